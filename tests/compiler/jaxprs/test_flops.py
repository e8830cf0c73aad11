"""FLOPs and bytes of equations: those of XLA for products and convolutions, counted by hand for the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from autopar.compiler.jaxprs.flops import aval_bytes, equation_bytes, equation_flops, jaxpr_bytes, jaxpr_flops


def ones(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def flops(fun, *args) -> float:
    return jaxpr_flops(jax.make_jaxpr(fun)(*args))


def bytes_moved(fun, *args) -> float:
    return jaxpr_bytes(jax.make_jaxpr(fun)(*args))


def xla_flops(fun, *args) -> float:
    return jax.jit(fun).lower(*args).cost_analysis()["flops"]


def convolution(strides=(1, 1), padding="SAME", layout=("NHWC", "HWIO", "NHWC"), **fields):
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=layout, **fields)


IMAGES, KERNEL = ones(4, 9, 8, 6), ones(3, 2, 6, 10)

PRODUCTS = {
    "matmul": (jnp.matmul, (ones(5, 6), ones(6, 7))),
    "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (ones(3, 5, 6), ones(3, 6, 7))),
    "contracted twice": (lambda a, b: jnp.tensordot(a, b, 2), (ones(5, 6, 7), ones(6, 7, 2))),
    "outer": (jnp.outer, (ones(5), ones(7))),
    "convolution": (convolution(), (IMAGES, KERNEL)),
    "strided": (convolution((2, 3)), (IMAGES, KERNEL)),
    "padded": (convolution(padding=((5, 0), (1, 2))), (IMAGES, KERNEL)),
    "cropped": (convolution(padding=((-1, 0), (0, -2))), (IMAGES, KERNEL)),
    "dilated kernel": (convolution(rhs_dilation=(2, 3)), (IMAGES, KERNEL)),
    "transposed": (convolution(padding=((1, 1), (1, 0)), lhs_dilation=(2, 2)), (IMAGES, KERNEL)),
    "both dilated": (
        convolution((2, 1), ((3, 1), (0, 2)), lhs_dilation=(3, 2), rhs_dilation=(2, 1)),
        (IMAGES, KERNEL),
    ),
    "feature groups": (convolution(feature_group_count=3), (IMAGES, ones(3, 2, 2, 9))),
    "batch groups": (convolution(batch_group_count=2), (IMAGES, ones(3, 2, 6, 10))),
    "channels first": (
        convolution((2, 2), layout=("NCHW", "OIHW", "NCHW")),
        (ones(4, 6, 9, 8), ones(10, 6, 3, 2)),
    ),
    "one dimension": (convolution((2,), layout=("NHC", "HIO", "NHC")), (ones(4, 9, 6), ones(3, 6, 10))),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_and_convolutions_count_as_in_xla(case):
    fun, args = PRODUCTS[case]
    assert flops(fun, *args) == xla_flops(fun, *args)


@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize("case", ["strided", "padded", "dilated kernel", "feature groups"])
def test_backward_of_a_convolution_costs_as_much_as_its_forward(case, argument):
    fun, args = PRODUCTS[case]
    output = fun(*args)
    backward = jax.make_jaxpr(lambda x, w, g: jax.vjp(fun, x, w)[1](g)[argument])(*args, output)
    products = [eqn for eqn in backward.jaxpr.eqns if eqn.primitive.name == "conv_general_dilated"]
    # The forward is among them, unless it is dead code that make_jaxpr already left out.
    assert {equation_flops(eqn) for eqn in products} == {flops(fun, *args)}


def test_ragged_dot_costs_one_dot_for_all_groups():
    sizes = jnp.array([1, 2, 3], jnp.int32)
    assert flops(lambda x, w: lax.ragged_dot(x, w, sizes), ones(6, 8), ones(3, 8, 5)) == 2 * 6 * 8 * 5


def inner_equations(jaxpr):
    """The equations of a jaxpr, and after each those of the functions that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name == "jit":
            yield from inner_equations(getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]))


def pallas_double(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2.0

    block = pl.BlockSpec((2, 16), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, grid=(4,), in_specs=[block], out_specs=block)(x)


def sharded_sine(x):
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@jax.custom_vjp
def cubed(x):
    return x * x * x


cubed.defvjp(lambda x: (cubed(x), x), lambda x, g: (3 * x * x * g,))


@pytest.mark.parametrize(
    ("name", "fun", "args", "expected"),
    [
        ("add", jnp.add, (ones(3, 4), ones(3, 4)), 12),
        ("tanh", jnp.tanh, (ones(3, 4),), 12),
        ("random_bits", lambda k: jax.random.bits(k, (3, 4)), (jax.random.key(0),), 12),
        ("transpose", jnp.transpose, (ones(3, 4),), 0),
        ("slice", lambda x: lax.slice(x, (0,), (2,)), (ones(9),), 0),
        ("convert_element_type", lambda x: x.astype(jnp.bfloat16), (ones(3, 4),), 0),
        ("optimization_barrier", lax.optimization_barrier, (ones(3, 4),), 0),
        ("reduce_sum", jnp.sum, (ones(3, 4),), 12),
        ("argmax", lambda x: lax.argmax(x, 0, jnp.int32), (ones(3, 4),), 12),
        ("cumsum", lambda x: lax.cumsum(x, 1), (ones(3, 4),), 12),
        ("reduce", lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * 2, (0,)), (ones(3, 4),), 24),
        (
            "reduce_window_sum",
            lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "VALID"),
            (ones(4, 6),),
            24,
        ),
        (
            "reduce_window",
            lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + b * 2, (2, 2), (2, 2), "VALID"),
            (ones(4, 6),),
            48,
        ),
        (
            "select_and_scatter_add",
            jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()),
            (ones(4, 6),),
            24 + 6,
        ),
        ("sort", lambda x: lax.sort(x, dimension=0), (ones(5, 3),), 15 * 3),
        ("top_k", lambda x: lax.top_k(x, 3), (ones(2, 10),), 20 * 2),
        ("scatter-add", lambda x: x.at[jnp.array([0, 2])].add(ones(2, 4)), (ones(3, 4),), 8),
        ("scatter", lambda x: x.at[jnp.array([0, 2])].set(ones(2, 4)), (ones(3, 4),), 0),
        ("gather", lambda x: x[jnp.array([0, 2])], (ones(3, 4),), 0),
        (
            "triangular_solve",
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
            (ones(3, 3), ones(3, 5)),
            3 * 3 * 5,
        ),
        ("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (ones(2, 3, 3),), 2 * 9),
        ("fft", lambda x: lax.fft(x, "fft", (8,)), (ones(2, 8, dtype=jnp.complex64),), 5 * 16 * 3),
        ("fft", lambda x: lax.fft(x, "rfft", (8,)), (ones(2, 8),), 2.5 * 16 * 3),
        ("jit", jax.jit(jnp.sin), (ones(3),), 3),
        ("remat2", jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), (ones(3),), 6),
        ("custom_jvp_call", jax.nn.relu, (ones(3),), 3),
        ("custom_vjp_call", cubed, (ones(3),), 6),
        ("pallas_call", pallas_double, (ones(8, 16),), 128),
        ("shard_map", sharded_sine, (ones(8, 16),), 128),
        ("cond", lambda x: lax.cond(x[0] > 0, lambda: x, lambda: x * x + x), (ones(4),), 8),
        (
            "custom_linear_solve",
            lambda x: lax.custom_linear_solve(lambda y: y * 2, x, lambda _, y: y / 2, lambda _, y: y / 2),
            (ones(4),),
            4,
        ),
    ],
)
def test_equations_cost_what_a_count_by_hand_gives(name, fun, args, expected):
    eqns = inner_equations(jax.make_jaxpr(fun)(*args).jaxpr)
    assert [equation_flops(eqn) for eqn in eqns if eqn.primitive.name == name][:1] == [expected]


def test_scan_costs_its_length_times_its_body():
    def body(carry, x):
        return carry @ x, jnp.sum(carry)

    matrices, start = ones(7, 4, 4), ones(4, 4)
    once = flops(body, start, matrices[0])
    assert once == 2 * 4**3 + 16
    assert flops(lambda c, xs: lax.scan(body, c, xs), start, matrices) == 7 * once
    assert bytes_moved(lambda c, xs: lax.scan(body, c, xs), start, matrices) == 7 * bytes_moved(
        body, start, matrices[0]
    )


def counted_loop(start, keeps_on, step):
    def loop(x):
        return lax.while_loop(lambda c: keeps_on(c[0]), lambda c: (step(c[0]), c[1] * 2), (jnp.int32(start), x))

    return loop


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (counted_loop(0, lambda i: i < 10, lambda i: i + 1), 10),
        (counted_loop(0, lambda i: i < 10, lambda i: i + 3), 4),
        (counted_loop(0, lambda i: i <= 9, lambda i: i + 3), 4),
        (counted_loop(9, lambda i: i > 0, lambda i: i - 2), 5),
        (counted_loop(9, lambda i: i >= 1, lambda i: i - 2), 5),
        (counted_loop(2, lambda i: lax.gt(jnp.int32(7), i), lambda i: 1 + i), 5),
        (counted_loop(9, lambda i: i < 3, lambda i: i + 1), 0),
        (counted_loop(9, lambda i: i < 3, lambda i: i - 1), 0),
        (lambda x: lax.fori_loop(2, jnp.int32(9), lambda i, y: y * 2, x), 7),
        # Trips that depend on values count once.
        (counted_loop(0, lambda i: i < 10, lambda i: i * 2 + 1), 1),
        (counted_loop(0, lambda i: i != 10, lambda i: i + 1), 1),
        (lambda x: lax.while_loop(lambda y: y[0] < 9, lambda y: y * 2, x), 1),
    ],
)
def test_while_costs_its_trips_where_literals_tell_them(loop, trips):
    jaxpr = jax.make_jaxpr(loop)(ones(100))
    (eqn,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "while"]
    # The counter and the comparison add at most 3 each time; the body has 100.
    assert equation_flops(eqn) // 100 == trips


def test_gradient_of_a_model_costs_three_times_its_forward_products():
    x, weights = ones(32, 64), (ones(64, 128), ones(128, 8))

    def loss(weights):
        return jnp.sum((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    def products(fun):
        eqns = jax.make_jaxpr(fun)(weights).jaxpr.eqns
        return sum(equation_flops(eqn) for eqn in eqns if eqn.primitive.name == "dot_general")

    first, second = 2 * 32 * 64 * 128, 2 * 32 * 128 * 8
    assert products(loss) == first + second
    assert products(jax.grad(loss)) == 2 * first + 3 * second  # nobody asks for the gradient of x


@pytest.mark.parametrize(
    ("fun", "args", "expected"),
    [
        (jnp.add, (ones(3, 4), ones(3, 4)), 3 * 48),
        (lambda x: x * x, (ones(3, 4),), 2 * 48),  # read once
        (jnp.matmul, (ones(5, 6), ones(6, 7)), 4 * (30 + 42 + 35)),
        (lambda x: x.astype(jnp.bfloat16), (ones(3, 4),), 48 + 24),
        (lambda x: x.reshape(12), (ones(3, 4),), 0),
        (lambda x: lax.slice(x, (0,), (2,)), (ones(900),), 2 * 8),
        (lambda x: lax.dynamic_slice(x, (0,), (2,)), (ones(900),), 2 * 8 + 4),
        (lambda x: lax.dynamic_update_slice(x, ones(2), (0,)), (ones(900),), 2 * 8 + 4),
        (jax.jit(jnp.sin), (ones(3),), 24),
        (pallas_double, (ones(8, 16),), 2 * 512),
    ],
)
def test_equations_read_their_operands_and_write_their_results(fun, args, expected):
    last = jax.make_jaxpr(fun)(*args).jaxpr.eqns[-1]
    assert equation_bytes(last) == expected


def test_gather_and_scatter_touch_the_rows_they_name_only():
    table, rows, indices = ones(1000, 8), ones(2, 8), jnp.zeros((2, 1), jnp.int32)
    take = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    put = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    rows_bytes, index_bytes = 64, 8
    assert bytes_moved(lambda t, i: lax.gather(t, i, take, (1, 8), mode="clip"), table, indices) >= 2 * rows_bytes
    (gather,) = [
        eqn
        for eqn in jax.make_jaxpr(lambda t, i: lax.gather(t, i, take, (1, 8)))(table, indices).jaxpr.eqns
        if eqn.primitive.name == "gather"
    ]
    assert equation_bytes(gather) == 2 * rows_bytes + index_bytes
    for fun, passes in ((lax.scatter, 2), (lax.scatter_add, 3)):
        (eqn,) = jax.make_jaxpr(lambda t, i, r, fun=fun: fun(t, i, r, put))(table, indices, rows).jaxpr.eqns
        assert equation_bytes(eqn) == passes * rows_bytes + index_bytes


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (jnp.bool_, 15),
        (jnp.int8, 15),
        (jnp.bfloat16, 30),
        (jnp.float8_e4m3fn, 15),
        (jnp.float32, 60),
        (jnp.complex64, 120),
        (jnp.int4, 8),
        (jnp.uint4, 8),
    ],
)
def test_bytes_of_an_array_are_those_that_xla_takes(dtype, expected):
    aval = jax.ShapeDtypeStruct((3, 5), dtype)
    assert aval_bytes(aval) == expected
    compiled = jax.jit(lambda x: x != 0).lower(aval).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == expected


@pytest.mark.parametrize(("impl", "words"), [("threefry2x32", 2), ("rbg", 4)])
def test_bytes_of_keys_are_those_of_their_words(impl, words):
    keys = jax.random.split(jax.random.key(0, impl=impl), 5)
    nbytes = np.asarray(jax.random.key_data(keys)).nbytes
    assert (aval_bytes(jax.typeof(keys)), nbytes) == (5 * 4 * words, 5 * 4 * words)


def test_bytes_of_what_is_no_array_are_none():
    assert aval_bytes(object()) == 0
