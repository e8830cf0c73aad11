"""Shrink a choice problem without losing its optimum: a smaller problem, and the way back.

Until nothing changes (Scholz & Eckstein 2002, "Register allocation for irregular architectures"; Goldstein 1994),

    forbidden   a state that costs ∞, or that some neighbour has no partner for, goes;
    dominated   state a goes if b costs no more whatever the neighbours are,
                c[a] - c[b] + Σ_j min_k (M_j[a,k] - M_j[b,k]) >= 0;
    split       an edge M[a,b] = u[a] + v[b] goes, u and v to its ends;
    R0, R1, R2  a node of at most two neighbours goes: its best state is a function of theirs,
                T[p,q] = min_a (A[a,p] + B[a,q]).

Protected nodes keep all states that are not forbidden, and stay: something else, a row, depends on them.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.compiler.solver.beam_search import frontier_order
from autopar.compiler.solver.problem import Floats, Indices, Infeasible, Problem, Row, States, row_scale

LARGEST_TABLE = 4_000_000
"""Entries that eliminating a node of two neighbours may look at."""
COMPARISONS = 200_000
"""Entries that one search for dominated states may look at."""
IN_CACHE = 16_384
"""Entries of these to look at in one go."""
STANDS_FOR_INFINITY = 1e30
ROUND_OFF = 1e-13


@dataclass(frozen=True, kw_only=True)
class Eliminated:
    """A node that left: its best state is that of the least entry, given the neighbours' states."""

    node: int
    states: Indices
    cost: Floats
    neighbours: tuple[tuple[int, Indices, Floats], ...]
    """Per neighbour: its number, its states at the time, and the matrix (rows: states of `node`)."""


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A smaller problem with the same optimum, `constant` aside."""

    core: Problem
    nodes: tuple[int, ...]
    """Node of the whole problem that each node of the core is, in an order that suits sweeps and searches."""
    states: tuple[Indices, ...]
    """State of the whole problem that each state of the core is, per node."""
    constant: float
    num_nodes: int
    eliminated: tuple[Eliminated, ...]

    def expand(self, core_states: Sequence[int]) -> States:
        """The states of the whole problem that go with those of the core."""
        chosen = [-1] * self.num_nodes
        for node, domain, state in zip(self.nodes, self.states, core_states, strict=True):
            chosen[node] = int(domain[state])
        for gone in reversed(self.eliminated):
            total = gone.cost
            for neighbour, domain, matrix in gone.neighbours:
                total = total + matrix[:, np.searchsorted(domain, chosen[neighbour])]
            chosen[gone.node] = int(gone.states[total.argmin()])
        return tuple(chosen)

    def core_states(self, states: Sequence[int]) -> States | None:
        """The states of the core that are these of the whole problem; None if some are not among the core's."""
        chosen = list[int]()
        for node, domain in zip(self.nodes, self.states):
            place = int(np.searchsorted(domain, states[node]))
            if place == domain.size or domain[place] != states[node]:
                return None
            chosen.append(place)
        return tuple(chosen)


def reduce_problem(problem: Problem, protected: Collection[int] = ()) -> Reduced:
    """Apply every reduction until none applies. Raises `Infeasible` when a node has no state left."""
    work = _Work.of(problem, frozenset(protected))
    work.remove_forbidden(range(len(problem.costs)))
    while True:
        work.eliminate_nodes()
        if not work.remove_dominated():
            break
    return work.result()


@dataclass(kw_only=True)
class _Work:
    """The problem while it shrinks. Matrices are never changed in place: several edges share one."""

    costs: list[Floats]
    links: list[dict[int, Floats]]
    """Per node: neighbour → matrix whose rows are the node's states."""
    states: list[Indices]
    alive: list[bool]
    protected: frozenset[int]
    constant: float = 0.0
    eliminated: list[Eliminated] = field(default_factory=list[Eliminated])
    unexamined: set[int] = field(default_factory=set[int])
    """Nodes something changed at since dominated states were last searched for."""

    @classmethod
    def of(cls, problem: Problem, protected: frozenset[int]) -> _Work:
        num_nodes = len(problem.costs)
        work = cls(
            costs=list(problem.costs),
            links=[{} for _ in range(num_nodes)],
            states=[np.arange(cost.size) for cost in problem.costs],
            alive=[True] * num_nodes,
            protected=protected,
            unexamined=set(range(num_nodes)),
        )
        transposed: dict[int, Floats] = {}
        for (i, j), matrix in problem.edges.items():
            if id(matrix) not in transposed:
                transposed[id(matrix)] = np.ascontiguousarray(matrix.T)
            work.links[i][j], work.links[j][i] = matrix, transposed[id(matrix)]
        return work

    def result(self) -> Reduced:
        left = [node for node, alive in enumerate(self.alive) if alive]
        place = {node: index for index, node in enumerate(left)}
        links = [{place[other] for other in self.links[node]} for node in left]
        nodes = tuple(left[index] for index in frontier_order(links, [self.costs[node].size for node in left]))
        place = {node: index for index, node in enumerate(nodes)}
        core = Problem(
            costs=tuple(self.costs[node] for node in nodes),
            edges={
                (place[i], place[j]): matrix
                for i in nodes
                for j, matrix in sorted(self.links[i].items(), key=lambda link: place[link[0]])
                if place[i] < place[j]
            },
        )
        return Reduced(
            core=core,
            nodes=nodes,
            states=tuple(self.states[node] for node in nodes),
            constant=self.constant,
            num_nodes=len(self.alive),
            eliminated=tuple(self.eliminated),
        )

    def remove_forbidden(self, nodes: Collection[int]) -> None:
        """Remove states of infinite cost and states without a partner at some neighbour, and what follows from it."""
        waiting = set(nodes)
        while waiting:
            node = waiting.pop()  # in any order: what is left in the end is the same
            possible = np.isfinite(self.costs[node])
            for matrix in self.links[node].values():
                possible &= np.minimum.reduce(matrix, 1) < np.inf
            if not possible.all():
                self.keep(node, possible)
                waiting.update(self.links[node])

    def remove_forbidden_by_costs(self, nodes: Collection[int]) -> None:
        """The same where all states have partners: only costs that became infinite forbid any."""
        self.remove_forbidden([node for node in nodes if not np.isfinite(self.costs[node]).all()])

    def keep(self, node: int, kept: npt.NDArray[np.bool_]) -> None:
        """Restrict a node to some of its states."""
        if not kept.any():
            raise Infeasible(())
        self.costs[node], self.states[node] = self.costs[node][kept], self.states[node][kept]
        for neighbour, matrix in self.links[node].items():
            self.links[node][neighbour] = matrix[kept]
            self.links[neighbour][node] = np.ascontiguousarray(self.links[neighbour][node][:, kept])
        self.unexamined.update((node, *self.links[node]))

    def eliminate_nodes(self) -> None:
        """R0, R1 and R2, the fewest neighbours first, until no node has so few."""
        queue = [(len(self.links[n]), self.costs[n].size, n) for n, alive in enumerate(self.alive) if alive]
        heapq.heapify(queue)
        while queue and queue[0][0] <= 2:
            degree, size, node = heapq.heappop(queue)
            if not self.alive[node] or (degree, size) != (len(self.links[node]), self.costs[node].size):
                continue
            neighbours = sorted(self.links[node])
            if node in self.protected:
                continue
            if self.costs[node].size == 1:
                self.absorb(node)
            elif not self.table_is_small(node):
                continue
            else:
                self.eliminate(node)
            for other in neighbours:
                heapq.heappush(queue, (len(self.links[other]), self.costs[other].size, other))

    def table_is_small(self, node: int) -> bool:
        sizes = [self.costs[other].size for other in self.links[node]]
        return len(sizes) < 2 or self.costs[node].size * sizes[0] * sizes[1] <= LARGEST_TABLE

    def eliminate(self, node: int) -> None:
        """Put the best state of a node, as a function of its neighbours' states, into their costs."""
        cost, (*matrices,) = self.costs[node], sorted(self.links[node].items())
        self.remember(node)
        if not matrices:
            self.constant += float(cost.min())
        elif len(matrices) == 1:
            ((other, matrix),) = matrices
            self.costs[other] = self.costs[other] + np.minimum.reduce(cost[:, None] + matrix)
            self.remove_forbidden_by_costs((other,))
        else:
            (p, to_p), (q, to_q) = matrices
            self.add_edge(p, q, _least_sums(cost[:, None] + to_p, to_q))

    def absorb(self, node: int) -> None:
        """Put the costs of a node's only state into its neighbours'."""
        self.constant += float(self.costs[node][0])
        neighbours = list(self.links[node].items())
        self.remember(node)
        for other, matrix in neighbours:
            self.costs[other] = self.costs[other] + matrix[0]
        self.remove_forbidden_by_costs([other for other, _ in neighbours])

    def remember(self, node: int) -> None:
        """Take a node out of the graph and keep what its state follows from."""
        links = sorted(self.links[node].items())
        self.alive[node] = False
        self.unexamined.discard(node)
        self.eliminated.append(
            Eliminated(
                node=node,
                states=self.states[node],
                cost=self.costs[node],
                neighbours=tuple((other, self.states[other], matrix) for other, matrix in links),
            )
        )
        for other, _ in links:
            del self.links[other][node]
            self.unexamined.add(other)
        self.links[node] = {}

    def add_edge(self, i: int, j: int, matrix: Floats) -> None:
        """Add to the matrix between two nodes; what one state costs whatever the other goes to the nodes."""
        if j in self.links[i]:
            matrix = matrix + self.links[i].pop(j)
            del self.links[j][i]
        for_i = np.minimum.reduce(matrix, 1)
        finite_i = _finite(for_i)
        rest = matrix - finite_i[:, None]
        for_j = np.minimum.reduce(rest)
        finite_j = _finite(for_j)
        rest = rest - finite_j
        self.costs[i], self.costs[j] = self.costs[i] + for_i, self.costs[j] + for_j
        largest = max(np.abs(finite_i).max(), np.abs(finite_j).max())
        if rest.max() > ROUND_OFF * largest or {i, j} <= self.protected:
            self.links[i][j], self.links[j][i] = rest, np.ascontiguousarray(rest.T)
        self.unexamined.update((i, j))
        self.remove_forbidden_by_costs((i, j))

    def remove_dominated(self) -> bool:
        """Search every node that changed for dominated states; whether some were found."""
        found = False
        while self.unexamined:
            node = min(self.unexamined)
            self.unexamined.remove(node)
            if node in self.protected or self.costs[node].size < 2:
                continue
            kept = _undominated(self.costs[node], list(self.links[node].values()))
            if not kept.all():
                found = True
                self.keep(node, kept)
                self.unexamined.discard(node)
        return found


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def _least_sums(left: Floats, right: Floats) -> Floats:
    """T[p, q] = min_a (left[a, p] + right[a, q]), a few a at a time."""
    step = max(1, 100_000 // (left.shape[1] * right.shape[1]))
    table = np.full((left.shape[1], right.shape[1]), np.inf)
    for start in range(0, left.shape[0], step):
        block = slice(start, start + step)
        np.minimum(table, (left[block, :, None] + right[block, None, :]).min(0), out=table)
    return table


def _undominated(cost: Floats, matrices: Sequence[Floats]) -> npt.NDArray[np.bool_]:
    """The states that no state dominates; of states that dominate each other the first stays."""
    size = cost.size
    width = sum(matrix.shape[1] for matrix in matrices)
    best = cost + sum((np.minimum.reduce(matrix, 1) for matrix in matrices), np.zeros(size))
    # A state that is cheap at its best is the likeliest to dominate: with many states only such are tried.
    tried = np.argsort(best, kind="stable")[: max(1, COMPARISONS // max(1, size * width))]
    surplus = cost[None, :] - cost[tried][:, None]
    for matrix in matrices:
        # inf - inf would be NaN; taken as 0 it can only keep a state that could go.
        columns = np.minimum(matrix.T, STANDS_FOR_INFINITY)
        least = np.full(surplus.shape, np.inf)
        step = max(1, IN_CACHE // least.size)
        for start in range(0, len(columns), step):
            block = columns[start : start + step]
            np.minimum(least, np.minimum.reduce(block[:, None, :] - block[:, tried][:, :, None]), out=least)
        surplus = surplus + least
    kept = np.ones(size, bool)
    for row, state in zip(surplus, tried):
        if kept[state]:
            dominated = row >= 0
            dominated[state] = False
            kept &= ~dominated
    return kept


def total_pairs(problem: Problem) -> int:
    """How many pairs of states the edges allow: the size of what is left to solve."""
    return sum(int(np.isfinite(matrix).sum()) for matrix in problem.edges.values())


# --- Carry the rows of a choice problem along as it shrinks, and price them ---
# Reductions may not touch what a row depends on: the rows' nodes are protected, and the edges that they weigh exist.


@dataclass(frozen=True, kw_only=True)
class ReducedWithRows:
    """A reduced problem, and the rows by its nodes and states."""

    reduced: Reduced
    rows: tuple[Row, ...]

    def priced(self, prices: Floats) -> Problem:
        """The core, with what the rows' weights cost at these prices of a whole limit."""
        costs, edges = list(self.reduced.core.costs), dict(self.reduced.core.edges)
        for row, price in zip(self.rows, prices, strict=True):
            per_weight = price / row_scale(row)
            for i, weight in row.nodes.items():
                costs[i] = costs[i] + per_weight * weight
            for ends, weight in row.edges.items():
                edges[ends] = edges[ends] + per_weight * weight
        return Problem(costs=tuple(costs), edges=edges)

    def shift(self, prices: Floats) -> float:
        """What to add to a value of the priced core to have one of the Lagrangian."""
        limits = sum(float(price) * row.limit / row_scale(row) for row, price in zip(self.rows, prices, strict=True))
        return self.reduced.constant - limits


def reduce_with_rows(problem: Problem, rows: Sequence[Row]) -> ReducedWithRows:
    """Reduce what no row depends on. Raises `Infeasible` when a node has no state left."""
    touched = {i for row in rows for i in (*row.nodes, *(end for ends in row.edges for end in ends))}
    reduced = reduce_problem(with_row_edges(problem, rows), touched)
    place = {node: index for index, node in enumerate(reduced.nodes)}
    kept = dict(zip(reduced.nodes, reduced.states))
    return ReducedWithRows(
        reduced=reduced,
        rows=tuple(
            replace(
                row,
                nodes={place[i]: weight[kept[i]] for i, weight in row.nodes.items()},
                edges=dict(
                    ((place[i], place[j]), w[np.ix_(kept[i], kept[j])])
                    if place[i] < place[j]
                    else ((place[j], place[i]), w.T[np.ix_(kept[j], kept[i])])
                    for (i, j), w in row.edges.items()
                ),
            )
            for row in rows
        ),
    )


def with_row_edges(problem: Problem, rows: Sequence[Row]) -> Problem:
    """The problem with an edge, of no cost, wherever a row weighs a pair that has none."""
    missing = {ends: np.zeros(w.shape) for row in rows for ends, w in row.edges.items() if ends not in problem.edges}
    return replace(problem, edges={**problem.edges, **missing}) if missing else problem


def restrict(problem: Problem, kept: Sequence[Indices]) -> Problem:
    """The problem with only some states of every node."""
    return Problem(
        costs=tuple(cost[keep] for cost, keep in zip(problem.costs, kept, strict=True)),
        edges={(i, j): matrix[np.ix_(kept[i], kept[j])] for (i, j), matrix in problem.edges.items()},
    )


def restrict_row(row: Row, kept: Sequence[Indices]) -> Row:
    """The row of a restricted problem."""
    edges: Mapping[tuple[int, int], Floats] = {
        (i, j): weight[np.ix_(kept[i], kept[j])] for (i, j), weight in row.edges.items()
    }
    return replace(row, nodes={i: weight[kept[i]] for i, weight in row.nodes.items()}, edges=edges)


def sum_of_rows(rows: Sequence[Row], factors: Floats) -> Row:
    """The rows times factors, as one; whatever is within all of them is within it."""
    nodes: dict[int, Floats] = {}
    edges: dict[tuple[int, int], Floats] = {}
    for row, factor in zip(rows, factors, strict=True):
        if factor == 0:
            continue
        for i, weight in row.nodes.items():
            nodes[i] = nodes.get(i, 0.0) + factor * weight
        for ends, weight in row.edges.items():
            edges[ends] = edges.get(ends, 0.0) + factor * weight
    limit = sum(float(factor) * row.limit for row, factor in zip(rows, factors, strict=True))
    return Row(name="all rows", nodes=nodes, edges=edges, limit=limit)


def weights_as_costs(problem: Problem, row: Row) -> Problem:
    """The problem of using up the least of one row."""
    problem = with_row_edges(problem, [row])

    def weights(costs: Floats, weight: Floats | None) -> Floats:
        return np.where(np.isinf(costs), np.inf, 0.0 if weight is None else weight)

    return Problem(
        costs=tuple(weights(cost, row.nodes.get(i)) for i, cost in enumerate(problem.costs)),
        edges={ends: weights(matrix, row.edges.get(ends)) for ends, matrix in problem.edges.items()},
    )
