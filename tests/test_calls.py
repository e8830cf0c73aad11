"""A parallelized step is called where a jitted one would be: what that means for transformations, axes and options."""

import copy
import functools
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import CannotSerialize, InvalidArgument, Unsupported
from tests.compile_counts import compiled_by_xla

RNG = np.random.default_rng(0)
W, X = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((4, 4), (16, 4)))


def train_step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


parallel_step = autopar.parallelize(train_step, method=autopar.DataParallel())


@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_forked_process_is_told_why_the_step_would_wait_for_ever():
    step = autopar.parallelize(train_step, devices=jax.devices()[:1])
    step(W, X)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            step(W, X)
            told = "it ran"
        except Unsupported as error:
            told = str(error)
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "train_step was compiled in another process, of which this one was forked" in pipe.read()
    os.waitpid(child, 0)
    step(W, X)


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    def plain(self, w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - self.rate * gradient, loss

    step = autopar.parallelize(plain, method=autopar.DataParallel())
    jitted = autopar.parallelize(functools.partial(jax.jit, static_argnums=0)(plain), method=autopar.DataParallel())
    static = staticmethod(autopar.parallelize(train_step, method=autopar.DataParallel()))


@pytest.mark.parametrize("name", ["step", "jitted", "static"])
def test_a_step_in_a_class_is_a_method(name):
    for rate in (0.1,) if name == "static" else (0.1, 0.5):
        trainer = Trainer(rate)
        for found, wanted in zip(getattr(trainer, name)(W, X), trainer.plain(W, X), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert isinstance(Trainer.step, autopar.api.Step)


def test_a_step_of_a_module_changes_the_module_in_place():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(W)

        @autopar.parallelize(method=autopar.DataParallel())
        def step(self, x):
            w, loss = train_step(self.w[...], x)
            self.w[...] = w
            return loss

    model = Model()
    np.testing.assert_allclose(model.step(X), train_step(W, X)[1], rtol=1e-5)
    np.testing.assert_allclose(model.w[...], train_step(W, X)[0], rtol=1e-5)


def filled_buffer(rows=16, alignment=64):
    """A buffer of numpy's that JAX would take over as it is, for its place in memory."""
    room = np.zeros(rows * 4 + alignment, np.float32)
    first = -room.ctypes.data % alignment // room.itemsize
    buffer = room[first : first + rows * 4].reshape(rows, 4)
    buffer[:] = X
    return buffer


@pytest.mark.parametrize(
    "method",
    [autopar.DataParallel(), autopar.DataParallel(num_microbatches=2), autopar.PipelineParallel(num_stages=1)],
    ids=["data", "microbatches", "stage"],
)
@pytest.mark.parametrize("placed", [False, True], ids=["as it is", "placed"])
def test_one_buffer_may_be_filled_again_as_soon_as_a_call_has_returned(method, placed):
    step = autopar.parallelize(train_step, method=method)
    step(W, X)
    buffer = filled_buffer()
    batch = autopar.shard_batch(buffer, like=step, argnum=1) if placed else buffer
    result = step(W, batch)
    buffer[:] = 0
    again = step(W, batch) if placed else step(W, X)
    for found in (result, again):
        for a, b in zip(found, train_step(W, X), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "method", [autopar.DataParallel(), autopar.DataParallel(num_microbatches=2), autopar.PipelineParallel(num_stages=2)]
)
@pytest.mark.parametrize("donated", [(0,), (0, 1)], ids=str)
def test_a_donated_array_may_be_another_argument_as_well(method, donated):
    def step(params, target, x):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x @ target["a"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    parallel = autopar.parallelize(step, method=method, donate_argnums=donated)
    params, expected = ({"a": W + 0, "b": W + 1} for _ in range(2))
    for _ in range(3):  # the first call copies what is not in its place yet
        params, loss = parallel(params, params, X)
        expected, wanted = step(expected, expected, X)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)


@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.DataParallel(num_microbatches=2)], ids=str)
def test_a_guard_against_transfers_lets_arguments_be_placed(method):
    step = autopar.parallelize(train_step, method=method)
    with jax.transfer_guard("disallow"):
        w, _ = step(W, X)
        found = step(w, X)
    for a, b in zip(found, train_step(train_step(W, X)[0], X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("axis_name", [None, "devices"])
def test_error_of_tracing_names_the_step_and_the_argument(axis_name):
    def branching(state, x):
        return state if state["w"].sum() > 0 else {"w": x}

    step = autopar.parallelize(branching, axis_name=axis_name)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        step({"v": W, "w": W}, X)
    assert f"the function branching at {__file__}:" in str(caught.value)
    assert axis_name or "depends on the value of the argument state.w." in str(caught.value)


def test_a_step_is_lowered_and_compiled_where_that_of_jit_was():
    compiled = parallel_step.lower(W, X).compile()
    for a, b in zip(compiled(W, X), jax.jit(train_step).lower(W, X).compile()(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_threads_that_call_first_compile_once():
    traces = []

    def counted(w, x):
        traces.append(threading.get_ident())
        return train_step(w, x)

    step = autopar.parallelize(counted, method=autopar.DataParallel(), devices=jax.devices()[:2])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: step(W, X), range(4)))
    assert len(step.all_compiled()) == 1
    assert len(set(traces)) == 1
    for w, _ in results:
        np.testing.assert_allclose(w, jax.jit(train_step)(W, X)[0], rtol=1e-6)


# --- transformations ----------------------------------------------------------------------------------------------

TRANSFORMED = {
    "jit": lambda: jax.jit(parallel_step)(W, X),
    "grad": lambda: jax.grad(lambda w: parallel_step(w, X)[1])(W),
    "vmap": lambda: jax.vmap(parallel_step, in_axes=(None, 0))(W, X[None]),
    "scan": lambda: jax.lax.scan(parallel_step, W, X[None]),
    "eval_shape": lambda: jax.eval_shape(parallel_step, W, X),
    "parallelize": lambda: autopar.parallelize(lambda w, x: parallel_step(w, x), method=autopar.DataParallel())(W, X),
    "its own arrays": lambda: jax.jit(lambda x: parallel_step(W, X)[1] + x)(1.0),
    "compiled": lambda: jax.jit(parallel_step.trace(W, X).plan().lower().compile())(W, X),
}


@pytest.mark.parametrize("call", TRANSFORMED.values(), ids=TRANSFORMED)
def test_step_inside_of_a_transformation_is_refused_with_what_to_do(call):
    with pytest.raises(Unsupported, match=r"train_step is called inside of a transformation.*train_step.__wrapped__"):
        call()


def test_plain_step_can_be_transformed():
    shapes = jax.eval_shape(parallel_step.__wrapped__, W, X)
    assert shapes[0].shape == W.shape


def test_without_jit_the_step_runs_as_it_stands():
    seen = []

    def step(w, x):
        seen.append(float(jnp.mean(x)))  # a number only outside of a trace
        return w + jnp.mean(x)

    with jax.disable_jit():
        np.testing.assert_allclose(
            autopar.parallelize(step, method=autopar.DataParallel())(W, X), W + jnp.mean(X), rtol=1e-6
        )
    assert len(seen) == 1


# --- pickling -----------------------------------------------------------------------------------------------------


def test_step_is_pickled_by_reference():
    assert pickle.loads(pickle.dumps(parallel_step)) is parallel_step
    assert pickle.loads(pickle.dumps(decorated)) is decorated


@autopar.parallelize
def decorated(w, x):
    return w + jnp.mean(x)


def test_step_without_a_name_of_its_own_is_not_pickled():
    with pytest.raises(CannotSerialize, match=r"<lambda> has no name of its own in the module.*Pickle the plain"):
        pickle.dumps(autopar.parallelize(lambda w, x: w))


def test_what_holds_a_step_is_copied_with_the_step_itself():
    held = functools.partial(autopar.parallelize(lambda w, x: w), 1.0)
    assert copy.deepcopy(held).func is copy.copy(held).func is copy.copy(held.func) is held.func


# --- what was compiled --------------------------------------------------------------------------------------------


def test_compiled_steps_are_listed_and_dropped():
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    step(W, X), step(W, X[:8])
    first, second = step.all_compiled()
    step.clear_cache(first)
    assert step.all_compiled() == [second]
    with pytest.raises(InvalidArgument, match=r"train_step has no such compiled step.*all_compiled"):
        step.clear_cache(first)
    step.clear_cache()
    assert step.all_compiled() == []
    step(W, X)
    assert len(step.all_compiled()) == 1


# --- one device ---------------------------------------------------------------------------------------------------


def on_one_device(step=train_step, **options):
    return autopar.parallelize(step, devices=jax.devices()[1:2], **options)


def test_step_on_one_device_is_compiled_once_however_its_arrays_lie():
    step = on_one_device()
    w, x, there = jax.block_until_ready((W + 0, np.asarray(X), jax.device_put(X, jax.devices()[1])))

    def train():
        state = w
        for batch in (x, x, there, x):
            state, _ = step(state, batch)
        assert state.devices() == {jax.devices()[1]}

    assert compiled_by_xla(train) == 1
    assert len(step.all_compiled()) == 1


def test_step_on_one_device_equals_the_plain_step_for_every_call():
    step, plain = on_one_device(), jax.jit(train_step)
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    calls = {
        "first": (W, X),
        "again": (W, X),
        "other batch size": (W, X[:6]),
        "other dtype": (W.astype(jnp.bfloat16), X),
        "on other devices": (jax.device_put(W, jax.devices()[3]), X),
        "on a mesh": (jax.device_put(W, jax.NamedSharding(mesh, P())), X),
    }
    for w, x in calls.values():
        ours, theirs = step(w, x), plain(jax.device_get(w), jax.device_get(x))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)
        assert ours[1].devices() == {jax.devices()[1]}
    assert len(step.all_compiled()) == 3


def test_step_on_one_device_tells_settings_and_names_apart():
    def draw(w, x):
        return w + jax.random.normal(jax.random.key(0), w.shape) + jnp.mean(x)

    step = on_one_device(draw)
    default = step(W, X)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        np.testing.assert_allclose(step(W, X), jax.jit(draw)(W, X), rtol=1e-5)
    np.testing.assert_array_equal(step(W, X), default)
    np.testing.assert_allclose(step(W, x=X), default, rtol=1e-6)
    with jax.enable_x64(True):
        assert step(W.astype(jnp.float64), X).dtype == jnp.float64


def test_array_donated_on_one_device_is_named_when_it_is_used_again():
    step = on_one_device(donate_argnums=0)
    w = step(W + 0, X)[0]
    step(w, X)
    with pytest.raises(autopar.DonatedBuffer, match="'w' was donated to an earlier call"):
        step(w, X)


def test_calls_that_jit_alone_cannot_serve_follow_ones_that_it_can():
    step = on_one_device(lambda state, x: {"mean": state["w"] * jnp.mean(x), "name": state.get("name")})
    np.testing.assert_allclose(step({"w": W}, X)["mean"], W * jnp.mean(X), rtol=1e-5)
    named = step({"w": W, "name": "first"}, X)
    assert named["name"] == "first"
    np.testing.assert_allclose(step({"w": W}, X)["mean"], named["mean"], rtol=1e-6)


# --- steps for pmap -----------------------------------------------------------------------------------------------


def pmap_step(w, x):
    gradient = jax.lax.pmean(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), "batch")
    return w - 0.1 * gradient, {"total": jax.lax.psum(jnp.sum(x), "batch"), "count": jax.lax.psum(1, "batch")}


def place_step(w, x):
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("batch"))
    noise = jax.random.normal(key, w.shape)
    return w + noise * jnp.mean(x), jax.lax.all_gather(jnp.mean(x), "batch")


METHODS = {"data": autopar.DataParallel(), "stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2)}
PMAP = {
    "mean": (pmap_step, autopar.DataParallel()),
    "mean in stages": (pmap_step, METHODS["stages"]),
    "place": (place_step, autopar.DataParallel()),
}


@pytest.mark.parametrize(("step", "method"), PMAP.values(), ids=PMAP)
def test_step_for_pmap_is_that_of_one_device_with_the_whole_batch(step, method):
    one_device = jax.pmap(step, axis_name="batch", devices=jax.devices()[:1])
    expected = jax.tree.map(lambda a: a[0], one_device(W[None], X[None]))
    ours = autopar.parallelize(step, method=method, axis_name="batch")(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected)


def test_step_for_pmap_changes_objects_in_place():
    def step(model, x):
        model.kernel[...] -= jax.lax.pmean(jnp.mean(x), "batch")
        return jnp.mean(x)

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    expected = model.kernel[...] - jnp.mean(X)
    autopar.parallelize(step, method=autopar.DataParallel(), axis_name="batch")(model, X)
    np.testing.assert_allclose(model.kernel[...], expected, rtol=1e-5, atol=1e-6)


def test_axis_that_nothing_binds_is_refused_with_the_recipe():
    with pytest.raises(InvalidArgument, match=r"pmap_step reduces over the axis 'batch'.*axis_name='batch'"):
        autopar.parallelize(pmap_step, method=autopar.DataParallel())(W, X)


def test_name_that_the_step_lacks_is_its_own_error():
    with pytest.raises(NameError, match="nothing_of_this_name"):
        autopar.parallelize(lambda w, x: nothing_of_this_name, method=autopar.DataParallel())(W, X)  # noqa: F821


# --- wrapped by jax.jit -------------------------------------------------------------------------------------------


def test_arguments_that_jit_was_told_of_are_static_and_donated():
    def step(w, x, mode):
        return w + (jnp.mean(x) if mode == "mean" else jnp.sum(x))

    jitted = jax.jit(step, static_argnames="mode", donate_argnums=0)
    ours = autopar.parallelize(jitted, method=autopar.DataParallel())
    assert (ours.arguments.static_names, ours.arguments.donated) == ({"mode"}, {0})
    np.testing.assert_allclose(ours(W + 0, X, "mean"), step(W, X, "mean"), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(W + 0, X, mode="sum"), step(W, X, "sum"), rtol=1e-5, atol=1e-5)


# --- options ------------------------------------------------------------------------------------------------------


def test_lists_strings_and_numbers_of_numpy_are_taken_for_options():
    step = autopar.parallelize(
        lambda w, x, mode: w + jnp.mean(x),
        method=autopar.DataParallel(),
        batch_argnums=[np.int64(1)],
        static_argnames=["mode"],
        donate_argnums=np.int32(0),
        num_microbatches=np.int64(2),
    )
    assert (step.arguments.batch, step.arguments.static_names, step.arguments.donated) == ({1}, {"mode"}, {0})
    method = autopar.ShardParallel(mesh_shape=[2, np.int64(4)], axis_names=["data", "model"], specs={"w": P("data")})
    assert method == autopar.ShardParallel(mesh_shape=(2, 4), axis_names=("data", "model"), specs={"w": P("data")})
    assert autopar.Auto(mesh_shape=8, axis_names="data").mesh_axes == ("data",)
    assert hash(autopar.Zero(mesh_shape=[2, 4])) == hash(autopar.Zero(mesh_shape=(2, 4)))
    assert autopar.Auto(memory=np.float32(0.5)).memory == 0.5


@jax.tree_util.register_pytree_node_class
class Scale:
    """A node that takes nothing but arrays, as scales of losses in packages of mixed precision."""

    def __init__(self, value):
        if not isinstance(value, jax.Array):
            raise TypeError(f"no array: {value}")
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.parametrize("count", [1, 2])
def test_a_node_that_takes_only_arrays_is_returned(count):
    def step(scale, x):
        return Scale(scale.value * 2), jnp.sum(x * scale.value)

    args = Scale(jnp.float32(3)), jnp.arange(8.0)
    scale, total = autopar.parallelize(step, method=autopar.DataParallel(), devices=jax.devices()[:count])(*args)
    assert (float(scale.value), float(total)) == (6.0, 84.0)


WRONG = {
    "number as a string": ({"batch_argnums": "1"}, "batch_argnums is '1'. Give the number"),
    "truth value as a number": ({"donate_argnums": True}, "donate_argnums is True. Give the number"),
    "float as a number": ({"static_argnums": [1.0]}, r"static_argnums is \[1.0\]. Give the number"),
    "number as a name": ({"static_argnames": 1}, "static_argnames is 1. Give the name"),
    "number as an axis": ({"axis_name": 1}, "axis_name is 1. Give the name"),
    "number of devices": ({"devices": 4}, "devices is 4. Give a sequence"),
    "device as a string": ({"devices": ["cpu"]}, r"devices is \['cpu'\]. Give a sequence"),
    "no regular expression": ({"unbatched": "("}, r"pattern '\(' of unbatched is no regular expression"),
    "an axis for all": ({"batch_axes": 1}, "batch_axes is 1. Give the axis of the batch by a pattern"),
    "a truth value for an axis": ({"batch_axes": {"x": True}}, "Give the axis of the batch by a pattern"),
    "no regular expression for an axis": ({"batch_axes": {"(": 1}}, r"pattern '\(' of batch_axes is no regular"),
    "no devices": ({"devices": []}, r"devices is \[\]. Give a sequence"),
    "cluster as a string": ({"cluster": "2x dgx-h100"}, "cluster is '2x dgx-h100'. Give an autopar.Cluster"),
    "float as a count": ({"num_microbatches": 2.0}, "num_microbatches is 2.0, it must be an integer"),
}


@pytest.mark.parametrize(("options", "expected"), WRONG.values(), ids=WRONG)
def test_option_of_another_type_is_refused_by_name(options, expected):
    with pytest.raises(InvalidArgument, match=expected):
        autopar.parallelize(train_step, **options)


FIELDS = {
    "remat of stages": (autopar.PipelineParallel, {"remat": "auto"}, "remat is 'auto'. Give True or False"),
    "remat": (autopar.Auto, {"remat": "no"}, "remat is 'no'; give True, False"),
    "remat by number": (autopar.Auto, {"remat": 1}, "remat is 1; give True, False"),
    "stage": (autopar.Zero, {"stage": True}, "stage=True; there are the stages 1, 2 and 3"),
    "zero": (autopar.Megatron, {"zero": True}, "zero is True; ZeRO has the stages"),
    "count": (autopar.Auto, {"num_stages": 2.0}, "num_stages is 2.0, it must be an integer"),
    "memory": (autopar.Auto, {"memory": True}, "memory is True; give bytes"),
    "memory as a list": (autopar.Zero, {"memory": [1]}, r"memory is \(1,\); give bytes"),
    "seconds": (autopar.Auto, {"time_limit_s": "60"}, "time_limit_s is '60'; give a positive number"),
    "mesh": (autopar.ShardParallel, {"mesh_shape": 2.5}, "mesh_shape is 2.5. Give a tuple of integers"),
    "size of an axis": (autopar.ShardParallel, {"mesh_shape": (2, True)}, "it must be an integer"),
    "names of axes": (autopar.ShardParallel, {"mesh_shape": (2,), "axis_names": (1,)}, "Give a tuple of strings"),
    "specs": (
        autopar.ShardParallel,
        {"mesh_shape": (2,), "specs": [P()]},
        "Give a dictionary from regular expressions",
    ),
    "pattern": (autopar.Auto, {"pins": {1: P()}}, "Give a dictionary from regular expressions"),
    "word": (autopar.DataParallel, {"random": ["full_batch"]}, "random is .*Choose one of"),
    "truth value": (autopar.Auto, {"ignore_user_shardings": "yes"}, "ignore_user_shardings is 'yes'. Give True or"),
}


@pytest.mark.parametrize(("method", "options", "expected"), FIELDS.values(), ids=FIELDS)
def test_field_of_a_method_of_another_type_is_refused_by_name(method, options, expected):
    with pytest.raises(InvalidArgument, match=expected):
        method(**options)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize(
    "method",
    [
        autopar.DataParallel(),
        autopar.PipelineParallel(num_stages=2, num_microbatches=2),
        autopar.Auto(num_stages=1, mesh_shape=(2, 4)),
    ],
    ids=["data", "pipeline", "auto"],
)
def test_mesh_that_the_user_has_set_is_none_of_what_runs(method, num_devices):
    def step(state, x):
        weights, momentum = state

        def loss(weights):
            h = jnp.tanh(x @ weights[0])
            return jnp.mean((h @ weights[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum), value

    state = ((W, W + 1), (0 * W, 0 * W))
    wanted = jax.jit(step)(*[jax.jit(step)(state, X)[0], X])
    mesh = jax.make_mesh((1, num_devices), ("replica", "data"), devices=jax.devices()[:num_devices])
    parallel = autopar.parallelize(step, method=method)
    with jax.set_mesh(mesh):
        found = parallel(*[parallel(state, X)[0], X])
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("method", [autopar.Auto(), autopar.DataParallel(num_microbatches=2)], ids=["auto", "data"])
def test_step_on_one_device_runs_under_a_mesh_whose_axes_are_in_types(method):
    def step(params, x):
        def loss(params):
            h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, params)
            return jnp.mean((jax.sharding.reshard(h, P("data")) - jnp.arange(4.0)) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.1 * gradient, value

    parallel, expected = autopar.parallelize(step, method=method, devices=jax.devices()[:1]), jax.jit(step)
    params = wanted = jnp.stack([W, W + 1])
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        for _ in range(3):
            (params, value), (wanted, loss) = parallel(params, X), expected(wanted, X)
            np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [autopar.DataParallel(num_microbatches=2), autopar.PipelineParallel(num_stages=2)])
def test_gradients_of_whole_numbers_are_returned_as_by_jit(method):
    def step(params, x):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2) * params["times"]

        return jax.grad(loss, allow_int=True)(params)

    params = {"a": W, "b": W, "times": jnp.int32(2)}
    found = autopar.parallelize(step, method=method)(params, X)
    wanted = jax.jit(step)(params, X)
    assert found["times"].dtype == wanted["times"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(found["a"], wanted["a"], rtol=1e-5, atol=1e-7)


NUMBERS = {
    "data": autopar.DataParallel(),
    "microbatches": autopar.DataParallel(num_microbatches=2),
    "stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    "search": autopar.Auto(),
}


@pytest.mark.parametrize("method", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_python_in_the_state_give_way_to_arrays_in_every_later_call_as_by_jit(method):
    def step(state, x):
        def loss(ws):
            return jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

        gradients = jax.grad(loss)(state["ws"])
        ws = [w - state["rate"] * g for w, g in zip(state["ws"], gradients, strict=True)]
        return {"ws": ws, "rate": state["rate"] * 0.5, "decay": state["decay"]}, 2.5, state["rate"] > 1

    narrow = W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    results = {}
    for name, run in {"plain": jax.jit(step), "parallel": autopar.parallelize(step, method=method)}.items():
        state = {"ws": [narrow[0], narrow[0] + 1], "rate": 0.1, "decay": 0.9}
        for rows in (16, 8):  # the second shape is traced with the state that came back
            state, *others = run(state, narrow[1][:rows])
        results[name] = [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves((state, others))]
    assert results["parallel"] == results["plain"]
    assert [weak for _, weak in results["plain"]] == [True, True, False, False, True, True]


@pytest.mark.parametrize("method", NUMBERS.values(), ids=NUMBERS)
def test_state_of_less_than_a_byte_per_element_is_taken_as_it_was_returned(method):
    def step(state, x):
        def loss(ws):
            return jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

        gradients = jax.grad(loss)([w + 0.1 * code.astype(w.dtype) for w, code in state])
        codes = [jnp.clip(code - jnp.sign(g).astype(code.dtype), -7, 7) for (_, code), g in zip(state, gradients)]
        return [(w - 0.1 * g, code) for (w, _), g, code in zip(state, gradients, codes)]

    state = wanted = [(W, jnp.ones_like(W, dtype=jnp.int4)), (W + 1, jnp.ones_like(W, dtype=jnp.int4))]
    parallel, plain = autopar.parallelize(step, method=method), jax.jit(step)
    for _ in range(3):
        state, wanted = parallel(state, X), plain(wanted, X)
    for found, expected in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-4, atol=1e-5)


def test_shapes_of_results_are_those_of_jit_and_nothing_is_compiled():
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    assert step.eval_shape(W, x=X) == jax.jit(train_step).eval_shape(W, X)
    assert step.eval_shape(jax.ShapeDtypeStruct(W.shape, W.dtype), X) == step.eval_shape(W, X)
    assert step.all_compiled() == []
    with pytest.raises(InvalidArgument, match="w is an array of <U1, a type that JAX does not have"):
        step.eval_shape(np.array(["w"]), X)


def test_shapes_of_results_leave_objects_and_what_is_static_as_they_are():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    before = model.kernel[...]

    @autopar.parallelize
    def step(model, x):
        model.kernel[...] = 2 * model.kernel[...]
        return {"mean": model(x).mean(), "name": "linear"}

    shapes = step.eval_shape(model, jnp.ones((8, 3)))
    assert shapes == {"mean": jax.ShapeDtypeStruct((), jnp.float32), "name": "linear"}
    assert model.kernel[...] is before
