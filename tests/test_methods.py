"""Methods that a user may ask for: the usual values, what is refused, and the examples of the docstrings."""

import doctest
from types import SimpleNamespace

import pytest
from jax.sharding import PartitionSpec as P

from autopar import methods
from autopar.errors import InvalidArgument
from autopar.hardware import cluster
from autopar.hardware.cluster import Cluster
from autopar.methods import Auto, DataParallel, PipelineParallel, ShardParallel


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((8,), ("data",)), ((2, 4), ("data", "model")), ((2, 2, 2), ("data", "model", "expert"))],
)
def test_mesh_axes_have_the_usual_names(shape, axes):
    assert ShardParallel(mesh_shape=shape).mesh_axes == axes
    assert PipelineParallel(mesh_shape=shape).mesh_axes == axes


def test_given_axis_names_replace_the_usual_ones():
    assert ShardParallel(mesh_shape=(4, 2), axis_names=("x", "y")).mesh_axes == ("x", "y")
    assert PipelineParallel(axis_names=("batch",), specs={"": P("batch")}).mesh_axes == ("batch",)


@pytest.mark.parametrize(
    ("method", "layers", "stages", "per_mesh"),
    [
        (PipelineParallel(), 2, 2, 1),
        (PipelineParallel(num_stages=4, layers=8), 8, 4, 1),
        (PipelineParallel(num_stages=4, schedule="interleaved"), 8, 8, 2),
        (PipelineParallel(num_stages=2, schedule="interleaved", virtual_stages=3), 6, 6, 3),
        (PipelineParallel(num_stages=2, schedule="interleaved", virtual_stages=1), 2, 2, 1),
    ],
)
def test_pipeline_counts_layers_and_stages(method, layers, stages, per_mesh):
    assert (method.num_layers, method.num_virtual_stages, method.stages_per_mesh) == (
        layers,
        stages,
        per_mesh,
    )


@pytest.mark.parametrize("method", [DataParallel, lambda **kw: ShardParallel(mesh_shape=(1,), **kw), PipelineParallel])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0, it must be an integer. Give 1 or more"),
        ({"num_microbatches": 2.0}, "num_microbatches is 2.0"),
        ({"random": "off"}, "random is 'off'. Choose one of 'full_batch', 'per_microbatch'"),
        ({"batch_statistics": "off"}, "batch_statistics is 'off'. Choose one of 'exact'"),
    ],
)
def test_count_or_word_that_no_method_has_is_refused(method, fields, message):
    with pytest.raises(InvalidArgument, match=message):
        method(**fields)


@pytest.mark.parametrize("method", [ShardParallel, PipelineParallel])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh_shape": (0, 2)}, r"mesh axis 0 in \(0, 2\) is 0"),
        ({"mesh_shape": (1, 1, 1, 1)}, "has 4 axes, there are usual names for up to 3"),
        ({"mesh_shape": (2,), "axis_names": ("a", "b")}, "Give 1 different names"),
        ({"mesh_shape": (2,), "specs": {"w": P("model")}}, "match 'w' is .*'model'.*mesh axes are"),
        ({"mesh_shape": (2,), "specs": {"w": "data"}}, "is 'data'. Give a jax.sharding.PartitionSpec"),
        ({"mesh_shape": (2,), "specs": {"params['w": P()}}, "no regular expression.*re.escape"),
    ],
)
def test_mesh_or_spec_that_does_not_fit_is_refused(method, fields, message):
    with pytest.raises(InvalidArgument, match=message):
        method(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_stages": 0}, "num_stages is 0"),
        ({"schedule": "chimera"}, "schedule is 'chimera'"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": 3, "num_stages": 4}, "3 layers for 4 stages.*layers=4 or more"),
        ({"virtual_stages": 2}, 'virtual_stages is 2 with schedule="1f1b"'),
        ({"virtual_stages": 0, "schedule": "interleaved"}, "virtual_stages is 0"),
        ({"specs": {"w": P("model")}}, "mesh axes are"),
    ],
)
def test_pipeline_that_cannot_be_built_is_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        PipelineParallel(**fields)


def test_a_search_of_fewer_layers_than_stages_is_refused():
    with pytest.raises(InvalidArgument, match=r"3 layers for 4 stages.*layers=4 or more"):
        Auto(num_stages=4, layers=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kinds": ()}, r"kinds is \(\).*one or more of 'data', 'zero'"),
        ({"kinds": ("data", "model")}, "kinds is 'model'. Choose one of 'data', 'zero', 'tensor'"),
        ({"kinds": {"data": 1}}, "kinds is {'data': 1}. Give one or more of"),
        ({"kinds": ("data", "zero"), "num_stages": 2}, r"num_stages is 2, and kinds \('data', 'zero'\) has no"),
    ],
)
def test_kinds_that_there_are_not_or_that_stages_contradict_are_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Auto(**fields)


def test_kinds_in_any_order_are_one_method():
    assert Auto(kinds=["zero", "data", "zero"]) == Auto(kinds=("data", "zero"), num_stages=None)
    assert Auto(kinds=("data", "pipeline"), num_stages=2).allows_stages
    assert not Auto(kinds="data", num_stages=1).allows_stages


def test_methods_are_values_that_compare_and_hash():
    one, other = (ShardParallel(mesh_shape=(2,), specs={"w": P("data")}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != ShardParallel(mesh_shape=(2,))


def test_method_does_not_change_with_the_dictionary_it_was_made_from():
    specs = {"w": P("data")}
    method = ShardParallel(mesh_shape=(2,), specs=specs)
    specs.clear()
    assert method.specs == {"w": P("data")}


@pytest.mark.parametrize("module", [methods, cluster])
def test_examples_of_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_cluster_counts_the_devices_of_one_kind():
    devices = [SimpleNamespace(device_kind="NVIDIA H200")] * 4
    assert Cluster.from_devices(devices) == Cluster(num_devices=4, kind="NVIDIA H200")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [([], "0 devices, it needs at least 1"), (["V100", "H100", "V100"], "by turns. Put those of each kind together")],
)
def test_cluster_without_devices_or_of_kinds_by_turns_is_refused(kinds, message):
    with pytest.raises(InvalidArgument, match=message):
        Cluster.from_devices([SimpleNamespace(device_kind=kind) for kind in kinds])
