"""Steps of plans are taken in turn, and the chosen one is held against the fastest other."""

import json

import pytest

from autopar import Auto, DataParallel
from benchmarks.chosen_here import CHOSEN, Row, main, measured
from benchmarks.models import MODELS


def small():
    return MODELS["mlp"](width=16, hidden=32, batch=16)


def test_every_method_is_planned_and_run(monkeypatch):
    methods = {CHOSEN: DataParallel(), "the same": DataParallel(), "two stages": Auto(num_stages=2)}
    monkeypatch.setattr("benchmarks.chosen_here.METHODS", methods | {"refused": Auto(num_stages=99)})
    row = measured(small(), 2)
    assert set(row.measured_ms) == set(row.cpu_ms) == set(row.simulated_ms) == set(methods)
    assert min(row.cpu_ms.values()) > 0 < row.cpu_ratio
    assert set(row.refused) == {"refused"}
    assert row.measured_ms["the same"] == row.measured_ms[CHOSEN]
    assert row.interval[0] <= row.ratio <= row.interval[1]


def test_being_behind_fails(monkeypatch, tmp_path, capsys):
    behind = Row(
        model="mlp",
        plan="1 stage",
        measured_ms={CHOSEN: 3.0, "one stage": 2.0},
        cpu_ms={CHOSEN: 6.0, "one stage": 5.0},
        cpu_ratio=1.2,
        simulated_ms={CHOSEN: 1.0, "one stage": 1.0},
        refused={},
        best="one stage",
        ratio=1.5,
        interval=(1.4, 1.6),
    )
    monkeypatch.setattr("benchmarks.chosen_here.MODELS", {"mlp": small})
    monkeypatch.setattr("benchmarks.chosen_here.measured", lambda model, rounds: behind)
    with pytest.raises(SystemExit, match=r"mlp takes 1\.50 of one stage"):
        main(["--models", "mlp", "--json", str(tmp_path / "rows.json")])
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["ratio"] == 1.5
    assert "1.500" in capsys.readouterr().out
