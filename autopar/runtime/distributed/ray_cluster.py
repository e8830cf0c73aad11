"""The processes of a cluster, as actors of Ray: one per host, each with all of the host's devices that it is given.

    start_hosts    Ray is started or joined -> a placement group -> one actor per bundle, in the order of nodes
    RayHosts       call a method of some or all of them; kill them; give everything back

Ray runs the processes and says when one dies. Nothing of a step goes through its object store but what the driver
sends and fetches.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InvalidArgument, Unsupported

CONNECT_TIMEOUT_S = 20.0
_QUIET: dict[str, Any] = {"logging_level": "error", "log_to_driver": True}
ANSWER_S = 60.0  # how long a new process may take to start: a busy machine imports JAX slowly


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What the user says of the cluster; None is chosen."""

    address: str | None = None
    num_hosts: int | None = None
    devices_per_host: int | None = None
    placement_group: Any = None
    runtime_env: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class RayHosts:
    """The actors, in the order of their processes' numbers, and what has to be given back."""

    ray: Any
    actors: list[Any]
    nodes: tuple[str, ...]
    """The IP address of the node of every actor."""
    devices_per_host: int
    uses_gpus: bool
    group: Any
    owns_group: bool
    owns_ray: bool
    options: RayOptions

    def kill(self) -> None:
        """End all processes at once."""
        for actor in self.actors:
            try:
                self.ray.kill(actor, no_restart=True)
            except Exception:  # it was dead already, or Ray is
                continue

    def give_back(self) -> None:
        """Kill the processes, remove the placement group and stop Ray, each if it was ours."""
        if not self.ray.is_initialized():
            return
        self._give_back_group()
        if self.owns_ray:
            self.ray.shutdown()

    def _give_back_group(self) -> None:
        self.kill()
        if self.owns_group and self.group is not None:
            try:
                self.ray.util.remove_placement_group(self.group)
            except Exception:  # Ray is gone, and the group with it
                return

    def room(self) -> int:
        """How many processes like these the nodes that are alive have room for, these ones given back."""
        needed = {"GPU": self.devices_per_host} if self.uses_gpus else {"CPU": 1}
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return sum(min(int(node.get(name, 0) // count) for name, count in needed.items()) for node in alive)

    def again(self, num_hosts: int) -> RayHosts:
        """So many new processes in place of these."""
        self._give_back_group()
        return _make_actors(self.ray, replace(self.options, num_hosts=num_hosts), self.owns_ray)


def import_ray() -> Any:
    """The module `ray`; raises `Unsupported`, which says what to install."""
    # Without a GPU in an actor's resources Ray would otherwise hide the GPUs, also from actors that are given some.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise Unsupported(
            "autopar.init(cluster='ray') needs Ray, which is not installed. Install it with: pip install 'autopar[ray]'"
        ) from None
    return ray


def pickled(value: Any) -> bytes:
    """As Ray sends it: functions of the main script by value, those of modules by name."""
    return import_ray().cloudpickle.dumps(value)


def unpickled(data: bytes) -> Any:
    """What `pickled` was given."""
    return import_ray().cloudpickle.loads(data)


def start_hosts(options: RayOptions) -> RayHosts:
    """Start or join Ray, and make one process per host.

    Raises `InvalidArgument` if no cluster answers at the address, or it has fewer hosts or devices than asked for.
    """
    ray = import_ray()
    if ray.is_initialized():
        return _make_actors(ray, options, owns_ray=False)
    address = options.address or os.environ.get("RAY_ADDRESS")
    if address is None and _joined(ray, "auto"):
        try:
            return _make_actors(ray, options, owns_ray=True)
        except InvalidArgument:  # somebody else's, without room: not the one that was meant
            ray.shutdown()
    _connect(ray, address or "local", options)
    try:
        return _make_actors(ray, options, owns_ray=True)
    except BaseException:
        ray.shutdown()
        raise


def _connect(ray: Any, address: str, options: RayOptions) -> None:
    if address == "local":
        with _forking():
            cores = max(os.cpu_count() or 1, options.num_hosts or 1)
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **_QUIET)
        return
    if ":" in address and not address.startswith("ray://"):
        check_answers(address)
    if not _joined(ray, address):
        raise InvalidArgument(
            f"No Ray cluster answers at {address!r}. Start one with 'ray start --head', give its address, or "
            "address='local' to start Ray here."
        )


def _joined(ray: Any, address: str) -> bool:
    try:
        with _forking():
            ray.init(address=address, **_QUIET)
    except Exception:  # Ray has several for this
        return False
    return True


@contextmanager
def _forking() -> Generator[None]:
    """Without JAX's warning of forks: Ray's forked processes become other programs at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*os.fork.*", category=RuntimeWarning)
        yield


def check_answers(address: str) -> None:
    """Raise `InvalidArgument` if nothing listens there; Ray itself waits much longer to find out."""
    import socket

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f"The address of the Ray cluster is {address!r}; it must be host:port, or 'auto'.")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise InvalidArgument(
            f"No Ray cluster answers at {address!r} within {CONNECT_TIMEOUT_S:.0f} s ({error}). Start one with "
            "'ray start --head', correct the address, or give address='local' to start Ray here."
        ) from None


def _make_actors(ray: Any, options: RayOptions, owns_ray: bool) -> RayHosts:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    uses_gpus = any(gpus)
    num_hosts = (
        options.num_hosts
        if options.num_hosts is not None
        else (sum(count > 0 for count in gpus) if uses_gpus else len(nodes))
    )
    devices = (
        options.devices_per_host
        if options.devices_per_host is not None
        else (min(count for count in gpus if count) if uses_gpus else _virtual_devices())
    )
    for name, count in (("num_hosts", num_hosts), ("devices_per_host", devices)):
        if count < 1:
            raise InvalidArgument(f"{name} is {count}; at least 1 is required.")
    bundle: dict[str, float] = {"CPU": 1, **({"GPU": devices} if uses_gpus else {})}
    _check_resources(ray, bundle, num_hosts, owns_group=options.placement_group is None)
    group = options.placement_group or ray.util.placement_group([bundle] * num_hosts, strategy="PACK")
    if not group.wait(CONNECT_TIMEOUT_S):
        if options.placement_group is None:
            ray.util.remove_placement_group(group)
        raise InvalidArgument(
            f"The Ray cluster has no room for {num_hosts} hosts with {bundle} each within {CONNECT_TIMEOUT_S:.0f} s; "
            f"free are {ray.available_resources()}. End what uses them, or ask for fewer."
        )
    actors = [_actor(ray, options, group, bundle, number) for number in range(num_hosts)]
    try:
        places = ray.get([actor.node.remote() for actor in actors], timeout=ANSWER_S)
    except Exception:
        for actor in actors:
            ray.kill(actor)
        if options.placement_group is None:
            ray.util.remove_placement_group(group)
        raise
    # Neighbours in the world are neighbours in the machine room.
    order = sorted(range(num_hosts), key=lambda n: (places[n], n))
    return RayHosts(
        ray=ray,
        actors=[actors[n] for n in order],
        nodes=tuple(places[n] for n in order),
        devices_per_host=devices,
        uses_gpus=uses_gpus,
        group=group,
        owns_group=options.placement_group is None,
        owns_ray=owns_ray,
        options=options,
    )


def _virtual_devices() -> int:
    """How many CPU devices the driver's own flags ask for; one by default."""
    flag = "--xla_force_host_platform_device_count="
    given = [word.removeprefix(flag) for word in os.environ.get("XLA_FLAGS", "").split() if word.startswith(flag)]
    return int(given[-1]) if given else 1


def _check_resources(ray: Any, bundle: Mapping[str, float], num_hosts: int, *, owns_group: bool) -> None:
    total = ray.cluster_resources()
    short = [name for name, count in bundle.items() if total.get(name, 0) < count * num_hosts]
    if short and owns_group:
        have = {name: total.get(name, 0) for name in bundle}
        raise InvalidArgument(
            f"{num_hosts} hosts with {dict(bundle)} each were asked for; the Ray cluster has {have} in all. Ask for "
            "fewer hosts or devices, add nodes to the cluster, or give address='local' to start Ray here."
        )


def _actor(ray: Any, options: RayOptions, group: Any, bundle: Mapping[str, float], number: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from autopar.runtime.distributed.ray_actor import HostActor

    return (
        # Steps in the order that they were sent; health is answered beside them.
        ray.remote(concurrency_groups={"health": 2})(HostActor)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            ),
            runtime_env=dict(options.runtime_env or {}),
        )
        .remote()
    )
