"""Find the dimensions of a step's values that are one: split one of them, and all are split.

An equation's sharding rule names the dimensions of its operands and results; dimensions of one name are joined, from
equation to equation and into the bodies of loops, branches and regions. `x @ w` joins the columns of x with the rows of
w, `+` joins all dimensions of two arrays, a reshape joins what a dimension is made of. What is left are the step's own
dimensions: examples, positions, features, layers. Sizes play no part: two dimensions of 8 are two, unless they meet.

Where a dimension ends, the ends are noted:

    Reduction    x @ w reduces the features of x, and keeps its rows
    feeds        y = concatenate([x, x]): what becomes of the rows of y becomes of the rows of x
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.identity_indices import are_identity_indices
from autopar.compiler.jaxprs.linearity import carried_sums
from autopar.compiler.jaxprs.primitives import (
    ARGUMENT_REDUCTIONS,
    CUMULATIVE,
    KEYS,
    NESTED,
    PRODUCTS,
    REDUCTIONS,
    SCATTERS,
    SORTS,
    WINDOWS,
    names,
)
from autopar.compiler.sharding.rule import JoinedFactors, Rule, shapes_of
from autopar.compiler.sharding.rule_lookup import rules_without_warning

Dimension = tuple[int, ...]
"""The factors of one dimension, major to minor: equal for dimensions that are one. Empty for a size of 1."""

_ALONG = CUMULATIVE | SORTS | WINDOWS | names("concatenate dynamic_slice dynamic_update_slice pad rev slice split tile")
"""They work along some dimensions, whose results stand at the same places as what they are made of."""
_DRAWN = KEYS | {"random_bits"}
"""Keys, and what is drawn: the dimensions of an array of keys come first."""
_LOSES = REDUCTIONS | ARGUMENT_REDUCTIONS | PRODUCTS | SCATTERS | {"reduce"}
"""A dimension that only their operands have is reduced, in whatever way."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Dimensions that an equation (or a loop, from round to round) reduces, and those that its results keep."""

    reduced: frozenset[int]
    kept: frozenset[int]
    kind: str
    """`"reduce"`, `"index"` for places that a gather or scatter names, or `"slice"` for single places by number."""
    backward: bool
    """True if it belongs to the backward pass of a gradient."""


@dataclass(frozen=True, kw_only=True)
class StepDimensions:
    """The dimensions of a step's inputs and outputs, by factors that are numbers."""

    inputs: tuple[tuple[Dimension, ...], ...]
    outputs: tuple[tuple[Dimension, ...], ...]
    reductions: tuple[Reduction, ...]
    differentiated: frozenset[int]
    """The factors of values that a gradient meets."""
    rounds: frozenset[int]
    """The factors that a loop goes along in order, with what it carries from one round to the next."""
    in_turn: frozenset[int]
    """Those of them whose rounds wait for each other: some loop hands on more than sums."""


def find_dimensions(closed: jc.ClosedJaxpr) -> StepDimensions:
    """Return the dimensions of a normalised step's inputs and outputs, and what becomes of them."""
    eqns = list(_leaf_equations(closed))
    rules = dict(zip(map(id, eqns), rules_without_warning(eqns), strict=True))
    walk = _Walk(rules=rules)
    jaxpr, _ = jc.open_jaxpr(closed)
    inputs = [walk.joined.of_shape(shape) for shape in shapes_of(jaxpr.invars)]
    outputs = walk.through(closed, inputs, phase=None)
    return walk.found(inputs, outputs)


@dataclass(frozen=True, kw_only=True)
class Product:
    """The factors of a product: those of each operand alone, and those that both have."""

    primitive: str
    own: tuple[frozenset[int], frozenset[int]]
    batch: frozenset[int]
    """The dimensions of both operands that its result keeps."""
    contracted: frozenset[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueDimensions:
    """The dimensions of all values of some programs, by factors that are numbers."""

    named: Mapping[str, tuple[Dimension, ...]]
    """The dimensions of the values that go from program to program."""
    variables: Mapping[jc.Var, tuple[tuple[Dimension, ...], ...]]
    """The dimensions of every variable, once for every time that its program is entered."""
    sizes: Mapping[int, int]
    products: tuple[Product, ...]
    followed: tuple[tuple[Dimension, Dimension], ...]
    """Pairs of dimensions of which one is a part of the other: y = x[1:]."""


def find_value_dimensions(
    programs: Iterable[tuple[jc.ClosedJaxpr, Sequence[str], Sequence[str]]],
    *,
    joined: Iterable[tuple[str, str]] = (),
    parts: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> ValueDimensions:
    """Return the dimensions of the values of programs, each with the names of its inputs and outputs.

    Values of one name are one, and those of a pair in `joined` have the same dimensions. `parts` are the sizes of the
    factors that dimensions of named values are known to be made of.
    """
    programs = list(programs)
    eqns = [eqn for closed, _, _ in programs for eqn in _leaf_equations(closed)]
    walk = _Walk(rules=dict(zip(map(id, eqns), rules_without_warning(eqns), strict=True)))
    named: dict[str, _Value] = {}

    def value(name: str, shape: Sequence[int]) -> _Value:
        if name not in named:
            named[name] = [
                [walk.joined.new(n) for n in sizes] for sizes in (parts or {}).get(name, [[n] for n in shape])
            ]
        return named[name]

    for closed, inputs, outputs in programs:
        shapes = shapes_of(jc.open_jaxpr(closed)[0].invars)
        read = [value(name, shape) for name, shape in zip(inputs, shapes, strict=True)]
        made = walk.through(closed, read, phase=None)
        for name, result, shape in zip(outputs, made, shapes_of(jc.open_jaxpr(closed)[0].outvars), strict=True):
            walk.join_all([value(name, shape)], [result])
    for one, other in joined:
        if one in named and other in named:
            walk.join_all([named[one]], [named[other]])
    return walk.values_of(named)


def _leaf_equations(jaxpr: Any) -> Iterable[jc.JaxprEqn]:
    """The equations at all depths, without those whose bodies are entered."""
    for eqn in jc.open_jaxpr(jaxpr)[0].eqns:
        if _is_entered(eqn):
            for body in jc.subjaxprs(eqn):
                yield from _leaf_equations(body)
        else:
            yield eqn


def _is_entered(eqn: jc.JaxprEqn) -> bool:
    return eqn.primitive.name in NESTED or jp.called_function(eqn) is not None


_Value = list[list[int]]
"""Factors of every dimension of a value, as they were when it was met."""


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """A `Reduction` whose factors may still be joined with others."""

    reduced: list[int]
    kept: _Value
    kind: str
    backward: bool


@dataclass(kw_only=True)
class _Walk:
    rules: dict[int, Rule]
    joined: JoinedFactors = field(default_factory=JoinedFactors)
    endings: list[_Ending] = field(default_factory=list[_Ending])
    feeds: list[tuple[list[int], list[int]]] = field(default_factory=list[tuple[list[int], list[int]]])
    differentiated: _Value = field(default_factory=list[list[int]])
    rounds: list[tuple[list[int], bool]] = field(default_factory=list[tuple[list[int], bool]])
    producers: dict[jc.Var, jc.JaxprEqn] = field(default_factory=dict[jc.Var, jc.JaxprEqn])
    constants: dict[jc.Var, Any] = field(default_factory=dict[jc.Var, Any])
    variables: dict[jc.Var, list[_Value]] = field(default_factory=dict[jc.Var, list[_Value]])
    products: list[tuple[str, list[list[int]]]] = field(default_factory=list[tuple[str, list[list[int]]]])
    followed: list[tuple[list[int], list[int]]] = field(default_factory=list[tuple[list[int], list[int]]])

    def through(
        self, closed: Any, inputs: Sequence[_Value], phase: str | None, atoms: Sequence[Any] = ()
    ) -> list[_Value]:
        """Walk through a program whose inputs are known. Return its results.

        `phase` is that of the equation around it, and `atoms` are what its first inputs are given.
        """
        jaxpr, consts = jc.open_jaxpr(closed)
        self.constants.update(zip(jaxpr.constvars, consts))
        for var, atom in zip(jaxpr.invars, atoms):
            for known in (self.producers, self.constants):
                if isinstance(atom, jc.Var) and atom in known:
                    known[var] = known[atom]
        values: dict[jc.Var, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            known = values.get(atom) if isinstance(atom, jc.Var) else None
            if known is None:  # a literal or a constant
                known = self.joined.of_shape(shapes_of([atom])[0])
                if isinstance(atom, jc.Var):
                    values[atom] = known
            return known

        for eqn in jaxpr.eqns:
            inside, operands = phase or jc.ad_phase(eqn), [read(a) for a in eqn.invars]
            results = self._equation(eqn, operands, inside)
            values.update(zip(eqn.outvars, results, strict=True))
            self.producers.update(dict.fromkeys(eqn.outvars, eqn))
            if inside is not None:
                self.differentiated += (factors for value in (*operands, *results) for factors in value)
        for var, known in values.items():
            self.variables.setdefault(var, []).append(known)
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: jc.JaxprEqn, operands: list[_Value], phase: str | None) -> list[_Value]:
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, operands, phase)
            case "while":
                loop = jp.while_of(eqn)
                carry = operands[loop.first_carry :]
                self.through(loop.cond, [*operands[: loop.cond_consts], *carry], phase)
                after = self.through(loop.body, [*operands[loop.cond_consts : loop.first_carry], *carry], phase)
                self.join_all(carry, after)
                return carry
            case "cond":
                branches = jp.branches_of(eqn)
                first, *others = (self.through(body, operands[1:], phase, eqn.invars[1:]) for body in branches)
                for results in others:
                    self.join_all(first, results)
                return first
            case _ if _is_entered(eqn):
                body = jp.called_function(eqn) or next(jc.subjaxprs(eqn))
                return self.through(body, operands, phase, eqn.invars)
            case _:
                return self._by_rule(eqn, operands, phase)

    def _scan(self, eqn: jc.JaxprEqn, operands: list[_Value], phase: str | None) -> list[_Value]:
        """A loop: the dimension that is scanned over is one of all that is scanned, and reduced by the carry."""
        loop = jp.scan_of(eqn)
        consts, carry = operands[: loop.num_consts], operands[loop.num_consts : loop.first_x]
        scanned = operands[loop.first_x :]
        rounds = scanned[0][0] if scanned else [self.joined.new(loop.length)]
        for value in scanned[1:]:
            self.joined.join(rounds, value[0])
        inputs = [*consts, *carry, *(value[1:] for value in scanned)]
        after = self.through(loop.body, inputs, phase, eqn.invars[: loop.num_consts])
        self.join_all(carry, after[: loop.num_carry])
        self._ends(rounds, [factors for value in carry for factors in value], phase)
        if carry and phase != "backward":  # there, gradients of what every round read are summed up
            self.rounds.append((rounds, all(carried_sums(loop))))
        return [*carry, *([rounds, *value] for value in after[loop.num_carry :])]

    def _by_rule(self, eqn: jc.JaxprEqn, operands: list[_Value], phase: str | None) -> list[_Value]:
        rule, name = self.rules[id(eqn)], eqn.primitive.name
        numbers = [self.joined.new(size) for size in rule.sizes]

        def own(dims: Any) -> _Value:
            return [[numbers[f] for f in factors] for factors in dims]

        for value, dims in zip(operands, rule.operands, strict=True):
            self._join(value, own(dims))
        results = [own(dims) for dims in rule.results]
        if name in PRODUCTS and len(operands) == 2:
            self._multiplied(name, [own(dims) for dims in rule.operands], results[0])
        if name in _DRAWN:
            for operand in operands:
                self._join(operand[: _rank_of_keys(eqn)], results[0])
        elif name in _ALONG:
            self._follow(operands if name == "concatenate" else operands[:1], results)
            if name == "slice":
                for factors, size in zip(operands[0], shapes_of(eqn.outvars)[0], strict=True):
                    self._ends(factors if size == 1 else [], results[0], phase, "slice")
        elif name == "gather" or name in SCATTERS:
            self._indexed(eqn, operands, phase)
        elif rule.source == "none":
            self._join_leading([*operands, *results])
        kept = {f for dims in rule.results for factors in dims for f in factors}
        lost = {f for dims in rule.operands for factors in dims for f in factors} - kept
        ended = lost if name in _LOSES else rule.reductions.keys() if name != "gather" else ()
        self._ends([numbers[f] for f in ended], [[numbers[f]] for f in kept], phase)
        return results

    def _multiplied(self, name: str, operands: list[_Value], result: _Value) -> None:
        """Note the factors of a product before they are joined with others: afterwards two of them may be one."""
        left, right, kept = ({f for factors in value for f in factors} for value in (*operands, result))
        parts = (left - right, right - left, left & right & kept, (left & right) - kept)
        self.products.append((name, [sorted(part) for part in parts]))

    def _indexed(self, eqn: jc.JaxprEqn, operands: list[_Value], phase: str | None) -> None:
        """Places of an array that are named by indices. They are those of the indices themselves in `x[arange(n)]`."""
        array, indices = operands[:2]
        for column, place in enumerate(jp.indexed_dimensions(eqn)):
            own = next((k for k in range(len(indices) - 1) if self._counts(eqn, array[place], k, column)), None)
            if own is not None:
                self.joined.join(array[place], indices[own])
                continue
            self._ends(array[place], indices[:-1], phase, "index")
            self.feeds += ((array[place], factors) for factors in indices[:-1])

    def _counts(self, eqn: jc.JaxprEqn, place: list[int], axis: int, column: int) -> bool:
        atom = eqn.invars[1]
        rows = shapes_of([atom])[0][axis]
        return self.joined.size(place) == rows and are_identity_indices(
            atom, axis, column, self.producers, self.constants
        )

    def _join(self, mine: _Value, theirs: _Value) -> None:
        for a, b in zip(mine, theirs):
            self.joined.join(a, b)

    def join_all(self, mine: Sequence[_Value], theirs: Sequence[_Value]) -> None:
        """Make the dimensions of values those of others."""
        for a, b in zip(mine, theirs, strict=True):
            self._join(a, b)

    def _follow(self, operands: Sequence[_Value], results: Sequence[_Value]) -> None:
        """Dimensions at the same place of operands and results: one if they are of one size."""
        pairs = ((a, b) for operand in operands for result in results for a, b in zip(operand, result))
        for a, b in pairs:
            if self.joined.size(a) == self.joined.size(b):
                self.joined.join(a, b)
            else:
                self.feeds.append((a, b))
                self.followed.append((a, b))

    def _join_leading(self, values: Sequence[_Value]) -> None:
        """Take first dimensions of one size to be one, for an equation that nobody has a rule for."""
        first: dict[int, list[int]] = {}
        for factors in (value[0] for value in values if value):
            self.joined.join(first.setdefault(self.joined.size(factors), factors), factors)

    def _ends(self, reduced: list[int], kept: _Value, phase: str | None, kind: str = "reduce") -> None:
        if reduced:
            self.endings.append(_Ending(reduced=reduced, kept=kept, kind=kind, backward=phase == "backward"))

    def found(self, inputs: Sequence[_Value], outputs: Sequence[_Value]) -> StepDimensions:
        """Return what the factors have become by now."""

        def dims(value: _Value) -> tuple[Dimension, ...]:
            return tuple(tuple(self.joined.resolved(factors)) for factors in value)

        def sources(pairs: Iterable[tuple[list[int], list[int]]]) -> dict[int, set[int]]:
            of: dict[int, set[int]] = {}
            for source, target in pairs:
                for f in self.joined.resolved(target):
                    of.setdefault(f, set()).update(self.joined.resolved(source))
            return of

        fed, followed = sources(self.feeds), sources(self.followed)

        def reduction(ending: _Ending) -> Reduction:
            reduced = _with_sources(self.joined.resolved(ending.reduced), fed)
            kept = [f for each in ending.kept for f in self.joined.resolved(each)]
            # Of pairs of joined rows one is reduced and the other kept: that says nothing of what they are made of.
            behind = _with_sources(kept, followed) - reduced
            return Reduction(reduced=reduced, kept=behind.union(kept), kind=ending.kind, backward=ending.backward)

        reductions = map(reduction, self.endings)
        return StepDimensions(
            inputs=tuple(map(dims, inputs)),
            outputs=tuple(map(dims, outputs)),
            reductions=tuple(dict.fromkeys(reductions)),
            differentiated=_with_sources(
                [f for factors in self.differentiated for f in self.joined.resolved(factors)], fed
            ),
            rounds=frozenset(f for factors, _ in self.rounds for f in self.joined.resolved(factors)),
            in_turn=frozenset(f for factors, sums in self.rounds if not sums for f in self.joined.resolved(factors)),
        )

    def values_of(self, named: Mapping[str, _Value]) -> ValueDimensions:
        """Return what the factors of all values have become by now."""

        def dims(value: _Value) -> tuple[Dimension, ...]:
            return tuple(tuple(self.joined.resolved(factors)) for factors in value)

        by_variable = {v: tuple(dict.fromkeys(map(dims, each))) for v, each in self.variables.items()}
        by_name = {name: dims(value) for name, value in named.items()}
        every = {f for each in by_variable.values() for value in each for factors in value for f in factors}
        every.update(f for value in by_name.values() for factors in value for f in factors)
        return ValueDimensions(
            named=by_name,
            variables=by_variable,
            sizes={f: self.joined.size([f]) for f in sorted(every)},
            products=tuple(
                dict.fromkeys(
                    Product(primitive=name, own=(left, right), batch=batch, contracted=contracted)
                    for name, each in self.products
                    for left, right, batch, contracted in [[frozenset(self.joined.resolved(part)) for part in each]]
                )
            ),
            followed=tuple((tuple(self.joined.resolved(a)), tuple(self.joined.resolved(b))) for a, b in self.followed),
        )


def _rank_of_keys(eqn: jc.JaxprEqn) -> int:
    """The number of dimensions of an array of keys, that an equation reads or makes."""
    keys = [v for v in (*eqn.invars, *eqn.outvars) if _is_key(v.aval)]
    return len(shapes_of(keys)[0]) if keys else 0


def _is_key(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _with_sources(factors: Sequence[int], fed: dict[int, set[int]]) -> frozenset[int]:
    """These factors, and those that they are made of."""
    found, waiting = set(factors), list(factors)
    while waiting:
        new = fed.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return frozenset(found)
