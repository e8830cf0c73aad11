"""Bytes that go through memory once XLA has fused what it can."""

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import content_key
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.fusion import fused_traffic
from autopar.compiler.jaxprs.fusion_kinds import FusionRules
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.params import scan_of

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ONE = 4 * 64 * 64


def traffic(fn, *args, product_sums: bool = False, **compiler: float):
    """By equation, its name and its traffic."""
    jaxpr, _ = jc.open_jaxpr(normalize(jax.make_jaxpr(fn)(*args)))
    return jaxpr, fused_traffic(jaxpr, rules=FusionRules(product_sums, **compiler))


def moved(fn, *args, **compiler: float) -> float:
    """Bytes read and written by all kernels, in arrays of X."""
    jaxpr, found = traffic(fn, *args, **compiler)
    read = sum(n * aval_bytes(v.aval) for e, t in zip(jaxpr.eqns, found) for n, v in zip(t.reads, e.invars))
    written = sum(n * aval_bytes(v.aval) for e, t in zip(jaxpr.eqns, found) for n, v in zip(t.writes, e.outvars))
    return (read + written) / ONE


def kernels(fn, *args) -> float:
    return sum(each.kernels for each in traffic(fn, *args)[1])


@pytest.mark.parametrize(
    ("fn", "operands", "arrays"),
    [
        pytest.param(lambda x: jnp.tanh(x * 2.0) + 1.0, 1, 2, id="a chain reads and writes once"),
        pytest.param(lambda x, y: (x * y, x + y), 2, 4, id="two results of one kernel share its operands"),
        pytest.param(lambda x: jnp.tanh(x @ x + x), 1, 5, id="a product stands apart"),
        pytest.param(lambda x: jnp.sin(x).T.reshape(-1), 1, 2, id="views move nothing"),
        pytest.param(lambda x: x.sum(), 1, 1, id="a reduction writes next to nothing"),
        pytest.param(lambda x: x - (x * 2.0).sum(1, keepdims=True), 1, 3, id="what a reduction gives is read after it"),
        pytest.param(lambda x: jnp.full((64, 64), 2.0) * x, 1, 2, id="a constant is filled in"),
        pytest.param(lambda x: jnp.zeros((64, 64)) @ x, 1, 4, id="a product reads its constant from memory"),
    ],
)
def test_kernels_move_the_bytes_at_their_borders(fn, operands: int, arrays: float):
    assert moved(fn, *[X] * operands) == pytest.approx(arrays, abs=0.05)


def test_every_equation_but_views_is_a_kernel_where_none_are_joined():
    _, found = traffic(lambda x: jnp.tanh(x * 2.0).T + 1.0, X, fuses=False)
    assert sum(each.kernels for each in found) == 3
    assert moved(lambda x: jnp.tanh(x * 2.0).T + 1.0, X, fuses=False) == pytest.approx(6, abs=0.05)


@pytest.mark.parametrize(
    ("fn", "arrays", "apart"),
    [
        pytest.param(lambda x, w, b: x @ w + b[:, None], 3, 5, id="a bias is added by the kernel of the product"),
        pytest.param(lambda x, w, b: x + (x @ w + b[:, None]), 4, 6, id="and so is what goes past the product"),
        pytest.param(lambda x, w, b: x @ w + w @ x, 7, 9, id="of two products one takes the result of the other"),
        pytest.param(lambda x, w, b: (y := x @ w, y + x), 6, 6, id="not if the result is read by others"),
        pytest.param(lambda x, w, b: (y := x @ w + x) @ w + y, 8, 12, id="the sum is in memory for all that read it"),
    ],
)
def test_products_take_what_is_added_to_them_where_the_compiler_has_them_do_so(fn, arrays: float, apart: float):
    b = jax.ShapeDtypeStruct((64,), jnp.float32)
    assert moved(fn, X, X, b, product_sums=True) == pytest.approx(arrays, abs=0.1)
    assert moved(fn, X, X, b) == pytest.approx(apart, abs=0.1)


def tanh_block(x, w, dy):
    """A product, what follows it, and what goes back through both."""
    y, back = jax.vjp(lambda x, w: jnp.tanh(x @ w) @ w, x, w)
    return (y, *back(dy))


@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        pytest.param(lambda x, w, b: jnp.tanh(x * 2.0) @ w, 3, id="a product computes what it reads"),
        pytest.param(lambda x, w, b: (jnp.tanh(x) @ w, jnp.exp(x) @ w), 6, id="each of two again"),
        pytest.param(lambda x, w, b: jnp.tanh(x @ w) * b[:, None], 3, id="and what follows it"),
        pytest.param(lambda x, w, b: (x @ w) * x, 4, id="with what that reads"),
        pytest.param(lambda x, w, b: (y := x @ w, y.max(1), (y * y).sum(1)), 3, id="reductions of its result too"),
        pytest.param(lambda x, w, b: (x @ w).max(1), 2, id="which is written if others read it"),
        pytest.param(lambda x, w, b: (x @ w).T @ w, 5, id="in bfloat16 if products alone do"),
        pytest.param(lambda x, w, b: (y := x @ w, y @ w), 6, id="not if it leaves the program"),
        pytest.param(
            lambda x, w, b: (y := x @ w) - jnp.exp(y - y.max(1, keepdims=True)).sum(1, keepdims=True),
            6,
            id="what needs all of a reduction reads what the product wrote",
        ),
        # Both products 3; the gradient of tanh 3.5, for products alone read it; of x 2.5; of w 3, and 3.5 with the sum.
        pytest.param(tanh_block, 6 + 3.5 + 2.5 + 6.5, id="a layer and its gradients"),
    ],
)
def test_products_compute_what_they_read_and_what_follows_where_the_compiler_fuses_them(fn, arrays: float):
    operand = X if fn is tanh_block else jax.ShapeDtypeStruct((64,), jnp.float32)
    assert moved(fn, X, X, operand, product_sums=True, fuses_products=True) == pytest.approx(arrays, abs=0.1)


HALF = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        pytest.param(
            lambda x, w: jnp.tanh(x.astype(jnp.float32)).astype(x.dtype) @ w, 1.5, id="whose source is as small"
        ),
        # The scores are in float32, the probabilities, which the product reads, in bfloat16.
        pytest.param(
            lambda x, w: jax.nn.softmax((x @ w).astype(jnp.float32) * 2.0).astype(x.dtype) @ w,
            (0.5 + 0.5 + 1) + 1 + (1 + 0.5) + (0.5 + 0.5 + 0.5),
            id="not if its source is larger",
        ),
        pytest.param(lambda x, w: (x @ w).astype(jnp.float32).sum(), 1, id="a wider type is left to who reads it"),
    ],
)
def test_products_compute_in_bfloat16(fn, arrays: float):
    assert moved(fn, HALF, HALF, product_sums=True, fuses_products=True) == pytest.approx(arrays, abs=0.1)


def test_rows_are_picked_from_memory_and_what_they_are_picked_of_is_computed_again_elsewhere():
    def fn(x, w, rows):
        wide = (x @ w).astype(jnp.float32)
        return wide[rows, 0], jnp.exp(wide).sum(1)

    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    # The product, which sums the exponentials up, 1.5; the same in float32 1.5, which counts as read in whole here.
    assert moved(fn, HALF, HALF, rows, product_sums=True, fuses_products=True) == pytest.approx(4, abs=0.1)


def test_what_a_product_hands_on_is_computed_for_the_bytes_that_its_kernel_reads():
    def softmax(x, w):
        wide = (x @ w).astype(jnp.float32)
        shifted = jnp.exp(wide - wide.max(1, keepdims=True))
        return shifted / shifted.sum(1, keepdims=True)

    few, many = (
        max(each.flops_per_byte for each in traffic(softmax, HALF, w, product_sums=True, fuses_products=True)[1])
        for w in (HALF, jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16))
    )
    assert few < many < 4  # and not for each byte of what a row's sum leaves, of which there are ever fewer


def moved_by_an_iteration(step, xs: int) -> float:
    """Bytes of the body of a loop over stacks, in arrays of X."""
    stacks = [jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)] * xs
    closed = jax.make_jaxpr(lambda c, *xs: jax.lax.scan(lambda c, xs: step(c, *xs), c, xs, length=4))(X, *stacks)
    jaxpr, _ = jc.open_jaxpr(normalize(closed))
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    body, _ = jc.open_jaxpr(scan_of(loop).body)
    found = fused_traffic(body, loop, rules=FusionRules(product_sums=False))
    counts = [(n, v) for e, t in zip(body.eqns, found) for n, v in zip((*t.reads, *t.writes), (*e.invars, *e.outvars))]
    return sum(n * aval_bytes(v.aval) for n, v in counts) / ONE


@pytest.mark.parametrize(
    ("step", "xs", "arrays"),
    [
        pytest.param(lambda c, x: (c + x, ()), 1, 3, id="a slice is read where it lies"),
        pytest.param(lambda c, x: (c @ x, ()), 1, 5, id="but copied for a product"),
        pytest.param(lambda c: (c, c * 2.0), 0, 3, id="a stack is made of zeros, and a part of it written once"),
        pytest.param(lambda c: (c * 2.0, jnp.tanh(c)), 0, 5, id="a part is computed in a kernel of its own"),
        pytest.param(lambda c: (c * 2.0, c @ c), 0, 7, id="a product is copied into its stack"),
        pytest.param(lambda c: (c * 2.0, c), 0, 5, id="and so is the carry"),
    ],
)
def test_loops_copy_slices_out_of_stacks_and_results_into_them(step, xs: int, arrays: float):
    assert moved_by_an_iteration(step, xs) == pytest.approx(arrays)


def test_cheap_equations_are_computed_again_and_expensive_ones_kept():
    def twice(inner):
        def fn(x):
            y = inner(x)
            return y - y.sum(1, keepdims=True)

        return fn

    assert moved(twice(lambda x: x + 1.0), X) == pytest.approx(3, abs=0.05)
    # Written by the first kernel, which goes on to its sum, and read by the second.
    assert moved(twice(jnp.exp), X) == pytest.approx(4, abs=0.05)


def normalized(x):
    return (x - x.mean(1, keepdims=True)) / jnp.sqrt((x * x).mean(1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        pytest.param(jax.nn.softmax, 2, id="a softmax is one kernel"),
        pytest.param(normalized, 2, id="and so is a normalization"),
        pytest.param(lambda x: jax.nn.softmax(x, 0), 4, id="columns are read once more after each reduction"),
        pytest.param(lambda x: jax.nn.softmax(x.T, 0).T, 2, id="what is innermost in memory is a row"),
        pytest.param(lambda x: (y := normalized(x), y.sum(0)), 3, id="their columns are summed from memory"),
        pytest.param(lambda x: (jnp.exp(x), jnp.exp(x).sum(0)), 2, id="what follows no row is summed where it is made"),
    ],
)
def test_rows_are_held_in_one_kernel_where_the_compiler_does(fn, arrays: float):
    assert moved(fn, X, holds_rows=True) == pytest.approx(arrays, abs=0.1)


@pytest.mark.parametrize(
    ("num_readers", "more"),
    [pytest.param(2, 0, id="computed again in two kernels"), pytest.param(3, 1, id="kept for three")],
)
def test_exponentials_of_many_kernels_are_kept_where_the_compiler_does(num_readers: int, more: float):
    def fn(x, y):
        z = jnp.exp(x)
        for _ in range(num_readers):
            y = (y * z) @ y
        return y

    again, kept = (moved(fn, X, X, holds_rows=True, keeps_exponentials=keeps) for keeps in (False, True))
    # It is written once, and read in place of what it is computed from.
    assert kept - again == pytest.approx(more, abs=0.05)


def test_rows_that_no_kernel_holds_are_read_after_each_reduction():
    x = jax.ShapeDtypeStruct((4, 2**15), jnp.float32)
    assert moved(jax.nn.softmax, x, holds_rows=True) * ONE == pytest.approx(4 * 4 * 4 * 2**15, rel=1e-3)


HEADS = jax.ShapeDtypeStruct((2, 32, 4, 16), jnp.float32)
WIDE = jax.ShapeDtypeStruct((2, 32, 64), jnp.float32)


def scores(q, k):
    return jnp.einsum("bqhk,bshk->bhqs", q, k)


@pytest.mark.parametrize(
    ("fn", "operands", "arrays"),
    [
        pytest.param(scores, [HEADS, HEADS], 4 + 2 + 2, id="heads between the other dimensions"),
        pytest.param(lambda q, k: scores(q + 1.0, k), [HEADS, HEADS], 4 + 2 + 2, id="written so where computed"),
        pytest.param(lambda q: scores(q, q), [HEADS], 3 + 2, id="one copy for all that read it"),
        pytest.param(lambda x, w: x.T @ w, [X, X], 3, id="a transposed matrix is read as it is"),
        pytest.param(lambda x: x.transpose(2, 0, 1).reshape(64, 64), [WIDE], 0, id="a view of adjacent dimensions"),
        pytest.param(lambda x: x.T + 1.0, [X], 2, id="what is computed stays in its layout"),
        pytest.param(lambda x, y: x + y.T, [X, X], 3, id="one kernel reads both layouts"),
    ],
)
def test_operands_of_products_are_transposed_unless_their_dimensions_are_side_by_side(fn, operands, arrays: float):
    assert moved(fn, *operands, transposes_operands=True) == pytest.approx(arrays, abs=0.1)


def test_a_sum_that_all_layers_add_to_is_kept_between_them():
    def layers(x, *weights):
        for each in weights:
            x = x + (x - x.sum(1, keepdims=True)) @ each
        return x

    few, more, most = (moved(layers, *[X] * (count + 1)) for count in (4, 8, 12))
    # Of a layer, the sum is written, and read three times; the product reads two arrays, one of them made for it.
    assert most - more == pytest.approx(more - few) == pytest.approx(4 * 8, abs=0.5)


def test_it_is_kept_where_kernels_of_products_could_compute_it_again_from_all_of_them():
    def layers(x, *weights):
        for each in weights:
            y = x @ each
            x = x + (y - y.max(1, keepdims=True))
        return x

    rules = {"product_sums": True, "fuses_products": True}
    few, more, most = (moved(layers, *[X] * (count + 1), **rules) for count in (6, 12, 18))
    # Of a layer, the product reads two arrays and writes one; the sum is written, and computed of two.
    assert most - more == pytest.approx(more - few) == pytest.approx(6 * 6, abs=0.5)


@pytest.mark.parametrize(("layout", "copies"), [("HWIO", 2), ("OHWI", 0)])
def test_kernels_with_space_first_are_copied_once_for_all_convolutions_that_read_them(layout, copies):
    images, (height, width, into, out) = jnp.zeros((2, 8, 8, 16)), (3, 3, 16, 16)
    sizes = {"H": height, "W": width, "I": into, "O": out}
    kernel = jax.ShapeDtypeStruct([sizes[name] for name in layout], jnp.float32)

    def convolve(kernel):
        def once(x):
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", layout, "NHWC"))

        return once(once(images))

    (_, without), (_, found) = (traffic(convolve, kernel, transposes_kernels=each) for each in (False, True))
    more = [sum(one.reads) - sum(other.reads) for one, other in zip(found, without)]
    assert sum(more) == copies and sum(t.kernels for t in found) - sum(t.kernels for t in without) == copies / 2
    assert moved(convolve, kernel, transposes_kernels=True) - moved(convolve, kernel) == pytest.approx(
        copies * height * width * into * out * 4 / ONE
    )

    # A kernel in another type is written as libraries read it.
    narrow = lambda kernel: convolve(kernel * 2.0)  # noqa: E731
    assert moved(narrow, kernel, transposes_kernels=True) == moved(narrow, kernel)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("narrow", "copies", "again"), [(False, 1, 0), (True, 2, 3)])
def test_an_update_by_a_gradient_that_it_transposes_reads_copies_of_what_it_writes_over(
    recomputed, narrow, copies, again
):
    images = jnp.zeros((2, 8, 8, 16))
    state = jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32)

    def step(read, w, m):
        def loss(kernel):
            numbers = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            return (y * y).sum()

        m = 0.9 * m + jax.grad(jax.checkpoint(loss) if recomputed else loss)(read)
        w = w - 0.1 * m
        return (w, m, w.astype(jnp.bfloat16)) if narrow else (w, m)

    # One kernel of the library's own order is copied as the convolution reads it; the copy stands for the weights.
    arguments = (state, state, state) if narrow else (state, state)
    fn = step if narrow else lambda w, m: step(w, w, m)
    (_, without), (jaxpr, found) = (traffic(fn, *arguments, transposes_kernels=each) for each in (False, True))
    updated = [number for number, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name != "conv_general_dilated"]
    more = sum(sum(found[n].reads) - sum(without[n].reads) for n in updated)
    assert more == 2 * copies + again


def test_an_optimizer_is_one_kernel_for_each_parameter():
    def adam(w, g, m, v):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - m / (jnp.sqrt(v) + 1e-8), m, v

    assert moved(adam, X, X, X, X) == pytest.approx(7)
    assert kernels(adam, X, X, X, X) == pytest.approx(1)
    assert kernels(lambda *args: (*adam(*args[:4]), *adam(*args[4:])), *[X] * 8) == pytest.approx(2)


def test_updates_that_share_a_counter_are_kernels_of_their_own_behind_whatever_they_come():
    """XLA's sibling fusion passes over scalars in common: of a ViT compiled for H100s every update is a kernel."""

    def corrected(count, w, g, m):
        count = count + 1.0
        m = 0.9 * m + 0.1 * g
        return w - m / (1.0 - 0.9**count), m

    def both(count, x, y, g, h, m, n):
        return corrected(count, x, g, m), corrected(count, y, h, n)

    def behind_products(count, x, y, g, h, m, n):
        return corrected(count, x, g @ g, m), corrected(count, y, h @ h @ h, n)

    count = jax.ShapeDtypeStruct((), jnp.float32)
    assert kernels(both, count, *[X] * 6) == pytest.approx(2)
    assert kernels(behind_products, count, *[X] * 6) == pytest.approx(2 + 3)


@pytest.mark.parametrize("fuses_products", [False, True])
def test_a_counter_that_every_update_computes_again_is_written_once(fuses_products):
    def step(count, *weights):
        count = count + 1.0
        decay = 1.0 - 0.9**count
        return [count, *(w - jnp.tanh(w) / decay for w in weights)]

    count = jax.ShapeDtypeStruct((), jnp.float32)
    for number in (1, 3):
        jaxpr, found = traffic(step, count, *[X] * number, fuses_products=fuses_products)
        started = {eqn.primitive.name: 0.0 for eqn in jaxpr.eqns}
        for eqn, each in zip(jaxpr.eqns, found, strict=True):
            started[eqn.primitive.name] += each.kernels
        assert started["add"] == 1 and sum(started.values()) == pytest.approx(1 + number)


def test_operations_are_told_for_the_bytes_of_the_whole_kernel():
    def polynomial(x):
        y = x
        for _ in range(50):
            y = y * x + 1.0
        return y

    _, found = traffic(polynomial, X)
    assert {each.flops_per_byte for each in found} == {100 / 8}


def test_what_is_computed_in_a_kernel_with_a_reduction_is_told_from_what_is_not():
    def step(x, y):
        return (jnp.exp(x) * x).sum(1), jnp.tanh(y) + 1.0

    jaxpr = jax.make_jaxpr(step)(jnp.ones((64, 64)), jnp.ones((64, 64))).jaxpr
    found = fused_traffic(jaxpr, rules=FusionRules(product_sums=True))
    reducing = {eqn.primitive.name: each.reduces for eqn, each in zip(jaxpr.eqns, found, strict=True)}
    assert reducing == {"exp": True, "mul": True, "reduce_sum": True, "tanh": False, "add": False}


def test_error_functions_are_as_many_operations_as_the_machine_says():
    _, (found,) = traffic(jax.lax.erfc, X, erf_flops=160.0)
    assert found.flops_per_byte == 160 / 8


def test_equal_programs_move_alike_and_others_that_look_alike_do_not():
    """Traffic is remembered by what a program computes: copies to hosts, bodies, and who reads whom belong to that."""

    def copied(space):
        return lambda x: jax.device_put(jnp.exp(x), space) * 2

    def looped(body):
        return lambda x: jax.lax.fori_loop(0, 8, lambda _, y: body(y), x)

    def key(fn):
        return content_key(traffic(fn, X)[0])

    there, back = copied(jax.memory.Space.Host), copied(jax.memory.Space.Device)
    assert traffic(there, X)[1] == traffic(there, X)[1] != traffic(back, X)[1] == traffic(back, X)[1]
    others = there, back, looped(jnp.sin), looped(jnp.cos), lambda x: x + x @ x, lambda x: (x @ x) @ x
    assert len(set(map(key, others))) == len(others)
    assert key(looped(jnp.sin)) == key(looped(lambda y: jnp.sin(y)))
