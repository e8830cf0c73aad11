"""Reductions that are made together: one collective with the planned bytes and the same numbers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

import autopar
from autopar.compiler.analysis.compiled_collectives import compiled_collectives
from autopar.compiler.costs.compilers import CPU
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, to_spec
from autopar.compiler.spmd.emit import localize
from autopar.compiler.spmd.local_program import LocalBlock, local_block
from tests.compiler.equations import real
from tests.compiler.planned_steps import LINE, plan_step, traced

EVERYTHING = 1e9
ROWS = Layout(((0,), ()))
COLUMNS = Layout(((), (0,)))
ARGS = real(16, 24) / 4, real(24, 80) / 4, real(80, 16) / 4, real(64, 4, 16)


def step(first, second, third, x):
    """Three layers by gradient descent; rows of the batch go to devices."""

    def loss(first, second, third):
        return (jnp.tanh(jnp.tanh(x @ first) @ second) @ third).var()

    gradients = jax.grad(loss, (0, 1, 2))(first, second, third)
    return [w - g for w, g in zip((first, second, third), gradients, strict=True)]


def planned() -> tuple[jc.ClosedJaxpr, LocalBlock]:
    """The best plan for weights that are stored split: one by columns."""
    closed = traced(step, *ARGS)
    layouts = {0: (ROWS,), 1: (COLUMNS,), 2: (ROWS,), 3: (Layout(((0,), (), ())),)}
    found = plan_step(closed, LINE, num_state=3, constraints=Constraints(inputs=layouts))
    return closed, local_block(jc.open_jaxpr(closed)[0], found.plan, LINE)


def compiled(closed: jc.ClosedJaxpr, block: LocalBlock, joined_bytes: float):
    devices = Mesh(np.array(jax.devices()), LINE.axis_names, (AxisType.Auto,))
    shardings = [NamedSharding(devices, to_spec(value.layout, LINE)) for value in block.inputs]
    local = jaxpr_as_fun(localize(closed, block, LINE, compiler=replace(CPU, joined_bytes=joined_bytes)))
    made = jax.jit(local, in_shardings=shardings).lower(*ARGS).compile()
    return made, made(*[jax.device_put(x, sharding) for x, sharding in zip(ARGS, shardings, strict=True)])


def sizes(program) -> list[float]:
    found = compiled_collectives(program.as_text())
    return sorted(each.nbytes for each in found if each.kind == "reduce-scatter")


@pytest.mark.parametrize(
    ("joined_bytes", "joined"),
    [(0, [1, 1, 1]), (1, [1, 1, 1]), (EVERYTHING, [3]), (4 * (16 * 24 + 24 * 80), [1, 2])],
    ids=["not at all", "too large for it", "all", "as many as fit"],
)
def test_reductions_are_made_together_and_add_up_the_same(joined_bytes, joined):
    closed, block = planned()
    program, results = compiled(closed, block, joined_bytes)
    assert len(sizes(program)) == len(joined)
    assert sum(sizes(program)) == 4 * (16 * 24 + 24 * 80 + 80 * 16)
    for mine, theirs in zip(results, step(*ARGS), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("joined_bytes", "turned"), [(0, {(80, 16)}), (EVERYTHING, {(10, 16)})])
def test_sums_are_made_before_they_are_transposed(joined_bytes, turned):
    """The third gradient is made as [16, 80]: what goes through memory transposed is a part of it."""
    closed, block = planned()
    local = localize(closed, block, LINE, compiler=replace(CPU, joined_bytes=joined_bytes))
    backward = [eqn for eqn in jc.all_equations(local) if eqn.primitive.name == "transpose"]
    assert {eqn.outvars[0].aval.shape for eqn in backward if eqn.outvars[0].aval.ndim == 2} == turned


def test_gradients_of_all_layers_are_reduced_together():
    parallel = autopar.parallelize(
        lambda state, batch: ([w - g for w, g in zip(state, jax.grad(mlp)(state, batch), strict=True)], None),
        method=autopar.Zero(stage=2, mesh_shape=(8,)),
        cluster=autopar.Cluster(num_devices=8, kind="cpu"),
    )
    state = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    report = parallel.trace(state, jax.ShapeDtypeStruct((64, 512), jnp.float32)).plan().verify()
    found = {each.kind: each for each in report.collectives.kinds}
    assert report, str(report)
    assert found["reduce-scatter"].planned_count == 4
    assert found["reduce-scatter"].compiled_count == 1


def mlp(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()
