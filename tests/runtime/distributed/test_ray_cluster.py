"""Processes by Ray: what keeps them from starting is said in Ray's own words, and what was taken is given back."""

import os
import signal

import jax
import numpy as np
import pytest

import autopar
from autopar import session
from autopar.errors import HostLost, InvalidArgument, PlanMismatch
from autopar.runtime.distributed.ray_cluster import RayOptions, start_hosts

ray = pytest.importorskip("ray")

pytestmark = [
    # Ray leaves sockets and files to the garbage collector, and forks processes that become other programs at once.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning"),
]


def test_a_cluster_that_cannot_be_joined_is_refused_with_what_ray_says():
    with pytest.raises(InvalidArgument, match=r"'nosuch://head' cannot be joined; Ray says: .*Module: nosuch"):
        start_hosts(RayOptions(address="nosuch://head"))


@pytest.fixture(scope="module")
def _joined_ray():
    os.environ.setdefault("RAY_worker_niceness", "0")  # or processes wait for whatever else runs here
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error")
    yield
    autopar.shutdown()
    ray.shutdown()


def groups_left():
    return [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


@pytest.mark.usefixtures("_joined_ray")
@pytest.mark.parametrize(
    ("runtime_env", "error", "message"),
    [
        ({"working_dir": "/no/such/directory"}, InvalidArgument, "/no/such/directory .*Correct the runtime_env"),
        ({"env_vars": {"JAX_ENABLE_X64": "perhaps"}}, HostLost, "did not start.*Ray says: (.|\n)*perhaps"),
    ],
    ids=["refused", "dies"],
)
def test_processes_that_do_not_start_leave_nothing_behind(runtime_env, error, message):
    with pytest.raises(error, match=message):
        start_hosts(RayOptions(num_hosts=1, runtime_env=runtime_env))
    assert ray.is_initialized()  # it was not ours
    assert not groups_left()


@pytest.mark.usefixtures("_joined_ray")
def test_processes_that_start_too_slowly_are_given_up_with_what_to_do():
    with pytest.raises(HostLost, match=r"within 0.01 s(.|\n)* longer start_timeout_s"):
        start_hosts(RayOptions(num_hosts=1, start_timeout_s=0.01))
    assert not groups_left()


@pytest.mark.usefixtures("_joined_ray")
def test_a_placement_group_with_too_few_bundles_is_refused_and_stays():
    group = ray.util.placement_group([{"CPU": 1}])
    with pytest.raises(InvalidArgument, match="has 1 bundles, 2 hosts were asked for"):
        start_hosts(RayOptions(num_hosts=2, placement_group=group))
    assert len(groups_left()) == 1
    ray.util.remove_placement_group(group)


@pytest.mark.slow
@pytest.mark.usefixtures("_joined_ray")
def test_a_restart_keeps_the_description_and_gives_back_processes_that_cannot_meet(tmp_path):
    described = autopar.Cluster(num_devices=4, machine=autopar.Cluster.named("p3.16xlarge").machine)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = {"num_hosts": 2, "devices_per_host": 2, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
    assert autopar.init(cluster=described, **options) == described
    step = autopar.parallelize(lambda state, batch: (state * 2, {}), method=autopar.DataParallel())
    arguments = np.ones(4, np.float32), np.ones((4, 1), np.float32)
    lost, _ = step(*arguments)
    checkpoints = autopar.Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(0, lost)
    checkpoints.wait()

    other = tmp_path / "numpy-0.0.1.dist-info"  # so that new processes seem to have another release
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    with pytest.raises(PlanMismatch, match=r"Process 0 has numpy 0\.0\.1"):
        session.restart()
    assert not groups_left()

    (other / "METADATA").unlink()
    other.rmdir()
    assert session.restart(1).cluster == described.with_devices(2)
    np.testing.assert_array_equal(jax.device_get(step(*arguments)[0]), [2, 2, 2, 2])
    with pytest.raises(InvalidArgument, match="shut down or restarted"):
        checkpoints.save(1, lost)
    with pytest.raises(InvalidArgument, match="lies on device 3 of a cluster, counted from 0; there are 2 now"):
        checkpoints.restore(like=lost)
    np.testing.assert_array_equal(checkpoints.restore(like=step)[1], [2, 2, 2, 2])
    autopar.shutdown()
    with pytest.raises(InvalidArgument, match="there are 0 now"):
        checkpoints.restore(like=lost)


def double(*arguments):
    step = autopar.parallelize(lambda state, batch: (state * 2, {}), method=autopar.DataParallel())
    return jax.device_get(step(*arguments)[0])


def use_devices(host):
    jax.devices()


@pytest.mark.slow
@pytest.mark.usefixtures("_joined_ray")
def test_spare_processes_take_the_places_of_lost_ones_and_new_ones_those_of_spares_that_cannot(caplog):
    arguments = np.ones(4, np.float32), np.ones((4, 1), np.float32)
    autopar.init(cluster="ray", num_hosts=1, devices_per_host=2)
    np.testing.assert_array_equal(double(*arguments), [2, 2, 2, 2])

    def pids():
        return {report.pid for report in session.ray_session().reports}

    def prepared():
        hosts = session.ray_session().hosts
        hosts.prepare_spares()
        hosts.prepare_spares()  # they are there already
        spares = {ray.get(spare.warm): spare.actor for spare in hosts.spares.waiting}
        assert len(spares) == 1
        assert not pids() & spares.keys()
        return spares

    spares = prepared()
    session.restart()
    assert pids() == spares.keys()
    np.testing.assert_array_equal(double(*arguments), [2, 2, 2, 2])

    spares = prepared()
    for dead in spares:
        os.kill(dead, signal.SIGKILL)
    session.restart()
    assert not pids() & spares.keys()

    spares = prepared()
    ray.get([actor.run.remote(use_devices) for actor in spares.values()])  # as many as it sees now, and not 2
    session.restart()
    assert not pids() & spares.keys()
    assert "Spare processes could not take the place of those lost" in caplog.text
    np.testing.assert_array_equal(double(*arguments), [2, 2, 2, 2])

    spares = prepared()
    autopar.shutdown()
    for actor in spares.values():
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.answer_ping.remote(), timeout=30)
