"""The batch is found from what a step does, and where nobody can tell it, that is said."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import InvalidArgument, ReplicatedWarning
from tests.small_steps import gan_step

ROWS, WIDTH, CLASSES = 8, 6, 3


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape):
    return zeros(*shape, dtype=jnp.int32)


PARAMS = {"a": zeros(WIDTH, 16), "b": zeros(16, CLASSES)}
X, Y = zeros(ROWS, WIDTH), zeros(ROWS, CLASSES)


def predict(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def loss(p, x, y):
    return jnp.mean((predict(p, x) - y) ** 2)


def updated(p, of_params):
    value, grads = jax.value_and_grad(of_params)(p)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value


def optimizer_second(params, state, batch):
    tx = optax.adam(0.1)
    value, grads = jax.value_and_grad(loss)(params, *batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def bare_array(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def gradients_and_key(params, x, y, key):
    kept = jax.random.bernoulli(key, 0.5, (x.shape[0], 16))
    grads = jax.grad(lambda p: jnp.mean((jnp.where(kept, jnp.tanh(x @ p["a"]), 0) @ p["b"] - y) ** 2))(params)
    return grads, jax.random.split(key)[0]


def counted(params, counts, x, labels):
    """Counts examples by label and prediction, in state that is one array."""
    outcome = updated(params, lambda p: optax.softmax_cross_entropy_with_integer_labels(predict(p, x), labels).mean())
    return outcome, counts.at[labels, predict(params, x).argmax(-1)].add(1)


def picked_labels(params, batch):
    def of_params(p):
        scores = jax.nn.log_softmax(predict(p, batch["x"]))
        return -jnp.mean(scores[jnp.arange(len(scores)), batch["label"]]) * batch["scale"]

    return updated(params, of_params)


def attention(params, frozen, tokens, positions):
    def of_params(p):
        h = frozen["table"][tokens] + jnp.sin(positions)[:, None]
        mask = jnp.where(positions[:, None] >= positions[None, :], 0, -1e9)
        h = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h @ p["q"], h) + mask) @ h
        scores = jax.nn.log_softmax(h[:, :-1] @ p["out"])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

    return updated(params, of_params)


def weights_of_positions(params, x, weights):
    return updated(params, lambda p: jnp.sum(jnp.mean(predict(p, x) ** 2, axis=(0, 2)) * weights))


def teacher(params, teacher, x):
    return updated(params, lambda p: loss(p, x, predict(teacher, x)))


def evaluate(params, x, label):
    scores = predict(params, x)
    return {"scores": scores, "accuracy": jnp.mean(scores.argmax(-1) == label)}


def batch_normalized(state, x, y):
    params, mean = state["params"], state["mean"]

    def of_params(p):
        h = x @ p["a"]
        center = jnp.mean(h, 0)
        return jnp.mean((jnp.tanh(h - center) @ p["b"] - y) ** 2), center

    (value, center), grads = jax.value_and_grad(of_params, has_aux=True)(params)
    params = jax.tree.map(lambda a, g: a - g, params, grads)
    return {"params": params, "mean": 0.9 * mean + 0.1 * center}, value


def accumulated(params, x, y):
    def one(total, part):
        value, grads = jax.value_and_grad(loss)(params, *part)
        return jax.tree.map(jnp.add, total, grads), value

    zero = jax.tree.map(jnp.zeros_like, params)
    grads, values = jax.lax.scan(one, zero, (x.reshape(2, 4, WIDTH), y.reshape(2, 4, CLASSES)))
    return jax.tree.map(lambda a, g: a - g, params, grads), values


def recurrent(params, x, start):
    def of_params(p):
        _, states = jax.lax.scan(lambda h, now: (jnp.tanh(now @ p["a"] + h),) * 2, start, x.swapaxes(0, 1))
        return jnp.mean((states @ p["b"]) ** 2)

    return updated(params, of_params)


def penalized(params, x, y):
    return {"loss": loss(params, x, y) + 1e-3 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))}


def steps_of_training(params, x, y):
    return jax.lax.scan(lambda p, part: updated(p, lambda p: loss(p, *part)), params, (x, y))


def shuffled(params, x, y, key):
    def epoch(p, key):
        order = jax.random.permutation(key, x.shape[0])
        parts = [value[order].reshape(2, 4, -1) for value in (x, y)]
        return jax.lax.scan(lambda p, part: updated(p, lambda p: loss(p, *part)), p, tuple(parts))

    return jax.lax.scan(epoch, params, jax.random.split(key, 2))


def key_of_each_example(params, x, keys):
    def one(p, x, key):
        return jnp.sum(predict(p, x + jax.random.normal(key, x.shape)))

    return updated(params, lambda p: jnp.mean(jax.vmap(one, (None, 0, 0))(p, x, keys)))


def views(times):
    def step(params, x, y):
        rows, labels = jnp.tile(x, (times, 1)), jnp.tile(y, (times, 1))
        return updated(params, lambda p: loss(p, rows, labels))

    return step


def joined_halves(params, real, fake):
    x = jnp.concatenate([real, jnp.tanh(fake)])
    label = jnp.concatenate([jnp.ones(len(real)), jnp.zeros(len(fake))])
    return updated(params, lambda p: jnp.mean((predict(p, x) - label[:, None]) ** 2))


def preferred(params, reference, chosen, rejected):
    """Pairs of sentences, joined for one pass through the model and through a frozen one (DPO)."""

    def scores(p):
        both = jnp.concatenate([chosen, rejected])
        return jnp.sum(jnp.tanh(p["a"][both]) @ p["b"], (1, 2))

    def of_params(p):
        better, worse = jnp.split(scores(p) - scores(reference), 2)
        return -jnp.mean(jax.nn.log_sigmoid(better - worse))

    return updated(params, of_params)


def compared(params, x, y):
    """Every example of two sources against all others (SimCLR)."""

    def of_params(p):
        codes = predict(p, jnp.concatenate([x, y]))
        return jnp.mean(jax.nn.logsumexp(codes @ codes.T, 1))

    return updated(params, of_params)


def one_by_one(params, x, y):
    """A loop over the examples, in which the backward pass carries the gradients of the parameters on."""
    return updated(params, lambda p: jnp.mean(jax.lax.map(lambda of_one: loss(p, *of_one), (x, y))))


def four_by_four(params, x, y):
    return updated(params, lambda p: jnp.mean(jax.lax.map(lambda of_one: loss(p, *of_one), (x, y), batch_size=4)))


def summed_up(params, x, y):
    def total(p):
        return jax.lax.scan(lambda so_far, of_one: (so_far + loss(p, *of_one), None), 0.0, (x, y))[0]

    return updated(params, lambda p: total(p) / len(x))


def carried_on(params, x, y):
    def last(p):
        return jax.lax.scan(lambda before, of_one: (0.5 * before + loss(p, *of_one), None), 0.0, (x, y))[0]

    return updated(params, last)


def keyword_only(params, *, images, labels, step):
    return updated(params, lambda p: loss(p, images, labels) * step)[0], step + 1


GAN = {k: [{"w": zeros(4, 4), "b": zeros(4)}] for k in ("generator", "critic")}
KEY = jax.eval_shape(lambda: jax.random.key(0))
FOUND = {
    "the optimizer before the batch": (
        optimizer_second,
        (PARAMS, jax.eval_shape(optax.adam(0.1).init, PARAMS), (X, Y)),
        ["batch.0", "batch.1"],
    ),
    "one array of the batch's shape": (bare_array, (zeros(8, 8), zeros(8, 8)), ["x"]),
    "an array that x never meets": (lambda w, x: w + jnp.mean(x), (zeros(4, 8), zeros(16, 8)), ["x"]),
    "gradients, and a key": (gradients_and_key, (PARAMS, X, Y, KEY), ["x", "y"]),
    "gradients, and an old key": (gradients_and_key, (PARAMS, X, Y, zeros(2, dtype=jnp.uint32)), ["x", "y"]),
    "a scalar and what nobody reads": (
        picked_labels,
        (PARAMS, {"x": X, "label": integers(ROWS), "scale": zeros(), "number": integers(ROWS)}),
        ["batch.label", "batch.number", "batch.x"],
    ),
    "examples that are counted": (counted, (PARAMS, integers(CLASSES, CLASSES), X, integers(ROWS)), ["x", "labels"]),
    "as many positions as examples": (
        attention,
        ({"q": zeros(8, 8), "out": zeros(8, 50)}, {"table": zeros(50, 8)}, integers(6, 6), zeros(6)),
        ["tokens"],
    ),
    "weights of as many positions": (weights_of_positions, (PARAMS, zeros(8, 8, WIDTH), zeros(8)), ["x"]),
    "a frozen teacher": (teacher, (PARAMS, {"a": zeros(WIDTH, 32), "b": zeros(32, CLASSES)}, X), ["x"]),
    "no gradient": (evaluate, (PARAMS, X, integers(ROWS)), ["x", "label"]),
    "batch statistics": (batch_normalized, ({"params": PARAMS, "mean": zeros(16)}, X, Y), ["x", "y"]),
    "accumulated in the step": (accumulated, (PARAMS, X, Y), ["x", "y"]),
    "a loop over time": (recurrent, (PARAMS, zeros(ROWS, 5, WIDTH), zeros(ROWS, 16)), ["x", "start"]),
    "parameters that only a penalty reads": (penalized, ({**PARAMS, "unused": zeros(16, 2)}, X, Y), ["x", "y"]),
    "steps of training": (steps_of_training, (PARAMS, zeros(4, ROWS, WIDTH), zeros(4, ROWS, CLASSES)), ["x", "y"]),
    "one example after the other": (one_by_one, (PARAMS, X, Y), ["x", "y"]),
    "four examples after four others": (four_by_four, (PARAMS, X, Y), ["x", "y"]),
    "one example after the other, summed up": (summed_up, (PARAMS, X, Y), ["x", "y"]),
    "rounds that wait for each other": (carried_on, (PARAMS, X, Y), []),
    "shuffled anew": (shuffled, (PARAMS, X, Y, KEY), ["x", "y"]),
    "a key for each example": (key_of_each_example, (PARAMS, X, zeros(ROWS, dtype=KEY.dtype)), ["x", "keys"]),
    "an old key for each example": (key_of_each_example, (PARAMS, X, zeros(ROWS, 2, dtype=jnp.uint32)), ["x", "keys"]),
    "two sources": (gan_step, (GAN, (zeros(8, 4), zeros(8, 4))), ["batch.0", "batch.1"]),
    "pairs joined, and tables of another model": (
        preferred,
        (PARAMS, PARAMS, integers(ROWS, 5), integers(ROWS, 5)),
        ["chosen", "rejected"],
    ),
    "two sources joined and compared": (compared, (PARAMS, X, X), ["x", "y"]),
    "two sources joined": (joined_halves, (PARAMS, X, X), ["real", "fake"]),
    "two views of each example": (views(2), (PARAMS, X, Y), ["x", "y"]),
    "many views of each example": (views(9), (PARAMS, X, Y), ["x", "y"]),
}


@pytest.mark.parametrize(("step", "args", "names"), FOUND.values(), ids=FOUND)
def test_the_batch_is_found(step, args, names):
    assert batch_of(autopar.parallelize(step).trace(*args).trace) == names


def pairs(params, images, texts):
    """Every image against every text (SigLIP), summed over the texts first."""

    def pairwise(p):
        scores = jnp.tanh(images @ p["a"]) @ jnp.tanh(texts @ p["a"]).T
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid((2 * jnp.eye(len(scores)) - 1) * scores), -1))

    return updated(params, pairwise)


def of_positions(params, x, positions):
    return updated(params, lambda p: jnp.mean(predict(p, x * positions[0]) ** 2))


def test_inputs_of_as_many_rows_are_in_the_batch_only_where_no_other_batch_can_be_without_them():
    assert batch_of(autopar.parallelize(pairs).trace(PARAMS, X, X).trace) == ["images", "texts"]
    assert batch_of(autopar.parallelize(pairs, unbatched="texts").trace(PARAMS, X, X).trace) == ["images"]
    assert batch_of(autopar.parallelize(of_positions).trace(PARAMS, X, zeros(ROWS)).trace) == ["x"]


def batch_of(trace):
    return [trace.inputs[i].name for i in trace.batch_inputs]


def test_the_batch_is_found_among_keyword_arguments():
    args = {"images": X, "labels": Y, "step": integers()}
    assert batch_of(autopar.parallelize(keyword_only).trace(PARAMS, **args).trace) == ["images", "labels"]


def graph_step(params, nodes, senders, receivers, labels):
    def of_params(p):
        h = jax.ops.segment_sum((nodes @ p["a"])[senders], receivers, nodes.shape[0])
        return jnp.mean((jnp.tanh(h) @ p["b"] - labels) ** 2)

    return updated(params, of_params)


GRAPH = (
    {"a": jnp.ones((WIDTH, 16)), "b": jnp.ones((16, CLASSES))},
    *(jnp.ones((30, WIDTH)), jnp.zeros(40, jnp.int32), jnp.zeros(40, jnp.int32), jnp.ones((30, CLASSES))),
)


def test_a_step_without_a_batch_is_not_run_in_silence():
    step = autopar.parallelize(graph_step, method=autopar.DataParallel())
    assert batch_of(step.trace(*GRAPH).trace) == []
    with pytest.warns(ReplicatedWarning, match="Every device computes the whole of graph_step, because no input"):
        got = step(*GRAPH)
    for value, expected in zip(jax.tree.leaves(got), jax.tree.leaves(graph_step(*GRAPH)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_microbatches_of_a_step_without_a_batch_are_refused():
    with pytest.raises(InvalidArgument, match=r"2 microbatches were asked for, but no input outside of the state .*"):
        autopar.parallelize(graph_step, method=autopar.DataParallel(), num_microbatches=2).trace(*GRAPH).plan().lower()


def moved(params, worlds):
    return worlds + jnp.tanh(predict(params, worlds)).sum(-1, keepdims=True)


def worlds_in_the_state(state):
    """Worlds that the model moves, whose number the step knows: no other batch can be traced."""
    worlds = moved(state["params"], state["worlds"]) * jnp.ones((ROWS, 1))
    params, value = updated(state["params"], lambda p: jnp.mean(predict(p, worlds) ** 2))
    return {"params": params, "worlds": worlds, "losses": jnp.roll(state["losses"], 1).at[0].set(value)}, value


def of_any_number(state):
    worlds = moved(state["params"], state["worlds"])
    params, value = updated(state["params"], lambda p: jnp.mean(predict(p, worlds) ** 2))
    return {**state, "params": params, "worlds": worlds}, value


def statistics_in_the_state(state):
    """The graph is a constant: what is left of the state has dimensions of the parameters, or no gradient."""
    x = jnp.ones((5, WIDTH))
    params, value = updated(state["params"], lambda p: jnp.mean((predict(p, x) - state["mean"]) ** 2))
    mean = 0.9 * state["mean"] + 0.1 * predict(state["params"], x).mean(0)
    losses = jnp.roll(state["losses"], 1).at[0].set(value)
    return {"params": params, "mean": mean, "losses": losses, "started": jnp.float32(1)}, value


def state_of_worlds():
    params = {name: np.full(value.shape, 0.1, np.float32) for name, value in PARAMS.items()}
    worlds = np.linspace(-1.0, 1.0, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    return {"params": params, "worlds": worlds, "losses": np.zeros(12, np.float32)}


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (worlds_in_the_state, autopar.DataParallel()),
        (worlds_in_the_state, autopar.Zero(stage=3)),
        (worlds_in_the_state, autopar.Auto()),
        (of_any_number, autopar.DataParallel(num_microbatches=2)),
        (of_any_number, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    ],
)
def test_a_batch_within_the_state_is_divided_with_equal_results(step, method):
    wrapped = autopar.parallelize(step, method=method, devices=jax.devices()[:2])
    assert batch_of(wrapped.trace(state_of_worlds()).trace) == ["state.worlds"]
    got, want = state_of_worlds(), state_of_worlds()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicatedWarning)
        for _ in range(2):
            (got, value), (want, expected) = wrapped(got), jax.jit(step)(want)
    for one, other in zip(jax.tree.leaves((got, value)), jax.tree.leaves((want, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_state_is_no_batch_where_its_dimensions_are_those_of_parameters_or_meet_no_gradient():
    state = {"params": PARAMS, "mean": zeros(CLASSES), "losses": zeros(12), "started": zeros()}
    assert batch_of(autopar.parallelize(statistics_in_the_state).trace(state).trace) == []


def two_sizes(params, labeled, y, others):
    return updated(params, lambda p: loss(p, labeled, y) + jnp.mean(predict(p, others) ** 2))


TWO_SIZES = (PARAMS, X, Y, zeros(24, WIDTH))


def test_two_readings_are_named_with_their_inputs():
    readings = r"first axis of labeled, y \(8 rows\) or the first axis of others \(24 rows\)"
    with pytest.raises(InvalidArgument, match=readings + ".*batch_argnums.*unbatched"):
        autopar.parallelize(two_sizes, method=autopar.DataParallel()).trace(*TWO_SIZES).plan()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"unbatched": "others"}, ["labeled", "y"]),
        ({"unbatched": ("^labeled$", "^y$")}, ["others"]),
        ({"batch_argnums": (1, 2)}, ["labeled", "y"]),
        ({"batch_argnums": (1, 2), "unbatched": "y"}, ["labeled"]),
        ({"batch_argnums": ()}, []),
    ],
)
def test_the_user_has_the_last_word(options, names):
    assert batch_of(autopar.parallelize(two_sizes, **options).trace(*TWO_SIZES).trace) == names


TIME = 5
CELL = {"in": zeros(WIDTH, 16), "h": zeros(16, 16), "out": zeros(16, CLASSES)}


def in_time(p, x, y):
    """A step of a in_time model on sequences `[time, examples, features]`."""

    def of_params(p):
        def after(h, x):
            h = jnp.tanh(x @ p["in"] + h @ p["h"])
            return h, h @ p["out"]

        return jnp.mean((jax.lax.scan(after, jnp.zeros((x.shape[1], 16)), x)[1] - y) ** 2)

    return updated(p, of_params)


def attending(p, x, mask):
    """The same without a loop: nothing but the user tells time from examples."""

    def of_params(p):
        h = jnp.tanh(x @ p["in"])
        seen = jax.nn.softmax(jnp.einsum("tbh,sbh->bts", h @ p["h"], h))
        return jnp.mean((jnp.einsum("bts,sbh->tbh", seen, h) @ p["out"]) ** 2 * mask[..., None])

    return updated(p, of_params)


SEQUENCES = zeros(TIME, ROWS, WIDTH)
BEHIND = {
    "time goes first": (in_time, (CELL, SEQUENCES, zeros(TIME, ROWS, CLASSES)), {}, {"x": 1, "y": 1}),
    "labels of examples": (in_time, (CELL, SEQUENCES, zeros(ROWS, CLASSES)), {}, {"x": 1, "y": 0}),
    "a word on one": (attending, (CELL, SEQUENCES, zeros(TIME, ROWS)), {"batch_axes": {"x": 1}}, {"x": 1, "mask": 1}),
    "counted from the end": (attending, (CELL, SEQUENCES, zeros(ROWS)), {"batch_axes": {"x": -2}}, {"x": 1, "mask": 0}),
    "with arguments": (
        attending,
        (CELL, SEQUENCES, zeros(TIME, ROWS)),
        {"batch_argnums": (1, 2), "batch_axes": {"x|mask": 1}},
        {"x": 1, "mask": 1},
    ),
}


@pytest.mark.parametrize(("step", "args", "options", "axes"), BEHIND.values(), ids=BEHIND)
def test_the_batch_is_on_another_axis(step, args, options, axes):
    trace = autopar.parallelize(step, **options).trace(*args).trace
    assert {trace.inputs[i].name: axis for i, axis in trace.batch_axes.items()} == axes
    assert trace.num_rows == ROWS


@pytest.mark.parametrize(
    "method",
    [
        autopar.DataParallel(),
        autopar.DataParallel(num_microbatches=2),
        autopar.PipelineParallel(num_stages=2, num_microbatches=2),
        autopar.Megatron(data=2),
        autopar.Zero(),
        autopar.Auto(),
    ],
    ids=lambda method: f"{type(method).__name__}, {method.num_microbatches}",
)
def test_examples_on_the_second_axis_are_divided_with_equal_results(method):
    keys = iter(jax.random.split(jax.random.key(0), 10))
    for step, (_, x, y), options, _ in (BEHIND["time goes first"], BEHIND["a word on one"]):
        args = jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape), (CELL, x, y))
        parallel = autopar.parallelize(step, method=method, devices=jax.devices()[:2], **options)
        got, want = parallel(*args), jax.jit(step)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
        if method == autopar.DataParallel():
            plan = parallel.all_compiled()[-1].plan
            assert plan.input_specs["x"] == jax.sharding.PartitionSpec(None, "data")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_axes": {"tokens": 1}}, r"batch_axes has the pattern 'tokens', which finds no input"),
        ({"batch_axes": {"x": 3}}, r"the batch on axis 3 of x, whose shape is \[5, 8, 6\]. Name an axis that it has"),
        (
            {"batch_axes": {"x": 1}, "unbatched": "x"},
            "x has a batch by batch_axes and none by unbatched. Name it in one",
        ),
        ({"batch_axes": {"x": 1, "mask": 0}}, r"different batch sizes \(x: 8, mask: 5\).*another axis in batch_axes"),
    ],
)
def test_axes_that_cannot_be_are_refused(options, expected):
    with pytest.raises(InvalidArgument, match=expected):
        autopar.parallelize(attending, **options).trace(CELL, SEQUENCES, zeros(TIME, ROWS))


def test_a_search_does_without_a_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = autopar.parallelize(two_sizes, method=autopar.Auto(num_stages=1)).trace(*TWO_SIZES).plan().plan
    assert plan.num_microbatches == 1


def test_a_pattern_that_finds_no_input_is_refused():
    with pytest.raises(InvalidArgument, match=r"unbatched has the pattern 'other_name', .* labeled"):
        autopar.parallelize(two_sizes, unbatched="other_name").trace(*TWO_SIZES)


def test_state_of_one_array_is_no_batch_where_the_data_are_left_out():
    def one_matrix(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    args = zeros(WIDTH, WIDTH), X
    traced = autopar.parallelize(one_matrix).trace(*args).trace
    assert [traced.inputs[i].name for i in traced.batch_inputs] == ["x"]
    with pytest.warns(ReplicatedWarning, match="Every device computes the whole of one_matrix"):
        planned = autopar.parallelize(one_matrix, method=autopar.DataParallel(), unbatched="^x$").trace(*args).plan()
    assert planned.trace.batch_inputs == ()


@pytest.mark.parametrize(
    "method",
    [
        autopar.Megatron(tensor=2),
        autopar.Megatron(pipeline=2),
        autopar.TensorParallel(),
        autopar.PipelineParallel(num_stages=2, num_microbatches=1),
        autopar.Auto(),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_batch_of_one_example_is_found_as_one_of_two(method):
    def step(params, batch):
        return updated(params, lambda p: loss(p, batch["x"], batch["y"]))

    params = {"a": np.full((WIDTH, 16), 0.1, np.float32), "b": np.full((16, 4), 0.2, np.float32)}
    batch = {"x": np.ones((1, 8, WIDTH), np.float32), "y": np.zeros((1, 8, 4), np.float32)}
    traced = autopar.parallelize(step, method=method, devices=jax.devices()[:2]).trace(params, batch)
    assert batch_of(traced.trace) == ["batch.x", "batch.y"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicatedWarning)
        found = autopar.parallelize(step, method=method, devices=jax.devices()[:2])(params, batch)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(params, batch)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_row_that_cannot_be_two_is_no_batch():
    def step(params, bias):
        return updated(params, lambda p: jnp.mean(predict(p, jnp.ones((3, WIDTH)) + bias.reshape(1, WIDTH)) ** 2))

    assert batch_of(autopar.parallelize(step).trace(PARAMS, zeros(1, WIDTH)).trace) == []


def decode(params, cache, token):
    """One token of each sequence, which looks at those before it."""
    h = params["table"][token]
    keys = jax.lax.dynamic_update_slice_in_dim(cache["keys"], (h @ params["key"])[:, None], cache["at"], 1)
    scores = jnp.einsum("bd,btd->bt", h @ params["query"], keys)
    seen = jnp.arange(keys.shape[1]) <= cache["at"]
    h = jnp.einsum("bt,btd->bd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), keys)
    return {"keys": keys, "at": cache["at"] + 1}, h @ params["table"].T


@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.Zero(), autopar.Auto(num_microbatches=2)])
def test_the_batch_of_a_step_that_decodes_is_in_its_cache_and_its_tokens(method):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"table": (CLASSES, 16), "key": (16, 16), "query": (16, 16)}
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    cache = wanted = {"keys": jnp.zeros((16, 4, 16)), "at": 0}
    parallel, token = autopar.parallelize(decode, method=method), jnp.arange(16) % CLASSES
    assert set(batch_of(parallel.trace(params, cache, token).trace)) == {"cache.keys", "token"}
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error", ReplicatedWarning)
            cache, scores = parallel(params, cache, token)
        wanted, expected = jax.jit(decode)(params, wanted, token)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cache["keys"], wanted["keys"], rtol=1e-5, atol=1e-6)


def averaged(averages, params):
    return jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, averages, params)


def test_a_step_that_averages_parameters_has_no_batch():
    assert batch_of(autopar.parallelize(averaged).trace(PARAMS, PARAMS).trace) == []
