"""A step that works on too few rows at a time for its devices is named with its line, once, and priced as it is."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ReplicatedWarning
from autopar.hardware.cluster import Cluster
from tests.small_steps import SEPARATE

WIDTH, ROWS = 64, 16


def loss(state, rows):
    for _ in range(3):
        rows = jnp.tanh(rows @ state)
    return jnp.mean(rows**2)


def accumulating(count):
    """Return a step that takes the gradient of its batch in so many microbatches of its own."""

    def step(state, batch):
        def add(total, rows):
            return total + jax.grad(loss)(state, rows), None

        parts = batch.reshape(count, batch.shape[0] // count, *batch.shape[1:])
        return state - 0.1 * jax.lax.scan(add, jnp.zeros_like(state), parts)[0]

    return step


def unrolled(state, batch):
    return state - 0.1 * sum(jax.grad(loss)(state, batch[4 * i : 4 * i + 4]) for i in range(4))


def plain(state, batch):
    return state - 0.1 * jax.grad(loss)(state, batch)


def by_row(state, batch):
    return state - 0.1 * jax.grad(lambda w: jnp.mean(jax.lax.map(lambda row: loss(w, row), batch)))(state)


def by_row_evaluated(state, batch):
    return jax.lax.map(lambda row: loss(state, row), batch)


def planned(step, method, *, rows=ROWS, width=WIDTH, **options):
    """Return the plan, and what is said of it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parallel = autopar.parallelize(step, method=method, batch_argnums=1, **options)
        found = parallel.trace(jnp.ones((width, width)), jnp.ones((rows, width))).plan()
    return found, [str(each.message) for each in told if each.category is ReplicatedWarning]


def said(step, method, **options):
    return planned(step, method, **options)[1]


def test_microbatches_of_the_step_that_do_not_divide_are_named_with_their_line_and_what_helps():
    (words,) = said(accumulating(4), autopar.DataParallel(), width=16)
    line = words[words.index("because ") + 8 : words.index(" works on")]
    assert line.startswith("test_shared_work.py:") and line.endswith("(accumulating.<locals>.step)")
    assert words == (
        f"Each of 8 devices computes 100 % of the FLOPs of step, and not 1/8 of them, because {line} works on 4 rows "
        "of batch at a time, which 8 devices cannot share evenly. Make these a multiple of 8, take one gradient "
        "of the whole batch and let autopar cut it into num_microbatches=2, or use Auto(), which can split "
        "other dimensions."
    )


@pytest.mark.parametrize(
    ("method", "percent"),
    [
        (autopar.Zero(), 49),  # 4 of the 8 devices have a row
        (autopar.ExpertParallel(), 100),
        (autopar.Megatron(), 29),  # 4 of the 8 devices have a row, and the update is every device's own
        (autopar.ShardParallel(mesh_shape=(8,), axis_names=("rows",), specs={"batch": P("rows")}), 100),
    ],
    ids=lambda given: type(given).__name__,
)
def test_every_method_that_divides_rows_tells(method, percent):
    (words,) = said(accumulating(4), method, width=16)
    assert f"computes {percent} % of the FLOPs" in words and "4 rows of batch at a time" in words


def test_a_search_within_kinds_tells_and_one_that_could_divide_features_does_not():
    for kinds in ("data", ("data", "zero")):
        (words,) = said(accumulating(4), autopar.Auto(kinds=kinds, num_stages=1))
        assert words.endswith("batch and let autopar cut it into num_microbatches=2, or name more kinds.")
    for method in (autopar.Auto(num_stages=1), autopar.Auto(kinds=("data", "tensor")), autopar.TensorParallel()):
        assert not said(accumulating(4), method)


def test_rows_that_divide_are_no_matter_though_a_step_is_so_small_that_all_of_it_is_whole():
    for step in (plain, accumulating(2)):
        for method in (autopar.DataParallel(), autopar.Zero(), autopar.Megatron(), autopar.Auto(kinds="data")):
            assert not said(step, method, width=16)


def test_features_that_are_divided_instead_are_no_matter():
    divided, words = planned(accumulating(4), autopar.DataParallel(), width=2048)
    whole, _ = planned(accumulating(4), autopar.Zero(), width=2048)
    assert not words and divided.simulate().compute_s < whole.simulate().compute_s / 4


def test_a_batch_that_does_not_divide_itself_is_named_alone():
    (words,) = said(accumulating(4), autopar.DataParallel(), rows=12)
    assert words.startswith("batch enters whole on every device, as its 12 rows do not divide among 8 devices.")


def test_a_loop_over_the_rows_themselves_has_one_at_a_time():
    (words,) = said(by_row, autopar.Zero())
    assert "works on one row of batch at a time" in words and "num_microbatches=2" in words
    (words,) = said(by_row_evaluated, autopar.DataParallel(), width=16)
    assert "one row of batch" in words and "num_microbatches" not in words


def test_a_loop_in_python_is_named_by_the_line_of_most_of_the_work():
    (words,) = said(unrolled, autopar.Zero(), width=512)
    assert "(loss) works on 4 rows of batch at a time" in words
    (words,) = said(unrolled, autopar.DataParallel(), rows=24, devices=jax.devices()[:6])
    assert "1/6 of them" in words and "num_microbatches=4" in words


def test_microbatches_of_autopar_are_named_as_such():
    (words,) = said(plain, autopar.Zero(num_microbatches=4))
    assert "because a microbatch has 4 rows of batch, which 8 devices" in words
    assert words.endswith("Make these a multiple of 8, or use Auto(), which can split other dimensions.")


def test_stages_tell_of_the_mesh_with_most():
    (words,) = said(accumulating(8), autopar.PipelineParallel(num_stages=2), width=16)
    assert "Each of 4 devices computes" in words and "of its stages of step, and not 1/4" in words
    assert "2 rows of batch at a time, which 4 devices cannot share evenly. Make these a multiple of 4" in words


def test_microbatches_within_those_of_autopar_count_as_they_are():
    (words,) = said(accumulating(4), autopar.DataParallel(num_microbatches=2), width=16)
    assert "works on 2 rows of batch at a time" in words


def test_a_simulation_prices_what_every_device_computes():
    method = autopar.Auto(kinds="data", num_stages=1, num_microbatches=1)
    whole, (words,) = planned(accumulating(4), method, width=512, cluster=Cluster(num_devices=8, machine=SEPARATE))
    alone, _ = planned(accumulating(4), method, width=512, cluster=Cluster(num_devices=1, machine=SEPARATE))
    assert "computes 100 % of the FLOPs" in words
    assert whole.simulate().compute_s == pytest.approx(alone.simulate().compute_s)
