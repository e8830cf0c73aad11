"""Which devices are neighbours: the order of a mesh's devices, as asked, printed, priced, compiled and run."""

import jax
import numpy as np
import pytest

import autopar
from autopar import InvalidArgument, Megatron
from tests.small_steps import adam, adam_state, draw, mlp_loss
from tests.test_hierarchical_all_reduce import hosts_of_four

WIDTH, ROWS = 64, 64
STEP = adam(mlp_loss)
REPLICAS_INSIDE = (0, 4, 1, 5, 2, 6, 3, 7)


def wide(rows: int, width: int):
    params = [{"w": draw(n, width, width), "b": draw(9 + n, width)} for n in range(2)]
    return adam_state(params), (draw(20, rows, width), draw(21, rows, width))


def arguments():
    return wide(ROWS, WIDTH)


def planned(method, cluster=None):
    parallel = autopar.parallelize(STEP, method=method, cluster=cluster or hosts_of_four(slower=20))
    return parallel.trace(*arguments()).plan()


def seconds(plan, axis: str) -> float:
    return sum(each.seconds for each in plan.planned_collectives if axis in each.axes)


ORDERS = {
    "model": (Megatron(tensor=2, placement="intra_node_model"), [tuple(range(8))]),
    "replica": (Megatron(tensor=2, placement="intra_node_replica"), [REPLICAS_INSIDE]),
    "list": (Megatron(tensor=2, placement=[[7, 6, 5, 4, 3, 2, 1, 0]]), [tuple(reversed(range(8)))]),
    "hosts by turns": (Megatron(tensor=4, placement=[[0, 4, 1, 5, 2, 6, 3, 7]]), [REPLICAS_INSIDE]),
    "stages": (
        Megatron(pipeline=2, tensor=2, num_microbatches=2, placement=[[0, 4, 1, 5], [2, 6, 3, 7]]),
        [(0, 4, 1, 5), (2, 6, 3, 7)],
    ),
    "stages, replica": (
        Megatron(pipeline=2, tensor=2, num_microbatches=2, placement="intra_node_replica"),
        [(0, 2, 1, 3), (4, 6, 5, 7)],
    ),
}


@pytest.mark.parametrize(("method", "devices"), ORDERS.values(), ids=ORDERS)
def test_a_step_on_devices_in_any_order_is_compiled_as_planned_and_equals_plain_jit(method, devices):
    found = planned(method)
    assert [mesh.devices for mesh in found.plan.meshes] == devices
    assert all(",".join(map(str, own)) in str(found.plan) for own in devices if own != tuple(range(8)))
    assert autopar.Plan.from_json(found.plan.to_json()) == found.plan
    report = found.verify(*arguments())
    assert report, str(report)
    wanted, got = jax.jit(STEP)(*arguments()), found.lower().compile()(*arguments())
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_lies_within_a_host_is_cheaper_and_what_lies_across_is_not():
    shapes = jax.eval_shape(lambda: wide(rows=65536, width=1024))
    model, replica = (
        autopar.parallelize(STEP, method=Megatron(tensor=2, placement=placement), cluster=hosts_of_four(slower=20))
        .trace(*shapes)
        .plan()
        for placement in ("intra_node_model", "intra_node_replica")
    )
    assert seconds(model.plan, "model") < seconds(replica.plan, "model")
    assert seconds(model.plan, "data") > seconds(replica.plan, "data")
    for found in (model, replica):
        in_collectives = sum(each.seconds for each in found.plan.planned_collectives)
        assert in_collectives <= found.simulate().step_time_s
    assert model.simulate().step_time_s < replica.simulate().step_time_s  # activations are more than gradients here


def test_a_list_in_the_order_of_a_word_is_the_same_plan():
    plans = [planned(Megatron(tensor=2, placement=p)).plan for p in ("intra_node_replica", [list(REPLICAS_INSIDE)])]
    assert plans[0] == plans[1]
    usual, asked = (planned(Megatron(tensor=2, placement=p)).plan for p in (None, "intra_node_model"))
    assert usual == asked


def test_the_plan_says_that_its_placement_was_asked_for():
    found = planned(Megatron(tensor=2, placement="intra_node_replica"))
    assert "the option placement='intra_node_replica' of Megatron" in found.explain("mesh_shape").asked


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": "intra_node"}, "placement is 'intra_node'"),
        (
            {"placement": [0, 1, 2]},
            r"placement is \(0, 1, 2\). Give one of 'intra_node_model', 'intra_node_replica', or",
        ),
        ({"placement": [["a"]]}, "for every stage a list of its devices"),
        (
            {"placement": [[0, 1, 2, 3]]},
            "placement has 4 devices in 1 lists, and Megatron has 1 stages of data=4 x tensor",
        ),
        ({"placement": [list(range(8))], "pipeline": 2}, "Give 2 lists of 4"),
        ({"placement": [[0, 1, 2, 3, 4, 5, 6, 6]]}, "which has not each of the devices 0 to 7 once"),
        ({"placement": "intra_node_model", "tensor": 8}, "puts tensor=8 devices into one host, and a host has 4"),
        ({"placement": "intra_node_replica", "tensor": 1}, "puts data=8 devices into one host, and a host has 4"),
    ],
)
def test_placements_that_no_devices_have_are_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        planned(Megatron(**{"tensor": 2} | fields))


def test_placements_are_for_hosts_that_are_alike():
    mixed = autopar.Cluster.parse("1x p3.16xlarge + 1x dgx-a100-80")
    with pytest.raises(InvalidArgument, match="orders the devices of hosts that are alike"):
        planned(Megatron(tensor=2, pipeline=2, placement="intra_node_replica"), mixed)
