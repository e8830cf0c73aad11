"""The in-process runtime computes what the program says, and copies and destroys no more than it must."""

import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import DonatedBuffer, InvalidArgument, InvalidProgram
from autopar.ir.program import (
    ArrayType,
    Executable,
    Free,
    Input,
    MeshProgram,
    Output,
    Program,
    Recv,
    Run,
    Send,
    Task,
    Window,
)
from autopar.runtime.in_process import InProcess

REPLICATED, ROWS = P(), P("d")


def array(*shape: int, dtype: str = "float32", spec: P = REPLICATED) -> ArrayType:
    return ArrayType(shape=shape, dtype=dtype, spec=spec)


def executable(
    name: str,
    mesh: int,
    fun: Callable[..., Any],
    inputs: Sequence[ArrayType],
    outputs: Sequence[P],
    donated=(),
) -> Executable:
    avals = [jax.eval_shape(lambda: jax.random.key(0)) if a.dtype.startswith("key") else a for a in inputs]
    avals = [jax.ShapeDtypeStruct(a.shape, x.dtype) for a, x in zip(inputs, avals)]
    jaxpr = jax.make_jaxpr(lambda *xs: tuple(fun(*xs)))(*avals)
    types = [array(*a.shape, dtype=str(a.dtype), spec=s) for a, s in zip(jaxpr.out_avals, outputs)]
    return Executable(name=name, mesh=mesh, inputs=tuple(inputs), outputs=tuple(types), donated=donated, jaxpr=jaxpr)


def run(name: str, inputs: str, outputs: str, stage: int = 0, microbatch: int | None = None) -> Run:
    task = Task(kind="F", stage=stage, microbatch=microbatch)
    return Run(task=task, executable=name, inputs=tuple(inputs.split()), outputs=tuple(outputs.split()))


def one_mesh(executables: Sequence[Executable], values, instructions, inputs, outputs, **kwargs) -> Program:
    mesh = MeshProgram(
        devices=(0, 1, 2, 3), shape=(4,), axis_names=("d",), values=values, instructions=tuple(instructions)
    )
    named = {e.name: e for e in executables}
    return Program(
        name="step", meshes=(mesh,), executables=named, inputs=tuple(inputs), outputs=tuple(outputs), **kwargs
    )


def pipeline() -> Program:
    """Two stages over two microbatches: h = tanh(x w) on mesh 0, sum(h v) and a new v on mesh 1.

    Stage 0 runs on a (4,) mesh, stage 1 on a (2, 2) mesh, so h is laid out anew on its way.
    """
    x, w, h0 = array(4, 8, spec=P("d")), array(8, 8, spec=P(None, "d")), array(4, 8, spec=P("d"))
    v, h1, number = array(8, 8, spec=P("a", "b")), array(4, 8, spec=P("a", "b")), array(dtype="int32")
    scalar = array()
    first = executable("first", 0, lambda w, x: [jnp.tanh(x @ w)], [w, x], [P("d")])
    second = executable(
        "second", 1, lambda v, h, i, s: [s + (i + 1) * jnp.sum(h @ v)], [v, h1, number, scalar], [P()], (3,)
    )
    update = executable("update", 1, lambda v, s: [v - 0.1 * s, s], [v, scalar], [P("a", "b"), P()], (0,))
    zero = executable("zero", 1, lambda: [jnp.float32(0)], [], [P()])
    mesh0 = MeshProgram(
        devices=(0, 1, 2, 3),
        shape=(4,),
        axis_names=("d",),
        values={"w": w, "x@0": x, "x@1": x, "h@0": h0, "h@1": h0},
        instructions=tuple(
            instruction
            for m in (0, 1)
            for instruction in (
                run("first", f"w x@{m}", f"h@{m}", microbatch=m),
                Send(values=(f"h@{m}",), to=1),
                Free(values=(f"h@{m}", f"x@{m}")),
            )
        ),
    )
    steps = [
        (
            Recv(values=(f"h@{m}",), source=0),
            run("second", f"v h@{m} i@{m} s{m}", f"s{m + 1}", 1, m),
            Free(values=(f"h@{m}",)),
        )
        for m in (0, 1)
    ]
    mesh1 = MeshProgram(
        devices=(4, 5, 6, 7),
        shape=(2, 2),
        axis_names=("a", "b"),
        values={"v": v, "v'": v, "h@0": h1, "h@1": h1, "i@0": number, "i@1": number}
        | {f"s{i}": scalar for i in range(4)},
        instructions=(
            run("zero", "", "s0", 1),
            *steps[0],
            *steps[1],
            run("update", "v s2", "v' s3", 1),
            Free(values=("s2",)),
        ),
    )
    return Program(
        name="pipeline",
        meshes=(mesh0, mesh1),
        executables={e.name: e for e in (first, second, update, zero)},
        inputs=(
            Input(leaf=0, mesh=0, value="w"),
            Input(leaf=1, mesh=1, value="v"),
            *(
                Input(leaf=2, mesh=0, value=f"x@{m}", window=Window(axis=0, start=4 * m, stop=4 * m + 4))
                for m in (0, 1)
            ),
            *(Input(leaf=None, mesh=1, value=f"i@{m}", constant=m) for m in (0, 1)),
        ),
        outputs=(
            Output(leaf=0, parts=((1, "v'"),)),
            Output(leaf=1, parts=((1, "s3"),)),
            Output(leaf=2, parts=((0, "w"),)),
            Output(leaf=3, parts=(), literal=np.int32(7)),
            Output(leaf=4, parts=((1, "v'"),)),
        ),
        num_microbatches=2,
    )


def pipeline_oracle(w, v, x):
    h = jnp.tanh(x @ w)
    loss = jnp.sum(h[:4] @ v) + 2 * jnp.sum(h[4:] @ v)
    return v - 0.1 * loss, loss, w, 7, v - 0.1 * loss


def pipeline_arguments() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (8, 8), (8, 8))]


# The summands of the loss are 505 in absolute value, and cancel to -0.2: their order moves it by units in the last
# place of the former, not of the sum.
ROUNDING = 505 * np.finfo(np.float32).eps

PREPARE: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": lambda x: x,
    "one device": jnp.asarray,
    "another device": lambda x: jax.device_put(x, jax.devices()[6]),
    "all devices": lambda x: jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), "z"), P("z"))),
}


@pytest.mark.parametrize("prepare", PREPARE.values(), ids=PREPARE)
def test_pipeline_equals_plain_function_wherever_its_arguments_are(prepare) -> None:
    step = InProcess(jax.devices()).load(pipeline())
    for _ in range(2):  # The second call finds the constants of the first in place.
        found = step([prepare(x) for x in pipeline_arguments()])
        for a, b in zip(found, pipeline_oracle(*pipeline_arguments()), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=ROUNDING)


def test_results_have_the_planned_layouts_and_feed_the_next_step() -> None:
    step = InProcess(jax.devices()).load(pipeline())
    w, v, x = pipeline_arguments()
    new_v, loss, new_w, _, again = step([w, v, x])
    assert new_v.sharding.spec == P("a", "b") and loss.sharding.device_set == set(jax.devices()[4:])
    expected = pipeline_oracle(w, np.asarray(new_v), x)[1]
    np.testing.assert_allclose(step([new_w, new_v, x])[1], expected, rtol=1e-5, atol=ROUNDING)
    # Two results never share a buffer: the donated one is gone, its twin is not.
    assert new_v.is_deleted() and not again.is_deleted()


def test_donated_argument_is_refused_by_name_the_second_time() -> None:
    step = InProcess(jax.devices()).load(pipeline(), leaf_names=("params.w", "params.v", "batch"))
    w, v, x = pipeline_arguments()
    new_v = step([w, v, x])[0]
    step([w, new_v, x])
    with pytest.raises(DonatedBuffer, match=r"'params.v' was donated to an earlier call.*Pass the array"):
        step([w, new_v, x])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, v, x: [w, v], r"given 2 arrays; program 'pipeline' takes 3"),
        (lambda w, v, x: [w, v, x, x], r"given 4 arrays; program 'pipeline' takes 3"),
        (
            lambda w, v, x: [w, v, x[:4]],
            r"'x' is float32\[4, 8\]; the program was compiled for float32\[8, 8\]",
        ),
        (lambda w, v, x: [w.astype(np.int32), v, x], r"'w' is int32\[8, 8\].*for float32\[8, 8\]"),
        (lambda w, v, x: [w, jnp.ones((8, 8, 1)), x], r"'v' is float32\[8, 8, 1\].*for float32\[8, 8\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message) -> None:
    step = InProcess(jax.devices()).load(pipeline(), leaf_names=("w", "v", "x"))
    with pytest.raises(InvalidArgument, match=message):
        step(change(*pipeline_arguments()))


def test_a_program_for_more_devices_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"uses device 4, but there are 4.*more devices"):
        InProcess(jax.devices()[:4]).load(pipeline())


def test_an_invalid_program_is_refused_at_load() -> None:
    kind = array(4)
    program = one_mesh([], {"x": kind}, [Free(values=("y",))], [Input(leaf=0, mesh=0, value="x")], [])
    with pytest.raises(InvalidProgram, match="names 'y'"):
        InProcess(jax.devices()).load(program)


def test_undonated_arguments_survive_and_are_not_copied() -> None:
    kind = array(8, 4, spec=P("d"))
    call = executable("call", 0, lambda x, y: [x + y], [kind, kind], [P("d")], donated=(0,))
    program = one_mesh(
        [call],
        {"x": kind, "y": kind, "z": kind},
        [run("call", "x y", "z")],
        [Input(leaf=0, mesh=0, value="x"), Input(leaf=1, mesh=0, value="y")],
        [Output(leaf=0, parts=((0, "z"),)), Output(leaf=1, parts=((0, "y"),))],
    )
    step = InProcess(jax.devices()).load(program)
    z, y = step([np.ones((8, 4), np.float32)] * 2)
    again, same = step([z, y])
    assert same is y and z.is_deleted() and not y.is_deleted()
    np.testing.assert_array_equal(again, np.full((8, 4), 3.0))


@pytest.mark.parametrize("scalar", [2, 2.0, np.float64(2), jnp.float32(2), True])
def test_python_and_numpy_scalars_are_arguments(scalar) -> None:
    kind = array(dtype=str(jnp.asarray(scalar).dtype))
    call = executable("call", 0, lambda x: [x * 3], [kind], [P()])
    values = {"x": kind, "y": call.outputs[0]}
    outputs = [Output(leaf=0, parts=((0, "y"),))]
    program = one_mesh([call], values, [run("call", "x", "y")], [Input(leaf=0, mesh=0, value="x")], outputs)
    assert InProcess(jax.devices()).load(program)([scalar])[0] == scalar * 3


def test_random_keys_are_sliced_moved_and_compared_like_arrays() -> None:
    keys, one = array(4, dtype="key<fry>", spec=P("d")), array(4, 2, spec=P("d"))
    draw = executable("draw", 0, lambda k: [jax.vmap(lambda q: jax.random.normal(q, (2,)))(k)], [keys], [P("d")])
    values = {f"k@{m}": keys for m in (0, 1)} | {f"r@{m}": one for m in (0, 1)}
    program = one_mesh(
        [draw],
        values,
        [run("draw", f"k@{m}", f"r@{m}", microbatch=m) for m in (0, 1)],
        [Input(leaf=0, mesh=0, value=f"k@{m}", window=Window(axis=0, start=4 * m, stop=4 * m + 4)) for m in (0, 1)],
        [Output(leaf=0, parts=((0, "r@0"), (0, "r@1")))],
    )
    step = InProcess(jax.devices()).load(program)
    given = jax.random.split(jax.random.key(1), 8)
    expected = jax.vmap(lambda q: jax.random.normal(q, (2,)))(given)
    np.testing.assert_array_equal(step([given])[0], expected)
    there = jax.device_put(given, NamedSharding(Mesh(np.array(jax.devices()[:4]), "d"), P("d")))
    np.testing.assert_array_equal(step([there])[0], expected)
    with pytest.raises(InvalidArgument, match=r"is key<rbg>\[8\].*for key<fry>\[8\]"):
        step([jax.random.split(jax.random.key(1, impl="rbg"), 8)])


def test_random_keys_of_another_layout_are_moved_at_every_call() -> None:
    keys = array(4, dtype="key<fry>", spec=P("d"))
    draw = executable("draw", 0, lambda k: [jax.vmap(lambda q: jax.random.uniform(q))(k)], [keys], [P("d")])
    outputs = [Output(leaf=0, parts=((0, "r"),))]
    values = {"k": keys, "r": draw.outputs[0]}
    program = one_mesh([draw], values, [run("draw", "k", "r")], [Input(leaf=0, mesh=0, value="k")], outputs)
    step = InProcess(jax.devices()).load(program)
    given = jax.random.split(jax.random.key(1), 4)
    whole = jax.device_put(given, NamedSharding(Mesh(np.array(jax.devices()[:4]), "d"), P()))
    for keys in (given, whole, whole, given):  # JAX checks the layout at the first call alone
        np.testing.assert_array_equal(step([keys])[0], jax.vmap(jax.random.uniform)(given))


def stacked(pieces: Sequence[int], rows: int = 4, sizes: Sequence[int] = (4, 4), spec: P = ROWS) -> Program:
    """Adds 1 to each piece of a stacked parameter; piece i is on mesh pieces[i]."""
    kind = array(rows, 4, spec=spec)
    devices = (tuple(range(sizes[0])), tuple(range(sizes[0], sizes[0] + sizes[1])))
    used = sorted(set(pieces))
    meshes = tuple(
        MeshProgram(
            devices=devices[mesh],
            shape=(sizes[mesh],),
            axis_names=("d",),
            values={f"{n}{i}": kind for n in "pq" for i, home in enumerate(pieces) if home == mesh},
            instructions=tuple(run(f"add{mesh}", f"p{i}", f"q{i}", i) for i, home in enumerate(pieces) if home == mesh),
        )
        for mesh in used
    )
    adds = [executable(f"add{mesh}", mesh, lambda p: [p + 1], [kind], [spec], donated=(0,)) for mesh in used]
    return Program(
        name="stacked",
        meshes=meshes,
        executables={e.name: e for e in adds},
        inputs=tuple(
            Input(leaf=0, mesh=mesh, value=f"p{i}", window=Window(axis=0, start=rows * i, stop=rows * (i + 1)))
            for i, mesh in enumerate(pieces)
        ),
        outputs=(Output(leaf=0, parts=tuple((mesh, f"q{i}") for i, mesh in enumerate(pieces))),),
    )


@pytest.mark.parametrize(
    ("pieces", "sizes", "num_devices"),
    [
        ((0, 1), (4, 4), 8),  # assembled
        ((0, 0, 1, 1), (4, 4), 8),  # neighbours joined, then assembled
        ((0, 0), (4, 4), 4),  # joined on their mesh
        ((0, 1, 0, 1), (4, 4), 4),  # gathered
        ((0, 1), (4, 2), 4),  # meshes of two sizes: gathered
        ((0, 0, 1), (4, 4), 4),  # uneven: gathered
    ],
)
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P()], ids=str)
def test_pieces_of_a_stacked_parameter_go_in_and_come_out_as_one_array(pieces, sizes, num_devices, spec) -> None:
    step = InProcess(jax.devices()).load(stacked(pieces, sizes=sizes, spec=spec))
    given = np.arange(len(pieces) * 16, dtype=np.float32).reshape(-1, 4)
    once = step([given])[0]
    assert len(once.sharding.device_set) == num_devices
    np.testing.assert_array_equal(once, given + 1)
    np.testing.assert_array_equal(step([once])[0], given + 2)


def test_pieces_that_are_on_their_mesh_are_neither_moved_nor_copied() -> None:
    step = InProcess(jax.devices()).load(stacked((0, 1)))
    once = step([np.zeros((8, 4), np.float32)])[0]
    assert once.sharding.spec == P(("stage", "d")) and once.sharding.mesh.axis_names == ("stage", "d")
    before = [shard.data.unsafe_buffer_pointer() for shard in once.addressable_shards]
    twice = step([once])[0]
    assert once.is_deleted()  # The pieces were donated, so they were the argument's own buffers.
    assert [shard.data.unsafe_buffer_pointer() for shard in twice.addressable_shards] == before
    with pytest.raises(DonatedBuffer, match="Argument 0 was donated"):
        step([once])


@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P()], ids=str)
def test_pieces_of_one_mesh_are_taken_apart_there(spec, monkeypatch) -> None:
    step = InProcess(jax.devices()).load(stacked((0, 0, 1, 1), spec=spec))
    once = step([np.zeros((16, 4), np.float32)])[0]
    assert len(once.sharding.device_set) == 8

    def fetched(argument: jax.Array) -> None:
        raise AssertionError("fetched to the host")

    monkeypatch.setattr("autopar.runtime.inputs._on_host", fetched)
    np.testing.assert_array_equal(step([once])[0], np.full((16, 4), 2.0))


def test_what_lies_on_one_mesh_is_taken_apart_there_for_all(monkeypatch) -> None:
    step = InProcess(jax.devices()).load(stacked((0, 1, 0, 1)))
    once = step([np.zeros((16, 4), np.float32)])[0]
    assert len(once.sharding.device_set) == 4
    monkeypatch.setattr("autopar.runtime.inputs._on_host", None)  # calling it is an error
    np.testing.assert_array_equal(step([once])[0], np.full((16, 4), 2.0))


def test_what_lies_across_meshes_otherwise_comes_by_way_of_the_host() -> None:
    # A program that takes it apart would run on all devices, beside those of the meshes.
    rows = np.arange(64, dtype=np.float32).reshape(16, 4)
    across = jax.device_put(rows, NamedSharding(Mesh(np.array(jax.devices()), "all"), P()))
    np.testing.assert_array_equal(InProcess(jax.devices()).load(stacked((0, 0, 1, 1)))([across])[0], rows + 1)


def test_a_window_of_everything_is_the_argument_itself() -> None:
    program = stacked((0,))
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Auto,))
    given = jax.device_put(np.zeros((4, 4), np.float32), NamedSharding(mesh, P("d")))
    InProcess(jax.devices()).load(program)([given])
    assert given.is_deleted()


def test_a_literal_result_is_new_in_every_call() -> None:
    step = InProcess(jax.devices()).load(pipeline())
    first, second = (step(pipeline_arguments())[3] for _ in range(2))
    first.delete()
    assert second == 7


def test_a_call_after_a_failed_call_is_not_disturbed() -> None:
    step = InProcess(jax.devices()).load(pipeline())
    w, v, x = pipeline_arguments()
    with pytest.raises(InvalidArgument):
        step([w, v, x[:1]])
    np.testing.assert_allclose(step([w, v, x])[1], pipeline_oracle(w, v, x)[1], rtol=1e-5, atol=ROUNDING)


def test_threads_that_call_one_program_get_their_own_results() -> None:
    step = InProcess(jax.devices()).load(pipeline())
    w, v, x = pipeline_arguments()

    def call(number: int) -> None:
        expected = pipeline_oracle(w, v, x * number)[1]
        for _ in range(10):
            np.testing.assert_allclose(step([w, v, x * number])[1], expected, rtol=1e-5, atol=number * ROUNDING)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(1, 9)))


def test_calls_that_are_interrupted_anywhere_leave_the_next_one_alone() -> None:
    step = InProcess(jax.devices()).load(pipeline())
    w, v, x = pipeline_arguments()
    expected = pipeline_oracle(w, v, x)[1]

    def interrupted(after: int) -> bool:
        """Raise in the `after`-th function that the call enters; False if it was done before."""
        left = itertools.count(after, -1)

        def trace(frame: Any, event: str, arg: Any) -> None:
            if "autopar" in frame.f_code.co_filename and next(left) == 0:
                raise KeyboardInterrupt

        sys.setprofile(trace)
        try:
            step([w, v, x])
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    count = 0
    while interrupted(count):
        np.testing.assert_allclose(step([w, v, x])[1], expected, rtol=1e-5, atol=ROUNDING)
        count += 7
    assert count > 70
