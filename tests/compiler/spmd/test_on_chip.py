"""Bytes that need not be moved, since arrays stay in the memory on the chip."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.spmd.block_times import moved_bytes
from autopar.compiler.spmd.local_program import local_block
from autopar.compiler.spmd.on_chip import MovedArray, saved_bytes
from autopar.hardware.machine import Machine
from tests.compiler.equations import real
from tests.compiler.planned_steps import LINE, plan_step, traced

TPU = Machine.named("tpu-v6e")
MIB = 2.0**20
COPY_S = MIB / TPU.memory_bandwidth


def array(made: int, *reads: int, **how) -> MovedArray:
    """An array of one MiB that is written and read in whole."""
    return MovedArray(nbytes=MIB, made=made, written=MIB if made >= 0 else 0.0, reads=dict.fromkeys(reads, MIB), **how)


@pytest.mark.parametrize(
    ("arrays", "copies_between", "room", "saved"),
    [
        pytest.param([array(0, 2)], 19, 8, 2, id="it is neither written nor read"),
        pytest.param([array(0, 2)], 21, 8, 0, id="it does not wait for long"),
        pytest.param([array(0, 2, 3)], 21, 8, 1, id="of two readings the second finds it there"),
        pytest.param([array(-1, 0, 1)], 0, 8, 1, id="what is given is read once"),
        pytest.param([array(0, 1, in_memory=True)], 0, 8, 0, id="what is made in memory is read there"),
        pytest.param([array(0, 1, leaves=True)], 0, 8, 1, id="a result is written all the same"),
        pytest.param([array(0, 1), array(0, 1)], 0, 1, 2, id="one of two finds room"),
        pytest.param([array(0, 1), array(2, 3)], 0, 1, 4, id="each one after the other"),
        pytest.param([array(0, 1, 2, 3)], 0, 1, 4, id="an array takes its room once"),
        pytest.param([array(0, 1)], 0, 0.5, 0, id="a larger one than the chip holds does not stay"),
    ],
)
def test_arrays_stay_on_the_chip_as_long_as_there_is_room_and_they_are_read_soon(arrays, copies_between, room, saved):
    machine = dataclasses.replace(TPU, chip_bytes=room * MIB)
    assert saved_bytes(arrays, [0.0, copies_between * COPY_S, 0.0, 0.0], machine) == saved * MIB


def moved(fn, *args, **machine: float) -> float:
    """Bytes that a device moves."""
    closed = traced(fn, *args)
    costs = MeshCosts(machine=dataclasses.replace(TPU, **machine), mesh=LINE)
    found = plan_step(closed, LINE, num_state=0, chosen=costs)
    return moved_bytes(local_block(jc.open_jaxpr(closed)[0], found.plan, LINE), costs)


def test_what_products_hand_on_goes_through_the_memory_that_cores_share():
    def products(x, w):
        return (jnp.tanh(jnp.tanh(x @ w) @ w) @ w).sum(0)

    x, w = real(4096, 512), real(512, 512)
    handed = 4 * x.size / LINE.num_devices / 2  # of either tanh in bfloat16, as products alone read them
    nowhere = moved(products, x, w, chip_bytes=0.0)
    whole = nowhere - moved(products, x, w)
    # Both are neither written nor read, nor are the weights again.
    assert whole == pytest.approx(4 * handed + 2 * 4 * w.size, rel=0.01)
    assert nowhere - moved(products, x, w, cores=2) == pytest.approx(2 * 4 * w.size, rel=0.01)


def test_loops_leave_nothing_on_the_chip():
    def looped(x, w):
        y = jnp.exp(x.sum(1, keepdims=True)) * x
        z = jax.lax.scan(lambda h, _: (h @ w, None), y, None, 4)[0]
        return y + z

    x, w = real(512, 512), real(512, 512)
    # Of what is given, the second reading; what is made for the loop is read from memory by it and behind it.
    assert moved(looped, x, w, chip_bytes=0.0) - moved(looped, x, w) == pytest.approx(
        4 * x.size / LINE.num_devices, rel=0.01
    )
