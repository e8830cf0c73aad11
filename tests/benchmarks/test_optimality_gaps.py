"""Plans of the zoo are proven to be as good as optimal; `benchmarks/optimality_gaps.py` has all models and meshes."""

import json
from pathlib import Path

import pytest

from autopar.compiler.solver.solve import STEPS
from benchmarks import optimality_gaps
from benchmarks.optimality_gaps import MOST, measure

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("kind", ["cpu", "h100"])
@pytest.mark.parametrize(("case", "mesh"), [("sum_loss", "2x4"), ("regularized", "2x2x2"), ("control_flow", "4x2")])
def test_plan_is_proven_to_be_near_the_optimum(case, mesh, kind):
    (row,) = measure(case, mesh, kind, time_limit_s=600)
    assert 0 < row.lower_bound_s <= row.objective_s
    assert row.gap <= MOST


def test_the_benchmark_writes_every_row_and_counts_what_is_above_the_gap(tmp_path: Path):
    file = tmp_path / "gaps.json"
    common = ["--cases", "mlp", "--meshes", "8", "2x4", "--json", str(file)]
    assert optimality_gaps.main(common) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["case"], row["mesh"]) for row in rows] == [("mlp", "8"), ("mlp", "2x4")]
    assert optimality_gaps.main([*common, "--most", "-1"]) == 2


def test_without_steps_of_the_solver_the_bound_holds():
    plan, again, *left_out = measure("sum_loss", "2x4", "cpu", time_limit_s=600, without=STEPS)
    assert [row.without for row in left_out] == list(STEPS)
    assert again.objective_s == pytest.approx(plan.objective_s, rel=1e-12)
    assert all(row.lower_bound_s <= plan.objective_s * (1 + 1e-12) for row in left_out)
    assert all(row.objective_s >= plan.lower_bound_s * (1 - 1e-12) for row in left_out)
