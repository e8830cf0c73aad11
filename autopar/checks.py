"""Guards that plans and options share: counts, words, mesh shapes and specs, each refused with a lesson."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar.errors import InvalidArgument

_LEAST_BYTES_OF_SUMS = 4
RANDOM = ("full_batch", "per_microbatch")
BATCH_STATISTICS = ("exact", "per_microbatch")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise `InvalidArgument` unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} is {value!r}, it must be an integer. Give {least} or more.")


def is_text(value: object) -> bool:
    """Return whether `value` is a string."""
    return isinstance(value, str)


def is_whole(value: object) -> bool:
    """Return whether `value` is an integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether `value` is a real number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_flag(name: str, value: object) -> bool:
    """Return a truth value. Raises `InvalidArgument` for anything else."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}. Give True or False.")
    return value


def is_positive(value: object) -> bool:
    """Return whether `value` is a finite number above zero."""
    return is_number(value) and 0 < cast(float, value) < math.inf


def plain_value(value: Any) -> Any:
    """Return the value with Python's numbers for those of NumPy, and tuples for lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        plain = tuple(map(plain_value, cast(Sequence[Any], value)))
        return value if type(value) is tuple and all(a is b for a, b in zip(plain, value)) else plain
    return value


def check_numbers(name: str, value: object) -> tuple[int, ...]:
    """Return one integer or several as a tuple. Raises `InvalidArgument` for anything else."""
    plain = plain_value(value)
    numbers = (plain,) if isinstance(plain, int) else plain
    if not isinstance(numbers, tuple) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise InvalidArgument(f"{name} is {value!r}. Give the number of an argument, from 0, or a tuple of numbers.")
    return cast(tuple[int, ...], numbers)


def check_names(name: str, value: object) -> tuple[str, ...]:
    """Return one string or several as a tuple. Raises `InvalidArgument` for anything else."""
    plain = plain_value(value)
    names = (plain,) if isinstance(plain, str) else plain
    if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
        raise InvalidArgument(f"{name} is {value!r}. Give the name of an argument, or a tuple of names.")
    return cast(tuple[str, ...], names)


def check_pattern(name: str, pattern: str) -> None:
    """Raise `InvalidArgument` unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(
            f"The pattern {pattern!r} of {name} is no regular expression: {error}. Escape what is meant literally, for "
            "example with re.escape(name)."
        ) from None


def check_axes(name: str, value: object) -> tuple[tuple[str, int], ...]:
    """Return patterns and the axis of each as pairs. Raises `InvalidArgument` for anything else."""
    pairs: list[tuple[object, object]] = (
        list(cast(Mapping[object, object], value).items()) if isinstance(value, Mapping) else [(None, None)]
    )
    if not all(isinstance(p, str) and isinstance(axis, int) and not isinstance(axis, bool) for p, axis in pairs):
        raise InvalidArgument(
            f'{name} is {value!r}. Give the axis of the batch by a pattern that finds the input: {{"tokens": 1}}.'
        )
    for pattern, _ in pairs:
        check_pattern(name, cast(str, pattern))
    return cast(tuple[tuple[str, int], ...], tuple(pairs))


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `InvalidArgument` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} is {value!r}. Choose one of {', '.join(repr(choice) for choice in choices)}.")


def as_reduce_dtype(value: object) -> str | None:
    """Return the name of a type in which gradients can be summed, or None. Raises `InvalidArgument` for others."""
    if value is None:
        return None
    try:
        dtype = np.dtype(cast(Any, value))
    # NumPy raises whatever it stumbled over.
    except Exception:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise InvalidArgument(
            f"reduce_dtype is {value!r}, which is no type of floating numbers. Give the one in which gradients are to "
            'be summed, "float32", or None for the type in which they are made.'
        )
    if dtype.itemsize < _LEAST_BYTES_OF_SUMS:
        raise InvalidArgument(
            f'reduce_dtype is {dtype.name}, of {8 * dtype.itemsize} bits: a sum needs at least the 32 of "float32". '
            "Leave it out to sum gradients in the type in which they are made; to send them in fewer bits call "
            "autopar.compress_gradients on them."
        )
    return dtype.name


def names_alike(name: str, names: Iterable[str]) -> str:
    """Return "Did you mean ...? " with the names that are spelled alike, or nothing if none is."""
    close = difflib.get_close_matches(name.lower(), list(names), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, close))}? " if close else ""


def check_mesh_shape(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> None:
    """Raise `InvalidArgument` unless every mesh axis has a size of at least 1 and a name of its own."""
    if not shape:
        raise InvalidArgument("A mesh has the shape (), it needs at least one axis. Give a shape such as (1,).")
    for axis, size in enumerate(shape):
        check_count(f"The size of mesh axis {axis} in {shape}", size)
    if len(axis_names) != len(shape) or len(set(axis_names)) != len(axis_names):
        raise InvalidArgument(
            f"A mesh of shape {shape} has the axis names {axis_names}. Give {len(shape)} different names."
        )


def check_spec(name: str, spec: object, meshes: Sequence[tuple[str, ...]]) -> None:
    """Raise `InvalidArgument` unless one of the `meshes`, given by axis names, has every axis of the spec."""
    if not isinstance(spec, PartitionSpec):
        raise InvalidArgument(f"The spec of {name} is {spec!r}. Give a jax.sharding.PartitionSpec.")
    if spec.unreduced or any(part is PartitionSpec.UNCONSTRAINED for part in spec):
        raise InvalidArgument(f"The spec of {name} is {spec}. A plan decides: name an axis or None for each dimension.")
    axes = list(_axes_of(spec))
    if len(set(axes)) != len(axes):
        raise InvalidArgument(f"The spec of {name} is {spec}. Use each mesh axis for one dimension only.")
    if axes and not any(set(axes) <= set(mesh) for mesh in meshes):
        found = " or ".join(str(mesh) for mesh in dict.fromkeys(meshes))
        raise InvalidArgument(
            f"The spec of {name} is {spec}, the mesh axes are {found}. "
            f"Use axes of one mesh, or name the axis in axis_names."
        )


def _axes_of(spec: PartitionSpec) -> Iterator[str]:
    for part in cast(Iterable[Any], spec):
        if part is not None:
            yield from (part,) if isinstance(part, str) else part
