"""XLA's GPU compiler has every transfer of a small GPT's plans, and gives hosts and devices the planned bytes."""

import importlib.util

import pytest

from benchmarks.compiled_offload import compiled_row, table_of
from benchmarks.models.gpt import gpt

MODEL = gpt(layers=1, width=64, heads=2, vocabulary=512, length=16, batch=16)
EVERYTHING = ("parameters", "activations")


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="pip install 'autopar[gpu-aot]'")
def test_every_copy_is_a_transfer_of_the_gpu_compiler_and_the_memory_is_as_planned():
    here, there = (compiled_row(MODEL, offload, 3, "h100") for offload in ("off", EVERYTHING))
    assert (here.copies, here.planned_host_bytes, here.xla_host_bytes) == (0, 0, 0)
    assert there.agrees
    assert there.copies > 0
    assert there.xla_host_bytes > 0
    assert there.xla_bytes < here.xla_bytes
    assert there.planned_bytes == pytest.approx(there.xla_bytes, rel=0.1)
    assert table_of([here, there], "h100").row_count == 2
