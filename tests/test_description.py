"""A plan prints what runs: layouts of the arrays, values between meshes, figures; reprs are short, HTML is safe."""

import json

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.program import Send
from tests.small_steps import draw, sgd

METHODS = {
    "data parallel": autopar.DataParallel(),
    "zero": autopar.Zero(mesh_shape=(8,)),
    "searched": autopar.Auto(num_stages=1, mesh_shape=(2, 4), num_microbatches=2),
    "two stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    "virtual stages": autopar.PipelineParallel(num_stages=4, num_microbatches=2, schedule="interleaved"),
}
WIDTH, ROWS = 32, 32


def deep_loss(params, batch):
    for layer in params["layers"]:
        batch = batch + jnp.tanh(batch @ layer["<up>"]) @ layer["down"]
    return jnp.mean(batch**2)


def arguments():
    layers = [{"<up>": draw(i, WIDTH, 4 * WIDTH), "down": draw(9 + i, 4 * WIDTH, WIDTH)} for i in range(4)]
    return {"layers": layers}, draw(20, ROWS, WIDTH)


def planned(method):
    return autopar.parallelize(sgd(deep_loss), method=method).trace(*arguments()).plan()


@pytest.mark.parametrize("name", METHODS)
def test_described_layouts_are_those_of_the_arrays_that_run(name):
    plan = planned(METHODS[name])
    described = plan.describe()
    # The new state lies where the next call wants it.
    state, _ = plan.lower().compile()(*arguments())
    leaves = {f"params.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf for path, leaf in
              jax.tree.leaves_with_path(state)}  # fmt: skip
    places = {each.name: each for each in described.inputs if each.name in leaves}
    assert places.keys() == leaves.keys()
    for path, leaf in leaves.items():
        shards, place = leaf.addressable_shards, places[path]
        assert {shard.device.id for shard in shards} == set(plan.plan.meshes[place.mesh].devices)
        assert {shard.data.nbytes for shard in shards} == {place.bytes_per_device}
    assert str(described) == str(plan)
    assert all(name in described.to_json() for name in ("params.layers.0.down", "batch"))


def test_a_row_stands_for_inputs_that_differ_in_their_number_only():
    text = str(planned(METHODS["data parallel"]).describe())
    (row,) = [line for line in text.splitlines() if "params.layers.*.down" in line]
    assert row.split()[1:3] == ["4", "float32[128,32]"]


def test_values_between_meshes_are_those_that_the_program_sends():
    plan = planned(METHODS["two stages"])
    sent = [
        (mesh, each.to, value)
        for mesh, program in enumerate(plan.lower().program.meshes)
        for each in program.instructions
        if isinstance(each, Send)
        for value in each.values
    ]
    crossings = plan.describe().crossings
    assert sum(each.times for each in crossings) == len(sent) >= 8
    assert {(each.source, each.destination) for each in crossings} == {(a, b) for a, b, _ in sent}
    (forward,) = [each for each in crossings if each.source == 0]
    assert forward.nbytes == 4 * ROWS * WIDTH and forward.times == 4
    assert forward.sent.spec == jax.sharding.PartitionSpec("data")


def test_figures_are_those_of_the_simulation():
    plan = planned(METHODS["two stages"])
    data, report = json.loads(plan.describe().to_json()), plan.simulate()
    assert data["simulated"]["step_time_s"] == report.step_time_s
    assert [mesh["peak_bytes"] for mesh in data["simulated"]["meshes"]] == [mesh.peak_bytes for mesh in report.meshes]
    assert f"{1e3 * report.step_time_s:.4g} ms per step" in str(plan)


def test_names_are_escaped_in_html():
    shown = planned(METHODS["data parallel"])._repr_html_()
    assert "&lt;up&gt;" in shown and "<up>" not in shown
    assert shown.count("<table>") == shown.count("</table>") == 4  # stages, memory, inputs, collectives


def test_reprs_are_short():
    plan = planned(METHODS["two stages"])
    lowered = plan.lower()
    assert repr(plan) == (
        "<Planned train_step: <Plan PipelineParallel: 2 stages on 8 devices, 4 microbatches, schedule 1f1b>>"
    )
    for value in (plan.plan, lowered, lowered.compile(), autopar.parallelize(sgd(deep_loss)).trace(*arguments())):
        assert len(repr(value)) < 120 and "\n" not in repr(value)


def test_a_plan_for_another_machine_prints_without_figures():
    method = METHODS["two stages"]
    cluster = autopar.Cluster.parse("1x dgx-h100")
    foreign = autopar.parallelize(sgd(deep_loss), method=method, cluster=cluster).trace(*arguments()).plan().plan
    here = planned(foreign)
    with pytest.raises(autopar.InvalidArgument, match="modelled for"):
        here.describe()
    assert str(here) == str(foreign)
