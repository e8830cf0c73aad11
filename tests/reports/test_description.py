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


def test_an_input_that_is_read_in_microbatches_and_whole_is_described_twice():
    def step(w, batch):
        def loss(w):
            return jnp.sum(jnp.where(batch["kept"], batch["x"] @ w, 0.0))

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads / batch["kept"].sum(), value

    given = draw(0, WIDTH, 1), {"x": draw(1, ROWS, WIDTH), "kept": jnp.arange(ROWS)[:, None] % 3 > 0}
    plan = autopar.parallelize(step, method=autopar.DataParallel(num_microbatches=2)).trace(*given).plan()
    described = plan.describe()
    kept = [
        (str(each.type), each.parts, each.bytes_per_device) for each in described.inputs if each.name[-4:] == "kept"
    ]
    # Half of the batch twice, of which a device has its part; and all of it, for the count.
    assert sorted(kept) == [(f"bool[{ROWS // 2},1] (data)", 2, ROWS // 8), (f"bool[{ROWS},1]", 1, ROWS)]
    arrays = [plan.lower().program.meshes[0].values[item.value] for item in plan.lower().program.inputs]
    assert sorted(str(each) for each in arrays if each.dtype == "bool") == [kept[0][0], kept[0][0], kept[1][0]]
    for text in (str(described), described.to_html()):
        inputs = text[text.index("inputs") :]
        assert inputs.count("batch.kept") == 2
        assert inputs.index(kept[0][0]) < inputs.index(kept[1][0])


def stacked_loss(layers, batch):
    return jnp.mean(jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), batch, layers)[0] ** 2)


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved", 2)])
def test_a_result_stacked_over_stages_is_described_where_it_lies(schedule, virtual_stages):
    method = autopar.PipelineParallel(
        num_stages=2, virtual_stages=virtual_stages, num_microbatches=2, schedule=schedule
    )
    given = draw(0, 8, WIDTH, WIDTH), draw(1, ROWS, WIDTH)
    plan = autopar.parallelize(sgd(stacked_loss), method=method).trace(*given).plan()
    described = plan.describe()
    layers, _ = plan.lower().compile()(*given)
    places = [each for each in described.results if each.replaces == "params"]
    # Stages of one mesh each: an array over both meshes. Virtual ones take turns, and the first mesh has all of it.
    assert [each.mesh for each in places] == ([0, 1] if virtual_stages == 1 else [0])
    assert [each.as_input for each in places] == [virtual_stages == 1] * len(places)
    there = {device for each in places for device in plan.plan.meshes[each.mesh].devices}
    shards = layers.addressable_shards
    assert {shard.device.id for shard in shards} == there
    assert {shard.data.nbytes for shard in shards} == {each.bytes_per_device for each in places}
    shown = [line for line in str(described).partition("results (")[2].splitlines() if line.startswith("  params")]
    assert len(shown) == virtual_stages - 1 and all(f"float32[8,{WIDTH},{WIDTH}]" in line for line in shown)


def test_figures_are_those_of_the_simulation():
    plan = planned(METHODS["two stages"])
    data, report = json.loads(plan.describe().to_json()), plan.simulate()
    assert data["simulated"]["step_time_s"] == report.step_time_s
    assert [mesh["peak_bytes"] for mesh in data["simulated"]["meshes"]] == [mesh.peak_bytes for mesh in report.meshes]
    assert f"{1e3 * report.step_time_s:.4g} ms per step" in str(plan)


def test_names_are_escaped_in_html():
    shown = planned(METHODS["data parallel"])._repr_html_()
    assert "&lt;up&gt;" in shown and "<up>" not in shown
    assert shown.count("<table>") == shown.count("</table>") == 5  # stages, memory, inputs, results, collectives


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
