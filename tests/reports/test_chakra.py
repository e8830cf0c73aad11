"""Chakra traces of a step say what the simulation says: work, collectives, messages, and what waits for what."""

import json
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.__main__ import main
from autopar.ir.program import Copy, Recv, Run, Send
from autopar.reports.chakra import read_chakra
from tests.reports.test_description import arguments, deep_loss
from tests.small_steps import SEPARATE, adam, adam_state, draw, mlp_loss, sgd

KINDS = {2: "load", 3: "store", 4: "compute", 5: "send", 6: "recv", 7: "collective"}
COLLECTIVES = {0: "all-reduce", 2: "all-gather", 6: "all-to-all", 7: "reduce-scatter"}
METHODS = {
    "zero": autopar.Zero(mesh_shape=(8,)),
    "specs": autopar.ShardParallel(mesh_shape=(2, 4), specs={"down": P("data", "model"), "up": P("model", "data")}),
    "microbatches": autopar.Zero(mesh_shape=(2, 4), num_microbatches=4),
    "two stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    "tensor stages": autopar.Megatron(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1),
    "virtual stages": autopar.PipelineParallel(num_stages=4, num_microbatches=2, schedule="interleaved"),
}


def planned(method):
    return autopar.parallelize(sgd(deep_loss), method=method).trace(*arguments()).plan()


def traces_of(plan, folder):
    return {int(path.name.split(".")[1]): read_chakra(path) for path in plan.chakra(folder).glob("*.et")}


def attributes(node):
    return {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}


@pytest.fixture(scope="module", params=METHODS)
def exported(request, tmp_path_factory):
    plan, folder = planned(METHODS[request.param]), tmp_path_factory.mktemp("chakra")
    return plan, folder, traces_of(plan, folder)


def test_the_work_of_each_device_is_that_of_the_simulation(exported):
    plan, _, traces = exported
    report = plan.simulate()
    assert len(traces) == report.num_devices == 8
    for mesh in report.meshes:
        for device in mesh.devices:
            found = Counter()
            for node in traces[device]:
                found[KINDS[node.type]] += attributes(node)["duration_s"]
                assert node.duration_micros == pytest.approx(1e6 * attributes(node)["duration_s"], abs=1)
            assert found["compute"] == pytest.approx(mesh.compute_s)
            assert found["collective"] == pytest.approx(mesh.collective_s)


@pytest.mark.parametrize(("name", "repeated"), [("zero", 1.0), ("specs", 1.6), ("two stages", 2.7)])
def test_operations_are_those_that_xla_counts_on_a_device_also_of_work_that_devices_repeat(name, repeated, tmp_path):
    plan = planned(METHODS[name])
    traces, lowered, shares = traces_of(plan, tmp_path), plan.lower(), []
    counted = {each.name: each.cost.get("flops", 0.0) for each in lowered.inspect()}
    for mesh in lowered.program.meshes:
        runs = [each.executable for each in mesh.instructions if isinstance(each, Run)]
        whole = [lowered.program.executables[name] for name in runs]
        for device in mesh.devices:
            works = [attributes(node) for node in traces[device] if KINDS[node.type] == "compute"]
            num_ops, nbytes = (sum(each[key] for each in works) for key in ("num_ops", "tensor_size"))
            assert num_ops == pytest.approx(sum(counted[name] for name in runs), rel=0.02)
            assert sum(each.bytes_accessed for each in whole) / len(mesh.devices) < nbytes
            assert nbytes < sum(each.bytes_accessed for each in whole)
            shares.append(num_ops * len(mesh.devices) / sum(each.flops for each in whole))
    assert max(shares) == pytest.approx(repeated, rel=0.02)


def test_collectives_are_as_many_and_as_large_as_planned(exported):
    plan, folder, traces = exported
    groups = json.loads((folder / "comm_groups.json").read_text())
    for number, mesh in enumerate(plan.plan.meshes):
        wanted, sizes = Counter(), Counter()
        for at, each in plan.plan.collectives_by_mesh():
            if at == number:
                key = each.kind, each.group_size
                wanted[key] += each.times
                sizes[key] += each.times * each.nbytes
        for device in mesh.devices:
            found, moved = Counter(), Counter()
            for node in traces[device]:
                if KINDS[node.type] == "collective":
                    values = attributes(node)
                    assert device in groups[values["pg_name"]]
                    key = COLLECTIVES[values["comm_type"]], len(groups[values["pg_name"]])
                    found[key] += 1
                    moved[key] += values["comm_size"]
            assert found == wanted and moved == pytest.approx(sizes)


def test_members_of_a_group_meet_in_the_same_order(exported):
    _, folder, traces = exported
    for number, group in json.loads((folder / "comm_groups.json").read_text()).items():
        met = {
            tuple(
                (v["comm_type"], v["comm_size"]) for v in map(attributes, traces[device]) if v.get("pg_name") == number
            )
            for device in group
        }
        assert len(met) == 1


def test_every_message_is_sent_and_received_once(exported):
    plan, _, traces = exported
    sides = {5: Counter(), 6: Counter()}
    for device, nodes in traces.items():
        for node in nodes:
            if node.type in sides:
                values = attributes(node)
                assert device == values["comm_src" if node.type == 5 else "comm_dst"]
                sides[node.type][tuple(values[n] for n in ("comm_src", "comm_dst", "comm_tag", "comm_size"))] += 1
    assert sides[5] == sides[6] and set(sides[5].values()) <= {1}
    # Each device receives its shard of what is sent to its mesh.
    program = plan.lower().program
    for mesh in program.meshes:
        received = sum(
            mesh.values[value].bytes_per_device(mesh)
            for each in mesh.instructions
            if isinstance(each, Recv)
            for value in each.values
        )
        for device in mesh.devices:
            assert sum(size for _, to, _, size in sides[6] if to == device) == received
    assert bool(sides[5]) == any(isinstance(each, Send) for mesh in program.meshes for each in mesh.instructions)


def test_nothing_waits_for_itself_on_any_device(exported):
    _, _, traces = exported
    sent = {}
    for device, nodes in traces.items():
        for node in nodes:
            values = attributes(node)
            if node.type == 5:
                sent[values["comm_src"], values["comm_dst"], values["comm_tag"]] = device, node.id
    graph = {}
    for device, nodes in traces.items():
        ids = {node.id for node in nodes}
        assert len(ids) == len(nodes)
        for node in nodes:
            assert ids.issuperset((*node.ctrl_deps, *node.data_deps))
            waits = {(device, each) for each in (*node.ctrl_deps, *node.data_deps)}
            values = attributes(node)
            if node.type == 6:
                waits.add(sent[values["comm_src"], values["comm_dst"], values["comm_tag"]])
            graph[device, node.id] = waits
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) == sum(map(len, traces.values()))


def test_a_permute_is_a_message_from_each_device_to_another(tmp_path):
    method = autopar.ShardParallel(mesh_shape=(2, 2), specs={r"\.a$": P("data", "model"), r"\.b$": P("model", "data")})

    def step(params):
        return {"a": params["a"] + params["b"], "b": params["b"] * 2.0}

    plan = (
        autopar.parallelize(step, method=method, cluster=autopar.Cluster(num_devices=4, machine=SEPARATE))
        .trace({name: draw(0, 64, 64) for name in "ab"})
        .plan()
    )
    kinds = {each.kind for each in plan.plan.planned_collectives}
    assert kinds == {"collective-permute"}
    traces = traces_of(plan, tmp_path)
    sends = [attributes(node) for nodes in traces.values() for node in nodes if node.type == 5]
    assert sends and all(each["comm_src"] != each["comm_dst"] for each in sends)
    (planned_once,) = plan.plan.planned_collectives
    assert {each["comm_size"] for each in sends} == {planned_once.nbytes}
    received = [node for nodes in traces.values() for node in nodes if node.type == 6]
    assert len(received) == len(sends) and not any(node.type == 7 for nodes in traces.values() for node in nodes)


def test_state_on_the_host_is_loaded_before_its_task_and_stored_after(tmp_path):
    state = adam_state([{"w": draw(i, 32, 32), "b": draw(9 + i, 32)} for i in range(2)])
    method = autopar.Megatron(pipeline=2, data=4, num_microbatches=2, offload="optimizer")
    step = autopar.parallelize(adam(mlp_loss), method=method, donate_argnums=0)
    plan = step.trace(state, (draw(20, 32, 32), draw(21, 32, 32))).plan()
    traces, program = traces_of(plan, tmp_path), plan.lower().program
    assert plan.plan.host_state
    for mesh in program.meshes:
        wanted = Counter()
        for each in mesh.instructions:
            if isinstance(each, Copy):
                kind = "store" if each.to == "host" else "load"
                wanted[kind] += sum(mesh.values[value].bytes_per_device(mesh) for value in each.values)
        assert wanted["load"] and wanted["store"]
        for device in mesh.devices:
            nodes, found = traces[device], Counter()
            for node in nodes:
                if KINDS[node.type] in ("load", "store"):
                    found[KINDS[node.type]] += attributes(node)["tensor_size"]
            assert found == wanted
            loads = {node.id for node in nodes if KINDS[node.type] == "load"}
            assert all(node.data_deps for node in nodes if KINDS[node.type] == "store")
            assert loads <= {each for node in nodes for each in (*node.data_deps, *node.ctrl_deps)}


def test_files_are_messages_behind_their_lengths(tmp_path):
    path = planned(METHODS["zero"]).chakra(tmp_path) / "step.0.et"
    data = path.read_bytes()
    assert data.startswith(b"\x07\x0a\x050.0.4")  # GlobalMetadata: its field 1 is the schema's version
    assert data[9:14] == b"\x08\x01\x12" + data[12:14]  # Node: field 1 is its number, field 2 its name
    assert not list(tmp_path.glob("step.8.et"))


def test_some_devices_are_enough(tmp_path):
    plan = planned(METHODS["two stages"])
    assert set(traces_of_some(plan, tmp_path)) == {0, 5}


def traces_of_some(plan, folder):
    return {int(path.name.split(".")[1]) for path in plan.chakra(folder, devices=[0, 5]).glob("*.et")}


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(autopar.InvalidArgument, match="cannot be written to"):
        planned(METHODS["zero"]).chakra(tmp_path / "taken")


def test_the_command_writes_traces(tmp_path, monkeypatch, capsys):
    Path(tmp_path / "small_model.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def make():\n"
        "    def step(w, batch):\n"
        "        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)\n"
        "        return w - 0.1 * grad, loss\n"
        "    return step, jnp.ones((16, 16)), jnp.ones((32, 16))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["simulate", "small_model:make", "--cluster", "1x dgx-h100", "--chakra", str(tmp_path / "traces")]
    assert main(words) == 0 and "ms per step" in capsys.readouterr().out
    assert len(list((tmp_path / "traces").glob("step.*.et"))) == 8
