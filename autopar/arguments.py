"""Sort the arguments of a call: which are static, which are traced, which carry the batch, which are donated.

    step(state, batch, train=True)  ->  flat leaves, their tree, and the static values

Arguments may be named by position or by name, however the caller passes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class ArgumentRoles:
    """The user's words on the arguments of a step."""

    batch_argnums: tuple[int, ...] | None = None
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call's arguments. `leaves` are the traced ones, flat; `static` the rest, hashable."""

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int | str, Hashable], ...]
    num_positional: int

    def without_values(self, names: Sequence[str]) -> Call:
        """Return the same call of shapes and dtypes alone; `names` of the leaves are for messages."""
        shapes: list[Any] = [abstract(leaf, name) for leaf, name in zip(self.leaves, names, strict=True)]
        return Call(leaves=shapes, tree=self.tree, static=self.static, num_positional=self.num_positional)

    def key(self) -> Hashable:
        """Return a value that is equal for calls that one compiled step serves."""
        return (self.static, self.num_positional, self.tree, tuple(map(leaf_type, self.leaves)))

    def key_of_successor(self, state: Collection[int]) -> Hashable:
        """The key of the next call, where the leaves `state` are results of this one: arrays, no longer numbers."""
        types = [leaf_type(leaf) for leaf in self.leaves]
        types = [(*t[:2], False) if i in state else t for i, t in enumerate(types)]
        return (self.static, self.num_positional, self.tree, tuple(types))


class Arguments:
    """Sorts the arguments of calls of one function."""

    def __init__(self, fun: Callable[..., Any], roles: ArgumentRoles) -> None:
        self.fun = fun
        self.roles = roles
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.positional = _positional_names(fun)
        self.static_positions = self._positions("static_argnums", roles.static_argnums)
        self._check_names(roles.static_argnames)
        self.static_names = frozenset(roles.static_argnames) | {
            self.positional[i] for i in self.static_positions if i < len(self.positional)
        }
        self.static_positions |= {i for i, n in enumerate(self.positional) if n in self.static_names}
        if roles.batch_argnums is None:
            self.batch = frozenset({1} if 1 not in self.static_positions and len(self.positional) != 1 else ())
        else:
            self.batch = self._positions("batch_argnums", roles.batch_argnums)
        self.donated = self._positions("donate_argnums", roles.donate_argnums)
        both = (self.batch | self.donated) & self.static_positions
        if both:
            raise InvalidArgument(
                f"Argument {min(both)} of {self.name} is static, and cannot be a batch or donated as well. Static "
                "arguments are Python values that the step is compiled for; name it in one place only."
            )

    def _positions(self, option: str, numbers: Sequence[int] | int) -> frozenset[int]:
        positions: set[int] = set()
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            count = len(self.positional)
            position = number + count if number < 0 else number
            if count and not 0 <= position < count and not _takes_any(self.fun):
                raise InvalidArgument(
                    f"{option} names argument {number}, but {self.name} takes {count} positional arguments "
                    f"({', '.join(self.positional)}). Count them from 0."
                )
            positions.add(position)
        return frozenset(positions)

    def _check_names(self, names: Sequence[str]) -> None:
        taken = _names(self.fun)
        for name in names:
            if taken is not None and name not in taken:
                raise InvalidArgument(
                    f"static_argnames names {name!r}, but {self.name} takes {', '.join(taken)}. Name one of these."
                )

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Sort one call's arguments."""
        static: list[tuple[int | str, Hashable]] = []
        traced_args: dict[int, Any] = {}
        traced_kwargs: dict[str, Any] = {}
        for i, value in enumerate(args):
            if i in self.static_positions:
                static.append((i, self._hashable(i, value)))
            else:
                traced_args[i] = value
        for name, value in kwargs.items():
            if name in self.static_names:
                static.append((name, self._hashable(name, value)))
            else:
                traced_kwargs[name] = value
        leaves, tree = jax.tree.flatten((traced_args, traced_kwargs))
        return Call(leaves=leaves, tree=tree, static=tuple(static), num_positional=len(args))

    def _hashable(self, where: int | str, value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError:
            raise InvalidArgument(
                f"Static argument {where!r} of {self.name} is a {type(value).__name__}, which cannot be hashed. "
                "The step is compiled once for each static value, so it must be hashable: pass a tuple or a frozen "
                "dataclass, or make it a traced argument."
            ) from None
        return value

    def call_flat(self, call: Call) -> Callable[..., Any]:
        """Return the function of the traced leaves alone."""

        def flat(*leaves: Any) -> Any:
            traced_args, kwargs = jax.tree.unflatten(call.tree, leaves)
            positional = dict(traced_args) | {k: v for k, v in call.static if isinstance(k, int)}
            named = dict(kwargs) | {k: v for k, v in call.static if isinstance(k, str)}
            return self.fun(*[positional[i] for i in range(call.num_positional)], **named)

        return flat

    def describe_leaves(self, call: Call) -> list[tuple[str, int | None]]:
        """Return of every leaf its name in messages and plans, and its argument's position (None: by keyword only)."""
        described: list[tuple[str, int | None]] = []
        traced_args, traced_kwargs = jax.tree.unflatten(call.tree, call.leaves)
        for i in traced_args:
            name = self.positional[i] if i < len(self.positional) else f"args[{i}]"
            paths = jax.tree_util.tree_leaves_with_path(traced_args[i])
            described += [(name + jax.tree_util.keystr(path), i) for path, _ in paths]
        for name in sorted(traced_kwargs):
            position = self.positional.index(name) if name in self.positional else None
            paths = jax.tree_util.tree_leaves_with_path(traced_kwargs[name])
            described += [(name + jax.tree_util.keystr(path), position) for path, _ in paths]
        return described


def _positional_names(fun: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return ()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _names(fun: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments that may be passed by name; None if any may."""
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name, p in parameters.items() if p.kind in kinds)


def _takes_any(fun: Callable[..., Any]) -> bool:
    parameters = inspect.signature(fun).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def leaf_type(leaf: Any) -> tuple[Any, Any, bool]:
    """Return what a compiled step depends on: shape, dtype, and whether the dtype is a Python number's."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or _on_cluster(leaf):
        return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
    try:
        aval = jax.typeof(leaf)  # of numpy's 64 bits it keeps what JAX is set to keep
    except TypeError:  # no array: tracing names it
        return ((), type(leaf), False)
    return (aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False)))


def _on_cluster(leaf: Any) -> bool:
    """Return True for a value of a cluster, which must not be fetched to learn its type."""
    return isinstance(getattr(leaf, "aval", None), jax.ShapeDtypeStruct)


def abstract(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an argument, as JAX will see it. Raises `InvalidArgument` for what is no array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if _on_cluster(leaf):
        return leaf.aval
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        raise InvalidArgument(
            f"{name} is a {type(leaf).__name__}; arrays and numbers are required. Name the argument in static_argnums "
            "or static_argnames if the step is to be compiled for its value."
        ) from None
    weak = bool(getattr(aval, "weak_type", False))
    dtype = aval.dtype if isinstance(leaf, jax.Array) else np.dtype(aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=weak)
