"""Composed ranges cost what direct enumeration of the shardings at every cut finds."""

import itertools
import random

import numpy as np
import pytest

from autopar.compiler.inter_op.range_costs import CostTable, compose, pareto
from autopar.errors import InvalidArgument


def random_tables(seed: int, *, num_layers: int, choices: int):
    """Layers of two classes with 1 to 3 shardings at their ends; a choice in five is missing."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    width = draw.randint(1, 3)

    def table(name: str) -> CostTable:
        costs = rng.integers(1, 30, size=(width, width, choices, 3)).astype(float)
        costs[rng.random(costs.shape[:3]) < 0.2] = np.inf
        return CostTable(name=name, costs=costs)

    kinds, edges = [table("a"), table("b")], [table("x"), table("y")]
    layers = [draw.choice(kinds) for _ in range(num_layers)]
    return layers, [draw.choice(edges) for _ in range(num_layers - 1)]


def enumerated(layers, boundaries, start: int, stop: int, row: int, column: int) -> set[tuple[float, ...]]:
    """The front of the sums over every choice of shardings and of entries."""
    tables = [layers[start]]
    for number in range(start + 1, stop):
        tables += [boundaries[number - 1], layers[number]]
    width = layers[0].costs.shape[0]
    sums = set()
    for between in itertools.product(range(width), repeat=len(tables) - 1):
        path = [row, *between, column]
        fronts = [table.front(path[n], path[n + 1]) for n, table in enumerate(tables)]
        sums |= {tuple(float(x) for x in sum(vectors)) for vectors in itertools.product(*fronts)}
    return {a for a in sums if not any(b != a and all(y <= x for x, y in zip(a, b)) for b in sums)}


@pytest.mark.parametrize("seed", range(12))
def test_composed_ranges_equal_enumeration(seed) -> None:
    layers, boundaries = random_tables(seed, num_layers=3, choices=2)
    ranges = compose(layers, boundaries, max_choices=1000)
    assert sorted(ranges) == list(itertools.combinations(range(4), 2))
    width = layers[0].costs.shape[0]
    for (start, stop), table in ranges.items():
        for row, column in itertools.product(range(width), repeat=2):
            expected = enumerated(layers, boundaries, start, stop, row, column)
            if stop == start + 1:
                assert expected <= {tuple(x) for x in table.front(row, column)}
            else:
                assert {tuple(x) for x in table.front(row, column)} == expected


def test_equal_sequences_are_computed_once() -> None:
    layer = CostTable(name="layer", costs=np.ones((2, 2, 1, 2)))
    edge = CostTable(name="edge", costs=np.zeros((2, 2, 1, 2)))
    ranges = compose([layer] * 10, [edge] * 9)
    assert len({id(table) for table in ranges.values()}) == 10
    assert ranges[3, 8].front(0, 1).tolist() == [[5.0, 5.0]]


def test_a_thinned_front_keeps_both_ends() -> None:
    front = pareto(np.array([[float(n), float(100 - n)] for n in range(100)]), max_choices=5)
    assert len(front) <= 6
    assert front[0].tolist() == [0.0, 100.0]
    assert front[-1].tolist() == [99.0, 1.0]


@pytest.mark.parametrize(
    ("num_boundaries", "width", "message"),
    [(1, 2, r"3 layers have 2 boundaries; 1 were given"), (2, 3, r"Boundary 0 is of \(3, 3\).*\(2, 2\)")],
)
def test_boundaries_that_do_not_match_are_refused(num_boundaries, width, message) -> None:
    layer = CostTable(name="layer", costs=np.ones((2, 2, 1, 2)))
    edge = CostTable(name="edge", costs=np.zeros((width, width, 1, 2)))
    with pytest.raises(InvalidArgument, match=message):
        compose([layer] * 3, [edge] * num_boundaries)
