"""List the collectives of a local program: what each moves, for which equation, how often, and which repeat another.

    LocalBlock, mesh  ->  LocalCollective, ...      all, in program order
    LocalBlock        ->  flags for every action    those that repeat an earlier one, and may be merged with it

A plan repeats a collective on purpose where keeping its result would take memory: parameters are gathered again for the
backward pass, and a remat region repeats collectives of the forward pass. Value numbering finds these: two collectives
are the same if they do the same with the same operand. A remat region counts as part of the program around it; what a
loop does in its rounds equals nothing outside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.costs.own_collectives import own_collectives
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import equation_key, literal_key
from autopar.compiler.jaxprs.primitives import CONTROL_FLOW
from autopar.compiler.jaxprs.trip_counts import trip_count
from autopar.compiler.resharding.costs import step_collectives
from autopar.compiler.resharding.steps import ReshardStep, collective_kind
from autopar.compiler.sharding.collective import Collective
from autopar.compiler.sharding.layout import Layout, LogicalMesh, describe_layout
from autopar.compiler.spmd.local_program import Action, Evaluate, LocalBlock, Reshard, RunBody, Value

_OWN_LINES = str(Path(__file__).parents[2])
"""Equations made here, such as sums over microbatches, have no line of the user's."""


def user_line(*eqns: jc.JaxprEqn) -> str:
    """Return the line of the first equation that the user wrote, as `model.py:41 (attention)`; empty for none."""
    lines = map(jc.source_line, eqns)
    return next((Path(line).name for line in lines if line and not line.startswith(_OWN_LINES)), "")


class LocalCollective(NamedTuple):
    """A collective of the program: how many times a step runs it, for which equation, and in which phase."""

    collective: Collective
    times: float
    dtype: str
    what: str
    reader: jc.JaxprEqn | None
    """The equation that needs it; None for what is done for a result."""
    maker: jc.JaxprEqn | None
    """The equation that made its operand; None for an input."""
    phase: str
    repeated: bool
    """True if the same was done before, and is done again to save memory."""
    invariant_trips: float
    """Rounds of the loops around it in which its operand is the same: one run before them would do."""
    combined: bool
    """True if the compiler combines it with others, so that they share their latency."""
    share: float
    """The share of its program's runs that come by here: one branch of several is taken."""

    @property
    def scope(self) -> str:
        """The name stack of the equation that needs it."""
        return "" if self.reader is None else jc.scope_of(self.reader)

    @property
    def line(self) -> str:
        """The user's line that needs it; for a result the one that made it."""
        return user_line(*(eqn for eqn in (self.reader, self.maker) if eqn is not None))

    def seconds(self, mesh_costs: MeshCosts) -> float:
        """Return the seconds of all its runs in a step, on average."""
        costs = mesh_costs.combined() if self.combined else mesh_costs
        kind, axes, nbytes = self.collective.kind, self.collective.axes, self.collective.nbytes
        return self.share * self.times * costs.collective_s(kind, axes, nbytes, self.collective.reach)


def planned_collectives(block: LocalBlock, mesh: LogicalMesh) -> Iterator[LocalCollective]:
    """The collectives that a step runs, in program order."""
    once = dict.fromkeys(block.inputs, 1.0)
    return _of_block(block, mesh, repeated_collectives(block), 1.0, 1.0, invariant_trips(block, once, 1.0))


def _of_block(
    block: LocalBlock,
    mesh: LogicalMesh,
    repeated: Mapping[Action, tuple[bool, ...]],
    times: float,
    share: float,
    invariant: Mapping[Action, float],
) -> Iterator[LocalCollective]:
    readers, makers = _readers(block), _makers(block)
    for action in block.actions:
        match action:
            case Reshard(source=source, result=result, steps=steps):
                aval: Any = action.aval
                what = f"{aval.str_short()} {describe_layout(source, mesh)} -> {describe_layout(result.layout, mesh)}"
                what += _for_scatter(result, source, readers.get(result))
                combined = block.combined.share(result.variable, result.form)
                moves = step_collectives(steps, source, tuple(aval.shape), aval.dtype.itemsize, mesh)
                eqns = readers.get(result), makers.get(result)
                for of_step, again in zip(moves, repeated[action], strict=True):
                    for each in of_step:
                        rounds = again, invariant[action]
                        yield LocalCollective(
                            each, times, str(aval.dtype), what, *eqns, result.form, *rounds, combined, share
                        )
            case Evaluate(eqn=eqn, strategy=strategy):
                for own, dtype in own_collectives(eqn, strategy, mesh):
                    aval = eqn.outvars[0].aval
                    what, again = f"{eqn.primitive.name} {aval.str_short()}", all(repeated[action])
                    yield LocalCollective(own, times, dtype, what, eqn, eqn, "", again, invariant[action], False, share)
            case RunBody(eqn=eqn, bodies=bodies):
                for body in bodies:
                    yield from _of_block(body, mesh, repeated, times * trips(eqn), share * taken(eqn), invariant)


def _for_scatter(value: Value, source: Layout, reader: jc.JaxprEqn | None) -> str:
    """Return what a gathered value is to the equation that adds it to rows of an array, as of an embedding's gradient.

    Its rows and their ids are gathered where that takes less time than a sum over the devices of the whole array.
    """
    if reader is None or reader.primitive.name != "scatter-add":
        return ""
    place = next((number for number, v in enumerate(reader.invars) if v is value.variable), 0)
    windows = jp.scatter_of(reader).numbers.update_window_dims if place == 2 else ()
    by_row = any(axes and not value.layout.dims[d] for d, axes in enumerate(source.dims) if d not in windows)
    words = {1: "ids", 2: "rows"}.get(place)
    array: Any = reader.outvars[0].aval
    return f", {words} for {array.str_short()}" if words and by_row and not source.partial else ""


def invariant_trips(block: LocalBlock, inputs: Mapping[Value, float], times: float) -> dict[Action, float]:
    """Return for every action in how many rounds of the loops around it its operands are the same.

    A block that runs `times` in a step is given the same of its inputs. Compilers may move such an action in front of
    these loops, so that it runs once.
    """
    found: dict[Action, float] = {}
    _enter_invariants(block, inputs, times, found)
    return found


def _enter_invariants(
    block: LocalBlock, inputs: Mapping[Value, float], times: float, found: dict[Action, float]
) -> list[float]:
    """Enter a block's actions into `found`; returns the same of the block's outputs."""
    known = dict(inputs)

    def of(value: Value | jc.Literal) -> float:
        return known.get(value, times) if isinstance(value, Value) else times  # constants never change

    for action in block.actions:
        match action:
            case Reshard(operand=operand, result=result, after=after):
                found[action] = known[result] = min(map(of, (operand, *after)))
            case Evaluate(eqn=eqn, operands=operands, results=results):
                found[action] = 1.0 if eqn.effects else min(map(of, operands), default=times)
                known.update(dict.fromkeys(results, found[action]))
            case RunBody(eqn=eqn, operands=operands, results=results, bodies=bodies, after=after):
                given, rounds = [min(map(of, (v, *after))) for v in operands], trips(eqn)
                made: list[float] = []
                for body, entered in zip(bodies, _entered_invariants(eqn, given, rounds), strict=True):
                    made = _enter_invariants(body, dict(zip(body.inputs, entered, strict=True)), times * rounds, found)
                if eqn.primitive.name in CONTROL_FLOW:
                    made = [1.0 if eqn.effects else min(given, default=times)] * len(results)
                known.update(zip(results, made, strict=True))
    return [of(value) for value in block.outputs]


def _entered_invariants(eqn: jc.JaxprEqn, given: Sequence[float], rounds: float) -> list[list[float]]:
    """Return for the inputs of every body in how many rounds they are the same; `given` is that of the operands."""
    match eqn.primitive.name:
        case "scan":
            num_consts = jp.scan_of(eqn).num_consts
            return [[rounds * each for each in given[:num_consts]] + [1.0] * len(given[num_consts:])]
        case "while":
            loop = jp.while_of(eqn)
            num_consts = loop.cond_consts + loop.body_consts
            consts, carry = [rounds * each for each in given[:num_consts]], [1.0] * len(given[num_consts:])
            return [consts[: loop.cond_consts] + carry, consts[loop.cond_consts :] + carry]
        case "cond":
            return [list(given[1:]) for _ in jp.branches_of(eqn)]
        case _:
            return [list(given)]


def _readers(block: LocalBlock) -> dict[Value, jc.JaxprEqn]:
    """Return, for every value, the equation that reads it first."""
    readers: dict[Value, jc.JaxprEqn] = {}
    for action in reversed(block.actions):
        if isinstance(action, Evaluate | RunBody):
            readers.update({v: action.eqn for v in action.operands if isinstance(v, Value)})
        elif isinstance(action.operand, Value) and action.result in readers:
            readers[action.operand] = readers[action.result]
    return readers


def _makers(block: LocalBlock) -> dict[Value, jc.JaxprEqn]:
    """Return for every value that is no input the equation that made it."""
    makers: dict[Value, jc.JaxprEqn] = {}
    for action in block.actions:
        if isinstance(action, Evaluate | RunBody):
            makers.update(dict.fromkeys(action.results, action.eqn))
        elif isinstance(action.operand, Value) and action.operand in makers:
            makers[action.result] = makers[action.operand]
    return makers


def trips(eqn: jc.JaxprEqn) -> float:
    """Return how many times an equation runs its bodies."""
    match eqn.primitive.name:
        case "scan":
            return jp.scan_of(eqn).length
        case "while":
            return trip_count(eqn)
        case _:
            return 1.0


def taken(eqn: jc.JaxprEqn) -> float:
    """Return the share of an equation's runs that each of its bodies takes part in: a branch as often as the others."""
    return 1 / len(jp.branches_of(eqn)) if eqn.primitive.name == "cond" else 1.0


# --- repeated collectives ---------------------------------------------------------------------------------------


def repeated_collectives(block: LocalBlock) -> Mapping[Action, tuple[bool, ...]]:
    """Return, for every action that communicates, whether what its steps send, in their order, was sent before."""
    numbering = _Numbering(merges=_has_regions(block))
    numbering.read(block, [numbering.new() for _ in block.inputs])
    return numbering.repeated


def _has_regions(block: LocalBlock) -> bool:
    entered = [action for action in block.actions if isinstance(action, RunBody)]
    return any(each.eqn.primitive.name not in CONTROL_FLOW or any(map(_has_regions, each.bodies)) for each in entered)


@dataclass(kw_only=True, eq=False)
class _Numbering:
    merges: bool
    """True if equal equations get equal numbers. Outside of remat regions there are no two."""
    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    repeated: dict[Action, tuple[bool, ...]] = field(default_factory=dict[Action, tuple[bool, ...]])
    fresh: Iterator[int] = field(default_factory=itertools.count)

    def new(self) -> int:
        """The number of what equals nothing else."""
        return next(self.fresh)

    def read(self, block: LocalBlock, inputs: Sequence[int]) -> list[int]:
        """The numbers of the block's outputs, given those of its inputs."""
        values = dict(zip(block.inputs, inputs, strict=True))

        def number(value: Value | jc.Literal) -> int:
            if isinstance(value, jc.Literal):
                return self._number_of(("literal", literal_key(value)))[0]
            if value not in values:  # a constant of the jaxpr
                values[value] = self.new()
            return values[value]

        for action in block.actions:
            match action:
                case Reshard(operand=operand, result=result, steps=steps):
                    values[result] = self._reshard(action, number(operand), steps)
                case Evaluate(operands=operands, results=results):
                    values.update(zip(results, self._evaluate(action, [number(v) for v in operands]), strict=True))
                case RunBody(operands=operands, results=results):
                    values.update(zip(results, self._enter(action, [number(v) for v in operands]), strict=True))
        return [number(value) for value in block.outputs]

    def _number_of(self, key: Hashable) -> tuple[int, bool]:
        """The number of what `key` says, and whether it was there before."""
        known = key in self.numbers
        if not known:
            self.numbers[key] = self.new()
        return self.numbers[key], known

    def _reshard(self, action: Action, operand: int, steps: Sequence[ReshardStep]) -> int:
        flags: list[bool] = []
        for step in steps:
            operand, known = self._number_of((operand, step))
            if collective_kind(step) is not None:
                flags.append(known)
        self.repeated[action] = tuple(flags)
        return operand

    def _evaluate(self, action: Evaluate, operands: Sequence[int]) -> list[int]:
        known = False
        if self.merges and not action.eqn.effects:
            first, known = self._number_of((equation_key(action.eqn), action.strategy, tuple(operands)))
            numbers = [self._number_of((first, place))[0] for place in range(len(action.results))]
        else:
            numbers = [self.new() for _ in action.results]
        self.repeated[action] = (known,) if action.strategy.combined else ()
        return numbers

    def _enter(self, action: RunBody, operands: Sequence[int]) -> list[int]:
        if action.eqn.primitive.name not in CONTROL_FLOW:
            (body,) = action.bodies
            return self.read(body, operands)
        for body in action.bodies:
            inside = _Numbering(merges=self.merges, repeated=self.repeated)
            inside.read(body, [inside.new() for _ in body.inputs])
        return [self.new() for _ in action.results]
