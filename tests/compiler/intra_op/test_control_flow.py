"""Loops, branches and remat regions in the graph: layouts at their borders, and costs as often as bodies run."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.intra_op.choice_graph import BlockGraph, EquationNode
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.sharding.layout import Layout, all_layouts, replicated
from tests.compiler.equations import real
from tests.compiler.planned_steps import GRID, LINE, collectives, plan_step, traced

W, X, STACK, BATCHES = real(64, 64), real(32, 64), real(3, 64, 64), real(4, 32, 64)


def entered(function, *args, mesh=LINE) -> tuple[EquationNode, BlockGraph]:
    """The first equation with bodies of a program, and its last body."""
    choices = plan_step(traced(function, *args), mesh).choices
    (equation, *_) = [each for each in choices.equations if each is not None and each.bodies]
    return equation, equation.bodies[-1]


def layouts_of(choice):
    return None if choice is None else choice.layouts


def test_a_slice_of_a_stack_is_laid_out_like_the_stack_which_is_not_split_along_it():
    scan, body = entered(lambda stack, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, stack), STACK, X)
    carry, stack = scan.arguments
    assert layouts_of(carry) == all_layouts((32, 64), LINE)
    assert layouts_of(stack) == tuple(Layout(((), *layout.dims)) for layout in all_layouts((64, 64), LINE))
    assert [choice.number for choice in scan.arguments] == [choice.number for choice in body.arguments]
    assert all(layout.dims[0] == () for layout in layouts_of(scan.results[1]))


def test_a_carry_has_one_layout_coming_in_and_going_out():
    scan, body = entered(lambda stack, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack), STACK, X)
    assert scan.arguments[0] is scan.results[0] is body.arguments[0] is body.results[0]


def test_a_carry_that_is_only_added_to_may_be_a_sum():
    def adds(w, batches):
        return lax.scan(lambda total, x: (total + x.T @ x, None), w, batches)

    def uses(w, batches):
        return lax.scan(lambda total, x: (total + total @ (x.T @ x), None), w, batches)

    assert any(layout.partial for layout in entered(adds, W, BATCHES)[0].arguments[0].layouts)
    assert not any(layout.partial for layout in entered(uses, W, BATCHES)[0].arguments[0].layouts)


def test_sums_over_microbatches_are_made_once_after_the_loop():
    def gradients(w, batches):
        return lax.scan(lambda total, x: (total + x.T @ jnp.tanh(x @ w), None), jnp.zeros_like(w), batches)[0]

    closed = traced(gradients, W, real(4, 512, 64))
    rows = Constraints(inputs={1: (Layout(((), (0, 1), ())),)})
    moved = collectives(closed, plan_step(closed, GRID, constraints=rows), GRID)
    assert [each.times for each in moved if "+" in each.what] == [1]


def test_counters_of_loops_are_free():
    equation, body = entered(lambda w, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) * i, x), W, X)
    assert [layouts_of(choice) is None for choice in equation.arguments].count(True) >= 1
    assert [choice is None for choice in body.results].count(True) >= 1


@pytest.mark.parametrize("length", [1, 7])
def test_a_body_costs_as_often_as_it_runs(length):
    def scanned(w, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length)[0]

    def total(function):
        table = plan_step(traced(function, W, X), LINE).table
        return sum(cost[0] for cost in table.costs)

    assert total(scanned) == pytest.approx(length * total(lambda w, x: jnp.tanh(x @ w)))


def test_who_decides_a_branch_or_ends_a_loop_is_known_everywhere():
    branch, _ = entered(lambda w, x: lax.cond(x.sum() > 0, lambda: x @ w, lambda: x), W, X)
    assert layouts_of(branch.arguments[0]) == (replicated(0),)
    loop, _ = entered(lambda w, x: lax.while_loop(lambda h: h.sum() < 9, lambda h: jnp.abs(h @ w) + 1, x), W, X)
    assert layouts_of(loop.bodies[0].results[0]) == (replicated(0),)


def test_branches_have_one_layout_for_each_operand_and_result():
    branch, _ = entered(lambda w, x: lax.cond(x.sum() > 0, lambda: jnp.sin(x @ w), lambda: x), W, X)
    first, second = branch.bodies
    assert first.arguments == second.arguments == branch.arguments[1:]
    assert first.results == second.results == list(branch.results)


def test_a_branch_costs_its_share_of_the_time():
    def either(w, x):
        return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: x)

    table = plan_step(traced(either, W, X), LINE).table
    product = next(cost for name, cost in zip(table.names, table.costs) if name.startswith("dot_general"))
    plain = plan_step(traced(lambda w, x: jnp.tanh(x @ w), W, X), LINE).table
    whole = next(cost for name, cost in zip(plain.names, plain.costs) if name.startswith("dot_general"))
    assert product[0] == pytest.approx(whole[0] / 2)


def test_a_remat_region_has_layouts_of_its_own_at_its_border():
    region, body = entered(lambda w, x: jax.grad(lambda w: jax.checkpoint(lambda w: jnp.tanh(x @ w).sum())(w))(w), W, X)
    assert [layouts_of(choice) for choice in region.arguments[:2]] == [layouts_of(c) for c in body.arguments[:2]]
    assert all(choice is None or choice.layouts for choice in region.results)
