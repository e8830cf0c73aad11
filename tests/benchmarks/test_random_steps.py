"""Random steps of every kind of operation and structure equal plain `jax.jit`, or are refused with a reason."""

import pytest

from benchmarks.random_steps import METHODS, OPERATIONS, STRUCTURES, draw, verdicts

SEEDS = range(56)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("number", range(len(METHODS)), ids=METHODS)
def test_random_steps_are_right_or_refused(number):
    """The methods take turns; `python -m benchmarks.random_steps` tries all of them on more steps."""
    name, steps = list(METHODS)[number], [draw(seed) for seed in SEEDS[number :: len(METHODS)]]
    found = [(step, *next(verdicts(step, [name]))) for step in steps]
    told = "\n".join(f"{name}: {step} is {result}: {text}" for step, _, result, text in found)
    results = [result for _, _, result, _ in found]
    assert set(results) <= {"right", "refused"}, told
    assert results.count("right") > len(results) / 2, told


def test_the_draws_have_every_operation_and_structure():
    steps = [draw(seed) for seed in SEEDS]
    assert {name for step in steps for name, _ in step.operations} == set(OPERATIONS)
    assert {step.structure for step in steps} == set(STRUCTURES)
    assert {step.precision for step in steps} == {"float64", "bfloat16"}
