"""Steps of training frameworks by the compiler's path: which rows are expressed, and what their executor does."""

import json
from argparse import ArgumentParser
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import PipelineParallel
from autopar.step_parts import StepParts
from benchmarks import accuracy, eager_steps
from benchmarks.accuracy_cases import Unusable, case_of
from benchmarks.accuracy_fit import Scalars, fitted_scalars
from benchmarks.models.llama import Llama, through_experts
from tests.benchmarks.measured_rows import SMALL_ROW, row
from tests.benchmarks.test_accuracy import write


def run(tmp_path, rows, *options):
    file, out = write(tmp_path / "rows.csv", rows), tmp_path / "out.json"
    parser = ArgumentParser()
    accuracy.add_arguments(parser)
    accuracy.main(parser.parse_args(["--measurements", str(file), "--json", str(out), *options]))
    return json.loads(out.read_text(encoding="utf-8"))


def test_rows_are_planned_by_their_degrees_and_others_counted(tmp_path, capsys):
    rows = [
        SMALL_ROW,
        SMALL_ROW | {"tp": "1", "dp": "4"},
        SMALL_ROW | {"recompute": "selective"},
        SMALL_ROW | {"layers": "3"},
    ]
    found = run(tmp_path, rows, "--sample", "1", "--rows")
    assert [each["line"] for each in found["predictions"]] == [2, 3]
    assert all(each["predicted_s"] > 0 and each["measured_s"] == 0.018 for each in found["predictions"])
    reasons = {each["reason"] for each in found["skipped"]}
    assert reasons == {"computes parts of a layer again", "has unequal stages and does not say of which layers"}
    assert "[2/2]" in capsys.readouterr().err
    assert not (tmp_path / "out.journal").exists()


def test_a_fit_finds_another_machine_by_parts_of_steps_and_predicts_rows_it_has_not_seen():
    wide, replicas = {"hidden": "2048"}, {"tp": "1", "dp": "4"}
    cases = [case_of(row(**(SMALL_ROW | cells))) for cells in ({}, wide, replicas, wide | replicas)]
    entries = {case.row.digest: eager_steps.priced(case) for case in cases}
    predict = eager_steps.by_parts(entries)
    truth = Scalars(memory_rate=0.6, launch=1.5)
    measured = [replace(each.case, measured_s=each.step_s) for each in predict(cases, truth)]
    found = fitted_scalars(measured[:3], predict)
    assert found == fitted_scalars(measured[:3], predict)
    errors = [abs(each.step_s / each.case.measured_s - 1) for each in predict(measured, found)]
    assert max(errors) < 0.03 < min(abs(e.step_s / e.case.measured_s - 1) for e in predict(measured, Scalars()))


@pytest.mark.parametrize(
    ("cells", "runs"),
    [
        ({"layers": "3", "note": "layers/stage [1, 2]"}, [[0, 1], [1, 3]]),
        ({"layers": "4", "pp": "3", "ngpu": "12", "zero": "1"}, [[0, 1], [1, 3], [3, 4]]),
        ({"layers": "6", "vp": "2"}, [[0, 1], [1, 3], [3, 5], [5, 6]]),
    ],
)
def test_unequal_stages_have_the_layers_that_are_noted_or_the_ends_of_the_model(cells, runs):
    case = eager_steps.check_expressed(case_of(row(**(SMALL_ROW | cells))))
    workload, _ = eager_steps.traced(eager_steps.traced_key(case))
    method = eager_steps.method_of(case, workload)
    assert isinstance(method, PipelineParallel) and method.layers == tuple(map(tuple, runs))
    assert {axis for spec in method.specs.values() for axis in spec} == {None, "tensor", "data"}
    assert eager_steps.priced(case).step_s > 0


def test_sums_in_32_bits_take_longer_and_more_room():
    case = case_of(row(**SMALL_ROW))
    plain, wide = (
        eager_steps.priced(replace(case, habits=replace(case.habits, sums_in_32_bits=each))) for each in (False, True)
    )
    assert plain.step_s < wide.step_s and plain.peak_bytes < wide.peak_bytes


@pytest.mark.parametrize("cells", [{"model": "llama2-7b"}, {"framework": "NeMo pretrain", "note": "fp8"}])
def test_gated_models_and_products_in_8_bits_are_expressed(cells):
    sizes = {"layers": "2", "hidden": "", "heads": "", "pp": "1", "dp": "4"} if "model" in cells else {}
    entry = eager_steps.priced(case_of(row(**(SMALL_ROW | sizes | cells))))
    assert entry.parts and entry.peak_bytes > 0


EXPERTS = {"model": "Qwen3_30B_a3B", "framework": "Megatron-Bridge 26.02", "hw": "DGX-B200", "hidden": "", "heads": ""}
DIVIDED = {"dp": "8", "tp": "1", "pp": "1", "ep": "8", "mbs": "1", "gbs": "16", "seq": "4096", "recompute": "no"}


def test_experts_are_divided_among_all_devices_and_tokens_travel_to_them():
    case = eager_steps.check_expressed(case_of(row(**(SMALL_ROW | EXPERTS | DIVIDED))))
    parts = StepParts.from_data(eager_steps.priced(case).parts or {})
    sent = sum(times for task in parts.tasks for each, times in task.collectives if each.kind == "all-to-all")
    # Of each of 2 microbatches and 2 layers, one way at least: gathers of all tokens have as many bytes as 8 choices.
    assert sent >= 2 * 2


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"tp": "2", "dp": "4", "ep": "4"}, "divides experts otherwise than their tokens"),
        ({"dp": "4", "ngpu": "4"}, "divides experts otherwise than their tokens"),
        ({"zero": "3"}, "has experts or unequal stages with ZeRO 2 or 3"),
        ({"model": "deepseekv3"}, "has latent attention"),
        ({"model": "GPT OSS 20B"}, "layers without any"),
    ],
)
def test_experts_that_are_divided_otherwise_are_not_expressed(cells, reason):
    with pytest.raises(Unusable, match=reason):
        eager_steps.check_expressed(case_of(row(**(SMALL_ROW | EXPERTS | DIVIDED | cells))))


def test_a_state_that_no_dimension_of_a_weight_divides_is_not_expressed():
    with pytest.raises(Unusable, match="divide no weight"):
        eager_steps.check_expressed(case_of(row(**(SMALL_ROW | {"dp": "3", "ngpu": "12", "gbs": "24"}))))


@pytest.mark.parametrize(("vocab", "tp", "padded"), [("1000", "1", 1000), ("1000", "2", 1000), ("1001", "2", 1024)])
def test_a_vocabulary_is_padded_that_devices_share_it(vocab, tp, padded):
    case = case_of(row(**(SMALL_ROW | {"vocab": vocab, "tp": tp, "dp": "1", "ngpu": ""})))
    assert eager_steps.traced_key(case).model.vocab == padded


def test_a_token_goes_through_the_experts_that_it_chose():
    width, experts, tokens = 4, 4, 8
    sizes = Llama(
        num_layers=1, width=width, num_heads=1, num_kv_heads=1, hidden=3, experts=experts, chosen=2, dtype=jnp.float32
    )
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"gate": (experts, width, 3), "up": (experts, width, 3), "down": (experts, 3, width)}
    weights = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}
    # Token t chooses experts t and t + 1, modulo their number.
    x = jnp.eye(width)[jnp.arange(tokens) % experts] + 0.1 * jax.random.normal(keys[3], (1, tokens, width))
    weights["router"] = jnp.eye(experts) * 9 + jnp.roll(jnp.eye(experts), 1, axis=1) * 5
    every = jnp.einsum(
        "btef,efd->bted",
        jax.nn.silu(jnp.einsum("btd,edf->btef", x, weights["gate"])) * jnp.einsum("btd,edf->btef", x, weights["up"]),
        weights["down"],
    )
    share, expert = jax.lax.top_k(jax.nn.softmax(x @ weights["router"]), 2)
    chosen = jnp.take_along_axis(every, expert[..., None], axis=2)
    expected = jnp.einsum("btk,btkd->btd", share / share.sum(-1, keepdims=True), chosen)
    assert [*jnp.bincount(expert.reshape(-1))] == [tokens * 2 // experts] * experts
    np.testing.assert_allclose(through_experts(sizes, x, weights), expected, rtol=1e-5, atol=1e-6)


def test_the_machine_launches_each_kernel_and_hides_what_the_framework_does():
    megatron, fsdp, oneflow = (
        case_of(row(framework=each)) for each in ("Megatron-DeepSpeed", "Composer FSDP", "OneFlow-GPT")
    )
    eager, hiding, compiled = (eager_steps.machine_of(case, Scalars()) for case in (megatron, fsdp, oneflow))
    assert eager.launch_s == megatron.habits.launch_s > megatron.machine.kernel_s
    assert (eager.hidden_share, eager.unaligned_share) == (0, eager_steps.UNALIGNED)
    assert hiding.hidden_share == fsdp.habits.hidden_share > 0
    assert (compiled.launch_s, compiled.unaligned_share) == (0, 1)


def test_what_is_gathered_for_the_backward_pass_is_hidden_as_what_is_for_the_forward_pass():
    cells = {"framework": "Composer FSDP", "tp": "1", "pp": "1", "dp": "8", "zero": "FULL_SHARD"}
    case = case_of(row(**(SMALL_ROW | cells)))
    waiting = replace(case, habits=replace(case.habits, hidden_share=0.0))
    (ahead,), (after,) = (
        eager_steps.by_parts({case.row.digest: eager_steps.priced(each)})([each], Scalars()) for each in (case, waiting)
    )
    assert ahead.step_s < after.step_s


def test_collectives_of_tensor_parallelism_run_behind_products_but_for_their_first_part():
    case = case_of(row(**(SMALL_ROW | {"tp": "4", "dp": "1"})))
    overlapping = replace(case, habits=replace(case.habits, overlaps_products=True))
    waiting, behind = (StepParts.from_data(eager_steps.priced(each).parts or {}) for each in (case, overlapping))
    for before, after in zip(waiting.tasks, behind.tasks, strict=True):
        shares = {name: times / dict(before.collectives)[name] for name, times in after.collectives}
        assert all(share == (1 if each.combined else 1 / 4) for each, share in shares.items())
    assert any(task.collectives for task in behind.tasks)
