"""Nothing grows over calls of a step, and what was compiled can be listed and dropped."""

import gc
import weakref

import pytest

from autopar.errors import InvalidArgument
from benchmarks.growth import grow, held


def test_nothing_grows_over_calls_and_compiled_steps_can_be_dropped():
    step, rows = grow(num_shapes=2, num_calls=200)
    assert [row.compiled for row in rows] == [2] * len(rows) and rows[-1].calls == 200
    assert len({(row.arrays, row.threads, row.files) for row in rows[1:]}) == 1, rows
    first, second = step.all_compiled()
    dropped = weakref.ref(first)
    step.clear_cache(first)
    assert step.all_compiled() == [second]
    with pytest.raises(InvalidArgument, match="has no such compiled step"):
        step.clear_cache(first)
    del first
    gc.collect()
    assert dropped() is None
    step.clear_cache()
    assert held(200, step).compiled == 0
