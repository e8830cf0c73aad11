"""The model of a train step: what frameworks and units of a kind do the same way for every model."""

from dataclasses import replace

import pytest

from autopar.hardware.machine import Machine
from benchmarks.training_model.known_models import named_transformer
from benchmarks.training_model.layout import Habits, Layout
from benchmarks.training_model.memory import peak_memory
from benchmarks.training_model.models import Transformer
from benchmarks.training_model.operators import Collective, Pass, Product, layer_backward, layer_forward
from benchmarks.training_model.prices import HOPPER_BACKWARD, Scalars, price, rates_of
from benchmarks.training_model.step import step_time

A100 = Machine.named("dgx-a100-80")
GPT = Transformer(layers=24, hidden=2048, heads=16, vocab=51200)
PLAIN = Layout(microbatch=4, microbatches=8, sequence=1024)
UNFUSED = Habits(dtype="float16", flash=False, dropout=True)


def seconds(model: Transformer, layout: Layout, habits: Habits, machine: Machine) -> float:
    return step_time(model, layout, rates_of(machine, habits, Scalars())).total_s


def product_flops(operators):
    return sum(each.flops * each.count for each in operators if isinstance(each, Product))


@pytest.mark.parametrize(("tp", "pp", "hidden"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_collectives_in_the_stream_of_kernels_hide_nothing(tp, pp, hidden):
    layout = replace(PLAIN, dp=8, tp=tp, pp=pp)
    free, queued = (
        step_time(GPT, layout, rates_of(A100, replace(UNFUSED, overlaps=True, one_stream=each), Scalars())).reduce_s
        for each in (False, True)
    )
    assert (queued == free) == hidden
    assert queued >= free


def test_frozen_weights_have_no_gradients():
    frozen = replace(UNFUSED, frozen=True)
    forward = layer_forward(GPT, PLAIN, frozen, False)
    assert product_flops(layer_backward(GPT, PLAIN, frozen, False)) == pytest.approx(product_flops(forward))
    time = step_time(GPT, replace(PLAIN, dp=8), rates_of(A100, frozen, Scalars()))
    assert (time.reduce_s, time.update_s) == (0.0, 0.0)
    assert peak_memory(GPT, PLAIN, frozen).total_bytes < peak_memory(GPT, PLAIN, UNFUSED).total_bytes


@pytest.mark.parametrize(("machine", "hidden"), [("dgx-b200", True), ("dgx-h100", False)])
def test_blackwell_accumulates_gradients_behind_the_products_that_make_them(machine, hidden):
    there = Machine.named(machine)
    taken_s = price((Pass(nbytes=1e9, epilogue=True),), PLAIN, rates_of(there, Habits(), Scalars())).total_s
    assert taken_s == pytest.approx(0.0 if hidden else there.kernel_s + 1e9 / there.memory_bandwidth)


@pytest.mark.parametrize(("fused", "nbytes"), [(False, 2 + 2 * 4), (True, 2 * 4)])
def test_gradients_are_added_to_what_is_accumulated(fused, nbytes):
    habits = Habits(gradient_bytes=4.0, fused_accumulation=fused)
    weights = GPT.attention_parameters + GPT.dense_mlp_parameters
    passes = [each for each in layer_backward(GPT, PLAIN, habits, False) if isinstance(each, Pass) and each.exact]
    assert [(each.nbytes, each.epilogue) for each in passes] == [(nbytes * weights, fused)]


def test_fused_experts_are_launched_and_passed_over_less():
    model = named_transformer("qwen3-30b")
    assert model is not None
    layout, habits = replace(PLAIN, ep=8, dp=8), Habits(dtype="fp8", compiled=True, launch_s=10e-6)
    b200 = Machine.named("dgx-b200")
    apart, fused = (seconds(model, layout, replace(habits, fused_experts=each), b200) for each in (False, True))
    assert fused < 0.8 * apart
    one = replace(layout, microbatch=1, sequence=64)
    apart, fused = (seconds(model, one, replace(habits, fused_experts=each), b200) for each in (False, True))
    assert fused < 0.5 * apart  # launches are all there is


def test_values_of_four_bytes_are_read_and_sent_in_twice_the_time():
    mixed, single = (
        rates_of(A100, replace(UNFUSED, value_bytes=nbytes), Scalars(intra_latency=1e-9)) for nbytes in (2.0, 4.0)
    )
    layout = replace(PLAIN, tp=8)
    kept, as_is = (Pass(nbytes=1e10),), (Pass(nbytes=1e10, exact=True),)
    assert price(kept, layout, single).total_s == pytest.approx(2 * price(kept, layout, mixed).total_s, rel=1e-3)
    assert price(as_is, layout, single).total_s == price(as_is, layout, mixed).total_s
    sent = (Collective(kind="all-reduce", nbytes=1e10, axis="tp"),)
    assert price(sent, layout, single).total_s == pytest.approx(2 * price(sent, layout, mixed).total_s, rel=1e-2)


@pytest.mark.parametrize(
    ("machine", "dtype", "share"),
    [
        ("dgx-h100", "tf32", HOPPER_BACKWARD["tf32"]),
        ("dgx-h100", "fp8", HOPPER_BACKWARD["fp8"]),
        ("dgx-h100", "bfloat16", 1.0),
        ("dgx-b200", "fp8", 1.0),
        ("dgx-a100-80", "tf32", 1.0),
    ],
)
def test_hopper_computes_gradients_slowly_in_types_other_than_of_two_bytes(machine, dtype, share):
    rates = rates_of(Machine.named(machine), replace(UNFUSED, dtype=dtype), Scalars(matmul_half=1e-9))
    forward = Product(flops=1e15, nbytes=1e3)
    times = [price((replace(forward, backward=each),), PLAIN, rates).total_s for each in (False, True)]
    assert times[0] / times[1] == pytest.approx(share, rel=1e-3)


def test_scales_of_blocks_cost_another_pass_over_what_is_multiplied():
    h100 = Machine.named("dgx-h100")
    habits = Habits(dtype="fp8", compiled=True)
    large = Product(flops=1e12, nbytes=1e9)
    plain, blocks = (
        price((large,), PLAIN, rates_of(h100, replace(habits, block_scaled=scaled), Scalars())).total_s
        for scaled in (False, True)
    )
    assert blocks - plain == pytest.approx(1e9 / 4 / h100.memory_bandwidth)
