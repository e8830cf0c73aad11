"""Every answer is a plan: it takes what is printed, keeps the memory that is printed, and computes the same."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compiler.analysis.revision import DECISIONS
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Link
from tests.compiler.planning.demands.test_groups import cluster
from tests.small_steps import SEPARATE, draw, sgd, tanh_loss

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
        ("stages of one device", "schedule", {"eager-1f1b", "gpipe", "zero-bubble", "zero-bubble-h2"}),
        ("searched stages", "num_microbatches", {"1", "4"}),
        ("megatron", "remat", {"every stage computed again", "every layer of stage 0 computed again"}),
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


def scoped_loss(params, batch):
    with autopar.replicate(name="body"):
        h = jnp.tanh(batch @ params["body"])
    with autopar.split(devices=2, name="head"):
        return jnp.mean((h @ params["head"]) ** 2)


def explained(method, question, loss=scoped_loss, cluster=None):
    params = {"body": draw(0, 16, 32), "head": draw(1, 32, 16)}
    cluster = cluster or autopar.Cluster(num_devices=4, kind="cpu")
    traced = autopar.parallelize(sgd(loss), method=method, cluster=cluster).trace(params, draw(2, 8, 16))
    planned = traced.plan()
    return planned, planned.explain(question)


HEAD = "the scope autopar.split(devices=2, name='head')"


@pytest.mark.parametrize("options", [{"mesh_shape": (2, 2)}, {"num_stages": 2, "mesh_shape": (1, 2), "layers": 2}])
def test_a_layout_in_a_scope_is_as_it_is_because_the_user_asked_for_it(options):
    planned, answer = explained(autopar.Auto(**options), "head")
    assert answer.asked == (HEAD,) and f"Because you asked for it by {HEAD}." in str(answer)
    assert not answer.chosen.against and answer.to_data()["asked"] == answer.asked
    whole = next(each for each in answer.others if each.choice == "P()")
    assert whole.against == f"against {HEAD}" and whole.price is not None
    assert planned.explain("body").asked == ("the scope autopar.replicate(name='body')",)
    shape = planned.explain("mesh_shape")
    assert HEAD in shape.asked and f"the option mesh_shape={options['mesh_shape']} of Auto" in shape.asked


def test_the_collectives_of_a_scope_say_that_the_user_asked_for_it():
    _, answer = explained(autopar.Auto(mesh_shape=(2, 2)), "name='head'")
    assert answer.asked == ("autopar.split(devices=2, name='head')",)
    assert "Because you asked for it by the scope autopar.split(devices=2, name='head')" in str(answer)


def test_named_stages_are_where_they_are_because_the_user_asked_for_it():
    def loss(params, batch):
        with autopar.stage("encoder"):
            h = jnp.tanh(batch @ params["body"])
        with autopar.stage("decoder"):
            return jnp.mean((h @ params["head"]) ** 2)

    planned, answer = explained(autopar.Auto(), "stages", loss)
    assert answer.asked == ("the scope autopar.stage(name='encoder')", "the scope autopar.stage(name='decoder')")
    assert planned.explain("head").asked == ("the scope autopar.stage(name='decoder')",)


@pytest.mark.parametrize("options", [{"num_stages": 1, "mesh_shape": (2, 2)}, {"num_stages": 2, "layers": 2}])
def test_pins_stay_while_others_are_explained_and_are_named(options):
    pinned = {"head": P(None, "model")}
    method = autopar.Auto(**options, pins=pinned, ignore_user_shardings=True)
    planned, answer = explained(method, "head")
    assert answer.asked == ("the pin 'head'",) and not answer.chosen.against
    assert all(each.against == "against the pin 'head'" for each in answer.others)
    for each in planned.explain("body").others:
        assert each.plan.input_specs["params.head"] == P(None, "model")
    assert planned.explain("body").asked == ()


@pytest.mark.parametrize(
    ("method", "question", "asked"),
    [
        (autopar.Zero(stage=1, mesh_shape=(4,)), "head", "the method Zero(mesh_shape=(4,), stage=1)"),
        (autopar.DataParallel(), "head", "the method DataParallel()"),
        (autopar.Megatron(tensor=2, data=2), "mesh_shape", "the option tensor=2 of Megatron"),
        (autopar.Auto(num_microbatches=2), "num_microbatches", "the option num_microbatches=2 of Auto"),
    ],
)
def test_what_a_method_decides_is_said(method, question, asked):
    _, answer = explained(method, question, plain_loss)
    assert asked in answer.asked


def test_a_restricted_search_is_explained_within_its_restriction():
    method = autopar.Zero(mesh_shape=(4,), ignore_user_shardings=True)
    planned, answer = explained(method, "num_microbatches")
    (other,) = answer.others
    assert other.step_time_s == planned.what_if(num_microbatches=2).after.simulated.step_time_s


@pytest.mark.parametrize("question", ["layers.1.0", "num_microbatches"])
def test_layouts_chosen_anew_keep_the_memory_where_some_can(plans, question):
    limit = 0.95 * plans("searched stages").simulate().peak_bytes
    tight = autopar.Cluster(num_devices=4, machine=replace(SEPARATE, devices_per_host=4, memory_bytes=limit))
    step = autopar.parallelize(sgd(loss), method=METHODS["searched stages"], cluster=tight)
    others = step.trace(*arguments()).plan().explain(question).others
    assert others and all(other.fits for other in others)


@pytest.mark.parametrize("name", ["stages by hand", "megatron"])
def test_plans_on_devices_of_several_kinds_are_explained(name):
    planned, answer = explained(METHODS[name], "head", plain_loss, cluster(memory_bytes=(1e9, 2e6)))
    assert {mesh.machine for mesh in planned.plan.meshes} == {"fast", "slow"}
    report = planned.simulate()
    assert answer.memory_limit_bytes == report.memory_limit_bytes == 2e6 and len(answer.others) >= 2
    for question in DECISIONS:
        answers = planned.explain(question)
        for each in answers.others:
            if each.plan is not None:
                again = replace(planned, plan=autopar.Plan.from_json(each.plan.to_json())).simulate()
                assert (again.step_time_s, again.peak_bytes) == (each.step_time_s, each.price.peak_bytes)
    assert planned.explain("num_microbatches").others


def plain_loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["body"]) @ params["head"]) ** 2)


def test_kinds_of_parallelism_stay_while_stages_are_explained():
    method = autopar.Auto(num_stages=2, num_microbatches=2, layers=2, kinds=("data", "pipeline"))
    planned, answer = explained(method, "num_microbatches", plain_loss)
    counts = [each for each in answer.others if each.plan is not None]
    assert counts and all(
        not spec or name == "batch" for each in counts for name, spec in each.plan.input_specs.items()
    )
    layouts = planned.explain("head")
    assert layouts.asked == ("the option kinds=('data', 'pipeline') of Auto",)
    for each in layouts.others:
        assert each.plan is None or "params.body" not in each.plan.input_specs


def of_groups(bandwidth=1e9, **slow):
    """Two devices, and two of the same figures but those of `slow`."""
    fast = cluster().groups[0].machine
    machines = (fast, replace(fast, name="slow", kind="slow", **slow))
    groups = [autopar.Cluster(num_devices=2, machine=each) for each in machines]
    return autopar.Cluster.of_groups(groups, Link(latency_s=1e-6, bandwidth=bandwidth, ramp_bytes=0.0))


def three_layers(method, there):
    params, batch = [draw(i, 64, 64) for i in range(3)], (draw(9, 512, 64), jnp.zeros((512, 64)))
    traced = autopar.parallelize(sgd(tanh_loss), method=method, cluster=there).trace(params, batch)
    return traced, traced.plan()


UNEVEN = autopar.PipelineParallel(num_stages=2, layers=3, num_microbatches=4)
SLOW_LINK = Link(latency_s=1e-4, bandwidth=1e6, ramp_bytes=0.0)


@pytest.mark.parametrize(
    ("figure", "slow"),
    [
        ("rate", {"peak_flops": {"float32": 1e9}, "matmul_share": {"float32": 1.0}, "memory_bandwidth": 1e8}),
        ("links", {"intra": SLOW_LINK}),
        ("memory", {"memory_bytes": 2.5e5}),
    ],
)
def test_the_figure_that_decides_where_a_stage_lies_is_the_one_that_differs(figure, slow):
    there, seen = of_groups(**slow), []
    for turned in (there, autopar.Cluster.of_groups(there.groups[::-1], there.link_between(0, 1))):
        traced, planned = three_layers(UNEVEN, turned)
        answer = planned.explain("machines")
        (other,) = answer.others
        assert (
            other.choice
            != answer.chosen.choice
            == ", ".join(f"stage {n} on {group.machine.name}" for n, group in enumerate(turned.groups))
        )
        worse = not other.fits or other.step_time_s > answer.chosen.step_time_s
        assert (other.decides is not None) == worse
        if other.decides is None:
            continue
        decides = other.decides
        seen.append(decides.figure)
        assert f"by its {figure}" in str(answer)
        assert figure == "memory" or decides.step_time_s == pytest.approx(decides.planned_s, rel=0.05)
        assert json.loads(answer.to_json())["alternatives"][-1]["decides"] == decides.to_data()
        for plan, printed in ((decides.plan, decides.step_time_s), (decides.instead_of, decides.planned_s)):
            again = traced.on_cluster(decides.cluster).plan(autopar.Plan.from_json(plan.to_json()))
            assert again.simulate().step_time_s == printed
    assert set(seen) == {figure}


def test_a_step_on_one_machine_has_the_price_of_the_same_step_on_another():
    slow = replace(cluster().groups[1].machine, devices_per_host=1)
    small = autopar.Cluster.of_groups(
        [cluster().groups[0], autopar.Cluster(num_devices=1, machine=slow)],
        Link(latency_s=1e-3, bandwidth=1e4, ramp_bytes=0.0),
    )
    for there in (cluster(bandwidth=1e4), small):
        traced, planned = three_layers(autopar.Auto(num_microbatches=1), there)
        answer = planned.explain("machines")
        assert planned.plan.sharding is not None and answer.chosen.choice == "the step on fast"
        assert [each.choice for each in answer.others] == ["the step on slow"]
        assert answer.others[0].decides.figure == "rate"
        assert {mesh.machine for mesh in answer.others[0].plan.meshes} == {"slow"}
        again = traced.plan(autopar.Plan.from_json(answer.others[0].plan.to_json())).simulate()
        assert again.step_time_s == answer.others[0].step_time_s > answer.chosen.step_time_s


def test_a_machine_with_too_few_devices_for_a_stage_is_an_answer():
    fast = autopar.Cluster(num_devices=4, machine=replace(cluster().groups[0].machine, devices_per_host=4))
    slow = autopar.Cluster(num_devices=1, machine=replace(cluster().groups[1].machine, devices_per_host=1))
    there = autopar.Cluster.of_groups([fast, slow], Link(latency_s=1e-2, bandwidth=1e4, ramp_bytes=0.0))
    stored = replace(three_layers(UNEVEN, fast)[1].plan, method="")
    traced, _ = three_layers(autopar.Auto(num_microbatches=1), there)
    answer = traced.plan(stored).explain("machines")
    assert answer.chosen.choice == "stage 0 on fast, stage 1 on fast"
    words = [(each.choice, each.refused) for each in answer.others]
    assert words == [(f"stage {n} on slow", "of its 1 devices 1 are idle, and it needs 2") for n in (0, 1)]
