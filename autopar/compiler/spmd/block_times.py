"""Add up what a planned program costs: the work of its equations, and its collectives.

LocalBlock, MeshCosts    ->  BlockTimes, of which the copies of resharding are work
LocalBlock, MeshCosts    ->  bytes read from memory and written there
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from autopar.compiler.costs.compute import EquationWork, equation_bytes, equation_work
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import equation_classes
from autopar.compiler.jaxprs.fusion import Traffic, fused_traffic
from autopar.compiler.jaxprs.fusion_kinds import FusionRules
from autopar.compiler.jaxprs.primitives import NESTED
from autopar.compiler.resharding.costs import STATE_COPIES, copied_bytes
from autopar.compiler.spmd.collectives import planned_collectives, taken, trips
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, Reshard, RunBody, Value, value_bytes


class BlockTimes(NamedTuple):
    """Seconds of one run of a program on every device of its mesh."""

    compute_s: float
    collective_s: float

    @property
    def total_s(self) -> float:
        """Both, one after the other."""
        return self.compute_s + self.collective_s


def block_times(block: LocalBlock, mesh_costs: MeshCosts, copied: Collection[Value] = ()) -> BlockTimes:
    """The times of a program; `copied` as in `block_work`."""
    collective_s = sum(each.seconds(mesh_costs) for each in planned_collectives(block, mesh_costs.mesh))
    works = list(block_work(block, mesh_costs, copied=copied))
    together = EquationWork(*np.array([work for work, _ in works]).reshape(-1, len(EquationWork._fields)).T)
    each_s = together.seconds(mesh_costs.machine).tolist()
    return BlockTimes(sum(times * each for (_, times), each in zip(works, each_s, strict=True)), collective_s)


def block_work(
    block: LocalBlock, mesh_costs: MeshCosts, within: jc.JaxprEqn | None = None, copied: Collection[Value] = ()
) -> Iterator[tuple[EquationWork, float]]:
    """Yield the work of every equation and resharding of a program, and how often one run of it does that.

    `within` is the equation that it is a body of; `copied` are the results in whose places state stands that is copied
    when the program begins, and that are copied there at its end (`memory.estimate`).
    """
    bandwidth = mesh_costs.machine.memory_bandwidth
    if copied:
        yield EquationWork(0.0, passes_s=_state_bytes(copied, mesh_costs) / bandwidth), 1.0
    traffic = _traffic(block, mesh_costs, within)
    kinds = dict(zip(map(id, block.jaxpr.eqns), equation_classes(block.jaxpr), strict=True))
    known: dict[Hashable, EquationWork] = {}  # layers repeat
    for action in block.actions:
        match action:
            case Evaluate(eqn=eqn, strategy=strategy):
                kind = id(eqn) if eqn.primitive.name in NESTED else kinds[id(eqn)]
                key = kind, strategy, traffic[id(eqn)], jc.moves_memory(eqn)
                if key not in known:
                    known[key] = equation_work(eqn, strategy, mesh_costs, traffic[id(eqn)])
                yield known[key], 1.0
            case RunBody(eqn=eqn, bodies=bodies):
                rounds = taken(eqn) * trips(eqn)
                for body in bodies:
                    yield from ((work, rounds * times) for work, times in block_work(body, mesh_costs, eqn))
            case Reshard():
                yield EquationWork(0.0, passes_s=_copied_bytes(action, mesh_costs) / bandwidth), 1.0


def block_bytes(
    block: LocalBlock, mesh_costs: MeshCosts, within: jc.JaxprEqn | None = None, copied: Collection[Value] = ()
) -> float:
    """Bytes that one run of a program reads from a device's memory and writes there, as its times have them.

    Those of collectives are not among them. `within` and `copied` are as in `block_work`.
    """
    total, traffic = _state_bytes(copied, mesh_costs), _traffic(block, mesh_costs, within)
    for action in block.actions:
        match action:
            case Evaluate(eqn=eqn, strategy=strategy):
                total += equation_bytes(eqn, strategy, mesh_costs, traffic[id(eqn)])
            case RunBody(eqn=eqn, bodies=bodies):
                total += taken(eqn) * trips(eqn) * sum(block_bytes(body, mesh_costs, eqn) for body in bodies)
            case Reshard():
                total += _copied_bytes(action, mesh_costs)
    return total


def _traffic(block: LocalBlock, mesh_costs: MeshCosts, within: jc.JaxprEqn | None) -> dict[int, Traffic]:
    """Return the traffic of the equations of a program by their identities."""
    found = fused_traffic(block.jaxpr, within, rules=FusionRules.of(mesh_costs.machine))
    return dict(zip(map(id, block.jaxpr.eqns), found, strict=True))


def _copied_bytes(action: Reshard, mesh_costs: MeshCosts) -> float:
    """Return the bytes that resharding reads and writes besides its collectives."""
    aval: Any = action.aval
    return copied_bytes(action.steps, action.source, tuple(aval.shape), aval.dtype.itemsize, mesh_costs.mesh)


def _state_bytes(copied: Collection[Value], mesh_costs: MeshCosts) -> float:
    """Return the bytes that are read and written to copy state elsewhere, and what replaces it to its place."""
    return STATE_COPIES * sum(value_bytes(value, mesh_costs.mesh) for value in copied)
