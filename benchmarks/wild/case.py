"""Define a case: a train step of a released package, which other people wrote, with arguments to call it.

Nothing of a package is kept here. A case takes the package's own step where it has one; where it has models and losses
only, the step is the one that its documentation shows: a gradient and an update.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SEED = 0
BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Wild:
    """A train step of a package.

    `arguments()` are fresh ones for each run; `jit` is what its users put around it, and `around` the context in which
    they call it; `options` are those that `autopar.parallelize` is told beside the method.
    """

    step: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit
    options: dict[str, Any]
    keywords: Callable[[], dict[str, Any]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


CASES: dict[str, tuple[str, Callable[[], Wild]]] = {}
"""Name of a case -> the distribution it comes from, and what builds it."""


def case(package: str) -> Callable[[Callable[[], Wild]], Callable[[], Wild]]:
    """Return a decorator that adds what builds a step of a distribution to the cases, by its name."""

    def register(build: Callable[[], Wild]) -> Callable[[], Wild]:
        CASES[build.__name__] = (package, build)
        return build

    return register


def wild(
    step: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    jit: Callable[..., Any] = jax.jit,
    keywords: Callable[[], dict[str, Any]] = dict,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> Wild:
    """Return a step as a case, with the options for `autopar.parallelize` by name."""
    return Wild(step=step, arguments=arguments, jit=jit, options=options, keywords=keywords, around=around)


def normal(*shape: int, seed: int = SEED) -> jax.Array:
    """Return normally distributed numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def ints(high: int, *shape: int, seed: int = SEED) -> jax.Array:
    """Return whole numbers from 0 on that are less than `high`."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def images() -> tuple[jax.Array, jax.Array]:
    """Return a batch of small images, and the label of each among ten."""
    return normal(BATCH, 16, 16, 3), ints(10, BATCH)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss of a classification."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def two_layers() -> tuple[Callable[[Any, jax.Array, jax.Array], jax.Array], Any]:
    """Return the loss of a perceptron of two layers, of 8 numbers and 4 to predict, and its parameters."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)

    return loss, {"in": normal(8, 32) / 3, "out": normal(32, 4) / 6}
