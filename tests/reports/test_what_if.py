"""The predicted effect of another choice is its real effect: each answer is compared with a plan made anew."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.plain_text import size_words
from autopar.reports.changes import SHORT_LIMIT_S, Asked, in_short
from autopar.reports.fixes import find_fixes, method_words
from autopar.reports.plan_difference import plan_difference
from tests.reports.test_description import arguments, deep_loss
from tests.small_steps import draw, mlp_loss, sgd

STAGES = autopar.PipelineParallel(num_stages=2, num_microbatches=4)


def traced(method, devices=8):
    cluster = autopar.Cluster(num_devices=devices, kind="cpu")
    return autopar.parallelize(sgd(deep_loss), method=method, cluster=cluster).trace(*arguments())


@pytest.fixture(scope="module")
def stages():
    return traced(STAGES).plan()


def test_another_option_is_planned_anew_and_told_in_numbers(stages):
    asked = stages.what_if(num_microbatches=2, schedule="gpipe")
    made = traced(autopar.PipelineParallel(num_stages=2, num_microbatches=2, schedule="gpipe")).plan().simulate()
    assert asked.after.simulated.step_time_s == made.step_time_s
    changes = {each.subject: (each.before, each.after) for each in asked.changes}
    assert changes["microbatches"] == ("4", "2") and changes["schedule"] == ("1f1b", "gpipe")
    assert changes["time per step"][1] == f"{1e3 * made.step_time_s:.4g} ms"
    assert "stages" not in changes and "% faster" in asked.headline()
    assert "microbatches" in str(asked) and "<table>" in asked._repr_html_()
    data = json.loads(asked.to_json())
    assert data["after"]["simulated"]["step_time_s"] == made.step_time_s


def test_another_method_changes_layouts_by_their_names(stages):
    asked = stages.what_if(method=autopar.ShardParallel(mesh_shape=(8,), specs={"down": P("data"), "batch": P("data")}))
    layouts = {each.subject: (each.before, each.after) for each in asked.changes if each.subject.startswith("layout")}
    assert layouts["layout of params.layers.*.down (4)"] == ("replicated", "(data=8)")


def test_results_that_lie_otherwise_are_named():
    rows = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))

    @partial(jax.jit, out_shardings=rows)
    def predict(weights, batch):
        return {"logits": batch["x"] @ weights}

    shapes = jax.ShapeDtypeStruct((16, 8), jnp.float32), {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    traced = autopar.parallelize(predict, cluster=autopar.Cluster(num_devices=8, kind="cpu")).trace(*shapes)
    ours, theirs = (traced.plan(autopar.DataParallel(ignore_user_shardings=ignored)) for ignored in (True, False))
    layouts = {each.subject: (each.before, each.after) for each in ours.diff(theirs).changes}
    assert layouts["layout of result logits"] == ("replicated", "(data=8)")


def test_another_cluster_is_planned_for(stages):
    asked = stages.what_if(cluster="1x dgx-h100")
    (change,) = [each for each in asked.changes if each.subject == "cluster"]
    assert "dgx-h100" in change.after
    assert not stages.what_if()


def test_stored_plans_are_compared_without_their_step(stages):
    before, after = stages.plan, traced(autopar.Zero(mesh_shape=(8,))).plan().plan
    difference = plan_difference(before, after)
    subjects = {each.subject for each in difference.changes}
    assert {"method", "stages", "meshes", "microbatches"} <= subjects
    assert str(plan_difference(before, before)) == "The plans are the same."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0.5}, r"PipelineParallel has no option 'memory'; it has .*method=autopar.Auto\(memory=0.5\)"),
        ({"method": "Auto"}, "method is 'Auto'"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
    ],
)
def test_what_cannot_be_asked_is_said(stages, options, message):
    with pytest.raises(InvalidArgument, match=message):
        stages.what_if(**options)
    with pytest.raises(InvalidArgument, match="was planned from a stored plan"):
        traced(stages.plan).plan().what_if(num_microbatches=2)


def test_fixes_are_plans_sorted_by_what_they_gain(stages):
    fixes = stages.fixes()
    better = fixes.better
    assert better and [each.step_time_s for each in better] == sorted(each.step_time_s for each in better)
    assert all(each.step_time_s < stages.simulate().step_time_s for each in better)
    best = better[0]
    assert traced(best.method).plan().simulate().step_time_s == best.step_time_s
    assert best.words in str(fixes) and json.loads(fixes.to_json())["better"][0] == best.words


def test_what_has_no_plan_is_given_what_has():
    refused = traced(autopar.DataParallel(num_microbatches=3))
    fixes = refused.fixes()
    assert fixes.now is None and "3" in fixes.reason
    assert fixes.better and "There is no plan" in str(fixes)


def asked_of(method):
    return Asked(method=method, cluster=autopar.Cluster(num_devices=8, kind="cpu"), rows=32)


def test_no_search_is_made_inside_of_one_that_found_nothing():
    asked = []

    def describe(change):
        asked.append(change)
        raise MemoryTooSmall("no room", least_share=2.0)

    method = autopar.Auto(memory=1e9, num_stages=2, mesh_shape=(4,), remat=False)
    fixes = find_fixes(asked_of(method), describe, now=MemoryTooSmall("no room", changes="not read"))
    brief = partial(autopar.Auto, effort="fast", time_limit_s=SHORT_LIMIT_S)
    wide, hosts, *larger, more = [each.method for each in asked]
    assert wide == brief(memory=1e9) and hosts == replace(in_short(method), offload="auto")
    assert [each.memory for each in larger] == [1_250_001_250, "adaptive", "adaptive"] and more == in_short(method)
    assert asked[-1].cluster.num_devices == 16
    skipped = {each.words: each.refused for each in fixes.tried if each.method not in [each.method for each in asked]}
    inside = "Auto(memory=1000000000.0) leaves open what this fixes, and no plan of it fits"
    assert skipped["Zero(memory=1000000000.0)"] == inside
    assert skipped["Auto(num_stages=2, memory=1000000000.0, remat=False)"] == inside
    assert not fixes.better and fixes.reason == "no room"
    assert fixes.lesson().startswith("None of the changes that were planned fits: ") and "16 devices" in fixes.lesson()


def test_an_error_begins_with_no_change_once_its_time_is_up():
    def describe(change):
        raise AssertionError("time is up")

    fixes = find_fixes(asked_of(autopar.Auto()), describe, now=MemoryTooSmall("no room"), most_s=0.0)
    assert fixes.stopped and not fixes.tried
    assert "Others were not planned, for want of time: trace(...).fixes() does." in fixes.lesson()


def test_what_a_search_left_open_is_not_searched_again():
    asked = []

    def describe(change):
        asked.append(change.method)
        raise InvalidArgument("not here")

    find_fixes(asked_of(autopar.Auto()), describe, now=InvalidArgument("not here"))
    assert asked == [autopar.Zero(), autopar.DataParallel()]


def roomy(cluster, memory_bytes):
    return autopar.Cluster(num_devices=cluster.num_devices, machine=replace(cluster.machine, memory_bytes=memory_bytes))


SHORT = {
    "alone": (None, 19200.0),
    "a search within a budget": (autopar.Auto(num_stages=1, num_microbatches=1, memory=25600.0), 2**31),
    "stages by hand": (autopar.PipelineParallel(num_stages=2, num_microbatches=2, schedule="gpipe"), 38400.0),
    "degrees by hand": (autopar.Megatron(tensor=2), 32000.0),
}


def small(method, cluster, rows=64, **options):
    options = {"method": method, "cluster": cluster, "batch_argnums": 1, **options}
    layers = [{"w": draw(i, 32, 32), "b": draw(9 + i, 32)} for i in range(2)]
    return autopar.parallelize(sgd(mlp_loss), **options).trace(layers, (draw(20, rows, 32), draw(21, rows, 32)))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", SHORT)
def test_where_nothing_fits_changes_that_do_are_told_with_the_time_and_memory_of_their_plans(name):
    method, memory_bytes = SHORT[name]
    here = roomy(autopar.Cluster(num_devices=2, kind="cpu"), memory_bytes)
    refused = small(method, here)
    try:
        message = refused.plan().fixes().lesson()
    except MemoryTooSmall as error:
        message = str(error)
        assert message.startswith(error.shortage)
    fixes = refused.fixes()
    lines = [line for line in message.splitlines() if line.startswith("  ")]
    assert [line.split(": ")[0].strip() for line in lines] == [each.change.words for each in fixes.better]
    sizes = [each.change.size for each in fixes.better]
    assert lines and sizes == sorted(sizes)
    for fix, line in zip(fixes.better, lines, strict=True):
        change = fix.change
        made = small(change.method, change.cluster or here, donate_argnums=change.donated).plan().simulate()
        assert made.fits and made.step_time_s == fix.step_time_s
        assert f"{1e3 * made.step_time_s:.4g} ms per step" in line and size_words(made.peak_bytes) in line


def test_a_state_that_may_be_overwritten_is_the_smallest_change():
    one, method = autopar.Cluster(num_devices=1, kind="cpu"), autopar.DataParallel()
    needed = [small(method, one, 8, donate_argnums=each).plan().simulate().peak_bytes for each in ((), (0,))]
    assert needed[1] < needed[0]
    here = roomy(one, (needed[0] + needed[1]) / 2)
    first = small(method, here, 8).plan().fixes().better[0]
    assert first.change.words == "donate_argnums=(0,)" and first.words == "DataParallel(), donate_argnums=(0,)"
    made = small(method, here, 8, donate_argnums=(0,))
    assert made.plan().simulate().fits and made.plan().simulate().step_time_s == first.step_time_s
    assert not made.trace.undonated_state


@pytest.mark.usefixtures("patient")
def test_changes_are_looked_for_when_the_message_is_read():
    method, memory_bytes = SHORT["a search within a budget"]
    refused = small(method, roomy(autopar.Cluster(num_devices=2, kind="cpu"), memory_bytes))
    with pytest.raises(MemoryTooSmall) as caught:
        refused.plan()
    assert callable(caught.value._changes)
    assert caught.value.least_share > 1 and callable(caught.value._changes)
    assert "per step" in str(caught.value) and not callable(caught.value._changes)


def test_of_what_takes_long_to_plan_an_error_plans_nothing_more(monkeypatch):
    monkeypatch.setattr("autopar.reports.fixes.QUICK_S", 0.0)
    monkeypatch.setattr("autopar.aot.find_fixes", lambda *_, **__: pytest.fail("planned"))
    method, memory_bytes = SHORT["a search within a budget"]
    with pytest.raises(MemoryTooSmall) as caught:
        small(method, roomy(autopar.Cluster(num_devices=2, kind="cpu"), memory_bytes)).plan()
    asks = "To plan what would fit takes long here: trace(...).fixes() does, the smallest change first."
    assert str(caught.value) == f"{caught.value.shortage} {asks}"


def test_methods_are_written_as_they_are_given():
    assert method_words(autopar.Auto()) == "Auto()"
    assert method_words(STAGES) == "PipelineParallel(num_stages=2, num_microbatches=4)"
