"""The processes of a cluster, as actors of Ray: one per host, each with all of the host's devices that it is given.

    start_hosts    Ray is started or joined -> a placement group -> one actor per bundle, in the order of nodes
    RayHosts       the actors; they are killed, replaced, by spare ones where there are some, and given back

Ray runs the processes and says when one dies. Nothing of a step goes through its object store but what the driver
sends and fetches.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import HostLost, InvalidArgument, Unsupported
from autopar.progress import search_progress, tell
from autopar.runtime.distributed.spares import Spares, describe

CONNECT_TIMEOUT_S = 20.0
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 30.0
NODE_TIMEOUT_S = 1.0
_KIND = "accelerator_type:"  # what Ray calls the kind of a node's devices
_QUIET: dict[str, Any] = {"logging_level": "error", "log_to_driver": True}


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The user's options for the cluster; None leaves one open."""

    address: str | None = None
    num_hosts: int | None = None
    devices_per_host: int | None = None
    placement_group: Any = None
    runtime_env: Mapping[str, Any] | None = None
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds that Ray and new processes may take to start: a busy machine imports JAX slowly."""
    answer_timeout_s: float = ANSWER_TIMEOUT_S
    """A process that answers no ping for so long is taken for lost; one that compiles or traces still answers."""


@dataclass(kw_only=True)
class RayHosts:
    """The actors, in the order of their processes' numbers, and what has to be given back."""

    ray: Any
    actors: list[Any]
    nodes: tuple[str, ...]
    """The IP address of the node of every actor."""
    node_names: tuple[str, ...]
    """Ray's name for it: several nodes may share an address."""
    devices_per_host: int
    uses_gpus: bool
    group: Any
    owns_group: bool
    owns_ray: bool
    options: RayOptions
    survivors_stay: bool = False
    """True if a loss leaves the other processes as they are, so that what they hold can be taken from them."""
    leaving: frozenset[str] = frozenset()
    """Ray's names for nodes that are about to go: no process is started there."""
    spares: Spares
    pids: tuple[int, ...] = ()
    """The number of every process on its node, once they have met."""
    before: tuple[tuple[str, int], ...] = ()
    """The processes in whose place these are, as node and number there."""
    reached: frozenset[str] = frozenset()
    """Ray's names for nodes of these processes, and of those before, that have answered."""
    has_spares: bool = False
    """True if some of these were spare processes."""

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
        self.spares.end()
        self.release()
        if self.owns_ray:
            self.ray.shutdown()

    def release(self) -> None:
        """Kill the processes and remove the placement group if it was ours; Ray goes on, for others in their place."""
        self.kill()
        if self.owns_group and self.group is not None:
            try:
                self.ray.util.remove_placement_group(self.group)
            except Exception:  # Ray is gone, and the group with it
                return

    def room(self) -> int:
        """Return for how many processes like these the nodes that are alive have room, these ones given back."""
        return sum(self._room_on().values())

    def _room_on(self) -> Counter[str]:
        """Return by node for how many processes it has room, these ones given back."""
        avoided = self.leaving | self.silent()
        alive = [node for node in self.ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
        return Counter({node["NodeID"]: _times(node["Resources"], self._needed) for node in alive})

    @property
    def _needed(self) -> dict[str, int]:
        return {"GPU": self.devices_per_host} if self.uses_gpus else {"CPU": 1}

    def room_beside(self) -> int:
        """Return for how many more processes there is room now, with these and those of others where they are."""
        beside = _times(self.ray.available_resources(), self._needed)
        return max(min(beside, self.room() - len(self.actors)), 0) if beside else 0

    def there(self) -> frozenset[str]:
        """Return Ray's names for the nodes that are alive."""
        return frozenset(node["NodeID"] for node in self.ray.nodes() if node["Alive"]) - self.silent()

    def silent(self) -> frozenset[str]:
        """Return the nodes that Ray takes for alive, and that answered before and do so no more.

        Ray itself says that a node is gone after 15 s, and until then would start processes there.
        """
        known = [node for node in self.ray.nodes() if node["Alive"] and node["NodeID"] in self.reached]
        return frozenset(node["NodeID"] for node in known) - _answering(known)

    def prepare_spares(self) -> None:
        """Start one spare process beside each of these, and do not wait."""
        self._prepare(self.node_names)

    def ready_beside(self) -> int:
        """Return for how many more processes there is room and a spare process; others are started meanwhile.

        Where new processes get GPUs, for how many there is room: only a process that Ray gave GPUs may use them.
        """
        count = self.room_beside()
        if not count or self.uses_gpus:
            return count
        beside = list((self._room_on() - Counter(self.node_names)).elements())
        self._prepare([*self.node_names, *beside])
        return min(len(self.spares.warm([*self.node_names, *beside])) - len(self.spares.warm(self.node_names)), count)

    def _prepare(self, nodes: Sequence[str]) -> None:
        actors = dict(zip(self.node_names, self.actors))
        if self.uses_gpus:  # of a part of a node's GPUs, Ray might have given them to others meanwhile
            counts = {node["NodeID"]: node["Resources"].get("GPU") for node in self.ray.nodes()}
            nodes = [node for node in nodes if counts.get(node) == self.devices_per_host]
        models: dict[str, Any] = {}

        def model_of(node: str) -> Any:
            actor = actors.get(node, self.actors[0])
            return models.setdefault(node, actor.run_beside.remote(describe))

        self.spares.prepare(model_of, nodes)

    def nodes_called(self, host: str) -> dict[str, str]:
        """Return the nodes with this address, host name or name of Ray's: Ray's names, each with its address.

        Raises `InvalidArgument` if there is none.
        """
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        names = ("NodeManagerAddress", "NodeManagerHostname", "NodeID")
        found = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if host in [node[n] for n in names]}
        if not found:
            there = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})" for node in nodes)
            raise InvalidArgument(
                f"The Ray cluster has no host {host!r}; it has {there}. Give an address, a host name, or Ray's node ID."
            )
        return found

    def again(self, num_hosts: int) -> RayHosts:
        """Return so many new processes in place of these, which were released."""
        options = replace(self.options, num_hosts=num_hosts)
        return _make_actors(self.ray, options, self.owns_ray, replaced=self)


def _times(there: Mapping[str, float], needed: Mapping[str, int]) -> int:
    """Return how many times what is needed is there."""
    return min(int(there.get(name, 0) // count) for name, count in needed.items())


def _answering(nodes: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return Ray's names for those of these nodes at which it listens."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(_listens, nodes))
    return frozenset(node["NodeID"] for node, answer in zip(nodes, answers) if answer)


def _listens(node: Mapping[str, Any]) -> bool:
    try:
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(address, timeout=NODE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


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


def import_ray_train() -> Any:
    """The module `ray.train`; raises `Unsupported`, which says what to install."""
    import_ray()
    try:
        import ray.train
    except ImportError:
        raise Unsupported(
            "Ray Train is not installed whole, which autopar.ray_train_loop needs. Install it with: pip install "
            "'autopar[ray-train]'"
        ) from None
    return ray.train


def pickled(value: Any) -> bytes:
    """Return a value as Ray sends it: functions of the main script by value, those of modules by name."""
    return import_ray().cloudpickle.dumps(value)


def unpickled(data: bytes) -> Any:
    """Return the value that `pickled` was given."""
    return import_ray().cloudpickle.loads(data)


def start_hosts(options: RayOptions) -> RayHosts:
    """Start or join Ray, and make one process per host.

    Raises `InvalidArgument` if no cluster answers at the address, or it has fewer hosts or devices than asked for.
    """
    ray = import_ray()
    if ray.is_initialized():
        return _make_actors(ray, options, owns_ray=False)
    address = options.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        with suppress(InvalidArgument):  # none runs here, or it is somebody else's, without room
            _join(ray, "auto")
            return _make_actors_or_leave(ray, options)
    if address is None or address == "local":
        cores = max(os.cpu_count() or 1, options.num_hosts or 1)
        _start_here(ray, cores, options.start_timeout_s)
    else:
        _join(ray, address)
    return _make_actors_or_leave(ray, options)


def _start_here(ray: Any, cores: int, timeout_s: float) -> None:
    # Ray gives what it runs the lowest priority but four: beside anything else on this machine steps would wait for it.
    os.environ.setdefault("RAY_worker_niceness", "0")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with _forking(), search_progress("starting Ray"):
                ray.init(address="local", num_cpus=cores, include_dashboard=False, **_QUIET)
            return
        except Exception as error:  # Ray has limits of its own, which a busy machine exceeds
            ray.shutdown()
            if time.monotonic() > deadline:
                raise HostLost(
                    f"Ray did not start on this machine within {timeout_s:g} s; it says: {type(error).__name__}: "
                    f"{error} Look into /tmp/ray/session_latest/logs, give a busy machine a longer start_timeout_s in "
                    "autopar.init, or start Ray with 'ray start --head' and join it."
                ) from error


def _make_actors_or_leave(ray: Any, options: RayOptions) -> RayHosts:
    try:
        return _make_actors(ray, options, owns_ray=True)
    except BaseException:
        ray.shutdown()
        raise


def _join(ray: Any, address: str) -> None:
    if ":" in address and "://" not in address:
        check_answers(address)
    try:
        with _forking():
            ray.init(address=address, **_QUIET)
    except Exception as error:  # Ray has several for this
        ray.shutdown()
        raise InvalidArgument(
            f"The Ray cluster at {address!r} cannot be joined; Ray says: {type(error).__name__}: {error}. Start one "
            "with 'ray start --head' and the releases of Python and Ray that are here, correct the address, or give "
            "address='local' to start Ray here."
        ) from error


@contextmanager
def _forking() -> Generator[None]:
    """Without JAX's warning of forks: Ray's forked processes become other programs at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*os.fork.*", category=RuntimeWarning)
        yield


def check_answers(address: str) -> None:
    """Raise `InvalidArgument` if nothing listens there; Ray itself waits much longer to find out."""
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


def _make_actors(ray: Any, options: RayOptions, owns_ray: bool, replaced: RayHosts | None = None) -> RayHosts:
    num_hosts, devices, uses_gpus = _sizes(ray, options)
    bundle: dict[str, float] = {"CPU": 1, **({"GPU": devices} if uses_gpus else {})}
    owns_group = options.placement_group is None
    if owns_group:
        _check_resources(ray, bundle, num_hosts)
    avoided = replaced.leaving | replaced.silent() if replaced is not None else frozenset[str]()
    hosts = RayHosts(
        ray=ray,
        actors=[],
        nodes=(),
        node_names=(),
        devices_per_host=devices,
        uses_gpus=uses_gpus,
        group=_placement_group(ray, [bundle] * num_hosts, avoided) if owns_group else options.placement_group,
        owns_group=owns_group,
        owns_ray=owns_ray,
        options=options,
        spares=Spares(ray=ray, start=lambda node: _spare_actor(ray, options, node)),
    )
    if replaced is not None:
        hosts.survivors_stay, hosts.leaving = replaced.survivors_stay, replaced.leaving
        hosts.spares, hosts.reached = replaced.spares, replaced.reached
        hosts.before = tuple(zip(replaced.node_names, replaced.pids))
    try:
        _start_actors(hosts, bundle, num_hosts)
    except BaseException:
        hosts.release()
        raise
    return hosts


def _placement_group(ray: Any, bundles: list[Mapping[str, float]], avoided: frozenset[str]) -> Any:
    elsewhere = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}
    options = {"bundle_label_selector": [elsewhere] * len(bundles)} if avoided else {}
    return ray.util.placement_group(bundles, strategy="PACK", **options)


def _sizes(ray: Any, options: RayOptions) -> tuple[int, int, bool]:
    """Return the number of hosts, the devices on each, and whether these are GPUs."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    uses_gpus = any(gpus)
    num_hosts, devices, group = options.num_hosts, options.devices_per_host, options.placement_group
    if num_hosts is None:
        with_gpus = sum(count > 0 for count in gpus)
        num_hosts = group.bundle_count if group is not None else with_gpus if uses_gpus else len(nodes)
    if devices is None:
        devices = min(count for count in gpus if count) if uses_gpus else _virtual_devices()
    if group is not None and group.bundle_count < num_hosts:
        raise InvalidArgument(
            f"The placement group has {group.bundle_count} bundles, {num_hosts} hosts were asked for. Give a group "
            "with one bundle per host, or ask for fewer hosts."
        )
    return num_hosts, devices, uses_gpus


def _start_actors(hosts: RayHosts, bundle: Mapping[str, float], num_hosts: int) -> None:
    """Start the processes, and order them by their nodes."""
    deadline = time.monotonic() + hosts.options.start_timeout_s
    _wait_for_room(hosts, bundle, num_hosts, deadline)
    try:
        nodes = hosts.ray.util.placement_group_table(hosts.group)["bundles_to_node_id"]
        spares = hosts.spares.take([nodes[number] for number in range(num_hosts)])
        hosts.has_spares = any(spare is not None for spare in spares)
        for number, spare in enumerate(spares):
            hosts.actors.append(_actor(hosts, bundle, number) if spare is None else spare)
    except ValueError as error:
        raise InvalidArgument(f"Ray refuses to start a process: {error}. Correct the runtime_env.") from error
    places = _places(hosts, deadline)
    # Neighbours in the world are neighbours in the machine room, and devices of a kind stand together.
    nodes = hosts.ray.nodes()
    kinds = {node["NodeID"]: sorted(r for r in node["Resources"] if r.startswith(_KIND)) for node in nodes}
    order = sorted(range(num_hosts), key=lambda n: (kinds.get(places[n][1], []), places[n], n))
    hosts.actors[:] = [hosts.actors[n] for n in order]
    hosts.nodes = tuple(places[n][0] for n in order)
    hosts.node_names = tuple(places[n][1] for n in order)
    hosts.reached |= _answering([node for node in nodes if node["NodeID"] in hosts.node_names])


def _wait_for_room(hosts: RayHosts, bundle: Mapping[str, float], num_hosts: int, deadline: float) -> None:
    """Return when the placement group is there; a cluster that has the room free may take until the deadline."""
    while not _has_placed(hosts, num_hosts):
        free = hosts.ray.available_resources()
        has_room = all(free.get(name, 0) >= count * num_hosts for name, count in bundle.items())
        # What the group has taken is free no longer, shortly before it says that it is there.
        if not (has_room and hosts.owns_group) and not hosts.group.wait(1.0):
            raise InvalidArgument(
                f"The Ray cluster has no room for {num_hosts} hosts with {dict(bundle)} each, which was waited for up "
                f"to {CONNECT_TIMEOUT_S:.0f} s; free are {free}. End what uses them, or ask for fewer."
            )
        if time.monotonic() > deadline:
            raise HostLost(
                f"The Ray cluster has not placed {num_hosts} hosts with {dict(bundle)} each within "
                f"{hosts.options.start_timeout_s:g} s. Give a busy cluster a longer start_timeout_s in "
                "autopar.init, or look whether its nodes are well with 'ray status'."
            )


def _has_placed(hosts: RayHosts, num_hosts: int) -> bool:
    """Return whether the placement group is there in time; False as soon as nodes that it needs are gone."""
    left_s = min(CONNECT_TIMEOUT_S, hosts.options.start_timeout_s)
    while left_s > 0:
        if hosts.group.wait(min(1.0, left_s)):
            return True
        if hosts.owns_group and hosts.room() < num_hosts:
            return False
        left_s -= 1.0
    return False


def _places(hosts: RayHosts, deadline: float) -> list[tuple[str, str]]:
    """Return the node of every process, as they start, and show how many have."""
    ray, refs = hosts.ray, [actor.node.remote() for actor in hosts.actors]
    waiting = refs
    with search_progress(f"starting {len(refs)} processes"):
        while waiting and time.monotonic() < deadline:
            left = max(min(1.0, deadline - time.monotonic()), 0.0)
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=left)
            tell(f"{len(refs) - len(waiting)} have started")
            for ref in ready:
                _started(ray, ref)
    if waiting:
        raise HostLost(
            f"{len(waiting)} of {len(refs)} new processes of the Ray cluster did not start within "
            f"{hosts.options.start_timeout_s:g} s. Give busy hosts a longer start_timeout_s in autopar.init, or look "
            "into Ray's logs for what keeps them."
        )
    return [_started(ray, ref) for ref in refs]


def _started(ray: Any, ref: Any) -> tuple[str, str]:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        raise HostLost(
            f"A new process of the Ray cluster did not start. Ray says: {type(error).__name__}: {error} Install the "
            "same packages on every host, or correct the runtime_env."
        ) from error


def _virtual_devices() -> int:
    """Return how many CPU devices the driver's own flags ask for; one by default."""
    flag = "--xla_force_host_platform_device_count="
    given = [word.removeprefix(flag) for word in os.environ.get("XLA_FLAGS", "").split() if word.startswith(flag)]
    return int(given[-1]) if given else 1


def _check_resources(ray: Any, bundle: Mapping[str, float], num_hosts: int) -> None:
    total = ray.cluster_resources()
    if any(total.get(name, 0) < count * num_hosts for name, count in bundle.items()):
        have = {name: total.get(name, 0) for name in bundle}
        raise InvalidArgument(
            f"{num_hosts} hosts with {dict(bundle)} each were asked for; the Ray cluster has {have} in all. Ask for "
            "fewer hosts or devices, add nodes to the cluster, or give address='local' to start Ray here."
        )


def _actor(hosts: RayHosts, bundle: Mapping[str, float], number: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=hosts.group, placement_group_bundle_index=number)
    return _start_actor(hosts.ray, hosts.options, where, bundle["CPU"], bundle.get("GPU", 0))


def _spare_actor(ray: Any, options: RayOptions, node: str) -> Any:
    # It takes nothing that others could use, and works in the bundle of the process that it stands in for.
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return _start_actor(ray, options, NodeAffinitySchedulingStrategy(node, soft=False), 0, 0)


def _start_actor(ray: Any, options: RayOptions, where: Any, cpus: float, gpus: float) -> Any:
    from autopar.runtime.distributed.ray_actor import HostActor

    return (
        # Steps in the order that they were sent; health is answered beside them.
        ray.remote(concurrency_groups={"health": 3})(HostActor)
        .options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            scheduling_strategy=where,
            runtime_env=dict(options.runtime_env or {}),
        )
        .remote()
    )
