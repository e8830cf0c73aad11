"""Lanes on a mixed cluster: chosen where they are fastest, with shares by speed, and right to the last digit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import InvalidArgument, MeshPlan, Plan, StagePlan
from autopar.compiler.inter_op.stage_costs import Stage
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.compiler.planning.search import best_first
from autopar.compiler.planning.search import lanes as planning_lanes
from autopar.compiler.planning.search.space import Space
from autopar.compiler.planning.stages.layer_costs import LayoutChoice
from autopar.compiler.planning.stages.stage_costs import RangeCosts
from autopar.compiler.planning.step_bounds import step_bounds
from autopar.hardware.machine import Link
from tests.compiler.planning.demands.test_groups import cluster
from tests.small_steps import (
    SEPARATE,
    adam,
    adam_state,
    assert_same,
    draw,
    mlp_batch,
    mlp_loss,
    mlp_params,
    tanh_loss,
)

ROWS, LENGTH, WIDTH = 48, 40, 64
STATE = adam_state([draw(0, WIDTH, WIDTH)])
BATCH = draw(20, ROWS, LENGTH, WIDTH), draw(21, ROWS, LENGTH, WIDTH)


step = adam(tanh_loss)  # of one layer: a model that no cut divides


@pytest.fixture(scope="module")
def planned():
    method = autopar.Auto(num_microbatches=4)
    return autopar.parallelize(step, method=method, cluster=cluster(bandwidth=1e12)).trace(STATE, BATCH).plan()


def test_the_machine_that_computes_three_times_as_fast_gets_three_times_the_share(planned):
    plan = planned.plan
    assert plan.shares == (3, 1)
    assert [(mesh.machine, mesh.devices) for mesh in plan.meshes] == [("fast", (0, 1)), ("slow", (2, 3))]
    assert Plan.from_json(plan.to_json()) == plan
    assert "2 lanes" in plan.choice() and "4 microbatches (3 + 1)" in str(plan)


def test_lanes_are_chosen_where_they_are_faster_than_every_other_plan(planned):
    alone = autopar.Cluster.of_groups(cluster().groups[:1])
    method = autopar.Auto(num_microbatches=4)
    fast = autopar.parallelize(step, method=method, cluster=alone).trace(STATE, BATCH).plan()
    assert planned.simulate().step_time_s < fast.simulate().step_time_s


def test_ten_steps_with_36_and_12_of_48_examples_are_those_of_one_device(planned):
    run = autopar.parallelize(step, method=planned.plan, devices=jax.devices()[:4])
    state, expected = STATE, STATE
    plain = jax.jit(step)
    for _ in range(10):
        state, loss = run(state, BATCH)
        expected, wanted = plain(expected, BATCH)
    assert_same((state, loss), (expected, wanted))


def normalized(params, batch):
    """A layer with statistics of the batch."""
    h = batch[0] @ params["w"]
    h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-5) * params["scale"]
    return jnp.mean((jnp.tanh(h) - batch[1]) ** 2)


def norm_in_lanes(**options):
    """A plan that trains 36 of 48 examples on one device and 12 on another."""
    batch = draw(20, ROWS, WIDTH), draw(21, ROWS, WIDTH)
    state = adam_state({"w": draw(0, WIDTH, WIDTH), "scale": draw(1, WIDTH)})
    method = autopar.DataParallel(num_microbatches=4, **options)
    bare = autopar.parallelize(adam(normalized), method=method, devices=jax.devices()[:1]).trace(state, batch).plan()
    meshes = tuple(MeshPlan(devices=(device,), shape=(1,), axis_names=("data",)) for device in range(2))
    shares = tuple(StagePlan(layers=(0, 1), mesh=lane, microbatches=share) for lane, share in enumerate((3, 1)))
    plan = replace(bare.plan, meshes=meshes, sharding=None, stages=shares)
    return autopar.parallelize(adam(normalized), method=plan, devices=jax.devices()[:2]), state, batch


def test_batch_norm_over_uneven_lanes_is_that_of_the_whole_batch():
    run, state, batch = norm_in_lanes()
    expected, plain = state, jax.jit(adam(normalized))
    for _ in range(10):
        state, loss = run(state, batch)
        expected, wanted = plain(expected, batch)
    assert_same((state, loss), (expected, wanted))


def test_batch_norm_over_uneven_lanes_is_that_of_each_microbatch_on_request_alone():
    run, state, batch = norm_in_lanes(batch_statistics="per_microbatch")
    parts = [jax.tree.map(lambda array, n=n: array[12 * n : 12 * n + 12], batch) for n in range(4)]
    wanted = jnp.mean(jnp.array([normalized(state.params, part) for part in parts]))
    assert_same(run(state, batch)[1], wanted)
    assert abs(wanted - normalized(state.params, batch)) > 1e-3


def test_over_a_slow_link_the_fast_machine_works_alone():
    method = autopar.Auto(num_microbatches=4)
    slow = autopar.parallelize(step, method=method, cluster=cluster(bandwidth=1e6)).trace(STATE, BATCH).plan()
    assert slow.plan.shares == () and [mesh.machine for mesh in slow.plan.meshes] == ["fast"]


def lanes(*stages, **changed):
    plan = autopar.parallelize(
        adam(mlp_loss), method=autopar.DataParallel(num_microbatches=4), devices=jax.devices()[:1]
    )
    bare = plan.trace(adam_state(mlp_params()), mlp_batch()).plan().plan
    meshes = tuple(MeshPlan(devices=(device,), shape=(1,), axis_names=("data",)) for device in range(2))
    return replace(bare, meshes=meshes, stages=stages, **changed)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"mesh": 0, "microbatches": 3}, {"mesh": 1, "microbatches": 2}], r"run \[3, 2\] microbatches, and the step"),
        ([{"mesh": 0, "microbatches": 4}, {"mesh": 1, "microbatches": 0}], r"run \[4, 0\] microbatches"),
        ([{"mesh": 0, "microbatches": 3}, {"mesh": 0, "microbatches": 1}], r"lanes live on the meshes \[0, 0\], of 2"),
        ([{"mesh": 0, "microbatches": 4}], r"lanes live on the meshes \[0\], of 2"),
        ([{"mesh": 0, "microbatches": 3}, {"mesh": 1}], "must begin at layer 1 and"),
        ([{"mesh": 0}, {"mesh": 1, "microbatches": 4}], r"run \[None, 4\] microbatches of their own"),
    ],
)
def test_lanes_that_do_not_fit_together_are_refused(stages, message):
    with pytest.raises(InvalidArgument, match=message):
        lanes(*(StagePlan(layers=(0, 1), **stage) for stage in stages))


TWO_LAYERS = {"cuts": (1,), "num_microbatches": 4}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([((0, 1), 3), ((1, 2), 2), ((0, 2), 1)], r"run \[3, 2, 1\] microbatches of their own"),
        ([((0, 1), 3), ((0, 2), 1)], r"Stage 1 has the layers \[0, 2\), it must begin at layer 1"),
        ([((0, 1), 3), ((1, 2), 3), ((1, 2), 1)], r"Stage 2 has the layers \[1, 2\), it must begin at layer 0"),
        ([((0, 1), 3), ((1, 2), 3), ((0, 1), 1)], "have 1 layers together, the cuts make 2"),
        ([((0, 1), 3), ((1, 2), 3), ((0, 2), 2)], r"run \[3, 2\] microbatches, and the step has 4"),
    ],
)
def test_pipelines_side_by_side_that_do_not_fit_together_are_refused(stages, message):
    meshes = tuple(MeshPlan(devices=(device,), shape=(1,), axis_names=("data",)) for device in range(len(stages)))
    planned = (StagePlan(layers=layers, mesh=n, microbatches=share) for n, (layers, share) in enumerate(stages))
    bare = lanes(StagePlan(layers=(0, 1), mesh=0))
    with pytest.raises(InvalidArgument, match=message):
        replace(bare, meshes=meshes, stages=tuple(planned), **TWO_LAYERS)


def test_other_shares_take_what_their_plans_take(planned):
    shares = planned.explain("shares")
    assert shares.chosen.choice == "3 + 1" and [each.choice for each in shares.others] == ["2 + 2"]
    counts = planned.explain("num_microbatches")
    assert {each.choice: each.plan.shares for each in counts.others} == {"3": (2, 1), "6": (5, 1)}
    layouts = planned.explain("params.0")
    assert {each.choice for each in layouts.others} == {"P()", "P('model',)"}
    for each in (*shares.others, *counts.others, *layouts.others[:3]):
        again = Plan.from_json(each.plan.to_json())
        there = autopar.parallelize(step, method=again, cluster=cluster(bandwidth=1e12)).trace(STATE, BATCH).plan()
        assert there.simulate().step_time_s == each.step_time_s > planned.simulate().step_time_s * (1 - 1e-9)
    assert planned.explain("all-reduce").collectives and "no other choice" in str(planned.explain("schedule"))


def test_lanes_and_state_on_the_host_exclude_each_other():
    two = (StagePlan(layers=(0, 1), mesh=lane, microbatches=2) for lane in range(2))
    with pytest.raises(InvalidArgument, match="one lane only"):
        lanes(*two, host_state=(("state.mu.0.w",),))


def test_what_lanes_have_no_answer_for_is_refused(planned):
    two = (StagePlan(layers=(0, 1), mesh=lane, microbatches=2) for lane in range(2))
    train = autopar.parallelize(adam(mlp_loss), method=lanes(*two), devices=jax.devices()[:2])
    train(adam_state(mlp_params()), mlp_batch())
    evaluate = autopar.parallelize(lambda state, batch: mlp_loss(state.params, batch), follow=train)
    with pytest.raises(autopar.Unsupported, match="runs in lanes, of which one holds the state"):
        evaluate(adam_state(mlp_params()), mlp_batch())


# --- pipelines side by side -------------------------------------------------------------------------------------------


def hosts(memory_bytes, *, inside, between, counts=(2, 2), per_host=1):
    """Hosts of one or more devices, the second half of which computes at half the rate; links in bytes/s."""
    link = Link(latency_s=1e-6, bandwidth=inside, ramp_bytes=0.0)
    groups = [
        replace(
            SEPARATE,
            name=name,
            kind=name,
            devices_per_host=per_host,
            domain=per_host,
            dispatch_s=1e-6,
            kernel_s=1e-7,
            matmul_half_flops=0.0,
            memory_bytes=memory_bytes,
            intra=link,
            inter=link,
            peak_flops={dtype: rate * faster for dtype, rate in SEPARATE.peak_flops.items()},
            memory_bandwidth=SEPARATE.memory_bandwidth * faster,
        )
        for name, faster in (("fast", 10), ("slow", 5))
    ]
    each = [autopar.Cluster(num_devices=count, machine=group) for count, group in zip(counts, groups, strict=True)]
    return autopar.Cluster.of_groups(each, replace(link, bandwidth=between))


DEEP = adam(tanh_loss)
DEEP_STATE = adam_state([draw(n, 512, 512) / 512**0.5 for n in range(4)])
DEEP_BATCH = draw(20, 2048, 512), draw(21, 2048, 512)


THREE_AND_TWO = [(0, 3, 2), (3, 4, 1)], [(0, 2, 1), (2, 4, 1)]
"""A pipeline on each of two machines, of three and of two devices."""


def planned_deep(there):
    method = autopar.Auto(num_microbatches=8, layers=4)
    return autopar.parallelize(DEEP, method=method, cluster=there).trace(DEEP_STATE, DEEP_BATCH).plan()


@pytest.fixture
def without_pipelines(monkeypatch, tmp_path):
    def plan(there):
        with monkeypatch.context() as patched:
            patched.setattr(planning_lanes, "_best_pipelines", lambda ranges, below_s: [])
            patched.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))  # of plans that know of no pipelines
            return planned_deep(there)

    return plan


@pytest.fixture
def these_pipelines(monkeypatch, tmp_path):
    """Plan pipelines of these (first layer, layer behind the last, devices) by machine, whatever else is faster."""

    def plan(there, *shapes):
        def given(problem, layers, costs, below_s):
            ranges, lanes = RangeCosts(problem, layers, costs), []
            for group, shape in enumerate(shapes):
                per_host = there.groups[group].machine.devices_per_host
                sizes = [(max(1, count // per_host), min(count, per_host)) for _, _, count in shape]
                meshes = [Submesh(num_hosts=n, devices_per_host=each, group=group) for n, each in sizes]
                ranges.solve(meshes)
                each = [
                    (start, stop, mesh, ranges.cost(start, stop, mesh, LayoutChoice(0.0)))
                    for (start, stop, _), mesh in zip(shape, meshes, strict=True)
                ]
                lanes.append(tuple(Stage(start=a, stop=b, submesh=mesh, cost=cost) for a, b, mesh, cost in each))
            yield from planning_lanes._with_best_shares(ranges, lanes)

        with monkeypatch.context() as patched:
            patched.setattr(best_first, "lanes_of_machines", given)
            patched.setattr(Space, "stages", lambda space: iter(()))
            patched.setattr(Space, "programs", lambda space: iter(()))
            patched.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))  # of plans that are not the fastest
            return planned_deep(there)

    return plan


def check_runs(found, there):
    """A plan of the deep model is as it is written, above its bound, and right to the last digit."""
    assert Plan.from_json(found.plan.to_json()) == found.plan
    bounds = step_bounds(found.trace, there, batch_statistics="exact", random="full_batch")
    assert bounds.lanes_s(8) <= found.simulate().step_time_s
    run = autopar.parallelize(DEEP, method=found.plan, devices=jax.devices()[: there.num_devices])
    state, expected, plain = DEEP_STATE, DEEP_STATE, jax.jit(DEEP)
    for _ in range(3):
        state, loss = run(state, DEEP_BATCH)
        expected, wanted = plain(expected, DEEP_BATCH)
    assert_same((state, loss), (expected, wanted))


def test_machines_run_the_pipelines_that_suit_them_side_by_side_where_that_is_fastest(without_pipelines):
    there, shape = hosts(14e6, inside=1e9, between=1e9, counts=(4, 4), per_host=2), "2 lanes of 2 + 1 stages"
    found = planned_deep(there)
    assert found.plan.stages_in_words() == shape and shape in found.plan.choice()
    assert found.simulate().step_time_s < without_pipelines(there).simulate().step_time_s
    check_runs(found, there)


def test_lanes_on_more_memory_take_no_longer(tmp_path, monkeypatch):
    """With 16 MB the fastest layouts of a microbatch fit, which leave more to do behind the sums of all lanes."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    less, more = (
        planned_deep(hosts(memory, inside=1e9, between=1e9, counts=(4, 4), per_host=2)) for memory in (14e6, 16e6)
    )
    assert less.plan.shares == more.plan.shares == (5, 3)
    assert more.simulate().step_time_s <= less.simulate().step_time_s


def test_of_shares_that_take_alike_times_by_the_formula_the_simulator_chooses(monkeypatch, tmp_path):
    met = {}

    def recorded(*arguments):
        for each in planning_lanes.lanes_of_machines(*arguments):
            met.setdefault(each.bare.shares, each)  # with its fastest layouts
            yield each

    monkeypatch.setattr(best_first, "lanes_of_machines", recorded)
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))  # where no such plan is known
    there = hosts(16e6, inside=1e9, between=8e8, counts=(4, 4), per_host=2)
    found = planned_deep(there)
    assert set(met) == {(6, 2), (5, 3)} and found.plan.shares == (5, 3)
    by_formula, chosen = met[6, 2], met[5, 3]
    assert max(by_formula.table(0)[6], by_formula.table(1)[2]) < max(by_formula.table(0)[5], by_formula.table(1)[3])
    assert chosen.plan().stages == found.plan.stages
    other = autopar.parallelize(DEEP, method=by_formula.plan(), cluster=there).trace(DEEP_STATE, DEEP_BATCH).plan()
    assert found.simulate().step_time_s < other.simulate().step_time_s


@pytest.mark.parametrize(
    ("counts", "per_host", "shapes"),
    [((3, 2), 1, THREE_AND_TWO), ((4, 2), 2, ([(0, 2, 2), (2, 4, 2)], [(0, 2, 1), (2, 4, 1)]))],
    ids=["2+2", "sharded"],
)
def test_pipelines_of_unlike_machines_side_by_side_make_one_step(counts, per_host, shapes, these_pipelines):
    there = hosts(1e9, inside=1e9, between=1e9, counts=counts, per_host=per_host)
    found = these_pipelines(there, *shapes)
    assert found.plan.stages_in_words() == "2 lanes of 2 + 2 stages"
    check_runs(found, there)


@pytest.mark.parametrize(("memory", "inside", "between"), [(16e6, 3e8, 1e9), (18e6, 1e9, 3e8)])
def test_pipelines_side_by_side_never_put_off_a_faster_plan(memory, inside, between, without_pipelines):
    there = hosts(memory, inside=inside, between=between, counts=(4, 4), per_host=2)
    found, other = planned_deep(there), without_pipelines(there)
    assert found.simulate().step_time_s <= other.simulate().step_time_s
    assert any("pipelines" in words for words, _ in found.plan.certificate.runners_up)


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zero-bubble"])
def test_pipelines_side_by_side_never_put_off_what_one_schedule_alone_finds(schedule):
    there = hosts(18e6, inside=1e9, between=1e9, counts=(3, 2))
    method = autopar.Auto(num_microbatches=8, layers=4, schedule=schedule)
    alone = autopar.parallelize(DEEP, method=method, cluster=there).trace(DEEP_STATE, DEEP_BATCH).plan()
    assert planned_deep(there).simulate().step_time_s <= 1.001 * alone.simulate().step_time_s


@pytest.mark.parametrize(("memory_bytes", "inside"), [(36e6, 1e9), (36e6, 3e8), (36e6, 1e8)])
def test_no_plan_of_lanes_is_simulated_to_take_less_than_the_bound_that_puts_others_off(
    memory_bytes, inside, monkeypatch, tmp_path
):
    seen = []

    def seen_lanes(*arguments):
        for each in planning_lanes.lanes_of_machines(*arguments):
            seen.append(each)
            yield each

    monkeypatch.setattr("autopar.compiler.planning.search.best_first.lanes_of_machines", seen_lanes)
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))  # no plan of another test
    there = hosts(memory_bytes, inside=inside, between=1e9)
    found = planned_deep(there)
    assert seen
    for each in seen:
        step = autopar.parallelize(DEEP, method=each.plan(), cluster=there)
        simulated_s = step.trace(DEEP_STATE, DEEP_BATCH).plan().simulate().step_time_s
        assert 0.5 * simulated_s < each.least_s <= simulated_s
        assert found.simulate().step_time_s <= simulated_s


def test_explanations_of_pipelines_side_by_side_keep_them_whole(these_pipelines):
    found = these_pipelines(hosts(1e9, inside=3e9, between=3e8, counts=(3, 2)), *THREE_AND_TWO)
    assert found.plan.shares == (7, 1)
    assert {each.choice for each in found.explain("shares").others} == {"6 + 2"}
    # The last stage of the first lane has one layer: the border before it can only come sooner.
    borders = {each.choice for each in found.explain("stages").others}
    assert borders == {"stage 1 from layer 2, not 3", *(f"stage 3 from layer {layer}, not 2" for layer in (1, 3))}
    machines = found.explain("machines").chosen.choice
    assert machines.startswith("stage 0 of lane 0 on fast") and "stage 3 of lane 1 on slow" in machines
    assert "2 lanes of 2 + 2 stages" in str(found.simulate())
    counts = found.explain("num_microbatches").others
    assert all(sum(each.plan.shares) == each.plan.num_microbatches for each in counts if each.plan is not None)
