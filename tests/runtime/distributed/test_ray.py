"""A step on a Ray cluster: equal to the plain step, its values stay there, and what goes wrong has one clear reason."""

import gc
import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import session
from autopar.errors import (
    CannotSerialize,
    DonatedBuffer,
    HostLost,
    InvalidArgument,
    NonFiniteValue,
    PlanMismatch,
    StepFailed,
    StepTimeout,
    Unsupported,
)
from autopar.runtime.distributed.host import Host
from autopar.runtime.distributed.ray_cluster import RayOptions, check_answers, start_hosts
from autopar.runtime.distributed.session import check_versions
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.weak_scaling_local import timed
from tests.equivalence import Configuration, compare
from tests.runtime.listeners import listeners
from tests.small_steps import tanh_loss
from tests.zoo import ZOO

# Ray leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

HOSTS, DEVICES_PER_HOST = 2, 4
SMALL_GPT = alpa_gpt("small-gpt", GPTSize(width=32, layers=1, heads=4, length=16, vocabulary=64, batch=8), jnp.float32)
TWO = {"num_stages": 2, "num_microbatches": 2}
# A third of the zoo: each row is there for what its state, its batch or its graph has that others have not.
MODELS = {
    "mlp": Configuration(**TWO, schedule="gpipe"),
    "tied_embedding": Configuration(**TWO, schedule="1f1b", donate=True),
    "scan_layers": Configuration(**TWO, schedule="interleaved", donate=True, options={"layers": 8}),
    "several_arguments": Configuration(**TWO, schedule="zero-bubble"),
    "dropout_legacy_key": Configuration(**TWO, schedule="1f1b"),
    "dropout": Configuration(**TWO, schedule="eager-1f1b", donate=True),
    "vae": Configuration(num_stages=1, num_microbatches=2),
    "control_flow": Configuration(num_stages=4, num_microbatches=2, schedule="1f1b"),
    "gpt_linen": Configuration(**TWO, schedule="1f1b", options={"mesh_shape": (2, 2)}),
}


@pytest.fixture(scope="module")
def cluster():
    autopar.init(cluster="ray", num_hosts=HOSTS, devices_per_host=DEVICES_PER_HOST)
    yield session.current_session
    autopar.shutdown()


def train_step(state, batch):
    def loss_fn(weights):
        x = batch["x"]
        for number, weight in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), {"loss": loss}


def made(layers=4, width=16, batch=16):
    draw = np.random.RandomState(0)
    state = [jnp.asarray(draw.randn(width, width).astype(np.float32) * 0.3) for _ in range(layers)]
    return state, {name: draw.randn(batch, width).astype(np.float32) for name in "xy"}


def pipelined(function=train_step, **options):
    return autopar.parallelize(function, method=autopar.PipelineParallel(num_stages=2, num_microbatches=4), **options)


def expected(num_steps):
    state, batch = made()
    plain = jax.jit(train_step)
    for _ in range(num_steps):
        state, metrics = plain(state, batch)
    return state, metrics


def assert_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("float64", "cluster")
def test_step_on_a_cluster_equals_the_plain_step(name):
    agreement = compare(ZOO[name], MODELS[name])
    assert agreement.holds, str(agreement)


def test_the_weak_scaling_benchmark_times_steps_on_a_cluster(cluster):
    row = timed(SMALL_GPT, cluster().cluster, "data", repetitions=1)
    assert (row.gpus, row.method) == (HOSTS * DEVICES_PER_HOST, "data, ray")
    assert row.step_time_s > 0 and row.plan == f"1 stage x 1 microbatch: data={row.gpus}"


@pytest.mark.usefixtures("cluster")
def test_pipelines_of_different_shape_run_side_by_side_on_the_hosts():
    state, batch = made()
    bare = pipelined().trace(state, batch).plan().plan
    lanes = [(0, (0, 1), 3), (1, (1, 2), 3), (7, (0, 2), 1)]  # the other one is on the other host
    plan = replace(
        bare,
        meshes=tuple(autopar.MeshPlan(devices=(n,), shape=(1,), axis_names=("data",)) for n, _, _ in lanes),
        stages=tuple(
            autopar.StagePlan(layers=layers, mesh=mesh, microbatches=share)
            for mesh, (_, layers, share) in enumerate(lanes)
        ),
        input_specs={},
    )
    step = autopar.parallelize(train_step, method=plan)
    for _ in range(3):
        state, metrics = step(state, batch)
    want_state, want = expected(3)
    assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    assert_equal(jax.device_get(state), want_state)


def test_results_stay_on_the_cluster_until_they_are_read(cluster):
    state, batch = made()
    step = pipelined()
    for _ in range(3):
        state, metrics = step(state, batch)
    loss = metrics["loss"]
    assert isinstance(loss, autopar.DistributedArray) and loss.shape == () and loss.dtype == np.float32
    assert jax.block_until_ready(metrics)["loss"] is loss
    want_state, want = expected(3)
    assert float(loss) == pytest.approx(float(want["loss"]), rel=1e-6)
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert float(loss * 2) == pytest.approx(2 * float(loss))
    assert_equal(jax.device_get(state), want_state)
    assert_equal(jax.tree.map(jnp.asarray, state), want_state)
    assert "16, 16" in repr(state[0])


def test_numbers_of_python_come_back_from_a_cluster_as_such(cluster):
    def step(state, x):
        gradient = jax.grad(lambda w: tanh_loss([w], (x, x)))(state["w"])
        return {"w": state["w"] - state["rate"] * gradient, "rate": state["rate"] * 0.5}

    ours = autopar.parallelize(step, method=autopar.DataParallel())
    state = {"w": jnp.eye(4, dtype=jnp.bfloat16), "rate": 0.1}
    for rows in (16, 8):  # the second shape is traced with the state that came back
        state = ours(state, jnp.ones((rows, 4), jnp.bfloat16))
    assert (state["w"].dtype, state["rate"].weak_type) == (jnp.bfloat16, True)


def test_threads_that_call_one_step_on_a_cluster_get_their_own_results(cluster):
    step, plain, (state, batch) = pipelined(), jax.jit(train_step), made()

    def call(number):
        batches = {name: array * number for name, array in batch.items()}
        for _ in range(3):
            assert_equal(step(state, batches), plain(state, batches))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(1, 5)))


def test_callback_that_raises_in_a_stage_ends_the_cluster_with_its_reason(cluster):
    def refuse(loss):
        raise ValueError("a loss that nobody wants")

    def checked(state, batch):
        state, metrics = train_step(state, batch)
        jax.debug.callback(refuse, metrics["loss"])
        return state, metrics

    step = pipelined(checked)
    with pytest.raises(StepFailed, match="a loss that nobody wants"):
        for _ in range(2):
            float(step(*made())[1]["loss"])
    session.restart()


def test_dropped_values_are_freed_on_the_cluster(cluster):
    state, batch = made()
    step = pipelined()
    counts = []
    for _ in range(5):
        state, metrics = step(state, batch)
        float(metrics["loss"])
        counts.append(cluster().run_everywhere(Host.ping))
    assert counts[-1] == counts[-2]


def test_program_of_a_step_that_was_dropped_is_forgotten_in_every_process(cluster):
    state, batch = made()
    kept, dropped = pipelined(), pipelined()
    state, _ = kept(state, batch)
    state, _ = dropped(state, batch)
    before = cluster().run_everywhere(count_programs)
    del dropped
    gc.collect()
    state, _ = kept(state, batch)
    assert cluster().run_everywhere(count_programs) == [count - 1 for count in before]
    assert_equal(state, expected(3)[0])


def count_programs(host):
    return len(host.programs)


def test_first_nan_on_a_cluster_is_named_with_its_line_and_stage(cluster):
    step = pipelined(check_finite=True)
    state, batch = made()
    state, _ = step(state, batch)
    assert_equal(state, expected(1)[0])
    batch["y"][5] = 1e30  # in the second of four microbatches
    with pytest.raises(NonFiniteValue, match=r"test_ray.py:\d+.* is infinite \(stage 1, forward of microbatch 1\)"):
        step(state, batch)
    assert_equal(step(state, made()[1])[0], expected(2)[0])


def test_one_value_cannot_be_donated_twice(cluster):
    state, batch = made(layers=2)
    step = pipelined(donate_argnums=0)
    state, _ = step(state, batch)
    with pytest.raises(InvalidArgument, match=r"'state\.0' and 'state\.1' are one value"):
        step([state[0], state[0]], batch)
    assert_equal(step(state, batch)[0], step(step(*made(layers=2))[0], batch)[0])


def test_donated_state_is_gone_and_says_so(cluster):
    state, batch = made()
    step = pipelined(donate_argnums=0)
    first, _ = step(state, batch)
    second, _ = step(first, batch)
    assert first[0].is_deleted() and not second[0].is_deleted()
    with pytest.raises(DonatedBuffer, match="donated"):
        step(first, batch)
    with pytest.raises(DonatedBuffer):
        np.asarray(first[0])
    assert_equal(second, expected(2)[0])


def test_another_step_takes_the_state_as_it_lies_elsewhere(cluster):
    state, batch = made()
    state, _ = pipelined()(state, batch)

    def evaluate(state, batch):
        return {"loss": train_step(state, batch)[1]["loss"], "norm": sum(jnp.sum(w * w) for w in state)}

    got = autopar.parallelize(evaluate, method=autopar.ShardParallel(mesh_shape=(2, 4)))(state, batch)
    want = evaluate(expected(1)[0], batch)
    assert_equal(got, want)


def test_stage_may_span_processes_and_a_process_may_hold_stages(cluster):
    state, batch = made()
    plan = pipelined().trace(state, batch).plan().plan
    for order in ((0, 4, 1, 5, 2, 6, 3, 7), (7, 6, 5, 4, 3, 2, 1, 0)):
        text = json.loads(plan.to_json())
        for number, mesh in enumerate(text["meshes"]):
            mesh["devices"] = list(order[4 * number : 4 * number + 4])
        step = autopar.parallelize(train_step, method=autopar.Plan.from_json(json.dumps(text)))
        got, _ = step(*made())
        assert_equal(got, expected(1)[0])


def test_timeline_holds_every_task_of_every_process(cluster, tmp_path):
    state, batch = made()
    step = pipelined()
    state, _ = step(state, batch)
    got, _ = step.timeline(tmp_path / "trace.json", state, batch)
    assert_equal(got, expected(2)[0])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert {f"{kind}{stage}.m{m}" for kind in "FB" for stage in (0, 1) for m in range(4)} <= spans
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_wrong_shapes_are_named(cluster):
    state, batch = made()
    compiled = pipelined().trace(state, batch).plan().lower().compile()
    with pytest.raises(InvalidArgument, match="shapes"):
        compiled(state, {"x": batch["x"][:8], "y": batch["y"][:8]})


def test_step_that_cannot_be_shipped_names_what_in_it(cluster):
    lock = threading.Lock()

    def step(state, batch):
        with lock:
            return train_step(state, batch)

    with pytest.raises(CannotSerialize, match="'lock'"):
        pipelined(step)(*made())


def test_step_that_differs_between_processes_is_refused(cluster):
    def step(state, batch):
        return train_step(state, {**batch, "y": batch["y"] * os.getpid()})

    with pytest.raises(PlanMismatch, match="program"):
        pipelined(step)(*made())
    assert_equal(pipelined()(*made())[0], expected(1)[0])  # the cluster goes on


def test_other_releases_are_refused():
    driver = {"jax": "0.10.2", "python": "3.11"}
    with pytest.raises(PlanMismatch, match=r"Process 1 has jax 0\.9\.0, the driver 0\.10\.2"):
        check_versions(driver, [driver, {**driver, "jax": "0.9.0"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "slurm"}, "Choose 'local', 'ray'"),
        ({"cluster": "local", "num_hosts": 2}, "num_hosts need cluster='ray'"),
        ({"cluster": "ray", "step_timeout_s": 0}, "step_timeout_s is 0; it must be a positive"),
        ({"cluster": "ray", "start_timeout_s": "long"}, "start_timeout_s is 'long'"),
        ({"cluster": "ray", "answer_timeout_s": float("nan")}, "answer_timeout_s is nan"),
        ({"cluster": "ray", "num_hosts": 0}, "num_hosts is 0, it must be an integer"),
        ({"cluster": "ray", "devices_per_host": 1.5}, "devices_per_host is 1.5"),
        ({"cluster": "ray", "address": 6379}, "address is 6379"),
        ({"cluster": "ray", "runtime_env": "env"}, "runtime_env is 'env'"),
        ({"cluster": None}, "cluster is None"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        autopar.init(**options)


@pytest.mark.usefixtures("cluster")
def test_hosts_that_are_not_there_are_refused():
    with pytest.raises(InvalidArgument, match="fewer"):
        start_hosts(RayOptions(num_hosts=999))


def listeners_of(host):
    return listeners()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_listen_where_the_page_on_security_says(cluster):
    node = cluster().hosts.nodes[0]
    assert listeners().count(node) >= 1  # the coordinator
    for found in cluster().run_everywhere(listeners_of):
        # Three of the transfer server.
        assert found.count(node) >= 3, found
        # One of Ray's worker.
        assert sum(address in ("::", "0.0.0.0") for address in found) <= 1, found
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    table = page.partition("<!-- begin: listeners -->")[2].partition("<!-- end")[0]
    for who in ("JAX's coordinator", "JAX's transfer server", "Gloo", "Ray's worker"):
        assert who in table


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    with pytest.raises(Unsupported, match=r"pip install 'autopar\[ray\]'"):
        start_hosts(RayOptions())


def test_address_without_a_cluster_is_refused_in_time():
    start = time.monotonic()
    with pytest.raises(InvalidArgument, match=r"No Ray cluster answers at '127\.0\.0\.1:1'"):
        check_answers("127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="host:port"):
        check_answers("somewhere")
    assert time.monotonic() - start < 20


# What follows ends the cluster's processes.


def stopped_at(limit, stop, device=0):
    """A train step on one device, with a callback that does `stop` once the batch is larger than `limit`."""

    def step(state, batch):
        def look(x):
            if float(np.sum(x)) > limit:
                stop()
            return x

        x = jax.pure_callback(look, jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype), batch["x"])
        return train_step(state, {**batch, "x": x})

    # On one device: where several compute together, the others would wait for the one that failed.
    here = autopar.parallelize(step, method=autopar.ShardParallel(mesh_shape=(1,)), devices=jax.devices()[:1])
    plan = json.loads(here.trace(*made()).plan().plan.to_json())
    plan["meshes"][0]["devices"] = [device]
    return autopar.parallelize(step, method=autopar.Plan.from_json(json.dumps(plan)))


def test_error_within_a_step_is_raised_with_its_reason(cluster):
    def stop():
        raise ValueError("the batch is too large")

    step = stopped_at(1e6, stop)
    state, batch = made()
    state, _ = step(state, batch)
    with pytest.raises(StepFailed, match="too large"):
        _, metrics = step(state, {**batch, "x": batch["x"] + 1e6})
        np.asarray(metrics["loss"])
    session.restart()
    assert_equal(pipelined()(*made())[0], expected(1)[0])


def test_answer_that_is_lost_ends_the_cluster_with_what_ray_says(cluster):
    actor = cluster().hosts.actors[0]
    actor.run.remote(pause)
    lost = actor.run.remote(pause)  # waits behind the first
    cluster().hosts.ray.cancel(lost)
    with pytest.raises(HostLost, match=r"Lost an answer .* during fetching values; Ray says: TaskCancelledError"):
        cluster().replies.get({lost: 0}, 60.0, "fetching values")
    with pytest.raises(HostLost, match="Lost an answer"):
        pipelined()(*made())
    session.restart()
    assert_equal(pipelined()(*made())[0], expected(1)[0])


def pause(host):
    time.sleep(2)


def hanging_step(state, batch):
    """A train step whose loss waits for ever once the targets are large."""

    def loss_fn(weights):
        loss = tanh_loss(weights, (batch["x"], batch["y"]))
        jax.debug.callback(lambda y: time.sleep(60 * (np.sum(y) > 1e6)), batch["y"])  # in the last stage
        return loss

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), {"loss": loss}


def test_step_that_hangs_is_given_up_in_time_and_the_task_is_named(cluster):
    step = pipelined(hanging_step)
    state, batch = made()
    state, _ = step(state, batch)
    cluster().step_timeout_s = 3.0
    start = time.monotonic()
    with pytest.raises(StepTimeout, match=r"longer than 3 s; no answer came from process . on host") as raised:
        _, metrics = step(state, {**batch, "y": batch["y"] + 1e6})
        np.asarray(metrics["loss"])
    assert time.monotonic() - start < 30
    first = r"The first that has not ended is task F1.m0 on mesh 1, which reads .* of mesh 0, in process 1; "
    assert re.search(first + r"process 0 waits in task B0.m0 on mesh 0, which reads .* of mesh 1\.", str(raised.value))
    session.restart()
    cluster().step_timeout_s = session.STEP_TIMEOUT_S
    assert_equal(pipelined()(*made())[0], expected(1)[0])


@pytest.mark.parametrize("number", range(HOSTS))
def test_killed_process_is_named_at_once_and_a_restart_goes_on(cluster, number):
    state, batch = made()
    step = pipelined()
    state, metrics = step(state, batch)
    float(metrics["loss"])
    os.kill(cluster().reports[number].pid, 9)
    start = time.monotonic()
    with pytest.raises(HostLost, match=rf"process {number} .*mesh {number}"):
        while True:
            state, metrics = step(state, batch)
            float(metrics["loss"])
    assert time.monotonic() - start < 30
    with pytest.raises(HostLost):
        np.asarray(state[0])
    session.restart()
    with pytest.raises(InvalidArgument, match="shut down or restarted"):
        step(state, batch)
    assert_equal(step(*made())[0], expected(1)[0])
