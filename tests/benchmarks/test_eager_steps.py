"""Steps of eager frameworks by the compiler's path: which rows are expressed, and what their executor does."""

import json

import pytest

from autopar.errors import InvalidArgument
from benchmarks import eager_steps
from benchmarks.accuracy_cases import case_of
from benchmarks.accuracy_rows import STEPS
from tests.benchmarks.measured_rows import GPT_ROW, row
from tests.benchmarks.test_accuracy import write

SMALL = GPT_ROW | {"layers": "4", "seq": "128", "vocab": "1000"}


def run(tmp_path, rows, *options):
    tmp_path.mkdir(exist_ok=True)
    file, out = write(tmp_path / "rows.csv", rows), tmp_path / "out.json"
    eager_steps.main(["--measurements", str(file), "--json", str(out), *options])
    return json.loads(out.read_text(encoding="utf-8"))


def test_rows_are_planned_by_their_degrees_and_both_errors_are_told(tmp_path, capsys):
    rows = [SMALL, SMALL | {"tp": "1", "dp": "4"}, SMALL | {"recompute": "selective"}, SMALL | {"layers": "3"}]
    found = run(tmp_path, rows)
    assert [each["line"] for each in found["rows"]] == [2, 3]
    assert all(each["path_s"] > 0 < each["model_s"] and each["measured_s"] == 0.22 for each in found["rows"])
    assert found["skipped"] == {"computes parts of a layer again": 1, "has stages of unequal layers": 1}
    errors = [abs(each["path_s"] / 0.22 - 1) for each in found["rows"]]
    assert found["all"]["path_s"]["mape"] == pytest.approx(sum(errors) / 2)
    printed = capsys.readouterr()
    assert "2 rows: by the compiler's path" in printed.out and "[2/2]" in printed.err
    assert not (tmp_path / "out.journal").exists()


def test_an_executor_that_fuses_nothing_takes_longer(tmp_path):
    fused, apart = (run(tmp_path / name, [SMALL], *options) for name, options in (("a", ()), ("b", ("--unfused",))))
    assert apart["unfused"] and apart["rows"][0]["path_s"] > 1.5 * fused["rows"][0]["path_s"]


def test_the_machine_launches_each_kernel_and_hides_what_the_framework_does():
    megatron, fsdp = (case_of(row(framework=each)) for each in ("Megatron-DeepSpeed", "Composer FSDP"))
    assert eager_steps.machine_of(megatron).launch_s == megatron.habits.launch_s > megatron.machine.kernel_s
    assert eager_steps.machine_of(megatron).hidden_share == 0
    assert eager_steps.machine_of(fsdp).hidden_share == fsdp.machine.overlap > 0


def test_a_step_of_a_jax_program_is_refused(tmp_path):
    file = write(tmp_path / "steps.csv", [], STEPS.names)
    with pytest.raises(InvalidArgument, match="has steps of JAX programs, which are not eager"):
        eager_steps.expressible(file)


def test_a_run_without_rows_says_so(tmp_path, capsys):
    assert run(tmp_path, [SMALL | {"recompute": "selective"}])["all"]["path_s"] == {"rows": 0}
    assert "No row was predicted." in capsys.readouterr().out
