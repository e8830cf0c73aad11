"""Every pass leaves a value that its own checker accepts, for every model of the zoo."""

import itertools
from typing import Any

import pytest

import autopar
from autopar.compiler import passes
from autopar.ir.plan import Plan
from tests.zoo import ZOO, Case

pytestmark = pytest.mark.usefixtures("float64")

# Each model has one of them: what a schedule does to a model is tested where programs run.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "num_microbatches": 2},
    {"schedule": "zero-bubble", "num_microbatches": 4},
    {"schedule": "gpipe", "num_microbatches": 1, "remat": True},
)
ROWS = [pytest.param(*row, id=f"{row[0]}: {row[1]['schedule']}") for row in zip(ZOO.values(), itertools.cycle(OPTIONS))]


@pytest.mark.parametrize(("case", "options"), ROWS)
def test_each_value_between_passes_is_verified(case: Case, options: dict[str, Any]) -> None:
    step, *arguments = case.make()
    method = autopar.PipelineParallel(num_stages=2, batch_statistics=case.batch_statistics, **options)
    parallelized = autopar.parallelize(step, method=method, batch_argnums=case.batch_argnums)
    planned = parallelized.trace(*arguments, **case.kwargs).plan()
    assert Plan.from_json(planned.plan.to_json()) == planned.plan
    passes.cut_step(planned.trace, planned.plan).verify()
    passes.lower_step(planned.trace, planned.plan).verify()
