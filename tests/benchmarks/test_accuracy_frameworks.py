"""Fields that rows leave out are filled in as the frameworks' own scripts and releases have them."""

import pytest

from autopar.step_parts import StepParts
from benchmarks.accuracy_cases import case_of
from benchmarks.accuracy_fit import Scalars
from benchmarks.accuracy_journal import Entry
from benchmarks.accuracy_report import summary
from benchmarks.eager_steps import by_parts
from tests.benchmarks.measured_rows import row


@pytest.mark.parametrize(
    ("pp", "noted", "stage_layers"),
    [
        ("2", "[12, 12]", (12, 12)),
        ("2", "[11, 15]", (10, 14)),
        ("4", "[5, 7, 7, 7]", (4, 7, 7, 6)),
        ("1", "[26]", (24,)),
    ],
)
def test_stages_hold_what_is_noted_without_the_ends_of_the_model(pp, noted, stage_layers):
    case = case_of(row(pp=pp, dp="1", ngpu=str(2 * int(pp)), note=f"layers/stage {noted}"))
    assert case.layout.stage_layers == stage_layers


@pytest.mark.parametrize(
    ("cells", "microbatch", "microbatches"),
    [
        ({"pp": "1", "ngpu": "4"}, 16, 1),
        ({"pp": "2"}, 1, 16),
        ({"note": "grad_accum=8"}, 2, 8),
    ],
)
def test_only_pipelines_are_taken_to_accumulate_where_nothing_is_recorded(cells, microbatch, microbatches):
    layout = case_of(row(mbs="", **cells)).layout
    assert (layout.microbatch, layout.microbatches) == (microbatch, microbatches)


@pytest.mark.parametrize(
    ("cells", "frozen"),
    [
        ({"framework": "NeMo LoRA"}, True),
        ({"note": "llama2_70b_lora"}, True),
        (
            {"tok_s_gpu": "1000", "tflops_gpu": "1.4"},
            True,
        ),  # 350M parameters: 2.1 GFLOP of a token, 1.4 without weights
        ({"tok_s_gpu": "1000", "tflops_gpu": "2.1"}, False),
        ({}, False),
    ],
)
def test_weights_are_frozen_where_adapters_are_trained_by_name_or_by_flops(cells, frozen):
    assert case_of(row(step_s="" if cells else "1", samples_s="1" if cells else "", **cells)).habits.frozen == frozen


def test_sailor_trains_in_float32():
    assert case_of(row(framework="Sailor(Megatron-DeepSpeed)", hw="GH-96")).habits.dtype == "tf32"


@pytest.mark.parametrize(("layers", "dense_layers"), [("61", 3), ("40", 2), ("4", 1)])
def test_a_model_cut_to_few_layers_keeps_its_share_of_plain_ones(layers, dense_layers):
    cells = {"framework": "Megatron-LM 0.14", "model": "deepseekv3", "hidden": "", "hw": "B200", "ep": "2"}
    case = case_of(row(layers=layers, **cells))
    assert case.model.experts is not None
    assert case.model.experts.dense_layers == dense_layers
    assert not case.habits.hidden_share


def test_recorded_memory_is_compared_with_what_its_framework_counts():
    parts = StepParts(tasks=(), transfers=(), waited_s=1.0).to_data()
    for cells in ({"framework": "Megatron-LM 0.14", "mem_gib": "30"}, {"mem_gib": "37"}):
        case = case_of(row(**cells))
        predict = by_parts({case.row.digest: Entry(peak_bytes=30 * 2**30, parts=parts)})
        (predicted,) = predict([case], Scalars())
        assert predicted.peak_bytes == (30 + 4) * 2**30
        assert summary([predicted])["memory_mape"] == pytest.approx(0, abs=1e-5)


def test_gradients_that_stay_beside_their_sums_take_room_on_each_device():
    parts = StepParts(tasks=(), transfers=(), waited_s=1.0).to_data()
    peaks: list[float] = []
    for note in ("02-25", "02-28"):
        case = case_of(row(note=note))
        (predicted,) = by_parts({case.row.digest: Entry(peak_bytes=2**30, parts=parts)})([case], Scalars())
        peaks.append(predicted.tensor_bytes)
    assert peaks[1] - peaks[0] == pytest.approx(2 * case_of(row()).model.parameters / (2 * 2))
