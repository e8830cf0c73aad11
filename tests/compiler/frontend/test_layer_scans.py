"""Splitting loops over layers: the same numbers, state in pieces, phases kept, and no other loop touched."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.compiler.frontend.layer_scans import LeafRows, SplitScans, layer_scan_lengths, split_layer_scans
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize
from tests.compiler.planning.layer_models import MODELS, ROWS, WIDTH, adamw, dense, dense_stack, draw, mlp, trained

pytestmark = pytest.mark.usefixtures("float64")

all_models = pytest.mark.parametrize("name", MODELS)


def traced(step: Any, *arguments: Any) -> tuple[jc.ClosedJaxpr, list[Any], list[int]]:
    """The normalised step, its flat arguments, and which of them are batch: all but the first argument's."""
    leaves, tree = jax.tree.flatten(arguments)
    closed = jax.make_jaxpr(lambda *flat: step(*jax.tree.unflatten(tree, flat)))(*leaves)
    return normalize(closed), leaves, list(range(len(jax.tree.leaves(arguments[0])), len(leaves)))


@functools.cache
def traced_model(name: str) -> tuple[jc.ClosedJaxpr, list[Any], list[int]]:
    return traced(*MODELS[name]())


@functools.cache
def plain_results(name: str) -> list[Any]:
    closed, leaves, _ = traced_model(name)
    return evaluate(closed, leaves)


def evaluate(closed: jc.ClosedJaxpr, args: list[Any]) -> list[Any]:
    return jax.jit(jc.jaxpr_as_fun(closed))(*args)


def evaluate_split(split: SplitScans, leaves: list[Any]) -> list[Any]:
    """Cut the arguments, run the split step, and put the results together again."""
    results = evaluate(
        split.jaxpr, [leaves[p.leaf][p.start : p.stop] if p.stop else leaves[p.leaf] for p in split.inputs]
    )
    joined: dict[int, list[Any]] = {}
    for piece, result in zip(split.outputs, results, strict=True):
        joined.setdefault(piece.leaf, []).append(result)
    assert list(joined) == sorted(joined)
    return [pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces) for pieces in joined.values()]


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert (jnp.shape(x), jnp.result_type(x)) == (jnp.shape(y), jnp.result_type(y))
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10)


def bounds(pieces: tuple[LeafRows, ...], leaf: int) -> list[Any]:
    return [(p.start, p.stop) for p in pieces if p.leaf == leaf]


def names(split: SplitScans) -> list[str]:
    return [eqn.primitive.name for eqn in split.jaxpr.jaxpr.eqns]


# The transformer takes half a minute to compile.
@pytest.mark.parametrize(
    ("name", "num_pieces"), [(name, n) for name in MODELS for n in (2, 3) if (name, n) != ("flax transformer", 3)]
)
def test_split_step_equals_plain_step(name, num_pieces):
    closed, leaves, batch_inputs = traced_model(name)
    split = split_layer_scans(closed, num_pieces, batch_inputs=batch_inputs)
    assert_equal(evaluate_split(split, leaves), plain_results(name))


@pytest.mark.parametrize("name", ["adamw with clipping", "outputs per layer", "encoder and decoder"])
def test_a_loop_per_layer_equals_plain_step(name):
    closed, leaves, batch_inputs = traced_model(name)
    split = split_layer_scans(closed, 100, batch_inputs=batch_inputs)
    assert {eqn.params["length"] for eqn in split.jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"} == {1}
    assert_equal(evaluate_split(split, leaves), plain_results(name))


@all_models
def test_every_loop_over_layers_is_split(name):
    closed, _, batch_inputs = traced_model(name)
    loops = [eqn.primitive.name for eqn in closed.jaxpr.eqns].count("scan")
    assert loops >= 2
    assert names(split_layer_scans(closed, 2, batch_inputs=batch_inputs)).count("scan") >= 2 * loops


# The parameters that are no stack; of "adafactor" the moments that have no axis for the layers.
NOT_STACKED = {
    "adafactor": ["[1][0].v['b']", "[1][0].v['w']", "[1][0].v_col['b']"],
    "shared weights": ["[0][1]"],
    "flax transformer": [
        f"{tree}['params'][{name}]"
        for tree in ("[0]", "[1][1][0].mu", "[1][1][0].nu")
        for name in ("'Dense_0']['bias'", "'Dense_0']['kernel'", "'Embed_0']['embedding'")
    ],
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "stacked in the step"])
def test_stacked_parameters_and_their_moments_are_in_the_same_pieces_before_and_after(name):
    closed, leaves, batch_inputs = traced_model(name)
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    _, state, _ = MODELS[name]()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    whole = [path for i, path in enumerate(paths) if bounds(split.inputs, i) == [(None, None)]]
    assert whole == [p for i, p in enumerate(paths) if p in NOT_STACKED.get(name, ()) or not jnp.ndim(leaves[i])]
    assert all(bounds(split.inputs, i) == bounds(split.outputs, i) for i in range(len(paths)))
    assert all(bounds(split.inputs, i) == [(None, None)] for i in batch_inputs)


@all_models
def test_nothing_is_put_together_again(name):
    closed, _, batch_inputs = traced_model(name)
    assert "concatenate" not in names(split_layer_scans(closed, 2, batch_inputs=batch_inputs))


@pytest.mark.parametrize(
    ("length", "num_pieces", "wanted"),
    [
        (5, 1, [(None, None)]),
        (5, 2, [(0, 2), (2, 5)]),
        (5, 3, [(0, 1), (1, 3), (3, 5)]),
        (3, 8, [(0, 1), (1, 2), (2, 3)]),
        (1, 4, [(None, None)]),
    ],
)
def test_sizes_of_pieces_differ_by_at_most_one(length, num_pieces, wanted):
    closed, leaves, batch_inputs = traced(*mlp(length=length, tx=adamw())())
    split = split_layer_scans(closed, num_pieces, batch_inputs=batch_inputs)
    stacked = [i for i, x in enumerate(leaves) if jnp.ndim(x) and i not in batch_inputs]
    assert len(stacked) == 6  # w and b, each with its two moments
    assert all(bounds(split.inputs, i) == wanted for i in stacked)


def test_loops_of_different_lengths_have_bounds_of_their_own():
    closed, leaves, batch_inputs = traced_model("encoder and decoder")
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert layer_scan_lengths(closed, batch_inputs=batch_inputs) == (4, 6)
    found = {leaves[p.leaf].shape[0]: p.stop for p in split.inputs if p.start == 0}
    assert found == {4: 2, 6: 3}


def test_slices_of_one_stack_are_split_each_and_the_stack_where_they_meet():
    closed, _, batch_inputs = traced_model("scans over slices")
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert layer_scan_lengths(closed, batch_inputs=batch_inputs) == (4, 2)
    assert bounds(split.inputs, 0) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert not {"pad", "slice"} & set(names(split))


@all_models
def test_phases_and_scopes_stay(name):
    closed, _, batch_inputs = traced_model(name)
    split = split_layer_scans(closed, 3, batch_inputs=batch_inputs)
    before, after = closed.jaxpr.eqns, split.jaxpr.jaxpr.eqns
    assert [p for p, _ in itertools.groupby(map(jc.ad_phase, after))] == [
        p for p, _ in itertools.groupby(map(jc.ad_phase, before))
    ]
    assert set(map(jc.scope_of, after)) <= set(map(jc.scope_of, before))


@all_models
def test_slices_in_front_of_a_loop_have_its_phase(name):
    closed, _, batch_inputs = traced_model(name)
    eqns = split_layer_scans(closed, 3, batch_inputs=batch_inputs).jaxpr.jaxpr.eqns
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    for loop in (eqn for eqn in eqns if eqn.primitive.name == "scan"):
        for v in (v for v in loop.invars if isinstance(v, jc.Var)):
            if v in makers and makers[v].primitive.name == "slice":
                assert jc.ad_phase(makers[v]) == jc.ad_phase(loop)


def recurrent(params: Any, batch: Any) -> Any:
    """A recurrent network over time, with positions added, a mask and a dropout key for every step."""

    def cell(h, step):
        x, key = step
        h = jnp.tanh(x @ params["w"] + h) * jax.random.bernoulli(key, 0.9, h.shape)
        return h, h

    xs = jnp.swapaxes(batch, 0, 1) + params["positions"][:, None]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), params["count"]), xs.shape[0])
    h, _ = lax.scan(cell, jnp.zeros((ROWS, WIDTH)), (xs, keys))
    return jnp.mean(h**2), ()


def counted(params: Any, x: jax.Array) -> Any:
    """A layer that is applied four times: a loop without stacked parameters."""
    h = lax.fori_loop(0, 4, lambda _, h: dense(h, params)[0], x)
    return jnp.mean(h**2), ()


@pytest.mark.parametrize(
    ("loss", "params", "batch"),
    [
        (recurrent, {"w": (WIDTH, WIDTH), "positions": (6, WIDTH)}, (ROWS, 6, WIDTH)),
        (counted, {"w": (WIDTH, WIDTH), "b": (WIDTH,)}, (ROWS, WIDTH)),
    ],
)
def test_loops_over_time_are_left_alone(loss, params, batch):
    params = {name: draw(i, *shape) for i, (name, shape) in enumerate(params.items())}
    frozen = {"count": jnp.int32(3)}
    step, state, batch = trained(lambda p, b: loss({**p, **frozen}, b), params, batch=draw(5, *batch))
    closed, leaves, batch_inputs = traced(step, state, batch)
    assert layer_scan_lengths(closed, batch_inputs=batch_inputs) == ()
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert split.jaxpr is closed
    assert split.inputs == tuple(LeafRows(leaf=i) for i in range(len(leaves)))


def test_a_recurrent_network_within_every_layer_is_split_by_layers_only():
    def layer(h, weights):
        return lax.scan(lambda c, x: (jnp.tanh(c + x @ weights), c), h[0], h)[1], None

    def loss(params, batch):
        return jnp.mean(lax.scan(layer, jnp.swapaxes(batch, 0, 1), params)[0] ** 2), ()

    step, state, batch = trained(loss, draw(0, 4, WIDTH, WIDTH), batch=draw(1, ROWS, 4, WIDTH))
    closed, leaves, batch_inputs = traced(step, state, batch)
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert layer_scan_lengths(closed, batch_inputs=batch_inputs) == (4,)
    assert_equal(evaluate_split(split, leaves), evaluate(closed, leaves))


def test_callbacks_run_once_per_layer_and_in_order():
    seen: list[float] = []

    def layer(h, weights):
        jax.experimental.io_callback(lambda x: seen.append(float(x)), None, weights["b"][0], ordered=True)
        return dense(h, weights)

    params = dense_stack(5) | {"b": jnp.arange(5.0)[:, None] * jnp.ones(WIDTH)}
    closed, leaves, batch_inputs = traced(lambda p, x: lax.scan(layer, x, p)[0], params, draw(0, ROWS, WIDTH))
    split = split_layer_scans(closed, 3, batch_inputs=batch_inputs)
    assert split.jaxpr.effects == closed.effects
    evaluate_split(split, leaves)
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


def test_state_gets_equal_pieces_where_no_equation_ties_it():
    def step(params, x):
        h, _ = lax.scan(dense, x, params)
        # What comes out of a branch is not followed into it.
        return jax.tree.map(lambda p: lax.cond(h[0, 0] > 0, jnp.sin, jnp.cos, p), params)

    closed, leaves, batch_inputs = traced(step, dense_stack(4), draw(0, ROWS, WIDTH))
    tied = split_layer_scans(closed, 2, batch_inputs=batch_inputs, state_outputs={0: 0, 1: 1})
    loose = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert tied.inputs[:4] == loose.inputs[:4] == tied.outputs
    assert loose.outputs == (LeafRows(leaf=0), LeafRows(leaf=1))
    assert_equal(evaluate_split(tied, leaves), evaluate(closed, leaves))


def test_a_closed_over_stack_is_cut_inside_the_step():
    stack = dense_stack(4)

    def loss(gains, x):
        h, _ = lax.scan(lambda h, xs: (dense(h, xs[0])[0] * xs[1], None), x, (stack, gains))
        return jnp.mean(h**2), ()

    closed, leaves, batch_inputs = traced(*trained(loss, draw(3, 4)))
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert bounds(split.inputs, 0) == [(0, 2), (2, 4)]
    assert_equal(evaluate_split(split, leaves), evaluate(closed, leaves))


def test_a_batch_that_every_layer_reads_its_own_row_of_is_not_split():
    def loss(params, x):
        h, _ = lax.scan(lambda h, xs: (dense(h, xs[0])[0] + xs[1], None), x, (params, x))
        return jnp.mean(h**2), ()

    closed, leaves, batch_inputs = traced(*trained(loss, dense_stack(ROWS)))
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert bounds(split.inputs, batch_inputs[0]) == [(None, None)]
    assert_equal(evaluate_split(split, leaves), evaluate(closed, leaves))


def test_a_cut_that_would_spread_from_row_to_row_without_end_stops():
    def loss(params, x):
        h, _ = lax.scan(dense, x, params)
        flat = jnp.concatenate([p.ravel() for p in jax.tree.leaves(params)])
        return jnp.mean(h**2) + jnp.sum((flat[1:] - flat[:-1]) ** 2), ()

    closed, leaves, batch_inputs = traced(*trained(loss, dense_stack(20)))
    split = split_layer_scans(closed, 2, batch_inputs=batch_inputs)
    assert bounds(split.inputs, 0) == [(0, 10), (10, 20)]
    assert len(split.jaxpr.jaxpr.eqns) < 10 * len(closed.jaxpr.eqns)
    assert_equal(evaluate_split(split, leaves), evaluate(closed, leaves))
