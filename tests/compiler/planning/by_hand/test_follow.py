"""A step that follows another takes the state as that left it, and never moves it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import InvalidArgument, Unsupported
from tests.small_steps import two_stages

LAYERS, WIDTH, ROWS = 4, 16, 16


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32) / 4


def make_state():
    params = {f"h_{i}": {"w": draw(WIDTH, WIDTH + i)[:, :WIDTH], "b": draw(WIDTH)} for i in range(LAYERS)}
    return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(0)}


def forward(params, x):
    for i in range(LAYERS):
        with jax.named_scope(f"h_{i}"):
            x = jnp.tanh(x @ params[f"h_{i}"]["w"] + params[f"h_{i}"]["b"])
    return x


def loss_fn(params, batch):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments, "count": state["count"] + 1}, loss


def make_batch(rows=ROWS):
    return {"x": draw(rows, WIDTH), "y": draw(rows, WIDTH)}


def evaluate(state, batch):
    return {"loss": loss_fn(state["params"], batch), "predictions": forward(state["params"], batch["x"])}


def mean_loss(state, batch):
    return loss_fn(state["params"], batch)


METHODS = {
    "default": None,
    "by specs": autopar.ShardParallel(mesh_shape=(2, 4), specs={r"\.w$": P(None, "model")}),
    "ZeRO": autopar.Zero(stage=3, mesh_shape=(8,)),
    "two stages": two_stages(num_microbatches=2),
    "interleaved": two_stages(num_microbatches=2, schedule="interleaved"),
    "Megatron": autopar.Megatron(data=2, tensor=2, pipeline=2, num_microbatches=2),
    "searched stages": autopar.Auto(num_stages=2, num_microbatches=2),
}


def trained(method):
    step = autopar.parallelize(train_step, method=method)
    state, _ = step(make_state(), make_batch())
    return step, state


def check_nothing_moves(step, state):
    """The program takes every array in the sharding that it has."""
    compiled = step.all_compiled()[-1]
    leaves = {leaf.name: number for number, leaf in enumerate(compiled.trace.inputs)}
    taken = {given.leaf: given for given in compiled.program.inputs}
    for path, array in jax.tree_util.tree_leaves_with_path(state["params"]):
        given = taken[leaves["state.params." + ".".join(key.key for key in path)]]
        mesh = compiled.program.meshes[given.mesh]
        devices = np.array(jax.devices())[list(mesh.devices)].reshape(mesh.shape)
        wanted = NamedSharding(jax.sharding.Mesh(devices, mesh.axis_names), mesh.values[given.value].spec)
        assert array.sharding.is_equivalent_to(wanted, array.ndim), (path, array.sharding, wanted)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_evaluation_equals_the_plain_one_where_the_state_lies(method):
    step, state = trained(method)
    follower = autopar.parallelize(evaluate, follow=step)
    for rows in (ROWS, ROWS // 2):
        found, wanted = follower(state, make_batch(rows)), jax.jit(evaluate)(jax.device_get(state), make_batch(rows))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), dict(found), dict(wanted))
        check_nothing_moves(follower, state)


def test_a_pipeline_is_followed_by_one_without_a_backward_pass():
    step, state = trained(two_stages(num_microbatches=4))
    plan = autopar.parallelize(mean_loss, follow=step).trace(state, make_batch()).plan()
    assert plan.plan.num_stages == 2 and plan.plan.num_microbatches == 4 and plan.plan.method == "Follow"
    kinds = {i.task.kind for mesh in plan.lower().program.meshes for i in mesh.instructions if hasattr(i, "task")}
    assert "F" in kinds and "B" not in kinds
    assert plan.simulate().step_time_s > 0


def test_a_part_of_the_state_under_another_name_is_recognized():
    def evaluate_params(params, batch):
        return loss_fn(params, batch)

    step, state = trained(two_stages())
    found = autopar.parallelize(evaluate_params, follow=step)(state["params"], make_batch())
    np.testing.assert_allclose(found, loss_fn(jax.device_get(state["params"]), make_batch()), rtol=1e-5)


@pytest.mark.parametrize("method", [None, two_stages()])
def test_state_that_is_returned_as_it_is_stays_where_it_lies(method):
    def count_loss(state, batch):
        return {**state, "count": state["count"] + 1}, loss_fn(state["params"], batch)

    step, state = trained(method)
    follower = autopar.parallelize(jax.jit(count_loss), follow=step)
    after, loss = follower(state, make_batch())
    assert all(a is b for a, b in zip(jax.tree.leaves(after["params"]), jax.tree.leaves(state["params"]), strict=True))
    assert int(after["count"]) == 2
    np.testing.assert_allclose(loss, loss_fn(jax.device_get(state["params"]), make_batch()), rtol=1e-5)


def test_what_is_compiled_anew_is_followed_anew():
    step, state = trained(None)
    follower = autopar.parallelize(evaluate, follow=step)
    follower(state, make_batch())
    first = follower.all_compiled()
    step.clear_cache()
    step(jax.device_get(state), make_batch())
    follower(state, make_batch())
    assert follower.all_compiled() != first


def test_following_is_refused_with_the_reason():
    step, state = trained(two_stages())
    new = autopar.parallelize(train_step)
    with pytest.raises(InvalidArgument, match=r"evaluate follows train_step, which has not been compiled yet.*Call"):
        autopar.parallelize(evaluate, follow=new)(state, make_batch())
    with pytest.raises(InvalidArgument, match=r"follow takes the plan.*, and method would ask for others"):
        autopar.parallelize(evaluate, follow=step, method=autopar.Auto())
    with pytest.raises(InvalidArgument, match=r"follow is a function. Give a parallelized step"):
        autopar.parallelize(evaluate, follow=train_step)
    with pytest.raises(Unsupported, match=r"train_step follows train_step, and takes a gradient"):
        autopar.parallelize(train_step, follow=step)(state, make_batch())


def test_a_step_that_would_move_state_is_refused():
    def mixing(state, batch):
        both = state["params"]["h_0"]["w"], state["params"]["h_3"]["w"]
        return jnp.mean(jax.lax.dot_general(batch["x"], both[0], (((1,), (0,)), ((), ()))) @ both[1])

    def all_moments(state, batch):
        return loss_fn(state["params"], batch), state["moments"]["h_3"]["w"] * 2.0

    def at_once(state, batch):
        low, high = (jnp.broadcast_to(state["params"][h]["b"], batch["x"].shape) for h in ("h_0", "h_3"))
        return jnp.mean(jax.lax.clamp(low, batch["x"], high))

    step, state = trained(two_stages())
    autopar.parallelize(mixing, follow=step)(state, make_batch())
    with pytest.raises(Unsupported, match=r"at_once follows a step in stages, and `clamp`.* meshes \[0, 1\] at once"):
        autopar.parallelize(at_once, follow=step)(state, make_batch())
    with pytest.raises(Unsupported, match=r"all_moments reads state.moments.h_3.w on mesh 0, and train_step leaves it"):
        autopar.parallelize(all_moments, follow=step)(state, make_batch())
