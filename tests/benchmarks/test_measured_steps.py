"""Steps that are planned and run on the device that is here: what is written, and when the benchmark fails."""

import gzip
import json

import jax
import pytest

from autopar.hardware.machine import Machine
from benchmarks import measured_steps
from benchmarks.measured_steps import MODELS, Row, main, table_of

ROW = Row(
    model="a",
    planned_ms=10.9,
    calibrated_ms=10.4,
    measured_ms=10.0,
    interval_ms=(9.9, 10.1),
    planned_bytes=2.0**30,
    compiled_bytes=2.0**30,
    used_bytes=None,
    plan_s=1.0,
    compile_s=1.0,
    machine={"device": "none"},
)


def test_a_step_is_planned_run_and_kept_with_its_program(tmp_path, capsys):
    file, figures = tmp_path / "rows.json", tmp_path / "machine.json"
    Machine.named("cpu").save(figures)
    words = ["--models", "small", "--here", "--figures", str(figures), "--details", str(tmp_path), "--json", str(file)]
    main(words)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["model"] == "small"
    assert row["planned_ms"] == pytest.approx(row["calibrated_ms"])  # by the figures that the library has
    assert 0 < row["interval_ms"][0] <= row["measured_ms"] <= row["interval_ms"][1]
    assert 0 < row["planned_bytes"] < 2 * row["compiled_bytes"]
    with gzip.open(tmp_path / "small.hlo.txt.gz", "rt") as program:
        assert "ENTRY" in program.read()
    with gzip.open(tmp_path / "small.kernels.json.gz", "rt") as kernels:
        assert json.load(kernels) == []  # a CPU's profile has no device
    assert capsys.readouterr().out == ""


def test_what_is_off_or_does_not_run_fails(monkeypatch, capsys):
    answers = iter([ROW, Row(**{**vars(ROW), "model": "b", "calibrated_ms": 10.6}), None])
    monkeypatch.setattr(measured_steps, "in_a_process", lambda *_: next(answers))
    with pytest.raises(SystemExit, match=r"is asked for: b\. Not run: \['llama-1b'\]") as exit:
        main(["--models", "gpt-350m", "gpt-1.3b", "llama-1b"])
    assert exit.value.code
    assert "+9.0%" in capsys.readouterr().out


def test_a_table_without_rows_is_a_table():
    assert table_of([]).row_count == 0


def test_states_are_drawn_in_the_shapes_of_the_model():
    model = MODELS["small"]()
    state = model.draw_state()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model.abstract_state
    )
