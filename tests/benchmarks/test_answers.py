"""Answers about plans are held against plans made anew, and one that is wrong is noticed."""

from dataclasses import replace

import pytest

from benchmarks import answers
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")
@pytest.mark.parametrize(
    ("model", "method"),
    [("several_arguments", "data parallel"), ("tied_embedding", "zero"), ("mlp", "two kinds"), ("mlp", "auto stages")],
)
def test_all_answers_about_a_plan_hold(model, method):
    row = answers.measure(model, method)
    assert row.holds, row.wrong
    assert row.answers >= 9 and row.prices >= 12 and not row.refused


def test_a_price_that_does_not_come_out_is_noticed():
    asked = answers.Asked(ZOO["mlp"], "data parallel")
    right = asked.planned.explain("num_microbatches")
    asked._hold_explanation("num_microbatches", right)
    assert not asked.wrong
    price = replace(right.chosen.price, step_time_s=1.01 * right.chosen.step_time_s)
    asked._hold_explanation("num_microbatches", replace(right, chosen=replace(right.chosen, price=price)))
    assert len(asked.wrong) == 1 and "was printed" in asked.wrong[0]


def test_every_method_is_asked_about():
    named = {type(method).__name__ for method in answers.METHODS.values()}
    assert named == {each.__name__ for each in answers.Method.__args__}
    assert len(answers.MODELS) >= 10
