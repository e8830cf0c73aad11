"""Which arrays compilers make beside those of a program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.jaxprs.strides import reads_transposed, turns_tiles, writes_transposed
from autopar.compiler.memory.liveness import Op
from autopar.compiler.memory.twins import (
    TransposingUpdate,
    made_elsewhere,
    rectifies,
    scattered_onto,
    transposing_updates,
    without_places,
)


@pytest.mark.parametrize(("kernel", "transposed"), [("HWIO", True), ("OHWI", False), ("OIHW", False)])
def test_kernels_with_space_first_are_read_and_their_gradients_written_in_another_order(kernel, transposed):
    sizes = {"H": 3, "W": 3, "I": 4, "O": 8}

    def convolve(kernels, images):
        return lax.conv_general_dilated(images, kernels, (1, 1), "SAME", dimension_numbers=("NHWC", kernel, "NHWC"))

    arguments = jnp.zeros([sizes[name] for name in kernel]), jnp.zeros((2, 6, 6, 4))
    (forward,) = jax.make_jaxpr(convolve)(*arguments).jaxpr.eqns
    assert (reads_transposed(forward), writes_transposed(forward)) == (transposed, False)
    gradient = jax.make_jaxpr(jax.grad(lambda *args: convolve(*args).sum()))(*arguments).jaxpr
    last = [eqn for eqn in gradient.eqns if eqn.primitive.name == "conv_general_dilated"][-1]
    assert (reads_transposed(last), writes_transposed(last)) == (False, transposed)


@pytest.mark.parametrize(
    ("side", "stride", "transposed"),
    [
        pytest.param(3, 1, True, id="the one that the convolution reads"),
        pytest.param(1, 1, False, id="channels alone lie as they are wanted"),
        pytest.param(1, 2, True, id="as one of strides is computed"),
    ],
)
def test_a_gradient_of_images_reads_the_copy_of_a_kernel(side: int, stride: int, transposed: bool):
    def convolve(images, kernels):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(images, kernels, (stride, stride), "SAME", dimension_numbers=dimensions)

    arguments = jnp.zeros((2, 6, 6, 4)), jnp.zeros((side, side, 4, 8))
    gradient = jax.make_jaxpr(jax.grad(lambda *args: convolve(*args).sum()))(*arguments).jaxpr
    found = [reads_transposed(eqn) for eqn in gradient.eqns if eqn.primitive.name == "conv_general_dilated"]
    assert found == [True, transposed]


def test_only_a_maximum_with_zero_rectifies():
    found = [jax.make_jaxpr(lambda x, least=least: jnp.maximum(x, least))(1.0).jaxpr.eqns[-1] for least in (0.0, 1.0)]
    assert [rectifies(eqn) for eqn in found] == [True, False]


@pytest.mark.parametrize(
    ("initial", "again", "found"),
    [
        pytest.param(0.0, False, [(1, 2, ("other",))], id="onto the array that it is added to"),
        pytest.param(1.0, False, [], id="only of zeros"),
        pytest.param(0.0, True, [], id="only if nothing else reads it"),
    ],
)
def test_what_is_scattered_onto_zeros_and_added_is_scattered_onto_the_other(initial: float, again: bool, found):
    def table(other, places, rows):
        return other + jnp.full((16, 4), initial, "float32").at[places].add(rows)

    jaxpr = jax.make_jaxpr(table)(jnp.zeros((16, 4)), jnp.zeros(8, int), jnp.zeros((8, 4))).jaxpr
    filled = next(eqn for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape == (16, 4))
    eqns = [filled, jaxpr.eqns[-2], jaxpr.eqns[-1]]
    assert [eqn.primitive.name for eqn in eqns] == ["broadcast_in_dim", "scatter-add", "add"]
    ops = [
        Op("constant", (), ("zeros",)),
        Op("apart", ("zeros", "places", "rows"), ("table",), over=True),
        Op("fused", ("other", "table"), ("sum",)),
    ]
    more = [Op("fused", ("table",), ("more",))] if again else []
    assert scattered_onto([*ops, *more], [*eqns, *(None for _ in more)]) == found


@pytest.mark.parametrize(
    ("kind", "transposed", "expected"),
    [
        ("fused", {"gradient"}, {"state": TransposingUpdate(reads=frozenset({3}), number=1)}),
        ("fused", set(), {}),
        ("apart", {"gradient"}, {}),
    ],
)
def test_state_is_copied_if_one_kernel_reads_it_and_a_transposed_gradient(kind, transposed, expected):
    ops = [
        Op("apart", ("x",), ("gradient",)),
        Op(kind, ("gradient",), ("scaled",)),
        Op("form", ("state",), ("form",)),
        Op("fused", ("scaled", "form"), ("new",)),
    ]
    assert transposing_updates(ops, {"form": "state"}, [("new", "state")], transposed) == expected


def test_copies_stand_in_the_places_of_what_is_updated_later():
    updated = {"first": 3, "its momentum": 3, "second": 5, "its own": 5, "last": 9, "large": 4}
    nbytes = dict.fromkeys(updated, 8.0) | {"large": 16.0}
    # The places of the last one, and of one of the two before it, take the copies of what is updated earlier.
    assert sorted(without_places(updated, nbytes)) == ["its own", "large", "last"]


@pytest.mark.parametrize(
    ("shape", "order", "turns"),
    [
        pytest.param((1024, 512), (1, 0), True, id="rows become columns"),
        pytest.param((2, 1024, 512), (1, 0, 2), False, id="what is innermost stays so"),
        pytest.param((16, 64, 1024), (2, 0, 1), False, id="64 fill no tile: they lie as before"),
    ],
)
def test_a_transposition_turns_tiles_that_it_fills(shape: tuple[int, ...], order: tuple[int, ...], turns: bool):
    (eqn,) = jax.make_jaxpr(lambda x: x.transpose(order))(jnp.zeros(shape)).jaxpr.eqns
    assert turns_tiles(eqn, eqn.outvars[0].aval.shape) == turns


@pytest.mark.parametrize(
    ("collective", "turned", "elsewhere"),
    [
        pytest.param("all-reduce", {"sum"}, True, id="a sum that is transposed"),
        pytest.param("", {"sum"}, False, id="a product is written transposed"),
        pytest.param("all-reduce", set(), False, id="a sum in the order of the state"),
    ],
)
def test_what_is_updated_in_another_order_is_copied_to_its_place(collective: str, turned: set[str], elsewhere: bool):
    ops = [
        Op("apart", ("gradient",), ("sum",), collective=collective),
        Op("view", ("sum",), ("gradient of the state",)),
        Op("fused", ("gradient of the state", "state"), ("new",)),
    ]
    found = made_elsewhere(ops, {"gradient of the state": "sum"}, [("new", "state")], turned)
    assert found == ([("new", 2)] if elsewhere else [])


def test_what_is_gathered_is_copied_to_its_place_the_last_first():
    ops = [Op("apart", (f"part of {name}",), (name,), collective="all-gather") for name in ("first", "second")]
    found = made_elsewhere(ops, {}, [("first", "old"), ("second", "other old")], ())
    assert found == [("second", 1), ("first", 0)]
