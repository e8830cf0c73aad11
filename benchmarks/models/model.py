"""A train step to be planned: its arrays by the sizes and names of their dimensions, and its loss.

The names of dimensions ("batch", "embed", "heads", ...) are for plans written by hand, which send them to mesh axes;
autopar sees the step of plain JAX that `Model.step` is, and none of the names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

OPTIMIZER = optax.adamw(1e-3)
SCALE = 0.02
Tree = Any
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


class Mark(Protocol):
    """Name the dimensions of an activation; what comes back is used in its place."""

    def __call__(self, x: jax.Array, *names: str) -> jax.Array: ...


@dataclass(frozen=True, kw_only=True)
class Array:
    """An array to make: the leaf of a tree of parameters or of a batch."""

    shape: tuple[int, ...]
    names: tuple[str, ...]  # of its dimensions
    dtype: Any
    limit: int = 0  # of an array of integers: they are below it
    scale: float = 0.0  # of an array of floats: their standard deviation
    mean: float = 0.0

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def draw(self, rng: np.random.Generator) -> jax.Array:
        if self.limit:
            return jnp.asarray(rng.integers(0, self.limit, self.shape), self.dtype)
        return jnp.asarray(self.mean + self.scale * rng.standard_normal(self.shape, np.float32), self.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model under AdamW. The state is a pair of parameters and the optimizer's state; a batch is a dictionary."""

    name: str
    params: Tree  # of Array
    batch: dict[str, Array]
    loss: Callable[[Tree, Tree, Mark], jax.Array]
    convert: Callable[[Tree], Tree] = lambda params: params
    """The parameters as the loss reads them."""

    @property
    def step(self) -> Step:
        return train_step(self)

    @property
    def abstract_state(self) -> Tree:
        params = jax.tree.map(lambda array: array.abstract, self.params)
        return params, jax.eval_shape(OPTIMIZER.init, params)

    @property
    def abstract_batch(self) -> Tree:
        return {name: array.abstract for name, array in self.batch.items()}

    def create_state(self, seed: int = 0) -> Tree:
        rng = np.random.default_rng(seed)
        params = jax.tree.map(lambda array: array.draw(rng), self.params)
        return params, OPTIMIZER.init(params)

    def create_batch(self, seed: int = 1) -> Tree:
        rng = np.random.default_rng(seed)
        return {name: array.draw(rng) for name, array in self.batch.items()}

    @property
    def num_parameters(self) -> int:
        return sum(array.abstract.size for array in jax.tree.leaves(self.params))


def computing_in(dtype: Any, model: Model) -> Model:
    """The model with its parameters kept as they are, and all else computed in `dtype`; the loss is in float32."""

    def converted(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        return model.loss(params, converted(batch), mark).astype(jnp.float32)

    return replace(model, name=f"{model.name} {jnp.dtype(dtype).name}", loss=loss, convert=converted)


def unmarked(x: jax.Array, *names: str) -> jax.Array:
    """Leave the activation to the compiler."""
    assert len(names) == x.ndim, (names, x.shape)
    return x


def train_step(
    model: Model, mark: Mark = unmarked, mark_gradients: Callable[[Tree], Tree] = lambda grads: grads
) -> Step:
    """The step `(state, batch) -> (state, metrics)`, with whatever a plan does to activations and gradients."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: model.loss(model.convert(params), batch, mark))(params)
        updates, opt_state = OPTIMIZER.update(mark_gradients(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step


def weights(dtype: Any = jnp.float32, *, scale: float = SCALE, **dims: int) -> Array:
    """A parameter drawn from a normal distribution, e.g. `weights(embed=256, mlp=1024)`."""
    return Array(shape=tuple(dims.values()), names=tuple(dims), dtype=dtype, scale=scale)


def constant(mean: float, dtype: Any = jnp.float32, **dims: int) -> Array:
    """A parameter that begins as a constant: a bias, or the gain of a norm."""
    return Array(shape=tuple(dims.values()), names=tuple(dims), dtype=dtype, mean=mean)


def integers(limit: int, **dims: int) -> Array:
    """Tokens or classes of a batch."""
    return Array(shape=tuple(dims.values()), names=tuple(dims), dtype=jnp.int32, limit=limit)
