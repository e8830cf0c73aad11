"""The part of a backward pass that nobody waits for takes about as long as the task of its own that it becomes."""

import math

import pytest

import autopar
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.planning.search.candidates import stage_candidates
from autopar.compiler.planning.stages.layer_costs import LayoutChoice
from autopar.compiler.planning.stages.stage_costs import KnownLayers
from autopar.compiler.planning.stages.stage_problem import StageProblem, submesh_mesh
from tests.compiler.planning.search.test_free_search import arguments, train_step


@pytest.fixture(scope="module")
def searched():
    cluster = autopar.Cluster.parse("1x dgx-h100").with_devices(4)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(4096, 1024))
    problem = StageProblem(trace=traced.trace, method=autopar.Auto(), hardware=cluster, cache_directory=None)
    known = KnownLayers.of(problem)
    stage_candidates(problem, known, 1, (2, 2), math.inf)
    return problem, known


def test_layers_are_not_solved_for_once_more_with_weight_gradients_apart(searched):
    _, known = searched
    (_, whole), (_, split) = (known(1, False, splits=splits) for splits in (False, True))
    assert whole.solved
    assert not split.solved & whole.solved


def test_a_weight_gradient_takes_about_what_its_own_task_does(searched):
    problem, known = searched
    (layers, whole), (apart, split) = (known(1, False, splits=splits) for splits in (False, True))
    assert layers.class_of == apart.class_of
    for submesh in whole.solved:
        mesh_costs = MeshCosts(machine=problem.machine_of(submesh), mesh=submesh_mesh(problem, submesh))
        for number in set(layers.class_of):
            mine, own = (each.cost(number, mesh_costs, LayoutChoice(0.0)) for each in (whole, split))
            assert mine.weight_s == pytest.approx(own.weight_s, rel=0.1)
            assert mine.forward_s + mine.backward_s <= (own.forward_s + own.backward_s) * 1.02


def test_stages_that_compute_again_have_no_weight_gradient_of_their_own(searched):
    problem, known = searched
    _, costs = known(1, True, splits=False)
    for submesh in known(1, False, splits=False)[1].solved:
        mesh_costs = MeshCosts(machine=problem.machine_of(submesh), mesh=submesh_mesh(problem, submesh))
        assert costs.cost(0, mesh_costs, LayoutChoice(0.0, None, True)).weight_s == 0.0
