"""The state of a value of the full-batch step in one microbatch: shared, a slice, a summand, or a statistic of its own.

    Invariant    the same for every microbatch
    Batched      the microbatch has a contiguous slice along `axis`
    Partial      the full value is the sum (max, min, and, or) of the microbatches' values
    Local        each microbatch has its own approximation of one value (statistics per microbatch)
    Whole        known at the full size only: it must have no part in what depends on the state

A state carries its provenance: where the value comes from. Equations are described in these terms: a
`Site` is an equation whose operands have batch axes, a `Verdict` is what a rule says of it, a
`MicrobatchStep` is what one microbatch does for it. An `AnalysisState` remembers across equations which reductions over
the batch met their examples again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import primitives
from autopar.errors import NotSplittable

SUM = "sum"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a value. Sets are bits of an int: a train step has tens of thousands of equations."""

    stateful: bool = False
    """True if it depends on an input that is neither of the batch nor a random key nor a small integer (a counter)."""
    round: int = 0
    """The number of accumulations over the microbatches that precede it."""
    rows: int = 0
    """The batched, stateful values from which it is computed without an accumulation between."""
    sums: int = 0
    """The batched, stateful values behind the accumulations from which it is computed."""
    origins: int = 0
    """The reductions over the batch behind `sums`."""
    repeated: int = 0
    """The equations that compute it again for every microbatch, because their other results vary."""

    def __or__(self, other: Provenance) -> Provenance:
        if other is self or other is NOTHING:
            return self
        return Provenance(
            stateful=self.stateful or other.stateful,
            round=max(self.round, other.round),
            rows=self.rows | other.rows,
            sums=self.sums | other.sums,
            origins=self.origins | other.origins,
            repeated=self.repeated | other.repeated,
        )


NOTHING = Provenance()


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """The same for every microbatch; `zero` where it is known to be all zeros."""

    provenance: Provenance = NOTHING
    zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Batched:
    """A contiguous slice of rows along `axis`."""

    axis: int
    provenance: Provenance = NOTHING
    gathered: bool = False
    """True if the rows of all microbatches are at hand, and each takes its own."""


@dataclass(frozen=True, kw_only=True)
class Partial:
    """A summand (`kind` sum), or what takes part in a maximum, minimum, conjunction or disjunction."""

    kind: str
    provenance: Provenance = NOTHING


@dataclass(frozen=True, kw_only=True)
class Local:
    """A statistic of the microbatch that stands for the one of the batch."""

    provenance: Provenance = NOTHING


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A value of the full batch that has no slice for a microbatch."""

    provenance: Provenance = NOTHING


State = Invariant | Batched | Partial | Local | Whole


def provenances(states: Iterable[State]) -> Provenance:
    """Return all that values in these states come from."""
    found = NOTHING
    for state in states:
        found = state.provenance if found is NOTHING else found | state.provenance
    return found


def completed(state: State) -> Invariant:
    """Return the state after accumulation over all microbatches: rows have become sums, one round later."""
    provenance = state.provenance
    sums = provenance.sums if isinstance(state, Local) else provenance.sums | provenance.rows
    return Invariant(provenance=replace(provenance, round=provenance.round + 1, rows=0, sums=sums, repeated=0))


def joined(a: State, b: State) -> State | None:
    """Return the state that holds for either value, as in a loop's carry; None if there is none."""
    provenance = a.provenance | b.provenance
    match a, b:
        case (Invariant(), Invariant()):
            return Invariant(provenance=provenance, zero=a.zero and b.zero)
        case (Batched(), Batched()) if a.axis == b.axis:
            return Batched(axis=a.axis, provenance=provenance)
        case (Partial(), Partial()):
            return Partial(kind=a.kind, provenance=provenance) if a.kind == b.kind else None
        case (Partial(), Invariant() | Local()) | (Invariant() | Local(), Partial()):
            kind = a.kind if isinstance(a, Partial) else b.kind if isinstance(b, Partial) else SUM
            return Partial(kind=kind, provenance=provenance)
        case (Local() | Invariant(), Local() | Invariant()):
            return Local(provenance=provenance)
        case _:
            return None


def use_as(state: State, wanted: State) -> str:
    """Return the use by which a value in `state` takes the place of one in `wanted`: see `MicrobatchStep.uses`."""
    match state, wanted:
        case (Invariant(zero=False), Partial(kind="sum")):
            return "first"
        case (Local(), Partial(kind="sum")):
            return "share"
        case _:
            return "keep"


# Equations before the rules, and what a rule says of them


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a value in a program."""
    return tuple(atom.aval.shape)


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The rows of the batch, and of the other one that the step was traced with."""

    full: int
    other: int

    def in_proportion(self, size: int, at_other_batch: int) -> bool:
        """Return whether a size grows as the batch does."""
        return size * self.other == at_other_batch * self.full


@dataclass(frozen=True, kw_only=True)
class Site:
    """An equation at the full and the other batch; the batch axis of each operand (None: it has none)."""

    eqn: jc.JaxprEqn
    at_other_batch: jc.JaxprEqn
    sizes: BatchSizes
    axes: tuple[int | None, ...]
    producers: Mapping[jc.Var, jc.JaxprEqn]
    constants: Mapping[jc.Var, Any]

    def shape(self, operand: int) -> tuple[int, ...]:
        return shape_of(self.eqn.invars[operand])


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows stay apart. `identity_column`: that column of the indices holds each row's own number."""

    identity_column: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReducedBatch:
    """The rows are reduced; the operands at `summands` take part in the reduction without being batched."""

    kind: str
    summands: tuple[int, ...] = ()


Verdict = Rows | ReducedBatch


def refuse(
    eqn: jc.JaxprEqn, problem: str, *, instead: str = "Apply it along another axis or outside of the train step"
) -> NoReturn:
    """Raise for an equation that mixes the examples of the batch; says what to do `instead`."""
    raise NotSplittable(
        f"{jc.describe(eqn)} {problem}. A microbatch has only its own examples, so every operation on the "
        f"batch must treat them independently or reduce over them. {instead}, or use num_microbatches=1."
    )


def describe_beside(eqn: jc.JaxprEqn, others: Iterable[jc.JaxprEqn]) -> str:
    """Return the descriptions of equations, without the user's line where it is that of `eqn`, which is named before.

    Equations that a package made on one line of the user's stand on different lines of the package.
    """
    _, _, place = jc.describe(eqn).partition(" at ")
    line, _, _ = place.partition(", by ")

    def beside(other: jc.JaxprEqn) -> str:
        described = jc.describe(other).removesuffix(f" at {place}").removesuffix(f" at {line}")
        return described.replace(f" at {line}, by ", ", by ")

    return "; ".join(dict.fromkeys(map(beside, others)))


# The result of the analysis: what one microbatch does for each equation

KEEP, COMPLETE, FIRST, SHARE = "keep", "complete", "first", "share"
"""The uses of an operand: as it is; accumulated over the microbatches; by the first microbatch only (the
others use zero); divided by the number of microbatches."""

SPLIT, SOURCE, DRAW, WHOLE, NESTED = "split", "source", "draw", "whole", "nested"
"""The modes of an equation's evaluation: at the microbatch's shape; at the full shape, then sliced; random bits at the
microbatch's shape; on the whole batch, before the microbatches; with its bodies rewritten."""

CALLS = ("jit", "pjit", "closed_call", "eval_jaxpr")
"""Equations with bodies, beside `cond`. Calls are left only where constants keep them from being inlined."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchStep:
    """The work of one microbatch for an equation."""

    eqn: jc.JaxprEqn
    at_other_batch: jc.JaxprEqn
    mode: str
    uses: tuple[str, ...]
    operands: tuple[State, ...]
    results: tuple[State, ...]
    local: bool = False
    """True if a sum over the microbatch, times the number of microbatches, stands for the one over the batch."""
    identity_column: int | None = None
    """The column of a gather's or scatter's indices that counts the rows of the batch."""
    bodies: tuple[MicrobatchBlock, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MicrobatchBlock:
    """A program or the body of an equation."""

    jaxpr: jc.Jaxpr
    consts: tuple[Any, ...]
    steps: tuple[MicrobatchStep, ...]
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    needed_whole: frozenset[jc.Var]
    """Values that are wanted of the whole batch, before the microbatches."""
    constants: Mapping[jc.Var, State] = field(default_factory=dict[jc.Var, State])
    output_uses: tuple[str, ...] = ()


def needed_whole(steps: tuple[MicrobatchStep, ...], states: Mapping[jc.Var, State], top: bool) -> frozenset[jc.Var]:
    """Return what the steps on the whole batch read. At the top, shared values are at hand and left out."""
    needed: set[jc.Var] = set()

    def want(atom: Any) -> None:
        if isinstance(atom, jc.Var) and not (top and isinstance(states[atom], Invariant)):
            needed.add(atom)

    for step in reversed(steps):
        if step.mode == WHOLE or any(v in needed for v in step.eqn.outvars):
            for atom in step.eqn.invars:
                want(atom)
        for body, offset in straight_bodies(step):
            for position, var in enumerate(body.jaxpr.invars):
                if var in body.needed_whole:
                    want(step.eqn.invars[offset + position])
    return frozenset(needed)


def straight_bodies(step: MicrobatchStep) -> list[tuple[MicrobatchBlock, int]]:
    """Bodies that run once, so that what they need whole is computed outside; the operands before theirs."""
    if step.mode != NESTED or step.eqn.primitive.name in primitives.LOOPS:
        return []
    return [(body, 1 if step.eqn.primitive.name == "cond" else 0) for body in step.bodies]


# What an analysis remembers across equations

EquationPlace = tuple[object, ...]
"""The place of an equation: its number, behind the numbers and roles of the equations around it."""


@dataclass(frozen=True, kw_only=True)
class BatchReduction:
    """A reduction over the batch: its equation, and the batched values it was computed from."""

    place: EquationPlace
    eqn: jc.JaxprEqn
    rows: int


class Unfinished(NotSplittable):
    """A sum over the batch is needed inside a loop or rematerialised region that began outside of it."""


@dataclass(kw_only=True)
class AnalysisState:
    """One analysis: its options, and what it learns on the way."""

    num_microbatches: int
    sizes: BatchSizes
    exact: bool
    draw_per_microbatch: bool
    local: frozenset[EquationPlace] = frozenset()
    """Reductions to be taken within each microbatch."""
    crossing: set[EquationPlace] = field(default_factory=set[EquationPlace])
    """Reductions whose results met their own examples again."""
    apart: frozenset[EquationPlace] = frozenset()
    """Equations to take apart, because a result that is the same for every microbatch is wanted once."""
    repeating: dict[int, EquationPlace] = field(default_factory=dict[int, EquationPlace])
    bits: dict[EquationPlace, int] = field(default_factory=dict[EquationPlace, int])
    reductions: dict[int, BatchReduction] = field(default_factory=dict[int, BatchReduction])

    def bit(self, place: EquationPlace) -> int:
        """The bit that stands for an equation in a provenance."""
        return self.bits.setdefault(place, 1 << len(self.bits))

    def reduction(self, place: EquationPlace, eqn: jc.JaxprEqn, provenance: Provenance) -> int:
        """Register a reduction; its bit in the `origins` of a provenance."""
        bit = self.bit((*place, "reduction"))
        self.reductions[bit] = BatchReduction(place=place, eqn=eqn, rows=provenance.rows)
        return bit

    def repeats(self, place: EquationPlace) -> int:
        """Register an equation that computes a shared value for every microbatch; its bit."""
        bit = self.bit((*place, "repeats"))
        self.repeating[bit] = place
        return bit

    def origins(self, provenance: Provenance) -> list[BatchReduction]:
        """The reductions behind a value, by order of appearance."""
        return [r for bit, r in self.reductions.items() if provenance.origins & bit]

    def note_crossing(self, states: list[State]) -> None:
        """Note the sums over the batch that are combined with examples they were computed from.

        Exact ones wait for all microbatches: what reads them is of the next round.
        """
        if self.exact:
            return
        for i, one in enumerate(states):
            for j, other in enumerate(states):
                if i != j and one.provenance.sums & other.provenance.rows:
                    rows = other.provenance.rows
                    self.crossing.update(r.place for r in self.origins(one.provenance) if r.rows & rows)
