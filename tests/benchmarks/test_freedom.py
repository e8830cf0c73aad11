"""More of what a plan may use makes none slower, and a ladder that breaks this is told."""

import dataclasses

import pytest

from autopar.hardware.machine import Machine
from benchmarks import freedom
from benchmarks.freedom import Row, climbed, line, slower


@pytest.mark.parametrize(
    ("model", "what"), [("mlp", "kinds"), ("vit", "kinds"), ("convnet", "effort"), ("lstm", "links")]
)
def test_more_of_something_makes_no_plan_slower(model, what):
    rows = climbed(model, what, Machine.named("dgx-h100"))
    assert all(row.step_ms is not None for row in rows) and len(rows) > 2
    assert not [line(row) for row in rows if slower(row)]


def test_less_memory_is_less_of_what_the_free_plan_takes(monkeypatch):
    monkeypatch.setattr(freedom, "SHARES", (0.8, 1.0))
    rows = climbed("mlp", "memory", Machine.named("dgx-h100"))
    assert [row.rung for row in rows] == ["0.80 of what it takes", "1.00 of what it takes", "all"]
    assert rows[1].step_ms == rows[2].step_ms and not any(map(slower, rows))


def test_a_rung_behind_one_below_ends_the_command_with_an_error(monkeypatch, tmp_path, capsys):
    fast = Row(model="mlp", what="effort", rung="fast", step_ms=1.0, refused="", ratio=None, plan="", cpu_s=1.0)
    behind = dataclasses.replace(fast, rung="normal", step_ms=1.01, ratio=1.01)
    monkeypatch.setattr(freedom, "climbed", lambda *_: [fast, behind])
    with pytest.raises(SystemExit, match=r"normal +1.01 ms, 1.0100 of the best with less"):
        freedom.main(["--models", "mlp", "--what", "effort", "--json", str(tmp_path / "rows.json")])
    assert "1.0100" in capsys.readouterr().out and (tmp_path / "rows.json").exists()
    assert not slower(fast) and slower(dataclasses.replace(fast, step_ms=None, ratio=float("inf")))
