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


def planned_step(name, method):
    step, *arguments = ZOO[name].make()
    return autopar.parallelize(step, method=method).trace(*arguments).plan(), arguments


def test_a_layout_that_is_printed_otherwise_is_noticed():
    planned, arguments = planned_step("mlp", autopar.DataParallel())
    compared = dict.fromkeys(words for _, words in printed_layouts._compared(planned, ZOO["mlp"], arguments))
    assert list(compared) == [""]
    described = planned.describe()
    weight = next(each for each in described.inputs if each.type.shape == (16, 16))
    array = arguments[0][0][0]["w"]
    assert "on devices" in printed_layouts._difference("w", described, 0, weight.type, array)
    placed = planned.lower().compile().loaded.place(jax.tree.leaves(arguments))
    number = [leaf.name for leaf in planned.trace.inputs].index(weight.name)
    assert printed_layouts._difference("w", described, 0, weight.type, placed[number]) == ""
    for other in ({"spec": P("data")}, {"memory": "host"}, {"dtype": "float32"}):
        printed = replace(weight.type, **other)
        assert "printed as" in printed_layouts._difference("w", described, 0, printed, placed[number])


def test_a_copy_that_is_not_printed_or_not_there_is_noticed(monkeypatch):
    planned, arguments = planned_step("sum_loss", autopar.DataParallel(num_microbatches=2))
    described = planned.describe()
    mask = [each for each in described.inputs if each.name == "batch.1"]
    assert len(mask) == 2
    for other in (
        replace(described, inputs=tuple(each for each in described.inputs if each is not mask[0])),
        replace(described, inputs=(*described.inputs, replace(mask[1], parts=3))),
    ):
        monkeypatch.setattr(autopar.Planned, "describe", lambda *_, other=other: other)
        wrong = {words for _, words in printed_layouts._compared(planned, ZOO["sum_loss"], arguments) if words}
        assert wrong and all("batch.1" in words for words in wrong)


def test_a_result_that_lies_on_other_meshes_is_noticed(monkeypatch):
    planned, arguments = planned_step("scan_layers", autopar.PipelineParallel(num_stages=2, num_microbatches=2))
    described = planned.describe()
    first_only = tuple(each for each in described.results if not (each.replaces == "state.0.w" and each.mesh == 1))
    assert len(first_only) == len(described.results) - 1
    monkeypatch.setattr(autopar.Planned, "describe", lambda *_: replace(described, results=first_only))
    compared = printed_layouts._compared(planned, ZOO["scan_layers"], arguments)
    (wrong,) = {words for _, words in compared if words}
    assert wrong.startswith("result 0.0.w: printed as float64[4,16,16] on mesh 0")
