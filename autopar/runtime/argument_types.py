"""What the flat arguments of a program must be; every runtime takes them from here, and refuses others alike.

input of the program    all of an argument, or a window of it: a microbatch, or a piece of a stacked parameter
argument                as large as the input that is all of it, else as its windows reach
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.errors import DonatedBuffer, InvalidArgument
from autopar.ir.program import Program
from autopar.runtime.executables import dtype_of


@dataclass(frozen=True, kw_only=True)
class ArgumentType:
    """What one flat argument must be, and its name for error messages."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


def places_of(program: Program) -> Mapping[int, Sequence[int]]:
    """For every argument that the program reads, in order: which of its inputs it serves."""
    places: dict[int, list[int]] = {}
    for place, item in enumerate(program.inputs):
        if item.leaf is not None:
            places.setdefault(item.leaf, []).append(place)
    return dict(sorted(places.items()))


@dataclass(frozen=True, kw_only=True)
class ArgumentTypes:
    """All arguments of a program."""

    program: str
    count: int
    """So many are taken; those that the program does not read are among them."""
    exactly: bool
    """Whether more are refused: they are not where nobody named the arguments."""
    types: Mapping[int, ArgumentType]
    """Of those that the program reads."""

    def check(self, arguments: Sequence[Any]) -> None:
        """Raise `InvalidArgument` for another number, shape or dtype, and `DonatedBuffer` for an array that is gone."""
        if len(arguments) < self.count or (self.exactly and len(arguments) > self.count):
            raise InvalidArgument(
                f"The step was given {len(arguments)} arrays; program '{self.program}' takes {self.count}. "
                "Call it with arguments of the structure that it was compiled for."
            )
        for leaf, wanted in self.types.items():
            _check(arguments[leaf], wanted)


def argument_types(program: Program, leaf_names: Sequence[str]) -> ArgumentTypes:
    """The types of all arguments; `leaf_names` are for error messages, and may be left out."""
    types = {leaf: _type(program, leaf, places, leaf_names) for leaf, places in places_of(program).items()}
    return ArgumentTypes(
        program=program.name,
        count=len(leaf_names) or max(types, default=-1) + 1,
        exactly=bool(leaf_names),
        types=types,
    )


def _type(program: Program, leaf: int, places: Sequence[int], leaf_names: Sequence[str]) -> ArgumentType:
    items = [program.inputs[place] for place in places]
    kinds = [program.meshes[item.mesh].values[item.value] for item in items]
    shape = list(kinds[0].shape)
    for item, kind in zip(items, kinds):
        if item.window is None:
            shape = list(kind.shape)
            break
        # The windows of an argument cover it.
        shape[item.window.axis] = max(shape[item.window.axis], item.window.stop)
    name = f"'{leaf_names[leaf]}'" if leaf < len(leaf_names) else str(leaf)
    return ArgumentType(name=name, shape=tuple(shape), dtype=dtype_of(kinds[0].dtype))


def _check(argument: Any, wanted: ArgumentType) -> None:
    is_deleted = getattr(argument, "is_deleted", None)  # arrays on devices have it
    if is_deleted is not None and is_deleted():
        raise DonatedBuffer(
            f"Argument {wanted.name} was donated to an earlier call and is gone. "
            "Pass the array that the call returned in its place, or do not donate it."
        )
    # What JAX makes of it: int64 of numpy is int32 unless 64 bits are enabled.
    dtype = jax.dtypes.result_type(argument) if is_deleted is None else argument.dtype
    shape = tuple(argument.shape) if hasattr(argument, "shape") else np.shape(argument)
    if shape != wanted.shape or dtype != wanted.dtype:
        raise InvalidArgument(
            f"Argument {wanted.name} is {dtype}{list(shape)}; the program was compiled for "
            f"{wanted.dtype}{list(wanted.shape)}. Pass that, or compile for the new shape."
        )
