"""State on the host comes to the devices in parts for its update and goes back, and the step is the plain one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import InvalidArgument, MemoryTooSmall, NonFiniteValue, Unsupported
from autopar.hardware.machine import Machine
from autopar.ir.plan import Plan
from autopar.ir.program import ArrayType, Copy, Free, Program, Run
from autopar.runtime.executables import sharding_of
from autopar.runtime.simulator import ConstantCosts, simulate
from autopar.simulation import SimulationReport
from autopar.training.create_state import create_state
from tests.equivalence import Configuration, compare
from tests.zoo import ZOO

TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))
LAYERS, WIDTH = 5, 16


def loss(params, batch):
    h = batch
    for w in params:
        h = autopar.layer_boundary(jnp.tanh(h @ w))
    return jnp.mean(h**2)


def train_step(state, batch):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def new_state(layers: int = LAYERS):
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in jax.random.split(jax.random.key(0), layers)]
    return params, TX.init(params)


BATCH = jnp.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)


def planned(num_devices: int = 4, donate: tuple[int, ...] = (0,), offload: str = "optimizer", **fields: Any):
    step = autopar.parallelize(train_step, devices=jax.devices()[:num_devices], donate_argnums=donate)
    return step.trace(new_state(), BATCH).plan(autopar.Megatron(offload=offload, **fields))


def is_moment(name: str) -> bool:
    return ".mu." in name or ".nu." in name


def program(**fields: Any) -> Program:
    return planned(**fields).lower().program


def test_moments_come_and_leave_in_parts_and_never_more_than_three_are_on_the_devices():
    (mesh,) = program().meshes
    assert {name for name, kind in mesh.values.items() if kind.memory == "host"} >= {"state.1.1.0.mu.0/host"}
    copies = [i for i in mesh.instructions if isinstance(i, Copy)]
    assert [sorted(i.results) for i in copies if i.to == "device"] == [
        [f"state.1.1.0.mu.{n}", f"state.1.1.0.nu.{n}"] for n in range(LAYERS)
    ]
    assert all(i.takes for i in copies if i.to == "device")
    of_copies = {name for i in copies for name in (i.results if i.to == "device" else i.values)}
    there: set[str] = set()
    most = 0
    for instruction in mesh.instructions:
        if isinstance(instruction, Copy) and instruction.to == "device":
            there.update(instruction.results)
        elif isinstance(instruction, Run):
            there.update(of_copies.intersection(instruction.outputs))
            there.difference_update(n for n in instruction.inputs if is_moment(n))  # donated
        elif isinstance(instruction, Free):
            there.difference_update(instruction.values)
        most = max(most, len(there))
    assert (most, there) == (3 * 2, set())


def test_a_part_is_on_its_way_while_the_one_before_it_is_updated_and_waits_for_the_room_of_an_earlier_one():
    (mesh,) = program().meshes
    order = [i for i in mesh.instructions if isinstance(i, Copy) or (isinstance(i, Run) and i.task.update_round)]
    kinds = [i.to if isinstance(i, Copy) else "run" for i in order]
    assert kinds == ["device", *(["device", "run", "host"] * (LAYERS - 1)), "run", "host"]
    leaving = [i for i in order if isinstance(i, Copy) and i.to == "host"]
    waits = [i for i in mesh.instructions if isinstance(i, Free) and i.after]
    assert [i.after for i in waits] == [i.results for i in leaving]
    places = [mesh.instructions.index(i) for i in waits]
    assert all(isinstance(mesh.instructions[place + 1], Copy) for place in places[: LAYERS - 3])


@pytest.mark.parametrize("donate", [(0,), ()], ids=["donated", "kept"])
@pytest.mark.parametrize(
    ("num_devices", "fields"),
    [
        (1, {}),
        (4, {"zero": 1, "num_microbatches": 2}),
        (4, {"tensor": 2, "zero": 3}),
        (4, {"data": 2, "pipeline": 2, "num_microbatches": 2, "zero": 1}),
    ],
    ids=["one device", "zero", "tensor", "stages"],
)
@pytest.mark.usefixtures("float64")
def test_a_step_with_its_moments_on_the_host_equals_the_plain_one(num_devices, fields, donate):
    step = planned(num_devices, donate, **fields).lower().compile()
    plain = jax.jit(train_step)
    state, expected = new_state(), new_state()
    for _ in range(3):
        given = state
        state, value = step(state, BATCH)
        expected, expected_value = plain(expected, BATCH)
        deleted = {leaf.is_deleted() for leaf in jax.tree.leaves(given[1][1][0].mu)}
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12),
        (state, value),
        (expected, expected_value),
    )
    assert deleted == {bool(donate)}
    moments, parameters = jax.tree.leaves((state[1][1][0].mu, state[1][1][0].nu)), jax.tree.leaves(state[0])
    assert {array.sharding.memory_kind for array in moments} == {"pinned_host"}
    assert {array.sharding.memory_kind for array in parameters} == {"device"}
    if "zero" in fields and "pipeline" not in fields:
        assert all(array.sharding.shard_shape(array.shape) != array.shape for array in moments)


def report(**fields: Any) -> SimulationReport:
    return planned(**fields).simulate()


def test_the_account_has_the_moments_on_the_host_and_their_time_on_the_link():
    here, there = report(offload="off"), report()
    moments = 2 * LAYERS * WIDTH * WIDTH * 4
    assert (here.host_bytes, there.host_bytes) == (0, moments)
    assert there.timeline.memory[0][0][1] == here.timeline.memory[0][0][1] - moments
    assert there.peak_bytes < here.peak_bytes
    bandwidth = Machine.named("cpu").host_bandwidth
    for to in ("device", "host"):
        copies = [each for each in there.timeline.copies if each.to == to]
        assert sum(each.num_bytes for each in copies) == moments
        assert sum(each.stop_s - each.start_s for each in copies) == pytest.approx(moments / bandwidth)
    assert there.step_time_s >= max(each.stop_s for each in there.timeline.copies)
    assert "GB of the host for each device" in str(there)
    lanes = [each["args"]["name"] for each in there.timeline.to_chrome_trace()["traceEvents"] if each["ph"] == "M"]
    assert {"to the device", "to the host"} <= set(lanes)


def test_the_plan_says_what_is_on_the_host_and_comes_back_from_its_file():
    made = planned().plan
    assert Plan.from_json(made.to_json()) == made
    assert f"in pinned memory of the host between steps: {2 * LAYERS} inputs, brought in {LAYERS} parts" in str(made)
    assert "host_state" not in planned(offload="off").plan.to_json()


def test_a_step_that_is_timed_tells_when_each_part_came_and_left(tmp_path):
    step = planned().lower().compile()
    path = tmp_path / "trace.json"
    step.timeline(path, new_state(), BATCH)
    assert path.read_text().count("to the device") >= LAYERS


def test_values_that_are_not_finite_are_found_with_state_on_the_host():
    step = autopar.parallelize(
        train_step, method=autopar.Megatron(offload="optimizer"), devices=jax.devices()[:2], check_finite=True
    )
    state, _ = step(new_state(1), BATCH)
    with pytest.raises(NonFiniteValue):
        step(state, BATCH * np.inf)


def test_a_first_state_is_made_where_the_step_wants_it():
    step = autopar.parallelize(train_step, method=autopar.Megatron(offload="optimizer"), devices=jax.devices()[:2])
    step(new_state(), BATCH)
    state = create_state(new_state, like=step)
    assert {array.sharding.memory_kind for array in jax.tree.leaves(state[1][1][0].mu)} == {"pinned_host"}
    np.testing.assert_array_equal(state[0][0], new_state()[0][0])
    step(state, BATCH)


def test_devices_without_pinned_memory_are_refused():
    device = SimpleNamespace(device_kind="abacus", addressable_memories=lambda: [SimpleNamespace(kind="beads")])
    mesh: Any = SimpleNamespace(devices=np.array([device]))
    kind = ArrayType(shape=(4,), dtype="float32", memory="host")
    with pytest.raises(Unsupported, match=r"pinned_host memory, and abacus devices have beads here\. Plan without"):
        sharding_of(kind, mesh)


# --- parameters, sums of gradients, activations -------------------------------------------------------------------

DEEP = 12
VIRTUAL = {"schedule": "interleaved", "virtual_stages": DEEP}
EVERYTHING = ("parameters", "activations")


def deep(num_devices: int = 1, donate: tuple[int, ...] = (0,), **fields: Any):
    step = autopar.parallelize(train_step, devices=jax.devices()[:num_devices], donate_argnums=donate)
    return step.trace(new_state(DEEP), BATCH).plan(autopar.Megatron(**VIRTUAL | fields))


@pytest.mark.parametrize(
    ("num_devices", "fields"),
    [
        (1, {}),
        (2, {"zero": 3, "num_microbatches": 2, "virtual_stages": 6, "remat": True}),
        (4, {"tensor": 2, "pipeline": 2, "num_microbatches": 4, "virtual_stages": 6}),
        (8, {"data": 2, "tensor": 2, "pipeline": 2, "num_microbatches": 2, "virtual_stages": 6, "zero": 1}),
    ],
    ids=["one device", "zero", "stages", "all"],
)
@pytest.mark.parametrize(
    ("offload", "donate"), [("parameters", (0,)), (EVERYTHING, ())], ids=["parameters donated", "everything kept"]
)
@pytest.mark.usefixtures("float64")
def test_a_step_with_its_parameters_on_the_host_equals_the_plain_one(offload, num_devices, fields, donate):
    step = deep(num_devices, donate, offload=offload, **fields).lower().compile()
    plain = jax.jit(train_step)
    state, expected = new_state(DEEP), new_state(DEEP)
    for _ in range(3):
        given = state
        state, value = step(state, BATCH)
        expected, expected_value = plain(expected, BATCH)
        deleted = {leaf.is_deleted() for leaf in jax.tree.leaves((given[0], given[1][1][0].nu))}
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12),
        (state, value),
        (expected, expected_value),
    )
    assert deleted == {bool(donate)}
    arrays = jax.tree.leaves((state[0], state[1][1][0].mu, state[1][1][0].nu))
    assert {array.sharding.memory_kind for array in arrays} == {"pinned_host"}


def on_devices(program: Program, name: str) -> set[str]:
    """The most values with a name like this that are on the devices at once."""
    (mesh,) = program.meshes
    there, most = set[str](), set[str]()
    for instruction in mesh.instructions:
        match instruction:
            case Copy(to="device", results=made) | Run(outputs=made):
                there.update(value for value in made if value.startswith(name))
            case Free(values=gone):
                there.difference_update(gone)
            case _:
                pass
        most = max(most, there, key=len)
        if isinstance(instruction, Run):
            donated = program.executables[instruction.executable].donated
            there.difference_update(instruction.inputs[place] for place in donated)
    return most


def test_parameters_of_three_stages_are_on_the_devices_at_once_and_come_while_the_stage_before_is_computed():
    made = deep(offload="parameters").lower().program
    assert len(on_devices(made, "state.0.")) <= 3
    (mesh,) = made.meshes
    order = list(mesh.instructions)
    come = next(n for n, i in enumerate(order) if isinstance(i, Copy) and "state.0.5" in i.results)
    runs = [i.task.stage for i in order[come:] if isinstance(i, Run)]
    assert runs[:2] == [4, 5]
    forward = [i for i in order if isinstance(i, Copy) and i.results == ("state.0.5",)]
    assert [copy.takes for copy in forward] == [False, False]  # the last time it comes with its moments


def test_what_microbatches_leave_is_on_the_host_until_their_backward_pass():
    made = deep(offload="activations").lower().program
    (mesh,) = made.meshes
    assert not any(name.startswith("state.") and kind.memory == "host" for name, kind in mesh.values.items())
    copies = [i for i in mesh.instructions if isinstance(i, Copy)]
    left = {name for i in copies if i.to == "host" for name in i.values}
    assert len(left) >= DEEP
    assert left == {name for i in copies if i.to == "device" for name in i.results}
    assert all("@0" in name for name in left)


@pytest.mark.parametrize("offload", ["off", "optimizer", "parameters", "activations", EVERYTHING], ids=str)
def test_the_devices_hold_what_the_account_says(offload):
    planned = deep(offload=offload)
    step = planned.lower().compile()
    expected = simulate(step.program, ConstantCosts(forward_s=1, backward_s=2)).peak_bytes[0]
    leaves, loaded = jax.tree.leaves((new_state(DEEP), BATCH)), step.loaded
    env = loaded.place(leaves) + loaded.unset
    loaded.progress.begin()
    held = []
    for run in loaded.steps:
        run(env)
        arrays = {id(array): array for array in env if isinstance(array, jax.Array) and not array.is_deleted()}
        held.append(sum(a.nbytes for a in arrays.values() if a.sharding.memory_kind == "device"))
    # The account has the batch to the end, which the caller holds.
    assert expected - BATCH.nbytes <= max(held) <= expected


def test_each_thing_on_the_host_makes_the_peak_of_the_devices_smaller():
    peaks = [deep(offload=each).simulate().peak_bytes for each in ("off", "optimizer", "parameters", EVERYTHING)]
    assert sorted(peaks, reverse=True) == peaks
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(new_state(DEEP)))
    assert peaks[0] > state > 1.5 * peaks[-1]


def test_a_plan_says_what_is_on_the_host_while_no_task_uses_it():
    made = deep(offload=EVERYTHING).plan
    assert Plan.from_json(made.to_json()) == made
    assert "in pinned memory of the host while no task uses them: activations and sums of gradients" in str(made)
    assert f"between steps: {3 * DEEP} inputs, brought in {DEEP} parts" in str(made)
    with pytest.raises(InvalidArgument, match="a kind of host_values"):
        Plan(**{**vars(made), "host_values": ("weights",)})


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ("weights", "offload is 'weights'"),
        ((), r"offload is \(\), which names nothing"),
        (("optimizer", "off"), "offload is 'off'"),
        ("auto", 'offload="auto" is for Auto, which searches'),
    ],
)
def test_words_that_cannot_be_used_are_refused(offload, message):
    with pytest.raises(InvalidArgument, match=message):
        autopar.Megatron(offload=offload)


def test_several_words_have_one_order_and_parameters_imply_the_optimizer():
    for method in (autopar.Megatron, autopar.Auto, autopar.PipelineParallel):
        assert method(offload={"activations", "parameters", "optimizer"}).offload == EVERYTHING
        assert method(offload=["optimizer"]).offload == "optimizer"


def test_activations_that_have_no_time_to_leave_are_refused():
    with pytest.raises(Unsupported, match="what waits for the backward pass, and in train_step that is"):
        planned(1, offload="activations")


def test_a_scan_over_layers_has_no_parameters_for_the_host():
    def scanned(params, batch):
        def loss(params):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)[0] ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    step = autopar.parallelize(scanned, devices=jax.devices()[:1], donate_argnums=0)
    method = autopar.Megatron(schedule="interleaved", virtual_stages=4, offload="parameters")
    with pytest.raises(Unsupported, match="Give layers parameters of their own in place of a scan"):
        step.trace(jnp.ones((4, WIDTH, WIDTH)), BATCH).plan(method)


@pytest.mark.parametrize("name", ["mlp", "tied_embedding", "gpt_equinox", "moe", "dropout"])
@pytest.mark.usefixtures("float64")
def test_a_model_of_the_zoo_with_everything_on_the_hosts_equals_plain_jit(name):
    configuration = Configuration(
        num_stages=2, num_microbatches=4, schedule="interleaved", donate=True, options={"offload": EVERYTHING}
    )
    agreement = compare(ZOO[name], configuration)
    assert agreement.holds, agreement


@pytest.mark.usefixtures("float64")
def test_a_pipeline_by_hand_keeps_its_parameters_on_the_hosts():
    method = autopar.PipelineParallel(
        num_stages=2, num_microbatches=2, schedule="interleaved", virtual_stages=6, offload=EVERYTHING
    )
    step = autopar.parallelize(train_step, method=method, devices=jax.devices()[:4], donate_argnums=0)
    state, value = step(new_state(DEEP), BATCH)
    expected, expected_value = jax.jit(train_step)(new_state(DEEP), BATCH)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12),
        (state, value),
        (expected, expected_value),
    )
    assert {array.sharding.memory_kind for array in state[0]} == {"pinned_host"}


def hosts_of(num_bytes: float) -> autopar.Cluster:
    return autopar.Cluster.of_hosts(replace(Machine.named("p3dn.24xlarge"), host_memory_bytes=num_bytes), 1)


def test_a_plan_that_hosts_have_no_memory_for_does_not_fit_and_a_search_refuses_it():
    moments = 2 * LAYERS * WIDTH * WIDTH * 4
    traced = autopar.parallelize(train_step, cluster=hosts_of(8 * moments - 1), donate_argnums=0).trace(
        new_state(), BATCH
    )
    report = traced.plan(autopar.Megatron(offload="optimizer")).simulate()
    assert (report.all_on_host_bytes, report.fits) == (8 * moments, False)
    assert "DOES NOT FIT" in str(report)
    assert report.to_data()["host_memory_bytes"] == 8 * moments - 1
    enough = traced.on_cluster(hosts_of(8 * moments))
    assert enough.plan(autopar.Megatron(offload="optimizer")).simulate().fits
    with pytest.raises(MemoryTooSmall, match="in the memory of one host, which has"):
        traced.on_cluster(hosts_of(10)).planned(autopar.Auto(offload="optimizer", num_stages=1, num_microbatches=1))
