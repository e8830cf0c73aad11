"""Watch the processes of a cluster on a thread of its own: their death, their silence, and errors of steps.

    death     a call that never returns ends with the process; Ray says so within 0.1 s
    silence   a process that answers no ping for 30 s (`answer_timeout_s`) hangs, was stopped, or is cut off
    errors    of steps whose results nobody reads, before the next step is sent

What is found ends the other processes, and is raised where somebody waits for an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from autopar.errors import AutoparError, HostLost
from autopar.runtime.distributed.ray_cluster import RayHosts

PING_EVERY_S = 1.0
LOOK_EVERY_S = 0.25
GRACE_S = 0.7  # peers of a process that died may say first that a transfer failed


class Watched(Protocol):
    """The waiters for the processes, as the watch sees them."""

    hosts: RayHosts
    failure: AutoparError | None

    def fail(self, failure: AutoparError) -> AutoparError:
        """End all processes for this reason."""
        ...

    def lost(self, number: int | None, doing: str, reason: str) -> HostLost:
        """The error for a process that died."""
        ...

    def describe(self, number: int | None) -> str:
        """A process in words."""
        ...

    def waits(self) -> str:
        """Return which instruction has not ended, in words."""
        ...

    def check_answer(self, ref: Any, doing: str) -> None:
        """Raise what a process raised."""
        ...

    def unread(self) -> Iterable[Any]:
        """The replies of steps that nobody has waited for yet."""
        ...


class ProcessWatch:
    """Looks after the processes until it is stopped, or one of them is lost."""

    def __init__(self, replies: Watched) -> None:
        self._replies = replies
        self._ray = replies.hosts.ray
        self._stays = {actor.stay_alive.remote(): n for n, actor in enumerate(replies.hosts.actors)}
        self._pings: dict[Any, int] = {}
        self._answered_at: dict[int, float] = {}
        self._silent_s: dict[int, float] = {}
        self._looked_at = time.monotonic()
        self._checked: set[Any] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="autopar-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no longer."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def dead(self) -> tuple[int, str] | None:
        """A process that has died, or dies within `GRACE_S`, and what Ray says of it."""
        ended, _ = self._ray.wait(list(self._stays), num_returns=1, timeout=GRACE_S)
        return (self._stays[ended[0]], self._reason(ended[0])) if ended else None

    def _look(self) -> None:
        while not self._stop.is_set() and self._replies.failure is None:
            try:
                self._look_once()
            except AutoparError:
                continue  # whoever asks for the answer is told; if it ended the cluster, there is nothing to watch
            except Exception as error:
                if not self._stop.is_set() and self._ray.is_initialized():
                    self._replies.fail(
                        HostLost(
                            f"The processes of the cluster cannot be watched any more: {type(error).__name__}: "
                            f"{error}. All were ended. Start again from the last checkpoint, or train with "
                            "autopar.fit, which does."
                        )
                    )
                return

    def _look_once(self) -> None:
        unread = list(self._replies.unread())
        self._checked &= set(unread)
        steps = [ref for ref in unread if ref not in self._checked]
        # What is ready is looked at once: waiting for it again would never wait.
        refs = [*self._stays, *self._pings, *steps]
        self._ray.wait(refs, num_returns=1, timeout=LOOK_EVERY_S)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in self._stays:
                raise self._replies.fail(self._replies.lost(self._stays[ref], "training", self._reason(ref)))
            if ref in self._pings:
                self._answered_at[self._pings.pop(ref)] = time.monotonic()
            else:
                self._checked.add(ref)
            self._replies.check_answer(ref, "a step")
        self._ping()

    def _ping(self) -> None:
        now = time.monotonic()
        # While this process was held up itself (a debugger, a full machine) it could hear of nobody.
        passed_s = min(now - self._looked_at, PING_EVERY_S)
        self._looked_at = now
        for number, actor in enumerate(self._replies.hosts.actors):
            if number in self._pings.values():
                self._silent_s[number] += passed_s
            elif now - self._answered_at.get(number, 0.0) > PING_EVERY_S:
                self._pings[actor.answer_ping.remote()] = number
                self._silent_s[number] = 0.0
        limit_s = self._replies.hosts.options.answer_timeout_s
        for number in self._pings.values():
            if self._silent_s[number] > limit_s:
                raise self._replies.fail(
                    HostLost(
                        f"Lost {self._replies.describe(number)}: it has not answered for {limit_s:g} s, so it hangs or "
                        f"was stopped, or its host is cut off.{self._replies.waits()} All processes were ended. "
                        "Start again from the last checkpoint, or train with autopar.fit, which does; give very busy "
                        "hosts a longer "
                        "answer_timeout_s in autopar.init."
                    )
                )

    def _reason(self, ref: Any) -> str:
        try:
            self._ray.get(ref)
        except Exception as error:
            return str(error)
        return "it left"
