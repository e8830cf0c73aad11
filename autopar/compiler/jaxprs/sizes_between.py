"""Write a program for a batch at which it was not traced, from two at which it was.

    program of 32 rows, program of 16 rows  ->  program of 8 rows, of 4, ...

Every size in a program grows evenly with the rows: a dimension is a multiple of them, or a multiple and something that
stays. So two programs that differ in nothing but sizes tell those of every other batch. Nothing is traced, and nothing
but sizes is looked at: what else is different is a reason to trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import literal_key


class NotBetween(Exception):
    """Two programs differ in more than sizes, or those of a batch would not be whole."""


class _Place(NamedTuple):
    at: Fraction
    """The place on the line from one program (0) to the other (1), and beyond."""
    counts: tuple[int, int, int]
    """The numbers of microbatches of the two, and there."""


def program_between(
    one: jc.ClosedJaxpr, other: jc.ClosedJaxpr, at: Fraction, counts: tuple[int, int, int] = (1, 1, 1)
) -> jc.ClosedJaxpr:
    """Return the program at this place of the line from one (0) to the other (1), and beyond; raise `NotBetween`.

    `counts` are the numbers of microbatches of the two, and there: means over microbatches divide by them.
    """
    return _between(one, other, _Place(at, counts))


def _between(one: Any, other: Any, place: _Place) -> Any:
    """Return what a parameter of an equation is there."""
    if one is other:
        return one
    if isinstance(one, jc.ClosedJaxpr):
        return _closed(one, other, place)
    if isinstance(one, jc.Jaxpr):
        return _jaxpr(one, other, place)
    if type(one) is not type(other):
        raise NotBetween
    if isinstance(one, int | np.integer) and not isinstance(one, bool):
        return _size(int(one), int(other), place)
    if isinstance(one, list | tuple):
        return _items(one, other, place)
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            raise NotBetween
        return {key: _between(value, other[key], place) for key, value in one.items()}
    return _as_it_is(one, other, place)


def _as_it_is(one: Any, other: Any, place: _Place) -> Any:
    """Return what has no size of its own: it has to be the same, but for functions, which every trace makes anew."""
    if isinstance(one, np.ndarray) or hasattr(one, "__array__"):
        if one.shape != other.shape or not bool(np.array_equal(one, other)):
            raise NotBetween
        return one
    if callable(one) or one == other:
        return one
    if is_dataclass(one) and not isinstance(one, type):
        named = {each.name: getattr(one, each.name) for each in fields(one) if each.init}
        return replace(one, **{name: _between(value, getattr(other, name), place) for name, value in named.items()})
    raise NotBetween


def _size(one: int, other: int, place: _Place) -> int:
    size = one + (other - one) * place.at
    if size.denominator != 1 or (size <= 0 < one):
        raise NotBetween
    return int(size)


def _items(one: Any, other: Any, place: _Place) -> Any:
    if len(one) != len(other):
        raise NotBetween
    items = [_between(a, b, place) for a, b in zip(one, other, strict=True)]
    return type(one)(*items) if hasattr(one, "_fields") else type(one)(items)


def _type(one: Any, other: Any, place: _Place) -> Any:
    if one == other:
        return one
    if len(one.shape) != len(other.shape) or one.dtype != other.dtype or one.weak_type != other.weak_type:
        raise NotBetween
    aval = jc.with_shape(one, tuple(_size(a, b, place) for a, b in zip(one.shape, other.shape, strict=True)))
    if aval is None:
        raise NotBetween
    return aval


def _closed(one: jc.ClosedJaxpr, other: jc.ClosedJaxpr, place: _Place) -> jc.ClosedJaxpr:
    (jaxpr, consts), (twin, theirs) = jc.open_jaxpr(one), jc.open_jaxpr(other)
    return jc.closed_jaxpr(_jaxpr(jaxpr, twin, place), _items(consts, theirs, place))


def _jaxpr(one: jc.Jaxpr, other: jc.Jaxpr, place: _Place) -> jc.Jaxpr:
    """Return the program with values of other types, equation by equation."""
    if len(one.eqns) != len(other.eqns):
        raise NotBetween
    values: dict[jc.Var, jc.Var] = {}
    twins: dict[jc.Var, jc.Var] = {}

    def made(mine: Any, theirs: Any) -> list[jc.Var]:
        if len(mine) != len(theirs):
            raise NotBetween
        for v, twin in zip(mine, theirs, strict=True):
            values[v], twins[v] = jc.value_of_type(_type(v.aval, twin.aval, place)), twin
        return [values[v] for v in mine]

    def read(mine: Any, theirs: Any) -> list[Any]:
        if len(mine) != len(theirs):
            raise NotBetween
        pairs = zip(mine, theirs, strict=True)
        return [_literal(a, b, place) if isinstance(a, jc.Literal) else known(a, b) for a, b in pairs]

    def known(v: jc.Var, twin: Any) -> jc.Var:
        if twins[v] is not twin:
            raise NotBetween
        return values[v]

    constvars, invars = made(one.constvars, other.constvars), made(one.invars, other.invars)
    eqns: list[jc.JaxprEqn] = []
    for eqn, twin in zip(one.eqns, other.eqns, strict=True):
        if eqn.primitive is not twin.primitive:
            raise NotBetween
        invars_of = read(eqn.invars, twin.invars)
        params = _between(dict(jp.parameters(eqn)), dict(jp.parameters(twin)), place)
        eqns.append(eqn.replace(invars=invars_of, outvars=made(eqn.outvars, twin.outvars), params=params))
    outvars = read(one.outvars, other.outvars)
    return one.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)


def _literal(one: jc.Literal, other: Any, place: _Place) -> jc.Literal:
    """Return a literal that both have, or for their numbers of microbatches the number there."""
    if not isinstance(other, jc.Literal):
        raise NotBetween
    if literal_key(one) == literal_key(other):
        return one
    aval: Any = one.aval
    if aval.shape or aval != other.aval or (one.val, other.val) != place.counts[:2]:
        raise NotBetween
    return jc.Literal(np.asarray(place.counts[2], np.asarray(one.val).dtype)[()], aval)
