"""Products whose left operand is in columns: copied into rows for compilers that read rows, the same for others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from autopar.compiler.costs.compilers import CPU, GPU
from autopar.compiler.intra_op.operand_order import copies_of_operands
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.spmd.emit import localize
from autopar.compiler.spmd.local_program import local_block
from tests.compiler.equations import real
from tests.compiler.planned_steps import LINE, plan_step, traced

COLUMNS = (((0,), (0,)), ((), ()))


@pytest.mark.parametrize(
    ("compiler", "numbers", "shapes", "order"),
    [
        (CPU, COLUMNS, ((64, 16), (64, 24)), (1, 0)),
        (CPU, COLUMNS, ((64, 16), (64, 8, 3)), (1, 0)),
        (GPU, COLUMNS, ((64, 16), (64, 24)), None),
        (CPU, (((1,), (0,)), ((), ())), ((16, 64), (64, 24)), None),
        (CPU, (((1,), (1,)), ((0,), (0,))), ((2, 64, 16), (2, 64, 24)), None),
    ],
    ids=["matrices", "a matrix and more", "on GPUs", "in rows", "of each of a batch"],
)
def test_a_left_matrix_in_columns_is_copied_on_cpus(compiler, numbers, shapes, order):
    args = [real(*shape) for shape in shapes]
    closed = traced(lambda x, y: jnp.sin(lax.dot_general(x, y, numbers)), *args)
    product = next(eqn for eqn in jc.open_jaxpr(closed)[0].eqns if eqn.primitive.name == "dot_general")
    assert copies_of_operands(product, compiler)[0].order == order
    block = local_block(jc.open_jaxpr(closed)[0], plan_step(closed, LINE).plan, LINE)
    local = localize(closed, block, LINE, compiler=compiler)
    found = [eqn.primitive.name for eqn in jc.all_equations(local)]
    assert found.count("optimization_barrier") == (order is not None)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), LINE.axis_names)
    with jax.sharding.set_mesh(mesh):
        (result,) = jax.jit(jaxpr_as_fun(local))(*args)
    np.testing.assert_allclose(result, jnp.sin(lax.dot_general(*args, numbers)), rtol=1e-4, atol=1e-5)
