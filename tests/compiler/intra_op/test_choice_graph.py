"""The table of choices: an edge costs the resharding between what two states mean."""

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.intra_op.choice_graph import LayoutNode, NodeTable
from autopar.compiler.resharding.costs import reshard_s
from autopar.compiler.sharding.layout import Layout, replicated
from tests.compiler.planned_steps import LINE, mesh_costs

WHOLE, ROWS, COLUMNS = replicated(2), Layout(((0,), ())), Layout(((), (0,)))
FORWARD = mesh_costs(LINE, latency_s=1e-3)
UPDATE = FORWARD.combined()
MATRIX = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def table():
    return NodeTable(mesh_costs=FORWARD)


def test_layouts_are_states_free_of_cost():
    choices = table()
    first = choices.add_layouts("input", (WHOLE, ROWS))
    second = LayoutNode(choices.add_node("equation", [1.0, 2.0, 3.0]), (WHOLE, ROWS, COLUMNS))
    assert (first.number, second.number) == (0, 1)
    assert [list(cost) for cost in choices.problem().costs] == [[0, 0], [1, 2, 3]]


def test_an_edge_costs_what_resharding_takes_as_often_as_it_is_read():
    choices = table()
    source, target = (choices.add_layouts(name, (WHOLE, ROWS, COLUMNS)) for name in ("source", "target"))
    choices.add_edge(source, target, MATRIX, 3.0, "forward")
    matrix = choices.problem().edges[0, 1]
    for i, before in enumerate(source.layouts):
        for j, after in enumerate(target.layouts):
            assert matrix[i, j] == 3 * reshard_s(before, after, (64, 64), 4, FORWARD)


def test_edges_go_from_the_lower_node_to_the_higher_and_add_up():
    choices = table()
    late, early = (choices.add_layouts(name, (WHOLE, ROWS)) for name in ("late", "early"))
    choices.add_edge(early, late, MATRIX, 1.0, "forward")
    choices.add_edge(late, early, MATRIX, 1.0, "forward")
    gathered = reshard_s(ROWS, WHOLE, (64, 64), 4, FORWARD)
    sliced = reshard_s(WHOLE, ROWS, (64, 64), 4, FORWARD)
    assert list(choices.edges) == [(0, 1)]
    np.testing.assert_allclose(choices.edges[0, 1], [[0, gathered + sliced], [gathered + sliced, 0]])


def test_reshardings_of_the_update_share_their_latency():
    choices = table()
    source, target = choices.add_layouts("source", (ROWS,)), choices.add_layouts("target", (WHOLE,))
    choices.add_edge(source, target, MATRIX, 1.0, "update")
    assert choices.edges[0, 1] == reshard_s(ROWS, WHOLE, (64, 64), 4, UPDATE)


def test_a_node_that_reads_itself_pays_in_each_state():
    choices = table()
    node = choices.add_node("carry", [1.0, 1.0])
    before, after = LayoutNode(node, (ROWS, ROWS)), LayoutNode(node, (ROWS, WHOLE))
    choices.add_edge(before, after, MATRIX, 2.0, "body")
    assert not choices.edges
    gathered = reshard_s(ROWS, WHOLE, (64, 64), 4, FORWARD)
    np.testing.assert_allclose(choices.costs[node], [1, 1 + 2 * gathered])


def test_states_that_mean_one_layout_cost_the_same():
    choices = table()
    source, target = choices.add_layouts("source", (ROWS, WHOLE, ROWS)), choices.add_layouts("target", (WHOLE, WHOLE))
    choices.add_edge(source, target, MATRIX, 1.0, "forward")
    matrix = choices.edges[0, 1]
    assert matrix.shape == (3, 2)
    assert (matrix[0] == matrix[2]).all()
    assert not matrix[1].any()
