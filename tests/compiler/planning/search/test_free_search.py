"""A free search is never behind what is fixed, by the simulator; and its bound is below all of them."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.intra_op import plan_program
from autopar.compiler.planning import one_mesh
from autopar.compiler.planning.one_mesh import plan_by_search
from autopar.compiler.planning.search import best_first
from autopar.compiler.planning.search.candidates import (
    likely_times_s,
    microbatch_counts,
    stage_candidates,
)
from autopar.compiler.planning.search.space import Space, Stages
from autopar.compiler.planning.stages.stage_costs import KnownLayers
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.planning.step_bounds import Work, step_bounds
from autopar.compiler.solver.problem import NoneBelow
from autopar.errors import AutoparError, InvalidArgument, MemoryTooSmall
from autopar.hardware.machine import Link, Machine
from autopar.ir.schedules import DEFAULT_SCHEDULE, SCHEDULES
from autopar.method_fields import EFFORTS
from benchmarks.models import convnet, lstm
from tests.slow_links import slow_links

LAYERS = 3


def train_step(params, batch):
    def loss_of(params):
        h = batch["x"]
        for i in range(LAYERS):
            with jax.named_scope(f"h_{i}"):
                h = h + jnp.tanh(h @ params[f"h_{i}"]["up"]) @ params[f"h_{i}"]["down"]
        return jnp.mean((h - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(width, rows):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {f"h_{i}": {"up": array(width, 2 * width), "down": array(2 * width, width)} for i in range(LAYERS)}
    return params, {"x": array(rows, width), "y": array(rows, width)}


CASES = {
    "a small model": ((64, 16), autopar.Cluster.parse("1x dgx-h100").with_devices(4)),
    "slow links": ((128, 64), slow_links()),
    "a large model": ((4096, 1024), autopar.Cluster.parse("1x p3.16xlarge").with_devices(4)),
}
METHODS = (
    autopar.Auto(num_stages=1),
    autopar.Auto(num_stages=1, num_microbatches=2),
    autopar.Auto(num_stages=2),
    autopar.Auto(num_microbatches=4),
    autopar.Auto(schedule="1f1b"),
    autopar.Auto(mesh_shape=(4,)),
    autopar.Auto(mesh_shape=(2,)),
    autopar.DataParallel(),
    autopar.Zero(stage=3),
    autopar.Megatron(),
    autopar.Megatron(tensor=2),
    autopar.Megatron(pipeline=2, num_microbatches=4),
    autopar.PipelineParallel(num_stages=2, num_microbatches=4),
)


@pytest.mark.parametrize("case", CASES)
def test_freedom_costs_no_time(case):
    sizes, cluster = CASES[case]
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(*sizes))
    free = traced.plan(autopar.Auto())
    free_s, certificate = free.simulate(cluster).step_time_s, free.plan.certificate
    assert certificate.step_time_s == pytest.approx(free_s)
    assert certificate.lower_bound_s <= free_s
    for method in METHODS:
        try:
            seconds = traced.plan(method).simulate(cluster).step_time_s
        except AutoparError:
            continue
        assert free_s <= 1.001 * seconds, method
        assert certificate.lower_bound_s <= seconds * (1 + 1e-9), method


def test_stages_that_cannot_be_equal_are_not_told_by_fewer_that_can():
    """Of three layers, two are on one device each: two equal stages of two devices wait for their slow links."""
    link = Link(latency_s=1e-6, bandwidth=1e8, ramp_bytes=0.0)
    lone = {"devices_per_host": 1, "domain": 1, "inter": link, "peak_flops": {"float32": 3e11}}
    machine = dataclasses.replace(slow_links().machine, name="lone", kernel_s=1e-6, dispatch_s=1e-6, **lone)
    cluster = autopar.Cluster(num_devices=4, machine=machine)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(1024, 768))
    free = traced.plan(autopar.Auto()).plan
    fixed = [traced.plan(autopar.Auto(num_microbatches=count)).plan for count in (32, 48, 64)]
    assert free.num_stages == 3
    least_s = min(each.certificate.step_time_s for each in fixed)
    assert free.certificate.step_time_s <= 1.001 * least_s
    assert free.certificate.lower_bound_s <= least_s
    assert free.certificate.stopped == best_first._UNLIKELY


def drawn(abstract):
    """Return arrays of these types."""
    leaves, tree = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


@pytest.mark.filterwarnings("ignore::autopar.errors.ReplicatedWarning")
@pytest.mark.parametrize("machine", ["dgx-h100", "cpu"])
@pytest.mark.parametrize("num_devices", [5, 7])
def test_a_number_of_stages_that_does_not_divide_the_devices_is_kept(num_devices, machine):
    values, cluster = drawn(arguments(32, 12)), autopar.Cluster(num_devices=num_devices, machine=Machine.named(machine))
    traced, expected = autopar.parallelize(train_step, cluster=cluster).trace(*values), jax.jit(train_step)(*values)
    free_s = traced.plan(autopar.Auto()).simulate(cluster).step_time_s
    for number in (2, 3):
        planned = traced.plan(autopar.Auto(num_stages=number))
        certificate, seconds = planned.plan.certificate, planned.simulate(cluster).step_time_s
        assert planned.plan.num_stages == number
        assert free_s <= 1.001 * seconds and certificate.lower_bound_s <= seconds
        found = autopar.parallelize(train_step, method=planned.plan, devices=jax.devices()[:num_devices])(*values)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "rows"), [(64, 24), (256, 96)])
def test_a_given_number_of_stages_is_no_slower_where_their_sizes_may_differ(width, rows):
    cluster = slow_links(8)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(width, rows))
    found = {number: traced.plan(autopar.Auto(num_stages=number)).plan for number in (2, 3)}
    with pytest.MonkeyPatch.context() as only_equal:
        only_equal.setattr(StageProblem, "given_may_differ", False)
        equal = traced.plan(autopar.Auto(num_stages=2)).plan
    assert found[2].certificate.step_time_s <= 1.001 * equal.certificate.step_time_s
    assert found[2].certificate.lower_bound_s <= 1.001 * equal.certificate.step_time_s
    assert found[3].num_stages == 3


def test_every_number_of_microbatches_is_in_the_space():
    cluster = CASES["a small model"][1]
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(64, 24))
    assert microbatch_counts(problem_of(traced, cluster)) == [1, 2, 3, 4, 6, 8, 12, 24]


def problem_of(traced, cluster, **fixed):
    return StageProblem(trace=traced.trace, method=autopar.Auto(**fixed), hardware=cluster, cache_directory=None)


@pytest.mark.parametrize(("count", "other"), [(1, 2), (1, 4), (2, 1), (4, 1)])
def test_layers_of_other_microbatches_tell_no_more_than_stages_take(count, other):
    sizes, cluster = CASES["a small model"]
    problem = problem_of(autopar.parallelize(train_step, cluster=cluster).trace(*arguments(*sizes)), cluster)
    known = KnownLayers.of(problem)
    stage_candidates(problem, known, other, (1, LAYERS), math.inf)
    by_others_s = min(likely_times_s(problem, known, count, other).values())
    found = stage_candidates(problem, known, count, (1, LAYERS), math.inf)
    least_s = min(each.step_time_s for each in found)
    assert by_others_s <= least_s


def test_of_several_meshes_the_program_of_the_fastest_alone_is_measured(monkeypatch):
    measured, memory = [], plan_program.peak_memory
    monkeypatch.setattr(plan_program, "peak_memory", lambda *a, **k: measured.append(a[1].shape) or memory(*a, **k))
    sizes, there = CASES["a large model"]
    trace = autopar.parallelize(train_step, cluster=there).trace(*arguments(*sizes)).trace
    how = {"num_devices": 4, "machine": there.machine}
    budget = trace_bytes(trace)  # of all that is given, which a device holds a part of
    plan = plan_by_search(trace, autopar.Auto(memory=budget), **how)
    every = [plan_by_search(trace, autopar.Auto(memory="off", mesh_shape=shape), **how) for shape in ((1, 4), (2, 2))]
    assert plan.sharding.step_time_s == pytest.approx(min(each.sharding.step_time_s for each in every), rel=1e-3)
    assert set(measured[: len(measured) - 2]) == {plan.meshes[0].shape}


def trace_bytes(trace):
    return float(sum(math.prod(leaf.aval.shape) * leaf.aval.dtype.itemsize for leaf in trace.inputs))


def test_layers_of_other_microbatches_tell_which_numbers_of_stages_do_not_fit():
    sizes, cluster = CASES["a small model"]
    problem = problem_of(autopar.parallelize(train_step, cluster=cluster).trace(*arguments(*sizes)), cluster)
    small = dataclasses.replace(problem, share=1e-9, known={})
    roomy, none = (likely_times_s(each, KnownLayers.of(each), 2, 1) for each in (problem, small))
    assert all(map(math.isfinite, roomy.values()))
    assert none.keys() == roomy.keys()
    assert set(none.values()) == {math.inf}


@pytest.mark.parametrize(
    ("case", "share", "spares"),
    [("a small model", 1.0, True), ("a small model", 0.95, False), ("a large model", 0.99, False)],
)
def test_layouts_that_save_memory_are_solved_for_where_the_best_stages_need_them_only(case, share, spares):
    sizes, cluster = CASES[case]
    problem = problem_of(autopar.parallelize(train_step, cluster=cluster).trace(*arguments(*sizes)), cluster)
    while problem.is_roomy:  # then nobody asks what stages need at work
        problem = dataclasses.replace(problem, share=problem.share / 2)
    best = min(best_stages(problem, ()), key=lambda each: each.step_time_s)
    found = []
    for solved in ((), problem.submeshes()):
        short = dataclasses.replace(problem, share=share * max(best.peak_shares(problem)), known={}, layer_optima={})
        found.append((min(each.step_time_s for each in best_stages(short, solved)), len(short.layer_optima)))
    (least_s, few), (eager_s, every) = found
    assert least_s == eager_s
    assert few <= every and (few < every) == spares


def best_stages(problem, saving):
    """The candidates for two microbatches, where layouts that save memory are solved for on these submeshes at once."""
    known = KnownLayers.of(problem)
    for splits in (False, True):
        known(2, False, splits=splits)[1].saving.update(saving)
    return stage_candidates(problem, known, 2, (1, LAYERS), math.inf)


def test_a_search_of_every_schedule_finds_the_stages_of_one():
    made, cluster = convnet(), autopar.Cluster.parse("1x dgx-h100")
    traced = autopar.parallelize(made.step, cluster=cluster).trace(made.abstract_state, made.abstract_batch)
    found: list[dict] = []
    for fixed in ({}, {"schedule": "zero-bubble"}):
        problem = problem_of(traced, cluster, **fixed)
        stages = stage_candidates(problem, KnownLayers.of(problem), 1, (2, 2), 1.7e-3)
        split = [each for each in stages if each.timing.schedule.splits_weight_gradients]
        in_order = sorted(split, key=lambda each: each.step_time_s)
        found.append({tuple((s.start, s.stop, s.submesh) for s in each.stages): each.step_time_s for each in in_order})
    free, restricted = found
    best, second, *others = restricted
    assert others and best in free
    assert second in free or sorted(free.values())[1] < restricted[second]


def test_bounds_are_below_what_is_simulated_and_grow_with_stages_and_microbatches():
    cluster = autopar.Cluster.parse("1x dgx-h100")
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(64, 32))
    bounds = step_bounds(traced.trace, cluster, batch_statistics="exact", random="full_batch")
    assert bounds.one_program_s(8, 1) < bounds.one_program_s(4, 1) < bounds.one_program_s(1, 1)
    assert bounds.one_program_s(8, 1) < bounds.one_program_s(8, 2)
    sizes = [1, 2, 4, 8]
    for count in (1, 2, 4):
        assert bounds.stages_s(count, 2, 2, sizes) <= bounds.stages_s(count, 4, 4, sizes)
        method = autopar.PipelineParallel(num_stages=2, num_microbatches=count)
        assert bounds.stages_s(count, 2, 2, [4]) <= traced.plan(method).simulate(cluster).step_time_s
    alone = autopar.parallelize(train_step, cluster=cluster.with_devices(1)).trace(*arguments(64, 32))
    assert bounds.one_program_s(1, 1) == pytest.approx(alone.plan().simulate().step_time_s, rel=0.05)
    assert bounds.stages_s(1, 9, 9, sizes) == float("inf")


@pytest.mark.parametrize(("concurrent", "execution_s"), [(1, 0.0), (2, 1e-3), (6, 1e-3), (8, 0.0)])
def test_bounds_are_below_what_is_simulated_where_devices_share_their_host(concurrent, execution_s):
    """Stages that idle leave their compute to others, so that no time is lost to a pipeline's bubble."""
    machine = autopar.Cluster.parse("1x dgx-h100").machine
    machine = dataclasses.replace(
        machine, concurrent_devices=concurrent, dispatch_s=0.0, execution_s=execution_s, launch_s=0.0
    )
    cluster = autopar.Cluster.of_hosts(machine, 1)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(64, 32))
    bounds = step_bounds(traced.trace, cluster, batch_statistics="exact", random="full_batch")
    for count in (1, 2, 4):
        for stages in (2, 4):
            method = autopar.PipelineParallel(num_stages=stages, num_microbatches=count)
            simulated_s = traced.plan(method).simulate(cluster).step_time_s
            bound_s = bounds.stages_s(count, stages, stages, [8 // stages])
            assert (count - 1) * execution_s / 2 < bound_s <= simulated_s
            if stages < LAYERS:  # the last of four has no parameters
                assert bound_s <= bounds.likely_stages_s(count, stages, stages, [8 // stages]) <= simulated_s
    for devices in (1, 2, 4):
        alone = autopar.parallelize(train_step, method=autopar.DataParallel(), cluster=cluster.with_devices(devices))
        simulated_s = alone.trace(*arguments(64, 32)).plan().simulate().step_time_s
        assert bounds.one_program_s(devices, 1) <= simulated_s * (1 + 1e-9)


def test_a_search_takes_all_devices_that_share_their_host():
    sizes, cluster = CASES["a small model"]
    machine = dataclasses.replace(cluster.machine, concurrent_devices=1)
    shared = autopar.Cluster(num_devices=cluster.num_devices, machine=machine)
    traced = autopar.parallelize(train_step, cluster=shared).trace(*arguments(*sizes))
    plan = traced.plan(autopar.Auto()).plan
    assert plan.num_devices == shared.num_devices and plan.certificate is not None
    assert len({len(mesh.devices) for mesh in plan.meshes}) == 1
    for stages in (1, 2):
        found_s = traced.plan(autopar.Auto(num_stages=stages)).simulate().step_time_s
        assert plan.certificate.lower_bound_s <= plan.certificate.step_time_s <= 1.001 * found_s


def test_stages_of_one_size_may_be_more_than_the_layers_where_devices_share_their_host():
    cluster = autopar.Cluster(num_devices=8, kind="cpu")
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(64, 16))
    free = Space.of(problem_of(traced, cluster))
    assert free.known.num_worthwhile == LAYERS < free.known.num_layers
    assert [*free.numbers_of_stages()] == [(2, 2), (4, 4), (8, 8)]  # there are none of 8 / 3 devices
    assert free.known_of((2, 2)) is free.known and free.known_of((8, 8)).num_layers == 8
    given = Space.of(problem_of(traced, cluster, layers=LAYERS))
    assert [*given.numbers_of_stages()] == [(2, 2)]


def test_several_microbatches_are_in_a_bound_without_a_trace_unless_they_are_known_not_to_be_there(monkeypatch):
    cluster = CASES["a small model"][1]
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(64, 16))
    space = Space.of(problem_of(traced, cluster))
    (region, *_) = [each for each in space.regions if each.num_microbatches == 2]
    assert space.may_be_there(region) and traced.trace.rows_traced == ()
    assert space.is_there(region) and traced.trace.rows_traced
    monkeypatch.setattr("autopar.compiler.planning.search.space.worth_splitting", lambda *_: False)
    waiting = Space.of(problem_of(traced, cluster))
    assert not waiting.is_there(region) and not waiting.may_be_there(region)


def test_idle_devices_are_left_by_meshes_that_divide_what_there_is():
    cluster = autopar.Cluster.parse("1x dgx-h100")
    space = Space.of(problem_of(autopar.parallelize(train_step, cluster=cluster).trace(*arguments(64, 16)), cluster))
    padding = {num_devices: space.pads(space.program(num_devices, (1, num_devices), 1)) for num_devices in (3, 4, 6)}
    assert padding == {3: True, 4: False, 6: True}
    assert not space.pads(space.program(8, (1, 8), 1))  # none is idle


def looked_at(step, directory, monkeypatch):
    """The meshes of the programs that a search solves, and its plan."""
    solved, solve = set(), best_first._Search.solve_program
    cluster = autopar.Cluster.parse("1x dgx-h100")
    with monkeypatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE_DIR", str(directory))
        patch.setattr(best_first._Search, "solve_program", lambda *a: solved.add(a[1].shape) or solve(*a))
        plan = autopar.parallelize(step, cluster=cluster).trace(*arguments(64, 16)).plan().plan
    return solved, plan


def test_programs_on_parts_of_a_mesh_are_not_looked_at_unless_the_user_names_axes(tmp_path, monkeypatch):
    def constrained(params, batch):
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        return train_step(params, batch | {"x": jax.lax.with_sharding_constraint(batch["x"], sharding)})

    free, plan = looked_at(train_step, tmp_path / "free", monkeypatch)
    assert (2, 4) in free and not free & {(1, 4), (1, 2), (1, 1)}
    demanding, _ = looked_at(constrained, tmp_path / "demanding", monkeypatch)
    assert {(1, 4), (1, 2)} <= demanding
    monkeypatch.setattr(Space, "is_part", lambda *_: False)
    every, same = looked_at(train_step, tmp_path / "every", monkeypatch)
    assert free | {(1, 4), (1, 2)} <= every and same.meshes == plan.meshes


def test_more_devices_make_no_plan_slower_although_batch_and_layers_do_not_divide_among_them():
    took_s: list[float] = []
    for num_devices in range(2, 9):
        cluster = autopar.Cluster(num_devices=num_devices, kind="dgx-h100")
        planned = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(2048, 256)).plan()
        took_s.append(planned.simulate(cluster).step_time_s)
    assert all(more <= 1.001 * fewer for fewer, more in itertools.pairwise(took_s))
    assert took_s[5] == pytest.approx(took_s[2]) and took_s[6] < 0.95 * took_s[5]  # of 7 devices 3 are idle, of 8 none


def test_a_search_takes_more_stages_than_the_model_has_layers_where_they_are_the_best():
    made, cluster = lstm(), autopar.Cluster(num_devices=8, kind="cpu")
    traced = autopar.parallelize(made.step, cluster=cluster).trace(made.abstract_state, made.abstract_batch)
    free, four = (traced.plan(method).simulate() for method in (autopar.Auto(), autopar.Auto(num_stages=4)))
    assert traced.plan(autopar.Auto(layers=2)).simulate().step_time_s > 1.02 * four.step_time_s
    assert free.step_time_s <= 1.001 * four.step_time_s


def test_work_divides_but_for_what_begins_everywhere():
    assert Work(fixed_s=1.0, divisible_s=4.0).on(4) == 2.0


def test_equal_inputs_give_equal_plans(tmp_path, monkeypatch):
    sizes, cluster = CASES["slow links"]
    step = autopar.parallelize(train_step, cluster=cluster, method=autopar.Auto(num_microbatches=4))
    plans = []
    for directory in ("one", "other"):  # so that neither is the other one, kept
        monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / directory))
        plans.append(step.trace(*arguments(*sizes)).plan().plan.to_json())
    assert plans[0] == plans[1]


def test_what_ended_the_search_early_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    sizes, cluster = CASES["slow links"]
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(*sizes))
    monkeypatch.setitem(EFFORTS, "fast", 1)
    fast = traced.plan(autopar.Auto(effort="fast")).plan
    assert 'effort="fast" ended the search' in " ".join(str(fast).split())
    stopped = traced.plan(autopar.Auto(time_limit_s=1e-9)).plan
    assert "the time limit of 5 x 1e-09 s ended the search" in " ".join(str(stopped).split())


def test_a_region_that_time_ends_is_still_open(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    take, given_up = best_first._Search.take, []

    def take_until_time_is_up(self, region):
        if isinstance(region, Stages) and self.best is not None:
            self.deadline_s = 0.0
            given_up.append(region)
        return take(self, region)

    monkeypatch.setattr(best_first._Search, "take", take_until_time_is_up)
    sizes, cluster = CASES["slow links"]
    plan = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(*sizes)).plan().plan
    (region,) = given_up
    assert "the time limit of 5 x 60 s ended the search" in plan.certificate.stopped
    assert plan.certificate.lower_bound_s <= region.bound_s < plan.certificate.step_time_s


def test_what_does_not_fit_is_counted_apart_from_the_effort(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(EFFORTS, "fast", 4)
    take, solve, fits = best_first._Search.take, best_first._Search.solve_program, []

    def solve_program(self, region):
        if region.shape == (1, 4):
            raise MemoryTooSmall(str(region))
        return solve(self, region)

    monkeypatch.setattr(best_first._Search, "solve_program", solve_program)
    monkeypatch.setattr(best_first._Search, "take", lambda *a: fits.append(take(*a)) or fits[-1])
    sizes, cluster = CASES["slow links"]
    plan = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(*sizes)).plan(autopar.Auto(effort="fast"))
    assert 'effort="fast" ended the search' in plan.plan.certificate.stopped
    assert max(fits.count(True), fits.count(False)) == 4 < len(fits)


def test_microbatches_that_wait_for_statistics_are_none_of_the_space():
    def centred(params, batch):
        def loss_of(params):
            h = batch["x"] @ params["h_0"]["up"]
            h = jnp.tanh(h - jnp.mean(h, axis=0)) @ params["h_0"]["down"]
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    args = arguments(128, 64)
    tried = [
        autopar.parallelize(step, cluster=slow_links()).trace(*args).plan().plan.certificate.tried
        for step in (train_step, centred)
    ]
    assert max(tried[0]) > 1 and tried[1] == (1,)


def test_an_effort_that_there_is_not_is_refused():
    with pytest.raises(InvalidArgument, match="effort"):
        autopar.Auto(effort="some")


def test_the_default_is_a_search_that_says_what_it_chose(capsys):
    args = arguments(64, 16)
    there = autopar.Cluster.parse("1x dgx-h100").with_devices(4)
    planned = autopar.parallelize(train_step, cluster=there).trace(*args).plan()
    assert planned.plan.method == "Auto" and planned.plan.certificate is not None
    line = f"train_step: {planned.plan.choice()}"
    assert line in capsys.readouterr().err and " ms per step as simulated" in line
    shape = "x".join(map(str, planned.plan.meshes[0].shape))
    certificate = dataclasses.replace(planned.plan.certificate, runners_up=(("2 stages of some size", 1.0),))
    compared = dataclasses.replace(planned.plan, certificate=certificate).choice()
    assert compared.endswith("the least that was found; 2 stages of some size takes 1000 ms")
    others = [words for words, _ in planned.plan.certificate.runners_up]
    assert planned.plan.num_stages > 1 or f"one program on {shape}, 1 microbatch" not in others


def plan_on(shape, below_s=math.inf):
    there = CASES["a small model"][1]
    traced = autopar.parallelize(train_step, cluster=there).trace(*arguments(64, 16))
    method = autopar.Auto(num_stages=1, mesh_shape=shape)
    return plan_by_search(traced.trace, method, num_devices=4, machine=there.machine, below_s=below_s)


def test_one_program_that_is_not_quick_enough_ends_at_its_bound():
    best = plan_on((2, 2)).sharding
    with pytest.raises(NoneBelow) as none:
        plan_on((2, 2), below_s=0.9 * best.step_time_s)
    assert 0.9 * best.step_time_s <= none.value.bound <= best.step_time_s * (1 + 1e-9)
    assert plan_on((2, 2), below_s=1.1 * best.step_time_s).sharding.step_time_s == pytest.approx(best.step_time_s)


@pytest.mark.parametrize("case", CASES)
def test_programs_that_end_at_their_bound_change_no_plan(case, monkeypatch, tmp_path):
    sizes, there = CASES[case]
    traced = autopar.parallelize(train_step, cluster=there).trace(*arguments(*sizes))
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "bounded"))
    bounded, given = traced.plan(autopar.Auto()).plan, []

    def unbounded(*args, below_s, **options):
        given.append(below_s)
        return plan_by_search(*args, **options)

    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "unbounded"))
    monkeypatch.setattr(best_first, "plan_by_search", unbounded)
    plan = traced.plan(autopar.Auto()).plan
    assert min(given) < math.inf
    assert dataclasses.replace(plan, certificate=None) == dataclasses.replace(bounded, certificate=None)
    assert plan.certificate.step_time_s == bounded.certificate.step_time_s


def test_with_one_microbatch_schedules_differ_by_weight_gradients_alone():
    (width, rows), there = CASES["slow links"]
    traced = autopar.parallelize(train_step, cluster=there).trace(*arguments(width, rows))
    fixed = {"num_stages": 2, "num_microbatches": 1}
    times = {
        name: traced.plan(autopar.Auto(schedule=name, **fixed)).simulate().step_time_s
        for name, schedule in SCHEDULES.items()
        if not schedule.splits_weight_gradients
    }
    assert len(times) > 2
    assert min(times.values()) == pytest.approx(times[DEFAULT_SCHEDULE], rel=1e-9), times


def test_on_one_device_nothing_is_searched(capsys, monkeypatch):
    monkeypatch.setattr(one_mesh, "begin_on", None)
    step = autopar.parallelize(train_step, devices=jax.devices()[:1])
    params, batch = jax.tree.map(lambda a: jnp.full(a.shape, 0.01), arguments(16, 8))
    got, loss = step(params, batch)
    wanted, wanted_loss = train_step(params, batch)
    assert jnp.allclose(loss, wanted_loss)
    assert all(map(jnp.allclose, jax.tree.leaves(got), jax.tree.leaves(wanted)))
    assert capsys.readouterr().err == ""


def test_one_device_with_little_memory_is_searched_for():
    args = arguments(4096, 1024)
    there = autopar.Cluster.parse("1x p3.16xlarge").with_devices(1)
    traced = autopar.parallelize(train_step, cluster=there).trace(*args)
    assert traced.plan().plan.certificate is None
    assert traced.plan(autopar.Auto(memory=2.3e9)).plan.certificate is not None
    with pytest.raises(MemoryTooSmall, match="the budget is"):
        traced.plan(autopar.Auto(memory=1.2e9))


def test_one_device_runs_what_its_usual_memory_does_not_hold():
    args = arguments(4096, 1024)
    small = dataclasses.replace(Machine.named("p3.16xlarge"), name="small", memory_bytes=10**9, sources={})
    there = autopar.Cluster(num_devices=1, machine=small)
    assert autopar.parallelize(train_step, cluster=there).trace(*args).plan().plan.certificate is None
