"""Callbacks in a parallelized step: each runs where it can, as often as its data is there, and sees whole values."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.small_steps import assert_same, devices, mlp_batch, mlp_loss, mlp_params, sgd, two_stages

Show = Callable[..., None]

METHODS = {
    "pipeline": two_stages(),
    "remat": two_stages(remat=True),
    "zero bubble": two_stages(schedule="zero-bubble"),
    "one mesh": autopar.ShardParallel(mesh_shape=(2,), num_microbatches=2),
}


def shown(step: Any, method: Any) -> tuple[list[Any], list[Any]]:
    """Return what `step(show)` shows when parallelized and when plain, each sorted."""
    found: list[list[Any]] = []
    for run in (lambda f: autopar.parallelize(f, method=method, devices=devices()), jax.jit):
        values: list[Any] = []

        def show(name: str, *arrays: Any, values: list[Any] = values) -> None:
            values.append((name, *(round(float(a), 4) if a.ndim == 0 else a.shape for a in map(np.asarray, arrays))))

        result = run(step(lambda name, *a, show=show: jax.debug.callback(lambda *b: show(name, *b), *a)))(
            mlp_params(), mlp_batch()
        )
        jax.effects_barrier()
        found.append(sorted(values))
        if len(found) == 1:
            first = result
    assert_same(first, result)
    return found[0], found[1]


def activation(show: Show) -> Any:
    def loss(params, batch):
        h = jnp.tanh(batch[0] @ params[0]["w"])
        show("hidden", h)
        return mlp_loss(params[1:], (h, batch[1]))

    return sgd(loss)


def cotangent(show: Show) -> Any:
    @jax.custom_vjp
    def watched(x):
        return x

    def backward(_, g):
        show("cotangent", g)
        return (g,)

    watched.defvjp(lambda x: (x, None), backward)

    def loss(params, batch):
        return mlp_loss(params[1:], (watched(jnp.tanh(batch[0] @ params[0]["w"])), batch[1]))

    return sgd(loss)


def scanned(show: Show) -> Any:
    def layer(h, params):
        show("layer", h)
        return jnp.tanh(h @ params["w"] + params["b"]), None

    def loss(params, batch):
        h, _ = jax.lax.scan(layer, batch[0], jax.tree.map(lambda *p: jnp.stack(p), *params))
        return jnp.mean((h - batch[1]) ** 2)

    return sgd(loss)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("step", [activation, cotangent, scanned])
def test_callback_on_examples_runs_once_per_microbatch(step, method):
    mine, plain = shown(step, method)
    assert mine == [(name, (4, 4)) for name, _ in plain for _ in range(2)]


def on_the_loss(show: Show) -> Any:
    def step(params, batch):
        new, value = sgd(mlp_loss)(params, batch)
        show("loss", value)
        return new, value

    return step


def on_a_gradient(show: Show) -> Any:
    def step(params, batch):
        grads = jax.grad(mlp_loss)(params, batch)
        show("gradient of the first layer", grads[0]["w"])
        show("sum over the last layer", jnp.sum(grads[-1]["w"]))
        return grads

    return step


def on_the_loss_inside(show: Show) -> Any:
    def loss(params, batch):
        value = mlp_loss(params, batch)
        show("loss", value)
        return value

    return sgd(loss)


def on_parameters(show: Show) -> Any:
    def step(params, batch):
        show("parameters", params[1]["w"])
        show("nothing")
        return sgd(mlp_loss)(params, batch)

    return step


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("step", [on_the_loss, on_a_gradient, on_the_loss_inside, on_parameters])
def test_callback_on_values_of_the_whole_step_runs_once_and_sees_the_whole_value(step, method):
    mine, plain = shown(step, method)
    assert mine == plain


def test_callback_on_the_loss_and_examples_sees_the_whole_loss_with_every_microbatch():
    def step(show: Show) -> Any:
        def loss(params, batch):
            h = jnp.tanh(batch[0] @ params[0]["w"])
            value = mlp_loss(params[1:], (h, batch[1]))
            show("both", value, h)
            return value

        return sgd(loss)

    mine, ((_, value, _),) = shown(step, two_stages())
    assert mine == [("both", value, (4, 4))] * 2


def test_printing_in_the_model_prints_once_per_microbatch(capfd):
    def loss(params, batch):
        value = mlp_loss(params, batch)
        jax.debug.print("rows {rows}", rows=batch[0][:, :1].T)
        return value

    step = autopar.parallelize(sgd(loss), method=two_stages(), devices=devices())
    jax.block_until_ready(step(mlp_params(), mlp_batch()))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("rows") == 2


def pure(h: Any) -> Any:
    return h * jax.pure_callback(np.ones_like, jax.ShapeDtypeStruct(h.shape, h.dtype), jax.lax.stop_gradient(h))


def impure(h: Any) -> Any:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    jax.experimental.io_callback(lambda h: np.float32(0), shape, jax.lax.stop_gradient(h))
    return h


@pytest.mark.parametrize(("call", "primitive"), [(pure, "pure_callback"), (impure, "io_callback")])
def test_callback_whose_result_may_mix_examples_is_refused_with_microbatches(call, primitive):
    step = sgd(lambda params, batch: mlp_loss(params, (call(batch[0] @ params[0]["w"]), batch[1])))
    with pytest.raises(autopar.Unsupported, match=rf"`{primitive}` -> .* at .*test_callbacks.py.*num_microbatches=1"):
        autopar.parallelize(step, method=two_stages(), devices=devices()).trace(mlp_params(), mlp_batch()).plan()


@pytest.mark.parametrize("call", [pure, impure])
def test_callback_whose_result_may_mix_examples_runs_with_the_whole_batch(call):
    step = sgd(lambda params, batch: mlp_loss(params, (call(batch[0] @ params[0]["w"]), batch[1])))
    parallel = autopar.parallelize(step, method=two_stages(num_microbatches=1), devices=devices())
    assert_same(parallel(mlp_params(), mlp_batch()), jax.jit(step)(mlp_params(), mlp_batch()))


@pytest.fixture
def new_tokens() -> Iterator[None]:
    """JAX remembers the last execution with effects of every device, and raises its failure when the process ends."""
    yield
    for device in jax.devices():
        jax.jit(lambda x: jax.debug.callback(lambda x: None, x))(jax.device_put(0, device))
    jax.effects_barrier()


RAISING = METHODS | {
    "data parallel": autopar.DataParallel(),
    "search": autopar.Auto(num_stages=1, num_microbatches=1),
}


def refuse(loss: Any) -> None:
    raise ValueError(f"a loss of {loss}")


def refused(callback: Any) -> Any:
    def step(params, batch):
        new, loss = sgd(mlp_loss)(params, batch)
        callback(refuse, None, loss) if callback is jax.experimental.io_callback else callback(refuse, loss)
        return new, loss

    return step


@pytest.mark.parametrize("callback", [jax.experimental.io_callback, jax.debug.callback], ids=["io", "debug"])
@pytest.mark.parametrize("method", RAISING.values(), ids=RAISING)
def test_callback_that_raises_fails_the_call(method, callback):
    parallel = autopar.parallelize(refused(callback), method=method, devices=devices())
    for _ in range(2):  # not only the first time
        with pytest.raises(jax.errors.JaxRuntimeError, match="a loss of") as caught:
            parallel(mlp_params(), mlp_batch())
        assert isinstance(caught.value.__cause__, ValueError)


def test_callback_that_raises_on_one_device_fails_who_reads_the_loss_as_in_jit(new_tokens):
    for run in (jax.jit, lambda f: autopar.parallelize(f, devices=devices(1))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a loss of"):
            float(run(refused(jax.debug.callback))(mlp_params(), mlp_batch())[1])


def test_each_loaded_program_keeps_the_errors_of_its_own_calls():
    step = autopar.parallelize(refused(jax.debug.callback), method=autopar.DataParallel(), devices=devices())
    lowered = step.trace(mlp_params(), mlp_batch()).plan().lower()
    (_, first), (_, second), (_, none) = lowered.program.guarded(), lowered.program.guarded(), _unguarded().guarded()
    assert first is not None and second is not None and first is not second
    assert none is None


def _unguarded() -> Any:
    step = autopar.parallelize(sgd(mlp_loss), method=autopar.DataParallel(), devices=devices())
    return step.trace(mlp_params(), mlp_batch()).plan().lower().program


def test_timeline_of_a_step_whose_callback_raises_fails(tmp_path):
    parallel = autopar.parallelize(refused(jax.debug.callback), method=autopar.DataParallel(), devices=devices())
    compiled = parallel.trace(mlp_params(), mlp_batch()).plan().lower().compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="a loss of"):
        compiled.timeline(tmp_path / "timeline.json", mlp_params(), mlp_batch())


def called(function: Callable[..., Any], h: Any) -> Any:
    return jax.pure_callback(function, jax.ShapeDtypeStruct(h.shape, h.dtype), jax.lax.stop_gradient(h))


def refused_in_a_loop(h: Any) -> Any:
    return jax.lax.scan(lambda h, _: (h + called(refuse, h), None), h, length=2)[0]


def refused_under_a_rule(h: Any) -> Any:
    return autopar.sharding_rule(lambda h: called(refuse, h), "b d -> b d")(jax.lax.stop_gradient(h)) + h


def of_another_shape(h: Any) -> Any:
    return h + called(lambda h: np.zeros(3, np.float32), h)


def printed_as_an_integer(h: Any) -> Any:
    jax.debug.print("{:d}", h[0, 0])
    return h


WRONG = {
    refused_in_a_loop: "a loss of",
    refused_under_a_rule: "a loss of",
    of_another_shape: r"returned float32\[3\], but declares float32\[8,4\]",
    printed_as_an_integer: "format",
}


@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")
@pytest.mark.parametrize(("use", "message"), WRONG.items(), ids=[use.__name__ for use in WRONG])
def test_callback_that_raises_wherever_it_stands_fails_the_call(use, message):
    step = sgd(lambda params, batch: mlp_loss(params, (use(batch[0] @ params[0]["w"]), batch[1])))
    parallel = autopar.parallelize(step, method=autopar.ShardParallel(mesh_shape=(2,)), devices=devices())
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        parallel(mlp_params(), mlp_batch())


@pytest.mark.parametrize("method", [two_stages(), autopar.DataParallel()], ids=["pipeline", "data parallel"])
def test_a_step_whose_callback_raised_once_goes_on(method):
    seen: list[float] = []

    def refuse_the_first(loss: Any) -> None:
        seen.append(float(loss))
        if len(seen) == 1:
            raise ValueError("the first")

    def step(params, batch):
        new, loss = sgd(mlp_loss)(params, batch)
        jax.debug.callback(refuse_the_first, loss)
        return new, loss

    parallel = autopar.parallelize(step, method=method, devices=devices())
    with pytest.raises(jax.errors.JaxRuntimeError, match="the first"):
        parallel(mlp_params(), mlp_batch())
    assert_same(parallel(mlp_params(), mlp_batch()), jax.jit(sgd(mlp_loss))(mlp_params(), mlp_batch()))
    assert len(seen) == 2


def test_of_threads_that_call_one_step_those_fail_whose_callback_raised():
    def refuse_large(loss: Any) -> None:
        if loss > 1:
            raise ValueError(f"a loss of {loss}")

    def step(params, batch):
        new, loss = sgd(mlp_loss)(params, batch)
        jax.debug.callback(refuse_large, loss)
        return new, loss

    parallel = autopar.parallelize(step, method=autopar.DataParallel(), devices=devices())
    expected = jax.jit(sgd(mlp_loss))(mlp_params(), mlp_batch())
    x, y = mlp_batch()

    def call(number: int) -> None:
        if number % 2:
            with pytest.raises(jax.errors.JaxRuntimeError, match="a loss of"):
                parallel(mlp_params(), (x, y + 10))
        else:
            assert_same(parallel(mlp_params(), (x, y)), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(16)))
