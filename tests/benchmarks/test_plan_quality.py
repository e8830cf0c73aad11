"""The plans by hand compute the plain step and move what they should, and the figures count what was compiled."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.analysis.compiled_collectives import compiled_collectives, wire_bytes_by_kind
from autopar.hardware.machine import Machine
from benchmarks.compiled_figures import CompiledFigures, compile_program, figures_of_compiled, peak_bytes
from benchmarks.hand_plans import HandPlan, compile_by_hand, hand_plans
from benchmarks.hlo_roofline import Kernel, Work, work_of
from benchmarks.models import MODELS
from benchmarks.models.model import computing_in
from benchmarks.plan_quality import (
    ByHand,
    Row,
    beats,
    finite,
    main,
    ratio_to_fastest,
    row_data,
    summary,
    target_of,
    time_in_turn,
)

CPU = Machine.named("cpu")

SMALL = {
    "mlp": {"width": 16, "hidden": 32, "batch": 16},
    "gpt": {"layers": 1, "width": 16, "vocabulary": 32, "length": 8, "batch": 16},
    "llama": {
        "layers": 1,
        "width": 16,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 32,
        "vocabulary": 32,
        "length": 8,
        "batch": 16,
    },
    "moe": {"layers": 1, "width": 16, "hidden": 32, "vocabulary": 32, "length": 8, "batch": 16},
    "moe_ragged": {"layers": 1, "width": 16, "hidden": 32, "vocabulary": 32, "length": 8, "batch": 16},
    "convnet": {"stages": 2, "blocks": 1, "channels": 8, "image": 8, "classes": 8, "batch": 16},
    "vit": {"layers": 1, "width": 16, "image": 16, "patch": 4, "classes": 8, "batch": 16},
    "lstm": {"layers": 1, "width": 16, "vocabulary": 32, "length": 8, "batch": 16},
    "encoder_decoder": {
        "layers": 1,
        "width": 16,
        "vocabulary": 32,
        "source_length": 8,
        "target_length": 8,
        "batch": 16,
    },
}


@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_a_model_computes_in_another_precision_with_the_parameters_it_has(name):
    plain = MODELS[name](**SMALL[name])
    model = computing_in(jnp.bfloat16, plain)
    (params, _), metrics = jax.eval_shape(model.step, model.abstract_state, model.abstract_batch)
    assert params == plain.abstract_state[0]
    assert metrics["loss"].dtype == jnp.float32
    traced = str(jax.make_jaxpr(model.step)(model.abstract_state, model.abstract_batch))
    products = [line for line in traced.splitlines() if "dot_general" in line or "conv_general_dilated" in line]
    assert products
    assert all("bf16[" in line for line in products)


@pytest.mark.parametrize("name", SMALL)
def test_loss_of_a_model_falls(name):
    model = MODELS[name](**SMALL[name])
    step, state, batch = jax.jit(model.step), model.create_state(), model.create_batch()
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


def plans_of(name: str) -> list[HandPlan]:
    """The variants of each kind on one mesh, and the one with three axes."""
    plans = hand_plans(MODELS[name](**SMALL[name]))
    return [plan for plan in plans if sorted(plan.mesh.values()) in ([2, 4], [8], [2, 2, 2])][
        :: 1 if name == "mlp" else 4
    ]


@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name in ("mlp", "moe") for plan in plans_of(name)], ids=str
)
def test_step_by_hand_equals_plain_step(name, plan):
    model = MODELS[name](**SMALL[name])
    compiled = compile_by_hand(model, plan, jax.devices()[:8])
    expected, metrics = jax.jit(model.step)(model.create_state(), model.create_batch())
    arguments = jax.device_put((model.create_state(), model.create_batch()), compiled.input_shardings[0])
    state, found = compiled(*arguments)
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    # Adam divides by the gradient's size: of a gradient that is all rounding, the update is too.
    for ours, theirs in zip(jax.tree.leaves(state[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)


def compiled_mlp(name: str):
    model = MODELS["mlp"](**SMALL["mlp"])
    (plan,) = [plan for plan in hand_plans(model) if str(plan) == name]
    return model, compile_by_hand(model, plan, jax.devices()[:8])


def test_data_parallel_sends_every_gradient_once_around():
    model, compiled = compiled_mlp("data parallel data=8")
    loss = 4
    sent = wire_bytes_by_kind(compiled_collectives(compiled.as_text()))
    assert sent == {"all-reduce": 2 * 7 / 8 * (4 * model.num_parameters + loss)}


def test_zero_keeps_less_the_higher_its_stage():
    names = ("data parallel data=8", "ZeRO-1 data=8", "FSDP data=8")
    arguments = [compiled_mlp(name)[1].memory_analysis().argument_size_in_bytes for name in names]
    peaks = [peak_bytes(compiled_mlp(name)[1]) for name in names]
    assert arguments == sorted(arguments, reverse=True) and peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("sizes", "mesh", "fits"),
    [
        ({"data": 8}, (8,), True),
        ({"data": 8}, (2, 4), True),
        ({"data": 4, "model": 2}, (8,), False),
        ({"data": 4, "model": 2}, (2, 4), True),
        ({"data": 4, "model": 2}, (2, 2, 2), True),
        ({"data": 2, "expert": 2, "model": 2}, (2, 4), False),
        ({"data": 1, "model": 8}, (4, 2), True),
    ],
)
def test_plan_fits_a_mesh_whose_axes_can_be_taken_for_its_own(sizes, mesh, fits):
    assert HandPlan(name="any", mesh=sizes, params={}, activations={}).fits(mesh) is fits


def test_work_counts_every_turn_of_a_loop():
    def run(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]

    x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    work = work_of(jax.jit(run).lower(x, w).compile().as_text())
    assert work.flops == 5 * 2 * 8 * 16 * 16
    assert work.memory_bytes > 5 * 4 * (16 * 16 + 2 * 8 * 16)


def test_work_counts_of_a_stacked_array_the_slice_that_a_turn_reads():
    def run(xs):
        return jax.lax.scan(lambda total, x: (total + x, total), jnp.zeros(1024), xs)

    whole = 4 * 1024 * 1024
    work = work_of(jax.jit(run).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).compile().as_text())
    assert work.memory_bytes < 10 * whole


def test_copies_to_the_fast_memory_on_the_chip_read_what_they_copy_once():
    hlo = """
ENTRY %main (p: f32[64,32]) -> f32[8,32] {
  %p = f32[64,32]{1,0:T(8,128)} parameter(0)
  %whole = (f32[64,32]{1,0:T(8,128)S(1)}, f32[64,32]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)
  %done = f32[64,32]{1,0:T(8,128)S(1)} copy-done(%whole)
  %part = ((f32[64,32]{1,0:T(8,128)}), f32[8,32]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:8]}
  %slice = f32[8,32]{1,0:T(8,128)S(1)} slice-done(%part)
  ROOT %back = (f32[8,32]{1,0:T(8,128)}, f32[8,32]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%slice)
}
"""
    assert work_of(hlo).memory_bytes == 4 * 32 * (64 + 8 + 8)


def test_work_of_straight_code_is_what_xla_counts():
    def run(x, w):
        return jnp.tanh(x @ w) @ w

    x, w = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 32), jnp.float32)
    compiled = jax.jit(run).lower(x, w).compile()
    work = work_of(compiled.as_text())
    assert work.flops == 2 * 2 * 64 * 32 * 32
    assert work.memory_bytes == compiled.cost_analysis()["bytes accessed"]


def test_fusion_reads_only_what_its_slice_depends_on():
    hlo = """HloModule fused, num_partitions=1

%fused (p0: f32[8,256], p1: f32[8,256]) -> f32[8,32] {
  %p0 = f32[8,256]{1,0} parameter(0)
  %p1 = f32[8,256]{1,0} parameter(1)
  %sum = f32[8,256]{1,0} add(%p0, %p1)
  ROOT %cut = f32[8,32]{1,0} slice(%sum), slice={[0:8], [0:32]}
}

ENTRY %main (a: f32[8,256], b: f32[8,256]) -> f32[8,32] {
  %a = f32[8,256]{1,0} parameter(0)
  %b = f32[8,256]{1,0} parameter(1)
  ROOT %add_slice_fusion = f32[8,32]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused
}
"""
    assert work_of(hlo).memory_bytes == 3 * 4 * 8 * 32


@pytest.mark.parametrize("ends", [("",), ("-start", "-done")])
def test_collectives_are_no_kernels(ends):
    lines = "\n".join(f"  %x{end} = f32[8]{{0}} reduce-scatter{end}(%a)" for end in ends)
    hlo = "HloModule m, num_partitions=8\n\nENTRY %main (a: f32[64]) -> f32[8] {\n  %a = f32[64]{0} parameter(0)\n"
    assert work_of(f"{hlo}{lines}\n}}\n").kernels == ()


def test_what_a_library_call_may_work_in_is_not_moved():
    hlo = """HloModule m, num_partitions=1

ENTRY %main (a: f32[8,32], b: f32[32,8]) -> f32[8,8] {
  %a = f32[8,32]{1,0} parameter(0)
  %b = f32[32,8]{1,0} parameter(1)
  %call = (f32[8,8]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
  ROOT %c = f32[8,8]{1,0} get-tuple-element(%call), index=0
}
"""
    assert work_of(hlo).memory_bytes == 4 * (2 * 8 * 32 + 8 * 8)


def test_what_is_kept_on_the_chip_is_not_read_from_memory():
    hlo = """
ENTRY %main (p: f32[8,32]) -> f32[8,32] {
  %p = f32[8,32]{1,0:T(8,128)} parameter(0)
  %near = f32[8,32]{1,0:T(8,128)S(1)} exponential(%p)
  ROOT %far = f32[8,32]{1,0:T(8,128)} negate(%near)
}
"""
    assert work_of(hlo).memory_bytes == 2 * 4 * 8 * 32


def test_kernel_that_waits_for_memory_is_not_hidden_behind_one_that_computes():
    machine = replace(CPU, kernel_s=0.0, matmul_half_flops=0.0)
    flops, nbytes = machine.matmul_flops("float32"), machine.memory_bandwidth
    work = Work(kernels=(Kernel(flops=3 * flops, nbytes=nbytes, times=1), Kernel(flops=0, nbytes=nbytes, times=2)))
    assert (work.flops, work.memory_bytes) == (3 * flops, 3 * nbytes)
    assert work.seconds(machine) == 3 + 2


def test_product_is_timed_at_the_rate_of_its_type():
    machine = replace(CPU, memory_bandwidth=1e30, kernel_s=0.5)
    hlo = """HloModule product, num_partitions=1

ENTRY %main (a: bf16[64,64], b: bf16[64,64]) -> f32[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  ROOT %dot = f32[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    assert work_of(hlo).seconds(machine) == 0.5 + 2 * 64**3 / machine.matmul_flops("bfloat16")


def test_convolution_counts_every_pixel_of_its_result():
    def run(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, k = jax.ShapeDtypeStruct((2, 10, 10, 4), jnp.float32), jax.ShapeDtypeStruct((3, 3, 4, 8), jnp.float32)
    assert work_of(jax.jit(run).lower(x, k).compile().as_text()).flops == 2 * (2 * 8 * 8 * 8) * (3 * 3 * 4)


def test_measured_ratio_is_to_the_fastest_plan_by_hand_round_by_round():
    times = {"slow": [4.0, 4.0, 4.0], "fast": [1.0, 2.0, 3.0], "autopar": [2.0, 2.0, 3.0]}
    assert ratio_to_fastest(times)[0] == 1.0
    assert np.isnan(ratio_to_fastest({})[0])


def row(budget: float, peak_bytes: float | None) -> Row:
    """Ours takes 2 ms and sends 3 MB; the plan by hand takes 4 ms and sends 6 MB."""
    ours = CompiledFigures(
        wire_bytes={"all-reduce": 3e6},
        num_collectives=1,
        peak_bytes=peak_bytes or 0.0,
        flops=0.0,
        memory_bytes=0.0,
        written_bytes=4e6,
        compute_s=1e-3,
        collectives_s=1e-3,
    )
    return Row(
        model="mlp",
        mesh="8",
        budget=budget,
        fastest="data parallel data=8",
        fastest_ms=4.0,
        theirs=replace(ours, wire_bytes={"all-reduce": 6e6}, written_bytes=2e6, peak_bytes=10.0),
        fewest="data parallel data=8",
        fewest_mb=6.0,
        beaten_by="",
        ours=None if peak_bytes is None else ours,
        planned_ms=math.nan if peak_bytes is None else 2.0,
        plan_s=0.1,
        measured={},
        measured_ratio=math.nan,
        interval=(math.nan, math.nan),
        message="MemoryTooSmall" if peak_bytes is None else "",
    )


def test_results_are_written_without_numbers_that_json_does_not_have():
    text = json.dumps(finite([row_data(row(math.inf, 7.0)), row_data(row(5.0, None))]), allow_nan=False)
    first, second = json.loads(text)
    assert first["budget"] is None and first["measured_ratio"] is None and first["interval"] == [None, None]
    assert (first["time_ratio"], first["bytes_ratio"], first["within"]) == (0.5, 0.5, True)
    assert (first["sent_ratio"], first["written_ratio"], first["memory_ratio"]) == (0.5, 2.0, 0.7)
    assert second["ours"] is None and second["time_ratio"] is None


@pytest.mark.parametrize(("peak_bytes", "over", "missed"), [(5.0, 0, 0), (7.0, 1, 1), (None, 0, 1)])
def test_cell_is_missed_if_only_the_plan_by_hand_keeps_within_the_budget(peak_bytes, over, missed):
    counts = summary([row(5.0, peak_bytes)])
    assert (counts["rows"], counts["over_budget"], counts["missed"]) == (1, over, missed)
    assert "measured_ratio" not in counts and ("time_ratio" in counts) == (not missed)
    assert missed or (counts["written_ratio"]["above_most"], counts["sent_ratio"]["above_most"]) == (1, 0)


def test_plan_by_hand_beats_ours_only_in_time_and_bytes_together():
    def figures(seconds: float, nbytes: float) -> CompiledFigures:
        ours = row(5.0, 5.0).ours
        assert ours is not None
        return replace(ours, compute_s=seconds, collectives_s=0.0, wire_bytes={"all-reduce": nbytes})

    ours = figures(2.0, 20.0)
    assert beats(figures(1.0, 10.0), ours)
    assert not beats(figures(1.0, 30.0), ours) and not beats(figures(3.0, 10.0), ours) and not beats(ours, ours)


def test_every_contestant_takes_all_steps_but_the_one_that_settles():
    model = MODELS["mlp"](**SMALL["mlp"])
    devices = jax.devices()[:8]
    plan = hand_plans(model)[0]
    theirs = compile_by_hand(model, plan, devices)
    step = autopar.parallelize(model.step, method=autopar.Auto(mesh_shape=(8,)), donate_argnums=0)
    program = step.trace(model.abstract_state, model.abstract_batch).plan().lower().program
    figures = figures_of_compiled(theirs, CPU)
    by_hand = ByHand(plan=plan, compiled=theirs, figures=figures)
    times = time_in_turn(model, step, compile_program(program, devices), [by_hand], repetitions=2)
    assert {name: len(seconds) for name, seconds in times.items()} == {str(plan): 2, "autopar": 2}


def test_measured_figures_are_what_is_planned_by_and_modelled_with(tmp_path):
    measured = replace(Machine.named("cpu"), name="measured-cpu", memory_bandwidth=5e9, kernel_s=1e-6)
    measured.save(tmp_path / "here.json")
    found, by_kind = target_of(None, tmp_path / "here.json"), target_of(None)
    assert found.cluster is not None and found.cluster.machine == measured
    assert (found.cluster.num_devices, list(found.devices)) == (8, list(by_kind.devices))
    assert found.machine == measured
    assert by_kind.cluster is None and by_kind.machine == CPU


@pytest.mark.parametrize(
    "words", [["--target", "h100", "--timed"], ["--target", "h100", "--figures", "here.json"]], ids=" ".join
)
def test_devices_that_are_not_here_are_neither_timed_nor_measured(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert "give one of them" in capsys.readouterr().err


def test_virtual_devices_of_a_cpu_are_not_timed(capsys):
    with pytest.raises(SystemExit):
        main(["--models", "mlp", "--timed"])
    assert "virtual ones of a CPU" in capsys.readouterr().err
