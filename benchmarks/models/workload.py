"""A train step to be timed or planned: mixed precision, any optimizer, statistics of batches, and what it computes.

    params (16 bits)  --loss, gradients-->  gradients (16 bits)  --optimizer in 32 bits-->  master  --rounded-->  params

or, `rounded_in_step`, with parameters of 32 bits that the loss rounds before it uses them.

Nothing is allocated until `create_state` is called: `abstract_state` and `abstract_batch` are shapes, from which a step
of any size is traced and planned. Models in 32 bits have no master copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models.model import Array, Tree

Loss = Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]


class State(NamedTuple):
    """State that a train step replaces. `master` is None where the parameters have 32 bits themselves."""

    params: Tree
    master: Tree
    opt_state: Tree
    statistics: Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A train step on a global batch, and the work that is in it."""

    name: str
    params: Tree  # of Array
    batch: dict[str, Array]
    loss: Loss
    """(params, statistics, batch) -> (loss, statistics)"""
    optimizer: optax.GradientTransformation
    flops: float
    """FLOPs of the model in one step: forward and backward pass, without what is computed again."""
    tokens: int
    """Tokens of one step; images, for a classifier of images."""
    statistics: Tree = field(default_factory=dict[str, Any])  # of Array
    updates_in_place: bool = False
    """True if what replaces a parameter of 16 bits reads it, and so gets its memory. No step as users write it does.
    But where an executor hands what it replaces to the update, it needs no more memory than such a step."""

    @property
    def batch_size(self) -> int:
        """Examples of a step."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def batch_statistics(self) -> str:
        """How microbatches take the statistics of a batch: each its own, if the model has any."""
        return "per_microbatch" if self.statistics else "exact"

    @property
    def num_parameters(self) -> int:
        return sum(array.abstract.size for array in jax.tree.leaves(self.params))

    @property
    def abstract_state(self) -> State:
        params = jax.tree.map(lambda array: array.abstract, self.params)
        master = _in_32_bits(params) if self._rounds else None
        opt_state = jax.eval_shape(self.optimizer.init, params if master is None else master)
        return State(params, master, opt_state, jax.tree.map(lambda array: array.abstract, self.statistics))

    @property
    def abstract_batch(self) -> Tree:
        return {name: array.abstract for name, array in self.batch.items()}

    def create_state(self, seed: int = 0) -> State:
        """A state of real arrays."""
        rng = np.random.default_rng(seed)
        params, statistics = jax.tree.map(lambda array: array.draw(rng), (self.params, self.statistics))
        master = jax.tree.map(lambda x: x.astype(jnp.float32), params) if self._rounds else None
        return State(params, master, self.optimizer.init(params if master is None else master), statistics)

    def draw_state(self, seed: int = 0) -> State:
        """A state that is drawn on JAX's first device: for a billion parameters the host takes half a minute."""
        leaves, tree = jax.tree.flatten((self.params, self.statistics))
        drawn = [
            (each.mean + each.scale * jax.random.normal(key, each.shape)).astype(each.dtype)
            for each, key in zip(leaves, jax.random.split(jax.random.key(seed), len(leaves)), strict=True)
        ]
        params, statistics = jax.tree.unflatten(tree, drawn)
        master = jax.tree.map(lambda x: x.astype(jnp.float32), params) if self._rounds else None
        return State(params, master, self.optimizer.init(params if master is None else master), statistics)

    def create_batch(self, seed: int = 1) -> Tree:
        """A batch of real arrays."""
        rng = np.random.default_rng(seed)
        return {name: array.draw(rng) for name, array in self.batch.items()}

    def step(self, state: State, batch: Tree) -> tuple[State, Tree]:
        """One step of training on the global batch."""
        (loss, statistics), grads = jax.value_and_grad(self.loss, has_aux=True)(state.params, state.statistics, batch)
        weights = state.params if state.master is None else state.master
        grads = jax.tree.map(lambda grad, weight: grad.astype(weight.dtype), grads, weights)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, weights)
        weights = optax.apply_updates(weights, updates)
        if state.master is None:
            return State(weights, None, opt_state, statistics), {"loss": loss}
        params = jax.tree.map(lambda weight, param: weight.astype(param.dtype), weights, state.params)
        if self.updates_in_place:
            params = jax.tree.map(lambda new, old: new + 0 * old, params, state.params)
        return State(params, weights, opt_state, statistics), {"loss": loss}

    @property
    def _rounds(self) -> bool:
        """True if parameters are rounded to 16 bits for the model."""
        return any(jnp.dtype(array.dtype).itemsize == 2 for array in jax.tree.leaves(self.params))


def rounded_in_step(workload: Workload) -> Workload:
    """Return the same step without a master copy: its parameters have 32 bits, and the loss begins by rounding them."""
    dtypes = jax.tree.map(lambda array: array.dtype, workload.params)

    def loss(params: Tree, statistics: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        rounded = jax.tree.map(lambda param, dtype: param.astype(dtype), params, dtypes)
        return workload.loss(rounded, statistics, batch)

    params = jax.tree.map(lambda array: replace(array, dtype=jnp.float32), workload.params)
    return replace(workload, params=params, loss=loss)


def adamw() -> optax.GradientTransformation:
    """AdamW that decays matrices only, as in Alpa's benchmark_one_case_gpt_bert.py."""
    return optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))


def _in_32_bits(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), tree)
