"""Have gradients that are made in few bits summed in more: `reduce_dtype="float32"`.

    g = dot_general(x, dy)         bfloat16    ->    g = dot_general(x, dy)            bfloat16, of a device's examples
    p = convert_element_type(g)    float32           p = widen_gradient(g)             float32: summed over devices so
    r = f(g)                                         r = f(convert_element_type(p))

A gradient is what the backward pass hands to the rest of the step. From there the program is followed back through what
only moves, adds or scales numbers, to what makes them: a product, a sum over examples, each device's or microbatch's
part of it. Right behind that stands `widen_gradient`, which may be done on summands, and before which nothing sums
them (`intra_op.choice_graph`); all that follows is done in more bits, also within loops over layers and
rematerialised regions. Where the step itself converts, that is the gradient; where it reads fewer bits, the sum is
rounded. What a loop carries from layer to layer is widened behind it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import bind_bodies, evaluate_jaxpr
from autopar.compiler.jaxprs.primitives import (
    ADDITIONS,
    COPIES,
    JOINS,
    LABELS,
    NESTED,
    REMAT,
    REORDERINGS,
    RESHAPES,
    WIDENING,
    names,
)

_CARRIES = (
    ADDITIONS
    | COPIES
    | JOINS
    | LABELS
    | REORDERINGS
    | RESHAPES
    | names("broadcast_in_dim convert_element_type neg pad slice split sub")
)
_widen: Any = jc.calling_primitive(WIDENING)


@functools.cache
def _converting_to(dtype: Any) -> Callable[..., list[Any]]:
    # One object for all calls alike, so that they are equal equations.
    return lambda leaf: [lax.convert_element_type(leaf, dtype)]


def with_wide_gradients(closed: jc.ClosedJaxpr, dtype: str) -> jc.ClosedJaxpr:
    """Return the step with gradients of fewer bits than `dtype` summed in it; the same object if it has none."""
    jaxpr, consts = jc.open_jaxpr(closed)
    wide = jnp.dtype(dtype)
    if not _has_narrow_gradients(jaxpr, wide):
        return closed
    return eliminate_dead(
        jc.trace(
            lambda *args: _Level.of_gradients(jaxpr, wide).run(jaxpr, consts, args), [v.aval for v in jaxpr.invars]
        )
    )


def _levels(jaxpr: jc.Jaxpr) -> Iterator[jc.Jaxpr]:
    """A program, and the bodies in it that take gradients of their own, as a loop over microbatches does."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in NESTED and jc.ad_phase(eqn) != "backward":
            for body in jp.bodies_of(eqn):
                yield from _levels(jc.open_jaxpr(body)[0])


def _has_narrow_gradients(jaxpr: jc.Jaxpr, dtype: Any) -> bool:
    return any(_Level.of_gradients(level, dtype).marked for level in _levels(jaxpr))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Level:
    """The equations of a program or of a body, and which of their results are had in more bits: the values of these."""

    dtype: Any
    marked: frozenset[jc.Var]

    @classmethod
    def of_gradients(cls, jaxpr: jc.Jaxpr, dtype: Any) -> _Level:
        """Return the level of a program that takes gradients: what the backward pass makes and others read."""
        makers = {v for eqn in jaxpr.eqns if jc.ad_phase(eqn) == "backward" for v in eqn.outvars}
        read = {v for eqn in jaxpr.eqns if jc.ad_phase(eqn) != "backward" for v in jc.operands(eqn)}
        gradients = makers & (read | {v for v in jaxpr.outvars if isinstance(v, jc.Var)})
        return cls(dtype=dtype, marked=_marked(jaxpr, gradients, dtype, makers=makers))

    def run(self, jaxpr: jc.Jaxpr, consts: Sequence[Any], args: Sequence[Any], wide: Collection[int] = ()) -> list[Any]:
        """Return the results, those of these numbers in more bits."""
        results = evaluate_jaxpr(jaxpr, consts, args, self._equation)
        return [
            lax.convert_element_type(x, self.dtype) if n in wide else self._rounded([v], [x])[0]
            for n, (v, x) in enumerate(zip(jaxpr.outvars, results, strict=True))
        ]

    def _rounded(self, atoms: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The values of what is read, in the types that the step has it in."""
        return [_as(v, x) if self._is_marked(v) else x for v, x in zip(atoms, values, strict=True)]

    def _is_marked(self, atom: Any) -> bool:
        return isinstance(atom, jc.Var) and atom in self.marked

    def _equation(self, _: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """The results of an equation; it reads in fewer bits, rounded in its own scope, what it does not carry on."""
        if not self.marked.isdisjoint(eqn.outvars):
            return self._made(eqn, values)
        with jc.under_scope_of(eqn):
            if eqn.primitive.name == "convert_element_type" and self._is_marked(eqn.invars[0]):
                return [_as(eqn.outvars[0], values[0])]
            values = self._rounded(eqn.invars, values)
        bodies = jp.bodies_of(eqn) if eqn.primitive.name in NESTED and jc.ad_phase(eqn) != "backward" else ()
        if any(_has_narrow_gradients(jc.open_jaxpr(body)[0], self.dtype) for body in bodies):
            return bind_bodies(eqn, values, lambda number, inputs: self._gradients_of(eqn, number, inputs))
        return jc.bind_equation(eqn, values)

    def _gradients_of(self, eqn: jc.JaxprEqn, number: int, inputs: Sequence[Any]) -> list[Any]:
        """The results of a body that may take gradients of its own."""
        jaxpr, consts = jc.open_jaxpr(jp.bodies_of(eqn)[number])
        return _Level.of_gradients(jaxpr, self.dtype).run(jaxpr, consts, inputs)

    def _made(self, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """The results of an equation some of which are marked: these in more bits."""
        wider = eqn.primitive.name == "convert_element_type" and _is_float(eqn.invars[0])
        if _carries(eqn) and (wider or any(map(self._is_marked, eqn.invars))):
            with jc.under_scope_of(eqn):
                wide = [
                    lax.convert_element_type(x, self.dtype) if _is_float(v) else x
                    for v, x in zip(eqn.invars, values, strict=True)
                ]
            return wide if eqn.primitive.name == "convert_element_type" else jc.bind_equation(eqn, wide)
        with jc.under_scope_of(eqn):
            values = self._rounded(eqn.invars, values)
        places = [n for n, v in enumerate(eqn.outvars) if v in self.marked]
        inside = [n for n in places if _body_makes(eqn, n, self.dtype)]
        results = list(self._with_wide_results(eqn, values, inside) if inside else jc.bind_equation(eqn, values))
        with jc.under_scope_of(eqn):
            for place in set(places) - set(inside):
                (results[place],) = _widen.bind(results[place], function=_converting_to(self.dtype))
        return results

    def _with_wide_results(self, eqn: jc.JaxprEqn, values: list[Any], places: Collection[int]) -> list[Any]:
        """The results of a loop or region whose body has some of them in more bits."""
        jaxpr, consts = jc.open_jaxpr(jp.bodies_of(eqn)[0])
        wanted = [v for n in places if isinstance(v := jaxpr.outvars[n], jc.Var)]
        level = _Level(dtype=self.dtype, marked=_marked(jaxpr, wanted, self.dtype))
        return bind_bodies(eqn, values, lambda _, inputs: level.run(jaxpr, consts, inputs, places))


def _marked(
    jaxpr: jc.Jaxpr, wanted: Collection[jc.Var], dtype: Any, makers: Collection[jc.Var] | None = None
) -> frozenset[jc.Var]:
    """Return the values of few bits between what makes these and them; of those in `makers` only, if they are given."""
    known = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if makers is None or v in makers}
    waiting, reached = list(wanted), set[jc.Var]()
    while waiting:
        v = waiting.pop()
        if v in known and v not in reached:
            reached.add(v)
            waiting += jc.operands(known[v]) if _carries(known[v]) else ()
    return frozenset(v for v in reached if _is_narrow(v, dtype))


def _carries(eqn: jc.JaxprEqn) -> bool:
    """Return whether an equation moves or adds up numbers, or scales them all."""
    name, (result, *_) = eqn.primitive.name, eqn.outvars
    if name in ("mul", "div"):
        return not _shape(eqn.invars[1]) and bool(_shape(result))
    # A sum along dimensions of one element, as of what was broadcast along them, is none.
    return name in _CARRIES or (name == "reduce_sum" and math.prod(_shape(eqn.invars[0])) == math.prod(_shape(result)))


def _body_makes(eqn: jc.JaxprEqn, place: int, dtype: Any) -> bool:
    """Return whether a result is made anew in each round of a loop over layers, or in a rematerialised region."""
    if not (eqn.primitive.name in REMAT or (eqn.primitive.name == "scan" and place >= jp.scan_of(eqn).num_carry)):
        return False
    body = jc.open_jaxpr(jp.bodies_of(eqn)[0])[0]
    v = body.outvars[place]
    return isinstance(v, jc.Var) and bool(_marked(body, [v], dtype))


def _shape(v: Any) -> tuple[int, ...]:
    return v.aval.shape


def _is_narrow(v: Any, dtype: Any) -> bool:
    return _is_float(v) and v.aval.dtype.itemsize < dtype.itemsize


def _is_float(v: Any) -> bool:
    found = getattr(v.aval, "dtype", None)
    return found is not None and jnp.issubdtype(found, jnp.floating)


def _as(v: Any, value: Any) -> Any:
    """A value in the type that the step has it in."""
    return lax.convert_element_type(value, v.aval.dtype)
