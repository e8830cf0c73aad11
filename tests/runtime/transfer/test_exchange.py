"""Exchange: values arrive bit for bit, between processes and within one, and what crosses is what was planned."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.ir.instructions import ArrayType, Executable, Free, Input, MeshProgram, Output, Recv, Run, Send, Task
from autopar.ir.program import Program
from autopar.runtime.transfer.exchange import Exchange, lasting_values
from autopar.runtime.transfer.tiles import DeviceLayout, plan_transfer
from tests.runtime.exchange_process import (
    DEVICES_EACH,
    array_of,
    carried_out,
    drawn_messages,
    is_right,
    sharding_of,
)
from tests.runtime.worlds import world

PROCESSES = 3
PROCESS_OF = [ordinal // DEVICES_EACH for ordinal in range(PROCESSES * DEVICES_EACH)]


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    """Reports of the processes of one world."""
    # Gloo's collectives need threads that wait for each other, however few cores there are.
    cpu = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES_EACH}", "NPROC": "16"}
    with world("server", [cpu] * PROCESSES) as what:
        yield what


def test_values_of_every_dtype_and_layout_arrive_bit_for_bit(found):
    messages = drawn_messages(len(PROCESS_OF), PROCESS_OF)
    assert sum(len(values) for values in messages) >= 60
    assert len({moved.plan.dtype for values in messages for moved in values}) == 9
    assert [process["wrong"] for process in found] == [[]] * PROCESSES


def test_the_bytes_that_leave_a_process_are_those_planned(found):
    plans = [moved.plan for values in drawn_messages(len(PROCESS_OF), PROCESS_OF) for moved in values]
    planned = [sum(n for plan in plans for link, n in plan.traffic.items() if link[0] == p) for p in range(PROCESSES)]
    assert all(planned)
    assert [process["wire_bytes"] for process in found] == [2 * num_bytes for num_bytes in planned]  # in two steps


def test_what_is_sent_before_it_is_computed_and_donated_at_once_arrives(found):
    assert all(process["donated"] for process in found)


def test_what_several_processes_want_can_be_scattered_and_gathered(found):
    assert all(process["scattered"] for process in found)


@pytest.fixture
def alone() -> Exchange:
    """All devices in this process."""
    return Exchange(0, [0] * 8, dict(enumerate(jax.devices())), None)


def test_in_one_process_values_arrive_without_an_endpoint(alone):
    messages = drawn_messages(8, [0] * 8, seed=1)[:6]
    assert carried_out(alone, messages, steps=2) == []
    assert alone.wire_bytes_sent == 0


@pytest.mark.parametrize("destination", [(0, 1), (1, 0), (2, 3), (0, 2)])
@pytest.mark.parametrize("specs", [(P("x"), P("x")), (P(), P()), (P("x"), P()), (P(), P("x"))], ids=str)
def test_what_arrives_shares_no_buffer_with_what_was_sent(alone, destination, specs):
    ends = [
        DeviceLayout(devices=devices, mesh_shape=(2,), axis_names=("x",), spec=spec)
        for devices, spec in zip([(0, 1), destination], specs)
    ]
    plan = plan_transfer((8,), 4, *ends, [0] * 8, dtype="float32")
    sent = jax.device_put(np.arange(8, dtype=np.float32), sharding_of(ends[0]))
    alone.sender([plan], 0, lasting=[0])([sent])
    received = alone.receiver([plan], 0, [sharding_of(ends[1])])()[0]
    np.testing.assert_array_equal(received, sent)
    before, after = (
        {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards} for array in (sent, received)
    )
    assert len(after) == 2 and not before & after


def test_what_an_interrupted_step_sent_is_not_received_in_the_next(alone):
    values = drawn_messages(8, [0] * 8, seed=2)[0]
    plans = [moved.plan for moved in values]
    send = alone.sender(plans, 0)
    receive = alone.receiver(plans, 0, [sharding_of(plan.destination) for plan in plans])
    send([array_of(moved) for moved in values])
    alone.begin_step(1)
    send([array_of(moved) for moved in values])
    assert all(is_right(array, moved) for array, moved in zip(receive(), values, strict=True))
    with pytest.raises(IndexError):
        receive()


def test_values_last_unless_they_are_donated_or_in_the_hands_of_the_user():
    kind = ArrayType(shape=(4,), dtype="float32")
    executables = {
        "make": Executable(name="make", mesh=0, inputs=(kind,), outputs=(kind, kind, kind)),
        "spend": Executable(name="spend", mesh=0, inputs=(kind,), outputs=(kind,), donated=(0,)),
    }
    first = MeshProgram(
        devices=(0,),
        shape=(1,),
        axis_names=("x",),
        values=dict.fromkeys(["argument", "kept", "donated", "result", "last"], kind),
        instructions=(
            Run(
                task=Task(kind="F", stage=0),
                executable="make",
                inputs=("argument",),
                outputs=("kept", "donated", "result"),
            ),
            Send(values=("argument", "kept", "donated", "result"), to=1),
            Run(task=Task(kind="U", stage=0), executable="spend", inputs=("donated",), outputs=("last",)),
            Free(values=("kept", "last")),
        ),
    )
    second = MeshProgram(
        devices=(1,),
        shape=(1,),
        axis_names=("x",),
        values=dict.fromkeys(["argument", "kept", "donated", "result"], kind),
        instructions=(
            Recv(values=("argument", "kept", "donated", "result"), source=0),
            Free(values=("argument", "kept", "donated", "result")),
        ),
    )
    program = Program(
        name="lasting",
        meshes=(first, second),
        executables=executables,
        inputs=(Input(leaf=0, mesh=0, value="argument"),),
        outputs=(Output(leaf=0, parts=((0, "result"),)), Output(leaf=1, parts=((0, "argument"),))),
    )
    program.verify()
    assert lasting_values(program) == {(0, "kept")}
