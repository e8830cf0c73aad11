"""Tasks of several stages on a mesh that compute the same are planned as one, whose cost counts for each."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op import plan_tasks
from autopar.compiler.intra_op.plan_tasks import TaskGraph, task_graph
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.passes import cut_step
from autopar.compiler.planning.stages.layer_classes import LayerClass, layer_class
from autopar.compiler.planning.stages.layer_costs import stage_cost
from autopar.compiler.sharding.layout import Layout, LogicalMesh
from tests.compiler.stage_plans import QUICK

LAYERS, WIDTH, ROWS = 6, 64, 32
COSTS = MeshCosts(machine=QUICK, mesh=LogicalMesh(shape=(2, 2), axis_names=("data", "model")))


def train_step(params, batch):
    def loss_of(params):
        h = batch @ params["first"]
        for i in range(LAYERS):
            with jax.named_scope(f"h_{i}"):
                h = h + jnp.tanh(h @ params[f"h_{i}"]["up"]) @ params[f"h_{i}"]["down"]
        return jnp.mean(h**2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.fixture(scope="module")
def stage() -> LayerClass:
    """Return all of the second mesh, which holds the stages 1, 3 and 5 of six: the tasks of the first two are alike."""
    up, down = jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH))
    params = {f"h_{i}": {"up": up, "down": down} for i in range(LAYERS)} | {"first": jnp.ones((WIDTH, WIDTH))}
    method = autopar.PipelineParallel(num_stages=2, virtual_stages=3, num_microbatches=4, schedule="interleaved")
    step = autopar.parallelize(train_step, method=method, cluster=autopar.Cluster(num_devices=8, machine=QUICK))
    planned = step.trace(params, jnp.ones((ROWS, WIDTH))).plan()
    graph = cut_step(planned.trace, planned.plan)
    return layer_class(graph, tasks_of_stages(graph, planned.plan.stages_on(1)))


@pytest.fixture
def apart(stage) -> TaskGraph:
    """Return the graph of the stage, whose tasks are too small to be folded."""
    return task_graph(stage.tasks, COSTS, stage.constraints)


@pytest.fixture
def folded(monkeypatch, stage, apart) -> TaskGraph:
    monkeypatch.setattr(plan_tasks, "FOLD_FROM", 0)
    return task_graph(stage.tasks, COSTS, stage.constraints)


def test_tasks_that_are_alike_have_the_same_nodes(apart, folded):
    by_stage = dict[str, list[str]]()
    for task, block in zip(folded.tasks, folded.blocks, strict=True):
        by_stage.setdefault(f"{task.phase} {id(block)}", []).append(task.name)
    assert sorted(map(len, by_stage.values())) == [1, 1, 2, 2, 3]
    assert len({id(block) for block in apart.blocks}) == len(apart.blocks) == 9
    assert len(folded.table.costs) < 0.8 * len(apart.table.costs)
    plan = folded.best({})
    for names in by_stage.values():
        assert all(plan.tasks[name] is not None and plan.tasks[name] == plan.tasks[names[0]] for name in names)


def test_what_tasks_that_are_alike_cost_counts_for_each(stage, apart, folded):
    one, other = (graph.best({}) for graph in (folded, apart))
    seconds = [stage_cost(stage, plan, COSTS).step_s(4) for plan in (one, other)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)
    assert one.optimum.value == pytest.approx(other.optimum.value, rel=1e-3)


def test_memory_charges_count_for_each(stage, apart, folded):
    charged = dict.fromkeys(stage.state, 1e-9)
    one, other = (sum(float(each.max()) for each in graph.charges(charged).values()) for graph in (folded, apart))
    assert one == pytest.approx(other) and one > 0


def test_tasks_under_unlike_constraints_are_planned_apart(stage, folded):
    twins = [task for task in stage.tasks if folded.blocks[stage.tasks.index(task)] is folded.blocks[0]]
    assert len(twins) == 2
    name = twins[1].inputs[0]
    pinned = dataclasses.replace(stage.constraints, allowed={**stage.constraints.allowed, name: (Layout(((0,), ())),)})
    graph = task_graph(stage.tasks, COSTS, pinned)
    first, second = (graph.blocks[stage.tasks.index(task)] for task in twins)
    assert first is not second
    assert graph.best({}).layouts[name] == Layout(((0,), ()))
