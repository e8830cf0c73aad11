"""Equations of every family, with operands on which a mistake in them would show: indices in and out of range, ties."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

import autopar
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def real(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Normal numbers."""
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def whole(*shape: int, below: int = 3, dtype: Any = jnp.int32) -> jax.Array:
    """Integers from 0 to `below`, with ties."""
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(0, below, shape), dtype)


def indices(*shape: int, size: int, dtype: Any = jnp.int32) -> jax.Array:
    """Indices into a dimension of this size, some of them below and above it."""
    drawn = np.random.default_rng(1).integers(-2, size + 3, shape).reshape(-1)
    drawn[:4] = [0, size - 1, size, -1]
    return jnp.asarray(drawn.reshape(shape), dtype)


def keys(*shape: int) -> jax.Array:
    """Keys of random numbers."""
    return jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)


def conv(**params: Any) -> Callable[..., Any]:
    """A convolution that keeps the size of the image."""
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", **params)


def grad(function: Callable[..., Any], argument: int = 0) -> Callable[..., Any]:
    """The gradient of a loss of the function's result, in which every element counts differently."""

    def loss(*args: Any) -> Any:
        result = function(*args)
        return (result * jnp.cos(jnp.arange(result.size, dtype=result.dtype)).reshape(result.shape)).sum()

    return jax.grad(loss, argument)


def take(mode: str, **params: Any) -> Callable[..., Any]:
    """Rows of a table."""
    return lambda w, i: w.at[i].get(mode=mode, wrap_negative_indices=False, **params)


def take_elements(mode: str, **params: Any) -> Callable[..., Any]:
    """Elements of a matrix at pairs of indices."""
    return lambda w, i, j: w.at[i, j].get(mode=mode, wrap_negative_indices=False, **params)


def put(how: str, mode: str | None = None, **params: Any) -> Callable[..., Any]:
    """Rows of a table changed."""
    return lambda w, i, u: getattr(w.at[i], how)(u, mode=mode, wrap_negative_indices=False, **params)


def put_elements(how: str, mode: str) -> Callable[..., Any]:
    """Elements of a matrix changed at pairs of indices."""
    return lambda w, i, j, u: getattr(w.at[i, j], how)(u, mode=mode, wrap_negative_indices=False)


def put_windows(mode: str) -> Callable[..., Any]:
    """Rows of a matrix set, whose indices name the columns too."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
    return lambda w, i, u: lax.scatter(w, i, u, numbers, mode=mode)


def bits(*shape: int, width: int = 32) -> Callable[..., Any]:
    """Random bits of an array of this shape."""
    return lambda key: jax.random.bits(key, shape, f"uint{width}")


def pool(x: Any, identity: float, combine: Any) -> Any:
    """Windows of two by two."""
    return lax.reduce_window(x, identity, combine, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def take_pairs(w: Any, i: Any) -> Any:
    """Two rows at once from each index on."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return lax.gather(w, i, numbers, (2, w.shape[1]), mode="clip")


def ragged_sum(a: Any, b: Any, sizes: Any) -> Any:
    """Products of the groups of rows of two matrices."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(a, b, sizes, numbers)


IMAGE, KERNEL = real(8, 8, 4, 4), real(16, 8, 3, 3)
GROUPED, DEPTHWISE = real(16, 4, 3, 3), real(8, 1, 3, 3)
TABLE, MATRIX, ROWS = real(32, 8), real(8, 16), indices(8, size=32)
SIZES = jnp.asarray([3, 0, 9, 4], jnp.int32)

POWERS = 2.0 ** (whole(8, 16) % 8).astype(jnp.float32)
"""Numbers that codes of 8 bits hold, with whatever numbers they share a scale."""


def in_eight_bits(x: Any) -> Any:
    return autopar.compress_gradients(x, "float8_e4m3fn")


EQUATIONS: dict[str, Case] = {
    # Elements apart.
    "tanh": ("tanh", jnp.tanh, (MATRIX,)),
    "negation": ("neg", jnp.negative, (MATRIX,)),
    "sum of two": ("add", jnp.add, (MATRIX, real(8, 16))),
    "difference": ("sub", jnp.subtract, (MATRIX, real(8, 16))),
    "a number added": ("add", lambda x: x + 3, (MATRIX,)),
    "product of two": ("mul", jnp.multiply, (MATRIX, real(8, 16))),
    "product of integers": ("mul", jnp.multiply, (whole(8, 16), whole(8, 16))),
    "square": ("mul", lambda x: lax.mul(x, x), (MATRIX,)),
    "quotient": ("div", jnp.divide, (MATRIX, real(8, 16) + 4)),
    "to sixteen bits": ("convert_element_type", lambda x: x.astype(jnp.bfloat16), (MATRIX,)),
    "to thirty-two bits": ("convert_element_type", lambda x: x.astype(jnp.float32), (MATRIX.astype(jnp.bfloat16),)),
    "to eight bits in blocks": ("compress_gradient_in_blocks", in_eight_bits, (POWERS,)),
    "bits of elements": ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint8), (MATRIX,)),
    "select": ("select_n", lax.select_n, (MATRIX > 0, MATRIX, real(8, 16))),
    "select by a scalar": ("select_n", lax.select_n, (jnp.asarray(True), MATRIX, MATRIX + 1)),
    "clamp": ("clamp", lambda x: lax.clamp(-0.5, x, 0.5), (MATRIX,)),
    "barrier": ("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (MATRIX, real(8))),
    "threefry": ("threefry2x32", threefry2x32_p.bind, (whole(16, dtype=jnp.uint32),) * 4),
    # Dimensions rearranged.
    "transpose": ("transpose", lambda x: x.transpose(0, 2, 1), (real(2, 8, 4),)),
    "broadcast rows": ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 16), (1,)), (real(16),)),
    "broadcast a size of one": ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 16), (0, 1)), (real(8, 1),)),
    "broadcast a number": ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 16), ()), (real(),)),
    "repeat a size of one": ("tile", lambda x: lax.tile(x, (1, 16, 1)), (real(8, 1, 16),)),
    "repeat several elements many times": ("tile", lambda x: lax.tile(x, (1, 12)), (real(8, 16),)),
    "broadcast keys": ("broadcast_in_dim", lambda k: jnp.broadcast_to(k, (4, 8)), (keys(8),)),
    "squeeze": ("squeeze", lambda x: lax.squeeze(x, (1,)), (real(8, 1, 16),)),
    "split a dimension": ("reshape", lambda x: x.reshape(8, 4, 16), (real(8, 64),)),
    "merge dimensions": ("reshape", lambda x: x.reshape(32, 16), (real(2, 16, 16),)),
    "merge small dimensions": ("reshape", lambda x: x.reshape(16, 8), (real(2, 8, 8),)),
    "move a bound": ("reshape", lambda x: x.reshape(2, 16, 8), (real(8, 4, 8),)),
    # Reductions.
    "sum": ("reduce_sum", lambda x: x.sum(1), (MATRIX,)),
    "sum of everything": ("reduce_sum", lambda x: x.sum(), (MATRIX,)),
    "sum of integers": ("reduce_sum", lambda x: x.sum(0), (whole(8, 16),)),
    "maximum": ("reduce_max", lambda x: x.max(1), (MATRIX,)),
    "greatest of everything": ("reduce_max", lambda x: x.max(), (MATRIX,)),
    "greatest integer": ("reduce_max", lambda x: x.max(0), (whole(8, 16) - 5,)),
    "minimum": ("reduce_min", lambda x: x.min(0), (MATRIX,)),
    "any": ("reduce_or", lambda x: x.any(1), (MATRIX > 1,)),
    "product": ("reduce_prod", lambda x: x.prod(1), (MATRIX,)),
    "argmax": ("argmax", lambda x: jnp.argmax(x, 1), (whole(8, 16),)),
    "argmin": ("argmin", lambda x: jnp.argmin(x, 0), (whole(8, 16),)),
    # Products.
    "matrix product": ("dot_general", jnp.matmul, (MATRIX, real(16, 8))),
    "batched product": ("dot_general", lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (real(4, 8, 4), real(4, 2, 4))),
    "two contracted dimensions": (
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ()))),
        (real(4, 8, 4), real(4, 8, 8)),
    ),
    "convolution": ("conv_general_dilated", conv(), (IMAGE, KERNEL)),
    "convolution, channels last": (
        "conv_general_dilated",
        conv(dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (real(8, 4, 4, 8), real(3, 3, 8, 16)),
    ),
    "grouped convolution": ("conv_general_dilated", conv(feature_group_count=2), (IMAGE, GROUPED)),
    "depthwise convolution": ("conv_general_dilated", conv(feature_group_count=8), (IMAGE, DEPTHWISE)),
    "gradient of a kernel": ("conv_general_dilated", grad(conv(), 1), (IMAGE, KERNEL)),
    "gradient of a convolved image": ("conv_general_dilated", grad(conv()), (IMAGE, KERNEL)),
    "gradient of a grouped kernel": ("conv_general_dilated", grad(conv(feature_group_count=2), 1), (IMAGE, GROUPED)),
    "gradient of a grouped image": ("conv_general_dilated", grad(conv(feature_group_count=2)), (IMAGE, GROUPED)),
    "gradient of a depthwise kernel": (
        "conv_general_dilated",
        grad(conv(feature_group_count=8), 1),
        (IMAGE, DEPTHWISE),
    ),
    "convolution of grouped batches": (
        "conv_general_dilated",
        conv(batch_group_count=8),
        (real(16, 8, 4, 4), real(8, 8, 3, 3)),
    ),
    "ragged product": ("ragged_dot_general", lax.ragged_dot, (real(16, 8), real(4, 8, 16), SIZES)),
    "ragged product that sums over rows": ("ragged_dot_general", ragged_sum, (real(16, 8), real(16, 8), SIZES)),
    # Elements at indices.
    "rows, clipped": ("gather", take("clip"), (TABLE, ROWS)),
    "rows, or what fills": ("gather", take("fill"), (TABLE, ROWS)),
    "rows, or a number": ("gather", take("fill", fill_value=2.0), (TABLE, ROWS)),
    "rows of integers, or the least one": ("gather", take("fill"), (whole(32, 8), ROWS)),
    "rows of bytes, clipped": ("gather", take("clip"), (whole(32, 8, dtype=jnp.uint8), ROWS)),
    "rows at large unsigned indices, clipped": ("gather", take("clip"), (TABLE, ROWS.astype(jnp.uint32))),
    "rows at small unsigned indices, or what fills": ("gather", take("fill"), (TABLE, ROWS.astype(jnp.uint8))),
    "rows that are there": ("gather", take("promise_in_bounds"), (TABLE, jnp.clip(ROWS, 0, 31))),
    "rows as in Python": ("gather", lambda w, i: w[i], (TABLE, ROWS)),
    "rows at a table of indices": ("gather", take("clip"), (TABLE, indices(2, 4, size=32))),
    "rows of booleans": ("gather", take("clip"), (TABLE > 0, ROWS)),
    "one row": ("gather", take("clip"), (TABLE, indices(4, size=32)[1:2])),
    "pairs of rows": ("gather", take_pairs, (TABLE, ROWS[:, None])),
    "elements, clipped": ("gather", take_elements("clip"), (MATRIX, indices(8, size=8), indices(8, size=16)[::-1])),
    "elements, or what fills": (
        "gather",
        take_elements("fill"),
        (MATRIX, indices(8, size=8), indices(8, size=16)[::-1]),
    ),
    "integers at pairs, or the least one": (
        "gather",
        take_elements("fill"),
        (whole(8, 16), indices(8, size=8), indices(8, size=16)[::-1]),
    ),
    "take along an axis": (
        "gather",
        lambda x, i: jnp.take_along_axis(x, i, axis=-1, mode="clip"),
        (real(4, 2, 16), indices(4, 2, 4, size=16)),
    ),
    "take along an axis, or what fills": (
        "gather",
        lambda x, i: jnp.take_along_axis(x, i, axis=-1),
        (real(4, 2, 16), indices(4, 2, 4, size=16)),
    ),
    "gradient of rows": ("scatter-add", grad(take("clip")), (TABLE, ROWS)),
    "gradient of an axis": (
        "scatter-add",
        grad(lambda x, i: jnp.take_along_axis(x, i, axis=-1)),
        (real(4, 2, 16), indices(4, 2, 4, size=16)),
    ),
    "rows added": ("scatter-add", put("add", "drop"), (TABLE, ROWS, real(8, 8))),
    "rows added, clipped": ("scatter-add", put("add", "clip"), (TABLE, ROWS, real(8, 8))),
    "rows added that are there": (
        "scatter-add",
        put("add", "promise_in_bounds", indices_are_sorted=True),
        (TABLE, jnp.sort(jnp.clip(ROWS, 0, 31)), real(8, 8)),
    ),
    "integers added": ("scatter-add", put("add", "drop"), (whole(32, 8), ROWS, whole(8, 8))),
    "elements added, clipped": (
        "scatter-add",
        put_elements("add", "clip"),
        (MATRIX, indices(8, size=8), indices(8, size=16)[::-1], real(8)),
    ),
    "rows set": ("scatter", put("set", "drop"), (TABLE, indices(8, size=32), real(8, 8))),
    "rows set, clipped": ("scatter", put("set", "clip"), (TABLE, ROWS[:3], real(3, 8))),
    "rows set at unsigned indices": (
        "scatter",
        put("set", "drop"),
        (real(1024, 2), jnp.arange(248, 256, dtype=jnp.uint8), real(8, 2)),
    ),
    "rows set that move their windows": (
        "scatter",
        put_windows("clip"),
        (TABLE, jnp.asarray([[3, 0], [40, 0]], jnp.int32), real(2, 8)),
    ),
    "greatest of rows": ("scatter-max", put("max", "drop"), (TABLE, ROWS, real(8, 8))),
    "rows multiplied": ("scatter-mul", put("multiply", "drop"), (TABLE, ROWS, real(8, 8))),
    # Positions along a dimension.
    "iota": ("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1), ()),
    "iota of bytes": ("iota", lambda: lax.broadcasted_iota(jnp.uint8, (256, 2), 0), ()),
    "iota in sixteen bits": ("iota", lambda: lax.iota(jnp.bfloat16, 6000), ()),
    "slice": ("slice", lambda x: x[:, 1:9:2], (MATRIX,)),
    "slice of nothing": ("slice", lambda x: x[:, 3:3], (MATRIX,)),
    "sum of nothing": ("reduce_sum", lambda x: x.sum(1), (real(8, 0),)),
    "slice from one dimension of three": ("slice", lambda x: x[:, 2:5], (real(8, 8, 16),)),
    "slice of keys": ("slice", lambda k: k[:, 1:3], (keys(8, 4),)),
    "dynamic slice": ("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 16)), (MATRIX, jnp.asarray(7))),
    "dynamic update": (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (MATRIX, real(2, 16), jnp.asarray(3)),
    ),
    "concatenate": ("concatenate", lambda x, y: jnp.concatenate([x, y], 1), (MATRIX, TABLE[:8])),
    "pad": ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 2))), (MATRIX,)),
    "pad with ones": ("pad", lambda x: lax.pad(x, 1.0, ((0, 0, 0), (1, 2, 0))), (MATRIX,)),
    "reverse": ("rev", lambda x: lax.rev(x, (1,)), (MATRIX,)),
    "cumulative sum": ("cumsum", lambda x: lax.cumsum(x, 1), (MATRIX,)),
    "cumulative maximum": ("cummax", lambda x: lax.cummax(x, 0), (MATRIX,)),
    "sort": ("sort", lambda x: lax.sort(x, dimension=0), (MATRIX,)),
    "sort pairs": ("sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (whole(8, 16), MATRIX)),
    "largest two": ("top_k", lambda x: lax.top_k(x, 2), (MATRIX,)),
    "split in two": ("split", lambda x: lax.split(x, (4, 12), 1), (MATRIX,)),
    "Fourier transform": ("fft", jnp.fft.fft, (MATRIX,)),
    "real Fourier transform": ("fft", jnp.fft.rfft, (MATRIX,)),
    "sums of windows": ("reduce_window_sum", lambda x: pool(x, 0.0, lax.add), (IMAGE,)),
    "largest of windows": ("reduce_window_max", lambda x: pool(x, -jnp.inf, lax.max), (IMAGE,)),
    "gradient of the largest of windows": (
        "select_and_scatter_add",
        grad(lambda x: pool(x, -jnp.inf, lax.max)),
        (IMAGE,),
    ),
    # Matrices one by one.
    "cholesky": ("cholesky", lambda x: lax.linalg.cholesky(x @ x.mT + 4 * jnp.eye(4)), (real(8, 4, 4),)),
    "triangular solve": (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
        (real(8, 4, 4) + 4 * jnp.eye(4), real(8, 4, 2)),
    ),
    "triangular solve of many sides": (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b),
        (real(4, 4) + 4 * jnp.eye(4), real(8, 4)),
    ),
    # Random numbers.
    "random bits": ("random_bits", bits(8, 16), (keys(),)),
    "random bytes": ("random_bits", bits(8, 4, 4, width=8), (keys(),)),
    "random bits by sixteen": ("random_bits", bits(64, width=16), (keys(),)),
    "random bits of several keys": ("random_bits", lambda k: jax.vmap(bits(16))(k), (keys(8),)),
    "random bits of another generator": ("random_bits", bits(8, 16), (jax.random.key(0, impl="rbg"),)),
    "fresh keys": ("random_split", lambda k: jax.random.split(k, 8), (keys(),)),
    "a key for a step": ("random_fold_in", jax.random.fold_in, (keys(), jnp.asarray(3))),
    "a key of words": ("random_wrap", jax.random.wrap_key_data, (whole(8, 2, dtype=jnp.uint32),)),
    "words of a key": ("random_unwrap", jax.random.key_data, (keys(8),)),
    "bits by XLA": ("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (8, 16)), (whole(4, dtype=jnp.uint32),)),
}


def equation(primitive: str, function: Callable[..., Any], args: Sequence[Any]) -> tuple[jc.JaxprEqn, list[Any]]:
    """The last equation of a primitive in the normalised trace of a function, and its operands."""
    jaxpr, consts = jc.open_jaxpr(normalize(jax.make_jaxpr(function)(*args)))
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def value(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, jc.Literal) else values[atom]

    wanted = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == primitive][-1]
    for eqn in jaxpr.eqns:
        if eqn is wanted:
            break
        values.update(zip(eqn.outvars, jc.bind_equation(eqn, [value(atom) for atom in eqn.invars]), strict=True))
    return wanted, [value(atom) for atom in wanted.invars]
