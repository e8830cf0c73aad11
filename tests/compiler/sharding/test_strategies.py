"""Strategies: which factor, or operand, each axis of a mesh may be given to."""

import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.sharding.layout import LogicalMesh, all_layouts, describe_layout
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import strategies
from tests.compiler.equations import equation, real
from tests.compiler.planned_steps import GRID, LINE

PAIR = LogicalMesh(shape=(2,), axis_names=("x",))


def written(case, mesh, maybe_partial=()):
    """The strategies of an equation as text."""
    eqn, _ = equation(*case)
    (rule,) = sharding_rules([eqn])

    def text(strategy):
        operands, results = (
            " ".join(describe_layout(layout, mesh) for layout in side) for side in (strategy.operands, strategy.results)
        )
        return f"{operands} -> {results}" + (f" over {mesh.names(strategy.combined)}" if strategy.combined else "")

    return [text(strategy) for strategy in strategies(eqn, rule, mesh, maybe_partial=maybe_partial)]


PRODUCT = ("dot_general", jnp.matmul, (real(8, 16), real(16, 24)))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(
            PRODUCT,
            [
                "[-, -] [-, -] -> [-, -]",
                "[x, -] [-, -] -> [x, -]",
                "[-, x] [x, -] -> [-, -] + x",
                "[-, -] [-, x] -> [-, x]",
            ],
            id="a product: rows, the summed dimension, columns",
        ),
        pytest.param(
            ("reduce_max", lambda x: x.max(1), (real(8, 16),)),
            ["[-, -] -> [-]", "[x, -] -> [x]", "[-, x] -> [-] over ('x',)"],
            id="a maximum is combined at once",
        ),
        pytest.param(
            ("cumsum", lambda x: lax.cumsum(x, 1), (real(8, 16),)),
            ["[-, -] -> [-, -]", "[x, -] -> [x, -]"],
            id="never along a blocked dimension",
        ),
        pytest.param(
            ("tanh", jnp.tanh, (real(3, 8),)),
            ["[-, -] -> [-, -]", "[x, -] -> [x, -]", "[-, x] -> [-, x]"],
            id="with padding where the size does not divide",
        ),
        pytest.param(
            ("reshape", lambda x: x.reshape(3, 2, 4), (real(6, 4),)),
            ["[-, -] -> [-, -, -]", "[-, x] -> [-, -, x]"],
            id="but not where padding would stand inside of a dimension",
        ),
        pytest.param(
            ("reshape", lambda x: x.reshape(4, 2, 4), (real(8, 4),)),
            ["[-, -] -> [-, -, -]", "[x, -] -> [x, -, -]", "[-, x] -> [-, -, x]"],
            id="not by the minor of two factors alone",
        ),
    ],
)
def test_strategies_on_one_axis_are(case, expected):
    assert written(case, PAIR) == expected


def test_two_axes_may_split_one_factor_or_two():
    found = written(PRODUCT, GRID)
    assert len(found) == len(set(found)) == 4**2
    assert "[x, y] [y, -] -> [x, -] + y" in found
    assert "[x*y, -] [-, -] -> [x*y, -]" in found
    assert "[-, x*y] [x*y, -] -> [-, -] + x + y" in found


def test_an_axis_of_one_device_splits_nothing():
    beside_one = LogicalMesh(shape=(1, 8), axis_names=("x", "y"))
    alone = LogicalMesh(shape=(8,), axis_names=("y",))
    assert written(PRODUCT, beside_one) == written(PRODUCT, alone)
    assert len(all_layouts((8, 16), beside_one)) == len(all_layouts((8, 16), alone)) == 3


def test_a_merged_dimension_is_split_by_the_minor_factor_once_the_major_one_is_split_whole():
    merged = ("reshape", lambda x: x.reshape(8, 4), (real(2, 4, 4),))
    found = written(merged, GRID)
    assert "[x, y, -] -> [x*y, -]" in found
    # Split by y first the parts would not follow each other in the order of the mesh.
    assert all("y*x" not in text for text in found)
    assert "[-, y, -] -> [y, -]" not in found


def test_operands_that_may_be_sums_are_taken_as_they_are_where_the_equation_is_linear():
    total = ("add", jnp.add, (real(8, 16), real(8, 16)))
    assert "[-, -] + x [-, -] + x -> [-, -] + x" in written(total, PAIR, maybe_partial=[0])
    assert all("+" not in text for text in written(total, PAIR))
    times = ("mul", jnp.multiply, (real(8, 16), real(8, 16)))
    assert "[-, -] + x [-, -] -> [-, -] + x" in written(times, PAIR, maybe_partial=[0])
    assert "[-, -] [-, -] + x -> [-, -] + x" not in written(times, PAIR, maybe_partial=[0])
    assert "[x, -] + y [x, -] -> [x, -] + y" in written(times, GRID, maybe_partial=[0])
    curved = ("tanh", jnp.tanh, (real(8, 16),))
    assert all("+" not in text for text in written(curved, PAIR, maybe_partial=[0]))


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["8", "2x4"])
def test_the_first_strategy_splits_nothing_and_devices_count_what_divides_the_work(mesh):
    eqn, _ = equation(*PRODUCT)
    (rule,) = sharding_rules([eqn])
    first, *others = strategies(eqn, rule, mesh)
    assert first.devices == 1
    assert max(strategy.devices for strategy in others) == 8
