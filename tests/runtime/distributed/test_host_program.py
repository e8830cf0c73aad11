"""A program in one process of a cluster, driven without Ray: it computes what it says, and names what fails."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.errors import StepFailed
from autopar.ir.program import Input, Output
from autopar.runtime.distributed.host_program import HostProgram
from autopar.runtime.distributed.input_routing import route_inputs
from autopar.runtime.distributed.pieces import Piece, Placed, placed_output, program_layouts
from autopar.runtime.distributed.world import World
from autopar.runtime.transfer.exchange import Exchange
from autopar.runtime.transfer.tiles import DeviceLayout
from tests.runtime.test_in_process import (
    ROUNDING,
    array,
    executable,
    one_mesh,
    pipeline,
    pipeline_arguments,
    pipeline_oracle,
    run,
)


@pytest.fixture(scope="module")
def world() -> World:
    """One process with all devices: its transfers are within it."""
    devices = jax.devices()
    process_of = (0,) * len(devices)
    exchange = Exchange(0, process_of, dict(enumerate(devices)), None)
    return World(process=0, devices=devices, process_of=process_of, node_of=("here",), exchange=exchange)


def sent_to_all(routing: Any, arguments: Any, world: World) -> list[np.ndarray[Any, Any]]:
    """Return what the driver sends."""
    boxes = routing.sent_to(world.ordinals)
    return [np.asarray(arguments[leaf])[tuple(slice(*part) for part in box)] for leaf, box in boxes]


def assert_close(results: list[list[Any]], expected: Any) -> None:
    """Result 3 is a constant, which has no piece."""
    assert not results[3]
    for pieces, wanted in zip(results[:3] + results[4:], [*expected[:3], expected[4]], strict=True):
        [piece] = pieces
        np.testing.assert_allclose(piece, wanted, rtol=1e-5, atol=ROUNDING)


def test_arguments_that_are_sent_that_lie_there_and_that_are_moved_give_the_same_step(world):
    program, layouts = pipeline(), program_layouts(pipeline())
    loaded = HostProgram(program, world)
    w, v, x = pipeline_arguments()
    elsewhere = DeviceLayout(devices=(7,), mesh_shape=(1,), axis_names=("z",), spec=P())
    moved = Placed(shape=(8, 8), dtype="float32", pieces=(Piece(layout=elsewhere, shape=(8, 8)),))
    outputs = sorted(program.outputs, key=lambda output: output.leaf)
    there = [placed_output(program, outputs[leaf], layouts) for leaf in (2, 0)]
    routings = [route_inputs(program, places) for places in ([None] * 3, [*there, None], [moved, None, moved])]
    assert [(len(a.in_place), len(a.from_driver), len(a.from_devices)) for a in routings] == [
        (0, 4, 0),
        (2, 2, 0),
        (0, 1, 3),
    ]
    for number, routing in enumerate(routings):
        loaded.expect(number, routing)

    first = loaded.run(0, [None] * 3, sent_to_all(routings[0], (w, v, x), world))
    expected = pipeline_oracle(w, v, x)
    assert_close(first, expected)
    [new_v], [again] = first[0], first[4]
    second = loaded.run(1, [first[2], first[0], None], sent_to_all(routings[1], (w, v, x), world))
    assert_close(second, pipeline_oracle(w, expected[0], x))
    assert new_v.is_deleted() and not again.is_deleted()
    on_seven = [[jax.device_put(a, jax.devices()[7])] for a in (w, x)]
    third = loaded.run(2, [on_seven[0], None, on_seven[1]], sent_to_all(routings[2], (w, v, x), world))
    assert_close(third, expected)


def test_a_step_that_fails_says_where(world):
    def refuse(x: Any) -> Any:
        raise ValueError("not this number")

    kind = array(4)
    call = executable(
        "call", 0, lambda x: [jax.pure_callback(refuse, jax.ShapeDtypeStruct((4,), jnp.float32), x)], [kind], [P()]
    )
    program = one_mesh(
        [call],
        {"x": kind, "y": kind},
        [run("call", "x", "y", microbatch=3)],
        [Input(leaf=0, mesh=0, value="x")],
        [Output(leaf=0, parts=((0, "y"),))],
    )
    # On one device: where several compute together, the others would wait for the one that failed.
    program = replace(program, meshes=(replace(program.meshes[0], devices=(0,), shape=(1,)),))
    loaded = HostProgram(program, world)
    routing = route_inputs(program, [None])
    loaded.expect(0, routing)
    with pytest.raises(StepFailed, match=r"^Bringing the arguments into process 0 failed: IndexError"):
        loaded.run(0, [None], [])
    sent = sent_to_all(routing, [np.ones(4, np.float32)], world)
    with pytest.raises(StepFailed, match=r"^On mesh 0 in process 0, task F0\.m3 failed: (.|\n)*not this number"):
        loaded.run(0, [None], sent, clock=[])
