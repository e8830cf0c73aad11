"""Seconds of an equation: FLOPs of products, bytes of the rest, divided among the devices that share the work."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from autopar.compiler.costs.compute import equation_s
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs.fusion import alone
from autopar.compiler.sharding.rule import blocked_rule
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import strategies
from autopar.hardware.machine import Link
from tests.compiler.equations import bits, equation, keys, real, whole
from tests.compiler.planned_steps import LINE, mesh_costs

RATES = {"float32": 1e9, "float16": 4e9, "bfloat16": 4e9}
PLAIN = mesh_costs(LINE, peak_flops=RATES, memory_bandwidth=2e8)
BYTES = 4 * 64 * 64


def seconds(case, chosen: MeshCosts = PLAIN):
    """The seconds of every strategy of an equation."""
    eqn, _ = equation(*case)
    (rule,) = sharding_rules([eqn])
    return [equation_s(eqn, strategy, chosen, alone(eqn)) for strategy in strategies(eqn, rule, LINE)]


def changed(**more) -> MeshCosts:
    return dataclasses.replace(PLAIN, machine=dataclasses.replace(PLAIN.machine, **more))


X = real(64, 64)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(("dot_general", jnp.matmul, (X, X)), 2 * 64**3 / 0.88e9, id="product, by its FLOPs"),
        pytest.param(
            ("dot_general", jnp.matmul, (X.astype(jnp.bfloat16),) * 2), 2 * 64**3 / 3.52e9, id="product in sixteen bits"
        ),
        pytest.param(("dot_general", jnp.matmul, (X, real(64))), (BYTES + 512) / 2e8, id="product, by its bytes"),
        pytest.param(("add", jnp.add, (X, X)), 3 * BYTES / 2e8, id="bytes of a kernel of its own"),
        pytest.param(("transpose", jnp.transpose, (X,)), 2 * BYTES / 2e8, id="moves, their bytes"),
        pytest.param(("random_bits", bits(64, 64), (keys(),)), 64 * 64 * 100 * 16 / 1e9, id="random bits, their FLOPs"),
        pytest.param(
            ("gather", lambda w, i: w[i], (real(4096, 64), whole(8))),
            2 * 8 * 64 * 4 / 2e8,
            id="rows, not the table",
        ),
    ],
)
def test_seconds_on_one_device_are_those_of_the_roofline(case, expected):
    assert seconds(case)[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("case", [("dot_general", jnp.matmul, (X, X)), ("add", jnp.add, (X, X))])
def test_no_kernel_is_shorter_than_a_launch_where_a_host_launches_each(case):
    least = min(seconds(case))
    assert min(seconds(case, changed(launch_s=least / 2))) == least
    assert min(seconds(case, changed(launch_s=3 * least))) == pytest.approx(3 * least)


@pytest.mark.parametrize(("columns", "share"), [(64, 1.0), (60, 0.4)])
def test_products_with_rows_of_odd_lengths_are_slower_where_nothing_pads_them(columns, share):
    case = ("dot_general", jnp.matmul, (real(64, 4096), real(4096, columns)))
    padded, apart = seconds(case)[0], seconds(case, changed(unaligned_share=0.4))[0]
    assert apart == pytest.approx(padded / share, rel=0.02)


@pytest.mark.parametrize(("channels", "share"), [(3, 0.25 * 3 / 4), (4, 1.0), (16, 1.0)])
@pytest.mark.parametrize("layout", ["HWIO", "OIHW"])
@pytest.mark.parametrize("examples", [2, 8])  # few of these are no reason
def test_convolutions_of_few_channels_are_slower_with_those_that_libraries_pad_them_to(
    channels, share, layout, examples
):
    sizes = {"H": 5, "W": 5, "I": channels, "O": 512}
    images, kernel = real(examples, 32, 32, channels), real(*(sizes[name] for name in layout))

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", layout, "NHWC"))

    for fn in (convolve, lambda x, y: jax.linear_transpose(lambda w: convolve(x, w), kernel)(y)):
        case = ("conv_general_dilated", fn, (images, kernel if fn is convolve else real(examples, 32, 32, 512)))
        plain, narrow = seconds(case)[0], seconds(case, changed(narrow_share=0.25))[0]
        assert narrow == pytest.approx(plain / share, rel=0.02)


@pytest.mark.parametrize("masks", [False, True])
def test_ragged_products_are_computed_for_every_group_where_each_meets_all_rows(masks):
    case = ("ragged_dot_general", lax.ragged_dot, (X, real(3, 64, 64), whole(3)))
    product_s = 2 * 64**3 / 0.88e9
    expected_s = 3 * product_s + 2 * 3 * BYTES / 2e8 if masks else product_s
    assert seconds(case, changed(masks_ragged_products=masks))[0] == pytest.approx(expected_s, rel=0.02)
    product = ("dot_general", jnp.matmul, (X, X))
    assert seconds(product, changed(masks_ragged_products=masks)) == seconds(product)


def test_small_products_are_slower_than_their_flops_and_kernels_take_time_to_start():
    case = ("dot_general", jnp.matmul, (X, X))
    (plain_s, *_), (slow_s, *_) = seconds(case), seconds(case, changed(matmul_half_flops=1e6))
    assert slow_s - plain_s == pytest.approx(1e6 / 1e9)
    started = changed(kernel_s=0.25)
    assert seconds(case, started)[0] - plain_s == pytest.approx(0.25)
    adds = ("add", jnp.add, (X, X))
    assert seconds(adds, started)[0] - seconds(adds)[0] == pytest.approx(0.25)


@pytest.mark.parametrize("terms", [2, 64, 1024])
def test_untuned_products_with_batch_dimensions_reach_a_share_of_the_rate_and_then_write_their_result(terms):
    batched = ("dot_general", jnp.matmul, (real(4, 64, terms), real(4, terms, 64)))
    (tuned_s, *_), (untuned_s, *_) = seconds(batched), seconds(batched, changed(batched_share=0.5))
    product_s, read_s, write_s = 4 * 2 * 64**2 * terms / 0.88e9, 2 * 4 * 64 * terms * 4 / 2e8, 4 * BYTES / 2e8
    assert tuned_s == pytest.approx(max(product_s, read_s + write_s), rel=0.02)
    assert untuned_s == pytest.approx(max(2 * product_s, read_s) + write_s, rel=0.02)


def test_products_without_batch_dimensions_are_tuned():
    single = ("dot_general", jnp.matmul, (X, X))
    assert seconds(single, changed(batched_share=0.5)) == seconds(single)


def pallas_product(x, y):
    def kernel(_, x_ref, y_ref, result):
        result[...] = x_ref[...] @ y_ref[...]

    places = jnp.zeros(4, jnp.int8)
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(places, x, y)


@pytest.mark.parametrize(("dtype", "rate"), [(jnp.float32, 1e9), (jnp.bfloat16, 4e9)])
def test_kernels_of_users_take_as_long_as_the_products_inside(dtype, rate):
    eqn, _ = equation("pallas_call", pallas_product, (X.astype(dtype), X.astype(dtype)))
    whole, *_ = strategies(eqn, blocked_rule(eqn, "by hand"), LINE)
    assert equation_s(eqn, whole, PLAIN, alone(eqn)) == pytest.approx(2 * 64**3 / (0.88 * rate), rel=0.02)


def test_work_that_is_shared_takes_an_eighth():
    whole_s, *split = seconds(("dot_general", jnp.matmul, (real(512, 512), real(512, 512))))
    assert split == pytest.approx([whole_s / 8] * 3)


def test_a_maximum_over_a_split_dimension_pays_for_its_collective():
    slow = changed(intra=Link(latency_s=1.0, bandwidth=1e10, ramp_bytes=0.0))
    replicated_s, apart, together = seconds(("reduce_max", lambda x: x.max(1), (X,)), slow)
    assert apart == pytest.approx(replicated_s / 8)
    assert together > 2


def test_kernels_with_reductions_reach_their_share_of_the_bandwidth():
    slower = changed(reducing_share=0.5)
    for case in (("reduce_sum", lambda x: x.sum(1), (X,)), ("reduce_max", lambda x: x.max(0), (X,))):
        assert seconds(case, slower)[0] == pytest.approx(2 * seconds(case)[0])
    for case in (("add", jnp.add, (X, X)), ("dot_general", jnp.matmul, (X, X))):
        assert seconds(case, slower) == seconds(case)


@pytest.mark.parametrize(
    "case",
    [
        ("sort", lambda x: lax.sort(x), (X,)),
        ("tanh", jnp.tanh, (X,)),
        ("scatter-add", lambda w, i, u: w.at[i].add(u), (X, whole(8), real(8, 64))),
        ("iota", lambda: lax.iota(jnp.int32, 4096), ()),
    ],
    ids=lambda case: case[0],
)
def test_every_equation_takes_some_time_and_no_more_on_eight_devices(case):
    whole_s, *split = seconds(case)
    assert whole_s > 0
    assert all(0 < each <= whole_s for each in split)
