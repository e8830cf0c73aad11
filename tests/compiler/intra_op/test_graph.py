"""The graph of choices of a program: which nodes there are, and who shares them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.intra_op.plan_program import Constraints, plan_intra_op
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, all_layouts
from tests.compiler.equations import real
from tests.compiler.planned_steps import GRID, LINE, mesh_costs, plan_step, traced

X, Y, W = real(64, 32), real(32, 64), real(32, 32)


def names(function, *args, **options):
    """The nodes of a program's graph, without their numbers."""
    found = plan_step(traced(function, *args), LINE, **options)
    return [name.split(" of ")[0] for name in found.table.names]


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        pytest.param(
            lambda x, y: x @ y, (X, Y), ["input 0", "input 1", "dot_general 0", "result 0"], id="one equation"
        ),
        pytest.param(
            lambda x: jnp.sin(x) * jnp.cos(x),
            (X,),
            ["input 0", "sin 0", "cos 1", "mul 2", "result 0", "stored float32[64,32]"],
            id="a value with two readers is stored",
        ),
        pytest.param(lambda x: x, (X,), ["input 0", "result 0"], id="an input that is a result"),
        pytest.param(
            lambda x: (x + jnp.arange(32.0) * 2, 3.0),
            (X,),
            ["input 0", "add 3", "result 0"],
            id="nothing for what is free",
        ),
        pytest.param(lambda n: n + 1, (jnp.float32(1),), ["add 0"], id="one without a choice for what is small"),
    ],
)
def test_nodes_of_a_program_are(function, args, expected):
    found = names(function, *args)
    assert [n for n in found if not n.startswith("broadcast")] == expected


def test_a_state_and_what_replaces_it_share_their_node():
    apart, together = names(jnp.sin, X), names(jnp.sin, X, num_state=1)
    assert apart == ["input 0", "sin 0", "result 0"]
    assert together == ["input 0", "sin 0"]


def test_a_weight_of_both_phases_has_a_copy_for_the_phase_that_reads_it_often():
    def step(w, v, x):
        # Backward, w is read twice: for the gradients of both products.
        return jax.grad(lambda x, v: (jnp.tanh(x @ w) @ v @ w).sum(), (0, 1))(x, v)

    closed = traced(step, W, W + 1, X)
    choices = plan_step(closed, LINE).choices
    weight = jc.open_jaxpr(closed)[0].invars[0]
    assert weight in choices.stored
    assert set(choices.copies[weight]) <= {"forward", "backward"}


def test_readers_of_one_value_share_its_gathering():
    """Both pay for it once: the optimum of two products costs less than twice that of one."""
    rows = Layout(((0,), ()))
    chosen = mesh_costs(LINE, bandwidth=1e6)

    def value(function, results):
        closed = traced(function, X, Y)
        pinned = {"inputs": {0: (rows,)}, "results": {n: (Layout(((), ())),) for n in range(results)}}
        return plan_step(closed, LINE, chosen=chosen, constraints=Constraints(**pinned)).optimum.value

    one = value(lambda x, y: jnp.sin(x), 1)
    assert value(lambda x, y: (jnp.sin(x), jnp.cos(x)), 2) < 1.5 * one


def test_folded_layers_share_nodes_that_count_as_often_as_they_stand():
    def step(*args):
        *weights, x = args
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    closed = traced(step, *[W] * 6, X)
    input_names = [*(f"params.h_{number}" for number in range(6)), "x"]
    apart = plan_step(closed, LINE).table
    together = plan_step(closed, LINE, input_names=input_names, fold_from=1).table

    def cost_of(table, name):
        found = [cost[0] for node, cost in zip(table.names, table.costs) if node.startswith(name)]
        return len(found), sum(found)

    for name in ("tanh", "dot_general"):
        (all_nodes, all_s), (nodes, seconds) = cost_of(apart, name), cost_of(together, name)
        assert all_nodes == 6 > nodes
        assert seconds == pytest.approx(all_s)


def test_inputs_have_all_layouts_and_equations_all_strategies():
    found = plan_step(traced(lambda x, y: x @ y, X, Y), GRID)
    product = found.choices.equations[0]
    assert product is not None and product.number is not None
    first = found.choices.arguments[0]
    assert first is not None
    assert first.layouts == all_layouts((64, 32), GRID)
    assert len(product.strategies) == len(found.table.costs[product.number]) == 16
    assert product.results[0] is not None
    assert product.results[0].layouts == tuple(strategy.results[0] for strategy in product.strategies)


def test_sums_are_passed_on_through_what_is_linear_only():
    def partial_strategies(function):
        choices = plan_step(traced(function, X, Y), LINE).choices
        last = choices.equations[-1]
        assert last is not None
        return [s for s in last.strategies if any(layout.partial for layout in s.operands)]

    assert partial_strategies(lambda x, y: 2.0 * (x @ y))
    assert not partial_strategies(lambda x, y: jnp.tanh(x @ y))
    assert not partial_strategies(lambda x, y: 2.0 * x)


def test_equal_equations_are_listed_once():
    found = plan_intra_op(
        traced(lambda x: jnp.tanh(jnp.tanh(x)), X), mesh_costs(GRID), state_outputs={}, time_limit_s=10
    )
    first, second = found.choices.equations
    assert first is not None and second is not None
    assert first.strategies is second.strategies
    assert first.number != second.number
    np.testing.assert_array_equal(*(found.table.costs[each.number] for each in (first, second)))
