"""A small GPT trains with its gradients in fewer bits, and the rows say what was sent."""

import pytest

from benchmarks.compressed_gradients import holds, off, table_of, trained
from benchmarks.models.gpt import gpt

MODEL = gpt(layers=1, width=64, heads=2, vocabulary=64, length=8, batch=8)


def test_a_gpt_trains_with_a_quarter_of_the_bytes():
    rows = [trained(MODEL, dtype, 3) for dtype in ("float32", "float8_e4m3fn")]
    assert holds(rows) == {"float32": True, "float8_e4m3fn": True}
    assert 0 < off(rows[1], rows[0]) < 1e-3
    # Biases and norms are summed as they are.
    assert rows[1].planned_bytes / rows[0].planned_bytes == pytest.approx(0.28, abs=0.01)
    assert table_of(rows, MODEL).row_count == 2
