"""The driver of a cluster of processes: one message per process and step, values by number, and losses.

    load     the program is made anew in every process from what is shipped, and compiled there
    step     one message per process; returns as soon as they are sent
    fetch    the bytes of values, when somebody reads them
    fail     a process died, does not answer, or raised: all are ended, and every later call raises the one reason

Threads: the user's, and one that watches the processes. What a process raised in a step is found by either.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.cluster import Cluster
from autopar.errors import AutoparError, CheckpointFailed, HostLost, InvalidArgument, StepFailed, StepTimeout
from autopar.program import Program
from autopar.runtime.distributed.distributed_array import DistributedArray
from autopar.runtime.distributed.messages import HostReport, ShardRequest, StepMessage, WorldSpec, packed
from autopar.runtime.distributed.placed import Placed
from autopar.runtime.distributed.process_watch import ProcessWatch
from autopar.runtime.distributed.ray_cluster import RayHosts
from autopar.runtime.distributed.shards import assemble, cover
from autopar.runtime.distributed.versions import check_versions, versions

STEPS_IN_FLIGHT = 3  # messages that a process may not have answered yet
JOIN_TIMEOUT_S = 120.0

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


@dataclass(kw_only=True)
class _Pending:
    """A step that was sent: what each process has still to answer."""

    step: int
    refs: list[Any]
    sent_at: float


class RaySession:
    """The processes of one world. Raises `HostLost`, `StepTimeout` or `StepFailed` once one of them is lost."""

    def __init__(self, hosts: RayHosts, *, step_timeout_s: float, described_by: Cluster | None = None) -> None:
        self.hosts = hosts
        self.step_timeout_s = step_timeout_s
        self.failure: AutoparError | None = None
        self._ray = hosts.ray
        self._numbers = itertools.count(1)
        self._steps = itertools.count(1)
        self._programs = itertools.count(1)
        self._layouts: dict[Placed, int] = {}
        self._dropped: deque[int] = deque()
        self._pending: deque[_Pending] = deque()
        self.stages_of: dict[int, tuple[int, ...]] = {}
        self._watch = ProcessWatch(self)
        self._lock = threading.Lock()
        self.reports = self._join()
        self.process_of = self.reports[0].process_of
        self.described_by = described_by
        self.cluster = _cluster(self.reports, described_by)
        self._watch.start()

    def _join(self) -> list[HostReport]:
        hosts = self.hosts
        port = self._ray.get(hosts.actors[0].free_port.remote(), timeout=JOIN_TIMEOUT_S)
        coordinator = f"{hosts.nodes[0]}:{port}" if len(hosts.actors) > 1 else None
        specs = [self._spec(number, coordinator) for number in range(len(hosts.actors))]
        refs = [actor.join.remote(spec) for actor, spec in zip(hosts.actors, specs)]
        reports: list[HostReport] = self._get(refs, JOIN_TIMEOUT_S, "joining the cluster")
        check_versions(versions(), [report.versions for report in reports])
        addresses = {number: report.address for number, report in enumerate(reports)}
        self._get([actor.connect.remote(addresses) for actor in hosts.actors], JOIN_TIMEOUT_S, "connecting")
        return reports

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
            jax_settings=_settings(),
            search_path=_search_path(),
        )

    def close(self) -> None:
        """End the processes and give back what was started."""
        self.abandon()
        self.hosts.give_back()

    def abandon(self) -> None:
        """Stop watching the processes; every later call raises."""
        if self.failure is None:
            self.failure = InvalidArgument(
                "The cluster was shut down, and its values with it. Call autopar.init again, and restore a checkpoint."
            )
        self._watch.stop()

    def load(self, program: Program, make_program: Callable[[], Program]) -> int:
        """Ship a program to every process; its number. Raises what a process raised, `PlanMismatch` for another."""
        self.check()
        number = next(self._programs)
        fingerprint = program.fingerprint()
        shared = self._ray.put(make_program)  # one copy per node, and not one per process
        refs = [actor.load.remote(number, shared, fingerprint, _settings()) for actor in self.hosts.actors]
        meshes = self._get(refs, None, f"loading {program.name}")
        if program.executables:  # others only move values
            self.stages_of = dict(enumerate(meshes))
        return number

    def unload(self, number: int) -> None:
        """Forget a program in every process, after the steps that were sent."""
        for actor in self.hosts.actors:
            actor.unload.remote(number)

    def next_numbers(self, count: int) -> list[int]:
        """Numbers for new values."""
        return list(itertools.islice(self._numbers, count))

    def number_of_layout(self, placed: Placed) -> int:
        """A small number for where a value lies; equal places have equal numbers."""
        return self._layouts.setdefault(placed, len(self._layouts))

    def submit(self, messages: Sequence[StepMessage]) -> None:
        """Send one step's messages, one per process; waits only if too many steps are under way."""
        self.check()
        while len(self._pending) >= STEPS_IN_FLIGHT:
            self._settle(self._pending[0])
        refs = [actor.step.remote(packed(message)) for actor, message in zip(self.hosts.actors, messages, strict=True)]
        with self._lock:
            self._pending.append(_Pending(step=messages[0].step, refs=refs, sent_at=time.monotonic()))

    def next_step(self) -> int:
        """The number of a new step; they count over all programs."""
        return next(self._steps)

    def take_dropped(self) -> list[int]:
        """Numbers of the values that the driver dropped since the last message."""
        taken: list[int] = []
        while self._dropped:
            taken.append(self._dropped.popleft())
        return taken

    def _settle(self, pending: _Pending) -> list[Any]:
        reports = self._get(pending.refs, self.step_timeout_s, f"step {pending.step}", since=pending.sent_at)
        with self._lock:
            if pending in self._pending:
                self._pending.remove(pending)
        return reports

    def settle(self) -> list[Any]:
        """Wait until every process has answered every step; the reports of the last one."""
        self.check()
        reports: list[Any] = []
        while self._pending:
            reports = self._settle(self._pending[0])
        return reports

    def fetch(self, values: Sequence[DistributedArray]) -> list[np.ndarray[Any, Any]]:
        """The bytes of values: each shard from one process that holds it."""
        self.check()
        plans = [cover(value.placed, self.process_of) for value in values]
        by_process: dict[int, list[tuple[int, list[ShardRequest]]]] = {}
        for number, plan in enumerate(plans):
            for process, requests in plan.items():
                by_process.setdefault(process, []).append((number, [request for request, _ in requests]))
        refs = [
            self.hosts.actors[process].fetch.remote(
                [values[number].identity for number, _ in wanted], [requests for _, requests in wanted]
            )
            for process, wanted in by_process.items()
        ]
        answers = self._get(refs, self.step_timeout_s, "fetching values")
        shards: dict[tuple[int, int], list[Any]] = {}
        for (process, wanted), answer in zip(by_process.items(), answers):
            for (number, _), arrays in zip(wanted, answer):
                shards[number, process] = arrays
        return [
            assemble(value, [(box, a) for p, r in plan.items() for (_, box), a in zip(r, shards[n, p])])
            for n, (value, plan) in enumerate(zip(values, plans))
        ]

    def wait(self, values: Sequence[DistributedArray]) -> None:
        """Return when values have been computed."""
        self.check()
        holders = {self.process_of[ordinal] for value in values for ordinal in value.placed.devices}
        numbers = [value.identity for value in values]
        refs = [self.hosts.actors[process].wait.remote(numbers) for process in sorted(holders)]
        self._get(refs, self.step_timeout_s, "waiting for values")

    def forget(self, identity: int) -> None:
        """Free a value with the next message."""
        self._dropped.append(identity)

    def run_everywhere(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `function(host, *arguments)` in every process, after the steps that were sent; their results."""
        return self.run_each(function, [arguments] * len(self.hosts.actors), timeout_s=timeout_s)

    def run_each(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """The same with arguments for each process; may be called on any thread."""
        self.check()
        refs = [actor.run.remote(function, *own) for actor, own in zip(self.hosts.actors, arguments, strict=True)]
        return self._get(refs, timeout_s, getattr(function, "__name__", "a call"))

    def run_on(self, processes: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same in some processes."""
        self.check()
        refs = [self.hosts.actors[process].run.remote(function, *arguments) for process in processes]
        return self._get(refs, None, getattr(function, "__name__", "a call"))

    def check(self) -> None:
        """Raise the reason if the cluster is lost."""
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: AutoparError) -> AutoparError:
        """The cluster is lost: end all processes, keep the first reason, and return it."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
        self.hosts.kill()
        return self.failure

    def _get(
        self, refs: Sequence[Any], timeout_s: float | None, doing: str, *, since: float | None = None
    ) -> list[Any]:
        """The answers, or the one reason why there are none: a loss, an error of a process, or the timeout."""
        deadline = None if timeout_s is None else (time.monotonic() if since is None else since) + timeout_s
        waiting = list(refs)
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=len(waiting), timeout=0.25)
            if not waiting:
                with suppress(Exception):  # of which one is found below
                    return self._ray.get(list(refs))
            for ref in ready:
                self.check_answer(ref, doing)
            if self.failure is not None:
                raise self.failure
            if waiting and deadline is not None and time.monotonic() > deadline:
                silent = [n for n, ref in enumerate(refs) if ref in waiting]
                raise self.fail(
                    StepTimeout(
                        f"{doing.capitalize()} took longer than {timeout_s:g} s; no answer came from "
                        f"{', '.join(self.describe(n) for n in silent)}. The processes were ended. Look for a step "
                        "that waits for ever (a callback, a lock), or give a longer step_timeout_s to autopar.init."
                    )
                )
        return self._ray.get(list(refs))

    def check_answer(self, ref: Any, doing: str) -> None:
        """Raise what a process raised, or that it died; what ends the cluster ends it."""
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, AutoparError) and not isinstance(cause, StepFailed | CheckpointFailed):
                raise cause from None
            self.blame_the_dead(doing)
            if isinstance(cause, CheckpointFailed):
                raise cause from None
            if isinstance(cause, StepFailed):
                raise self.fail(cause) from None
            raise self.fail(
                StepFailed(f"{doing.capitalize()} failed in a process of the cluster: {type(cause).__name__}: {cause}")
            ) from error
        except self._ray.exceptions.RayActorError as error:
            raise self.fail(self.lost(self._number_of(error), doing, str(error))) from None

    def blame_the_dead(self, doing: str) -> None:
        """Raise `HostLost` if a process has died: what fails in the others then, fails for that reason."""
        dead = self._watch.dead()
        if self.failure is not None:
            raise self.failure
        if dead is not None:
            raise self.fail(self.lost(dead[0], doing, dead[1])) from None

    def unread(self) -> list[Any]:
        """The answers of steps that nobody has waited for yet."""
        with self._lock:
            return [ref for pending in self._pending for ref in pending.refs]

    def _number_of(self, error: Any) -> int | None:
        """Which process an error of Ray is about."""
        for number, actor in enumerate(self.hosts.actors):
            identity = getattr(error, "actor_id", None)
            if identity is not None and actor._actor_id.hex() == identity:
                return number
        return None

    def describe(self, number: int | None) -> str:
        """A process in words: its host and the meshes that it works for."""
        if number is None:
            return "a process"
        meshes = self.stages_of.get(number, ())
        works = f" (mesh {', '.join(map(str, meshes))})" if meshes else ""
        return f"process {number} on host {self.hosts.nodes[number]}{works}"

    def lost(self, number: int | None, doing: str, reason: str) -> HostLost:
        """The error for a process that died; `reason` is what Ray says."""
        first = next((line.strip() for line in reason.splitlines() if "cause" in line.lower() or "exit" in line), "")
        return HostLost(
            f"Lost {self.describe(number)} during {doing}; it died. {first} The other processes were ended, and what "
            "was not in a checkpoint is gone. Start again from the last one, or train with autopar.fit, which does."
        )


def _cluster(reports: Sequence[HostReport], described_by: Cluster | None) -> Cluster:
    count = len(reports[0].process_of)
    if described_by is None:
        return Cluster(num_devices=count, kind=reports[0].device_kind)
    if described_by.num_devices != count:
        raise InvalidArgument(
            f"The cluster was said to have {described_by.num_devices} devices, the Ray cluster has {count}. Give a "
            "cluster of as many, or other num_hosts and devices_per_host."
        )
    return described_by


def _settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in JAX_SETTINGS}


def _search_path() -> tuple[str, ...]:
    import os
    import sys

    return tuple(os.path.abspath(path) for path in sys.path)
