"""The model of a train step: its parts against closed forms and published figures, its orders as physics has them."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.hardware.machine import Machine
from benchmarks.training_model.known_models import named_transformer
from benchmarks.training_model.layout import Habits, Layout
from benchmarks.training_model.memory import in_flight, layer_activations, peak_memory
from benchmarks.training_model.models import Transformer
from benchmarks.training_model.operators import Collective, Pass, Product, layer_backward, layer_forward
from benchmarks.training_model.pipeline import pipeline_s, simulated_s
from benchmarks.training_model.prices import (
    PARTIAL,
    Scalars,
    collective_time_s,
    price,
    rates_of,
)
from benchmarks.training_model.step import stage_parameters, step_time

A100 = Machine.named("dgx-a100-80")
GPT = Transformer(layers=24, hidden=2048, heads=16, vocab=51200)
PLAIN = Layout(microbatch=4, microbatches=8, sequence=1024)
UNFUSED = Habits(dtype="float16", flash=False, dropout=True)


def seconds(model: Transformer, layout: Layout, habits: Habits = UNFUSED, machine: Machine = A100, **scalars: float):
    return step_time(model, layout, rates_of(machine, habits, Scalars(**scalars))).total_s


def product_flops(operators):
    return sum(each.flops * each.count for each in operators if isinstance(each, Product))


# --- models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("GPT-3 175B", 175),
        ("Llama-2-7B", 6.7),
        ("LLAMA2-70B", 69),
        ("Llama3.1-8B-MaxText", 8.0),
        ("LLAMA3.1_405B", 405),
        ("MPT-30b", 30.0),
        ("Mixtral-8x7B-MaxText", 46.7),
        ("DeepSeekV3", 671),
        ("deepseekv2", 236),
        ("Qwen3_30B_a3B", 30.5),
        ("Qwen3_235B_a22B", 235),
        ("GPT OSS 120B", 117),
        ("GPT OSS 20B", 20.9),
        ("GPT3-20B", 20.2),
        ("Nemotron4_15B", 15.6),
        ("Nemotron4_340B", 341),
        ("Kimi_K2", 1030),
        ("gpt-neo-2.7b", 2.65),
    ],
)
def test_named_models_have_the_parameters_of_their_papers(name, billions):
    model = named_transformer(name)
    assert model is not None
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_an_unknown_name_gives_no_model():
    assert named_transformer("a model nobody has written about") is None


# --- operators ------------------------------------------------------------------------------------------------


def test_a_layer_has_the_flops_that_megatron_counts():
    n, h, s = PLAIN.tokens, GPT.hidden, PLAIN.sequence
    forward = product_flops(layer_forward(GPT, PLAIN, UNFUSED, False))
    backward = product_flops(layer_backward(GPT, PLAIN, UNFUSED, False))
    assert forward == pytest.approx(24 * n * h * h * (1 + s / (6 * h)))
    assert backward == pytest.approx(2 * forward)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_divides_the_products_and_adds_two_all_reduces_each_way(tp):
    layout = replace(PLAIN, tp=tp)
    for layer in (layer_forward, layer_backward):
        split, whole = layer(GPT, layout, UNFUSED, False), layer(GPT, PLAIN, UNFUSED, False)
        assert product_flops(split) == pytest.approx(product_flops(whole) / tp)
        assert [each for each in split if isinstance(each, Collective)] == [
            Collective(kind="all-reduce", nbytes=2 * PLAIN.tokens * GPT.hidden, axis="tp", count=2)
        ]


def test_experts_compute_what_tokens_choose_however_many_there_are():
    model = named_transformer("qwen3-30b")
    assert model is not None and model.experts is not None
    more = replace(model, experts=replace(model.experts, count=2 * model.experts.count))
    habits, layout = Habits(), replace(PLAIN, ep=8, dp=8)
    routed = product_flops(layer_forward(model, layout, habits, True))
    assert product_flops(layer_forward(more, layout, habits, True)) == pytest.approx(routed)


@pytest.mark.parametrize(
    ("tp", "microbatch", "nbytes", "kernels"),
    [(1, 1, 9, 2), (4, 1, 9, 2), (8, 1, 41, 6), (8, 2, 9, 2), (8, 3, 41, 6)],
)
def test_softmax_is_one_kernel_if_four_warps_divide_heads_and_samples(tp, microbatch, nbytes, kernels):
    layout = replace(PLAIN, tp=tp, microbatch=microbatch)
    scores = microbatch * GPT.heads / tp * layout.sequence**2
    passes = [each for each in layer_forward(GPT, layout, UNFUSED, False) if isinstance(each, Pass)]
    assert Pass(nbytes=nbytes * scores, kernels=kernels) in passes


def test_a_compiler_drops_scores_out_where_it_normalizes_them():
    apart, fused = (
        [
            each
            for each in layer_forward(GPT, PLAIN, replace(UNFUSED, compiled=compiled), False)
            if isinstance(each, Pass)
        ]
        for compiled in (False, True)
    )
    scores = PLAIN.microbatch * GPT.heads * PLAIN.sequence**2
    assert Pass(nbytes=9 * scores, kernels=2) in apart
    assert Pass(nbytes=7 * scores, kernels=1) in fused


def test_fused_attention_never_passes_over_its_scores():
    fused, unfused = (
        sum(each.nbytes for each in layer_forward(GPT, PLAIN, habits, False) if isinstance(each, Pass))
        for habits in (replace(UNFUSED, flash=True), UNFUSED)
    )
    scores = PLAIN.microbatch * GPT.heads * PLAIN.sequence**2
    assert unfused - fused == pytest.approx(9 * scores)


# --- prices ---------------------------------------------------------------------------------------------------


def test_small_kernels_take_as_long_as_their_launches():
    rates = rates_of(A100, replace(UNFUSED, launch_s=20e-6), Scalars())
    small = (Pass(nbytes=1e3, kernels=7), Product(flops=1e3, nbytes=1e3, count=3))
    assert price(small, PLAIN, rates).total_s == pytest.approx(10 * 20e-6)


def test_large_kernels_hide_their_launches():
    rates = rates_of(A100, replace(UNFUSED, launch_s=20e-6), Scalars())
    large = (Pass(nbytes=1e9),)
    assert price(large, PLAIN, rates).total_s == pytest.approx(A100.kernel_s + 1e9 / A100.memory_bandwidth)


def test_collectives_that_run_behind_products_are_shorter():
    reduced = (Collective(kind="all-reduce", nbytes=1e8, axis="tp"),)
    layout = replace(PLAIN, tp=8)
    plain = rates_of(A100, replace(UNFUSED, overlaps=True), Scalars())
    cut_up = rates_of(A100, replace(UNFUSED, overlaps=True, overlaps_products=True), Scalars())
    before, after = (price(reduced, layout, rates).collective_s for rates in (plain, cut_up))
    # An eighth of the products must wait for the first part; the other parts run behind them.
    assert after == pytest.approx(before / 8)


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_ring_over_hosts_goes_through_the_cards_of_each_host(hosts):
    layout = replace(PLAIN, dp=8 * hosts)
    through_s = 2 * (layout.dp - 1) / layout.dp * 1e10 / (8 * A100.inter.bandwidth)
    rates = rates_of(A100, UNFUSED, Scalars())
    assert collective_time_s("all-reduce", 1e10, "dp", layout, rates) == pytest.approx(through_s, rel=0.01)


@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 2)])
def test_layers_that_are_gathered_one_by_one_each_go_around_the_ring_of_all_ranks(zero, gathers):
    few, many = (Layout(dp=dp, zero=zero, microbatch=4, microbatches=1, sequence=1024) for dp in (128, 512))
    rates = rates_of(A100, UNFUSED, Scalars())
    starts_s = [
        sum(
            count * collective_time_s(kind, 0.0, "dp", layout, rates)
            for kind, count in (("reduce-scatter", 1), ("all-gather", gathers))
        )
        for layout in (few, many)
    ]
    grown_s = step_time(GPT, many, rates).reduce_s - step_time(GPT, few, rates).reduce_s
    # Besides, a ring of more ranks sends a little more of the whole: (n - 1) / n of it.
    assert grown_s == pytest.approx(GPT.layers * (starts_s[1] - starts_s[0]), rel=0.05)


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_in_a_part_of_a_host_are_slower_than_in_the_whole(size):
    rates = rates_of(A100, UNFUSED, Scalars())
    layout = replace(PLAIN, tp=size)
    even = replace(A100, intra=replace(A100.intra, group_bandwidths=()))
    slower = collective_time_s("all-reduce", 1e9, "tp", layout, rates) / even.collective_s("all-reduce", 1e9, size)
    assert slower == pytest.approx((8 / size) ** PARTIAL, rel=0.01)


@pytest.mark.parametrize(
    ("scalar", "worse"),
    [
        ("matmul_rate", 0.5),
        ("matmul_half", 10.0),
        ("memory_rate", 0.5),
        ("intra_latency", 20.0),
        ("intra_rate", 0.5),
        ("intra_partial", 5.0),
        ("inter_rate", 0.5),
        ("step_s", 0.05),
    ],
)
def test_a_worse_machine_is_slower(scalar, worse):
    layout = replace(PLAIN, dp=8, tp=4, pp=2)
    assert seconds(GPT, layout, **{scalar: worse}) > seconds(GPT, layout)


def test_slower_launches_and_less_overlap_are_slower_where_they_matter():
    eager = replace(UNFUSED, launch_s=30e-6, overlaps=True)
    layout = replace(PLAIN, dp=16, microbatch=1, sequence=128)
    assert seconds(GPT, layout, eager, launch=2.0) > seconds(GPT, layout, eager)
    assert seconds(GPT, layout, eager, overlap=0.5) > seconds(GPT, layout, eager)


# --- pipeline -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 16),
    forward_s=st.floats(0.1, 3),
    backward_s=st.floats(0.1, 3),
)
def test_closed_form_of_equal_stages_is_what_events_make(stages, microbatches, forward_s, backward_s):
    forward, backward = [forward_s] * stages, [backward_s] * stages
    events = simulated_s(forward, backward, microbatches, 0.0)
    assert pipeline_s(forward, backward, microbatches) == pytest.approx(events)
    assert events == pytest.approx((microbatches + stages - 1) * (forward_s + backward_s))


@settings(max_examples=60, deadline=None)
@given(
    both=st.lists(st.tuples(st.floats(0.8, 1.2), st.floats(1.6, 2.4)), min_size=2, max_size=6),
    more=st.integers(0, 20),
    transfer_s=st.floats(0, 0.05),
)
@example(both=[(1.2, 2.4), (0.8, 1.6), (0.8, 1.6), (0.8, 1.6)], more=0, transfer_s=0.0)
def test_closed_form_of_unequal_stages_is_near_what_events_make(both, more, transfer_s):
    """Farthest where the first stage alone is slow and there are no more microbatches than stages: 20 %."""
    forward, backward = [f for f, _ in both], [b for _, b in both]
    microbatches = len(both) + more
    events = simulated_s(forward, backward, microbatches, transfer_s)
    assert pipeline_s(forward, backward, microbatches, transfer_s) == pytest.approx(events, rel=0.201)


def test_a_slow_last_stage_sets_the_pace():
    forward, backward = [1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 4.0]
    assert pipeline_s(forward, backward, 10) == pytest.approx(3 * 3 + 10 * 6)
    assert simulated_s(forward, backward, 10, 0.0) == pytest.approx(3 * 3 + 10 * 6)


def test_interleaving_divides_the_bubble():
    forward, backward = [1.0] * 4, [2.0] * 4
    assert pipeline_s(forward, backward, 8) == pytest.approx((8 + 3) * 3)
    assert pipeline_s(forward, backward, 8, virtual=3) == pytest.approx((8 + 1) * 3)


# --- steps ----------------------------------------------------------------------------------------------------


def test_recomputation_adds_a_forward_pass():
    ratio = seconds(GPT, replace(PLAIN, recompute="full")) / seconds(GPT, PLAIN)
    assert 1.25 < ratio < 1.40


@pytest.mark.parametrize(
    ("layout", "tflops"),
    [
        # Narayanan et al. (2021), table 1: GPT of 175 and 530 billion parameters on A100s, per GPU.
        (Layout(dp=8, tp=8, pp=12, microbatch=1, microbatches=192, sequence=2048, recompute="full"), 149),
        (Layout(dp=16, tp=8, pp=12, microbatch=1, microbatches=96, sequence=2048, recompute="full"), 141),
    ],
)
def test_the_machine_file_alone_comes_near_published_rates(layout, tflops):
    model = named_transformer("gpt-3 175b")
    assert model is not None
    tokens = layout.dp * layout.microbatches * layout.sequence
    factor = 1 + layout.sequence / (6 * model.hidden) + model.vocab / (16 * model.layers * model.hidden)
    flops = 96 * tokens * model.layers * model.hidden**2 * factor
    rate = flops / seconds(model, layout, replace(UNFUSED, launch_s=30e-6)) / layout.devices / 1e12
    assert rate == pytest.approx(tflops, rel=0.25)


# --- memory ---------------------------------------------------------------------------------------------------


def test_activations_are_those_of_korthikanti_and_others():
    n, h, a, s = PLAIN.tokens, GPT.hidden, GPT.heads, PLAIN.sequence
    published = n * h * (34 + 5 * a * s / h)
    assert layer_activations(GPT, PLAIN, UNFUSED, "none") == pytest.approx(published, rel=0.12)
    assert layer_activations(GPT, PLAIN, UNFUSED, "selective") == pytest.approx(34 * n * h, rel=0.2)
    assert layer_activations(GPT, PLAIN, UNFUSED, "full") == 2 * n * h


@pytest.mark.parametrize(
    ("zero", "bytes_per_parameter"),
    [(0, 2 + 2 + 12), (1, 2 + 2 + 12 / 4), (2, 2 + 2 / 4 + 12 / 4), (3, 16 / 4)],
)
def test_zero_divides_states_as_rajbhandari_and_others_say(zero, bytes_per_parameter):
    layout = replace(PLAIN, dp=4, zero=zero)
    parameters = sum(stage_parameters(GPT, layout, 0))
    assert peak_memory(GPT, layout, UNFUSED).states_bytes == pytest.approx(bytes_per_parameter * parameters)


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"), [("1f1b", 0, 4), ("1f1b", 3, 1), ("gpipe", 0, 8), ("gpipe", 3, 8)]
)
def test_1f1b_keeps_as_many_microbatches_as_stages_follow(schedule, stage, expected):
    layout = replace(PLAIN, pp=4)
    assert in_flight(layout, replace(UNFUSED, schedule=schedule), stage) == expected


def test_stages_hold_every_parameter_once_and_a_tied_table_twice():
    layout = replace(PLAIN, pp=4)
    held = sum(sum(stage_parameters(GPT, layout, stage)) for stage in range(4))
    assert held == pytest.approx(GPT.parameters + GPT.vocab * GPT.hidden)
    untied = replace(GPT, tied=False)
    held = sum(sum(stage_parameters(untied, layout, stage)) for stage in range(4))
    assert held == pytest.approx(untied.parameters)


@pytest.mark.parametrize(
    ("axis", "hosts"),
    [("tp", 1), ("dp", 8), ("pp", 4)],
)
def test_axes_span_the_hosts_that_megatron_gives_them(axis, hosts):
    layout = Layout(tp=4, dp=16, pp=4, microbatch=1, microbatches=1, sequence=1)
    assert layout.hosts(axis, 8) == hosts
