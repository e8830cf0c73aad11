"""Each primitive keeps the examples of a batch apart, reduces over them, or is refused by name and line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.microbatch.split import evaluate_microbatched
from autopar.compiler.pipeline.phases import find_phases
from autopar.errors import NotSplittable, Unsupported
from tests.compiler.microbatch.microbatched import (
    PARAMS,
    WIDTH,
    X,
    accumulations,
    assert_equal,
    evaluate_both,
    hidden,
    split,
)

pytestmark = pytest.mark.usefixtures("float64")

W = jnp.asarray(np.linspace(0.5, 2.0, 6))
V = np.random.default_rng(1).normal(size=(8, 6))

APART = {
    "elementwise": lambda x: jnp.sin(x) * 2 + jnp.where(x > 0, x, jnp.exp(x)),
    "transpose": lambda x: x.T,
    "reshape and back": lambda x: x.reshape(-1),
    "expand": lambda x: x[:, None, :, None],
    "reduce features": lambda x: jnp.stack([x.sum(1), x.max(1), x.min(1), x.prod(1)]),
    "argmax of features": lambda x: jnp.argmax(x, axis=1),
    "cumulate features": lambda x: jnp.cumsum(x, 1) + jax.lax.cummax(x, 1) + jnp.cumprod(x, 1),
    "sort features": lambda x: jnp.sort(x, axis=1),
    "largest features": lambda x: jax.lax.top_k(x, 3)[0],
    "reverse features": lambda x: jnp.flip(x, axis=1),
    "slice features": lambda x: x[:, 1:5:2],
    "pad features": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
    "append features": lambda x: jnp.concatenate([x, x * 2], axis=1),
    "split features": lambda x: jnp.split(x, 3, axis=1)[1],
    "write features": lambda x: x.at[:, 2].set(0.0).at[:, 1].add(x[:, 0]),
    "update features": lambda x: jax.lax.dynamic_update_slice(x, x[:, :2] * 3, (0, 3)),
    "stack, repeat and take apart": lambda x: jnp.tile(jnp.stack(jnp.unstack(x, axis=1), axis=0), (2, 1)),
    "matmul": lambda x: x @ jnp.ones((6, 3)),
    "batched matmul": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "factorize": lambda x: jnp.linalg.cholesky(jnp.eye(6) * 9 + jnp.einsum("bi,bj->bij", x, x)),
    "solve with one matrix": lambda x: jax.scipy.linalg.solve_triangular(jnp.tri(6) + jnp.eye(6), x.T, lower=True).T,
    "fourier": lambda x: jnp.abs(jnp.fft.rfft(x, axis=1)),
    "window": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (1, 2), "VALID"),
    "look up": lambda x: jnp.arange(5.0)[jnp.clip(jnp.int32(x), 0, 4)],
    "look up own": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
    "own number": lambda x: x[jnp.arange(x.shape[0]), jnp.argmax(x, axis=1)],
    "write own number": lambda x: x.at[jnp.arange(x.shape[0]), jnp.argmin(x, axis=1)].mul(2.0),
    "number of the row": lambda x: x * jnp.arange(x.shape[0])[:, None],
    "identity of the row": lambda x: x.sum(1) + jnp.linspace(0, 1, x.shape[0]),
    "vmap of a loop": lambda x: jax.vmap(lambda r: jax.lax.fori_loop(0, 3, lambda _, c: c * r, r))(x),
    "barrier": lambda x: jax.lax.optimization_barrier((x, jnp.float32(2.0)))[0],
}

REDUCED = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "all": lambda x: (x > -1).all(0),
    "any": lambda x: (x > 1).any(0),
    "contract": lambda x: x.T @ x,
    "histogram": lambda x: jnp.zeros(6).at[jnp.argmax(x, axis=1)].add(x[:, 0]),
    "histogram onto state": lambda x: jnp.ones(6).at[jnp.argmax(x, axis=1)].add(x[:, 0]),
    "largest per class": lambda x: jnp.ones(6).at[jnp.argmax(x, axis=1)].max(x[:, 0]),
    "segment sum": lambda x: jax.ops.segment_sum(x, jnp.argmax(x, axis=1), 6),
    "sum in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i * x.sum(0), jnp.ones(6)),
    "count and sum": lambda x: jnp.stack([x.sum(), (x > 0).sum().astype(x.dtype)]),
}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", APART)
def test_what_keeps_the_examples_apart_gives_a_slice_of_the_result(name, microbatches):
    step = lambda w, x: APART[name](w * x)  # noqa: E731
    got, want = evaluate_both(step, W, V, microbatches=microbatches)
    assert_equal(got, want)
    microbatched, _ = split(step, W, V, microbatches=microbatches)
    assert accumulations(microbatched) == ["concatenate"]


@pytest.mark.parametrize("name", REDUCED)
def test_what_reduces_over_the_examples_is_accumulated(name):
    step = lambda w, x: REDUCED[name](w * x)  # noqa: E731
    got, want = evaluate_both(step, W, V)
    assert_equal(got, want)
    microbatched, _ = split(step, W, V)
    assert "concatenate" not in accumulations(microbatched)


@pytest.mark.parametrize("name", REDUCED)
def test_what_depends_on_the_batch_alone_is_taken_of_the_whole_batch(name):
    got, want = evaluate_both(lambda w, x: (w, REDUCED[name](x)), W, V)
    assert_equal(got, want)
    microbatched, _ = split(lambda w, x: (w, REDUCED[name](x)), W, V)
    assert accumulations(microbatched) == []
    assert [given.kind for given in microbatched.inputs] == ["whole", "microbatch", "whole"]


@pytest.mark.parametrize("draw", [jax.random.permutation, jax.random.choice], ids=lambda f: f.__name__)
def test_a_shuffle_of_the_batch_is_that_of_the_full_batch(draw):
    def step(state, x):
        w, key = state
        order = draw(key, x.shape[0], (x.shape[0],)) if draw is jax.random.choice else draw(key, x.shape[0])
        return w * x[order]

    assert_equal(*evaluate_both(step, (W, jax.random.key(2)), V))


def test_statistics_of_several_layers_are_taken_per_microbatch():
    def step(w, x):
        for _ in range(3):
            h = jnp.tanh(w * x)
            scale = jax.lax.rsqrt(jnp.mean(h**2, axis=0) + jnp.max(jnp.abs(h)))
            x = h * scale
        return x, scale

    microbatched, leaves = split(step, W, V, batch_statistics="per_microbatch")
    assert accumulations(microbatched) == ["concatenate", "mean"]
    assert_equal(*evaluate_both(step, W, V))
    rows, scale = evaluate_microbatched(microbatched, leaves)
    parts = [step(W, V[2 * m : 2 * m + 2]) for m in range(4)]
    assert_equal(rows, jnp.concatenate([p[0] for p in parts]))
    assert_equal(scale, sum(p[1] for p in parts) / 4)


def test_a_statistic_that_meets_an_accumulated_value_is_accumulated_too():
    def step(w, x):
        h = w * x
        mean = h.mean(0)
        return (h - mean).sum(1), jnp.sqrt(jnp.max(h)) * mean

    microbatched, leaves = split(step, W, V, batch_statistics="per_microbatch")
    assert accumulations(microbatched).count("mean") == 1
    assert_equal(evaluate_microbatched(microbatched, leaves)[1], step(W, V)[1])


def test_a_condition_on_the_batch_waits_for_all_microbatches():
    def step(w, x):
        h = w * x
        return jax.lax.cond(jnp.sum(h) > 0, lambda: jnp.sum(h**2), lambda: jnp.sum(h)), w + 1

    for sign in (1, -1):
        assert_equal(*evaluate_both(step, sign * W, V))


def test_a_condition_on_the_state_is_taken_by_every_microbatch():
    def step(w, x):
        return jax.lax.cond(w[0] > 0, lambda: (w * x).sum(), lambda: jnp.float64(3.0)), w + 1

    for sign in (1, -1):
        assert_equal(*evaluate_both(step, sign * W, V))


def mean_loss(p, batch):
    return jnp.mean(jnp.square(hidden(p, batch["x"]) @ p["c"]))


def contrastive(p, batch):
    h = hidden(p, batch["x"])
    return jnp.mean(jax.nn.logsumexp(h @ h.T, axis=1))


def sorted_batch(p, batch):
    return jnp.mean(jnp.sort(hidden(p, batch["x"]), axis=0)[..., 0])


def shifted(p, batch):
    h = hidden(p, batch["x"])
    return jnp.mean(h[1:] * h[:-1])


def picked(p, batch):
    return jnp.mean(hidden(p, batch["x"])[batch["label"]])


def grouped_by_place(p, batch):
    h = hidden(p, batch["x"])
    sizes = jnp.full(2, h.shape[0] // 2, jnp.int32)
    return jnp.mean(jax.lax.ragged_dot(h, jnp.stack([p["c"], 2 * p["c"]]), sizes) ** 2)


def loop_over_examples(p, batch):
    return jax.lax.scan(lambda c, x: (c / 2 + jnp.sum(hidden(p, x)), None), 0.0, batch["x"])[0]


def loop_until_all(p, batch):
    start = jax.lax.stop_gradient(hidden(p, batch["x"]))
    return mean_loss(p, batch) + jnp.sum(jax.lax.while_loop(lambda x: jnp.any(x > 0.1), lambda x: x / 2, start))


def callback(p, batch):
    h = hidden(p, batch["x"])
    return jnp.mean(jax.pure_callback(lambda v: v, h, jax.lax.stop_gradient(h)))


def time_first(p, batch):
    return jnp.mean(hidden(p, batch["series"].swapaxes(0, 1).reshape(-1, WIDTH)) ** 2)


def pairs_in_a_condition(p, batch):
    h = hidden(p, batch["x"])
    return jnp.mean(jax.lax.cond(p["b"][0] > 0, lambda: h @ h.T, lambda: h @ (2 * h).T))


def neighbours(p, batch):
    return jnp.mean(jnp.tanh(hidden(p, batch["x"])[::-1] @ p["c"]) ** 2)


MIXED_WITHOUT_PARAMETERS = [contrastive, sorted_batch, shifted, picked, neighbours]


@pytest.mark.parametrize("loss", MIXED_WITHOUT_PARAMETERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("microbatches", [2, 4])
def test_what_mixes_the_examples_without_parameters_is_taken_of_all_of_them(loss, microbatches):
    def step(p, batch):
        value, grads = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    assert_equal(*evaluate_both(step, PARAMS, X, microbatches=microbatches))


def test_pairs_of_examples_take_one_round_forward_and_one_backward():
    microbatched, _ = split(lambda p, batch: jax.grad(contrastive)(p, batch), PARAMS, X)
    assert find_phases(microbatched).num_rounds == 2


REFUSED = [
    (pairs_in_a_condition, NotSplittable, "pairs of the batch's examples"),
    (grouped_by_place, NotSplittable, "sorts into groups the batch"),
    (loop_over_examples, NotSplittable, "loop over the batch's examples.* Compute all of them at once"),
    (loop_until_all, NotSplittable, "repeats until a condition on the batch's examples holds"),
    (callback, Unsupported, "no rule says"),
]


@pytest.mark.parametrize(("loss", "error", "found"), REFUSED, ids=lambda f: getattr(f, "__name__", ""))
def test_what_mixes_the_examples_is_refused_by_name_and_line(loss, error, found):
    forward = lambda p, batch: (p, loss(p, batch))  # noqa: E731
    with pytest.raises(error, match=found) as raised:
        split(forward, PARAMS, X)
    assert f"({loss.__name__}" in str(raised.value)
    assert "num_microbatches=1" in str(raised.value)


@pytest.mark.parametrize("loss", [c[0] for c in REFUSED if c[0] is not callback], ids=lambda f: f.__name__)
def test_what_mixes_the_examples_runs_as_one_microbatch(loss):
    got, want = evaluate_both(lambda p, batch: (p, loss(p, batch)), PARAMS, X, microbatches=1)
    assert_equal(got, want)


def test_a_program_that_depends_on_the_batch_size_is_refused():
    def loss(p, batch):
        return sum(jnp.sum(hidden(p, row)) for row in batch["x"])

    with pytest.raises(NotSplittable, match="structure depends on the batch size"):
        split(loss, PARAMS, X)
