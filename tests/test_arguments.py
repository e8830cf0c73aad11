"""Arguments are sorted alike however they are passed, and calls that differ in what matters have other keys."""

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.arguments import ArgumentRoles, Arguments, abstract
from autopar.errors import InvalidArgument


def step(state, batch, scale=1.0, *, train=True):
    return state, batch, scale, train


def arguments(fun: Any = step, **roles: Any) -> Arguments:
    return Arguments(fun, ArgumentRoles(**roles))


CALLS = {
    "by position": ((1.0, 2.0, 3.0), {}),
    "batch by name": ((1.0,), {"batch": 2.0, "scale": 3.0}),
    "all by name": ((), {"scale": 3.0, "batch": 2.0, "state": 1.0}),
    "with a default": ((1.0, 2.0), {}),
}


@pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=CALLS)
def test_flat_function_gives_what_the_call_gives(args, kwargs):
    sorter = arguments()
    call = sorter.split(args, kwargs)
    assert sorter.call_flat(call)(*call.leaves) == step(*args, **kwargs)


@pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=CALLS)
def test_leaves_are_named_after_the_parameters_however_they_are_passed(args, kwargs):
    sorter = arguments()
    named = dict(sorter.describe_leaves(sorter.split(args, kwargs)))
    assert named == {n: i for i, n in enumerate(("state", "batch", "scale")) if n in named}
    assert {"state", "batch"} <= set(named)


def test_names_are_key_paths_in_the_order_of_the_leaves():
    sorter = arguments()
    call = sorter.split(({"b": [1.0, 2.0], "a": 3.0}, (4.0, None)), {"extra": {"x": 5.0}})
    described = sorter.describe_leaves(call)
    assert described == [
        ("state.a", 0),
        ("state.b.0", 0),
        ("state.b.1", 0),
        ("batch.0", 1),
        ("extra.x", None),
    ]
    assert call.leaves == [3.0, 1.0, 2.0, 4.0, 5.0]


STATIC = {
    "by number, passed by position": ({"static_argnums": 2}, (1.0, 2.0, "big"), {}),
    "by number, passed by name": ({"static_argnums": 2}, (1.0, 2.0), {"scale": "big"}),
    "by negative number": ({"static_argnums": -1}, (1.0, 2.0, "big"), {}),
    "by name, passed by position": ({"static_argnames": ("scale",)}, (1.0, 2.0, "big"), {}),
    "by name, passed by name": ({"static_argnames": ("scale",)}, (1.0, 2.0), {"scale": "big"}),
}


@pytest.mark.parametrize(("roles", "args", "kwargs"), STATIC.values(), ids=STATIC)
def test_static_arguments_are_set_apart_however_they_are_named_and_passed(roles, args, kwargs):
    sorter = arguments(**{k: (v,) if isinstance(v, int) else v for k, v in roles.items()})
    call = sorter.split(args, kwargs)
    assert [static.value for _, static in call.static] == ["big"] and call.leaves == [1.0, 2.0]
    assert sorter.result(call, sorter.call_flat(call)(*call.leaves)) == (1.0, 2.0, "big", True)


def test_the_batch_is_left_to_be_found_by_default():
    assert arguments().batch is None
    assert arguments(batch_argnums=(0, -1)).batch == {0, 2}


def test_function_without_a_signature_takes_any_number_of_arguments():
    sorter = arguments(jnp.add, batch_argnums=(0, 5))
    call = sorter.split((1.0, 2.0), {})
    assert sorter.call_flat(call)(*call.leaves) == 3.0


def test_partial_function_is_named_by_its_type_and_counted_without_what_is_bound():
    sorter = arguments(functools.partial(step, 1.0), donate_argnums=(0,))
    assert sorter.name == "partial"
    assert sorter.describe_leaves(sorter.split((2.0,), {})) == [("batch", 0)]


class Mode(enum.IntEnum):
    TRAIN = 1
    TEST = 2


X = jnp.ones((4, 2))
SAME = {
    "other numbers": ((X, 2.0), (X + 1, 3.0)),
    "numpy and jax": ((X, 2.0), (np.ones((4, 2), np.float32), 2.0)),
    "numpy's 64 bits": ((X, 2.0), (np.ones((4, 2)), 2.0)),
    "numpy's scalars": ((X, np.int64(2)), (X, jnp.int32(2))),
    "keys": ((X, jax.random.key(0)), (X, jax.random.key(1))),
    "truth values": ((X, True), (X, jnp.array(False))),
    "abstract": ((X, 2.0), (jax.ShapeDtypeStruct(X.shape, X.dtype), 2.0)),
}
OTHER = {
    "shape": ((X, 2.0), (X[:2], 2.0)),
    "dtype": ((X, 2.0), (X.astype(jnp.int32), 2.0)),
    "structure": ((X, 2.0), ([X], 2.0)),
    "kind of number": ((X, 2.0), (X, 2)),
    "strong and weak type": ((X, 2.0), (X, jnp.float32(2.0))),
    "position and name": ((X, 2.0), (X,)),
    "static value": ((X, 2.0, 1), (X, 2.0, 2)),
    "type of a static value": ((X, 2.0, 1), (X, 2.0, True)),
    "type inside of a static value": ((X, 2.0, (1, 2)), (X, 2.0, (1.0, 2))),
    "static leaf": ((X, [2.0, "mean"]), (X, [2.0, "sum"])),
    "member of an enumeration": ((X, Mode.TRAIN), (X, Mode.TEST)),
}


@pytest.mark.parametrize(("one", "two"), SAME.values(), ids=SAME)
def test_calls_that_one_compiled_step_serves_have_equal_keys(one, two):
    sorter = arguments(static_argnums=(2,))
    assert sorter.split(one, {}).key() == sorter.split(two, {}).key()


@pytest.mark.parametrize(("one", "two"), OTHER.values(), ids=OTHER)
def test_calls_that_need_a_step_of_their_own_have_other_keys(one, two):
    sorter = arguments(static_argnums=(2,))
    rest = {"batch": 2.0} if len(two) == 1 else {}
    assert sorter.split(one, {}).key() != sorter.split(two, rest).key()


def test_key_of_the_next_call_has_arrays_where_the_state_had_numbers():
    sorter = arguments()
    first, next_call = sorter.split((0, 2.0), {}), sorter.split((jnp.int32(1), 2.0), {})
    assert first.key() != next_call.key()
    assert first.key_of_successor({0}) == next_call.key()


SETTINGS = {
    "64 bits": jax.enable_x64,
    "random numbers": functools.partial(jax.threefry_partitionable, not jax.config.jax_threefry_partitionable),
    "precision": functools.partial(jax.default_matmul_precision, "highest"),
    "promotion": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "implementation of keys": functools.partial(jax.default_prng_impl, "rbg"),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_jax_are_part_of_the_key(setting):
    sorter = arguments()
    before = sorter.split((X, X), {}).key()
    with setting():
        assert sorter.split((X, X), {}).key() != before
    assert sorter.split((X, X), {}).key() == before


def test_what_no_trace_can_take_is_static_and_stays_in_its_place():
    sorter = arguments()
    call = sorter.split(([jnp.tanh, X, "relu", None], {"b": 2.0, "a": np.dtype("int8")}), {"scale": Mode.TEST})
    assert [static.value for _, static in call.static_leaves] == [jnp.tanh, "relu", np.dtype("int8"), Mode.TEST]
    assert [name for name, _ in sorter.describe_leaves(call)] == ["state.1", "batch.b"]
    returned = sorter.call_flat(call)(X + 1, 3.0)
    state, batch, scale, train = sorter.result(call, returned)
    assert state[0] is jnp.tanh and state[2:] == ["relu", None] and bool((state[1] == X + 1).all())
    assert (batch, scale, train) == ({"b": 3.0, "a": np.dtype("int8")}, Mode.TEST, True)


def test_what_can_be_neither_traced_nor_hashed_is_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"state\.words\.0 is a set: no array or number"):
        arguments().split(({"words": [{"a"}]}, X), {})


@pytest.mark.parametrize(
    ("leaf", "shape", "dtype", "weak"),
    [
        (1, (), "int32", True),
        (True, (), "bool", False),
        (2.5, (), "float32", True),
        (np.float32(1), (), "float32", False),
        (np.arange(3), (3,), "int32", False),
        (jnp.ones(2, jnp.bfloat16), (2,), "bfloat16", False),
        (jax.random.key(0), (), "key<fry>", False),
        (jax.ShapeDtypeStruct((2, 3), jnp.int8), (2, 3), "int8", False),
    ],
    ids=repr,
)
def test_abstract_value_is_what_jax_will_see(leaf, shape, dtype, weak):
    aval = abstract(leaf, "x")
    assert (aval.shape, str(aval.dtype), bool(aval.weak_type)) == (shape, dtype, weak)


def test_what_is_no_array_is_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"state\.text is a str; arrays and numbers are required"):
        abstract("hello", "state.text")


def donating(state, *, batch):
    return state * batch, batch + 1.0


@pytest.mark.parametrize(
    ("fun", "option", "donated"),
    [
        (donating, {"donate_argnames": "state"}, [0]),
        (donating, {"donate_argnames": ("state", "batch")}, [0, 1]),
        (jax.jit(donating, donate_argnames="batch"), {}, [1]),
    ],
)
def test_arguments_are_donated_by_name(fun, option, donated):
    step = autopar.parallelize(fun, batch_argnums=(), devices=jax.devices()[:1], **option)
    arguments = {"state": jnp.ones(4), "batch": jnp.ones(4)}
    step(arguments["state"], batch=arguments["batch"])
    assert [i for i, array in enumerate(arguments.values()) if array.is_deleted()] == donated


def test_donated_names_are_those_of_arguments():
    with pytest.raises(InvalidArgument, match=r"donate_argnames names 'stat', but donating takes state, batch"):
        autopar.parallelize(donating, donate_argnames="stat")
