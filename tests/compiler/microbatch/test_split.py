"""A microbatched step equals the step, for what train steps are made of; what cannot be split says why."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.split import evaluate_microbatched
from autopar.errors import InvalidArgument, NotSplittable
from tests.compiler.microbatch.microbatched import (
    BATCH,
    PARAMS,
    WIDTH,
    X,
    accumulations,
    assert_equal,
    evaluate_both,
    hidden,
    sgd,
    split,
)

pytestmark = pytest.mark.usefixtures("float64")


def mean_loss(p, batch):
    return jnp.mean(jnp.square(hidden(p, batch["x"]) @ p["c"]))


def sum_loss(p, batch):
    return jnp.sum(jnp.square(hidden(p, batch["x"])))


def masked_loss(p, batch):
    losses = jnp.sum(jnp.square(hidden(p, batch["series"])), axis=-1)
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def l2_loss(p, batch):
    return mean_loss(p, batch) + 0.1 * sum(jnp.sum(v**2) for v in jax.tree.leaves(p))


def with_metrics(p, batch):
    logits = hidden(p, batch["x"])
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
    return mean_loss(p, batch), {
        "accuracy": accuracy,
        "example": jnp.sum(logits, 1),
        "worst": jnp.max(logits),
    }


def centred_input(p, batch):
    x = batch["x"]
    x = (x - jnp.mean(x, axis=0)) / jnp.std(x, axis=0)
    return jnp.mean(jnp.square(hidden(p, x)))


def mixup(p, batch):
    order = jnp.argsort(batch["label"])
    return mean_loss(p, {"x": 0.7 * batch["x"] + 0.3 * batch["x"][order]})


def recurrent(p, batch):
    def cell(h, x):
        h = jnp.tanh(x @ p["a"] + h @ p["c"])
        return h, h * p["b"]

    zero = jnp.zeros_like(batch["series"][:, 0])
    last, outputs = jax.lax.scan(cell, zero, batch["series"].swapaxes(0, 1))
    return jnp.mean(last**2) + jnp.mean(outputs)


def remat_layers(p, batch):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w), None

    stacked = jnp.stack([p["a"], p["c"], p["a"]])
    return jnp.mean(jax.lax.scan(layer, batch["x"], stacked)[0] ** 2)


def remat_whole(p, batch):
    return jax.checkpoint(lambda p: masked_loss(p, batch) + 0.1 * jnp.sum(p["a"] ** 2))(p)


def branches(p, batch):
    x = jax.lax.cond(jnp.sum(p["b"]) > 0, lambda x: x @ p["a"], lambda x: jnp.sin(x), batch["x"])
    _, x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, x))
    return jnp.mean(jax.lax.stop_gradient(x) * hidden(p, batch["x"]))


def branch_on_sum(p, batch):
    return jax.lax.cond(sum_loss(p, batch) > 0, lambda: mean_loss(p, batch), lambda: 0.0)


def branch_of_sums(p, batch):
    return jax.lax.cond(jnp.sum(p["b"]) > 0, lambda: sum_loss(p, batch), lambda: jnp.sum(p["c"]) * 2.0)


def convolution(p, batch):
    kernel = jnp.reshape(p["a"].ravel(), (3, 3, 2, 2))
    y = jax.lax.conv_general_dilated(batch["image"], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    groups = y.reshape(*y.shape[:3], 2, 1)
    y = (groups - groups.mean((1, 2, 4), keepdims=True)) / (groups.std((1, 2, 4), keepdims=True) + 1e-5)
    pooled = jax.lax.reduce_window(y[..., 0], -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(pooled**2)


def depthwise(p, batch):
    kernel = jnp.reshape(p["a"].ravel()[:18], (3, 3, 1, 2))
    y = jax.lax.conv_general_dilated(
        batch["image"],
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )
    return jnp.mean(y**2)


def embedding(p, batch):
    return jnp.mean(jnp.square(p["table"][batch["tokens"]] @ p["a"]))


def own_label(p, batch):
    logits = jax.nn.log_softmax(hidden(p, batch["x"]))
    return -jnp.mean(logits[jnp.arange(BATCH if len(logits) == BATCH else len(logits)), batch["label"]])


def own_label_remat(p, batch):
    rows = jnp.arange(len(batch["x"]))
    return -jnp.mean(jax.checkpoint(lambda p: hidden(p, batch["x"])[rows[:, None], batch["label"][:, None]])(p))


def vmapped(p, batch):
    return jnp.mean(jax.vmap(lambda x, y: jnp.dot(hidden(p, x), p["b"])[None][0 * y])(batch["x"], batch["label"]))


def clipped_per_example(p, batch):
    grads = jax.vmap(lambda x: jax.grad(lambda w: jnp.sum(hidden({**p, "a": w}, x)))(p["a"]))(batch["x"])
    norms = jnp.sqrt(jnp.sum(grads**2, axis=(1, 2), keepdims=True))
    return jnp.sum(jnp.mean(jax.lax.stop_gradient(grads / jnp.maximum(norms, 1)), 0) * p["a"])


def chunked(p, batch):
    """A scan that sums a loss and counts what is in it."""

    def chunk(total, xs):
        x, mask = xs
        loss = jnp.sum(jnp.square(hidden(p, x)).sum(-1) * mask)
        return (total[0] + loss, total[1] + jnp.sum(mask)), None

    xs = (batch["series"].swapaxes(0, 1), batch["mask"].T)
    (loss, count), _ = jax.lax.scan(chunk, (0.0, 0.0), xs)
    return loss / count


def reshaped(p, batch):
    rows = batch["series"].reshape(-1, WIDTH)
    y = hidden(p, rows).reshape(-1, 5, 2, WIDTH // 2)
    return jnp.mean(jnp.cumsum(y, axis=1) ** 2) + jnp.mean(jnp.sort(y, axis=-1)[..., 0])


LOSSES = [
    mean_loss,
    sum_loss,
    masked_loss,
    l2_loss,
    centred_input,
    mixup,
    recurrent,
    remat_layers,
    remat_whole,
    branches,
    branch_on_sum,
    branch_of_sums,
    convolution,
    depthwise,
    embedding,
    own_label,
    own_label_remat,
    vmapped,
    clipped_per_example,
    chunked,
    reshaped,
]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_microbatched_step_equals_plain_step(loss, microbatches):
    got, want = evaluate_both(sgd(loss), PARAMS, X, microbatches=microbatches)
    assert_equal(got, want)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_auxiliary_outputs_are_those_of_the_full_batch(microbatches):
    got, want = evaluate_both(sgd(with_metrics, has_aux=True), PARAMS, X, microbatches=microbatches)
    assert got[1][1]["example"].shape == (BATCH,)
    assert_equal(got, want)


def test_bfloat16_step_is_equal_up_to_its_rounding():
    def loss(p, batch):
        p, x = jax.tree.map(lambda v: v.astype(jnp.bfloat16), (p, batch["x"]))
        return jnp.mean(jnp.square(hidden(p, x) @ p["c"]).astype(jnp.float32))

    got, want = evaluate_both(sgd(loss), jax.tree.map(jnp.float32, PARAMS), X)
    assert_equal(got, want, tolerance=2e-2)


def test_metrics_outside_of_the_gradient_are_those_of_the_full_batch():
    def step(params, batch):
        new, loss = sgd(mean_loss)(params, batch)
        logits = hidden(new, batch["x"])
        return new, (loss, jnp.sqrt(jnp.mean(logits**2)), jnp.all(logits > -2), jnp.any(logits > 0.5), logits)

    got, want = evaluate_both(step, PARAMS, X)
    assert_equal(got, want)


def test_gradients_are_accumulated_once_after_the_last_linear_equation():
    step, _ = split(sgd(mean_loss), PARAMS, X)
    jaxpr = jc.open_jaxpr(step.jaxpr)[0]
    phases = [jc.ad_phase(e) for e in jaxpr.eqns if e.primitive.name != "accumulate"]
    assert accumulations(step) == ["sum"] * 4  # a, b, c and the loss; the unused table has no gradient
    assert "backward" in phases
    shapes = sorted(e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "accumulate")
    assert shapes == [(), (WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH)]


def test_inputs_say_how_they_are_given():
    step, _ = split(sgd(masked_loss), PARAMS, X)
    kinds = [(i.kind, i.leaf) for i in step.inputs]
    names = [*sorted(PARAMS), *sorted(X)]
    assert kinds[: len(PARAMS)] == [("whole", i) for i in range(len(PARAMS))]
    assert kinds[len(PARAMS) : len(names)] == [("microbatch", i) for i in range(len(PARAMS), len(names))]
    assert kinds[len(names) :] == [("whole", names.index("mask"))]  # the count; no draw, so no index


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "legacy"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("where", ["plain", "scan", "remat"])
def test_dropout_masks_are_those_of_the_full_batch(key, microbatches, where):
    def layer(x, key):
        return x * jax.random.bernoulli(key, 0.6, x.shape), None

    def loss(p, batch, key):
        keys = jax.random.split(key, 3)
        x = hidden(p, batch["x"])
        if where == "scan":
            x, _ = jax.lax.scan(layer, x, keys)
        elif where == "remat":
            x = jax.checkpoint(lambda x: jnp.sin(layer(x, keys[0])[0]))(x)
        else:
            x, _ = layer(x, keys[0])
        return jnp.mean(x**2), jax.random.uniform(keys[1], (len(x),))

    def step(state, batch):
        params, rng = state
        rng, use = jax.random.split(rng)
        out, grads = jax.value_and_grad(loss, has_aux=True)(params, batch, use)
        return (jax.tree.map(lambda p, g: p - g, params, grads), rng), out

    got, want = evaluate_both(step, (PARAMS, key(3)), X, microbatches=microbatches)
    assert_equal(got, want)


def test_noise_per_example_from_split_keys_is_that_of_the_full_batch():
    def step(key, batch):
        key, *rest = jax.random.split(key, len(batch["x"]) + 1)
        noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(jnp.stack(rest))
        return key, jnp.sum(noise * batch["x"], axis=-1)

    def proportional(key, batch):
        keys = jax.random.split(key, len(batch["x"]))
        noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(keys)
        return jax.random.split(key)[0], jnp.sum(noise * batch["x"], axis=-1)

    assert_equal(*evaluate_both(proportional, jax.random.key(0), X))
    with pytest.raises(NotSplittable, match="structure depends on the batch size"):
        split(step, jax.random.key(0), X)


def test_random_per_microbatch_draws_other_numbers_in_each_microbatch():
    def step(key, batch):
        return jax.random.uniform(key, batch["x"].shape)

    def drawn(**options):
        microbatched, leaves = split(step, jax.random.key(0), X, microbatches=2, **options)
        return evaluate_microbatched(microbatched, leaves)[0], microbatched

    exact, _ = drawn()
    own, microbatched = drawn(random="per_microbatch")
    halves = np.split(np.asarray(own), 2)
    assert not np.allclose(halves[0], halves[1])
    assert not np.allclose(own, exact)
    assert "shape=(4, 6)" in str(microbatched.jaxpr)


def test_adversarial_step_takes_two_rounds():
    def generate(g, z):
        return jnp.tanh(z @ g)

    def judge(d, x):
        return jnp.tanh(x @ d["a"]) @ d["b"]

    def step(state, batch):
        g, d, key = state
        key, use = jax.random.split(key)
        z = jax.random.normal(use, batch["x"].shape)

        def critic_loss(d):
            return jnp.mean(judge(d, generate(g, z))) - jnp.mean(judge(d, batch["x"]))

        loss, grads = jax.value_and_grad(critic_loss)(d)
        d = jax.tree.map(lambda p, g: p - 0.1 * g, d, grads)
        g_loss, g_grad = jax.value_and_grad(lambda g: -jnp.mean(judge(d, generate(g, z))))(g)
        return (g - 0.1 * g_grad, d, key), (loss, g_loss)

    state = (PARAMS["c"], {"a": PARAMS["a"], "b": PARAMS["b"]}, jax.random.key(1))
    assert_equal(*evaluate_both(step, state, X))


def batch_norm(p, batch):
    h = batch["x"] @ p["a"]
    mean, var = jnp.mean(h, axis=0), jnp.var(h, axis=0)
    h = (h - mean) * jax.lax.rsqrt(var + 1e-5) * p["b"]
    return jnp.mean(jnp.square(h @ p["c"])), {"mean": mean, "var": var}


def test_batch_statistics_per_microbatch_equal_a_loop_that_averages():
    step = sgd(batch_norm, has_aux=True)
    microbatched, leaves = split(step, PARAMS, X, batch_statistics="per_microbatch")
    parts = [step(PARAMS, jax.tree.map(lambda v, m=m: v[2 * m : 2 * m + 2], X)) for m in range(4)]
    want = jax.tree.map(lambda *v: sum(v) / 4, *parts)
    got = jax.tree.unflatten(jax.tree.structure(want), evaluate_microbatched(microbatched, leaves))
    assert_equal(got, want)
    assert "mean" in accumulations(microbatched)


def test_batch_statistics_of_one_microbatch_are_exact():
    assert_equal(*evaluate_both(sgd(batch_norm, has_aux=True), PARAMS, X, microbatches=1))


def test_batch_normalization_waits_for_the_statistics_of_the_whole_batch():
    assert_equal(*evaluate_both(sgd(batch_norm, has_aux=True), PARAMS, X))


def test_batch_normalization_in_a_loop_is_refused_with_its_line():
    def repeated(p, batch):
        body = lambda h, _: ((h - jnp.mean(h, axis=0)) * p["b"], None)  # noqa: E731
        return jnp.sum(jnp.square(jax.lax.scan(body, batch["x"] @ p["a"], None, length=3)[0]))

    with pytest.raises(NotSplittable) as error:
        split(sgd(repeated), PARAMS, X)
    message = str(error.value)
    assert "reduce_sum" in message
    assert "test_split.py" in message and "repeated" in message
    assert "only after the loop" in message and "num_microbatches=1" in message


def test_a_line_is_named_once_for_equations_that_stand_on_it():
    def repeated(p, batch):
        body = lambda h, _: (h + jnp.var(h, axis=0), None)  # noqa: E731
        return jnp.sum(jnp.square(jax.lax.scan(body, batch["x"] @ p["a"], None, length=3)[0]))

    with pytest.raises(
        NotSplittable, match=r"`sub` -> .* at .*test_split\.py.* needs `reduce_sum` -> \S+ over"
    ) as error:
        split(sgd(repeated), PARAMS, X)
    assert str(error.value).count("test_split.py") == 1


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does():
    with pytest.raises(InvalidArgument, match=r"8 rows.*3 microbatches.*nearest is 2"):
        split(sgd(mean_loss), PARAMS, X, microbatches=3)


def test_groups_of_examples_that_do_not_divide_are_refused():
    def loss(p, batch):
        return jnp.mean(jnp.square(hidden(p, batch["x"]).reshape(-1, 4, WIDTH).mean(1)))

    assert_equal(*evaluate_both(sgd(loss), PARAMS, X, microbatches=2))
    with pytest.raises(NotSplittable, match=r"An axis of 2, .* 4 microbatches"):
        split(sgd(loss), PARAMS, X, microbatches=4)


def test_an_accumulation_is_never_lowered():
    step, leaves = split(sgd(mean_loss), PARAMS, X)
    with pytest.raises(AssertionError, match="stands between microbatches"):
        jax.jit(jc.jaxpr_as_fun(step.jaxpr)).lower(
            *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jc.open_jaxpr(step.jaxpr)[0].invars]
        )
    assert leaves


def test_source_lines_and_scopes_survive():
    def loss(p, batch):
        with jax.named_scope("block"):
            return mean_loss(p, batch)

    step, _ = split(sgd(loss), PARAMS, X)
    eqns = jc.open_jaxpr(step.jaxpr)[0].eqns
    assert {jc.ad_phase(e) for e in eqns} == {None, "forward", "backward"}
    assert any("block" in jc.scope_of(e) for e in eqns)
    assert all("tests/" in jc.source_line(e) for e in eqns)
