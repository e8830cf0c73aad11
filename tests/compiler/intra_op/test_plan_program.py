"""The plan of a step is what an expert would write, and of small programs the best of all."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.intra_op.plan_program import Constraints, plan_intra_op
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated
from autopar.compiler.solver.problem import assignment_cost
from autopar.hardware.collectives import wire_bytes
from tests.compiler.planned_steps import GRID, LINE, collectives, mesh_costs, plan_step, traced

MESHES = pytest.mark.parametrize("mesh", [LINE, GRID], ids=["8", "2x4"])


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def with_momentum(loss, num_weights):
    """A train step: weights and their momenta, then a batch, to weights and momenta."""

    def step(*args):
        weights, momenta, batch = args[:num_weights], args[num_weights : 2 * num_weights], args[2 * num_weights :]
        gradients = jax.grad(lambda weights: loss(weights, *batch))(weights)
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients)]
        return [*(w - 0.1 * m for w, m in zip(weights, momenta)), *momenta]

    return step


def planned_step(loss, weights, batch, mesh, **options):
    """The plan of a train step, and what it moves."""
    closed = traced(with_momentum(loss, len(weights)), *weights, *weights, *batch)
    found = plan_step(closed, mesh, num_state=2 * len(weights), **options)
    assert found.optimum.gap < 1e-9
    return found.plan, [each.collective for each in collectives(closed, found, mesh)]


def mlp(weights, x, y):
    first, second = weights
    return ((jnp.tanh(x @ first) @ second - y) ** 2).sum()


def experts(weights, x, dispatch):
    first, second = weights
    routed = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    hidden = jnp.tanh(jnp.einsum("ebcd,edf->ebcf", routed, first))
    return (jnp.einsum("bsec,ebcd->bsd", dispatch, jnp.einsum("ebcf,efd->ebcd", hidden, second)) ** 2).sum()


def classifier(weights, x, labels):
    logits = jnp.tanh(x) @ weights[0]
    own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - own).mean()


# --- known strategies ---------------------------------------------------------------------------------------


@MESHES
def test_large_weights_and_a_small_batch_are_split_by_columns_then_rows(mesh):
    every = tuple(range(len(mesh.shape)))
    weights = (f32(1024, 4096), f32(4096, 1024))
    plan, moved = planned_step(mlp, weights, (f32(8, 1024), f32(8, 1024)), mesh)
    assert plan.arguments[:4] == (Layout(((), every)), Layout((every, ()))) * 2
    assert all(each.nbytes <= 8 * 1024 * 4 for each in moved)


@MESHES
def test_small_weights_and_a_large_batch_split_the_batch_and_scatter_the_gradients(mesh):
    every, bytes_of_a_weight = tuple(range(len(mesh.shape))), 64 * 64 * 4
    plan, moved = planned_step(mlp, (f32(64, 64),) * 2, (f32(4096, 64), f32(4096, 64)), mesh)
    assert plan.arguments[4:] == (Layout((every, ())),) * 2
    assert {layout.dims for layout in plan.arguments[2:4]} <= {(every, ()), ((), every)}
    sent = Counter[str]()
    for each in moved:
        sent[each.kind] += wire_bytes(each.kind, mesh.size(each.axes), each.nbytes)
    # Every gradient is reduced, and every weight gathered, once: at once or one axis after the other.
    assert sent == dict.fromkeys(("reduce-scatter", "all-gather"), 2 * 7 / 8 * bytes_of_a_weight)


@MESHES
def test_experts_stay_where_they_are_and_tokens_travel(mesh):
    every = tuple(range(len(mesh.shape)))
    rows = Layout((every, (), ()))
    pinned = {4: (rows,), 5: (Layout((every, (), (), ())),)}
    weights, batch = (f32(8, 64, 512), f32(8, 512, 64)), (f32(16, 64, 64), f32(16, 64, 8, 8))
    plan, moved = planned_step(experts, weights, batch, mesh, constraints=Constraints(inputs=pinned))
    assert plan.arguments[:5] == (rows,) * 5
    # To the experts and back; the gradient of what came back goes there, and that of the input is not asked for.
    assert [each.kind for each in moved] == ["all-to-all"] * 3


@MESHES
def test_a_head_of_many_classes_is_split_and_no_logits_travel(mesh):
    every, (batch, classes) = tuple(range(len(mesh.shape))), (128, 100_000)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    plan, moved = planned_step(classifier, (f32(64, classes),), (f32(batch, 64), labels), mesh)
    assert plan.arguments[:2] == (Layout(((), every)),) * 2
    assert all(each.nbytes <= batch * 64 * 4 for each in moved)


def test_where_sending_is_slow_every_device_does_everything():
    chosen = mesh_costs(GRID, latency_s=10.0)
    _, moved = planned_step(mlp, (f32(64, 64),) * 2, (f32(128, 64), f32(128, 64)), GRID, chosen=chosen)
    assert moved == []


# --- what is asked for --------------------------------------------------------------------------------------


def test_state_leaves_in_the_layout_in_which_it_came():
    plan, _ = planned_step(mlp, (f32(64, 64),) * 2, (f32(128, 64), f32(128, 64)), GRID)
    assert plan.results == plan.arguments[:4]


def test_inputs_and_results_have_the_layouts_that_are_asked_for():
    rows, columns = Layout(((0,), ())), Layout(((), (1,)))
    closed = traced(lambda x, y: (x @ y, x + 1), f32(64, 64), f32(64, 64))
    constraints = Constraints(inputs={1: (rows, columns)}, results={0: (columns,), 1: (rows,)})
    plan = plan_step(closed, GRID, constraints=constraints).plan
    assert plan.arguments[1] in (rows, columns)
    assert plan.results == (columns, rows)


def test_only_allowed_strategies_are_chosen():
    closed = traced(lambda x, y: jnp.tanh(x @ y), f32(64, 64), f32(64, 64))

    def whole_products(eqn, every):
        return every[:1] if eqn.primitive.name == "dot_general" else every

    constraints = Constraints(restrict=whole_products, constraint_key=lambda eqn: "whole products")
    product, _ = plan_step(closed, GRID, constraints=constraints).plan.equations
    assert product is not None
    assert (*product.operands, *product.results) == (replicated(2),) * 3


def test_small_inputs_have_no_layout_to_choose():
    closed = traced(lambda x, scale: x * scale, f32(64, 64), f32(64))
    assert plan_step(closed, GRID).plan.arguments[1] is None


# --- the best of all ----------------------------------------------------------------------------------------

PAIR = LogicalMesh(shape=(2,), axis_names=("x",))


def random_program(seed):
    """Three to six equations on matrices of sixteen by sixteen."""
    rng = np.random.default_rng(seed)
    binary = [jnp.add, jnp.multiply, jnp.matmul, lambda a, b: a.T @ b]
    unary = [jnp.tanh, jnp.transpose, lambda a: a + a.sum(0), lambda a: a / a.max(1, keepdims=True)]
    picks = rng.integers(0, 2**16, (int(rng.integers(1, 4)), 4))

    def program(x, y):
        values = [x, y]
        for kind, which, left, right in picks:
            a, b = values[-1 - left % 2], values[right % len(values)]
            values.append(binary[which % 4](a, b) if kind % 2 else unary[which % 4](a))
        return values[-1]

    return traced(program, f32(16, 16), f32(16, 16))


def best_value(problem):
    """The least cost of any choice: all of them at once, in one array with a dimension for each node."""
    sizes = [cost.size for cost in problem.costs]
    total = np.zeros(sizes)
    for node, cost in enumerate(problem.costs):
        total += cost.reshape([-1 if n == node else 1 for n in range(len(sizes))])
    for (i, j), matrix in problem.edges.items():
        total += matrix.reshape([sizes[n] if n in (i, j) else 1 for n in range(len(sizes))])
    return total.min()


@pytest.mark.parametrize("state", [False, True], ids=["result apart", "result replaces an input"])
@pytest.mark.parametrize("seed", range(15))
def test_plan_of_a_small_program_is_the_best_of_all(seed, state):
    closed = random_program(seed)
    found = plan_step(closed, PAIR, num_state=int(state))
    problem = found.table.problem()
    if math.prod(cost.size for cost in problem.costs) > 3e6 or len(problem.costs) > 30:
        pytest.skip("too many choices to try all")
    assert found.optimum.value == pytest.approx(best_value(problem), rel=1e-9)
    assert found.optimum.value == pytest.approx(assignment_cost(problem, found.optimum.assignment), rel=1e-9)
    assert found.optimum.gap < 1e-9


def test_layers_alike_are_planned_as_one_where_inputs_have_names():
    def step(*weights_and_x):
        *weights, x = weights_and_x
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    closed = traced(step, *[f32(64, 64)] * 6, f32(256, 64))
    names = [*(f"params.h_{number}" for number in range(6)), "x"]
    apart = plan_step(closed, GRID)
    folded = plan_intra_op(closed, mesh_costs(GRID), state_outputs={}, input_names=names, fold_from=1)
    assert len(folded.table.costs) < len(apart.table.costs)
    assert folded.optimum.value >= apart.optimum.value * (1 - 1e-9)
    assert len(folded.plan.equations) == len(jc.open_jaxpr(closed)[0].eqns)
