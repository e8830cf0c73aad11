"""State and batches are made where a step wants them: the numbers of plain JAX, and nothing moves when it is called."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import CannotSerialize, InvalidArgument
from autopar.ir.program import ArrayType, Input, MeshProgram, Output, Program, Window
from autopar.runtime.distributed.input_routing import route_inputs
from autopar.runtime.distributed.pieces import Piece, Placed
from autopar.runtime.transfer.tiles import DeviceLayout
from autopar.training.array_placement import argument_placement
from autopar.training.batches import prefetch, shard_batch
from autopar.training.create_state import InitRecipe, create_state, serialize_init

LAYERS, WIDTH, ROWS = 4, 16, 16
OPTIMIZER = optax.adam(1e-2, eps=1e-4)


def init_fn(key: jax.Array, scale: Any = 0.3) -> Any:
    """A scan over layers between two matrices, an optimizer's state, a step count and a random key."""
    keys = jax.random.split(key, 4)
    params = {
        "in": jax.random.normal(keys[0], (8, WIDTH)) * scale + 0.1,
        "layers": {
            "w": jax.random.truncated_normal(keys[1], -2, 2, (LAYERS, WIDTH, WIDTH)) / 4,
            "b": jnp.zeros((LAYERS, WIDTH), jnp.bfloat16),
        },
        "out": jax.nn.initializers.orthogonal()(keys[2], (WIDTH, 8)),
    }
    return {"params": params, "moments": OPTIMIZER.init(params), "count": 0, "key": keys[3]}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w["w"] + w["b"]), None

    h, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
    return jnp.mean((h @ params["out"] - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, moments = OPTIMIZER.update(grads, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    key = jax.random.fold_in(state["key"], state["count"])
    return {"params": params, "moments": moments, "count": state["count"] + 1, "key": key}, {"loss": loss}


BATCH = {"x": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32), "y": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)}


def draw_batch(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=kind.shape).astype(np.float32) for name, kind in BATCH.items()}


def words(leaf: Any) -> np.ndarray[Any, Any]:
    array = jnp.asarray(leaf)
    return np.asarray(jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(words(a), words(b), err_msg=jax.tree_util.keystr(path))


def assert_close(found: Any, expected: Any) -> None:
    """The same to rounding: where programs are cut differently, XLA may join other multiplications and additions."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype, path
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-6, atol=1e-7, err_msg=jax.tree_util.keystr(path))
        else:
            np.testing.assert_array_equal(words(a), words(b), err_msg=jax.tree_util.keystr(path))


METHODS = {
    "data": autopar.DataParallel(),
    "shard": autopar.ShardParallel(mesh_shape=(4, 2)),
    "tensor": autopar.TensorParallel(),
    "zero": autopar.Zero(stage=3),
    "pipeline": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    "uneven pipeline": autopar.PipelineParallel(num_stages=3, num_microbatches=4),
    "circular": autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule="interleaved", virtual_stages=2),
}


def arrivals_without_a_move(compiled: autopar.Compiled, state: Any, batch: Any) -> Any:
    """Return the arrays that a call would have to move, by the places that were asked for."""
    places: list[Any] = [None] * len(compiled.trace.inputs)
    for number, value in ((0, state), (1, batch)):
        arrangement, _ = argument_placement(compiled, number)
        leaves = [i for i, leaf in enumerate(compiled.trace.inputs) if leaf.argument == number]
        assert len(leaves) == len(jax.tree.leaves(value))
        for i, place in zip(leaves, arrangement.places, strict=True):
            places[i] = arrangement.placed(place, with_copies=True)
    return route_inputs(compiled.program, places)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_created_state_equals_that_of_plain_jax_and_trains_alike(method):
    num_devices = 6 if getattr(method, "num_stages", 1) == 3 else 8
    step = autopar.parallelize(train_step, method=method, devices=jax.devices()[:num_devices])
    state = create_state(init_fn, jax.random.key(3), like=step, batch=BATCH)
    expected = jax.jit(init_fn)(jax.random.key(3))
    assert_close(state, expected)
    (compiled,) = step.all_compiled()
    wanted = arrivals_without_a_move(compiled, state, BATCH)
    assert not wanted.from_devices
    assert not wanted.from_driver
    state, metrics = step(state, shard_batch(draw_batch(0), like=step))
    expected, expected_metrics = jax.jit(train_step)(expected, draw_batch(0))
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
    assert len(step.all_compiled()) == 1  # the step that was compiled for the state served the call


def test_each_mesh_computes_only_the_leaves_that_it_holds():
    step = autopar.parallelize(train_step, method=METHODS["pipeline"])
    state = create_state(init_fn, jax.random.key(3), like=step, batch=BATCH)
    devices = jax.devices()
    assert state["params"]["in"].sharding.device_set == set(devices[:4])
    assert state["params"]["out"].sharding.device_set == set(devices[4:])
    assert state["params"]["layers"]["w"].sharding.device_set == set(devices)
    (layers,) = {shard.data.shape[0] for shard in state["params"]["layers"]["w"].addressable_shards}
    assert layers == LAYERS // 2


def test_state_is_created_for_a_compiled_step_and_for_one_that_was_called():
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    expected = jax.jit(init_fn)(jax.random.key(1), 0.2)
    compiled = step.trace(expected, BATCH).plan().lower().compile()
    assert_same(create_state(init_fn, jax.random.key(1), 0.2, like=compiled), expected)
    step(jax.jit(init_fn)(jax.random.key(0)), draw_batch(0))
    assert_same(create_state(init_fn, jax.random.key(1), 0.2, like=step), expected)


def test_a_step_with_further_arguments_is_compiled_with_them():
    def scaled_step(state: Any, batch: Any, rate: Any, depth: int) -> Any:
        grads = jax.grad(lambda w: depth * jnp.sum((batch["x"] @ w) ** 2))(state)
        return state - rate * grads, {}

    step = autopar.parallelize(scaled_step, method=autopar.DataParallel(), static_argnums=3)
    state = create_state(
        lambda key: jax.random.normal(key, (8, 4)), jax.random.key(0), like=step, batch=BATCH, further=(0.1, 2)
    )
    np.testing.assert_array_equal(state, jax.random.normal(jax.random.key(0), (8, 4)))
    assert len(step.all_compiled()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"params": s["params"] | {"in": jnp.zeros((8, 3))}}, r"float32\[8, 3\] at params\.in"),
        (lambda s: s | {"more": jnp.zeros(())}, r"more is too much"),
        (lambda s: {k: v for k, v in s.items() if k != "key"}, r"key is missing"),
        (lambda s: s | {"count": jnp.float32(0)}, r"float32\[\] at count; train_step takes int32\[\]"),
    ],
)
def test_a_state_that_the_step_does_not_take_is_refused_by_the_name_of_its_leaf(change, message):
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    compiled = step.trace(jax.eval_shape(init_fn, jax.random.key(0)), BATCH).plan().lower().compile()
    with pytest.raises(InvalidArgument, match=message):
        create_state(lambda key: change(init_fn(key)), jax.random.key(0), like=compiled)


def test_a_step_that_is_not_compiled_needs_a_batch():
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    with pytest.raises(InvalidArgument, match="has not been compiled yet"):
        create_state(init_fn, jax.random.key(0), like=step)
    with pytest.raises(InvalidArgument, match="has not been compiled yet"):
        shard_batch(draw_batch(0), like=step)
    with pytest.raises(InvalidArgument, match="like is a function"):
        create_state(init_fn, jax.random.key(0), like=train_step)


def test_batches_are_placed_and_may_load_themselves_by_their_ranges():
    step = autopar.parallelize(train_step, method=METHODS["shard"])
    create_state(init_fn, jax.random.key(0), like=step, batch=BATCH)
    batch = draw_batch(1)
    asked: list[Any] = []

    def load(index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        asked.append(index)
        return batch["x"][index].astype(np.float64)

    placed = shard_batch({"x": load, "y": batch["y"]}, like=step)
    assert_same(placed, jax.tree.map(jnp.asarray, batch))
    (compiled,) = step.all_compiled()
    arrangement, _ = argument_placement(compiled, 1)
    assert placed["x"].sharding == arrangement.sharding(arrangement.places[0], jax.devices())
    assert {(part.start, part.stop) for part, _ in asked} == {(i, i + 4) for i in range(0, ROWS, 4)}


def test_a_function_that_loads_may_fill_the_same_buffer_for_every_range():
    step = autopar.parallelize(train_step, method=METHODS["shard"])
    create_state(init_fn, jax.random.key(0), like=step, batch=BATCH)
    batch = draw_batch(1)
    room = np.zeros(ROWS * 8 + 16, np.float32)
    buffer = room[-room.ctypes.data % 64 // 4 :][: 4 * 8].reshape(4, 8)  # where JAX would take it over as it is

    def load(index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        np.copyto(buffer, batch["x"][index[0]])
        return buffer[:, index[1]]

    assert_same(shard_batch({"x": load, "y": batch["y"]}, like=step), jax.tree.map(jnp.asarray, batch))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros((ROWS, 3), np.float32), "y": np.zeros((ROWS, 8), np.float32)}, r"float32\[16, 3\] at x"),
        ({"x": np.zeros((ROWS, 8), np.float32)}, r"y is missing"),
        ({"x": lambda index: 1 / 0, "y": np.zeros((ROWS, 8), np.float32)}, r"b.*x raised ZeroDivisionError"),
        ({"x": lambda index: np.zeros((2, 2)), "y": np.zeros((ROWS, 8), np.float32)}, r"returned float64\[2, 2\]"),
    ],
)
def test_a_batch_that_the_step_does_not_take_is_refused(batch, message):
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    create_state(init_fn, jax.random.key(0), like=step, batch=BATCH)
    with pytest.raises(InvalidArgument, match=message):
        shard_batch(batch, like=step)


def test_prefetched_batches_come_in_order_and_pass_on_what_their_source_raises():
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    create_state(init_fn, jax.random.key(0), like=step, batch=BATCH)

    def source() -> Any:
        yield from (draw_batch(seed) for seed in range(5))
        raise OSError("the disk is gone")

    fetched = prefetch(source(), like=step, size=3)
    for seed in range(5):
        assert_same(next(fetched), jax.tree.map(jnp.asarray, draw_batch(seed)))
    with pytest.raises(OSError, match="the disk is gone"):
        next(fetched)
    assert [len(list(prefetch([], like=step)))] == [0]
    with pytest.raises(InvalidArgument, match="size is 0"):
        prefetch([], like=step, size=0)


def test_an_initialisation_that_cannot_be_sent_says_so():
    lock = threading.Lock()

    def locked(key: jax.Array) -> jax.Array:
        with lock:
            return key

    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    create_state(init_fn, jax.random.key(0), like=step, batch=BATCH)
    arrangement, _ = argument_placement(step.all_compiled()[0], 0)
    with pytest.raises(CannotSerialize, match="locked cannot be sent"):
        serialize_init(InitRecipe(init_fn=locked, args=(), to=arrangement))


def test_copies_of_a_batch_on_further_meshes_are_not_moved_as_well():
    def piece(devices: tuple[int, ...], start: int, stop: int) -> Piece:
        layout = DeviceLayout(devices=devices, mesh_shape=(2,), axis_names=("data",), spec=PartitionSpec())
        return Piece(layout=layout, shape=(stop - start, 3), window=Window(axis=0, start=start, stop=stop))

    pieces = (piece((0, 1), 0, 4), piece((0, 1), 4, 8), piece((2, 3), 0, 8), piece((2, 3), 2, 6))
    kind = ArrayType(shape=(8, 3), dtype="float32")
    mesh = MeshProgram(devices=(4, 5), shape=(2,), axis_names=("data",), values={"x": kind}, instructions=())
    program = Program(
        name="other",
        meshes=(mesh,),
        executables={},
        inputs=(Input(leaf=0, mesh=0, value="x"),),
        outputs=(Output(leaf=0, parts=((0, "x"),)),),
    )
    (moved,) = route_inputs(program, [Placed(shape=(8, 3), dtype="float32", pieces=pieces)]).from_devices
    assert [(part.piece, part.shape) for part in moved.parts] == [(0, (4, 3)), (1, (4, 3))]


def test_a_callback_that_raises_fails_the_creation_of_the_state():
    def refuse(x: Any) -> None:
        raise ValueError(f"a sum of {x:.2f}")

    def init(key: jax.Array) -> jax.Array:
        state = jax.random.normal(key, (8, 8))
        jax.debug.callback(refuse, jnp.sum(state))
        return state

    def step(state: jax.Array, batch: jax.Array) -> Any:
        return state - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state), {}

    parallel = autopar.parallelize(step, method=autopar.DataParallel(), devices=jax.devices()[:2])
    with pytest.raises(jax.errors.JaxRuntimeError, match="a sum of"):
        create_state(init, jax.random.key(0), like=parallel, batch=jax.ShapeDtypeStruct((8, 8), jnp.float32))
