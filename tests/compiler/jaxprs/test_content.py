"""Values of one content have one digest in every process, other contents another one, and what has none has none."""

import enum
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autopar import Auto
from autopar.compiler.jaxprs.content import content_digest

SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def traced(function, *avals):
    return jax.make_jaxpr(function)(*(avals or (SHAPE,)))


def layer(x):
    with jax.named_scope("layer"):
        return jnp.tanh(x) * 2.0


def loop(x, times=3):
    return jax.lax.fori_loop(0, times, lambda _, y: y @ y, x)


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Unknown:
    number: int = 1


DIFFERENT = {
    "none": None,
    "false": False,
    "zero": 0,
    "zero as a float": 0.0,
    "text": "0",
    "bytes": b"0",
    "empty tuple": (),
    "empty list": [],
    "nested": ((), ()),
    "nested otherwise": ((), (), ()),
    "array": np.zeros(2),
    "array of another type": np.zeros(2, np.float32),
    "array of another shape": np.zeros((2, 1)),
    "number of an array": np.float64(0),
    "set": frozenset({"a", "b"}),
    "mapping": {"a": 1},
    "mapping of another": {"a": 2},
    "spec": PartitionSpec("data"),
    "another spec": PartitionSpec(None, "data"),
    "method": Auto(),
    "another method": Auto(num_stages=2),
    "class": np.float32,
    "function": jax.checkpoint_policies.dots_saveable,
    "function with another name": jax.checkpoint_policies.nothing_saveable,
    "function that closes over something": jax.checkpoint_policies.save_only_these_names("a"),
    "function that closes over another": jax.checkpoint_policies.save_only_these_names("b"),
    "partial": partial(jax.checkpoint_policies.dots_saveable, 1),
    "program": traced(layer),
    "program with other names": traced(lambda x: jnp.tanh(x) * 2.0),
    "program with another number": traced(lambda x: jnp.tanh(x) * 3.0),
    "program of another shape": traced(layer, jax.ShapeDtypeStruct((4, 2), jnp.float32)),
    "program with another constant": traced(lambda x: x + np.arange(4.0)),
    "program with one more constant": traced(lambda x: x + np.arange(1.0, 5.0)),
    "loop": traced(loop),
    "longer loop": traced(partial(loop, times=4)),
    "another place of an operand": traced(lambda x, y: x - y, SHAPE, SHAPE),
    "places turned round": traced(lambda x, y: y - x, SHAPE, SHAPE),
}


def test_what_differs_in_content_differs_in_digest():
    digests = {name: content_digest(value) for name, value in DIFFERENT.items()}
    assert None not in digests.values()
    assert len(set(digests.values())) == len(DIFFERENT)


def test_several_values_are_not_one_of_several():
    assert len({content_digest(1, 2), content_digest((1, 2)), content_digest(12), content_digest(1, (2,))}) == 4


def test_equal_programs_have_one_digest():
    assert content_digest(traced(layer)) == content_digest(traced(layer))


KNOWN_TO_THE_USER = {
    "lambda": lambda x: x,
    "object": object(),
    "dataclass": Unknown(),
    "enum": Colour.RED,
    "function": layer,
    "partial": partial(layer, 1),
}


@pytest.mark.parametrize("kind", KNOWN_TO_THE_USER)
def test_what_only_the_user_knows_has_none(kind):
    assert content_digest(1, KNOWN_TO_THE_USER[kind]) is None
    assert content_digest({"a": [KNOWN_TO_THE_USER[kind]]}) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "bool"])
def test_programs_of_every_type_have_one(dtype):
    converted = traced(lambda x: x.astype(dtype) * jnp.ones((), dtype))
    assert content_digest(converted) is not None
    assert content_digest(converted) != content_digest(traced(lambda x: x.astype("int8") * jnp.ones((), "int8")))


def test_a_program_with_a_function_of_the_users_has_none():
    called = traced(lambda x: jax.pure_callback(lambda y: y, SHAPE, x))
    assert content_digest(called) is None


def test_another_process_has_the_same_digest():
    program = (
        "from tests.compiler.jaxprs import test_content as t\n"
        "print(*(t.content_digest(v) for v in t.DIFFERENT.values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [content_digest(value) for value in DIFFERENT.values()], done.stderr
