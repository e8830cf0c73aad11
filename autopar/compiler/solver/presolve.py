"""Shrink a problem without losing its optimum: a smaller problem, and the way back.

Until nothing changes (Scholz & Eckstein 2002, "Register allocation for irregular architectures"),

    forbidden   an option that costs ∞, or that some neighbour has no partner for, goes        → remove_forbidden
    split       an edge M[a,b] = u[a] + v[b] goes, u and v to its ends                         → add_edge
    R0, R1, R2  a node of at most two neighbours goes: its best option is a function of        → eliminate_nodes
                theirs, T[p,q] = min_a (A[a,p] + B[a,q])
    one option  a node with no other goes, whatever its neighbours: its costs are theirs       → absorb

Protected nodes keep all options that are not forbidden, and stay: something else, a row, depends on them.

Layers of a model repeat, and with them costs and matrices. What a reduction makes of some arrays is computed once for
all nodes that have these arrays → Results.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from autopar.compiler.solver.beam_search import frontier_order
from autopar.compiler.solver.problem import MRF, Assignment, BoolArray, FloatArray, IndexArray, Infeasible

T = TypeVar("T")

LARGEST_TABLE = 4_000_000
"""Entries that eliminating a node of two neighbours may look at."""
CANCELLATION = 1e-13
"""Share of the costs taken out of a matrix up to which what remains is rounding error."""


class Eliminated(NamedTuple):
    """A node that left: its best option is that of the least entry, given the neighbours' options."""

    node: int
    options: IndexArray
    cost: FloatArray
    neighbours: tuple[tuple[int, IndexArray, FloatArray], ...]
    """The neighbours, each with its number, its options at the time, and the matrix (rows: options of `node`)."""


@dataclass(frozen=True, kw_only=True)
class ReducedMRF:
    """A smaller problem with the same optimum, `constant` aside."""

    core: MRF
    nodes: tuple[int, ...]
    """Node of the whole problem that each node of the core is, in an order that suits sweeps and searches."""
    options: tuple[IndexArray, ...]
    """Option of the whole problem that each option of the core is, per node."""
    constant: float
    num_nodes: int
    eliminated: tuple[Eliminated, ...]

    def expand(self, core_assignment: Sequence[int]) -> Assignment:
        """Return the assignment of the whole problem that goes with one of the core."""
        chosen = [-1] * self.num_nodes
        for node, domain, option in zip(self.nodes, self.options, core_assignment, strict=True):
            chosen[node] = int(domain[option])
        known: dict[Any, int] = {}  # layers repeat here, too
        for node, options, cost, neighbours in reversed(self.eliminated):
            key = (
                id(options),
                id(cost),
                *((chosen[other], id(domain), id(matrix)) for other, domain, matrix in neighbours),
            )
            if key not in known:
                total = cost
                for other, domain, matrix in neighbours:
                    total = total + matrix[:, domain.searchsorted(chosen[other])]
                known[key] = int(options[total.argmin()])
            chosen[node] = known[key]
        return tuple(chosen)

    def core_assignment(self, options: Sequence[int]) -> Assignment | None:
        """The options of the core that are these of the whole problem; None if some are not among the core's."""
        chosen = list[int]()
        for node, domain in zip(self.nodes, self.options):
            place = int(np.searchsorted(domain, options[node]))
            if place == domain.size or domain[place] != options[node]:
                return None
            chosen.append(place)
        return tuple(chosen)


def reduce_problem(
    problem: MRF, protected: Collection[int] = (), *, eliminates: bool = True, ordered: bool = False
) -> ReducedMRF:
    """Apply every reduction until none applies; raise `Infeasible` when a node has no option left.

    Nodes with neighbours stay unless it `eliminates` them. Nodes that are `ordered` stay in their order; others get one
    that suits sweeps and searches.
    """
    work = _Work.of(problem, frozenset(protected))
    work.eliminate_nodes(most_neighbours=2 if eliminates else 0)
    return work.result(ordered)


class Results:
    """Results of functions of arrays, each computed once for the same arrays; arrays of one content become the same."""

    def __init__(self) -> None:
        self._same: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}

    def same(self, array: Any) -> Any:
        """Return the first array of this content."""
        return self._same.setdefault((array.shape, array.dtype, array.tobytes()), array)

    def __call__(self, function: Callable[..., T], *arrays: Any) -> T:
        key = (function, *map(id, arrays))
        found = self._known.get(key)
        if found is None:
            # The arrays are kept with the result, so that their identities stay theirs.
            found = self._known[key] = function(*arrays), arrays
        return found[0]


_Addend = tuple[FloatArray, bool]
"""Costs that options get in addition, and whether some are infinite."""


@dataclass(kw_only=True)
class _Work:
    """The problem while it shrinks. Arrays are never changed in place: several nodes and edges share one."""

    costs: list[FloatArray]
    links: list[dict[int, FloatArray]]
    """The neighbours of each node → matrix whose rows are the node's options."""
    options: list[IndexArray]
    alive: list[bool]
    protected: frozenset[int]
    results: Results
    constant: float = 0.0
    eliminated: list[Eliminated] = field(default_factory=list[Eliminated])

    @classmethod
    def of(cls, problem: MRF, protected: frozenset[int]) -> _Work:
        """Begin with the options that are not forbidden."""
        num_nodes, results = len(problem.costs), Results()
        work = cls(
            costs=[results.same(cost) for cost in problem.costs],
            links=[{} for _ in range(num_nodes)],
            options=[results.same(np.arange(cost.size)) for cost in problem.costs],
            alive=[True] * num_nodes,
            protected=protected,
            results=results,
        )
        possible: dict[int, list[BoolArray]] = {}
        for node, cost in enumerate(work.costs):
            _note(possible, node, results(_possible, cost))
        # Not by `results(results.same, ...)`: what holds itself, and so all arrays, would wait for the collector.
        different = {id(m): m for m in problem.edges.values()}
        both = {key: (first := results.same(m), *results(_turned, first)) for key, m in different.items()}
        for (i, j), matrix in problem.edges.items():
            work.links[i][j], work.links[j][i], possible_rows, possible_columns = both[id(matrix)]
            _note(possible, i, possible_rows)
            _note(possible, j, possible_columns)
        work.remove_forbidden(possible)
        return work

    def result(self, ordered: bool) -> ReducedMRF:
        left = [node for node, alive in enumerate(self.alive) if alive]
        nodes = tuple(left)
        if not ordered:
            place = {node: index for index, node in enumerate(left)}
            links = [{place[other] for other in self.links[node]} for node in left]
            nodes = tuple(left[index] for index in frontier_order(links, [self.costs[node].size for node in left]))
        place = {node: index for index, node in enumerate(nodes)}
        core = MRF(
            costs=tuple(self.costs[node] for node in nodes),
            edges={
                (place[i], place[j]): matrix
                for i in nodes
                for j, matrix in sorted(self.links[i].items(), key=lambda link: place[link[0]])
                if place[i] < place[j]
            },
        )
        return ReducedMRF(
            core=core,
            nodes=nodes,
            options=tuple(self.options[node] for node in nodes),
            constant=self.constant,
            num_nodes=len(self.alive),
            eliminated=tuple(self.eliminated),
        )

    def remove_forbidden(self, possible: dict[int, list[BoolArray]]) -> None:
        """Remove all options of some nodes but those in all of their masks, and those left without a partner by that.

        Empties the dictionary.
        """
        while possible:
            node, masks = possible.popitem()  # in any order: what is left in the end is the same
            self.keep(node, masks[0] if len(masks) == 1 else np.logical_and.reduce(masks))
            for other in self.links[node]:
                _note(possible, other, self.results(_possible, self.links[other][node]))

    def keep(self, node: int, kept: BoolArray) -> None:
        """Restrict a node to some of its options."""
        if not kept.any():
            raise Infeasible(())
        results, kept = self.results, self.results.same(kept)
        self.costs[node] = results(_taken, self.costs[node], kept)
        self.options[node] = results(_taken, self.options[node], kept)
        for neighbour, matrix in self.links[node].items():
            self.links[node][neighbour], self.links[neighbour][node] = results(_taken_and_turned, matrix, kept)

    def eliminate_nodes(self, most_neighbours: int) -> None:
        """Apply R0, R1 and R2, the fewest neighbours first, until no node has so few."""
        queue = [self.rank(n) for n, alive in enumerate(self.alive) if alive]
        heapq.heapify(queue)
        while queue and queue[0][0] <= most_neighbours:
            entry = heapq.heappop(queue)
            node = entry[2]
            if not self.alive[node] or entry != self.rank(node) or node in self.protected:
                continue
            neighbours = list(self.links[node])
            if self.costs[node].size == 1:
                self.absorb(node)
            elif not self.table_is_small(node):
                continue
            else:
                self.eliminate(node)
            for other in neighbours:
                heapq.heappush(queue, self.rank(other))

    def rank(self, node: int) -> tuple[int, int, int]:
        """Return what nodes are eliminated by: neighbours that it ties together, options."""
        size = self.costs[node].size
        return (0 if size == 1 else len(self.links[node])), size, node

    def table_is_small(self, node: int) -> bool:
        sizes = [self.costs[other].size for other in self.links[node]]
        return len(sizes) < 2 or self.costs[node].size * sizes[0] * sizes[1] <= LARGEST_TABLE

    def eliminate(self, node: int) -> None:
        """Put the best option of a node, as a function of its neighbours' options, into their costs."""
        cost, links = self.costs[node], self.remember(node)
        if not links:
            self.constant += float(cost.min())
        elif len(links) == 1:
            ((other, matrix),) = links
            self.add_costs((other, self.results(_least, cost, matrix)))
        else:
            (p, to_p), (q, to_q) = links
            self.add_edge(p, q, self.results(_least_sums, cost, to_p, to_q))

    def absorb(self, node: int) -> None:
        """Put the costs of a node's only option into its neighbours'."""
        self.constant += float(self.costs[node][0])
        self.add_costs(*((other, self.results(_first, matrix)) for other, matrix in self.remember(node)))

    def remember(self, node: int) -> list[tuple[int, FloatArray]]:
        """Take a node out of the graph and keep what its option follows from; return its links."""
        links = sorted(self.links[node].items())
        self.alive[node] = False
        neighbours = tuple([(other, self.options[other], matrix) for other, matrix in links])
        self.eliminated.append(Eliminated(node, self.options[node], self.costs[node], neighbours))
        for other, _ in links:
            del self.links[other][node]
        self.links[node] = {}
        return links

    def add_costs(self, *more: tuple[int, _Addend]) -> None:
        """Add to the costs of nodes, all of whose options have partners; some may be forbidden from now on."""
        possible: dict[int, list[BoolArray]] = {}
        for node, (costs, forbids) in more:
            self.costs[node] = self.results(np.add, self.costs[node], costs)
            if forbids:
                _note(possible, node, self.results(_possible, self.costs[node]))
        self.remove_forbidden(possible)

    def add_edge(self, i: int, j: int, matrix: FloatArray) -> None:
        """Add to the matrix between two nodes; what one option costs whatever the other goes to the nodes."""
        if j in self.links[i]:
            matrix = self.results(np.add, matrix, self.links[i].pop(j))
            del self.links[j][i]
        for_i, for_j, rest, turned, is_nothing = self.results(_split, matrix)
        if not is_nothing or {i, j} <= self.protected:
            self.links[i][j], self.links[j][i] = rest, turned
        self.add_costs((i, for_i), (j, for_j))


def _turned(matrix: FloatArray) -> tuple[FloatArray, BoolArray | None, BoolArray | None]:
    """Return a matrix by columns, and the rows, and the columns, that have a pair that is possible; None for all."""
    turned = np.ascontiguousarray(matrix.T)
    return turned, _possible(np.minimum.reduce(turned)), _possible(np.minimum.reduce(matrix))


def _taken(array: Any, kept: BoolArray) -> Any:
    return array[kept]


def _taken_and_turned(matrix: FloatArray, kept: BoolArray) -> tuple[FloatArray, FloatArray]:
    smaller = matrix[kept]
    return smaller, np.ascontiguousarray(smaller.T)


def _possible(costs: FloatArray) -> BoolArray | None:
    """Return the options that cost less than ∞, alone or, of a matrix, with some partner; None for all."""
    least = costs if costs.ndim == 1 else np.minimum.reduce(costs, 1)
    return None if np.maximum.reduce(least) < np.inf else least < np.inf


def _note(possible: dict[int, list[BoolArray]], node: int, mask: BoolArray | None) -> None:
    """Add the options of a node that are possible, unless these are all."""
    if mask is not None:
        possible.setdefault(node, []).append(mask)


def _least(cost: FloatArray, matrix: FloatArray) -> _Addend:
    return _addend(np.minimum.reduce(cost[:, None] + matrix))


def _first(matrix: FloatArray) -> _Addend:
    return _addend(matrix[0])


def _addend(costs: FloatArray) -> _Addend:
    return costs, bool(np.maximum.reduce(costs) == np.inf)


def _split(matrix: FloatArray) -> tuple[_Addend, _Addend, FloatArray, FloatArray, bool]:
    """Return what a matrix costs by its rows and by its columns whatever the other is, the rest, and if that is 0.

    The rest is returned by rows and by columns.
    """
    by_row, forbids_rows = for_row = _addend(np.minimum.reduce(matrix, 1))
    finite_by_row = _finite(by_row) if forbids_rows else by_row
    rest = matrix - finite_by_row[:, None]
    by_column, forbids_columns = for_column = _addend(np.minimum.reduce(rest))
    finite_by_column = _finite(by_column) if forbids_columns else by_column
    rest = rest - finite_by_column
    largest = max(_largest(finite_by_row), _largest(finite_by_column))
    is_nothing = bool(np.maximum.reduce(rest, axis=None) <= CANCELLATION * largest)
    return for_row, for_column, rest, np.ascontiguousarray(rest.T), is_nothing


def _finite(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, 0.0)


def _largest(values: FloatArray) -> float:
    return float(np.maximum.reduce(np.abs(values)))


def _least_sums(cost: FloatArray, to_left: FloatArray, right: FloatArray) -> FloatArray:
    """T[p, q] = min_a (cost[a] + to_left[a, p] + right[a, q]), a few a at a time."""
    left = cost[:, None] + to_left
    step = max(1, 100_000 // (left.shape[1] * right.shape[1]))
    table = np.full((left.shape[1], right.shape[1]), np.inf)
    for start in range(0, left.shape[0], step):
        block = slice(start, start + step)
        np.minimum(table, (left[block, :, None] + right[block, None, :]).min(0), out=table)
    return table
