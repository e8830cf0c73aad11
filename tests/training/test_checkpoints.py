"""Checkpoints hold the same bits whatever plan, runtime and number of devices wrote them, or read them."""

import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from autopar.errors import AutoparError, CheckpointFailed, InvalidArgument
from autopar.runtime.digests import DIGESTS
from autopar.session import current_session
from autopar.training.checkpoints import Checkpoints
from autopar.training.create_state import create_state
from tests.compiler.planning.demands.test_groups import cluster as mixed_cluster
from tests.small_steps import ArrayLayer, mlp_batch, mlp_params, mlp_step
from tests.training.test_state import BATCH, METHODS, assert_close, assert_same, draw_batch, init_fn, train_step

# Of the reads of a damaged checkpoint Orbax leaves the others under way when one fails: they end without a listener.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def created(method: Any, num_devices: int = 8, seed: int = 3) -> tuple[autopar.Step, Any]:
    step = autopar.parallelize(train_step, method=method, devices=jax.devices()[:num_devices])
    return step, create_state(init_fn, jax.random.key(seed), like=step, batch=BATCH)


def plain(seed: int = 3) -> Any:
    return jax.jit(init_fn)(jax.random.key(seed))


def on_one_device(state: Any) -> Any:
    """Return the tree that plain JAX restores into."""
    there = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), state)


def restored_by_orbax(path: Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, on_one_device(like))


@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")  # three devices
@pytest.mark.parametrize("name", ["pipeline", "circular", "shard"])
def test_a_checkpoint_is_read_by_plain_jax_and_by_other_plans_on_fewer_devices(tmp_path, name):
    _, state = created(METHODS[name])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state)
    checkpoints.wait()
    assert_same(restored_by_orbax(tmp_path / "7", state), state)
    step, _ = created(autopar.DataParallel(), num_devices=3, seed=0)
    number, found = checkpoints.restore(like=step)
    assert number == 7
    assert_same(found, state)
    assert found["params"]["in"].sharding.device_set == set(jax.devices()[:3])


def test_a_state_over_two_kinds_of_devices_goes_on_without_one_of_them_bit_for_bit(tmp_path):
    there = mixed_cluster(bandwidth=1e9)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    on_both = autopar.parallelize(train_step, method=method, cluster=there)
    plan = on_both.trace(plain(), BATCH).plan().plan
    assert [mesh.machine for mesh in plan.meshes] == ["fast", "slow"]
    both, state = created(plan, num_devices=4)
    for _ in range(3):
        state, _ = both(state, draw_batch(0))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state)
    checkpoints.wait()
    without = autopar.parallelize(train_step, method=autopar.Auto(), cluster=there.groups[0])
    planned = without.trace(plain(), BATCH).plan().plan
    alone, _ = created(planned, num_devices=2, seed=0)
    number, found = checkpoints.restore(like=alone)
    assert number == 3 and {device for leaf in jax.tree.leaves(found) for device in leaf.sharding.device_set} == set(
        jax.devices()[:2]
    )
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert bits(got) == bits(wanted)


def bits(array: Any) -> bytes:
    words = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return np.asarray(words).tobytes()


def test_what_plain_jax_saved_is_restored_where_a_plan_wants_it(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "4", plain())
    step, state = created(METHODS["pipeline"], seed=0)
    number, found = Checkpoints(tmp_path).restore(like=step)
    assert number == 4
    assert_same(found, plain())
    assert [a.sharding for a in jax.tree.leaves(found)] == [a.sharding for a in jax.tree.leaves(state)]
    _, metrics = step(found, draw_batch(0))
    np.testing.assert_allclose(metrics["loss"], jax.jit(train_step)(plain(), draw_batch(0))[1]["loss"], rtol=1e-5)


def test_nodes_that_take_only_arrays_are_restored(tmp_path):
    state = [ArrayLayer(**layer) for layer in mlp_params()]
    step = autopar.parallelize(mlp_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=2))
    state, _ = step(state, mlp_batch())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    zeros = jax.tree.map(jnp.zeros_like, state)
    for like in (step, zeros):
        assert_same(checkpoints.restore(like=like)[1], state)
    _, found = checkpoints.restore(like=zeros, only=r"0\.")
    assert_same(found, [state[0], zeros[1]])
    with pytest.raises(InvalidArgument, match="is missing"):
        create_state(lambda: state[:1], like=step)


def with_new_head(state: Any, rows: int = 3) -> Any:
    """Return a state of other numbers, with another head and a part that no checkpoint has."""
    params = {**jax.tree.map(jnp.zeros_like, state["params"]), "out": jnp.full((rows, 2), 7.0), "bias": jnp.ones(rows)}
    return {**jax.tree.map(jnp.zeros_like, state), "params": params}


def test_some_arrays_are_restored_by_name_and_the_others_stay(tmp_path):
    _, state = created(METHODS["pipeline"])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state)
    like = with_new_head(plain())
    names = sorted(set(like["params"]) - {"out", "bias"})
    for only in (rf"params\.({'|'.join(names)})(\.|$)", [rf"state\.params\.{name}" for name in names]):
        number, found = checkpoints.restore(like=like, only=only)
        assert number == 7
        assert_same({n: found["params"][n] for n in names}, {n: state["params"][n] for n in names})
        rest = {key: value for key, value in found.items() if key != "params"}
        assert_same(rest, {key: value for key, value in like.items() if key != "params"})
        assert_same(found["params"]["out"], like["params"]["out"])


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("params", r"holds another state: params\.bias is not in it"),
        (r"params\.out", r"holds float32\[.*\] at params\.out, where float32\[3, 2\] is required"),
        ("encoder", r"only has 'encoder', which finds no array of the state. There are "),
        ("(", "only has .*, which is no regular expression: missing"),
    ],
)
def test_arrays_that_cannot_be_restored_by_name_are_named(tmp_path, only, message):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, plain())
    with pytest.raises(InvalidArgument, match=message):
        checkpoints.restore(like=with_new_head(plain()), only=only)
    with pytest.raises(InvalidArgument, match="only leaves the other arrays as they are"):
        checkpoints.restore(like=jax.eval_shape(lambda: plain()), only="params")


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    step = autopar.parallelize(train_step, method=METHODS["pipeline"], donate_argnums=0)
    state = create_state(init_fn, jax.random.key(3), like=step, batch=BATCH)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state)
    after, _ = step(state, draw_batch(0))
    assert state["params"]["in"].is_deleted()
    checkpoints.save(1, after)
    step(after, draw_batch(1))
    checkpoints.wait()
    assert_same(checkpoints.restore(like=plain(), step=0)[1], plain())
    expected = autopar.parallelize(train_step, method=METHODS["pipeline"])(plain(), draw_batch(0))[0]
    assert_same(checkpoints.restore(like=plain(), step=1)[1], expected)


@pytest.mark.parametrize(("keep", "left"), [(2, [3, 20]), (1, [20]), (None, [1, 2, 3, 20])])
def test_the_newest_checkpoints_are_kept(tmp_path, keep, left):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    assert checkpoints.latest() is None
    for step in (1, 2, 3, 20):
        checkpoints.save(step, {"w": jnp.full(3, step), "python": 2.5})
    checkpoints.wait()
    assert checkpoints.steps() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, left))
    number, found = checkpoints.restore(like={"w": jnp.zeros(3, int), "python": 0.0})
    assert (number, found["python"]) == (20, 2.5)
    np.testing.assert_array_equal(found["w"], [20] * 3)


def damaged(path: Path) -> None:
    shutil.rmtree(path / "d")
    for process in path.glob("ocdbt.process_*"):
        shutil.rmtree(process)


@pytest.mark.parametrize("damage", [damaged, lambda path: (path / "_METADATA").write_text("{")])
def test_a_newest_checkpoint_that_cannot_be_read_gives_way_to_the_one_before(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.full(64, step)})
    checkpoints.wait()
    damage(tmp_path / "2")
    with pytest.raises(CheckpointFailed, match="cannot be read"):
        checkpoints.restore(like={"w": jnp.zeros(64, int)}, step=2)
    with pytest.warns(UserWarning, match=r"/2 is damaged: .* set aside as 2.damaged, and that of step 1 is used"):
        number, found = checkpoints.restore(like={"w": jnp.zeros(64, int)})
    assert number == 1
    np.testing.assert_array_equal(found["w"], [1] * 64)
    assert checkpoints.steps() == [1]
    checkpoints.save(2, {"w": jnp.full(64, 22)})
    assert checkpoints.restore(like={"w": jnp.zeros(64, int)})[0] == 2


def cut_short(path: Path, *, only: str = "") -> None:
    """Leave files as a storage does that said it had written all: it lost the second half of each file, or of one."""
    for file in path.rglob("*"):
        if file.is_file() and only in file.name:
            os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("lost", [cut_short, partial(cut_short, only="_METADATA"), partial(cut_short, only="digests")])
def test_storage_that_had_not_written_what_it_said_is_found_out(tmp_path, lost):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.full(64, step)})
    checkpoints.wait()
    lost(tmp_path / "2")
    with pytest.warns(UserWarning, match=r"/2 is damaged: .* set aside as 2.damaged, and that of step 1 is used"):
        number, found = Checkpoints(tmp_path).restore(like={"w": jnp.zeros(64, int)})
    assert number == 1 and np.array_equal(found["w"], [1] * 64)


def test_a_checkpoint_that_was_being_written_when_its_process_ended_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(3)})
    checkpoints.wait()
    ended = subprocess.Popen(["true"])
    ended.wait()
    shutil.copytree(tmp_path / "1", tmp_path / f"2.writing-{socket.gethostname()}-{ended.pid}")
    shutil.copytree(tmp_path / "1", tmp_path / f"2.writing-{socket.gethostname()}-{os.getppid()}")
    shutil.copytree(tmp_path / "1", tmp_path / "2.writing-elsewhere-1.orbax-checkpoint-tmp")
    (tmp_path / "3").mkdir()
    (tmp_path / "0.removed").mkdir()
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(like={"w": jnp.zeros(3)})[0] == 1
    checkpoints.save(2, {"w": jnp.ones(3)})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    # What processes that live, or those of other hosts may be writing still is left alone.
    left = {path.name for path in tmp_path.iterdir()} - {"1", "2", "3"}
    assert left == {f"2.writing-{socket.gethostname()}-{os.getppid()}", "2.writing-elsewhere-1.orbax-checkpoint-tmp"}


def test_threads_that_save_at_once_write_their_own_checkpoints(tmp_path):
    count, together = 4, threading.Barrier(4)

    def save(number: int) -> None:
        checkpoints = Checkpoints(tmp_path / str(number))
        together.wait()
        for step in range(3):
            checkpoints.save(step, {"w": np.full(8, 10.0 * number + step, np.float32)})
        checkpoints.wait()

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(save, range(count)))
    for number in range(count):
        step, state = Checkpoints(tmp_path / str(number)).restore(like={"w": np.zeros(8, np.float32)})
        assert step == 2
        np.testing.assert_array_equal(state["w"], np.full(8, 10.0 * number + 2))


def test_every_flipped_bit_is_noticed_and_the_predecessor_is_used(tmp_path):
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32), "i": jnp.arange(1000)}
    checkpoints = Checkpoints(tmp_path / "run", keep=None)
    for step in (1, 2):
        checkpoints.save(step, state)
    checkpoints.wait()
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    files = sorted(path for path in (tmp_path / "run" / "2").rglob("*") if path.is_file())
    draw = random.Random(1)
    for path in files:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "kept", tmp_path / "run")
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(data))
        again = Checkpoints(tmp_path / "run")
        with pytest.warns(UserWarning, match=r"run/2 is damaged: .*(not those|cannot be read|missing)"):
            assert again.latest_sound() == 1
        number, found = again.restore(like=state)
        assert number == 1
        assert_same(found, state)


def test_without_verification_the_digests_are_not_read(tmp_path):
    state = {"w": jnp.ones(3)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    (tmp_path / "1" / DIGESTS).write_text("{")
    assert Checkpoints(tmp_path, verify=False).restore(like=state)[0] == 1
    with pytest.raises(CheckpointFailed, match=r"No checkpoint in .* can be used: 1: .*cannot be read.*from a copy"):
        Checkpoints(tmp_path).latest_sound()
    assert checkpoints.steps() == [1]


def test_digests_of_another_format_are_refused_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(3)})
    checkpoints.wait()
    (tmp_path / "1" / DIGESTS).rename(tmp_path / "1" / "autopar-digests-7.json")
    with pytest.raises(InvalidArgument, match=r"the format autopar-digests-7.json, this release reads .*verify=False"):
        Checkpoints(tmp_path).restore(like={"w": jnp.ones(3)})


def test_two_writers_never_mix_their_files(tmp_path):
    one, other = Checkpoints(tmp_path), Checkpoints(tmp_path)
    one.save(1, {"w": jnp.full(3, 1)})
    other.save(2, {"w": jnp.full(3, 2)})
    other.wait()
    one.wait()
    assert one.steps() == [1, 2]
    states = {"one": {"w": jnp.full(3, 5)}, "other": {"w": jnp.full(3, 6)}}
    one.save(5, states["one"])
    other.save(5, states["other"])
    refused = []
    for name, checkpoints in (("one", one), ("other", other)):
        try:
            checkpoints.wait()
        except CheckpointFailed as error:
            refused.append(name)
            assert "/5 cannot be written" in str(error)
    [name] = states.keys() - set(refused)
    assert_same(one.restore(like=states["one"], step=5)[1], states[name])
    assert one.latest_sound() == 5 and sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "5"]


# Saves states of one number each, and says when each is complete.
WRITER = """
import itertools, sys
import jax.numpy as jnp
import autopar
checkpoints = autopar.Checkpoints(sys.argv[1], keep=2)
for step in itertools.count((checkpoints.latest() or 0) + 1):
    checkpoints.save(step, {"w": jnp.full((64, 64), step), "b": jnp.full(3, step)})
    checkpoints.wait()
    print(step, flush=True)
"""


class Killed(BaseException):
    """The end of a process."""


def test_a_save_that_ends_at_any_point_leaves_the_checkpoint_before_or_its_own(tmp_path, monkeypatch):
    """Every digest, write, sync and rename of a save in turn is the one at which it ends."""
    state = {"w": jnp.arange(6.0), "count": 3}
    first = Checkpoints(tmp_path)
    first.save(1, state)
    first.wait()
    left = [0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return function(*arguments, **options)

        return call

    for module, name in ((hashlib, "file_digest"), (json, "dump"), (os, "fsync"), (Path, "rename")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    monkeypatch.setattr("autopar.training.checkpoints.discard", lambda written: None)  # it was killed
    for point in itertools.count(1):
        after = {"w": state["w"] + point, "count": point}
        left[0] = point
        with suppress(Killed, AutoparError):
            writer = Checkpoints(tmp_path)
            writer.save(2, after)
            writer.wait()
        reached, left[0] = left[0], 0
        last = Checkpoints(tmp_path).latest_sound()  # 2 once it has its name
        found = Checkpoints(tmp_path).restore(like=state)
        assert_same(found[1], jax.tree.map(jnp.asarray, after if last == 2 else state))
        if reached > 0:  # nothing was left to end
            break
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
    assert last == 2 and point > 5


@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 5), marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_at_any_point_leaves_its_last_complete_checkpoint(tmp_path, seed):
    for number in seed if isinstance(seed, range) else [seed]:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        complete = int(writer.stdout.readline())
        time.sleep(random.Random(number).uniform(0, 0.3))
        os.kill(writer.pid, signal.SIGKILL)
        complete = max([complete, *map(int, writer.stdout.read().split())])
        writer.wait()
        found, state = Checkpoints(tmp_path, keep=2).restore(
            like={"w": jnp.zeros((64, 64), int), "b": jnp.zeros(3, int)}
        )
        assert found in (complete, complete + 1)
        assert (np.asarray(state["w"]) == found).all() and (np.asarray(state["b"]) == found).all()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.zeros((4, 3))}, r"holds float32\[3\] at w, where float32\[4, 3\] is required"),
        ({"w": jnp.zeros(3, jnp.bfloat16)}, r"holds float32\[3\] at w, where bfloat16\[3\]"),
        ({"w": jnp.zeros(3), "b": jnp.zeros(3)}, r"another state: b is not in it; it has 1 arrays, 2 are"),
        ({}, r"it also has w"),
    ],
)
def test_a_foreign_checkpoint_is_refused_by_key_and_shape(tmp_path, like, message):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(3)})
    with pytest.raises(InvalidArgument, match=message):
        checkpoints.restore(like=like)


def test_what_cannot_be_asked_for_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="no complete checkpoint"):
        checkpoints.restore(like={})
    with pytest.raises(InvalidArgument, match=r"There is no checkpoint .*/5"):
        checkpoints.restore(like={}, step=5)
    with pytest.raises(InvalidArgument, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)
    checkpoints.save(1, {"w": jnp.zeros(3)})
    checkpoints.wait()
    with pytest.raises(InvalidArgument, match="there already"):
        checkpoints.save(1, {"w": jnp.zeros(3)})


@pytest.fixture
def files_of_at_most_100_kb() -> Iterator[None]:
    """Stands for a full disk: the system refuses to write on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_error_and_leaves_the_last_good_checkpoint(tmp_path, files_of_at_most_100_kb):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"w": jnp.ones(3)})
    noise = jax.random.normal(jax.random.key(0), (100_000,))
    with pytest.raises(CheckpointFailed, match=r"/2 cannot be written: .* The last good one is .*/1\. Make room"):
        checkpoints.save(2, {"w": noise})
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(like={"w": jnp.zeros(3)})[0] == 1
    checkpoints.save(3, {"w": jnp.ones(3)})
    checkpoints.wait()
    assert checkpoints.steps() == [3]


def test_a_directory_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match=r"cannot be written: .* There is no earlier one"):
        Checkpoints(tmp_path / "file" / "runs").save(1, {"w": jnp.ones(3)})


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Four processes of two devices each."""
    pytest.importorskip("ray")
    autopar.init(cluster="ray", num_hosts=4, devices_per_host=2)
    yield
    autopar.shutdown()


def load_x(index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """The first array of `draw_batch(5)`, by ranges."""
    return draw_batch(5)["x"][index]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", ["pipeline", "circular"])
def test_states_and_batches_are_made_saved_and_restored_in_the_processes_of_a_cluster(tmp_path, name):
    step = autopar.parallelize(train_step, method=METHODS[name], donate_argnums=0)
    state = create_state(init_fn, jax.random.key(3), like=step, batch=BATCH)
    assert all(isinstance(leaf, autopar.DistributedArray) for leaf in jax.tree.leaves(state))
    assert_close(state, plain())
    saved = jax.tree.map(np.asarray, {"params": state["params"]})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state)
    state, metrics = step(state, autopar.shard_batch({"x": load_x, "y": draw_batch(5)["y"]}, like=step))
    expected, expected_metrics = jax.jit(train_step)(plain(), draw_batch(5))
    np.testing.assert_allclose(float(metrics["loss"]), expected_metrics["loss"], rtol=1e-5)
    checkpoints.save(1, state)
    checkpoints.wait()
    assert checkpoints.steps() == [0, 1]

    # Plain JAX, another plan in this process, and the cluster itself read the same bits.
    restored = restored_by_orbax(tmp_path / "0", plain())
    assert_close(restored, plain())
    assert_same({"params": restored["params"]}, saved)
    here, _ = created(autopar.Zero(stage=3), num_devices=2, seed=0)
    assert_same(checkpoints.restore(like=here)[1], state)
    again = checkpoints.restore(like=step)[1]
    assert_same(again, state)
    assert [leaf.placed for leaf in jax.tree.leaves(again)] == [leaf.placed for leaf in jax.tree.leaves(state)]
    _, metrics = step(again, draw_batch(6))
    np.testing.assert_allclose(
        float(metrics["loss"]), jax.jit(train_step)(expected, draw_batch(6))[1]["loss"], rtol=1e-4
    )

    # And the cluster reads what this process wrote.
    local = Checkpoints(tmp_path / "local")
    local.save(2, created(METHODS["shard"], seed=4)[1])
    assert_same(local.restore(like=step)[1], plain(4))
    assert_same(local.restore(like=state)[1], plain(4))
    part = local.restore(like=state, only="params")[1]
    assert_same(part["params"], plain(4)["params"])
    assert part["moments"] is not state["moments"] and part["key"] is state["key"]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_prefetched_batches_lie_on_the_cluster_when_the_step_is_called():
    step = autopar.parallelize(train_step, method=METHODS["pipeline"])
    state = create_state(init_fn, jax.random.key(3), like=step, batch=BATCH)
    expected = plain()
    for seed, batch in enumerate(autopar.prefetch((draw_batch(seed) for seed in range(3)), like=step)):
        assert all(isinstance(leaf, autopar.DistributedArray) for leaf in batch.values())
        assert_same(batch, jax.tree.map(jnp.asarray, draw_batch(seed)))
        state, metrics = step(state, batch)
        expected, expected_metrics = jax.jit(train_step)(expected, draw_batch(seed))
        np.testing.assert_allclose(float(metrics["loss"]), expected_metrics["loss"], rtol=1e-4)
    with pytest.raises(InvalidArgument, match=r"returned float64\[2, 2\]"):
        autopar.shard_batch({"x": lambda index: np.zeros((2, 2)), "y": draw_batch(0)["y"]}, like=step)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_processes_skip_a_checkpoint_that_cannot_be_read(tmp_path):
    step = autopar.parallelize(train_step, method=METHODS["pipeline"])
    state = create_state(init_fn, jax.random.key(3), like=step, batch=BATCH)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    damaged(tmp_path / "2")
    with pytest.warns(UserWarning, match="set aside as 2.damaged"):
        assert checkpoints.restore(like=step)[0] == 1
    with pytest.raises(InvalidArgument, match=r"another state: w is not in it"):
        checkpoints.restore(like={"w": jnp.zeros(3)}, step=1)


def limit_files(host: Any, most_bytes: int) -> None:
    """In process 0, which writes this state: no file may become longer."""
    if host.world.process == 0:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if most_bytes < 0 else most_bytes, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_full_disk_of_one_process_is_one_error_and_the_next_checkpoint_is_good(tmp_path):
    def large_init(key: jax.Array) -> Any:
        return jax.random.normal(key, (8, 40_000))

    def large_step(state: Any, batch: Any) -> Any:
        return state + jnp.mean(batch), {}

    step = autopar.parallelize(large_step, method=autopar.ShardParallel(mesh_shape=(8,), axis_names=("data",)))
    batch = np.zeros((8, 4), np.float32)
    state = create_state(large_init, jax.random.key(0), like=step, batch=batch)
    session = current_session()
    assert session is not None
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    session.run_everywhere(limit_files, 100_000)
    with pytest.raises(CheckpointFailed, match=r"/2 cannot be written: .*process 0 on host .*/1\. Make room"):
        checkpoints.save(2, state)
        checkpoints.wait()
    session.run_everywhere(limit_files, -1)
    assert checkpoints.steps() == [1]
    checkpoints.save(3, state)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]
    assert_same(checkpoints.restore(like=step)[1], jax.jit(large_init)(jax.random.key(0)))
