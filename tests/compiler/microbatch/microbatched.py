"""Split a step by hand in a test: trace it at the batch and at that of a microbatch, split it, evaluate it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.microbatch.split import MicrobatchedStep, evaluate_microbatched, split_batch

BATCH, WIDTH = 8, 6
_DRAW = np.random.default_rng(0)
PARAMS = {
    "a": _DRAW.normal(size=(WIDTH, WIDTH)),
    "b": _DRAW.normal(size=WIDTH),
    "c": _DRAW.normal(size=(WIDTH, WIDTH)),
    "table": _DRAW.normal(size=(11, WIDTH)),
}
X = {
    "x": _DRAW.normal(size=(BATCH, WIDTH)),
    "series": _DRAW.normal(size=(BATCH, 5, WIDTH)),
    "image": _DRAW.normal(size=(BATCH, 6, 6, 2)),
    "tokens": _DRAW.integers(0, 11, size=(BATCH, 5)),
    "label": _DRAW.integers(0, WIDTH, size=BATCH),
    "mask": _DRAW.integers(0, 2, size=(BATCH, 5)).astype(np.float64),
}


def sgd(loss: Any, has_aux: bool = False) -> Any:
    """A train step on `loss(params, batch)`."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def hidden(p, x):
    return jnp.tanh(x @ p["a"] + p["b"])


def traces(step: Any, *args: Any, batch: tuple[int, ...] = (1,), microbatches: int | None = None) -> Any:
    """The step traced at the batch and at another, the positions of the batch's leaves, and all leaves.

    The other batch is that of a microbatch of several rows if the step takes it, otherwise twice the batch.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    batch_inputs = [i for i, argument in enumerate(owner) if argument in batch]

    def flat(*values: Any) -> Any:
        return step(*jax.tree.unflatten(tree, values))

    def traced(rows: int) -> Any:
        sizes = [(rows, *v.shape[1:]) if i in batch_inputs and v.ndim else v.shape for i, v in enumerate(leaves)]
        return normalize(
            jax.make_jaxpr(flat)(*[jax.ShapeDtypeStruct(s, v.dtype) for s, v in zip(sizes, leaves, strict=True)])
        )

    rows = next((len(leaves[i]) for i in batch_inputs if leaves[i].ndim), 1)
    part = rows // microbatches if microbatches and rows % microbatches == 0 else 1
    full = traced(rows)
    try:
        at_other_batch = traced(part if 1 < part < rows else 2 * rows)
    except TypeError:  # groups of more rows than a microbatch has
        at_other_batch = traced(2 * rows)
    return full, at_other_batch, batch_inputs, leaves


def split(step: Any, *args: Any, batch: tuple[int, ...] = (1,), microbatches: int = 4, **options: Any) -> Any:
    """The microbatched step and the flat arguments."""
    full, at_other_batch, batch_inputs, leaves = traces(step, *args, batch=batch, microbatches=microbatches)
    result = split_batch(full, at_other_batch, batch_inputs=batch_inputs, num_microbatches=microbatches, **options)
    return result, leaves


def evaluate_both(
    step: Any, *args: Any, batch: tuple[int, ...] = (1,), microbatches: int = 4, **options: Any
) -> tuple[Any, Any]:
    """The step's results from microbatches, and from the step itself."""
    microbatched, leaves = split(step, *args, batch=batch, microbatches=microbatches, **options)
    want = jax.jit(step)(*jax.tree.map(jnp.asarray, args))
    got = jax.jit(lambda *leaves: evaluate_microbatched(microbatched, leaves))(*leaves)
    return jax.tree.unflatten(jax.tree.structure(want), got), want


def assert_equal(got: Any, want: Any, tolerance: float = 1e-9, leave_out: tuple[str, ...] = ()) -> None:
    """Equal up to the order of sums: relative to the largest entry of each leaf."""
    named, _ = jax.tree.flatten_with_path(want)
    for value, (path, expected) in zip(jax.tree.leaves(got), named, strict=True):
        if any(part in jax.tree_util.keystr(path) for part in leave_out):
            continue
        a, b = (np.asarray(_plain(v)) for v in (value, expected))
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        a, b = (v.astype(np.float64) for v in (a, b))
        assert np.all(np.abs(a - b) <= tolerance * (np.abs(b).max(initial=0) + 1e-3)), path


def _plain(value: Any) -> Any:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def accumulations(step: MicrobatchedStep) -> list[str]:
    """The kinds of the accumulations, in order."""
    eqns = jc.open_jaxpr(step.jaxpr)[0].eqns
    return [eqn.params["kind"] for eqn in eqns if eqn.primitive.name == "accumulate"]
