"""The figures that the benchmarks report mean what they say; no test here looks at a clock."""

import json
from math import comb
from pathlib import Path

import pytest

from benchmarks import overhead


@pytest.mark.parametrize("n", [5, 20, 100, 301])
def test_interval_of_the_median_holds_it_with_95_percent(n: int) -> None:
    _, (low, high) = overhead.median_interval(range(n))
    # The true median lies between two order statistics with this binomial probability, for any distribution.
    coverage = sum(comb(n, k) for k in range(int(low) + 1, int(high) + 1)) / 2**n
    assert coverage > (0.94 if n > 5 else 0.5)


def test_ratio_is_that_of_neighbours() -> None:
    # The machine becomes ten times slower halfway; each neighbour still takes 1.5 times as long.
    pairs = [(1.0, 1.5)] * 10 + [(10.0, 15.0)] * 10
    comparison = overhead.compare("", pairs)
    assert comparison.ratio == 1.5
    assert comparison.interval == (1.5, 1.5)


@pytest.mark.slow
def test_overhead_is_measured_and_written(tmp_path: Path) -> None:
    overhead.main(["--repetitions", "3", "--json", str(tmp_path / "overhead.json")])
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert len(result["comparisons"]) == 2 + len(overhead.NUMBERS_OF_LEAVES)
    assert result["driver"]["num_instructions"] > 0
