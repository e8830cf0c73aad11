"""Where `@nnx.jit` stood: what a step changes in its objects is changed after the call, and shared as before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.errors import InvalidArgument

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
METHODS = {"data": autopar.DataParallel(), "stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2)}


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jax.nn.relu(self.norm(self.up(x)))))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def loss_of(model, x):
    return jnp.mean((model(x) - x) ** 2)


def train_step(model, optimizer, metrics, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    metrics.update(values=loss)
    return loss


def objects(kind=Network):
    model = kind(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param), nnx.metrics.Average()


def state_after(step, args, steps=2):
    results = [step(*args, X) for _ in range(steps)]
    state = nnx.state(args, nnx.Not(nnx.RngKey))
    return jax.device_get((results, nnx.to_pure_dict(state)))


def assert_equal(one, two):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), one, two)


@pytest.mark.parametrize("given", [train_step, nnx.jit(train_step)], ids=["plain", "nnx.jit"])
def test_model_optimizer_metrics_and_random_streams_change_as_by_nnx_jit(given):
    step = autopar.parallelize(given, method=autopar.DataParallel(), batch_argnums=3)
    args = objects()
    assert_equal(state_after(step, args), state_after(nnx.jit(train_step), objects()))
    model = args[0]
    assert len(model.up.kernel.sharding.device_set) == jax.device_count()
    assert len(step.all_compiled()) == 1


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_tied_parameters_stay_tied(method):
    step = autopar.parallelize(train_step, method=method, batch_argnums=3)
    args = objects(Tied)
    assert_equal(state_after(step, args), state_after(nnx.jit(train_step), objects(Tied)))
    assert args[0].first is args[0].second


def test_replaced_arrays_are_state_and_no_others_are_results():
    def tune(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.PathContains("second")))(model, x)
        optimizer.update(model, grads)
        return loss

    class Pair(Tied):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    model = Pair(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.PathContains("second"))
    trace = autopar.parallelize(tune, batch_argnums=2, donate_argnums=(0, 1)).trace(model, optimizer, X).trace
    replaced = {trace.inputs[i].name for i in trace.state_outputs.values()}
    assert replaced == {"model.second.kernel", "model.second.bias", "optimizer.step"}
    assert {trace.inputs[i].name for i in trace.donated_inputs} == replaced


def test_objects_in_trees_and_by_name_and_as_results():
    def step(state, *, x):
        state["model"].kernel[...] += jnp.mean(x)
        return {"model": state["model"], "fresh": nnx.Param(jnp.sum(x)), "mean": jnp.mean(x)}

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    expected = model.kernel[...] + jnp.mean(X)
    result = autopar.parallelize(step, method=autopar.DataParallel(), batch_argnums=())({"model": model}, x=X)
    assert result["model"] is model
    np.testing.assert_allclose(model.kernel[...], expected, rtol=1e-6)
    np.testing.assert_allclose(result["fresh"][...], jnp.sum(X), rtol=1e-6)


def test_variables_and_settings_that_the_step_adds_are_there_afterwards():
    def step(model, x):
        y = model(x)
        model.largest = nnx.Intermediate(jnp.max(y))
        model.seen = "once"
        return jnp.mean(y)

    ours, theirs = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    parallel = autopar.parallelize(step, method=autopar.DataParallel())
    for _ in range(2):  # the second call finds the variable, and is another program
        np.testing.assert_allclose(parallel(ours, X), nnx.jit(step)(theirs, X), rtol=1e-5)
        np.testing.assert_allclose(ours.largest[...], theirs.largest[...], rtol=1e-5)
    assert ours.seen == "once" and len(parallel.all_compiled()) == 2


def test_array_that_moves_within_the_objects_is_kept():
    def step(model, target, x):
        target.kernel[...] = model.kernel[...]
        model.kernel[...] = model.kernel[...] + jnp.mean(x)
        return jnp.mean(x)

    model, target = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    before = np.asarray(model.kernel[...])
    parallel = autopar.parallelize(step, method=autopar.DataParallel(), batch_argnums=2, donate_argnums=(0, 1))
    for _ in range(2):
        parallel(model, target, X)
    np.testing.assert_allclose(target.kernel[...], before + np.mean(X), rtol=1e-5)
    np.testing.assert_allclose(model.kernel[...], before + 2 * np.mean(X), rtol=1e-5)


def test_settings_of_a_module_are_part_of_the_key():
    model = Network(nnx.Rngs(0))
    evaluate = autopar.parallelize(loss_of, method=autopar.DataParallel())
    evaluate(model, X)
    model.eval()
    np.testing.assert_allclose(evaluate(model, X), nnx.jit(loss_of)(model, X), rtol=1e-5)
    assert len(evaluate.all_compiled()) == 2


def test_state_that_is_passed_as_a_tree_is_a_tree():
    graphdef, params = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    def step(params, x):
        grads = jax.grad(lambda p: loss_of(nnx.merge(graphdef, p), x))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    traced = autopar.parallelize(step).trace(params, X)
    assert set(traced.trace.state_outputs.values()) == {0, 1}
    assert_equal(
        jax.device_get(autopar.parallelize(step, method=autopar.DataParallel())(params, X)),
        jax.device_get(jax.jit(step)(params, X)),
    )


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_state_that_is_merged_and_split_again_is_a_tree(method):
    model = Tied(nnx.Rngs(0))
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)))

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    wanted, got = jax.jit(step)(state, X), autopar.parallelize(step, method=method)(state, X)
    assert_equal(jax.device_get(got), jax.device_get(wanted))


def test_variable_of_a_state_that_is_changed_in_place_is_refused():
    _, params = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    def step(params, x):
        params["kernel"][...] = params["kernel"][...] + 1
        return jnp.mean(x)

    with pytest.raises(InvalidArgument, match=r"step changes a variable of an nnx.State in place.*pass the module"):
        autopar.parallelize(step, method=autopar.DataParallel())(params, X)
