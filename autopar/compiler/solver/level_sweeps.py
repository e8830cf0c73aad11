"""Sweep over the nodes of a problem, moving costs between them and their edges; what does not wait is done at once.

A reparametrisation adds vectors u(a) to the matrix of an edge and takes them from the costs of its ends. In a sweep a
node collects from the edges on one side all that they cost at least, and shares it among those on the other. It waits
for its neighbours on the first side only. So nodes have levels, and all of one level are computed in the same few calls
on long arrays, which hold the options of the nodes, and the entries of matrices, one after another. Large matrices,
which take longer than a call, are looked at one by one, so that equal ones are kept once.

Sweeps follow an order that cuts the problem's into runs side by side: a level then has a node of every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from autopar.compiler.solver.problem import MRF, FloatArray, IndexArray

SMALL = 1_000
"""Entries of a matrix that could be looked at in the time of a call."""
RUNS = 16
"""Parts of the order of nodes that are swept side by side: with more, costs move less far in a sweep."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Level:
    """The nodes of one level, and their edges on the side from which they collect."""

    nodes: IndexArray
    options: IndexArray
    """The options of all these nodes, by their places among the options of all nodes."""
    starts: IndexArray
    """The place of the first option of each node."""
    owner: IndexArray
    """The place of its node, by option."""
    divisor: FloatArray
    num_targets: FloatArray
    near: slice
    """The places of the sums that were added to the edges at these nodes, edge after edge."""
    to_option: IndexArray
    """For each of these, the place of the option."""
    matrix: FloatArray
    """The entries of the small matrices; by option of these nodes, those of the other end."""
    far: IndexArray
    """For each entry, the place of what was added at the other end."""
    rows: IndexArray
    """The place of the first entry for each option along each small edge."""
    small: IndexArray | None
    """The places of the small edges in `near`; None if all are small."""
    large: tuple[tuple[FloatArray, slice, slice], ...]
    """Matrices of large edges (rows: options of the other end), and the places of both ends."""
    targets: IndexArray
    """The places of what is added to the edges on the other side."""
    source: IndexArray
    """For each of these, the place of the option."""

    def least(self, added: FloatArray) -> FloatArray:
        """Return what every option costs at least along each edge, by what was `added` at the other ends."""
        found = np.minimum.reduceat(self.matrix + added.take(self.far), self.rows) if self.rows.size else self.matrix
        if self.small is None:
            return found
        every = np.empty(self.to_option.size)
        every[self.small] = found
        for matrix, far, near in self.large:
            every[near] = np.minimum.reduce(matrix + added[far][:, None])
        return every


@dataclass(kw_only=True, eq=False)
class LevelSweeps:
    """A problem with its costs moved: those of nodes, and for every edge what was added at its lower and higher end.

    Of the ends of an edge, the one that comes first in the order of sweeps is the lower.
    """

    offsets: IndexArray
    """The place of the first option of each node, and the number of all options."""
    order: IndexArray
    owner: IndexArray
    """The node of each option."""
    edges: dict[tuple[int, int], tuple[slice, slice, bool]]
    """The places of what was added at its lower and higher end, by ends of an edge; True if the first is the higher."""
    forward: list[_Level]
    back: list[_Level]
    costs: FloatArray
    at_low: FloatArray
    at_high: FloatArray
    links: list[list[_Link]]
    """The edges of each node, in the order of the problem's."""

    @classmethod
    def of(cls, problem: MRF) -> LevelSweeps:
        """Begin with nothing moved."""
        sizes = np.array([cost.size for cost in problem.costs], dtype=np.intp)
        num_nodes, offsets = sizes.size, _starts(sizes)
        run = -(-num_nodes // RUNS)
        order = np.array(sorted(range(num_nodes), key=lambda node: (node % run, node)), dtype=np.intp)
        rank = np.empty(num_nodes, np.intp)
        rank[order] = np.arange(num_nodes)
        ends = sorted(problem.edges)
        turned = [bool(rank[i] > rank[j]) for i, j in ends]
        low = np.array([j if back else i for (i, j), back in zip(ends, turned)], dtype=np.intp)
        high = np.array([i if back else j for (i, j), back in zip(ends, turned)], dtype=np.intp)
        both: dict[int, tuple[FloatArray, FloatArray]] = {}
        by_low, by_high = list[FloatArray](), list[FloatArray]()
        for (i, j), back in zip(ends, turned):
            matrix = problem.edges[i, j]
            if id(matrix) not in both:
                both[id(matrix)] = np.ascontiguousarray(matrix), np.ascontiguousarray(matrix.T)
            by_low.append(both[id(matrix)][back])
            by_high.append(both[id(matrix)][not back])
        sides = _Side(low, high, rank, sizes, offsets), _Side(high, low, num_nodes - 1 - rank, sizes, offsets)
        at_low, at_high = sides[1].places, sides[0].places
        # What is collected from the edges ahead is at their lower ends: that is the sweep back.
        places = zip(ends, turned, at_low.tolist(), at_high.tolist(), sizes[low].tolist(), sizes[high].tolist())
        edges = {edge: (slice(a, a + rows), slice(b, b + columns), back) for edge, back, a, b, rows, columns in places}
        return cls(
            offsets=offsets,
            order=order,
            owner=np.repeat(np.arange(num_nodes), sizes),
            edges=edges,
            forward=sides[0].levels(at_low, by_high, by_low),
            back=sides[1].levels(at_high, by_low, by_high),
            costs=np.concatenate(problem.costs),
            at_low=np.zeros(int(sizes[low].sum())),
            at_high=np.zeros(int(sizes[high].sum())),
            links=_links(problem, edges),
        )

    def sweep_back(self, bound: float, least: FloatArray) -> float:
        """Sweep from the last node to the first: collect from the edges ahead, share among those behind.

        Returns the bound with what was collected, and raises for each option what it costs at `least`.
        """
        return self._sweep(self.back, self.at_low, self.at_high, self.order[::-1], bound, least)

    def sweep_forward(self, bound: float, least: FloatArray) -> float:
        """Sweep the other way round."""
        return self._sweep(self.forward, self.at_high, self.at_low, self.order, bound, least)

    def _sweep(
        self,
        levels: Sequence[_Level],
        near: FloatArray,
        far: FloatArray,
        order: IndexArray,
        bound: float,
        least: FloatArray,
    ) -> float:
        swept, minima = np.empty(self.costs.size), np.empty(self.order.size)
        for level in levels:
            self._settle(level, level.least(far), near, far, swept, minima)
        return self._raised(bound, least, swept, minima, order)

    def scores(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return what every option costs with the least along each edge; and this least, at lower and higher ends.

        The least is without what was added at the option's own end.
        """
        scores, at_low, at_high = self.costs.copy(), np.empty(self.at_low.size), np.empty(self.at_high.size)
        for levels, near, far, least in (
            (self.back, self.at_low, self.at_high, at_low),
            (self.forward, self.at_high, self.at_low, at_high),
        ):
            for level in levels:
                if level.to_option.size:
                    least[level.near] = along = level.least(far)
                    np.add.at(scores, level.options[level.to_option], near[level.near] + along)
        return scores, at_low, at_high

    def _settle(
        self, level: _Level, along: FloatArray, near: FloatArray, far: FloatArray, swept: FloatArray, minima: FloatArray
    ) -> None:
        """Collect what edges cost at least; keep the least of each node for the bound, and share the rest."""
        cost = self.costs[level.options]
        if level.to_option.size:
            np.add.at(cost, level.to_option, near[level.near] + along)
            near[level.near] = -along
        swept[level.options] = cost
        least = np.minimum.reduceat(cost, level.starts)
        minima[level.nodes] = least
        cost = cost - least[level.owner]
        # As much to each edge as to one on the side with more of them: the rest waits for the sweep back.
        share = cost / level.divisor
        self.costs[level.options] = cost - level.num_targets * share
        far[level.targets] += share[level.source]

    def _raised(
        self, bound: float, least: FloatArray, swept: FloatArray, minima: FloatArray, order: IndexArray
    ) -> float:
        """Put the least costs into the bound, node after node, and raise what every option costs at least."""
        bounds = np.cumsum(np.concatenate([[bound], minima[order]]))
        before = np.empty(order.size)
        before[order] = bounds[:-1]
        np.maximum(least, before[self.owner] + swept, out=least)
        return float(bounds[-1])

    def go_on_from(self, other: LevelSweeps) -> None:
        """Move what was moved in a problem with the same edges, where nothing was moved yet."""
        for (i, j), (at_low, at_high, back) in self.edges.items():
            for node, added in zip((j, i) if back else (i, j), (other.at_low[at_low], other.at_high[at_high])):
                self.costs[self.offsets[node] : self.offsets[node + 1]] -= added
        self.at_low, self.at_high = other.at_low.copy(), other.at_high.copy()

    def split(self, values: FloatArray) -> list[FloatArray]:
        """Return what belongs to the options of each node."""
        ends = self.offsets.tolist()
        return [values[start:stop] for start, stop in pairwise(ends)]

    def matrix(
        self,
        edge: tuple[int, int],
        before: FloatArray,
        rows: IndexArray | None = None,
        columns: IndexArray | None = None,
    ) -> FloatArray:
        """Return an edge's costs as they are now, of these options of its ends; None for all."""
        at_low, at_high, back = self.edges[edge]
        first, second = self.at_low[at_low], self.at_high[at_high]
        by_row, by_column = (second, first) if back else (first, second)
        if rows is not None:
            before, by_row = before.take(rows, 0), by_row.take(rows)
        if columns is not None:
            before, by_column = before.take(columns, 1), by_column.take(columns)
        return before + by_row[:, None] + by_column


class _Link(NamedTuple):
    """An edge as one of its ends has it."""

    other: int
    matrix: FloatArray
    """The costs, by option of this end."""
    is_low: bool
    near: int
    """The place of the first of what was added at this end."""
    far: slice
    """The places of what was added at the other end."""


def _links(problem: MRF, edges: Mapping[tuple[int, int], tuple[slice, slice, bool]]) -> list[list[_Link]]:
    links: list[list[_Link]] = [[] for _ in problem.costs]
    for (i, j), matrix in problem.edges.items():
        at_low, at_high, back = edges[i, j]
        at_i, at_j = (at_high, at_low) if back else (at_low, at_high)
        links[i].append(_Link(j, matrix, not back, at_i.start, at_j))
        links[j].append(_Link(i, matrix.T, back, at_j.start, at_i))
    return links


class _Side:
    """The edges of all nodes on one side, in the order in which a sweep comes to their near ends."""

    def __init__(
        self, far: IndexArray, near: IndexArray, rank: IndexArray, sizes: IndexArray, offsets: IndexArray
    ) -> None:
        self.far, self.near, self.sizes = far, near, sizes
        level = [0] * sizes.size
        by_rank = np.argsort(rank[near], kind="stable").tolist()
        for start, stop in zip(far[by_rank].tolist(), near[by_rank].tolist()):
            level[stop] = max(level[stop], level[start] + 1)
        of = np.array(level, dtype=np.intp)
        self.num_levels = max(level, default=0) + 1
        numbers = np.arange(self.num_levels + 1)
        # Nodes, edges by their near ends, and by their far ones: each with the first of every level.
        self.nodes = np.lexsort((rank, of))
        self.order = np.lexsort((rank[far], rank[near], of[near]))
        self.ahead = np.lexsort((rank[near], rank[far], of[far]))
        self.node_cuts = np.searchsorted(of[self.nodes], numbers)
        self.edge_cuts = np.searchsorted(of[near[self.order]], numbers)
        self.ahead_cuts = np.searchsorted(of[far[self.ahead]], numbers)
        self.in_nodes = _starts(sizes[self.nodes])
        self.options = _ranges(offsets[self.nodes], sizes[self.nodes])
        self.place = np.empty(sizes.size, np.intp)
        """The place of a node's options among those of its level."""
        of_levels = np.repeat(self.in_nodes[self.node_cuts[:-1]], np.diff(self.node_cuts))
        self.place[self.nodes] = self.in_nodes[:-1] - of_levels
        self.in_edges = _starts(sizes[near[self.order]])
        self.places = np.empty(near.size, np.intp)
        """The places of what is added at the near ends of edges."""
        self.places[self.order] = self.in_edges[:-1]
        self.num_near, self.num_far = (np.bincount(ends, minlength=sizes.size) for ends in (near, far))
        self.is_small = sizes[near] * sizes[far] <= SMALL

    def levels(
        self, far_places: IndexArray, by_near: Sequence[FloatArray], by_far: Sequence[FloatArray]
    ) -> list[_Level]:
        """Return the levels; matrices are given by the options of near ends, and by those of far ones."""
        return [self._level(number, far_places, by_near, by_far) for number in range(self.num_levels)]

    def _level(
        self, number: int, far_places: IndexArray, by_near: Sequence[FloatArray], by_far: Sequence[FloatArray]
    ) -> _Level:
        sizes, near, far = self.sizes, self.near, self.far
        nodes, edges, reached = (
            of[cuts[number] : cuts[number + 1]]
            for of, cuts in (
                (self.nodes, self.node_cuts),
                (self.order, self.edge_cuts),
                (self.ahead, self.ahead_cuts),
            )
        )
        owner = np.repeat(np.arange(nodes.size), sizes[nodes])
        divisor = np.maximum(np.maximum(self.num_near, self.num_far)[nodes], 1)
        few = self.is_small[edges]
        small, large = edges[few], edges[~few].tolist()
        begin, end = self.in_edges[self.edge_cuts[number]], self.in_edges[self.edge_cuts[number + 1]]
        counts = np.repeat(sizes[far[small]], sizes[near[small]])  # entries of each row
        return _Level(
            nodes=nodes,
            options=self.options[self.in_nodes[self.node_cuts[number]] : self.in_nodes[self.node_cuts[number + 1]]],
            starts=_starts(sizes[nodes])[:-1],
            owner=owner,
            divisor=divisor[owner].astype(float),
            num_targets=self.num_far[nodes][owner].astype(float),
            near=slice(int(begin), int(end)),
            to_option=_ranges(self.place[near[edges]], sizes[near[edges]]),
            matrix=np.concatenate([by_near[e].ravel() for e in small.tolist()] or [np.empty(0)]),
            far=_ranges(np.repeat(far_places[small], sizes[near[small]]), counts),
            rows=_starts(counts)[:-1],
            small=None if few.all() else _ranges(self.places[small] - begin, sizes[near[small]]),
            large=tuple(
                (
                    by_far[e],
                    _part(far_places[e], sizes[far[e]]),
                    _part(self.places[e] - begin, sizes[near[e]]),
                )
                for e in large
            ),
            targets=_ranges(far_places[reached], sizes[far[reached]]),
            source=_ranges(self.place[far[reached]], sizes[far[reached]]),
        )


def _part(start: Any, size: Any) -> slice:
    return slice(int(start), int(start + size))


def _starts(sizes: IndexArray) -> IndexArray:
    """Return where each part begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)


def _ranges(starts: IndexArray, sizes: IndexArray) -> IndexArray:
    """Return the numbers from each start on, as many as its size, one range after another."""
    ends = _starts(sizes)
    return np.repeat(starts - ends[:-1], sizes) + np.arange(ends[-1])
