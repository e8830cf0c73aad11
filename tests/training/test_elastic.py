"""`fit(elastic=)` trains on as hosts are lost, leave and join: no batch is skipped, no step counts twice."""

import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import DeviceKind
from autopar.hardware.machine import register_machine
from autopar.runtime.distributed.handover import shards_here
from autopar.runtime.distributed.session import RaySession
from autopar.session import ray_session, restart
from autopar.training.checkpoints import Checkpoints
from autopar.training.fit import fit
from tests import small_steps
from tests.small_steps import mlp_params, sgd, tanh_loss
from tests.training.test_fit import draw, losses_of, plain_losses, train_step

KINDS = ("one cpu", "other cpu")

# Ray forks its processes beside JAX's threads; they become other programs at once.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.mark.parametrize("elastic", [3, (1,), (0, 2), (2, 1), (1, 2, 3), (1, 2.0), (True, 2), "12"])
def test_range_of_hosts_that_is_none_is_refused(elastic):
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    with pytest.raises(InvalidArgument, match=r"it must be the least and the largest number of hosts, such as"):
        fit(step, mlp_params(), draw, num_steps=2, elastic=elastic)


def test_elastic_training_and_leaving_hosts_need_a_ray_cluster(tmp_path):
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    with pytest.raises(InvalidArgument, match=r"elastic=\(1, 2\) needs processes that a driver can start and end"):
        fit(step, mlp_params(), draw, num_steps=2, elastic=(1, 2), checkpoint_dir=tmp_path)
    with pytest.raises(InvalidArgument, match="No Ray cluster is in use"):
        autopar.host_leaves("10.0.0.7", in_s=60)
    for host, in_s, message in ((7, 60, "host is 7"), ("here", 0, "in_s is 0"), ("here", "soon", "in_s is 'soon'")):
        with pytest.raises(InvalidArgument, match=message):
            autopar.host_leaves(host, in_s=in_s)  # type: ignore[arg-type]


class Nodes:
    """A Ray cluster on this machine whose nodes, with room for one process each, come and go."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.there = [self.add() for _ in range(count)]
        autopar.init(cluster="ray", address=self.cluster.address, num_hosts=count, devices_per_host=2)

    def fill(self, count: int) -> None:
        """So many nodes with processes, as at the start."""
        if ray_session().num_processes != count:
            for node in [node for node in self.there if node.node_id in ray_session().hosts.leaving]:
                self.remove(node)
            self.there += [self.add() for _ in range(count - len(self.there))]
            restart(count)

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1)

    def of(self, process: int) -> Any:
        """The node of a process."""
        name = ray_session().hosts.node_names[process]
        return next(node for node in self.there if node.node_id == name)

    def remove(self, node: Any) -> None:
        self.there.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def wait_for_death(actor: Any) -> None:
    """Return when a process answers no more."""
    ray = ray_session().hosts.ray
    with suppress(ray.exceptions.RayError):
        while True:
            ray.get(actor.run_beside.remote(shards_here, []), timeout=10)
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    pytest.importorskip("ray")
    autopar.shutdown()
    os.environ.setdefault("RAY_worker_niceness", "0")  # or processes wait for whatever else runs here
    made = Nodes(2)
    yield made
    autopar.shutdown()
    made.cluster.shutdown()


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    """Two of them."""
    cluster.fill(2)
    return cluster


@pytest.mark.slow
def test_hosts_that_no_plan_can_use_and_hosts_that_are_not_there_are_refused(nodes, tmp_path):
    options = {"num_steps": 2, "checkpoint_dir": tmp_path}
    stages = autopar.parallelize(train_step, method=autopar.PipelineParallel(num_stages=4, num_microbatches=2))
    with pytest.raises(InvalidArgument, match=r"elastic=\(1, 2\): there is no plan for 1 hosts of 2 devices: .*stage"):
        fit(stages, mlp_params(), draw, elastic=(1, 2), **options)
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    with pytest.raises(InvalidArgument, match=r"elastic=\(3, 4\): the cluster has 2 hosts now"):
        fit(step, mlp_params(), draw, elastic=(3, 4), **options)
    with pytest.raises(InvalidArgument, match=r"elastic=\(1, 2\) needs a checkpoint_dir"):
        fit(step, mlp_params(), draw, num_steps=2, elastic=(1, 2))
    with pytest.raises(InvalidArgument, match=r"The Ray cluster has no host '10\.9\.9\.9'; it has"):
        autopar.host_leaves("10.9.9.9", in_s=30)


@pytest.mark.slow
def test_training_goes_on_through_a_loss_a_return_and_a_leave_without_storage(nodes, tmp_path, caplog):
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    hosts: list[int] = []
    leaving: list[Any] = []
    happens = [
        (2, lambda: nodes.remove(nodes.of(0))),
        (1, lambda: nodes.there.append(nodes.add())),
        (2, lambda: (leaving.append(nodes.of(0)), autopar.host_leaves(leaving[0].node_id, in_s=60))),
        (1, lambda: None),
    ]

    def on_step(number: int, metrics: Any) -> None:
        time.sleep(0.02)
        if not hosts or hosts[-1] != ray_session().num_processes:
            hosts.append(ray_session().num_processes)
            expected, event = happens[len(hosts) - 1]
            assert hosts[-1] == expected
            event()

    def batches() -> Iterator[Any]:
        yield from itertools.takewhile(lambda _: len(hosts) < len(happens), map(draw, range(10_000)))

    with caplog.at_level(logging.WARNING, logger="autopar"):
        params, history = fit(
            step,
            mlp_params(),
            batches(),
            checkpoint_dir=tmp_path,
            checkpoint_every=100_000,
            on_step=on_step,
            elastic=(1, 2),
        )
    assert hosts == [2, 1, 2, 1]
    assert leaving[0].node_id not in ray_session().hosts.node_names
    assert Checkpoints(tmp_path).steps() == [0, len(history)]  # the first state, which was never needed, and the last
    assert caplog.text.count("with the state that they held") == 3
    expected, losses = plain_losses(len(history))
    np.testing.assert_allclose(losses_of(history), losses, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6), params, expected)


@pytest.mark.slow
def test_state_that_is_lost_with_its_only_holder_comes_from_the_last_checkpoint(nodes, tmp_path, caplog):
    step = autopar.parallelize(train_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=2))

    def on_step(number: int, metrics: Any) -> None:
        if number == 5 and ray_session().num_processes == 2:
            lost = ray_session().hosts.actors[1]
            nodes.remove(nodes.of(1))
            assert ray_session().hosts.room() == 1  # though Ray itself takes the node for alive for some time
            wait_for_death(lost)  # a process outlives its node for a while, and could train to the end

    _, history = fit(
        step,
        mlp_params(),
        draw,
        num_steps=8,
        checkpoint_dir=tmp_path,
        checkpoint_every=4,
        on_step=on_step,
        elastic=(1, 2),
    )
    assert step.all_compiled()[0].plan.num_devices == 2
    assert "with the state that they held" not in caplog.text
    assert "is gone; it goes on from a checkpoint" in caplog.text
    np.testing.assert_allclose(losses_of(history), plain_losses(8)[1], rtol=1e-5)


@pytest.fixture
def two_kinds(nodes: Nodes, own_machines: None, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Two hosts that say that their devices are of two kinds, with compute of their own."""
    for kind in KINDS:
        register_machine(replace(small_steps.SEPARATE, name=kind.replace(" ", "-"), kind=kind))
    join = RaySession._join

    def joined(session: RaySession) -> Any:
        return [replace(each, device_kind=DeviceKind(KINDS[number])) for number, each in enumerate(join(session))]

    monkeypatch.setattr(RaySession, "_join", joined)
    restart(2)
    return nodes


def large_batch(number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """So many rows that a second host is worth its parameters."""
    draw = np.random.default_rng(number)
    return draw.normal(size=(4096, 64)).astype(np.float32), draw.normal(size=(4096, 64)).astype(np.float32)


def in_lanes(params: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    params, loss = sgd(tanh_loss)(params, batch)
    return params, {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "from_storage"), [(1, False), (0, True)], ids=["other lane", "lane with the state"])
def test_training_in_lanes_goes_on_when_the_host_of_one_is_lost(two_kinds, tmp_path, caplog, lost, from_storage):
    step = autopar.parallelize(in_lanes, method=autopar.Auto(num_microbatches=4))
    params = [small_steps.draw(n, 64, 64) for n in range(4)]
    shares: list[tuple[int, ...]] = []

    def on_step(number: int, metrics: Any) -> None:
        shares.append(step.all_compiled()[-1].plan.shares)
        if number == 3 and len(shares) == 4:
            actor = ray_session().hosts.actors[lost]
            two_kinds.remove(two_kinds.of(lost))
            wait_for_death(actor)

    with caplog.at_level(logging.WARNING, logger="autopar"):
        found, history = fit(
            step,
            params,
            map(large_batch, range(8)),
            checkpoint_dir=tmp_path,
            checkpoint_every=100,
            on_step=on_step,
            elastic=(1, 2),
        )
    assert shares[:4] == [(2, 2)] * 4 and set(shares[4:]) == {()}
    assert ("goes on from a checkpoint" in caplog.text) == from_storage
    assert ("with the state that they held" in caplog.text) != from_storage
    expected, losses, plain = params, [], jax.jit(in_lanes)
    for number in range(8):
        expected, metrics = plain(expected, large_batch(number))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses_of(history), losses, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6), found, expected)
