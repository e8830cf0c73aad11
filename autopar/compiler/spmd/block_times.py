"""Add up what a planned program costs: the work of its equations, and its collectives.

LocalBlock, mesh, figures  ->  BlockTimes
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.compiler.costs.compute import equation_s
from autopar.compiler.costs.mesh_costs import MeshFigures
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.spmd.collectives import planned_collectives, trips
from autopar.compiler.spmd.local_program import Enter, Evaluate, LocalBlock


class BlockTimes(NamedTuple):
    """Seconds of one run of a program on every device of its mesh."""

    compute_s: float
    collective_s: float

    @property
    def total_s(self) -> float:
        """Both, one after the other."""
        return self.compute_s + self.collective_s


def block_times(block: LocalBlock, mesh: LogicalMesh, figures: MeshFigures) -> BlockTimes:
    """The times of a program; `figures` are those of its phase."""
    collective_s = sum(
        each.times * figures.collective_s(each.collective.kind, each.collective.axes, each.collective.nbytes, mesh)
        for each in planned_collectives(block, mesh)
    )
    return BlockTimes(_equations_s(block, mesh, figures), collective_s)


def _equations_s(block: LocalBlock, mesh: LogicalMesh, figures: MeshFigures) -> float:
    total_s = 0.0
    for action in block.actions:
        match action:
            case Evaluate(eqn=eqn, strategy=strategy):
                # The collective of a split maximum is counted with the others.
                total_s += equation_s(eqn, strategy._replace(combined=()), mesh, figures)
            case Enter(eqn=eqn, bodies=bodies):
                total_s += trips(eqn) * sum(_equations_s(body, mesh, figures) for body in bodies)
            case _:
                pass
    return total_s
