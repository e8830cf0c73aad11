"""A copied program has values of its own and computes the same, but for the equations that others stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.copying import Copier, Replaced, _may_fold, copy_program

TABLE = np.arange(3.0, dtype=np.float32)


def two_scopes(x, y):
    with jax.named_scope("first"):
        z = jnp.sin(x) * y
    with jax.named_scope("second"):
        return jnp.exp(z) + TABLE, z + TABLE


def keep(eqn, place):
    return None


def primitives(closed):
    return [eqn.primitive.name for eqn in jc.open_jaxpr(closed)[0].eqns]


def scopes(closed):
    return [str(eqn.source_info.name_stack) for eqn in jc.open_jaxpr(closed)[0].eqns]


def arguments():
    return jnp.linspace(0.0, 1.0, 3), jnp.linspace(1.0, 2.0, 3)


def assert_computes(closed, function, *args):
    found = jc.jaxpr_as_fun(closed)(*args)
    for mine, theirs in zip(found, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.fixture
def traced():
    return jax.make_jaxpr(two_scopes)(*arguments())


def test_a_copy_has_the_same_equations_and_scopes_on_values_of_its_own(traced):
    copied = copy_program(traced, keep, jc.NOWHERE)
    before, after = jc.open_jaxpr(traced)[0], jc.open_jaxpr(copied)[0]
    assert (primitives(copied), scopes(copied)) == (primitives(traced), scopes(traced))
    assert str(before) == str(after)
    made = [{v for eqn in jaxpr.eqns for v in eqn.outvars} | {*jaxpr.invars} for jaxpr in (before, after)]
    assert not made[0] & made[1]
    assert_computes(copied, two_scopes, *arguments())


def test_an_array_is_one_constant_however_often_it_is_read(traced):
    copied, consts = jc.open_jaxpr(copy_program(traced, keep, jc.NOWHERE))
    assert len(consts) == len(copied.constvars) == 1
    np.testing.assert_array_equal(consts[0], TABLE)


def test_a_program_stands_for_an_equation_in_its_scope(traced):
    other = jax.make_jaxpr(lambda z: jnp.cos(z) * 2.0)(arguments()[0])

    def replacement(eqn, place):
        return Replaced(other, place.inside(eqn), again=False) if eqn.primitive.name == "exp" else None

    copied = copy_program(traced, replacement, jc.NOWHERE)
    assert primitives(copied) == ["sin", "mul", "cos", "mul", "add", "add"]
    assert scopes(copied) == ["first"] * 2 + ["second"] * 4
    assert_computes(copied, lambda x, y: (jnp.cos(jnp.sin(x) * y) * 2.0 + TABLE, jnp.sin(x) * y + TABLE), *arguments())


@pytest.mark.parametrize(("again", "expected"), [(False, ["sin", "neg"]), (True, ["tanh", "neg"])])
def test_equations_of_what_stands_for_one_are_replaced_only_if_it_says_so(again, expected):
    x = arguments()[0]
    programs = {
        "exp": jax.make_jaxpr(lambda x: -jnp.sin(x))(x),
        "sin": jax.make_jaxpr(jnp.tanh)(x),
    }

    def replacement(eqn, place):
        program = programs.get(eqn.primitive.name)
        return program and Replaced(program, place, again)

    copied = copy_program(jax.make_jaxpr(jnp.exp)(x), replacement, jc.NOWHERE)
    assert primitives(copied) == expected
    assert_computes(copied, lambda x: (-(jnp.tanh if again else jnp.sin)(x),), x)


def literal(value):
    """A literal in the place of a variable."""
    return jc.Literal(value, jax.typeof(jnp.asarray(value)))


@pytest.mark.parametrize(
    ("function", "is_literal", "expected"),
    [
        (lambda x: x.astype(jnp.float16), True, True),
        (lambda x: x.astype(jnp.float16), False, False),  # nothing that JAX knows
        (jnp.sin, True, False),  # JAX computes no sine while it traces
    ],
)
def test_only_what_jax_computes_of_literals_while_it_traces_may_be_folded(function, is_literal, expected):
    (eqn,) = jax.make_jaxpr(function)(jnp.float32(2)).jaxpr.eqns
    given = [literal(np.float32(2))] if is_literal else [jc.value_of_type(v.aval) for v in eqn.invars]
    assert _may_fold(eqn, given) is expected


def test_a_literal_of_the_program_itself_is_left_as_jax_traced_it():
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(jnp.float16))(jnp.float32(2)).jaxpr.eqns
    eqn = eqn.replace(invars=[literal(np.float32(2))])
    assert not _may_fold(eqn, eqn.invars)


def test_a_copy_on_a_literal_has_what_jax_computes_of_it_in_place_of_the_equation():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x.astype(jnp.float16)))(jnp.float32(2))
    copier = Copier()
    copier.run(*jc.open_jaxpr(closed), [literal(np.float32(2))])
    assert [eqn.primitive.name for eqn in copier.eqns] == ["sin"]
    (operand,) = copier.eqns[0].invars
    assert operand.val == 2 and operand.aval.dtype == jnp.float16
