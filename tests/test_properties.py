"""Whatever the program and wherever it is cut, stages compute what the step computes: on paper and on devices.

Examples are drawn from a fixed seed for each test, so that a run is the same everywhere, and a failing one is
printed as a `Model` and a `Cutting`. The suite draws 100 programs, `AUTOPAR_ALL_EXAMPLES=1` all 300.
"""

import os
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, reject, settings

import autopar
from autopar.compiler import passes
from autopar.compiler.pipeline.stage_graph import evaluate
from tests.equivalence import largest_difference
from tests.random_programs import Cutting, Model, Operation, cuttings, make_arguments, make_plan, make_step, models

pytestmark = pytest.mark.usefixtures("float64")

Property = Callable[[Model, Cutting], None]
EXAMPLES = 3 if os.environ.get("AUTOPAR_ALL_EXAMPLES") else 1  # how many times those of the suite
TOLERANCE = 1e-9  # float64; microbatches and stages add up in another order


def check(holds: Property, *, seed: int, num_examples: int) -> None:
    """Check a property of models and cuttings on examples that depend on the seed alone."""
    options: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    checked = settings(max_examples=num_examples, **options)(given(model=models, cutting=cuttings())(holds))
    hypothesis.seed(seed)(checked)()


def step_on_paper(model: Model, cutting: Cutting) -> None:
    """The stages, evaluated task by task, give what the step gives."""
    state, batch = make_arguments()
    step = make_step(model)
    trace = autopar.parallelize(step).trace(state, batch).trace
    plan = make_plan(trace, cutting)
    if plan is None:
        reject()
    graph = passes.cut_step(trace, plan)
    got = jax.jit(lambda *leaves: evaluate(graph, leaves))(*jax.tree.leaves((state, batch)))
    want = jax.jit(step)(state, batch)
    agreement = largest_difference(jax.tree.unflatten(jax.tree.structure(want), got), want, TOLERANCE)
    assert agreement.holds, str(agreement)


def step_on_devices(model: Model, cutting: Cutting) -> None:
    """Two steps of the program, the second from the state that the first has placed, give what the step gives."""
    state, batch = make_arguments()
    step = make_step(model)
    plain = jax.jit(step)
    traced = autopar.parallelize(step, donate_argnums=(0,) if cutting.seed % 2 else ()).trace(state, batch)
    plan = make_plan(traced.trace, cutting)
    if plan is None:
        reject()
    compiled = traced.plan(plan).lower().compile()
    got, want = (jax.tree.map(jnp.array, state), None), (state, None)
    for _ in range(2):
        got, want = compiled(got[0], batch), plain(want[0], batch)
    agreement = largest_difference(got, want, TOLERANCE)
    assert agreement.holds, str(agreement)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))])
def test_the_stages_of_a_random_program_evaluate_to_it(seed):
    check(step_on_paper, seed=seed, num_examples=10 * EXAMPLES)


@pytest.mark.parametrize("seed", [100, 101, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (102, 103))])
def test_the_program_of_a_random_step_runs_to_the_same_result(seed):
    check(step_on_devices, seed=seed, num_examples=5 * EXAMPLES)


def test_what_two_rounds_make_again_has_a_name_in_each():
    operations = (
        Operation(name="normalize", back=0, skip=0, weight=0, wrapper="remat"),
        Operation(name="shift", back=0, skip=0, weight=0, wrapper="remat"),
        Operation(name="choose", back=0, skip=3, weight=0, wrapper="jit"),
    )
    step_on_devices(
        Model(
            operations=operations,
            loss="sum",
            loss_wrapper="plain",
            optimizer="sgd",
            num_updates=2,
            metrics=True,
        ),
        Cutting(
            num_stages=3,
            more_layers=2,
            num_microbatches=4,
            schedule="zero-bubble",
            recomputed=(0, 9, 0, 9),
            split_loops=False,
            seed=438323,
        ),
    )
