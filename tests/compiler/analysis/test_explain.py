"""Every answer is a plan: it takes what is printed, keeps the memory that is printed, and computes the same."""

import json

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import InvalidArgument
from tests.small_steps import draw, sgd

METHODS = {
    "one program": autopar.Auto(num_stages=1, mesh_shape=(4,)),
    "searched stages": autopar.Auto(num_stages=2, num_microbatches=2, schedule="1f1b"),
    "data parallel": autopar.DataParallel(),
    "microbatches": autopar.DataParallel(num_microbatches=2),
    "stages by hand": autopar.PipelineParallel(num_stages=2, layers=3, num_microbatches=2),
    "stages of one device": autopar.PipelineParallel(num_stages=4, num_microbatches=2),
    "megatron": autopar.Megatron(data=2, pipeline=2, num_microbatches=2, zero=1),
    "zero": autopar.Zero(mesh_shape=(4,)),
}


def loss(params, batch):
    for up, down in params["layers"]:
        batch = batch + jnp.tanh(batch @ up) @ down
    return jnp.mean(batch**2)


def arguments():
    layers = [(draw(i, 16, 32), draw(9 + i, 32, 16)) for i in range(4)]
    return {"layers": layers, "count": draw(0)}, draw(20, 8, 16)


@pytest.fixture(scope="module")
def plans():
    """Each plan once, made when it is first asked for."""
    known = {}

    def planned(name):
        if name not in known:
            cluster = autopar.Cluster(num_devices=4, kind="cpu")
            step = autopar.parallelize(sgd(loss), method=METHODS[name], cluster=cluster)
            known[name] = step.trace(*arguments()).plan()
        return known[name]

    return planned


def traced(planned):
    """The same step anew, so that nothing that was simulated is known."""
    cluster = autopar.Cluster(num_devices=4, kind="cpu")
    return autopar.parallelize(sgd(loss), cluster=cluster).trace(*arguments())


def assert_priced_as_planned(planned, explained):
    here = planned.simulate()
    assert (explained.chosen.step_time_s, explained.chosen.price.peak_bytes) == (here.step_time_s, here.peak_bytes)
    last = [each for each in explained.others if each.plan is not None][-1]
    again = traced(planned).plan(autopar.Plan.from_json(last.plan.to_json()))
    report = again.simulate()
    assert (report.step_time_s, report.peak_bytes) == (last.price.step_time_s, last.price.peak_bytes)
    return again


@pytest.mark.parametrize("name", [name for name in METHODS if name != "stages of one device"])
def test_a_layout_has_the_price_of_the_plan_with_it(plans, name):
    planned = plans(name)
    explained = planned.explain("layers.1.0")
    assert explained.subject == "params.layers.1.0 of shape (16, 32)"
    assert len({each.choice for each in explained.alternatives}) == len(explained.alternatives) >= 3
    assert_priced_as_planned(planned, explained)
    if isinstance(METHODS[name], autopar.Auto):  # it looked at all of them, each stage by itself
        assert explained.alternatives[0].step_time_s > 0.99 * explained.chosen.step_time_s


def test_another_layout_of_stages_computes_the_same():
    step = autopar.parallelize(sgd(loss), method=METHODS["stages by hand"])
    traced = step.trace(*arguments())
    explained = traced.plan().explain("layers.1.0")
    other = next(each for each in explained.others if each.choice == str(P("data")))
    again = traced.plan(other.plan)
    assert again.plan.input_specs["params.layers.1.0"][0] == "data"
    report = again.verify(*arguments())
    assert report, str(report)


@pytest.mark.parametrize(
    ("name", "decision", "choices"),
    [
        ("stages by hand", "stages", {"stage 1 from layer 1, not 2"}),
        ("stages of one device", "schedule", {"eager-1f1b", "gpipe", "zero-bubble"}),
        ("searched stages", "num_microbatches", {"1", "4"}),
        ("megatron", "remat", {"every stage computed again"}),
        ("one program", "num_microbatches", {"2"}),
        ("zero", "mesh_shape", {"1x4", "2x2"}),
        ("one program", "remat", None),
    ],
)
def test_a_decision_has_the_price_of_the_plan_with_its_neighbors(plans, name, decision, choices):
    planned = plans(name)
    explained = planned.explain(decision)
    assert choices is None or {each.choice for each in explained.others} == choices
    assert_priced_as_planned(planned, explained)
    assert "as planned" in str(explained)
    assert json.loads(explained.to_json())["chosen"] == explained.chosen.choice


def test_a_decision_that_a_plan_does_not_have_says_so(plans):
    assert "no other choice" in str(plans("data parallel").explain("schedule"))


@pytest.mark.parametrize("name", ["data parallel", "megatron", "zero"])
def test_a_collective_names_the_line_of_the_model_that_needs_it(plans, name):
    planned = plans(name)
    kind = planned.plan.planned_collectives[0].kind
    causes = planned.explain(kind)
    assert [each for _, each in causes.collectives] == [c for c in planned.plan.planned_collectives if c.kind == kind]
    by_line = planned.explain("test_explain.py:")
    assert all(each.line.startswith("test_explain.py:") for _, each in by_line.collectives)
    assert any("(loss)" in each.line for _, each in by_line.collectives)
    assert "test_explain.py:" in str(by_line) and json.loads(by_line.to_json())["collectives"]


def test_a_question_that_finds_nothing_says_what_there_is(plans):
    with pytest.raises(InvalidArgument, match=r"no collective of the plan has it.*params.layers.0.0.*num_microbatches"):
        plans("zero").explain("no_such(")
    with pytest.raises(InvalidArgument, match="too small to be split"):
        plans("megatron").explain("count")
