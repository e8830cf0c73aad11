"""The driver of a cluster of processes: one message per process and step, and values by number.

    load     the program is made anew in every process from the step, and compiled there
    submit   one message per process; returns as soon as they are sent
    fetch    the bytes of values, when somebody reads them
    run      a function in the processes: for batches, checkpoints and checks

Threads: the user's, of which one at a time sends a step; one that places batches ahead of the step, and one that
watches the processes.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from autopar.errors import AutoparError, CheckpointFailed, InvalidArgument, PlanMismatch, StepFailed
from autopar.hardware.cluster import Cluster, DeviceKind
from autopar.ir.program import Program
from autopar.progress import search_progress
from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.coordinator import start_coordinator
from autopar.runtime.distributed.host import HEARTBEAT_TIMEOUT_S
from autopar.runtime.distributed.messages import (
    HostReport,
    ShardRequest,
    StepMessage,
    WorldSpec,
    installed_versions,
    packed,
)
from autopar.runtime.distributed.pieces import Placed
from autopar.runtime.distributed.ray_cluster import RayHosts
from autopar.runtime.distributed.replies import Replies
from autopar.runtime.transfer.choice import check_endpoints
from autopar.runtime.transfer.tiles import Box
from autopar.runtime.unfinished import UnfinishedTask

STEPS_IN_FLIGHT = 3  # messages that a process may not have answered yet

# What changes the jaxpr of a step or the numbers of its random draws: processes trace as the driver does.
JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


class Numbering:
    """The numbers that a session gives to values, steps, programs and layouts, and what was dropped since."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._steps = itertools.count(1)
        self._programs = itertools.count(1)
        self._layouts: dict[Placed, int] = {}
        self._dropped: deque[int] = deque()
        self._dropped_programs: deque[int] = deque()
        self._lock = threading.Lock()
        self.stepping = threading.RLock()
        """Held from the first message of a step to the last: all processes get the steps in one order."""

    def next_numbers(self, count: int) -> list[int]:
        """Numbers for new values."""
        return list(itertools.islice(self._numbers, count))

    def number_of_layout(self, placed: Placed) -> int:
        """A small number for where a value lies: equal places have equal numbers, others never."""
        with self._lock:  # batches are placed on another thread
            return self._layouts.setdefault(placed, len(self._layouts))

    def next_step(self) -> int:
        """The number of a new step; they count over all programs."""
        return next(self._steps)

    def forget(self, identity: int) -> None:
        """Free a value with the next message; may be called on any thread."""
        self._dropped.append(identity)

    def take_dropped(self) -> list[int]:
        """Numbers of the values that the driver dropped since the last message."""
        return _taken(self._dropped)

    def forget_program(self, number: int) -> None:
        """Unload a program with the next message; may be called on any thread."""
        self._dropped_programs.append(number)


def _taken(numbers: deque[int]) -> list[int]:
    taken: list[int] = []
    while numbers:
        taken.append(numbers.popleft())
    return taken


class Session(Protocol):
    """The processes of a world, whoever drives them: what programs, checkpoints and batches ask of them."""

    cluster: Cluster
    process_of: Sequence[int]
    step_timeout_s: float
    stepping: threading.RLock
    has_driver: bool
    """True if one process drives the others: it sends them programs, and outlives them."""

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        ...

    def load(self, program: Program, make_program: Callable[[], Program]) -> int:
        """Bring a program to every process; its number."""
        ...

    def unload(self, number: int) -> None:
        """Forget a program in every process, after the steps that were sent."""
        ...

    def forget_program(self, number: int) -> None:
        """The same with the next message; may be called on any thread."""
        ...

    def next_numbers(self, count: int) -> list[int]:
        """Numbers for new values."""
        ...

    def number_of_layout(self, placed: Placed) -> int:
        """A small number for where a value lies."""
        ...

    def next_step(self) -> int:
        """The number of a new step."""
        ...

    def take_dropped(self) -> list[int]:
        """Numbers of the values that were dropped since the last message."""
        ...

    def make_room(self) -> None:
        """Wait until a step may be sent."""
        ...

    def submit(self, messages: Sequence[StepMessage]) -> None:
        """Start a step: one message per process."""
        ...

    def settle(self) -> list[Any]:
        """Wait for all steps; the reports of the last one."""
        ...

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction of this process that has not ended; None where there is a driver."""
        ...

    def fetch(self, values: Sequence[DistributedArray]) -> list[np.ndarray[Any, Any]]:
        """The bytes of values."""
        ...

    def wait(self, values: Sequence[DistributedArray]) -> None:
        """Return when values have been computed."""
        ...

    def forget(self, identity: int) -> None:
        """Free a value with the next message."""
        ...

    def agree_on_plan(self, step: str, traced: Callable[[], str], make: Callable[[], str]) -> str:
        """Return the plan that all processes obey."""
        ...

    def adopt(self, array: jax.Array) -> DistributedArray:
        """Return an array over several processes as a value of the session."""
        ...

    def of_first(self, value: Any) -> Any:
        """Return the value that the first controller has."""
        ...

    def run_everywhere(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `function(host, *arguments)` in every process; their results."""
        ...

    def run_each(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """The same with arguments for each process."""
        ...

    def run_on(self, processes: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same in some processes."""
        ...

    def save_failed(self, process: int, error: str, lost: bool) -> Exception:
        """Return the error for a checkpoint that a process could not write; `lost`: with the others."""
        ...


class RaySession(Numbering):
    """The processes of one world. Raises `HostLost`, `StepTimeout` or `StepFailed` once one of them is lost."""

    def __init__(self, hosts: RayHosts, *, step_timeout_s: float, described_by: Cluster | None = None) -> None:
        super().__init__()
        self.hosts = hosts
        self.step_timeout_s = step_timeout_s
        self.replies = Replies(hosts)
        self._ray = hosts.ray
        self._sending = threading.Lock()
        """Held while one message is sent to every process: all get the messages of several threads in one order."""
        self._coordinator: Any = None
        self.reports = self._join()
        hosts.pids = tuple(report.pid for report in self.reports)
        self.process_of = self.reports[0].process_of
        self.described_by = described_by
        kinds = [self.reports[process].device_kind for process in self.process_of]
        self.cluster = described_cluster(kinds, described_by)
        self.replies.watch()

    def _join(self) -> list[HostReport]:
        hosts, coordinator = self.hosts, None
        if len(hosts.actors) > 1:
            there = self._ray.util.get_node_ip_address()
            coordinator, self._coordinator = start_coordinator(there, len(hosts.actors), HEARTBEAT_TIMEOUT_S)
        specs = [self._spec(number, coordinator) for number in range(len(hosts.actors))]
        refs = {actor.join.remote(spec): n for n, (actor, spec) in enumerate(zip(hosts.actors, specs))}
        reports: list[HostReport] = self._starting(refs, "joining the cluster")
        check_versions(installed_versions(), [report.versions for report in reports])
        check_endpoints([report.endpoint for report in reports])
        addresses = {number: report.address for number, report in enumerate(reports)}
        refs = {actor.connect.remote(addresses): n for n, actor in enumerate(hosts.actors)}
        self._starting(refs, "connecting")
        return reports

    def _starting(self, refs: Mapping[Any, int], doing: str) -> list[Any]:
        with search_progress(doing):
            return self.replies.get(refs, self.hosts.options.start_timeout_s, doing, option="start_timeout_s")

    def _spec(self, number: int, coordinator: str | None) -> WorldSpec:
        environment = {}
        if not self.hosts.uses_gpus:
            # As many threads as there can be executions under way, or the collectives of some wait for ever.
            flags = f"--xla_force_host_platform_device_count={self.hosts.devices_per_host}"
            environment = {"JAX_PLATFORMS": "cpu", "NPROC": "16", "XLA_FLAGS": flags}
        return WorldSpec(
            process=number,
            num_processes=len(self.hosts.actors),
            coordinator=coordinator,
            nodes=self.hosts.nodes,
            num_devices=self.hosts.devices_per_host,
            environment=environment,
            jax_settings=jax_settings(),
            search_path=_search_path(),
            start_timeout_s=self.hosts.options.start_timeout_s,
            after=tuple(pid for node, pid in self.hosts.before if node == self.hosts.node_names[number]),
        )

    @property
    def failure(self) -> AutoparError | None:
        """The error by which the cluster is lost; None while it is not."""
        return self.replies.failure

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return len(self.hosts.actors)

    has_driver = True

    def cluster_of(self, num_hosts: int) -> Cluster:
        """The cluster that so many hosts would be: these, and more of the last one's kind."""
        if self.described_by is not None:
            return self.described_by.with_devices(num_hosts * self.hosts.devices_per_host)
        kinds = [report.device_kind for report in self.reports]
        hosts = (kinds + kinds[-1:] * num_hosts)[:num_hosts]
        return Cluster.of_kinds([kind for kind in hosts for _ in range(self.hosts.devices_per_host)])

    def host_leaves(self, host: str) -> None:
        """No process is started on this host any more. Raises `InvalidArgument` if there is none of this name."""
        self.hosts.leaving |= set(self.hosts.nodes_called(host))

    @property
    def is_left(self) -> bool:
        """True if a host of these processes is about to go."""
        return not self.hosts.leaving.isdisjoint(self.hosts.node_names)

    def close(self) -> None:
        """End the processes and give back what was started."""
        self.abandon()
        self.hosts.give_back()
        self.end_coordinator()

    def abandon(self) -> None:
        """Stop watching the processes; every later call raises."""
        self.replies.end(
            InvalidArgument(
                "The cluster was shut down, and its values with it. Call autopar.init again, and restore a checkpoint."
            )
        )

    def end_coordinator(self) -> None:
        """End JAX's coordinator, after the processes: they end with it, and say so."""
        if self._coordinator is not None:
            self._coordinator.shutdown()
            self._coordinator = None

    def load(self, program: Program, make_program: Callable[[], Program]) -> int:
        """Ship a program to every process; its number. Raises what a process raised, `PlanMismatch` for another."""
        self.replies.check()
        self._unload_dropped()
        number = next(self._programs)
        arguments = (program.fingerprint(), jax_settings())
        shared = self._ray.put(make_program)  # one copy per node, and not one per process
        with self._sending:
            refs = {actor.load.remote(number, shared, *arguments): n for n, actor in enumerate(self.hosts.actors)}
        try:
            meshes = self.replies.get(refs, None, f"loading {program.name}")
        except BaseException:
            self.forget_program(number)  # some have it
            raise
        if program.executables:  # others only move values
            self.replies.meshes_of = dict(enumerate(meshes))
        return number

    def unload(self, number: int) -> None:
        """Forget a program in every process, after the steps that were sent."""
        for actor in self.hosts.actors:
            actor.unload.remote(number)

    def _unload_dropped(self) -> None:
        for number in _taken(self._dropped_programs):
            self.unload(number)

    def make_room(self) -> None:
        """Wait until a step may be sent: not too many are under way."""
        self.replies.check()
        self.replies.settle(STEPS_IN_FLIGHT - 1, self.step_timeout_s)

    def submit(self, messages: Sequence[StepMessage]) -> None:
        """Send one step's messages, one per process, and do not wait."""
        self.replies.check()
        self._unload_dropped()
        sent = [packed(message) for message in messages]  # all, before the first process begins
        with self._sending:
            refs = {actor.step.remote(m): n for n, (actor, m) in enumerate(zip(self.hosts.actors, sent, strict=True))}
        self.replies.expect(messages[0].step, refs)

    def settle(self) -> list[Any]:
        """Wait until every process has answered every step; the reports of the last one."""
        with self.stepping:
            self.replies.check()
            return self.replies.settle(0, self.step_timeout_s)

    def unfinished(self) -> UnfinishedTask | None:
        """None: the replies say which process waits in which instruction."""
        return None

    def fetch(self, values: Sequence[DistributedArray]) -> list[np.ndarray[Any, Any]]:
        """The bytes of values: each shard from one process that holds it."""
        self.replies.check()
        plans = [cover(value.placed, self.process_of) for value in values]
        by_process: dict[int, list[tuple[int, list[ShardRequest]]]] = {}
        for number, plan in enumerate(plans):
            for process, requests in plan.items():
                by_process.setdefault(process, []).append((number, [request for request, _ in requests]))
        refs = {
            self.hosts.actors[process].fetch.remote(
                [values[number].identity for number, _ in wanted], [requests for _, requests in wanted]
            ): process
            for process, wanted in by_process.items()
        }
        replies = self.replies.get(refs, self.step_timeout_s, "fetching values")
        shards: dict[tuple[int, int], list[Any]] = {}
        for (process, wanted), reply in zip(by_process.items(), replies):
            for (number, _), arrays in zip(wanted, reply):
                shards[number, process] = arrays
        return [
            assemble(value, [(box, a) for p, r in plan.items() for (_, box), a in zip(r, shards[n, p])])
            for n, (value, plan) in enumerate(zip(values, plans))
        ]

    def wait(self, values: Sequence[DistributedArray]) -> None:
        """Return when values have been computed."""
        self.replies.check()
        holders = {self.process_of[ordinal] for value in values for ordinal in value.placed.devices}
        numbers = [value.identity for value in values]
        refs = {self.hosts.actors[process].wait.remote(numbers): process for process in sorted(holders)}
        self.replies.get(refs, self.step_timeout_s, "waiting for values")

    def agree_on_plan(self, step: str, traced: Callable[[], str], make: Callable[[], str]) -> str:
        """Return the driver's plan: there is no other."""
        return make()

    def adopt(self, array: jax.Array) -> DistributedArray:
        """Refuse an array of another world."""
        raise InvalidArgument(
            f"An argument of shape {array.shape} lies over several processes of a JAX world, and the steps run on a "
            "cluster of Ray's. Give the whole as a NumPy array, or choose autopar.init(cluster='jax')."
        )

    def of_first(self, value: Any) -> Any:
        """Return the driver's value: there is no other."""
        return value

    def save_failed(self, process: int, error: str, lost: bool) -> Exception:
        """Return the error for a checkpoint that a process could not write; `lost`: with the others."""
        self.replies.blame_the_dead("saving a checkpoint")
        text = f"{self.replies.describe(process)}: {error}"
        return self.replies.fail(StepFailed(f"Saving failed: {text}")) if lost else CheckpointFailed(text)

    def run_everywhere(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `function(host, *arguments)` in every process, after the steps that were sent; their results."""
        return self.run_each(function, [arguments] * len(self.hosts.actors), timeout_s=timeout_s)

    def run_each(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """The same with arguments for each process."""
        self.replies.check()
        calls = enumerate(zip(self.hosts.actors, arguments, strict=True))
        with self._sending:
            refs = {actor.run.remote(function, *own): process for process, (actor, own) in calls}
        return self.replies.get(refs, timeout_s, calling(function))

    def run_on(self, processes: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same in some processes."""
        self.replies.check()
        refs = {self.hosts.actors[process].run.remote(function, *arguments): process for process in processes}
        return self.replies.get(refs, None, calling(function))


def check_versions(driver: Mapping[str, str], processes: Sequence[Mapping[str, str]]) -> None:
    """Raise `PlanMismatch` unless every process has the driver's releases, naming the package and both."""
    for number, found in enumerate(processes):
        different = [name for name in driver if found.get(name) != driver[name]]
        if different:
            name = different[0]
            raise PlanMismatch(
                f"Process {number} has {name} {found.get(name)}, the driver {driver[name]}. Programs are made in every "
                "process, so all need the same releases: install the same packages on every host."
            )


def described_cluster(kinds: Sequence[DeviceKind], described_by: Cluster | None) -> Cluster:
    """Return the cluster of devices of these kinds, with the figures that the user gave. Raises `InvalidArgument`."""
    count = len(kinds)
    if described_by is None:
        return Cluster.of_kinds(kinds)
    if described_by.num_devices != count:
        raise InvalidArgument(
            f"The cluster was said to have {described_by.num_devices} devices, there are {count}. Give a "
            "cluster of as many, or other num_hosts and devices_per_host."
        )
    return described_by


def cover(placed: Placed, process_of: Sequence[int]) -> dict[int, list[tuple[ShardRequest, Box]]]:
    """Return, by process, the shards that together are the whole value, each once, with their boxes of the whole."""
    plan: dict[int, list[tuple[ShardRequest, Box]]] = {}
    seen: set[Box] = set()
    for number, piece in enumerate(placed.pieces):
        for ordinal, box in piece.device_boxes().items():
            if box not in seen:
                seen.add(box)
                plan.setdefault(process_of[ordinal], []).append((ShardRequest(piece=number, ordinal=ordinal), box))
    return plan


def assemble(value: DistributedArray, shards: Sequence[tuple[Box, np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
    """The whole value from its shards and their boxes; of random keys, their words."""
    if len(shards) == 1:
        return np.array(shards[0][1])
    words = shards[0][1].shape[value.ndim :]
    whole = np.empty((*value.shape, *words), shards[0][1].dtype)
    for box, shard in shards:
        whole[tuple(slice(*part) for part in box)] = shard
    return whole


def calling(function: Callable[..., Any]) -> str:
    """Return what a process does that calls a function, for errors."""
    return f"calling {getattr(function, '__name__', type(function).__name__)}"


def jax_settings() -> dict[str, Any]:
    """Return the settings here that every process must share."""
    return {name: getattr(jax.config, name) for name in JAX_SETTINGS}


def _search_path() -> tuple[str, ...]:
    return tuple(os.path.abspath(path) for path in sys.path)
