"""A program prints as text that one can read, and a broken one is refused with the place and the reason."""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.errors import InvalidProgram, Unsupported
from autopar.ir.program import (
    ArrayType,
    Copy,
    Executable,
    Free,
    Input,
    Instruction,
    MeshProgram,
    Output,
    Program,
    Recv,
    Run,
    Send,
    Task,
    Window,
)

X = ArrayType(shape=(4, 8), dtype="float32", spec=P("d"))
W = ArrayType(shape=(8, 8), dtype="float32", spec=P(None, "d"))
NUMBER = ArrayType(shape=(), dtype="int32")
INSTRUCTIONS: tuple[tuple[Instruction, ...], ...] = (
    (
        Run(
            task=Task(kind="F", stage=0, microbatch=0),
            executable="first",
            inputs=("w", "x@0"),
            outputs=("h@0",),
        ),
        Send(values=("h@0",), to=1),
        Free(values=("h@0",)),
        Run(
            task=Task(kind="F", stage=0, microbatch=1),
            executable="first",
            inputs=("w", "x@1"),
            outputs=("h@1",),
        ),
        Send(values=("h@1",), to=1),
        Free(values=("h@1", "x@0", "x@1")),
        Recv(values=("g",), source=1),
        Run(task=Task(kind="U", stage=0), executable="update", inputs=("w", "g"), outputs=("w'",)),
        Free(values=("g",)),
    ),
    (
        Recv(values=("h@0",), source=0),
        Recv(values=("h@1",), source=0),
        Run(
            task=Task(kind="B", stage=1),
            executable="second",
            inputs=("h@0", "h@1", "i"),
            outputs=("g",),
        ),
        Free(values=("h@0", "h@1")),
        Send(values=("g",), to=0),
        Free(values=("g",)),
    ),
)


def program() -> Program:
    return Program(
        name="step",
        meshes=(
            MeshProgram(
                devices=(0, 1),
                shape=(2,),
                axis_names=("d",),
                values={"w": W, "w'": W, "g": W, "x@0": X, "x@1": X, "h@0": X, "h@1": X},
                instructions=INSTRUCTIONS[0],
            ),
            MeshProgram(
                devices=(2, 3),
                shape=(2,),
                axis_names=("d",),
                values={"g": W, "h@0": X, "h@1": X, "i": NUMBER},
                instructions=INSTRUCTIONS[1],
            ),
        ),
        executables={
            "first": Executable(name="first", mesh=0, inputs=(W, X), outputs=(X,), flops=512),
            "update": Executable(name="update", mesh=0, inputs=(W, W), outputs=(W,), donated=(0,)),
            "second": Executable(name="second", mesh=1, inputs=(X, X, NUMBER), outputs=(W,), flops=1.5e9),
        },
        inputs=(
            Input(leaf=0, mesh=0, value="w"),
            Input(leaf=1, mesh=0, value="x@0", window=Window(axis=0, start=0, stop=4)),
            Input(leaf=1, mesh=0, value="x@1", window=Window(axis=0, start=4, stop=8)),
            Input(leaf=None, mesh=1, value="i", constant=3),
        ),
        outputs=(Output(leaf=0, parts=((0, "w'"),)), Output(leaf=1, parts=(), literal=np.float32(2))),
        num_microbatches=2,
    )


PRINTED = """\
program step: 2 meshes, 3 executables, 2 microbatches
mesh 0: devices 0, 1 as (d=2)
  in  w = leaf 0: float32[8,8] (-, d)
  in  x@0 = leaf 1[0:4 on axis 0]: float32[4,8] (d)
  in  x@1 = leaf 1[4:8 on axis 0]: float32[4,8] (d)
  0  F0.m0    h@0 <- first(w, x@0)
  1  send     h@0 to mesh 1
  2  free     h@0
  3  F0.m1    h@1 <- first(w, x@1)
  4  send     h@1 to mesh 1
  5  free     h@1, x@0, x@1
  6  recv     g from mesh 1
  7  U0       w' <- update(w, g)
  8  free     g
mesh 1: devices 2, 3 as (d=2)
  in  i = 3: int32[]
  0  recv     h@0 from mesh 0
  1  recv     h@1 from mesh 0
  2  B1       g <- second(h@0, h@1, i)
  3  free     h@0, h@1
  4  send     g to mesh 0
  5  free     g
executables
  first on mesh 0: 2 inputs, 1 outputs, 512 flop
  update on mesh 0: 2 inputs, 1 outputs, 0 flop, donates 0
  second on mesh 1: 3 inputs, 1 outputs, 1.5e+09 flop
results
  leaf 0 = mesh 0 w'
  leaf 1 = np.float32(2.0)"""


def test_a_program_prints_every_instruction_in_order() -> None:
    assert str(program()) == PRINTED


def test_long_lists_are_shortened_and_say_by_how_much() -> None:
    names = tuple(f"p{i}" for i in range(18))
    assert str(Free(values=names)) == "free     p0, p1, p2, p3, p4, p5 (+12)"
    assert str(Free(values=names[:7])) == "free     p0, p1, p2, p3, p4, p5, p6"


def test_linear_order_keeps_every_list_and_never_waits() -> None:
    order = program().linear_order()
    program().verify()
    for number, mesh in enumerate(program().meshes):
        assert tuple(instruction for at, instruction in order if at == number) == mesh.instructions
    on_the_way: list[tuple[int, int]] = []
    for mesh, instruction in order:
        if isinstance(instruction, Send):
            on_the_way.append((mesh, instruction.to))
        if isinstance(instruction, Recv):
            on_the_way.remove((instruction.source, mesh))
    assert not on_the_way
    # The meshes take turns, so that none is handed all its work before another has any.
    assert [mesh for mesh, instruction in order if isinstance(instruction, Run)] == [0, 0, 1, 0]


Change = Callable[[Program], Program]


def mesh(number: int, **changes) -> Change:
    def change(p: Program) -> Program:
        meshes = list(p.meshes)
        meshes[number] = replace(meshes[number], **changes)
        return replace(p, meshes=tuple(meshes))

    return change


def edit(number: int, position: int, *instructions: Instruction) -> Change:
    """Replace one instruction by others."""
    old = INSTRUCTIONS[number]
    return mesh(number, instructions=(*old[:position], *instructions, *old[position + 1 :]))


def values(number: int, **changes: ArrayType) -> Change:
    return lambda p: mesh(number, values={**p.meshes[number].values, **changes})(p)


def executable(name: str, **changes) -> Change:
    return lambda p: replace(p, executables=p.executables | {name: replace(p.executables[name], **changes)})


def inputs(*changed: Input) -> Change:
    return lambda p: replace(p, inputs=p.inputs + changed)


def outputs(*changed: Output) -> Change:
    return lambda p: replace(p, outputs=changed)


def at(number: int, position: int) -> Instruction:
    return INSTRUCTIONS[number][position]


BROKEN: dict[str, tuple[Change, str]] = {
    "read before written": (
        edit(0, 0, at(0, 3)),
        r"Mesh 0, instruction 1 \(send     h@0 to mesh 1\) reads 'h@0', which was never written",
    ),
    "read after free": (
        edit(0, 2, at(0, 2), at(0, 1)),
        r"instruction 3 .*reads 'h@0', which was freed by instruction 2",
    ),
    "read after donation": (
        edit(0, 8, Free(values=("g", "w"))),
        r"instruction 8 .*reads 'w', which was donated by instruction 7",
    ),
    "freed twice": (
        edit(1, 5, at(1, 5), at(1, 5)),
        r"Mesh 1, instruction 6 .*'g', which was freed by instruction 5",
    ),
    "not freed before the end": (edit(0, 2), r"ends with 'h@0', which is no result"),
    "overwritten": (
        edit(1, 2, at(1, 2), at(1, 2)),
        r"instruction 3 .*writes 'g', which is there already. Free it first",
    ),
    "not freed": (edit(1, 5), r"Mesh 1 ends with 'g', which is no result. Free it after its last use"),
    "undeclared": (
        mesh(1, values={"g": W, "h@0": X, "i": NUMBER}),
        r"Mesh 1, instruction 1 .*names 'h@1', which has no type there",
    ),
    "unknown executable": (
        lambda p: replace(p, executables={"second": p.executables["second"]}),
        r"F0.m0 .*calls 'first'; the executables of mesh 0 are: \.",
    ),
    "executable of another mesh": (
        executable("first", mesh=1),
        r"calls 'first'; the executables of mesh 0 are: update",
    ),
    "too few inputs": (executable("first", inputs=(W, X, X)), r"has 2 inputs; 'first' has 3"),
    "too many outputs": (executable("first", outputs=()), r"has 1 outputs; 'first' has 0"),
    "other shape": (
        executable("first", inputs=(W, replace(X, shape=(8, 8)))),
        r"'x@0' is float32\[4,8\] \(d\), but 'first' has float32\[8,8\] \(d\) in its inputs",
    ),
    "other dtype": (
        executable("first", outputs=(replace(X, dtype="int32"),)),
        r"'first' has int32\[4,8\] \(d\) in its outputs",
    ),
    "other layout": (
        executable("first", inputs=(replace(W, spec=P("d")), X)),
        r"'w' is float32\[8,8\] \(-, d\).*Shape, dtype and layout",
    ),
    "donated position": (
        executable("update", donated=(5,)),
        r"'update' donates positions \(5,\) of 2 inputs",
    ),
    "donated and read again": (
        edit(0, 7, replace(at(0, 7), inputs=("w", "w"))),
        r"donates 'w' and reads it a second time",
    ),
    "donated constant": (
        executable("second", donated=(2,)),
        r"donates the constant 'i', which the next call needs",
    ),
    "donated result": (
        outputs(Output(leaf=0, parts=((0, "w"),))),
        r"Result 'w' is not on mesh 0 at the end: it was donated by instruction 7",
    ),
    "result never written": (
        lambda p: outputs(Output(leaf=0, parts=((0, "w'"), (0, "z"))))(values(0, z=W)(p)),
        r"Result 'z' is not on mesh 0 at the end: it was never written",
    ),
    "send to nowhere": (
        edit(0, 1, Send(values=("h@0",), to=2)),
        r"sends to mesh 2; it must be another of the 2 meshes",
    ),
    "send to itself": (edit(0, 1, Send(values=("h@0",), to=0)), r"sends to mesh 0; it must be another"),
    "receive from itself": (
        edit(1, 0, Recv(values=("h@0",), source=1)),
        r"receives from mesh 1; it must be another",
    ),
    "send without receive": (
        edit(0, 1, at(0, 1), at(0, 1)),
        r"Mesh 1, instruction 1 .*expects 'h@1', but mesh 0 sends 'h@0' next",
    ),
    "send never received": (
        edit(1, 5, Send(values=("g",), to=0), at(1, 5)),
        r"Mesh 1 sends 'g' to mesh 0, which never receives it",
    ),
    "swapped receives": (
        lambda p: mesh(1, instructions=(at(1, 1), at(1, 0), *INSTRUCTIONS[1][2:]))(p),
        r"Mesh 1, instruction 0 .*expects 'h@1', but mesh 0 sends 'h@0' next.*reorder",
    ),
    "other type on the way": (
        values(1, g=replace(W, dtype="bfloat16")),
        r"Mesh 0, instruction 6 .*'g' is float32\[8,8\] \(-, d\) here and bfloat16\[8,8\] \(-, d\) on mesh 1",
    ),
    "deadlock": (
        lambda p: mesh(0, instructions=(at(0, 6), *INSTRUCTIONS[0][:6], *INSTRUCTIONS[0][7:]))(p),
        r"Deadlock: Mesh 0, instruction 0 \(recv     g from mesh 1\) waits; Mesh 1, instruction 0 .*waits",
    ),
    "device count": (mesh(0, shape=(4,)), r"Mesh 0 has 2 devices, shape \(4,\) and axes \('d',\)"),
    "axis count": (mesh(0, axis_names=("d", "e")), r"one entry per axis"),
    "shared device": (
        mesh(1, devices=(1, 2)),
        r"Device 1 is on mesh 0 and on mesh 1. Meshes share no device",
    ),
    "unknown axis": (
        values(0, w=replace(W, spec=P("z"))),
        r"value 'w' of type float32\[8,8\] \(z\): its spec must name axes of the mesh \{'d': 2\}",
    ),
    "indivisible": (
        values(1, i=ArrayType(shape=(3,), dtype="int32", spec=P("d"))),
        r"value 'i' .*that divide the dimension",
    ),
    "spec too long": (values(1, i=replace(NUMBER, spec=P(None))), r"value 'i' .*one entry each"),
    "input nowhere": (
        inputs(Input(leaf=2, mesh=5, value="z")),
        r"Input z = leaf 2 goes to mesh 5, which declares no such",
    ),
    "input undeclared": (
        inputs(Input(leaf=2, mesh=0, value="z")),
        r"goes to mesh 0, which declares no such value",
    ),
    "input twice": (inputs(Input(leaf=2, mesh=0, value="w")), r"Mesh 0 has two inputs 'w'"),
    "leaf twice": (
        inputs(Input(leaf=0, mesh=0, value="g")),
        r"Input g = leaf 0 on mesh 0 is there already as 'w'",
    ),
    "leaf and constant": (
        inputs(Input(leaf=2, mesh=0, value="g", constant=1)),
        r"from a leaf or be a constant",
    ),
    "neither": (inputs(Input(leaf=None, mesh=0, value="g")), r"must come from a leaf or be a constant"),
    "constant type": (
        inputs(Input(leaf=None, mesh=0, value="g", constant=1)),
        r"a constant is an int32 scalar",
    ),
    "window size": (
        inputs(Input(leaf=2, mesh=0, value="g", window=Window(axis=0, start=0, stop=4))),
        r"its window does not fit",
    ),
    "window axis": (
        inputs(Input(leaf=2, mesh=0, value="g", window=Window(axis=2, start=0, stop=8))),
        r"its window does not fit",
    ),
    "result undeclared": (
        outputs(Output(leaf=0, parts=((0, "z"),))),
        r"reads 'z' on mesh 0, which declares no such value",
    ),
    "result nothing": (outputs(Output(leaf=0, parts=())), r"must have parts or be a literal"),
    "result both": (
        outputs(Output(leaf=0, parts=((0, "w"),), literal=1)),
        r"must have parts or be a literal, and not both",
    ),
    "result leaves": (
        outputs(Output(leaf=1, parts=((0, "w'"),))),
        r"The results are leaves \[1\]; they must be 0 to 0",
    ),
    "another jaxpr": (
        executable("second", jaxpr=jax.make_jaxpr(lambda a, b, i: a + b)(np.ones((4, 8)), np.ones((4, 8)), 3)),
        r"'second' has other outputs than it declares: .*\(4, 8\).*\(8, 8\).*, the output 0",
    ),
    "unlike parts": (
        outputs(Output(leaf=0, parts=((0, "w'"), (1, "i")))),
        r"stacks float32\[8,8\] \(-, d\), int32\[\]. Parts need an axis 0",
    ),
}


ON_HOST = replace(W, memory="host")


def kept(*copies: Instruction, **kinds: ArrayType) -> Change:
    """Copy behind the update, the host's names being `kept` and `kept_too`."""
    return lambda p: values(0, **({"kept": ON_HOST} | kinds))(edit(0, 8, *copies, at(0, 8))(p))


COPY = Copy(values=("w'",), results=("kept",), to="host")
ON_HOST_INPUT = Input(leaf=2, mesh=0, value="kept")
BROKEN |= {
    "copy within a memory": (
        kept(COPY, kept=W),
        r"instruction 8 .*'w'' is float32\[8,8\] \(-, d\), and 'kept' is .*A copy to the host is from the other memory",
    ),
    "copy to where it is": (kept(replace(COPY, to="device")), r"A copy to the device is from the other memory"),
    "copy that changes the layout": (
        kept(COPY, kept=replace(ON_HOST, spec=P("d"))),
        r"'kept' is float32\[8,8\] \(d\) on the host. A copy to the host .*changes neither",
    ),
    "copy of one to two": (
        kept(replace(COPY, results=("kept", "kept_too")), kept_too=ON_HOST),
        r"copies 1 values to 2. Name one for each",
    ),
    "copy that is never read": (kept(COPY), r"Mesh 0 ends with 'kept', which is no result"),
    "copy that takes a result": (
        kept(replace(COPY, takes=True)),
        r"Result 'w'' is not on mesh 0 at the end: it was taken over by instruction 8",
    ),
    "free after what is gone": (
        kept(COPY, Free(values=("g",)), Free(values=("kept",), after=("g",))),
        r"instruction 10 .*reads 'g', which was freed by instruction 9",
    ),
    "read on the host": (
        values(0, w=ON_HOST),
        r"'w' is float32\[8,8\] \(-, d\) on the host, but 'first' has float32\[8,8\] \(-, d\) in its inputs",
    ),
    "sent from the host": (
        values(1, g=ON_HOST),
        r"instruction 6 .*'g' is .* on the host on mesh 1, and .* here. Values go from device to device: copy it",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_program_is_refused_with_place_and_reason(change, message) -> None:
    with pytest.raises(InvalidProgram, match=message):
        change(program()).verify()


def test_copies_print_the_memory_and_frees_what_they_wait_for() -> None:
    copies = COPY, replace(COPY, results=("kept_too",)), Free(values=("kept_too",), after=("kept",))
    changed = kept(*copies, kept_too=ON_HOST)(program())
    outputs(*(Output(leaf=n, parts=((0, name),)) for n, name in enumerate(("w'", "kept"))))(changed).verify()
    assert str(changed).count("copy     kept <- w' to the host\n") == 1
    assert "free     kept_too, after kept\n" in str(changed)
    assert "in  kept = leaf 2: float32[8,8] (-, d) on the host" in str(inputs(ON_HOST_INPUT)(changed))


def test_a_name_may_be_used_again_after_it_was_freed() -> None:
    again = (*INSTRUCTIONS[1], at(1, 0), at(1, 3))
    sender = (*INSTRUCTIONS[0][:2], *INSTRUCTIONS[0][3:6], at(0, 1), at(0, 2), *INSTRUCTIONS[0][6:])
    changed = mesh(1, instructions=(*again[:-1], Free(values=("h@0",))))(mesh(0, instructions=sender)(program()))
    changed.verify()


def test_layouts_that_differ_in_nothing_are_equal() -> None:
    changed = executable("first", inputs=(W, replace(X, spec=P("d", None))))(program())
    changed.verify()


@pytest.mark.parametrize(
    ("kind", "nbytes", "per_device"),
    [
        (ArrayType(shape=(4, 8), dtype="float32"), 128, 128),
        (ArrayType(shape=(4, 8), dtype="bfloat16", spec=P("a")), 64, 32),
        (ArrayType(shape=(4, 8), dtype="float32", spec=P(None, ("a", "b"))), 128, 16),
        (ArrayType(shape=(5,), dtype="int8", spec=P("b")), 5, 2),
        (ArrayType(shape=(), dtype="bool"), 1, 1),
        (ArrayType(shape=(4,), dtype="key<fry>", spec=P("a")), 32, 16),
        (ArrayType(shape=(), dtype="key<rbg>"), 16, 16),
    ],
)
def test_bytes_are_counted_whole_and_per_device(kind, nbytes, per_device) -> None:
    grid = MeshProgram(devices=tuple(range(8)), shape=(2, 4), axis_names=("a", "b"), values={}, instructions=())
    assert (kind.nbytes, kind.bytes_per_device(grid)) == (nbytes, per_device)


def test_keys_of_unknown_size_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"key<mine> have an unknown size; the known ones are key<fry>"):
        ArrayType(shape=(), dtype="key<mine>").nbytes  # noqa: B018
