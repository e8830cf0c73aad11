"""A choice problem as a linear program over the local marginal polytope.

    min  Σ c_i[a] s_i[a] + Σ M_ij[a,b] e_ij[a,b]
    s.t. Σ_a s_i[a] = 1                                      every node
         Σ_b e_ij[a,b] = s_i[a],  Σ_a e_ij[a,b] = s_j[b]     every edge; forbidden pairs have no variable
         Σ w_i[a] s_i[a] + Σ W_ij[a,b] e_ij[a,b] <= limit    every row, divided by its limit
         s, e >= 0, and s whole numbers where asked for

On the graphs of train steps the program without rows nearly always has a solution in whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.intra_op.choice_problem import Floats, Indices, Infeasible, Problem, Row, States, row_scale
from autopar.compiler.intra_op.highs import Program, run_program

WHOLE = 1 - 1e-6


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What the solver found. `states` is None when it ran out of time without any."""

    states: States | None
    bound: float
    whole: bool
    """Whether `states` is what the program's solution says, rather than a rounding of it."""


def solve_relaxation(problem: Problem, rows: Sequence[Row] = (), *, time_limit_s: float) -> Solution:
    """The linear program: a bound, and the likeliest state of every node."""
    return _solve(problem, rows, time_limit_s=time_limit_s)


def solve_in_whole_numbers(
    problem: Problem,
    rows: Sequence[Row] = (),
    *,
    start: Sequence[int] | None = None,
    time_limit_s: float,
    gap: float = 0.0,
) -> Solution:
    """The program in whole numbers, by branch and bound, from a known choice, up to an (absolute) gap."""
    return _solve(problem, rows, whole=True, start=start, time_limit_s=time_limit_s, gap=gap)


def _solve(
    problem: Problem,
    rows: Sequence[Row],
    *,
    whole: bool = False,
    start: Sequence[int] | None = None,
    time_limit_s: float,
    gap: float = 0.0,
) -> Solution:
    pairs = _pairs(problem)
    columns = None if start is None else _columns_of(problem, pairs, start)
    result = run_program(_as_program(problem, pairs, rows, whole), start=columns, time_limit_s=time_limit_s, gap=gap)
    if not result.feasible:
        raise Infeasible([row.name for row in rows])
    if result.columns is None:
        return Solution(states=None, bound=result.bound, whole=False)
    sizes = [cost.size for cost in problem.costs]
    chances = np.split(result.columns[: sum(sizes)], np.cumsum(sizes)[:-1])
    return Solution(
        states=tuple(int(chance.argmax()) for chance in chances),
        bound=result.bound,
        whole=all(chance.max() > WHOLE for chance in chances),
    )


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The allowed pairs of one edge, and the columns that stand for them."""

    low: Indices
    high: Indices
    columns: Indices


def _pairs(problem: Problem) -> dict[tuple[int, int], _Pairs]:
    pairs = dict[tuple[int, int], _Pairs]()
    end = sum(cost.size for cost in problem.costs)
    for ends, matrix in problem.edges.items():
        low, high = np.nonzero(np.isfinite(matrix))
        pairs[ends] = _Pairs(low=low, high=high, columns=end + np.arange(low.size))
        end += low.size
    return pairs


def _first_columns(problem: Problem) -> Indices:
    """The column of every node's first state."""
    return np.cumsum([0] + [cost.size for cost in problem.costs])


def _as_program(problem: Problem, pairs: dict[tuple[int, int], _Pairs], rows: Sequence[Row], whole: bool) -> Program:
    first = _first_columns(problem)
    num_nodes, num_states = len(problem.costs), int(first[-1])
    entries = [(np.repeat(np.arange(num_nodes), np.diff(first)), np.arange(num_states), np.ones(num_states))]
    end = num_nodes
    for (i, j), matrix in problem.edges.items():
        allowed = pairs[i, j]
        for node, states, size in ((i, allowed.low, matrix.shape[0]), (j, allowed.high, matrix.shape[1])):
            entries.append((end + states, allowed.columns, np.ones(states.size)))
            entries.append((end + np.arange(size), first[node] + np.arange(size), -np.ones(size)))
            end += size
    entries += [_row_entries(row, end + number, first, pairs) for number, row in enumerate(rows)]
    entry_rows, entry_columns, values = (np.concatenate(part) for part in zip(*entries))
    equal = np.concatenate([np.ones(num_nodes), np.zeros(end - num_nodes)])
    matrices = [matrix[pairs[ends].low, pairs[ends].high] for ends, matrix in problem.edges.items()]
    return Program(
        costs=np.concatenate([*problem.costs, *matrices]),
        lower=np.concatenate([equal, np.full(len(rows), -np.inf)]),
        upper=np.concatenate([equal, [row.limit / row_scale(row) for row in rows]]),
        entry_rows=entry_rows,
        entry_columns=entry_columns,
        entries=values,
        num_whole=num_states if whole else 0,
    )


def _row_entries(
    row: Row, number: int, first: Indices, pairs: dict[tuple[int, int], _Pairs]
) -> tuple[Indices, Indices, Floats]:
    columns = [first[i] + np.arange(weight.size) for i, weight in row.nodes.items()]
    columns += [pairs[ends].columns for ends in row.edges]
    weights = [*row.nodes.values(), *(w[pairs[ends].low, pairs[ends].high] for ends, w in row.edges.items())]
    at = np.concatenate([np.empty(0, np.intp), *columns])
    return np.full(at.size, number), at, np.concatenate([np.empty(0), *weights]) / row_scale(row)


def _columns_of(problem: Problem, pairs: dict[tuple[int, int], _Pairs], states: Sequence[int]) -> Floats:
    """The values of the columns that say `states`."""
    chosen = _first_columns(problem)[:-1] + np.asarray(states)
    columns = [np.zeros(sum(cost.size for cost in problem.costs))]
    columns[0][chosen] = 1.0
    for (i, j), allowed in pairs.items():
        columns.append(((allowed.low == states[i]) & (allowed.high == states[j])).astype(float))
    return np.concatenate(columns)
