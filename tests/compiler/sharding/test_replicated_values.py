"""Free values: what every device may compute for itself."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.replicated_values import below_split_size, free_carry, free_outputs
from tests.compiler.equations import real
from tests.compiler.planned_steps import traced

KEY = jax.random.key(0)


def counted(step, carry_of_data):
    """A loop that counts beside its array."""
    return lax.fori_loop(0, 3, lambda i, c: (c[0] + step, c[1] * 2), (step, carry_of_data))


@pytest.mark.parametrize(
    ("function", "args", "free_inputs", "expected"),
    [
        pytest.param(lambda: jnp.arange(4096), (), [], [True], id="positions"),
        pytest.param(lambda n: jnp.arange(4096) < n, (3,), [True], [True], id="a mask that a number decides"),
        pytest.param(lambda n, x: (n + 1, x + n), (3, real(64, 64)), [True, False], [True, False], id="not from data"),
        pytest.param(lambda x: x.sum(), (real(64, 64),), [False], [False], id="not a sum of data"),
        pytest.param(lambda k: jax.random.split(k), (KEY,), [True], [True], id="a few keys"),
        pytest.param(lambda k: jax.random.bits(k, (8,)), (KEY,), [True], [True], id="a few random bits"),
        pytest.param(lambda k: jax.random.bits(k, (4096,)), (KEY,), [True], [False], id="not many random bits"),
        pytest.param(lambda: jnp.ones((64, 64)) @ jnp.ones((64, 64)), (), [], [False], id="not a product of matrices"),
        pytest.param(counted, (1, real(64, 64)), [True, False], [True, False], id="a counter of a loop"),
        pytest.param(
            lambda n, x: lax.fori_loop(0, 3, lambda i, c: c + jnp.int32(x.sum()), n),
            (1, real(64, 64)),
            [True, False],
            [False],
            id="not what a loop makes of data",
        ),
        pytest.param(
            lambda n: lax.scan(lambda c, x: (c + 1, c * x), n, jnp.arange(5)), (1,), [True], [True, True], id="a scan"
        ),
        pytest.param(
            lambda n, x: lax.cond(n > 0, lambda: (n, x), lambda: (n + 1, x * 2)),
            (1, real(64, 64)),
            [True, False],
            [True, False],
            id="a branch that a number decides",
        ),
        pytest.param(
            lambda n, x: lax.cond(x.sum() > 0, lambda: n, lambda: n + 1),
            (1, real(64, 64)),
            [True, False],
            [False],
            id="not a branch that data decides",
        ),
        pytest.param(
            lambda n, x: lax.while_loop(lambda c: c < x.sum(), lambda c: c + 1, n),
            (1.0, real(64, 64)),
            [True, False],
            [False],
            id="not a loop that data ends",
        ),
        pytest.param(
            lambda n: jax.checkpoint(lambda m: jnp.sin(m) * 2)(n), (1.0,), [True], [True], id="a remat region"
        ),
    ],
)
def test_results_are_free_that_come_from_free_values_by_cheap_equations(function, args, free_inputs, expected):
    jaxpr, _ = jc.open_jaxpr(traced(function, *args))
    assert free_outputs(jaxpr, free_inputs) == expected


def test_a_carry_is_free_only_if_all_that_it_takes_up_is():
    def body(a, b, c, x):
        return b, c, x, a + 1

    jaxpr, _ = jc.open_jaxpr(jax.make_jaxpr(body)(1, 1, 1, 1))
    assert free_carry(jaxpr, [], [True, True, True], [True]) == [True, True, True]
    assert free_carry(jaxpr, [], [True, True, True], [False]) == [False, False, False]


def test_values_with_side_effects_are_never_free():
    def step(n):
        return io_callback(lambda m: m, n, n)

    jaxpr, _ = jc.open_jaxpr(traced(step, jnp.int32(1)))
    assert free_outputs(jaxpr, [True]) == [False]


@pytest.mark.parametrize(("shape", "small"), [((), True), ((64,), True), ((65,), False), ((8, 9), False)], ids=str)
def test_arrays_of_at_most_sixty_four_elements_are_small(shape, small):
    assert below_split_size(jax.ShapeDtypeStruct(shape, jnp.float32)) == small
