"""Layers for other numbers of microbatches: what is written down by those of two is what is found."""

import dataclasses

import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.planning.stages.stage_costs import KnownLayers
from autopar.compiler.planning.stages.stage_problem import StageProblem
from benchmarks.models import convnet
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.models.wide_resnet import ResNetSize, wide_resnet

GPT = alpa_gpt("gpt", GPTSize(width=256, layers=3, heads=4, length=64, vocabulary=1024, batch=16), jnp.float32)
RESNET = wide_resnet("resnet", ResNetSize(channels=8, depth=26, image=32, classes=16, batch=16))
CLUSTER = autopar.Cluster.parse("1x dgx-h100")


def problem_of(workload, batch_statistics="exact"):
    traced = autopar.parallelize(workload.step, cluster=CLUSTER, donate_argnums=(0,)).trace(
        workload.abstract_state, workload.abstract_batch
    )
    method = autopar.Auto(batch_statistics=batch_statistics)
    return StageProblem(trace=traced.trace, method=method, hardware=CLUSTER, cache_directory=None)


@pytest.mark.parametrize(
    ("workload", "batch_statistics", "way"),
    [
        pytest.param(GPT, "exact", (False, False), id="transformer"),
        pytest.param(GPT, "exact", (True, True), id="transformer, computed again, split"),
        pytest.param(convnet(), "exact", (False, False), id="convolutions"),
        pytest.param(convnet(), "exact", (True, True), id="convolutions, computed again, split"),
        pytest.param(RESNET, "per_microbatch", (False, False), id="means of statistics"),
    ],
)
def test_layers_by_those_of_two_numbers_are_those_that_are_found(workload, batch_statistics, way):
    remat, splits = way
    problem = problem_of(workload, batch_statistics)
    fresh = dataclasses.replace(problem, known={})
    known = KnownLayers.of(problem)
    (two, _), (four, _) = (known(count, remat, splits=splits) for count in (2, 4))
    by_others, _ = known(8, remat, splits=splits)
    found, _ = KnownLayers.of(fresh)(8, remat, splits=splits)
    assert (two.prepared, four.prepared) != (found.prepared, found.prepared)
    assert [each.key for each in by_others.classes] == [each.key for each in found.classes]
    assert by_others.crossing_bytes == pytest.approx(found.crossing_bytes)
    for field in ("cuts", "class_of", "num_microbatches", "loop_pieces", "least_devices"):
        assert getattr(by_others, field) == getattr(found, field), field
    mine, theirs = by_others.prepared, found.prepared
    assert mine is not theirs and str(mine.phases.step.jaxpr) == str(theirs.phases.step.jaxpr)
    for field in ("of", "rounds", "num_rounds"):
        assert getattr(mine.phases, field) == getattr(theirs.phases, field), field
    for field in ("inputs", "num_microbatches"):
        assert getattr(mine.phases.step, field) == getattr(theirs.phases.step, field), field


@pytest.mark.parametrize(("workload", "batch_statistics"), [(GPT, "exact"), (RESNET, "per_microbatch")])
def test_other_numbers_of_microbatches_are_not_traced(workload, batch_statistics):
    problem = problem_of(workload, batch_statistics)
    known = KnownLayers.of(problem)
    for count in (2, 4):
        known(count, remat=False, splits=False)
    before = problem.trace.rows_traced
    for count in (8, 16):
        layers, _ = known(count, remat=False, splits=False)
        assert layers.prepared.phases.step.num_microbatches == count
    assert problem.trace.rows_traced == before
