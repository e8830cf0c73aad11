"""The time of a plan on a cluster is that of its program on its costs: closed forms, and sums by hand."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.compiler.analysis.step_work import input_parts, step_work
from autopar.errors import InvalidArgument, PlanMismatch
from autopar.hardware.machine import Link, Machine
from autopar.ir.plan_sharding import MeshSharding, TaskTimes
from autopar.ir.program import Run, Send
from autopar.ir.schedules import schedule_tasks
from autopar.runtime.simulator import simulate
from autopar.simulation import ClusterCosts
from tests.compiler.planning.test_one_mesh import arguments, train_step
from tests.compiler.stage_plans import with_planned_layouts
from tests.schedule_programs import program_of
from tests.small_steps import SEPARATE

CPUS = autopar.Cluster(num_devices=8, machine=SEPARATE)
LINKED = dataclasses.replace(
    CPUS.machine,
    devices_per_host=2,
    domain=2,
    intra=Link(latency_s=0.25, bandwidth=4096.0, ramp_bytes=0.0),
    inter=Link(latency_s=0.5, bandwidth=2048.0, ramp_bytes=1024.0),
)
"""A KiB takes half a second in a host of two devices, and one and a half to another."""


def traced(method, *, step=train_step, args=None, cluster=CPUS, **options):
    return autopar.parallelize(step, method=method, cluster=cluster, **options).trace(*(args or arguments()))


@functools.cache
def pipeline(num_devices, **options):
    """A plan by hand of one device for each stage."""
    cluster = autopar.Cluster(num_devices=num_devices, machine=SEPARATE)
    return traced(autopar.PipelineParallel(num_stages=num_devices, **options), cluster=cluster).plan()


@functools.cache
def with_layouts(num_microbatches):
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=num_microbatches, mesh_shape=(2, 2))
    step = traced(method)
    return step.plan(with_planned_layouts(step, step.plan().plan, SEPARATE))


# --- times --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_the_makespan_of_a_pipeline_over_links_is_the_closed_form(stages, microbatches):
    order = schedule_tasks(
        "gpipe",
        num_microbatches=microbatches,
        stage_mesh=range(stages),
    )
    program = program_of(order, range(stages), microbatches)
    times = {
        name: TaskTimes(compute_s=1.0 if name.startswith("F") else 2.0, collective_s=1.0)
        for name in program.executables
    }
    timeline = simulate(
        program, ClusterCosts(program=program, cluster=autopar.Cluster(num_devices=stages, machine=LINKED), times=times)
    )
    # No transfer takes longer than a task, so each direction exposes one for every cut; every other cut is in a host.
    transfers_s = sum(0.5 if cut % 2 == 0 else 1.5 for cut in range(stages - 1))
    assert timeline.makespan_s == (microbatches + stages - 1) * (2 + 3) + 2 * transfers_s
    assert sum(timeline.exposed_s) == 2 * transfers_s


def test_a_step_of_stages_takes_its_tasks_and_transfers_one_after_the_other():
    planned = with_layouts(1)
    report = planned.simulate()
    first, second = (mesh.sharding.times for mesh in planned.plan.meshes)
    # 64 examples of 256 floats go to mesh 1, and their cotangents back.
    program, link = planned.lower().program, CPUS.machine.intra
    sends = [(i, mesh) for mesh in program.meshes for i in mesh.instructions if isinstance(i, Send)]
    assert [mesh.values[i.values[0]].nbytes for i, mesh in sends] == [64 * 256 * 4] * 2
    there_s, back_s = (
        link.latency_s + program.meshes[i.to].values[i.values[0]].bytes_per_device(program.meshes[i.to]) / 1e9
        for i, _ in sends
    )
    middle_s = first["forward_0"].total_s + there_s + second["forward_1"].total_s + second["backward_1"].total_s
    end_s = middle_s + back_s + first["backward_0"].total_s + first["update_0"].total_s
    assert report.step_time_s == pytest.approx(max(end_s, middle_s + second["update_1"].total_s), rel=1e-12)
    assert report.exposed_transfer_s == pytest.approx((there_s + back_s) / 2)
    assert report.meshes[1].collective_s == pytest.approx(sum(each.collective_s for each in second.values()))
    assert report.collective_s > 0


def test_a_pipeline_takes_its_host_the_starts_of_its_instructions_and_one_program_does_not():
    slow = autopar.Cluster(num_devices=8, machine=dataclasses.replace(SEPARATE, dispatch_s=0.5))
    planned = with_layouts(4)
    instructions = [i for mesh in planned.lower().program.meshes for i in mesh.instructions]
    starts = sum(len(i.values) if isinstance(i, Send) else isinstance(i, Run) for i in instructions)
    step_s, slow_s = planned.simulate().step_time_s, planned.simulate(slow).step_time_s
    assert 0.5 * (starts - 1) <= slow_s <= 0.5 * (starts - 1) + step_s
    one = traced(autopar.Auto(mesh_shape=(2, 4))).plan()
    assert one.simulate(slow).step_time_s == one.simulate().step_time_s


def test_the_parts_of_a_step_add_up_on_every_mesh():
    report = with_layouts(4).simulate()
    for mesh in report.meshes:
        parts_s = mesh.compute_s + mesh.collective_s + mesh.exposed_transfer_s + mesh.idle_s
        assert parts_s == pytest.approx(report.step_time_s)
    waits_s = sum(mesh.exposed_transfer_s + mesh.idle_s for mesh in report.meshes)
    assert report.bubble_fraction == pytest.approx(waits_s / report.step_time_s / 2)


def test_what_starts_accumulators_moves_their_bytes():
    planned = with_layouts(4)
    report, program = planned.simulate(), planned.lower().program
    event = next(e for e in report.timeline.events if e.mesh == 0 and e.task.kind == "Z")
    mesh = program.meshes[0]
    run = next(i for i in mesh.instructions if isinstance(i, Run))
    nbytes = sum(mesh.values[name].bytes_per_device(mesh) for name in run.outputs)
    assert nbytes > 0
    assert event.stop_s == pytest.approx(nbytes / CPUS.machine.memory_bandwidth)


@pytest.mark.parametrize("method", [autopar.Auto(mesh_shape=(2, 4)), autopar.Zero(stage=3, mesh_shape=(8,))])
def test_a_plan_on_one_mesh_takes_its_modelled_step_and_memory(method):
    planned = traced(method).plan()
    report = planned.simulate()
    sharding = planned.plan.sharding
    assert report.step_time_s == pytest.approx(sharding.step_time_s, rel=1e-12)
    assert report.compute_s + report.collective_s == pytest.approx(sharding.step_time_s)
    assert report.compute_s > 0 < report.collective_s
    assert report.bubble_fraction == pytest.approx(0, abs=1e-9)
    # The loss and the count of steps are too small to count among what an estimate holds.
    assert report.peak_bytes == pytest.approx(sharding.peak_bytes, abs=8)
    assert report.counts_temporaries


def test_every_executable_but_the_first_takes_what_one_more_takes():
    taken_s = 0.5
    slow = autopar.Cluster(num_devices=8, machine=dataclasses.replace(SEPARATE, execution_s=taken_s))
    one = traced(autopar.Zero(stage=3, mesh_shape=(8,))).plan()
    assert one.simulate(slow).step_time_s == one.simulate().step_time_s
    # Forward and backward on each of two meshes, one after the other, and the update of the first.
    planned = with_layouts(1)
    assert planned.simulate(slow).step_time_s == pytest.approx(4 * taken_s + planned.simulate().step_time_s, rel=0.01)


def parts_by_category(report):
    found = {}
    for part in report.memory:
        found.setdefault(part.category, {})[part.name] = part.nbytes
    return found


def adam_step(state, batch):
    params, moments = state

    def loss_fn(params):
        h = batch["x"]
        for number, w in enumerate(params["layers"]):
            with jax.named_scope(f"block_{number}"):
                h = jnp.tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), loss


@pytest.mark.parametrize(
    "method",
    [
        autopar.Auto(mesh_shape=(4,), pins={"moments|0|1": PartitionSpec()}, num_microbatches=1),
        autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    ],
)
def test_memory_is_told_by_category_with_the_names_of_the_user(method):
    params = {"layers": [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4}
    batch = {name: jax.ShapeDtypeStruct((1024, 64), jnp.float32) for name in "xy"}
    cluster = autopar.Cluster(num_devices=4, kind="cpu")
    planned = traced(method, step=adam_step, args=((params, params), batch), cluster=cluster).plan()
    report = planned.simulate()
    for mesh in report.meshes:
        assert sum(part.nbytes for part in mesh.memory) == pytest.approx(mesh.peak_bytes, abs=2)
    parts = parts_by_category(report)
    stages = planned.plan.num_stages
    layers = 4 // stages
    assert sum(parts["parameters"].values()) == sum(parts["optimizer"].values()) == layers * 64 * 64 * 4
    assert all("layers" in name and name.startswith("state.0") for name in parts["parameters"])
    assert all(name.startswith("state.1") for name in parts["optimizer"])
    assert parts["batch"] and parts["activations"]
    if stages == 1:
        assert {"block_0", "block_1", "block_2"} <= set(parts["activations"])
    assert "activations" in str(report) and report.to_data()["meshes"][0]["memory"][0]["nbytes"] > 0
    again = autopar.Plan.from_json(planned.plan.to_json())
    assert again == planned.plan


def test_one_device_for_each_stage_needs_no_planned_layouts():
    report = pipeline(2, num_microbatches=4).simulate()
    whole = pipeline(1, num_microbatches=4).simulate()
    assert report.collective_s == whole.collective_s == 0
    # The same work on one device and on two; only what joins values to accumulators differs.
    assert sum(mesh.compute_s for mesh in report.meshes) == pytest.approx(whole.step_time_s, rel=0.01)
    assert report.step_time_s < whole.step_time_s


def test_another_machine_times_stages_of_one_device_and_their_transfers():
    planned = pipeline(2, num_microbatches=4)
    slow, fast = planned.simulate(), planned.simulate(autopar.Cluster.named("dgx-h100"))
    assert fast.step_time_s < slow.step_time_s / 10
    assert (fast.cluster, fast.peak_flops) == (
        "2 of 8 devices of dgx-h100",
        Machine.named("dgx-h100").peak_flops["tf32"],
    )


# --- memory -------------------------------------------------------------------------------------------------


def test_1f1b_holds_fewer_microbatches_than_gpipe():
    rows, microbatches = 2048, 8
    cluster = autopar.Cluster(num_devices=2, kind="cpu")
    peaks = {}
    for name in ("gpipe", "1f1b"):
        method = autopar.PipelineParallel(num_stages=2, num_microbatches=microbatches, schedule=name)
        step = traced(method, args=arguments(rows=rows), cluster=cluster, donate_argnums=(0,))
        peaks[name] = step.plan().simulate().meshes[0].peak_bytes
    # The first product of the layer, the tanh in its gelu, and what the second product reads. In flight are two of 8.
    residuals = rows // microbatches * 3 * 1024 * 4
    assert peaks["gpipe"] - peaks["1f1b"] == pytest.approx(6 * residuals, rel=0.01)


def test_temporaries_of_a_task_count_while_it_runs():
    planned = with_layouts(2).plan

    def simulated(*needed):
        """The report, where every task of a mesh needs so many bytes."""
        meshes = [
            dataclasses.replace(
                mesh, sharding=dataclasses.replace(mesh.sharding, temporary_bytes=dict.fromkeys(mesh.sharding.times, n))
            )
            if n
            else dataclasses.replace(mesh, sharding=dataclasses.replace(mesh.sharding, temporary_bytes={}))
            for mesh, n in zip(planned.meshes, needed, strict=True)
        ]
        plan = autopar.Plan.from_json(dataclasses.replace(planned, meshes=tuple(meshes)).to_json())
        return plan.simulate(autopar.parallelize(train_step, cluster=CPUS), arguments())

    bare, more = simulated(0, 0), simulated(1e6, 0)
    grown = [after.peak_bytes - before.peak_bytes for before, after in zip(bare.meshes, more.meshes, strict=True)]
    assert 0 < grown[0] <= 1e6
    assert grown[1] == 0
    assert not bare.counts_temporaries
    assert "not counted" in str(bare)


@pytest.mark.parametrize("method", [autopar.Zero(stage=3, mesh_shape=(8,)), None], ids=["one mesh", "stages"])
def test_what_xla_does_not_let_a_program_have_is_computed_again_and_priced(method):
    planned = with_layouts(2) if method is None else traced(method).plan()
    free = planned.simulate()
    assert free.computed_again_bytes == free.computed_again_s == 0
    assert "again" not in str(free)
    program = planned.lower().program
    room = 1e3  # arguments leave nothing of that
    if method is not None:
        (executable,), (mesh,) = program.executables.values(), program.meshes
        given = sum(each.bytes_per_device(mesh) for each in (*executable.inputs, *executable.outputs))
        room = given + 1e4
    cluster = autopar.Cluster(
        num_devices=8, machine=dataclasses.replace(SEPARATE, compiler_share=room / SEPARATE.memory_bytes)
    )
    short = planned.simulate(cluster)
    if method is not None:
        # What it adds to arguments and results, above 0.95 of what these leave; nothing was donated.
        added = planned.plan.sharding.peak_bytes - given
        assert short.computed_again_bytes == pytest.approx(added - 0.95 * 1e4, rel=1e-6)
        assert short.step_time_s - free.step_time_s == pytest.approx(short.computed_again_s)
        assert short.computed_again_s == pytest.approx(2.5 * short.computed_again_bytes / SEPARATE.memory_bandwidth)
    else:
        temporary = [n for mesh in planned.plan.meshes for n in mesh.sharding.temporary_bytes.values()]
        assert 0 < short.computed_again_bytes <= max(temporary)
        assert 0 < short.step_time_s - free.step_time_s <= 2 * short.computed_again_s
    assert f"compute up to {short.computed_again_bytes / 1e9:.3g} GB again" in str(short)
    assert json.loads(short.to_json())["computed_again_bytes"] == short.computed_again_bytes
    parts = planned.parts(cluster)
    assert parts.step_s(cluster.machine) == pytest.approx(short.step_time_s, rel=1e-5)  # of figures of six digits


def test_a_plan_with_layouts_but_without_temporaries_is_read():
    data = with_layouts(2).plan.meshes[0].sharding.to_data()
    del data["temporary_bytes"]
    assert MeshSharding.from_data(data).temporary_bytes == {}


def test_a_plan_that_needs_more_memory_than_there_is_does_not_fit():
    planned = pipeline(2, num_microbatches=4)
    small = dataclasses.replace(CPUS.machine, memory_bytes=1e6)
    report = planned.simulate(autopar.Cluster(num_devices=2, machine=small))
    assert not report.fits
    assert "DOES NOT FIT" in str(report)
    assert planned.simulate().fits


# --- rates --------------------------------------------------------------------------------------------------


def language_step(state, batch, *, remat=False):
    """An embedding, two products, and the cross entropy of the next token."""

    def layer(h, matrix):
        return jnp.tanh(h @ matrix)

    def loss_of(params):
        h = params["embedding"][batch["tokens"]]
        for matrix in params["matrices"]:
            h = (jax.checkpoint(layer) if remat else layer)(h, matrix)
        logits = (h @ params["embedding"].T).astype(jnp.float32)
        at_targets = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - at_targets)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def language_arguments():
    tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    matrix = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    state = {"embedding": jax.ShapeDtypeStruct((128, 64), jnp.bfloat16), "matrices": [matrix] * 2}
    return state, {"tokens": tokens, "targets": tokens, "label": jax.ShapeDtypeStruct((8,), jnp.int32)}


@pytest.mark.parametrize("remat", [False, True])
def test_model_flops_are_those_of_forward_and_backward_once(remat):
    def step(state, batch):
        return language_step(state, batch, remat=remat)

    work = step_work(traced(autopar.DataParallel(), step=step, args=language_arguments()).trace)
    products = 3 * 2 * 8 * 32 * (2 * 64 * 64 + 64 * 128)
    assert work.flops == pytest.approx(products, rel=0.1)  # and what is no product
    assert (work.examples, work.tokens, work.dtype) == (8, 8 * 32, "bfloat16")


def test_an_evaluation_has_parameters():
    def evaluate(state, batch):
        return language_step(state["params"], batch)[1] + state["step"]

    params, batch = language_arguments()
    state = {"params": params, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    parts = input_parts(traced(autopar.DataParallel(), step=evaluate, args=(state, batch)).trace)
    found = {name.partition(".")[2]: category for category, name in parts}
    assert found["params.embedding"] == found["params.matrices.0"] == "parameters"
    assert (found["step"], found["tokens"]) == ("other inputs", "batch")


def test_recomputing_a_layer_adds_no_model_flops_to_what_the_step_is_worth():
    plain, again = (
        step_work(traced(autopar.DataParallel(), step=step, args=language_arguments()).trace).flops
        for step in (language_step, lambda state, batch: language_step(state, batch, remat=True))
    )
    # The derivative of tanh is made where tanh is: with its second evaluation, which does not count.
    assert again == plain - 2 * 8 * 32 * 64


def test_rates_are_amounts_over_the_step():
    cluster = autopar.Cluster(num_devices=8, machine=Machine.named("dgx-h100"))
    method = autopar.Auto(num_stages=1, mesh_shape=(8,))
    planned = traced(method, step=language_step, args=language_arguments(), cluster=cluster).plan()
    report = planned.simulate()
    assert report.examples_per_s == pytest.approx(8 / report.step_time_s)
    assert report.tokens_per_s == pytest.approx(8 * 32 / report.step_time_s)
    achieved = step_work(planned.trace).flops / report.step_time_s / 8
    assert report.tflops_per_device == pytest.approx(achieved / 1e12)
    assert report.mfu == pytest.approx(achieved / Machine.named("dgx-h100").peak_flops["bfloat16"])


# --- as text and files --------------------------------------------------------------------------------------


def test_a_report_prints_a_row_and_a_lane_for_every_mesh():
    report = with_layouts(4).simulate()
    lines = str(report).splitlines()
    assert lines[0].startswith("PipelineParallel, 2 stages, 4 microbatches, schedule 1f1b on 8 devices of cpu: ")
    assert [line.split()[:2] for line in lines if line.split()[1:2] == ["4"]] == [["0", "4"], ["1", "4"]]
    assert lines[-2:] == report.gantt(110).splitlines()
    assert all(f"B{microbatch}=" in lines[-1] for microbatch in range(4))


def test_a_report_is_json_with_every_figure():
    report = with_layouts(4).simulate()
    data = json.loads(report.to_json())
    for name in ("step_time_s", "bubble_fraction", "compute_s", "collective_s", "exposed_transfer_s", "mfu"):
        assert data[name] == getattr(report, name)
    assert [mesh["peak_bytes"] for mesh in data["meshes"]] == [mesh.peak_bytes for mesh in report.meshes]
    assert "timeline" not in data


def test_spans_of_compute_and_collectives_add_up_in_the_file(tmp_path):
    report = with_layouts(4).simulate()
    report.timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for number, mesh in enumerate(report.meshes):
        parts = {"compute": 0.0, "collectives": 0.0}
        for event in events:
            if event["pid"] == number and event["name"] in parts:
                parts[event["name"]] += event["dur"] / 1e6
        assert parts["collectives"] == pytest.approx(mesh.collective_s)
        assert 0 < parts["compute"] <= mesh.compute_s


# --- errors -------------------------------------------------------------------------------------------------


def test_a_cluster_that_lacks_devices_of_the_plan_is_refused():
    with pytest.raises(PlanMismatch, match="uses devices up to number 7, the cluster has 4"):
        with_layouts(2).simulate(autopar.Cluster(num_devices=4, kind="cpu"))


@pytest.mark.parametrize("planned", [lambda: with_layouts(2), lambda: traced(autopar.Auto(mesh_shape=(8,))).plan()])
def test_a_cluster_of_another_machine_than_the_planned_is_refused(planned):
    with pytest.raises(InvalidArgument, match="modelled for 'cpu', the cluster is of 'dgx-h100'"):
        planned().simulate(autopar.Cluster.named("dgx-h100"))
