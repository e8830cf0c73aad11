"""Keys of equations: equal for equations that compute the same from operands of the same types."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import NESTED

_PLACEMENT = frozenset({"copy_semantics", "devices", "out_sharding", "out_shardings", "sharding", "srcs"})
"""Parameters that say where an equation runs, not what it computes."""
_PLAIN = (int, str, float, np.dtype, type(None))
"""Types of parameters that are keys as they are."""


def equation_key(eqn: jc.JaxprEqn) -> Hashable:
    """Equal for equations that have the same rule: primitive, parameters but for placement, shapes and types."""
    name, given = eqn.primitive.name, jp.parameters(eqn)
    params = [(k, _frozen(given[k])) for k in sorted(given) if k not in _PLACEMENT] if name != "name" else ()
    return (name, tuple(params), _types_of([*eqn.invars, *eqn.outvars]), bool(eqn.effects))


_keys: weakref.WeakKeyDictionary[jc.Jaxpr, tuple[Hashable, ...]] = weakref.WeakKeyDictionary()


def equation_keys(jaxpr: jc.Jaxpr) -> tuple[Hashable, ...]:
    """Return the `equation_key` of each equation of a jaxpr, found once; those whose bodies are entered have none."""
    if jaxpr not in _keys:
        _keys[jaxpr] = tuple(None if eqn.primitive.name in NESTED else equation_key(eqn) for eqn in jaxpr.eqns)
    return _keys[jaxpr]


_kept: dict[Hashable, Hashable] = {}
_classes: weakref.WeakKeyDictionary[jc.Jaxpr, tuple[Hashable, ...]] = weakref.WeakKeyDictionary()


class _Key:
    """A stand-in for a key: only itself is equal to it, which takes no time to see."""

    __slots__ = ()


def equation_classes(jaxpr: jc.Jaxpr) -> tuple[Hashable, ...]:
    """Return for each equation of a jaxpr, not of its bodies, what is equal for those of equal `equation_key` alone."""
    if jaxpr not in _classes:
        _classes[jaxpr] = tuple(_kept.setdefault(key, _Key()) for key in equation_keys(jaxpr))
    return _classes[jaxpr]


_contents: weakref.WeakKeyDictionary[jc.Jaxpr, Hashable] = weakref.WeakKeyDictionary()


def content_key(jaxpr: jc.Jaxpr) -> Hashable:
    """Return what is equal for programs of equal equations, in their bodies too, that read each other alike."""
    if jaxpr not in _contents:
        _contents[jaxpr] = _content_of(jaxpr)
    return _contents[jaxpr]


def _content_of(jaxpr: jc.Jaxpr) -> Hashable:
    given = (*jaxpr.constvars, *jaxpr.invars)
    numbers: dict[Any, Hashable] = {v: number for number, v in enumerate(given)}
    lines: list[Hashable] = []

    def number(atom: Any) -> Hashable:
        return literal_key(atom) if isinstance(atom, jc.Literal) else numbers[atom]

    for kind, eqn in zip(equation_classes(jaxpr), jaxpr.eqns, strict=True):
        kind = _nested_key(eqn) if eqn.primitive.name in NESTED else kind
        lines.append((kind, jc.moves_memory(eqn), tuple(map(number, eqn.invars))))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
    return (len(jaxpr.constvars), _types_of(given), tuple(lines), tuple(map(number, jaxpr.outvars)))


def _nested_key(eqn: jc.JaxprEqn) -> Hashable:
    bodies = [jc.open_jaxpr(body)[0] for body in jc.subjaxprs(eqn)]
    given = jp.parameters(eqn)
    params = tuple([(key, _frozen(given[key])) for key in sorted(given) if not _has_programs(given[key])])
    return (eqn.primitive.name, params, _types_of([*eqn.invars, *eqn.outvars]), tuple(map(content_key, bodies)))


def _types_of(atoms: Iterable[Any]) -> Hashable:
    return tuple([(tuple(aval.shape), aval.dtype) for aval in (atom.aval for atom in atoms)])


def _has_programs(value: Any) -> bool:
    parts: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(part, (jc.Jaxpr, jc.ClosedJaxpr)) for part in parts)


def literal_key(literal: Any) -> Hashable:
    """Equal for literals of one type and value, and sooner there than their text."""
    aval, value = literal.aval, literal.val
    if not isinstance(aval.dtype, np.dtype):
        return str(value)
    return (tuple(aval.shape), aval.dtype, aval.weak_type, np.asarray(value).tobytes())


def same_equations(closed: Any, twin: Any) -> bool:
    """Return whether two programs have the same primitives in the same order, at every depth, of values of equal ranks.

    JAX leaves dimensions of one row out in places, as in the indices of `take_along_axis`.
    """
    one, other = ([(eqn.primitive, _ranks(eqn)) for eqn in jc.all_equations(each)] for each in (closed, twin))
    return one == other


def _ranks(eqn: jc.JaxprEqn) -> list[int]:
    return [len(getattr(v.aval, "shape", ())) for v in eqn.outvars]


def _frozen(value: Any) -> Hashable:
    """A parameter as something that can be compared and hashed."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([each if type(each) is int else _frozen(each) for each in cast(Sequence[Any], value)])
    if isinstance(value, dict):
        return tuple(sorted((str(k), _frozen(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes())
    if isinstance(value, (jc.Jaxpr, jc.ClosedJaxpr)):
        return str(value)
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value
