"""Each device's program, spelled out: which layout each reader takes, what is done once, and what moves."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, describe_layout, replicated
from autopar.compiler.spmd.block_plan import BlockPlan, EquationPlan
from autopar.compiler.spmd.collectives import planned_collectives
from autopar.compiler.spmd.emit import emit_spmd
from autopar.compiler.spmd.local_program import Action, Evaluate, LocalBlock, Reshard, RunBody, Value, local_block
from tests.compiler.equations import real
from tests.compiler.planned_steps import LINE, plan_step, traced

X = real(64, 32)
WHOLE, ROWS, COLUMNS = replicated(2), Layout(((0,), ())), Layout(((), (0,)))
SUM = Layout(((), ()), (0,))


def like(layout, num_operands=1):
    """An equation with one layout for everything."""
    return EquationPlan(operands=(layout,) * num_operands, results=(layout,))


def block_of(function, plan: BlockPlan, *args) -> LocalBlock:
    return local_block(jc.open_jaxpr(traced(function, *args))[0], plan, LINE)


def written(block: LocalBlock) -> list[str]:
    """The actions as text."""

    def text(action):
        match action:
            case Reshard(operand=operand, result=result, after=after):
                source = describe_layout(operand.layout, LINE) if isinstance(operand, Value) else "constant"
                again = " again" if after else ""
                return f"{source} to {describe_layout(result.layout, LINE)}{again}"
            case Evaluate(eqn=eqn) | RunBody(eqn=eqn):
                return eqn.primitive.name

    return [text(action) for action in block.actions]


def two_readers(x):
    return jnp.sin(x), jnp.cos(x)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        pytest.param(
            BlockPlan(arguments=(ROWS,), equations=(like(ROWS), like(ROWS)), results=(ROWS, ROWS)),
            ["sin", "cos"],
            id="what is there is read as it is",
        ),
        pytest.param(
            BlockPlan(arguments=(ROWS,), equations=(like(WHOLE), like(WHOLE)), results=(WHOLE, WHOLE)),
            ["[x, -] to [-, -]", "sin", "cos"],
            id="two readers of one phase share what is gathered",
        ),
        pytest.param(
            BlockPlan(
                arguments=(ROWS,),
                equations=(like(COLUMNS), like(WHOLE)),
                results=(COLUMNS, WHOLE),
                forms={(0, "stored"): WHOLE},
            ),
            ["[x, -] to [-, -]", "[-, -] to [-, x]", "sin", "cos"],
            id="by way of the stored form",
        ),
        pytest.param(
            BlockPlan(
                arguments=(ROWS,),
                equations=(like(ROWS), like(WHOLE)),
                results=(ROWS, WHOLE),
                forms={(0, "stored"): WHOLE},
            ),
            ["sin", "[x, -] to [-, -]", "cos"],
            id="not where it came in the layout that is wanted",
        ),
        pytest.param(
            BlockPlan(arguments=(ROWS,), equations=(like(ROWS), like(ROWS)), results=(WHOLE, COLUMNS)),
            ["sin", "cos", "[x, -] to [-, -]", "[x, -] to [-, x]"],
            id="results leave as planned",
        ),
        pytest.param(
            BlockPlan(arguments=(ROWS,), equations=(None, like(ROWS)), results=(None, ROWS)),
            ["[x, -] to [-, -]", "sin", "cos"],
            id="what has no plan is evaluated whole by everyone",
        ),
    ],
)
def test_actions_of_a_plan_are(plan, expected):
    assert written(block_of(two_readers, plan, X)) == expected


def test_a_constant_among_sums_is_a_sum_too():
    product = EquationPlan(operands=(COLUMNS, ROWS), results=(SUM,))
    total = EquationPlan(operands=(SUM, Layout((), (0,))), results=(SUM,))
    plan = BlockPlan(arguments=(COLUMNS, ROWS), equations=(product, total), results=(ROWS,))
    block = block_of(lambda x, y: x @ y + 1.0, plan, X, real(32, 64))
    assert written(block) == ["dot_general", "constant to [] + x", "add", "[-, -] + x to [x, -]"]


def test_what_a_later_phase_gathers_again_waits_for_what_it_is_needed_with():
    def gradient(w, x):
        return jax.grad(lambda x: jnp.tanh(x @ w).sum())(x)

    jaxpr = jc.open_jaxpr(traced(gradient, real(32, 64), X))[0]
    equations = [
        EquationPlan(operands=tuple(map(whole, eqn.invars)), results=tuple(map(whole, eqn.outvars)))
        for eqn in jaxpr.eqns
    ]
    plan = BlockPlan(arguments=(ROWS, WHOLE), equations=tuple(equations), results=(WHOLE,))
    gathered = [each for each in local_block(jaxpr, plan, LINE).actions if isinstance(each, Reshard)]
    assert [each.result.form for each in gathered] == ["forward", "backward"]
    assert not gathered[0].after
    assert gathered[1].after
    assert [each.repeated for each in planned_collectives(local_block(jaxpr, plan, LINE), LINE)] == [False, True]


def whole(atom):
    return replicated(len(atom.aval.shape))


def test_collectives_of_bodies_count_as_often_as_they_run():
    def scanned(x):
        return lax.scan(lambda h, _: (jnp.sin(h), None), x, None, 5)[0]

    body = BlockPlan(arguments=(ROWS,), equations=(like(WHOLE),), results=(ROWS,))
    scan = EquationPlan(operands=(ROWS,), results=(ROWS,), bodies=(body,))
    block = block_of(scanned, BlockPlan(arguments=(ROWS,), equations=(scan,), results=(ROWS,)), X)
    assert written(block) == ["scan"]
    (gathered,) = planned_collectives(block, LINE)
    assert (gathered.times, gathered.collective.kind, gathered.collective.nbytes) == (5, "all-gather", 64 * 32 * 4)
    assert (gathered.dtype, gathered.repeated) == ("float32", False)


def test_the_greatest_over_a_split_dimension_is_a_collective_of_its_equation():
    greatest = EquationPlan(operands=(COLUMNS,), results=(replicated(1),), combined=(0,))
    block = block_of(lambda x: x.max(1), BlockPlan(arguments=(COLUMNS,), equations=(greatest,), results=(None,)), X)
    (combined,) = planned_collectives(block, LINE)
    assert combined.what == "reduce_max float32[64]"
    assert (combined.collective.kind, combined.collective.nbytes) == ("all-reduce", 64 * 4)


def values_read(action: Action) -> set[Value]:
    read = (action.operand, action.after) if isinstance(action, Reshard) else action.operands
    return {value for value in read if isinstance(value, Value)}


def test_every_value_is_made_before_it_is_read():
    def step(w, x):
        h = lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: x @ w + 1)
        return lax.scan(lambda c, _: (jnp.tanh(c @ w.T @ w), c.max()), h, None, 3)

    def check(block: LocalBlock) -> None:
        made = {*block.inputs}
        for action in block.actions:
            assert values_read(action) <= made
            made |= {action.result} if isinstance(action, Reshard) else {*action.results}
            for body in action.bodies if isinstance(action, RunBody) else ():
                check(body)
        assert {value for value in block.outputs if isinstance(value, Value)} <= made

    closed = traced(step, real(32, 64), X)
    check(local_block(jc.open_jaxpr(closed)[0], plan_step(closed, LINE).plan, LINE))


def test_what_every_device_may_compute_is_computed_in_the_parts_that_are_read():
    def masked(x):
        rows, columns = (lax.broadcasted_iota(jnp.int32, (256, 256), d) for d in (0, 1))
        return jnp.tanh(jnp.where(rows >= columns, x, 0.0))

    x = real(256, 256)
    closed = traced(masked, x)
    found = plan_step(closed, LINE, constraints=Constraints(inputs={0: (ROWS,)}, results={0: (ROWS,)}))
    block = local_block(jc.open_jaxpr(closed)[0], found.plan, LINE)
    assert not any(isinstance(action, Reshard) for action in block.actions)
    shapes = {v.aval.shape for eqn in shard_map_body(emit_spmd(closed, block, LINE)) for v in eqn.outvars}
    assert (256, 256) not in shapes
    assert (32, 256) in shapes


def shard_map_body(closed):
    (eqn,) = jc.open_jaxpr(closed)[0].eqns
    (body,) = jc.subjaxprs(eqn)
    return jc.open_jaxpr(body)[0].eqns
