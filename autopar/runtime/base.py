"""What a runtime is: something that loads a program and then carries out one step per call."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from autopar.program import Program

Device = Any  # a jax.Device, which the type checker does not know
Sender = Callable[[Sequence[jax.Array]], None]
Receiver = Callable[[], Sequence[jax.Array]]


class Loaded(Protocol):
    """A program whose executables are on their devices: flat arguments in, flat results out."""

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Carry out one step; what the program donates is gone afterwards."""
        ...


class Runtime(Protocol):
    """Where programs run."""

    def load(self, program: Program, *, leaf_names: Sequence[str] = ()) -> Loaded:
        """Make the program ready to run; the names of the flat arguments are for error messages."""
        ...


class Channel(Protocol):
    """How the values of one mesh reach the others; both ends are made once, when a program is loaded."""

    def sender(self, values: tuple[str, ...], to: int) -> Sender:
        """A function that hands over the arrays of `values` and does not wait."""
        ...

    def receiver(self, values: tuple[str, ...], source: int) -> Receiver:
        """A function that returns the arrays of `values` in the layout that this mesh declares."""
        ...
