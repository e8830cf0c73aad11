"""A value that cannot be sent to other processes is named, at any depth; one that can is the same program there."""

import threading

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.arguments import ArgumentRoles, Arguments
from autopar.errors import CannotSerialize
from autopar.step_serialization import program_of, serialize_step, trace_call

LOCK = threading.Lock()


def train_step(weight, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weight)
    return weight - 0.1 * gradient, loss


def serialized(fun, *args):
    arguments = Arguments(fun, ArgumentRoles())
    call = arguments.split(args, {})
    plan = autopar.parallelize(fun, method=autopar.DataParallel()).trace(*args).plan().plan
    assert plan.fingerprint == trace_call(arguments, call).fingerprint
    return serialize_step(arguments, call, plan), program_of(arguments, call, plan)


def test_the_program_made_from_what_was_sent_is_the_drivers():
    sent, here = serialized(train_step, jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert sent().fingerprint() == here.fingerprint()
    assert str(sent()) == str(here)


def test_a_jitted_function_is_sent_with_what_it_was_told_of_its_arguments():
    def step(weight, batch, times):
        return jax.tree.map(lambda x: times * x, train_step(weight, batch))

    jitted = jax.jit(step, static_argnums=2, donate_argnums=0)
    sent, here = serialized(jitted, jnp.ones((4, 4)), jnp.ones((8, 4)), 3)
    assert sent().fingerprint() == here.fingerprint()


def test_functions_with_derivatives_of_their_own_are_sent():
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))

    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))

    def step(weight, batch):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(square(cube(batch @ w))))(weight)
        return weight - 0.1 * gradient, loss

    sent, here = serialized(step, jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert sent().fingerprint() == here.fingerprint()


class Model:
    def __init__(self):
        self.name, self.lock = "model", threading.Lock()

    def step(self, weight, batch):
        assert self.lock is not None
        return train_step(weight, batch)


def with_variable():
    lock = threading.Lock()

    def step(weight, batch):
        assert lock is not None
        return train_step(weight, batch)

    return step


def with_default():
    def step(weight, batch, lock=LOCK):
        return train_step(weight, batch)

    return step


@pytest.mark.parametrize(
    ("fun", "named"),
    [
        (with_variable(), "the variable 'lock' in step"),
        (with_default(), "default"),
        (Model().step, "the attribute 'lock' in the object of the method in step"),
    ],
    ids=["variable", "default", "method"],
)
def test_what_cannot_be_sent_is_named(fun, named):
    with pytest.raises(CannotSerialize, match=named):
        serialized(fun, jnp.ones((4, 4)), jnp.ones((8, 4)))
