"""Which arrays a GPU's compiler makes beside those of a program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.jaxprs.strides import reads_transposed, writes_transposed
from autopar.compiler.memory.liveness import Op
from autopar.compiler.memory.twins import (
    TransposingUpdate,
    rectifies,
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
