"""Keep processes that have started and imported what those of the world have, to take their places when one is lost.

    prepare   one more process on a node, beside the one that works there: it imports, and takes no device
    take      the spare processes of some nodes, as far as they are there

Of the seconds from a loss to the next step, most are the start of processes and their imports. A spare process holds
the host's memory that its imports take, and nothing of a device, until it joins a world.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.runtime.distributed.host import Host

_ANSWER_S = 1.0
"""A spare process answers within so long, or is not taken."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The properties that a spare process needs to be like the one that it stands in for."""

    search_path: tuple[str, ...]
    modules: tuple[str, ...]
    """The modules in the order in which they were imported."""
    visible: dict[str, str]
    """The devices that Ray gave the process, as environment variables."""


# In a process.


def describe(host: Host) -> Model:
    """Return what a spare process for this one needs."""
    modules = tuple(name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None)
    visible = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
    return Model(search_path=tuple(sys.path), modules=modules, visible=visible)


def warm_up(host: Host, model: Model) -> int:
    """Import what the other process has imported, and see the devices that it sees; the number of this process."""
    os.environ.update(model.visible)
    sys.path.extend(path for path in model.search_path if path not in sys.path)
    for name in model.modules:
        if name not in sys.modules:
            with suppress(Exception):  # it will be imported when it is needed, or say then why not
                importlib.import_module(name)
    return os.getpid()


# On the driver.


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A process that stands by on a node; `warm` is a reference to its number, and ready when it has imported."""

    actor: Any
    node: str
    warm: Any


@dataclass(kw_only=True)
class Spares:
    """The spare processes of a Ray cluster; `start` starts one on a node."""

    ray: Any
    start: Callable[[str], Any]
    waiting: list[Spare] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self, model_of: Callable[[str], Any], nodes: Sequence[str]) -> None:
        """Start processes until each of these nodes has one for every time that it is named, and do not wait.

        `model_of(node)` is a reference to what one on this node needs.
        """
        with self._lock:  # runs on several threads
            self._forget_dead()
            missing = Counter(nodes) - Counter(spare.node for spare in self.waiting)
            for node in missing.elements():
                actor = self.start(node)
                self.waiting.append(Spare(actor=actor, node=node, warm=actor.run.remote(warm_up, model_of(node))))

    def warm(self, nodes: Sequence[str]) -> list[str]:
        """Return those of these nodes, as often as they are named, that have a spare process which has imported."""
        self._forget_dead()
        there = Counter(spare.node for spare in self.waiting if self._is_ready(spare.warm))
        return list((Counter(nodes) & there).elements())

    def take(self, nodes: Sequence[str]) -> list[Any]:
        """Return for each of these nodes a spare process that is there, and is spare no more; None where there is none.

        One that has not imported yet is taken too: it is ahead of a new one.
        """
        asked = [spare for spare in self.waiting if spare.node in nodes]
        pings = {spare.actor.answer_ping.remote(): spare for spare in asked}
        answered = self.ray.wait(list(pings), num_returns=len(pings), timeout=_ANSWER_S)[0] if pings else []
        for ping, spare in pings.items():
            there = self._is_sound(ping) if ping in answered else not self._is_ready(spare.warm)
            if not there:
                self._end(spare)
        return [self._taken_on(node) for node in nodes]

    def end(self) -> None:
        """End all of them."""
        for spare in list(self.waiting):
            self._end(spare)

    def _taken_on(self, node: str) -> Any:
        found = [spare for spare in self.waiting if spare.node == node]
        found.sort(key=lambda spare: not self._is_ready(spare.warm))
        if not found:
            return None
        self.waiting.remove(found[0])
        return found[0].actor

    def _end(self, spare: Spare) -> None:
        self.waiting.remove(spare)
        with suppress(Exception):  # it was dead already, or Ray is
            self.ray.kill(spare.actor, no_restart=True)

    def _forget_dead(self) -> None:
        for spare in list(self.waiting):
            if self._is_ready(spare.warm) and not self._is_sound(spare.warm):
                self._end(spare)

    def _is_ready(self, ref: Any) -> bool:
        return bool(self.ray.wait([ref], timeout=0)[0])

    def _is_sound(self, ref: Any) -> bool:
        try:
            self.ray.get(ref)
        except self.ray.exceptions.RayError:
            return False
        return True
