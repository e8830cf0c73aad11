"""The trips that are read off the literals of a loop are those that the loop makes when it runs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.trip_counts import trip_count


def counted(start, goes_on, once):
    """The trips of a loop as its literals tell them, and as it makes them."""

    def loop(_):
        return lax.while_loop(lambda c: goes_on(c[0]), lambda c: (once(c[0]), c[1] + 1), (start, 0))

    (eqn,) = (e for e in jc.all_equations(jax.make_jaxpr(loop)(0)) if e.primitive.name == "while")
    return trip_count(eqn), int(loop(0)[1])


@pytest.mark.parametrize(
    ("start", "goes_on", "once"),
    [
        (2, lambda i: i < 9, lambda i: i + 1),
        (2, lambda i: i < 9, lambda i: i + 3),  # the last trip goes past the bound
        (0, lambda i: i <= 9, lambda i: i + 3),
        (0, lambda i: i <= 8, lambda i: i + 3),
        (9, lambda i: i > 2, lambda i: i - 2),
        (9, lambda i: i >= 1, lambda i: i - 2),
        (0, lambda i: i < 6, lambda i: 2 + i),
        (7, lambda i: i < 5, lambda i: i + 1),  # no trip at all
        (0.5, lambda i: i < 2.0, lambda i: i + 0.5),
    ],
)
def test_literals_tell_how_often_a_loop_runs(start, goes_on, once):
    told, made = counted(start, goes_on, once)
    assert told == made


@pytest.mark.parametrize(
    ("goes_on", "once"),
    [
        (lambda i: i < 9, lambda i: i * 2),  # not a literal more in each trip
        (lambda i: (i < 9) & (i != 5), lambda i: i + 1),  # not one comparison
        (lambda i: i != 9, lambda i: i + 1),
    ],
)
def test_a_loop_whose_literals_do_not_tell_counts_as_one_trip(goes_on, once):
    told, made = counted(1, goes_on, once)
    assert told == 1 < made


def test_a_bound_that_is_an_argument_is_not_known():
    closed = jax.make_jaxpr(lambda n: lax.while_loop(lambda i: i < n, lambda i: i + 1, jnp.int32(0)))(jnp.int32(5))
    (eqn,) = (e for e in jc.all_equations(closed) if e.primitive.name == "while")
    assert trip_count(eqn) == 1
