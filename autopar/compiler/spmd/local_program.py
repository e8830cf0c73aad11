"""Write down what every device does: reshard this, evaluate that on parts, run this body.

    jaxpr, BlockPlan, mesh  ->  LocalBlock

All that the plan left implicit is spelled out here, once: where a value is reduced or gathered, which readers share
the result, in which layout a loop's body finds its operands. The traced program, the list of its collectives and its
memory are all read off this, so they cannot differ.

What every device may compute for itself (a mask, positions) is computed in the parts that its readers want: the whole
of a mask over the batch would be as large as on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.primitives import ELEMENTWISE, NESTED, REARRANGEMENTS, REMAT
from autopar.compiler.resharding.costs import reshard_steps
from autopar.compiler.resharding.steps import ReduceScatter, ReshardStep
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards, replicated
from autopar.compiler.sharding.rule_lookup import rules_without_warning
from autopar.compiler.sharding.strategies import Strategy, strategies
from autopar.compiler.spmd.block_plan import BlockPlan, EquationPlan, strategy_of, value_numbers
from autopar.compiler.spmd.combining import CombinedValues, combined_in_body, combined_values
from autopar.compiler.spmd.dependencies import by_place
from autopar.compiler.spmd.phase import phase_of

_SUMMED_AT_ONCE_BYTES = 256 * 2.0**20
"""The bytes of summands for whose sums nothing waits: so many that the latency of a collective does not count."""


@dataclass(frozen=True, eq=False)
class ShardedConstant:
    """A constant that devices hold in different layouts, for one reader."""

    literal: jc.Literal

    @property
    def aval(self) -> Any:
        """Its shape and dtype."""
        return self.literal.aval


class Value(NamedTuple):
    """A variable of the jaxpr in some layout."""

    variable: Any
    layout: Layout
    form: str = ""
    """Empty as it is made; "stored", a phase, or that phase's readers, if it was resharded for these."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reshard:
    """Bring a value, or a constant, into another layout; not before `after` is there."""

    operand: Value | jc.Literal
    result: Value
    steps: tuple[ReshardStep, ...]
    after: tuple[Value, ...] = ()

    @property
    def aval(self) -> Any:
        """The type of the whole array."""
        return self.operand.aval if isinstance(self.operand, jc.Literal) else self.operand.variable.aval

    @property
    def source(self) -> Layout:
        """The layout of the operand."""
        return replicated(self.aval.ndim) if isinstance(self.operand, jc.Literal) else self.operand.layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluate:
    """Evaluate an equation on parts."""

    eqn: jc.JaxprEqn
    operands: tuple[Value | jc.Literal, ...]
    results: tuple[Value, ...]
    strategy: Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class RunBody:
    """Run the bodies of a loop, a branch or a remat region; not before `after` is there."""

    eqn: jc.JaxprEqn
    operands: tuple[Value | jc.Literal, ...]
    results: tuple[Value, ...]
    bodies: tuple[LocalBlock, ...]
    after: tuple[Value, ...] = ()


Action = Reshard | Evaluate | RunBody


def awaited(action: Action) -> tuple[Value, ...]:
    """Return what an action waits for beside its operands."""
    return () if isinstance(action, Evaluate) else action.after


def value_bytes(value: Value, mesh: LogicalMesh) -> float:
    """Return the bytes of a value on one device."""
    aval: Any = value.variable.aval
    return aval_bytes(aval) / num_shards(aval.shape, value.layout, mesh)


def action_values(action: Action) -> tuple[tuple[Value, ...], list[Value]]:
    """Return what an action makes, and what it reads of what others made."""
    if isinstance(action, Reshard):
        results, operands = (action.result,), (action.operand,)
    else:
        results, operands = action.results, action.operands
    return results, [each for each in operands if isinstance(each, Value)]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LocalBlock:
    """The actions of one jaxpr, in order; without a long `repr`, since each value of a program names its block."""

    jaxpr: jc.Jaxpr
    inputs: tuple[Value, ...]
    actions: tuple[Action, ...]
    outputs: tuple[Value | jc.Literal, ...]
    combined: CombinedValues


def local_block(
    jaxpr: jc.Jaxpr,
    plan: BlockPlan,
    mesh: LogicalMesh,
    *,
    phase: str | None = None,
    combined: CombinedValues | None = None,
    every_form: bool = False,
) -> LocalBlock:
    """Spell out a plan. `phase` is that of all equations, "body" in a body, where the scopes are not to tell.

    `combined` are its values whose collectives are combined, by default those of a whole step. With `every_form` also
    what this plan need not reshard stands there, as a resharding without steps: each planned form, and each layout that
    a reader wants. Another plan of the same problem may have to make a copy there.
    """
    combined = combined_values(jaxpr, phase) if combined is None else combined
    writer = _Writer(
        jaxpr=jaxpr,
        plan=plan,
        mesh=mesh,
        phase=phase,
        numbers=value_numbers(jaxpr),
        combined=combined,
        every_form=every_form,
    )
    inputs = [
        writer.define(v, _or_replicated(layout, v)) for v, layout in zip(jaxpr.invars, plan.arguments, strict=True)
    ]
    for v in jaxpr.constvars:
        writer.define(v, _or_replicated(None, v))
    for eqn, equation in zip(jaxpr.eqns, plan.equations, strict=True):
        writer.write(eqn, equation)
    outputs = [
        writer.read(atom, _or_replicated(layout, atom), phase or "update")
        for atom, layout in zip(jaxpr.outvars, plan.results, strict=True)
    ]
    actions = _without_unread(writer.actions, outputs, writer.free)
    return LocalBlock(
        jaxpr=jaxpr,
        inputs=tuple(inputs),
        actions=_behind_sums(actions, mesh) if plan.waits_for_sums else actions,
        outputs=tuple(outputs),
        combined=combined,
    )


@dataclass(kw_only=True, eq=False)
class _Writer:
    jaxpr: jc.Jaxpr
    plan: BlockPlan
    mesh: LogicalMesh
    phase: str | None
    numbers: dict[jc.Var, int]
    combined: CombinedValues
    every_form: bool
    produced: dict[Any, Value] = field(default_factory=dict[Any, Value])
    free: dict[Any, jc.JaxprEqn] = field(default_factory=dict[Any, jc.JaxprEqn])
    """The equation of each value that every device may evaluate for itself."""
    forms: dict[Value, Value] = field(default_factory=dict[Value, Value])
    actions: list[Action] = field(default_factory=list[Action])
    gathered: set[tuple[Value, Layout]] = field(default_factory=set[tuple[Value, Layout]])

    def define(self, v: Any, layout: Layout) -> Value:
        self.produced[v] = Value(v, layout)
        return self.produced[v]

    def write(self, eqn: jc.JaxprEqn, plan: EquationPlan | None) -> None:
        phase = "body" if self.phase == "body" else phase_of(eqn, self.phase)
        if plan is None:
            plan = _everywhere(eqn)
            self.free.update(dict.fromkeys(eqn.outvars, eqn) if not eqn.effects else {})
        operands = self._operands(eqn, plan, phase)
        results = tuple(
            self.define(v, _or_replicated(layout, v)) for v, layout in zip(eqn.outvars, plan.results, strict=True)
        )
        if plan.bodies:
            programs = [jc.open_jaxpr(body)[0] for body in jp.bodies_of(eqn)]
            bodies = [
                local_block(
                    body,
                    each,
                    self.mesh,
                    phase="body",
                    combined=combined_in_body(body, eqn, self.combined),
                    every_form=self.every_form,
                )
                for body, each in zip(programs, plan.bodies, strict=True)
            ]
            self.actions.append(RunBody(eqn=eqn, operands=operands, results=results, bodies=tuple(bodies)))
        else:
            strategy = strategy_of(eqn, plan, self.mesh)
            self.actions.append(Evaluate(eqn=eqn, operands=operands, results=results, strategy=strategy))

    def read(self, atom: Any, layout: Layout, phase: str, latest: Value | None = None) -> Value | jc.Literal:
        """The value in the layout that a reader of this phase wants, by way of the planned forms."""
        if isinstance(atom, jc.Literal):
            return atom if not layout.partial else self._reshard(atom, Value(ShardedConstant(atom), layout))
        value = self.produced[atom]
        number = self.numbers.get(atom)
        every_form = self.every_form and atom not in self.free
        for form in ("stored", phase):
            if value.layout == layout and not (every_form and form == "stored"):
                continue
            planned = None if number is None else self.plan.forms.get((number, form))
            if planned is not None:
                value = self._form(value, Value(atom, planned, form), latest)
        if every_form:
            return self._form(value, Value(atom, layout, f"{phase} reader"), latest)
        return value if value.layout == layout else self._form(value, Value(atom, layout, phase), latest)

    def _form(self, origin: Value, wanted: Value, latest: Value | None) -> Value:
        agrees = wanted.layout == origin.layout
        if wanted.layout == self.produced[wanted.variable].layout and not (self.every_form and agrees):
            return self.produced[wanted.variable]
        if wanted not in self.forms:
            self.forms[wanted] = wanted
            if not agrees and self._evaluate_part(wanted):
                return wanted
            made = self.produced[wanted.variable]
            source = made if made.layout == origin.layout else origin  # which a form in the same layout is
            again = (source, wanted.layout) in self.gathered
            self.gathered.add((source, wanted.layout))
            self._reshard(origin, wanted, (latest,) if again and latest else ())
        return self.forms[wanted]

    def _evaluate_part(self, wanted: Value) -> bool:
        """Evaluate the wanted part of what is free; return false if it is not, or if its equation has no such part."""
        eqn = self.free.get(wanted.variable)
        if eqn is None or eqn.primitive.name in NESTED or len(eqn.outvars) > 1:
            return False
        (rule,) = rules_without_warning([eqn])
        # A summand of a constant is the constant of a summand: no device fills an array to mask it.
        every = strategies(eqn, rule, self.mesh, maybe_partial=frozenset(range(len(eqn.invars))))
        strategy = next((s for s in every if s.results == (wanted.layout,) and not s.combined), None)
        if strategy is None:
            return False
        operands = tuple(
            self.read(atom, layout, wanted.form) for atom, layout in zip(eqn.invars, strategy.operands, strict=True)
        )
        self.actions.append(Evaluate(eqn=eqn, operands=operands, results=(wanted,), strategy=strategy))
        return True

    def _reshard(self, operand: Value | jc.Literal, result: Value, after: tuple[Value, ...] = ()) -> Value:
        aval: Any = operand.aval if isinstance(operand, jc.Literal) else operand.variable.aval
        source = replicated(aval.ndim) if isinstance(operand, jc.Literal) else operand.layout
        steps = reshard_steps(source, result.layout, tuple(aval.shape), self.mesh)
        self.actions.append(Reshard(operand=operand, result=result, steps=steps, after=after))
        return result

    def _operands(self, eqn: jc.JaxprEqn, plan: EquationPlan, phase: str) -> tuple[Value | jc.Literal, ...]:
        """Return the operands of an equation. One that is gathered again waits for the operand that was made last."""
        made = [self.numbers.get(atom, -1) if isinstance(atom, jc.Var) else -1 for atom in eqn.invars]
        operands: dict[int, Value | jc.Literal] = {}
        latest: Value | None = None
        for place in sorted(range(len(made)), key=lambda place: -made[place]):
            atom = eqn.invars[place]
            first = self.produced[atom] if made[place] >= 0 else None
            read = self.read(atom, _or_replicated(plan.operands[place], atom), phase, latest or first)
            operands[place] = read
            latest = latest or (read if isinstance(read, Value) else None)
        return tuple(operands[place] for place in range(len(made)))


def _without_unread(
    actions: Sequence[Action], outputs: Sequence[Value | jc.Literal], free: Mapping[Any, jc.JaxprEqn]
) -> tuple[Action, ...]:
    """Return the actions without the evaluations of free values, in whatever layout, that nothing reads."""
    read = {v for v in outputs if isinstance(v, Value)}
    kept: list[Action] = []
    for action in reversed(actions):
        results, operands = action_values(action)
        is_read = (
            isinstance(action, Reshard) or not results or any(v.variable not in free or v in read for v in results)
        )
        if is_read:
            kept.append(action)
            read.update(operands, awaited(action))
    return tuple(reversed(kept))


def _behind_sums(actions: Sequence[Action], mesh: LogicalMesh) -> tuple[Action, ...]:
    """Return the actions with regions that are not computed again before earlier sums are there, but for the last few.

    Those of the region before it may go on beside a region, and those of few bytes. Summands of sums of which devices
    take parts are kept until all is summed: many of them where a compiler begins sums late, or ends them late.
    """
    sums = {number: found for number, action in enumerate(actions) if (found := _scattered_sums(action, mesh))}
    regions = [number for number, action in enumerate(actions) if _is_region(action)]
    if not regions or sum(nbytes for found in sums.values() for _, nbytes in found) <= _SUMMED_AT_ONCE_BYTES:
        return tuple(actions)
    times, turned = _times_made(actions), list(actions)
    pending: list[tuple[Value, float]] = []
    older = 0  # how many of them there were at the region before
    for number in sorted({*sums, *regions}, key=lambda number: (times[number], number)):
        action = turned[number]
        if isinstance(action, RunBody):
            after = list[Value]()
            while older and sum(nbytes for _, nbytes in pending[1:]) >= _SUMMED_AT_ONCE_BYTES:
                after.append(pending.pop(0)[0])
                older -= 1
            older = len(pending)
            turned[number] = replace(action, after=tuple(after))
        pending += sums.get(number, [])
    makers = {value: number for number, action in enumerate(turned) for value in action_values(action)[0]}
    needs = [{makers[v] for v in (*action_values(action)[1], *awaited(action)) if v in makers} for action in turned]
    return tuple(turned[number] for number in by_place(needs, range(len(turned))))


def _is_region(action: Action) -> bool:
    return isinstance(action, RunBody) and action.eqn.primitive.name in REMAT


def _times_made(actions: Sequence[Action]) -> list[float]:
    """Return when the results of actions can be there: what goes element by element, or is resharded, at once."""
    times, made = list[float](), dict[Value, float]()
    for number, action in enumerate(actions):
        results, operands = action_values(action)
        at_once = isinstance(action, Reshard) or (
            isinstance(action, Evaluate) and action.eqn.primitive.name in ELEMENTWISE | REARRANGEMENTS
        )
        times.append(max((made.get(v, -1.0) for v in operands), default=-1.0) if at_once else float(number))
        made.update(dict.fromkeys(results, times[-1]))
    return times


def _scattered_sums(action: Action, mesh: LogicalMesh) -> list[tuple[Value, float]]:
    """Return the results of a resharding or a recomputed region that are parts of sums, with the bytes of a summand.

    Those of few bytes are left out.
    """
    match action:
        case Reshard(operand=Value() as operand, result=result, steps=steps):
            nbytes = value_bytes(operand, mesh)
            is_sum = any(isinstance(step, ReduceScatter) for step in steps) and nbytes >= _SUMMED_AT_ONCE_BYTES / 256
            return [(result, nbytes)] if is_sum else []
        case RunBody(results=results, bodies=(body,)) if _is_region(action):
            inside = dict(each for one in body.actions for each in _scattered_sums(one, mesh))
            pairs = zip(results, body.outputs, strict=True)
            return [(result, inside[v]) for result, v in pairs if isinstance(v, Value) and v in inside]
        case _:
            return []


def _everywhere(eqn: jc.JaxprEqn) -> EquationPlan:
    """Evaluate an equation that is replicated for free: every device does it on whole arrays."""
    return EquationPlan(
        operands=tuple(_or_replicated(None, atom) for atom in eqn.invars),
        results=tuple(_or_replicated(None, v) for v in eqn.outvars),
    )


def _or_replicated(layout: Layout | None, atom: Any) -> Layout:
    return replicated(len(getattr(atom.aval, "shape", ()))) if layout is None else layout
