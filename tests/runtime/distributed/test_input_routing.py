"""How arguments come to be where a program wants them: taken as they lie, sent by the driver, or moved."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.ir.program import ArrayType, Executable, Input, MeshProgram, Output, Program, Window
from autopar.runtime.distributed.host_program import sent_layout
from autopar.runtime.distributed.input_routing import dividing, route_inputs
from autopar.runtime.distributed.pieces import Piece, Placed, placed_output, value_layout
from autopar.runtime.transfer.tiles import DeviceLayout, plan_transfer

ROWS, COLUMNS = P("data"), P(None, "data")


def layout(devices, spec):
    return DeviceLayout(devices=devices, mesh_shape=(len(devices),), axis_names=("data",), spec=spec)


def program(*inputs, shape=(8, 4)):
    """A program of two meshes of two devices each; an input is (mesh, window or None, spec)."""
    values = [{}, {}]
    items = []
    for number, (mesh, window, spec) in enumerate(inputs):
        rows = shape[0] if window is None else window.stop - window.start
        values[mesh][f"v{number}"] = ArrayType(shape=(rows, *shape[1:]), dtype="float32", spec=spec)
        items.append(Input(leaf=0, mesh=mesh, value=f"v{number}", window=window))
    meshes = tuple(
        MeshProgram(
            devices=(2 * number, 2 * number + 1),
            shape=(2,),
            axis_names=("data",),
            values=values[number],
            instructions=(),
        )
        for number in (0, 1)
    )
    return Program(name="step", meshes=meshes, executables={}, inputs=tuple(items), outputs=())


def rows(start, stop):
    return Window(axis=0, start=start, stop=stop)


def test_argument_that_lies_there_is_taken():
    wanted = program((0, None, ROWS), (1, None, COLUMNS))
    there = Placed(
        shape=(8, 4),
        dtype="float32",
        pieces=(Piece(layout=layout((2, 3), COLUMNS), shape=(8, 4)),),
    )
    routing = route_inputs(wanted, [there])
    assert [(item.place, item.piece) for item in routing.in_place] == [(1, 0)]
    assert [item.place for item in routing.from_devices] == [0]
    assert not routing.from_driver


@pytest.mark.parametrize("spec", [P("data"), P("data", None), P(("data",))])
def test_spellings_of_one_layout_are_the_same_place(spec):
    there = Placed(shape=(8, 4), dtype="float32", pieces=(Piece(layout=layout((0, 1), spec), shape=(8, 4)),))
    assert route_inputs(program((0, None, ROWS)), [there]).in_place


def test_driver_sends_every_process_its_boxes_once():
    wanted = program((0, rows(0, 4), ROWS), (0, rows(4, 8), ROWS), (1, None, P()), (1, rows(0, 4), P()))
    routing = route_inputs(wanted, [None])
    assert not routing.in_place and not routing.from_devices
    assert routing.sent_to(frozenset({0})) == ((0, ((0, 2), (0, 4))), (0, ((4, 6), (0, 4))))
    assert routing.sent_to(frozenset({2, 3})) == ((0, ((0, 8), (0, 4))), (0, ((0, 4), (0, 4))))


def test_stacked_value_is_put_together_from_its_pieces():
    pieces = tuple(
        Piece(layout=layout((2 * n, 2 * n + 1), ROWS), shape=(4, 4), window=rows(4 * n, 4 * n + 4)) for n in (0, 1)
    )
    there = Placed(shape=(8, 4), dtype="float32", pieces=pieces)
    whole, third = route_inputs(program((1, None, COLUMNS), (0, rows(2, 6), ROWS)), [there]).from_devices
    assert [(part.piece, part.cut, part.shape) for part in whole.parts] == [(0, None, (4, 4)), (1, None, (4, 4))]
    assert [(part.piece, part.cut) for part in third.parts] == [(0, rows(2, 4)), (1, rows(0, 2))]
    # A part of two rows is still cut over two devices.
    assert {part.source.spec for part in third.parts} == {ROWS}


def test_parts_that_do_not_divide_are_replicated():
    assert dividing(layout((0, 1), ROWS), (3, 4)).spec == P(None)
    assert dividing(layout((0, 1), ROWS), (2, 4)).spec == ROWS


def test_scalars_move_whole():
    wanted = program((0, None, P()), shape=(1,))
    there = Placed(shape=(1,), dtype="float32", pieces=(Piece(layout=layout((3,), P()), shape=(1,)),))
    [moved] = route_inputs(wanted, [there]).from_devices
    assert [(part.cut, part.shape) for part in moved.parts] == [(None, (1,))]


def test_results_of_several_parts_are_stacked_in_their_order():
    kind = ArrayType(shape=(2, 4), dtype="float32", spec=ROWS)
    mesh = MeshProgram(devices=(0, 1), shape=(2,), axis_names=("data",), values={"a": kind}, instructions=())
    other = MeshProgram(devices=(2, 3), shape=(2,), axis_names=("data",), values={"b": kind}, instructions=())
    output = Output(leaf=0, parts=((1, "b"), (0, "a")))
    stacked = Program(name="step", meshes=(mesh, other), executables={}, inputs=(), outputs=(output,))
    layouts = {(0, "a"): value_layout(stacked, 0, "a"), (1, "b"): value_layout(stacked, 1, "b")}
    placed = placed_output(stacked, output, layouts)
    assert placed.shape == (4, 4) and placed.devices == frozenset(range(4))
    assert [(piece.layout.devices, piece.window) for piece in placed.pieces] == [
        ((2, 3), rows(0, 2)),
        ((0, 1), rows(2, 4)),
    ]


def test_fingerprints_tell_programs_apart():
    kind = ArrayType(shape=(8, 4), dtype="float32", spec=ROWS)
    executable = Executable(name="f", mesh=0, inputs=(kind,), outputs=(kind,), flops=1.0)
    first = program((0, None, ROWS))
    assert first.fingerprint() == program((0, None, ROWS)).fingerprint()
    others = [program((0, None, COLUMNS)), program((1, None, ROWS)), program((0, rows(0, 4), ROWS))]
    others.append(
        Program(name="step", meshes=first.meshes, executables={"f": executable}, inputs=first.inputs, outputs=())
    )
    assert len({p.fingerprint() for p in [first, *others]}) == 5


def test_boxes_of_what_is_sent_cover_the_argument():
    routing = route_inputs(program((0, None, ROWS), (1, None, COLUMNS)), [None])
    counted = np.zeros((8, 4), int)
    for ordinals in (frozenset({0, 1}), frozenset({2, 3})):
        for _, box in routing.sent_to(ordinals):
            counted[tuple(slice(*limits) for limits in box)] += 1
    assert (counted == 2).all()


@pytest.mark.parametrize(
    ("node_of", "spec", "sent"),
    [
        (("a", "b", "b"), P(), P("data")),  # two processes of one node want the same from another node
        (("a", "b", "c"), P(), P()),  # of two nodes: the bytes cross between nodes anyway
        (("a", "a", "a"), P(), P()),
        (("a", "b", "b"), P("data"), P("data")),  # they want different parts
    ],
)
def test_what_a_node_wants_several_times_is_sent_to_it_once(node_of, spec, sent):
    source, target = layout((0,), P()), layout((1, 2), spec)
    found = sent_layout(source, target, (8, 4), (0, 1, 2), node_of)
    assert found.boxes((8, 4)) == layout((1, 2), sent).boxes((8, 4))
    plan = plan_transfer((8, 4), 4, source, found, (0, 1, 2), dtype="float32")
    assert plan.wire_bytes == 8 * 4 * 4 * (1 if sent == P("data") else 2)
