"""An equation that an installed package makes is named by the line of the user's that called the package."""

import importlib.util
import inspect

import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.jaxprs import compat as jc

PACKAGE = """
import jax
import jax.numpy as jnp

def plain(x):
    return jnp.sinh(x)

jitted = jax.jit(plain)

def looped(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: plain(x), x)

def until_all_end(x):
    return jax.vmap(lambda row: jax.lax.while_loop(lambda row: row.sum() < 9, plain, row))(x)
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "site-packages" / "installed"
    folder.mkdir(parents=True)
    (folder / "functions.py").write_text(PACKAGE)
    spec = importlib.util.spec_from_file_location("functions", folder / "functions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(step, primitive):
    trace = autopar.parallelize(step, method=autopar.DataParallel()).trace(jnp.ones((8, 4))).trace
    return next(jc.describe(eqn) for eqn in jc.all_equations(trace.jaxpr) if eqn.primitive.name == primitive)


@pytest.mark.parametrize("name", ["plain", "jitted", "looped", "until_all_end"])
def test_a_line_of_a_package_stands_behind_that_of_the_user(package, name):
    def step(x):
        return getattr(package, name)(x)  # the user's line

    line = inspect.getsourcelines(step)[1] + 1
    text = described(step, "sinh")
    assert f"test_lines_of_users.py:{line}:" in text and "(test_a_line" in text
    if name == "plain":
        assert text.endswith(", by installed/functions.py:6:11 (plain)")


def test_a_line_of_the_user_stands_alone():
    assert ", by " not in described(lambda x: jnp.sinh(x), "sinh")


def test_a_step_of_a_package_is_named_by_its_line(package):
    assert "installed/functions.py:6:11 (plain)" in described(package.plain, "sinh")
