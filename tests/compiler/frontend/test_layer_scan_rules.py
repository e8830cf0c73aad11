"""Equations on pieces: each primitive computes the same as on the whole, and keeps pieces where it can."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.compiler.frontend.layer_scan_rules import Pieces, Zeros, rows, whole
from autopar.compiler.frontend.layer_scans import split_layer_scans
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize

pytestmark = pytest.mark.usefixtures("float64")

LENGTH, WIDTH = 4, 3
Function = Callable[[jax.Array, jax.Array], Any]


def positive(m: jax.Array) -> jax.Array:
    return m @ jnp.swapaxes(m, 1, 2) + 3 * jnp.eye(WIDTH)


def dot(x: Any, y: Any, contract: Any, batch: Any = ((), ())) -> jax.Array:
    return lax.dot_general(x, y, (contract, batch))


# Functions of a stack (4, 3, 3) and another input that run on pieces of both or of the first.
ON_PIECES: dict[str, Function] = {
    "elementwise": lambda p, q: lax.clamp(-1.0, jnp.where(p > q, p**2, jnp.exp(q)), 2.0),
    "axes of length one": lambda p, q: p * jnp.max(q) + p / jnp.sum(q, 0, keepdims=True),
    "cast": lambda p, _: p.astype(jnp.float32),
    "broadcast": lambda p, _: jnp.broadcast_to(p[:, :, None], (LENGTH, WIDTH, 2, WIDTH)),
    "broadcast of a constant": lambda p, _: p + jnp.arange(9.0).reshape(3, 3) + jnp.zeros((LENGTH, 3, 3)),
    "iota": lambda p, _: p + lax.broadcasted_iota(p.dtype, p.shape, 1),
    "transpose": lambda p, _: jnp.swapaxes(p, 1, 2),
    "reshape within layers": lambda p, _: p.reshape(LENGTH, 9),
    "reshape to a vector and back": lambda p, _: jnp.sin(p.ravel()).reshape(p.shape),
    "reshape to fewer rows": lambda p, _: p.reshape(2, 2, 9) * 2,
    "slice within layers": lambda p, _: p[:, 1:],
    "slice of layers": lambda p, _: p[1:, :2] * 2,
    "split of layers": lambda p, _: jnp.split(p, [1]),
    "split within layers": lambda p, _: jnp.split(p, [1], axis=1),
    "squeeze": lambda p, _: jnp.squeeze(p[:, :1], 1),
    "concatenate of layers": lambda p, q: jnp.concatenate([p, q[:1]]) * 2,
    "concatenate within layers": lambda p, q: jnp.concatenate([p, q], axis=2),
    "pad of layers": lambda p, _: jnp.pad(p, ((1, 2), (0, 0), (0, 0))) * 2,
    "pad with a value": lambda p, q: lax.pad(p, q[0, 0, 0], ((1, 0, 0), (0, 1, 0), (1, 0, 1))),
    "pad within layers": lambda p, _: jnp.pad(p, ((0, 0), (1, 0), (0, 1))),
    "sum": lambda p, _: jnp.sum(p),
    "sum of layers": lambda p, _: jnp.sum(p, axis=0),
    "sum within layers": lambda p, _: jnp.sum(p, axis=(1, 2)),
    "mean and deviation": lambda p, _: (p - p.mean((1, 2), keepdims=True)) / p.std(),
    "extremes": lambda p, _: (jnp.max(p), jnp.min(p, axis=0), jnp.prod(p), jnp.any(p > 1), jnp.all(p > 1, 0)),
    "position of the largest": lambda p, _: jnp.argmax(p, axis=1),
    "cumulative sum": lambda p, _: jnp.cumsum(p, axis=2),
    "sort and reverse": lambda p, _: jnp.sort(p, axis=1)[:, ::-1],
    "matrix product per layer": lambda p, q: p @ q,
    "product with one matrix": lambda p, _: p @ jnp.arange(9.0).reshape(3, 3),
    "product from the left": lambda p, _: dot(jnp.arange(3.0), p[:, 0], ((0,), (1,))),
    "norm": lambda p, q: jnp.vdot(p.ravel(), q.ravel()),
    "scalar product": lambda p, q: dot(jnp.sum(q), p, ((), ())),
    "matrix functions": lambda p, _: (jnp.linalg.cholesky(positive(p)), jnp.linalg.eigh(positive(p))[0]),
    "barrier": lambda p, q: lax.optimization_barrier((p, jnp.float64(1), q[:, 0])),
    "stack within layers": lambda p, q: jnp.stack([p, q], axis=1),
    "stack of layers": lambda p, _: p + jnp.stack([jnp.ones((3, 3)) * i for i in range(LENGTH)]),
    "unstack": lambda p, _: list(p),
    "tile within layers": lambda p, _: jnp.tile(p, (1, 9, 1)),
    "zeros": lambda p, _: jnp.pad(p[:2], ((0, 2), (0, 0), (0, 0))) + jnp.pad(p[2:], ((2, 0), (0, 0), (0, 0))),
}
# Functions whose equations mix the layers: they read the stack whole.
ON_THE_WHOLE: dict[str, Function] = {
    "transpose of layers": lambda p, _: jnp.transpose(p, (1, 0, 2)),
    "reshape across layers": lambda p, _: p.reshape(3, 12),
    "cumulative sum over layers": lambda p, _: jnp.cumsum(p, axis=0),
    "sort of layers": lambda p, _: jnp.sort(p, axis=0),
    "reverse": lambda p, _: p[::-1],
    "every second layer": lambda p, _: p[::2],
    "chosen layers": lambda p, _: p[jnp.array([2, 0])],
    "product over another axis": lambda p, _: dot(p, jnp.arange(12.0).reshape(3, 4), ((0,), (1,))),
    "interior padding": lambda p, _: lax.pad(p, 0.0, ((0, 0, 1), (0, 0, 0), (0, 0, 0))),
    "negative padding": lambda p, _: lax.pad(p, 0.0, ((-1, 0, 0), (0, 0, 0), (0, 0, 0))),
    "branch": lambda p, q: lax.cond(q[0, 0, 0] > 0, jnp.sin, jnp.cos, p),
    "position of the largest layer": lambda p, _: jnp.argmax(p, axis=0),
    "convolution": lambda p, _: jnp.convolve(p[:, 0, 0], jnp.ones(2)),
}


def evaluate_split_and_whole(function: Function, num_pieces: int) -> tuple[list[Any], list[Any], list[str]]:
    """The results of a function of scanned stacks, split and plain, and the primitives of the split step."""
    draw = np.random.default_rng(0)
    stacks = [jnp.asarray(draw.normal(size=(LENGTH, WIDTH, WIDTH))) for _ in range(2)]

    def step(p: jax.Array, q: jax.Array) -> Any:
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w[0] @ w[1]), None), jnp.ones(WIDTH), (p, q))
        return h, function(p, q)

    closed = normalize(jax.make_jaxpr(step)(*stacks))
    split = split_layer_scans(closed, num_pieces, batch_inputs=())
    args = [stacks[p.leaf][p.start : p.stop] for p in split.inputs]
    joined: dict[int, list[Any]] = {}
    for piece, result in zip(split.outputs, jc.jaxpr_as_fun(split.jaxpr)(*args), strict=True):
        joined.setdefault(piece.leaf, []).append(result)
    found = [pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces) for pieces in joined.values()]
    return found, jc.jaxpr_as_fun(closed)(*stacks), [e.primitive.name for e in split.jaxpr.jaxpr.eqns]


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_pieces", [2, 3])
@pytest.mark.parametrize("function", ON_PIECES.values(), ids=ON_PIECES)
def test_equation_on_pieces_equals_equation_on_the_whole(function, num_pieces):
    found, wanted, _ = evaluate_split_and_whole(function, num_pieces)
    assert_equal(found, wanted)


@pytest.mark.parametrize("name", ON_PIECES)
def test_equation_on_pieces_puts_no_stack_together(name):
    _, _, primitives = evaluate_split_and_whole(ON_PIECES[name], 2)
    # A concatenation within the layers stays one, on every piece.
    assert ("concatenate" in primitives) == (name == "concatenate within layers")


@pytest.mark.parametrize("function", ON_THE_WHOLE.values(), ids=ON_THE_WHOLE)
def test_equation_that_mixes_layers_reads_them_whole(function):
    found, wanted, primitives = evaluate_split_and_whole(function, 2)
    assert_equal(found, wanted)
    assert "concatenate" in primitives


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [(0, 2, [0, 1]), (1, 4, [1, 2, 3]), (3, 6, [3, 0, 0]), (0, 7, [0, 1, 2, 3, 0, 0, 0])],
)
def test_rows_are_cut_and_joined_as_needed(start, stop, wanted):
    value = Pieces(
        bounds=(0, 2, 4, 7),
        values=(jnp.array([0, 1]), jnp.array([2, 3]), Zeros(shape=(3,), dtype=jnp.int64)),
    )
    assert rows(value, start, stop).tolist() == wanted
    assert whole(value).tolist() == [0, 1, 2, 3, 0, 0, 0]


def test_a_fitting_piece_is_taken_as_it_is_and_zeros_stay_uncomputed():
    first, zeros = jnp.ones(2), Zeros(shape=(3,), dtype=jnp.float64)
    value = Pieces(bounds=(0, 2, 5), values=(first, zeros))
    assert rows(value, 0, 2) is first
    assert rows(value, 3, 5) == Zeros(shape=(2,), dtype=jnp.float64)
