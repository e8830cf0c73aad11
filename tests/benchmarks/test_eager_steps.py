"""Steps of training frameworks by the compiler's path: which rows are expressed, and what their executor does."""

import json
from argparse import ArgumentParser
from dataclasses import replace

import pytest

from autopar import PipelineParallel
from benchmarks import accuracy, eager_steps
from benchmarks.accuracy_cases import case_of
from benchmarks.accuracy_fit import Scalars, fitted_scalars
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
    workload, _ = eager_steps.traced(*eager_steps.traced_key(case))
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
