"""Gradients that the user compresses are sent in 16 or 8 bits, as planned and compiled; nothing else is rounded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compiler.sharding.scaled_blocks import CODE
from autopar.errors import InvalidArgument
from autopar.hardware.collectives import wire_bytes
from autopar.hardware.machine import Link, Machine
from tests.small_steps import adam_state, draw, mlp_loss

WIDTH, ROWS = 128, 512
LINK = Link(latency_s=1e-7, bandwidth=1e10, ramp_bytes=0.0)
MACHINE = dataclasses.replace(Machine.named("dgx-h100"), intra=LINK)
EIGHT = autopar.Cluster(num_devices=8, machine=MACHINE)
ELEMENTS = 2 * (WIDTH * WIDTH + WIDTH)
METHODS = {
    "data parallel": autopar.DataParallel(),
    "microbatches": autopar.DataParallel(num_microbatches=2),
    "degrees": autopar.Megatron(data=8, num_microbatches=2),
    "stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2, layers=2),
}


def arguments():
    params = [{"w": draw(n, WIDTH, WIDTH) / 8, "b": draw(9 + n, WIDTH)} for n in range(2)]
    return adam_state(params), (draw(20, ROWS, WIDTH), draw(21, ROWS, WIDTH))


def momentum_step(compressed):
    """SGD with momentum, its gradients handed through `compressed`."""

    def step(state, batch):
        value, grads = jax.value_and_grad(mlp_loss)(state.params, batch)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, compressed(grads))
        params = jax.tree.map(lambda p, m: p - 0.5 * m, state.params, mu)
        return state._replace(params=params, mu=mu), value

    return step


def compressed_to(dtype):
    return momentum_step(lambda grads: autopar.compress_gradients(grads, dtype))


def planned(step, method, cluster=EIGHT):
    return autopar.parallelize(step, method=method, cluster=cluster).trace(*arguments()).plan()


def sums_of_gradients(found):
    return [c for c in found.plan.planned_collectives if c.kind == "all-reduce" and c.nbytes > 16]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_sums_of_gradients_take_half_of_the_bytes_and_the_step_equals_plain_jit(method, dtype):
    found = planned(compressed_to(dtype), method)
    sums = sums_of_gradients(found)
    assert {c.dtype for c in sums} == {dtype}
    assert sum(c.nbytes * c.times for c in sums) == 2 * ELEMENTS
    report = found.verify(*arguments())
    assert report, str(report)


def test_the_compiled_program_sends_half_of_the_bytes():
    # XLA for CPUs sums bfloat16 in float32, and float16 as it is.
    half, whole = (
        sum(
            wire_bytes(kind.kind, kind.group_size, kind.compiled_bytes)
            for kind in planned(step, METHODS["data parallel"]).verify().collectives.kinds
        )
        for step in (compressed_to("float16"), momentum_step(lambda grads: grads))
    )
    loss = wire_bytes("all-reduce", 8, 4)
    assert whole - loss == wire_bytes("all-reduce", 8, 4 * ELEMENTS)
    assert half - loss == wire_bytes("all-reduce", 8, 2 * ELEMENTS)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_in_8_bits_the_weights_take_a_quarter_of_the_bytes_and_the_step_equals_plain_jit(method):
    found = planned(compressed_to(CODE), method)
    sent = [c for c in found.plan.planned_collectives if c.dtype == CODE]
    assert [c.kind for c in sent] == ["all-to-all", "all-gather"] * 2
    # 132 bytes of every 128 numbers, once to those who add them up, and once from these. Biases are summed as they are.
    assert {c.nbytes for c in sent} == {WIDTH * WIDTH * 132 / 128}
    assert {(c.dtype, c.nbytes) for c in sums_of_gradients(found)} == {("float32", 4 * WIDTH)}
    report = found.verify(*arguments())
    assert report, str(report)


def test_the_compiled_program_sends_a_quarter_of_the_bytes_of_weights_in_8_bits():
    eighth, whole = (
        sum(
            wire_bytes(kind.kind, kind.group_size, kind.compiled_bytes)
            for kind in planned(step, METHODS["data parallel"]).verify().collectives.kinds
        )
        for step in (compressed_to(CODE), momentum_step(lambda grads: grads))
    )
    exact = wire_bytes("all-reduce", 8, 4 + 4 * 2 * WIDTH)
    assert (eighth - exact) / (whole - exact) == pytest.approx(132 / 128 / 4)


def test_in_8_bits_each_device_keeps_its_part_where_the_state_is_divided():
    def step(mu, batch):
        w, (x, y) = mu["w"], batch
        grad = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
        return {"w": w, "mu": 0.9 * mu["mu"] + autopar.compress_gradients(grad, CODE)}

    w = draw(0, WIDTH, WIDTH)
    method = autopar.ShardParallel(mesh_shape=(8, 1), specs={r"batch": P("data"), r"mu\.mu": P(None, "data")})
    found = autopar.parallelize(step, method=method, cluster=EIGHT).trace({"w": w, "mu": w}, arguments()[1]).plan()
    assert [(c.kind, c.dtype) for c in found.plan.planned_collectives] == [("all-to-all", CODE)]
    report = found.verify({"w": w, "mu": w}, arguments()[1])
    assert report, str(report)


def test_by_default_nothing_is_compressed():
    found = planned(momentum_step(lambda grads: grads), METHODS["data parallel"])
    assert {c.dtype for c in found.plan.planned_collectives} == {"float32"}


def test_hierarchical_all_reduces_are_of_compressed_gradients():
    slow = dataclasses.replace(LINK, bandwidth=1e8)
    machine = dataclasses.replace(MACHINE, devices_per_host=4, domain=4, inter=slow)
    found = planned(compressed_to("float16"), METHODS["data parallel"], autopar.Cluster(num_devices=8, machine=machine))
    across = [c for c in found.plan.planned_collectives if c.reach == "across" and c.dtype == "float16"]
    assert sum(c.nbytes for c in across) == 2 * ELEMENTS / 4
    report = found.verify(*arguments())
    assert report, str(report)


def test_in_8_bits_sums_inside_of_hosts_are_exact_and_codes_go_across():
    slow = dataclasses.replace(LINK, bandwidth=1e8)
    machine = dataclasses.replace(MACHINE, devices_per_host=4, domain=4, inter=slow)
    found = planned(compressed_to(CODE), METHODS["data parallel"], autopar.Cluster(num_devices=8, machine=machine))
    made = [(c.kind, c.reach, c.dtype, c.nbytes) for c in found.plan.planned_collectives if "128,128" in c.what]
    weight, codes = 4 * WIDTH * WIDTH, WIDTH * WIDTH * 132 / 128
    assert made[:4] == [
        ("reduce-scatter", "inside", "float32", weight),
        ("all-to-all", "across", CODE, codes / 4),
        ("all-gather", "across", CODE, codes / 4),
        ("all-gather", "inside", CODE, codes),
    ]
    report = found.verify(*arguments())
    assert report, str(report)


@pytest.mark.parametrize("dtype", ["bfloat16", CODE])
def test_losses_of_200_steps_are_those_without_compression(dtype):
    state, batch = arguments()
    losses = []
    for step in (compressed_to(dtype), momentum_step(lambda grads: grads)):
        run = autopar.parallelize(step, method=autopar.DataParallel(), cluster=EIGHT)
        each, found = state, []
        for _ in range(200):
            each, loss = run(each, batch)
            found.append(float(loss))
        losses.append(np.array(found))
    compressed, exact = losses
    assert exact[-1] < 0.9 * exact[0]
    assert np.max(np.abs(compressed - exact) / exact) <= 1e-3
    assert np.any(compressed != exact)


def test_without_autopar_it_rounds():
    grads = {"w": draw(0, 3, 5), "short": draw(1, 4).astype(jnp.bfloat16)}
    rounded = autopar.compress_gradients(grads)
    np.testing.assert_array_equal(rounded["w"], grads["w"].astype(jnp.bfloat16).astype(jnp.float32))
    assert rounded["short"] is grads["short"]
    batched = jax.vmap(autopar.compress_gradients)(grads["w"])
    np.testing.assert_array_equal(batched, rounded["w"])


def test_in_8_bits_numbers_are_off_by_a_sixteenth_or_a_small_share_of_the_largest_in_their_block():
    x = draw(0, 1000) * 10.0 ** (np.arange(1000) // 50 - 10)
    found = np.asarray(autopar.compress_gradients(x, CODE))
    blocks = np.abs(x).reshape(8, 125)
    least = np.repeat(blocks.max(1) / 448 / 1024, 125)
    assert np.all(np.abs(found - x) <= 1.001 * np.maximum(np.abs(x) / 16, least))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_in_8_bits_what_is_not_finite_stays_so_and_spoils_no_more_than_its_block(bad):
    x = np.ones((2, 128), np.float32)
    x[0, 3] = bad
    found = np.asarray(autopar.compress_gradients(x, CODE))
    assert np.isnan(found[0, 3])
    np.testing.assert_array_equal(found[1], x[1])
    np.testing.assert_array_equal(autopar.compress_gradients(np.zeros(5, np.float32), CODE), np.zeros(5))


def test_in_8_bits_sixteen_are_compressed_too():
    x = draw(0, 300).astype(jnp.bfloat16)
    found = autopar.compress_gradients(x, CODE)
    assert found.dtype == jnp.bfloat16
    assert np.any(np.asarray(found != x))


# --- what must be exact -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", CODE])
def test_integers_are_refused_by_their_name(dtype):
    with pytest.raises(InvalidArgument, match=r"grads\.counts\.0 of type int32, .* leave integers"):
        autopar.compress_gradients({"counts": [jnp.arange(3)]}, dtype)


def test_other_types_are_refused():
    with pytest.raises(InvalidArgument, match="dtype"):
        autopar.compress_gradients({}, dtype="int8")


@pytest.mark.parametrize("dtype", ["bfloat16", CODE])
def test_statistics_and_losses_are_refused(dtype):
    def with_statistics(params, batch):
        def loss(params):
            x = batch @ params
            mean = x.mean(0)
            return jnp.mean((x - mean) ** 2), mean

        grads, mean = jax.grad(loss, has_aux=True)(params)
        grads, mean = autopar.compress_gradients((grads, mean), dtype)
        return params - grads, mean

    step = autopar.parallelize(with_statistics, cluster=EIGHT)
    where = r"float32\[8\] at test_compressed_gradients\.py:\d+:\d+ \(.*with_statistics\), which no backward pass made"
    with pytest.raises(InvalidArgument, match=where):
        step.trace(draw(0, 8, 8), draw(1, 16, 8))
