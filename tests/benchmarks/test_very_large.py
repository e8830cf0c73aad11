"""M6's models, small: each measure takes from the devices what the table says, and the step is the plain one."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import autopar
from benchmarks.models.m6 import SIZES, Factored, abstract_step
from benchmarks.very_large import MEASURES, planned, tables

SMALL = {"num_devices": 8, "layers": 6, "experts": 16, "hidden": 32, "width": 16, "heads": 2, "vocabulary": 32}
SIZE = replace(SIZES[0], length=8, batch=1, **SMALL)
TARGET = next(each for each in MEASURES if each.is_target)


def test_the_models_have_the_parameters_that_their_names_say():
    assert [size.num_parameters / 1e12 for size in SIZES] == pytest.approx([1, 10], rel=0.01)


def test_every_measure_takes_from_the_devices_what_it_is_for():
    size = replace(SIZE, experts=64, hidden=512, width=64)
    named = [each for each in MEASURES[2:6] if each.pipeline == each.tensor == 1]
    rows = [planned(size, each, "p3dn.24xlarge") for each in named]
    peaks = [row.device_gb for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.5 * peaks[0]
    assert [row.host_gb > 0 for row in rows] == [False, True, True, True]
    assert all(row.fits for row in rows)
    assert len(list(tables(rows))) == 1


def test_a_small_model_with_everything_on_the_hosts_equals_the_plain_step():
    optimizer = Factored()
    step, *abstract = abstract_step(SIZE, optimizer)
    rng = np.random.default_rng(0)

    def draw(kind):
        drawn = rng.integers(0, 32, kind.shape) if kind.dtype == np.int32 else 0.2 * rng.normal(size=kind.shape)
        return jax.numpy.asarray(drawn, kind.dtype)

    (params, _), batch = jax.tree.map(draw, abstract)
    state = params, optimizer.init(params)
    parallel = autopar.parallelize(step, method=TARGET.method(SIZE), devices=jax.devices()[:8])
    plain = jax.jit(step)
    expected = state
    for _ in range(2):
        state, value = parallel(state, batch)
        expected, expected_value = plain(expected, batch)
    # Products are in 16 bits, whose rounding is 1e-3.
    assert float(value) == pytest.approx(float(expected_value), rel=2e-3)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[0]) if leaf.size > 1024}
    assert kinds == {"pinned_host"}
