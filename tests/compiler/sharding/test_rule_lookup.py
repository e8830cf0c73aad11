"""Which dimensions of an equation are split together: a table of rules, and the promise that each of them makes."""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.primitives import ELEMENTWISE, REDUCTIONS
from autopar.compiler.sharding.rule import JoinedFactors, Rule
from autopar.compiler.sharding.rule_lookup import equation_key, rules_by_lowering, sharding_rules
from autopar.errors import ReplicatedWarning


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def u32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


def boolean(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


def keys(*shape):
    return jax.ShapeDtypeStruct(shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)


def conv(**params):
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", **params)


def conv_kernel_gradient(**params):
    def loss(x, w):
        return conv(**params)(x, w).sum()

    return jax.grad(loss, argnums=1)


def conv_input_gradient(**params):
    return jax.grad(lambda x, w: conv(**params)(x, w).sum())


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def gathered_columns(x, i):
    numbers = lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,))
    return lax.gather(x, i, numbers, (8, 1), mode="clip")


def gathered_pairs(x, i):
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return lax.gather(x, i, numbers, (2, 16), mode="clip")


def one_equation(function, *args: Any, primitive: str) -> jc.JaxprEqn:
    """The last equation of that primitive in the normalised trace of a function."""
    return [eqn for eqn in traced(function, *args) if eqn.primitive.name == primitive][-1]


def traced(function, *args: Any) -> list[jc.JaxprEqn]:
    """The equations of the normalised trace of a function."""
    return list(jc.open_jaxpr(normalize(jax.make_jaxpr(function)(*args)))[0].eqns)


IMAGE, KERNEL = f32(8, 4, 16, 16), f32(6, 4, 3, 3)

TABLE: dict[str, tuple[str, Any, tuple[Any, ...], str]] = {
    # Elements apart.
    "tanh": ("tanh", jnp.tanh, (f32(8, 16),), "ij->ij"),
    "add": ("add", jnp.add, (f32(8, 16), f32(8, 16)), "ij,ij->ij"),
    "add a scalar": ("add", lambda x: x + 1, (f32(8, 16),), "ij,->ij"),
    "two numbers": ("add", jnp.add, (f32(), f32()), ",->"),
    "erf_inv": ("erf_inv", lax.erf_inv, (f32(8, 16),), "ij->ij"),
    "logistic": ("logistic", jax.nn.sigmoid, (f32(8, 16),), "ij->ij"),
    "integer power": ("integer_pow", lambda x: x**3, (f32(8, 16),), "ij->ij"),
    "igamma": ("igamma", lax.igamma, (f32(8, 16), f32(8, 16)), "ij,ij->ij"),
    "lgamma": ("lgamma", lax.lgamma, (f32(8, 16),), "ij->ij"),
    "convert": ("convert_element_type", lambda x: x.astype(jnp.bfloat16), (f32(8, 16),), "ij->ij"),
    "round to fewer bits": ("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), (f32(8, 16),), "ij->ij"),
    "threefry": ("threefry2x32", threefry2x32_p.bind, (u32(16),) * 4, "i,i,i,i->i,i"),
    "select": ("select_n", lax.select_n, (boolean(8, 16), f32(8, 16), f32(8, 16)), "ij,ij,ij->ij"),
    "select by a scalar": ("select_n", lax.select_n, (boolean(), f32(8, 16), f32(8, 16)), ",ij,ij->ij"),
    "clamp": ("clamp", lambda x: lax.clamp(0.0, x, 1.0), (f32(8, 16),), ",ij,->ij"),
    "barrier": ("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (f32(8), f32(8)), "i,j->i,j"),
    "bits of elements": (
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        (f32(8, 16),),
        "ij->ijk blocked(k)",
    ),
    # Dimensions rearranged.
    "transpose": ("transpose", lambda x: x.transpose(0, 2, 1), (f32(2, 8, 4),), "ijk->ikj"),
    "broadcast rows": ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 16), (1,)), (f32(16),), "i->ji"),
    "broadcast a size of one": (
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim(x, (8, 16), (0, 1)),
        (f32(8, 1),),
        "i1->ij",
    ),
    "repeat a size of one": ("tile", lambda x: lax.tile(x, (1, 16, 1)), (f32(8, 1, 16),), "i1j->ikj"),
    "repeat several elements many times": ("tile", lambda x: lax.tile(x, (1, 12)), (f32(8, 16),), "ij->ik blocked(jk)"),
    "broadcast keys": ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (4, 8)), (keys(8),), "i->ji"),
    "squeeze": ("squeeze", lambda x: lax.squeeze(x, (1,)), (f32(8, 1, 16),), "i1j->ij"),
    "split a dimension": ("reshape", lambda x: x.reshape(8, 4, 16), (f32(8, 64),), "i(jk)->ijk"),
    "merge dimensions": ("reshape", lambda x: x.reshape(32, 64), (f32(8, 4, 64),), "ijk->(ij)k"),
    "move a bound": ("reshape", lambda x: x.reshape(2, 6, 8), (f32(4, 3, 8),), "(ij)kl->i(jk)l"),
    "sizes without a common divisor": (
        "reshape",
        lambda x: x.reshape(12, 8),
        (f32(8, 12),),
        "(ij)k->(il)m blocked(jklm)",
    ),
    "iota": ("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1), (), "->ij"),
    # Reductions.
    "sum": ("reduce_sum", lambda x: x.sum(1), (f32(8, 16),), "ij->i sum(j)"),
    "sum in sixteen bits": (
        "reduce_sum",
        lambda x: x.sum(1),
        (jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),),
        "ij->i sum(j)",
    ),
    "maximum": ("reduce_max", lambda x: x.max(1), (f32(8, 16),), "ij->i max(j)"),
    "minimum": ("reduce_min", lambda x: x.min(0), (f32(8, 16),), "ij->j min(i)"),
    "any": ("reduce_or", lambda x: x.any(1), (boolean(8, 16),), "ij->i blocked(j)"),
    "product": ("reduce_prod", lambda x: x.prod(1), (f32(8, 16),), "ij->i blocked(j)"),
    "argmax": ("argmax", lambda x: jnp.argmax(x, 1), (f32(8, 16),), "ij->i blocked(j)"),
    "a reduction of one's own": (
        "reduce",
        lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * b + a, (1,)),
        (f32(8, 16),),
        "ij,->i blocked(j)",
    ),
    # Products.
    "matrix product": ("dot_general", jnp.matmul, (f32(8, 16), f32(16, 4)), "ij,jk->ik sum(j)"),
    "batched product": (
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((3,), (3,)), ((0, 1), (0, 1)))),
        (f32(2, 4, 8, 16), f32(2, 4, 6, 16)),
        "ijkl,ijml->ijkm sum(l)",
    ),
    "two contracted dimensions": (
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ()))),
        (f32(2, 8, 16), f32(2, 8, 32)),
        "ijk,ijl->kl sum(ij)",
    ),
    "convolution": (
        "conv_general_dilated",
        conv(),
        (IMAGE, KERNEL),
        "ijkl,mjno->impq sum(j) blocked(klnopq)",
    ),
    "depthwise convolution": (
        "conv_general_dilated",
        conv(feature_group_count=4),
        (IMAGE, f32(4, 1, 3, 3)),
        "ijkl,j1mn->ijop blocked(klmnop)",
    ),
    "grouped convolution": (
        "conv_general_dilated",
        conv(feature_group_count=2),
        (IMAGE, f32(6, 2, 3, 3)),
        "i(jk)lm,(jn)kop->i(jn)qr blocked(klmnopqr)",
    ),
    "gradient of a kernel": (
        "conv_general_dilated",
        conv_kernel_gradient(),
        (IMAGE, KERNEL),
        "ijkl,imno->mjpq sum(i) blocked(klnopq)",
    ),
    "gradient of a convolved image": (
        "conv_general_dilated",
        conv_input_gradient(),
        (IMAGE, KERNEL),
        "ijkl,jmno->impq sum(j) blocked(klnopq)",
    ),
    "gradient of a depthwise kernel": (
        "conv_general_dilated",
        conv_kernel_gradient(feature_group_count=4),
        (IMAGE, f32(4, 1, 3, 3)),
        "ijkl,ijmn->j1op sum(i) blocked(klmnop)",
    ),
    "gradient of a grouped kernel": (
        "conv_general_dilated",
        conv_kernel_gradient(feature_group_count=2),
        (IMAGE, f32(6, 2, 3, 3)),
        "i(jk)lm,i(jn)op->(jn)kqr sum(i) blocked(klmnopqr)",
    ),
    "ragged product": (
        "ragged_dot_general",
        lax.ragged_dot,
        (f32(32, 16), f32(4, 16, 8), i32(4)),
        "ij,kjl,m->il sum(j) blocked(km)",
    ),
    "ragged product that sums over rows": (
        "ragged_dot_general",
        lambda a, b, sizes: lax.ragged_dot_general(
            a,
            b,
            sizes,
            lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
            ),
        ),
        (f32(32, 16), f32(32, 8), i32(4)),
        "ij,ik,l->mjk sum(i) blocked(lm)",
    ),
    # Indices.
    "embedding": ("gather", lambda w, i: w[i], (f32(64, 16), i32(4, 8)), "ij,kl1->klj sum(i)"),
    "embedding of booleans": ("gather", lambda w, i: w[i], (boolean(64, 16), i32(4)), "ij,k1->kj blocked(i)"),
    "one row": ("gather", lambda w, i: w.at[i].get(mode="clip"), (f32(64, 16), i32(1)), "ij,11->1j sum(i)"),
    "columns": ("gather", gathered_columns, (f32(8, 16), i32(4, 1)), "ij,k1->ik sum(j)"),
    "pairs of rows": ("gather", gathered_pairs, (f32(8, 16), i32(4, 1)), "ij,k1->klj blocked(il)"),
    "elements at two indices": (
        "gather",
        lambda w, i, j: w[i, j],
        (f32(8, 16), i32(4), i32(4)),
        "ij,kl->k sum(ij) blocked(l)",
    ),
    "take_along_axis": (
        "gather",
        lambda x, i: jnp.take_along_axis(x, i, axis=-1),
        (f32(4, 8, 32), i32(4, 8, 2)),
        "ijk,ijl1->ijl sum(k)",
    ),
    "gradient of an embedding": (
        "scatter-add",
        lambda w, i, u: w.at[i].add(u),
        (f32(64, 16), i32(4, 8), f32(4, 8, 16)),
        "ij,kl1,klj->ij sum(kl)",
    ),
    "rows set": (
        "scatter",
        lambda w, i, u: w.at[i].set(u),
        (f32(64, 16), i32(4), f32(4, 16)),
        "ij,k1,kj->ij blocked(k)",
    ),
    "greatest of rows": (
        "scatter-max",
        lambda w, i, u: w.at[i].max(u),
        (f32(64, 16), i32(4), f32(4, 16)),
        "ij,k1,kj->ij blocked(k)",
    ),
    "gradient of take_along_axis": (
        "scatter-add",
        jax.grad(lambda x, i: jnp.take_along_axis(x, i, axis=-1).sum()),
        (f32(4, 8, 32), i32(4, 8, 2)),
        "ijk,ijl1,ijl->ijk sum(l)",
    ),
    "gradient of a dynamic slice": (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (f32(8, 16), f32(2, 16), i32()),
        "ij,kj,,->lj blocked(ikl)",
    ),
    "dynamic slice": (
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 16)),
        (f32(8, 16), i32()),
        "ij,,->kj blocked(ik)",
    ),
    # Positions along a dimension.
    "slice": ("slice", lambda x: x[:, 1:], (f32(8, 16),), "ij->ik blocked(jk)"),
    "concatenate": (
        "concatenate",
        lambda x, y: jnp.concatenate([x, y], 1),
        (f32(8, 16), f32(8, 4)),
        "ij,ik->il blocked(jkl)",
    ),
    "pad": ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))), (f32(8, 16),), "ij,->ik blocked(jk)"),
    "reverse": ("rev", lambda x: lax.rev(x, (1,)), (f32(8, 16),), "ij->ik blocked(jk)"),
    "cumulative sum": ("cumsum", lambda x: lax.cumsum(x, 1), (f32(8, 16),), "ij->ik blocked(jk)"),
    "sort": ("sort", lambda x: lax.sort(x, dimension=0), (f32(8, 16),), "ij->kj blocked(ik)"),
    "sort pairs": (
        "sort",
        lambda x, y: lax.sort((x, y), dimension=1, num_keys=1),
        (f32(8, 16), f32(8, 16)),
        "ij,ik->il,im blocked(jklm)",
    ),
    "largest two": ("top_k", lambda x: lax.top_k(x, 2), (f32(8, 16),), "ij->ik,il blocked(jkl)"),
    "split in two": ("split", lambda x: lax.split(x, (4, 12), 1), (f32(8, 16),), "ij->ik,il blocked(jkl)"),
    "Fourier transform": ("fft", jnp.fft.fft, (f32(4, 16),), "ij->ik blocked(jk)"),
    "largest of windows": ("reduce_window_max", max_pool, (IMAGE,), "ijkl->ijmn blocked(klmn)"),
    "gradient of the largest of windows": (
        "select_and_scatter_add",
        jax.grad(lambda x: max_pool(x).sum()),
        (IMAGE,),
        "ijkl,ijmn->ijop blocked(klmnop)",
    ),
    # Matrices one by one.
    "cholesky": ("cholesky", lax.linalg.cholesky, (f32(4, 8, 8),), "ijk->ilm blocked(jklm)"),
    "triangular solve": (
        "triangular_solve",
        lax.linalg.triangular_solve,
        (f32(4, 8, 8), f32(4, 3, 8)),
        "ijk,ilm->iln blocked(jkmn)",
    ),
    "triangular solve from the left": (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
        (f32(8, 8), f32(8, 3)),
        "ij,kl->ml blocked(ijkm)",
    ),
    "eigenvalues": ("eigh", lambda x: lax.linalg.eigh(x), (f32(4, 8, 8),), "ijk->ilm,in blocked(jklmn)"),
    "lu": ("lu", lax.linalg.lu, (f32(4, 8, 8),), "ijk->ilm,in,io blocked(jklmno)"),
    # Random numbers.
    "random bits": ("random_bits", lambda k: jax.random.bits(k, (8, 16)), (keys(),), "->ij"),
    "fresh keys": ("random_split", lambda k: jax.random.split(k, 8), (keys(),), "->i blocked(i)"),
    "a key of words": ("random_wrap", lambda w: jax.random.wrap_key_data(w), (u32(2),), "i-> blocked(i)"),
    "bits by XLA": (
        "rng_bit_generator",
        lambda k: lax.rng_bit_generator(k, (8, 16)),
        (u32(4),),
        "i->j,kl blocked(ijkl)",
    ),
}


@functools.cache
def rules() -> dict[str, tuple[jc.JaxprEqn, Rule]]:
    """The equations of the table and their rules, lowered together as those of a step are."""
    eqns = [one_equation(function, *args, primitive=primitive) for primitive, function, args, _ in TABLE.values()]
    return {name: pair for name, *pair in zip(TABLE, eqns, sharding_rules(eqns))}


@pytest.mark.parametrize("name", TABLE)
def test_rule_of_an_equation_is(name):
    _, rule = rules()[name]
    assert str(rule) == TABLE[name][3]


# Shardy has no rule for igamma.
COMMON = (ELEMENTWISE - {"igamma"}) | REDUCTIONS | {"transpose", "broadcast_in_dim", "dot_general"}


@pytest.mark.parametrize("name", [name for name, (primitive, *_) in TABLE.items() if primitive in COMMON])
def test_rules_of_common_equations_have_the_factors_that_shardy_gives_them(name):
    eqn, rule = rules()[name]
    (lowered,) = rules_by_lowering([eqn])
    assert (rule.sizes, rule.operands, rule.results) == (lowered.sizes, lowered.operands, lowered.results)


@pytest.mark.parametrize("name", TABLE)
def test_sizes_of_the_factors_of_a_dimension_multiply_to_its_size(name):
    eqn, rule = rules()[name]
    for atoms, arrays in ((eqn.invars, rule.operands), (eqn.outvars, rule.results)):
        for atom, dims in zip(atoms, arrays, strict=True):
            assert tuple(math.prod(rule.sizes[f] for f in factors) for factors in dims) == atom.aval.shape
            assert all(rule.sizes[f] > 1 for factors in dims for f in factors)
    assert not rule.blocked & rule.reductions.keys()


# Parts of these are shifted to their place, which only a device on a mesh knows.
AT_A_PLACE = ("iota", "random_bits")


@pytest.mark.parametrize("name", [name for name, (primitive, *_) in TABLE.items() if primitive not in AT_A_PLACE])
def test_equation_on_parts_gives_the_parts_of_its_results(name):
    eqn, rule = rules()[name]
    operands = example_operands(eqn)
    whole = jc.bind_equation(eqn, operands)
    for factor in range(len(rule.sizes)):
        if can_be_split(eqn, rule, factor):
            size = rule.sizes[factor]
            parts = next(n for n in range(2, size + 1) if size % n == 0)
            local = [on_part(eqn, rule, factor, operands, part, parts) for part in range(parts)]
            check_parts(rule, factor, whole, local)


def can_be_split(eqn: jc.JaxprEqn, rule: Rule, factor: int) -> bool:
    """Not blocked, the major factor wherever it stands, and not a dimension that indices or groups point into."""
    dims = [factors for array in (*rule.operands, *rule.results) for factors in array]
    indexed = eqn.primitive.name == "gather" and factor in rule.reductions
    indexed |= eqn.primitive.name == "ragged_dot_general" and (factor,) == rule.operands[0][0]
    indexed |= eqn.primitive.name.startswith("scatter") and _is_scattered_into(eqn, rule, factor)
    return factor not in rule.blocked and not indexed and all(factor not in factors[1:] for factors in dims)


def _is_scattered_into(eqn: jc.JaxprEqn, rule: Rule, factor: int) -> bool:
    inserted = eqn.params["dimension_numbers"].inserted_window_dims
    return any((factor,) == rule.operands[0][d] for d in inserted)


def on_part(
    eqn: jc.JaxprEqn, rule: Rule, factor: int, operands: Sequence[Any], part: int, parts: int
) -> list[np.ndarray]:
    """The equation on one part of its operands along a factor."""

    def taken(array: Any, dims: Sequence[Sequence[int]]) -> Any:
        for d, factors in enumerate(dims):
            if factor in factors:
                size = array.shape[d] // parts
                array = lax.slice_in_dim(array, part * size, (part + 1) * size, axis=d)
        return array

    local = [taken(array, dims) for array, dims in zip(operands, rule.operands, strict=True)]
    if eqn.primitive.name == "scatter-add" and factor in rule.reductions and part:
        local[0] = jnp.zeros_like(local[0])
    return jc.bind_equation(eqn, local, local_params(eqn, rule, factor, parts))


def local_params(eqn: jc.JaxprEqn, rule: Rule, factor: int, parts: int) -> dict[str, Any]:
    """The parameters that hold shapes, for parts."""

    def shrunk(sizes: Sequence[int], dims: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return tuple(size // parts if factor in own else size for size, own in zip(sizes, dims, strict=True))

    params, results = dict(eqn.params), rule.results[0]
    match eqn.primitive.name:
        case "broadcast_in_dim":
            params["shape"] = shrunk(params["shape"], results)
        case "tile":
            sizes = shrunk(eqn.invars[0].aval.shape, rule.operands[0])
            wanted = shrunk(eqn.outvars[0].aval.shape, results)
            params["reps"] = tuple(n // size for n, size in zip(wanted, sizes, strict=True))
        case "reshape":
            params["new_sizes"] = shrunk(params["new_sizes"], results)
        case "slice":
            params["limit_indices"] = shrunk(params["limit_indices"], results)
        case "dynamic_slice":
            params["slice_sizes"] = shrunk(params["slice_sizes"], results)
        case "gather":
            windows = shrunk(params["slice_sizes"], rule.operands[0])
            params["slice_sizes"] = tuple(max(1, size) for size in windows)
        case "conv_general_dilated":
            numbers = params["dimension_numbers"]
            if factor in rule.operands[0][numbers.lhs_spec[1]] and params["feature_group_count"] > 1:
                params["feature_group_count"] //= parts
            if factor in rule.operands[0][numbers.lhs_spec[0]] and params["batch_group_count"] > 1:
                params["batch_group_count"] //= parts
        case _:
            pass
    return params


def check_parts(rule: Rule, factor: int, whole: Sequence[Any], local: Sequence[Sequence[Any]]) -> None:
    """Parts put together, reduced, or all alike, are the results."""
    reduce = {"sum": np.sum, "max": np.max, "min": np.min}
    for i, result in enumerate(whole):
        parts = [as_numbers(results[i]) for results in local]
        split = [d for d, factors in enumerate(rule.results[i]) if factor in factors]
        if split:
            together = np.concatenate(parts, axis=split[0])
        elif factor in rule.reductions:
            together = reduce[rule.reductions[factor]](np.stack(parts), axis=0)
        else:
            together = parts[0]
            for part in parts[1:]:
                np.testing.assert_array_equal(part, together)
        # Parts are summed in another order than the whole; what cancels leaves the errors of its greatest terms.
        expected = as_numbers(result)
        rtol = 2e-2 if result.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(together, expected, rtol=rtol, atol=1e-6 * np.abs(expected).max(initial=1))


def as_numbers(array: Any) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)


def example_operands(eqn: jc.JaxprEqn) -> list[Any]:
    """Random numbers of the operands' types; small ones where they may be indices or the sizes of groups."""
    random = np.random.default_rng(0)

    def example(atom: Any) -> Any:
        if isinstance(atom, jc.Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        shape, dtype = atom.aval.shape, atom.aval.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), shape)
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.asarray(random.integers(0, 4, shape), dtype)
        if dtype == jnp.bool_:
            return jnp.asarray(random.integers(0, 2, shape), dtype)
        values = random.normal(size=shape)
        if eqn.primitive.name == "cholesky":
            values = values @ values.swapaxes(1, 2) + 8 * np.eye(shape[-1])
        inside = {"igamma": np.abs, "lgamma": np.abs, "erf_inv": np.tanh}
        return jnp.asarray(inside.get(eqn.primitive.name, np.asarray)(values), dtype)

    return [example(atom) for atom in eqn.invars]


def test_equal_equations_have_one_key_whatever_their_shardings_and_operands():
    def step(x, y):
        return jnp.tanh(x) + jnp.tanh(y), jnp.tanh(x[:4])

    first, second, smaller = [eqn for eqn in traced(step, f32(8, 4), f32(8, 4)) if eqn.primitive.name == "tanh"]
    assert equation_key(first) == equation_key(second) != equation_key(smaller)
    assert hash(equation_key(first)) == hash(equation_key(second))


def test_equations_that_differ_in_type_or_parameters_have_keys_of_their_own():
    def step(x, y):
        return x.sum(0), x.sum(1), y.sum(0)

    sums = [eqn for eqn in traced(step, f32(4, 4), i32(4, 4)) if eqn.primitive.name == "reduce_sum"]
    assert len({equation_key(eqn) for eqn in sums}) == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.pure_callback(np.sin, f32(8, 16), x),
        lambda x: jax.pure_callback(lambda y: y.sum(), f32(), x),
    ],
    ids=["callback", "callback that returns a number"],
)
def test_what_nobody_knows_is_replicated_with_one_warning_that_names_it(function):
    eqns = [eqn for eqn in traced(function, f32(8, 16)) if eqn.primitive.name == "pure_callback"]
    with pytest.warns(ReplicatedWarning, match=r"`pure_callback` -> .*test_rule_lookup.* gathered") as caught:
        found = sharding_rules(eqns * 2)
    assert len(caught) == 1
    assert all(rule.source == "none" and rule.blocked == set(range(len(rule.sizes))) for rule in found)


def test_a_callback_on_single_numbers_loses_nothing_and_warns_of_nothing():
    (eqn,) = traced(lambda x: jax.debug.print("loss {}", x), f32())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (rule,) = sharding_rules([eqn])
    assert (str(rule), rule.source) == ("->", "by hand")


def test_one_equation_that_cannot_be_lowered_leaves_the_others_their_rules():
    broken = jc.unlowered_primitive("never_lowered", "a test asks for it")
    broken.def_abstract_eval(lambda x: x)
    eqns = traced(lambda x, y: (jnp.tanh(x) @ y, broken.bind(x)), f32(8, 16), f32(16, 2))
    with pytest.warns(ReplicatedWarning, match="never_lowered"):
        found = {eqn.primitive.name: str(rule) for eqn, rule in zip(eqns, sharding_rules(eqns))}
    assert found == {"tanh": "ij->ij", "dot_general": "ij,jk->ik sum(j)", "never_lowered": "ij->kl blocked(ijkl)"}


@pytest.mark.parametrize("primitive", ["scan", "while", "cond"])
def test_equations_with_bodies_are_not_to_be_asked_for(primitive):
    def step(x):
        x, _ = lax.scan(lambda c, _: (c + 1, None), x, length=3)
        x = lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x)
        return lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    with pytest.raises(AssertionError, match="has a body"):
        sharding_rules([one_equation(step, f32(8), primitive=primitive)])


def test_a_long_chain_of_equal_dimensions_is_followed_to_its_end():
    joined = JoinedFactors()
    chain = [joined.new(6) for _ in range(5000)]
    for one, other in zip(chain[1:], chain):
        joined.join([one], [other])
    joined.join([joined.new(2), joined.new(3)], [chain[0]])
    assert [joined.size([f]) for f in joined.resolved([chain[-1]])] == [2, 3]
    assert joined.resolved([chain[-1]]) == joined.resolved([chain[0]])
