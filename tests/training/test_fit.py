"""`fit` trains as a plain loop does, through losses of processes and of the driver; no step counts twice."""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ClusterFailed, HostLost, InvalidArgument, NonFiniteLoss
from autopar.session import current_session, restart
from autopar.training.checkpoints import Checkpoints
from autopar.training.fit import NumberedBatches, fit
from tests.small_steps import mlp_loss, mlp_params, sgd, two_stages
from tests.training.test_state import assert_same

ROWS, WIDTH = 24, 4  # rows for 8, 6 and 4 devices


def train_step(params: Any, batch: Any) -> Any:
    params, loss = sgd(mlp_loss)(params, batch)
    return params, {"loss": loss}


def draw(number: int) -> Any:
    rng = np.random.default_rng(number)
    return tuple(rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(2))


def plain_losses(count: int) -> tuple[Any, list[float]]:
    """The undisturbed run, by `jax.jit`."""
    params, losses, step = mlp_params(), [], jax.jit(train_step)
    for number in range(count):
        params, metrics = step(params, draw(number))
        losses.append(float(metrics["loss"]))
    return params, losses


def losses_of(history: list[Any]) -> list[float]:
    return [float(metrics["loss"]) for metrics in history]


@pytest.fixture(scope="module")
def step() -> autopar.Step:
    """Without donation, so that tests may use the first parameters again."""
    return autopar.parallelize(train_step, method=autopar.DataParallel(), devices=jax.devices())


@pytest.mark.parametrize(
    "batches", [draw, [draw(i) for i in range(9)], (draw(i) for i in range(7))], ids=["function", "list", "iterator"]
)
def test_training_equals_the_plain_loop(step, batches):
    told: list[Any] = []
    params, history = fit(
        step, mlp_params(), batches, num_steps=7, on_step=lambda n, m: told.append((n, float(m["loss"])))
    )
    expected, losses = plain_losses(7)
    np.testing.assert_allclose(losses_of(history), losses, rtol=1e-5)
    assert told == list(enumerate(losses_of(history)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)


def test_without_a_number_of_steps_training_ends_with_the_batches(step):
    assert len(fit(step, mlp_params(), [draw(0), draw(1)])[1]) == 2
    assert fit(step, mlp_params(), [])[1] == []
    assert fit(step, mlp_params(), draw, num_steps=0)[1] == []


def test_training_goes_on_at_the_right_batch_when_it_is_started_again(step, tmp_path):
    first, start = fit(step, mlp_params(), draw, num_steps=4, checkpoint_dir=tmp_path, checkpoint_every=3)
    assert Checkpoints(tmp_path).steps() == [3, 4]
    asked: list[int] = []

    def batches(number: int) -> Any:
        asked.append(number)
        return draw(number)

    params, rest = fit(step, mlp_params(), batches, num_steps=8, checkpoint_dir=tmp_path, checkpoint_every=3)
    assert min(asked) == 4
    undisturbed, whole = fit(step, mlp_params(), draw, num_steps=8)
    assert losses_of(start) + losses_of(rest) == losses_of(whole)
    assert_same(params, undisturbed)
    again, nothing = fit(step, mlp_params(), (draw(i) for i in range(8)), num_steps=8, checkpoint_dir=tmp_path)
    assert nothing == []
    assert_same(again, undisturbed)
    del first


def test_a_driver_that_dies_loses_the_steps_since_the_checkpoint_only(step, tmp_path):
    class Died(Exception):
        pass

    def die(number: int, metrics: Any) -> None:
        if number == 5:
            raise Died

    with pytest.raises(Died):
        fit(step, mlp_params(), draw, num_steps=9, checkpoint_dir=tmp_path, checkpoint_every=2, on_step=die)
    told: list[int] = []
    params, _ = fit(
        step,
        mlp_params(),
        (draw(i) for i in range(9)),
        checkpoint_dir=tmp_path,
        checkpoint_every=2,
        on_step=lambda n, m: told.append(n),
    )
    assert told == [4, 5, 6, 7, 8]
    assert_same(params, fit(step, mlp_params(), draw, num_steps=9)[0])


def test_training_goes_on_from_the_checkpoint_before_a_damaged_one_and_saves_the_same_steps_again(step, tmp_path):
    fit(step, mlp_params(), draw, num_steps=4, checkpoint_dir=tmp_path, checkpoint_every=2)
    largest = max(
        (path for path in (tmp_path / "4").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    os.truncate(largest, 10)
    iterator = (draw(i) for i in range(9))  # gives each batch once
    with pytest.warns(UserWarning, match=r"/4 is damaged: .* set aside as 4.damaged, and that of step 2"):
        params, rest = fit(step, mlp_params(), iterator, num_steps=6, checkpoint_dir=tmp_path, checkpoint_every=2)
    expected, losses = plain_losses(6)
    np.testing.assert_allclose(losses_of(rest), losses[2:], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "4.damaged", "6"]
    assert fit(step, mlp_params(), draw, num_steps=6, checkpoint_dir=tmp_path)[1] == []


def test_a_loss_that_is_not_finite_names_its_step_and_is_not_saved(step, tmp_path):
    def batches(number: int) -> Any:
        x, y = draw(number)
        return (x * np.float32("nan"), y) if number == 3 else (x, y)

    with pytest.raises(NonFiniteLoss, match=r"loss of step 3 is nan \(loss\)"):
        fit(step, mlp_params(), batches, num_steps=9, on_bad_loss="raise", checkpoint_dir=tmp_path, checkpoint_every=2)
    assert Checkpoints(tmp_path).steps() == [2]
    _, history = fit(step, mlp_params(), batches, num_steps=5)
    assert [bool(np.isfinite(loss)) for loss in losses_of(history)] == [True, True, True, False, False]


def test_training_goes_on_without_the_batches_that_spoiled_it(step, tmp_path):
    def batches(number: int) -> Any:
        x, y = draw(number)
        return (x, y * np.float32(1e25)) if number == 5 else (x, y)  # an infinite loss

    iterator = (batches(i) for i in range(9))  # gives each batch once
    told: list[int] = []
    params, history = fit(
        step,
        mlp_params(),
        iterator,
        num_steps=9,
        on_bad_loss="restore",
        on_step=lambda n, _: told.append(n),
        checkpoint_dir=tmp_path,
        checkpoint_every=2,
    )
    expected = mlp_params()
    for number in (0, 1, 2, 3, 6, 7, 8):  # 4 and 5 came after the checkpoint
        expected, _ = jax.jit(train_step)(expected, draw(number))
    assert_same(params, expected)
    assert told == list(range(9)) and len(history) == 9 and np.isinf(losses_of(history)[5])
    never = {"max_failures": 0, "checkpoint_dir": tmp_path / "never"}
    with pytest.raises(NonFiniteLoss, match="loss of step 5 is inf"):
        fit(step, mlp_params(), batches, num_steps=9, on_bad_loss="restore", **never)


def linear_step(weight: Any, x: Any) -> Any:
    """One step of a loss that is the product of one weight and the mean of a batch."""
    loss, gradient = jax.value_and_grad(lambda w: w * jnp.mean(x))(weight)
    return weight - 0.1 * gradient, {"loss": loss}


def test_checkpoint_of_a_state_that_was_spoiled_already_is_passed_over(tmp_path):
    def batches(number: int) -> Any:
        # The loss of step 4 is finite, and its state so large that all later ones are not.
        return np.full(2, 1.5e38 if number == 4 else 100 * (-1) ** number, np.float32)

    step = autopar.parallelize(linear_step, method=autopar.DataParallel(), devices=jax.devices()[:2], batch_argnums=1)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "on_bad_loss": "restore"}
    weight, history = fit(step, jnp.float32(1), batches, num_steps=9, **options)
    assert np.isfinite(losses_of(history)).tolist() == [True] * 5 + [False] * 2 + [True] * 2
    expected = jnp.float32(1)
    for number in (0, 1, 2, 3, 7, 8):  # from the checkpoint of step 4, and not from that of step 5
        expected, _ = jax.jit(linear_step)(expected, batches(number))
    assert_same(weight, expected)


def test_losses_that_are_bad_from_the_first_checkpoint_on_are_raised(step, tmp_path):
    def batches(number: int) -> Any:
        return draw(number)[0], draw(number)[1] * np.float32(1e25)

    with pytest.raises(NonFiniteLoss, match="loss of step 1 is inf"):
        fit(step, mlp_params(), batches, num_steps=9, on_bad_loss="restore", checkpoint_dir=tmp_path, max_failures=9)


def test_bad_losses_may_only_warn(step):
    with pytest.warns(UserWarning, match="loss of step 0 is inf"):
        fit(step, mlp_params(), lambda n: (draw(n)[0], draw(n)[1] * np.float32(1e25)), num_steps=1, on_bad_loss="warn")


def test_stage_that_takes_longer_than_its_share_is_named():
    def slow(params: Any, batch: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            jax.debug.callback(lambda _: time.sleep(0.05), batch[1])
            return mlp_loss(params, batch)

        params, value = sgd(loss)(params, batch)
        return params, {"loss": value}

    step = autopar.parallelize(slow, method=two_stages(), devices=jax.devices()[:2])
    with pytest.warns(autopar.StragglerWarning, match=r"Stage 0 on mesh 0, in process 0, took .* s for its tasks"):
        fit(step, mlp_params(), draw, num_steps=3, straggler_every=2)


def test_step_that_hangs_in_this_process_says_in_which_instruction(caplog):
    let_go = threading.Event()

    def hanging(params: Any, batch: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            jax.debug.callback(lambda y: let_go.wait(60) if np.sum(y) > 1e6 else None, batch[1])
            return mlp_loss(params, batch)

        params, value = sgd(loss)(params, batch)
        return params, {"loss": value}

    def batches(number: int) -> Any:
        x, y = draw(number)
        return x, y + (1e6 if number == 2 else 0)

    class LetGo(logging.Handler):  # who waits on this thread can be helped by another one only
        def emit(self, record: logging.LogRecord) -> None:
            let_go.set()

    handler = LetGo(logging.ERROR)
    logging.getLogger("autopar").addHandler(handler)
    autopar.init(step_timeout_s=3)  # steps that do not hang end within it on a busy machine as well
    said = ""
    try:
        step = autopar.parallelize(hanging, method=two_stages(), devices=jax.devices()[:2])
        fit(step, mlp_params(), batches, num_steps=3)
    except autopar.StepTimeout as error:  # where JAX started all instructions, this thread waits for them and says so
        said = str(error)
    finally:
        let_go.set()
        autopar.init()
        logging.getLogger("autopar").removeHandler(handler)
    watched = "Step 2 has been started for 3 s. The first instruction that has not ended is task "
    assert watched in caplog.text or "The first instruction that has not ended is task F0.m0 on mesh 0." in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_loss": "stop"}, "on_bad_loss is 'stop'. Choose one of 'ignore', 'warn', 'raise', 'restore'"),
        ({"on_bad_loss": "restore"}, "on_bad_loss='restore' needs a checkpoint_dir"),
        ({"spike_deviations": 0}, "spike_deviations is 0"),
        ({"straggler_every": 0}, "straggler_every is 0"),
        ({"on_failure": "retry"}, "on_failure is 'retry'. Choose one of 'raise', 'restart'"),
        ({"on_failure": "restart"}, "on_failure='restart' needs a checkpoint_dir"),
        ({"num_steps": None}, "Give num_steps"),
        ({"num_steps": -1}, "num_steps is -1; at least 0"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0; at least 1"),
        ({"max_failures": -1}, "max_failures is -1"),
        ({"batches": 3}, "batches is a int"),
        ({"batches": [], "num_steps": 3}, "batches ended after 0 steps, num_steps is 3"),
        ({"batches": [draw(0)] * 2}, "batches ended after 2 steps, num_steps is 4"),
        ({"step": train_step}, "given a function as its step"),
    ],
)
def test_options_that_contradict_each_other_are_refused(step, options, message):
    options = {"step": step, "state": mlp_params(), "batches": draw, "num_steps": 4} | options
    with pytest.raises(InvalidArgument, match=message):
        fit(**options)


def test_a_step_that_returns_no_metrics_is_refused():
    step = autopar.parallelize(
        lambda params, batch: jax.tree.map(jnp.negative, params), method=autopar.DataParallel(), batch_argnums=1
    )
    with pytest.raises(InvalidArgument, match=r"fit trains steps that return \(state, metrics\)"):
        fit(step, mlp_params(), draw, num_steps=1)


def test_batches_are_kept_until_they_are_forgotten_and_given_again():
    iterator = NumberedBatches(iter("abcdef"), 1, replays=True)
    assert [iterator.get(i) for i in (1, 2, 3, 1, 2, 3)] == list("bcdbcd")
    iterator.forget_before(3)
    assert [iterator.get(i) for i in (3, 4)] == list("de")
    with pytest.raises(InvalidArgument, match="batches before step 3 were given out"):
        iterator.get(2)
    with pytest.raises(StopIteration):
        iterator.get(6)
    listed = NumberedBatches(list("abcdef"), 0, replays=True)
    assert [listed.get(i) for i in (0, 1, 2)] == list("abc")
    listed.forget_before(3)
    assert [listed.get(i) for i in (1, 2, 3)] == list("bcd")
    with pytest.raises(InvalidArgument, match="checkpoint is of step 9, but there are only 6 batches"):
        NumberedBatches("abcdef", 9, replays=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Four processes of two devices each."""
    pytest.importorskip("ray")
    autopar.init(cluster="ray", num_hosts=4, devices_per_host=2)
    yield
    autopar.shutdown()


def kill(process: int) -> None:
    session = current_session()
    assert session is not None
    os.kill(session.reports[process].pid, signal.SIGKILL)


def pipelined() -> autopar.Step:
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    return autopar.parallelize(train_step, method=method, donate_argnums=0)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_processes_that_die_are_replaced_and_the_losses_are_those_of_an_undisturbed_run(tmp_path):
    _, undisturbed = fit(pipelined(), mlp_params(), draw, num_steps=10)
    to_kill = itertools.chain([2], itertools.repeat(None))
    told: list[int] = []

    def on_step(number: int, metrics: Any) -> None:
        told.append(number)
        if number == 6 and (process := next(to_kill)) is not None:
            kill(process)

    _, history = fit(
        pipelined(),
        mlp_params(),
        (draw(i) for i in range(10)),
        checkpoint_dir=tmp_path,
        checkpoint_every=4,
        on_failure="restart",
        on_step=on_step,
    )
    assert losses_of(history) == losses_of(undisturbed)
    np.testing.assert_allclose(losses_of(history), plain_losses(10)[1], rtol=1e-5)
    assert told == list(range(10))
    assert Checkpoints(tmp_path).latest() == 10


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_trainings_on_several_threads_share_a_cluster_and_its_recovery(tmp_path):
    _, undisturbed = fit(pipelined(), mlp_params(), draw, num_steps=10)
    to_kill = iter([1])

    def on_step(number: int, metrics: Any) -> None:
        if number == 5 and (process := next(to_kill, None)) is not None:
            kill(process)

    def train(number: int) -> list[float]:
        options = {"checkpoint_dir": tmp_path / str(number), "checkpoint_every": 1, "on_failure": "restart"}
        return losses_of(fit(pipelined(), mlp_params(), draw, num_steps=10, on_step=on_step, **options)[1])

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(train, range(3)))
    assert found == [losses_of(undisturbed)] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_process_that_dies_before_there_is_a_checkpoint_costs_no_step(tmp_path):
    kill(1)  # the driver finds out when it loads the step
    _, history = fit(pipelined(), mlp_params(), draw, num_steps=4, checkpoint_dir=tmp_path, on_failure="restart")
    np.testing.assert_allclose(losses_of(history), plain_losses(4)[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_failure_is_raised_unless_asked_otherwise_and_another_number_of_hosts_goes_on(tmp_path):
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    params, _ = fit(step, mlp_params(), draw, num_steps=3, checkpoint_dir=tmp_path)
    saved = jax.tree.map(np.array, params)
    kill(1)
    with pytest.raises(HostLost):
        fit(step, params, draw, num_steps=50)
    assert issubclass(HostLost, ClusterFailed)
    restart(3)
    params, history = fit(step, mlp_params(), draw, num_steps=4, checkpoint_dir=tmp_path)
    assert step.all_compiled()[0].plan.num_devices == 6
    assert_same(Checkpoints(tmp_path).restore(like=step, step=3)[1], saved)
    np.testing.assert_allclose(losses_of(history), plain_losses(4)[1][3:], rtol=1e-5)
