"""The benchmark of planning plans what it says; no test here looks at a clock."""

import json
from pathlib import Path

import pytest

from benchmarks import plan_time
from benchmarks.plan_time import Case


def test_planning_does_not_grow_with_the_length_of_a_scan() -> None:
    shallow, deep = (plan_time.measure(Case(layers=layers, mesh=(2, 2))) for layers in (2, 64))
    assert shallow.nodes == deep.nodes
    assert shallow.step_time_s < deep.step_time_s
    assert deep.gap < 1e-6


@pytest.mark.slow
def test_time_of_planning_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "plan_time.json"
    plan_time.main(["--model", "llama-8b", "--layers", "2", "--unrolled", "--mesh", "2x2", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["case"]["mesh"] == [2, 2]
    assert 0 < row["solve_s"] < row["total_s"]
