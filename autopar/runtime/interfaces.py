"""The interfaces of a runtime: a loaded program is called once per step; channels and endpoints carry values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autopar.runtime.timeline import InstructionTime
from autopar.runtime.unfinished import UnfinishedTask

Device = Any  # a jax.Device, which the type checker does not know
Message = Any  # what its receiver in this process needs; None where it goes by other ways
Sender = Callable[[Sequence[jax.Array]], Message]
Receiver = Callable[[Message], Sequence[jax.Array]]


class LoadedProgram(Protocol):
    """A program whose executables are on their devices: flat arguments in, flat results out."""

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Carry out one step; what the program donates is gone afterwards."""
        ...

    def timed(self, leaves: Sequence[Any]) -> tuple[list[Any], list[InstructionTime]]:
        """The same, waiting for every instruction, and when each ran."""
        ...

    def wait(self, arrays: Sequence[Any]) -> None:
        """Wait for results of the last step. Raises `StepTimeout`, which says what has not ended."""
        ...

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction here of the last step that has not ended; None if none is known."""
        ...


class Channel(Protocol):
    """A way from the values of one mesh to the others; both ends are made once, when a program is loaded.

    Calls of the program may overlap, so that a channel keeps nothing of a call: it is in the message.
    """

    def sender(self, values: tuple[str, ...], to: int) -> Sender:
        """A function that hands over the arrays of `values`, does not wait, and returns the message."""
        ...

    def receiver(self, values: tuple[str, ...], source: int) -> Receiver:
        """A function that returns the arrays of a message in the layout that this mesh declares for `values`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """An array on its way from a device of one process to a device of another; devices are ordinals."""

    source: int
    destination: int
    shape: tuple[int, ...]
    dtype: Any


Post = Callable[[int, Sequence[jax.Array]], None]  # a tag and one array per parcel
Pull = Callable[[int], Sequence[jax.Array]]  # a tag


class Endpoint(Protocol):
    """One process's side of a channel to others. A tag is used once between two processes; parcels are never empty.

    Two processes post and pull their common messages in the same order; arrays may arrive after the call returned.
    """

    def poster(self, process: int, parcels: Sequence[Parcel]) -> Post:
        """A function that hands over the parcels' arrays and does not wait; they must not be donated afterwards."""
        ...

    def puller(self, process: int, parcels: Sequence[Parcel]) -> Pull:
        """A function that returns what the process posted under the tag, on the parcels' destinations."""
        ...

    def open(self) -> None:
        """Reach the processes of the posters and pullers made so far; every process comes here before it posts."""
        ...
