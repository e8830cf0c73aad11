"""Processes of a Ray cluster on cores of their own, for steps that are timed in turns.

A *place* is a core, and maybe a control group that may use a part of its time. `autopar calibrate` measures all places
at the same time, as they work later; every place is a host of one device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import autopar
from autopar.hardware.machine import Link

PERIOD_US = 20_000
"""Microseconds after which the quota of a control group begins anew."""
_FIRST_ROUNDS = 2
"""Steps that compile and fill caches, and are not counted."""


@contextmanager
def control_group(quota: float) -> Iterator[Path]:
    """Make a group of processes that together may use so much of the time of one core."""
    new = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup") / ("" if new else "cpu") / f"autopar-{os.getpid()}"
    group.mkdir()
    try:
        limits = {"cpu.max": f"{quota * PERIOD_US:.0f} {PERIOD_US}"}
        if not new:
            limits = {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{quota * PERIOD_US:.0f}"}
        for name, limit in limits.items():
            (group / name).write_text(limit)
        yield group
    finally:
        for _ in range(100):
            with suppress(OSError):  # the last processes may not have ended
                group.rmdir()
                break
            time.sleep(0.1)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A core, and a control group or None."""

    core: int
    group: Path | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let what is started meanwhile, and all that it starts, run here."""
        every = os.sched_getaffinity(0)
        os.sched_setaffinity(0, [self.core])
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            os.sched_setaffinity(0, every)
            if self.group is not None:
                (self.group.parent / "cgroup.procs").write_text(str(os.getpid()))


def calibrated(places: Mapping[str, Place], folder: Path) -> dict[str, autopar.Cluster]:
    """Return one device for each place as `autopar calibrate` measures it there, all at the same time."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    running: list[subprocess.Popen[bytes]] = []
    for name, place in places.items():
        command = [sys.executable, "-m", "autopar", "calibrate", "--json", str(folder / name)]
        with place.entered():
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    failed = sum(each.wait() != 0 for each in running)
    if failed:
        raise RuntimeError("autopar calibrate failed, as it says above")
    machines = {name: autopar.Cluster.load(folder / name).machine for name in places}
    return {name: autopar.Cluster.of_hosts(replace(machine, name=name), 1) for name, machine in machines.items()}


@contextmanager
def session_at(
    places: Mapping[str, Place], machines: Mapping[str, autopar.Cluster], link: Link
) -> Iterator[autopar.Cluster]:
    """Start a Ray cluster with a process at every place, and give it to `autopar.init`; end both afterwards."""
    from ray.cluster_utils import Cluster as Nodes

    nodes, named = Nodes(initialize_head=True, head_node_args={"num_cpus": 0}), dict[str, str]()
    try:
        for name, place in places.items():
            with place.entered():
                named[nodes.add_node(num_cpus=1).node_id] = name
        cluster = autopar.Cluster.of_groups([machines[named[node]] for node in sorted(named)], link)
        autopar.init(cluster, address=nodes.address, num_hosts=len(places), devices_per_host=1)
        yield cluster
    finally:
        autopar.shutdown()
        nodes.shutdown()


def seconds_in_turns(
    runs: Mapping[str, Any], arguments: tuple[Any, ...], rounds: int, before: Callable[[str], object] | None = None
) -> dict[str, list[float]]:
    """Return the seconds of steps by name, taken in turns; `before` is called with the name of each, if given."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(_FIRST_ROUNDS + rounds):
        for name, run in runs.items():
            if before is not None:
                before(name)
            began_s = time.perf_counter()
            _, loss = run(*arguments)
            float(loss)
            if number >= _FIRST_ROUNDS:
                seconds[name].append(time.perf_counter() - began_s)
    return seconds
