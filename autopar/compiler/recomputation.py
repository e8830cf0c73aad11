"""Compute once what a program computes again: the backward half of `jax.checkpoint`, joined to the forward.

    equations, which of them recompute  ->  their results, each value computed by the first equation that makes it

Values are numbered so that equal numbers mean equal values: an equation with the primitive, the parameters and the operand
numbers of an earlier one has its result numbers. A recomputed value whose number the forward made is read from there.

A scan that is recomputed returns more than the forward's, for the backward pass needs the inside of every iteration:

    forward     h_n        = scan(body,  h_0, w)
    recomputed  h_n, a, b  = scan(body', h_0, w)

If both bodies, numbered side by side, carry the same values, the two become one scan in the forward's place that returns what
either does. This is the step that `jax.grad` would have made without `jax.checkpoint`.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from autopar.compiler import jax_compat as jc

_Table = MutableMapping[Hashable, tuple[int, ...]]


def join_recomputed(closed: jc.ClosedJaxpr, recomputes: Sequence[bool]) -> jc.ClosedJaxpr:
    """The same program, in which what the equations marked in `recomputes` share with the others is computed once.

    Every equation keeps its name stack; marked ones are not shared with each other. Equations with effects stay.
    """
    jaxpr, consts = jc.open_jaxpr(closed)
    level = _Level(fresh=itertools.count(), table={})
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    level.numbers.update((v, next(level.fresh)) for v in inputs)
    level.add(jaxpr.eqns, recomputes)

    def run(*args: Any) -> list[Any]:
        known = {level.numbers[v]: value for v, value in zip(inputs, [*consts, *args], strict=True)}
        return _Evaluation(level, known).run(jaxpr.outvars)

    return jc.trace(run, [v.aval for v in jaxpr.invars])


# Which values are equal


@dataclass(kw_only=True, eq=False)
class _Loop:
    """A scan of the forward, the scans that repeat it, and the one body that computes for all of them."""

    body: _Level
    carry: list[int]  # numbers inside of the body
    xs: dict[int, int]  # number of a stacked operand -> of its slice in the body
    ys: dict[int, int]  # number of a slice in the body -> of the stacked result


@dataclass(kw_only=True, eq=False)
class _Level:
    """The equations of the program, or of a loop's body, and the numbers of their values."""

    fresh: Iterator[int]
    table: _Table
    numbers: dict[jc.Var, int] = field(default_factory=dict)
    eqns: list[jc.JaxprEqn] = field(default_factory=list)
    recomputes: list[bool] = field(default_factory=list)
    made_at: dict[int, int] = field(default_factory=dict)
    loops: dict[int, _Loop] = field(default_factory=dict)
    """By number of the forward's scan equation."""

    def copy(self) -> _Level:
        """The same, to be extended on trial."""
        return _Level(
            fresh=self.fresh,
            table=ChainMap({}, self.table),
            numbers=dict(self.numbers),
            eqns=list(self.eqns),
            recomputes=list(self.recomputes),
            made_at=dict(self.made_at),
            loops=dict(self.loops),
        )

    def number(self, atom: Any) -> int:
        """The number of a variable or literal."""
        if isinstance(atom, jc.Literal):
            key = ("literal", *_literal_key(atom))
            return self.table.setdefault(key, (next(self.fresh),))[0]
        return self.numbers[atom]

    def add(self, eqns: Sequence[jc.JaxprEqn], recomputes: Sequence[bool]) -> None:
        """Number the results of further equations."""
        for eqn, recompute in zip(eqns, recomputes, strict=True):
            index = len(self.eqns)
            self.eqns.append(eqn)
            self.recomputes.append(recompute)
            results = self._results(eqn, recompute)
            self.numbers.update(zip(eqn.outvars, results, strict=True))
            for number in results:
                self.made_at.setdefault(number, index)

    def _results(self, eqn: jc.JaxprEqn, recompute: bool) -> Sequence[int]:
        operands = [self.number(atom) for atom in eqn.invars]
        if _changes_nothing(eqn):
            return operands
        new = tuple(next(self.fresh) for _ in eqn.outvars)
        if eqn.effects:
            return new
        key = (eqn.primitive, _params_key(eqn.params), tuple(operands))
        if key in self.table:
            return self.table[key]
        if not recompute:
            self.table[key] = new
        elif eqn.primitive.name == "scan":
            return self._join_scan(eqn, operands) or new
        return new

    def _join_scan(self, eqn: jc.JaxprEqn, operands: Sequence[int]) -> Sequence[int] | None:
        """The numbers of a recomputed scan's results, if a scan of the forward can compute them too."""
        for index, other in enumerate(self.eqns):
            if other.primitive.name == "scan" and not self.recomputes[index]:
                loop = self.loops.get(index) or self._loop(other)
                joined = self._join(index, loop, eqn, operands)
                if joined is not None:
                    self.loops[index], results = joined
                    return results
        return None

    def _loop(self, eqn: jc.JaxprEqn) -> _Loop:
        """A scan of the forward, its body numbered; what it reads in every iteration keeps its number inside."""
        scan = jc.loop_of(eqn)
        jaxpr, _ = jc.open_jaxpr(scan.body)
        consts, carry, xs = _split(scan, [self.number(atom) for atom in eqn.invars])
        inner_carry, inner_xs = ([next(self.fresh) for _ in part] for part in (carry, xs))
        body = _Level(fresh=self.fresh, table=ChainMap({}, self.table))
        body.bind(scan.body, [*consts, *inner_carry, *inner_xs])
        body.add(jaxpr.eqns, [False] * len(jaxpr.eqns))
        results = [self.number(v) for v in eqn.outvars]
        inner_ys = [body.number(atom) for atom in jaxpr.outvars[scan.num_carry :]]
        return _Loop(
            body=body,
            carry=inner_carry,
            xs=dict(zip(xs, inner_xs, strict=True)),
            ys=dict(zip(inner_ys, results[scan.num_carry :], strict=True)),
        )

    def bind(self, closed: jc.ClosedJaxpr, numbers: Sequence[int]) -> None:
        """Number the inputs of a body; its constants, if it has any, are values of their own."""
        jaxpr, _ = jc.open_jaxpr(closed)
        assert not jaxpr.constvars, "the bodies of a normalised step have no constants"
        self.numbers.update(zip(jaxpr.invars, numbers, strict=True))

    def _join(
        self, index: int, loop: _Loop, eqn: jc.JaxprEqn, operands: Sequence[int]
    ) -> tuple[_Loop, list[int]] | None:
        scan, forward = jc.loop_of(eqn), jc.loop_of(self.eqns[index])
        if (scan.length, scan.reverse) != (forward.length, forward.reverse):
            return None
        consts, carry, xs = _split(scan, operands)
        if any(self.made_at.get(number, -1) >= index for number in (*consts, *xs)):
            return None
        inits = [self.number(a) for a in self.eqns[index].invars[forward.num_consts :][: forward.num_carry]]
        places = _places(carry, inits)
        if places is None:
            return None
        loop = _Loop(body=loop.body.copy(), carry=loop.carry, xs=dict(loop.xs), ys=dict(loop.ys))
        for number in xs:
            if number not in loop.xs:
                loop.xs[number] = next(self.fresh)
        jaxpr, _ = jc.open_jaxpr(scan.body)
        loop.body.bind(scan.body, [*consts, *(loop.carry[k] for k in places), *(loop.xs[n] for n in xs)])
        loop.body.add(jaxpr.eqns, [True] * len(jaxpr.eqns))
        outs = [loop.body.number(atom) for atom in jaxpr.outvars]
        body, _ = jc.open_jaxpr(forward.body)
        if any(loop.body.number(body.outvars[k]) != n for k, n in zip(places, outs)):
            return None
        results = [self.number(self.eqns[index].outvars[k]) for k in places]
        results += [loop.ys.setdefault(n, next(self.fresh)) for n in outs[scan.num_carry :]]
        return loop, results


def _split(scan: jc.Loop, operands: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    border = scan.num_consts + scan.num_carry
    return operands[: scan.num_consts], operands[scan.num_consts : border], operands[border:]


def _places(carry: Sequence[int], inits: Sequence[int]) -> list[int] | None:
    """For each carried value of a scan, the place of one with the same start in another, in order."""
    places: list[int] = []
    for number in carry:
        free = [k for k, init in enumerate(inits) if init == number and k not in places]
        if not free:
            return None
        places.append(free[0])
    return places


def _changes_nothing(eqn: jc.JaxprEqn) -> bool:
    """Whether the results are the operands: JAX puts such equations around what it recomputes."""
    if eqn.primitive.name == "reduce_precision":
        finfo = np.finfo(eqn.invars[0].aval.dtype)  # type: ignore[attr-defined]
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (finfo.iexp, finfo.nmant)
    return eqn.primitive.name in ("optimization_barrier", "name")


def _params_key(params: Mapping[str, Any]) -> Hashable:
    return tuple((name, _param_key(params[name])) for name in sorted(params))


def _param_key(value: Any) -> Hashable:
    """Equal for equal parameters; jaxprs are compared by what they compute."""
    if isinstance(value, (jc.Jaxpr, jc.ClosedJaxpr)):
        return _jaxpr_key(value)
    if isinstance(value, (tuple, list)):
        return (type(value), *(_param_key(item) for item in value))
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)


def _jaxpr_key(value: Any) -> Hashable:
    jaxpr, consts = jc.open_jaxpr(value)
    numbers: dict[jc.Var, int] = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}

    def read(atom: Any) -> Hashable:
        return _literal_key(atom) if isinstance(atom, jc.Literal) else numbers[atom]

    eqns: list[Hashable] = []
    for eqn in jaxpr.eqns:
        eqns.append((eqn.primitive, _params_key(eqn.params), *(read(atom) for atom in eqn.invars)))
        numbers.update((v, len(numbers) + k) for k, v in enumerate(eqn.outvars))
    inputs = tuple((v.aval.shape, v.aval.dtype) for v in jaxpr.invars)
    return (inputs, tuple(id(c) for c in consts), tuple(eqns), *(read(atom) for atom in jaxpr.outvars))


def _literal_key(atom: jc.Literal) -> tuple[Hashable, ...]:
    value = np.asarray(atom.val)
    return (atom.aval.dtype, value.shape, value.tobytes())


# The program on values


class _Evaluation:
    """One evaluation of the equations of a level; `known` holds values by number."""

    def __init__(self, level: _Level, known: dict[int, Any]) -> None:
        self.level = level
        self.known = known
        self.env: dict[jc.Var, Any] = {}

    def run(self, outvars: Sequence[Any]) -> list[Any]:
        for index, eqn in enumerate(self.level.eqns):
            numbers = [self.level.numbers[v] for v in eqn.outvars]
            if self.level.recomputes[index] and not eqn.effects and all(n in self.known for n in numbers):
                results = [self.known[n] for n in numbers]
            elif index in self.level.loops:
                results = self._run_joined(eqn, self.level.loops[index])
            else:
                results = jc.bind_equation(eqn, [self._read(atom) for atom in eqn.invars])
            self.env.update(zip(eqn.outvars, results, strict=True))
            for number, value in zip(numbers, results, strict=True):
                self.known.setdefault(number, value)
        return [self._read(atom) for atom in outvars]

    def _read(self, atom: Any) -> Any:
        if isinstance(atom, jc.Literal):
            return atom.val
        return self.env[atom] if atom in self.env else self.known[self.level.numbers[atom]]

    def _run_joined(self, eqn: jc.JaxprEqn, loop: _Loop) -> list[Any]:
        """Run a scan of the forward with what its repetitions return besides."""
        scan = jc.loop_of(eqn)
        jaxpr, _ = jc.open_jaxpr(scan.body)
        forward_ys = len(jaxpr.outvars) - scan.num_carry
        inner_ys = list(loop.ys)

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            inside = dict(zip([*loop.carry, *loop.xs.values()], [*carry, *xs], strict=True))
            evaluation = _Evaluation(loop.body, self.known | inside)
            outs = evaluation.run(jaxpr.outvars)
            return outs[: scan.num_carry], [*outs[scan.num_carry :], *(evaluation.known[n] for n in inner_ys)]

        inits = [self._read(atom) for atom in eqn.invars[scan.num_consts :][: scan.num_carry]]
        xs = [self._number_value(eqn, number) for number in loop.xs]
        with jc.under_scope_of(eqn):
            carry, ys = lax.scan(
                body, inits, xs, length=scan.length, reverse=scan.reverse, unroll=scan.unroll
            )
        self.known.update(zip((loop.ys[n] for n in inner_ys), ys[forward_ys:], strict=True))
        return [*carry, *ys[:forward_ys]]
