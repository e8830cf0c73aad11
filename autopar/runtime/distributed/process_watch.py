"""Watch the processes of a cluster on a thread of its own: their death, their silence, and errors of steps.

    death     a call that never returns ends with the process; Ray says so within 0.1 s
    silence   a process that answers no ping for 15 s hangs, was stopped, or is cut off
    errors    of steps whose results nobody reads, before the next step is sent

What is found goes to the session, which ends the other processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from autopar.errors import AutoparError, HostLost
from autopar.runtime.distributed.ray_cluster import RayHosts

PING_EVERY_S = 1.0
ANSWER_PING_S = 15.0  # a process that compiles or traces still answers within a second or two
LOOK_EVERY_S = 0.25
GRACE_S = 0.7  # peers of a process that died may say first that a transfer failed


class Watched(Protocol):
    """The session as its watch sees it."""

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

    def check_answer(self, ref: Any, doing: str) -> None:
        """Raise what a process raised."""
        ...

    def unread(self) -> Iterable[Any]:
        """The answers of steps that nobody has waited for yet."""
        ...


class ProcessWatch:
    """Looks after the processes of a session until it is stopped, or one of them is lost."""

    def __init__(self, session: Watched) -> None:
        self._session = session
        self._ray = session.hosts.ray
        self._stays = {actor.stay_alive.remote(): n for n, actor in enumerate(session.hosts.actors)}
        self._pings: dict[Any, tuple[int, float]] = {}
        self._answered_at: dict[int, float] = {}
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

    def dead(self, within_s: float = GRACE_S) -> tuple[int, str] | None:
        """A process that has died, or dies within so many seconds, and what Ray says of it."""
        ended, _ = self._ray.wait(list(self._stays), num_returns=1, timeout=within_s)
        return (self._stays[ended[0]], self._reason(ended[0])) if ended else None

    def _look(self) -> None:
        while not self._stop.is_set() and self._session.failure is None:
            try:
                self._look_once()
            except AutoparError:
                return
            except Exception:
                if self._stop.is_set() or not self._ray.is_initialized():
                    return
                raise

    def _look_once(self) -> None:
        unread = list(self._session.unread())
        self._checked &= set(unread)
        steps = [ref for ref in unread if ref not in self._checked]
        # What is ready is looked at once: waiting for it again would never wait.
        ready, _ = self._ray.wait([*self._stays, *self._pings, *steps], num_returns=1, timeout=LOOK_EVERY_S)
        for ref in ready:
            if ref in self._stays:
                raise self._session.fail(self._session.lost(self._stays[ref], "training", self._reason(ref)))
            if ref in self._pings:
                number, _ = self._pings.pop(ref)
                self._answered_at[number] = time.monotonic()
            else:
                self._checked.add(ref)
            self._session.check_answer(ref, "a step")
        self._ping()

    def _ping(self) -> None:
        now = time.monotonic()
        asked = {number for number, _ in self._pings.values()}
        for number, actor in enumerate(self._session.hosts.actors):
            if number not in asked and now - self._answered_at.get(number, 0.0) > PING_EVERY_S:
                self._pings[actor.answer_ping.remote()] = (number, now)
        for number, since in self._pings.values():
            if now - since > ANSWER_PING_S:
                raise self._session.fail(
                    HostLost(
                        f"Lost {self._session.describe(number)}: it has not answered for {ANSWER_PING_S:.0f} s, so it "
                        "hangs or was stopped, or its host is cut off. All processes were ended. Start again from the "
                        "last checkpoint, or train with autopar.fit, which does."
                    )
                )

    def _reason(self, ref: Any) -> str:
        try:
            self._ray.get(ref)
        except Exception as error:
            return str(error)
        return "it left"
