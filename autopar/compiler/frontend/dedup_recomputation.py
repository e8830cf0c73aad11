"""Compute once what a program computes again: the backward half of `jax.checkpoint`, joined to the forward.

    program, which of its equations recompute  ->  the same program, which reads those values from the forward

Values are numbered so that equal numbers mean equal values: an equation with the primitive, the parameters and the
operand numbers of an earlier one has its result numbers.

A scan that is recomputed returns more than the forward's, for the backward pass needs the inside of every iteration:

    forward     h_n        = scan(body,  h_0, w)
    recomputed  h_n, a, b  = scan(body', h_0, w)

If both bodies, numbered side by side, carry the same values, the two become one scan in the forward's place that
returns what either does. So the program becomes the one that `jax.grad` would have made without `jax.checkpoint`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp


def join_recomputed(
    closed: jc.ClosedJaxpr, recomputes: Sequence[bool], at_other_batch: jc.ClosedJaxpr | None = None
) -> jc.ClosedJaxpr:
    """The same program, in which what the equations marked in `recomputes` share with the others is computed once.

    Every equation keeps its name stack; marked ones are not shared with each other. Equations with effects stay. With
    `at_other_batch`, which has the same equations, only what is equal there too is shared: ones of shape [rows] and
    [8] are not, although there are 8 rows here.
    """
    jaxpr, consts = jc.open_jaxpr(closed)
    twins = {} if at_other_batch is None else _twins(closed, at_other_batch)
    level = _Level(shared=_Shared(fresh=itertools.count(), literals={}, constants={}, twins=twins))
    level.numbers.update((v, level.new()) for v in [*jaxpr.constvars, *jaxpr.invars])
    level.add(jaxpr.eqns, recomputes)

    def run(*args: Any) -> list[Any]:
        inputs = zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
        known = level.shared.constants | {level.numbers[v]: value for v, value in inputs}
        evaluation = _Evaluation(level, known)
        evaluation.run()
        return [evaluation.read(atom) for atom in jaxpr.outvars]

    return jc.trace(run, [v.aval for v in jaxpr.invars])


def _twins(closed: jc.ClosedJaxpr, at_other_batch: jc.ClosedJaxpr) -> dict[int, Hashable]:
    """Return, by the identity of each equation at any depth, what its twin at another batch is told apart by."""
    pairs = zip(jc.all_equations(closed), jc.all_equations(at_other_batch), strict=True)
    return {id(eqn): (_params_key(jp.parameters(twin)), _literals_of(twin)) for eqn, twin in pairs}


def _literals_of(eqn: jc.JaxprEqn) -> Hashable:
    return tuple(_literal_key(atom) for atom in eqn.invars if isinstance(atom, jc.Literal))


# Which values are equal


@dataclass(frozen=True, kw_only=True, eq=False)
class _Loop:
    """A scan of the forward, the scans that repeat it, and the one body that computes for all of them."""

    body: _Level
    carry: list[int]  # numbers in the body
    xs: dict[int, int]  # number of a stacked operand -> of its slice in the body
    outs: list[int]  # numbers in the body of what the forward's scan returns
    ys: dict[int, tuple[Any, int]]  # number in the body -> who holds it there, number of the stacked result

    def copy(self) -> _Loop:
        """The same, to be extended on trial."""
        return replace(self, body=self.body.copy(), xs=dict(self.xs), ys=dict(self.ys))

    @property
    def repeated(self) -> bool:
        """Return whether a later scan repeats this one."""
        return any(self.body.recomputes)

    def slice_of(self, number: int) -> int:
        """The number in the body of a slice of a stacked value, which may be a result of the loop."""
        for inner, (_, outer) in self.ys.items():
            if outer == number:
                return inner
        return self.xs.setdefault(number, self.body.new())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shared:
    """The numbers that the program and all loop bodies have in common."""

    fresh: Iterator[int]
    literals: dict[Hashable, int]
    constants: dict[int, Any]  # literals and captured arrays by number
    twins: dict[int, Hashable]  # what tells equations apart at another batch, by their identity


@dataclass(frozen=True, kw_only=True, eq=False)
class _Level:
    """The equations of the program, or of a loop's body, and the numbers of their values."""

    shared: _Shared
    outer: _Level | None = None
    table: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)  # values that differ between the iterations of this body
    numbers: dict[jc.Var, int] = field(default_factory=dict)
    eqns: list[jc.JaxprEqn] = field(default_factory=list)
    recomputes: list[bool] = field(default_factory=list)
    made_at: dict[int, int] = field(default_factory=dict)
    loops: dict[int, _Loop] = field(default_factory=dict)  # by index of the forward's scan equation

    def copy(self) -> _Level:
        """The same, to be extended on trial."""
        return replace(
            self,
            table=dict(self.table),
            varying=set(self.varying),
            numbers=dict(self.numbers),
            eqns=list(self.eqns),
            recomputes=list(self.recomputes),
            made_at=dict(self.made_at),
            loops=dict(self.loops),
        )

    def new(self) -> int:
        """A number that no value has."""
        return next(self.shared.fresh)

    def number(self, atom: Any) -> int:
        """The number of a variable or literal."""
        if isinstance(atom, jc.Literal):
            return self._constant(("literal", *_literal_key(atom)), atom.val)
        return self.numbers[atom]

    def _constant(self, key: Hashable, value: Any) -> int:
        number = self.shared.literals.setdefault(key, self.new())
        self.shared.constants[number] = value
        return number

    def enter(self, closed: jc.ClosedJaxpr, inputs: Sequence[int], *, recompute: bool) -> list[int]:
        """Add the equations of a body to this level; the numbers of its results."""
        jaxpr, consts = jc.open_jaxpr(closed)
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            self.numbers[v] = self._constant(("captured", id(value)), value)
        self.numbers.update(zip(jaxpr.invars, inputs, strict=True))
        self.add(jaxpr.eqns, [recompute] * len(jaxpr.eqns))
        return [self.number(atom) for atom in jaxpr.outvars]

    def add(self, eqns: Sequence[jc.JaxprEqn], recomputes: Sequence[bool]) -> None:
        """Number the results of further equations."""
        for eqn, recompute in zip(eqns, recomputes, strict=True):
            results = self._results(eqn, recompute)
            self.numbers.update(zip(eqn.outvars, results, strict=True))
            for number in results:
                self.made_at.setdefault(number, len(self.eqns))
            self.eqns.append(eqn)
            self.recomputes.append(recompute)

    def _results(self, eqn: jc.JaxprEqn, recompute: bool) -> Sequence[int]:
        operands = [self.number(atom) for atom in eqn.invars]
        if _changes_nothing(eqn):
            return operands
        new = tuple(self.new() for _ in eqn.outvars)
        key = (eqn.primitive, _params_key(jp.parameters(eqn)), tuple(operands), self.shared.twins.get(id(eqn)))
        # What does not vary is the same outside of the loop: JAX recomputes it there, once for all iterations.
        level = self
        while level.outer is not None and level.varying.isdisjoint(operands):
            level = level.outer
        if not eqn.effects and key in level.table:
            return level.table[key]
        if recompute:
            joined = self._join_scan(jp.scan_of(eqn), operands) if eqn.primitive.name == "scan" else None
            new = tuple(joined or new)
        elif not eqn.effects:
            level.table[key] = new
            if eqn.primitive.name == "scan":
                self.loops[len(self.eqns)] = self._loop(jp.scan_of(eqn), operands, new)
        level.varying.update(new)
        return new

    # Scans that repeat a scan

    def _join_scan(self, scan: jp.Scan, operands: Sequence[int]) -> Sequence[int] | None:
        """The numbers of a recomputed scan's results, if a scan of the forward can compute them too."""
        consts, carry, xs = _split(scan, operands)
        for index, loop in self.loops.items():
            other = self.eqns[index]
            forward = jp.scan_of(other)
            starts = _split(forward, [self.number(atom) for atom in other.invars])[1]
            places = _places(carry, starts)
            # Read in the body, or stacked by it: such values are there although they are made later outside.
            stacked = {outer for _, outer in loop.ys.values()}
            late = {n for n, i in self.made_at.items() if i >= index}
            in_time = late.isdisjoint({*consts} - {*loop.body.made_at}) and late.isdisjoint({*xs} - stacked)
            if places is None or not in_time or (scan.length, scan.reverse) != (forward.length, forward.reverse):
                continue
            trial = loop.copy()
            ys = self._repeat(trial, places, scan, consts, xs)
            if ys is not None:
                self.loops[index] = trial
                return [*(self.numbers[other.outvars[k]] for k in places), *ys]
        return None

    def _loop(self, scan: jp.Scan, operands: Sequence[int], results: Sequence[int]) -> _Loop:
        """A scan of the forward; what all its iterations read keeps its number inside."""
        consts, carry, xs = _split(scan, operands)
        inner_carry = [self.new() for _ in carry]
        inner_xs = {number: self.new() for number in xs}
        body = _Level(shared=self.shared, outer=self, varying={*inner_carry, *inner_xs.values()})
        inputs = [*consts, *inner_carry, *(inner_xs[n] for n in xs)]
        outs = body.enter(scan.body, inputs, recompute=False)
        holders = zip(outs, _results_of(scan), results, strict=True)
        ys = {inner: (atom, outer) for inner, atom, outer in list(holders)[scan.num_carry :]}
        return _Loop(body=body, carry=inner_carry, xs=inner_xs, outs=outs, ys=ys)

    def _repeat(
        self, loop: _Loop, places: Sequence[int], scan: jp.Scan, consts: Sequence[int], xs: Sequence[int]
    ) -> list[int] | None:
        """Let the loop compute what `scan` does: the numbers of its stacked results; None if the carries differ."""
        slices = [loop.slice_of(number) for number in xs]
        loop.body.varying.update(slices)
        inputs = [*consts, *(loop.carry[k] for k in places), *slices]
        outs = loop.body.enter(scan.body, inputs, recompute=True)
        if [loop.outs[k] for k in places] != outs[: scan.num_carry]:
            return None
        holders = list(zip(outs, _results_of(scan), strict=True))[scan.num_carry :]
        return [loop.ys.setdefault(inner, (atom, self.new()))[1] for inner, atom in holders]


def _split(scan: jp.Scan, operands: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    border = scan.num_consts + scan.num_carry
    return operands[: scan.num_consts], operands[scan.num_consts : border], operands[border:]


def _results_of(scan: jp.Scan) -> list[Any]:
    return jc.open_jaxpr(scan.body)[0].outvars


def _places(carry: Sequence[int], starts: Sequence[int]) -> list[int] | None:
    """Return, for each carried value of a scan, the first place in another with the same start that is still free."""
    places: list[int] = []
    for number in carry:
        free = [k for k, start in enumerate(starts) if start == number and k not in places]
        if not free:
            return None
        places.append(free[0])
    return places


def _changes_nothing(eqn: jc.JaxprEqn) -> bool:
    """Return whether the results are the operands: JAX puts such equations around what it recomputes."""
    if eqn.primitive.name == "reduce_precision":
        finfo: Any = jnp.finfo(eqn.invars[0].aval.dtype)  # type: ignore[attr-defined]
        return jp.reduced_precision(eqn) == (finfo.nexp, finfo.nmant)
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
        eqns.append((eqn.primitive, _params_key(jp.parameters(eqn)), *(read(atom) for atom in eqn.invars)))
        numbers.update({v: len(numbers) + k for k, v in enumerate(eqn.outvars)})
    inputs = tuple(str(v.aval) for v in jaxpr.invars)
    return (inputs, tuple(id(c) for c in consts), tuple(eqns), *(read(atom) for atom in jaxpr.outvars))


def _literal_key(atom: jc.Literal) -> tuple[Hashable, ...]:
    value = np.asarray(atom.val)
    return (value.dtype, value.shape, value.tobytes())


# The program on values


class _Evaluation:
    """One evaluation of the equations of a level; `known` holds values by number."""

    def __init__(self, level: _Level, known: dict[int, Any]) -> None:
        self.level = level
        self.known = known
        self.env: dict[jc.Var, Any] = {}

    def read(self, atom: Any) -> Any:
        """The value of a variable or literal."""
        if isinstance(atom, jc.Literal):
            return atom.val
        return self.env[atom] if atom in self.env else self.known[self.level.numbers[atom]]

    def run(self) -> None:
        """Evaluate every equation that nothing before it has computed."""
        for index, eqn in enumerate(self.level.eqns):
            numbers = [self.level.numbers[v] for v in eqn.outvars]
            if self.level.recomputes[index] and not eqn.effects and all(n in self.known for n in numbers):
                results = [self.known[n] for n in numbers]
            elif index in self.level.loops and self.level.loops[index].repeated:
                results = self._run_loop(eqn, self.level.loops[index])
            else:
                results = jc.bind_equation(eqn, [self.read(atom) for atom in eqn.invars])
            self.env.update(zip(eqn.outvars, results, strict=True))
            for number, value in zip(numbers, results, strict=True):
                self.known.setdefault(number, value)

    def _run_loop(self, eqn: jc.JaxprEqn, loop: _Loop) -> list[Any]:
        """Run a scan of the forward together with those that repeat it."""
        scan = jp.scan_of(eqn)

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            inside = dict(zip([*loop.carry, *loop.xs.values()], [*carry, *xs], strict=True))
            evaluation = _Evaluation(loop.body, self.known | inside)
            evaluation.run()
            outs = [evaluation.read(atom) for atom in _results_of(scan)[: scan.num_carry]]
            return outs, [evaluation.read(atom) for atom, _ in loop.ys.values()]

        starts = [self.read(atom) for atom in eqn.invars[scan.num_consts :][: scan.num_carry]]
        xs = [self.known[number] for number in loop.xs]
        with jc.under_scope_of(eqn):
            carry, stacked = lax.scan(body, starts, xs, length=scan.length, reverse=scan.reverse, unroll=scan.unroll)
        self.known.update(zip((outer for _, outer in loop.ys.values()), stacked, strict=True))
        ys = dict(zip(loop.ys, stacked, strict=True))
        return [*carry, *(ys[inner] for inner in loop.outs[scan.num_carry :])]
