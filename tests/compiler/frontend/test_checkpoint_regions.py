"""Rematerialised regions and layers: narrow regions are not cut, wide ones are dissolved without a change of values."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autopar.compiler.frontend.checkpoint_regions import (
    find_wide_regions,
    inline_regions,
)
from autopar.compiler.frontend.layer_scans import LeafRows
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import same_equations
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.microbatch.unsplit import whole_batch
from autopar.compiler.pipeline.build_stage_graph import build_stage_graph
from autopar.compiler.pipeline.layers import cut_allowed, cut_forward
from autopar.compiler.pipeline.phases import Phases, find_phases
from autopar.compiler.pipeline.placement import layer_order, place_equations
from autopar.compiler.pipeline.stage_graph import evaluate
from tests.zoo import ZOO
from tests.zoo.gpt_linen import GPT, VOCABULARY, WIDTH, Block

pytestmark = pytest.mark.usefixtures("float64")

ROWS, SIZE, LAYERS = 5, 6, 4
Loss = Callable[..., jax.Array]


def dissolved(closed: jc.ClosedJaxpr, *, num_layers: int) -> tuple[jc.ClosedJaxpr, bool]:
    """A normalised step without regions wider than a layer, and whether there were any."""
    wide = find_wide_regions(closed, num_layers=num_layers)
    return inline_regions(closed, wide), bool(wide)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape))


def layers() -> list[dict[str, jax.Array]]:
    return [{"w": draw(i, SIZE, SIZE), "b": draw(LAYERS + i, SIZE)} for i in range(LAYERS)]


def stacked() -> dict[str, jax.Array]:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers())


def dense(p: dict[str, jax.Array], h: jax.Array) -> jax.Array:
    mean = jnp.mean(h, axis=-1, keepdims=True)
    return h + jnp.tanh((h - mean) @ p["w"] + p["b"])


def plain(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    for p in params:
        x = jax.nn.relu(dense(p, x))
    return jnp.mean(x**2)


def blockwise(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    for p in params:
        x = jax.checkpoint(dense)(p, x)
    return jnp.mean(x**2)


def grouped(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    def pair(ps, h):
        return dense(ps[1], dense(ps[0], h))

    for i in range(0, LAYERS, 2):
        x = jax.checkpoint(pair)(params[i : i + 2], x)
    return jnp.mean(x**2)


def dropout(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    for i, p in enumerate(params):
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        x = jnp.where(keep, dense(p, x) / 0.9, 0)
    return jnp.mean(x**2)


def with_barrier(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    for p in params:
        p, x = lax.optimization_barrier((p, x))
        x = dense(p, x)
    return jnp.mean(x**2)


def scanned(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    scale = jnp.tri(SIZE)
    x, ys = lax.scan(lambda h, p: (dense(p, h @ scale), jnp.sum(h)), x, params)
    return jnp.mean(x**2) + jnp.mean(ys)


def scanned_blocks(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    x, _ = lax.scan(jax.checkpoint(lambda h, p: (dense(p, h), None)), x, params)
    return jnp.mean(x**2)


def scan_in_scan(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    def layer(h, p):
        h, _ = lax.scan(lambda v, row: (dense(p, v) + row, None), h, jnp.stack([h, h]))
        return h, None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def scan_with_dropout(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    def layer(carry, p):
        h, key = carry
        key, mine = jax.random.split(key)
        return (jnp.where(jax.random.bernoulli(mine, 0.9, h.shape), dense(p, h), 0), key), None

    return jnp.mean(lax.scan(layer, (x, key), params)[0][0] ** 2)


class PlainGPT(nn.Module):
    """The zoo's GPT, but no block is rematerialised."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.float64, param_dtype=jnp.float64)
        x = embed(tokens)
        for i in range(LAYERS):
            x = Block(name=f"h_{i}")(x)
        return embed.attend(x)


def gpt(model: nn.Module) -> tuple[Loss, tuple[Any, ...]]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 9)), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])

    def loss(params, tokens, key):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, (params, tokens)


def mlp(loss: Loss, params: Callable[[], Any] = layers) -> Callable[[], tuple[Loss, tuple[Any, ...]]]:
    return lambda: (loss, (params(), draw(9, ROWS, SIZE)))


MODELS: dict[str, Callable[[], tuple[Loss, tuple[Any, ...]]]] = {
    "mlp": mlp(plain),
    "mlp, jitted": mlp(jax.jit(plain)),
    "dropout": mlp(dropout),
    "barriers": mlp(with_barrier),
    "nested": mlp(blockwise),
    "scan": mlp(scanned, stacked),
    "scan, nested": mlp(scanned_blocks, stacked),
    "scan in a scan": mlp(scan_in_scan, stacked),
    "scan with dropout": mlp(scan_with_dropout, stacked),
    "gpt": lambda: gpt(PlainGPT()),
    "gpt, nested": lambda: gpt(GPT()),
    "gpt, scan, nested": lambda: gpt(GPT(scan=True)),
}
WHOLE: dict[str, Callable[[Loss], Loss]] = {
    "checkpoint": jax.checkpoint,
    "twice": lambda loss: jax.checkpoint(jax.checkpoint(loss)),
    "dots saveable": lambda loss: jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable),
    "without barriers": lambda loss: jax.checkpoint(loss, prevent_cse=False),
}
over_wide = pytest.mark.parametrize(
    ("model", "whole"),
    [(m, "checkpoint") for m in MODELS] + [(m, w) for m in ("mlp", "scan") for w in WHOLE if w != "checkpoint"],
)


def step_of(loss: Loss, arguments: tuple[Any, ...]) -> jc.ClosedJaxpr:
    def step(params, batch, key):
        value, gradients = jax.value_and_grad(loss)(params, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return normalize(jax.make_jaxpr(step)(*arguments, jax.random.key(7)))


def run(closed: jc.ClosedJaxpr, arguments: tuple[Any, ...]) -> list[np.ndarray]:
    flat = jax.tree.leaves((*arguments, jax.random.key(7)))
    return [np.asarray(x) for x in jax.jit(jc.jaxpr_as_fun(closed))(*flat)]


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, int]]:
    """Primitives at every depth, with how often they run."""
    for eqn in jc.open_jaxpr(jaxpr)[0].eqns if not isinstance(jaxpr, list) else jaxpr:
        yield eqn.primitive.name, times
        for inner in jc.subjaxprs(eqn):
            yield from equations(inner, times * eqn.params.get("length", 1))


def count(closed: jc.ClosedJaxpr, phase: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, times in equations([eqn for eqn in closed.jaxpr.eqns if jc.ad_phase(eqn) == phase]):
        counts[name] += times
    return counts


def top_level_regions(closed: jc.ClosedJaxpr) -> list[jc.JaxprEqn]:
    return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name in REMAT]


@over_wide
def test_dissolving_a_region_around_the_whole_loss_keeps_every_value(model: str, whole: str) -> None:
    loss, arguments = MODELS[model]()
    before = step_of(WHOLE[whole](loss), arguments)
    after, found = dissolved(before, num_layers=2)
    assert found
    for expected, result in zip(run(before, arguments), run(after, arguments), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-13)


@over_wide
def test_a_dissolved_region_recomputes_nothing(model: str, whole: str) -> None:
    loss, arguments = MODELS[model]()
    after, _ = dissolved(step_of(WHOLE[whole](loss), arguments), num_layers=2)
    never = step_of(loss, arguments)
    for phase in ("forward", "backward"):
        for name in ("dot_general", "random_bits", "tanh", "erf", "gather", "scan"):
            assert count(after, phase)[name] <= count(never, phase)[name], (phase, name)
    # The regions of single blocks inside of the whole stay.
    assert len(top_level_regions(after)) == len(top_level_regions(never))


def test_the_zoo_step_that_checkpoints_its_loss_is_wide_for_two_layers() -> None:
    step, *arguments = ZOO["remat_whole"].make()
    closed = normalize(jax.make_jaxpr(step)(*arguments))
    assert len(top_level_regions(closed)) == 1
    after, found = dissolved(closed, num_layers=2)
    assert found and not top_level_regions(after)


@pytest.mark.parametrize(
    ("loss", "num_layers", "expected"),
    [
        (blockwise, 1, 0),
        (blockwise, 2, 0),
        (blockwise, LAYERS, 0),
        (grouped, 2, 0),
        (grouped, LAYERS, 2),
        (jax.checkpoint(plain), 1, 0),
        (jax.checkpoint(plain), 2, 1),
        (jax.checkpoint(blockwise), LAYERS, 1),
        (jax.checkpoint(grouped), 2, 1),
        (jax.checkpoint(grouped), 2 * LAYERS, 3),
    ],
)
def test_a_region_is_wide_if_it_is_more_than_a_layer(loss: Loss, num_layers: int, expected: int) -> None:
    closed = step_of(loss, mlp(loss)()[1])
    assert len(find_wide_regions(closed, num_layers=num_layers)) == expected
    if not expected:
        assert dissolved(closed, num_layers=num_layers) == (closed, False)


@pytest.mark.parametrize("num_layers", [2, 4])
def test_rematerialised_blocks_stay_as_the_user_wrote_them(num_layers: int) -> None:
    loss, arguments = gpt(GPT())
    closed = step_of(loss, arguments)
    assert dissolved(closed, num_layers=num_layers) == (closed, False)
    assert len(top_level_regions(closed)) == 4


@pytest.mark.parametrize("model", MODELS)
def test_the_same_regions_are_dissolved_at_another_batch_size(model: str) -> None:
    loss, (params, batch) = MODELS[model]()
    loss = jax.checkpoint(loss)
    small = step_of(loss, (params, batch))
    large = step_of(loss, (params, jnp.concatenate([batch, batch])))
    regions = find_wide_regions(small, num_layers=4)
    primitives = [
        [eqn.primitive.name for eqn in inline_regions(closed, regions).jaxpr.eqns] for closed in (small, large)
    ]
    assert primitives[0] == primitives[1]


def normalised_classifier(p: dict[str, jax.Array], batch: jax.Array, key: jax.Array) -> jax.Array:
    """Batch norm, and a loss that has ones for every example as the norm has for every channel."""
    h = batch @ p["w"]
    mean = jnp.mean(h, axis=0)
    variance = jnp.maximum(0.0, jnp.mean(h * h, axis=0) - mean * mean)
    scores = jax.nn.log_softmax((h - mean) * lax.rsqrt(variance + 1e-5) * p["b"])[:, 0]
    return -jnp.mean(jnp.where(scores > -2.0, 1.0, 0.0) * scores)


@pytest.mark.parametrize(("rows", "other"), [(SIZE, 2 * SIZE), (2 * SIZE, SIZE), (SIZE, 2)])
def test_regions_are_dissolved_alike_where_a_batch_has_the_size_of_a_layer(rows: int, other: int) -> None:
    params = {"w": draw(0, SIZE, SIZE), "b": draw(1, SIZE)}
    loss = jax.checkpoint(normalised_classifier)
    one, twin = (step_of(loss, (params, draw(2, n, SIZE))) for n in (rows, other))
    regions = find_wide_regions(one, num_layers=4)
    names = [[eqn.primitive.name for eqn in inline_regions(closed, regions).jaxpr.eqns] for closed in (one, twin)]
    assert names[0] != names[1]  # equal by chance is what one of the two alone joins
    pair = inline_regions(one, regions, twin), inline_regions(twin, regions, one)
    assert same_equations(*pair)
    arguments = [*jax.tree.leaves((params, draw(2, rows, SIZE))), jax.random.key(7)]
    for result, value in zip(*(jc.jaxpr_as_fun(closed)(*arguments) for closed in (pair[0], one)), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-12)


def test_dissolved_equations_stay_backward_and_name_their_source() -> None:
    closed, _ = dissolved(step_of(jax.checkpoint(plain), mlp(plain)()[1]), num_layers=2)
    phases = [jc.ad_phase(eqn) for eqn in closed.jaxpr.eqns]
    first = phases.index("backward")
    assert None not in phases[: len(phases) - phases[::-1].index("backward")]
    assert "forward" not in phases[first:]
    assert all("test_checkpoint_regions.py" in jc.source_line(eqn) for eqn in closed.jaxpr.eqns[first : first + 5])


def test_what_a_region_prints_is_printed_again(capfd: pytest.CaptureFixture[str]) -> None:
    def loss(params, x, key):
        jax.debug.print("loss")
        return plain(params, x, key)

    arguments = mlp(loss)()[1]
    before = step_of(jax.checkpoint(loss), arguments)
    after, found = dissolved(before, num_layers=2)
    printed = []
    for closed in (before, after):
        run(closed, arguments)
        jax.effects_barrier()
        printed.append(capfd.readouterr().out.count("loss"))
    assert found and printed[0] == printed[1] > 0


@pytest.mark.parametrize("model", ["mlp", "dropout", "nested", "gpt"])
def test_stages_that_recompute_their_forward_give_the_dissolved_steps_values(model: str) -> None:
    loss, arguments = MODELS[model]()
    closed = step_of(jax.checkpoint(loss), arguments)
    after, found = dissolved(closed, num_layers=2)
    num_inputs, num_outputs = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    step = whole_batch(after, batch_inputs=[num_inputs - 2])
    phases = find_phases(step)
    (cut,) = cut_forward(phases, 2)
    layer_stage = {i: int(p >= cut) for p, i in enumerate(layer_order(phases))}
    names = [f"input_{spec.leaf}{'' if i < num_inputs else '/whole'}" for i, spec in enumerate(step.inputs)]
    placement = place_equations(phases, layer_stage=layer_stage, num_stages=2)
    graph = build_stage_graph(
        placement,
        name=model,
        inputs=[LeafRows(leaf=i) for i in range(num_inputs)],
        outputs=[LeafRows(leaf=i) for i in range(num_outputs)],
        input_names=names,
        leaf_names=names[:num_inputs],
        again={0: [0], 1: [1]},
        layer_of=placement.stages,
    )
    assert found and {task.stage for task in graph.tasks if task.kind == "B"} == {0, 1}
    leaves = jax.tree.leaves((*arguments, jax.random.key(7)))
    results = jax.jit(lambda *leaves: evaluate(graph, leaves))(*leaves)
    for expected, result in zip(run(closed, arguments), results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-13)


# Where layers may begin


def phases_of(loss: Loss, arguments: tuple[Any, ...]) -> Phases:
    closed = step_of(loss, arguments)
    num_inputs = len(closed.jaxpr.invars)
    return find_phases(whole_batch(closed, batch_inputs=[num_inputs - 2]))


def layers_of(phases: Phases, num_layers: int) -> list[list[jc.JaxprEqn]]:
    order = layer_order(phases)
    borders = [0, *cut_forward(phases, num_layers), len(order)]
    return [[phases.equations[i] for i in order[start:stop]] for start, stop in pairwise(borders)]


def block_names(eqns: list[jc.JaxprEqn]) -> set[str]:
    scopes = [jc.scope_of(eqn).split("/") for eqn in eqns]
    return {scope[1] for scope in scopes if len(scope) > 1 and scope[1].startswith("h_")}


@pytest.mark.parametrize(("num_layers", "blocks"), [(2, [2, 2]), (4, [1, 1, 1, 1])])
def test_layers_of_a_rematerialised_gpt_begin_between_blocks(num_layers: int, blocks: list[int]) -> None:
    names = [block_names(eqns) for eqns in layers_of(phases_of(*gpt(GPT())), num_layers)]
    assert [len(found) for found in names] == blocks
    assert len(set().union(*names)) == 4


def penalised(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    penalty = sum(jnp.sum(p["w"] ** 2) for p in params)
    return blockwise(params, x, key) + 1e-3 * penalty


def cast_outside(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    low = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return blockwise(low, x.astype(jnp.float32), key).astype(jnp.float64)


def tied_ends(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """The first block's weights are read again behind the last block."""
    x = x @ params[0]["w"]
    for p in params:
        x = jax.checkpoint(dense)(p, x)
    return jnp.mean((x @ params[0]["w"].T) ** 2)


@pytest.mark.parametrize("loss", [blockwise, penalised, cast_outside], ids=lambda loss: loss.__name__)
def test_no_layer_begins_inside_a_block(loss: Loss) -> None:
    phases = phases_of(loss, mlp(loss)()[1])
    order = layer_order(phases)
    allowed = cut_allowed(phases, order)
    names = [phases.equations[i].primitive.name for i in order]
    # The bias is the last parameter that a block reads; behind it one may cut. The mean of the batch is of no layer, so
    # the first whole block is the second.
    start = names.index("reduce_sum")
    block = ["reduce_sum", "broadcast_in_dim", "div", "sub", "dot_general", "add", "tanh", "add"]
    stop = start + len(block) * (LAYERS - 1)
    assert names[start:stop] == block * (LAYERS - 1)
    assert allowed[start:stop] == [True, False, False, False, False, False, True, True] * (LAYERS - 1)
    assert all(allowed[stop:])


def test_tied_weights_forbid_no_cut_outside_of_their_blocks() -> None:
    phases = phases_of(tied_ends, mlp(tied_ends)()[1])
    allowed = cut_allowed(phases, layer_order(phases))
    assert sum(allowed) == len(allowed) - 5 * LAYERS


@pytest.mark.parametrize("loss", [plain, dropout], ids=lambda loss: loss.__name__)
def test_without_regions_a_layer_may_begin_anywhere(loss: Loss) -> None:
    phases = phases_of(loss, mlp(loss)()[1])
    assert all(cut_allowed(phases, layer_order(phases)))


def test_blocks_are_cut_only_where_there_are_more_layers_than_places_between_them() -> None:
    phases = phases_of(blockwise, mlp(blockwise)()[1])
    order = layer_order(phases)
    allowed = cut_allowed(phases, order)
    num_places = 1 + sum(allowed[1:])
    assert all(allowed[cut] for cut in cut_forward(phases, num_places))
    assert not all(allowed[cut] for cut in cut_forward(phases, num_places + 1))
