"""Steps whose losses compare the examples of a batch equal their plain steps, also over microbatches."""

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from tests.small_steps import assert_same, devices, draw, two_stages

ROWS, WIDTH, CODE = 8, 6, 4


def encode(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def two_towers(params, batch):
    """Image and text codes against each other, both ways, with a learned temperature (CLIP)."""
    images, texts = (
        codes / jnp.linalg.norm(codes, axis=-1, keepdims=True)
        for codes in (encode(params["image"], batch["image"]), encode(params["text"], batch["text"]))
    )
    scores = images @ texts.T * jnp.exp(params["temperature"])
    labels = jnp.arange(scores.shape[0])
    both = [optax.softmax_cross_entropy_with_integer_labels(s, labels).mean() for s in (scores, scores.T)]
    return sum(both) / 2


def diagonal_pairs(params, batch):
    """The same, as those write it who read the pairs that belong together off the diagonal."""
    scores = encode(params["image"], batch["image"]) @ encode(params["text"], batch["text"]).T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)) + jnp.diagonal(jax.nn.log_softmax(scores, axis=0)))


def two_views(params, batch):
    """Every view against all others of the batch but itself (SimCLR)."""
    codes = encode(params["image"], jnp.concatenate([batch["image"], batch["text"]]))
    scores = jnp.where(jnp.eye(codes.shape[0], dtype=bool), -1e9, codes @ codes.T)
    partner = (jnp.arange(codes.shape[0]) + codes.shape[0] // 2) % codes.shape[0]
    return optax.softmax_cross_entropy_with_integer_labels(scores, partner).mean()


def hardest_triplets(params, batch):
    codes = encode(params["image"], batch["image"])
    apart = jnp.sum((codes[:, None] - codes[None]) ** 2, -1)
    same = batch["label"][:, None] == batch["label"][None]
    far, near = jnp.max(jnp.where(same, apart, 0), 1), jnp.min(jnp.where(same, 1e9, apart), 1)
    return jnp.mean(jax.nn.relu(far - near + 0.2))


def hardest_half(params, batch):
    losses = jnp.sum((encode(params["image"], batch["image"]) - encode(params["text"], batch["text"])) ** 2, -1)
    return jnp.mean(jax.lax.top_k(losses, losses.shape[0] // 2)[0])


def mixed_features(params, batch):
    """Features of other examples are mixed in before the last layer."""
    hidden = jnp.tanh(batch["image"] @ params["image"]["w"])
    return jnp.mean(((0.7 * hidden + 0.3 * hidden[::-1]) @ params["image"]["v"] - batch["text"][:, :CODE]) ** 2)


LOSSES = [
    two_towers,
    jax.checkpoint(two_towers),
    diagonal_pairs,
    two_views,
    hardest_triplets,
    hardest_half,
    mixed_features,
]
METHODS = {
    "data": autopar.DataParallel(),
    "microbatches": autopar.DataParallel(num_microbatches=4),
    "stages": two_stages(),
    "search": autopar.Auto(),
    "zero": autopar.Zero(stage=3),
}


def make_arguments():
    def tower(seed):
        return {"w": draw(seed, WIDTH, 8), "v": draw(seed + 1, 8, CODE)}

    params = {"image": tower(0), "text": tower(2), "temperature": jnp.zeros(())}
    label = jnp.arange(ROWS) % 3
    return params, {"image": draw(4, ROWS, WIDTH), "text": draw(5, ROWS, WIDTH), "label": label}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_step_that_compares_examples_equals_the_plain_step(loss, method):
    def train_step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    step = autopar.parallelize(train_step, method=method, devices=devices(2))
    assert_same(step(*make_arguments()), jax.jit(train_step)(*make_arguments()))
