"""`autopar.init` and `autopar.shutdown`: where parallelized steps run from now on.

    init()                  the devices of this process (the default, also without a call)
    init(cluster="ray")     one process per host of a Ray cluster; Ray is started here if none runs
    init(cluster="jax")     all processes of a JAX world (Slurm, mpirun, TPU pods), each of which runs this same script

One session at a time: a step compiled in one is compiled anew in the next.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autopar.checks import check_count, is_positive, is_text
from autopar.errors import AutoparError, InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.runtime.distributed.ray_cluster import ANSWER_TIMEOUT_S, START_TIMEOUT_S, RayOptions, start_hosts

if TYPE_CHECKING:
    from autopar.runtime.distributed.many_controllers import JaxSession
    from autopar.runtime.distributed.ray_cluster import RayHosts
    from autopar.runtime.distributed.session import RaySession

_log = logging.getLogger("autopar")

STEP_TIMEOUT_S = 600.0

_current: list[RaySession | JaxSession] = []
_restarting = threading.Lock()
_timeouts_s: list[float] = []
"""The last one that `init` was given for this process; none without a call."""


def init(
    cluster: str | Cluster = "local",
    *,
    address: str | None = None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    placement_group: Any = None,
    runtime_env: Mapping[str, Any] | None = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
) -> Cluster | None:
    """Choose where steps run; returns the cluster, or None for this process.

    - `cluster`: "local", "ray", "jax", or a `Cluster`, whose figures then describe the devices of the Ray cluster.
      With "jax" every process of a world of `jax.distributed` makes the same calls, and runs its part of each step;
      `jax.distributed.initialize` is called if it was not, and finds Slurm's or Open MPI's processes by itself.
    - `address`: of a Ray cluster, host:port or "auto", or "local" to start one here. By default $RAY_ADDRESS, or one
      that runs on this machine and has room; else it is started here. The Ray that this process has joined comes first.
    - `num_hosts`, `devices_per_host`: how many processes, and how many devices each gets. By default every node with
      GPUs (or bundle of the placement group) and all of them; without GPUs, every node (or bundle) and as many virtual
      CPU devices as XLA_FLAGS asks for here.
    - `placement_group`: of Ray, with one bundle per process; made, and removed by `shutdown`, if not given.
    - `runtime_env`: for the processes, as Ray takes it.
    - `step_timeout_s`: a step that takes longer is given up, with an error that names the instruction which has not
      ended; in this process where autopar waits itself, in `autopar.fit` and for callbacks.
    - `start_timeout_s`: how long Ray, its processes, and their meeting may take each; a busy machine needs minutes.
    - `answer_timeout_s`: a process that hangs, was stopped or is cut off for so long is lost; one that died is at once.

    Raises `InvalidArgument` for a cluster that does not answer within 20 s, or has fewer hosts or devices than asked
    for, `ClusterFailed` for processes that do not start or meet, and `Unsupported` without Ray.
    """
    if not isinstance(cluster, Cluster) and cluster not in ("local", "ray", "jax"):
        raise InvalidArgument(f"cluster is {cluster!r}. Choose 'local', 'ray', 'jax', or give an autopar.Cluster.")
    _check_options(
        address,
        runtime_env,
        {"num_hosts": num_hosts, "devices_per_host": devices_per_host},
        {"step_timeout_s": step_timeout_s, "start_timeout_s": start_timeout_s, "answer_timeout_s": answer_timeout_s},
    )
    if cluster in ("local", "jax"):
        ray_only = {"address": address, "placement_group": placement_group, "runtime_env": runtime_env}
        sizes = {"num_hosts": num_hosts, "devices_per_host": devices_per_host} if cluster == "local" else {}
        given = [name for name, value in (ray_only | sizes).items() if value is not None]
        if given:
            raise InvalidArgument(f"{', '.join(given)} need cluster='ray'; with {cluster!r} they mean nothing.")
    shutdown()
    _timeouts_s[:] = [step_timeout_s]
    if cluster == "local":
        return None
    if cluster == "jax":
        from autopar.runtime.distributed.many_controllers import JaxSession, meet

        meet(num_hosts, devices_per_host)
        _current.append(JaxSession(step_timeout_s=step_timeout_s))
        return _current[-1].cluster
    options = RayOptions(
        address=address,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        placement_group=placement_group,
        runtime_env=runtime_env,
        start_timeout_s=start_timeout_s,
        answer_timeout_s=answer_timeout_s,
    )
    return _start_ray(options, step_timeout_s, cluster if isinstance(cluster, Cluster) else None)


def _start_ray(options: RayOptions, step_timeout_s: float, described_by: Cluster | None) -> Cluster:
    from autopar.runtime.distributed.session import RaySession

    hosts = start_hosts(options)
    # Now, so that it comes before what Ray does when the process ends.
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    try:
        session = RaySession(hosts, step_timeout_s=step_timeout_s, described_by=described_by)
    except BaseException:
        hosts.give_back()
        raise
    _current.append(session)
    return session.cluster


def _check_options(
    address: object, runtime_env: object, counts: Mapping[str, object], timeouts: Mapping[str, object]
) -> None:
    if address is not None and not isinstance(address, str):
        raise InvalidArgument(f"address is {address!r}. Give host:port, 'auto', or 'local'.")
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise InvalidArgument(f"runtime_env is {runtime_env!r}. Give a dictionary, as Ray takes it.")
    for name, count in counts.items():
        if count is not None:
            check_count(name, count)
    for name, value in timeouts.items():
        if not is_positive(value):
            raise InvalidArgument(f"{name} is {value!r}; it must be a positive number of seconds.")


def shutdown() -> None:
    """End the processes of the cluster, and Ray if `init` started it. Values on the cluster are gone."""
    while _current:
        _current.pop().close()


def current_session() -> RaySession | JaxSession | None:
    """The cluster that steps run on; None: this process."""
    return _current[-1] if _current else None


def ray_session() -> RaySession:
    """The processes of the Ray cluster. Raises `InvalidArgument` without one."""
    from autopar.runtime.distributed.session import RaySession

    session = current_session()
    if not isinstance(session, RaySession):
        raise InvalidArgument("No Ray cluster is in use. Call autopar.init(cluster='ray') first.")
    return session


@contextmanager
def survivors_stay() -> Generator[None]:
    """Within, a loss leaves the other processes of the Ray cluster as they are; after it they end with the first."""
    ray_session().hosts.survivors_stay = True
    try:
        yield
    finally:
        session = current_session()
        if session is not None:
            hosts = ray_session().hosts
            hosts.survivors_stay = False
            if session.failure is not None:
                hosts.kill()


def step_timeout_s() -> float:
    """Return how long a step may take."""
    return _timeouts_s[-1] if _timeouts_s else STEP_TIMEOUT_S


def host_leaves(host: str, *, in_s: float) -> None:
    """Announce that a host of the Ray cluster goes in so many seconds, as clouds warn before they take a machine back.

    `autopar.fit(elastic=...)` ends the step under way, moves the state to other hosts, and ends its processes there;
    where fewer others than it may use are left, it trains on until the host is gone. May be called on any thread, and
    by `on_step`.

    - `host`: an address, a host name, or Ray's node ID.

    Raises `InvalidArgument` without a Ray cluster, for a host that it does not have, and for a time that is none.
    """
    if not is_text(host):
        raise InvalidArgument(f"host is {host!r}. Give an address, a host name, or Ray's node ID, as a string.")
    if not is_positive(in_s):
        raise InvalidArgument(f"in_s is {in_s!r}; it must be a positive number of seconds.")
    ray_session().host_leaves(host)
    _log.warning("Host %s leaves in %g s.", host, in_s)


def restart(num_hosts: int | None = None, *, instead_of: RaySession | None = None) -> RaySession:
    """New processes in place of those of the current session, which has failed or is given up; its values are gone.

    As many as before, or `num_hosts`. If another thread has made new ones since `instead_of`, those are taken. Raises
    `InvalidArgument` without a session, or without room for so many, and `ClusterFailed` if one of them is lost before
    they have met; the session stays the failed one then.
    """
    with _restarting:
        old = ray_session()
        if instead_of is None or old is instead_of:
            _current[:] = [_restarted(old, num_hosts)]
        return ray_session()


def _restarted(old: RaySession, num_hosts: int | None) -> RaySession:
    old.abandon()
    old.hosts.release()
    old.end_coordinator()
    count = len(old.hosts.actors) if num_hosts is None else num_hosts
    try:
        return _in_place_of(old, old.hosts.again(count))
    except _SparesFailed as failed:
        _log.warning("Spare processes could not take the place of those lost: %s Starting new ones.", failed.__cause__)
        old.hosts.spares.end()
        return _in_place_of(old, old.hosts.again(count))


class _SparesFailed(Exception):
    """Processes of which some were spare ones did not become a world."""


def _in_place_of(old: RaySession, hosts: RayHosts) -> RaySession:
    from autopar.runtime.distributed.session import RaySession

    described_by = old.described_by
    if described_by is not None:
        described_by = described_by.with_devices(len(hosts.actors) * hosts.devices_per_host)
    try:
        return RaySession(hosts, step_timeout_s=old.step_timeout_s, described_by=described_by)
    except BaseException as error:
        hosts.release()
        if hosts.has_spares and isinstance(error, AutoparError):
            raise _SparesFailed from error
        raise
