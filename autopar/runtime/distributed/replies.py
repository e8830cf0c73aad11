"""Wait for what the processes answer, or say in one error why no answer comes.

    a process died               HostLost      names it, its host, and the meshes that it works for
    nothing came in time         StepTimeout   names who is silent
    a process raised             StepFailed    with the reason; a mistake of the user, after which the cluster goes on,
                                               is raised as it is

What ends the cluster ends all processes, and every later call raises the first reason again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError, CheckpointFailed, ClusterFailed, HostLost, StepFailed, StepTimeout
from autopar.runtime.distributed.ray_cluster import RayHosts
from autopar.runtime.distributed.watchdog import ProcessWatch
from autopar.runtime.unfinished import UnfinishedTask

_WAIT_S = 0.25
_TELL_S = 2.0  # so long the processes have to say where they are, before they are ended
_AGAIN = "Start again from the last checkpoint, or train with autopar.fit, which does."

Refs = Mapping[Any, int]  # what will hold a reply -> the process that gives it


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A step that was sent and has not been answered by all."""

    step: int
    refs: Refs
    sent_at: float


class Replies:
    """The replies of the processes of one world. May be asked for on any thread, but steps on one at a time."""

    def __init__(self, hosts: RayHosts) -> None:
        self.hosts = hosts
        self.failure: AutoparError | None = None
        self.meshes_of: Mapping[int, Sequence[int]] = {}
        """The meshes that each process works for, in the step that was loaded last: for messages."""
        self.lost_processes: set[int] = set()
        """The processes that are known to have died."""
        self._ray = hosts.ray
        self._lock = threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._watch = ProcessWatch(self)

    def watch(self) -> None:
        """Look after the processes from now on."""
        self._watch.start()

    def end(self, reason: AutoparError) -> None:
        """Look after them no longer; every later call raises."""
        with self._lock:
            self.failure = self.failure or reason
        self._watch.stop()

    def check(self) -> None:
        """Raise the reason if the cluster is lost."""
        if self.failure is not None:
            raise self.failure

    def get(
        self,
        refs: Refs,
        timeout_s: float | None,
        doing: str,
        *,
        since: float | None = None,
        option: str = "step_timeout_s",
    ) -> list[Any]:
        """Return all replies, in the order of `refs`; `timeout_s` counts from now, or from `since` (monotonic).

        `option` is that of `autopar.init` that gives more time.
        """
        deadline = None if timeout_s is None else (time.monotonic() if since is None else since) + timeout_s
        waiting = list(refs)
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=len(waiting), timeout=_WAIT_S)
            if not waiting:
                with suppress(Exception):  # of which one is found below
                    return self._ray.get(list(refs))
            for ref in ready:
                self.check_answer(ref, doing)
            self.check()
            if waiting and deadline is not None and time.monotonic() > deadline:
                raise self.fail(
                    StepTimeout(
                        f"{sentence(doing)} took longer than {timeout_s:g} s; no answer came from "
                        f"{', '.join(self.describe(refs[ref]) for ref in waiting)}.{self.waits()} The processes were "
                        "ended. Look for a step that waits for ever (a callback, a lock), or give a longer "
                        f"{option} to autopar.init."
                    )
                )
        return self._ray.get(list(refs))

    def expect(self, step: int, refs: Refs) -> None:
        """A step was sent: its replies are waited for by `settle`."""
        with self._lock:
            self._pending.append(_Pending(step=step, refs=refs, sent_at=time.monotonic()))

    def settle(self, left: int, timeout_s: float) -> list[Any]:
        """Wait until at most so many steps are not answered; the reports of the last one that was waited for."""
        reports: list[Any] = []
        while len(self._pending) > left:
            oldest = self._pending[0]
            reports = self.get(oldest.refs, timeout_s, f"step {oldest.step}", since=oldest.sent_at)
            with self._lock:
                self._pending.popleft()
        return reports

    def unread(self) -> list[Any]:
        """The replies of steps that nobody has waited for yet."""
        with self._lock:
            return [ref for pending in self._pending for ref in pending.refs]

    def check_answer(self, ref: Any, doing: str) -> None:
        """Raise what a process raised, or that it died; what ends the cluster ends it."""
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, AutoparError) and not isinstance(cause, ClusterFailed | CheckpointFailed):
                raise cause from None
            self.blame_the_dead(doing)
            if isinstance(cause, CheckpointFailed):
                raise cause from None
            if isinstance(cause, ClusterFailed):
                raise self.fail(cause) from None
            raise self.fail(
                StepFailed(f"{sentence(doing)} failed in a process of the cluster: {type(cause).__name__}: {cause}")
            ) from error
        except self._ray.exceptions.RayActorError as error:
            raise self.fail(self.lost(self._number_of(error), doing, str(error))) from None
        except self._ray.exceptions.RayError as error:  # for example because the answer was on a node that is gone
            self.blame_the_dead(doing)
            raise self.fail(
                HostLost(
                    f"Lost an answer of the cluster during {doing}; Ray says: {type(error).__name__}: {error} The "
                    f"processes were ended. {_AGAIN}"
                )
            ) from error

    def waits(self) -> str:
        """Return which instruction has not ended, and what the other processes wait in; "" if none can tell."""
        refs = {actor.first_unfinished.remote(): n for n, actor in enumerate(self.hosts.actors)}
        ready, _ = self._ray.wait(list(refs), num_returns=len(refs), timeout=_TELL_S)
        found: dict[int, UnfinishedTask] = {}
        for ref in ready:
            with suppress(Exception):  # it died
                answer = self._ray.get(ref)
                if answer is not None:
                    found[refs[ref]] = answer
        if not found:
            return ""
        place = min(each.place for each in found.values())
        first = [n for n, each in found.items() if each.place == place]
        others = [f"process {n} waits in {each.text}" for n, each in found.items() if n not in first]
        silent = [f"process {n} does not say" for n in range(len(refs)) if n not in [refs[ref] for ref in ready]]
        where = f"{'process' if len(first) == 1 else 'processes'} {', '.join(map(str, first))}"
        return f" The first that has not ended is {found[first[0]].text}, in {where}" + (
            f"; {'; '.join([*others, *silent])}." if others or silent else "."
        )

    def blame_the_dead(self, doing: str) -> None:
        """Raise `HostLost` if a process has died: what fails in the others then, fails for that reason."""
        dead = self._watch.dead()
        self.check()
        if dead is not None:
            raise self.fail(self.lost(dead[0], doing, dead[1])) from None

    def fail(self, failure: AutoparError) -> AutoparError:
        """The cluster is lost: end all processes, unless they are to stay, keep the first reason, and return it."""
        with self._lock:
            self.failure = first = self.failure or failure
        if not self.hosts.survivors_stay:
            self.hosts.kill()
        return first

    def _number_of(self, error: Any) -> int | None:
        """Return the number of the process that an error of Ray is about."""
        identity = getattr(error, "actor_id", None)
        numbers = (n for n, actor in enumerate(self.hosts.actors) if actor._actor_id.hex() == identity)
        return next(numbers, None)

    def describe(self, number: int | None) -> str:
        """A process in words: its host and the meshes that it works for."""
        if number is None:
            return "a process"
        meshes = self.meshes_of.get(number, ())
        works = f" (mesh {', '.join(map(str, meshes))})" if meshes else ""
        return f"process {number} on host {self.hosts.nodes[number]}{works}"

    def lost(self, number: int | None, doing: str, reason: str) -> HostLost:
        """The error for a process that died; `reason` is what Ray says."""
        first = next((line.strip() for line in reason.splitlines() if "cause" in line.lower() or "exit" in line), "")
        if number is not None:
            self.lost_processes.add(number)
        lost = f"Lost {self.describe(number)} during {doing}; it died. {first}"
        if self.hosts.survivors_stay:
            return HostLost(f"{lost} The others keep what they hold until it is taken from them.")
        return HostLost(f"{lost} The other processes were ended, and what was not in a checkpoint is gone. {_AGAIN}")


def sentence(doing: str) -> str:
    """Return the same words as the beginning of a sentence."""
    return doing[0].upper() + doing[1:]
