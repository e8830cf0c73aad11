"""Plans of programs as data: JSON and back, by the names of mesh axes."""

import copy
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, replicated
from autopar.compiler.spmd.block_plan import (
    BlockPlan,
    EquationPlan,
    from_data,
    layout_from_text,
    strategy_of,
    to_data,
    value_numbers,
)
from autopar.errors import PlanMismatch
from tests.compiler.equations import equation, real
from tests.compiler.planned_steps import GRID, plan_step, traced

PRODUCT = EquationPlan(
    operands=(Layout(((0,), (1,))), Layout(((1,), ()))), results=(Layout(((0,), ()), (1,)),), combined=()
)
GREATEST = EquationPlan(operands=(Layout(((), (0, 1))),), results=(replicated(1),), combined=(0, 1))
LOOP = EquationPlan(
    operands=(None, replicated(0)),
    results=(None,),
    bodies=(BlockPlan(arguments=(None, replicated(0)), equations=(None, PRODUCT), results=(None,)),),
)
PLAN = BlockPlan(
    arguments=(Layout(((0,), (1,))), None),
    equations=(PRODUCT, None, GREATEST, PRODUCT, LOOP),
    results=(Layout(((0, 1), ())), None),
    forms={(3, "stored"): Layout(((0,), ())), (3, "backward"): replicated(2)},
)


def test_a_plan_is_written_by_the_names_of_axes():
    data = to_data(PLAN, GRID)
    assert data["arguments"] == ["x,y", "free"]
    assert data["lines"] == ["x,y y,- -> x,-|y", "-,x*y -> - over x*y"]
    assert data["equations"][:4] == [0, None, 1, 0]
    assert data["equations"][4]["line"] == "free . -> free"
    assert data["forms"] == {"3 backward": "-,-", "3 stored": "x,-"}
    assert data["results"] == ["x*y,-", "free"]


def test_a_plan_read_is_the_plan_written():
    assert from_data(json.loads(json.dumps(to_data(PLAN, GRID))), GRID) == PLAN


def scanned(stack, x):
    def loss(stack):
        return (lax.scan(lambda h, w: (jnp.tanh(h @ w), h.max()), x, stack)[0] ** 2).sum()

    return stack - jax.grad(loss)(stack)


def branched(w, x):
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: lax.fori_loop(0, 3, lambda i, h: h @ w, x))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, y: jnp.tanh(x @ y).max(), (real(32, 64), real(64, 32))),
        (scanned, (real(3, 64, 64), real(32, 64))),
        (branched, (real(64, 64), real(32, 64))),
    ],
    ids=["product", "scan", "branch"],
)
def test_plans_of_programs_come_back(function, args):
    plan = plan_step(traced(function, *args), GRID).plan
    assert from_data(json.loads(json.dumps(to_data(plan, GRID))), GRID) == plan


def without(data, key):
    del data[key]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: without(data, "lines"), id="a part is missing"),
        pytest.param(lambda data: data["arguments"].__setitem__(0, "x,w"), id="an axis that the mesh has not"),
        pytest.param(lambda data: data["equations"].__setitem__(0, 7), id="a line that is not there"),
        pytest.param(lambda data: data["forms"].update({"three stored": "x,-"}), id="a number that is none"),
        pytest.param(lambda data: data.update(arguments=None), id="nothing where a list must be"),
    ],
)
def test_data_that_is_no_plan_is_an_error_that_says_what_to_do(damage):
    data = copy.deepcopy(to_data(PLAN, GRID))
    damage(data)
    with pytest.raises(PlanMismatch, match=r"cannot be read: .*axes \('x', 'y'\): make the plan again"):
        from_data(data, GRID)


@pytest.mark.parametrize("text", ["elsewhere", "-,", "-|elsewhere", 7])
def test_a_layout_over_no_axes_of_the_mesh_is_refused(text):
    with pytest.raises(PlanMismatch, match="which is none over the mesh axes"):
        layout_from_text(text, GRID)


def test_values_are_numbered_inputs_first():
    jaxpr, _ = jc.open_jaxpr(jax.make_jaxpr(lambda x, y: (lax.top_k(x, 2), jnp.sin(y)))(real(8), real(8)))
    numbers = value_numbers(jaxpr)
    assert [numbers[v] for v in jaxpr.invars] == [0, 1]
    assert [numbers[v] for eqn in jaxpr.eqns for v in eqn.outvars] == [2, 3, 4]


def test_the_strategy_of_an_equation_counts_the_devices_that_share_it():
    product, _ = equation("dot_general", jnp.matmul, (real(8, 8), real(8, 8)))
    greatest, _ = equation("reduce_max", lambda x: jnp.max(x, 1), (real(3, 8),))
    assert strategy_of(product, PRODUCT, GRID).devices == 8
    assert strategy_of(greatest, GREATEST, GRID).combined == (0, 1)


def test_devices_count_less_what_padding_takes():
    product, _ = equation("dot_general", jnp.matmul, (real(12, 6), real(6, 12)))
    # Of 12 rows over 8 devices each has 2, as six devices would; of 6 columns over 4 as three would.
    rows = EquationPlan(operands=(Layout(((0, 1), ())), replicated(2)), results=(Layout(((0, 1), ())),))
    assert strategy_of(product, rows, GRID).devices == 6
    both = EquationPlan(operands=(Layout(((0,), (1,))), Layout(((1,), ()))), results=(Layout(((0,), ()), (1,)),))
    assert strategy_of(product, both, GRID).devices == 6
