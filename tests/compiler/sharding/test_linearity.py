"""Linear equations: sums may pass through them, and only through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import COMPRESSED_SUM
from autopar.compiler.sharding.strategies import summands
from tests.compiler.equations import EQUATIONS, equation, real, whole

MATRIX = real(8, 16)
ROW = real(1, 16).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("primitive", "function", "args", "expected"),
    [
        ("add", jnp.add, (MATRIX, MATRIX), ((0, 1),)),
        ("add", lambda x: x + 1, (MATRIX,), ((0, 1),)),
        ("add", jnp.add, (MATRIX.astype(jnp.bfloat16), MATRIX.astype(jnp.bfloat16)), ((0, 1),)),
        ("sub", jnp.subtract, (MATRIX.astype(jnp.bfloat16), MATRIX.astype(jnp.bfloat16)), ()),
        ("mul", jnp.multiply, (MATRIX, MATRIX), ((0,), (1,))),
        ("div", jnp.divide, (MATRIX, MATRIX), ((0,),)),
        ("dot_general", jnp.matmul, (MATRIX, MATRIX.T), ((0,), (1,))),
        ("reduce_sum", lambda x: x.sum(), (MATRIX,), ((0,),)),
        ("reduce_sum", lambda x: jax.lax.reduce_sum(x, (0,)), (MATRIX.astype(jnp.bfloat16),), ()),
        ("reduce_sum", lambda x: jax.lax.reduce_sum(x, (0,)), (ROW,), ((0,),)),
        ("reduce_max", lambda x: x.max(), (MATRIX,), ()),
        ("tanh", jnp.tanh, (MATRIX,), ()),
        ("select_n", jax.lax.select_n, (MATRIX > 0, MATRIX, MATRIX), ((1, 2),)),
        ("concatenate", lambda x, y: jnp.concatenate([x, y]), (MATRIX, MATRIX), ((0, 1),)),
        ("add", jnp.add, (whole(8, 16), whole(8, 16)), ()),
        ("convert_element_type", lambda x: x.astype(jnp.bfloat16), (MATRIX,), ()),
        ("convert_element_type", lambda x: x.astype(jnp.float32), (MATRIX.astype(jnp.bfloat16),), ((0,),)),
        ("convert_element_type", lambda x: x.astype(jnp.float32), (whole(8, 16),), ()),
        ("pad", lambda x: jnp.pad(x, 1), (MATRIX,), ((0,),)),
        ("pad", lambda x: jnp.pad(x, 1, constant_values=1.0), (MATRIX,), ()),
    ],
)
def test_an_equation_is_linear_in(primitive, function, args, expected):
    eqn, _ = equation(primitive, function, args)
    assert summands(eqn) == expected


# The exception is the user's word: its summands are rounded one by one.
@pytest.mark.parametrize("name", [name for name, case in EQUATIONS.items() if case[0] != COMPRESSED_SUM])
def test_what_is_said_to_be_linear_adds_up(name):
    eqn, operands = equation(*EQUATIONS[name])
    random = np.random.default_rng(2)
    for together in summands(eqn):
        first = {o: jnp.asarray(random.normal(size=operands[o].shape), operands[o].dtype) for o in together}
        rest = {o: operands[o] - first[o] for o in together}
        parts = [jc.bind_equation(eqn, [part.get(o, x) for o, x in enumerate(operands)]) for part in (first, rest)]
        rounding = 1e-2 if any(x.dtype == jnp.bfloat16 for x in operands) else 1e-4
        for a, b, both in zip(*parts, jc.bind_equation(eqn, operands), strict=True):
            np.testing.assert_allclose(a + b, both, rtol=rounding, atol=rounding)
