"""Collectives done twice are found, in remat regions too; those of other data or in loops are not the same."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, replicated
from autopar.compiler.spmd.block_plan import BlockPlan, EquationPlan
from autopar.compiler.spmd.collectives import planned_collectives, repeated_collectives
from autopar.compiler.spmd.local_program import LocalBlock, local_block
from tests.compiler.equations import real
from tests.compiler.planned_steps import LINE, traced

X = real(64, 32)
ROWS, WHOLE = Layout(((0,), ())), replicated(2)


def block_of(function, *args) -> LocalBlock:
    """A program that gathers whatever it reads, and keeps rows."""
    jaxpr = jc.open_jaxpr(traced(function, *args))[0]
    return local_block(jaxpr, plan_of(jaxpr), LINE)


def plan_of(jaxpr) -> BlockPlan:
    return BlockPlan(
        arguments=tuple(map(rows, jaxpr.invars)),
        equations=tuple(map(equation_plan, jaxpr.eqns)),
        results=tuple(map(rows, jaxpr.outvars)),
    )


def equation_plan(eqn) -> EquationPlan:
    bodies = [jc.open_jaxpr(body)[0] for body in jc.subjaxprs(eqn)]
    layout = rows if bodies else whole
    return EquationPlan(
        operands=tuple(map(layout, eqn.invars)),
        results=tuple(map(rows, eqn.outvars)),
        bodies=tuple(map(plan_of, bodies)),
    )


def rows(atom) -> Layout:
    rank = len(atom.aval.shape)
    return Layout(tuple((0,) if d == 0 else () for d in range(rank)))


def whole(atom) -> Layout:
    return replicated(len(atom.aval.shape))


def flags(function, *args) -> list[bool]:
    return [each.repeated for each in planned_collectives(block_of(function, *args), LINE) if each.dtype == "float32"]


def two_readers(x):
    return jnp.sin(x), jnp.cos(x)


def chain(x):
    return jnp.cos(jnp.sin(x))


def region(x):
    """`sin` of x, and in a remat region the same again, and then something else."""
    return jnp.sin(x), jax.checkpoint(lambda x: jnp.cos(jnp.sin(x)))(x)


def two_regions(x, y):
    again = jax.checkpoint(lambda x: jnp.cos(jnp.sin(x)))
    return again(x), again(y), again(x)


def loop(x):
    return jnp.sin(x), lax.scan(lambda h, _: (jnp.sin(h), None), x, None, 3)[0]


def region_in_a_loop(x):
    def body(h, _):
        return jax.checkpoint(lambda h: jnp.cos(jnp.sin(h)))(h) + jnp.sin(h), None

    return lax.scan(body, x, None, 3)[0]


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        pytest.param(two_readers, (X,), [False], id="two readers share"),
        pytest.param(chain, (X,), [False, False], id="one after the other"),
        pytest.param(region, (X,), [False, True, False], id="a region does what was done before it"),
        pytest.param(two_regions, (X, X), [False, False, False, False, True, True], id="of the same operand only"),
        pytest.param(loop, (X,), [False, False], id="a loop does it to other data"),
    ],
)
def test_repeated_are(function, args, expected):
    assert flags(function, *args) == expected


def test_regions_in_a_loop_repeat_what_the_loop_does_in_the_same_round():
    assert True in flags(region_in_a_loop, X)
    assert flags(region_in_a_loop, X)[0] is False


def test_every_action_that_communicates_has_a_flag_for_each_collective():
    block = block_of(chain, X)
    assert set(repeated_collectives(block)) == set(block.actions)


def rounds_of_the_same(function, *args) -> list[tuple[float, float]]:
    """How often each gather runs, and in how many of these rounds its operand is the same."""
    every = planned_collectives(block_of(function, *args), LINE)
    return [(each.times, each.invariant_trips) for each in every if each.dtype == "float32"]


def loop_over_constant(x, w):
    """Reads w, and sin(w), in every round, and what changes."""
    return lax.scan(lambda h, _: (h + jnp.cos(jnp.sin(w)), None), x, None, 3)[0]


def nested_loops(x, w):
    """The inner loop reads w, which neither changes, and h, which the outer one does."""

    def body(h, _):
        return lax.scan(lambda g, _: (g + jnp.sin(w) + jnp.sin(h), None), h, None, 2)[0], None

    return lax.scan(body, x, None, 3)[0]


def counted_loop(x, w):
    return lax.fori_loop(0, 3, lambda _, h: jnp.sin(h) + jnp.sin(w), x)


def slices(x, w):
    return lax.scan(lambda h, row: (h + jnp.sin(row), None), jnp.zeros_like(x[0]), w)[0]


def region_in_a_loop_over_constant(x, w):
    body = jax.checkpoint(lambda h: jnp.sin(h) + jnp.sin(w))
    return lax.scan(lambda h, _: (body(h), None), x, None, 3)[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(loop_over_constant, {(3, 3): 3, (3, 1): 1}, id="constants of a loop, and what is made of them"),
        pytest.param(nested_loops, {(6, 6): 2, (6, 2): 2, (6, 1): 2}, id="in both loops, and in the inner one"),
        pytest.param(counted_loop, {(3, 3): 2, (3, 1): 2}, id="a while loop"),
        pytest.param(slices, {(64, 1): 3}, id="every round reads another slice"),
        pytest.param(region_in_a_loop_over_constant, {(3, 3): 2, (3, 1): 2}, id="a remat region in a loop"),
        pytest.param(chain, {(1, 1): 2}, id="no loop"),
    ],
)
def test_rounds_in_which_a_loop_does_not_change_what_is_gathered(function, expected):
    found = Counter(rounds_of_the_same(function, *([X] * (1 if function is chain else 2))))
    assert found == expected
