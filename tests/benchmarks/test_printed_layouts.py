"""Printed layouts are those of the arrays that run; one that is printed otherwise is noticed."""

from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks import printed_layouts
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("float64")
LIGHT = (
    "mlp",
    "tied_embedding",
    "several_arguments",
    "regularized",
    "scan_layers",
    "nested_jit",
    "vae",
    "control_flow",
)


# Every method with a model of its own kind; the benchmark has the product.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")
@pytest.mark.parametrize(
    ("model", "method"), [(LIGHT[n % len(LIGHT)], method) for n, method in enumerate(printed_layouts.METHODS)]
)
def test_arrays_lie_as_their_plan_prints(model, method):
    row = printed_layouts.measure(model, method)
    assert not row.wrong and not row.refused
    assert row.inputs > 4 and row.results
    assert row.crossings or "stages" not in method


def test_a_layout_that_is_printed_otherwise_is_noticed():
    step, *arguments = ZOO["mlp"].make()
    planned = autopar.parallelize(step, method=autopar.DataParallel()).trace(*arguments).plan()
    compared = dict.fromkeys(words for _, words in printed_layouts._compared(planned, ZOO["mlp"], arguments))
    assert list(compared) == [""]
    described = planned.describe()
    weight = next(each for each in described.inputs if each.type.shape == (16, 16))
    array = arguments[0][0][0]["w"]
    printed = replace(weight.type, spec=P("data"))
    assert "on devices" in printed_layouts._difference("w", described, 0, weight.type, array)
    placed = planned.lower().compile().loaded.place(jax.tree.leaves(arguments))
    number = [leaf.name for leaf in planned.trace.inputs].index(weight.name)
    assert printed_layouts._difference("w", described, 0, weight.type, placed[number]) == ""
    assert "printed as" in printed_layouts._difference("w", described, 0, printed, placed[number])


def test_every_method_is_run():
    assert {type(each).__name__ for each in printed_layouts.METHODS.values()} == {
        each.__name__ for each in printed_layouts.Method.__args__
    }
