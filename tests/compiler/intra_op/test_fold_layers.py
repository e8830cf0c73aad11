"""Repeated layers fold into one at any depth; what only looks alike does not; folded plans compute the same."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.fold_layers import Fold, fold
from autopar.compiler.intra_op.plan_program import IntraOpPlan, plan_intra_op
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.lowering.sharded_step import one_jaxpr
from autopar.compiler.sharding.layout import LogicalMesh, to_spec, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.spmd.block_times import block_times
from autopar.compiler.spmd.emit import emit_spmd
from autopar.compiler.spmd.local_program import local_block
from autopar.hardware.machine import Link, Machine

WIDTH = 16
MESH = LogicalMesh(shape=(2, 4), axis_names=("data", "model"))
# Slow devices and a fast network: even small steps are worth splitting.
H100 = Machine.named("dgx-h100")
SLOW = replace(
    H100,
    peak_flops=dict.fromkeys(H100.peak_flops, 1e9),
    matmul_share=dict.fromkeys(H100.matmul_share, 0.8),
    matmul_half_flops=0.0,
    kernel_s=0.0,
    intra=Link(latency_s=1e-9, bandwidth=360e9, ramp_bytes=0.0),
)
MESH_COSTS = MeshCosts(machine=SLOW, mesh=MESH)


def attention(weights: Any, x: jax.Array) -> jax.Array:
    query, key, value, out = weights
    shares = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x @ query, x @ key))
    return x + jnp.einsum("bst,btd->bsd", shares, x @ value) @ out


def feed_forward(weights: Any, x: jax.Array) -> jax.Array:
    into, out = weights
    return x + jax.nn.gelu(x @ into) @ out


def remat_feed_forward(weights: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(feed_forward)(weights, x)


LAYERS = {"attention": (attention, 4), "feed_forward": (feed_forward, 2), "remat": (remat_feed_forward, 2)}


def make_step(
    layer: Callable[..., jax.Array], num_weights: int, num_layers: int
) -> tuple[Callable[..., Any], Any, Any]:
    """A step with momentum over layers whose weights have no names, only numbers."""

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = batch @ params["into"]
        for weights in params["layers"]:
            x = layer(weights, x)
        return jnp.mean((x @ params["out"]) ** 2)

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        params, momentum = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value

    draw = np.random.default_rng(0)

    def square() -> jax.Array:
        return jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5)

    params = {
        "into": square(),
        "layers": [[square() for _ in range(num_weights)] for _ in range(num_layers)],
        "out": square(),
    }
    batch = jnp.asarray(draw.normal(size=(8, 4, WIDTH)))
    return train_step, (params, jax.tree.map(jnp.zeros_like, params)), batch


def traced(kind: str, num_layers: int, num_microbatches: int = 1) -> Trace:
    """A step, or that of a loop over microbatches."""
    step, state, batch = make_step(*LAYERS[kind], num_layers)
    trace = autopar.parallelize(step, batch_argnums=(1,)).trace(state, batch).trace
    exact = {"batch_statistics": "exact", "random": "full_batch"}
    return replace(trace, jaxpr=one_jaxpr(trace, num_microbatches=num_microbatches, **exact))


def folded(trace: Trace, **marks: Any) -> Fold:
    inputs = trace.jaxpr.jaxpr.invars
    free = [below_split_size(v.aval) for v in inputs]
    return fold(trace.jaxpr, [i.name for i in trace.inputs], free, state_outputs=trace.state_outputs, **marks)


@pytest.mark.parametrize("kind", LAYERS)
def test_number_of_classes_does_not_grow_with_the_depth(kind: str) -> None:
    shallow, deep = (folded(traced(kind, num_layers)) for num_layers in (8, 24))
    assert len(set(shallow.classes)) == len(set(deep.classes))
    assert len(set(deep.classes)) < len(deep.classes) / 6


@pytest.mark.parametrize("kind", LAYERS)
def test_number_of_classes_does_not_grow_with_the_depth_within_a_loop_either(kind: str) -> None:
    shallow, deep = (folded(traced(kind, num_layers, 4), bodies_from=0) for num_layers in (8, 24))
    for few, many in zip([shallow, *shallow.bodies.values()], [deep, *deep.bodies.values()], strict=True):
        assert len(set(few.classes)) == len(set(many.classes))
        assert len(set(many.classes)) < len(many.classes) / 6
    trace = traced(kind, 24, 4)
    ((number, body),) = deep.bodies.items()
    loop = jp.scan_of(trace.jaxpr.jaxpr.eqns[number])
    names = {v: leaf.name for v, leaf in zip(trace.jaxpr.jaxpr.invars, trace.inputs, strict=True)}
    given = [names.get(a, "") if isinstance(a, jc.Var) else "" for a in trace.jaxpr.jaxpr.eqns[number].invars]
    groups: dict[int, list[str]] = {}
    for place, name in enumerate(given):
        if "layers" in name:
            groups.setdefault(body.equivalent_inputs.get(place, place), []).append(name)
    assert len(groups) == LAYERS[kind][1]
    assert all(len(group) == 24 and len({name[-1] for name in group}) == 1 for group in groups.values())
    carry = {loop.num_consts + result: loop.num_consts + first for result, first in body.equivalent_results.items()}
    assert len(carry) >= 23 * LAYERS[kind][1] and carry.items() <= body.equivalent_inputs.items()
    assert not folded(trace).bodies


@pytest.mark.parametrize(("kind", "num_layers"), [*((kind, 8) for kind in LAYERS), ("attention", 4)])
def test_weights_fold_over_the_layers_and_never_within_one(kind: str, num_layers: int) -> None:
    num_weights = LAYERS[kind][1]
    trace = traced(kind, num_layers)
    alike = folded(trace).equivalent_inputs
    groups: dict[int, list[str]] = {}
    for number, leaf in enumerate(trace.inputs):
        groups.setdefault(alike.get(number, number), []).append(leaf.name)
    layered = [group for group in groups.values() if "layers" in group[0]]
    assert len(layered) == 2 * num_weights  # the weights, and their momenta
    for group in layered:
        assert group == [group[0].replace(".layers.0", f".layers.{layer}") for layer in range(num_layers)]


@pytest.mark.parametrize("kind", LAYERS)
def test_alike_equations_compute_the_same_in_the_same_phase(kind: str) -> None:
    trace = traced(kind, 8)
    eqns = trace.jaxpr.jaxpr.eqns
    for number, first in enumerate(folded(trace).classes):
        one, other = eqns[first], eqns[number]
        assert first <= number
        assert one.primitive is other.primitive
        assert jc.ad_phase(one) == jc.ad_phase(other)
        assert [v.aval for v in one.outvars] == [v.aval for v in other.outvars]


def test_marked_inputs_are_alike_only_inputs_with_the_same_mark() -> None:
    trace = traced("feed_forward", 8)
    names = [leaf.name for leaf in trace.inputs]
    marked = [names.index(f"state.0.layers.{layer}.0") for layer in (2, 5)]
    alike = folded(trace, input_marks=dict.fromkeys(marked, "constraint")).equivalent_inputs
    assert marked[0] not in alike
    assert alike[marked[1]] == marked[0]


def planned(trace: Trace, fold_from: int, mesh_costs: MeshCosts = MESH_COSTS) -> IntraOpPlan:
    return plan_intra_op(
        trace.jaxpr,
        mesh_costs,
        state_outputs=dict(trace.state_outputs),
        input_names=[leaf.name for leaf in trace.inputs],
        fold_from=fold_from,
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("kind", LAYERS)
def test_folded_plan_is_nearly_as_good_and_computes_the_same(kind: str, num_microbatches: int) -> None:
    trace = traced(kind, 6, num_microbatches)
    step, state, batch = make_step(*LAYERS[kind], 6)
    plans = [planned(trace, fold_from) for fold_from in (0, 10**6)]
    together, apart = plans
    assert len(together.table.costs) < len(apart.table.costs) / 2
    assert together.optimum.value <= 1.02 * apart.optimum.value
    # The ends of the model have traffic of their own; in loops and recomputed bodies the first layer stands for all.
    program_s = block_times(together.program.block, MESH_COSTS).total_s
    nearly = 1e-5 if kind == "remat" or num_microbatches > 1 else 1e-6
    assert together.optimum.value == pytest.approx(program_s, rel=nearly)
    assert any(used_axes(layout) for layout in together.plan.arguments if layout is not None)
    block = local_block(trace.jaxpr.jaxpr, together.plan, MESH)
    mesh = Mesh(np.array(jax.devices()).reshape(MESH.shape), MESH.axis_names)
    shardings = [NamedSharding(mesh, to_spec(value.layout, MESH)) for value in block.inputs]
    run = jax.jit(jc.jaxpr_as_fun(emit_spmd(trace.jaxpr, block, MESH)), in_shardings=shardings)
    results = run(*map(jax.device_put, jax.tree.leaves((state, batch)), shardings))
    for expected, found in zip(jax.tree.leaves(step(state, batch)), results, strict=True):
        # Sums in another order.
        np.testing.assert_allclose(expected, found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", LAYERS)
def test_what_has_one_reader_is_not_kept_for_several(kind: str) -> None:
    """Readers differ from layer to layer at the ends of the model, so that what stands for all has several."""
    trace = traced(kind, 8)
    found = planned(trace, 0)
    jaxpr = trace.jaxpr.jaxpr
    reads = Counter(v for eqn in jaxpr.eqns for v in jc.operands(eqn)) + Counter(
        v for v in jaxpr.outvars if isinstance(v, jc.Var)
    )
    assert found.choices.stored
    assert min(reads[v] for v in found.choices.stored) > 1


@pytest.mark.parametrize("fold_from", [0, 10**6])
def test_readers_of_the_update_share_a_part_and_the_price_of_layouts_says_so(fold_from: int) -> None:
    """Of a parameter that is kept whole, the decay and the update want the same part; tied weights are an end."""

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = batch @ params["tied"]
        for weights in params["layers"]:
            x = feed_forward(weights, x)
        return jnp.mean((x @ params["tied"].T) ** 2)

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        params, momentum = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g, p: 0.9 * m + g + 0.01 * p, momentum, gradients, params)
        return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value

    weight = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    params = {"tied": weight, "layers": [[weight] * 2] * 8}
    trace = autopar.parallelize(train_step).trace((params, params), jax.ShapeDtypeStruct((64, 256), jnp.float32)).trace
    mesh = LogicalMesh(shape=(1, 8), axis_names=("data", "model"))
    costs = MeshCosts(machine=Machine.named("p3.16xlarge"), mesh=mesh)
    found = planned(trace, fold_from, costs)
    assert found.optimum.value == pytest.approx(block_times(found.program.block, costs).total_s, rel=1e-6)
