"""Kernels of attention take what was measured of them on a GPU, as plans have it."""

import json
from pathlib import Path

import pytest

from autopar.hardware.machine import Machine
from benchmarks.attention_kernels import SHAPES, Shape, Timed, main, modelled_us

KEPT = Path(__file__).parents[2] / "benchmarks/results" / "attention-kernels-h100-2026-11-26.json"
ROUND_US = 30
"""Microseconds that a GPU waits for its host after each round of a loop: one forward kernel in the kept file."""


def rows():
    kept = json.loads(KEPT.read_text(encoding="utf-8"))["rows"]
    return [Timed(shape=Shape(**row["shape"]), forward_us=row["forward_us"], both_us=row["both_us"]) for row in kept]


@pytest.mark.parametrize("timed", rows(), ids=lambda each: str(each.shape))
def test_modelled_kernels_are_near_the_measured_ones(timed):
    forward_us, backward_us = modelled_us(timed.shape, Machine.named("dgx-h100"))
    assert forward_us == pytest.approx(timed.forward_us - ROUND_US, rel=0.08, abs=3)
    assert backward_us == pytest.approx(timed.backward_us, rel=0.14)


def test_kept_times_are_printed_beside_the_modelled_ones(capsys):
    main(["--kept", str(KEPT), "--machine", "dgx-h200"])
    printed = capsys.readouterr().out
    assert "modelled for dgx-h200" in printed
    assert printed.count("yes") + printed.count(" no ") == len(SHAPES)
