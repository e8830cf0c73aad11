"""Attention in one kernel of cuDNN: how it is split, what it takes, and steps that have it."""

import dataclasses
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

import autopar
from autopar.compiler.costs.compute import equation_bytes, equation_s
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import equation_flops
from autopar.compiler.jaxprs.fusion import alone, fused_traffic
from autopar.compiler.jaxprs.fusion_kinds import FusionRules
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.primitives import ATTENTION
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import strategies
from autopar.errors import ReplicatedWarning
from benchmarks.models.cudnn import traced_as_if_there
from tests import attention_on_cpu  # noqa: F401  so that the kernels run here
from tests.compiler.analysis.test_aot_targets import needs_compiler
from tests.compiler.planned_steps import LINE, mesh_costs


@pytest.fixture(autouse=True)
def _traced_without_cudnn():
    with traced_as_if_there():
        yield


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels(attend, *operands, wanted=(0, 1, 2)):
    """The equations of attention and of the gradients of some operands."""

    def loss(*given):
        return jnp.sum(attend(*given).astype(jnp.float32))

    traced = jax.make_jaxpr(jax.grad(loss, wanted))(*operands)
    return [eqn for eqn in jc.open_jaxpr(normalize(traced))[0].eqns if eqn.primitive.name in ATTENTION]


def public(**options):
    def attend(q, k, v, *more):
        given = dict(zip(options.get("names", ()), more, strict=True))
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=options.get("causal", False), implementation="cudnn", **given
        )

    return attend


def private(**options):
    return lambda q, k, v: dot_product_attention(q, k, v, **options)


Q, KV, ONE = array(8, 128, 12, 64), array(8, 128, 4, 64), array(8, 128, 1, 64)
HEADS_FIRST = array(8, 12, 128, 64)
PACKED = [jnp.zeros((8, n), jnp.int32) for n in (3, 3, 4, 4)]


def letters_split(rule):
    """For every operand and result the dimensions that may be split."""

    def of(array):
        return tuple(d for d, factors in enumerate(array) if factors and not set(factors[:1]) & rule.blocked)

    return [of(array) for array in rule.operands], [of(array) for array in rule.results]


NONE, ARRAY, STATISTICS = (), (0, 2), (0, 1)
FREE = {
    "as many heads of keys": (public(), (Q, Q, Q), ARRAY, NONE, ARRAY),
    "grouped heads": (public(causal=True), (Q, KV, KV), ARRAY, NONE, ARRAY),
    "one head of keys: examples only": (public(), (Q, ONE, ONE), (0,), NONE, (0,)),
    "heads first": (private(qkv_layout="BNTH"), (HEADS_FIRST,) * 3, (0, 1), NONE, (0, 1)),
    "a window": (private(mask_type=MaskType.CAUSAL, sliding_window_length=16), (Q, KV, KV), ARRAY, NONE, ARRAY),
    "a mask of each example": (
        public(names=("mask",)),
        (Q, KV, KV, array(8, 1, 128, 128, dtype=jnp.bool_)),
        ARRAY,
        (0,),
        ARRAY,
    ),
    "a mask of all": (public(names=("mask",)), (Q, KV, KV, array(1, 1, 128, 128, dtype=jnp.bool_)), ARRAY, NONE, ARRAY),
    "a bias of each head": (public(names=("bias",)), (Q, KV, KV, array(8, 12, 128, 128)), ARRAY, (0, 1), ARRAY),
}


@pytest.mark.parametrize(("attend", "operands", "queries", "bias", "results"), FREE.values(), ids=FREE)
def test_examples_and_heads_of_a_kernel_are_split(attend, operands, queries, bias, results):
    for rule in sharding_rules(kernels(attend, *operands)):
        read, written = letters_split(rule)
        assert read[:4] == [queries, queries, queries, bias]
        assert set(written[:1]) == {results}
        statistics = read[10] if len(read) > 10 else written[1]
        assert statistics == tuple(range(len(queries)))


def test_heads_are_split_in_whole_groups():
    forward, backward = sharding_rules(kernels(public(), Q, KV, KV))
    for rule in (forward, backward):
        kv, group = rule.operands[0][2]
        assert rule.operands[1][2] == (kv,)
        assert (rule.sizes[kv], rule.sizes[group]) == (4, 3)
        assert group in rule.blocked and kv not in rule.blocked


def test_lengths_and_packed_sequences_go_with_their_examples():
    def lengths(q, k, v, n):
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=n, implementation="cudnn")

    def packed(q, k, v):
        options = dict(zip(("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"), PACKED, strict=True))
        return dot_product_attention(q, k, v, mask_type=MaskType.PADDING_CAUSAL, **options)

    for rule in sharding_rules(kernels(lengths, Q, KV, KV, array(8, dtype=jnp.int32))):
        assert letters_split(rule)[0][4:6] == [(0,), (0,)]
    for rule in sharding_rules(kernels(packed, Q, KV, KV)):
        read, written = letters_split(rule)
        assert read[4:8] == [(0,)] * 4
        assert (read[10] if len(read) > 10 else written[1]) == (0, 1)


def test_gradient_of_a_bias_is_a_sum_that_keeps_examples_or_heads_together():
    operands = (Q, KV, KV)
    for shape, split in (((1, 12, 128, 128), (2,)), ((8, 1, 128, 128), (0,)), ((8, 12, 128, 128), (0, 2))):
        bias = array(*shape)
        _, backward = sharding_rules(kernels(public(names=("bias",)), *operands, bias, wanted=(0, 1, 2, 3)))
        assert letters_split(backward)[0][0] == split
        assert len(backward.results) == 4


def test_gradient_of_a_mask_is_not_made():
    mask = array(1, 1, 128, 128, dtype=jnp.bool_)
    _, backward = kernels(public(names=("mask",)), Q, KV, KV, mask)
    assert len(backward.outvars) == 3
    assert [v.aval.shape for v in backward.outvars] == [v.shape for v in (Q, KV, KV)]


def test_kernels_that_parts_would_change_are_whole_on_every_device():
    with pytest.warns(ReplicatedWarning) as warned:
        rules = sharding_rules(kernels(private(dropout_rate=0.1), Q, KV, KV))
    assert len(warned) == len(rules) == 2
    assert all(letters_split(rule)[0][0] == () for rule in rules)


PAIRS = {
    "every key": (public(), 128 * 128),
    "those before it": (public(causal=True), 128 * 129 / 2),
    "a window": (private(mask_type=MaskType.CAUSAL, sliding_window_length=16), 16 * 17 / 2 + 112 * 16),
}


@pytest.mark.parametrize(("attend", "pairs"), PAIRS.values(), ids=PAIRS)
def test_flops_are_those_of_the_products_that_the_mask_leaves(attend, pairs):
    forward, backward = kernels(attend, Q, KV, KV)
    product = 2.0 * 8 * 12 * 64 * pairs
    assert equation_flops(forward) == 2 * product
    assert equation_flops(backward) == 5 * product


COSTS = mesh_costs(
    LINE, peak_flops={"float32": 1e12, "float16": 1e14, "bfloat16": 1e14}, memory_bandwidth=1e13, exponentials=1e11
)


def seconds(eqn, costs=COSTS):
    """The seconds of every strategy."""
    (rule,) = sharding_rules([eqn])
    return [equation_s(eqn, strategy, costs, alone(eqn)) for strategy in strategies(eqn, rule, LINE)]


def changed(**figures):
    return dataclasses.replace(COSTS, machine=dataclasses.replace(COSTS.machine, **figures))


LONG = array(8, 8192, 16, 128)


def test_seconds_are_those_of_products_and_exponentials_in_one_kernel():
    (forward, backward), (half, _) = (kernels(public(causal=causal), LONG, LONG, LONG) for causal in (False, True))
    scores = 8 * 16 * 8192**2
    assert seconds(forward)[0] == pytest.approx(scores * (4 * 128 / 1e14 + 1 / 1e11), rel=0.05)
    assert seconds(backward)[0] == pytest.approx(scores * (10 * 128 / 1e14 + 2 / 1e11), rel=0.05)
    assert seconds(half)[0] == pytest.approx(seconds(forward)[0] / 2, rel=0.07)
    assert seconds(forward, changed(exponentials=1e15))[0] == pytest.approx(scores * 4 * 128 / 1e14, rel=0.05)
    rate = COSTS.machine.peak_flops["float32"] / 16
    assert seconds(forward, changed(exponentials=0.0)) == seconds(forward, changed(exponentials=rate))


def test_seconds_and_bytes_are_shared_among_the_devices_that_split_it():
    for eqn in kernels(public(), LONG, LONG, LONG):
        whole_s, *split = seconds(eqn)
        assert split == pytest.approx([whole_s / 8] * 2, rel=1e-3)  # examples, heads


def test_scores_do_not_pass_through_memory():
    forward, backward = kernels(public(), LONG, LONG, LONG)
    one, statistics = 2.0 * np.prod(LONG.shape), 4.0 * 8 * 16 * 8192
    (whole, *_) = strategies(forward, *sharding_rules([forward]), LINE)
    assert equation_bytes(forward, whole, COSTS, alone(forward)) == 4 * one + statistics
    (whole, *_) = strategies(backward, *sharding_rules([backward]), LINE)
    # Sums of the gradients of queries in float32 are written as zeros, and read; the result, its gradient and these
    # gradients pass once more.
    passes = 2 * 2 * one + 3 * one
    assert equation_bytes(backward, whole, COSTS, alone(backward)) == 8 * one + statistics + passes


def test_kernels_read_copies_of_what_does_not_lie_as_they_read_it():
    def attended(q, k, v):
        return public()(q.transpose(0, 2, 1, 3), k, v)

    heads_first = array(8, 16, 8192, 128)
    jaxpr = normalize(jax.make_jaxpr(attended)(heads_first, LONG, LONG)).jaxpr
    traffic = fused_traffic(jaxpr, rules=FusionRules(product_sums=False, transposes_operands=True))
    (kernel,) = (each for each, eqn in zip(traffic, jaxpr.eqns, strict=True) if eqn.primitive.name in ATTENTION)
    assert kernel.reads[:3] == (3, 1, 1)  # read and written to be transposed, and read
    assert kernel.kernels == 2


# Steps

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH, LAYERS = 16, 32, 8, 4, 16, 2
EMBED = HEADS * WIDTH


def attend(layer, x, causal=True, recomputed=False):
    def heads(name, count):
        return (x @ layer[name]).reshape(*x.shape[:2], count, WIDTH).astype(jnp.bfloat16)

    mixed = jax.nn.dot_product_attention(
        heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS), is_causal=causal, implementation="cudnn"
    )
    return x + mixed.reshape(x.shape).astype(x.dtype) @ layer["o"]


def train_step(params, x, recomputed=False):
    run = jax.checkpoint(attend) if recomputed else attend

    def loss_of(params):
        h = x
        for layer in params:
            h = run(layer, h)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, gradients), loss


def arguments():
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "o": HEADS}
    drawn = np.random.default_rng(0)

    def of(name):
        return jnp.asarray(drawn.normal(size=(EMBED, sizes[name] * WIDTH)) / EMBED**0.5, jnp.float32)

    params = [{name: of(name) for name in sizes} for _ in range(LAYERS)]
    return params, jnp.asarray(drawn.normal(size=(BATCH, LENGTH, EMBED)), jnp.float32)


METHODS = {
    "searched": autopar.Auto(num_stages=1),
    "examples": autopar.DataParallel(),
    "heads": autopar.Megatron(data=2, tensor=4),
    "microbatches": autopar.Auto(num_stages=1, num_microbatches=4),
    "stages": autopar.Auto(num_stages=2, num_microbatches=4, layers=2),
}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_step_with_kernels_of_attention_computes_what_the_plain_one_does(method, recomputed):
    step = partial(train_step, recomputed=recomputed)
    params, x = arguments()
    expected, loss = jax.jit(step)(params, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicatedWarning)
        found, value = autopar.parallelize(step, method=method, batch_argnums=(1,))(params, x)
    np.testing.assert_allclose(value, loss, rtol=1e-4)

    def same_change(before, after, wanted):
        # What is computed again rounds to 16 bits elsewhere: plain steps that do and do not differ by 0.5 %.
        assert jnp.abs(after - wanted).max() < 0.02 * jnp.abs(wanted - before).max()

    jax.tree.map(same_change, params, found, expected)


def test_step_is_split_by_examples_or_heads_with_no_scores_in_memory():
    """A plan keeps results and statistics for the gradients, and what their kernel sums in float32 while it runs."""
    cluster = autopar.Cluster.parse("1x dgx-h100")
    params = [{name: array(1024, 1024) for name in "qkvo"} for _ in range(2)]

    def step(params, x):
        def loss(params):
            h = x
            for layer in params:
                q, k, v = ((h @ layer[name]).reshape(*h.shape[:2], 16, 64) for name in "qkv")
                mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
                h = h + mixed.reshape(h.shape) @ layer["o"]
            return jnp.mean(h.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def simulated(length):
        planned = autopar.parallelize(step, cluster=cluster, batch_argnums=(1,)).trace(params, array(8, length, 1024))
        return planned.plan().simulate()

    short, long = simulated(1024), simulated(4096)
    # Scores would be 16 times the bytes: 16 heads of one example in 32 bits are 1 GiB.
    assert long.meshes[0].peak_bytes < 5 * short.meshes[0].peak_bytes
    assert "kernel workspace" in str(long)


@needs_compiler
def test_step_compiles_for_a_gpu_with_kernels_on_parts():
    def heads_of(params, x):
        return jnp.sum(attend(params, x).astype(jnp.float32))

    params, drawn = arguments()
    step = autopar.parallelize(
        lambda layer, x: jax.value_and_grad(heads_of)(layer, x),
        method=autopar.Megatron(data=2, tensor=2),
        cluster=autopar.Cluster.parse("1x dgx-h100").with_devices(4),
        batch_argnums=(1,),
    )
    layer, x = jax.eval_shape(lambda: (params[0], drawn))
    planned = step.trace(layer, x).plan()
    assert planned.verify(target="h100")
    (report,) = planned.lower().inspect(target="h100")
    calls = [line for line in report.hlo.splitlines() if "__cudnn$fmha" in line]
    part = f"bf16[{BATCH // 2},{LENGTH},{HEADS // 2},{WIDTH}]"
    assert len(calls) == 2
    assert all(part in line for line in calls)
