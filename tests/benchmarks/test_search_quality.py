"""Random machines are those of their seed, and a row says which method is ahead."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from benchmarks.enumerated_plans import train_step
from benchmarks.search_quality import ALLOWED, FREE, cluster_of, line, measured


def test_a_random_machine_is_that_of_its_seed():
    one, again, other = (cluster_of(f"random:{seed}") for seed in (3, 3, 4))
    assert one == again
    assert one != other
    assert one.num_devices % one.groups[0].machine.devices_per_host == 0


@pytest.mark.parametrize("seed", [0, 5])
def test_a_row_on_a_random_machine(seed):
    row = measured("mlp", f"random:{seed}", [FREE, "4 microbatches", "3 stages"])
    assert row.best in ("4 microbatches", "3 stages")
    assert row.ratio <= ALLOWED
    assert f"of {row.best}" in line(row)


def test_a_search_of_unequal_layers_is_not_behind_one_of_a_schedule_alone():
    """The best stages are for one microbatch. By formulas, which count on more of them, they are seventh or later."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    widths = (2048, 512, 512, 2048, 512, 256)
    params = [{"up": array(256, width), "down": array(width, 256)} for width in widths]
    cluster = cluster_of("random:11")
    traced = autopar.parallelize(train_step, cluster=cluster).trace(params, {"x": array(32, 256), "y": array(32, 256)})
    free_s, restricted_s = (
        traced.plan(method).simulate(cluster).step_time_s
        for method in (autopar.Auto(), autopar.Auto(schedule="zero-bubble", num_microbatches=1))
    )
    assert free_s <= ALLOWED * restricted_s
