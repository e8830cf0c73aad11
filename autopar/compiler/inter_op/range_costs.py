"""The costs of all ranges of layers from those of single layers, by min-plus products over shardings at the cuts.

With A the cost of a layer, B that of resharding what it hands on (both matrices over the shardings at its two ends):

    C[i, i+1] = A_i        C[i, k+1][p, q] = min over r, r' of  C[i, k][p, r] + B_k[r, r'] + A_k[r', q]

Every entry is a front of vectors (time, bytes, ...): sums are of vectors, and the minimum keeps those that no other
one is below in every component. Ranges with the same sequence of layers and boundaries are computed once, so that a
model of n equal layers takes n products instead of n².
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.inter_op.choice_tables import Floats
from autopar.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTable:
    """Costs `[row, column, choice, component]`; a choice of infinite time is none. Tables of one class are equal."""

    name: Hashable
    costs: Floats

    def front(self, row: int, column: int) -> Floats:
        """The choices of an entry, `[choice, component]`, by rising time."""
        entry = self.costs[row, column]
        return entry[np.isfinite(entry[:, 0])]


def compose(
    layers: Sequence[CostTable], boundaries: Sequence[CostTable], *, max_choices: int = 64
) -> dict[tuple[int, int], CostTable]:
    """The table of every range `[start, stop)`; `boundaries[k]` lies between layers k and k+1.

    Fronts of more than `max_choices` are thinned to choices evenly spread over time, of which the fastest and the one
    that is lowest in the second component stay.
    """
    if len(boundaries) != len(layers) - 1:
        raise InvalidArgument(f"{len(layers)} layers have {len(layers) - 1} boundaries; {len(boundaries)} were given.")
    for number, boundary in enumerate(boundaries):
        shape = (layers[number].costs.shape[1], layers[number + 1].costs.shape[0])
        if boundary.costs.shape[:2] != shape:
            raise InvalidArgument(
                f"Boundary {number} is of {boundary.costs.shape[:2]} shardings, its layers have {shape} there. "
                "Give a row per sharding that layer hands on, and a column per one that the next layer takes."
            )
    known: dict[tuple[Hashable, ...], CostTable] = {}
    ranges: dict[tuple[int, int], CostTable] = {}
    for start in range(len(layers)):
        names: tuple[Hashable, ...] = ()
        for stop in range(start + 1, len(layers) + 1):
            added = (
                (layers[stop - 1].name,) if stop == start + 1 else (boundaries[stop - 2].name, layers[stop - 1].name)
            )
            names = (*names, *added)
            if names not in known:
                before = ranges.get((start, stop - 1))
                table = layers[stop - 1].costs
                if before is not None:
                    joined = product(before.costs, boundaries[stop - 2].costs, max_choices=max_choices)
                    table = product(joined, table, max_choices=max_choices)
                known[names] = CostTable(name=names, costs=table)
            ranges[start, stop] = known[names]
    return ranges


def product(left: Floats, right: Floats, *, max_choices: int) -> Floats:
    """The min-plus product of two tables of fronts."""
    rows, columns, components = left.shape[0], right.shape[1], left.shape[-1]
    fronts = [
        [
            pareto(
                (left[row, :, :, None] + right[:, column, None, :]).reshape(-1, components),
                max_choices=max_choices,
            )
            for column in range(columns)
        ]
        for row in range(rows)
    ]
    most = max((len(front) for line in fronts for front in line), default=0)
    result = np.full((rows, columns, max(1, most), components), np.inf)
    for row, line in enumerate(fronts):
        for column, front in enumerate(line):
            result[row, column, : len(front)] = front
    return result


def pareto(vectors: Floats, *, max_choices: int) -> Floats:
    """Those that no other one is below or equal to in every component, by rising first component."""
    vectors = vectors[np.isfinite(vectors[:, 0])]
    vectors = vectors[np.lexsort(vectors.T[::-1])]
    kept: list[int] = []
    waiting = np.arange(len(vectors))
    while len(waiting):
        kept.append(int(waiting[0]))
        waiting = waiting[(vectors[waiting] < vectors[waiting[0]]).any(axis=1)]
    front = vectors[kept]
    if len(front) <= max_choices:
        return front
    spread = np.linspace(0, len(front) - 1, max_choices).round().astype(np.int64)
    lowest = int(front[:, 1].argmin()) if front.shape[1] > 1 else 0
    return front[np.unique(np.append(spread, lowest))]
