"""Let users say how a function of their own is split: `sharding_rule(attention, "b s h, b t h -> b s h")`.

Such a function is one equation of a step. What it does inside is its own affair (a kernel, a callback, a loop), and
what the rule says of it is taken on trust: on parts of its operands, split alike where they share a letter, it gives
the parts of its results.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.rule import Label, Rule, adds_up, rule_of_labels
from autopar.errors import InvalidArgument

_EXAMPLE = 'such as "b s d, d f -> b s f"'
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*|_")
_declared: Any = jc.calling_primitive("declared_rule")


def sharding_rule(fn: Callable[..., Any], text: str, *, gradients: bool = False) -> Callable[..., Any]:
    """`fn` as one equation that is split as `text` says, in every step that calls it.

    Operands stand left of `->`, results right of it, in the order of `jax.tree.leaves`, separated by commas; each is
    the names of its dimensions, separated by blanks (nothing for a single number). Dimensions of the same name are
    split together. A name that only operands have is summed: on a part of such a dimension, `fn` must give summands of
    its results. A dimension called `_` is never split, nor one whose name stands on the right only, or in some results
    but not in all.

        attention = autopar.sharding_rule(attention, "b s h d, b t h d, b t h d -> b s h d")   # wrong: sums over t
        attention = autopar.sharding_rule(attention, "b s h _, b _ h _, b _ h _ -> b s h _")   # right

    `fn` must take shapes as they come, read no traced value but its arguments, and have no side effects. `grad` and
    `vmap` look inside of `fn`, where the rule has no say. With `gradients=True` what `grad` makes is one equation, too:
    it computes `fn` again, and its gradients from that. It is split as `text` says, but for names that some operands
    lack, along which their gradients are sums: right for attention, not for a product with weights. Where `fn` need not
    be computed again, declare the two functions of its `jax.custom_vjp`.

        attention = autopar.sharding_rule(mha, "b _ h _, b _ h _, b _ h _ -> b _ h _", gradients=True)   # of Pallas

    Raises `InvalidArgument` for a text that cannot be read, and at the call for one that does not fit the arguments.
    """
    check_text(text)
    declared = _read(text)

    @functools.cache
    def on_leaves(tree: Any) -> Callable[..., list[Any]]:
        # One object for all calls alike, so that they are equal equations.
        return lambda *leaves: jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        body, result = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.unflatten(tree, arrays))
        _check(body, arrays, jax.tree.leaves(result), declared, _name(fn))
        results = _declared.bind(*arrays, function=on_leaves(tree), rule=declared)
        return jax.tree.unflatten(jax.tree.structure(result), results)

    return _with_gradients(call, fn, declared) if gradients else call


def _with_gradients(call: Callable[..., Any], fn: Callable[..., Any], declared: _Declared) -> Callable[..., Any]:
    """`call`, whose gradients are an equation with a rule."""

    @functools.cache
    def gradients_of(tree: Any, real: tuple[bool, ...], out_real: tuple[bool, ...]) -> Callable[..., Any]:
        """The gradients of real operands, from all operands and the cotangents of real results."""

        def gradients(*given: Any) -> list[Any]:
            operands, cotangents = given[: len(real)], given[len(real) :]

            def real_results(*moving: Any) -> list[Any]:
                of_moving = iter(moving)
                leaves = [next(of_moving) if moves else leaf for leaf, moves in zip(operands, real, strict=True)]
                return list(itertools.compress(jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves))), out_real))

            return list(jax.vjp(real_results, *itertools.compress(operands, real))[1](list(cotangents)))

        read = (*declared.operands, *itertools.compress(declared.results, out_real))
        sides = (read, tuple(itertools.compress(declared.operands, real)))
        return sharding_rule(gradients, " -> ".join(", ".join(map(" ".join, side)) for side in sides))

    def backward(args: Any, cotangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays, sent = [jnp.asarray(leaf) for leaf in leaves], jax.tree.leaves(cotangents)
        real, out_real = (tuple(map(_is_real, each)) for each in (arrays, sent))
        found = iter(gradients_of(tree, real, out_real)(*arrays, *itertools.compress(sent, out_real)))
        return jax.tree.unflatten(tree, [next(found) if moves else None for moves in real])

    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(lambda *args: (call(*args), args), backward)
    return differentiable


def _is_real(array: Any) -> bool:
    """Return whether an array has gradients, or a cotangent is one."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """A rule as its user wrote it, and the names of the dimensions in it."""

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return self.text


def declared_rule(eqn: jc.JaxprEqn) -> Rule:
    """The rule of an equation that `sharding_rule` made."""
    return _rule_of(eqn, eqn.params["rule"])


def rule_of_text(eqn: jc.JaxprEqn, text: str) -> Rule:
    """The rule that a text gives to an equation. Raises `InvalidArgument` for one that does not fit its arrays."""
    declared = _read(text)
    _check_arrays([v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], declared, eqn.primitive.name)
    return _rule_of(eqn, declared)


def check_text(text: object) -> None:
    """Raise `InvalidArgument` for a text that is no rule."""
    if not isinstance(text, str):
        raise InvalidArgument(f"A sharding rule is {text!r}; it must be a text, {_EXAMPLE}.")
    _read(text)


def _rule_of(eqn: jc.JaxprEqn, declared: _Declared) -> Rule:

    def labels(arrays: Sequence[Sequence[str]]) -> list[list[Label]]:
        return [[None if name == "_" else name for name in names] for names in arrays]

    everywhere = set(declared.results[0]).intersection(*declared.results) if declared.results else set[str]()
    anywhere = {name for names in declared.results for name in names}
    read = {name for names in declared.operands for name in names}
    summed = read - anywhere if all(map(adds_up, eqn.outvars)) else set[str]()
    return rule_of_labels(
        eqn,
        labels(declared.operands),
        labels(declared.results),
        reductions=dict.fromkeys(sorted(summed), "sum"),
        blocked=anywhere - everywhere,
        source="user",
    )


@functools.cache
def _read(text: str) -> _Declared:
    sides = text.split("->")
    if len(sides) != 2:
        raise InvalidArgument(
            f"The sharding rule {text!r} has {len(sides) - 1} arrows; it must have one, between operands and results. "
            f"Write one {_EXAMPLE}."
        )
    arrays = [tuple(tuple(names.split()) for names in side.split(",")) for side in sides]
    for name in (name for side in arrays for names in side for name in names):
        if not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"The sharding rule {text!r} names a dimension {name!r}; names are letters and digits that begin with "
                f"a letter, or `_`, with blanks between. Write one {_EXAMPLE}."
            )
    for names in (names for side in arrays for names in side):
        for name in sorted(set(names) - {"_"}):
            if names.count(name) > 1:
                raise InvalidArgument(
                    f"The sharding rule {text!r} has {name!r} twice in one array; its dimensions must have names of "
                    "their own. Call one of them `_`, which is never split."
                )
    return _Declared(text=text, operands=arrays[0], results=arrays[1])


def _check(body: Any, operands: Sequence[Any], results: Sequence[Any], declared: _Declared, name: str) -> None:
    """Raise `InvalidArgument` unless the function can be one equation, and the rule fits its arrays."""
    if jc.closes_over_tracers(body):
        raise InvalidArgument(
            f"{name!r} has the sharding rule {declared.text!r} and reads a traced value that is not among its "
            "arguments; the rule says nothing of it. Make it an argument."
        )
    if body.effects:
        raise InvalidArgument(
            f"{name!r} has the sharding rule {declared.text!r} and the side effects {sorted(map(str, body.effects))}; "
            "a function with a rule must have none. Move them out of it."
        )
    _check_arrays(operands, results, declared, name)


def _check_arrays(operands: Sequence[Any], results: Sequence[Any], declared: _Declared, name: str) -> None:
    sizes: dict[str, int] = {}
    for side, arrays, named in (("operand", operands, declared.operands), ("result", results, declared.results)):
        if len(arrays) != len(named):
            raise InvalidArgument(
                f"{name!r} has {len(arrays)} {side}s, its sharding rule {declared.text!r} has {len(named)}; they must "
                "be as many. Write one list of names for each leaf, separated by commas."
            )
        for i, (array, names) in enumerate(zip(arrays, named, strict=True)):
            _check_array(array.shape, names, sizes, f"{side} {i} of {name!r}", declared)


def _check_array(
    shape: tuple[int, ...], names: Sequence[str], sizes: dict[str, int], what: str, declared: _Declared
) -> None:
    if len(shape) != len(names):
        raise InvalidArgument(
            f"The {what} has the shape {shape}, its sharding rule {declared.text!r} names {len(names)} dimensions; "
            "there must be a name for each. Write `_` for those that are never split."
        )
    for size, dimension in zip(shape, names, strict=True):
        if dimension != "_" and sizes.setdefault(dimension, size) != size:
            raise InvalidArgument(
                f"The {what} has {size} elements along {dimension!r} of its sharding rule {declared.text!r}, another "
                f"array has {sizes[dimension]}; dimensions of one name must have one size. Give them two names."
            )
