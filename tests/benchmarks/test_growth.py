"""Nothing grows over calls of a step, and what was compiled can be listed and dropped."""

import gc
import weakref
from dataclasses import replace

import pytest

from autopar.errors import InvalidArgument
from benchmarks.growth import TOLERANCE, grow, held, is_flat, train


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


@pytest.mark.usefixtures("float64")
def test_trainings_in_threads_with_restarts_and_a_loader_that_fails_end_as_plain_ones_do():
    trained = train(120)
    assert trained.restarts > 9 and trained.difference < TOLERANCE
    assert is_flat(trained.rows), trained.rows
    grown = [replace(row, files=row.files + n) for n, row in enumerate(trained.rows)]
    assert not is_flat(grown)
