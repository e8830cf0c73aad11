"""Check what autopar needs: releases, devices, a step that runs, and the processes of a cluster and their ways.

    autopar doctor                                             this machine
    autopar doctor --ray --num-hosts 2 --devices-per-host 4    and a cluster, started here
    autopar doctor --ray --address HOST:PORT                   and a running one

Every finding says what was found, and what to do if it is not good; the exit status is 1 if one is bad.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from autopar.api import parallelize
from autopar.errors import AutoparError, GenericFiguresWarning
from autopar.hardware.cluster import Cluster
from autopar.methods import DataParallel

MARKS = {"good": "[green]good[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}
TRANSFER_BYTES = 1 << 20
_VIRTUAL = "--xla_force_host_platform_device_count=8"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at: `state` is "good", "note" (works, but) or "bad"; `advice` says what to do."""

    name: str
    state: str
    found: str
    advice: str = ""


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--ray", action="store_true", help="also start or join a Ray cluster and check its processes")
    parser.add_argument("--address", help="of a running Ray cluster, host:port (with --ray)")
    parser.add_argument("--num-hosts", type=int, help="processes to start (with --ray)")
    parser.add_argument("--devices-per-host", type=int, help="devices of each (with --ray)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the findings as they come; 1 if one is bad."""
    table = Table("check", "", "found", "what to do", title="autopar doctor")
    findings: list[Finding] = []
    with Console(stderr=True).status("checking"):
        for finding in [*check_machine(), *(check_processes(arguments) if arguments.ray else ())]:
            findings.append(finding)
            table.add_row(finding.name, MARKS[finding.state], finding.found, finding.advice)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        Console(width=None if Console().is_terminal else 160).print(table)
    return int(any(finding.state == "bad" for finding in findings))


def check_machine() -> Iterator[Finding]:
    """Releases, devices, and the optional packages of this process."""
    found = {name: _version(name) for name in ("jax", "jaxlib", "numpy", "ray", "highspy", "orbax-checkpoint")}
    yield Finding(name="Python", state="good", found=platform.python_version())
    same = found["jax"] == found["jaxlib"]
    yield Finding(
        name="JAX",
        state="good" if same else "bad",
        found=f"jax {found['jax']}, jaxlib {found['jaxlib']}",
        advice="" if same else "Install jax and jaxlib of one release.",
    )
    yield _devices()
    yield _figures()
    yield _tiny_step()
    if jax.default_backend() == "gpu":
        yield _cupy()
    for name, what in (("ray", "clusters"), ("highspy", "plans"), ("orbax-checkpoint", "checkpoints")):
        there = found[name] is not None
        yield Finding(
            name=name,
            state="good" if there else "note" if name == "ray" else "bad",
            found=found[name] or "not installed",
            advice="" if there else f"Needed for {what}: pip install '{'autopar[ray]' if name == 'ray' else name}'",
        )


def check_processes(arguments: argparse.Namespace) -> Iterator[Finding]:
    """A cluster's processes: that they start, agree on releases, add up together, and reach each other."""
    from autopar import session

    address = arguments.address or os.environ.get("RAY_ADDRESS") or "started here"
    try:
        session.init(
            cluster="ray",
            address=arguments.address,
            num_hosts=arguments.num_hosts,
            devices_per_host=arguments.devices_per_host,
        )
    except AutoparError as error:
        yield Finding(name="Ray cluster", state="bad", found=address, advice=str(error))
        return
    try:
        current: Any = session.current_session()
        assert current is not None
        for number, report in enumerate(current.reports):
            yield Finding(
                name=f"process {number}",
                state="good",
                found=f"{report.num_devices} {report.device_kind.name} devices on {report.node} "
                f"(pid {report.pid}), port {report.address.rpartition(':')[2]}, "
                f"{', '.join(f'{k} {v}' for k, v in report.versions.items())}",
            )
        yield _collective(current)
        yield from _transfers(current)
    except AutoparError as error:
        yield Finding(name="Ray cluster", state="bad", found=address, advice=str(error))
    finally:
        session.shutdown()


def _devices() -> Finding:
    devices = jax.devices()
    found = f"{len(devices)} {devices[0].platform} ({devices[0].device_kind})"
    if devices[0].platform == "cpu":
        seen = importlib.util.find_spec("cupy") is not None or os.path.exists("/proc/driver/nvidia/version")
        advice = "A GPU driver or CuPy is here, but JAX sees no GPU: pip install 'jax[cuda12]'" if seen else ""
        if not advice and len(devices) == 1:
            advice = f"XLA_FLAGS={_VIRTUAL} makes 8 virtual devices of it, to try plans on."
        return Finding(name="devices", state="note" if seen else "good", found=found, advice=advice)
    return Finding(name="devices", state="good", found=found)


def _figures() -> Finding:
    """Return whose figures price plans for these devices."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", GenericFiguresWarning)
        cluster = Cluster.from_devices(jax.devices())
        found = ", ".join(["those of " + cluster.machine.name, *([cluster.jax_limit] if cluster.jax_limit else [])])
    generic = [str(each.message) for each in told if issubclass(each.category, GenericFiguresWarning)]
    state = "note" if generic else "good"
    return Finding(name="figures", state=state, found=found, advice=" ".join(generic))


def _tiny_step() -> Finding:
    """Return whether a step on all devices runs, and computes what it does on one."""

    def step(weight: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weight)
        return weight - 0.1 * gradient, loss

    count = len(jax.devices())
    given = jnp.linspace(-1.0, 1.0, 256).reshape(16, 16), jnp.linspace(0.0, 1.0, 256 * count).reshape(16 * count, 16)
    parallel = parallelize(step, method=DataParallel())
    start = time.perf_counter()
    try:
        _, loss = jax.block_until_ready(parallel(*given))
    except AutoparError as error:
        return Finding(name="a step", state="bad", found=f"failed on {count} devices", advice=str(error))
    first_s, start = time.perf_counter() - start, time.perf_counter()
    jax.block_until_ready(parallel(*given))
    again_s, plain = time.perf_counter() - start, jax.jit(step)(*given)[1]
    right = abs(float(loss) - float(plain)) <= 1e-3 * abs(float(plain))
    return Finding(
        name="a step",
        state="good" if right else "bad",
        found=f"on {count} devices: {first_s:.2g} s to plan and compile, {1e3 * again_s:.2g} ms to run"
        + ("" if right else f", with the loss {float(loss):.6g} for {float(plain):.6g}"),
        advice="" if right else "The devices compute together what one does not: check the driver's release.",
    )


def _cupy() -> Finding:
    from autopar.runtime.transfer.nccl import nccl_version

    try:
        found = nccl_version(jax.devices())
    except AutoparError as error:
        return Finding(name="CuPy and NCCL", state="bad", found="not usable", advice=str(error))
    return Finding(name="CuPy and NCCL", state="good", found=f"NCCL {found}")


def _collective(current: Any) -> Finding:
    from autopar.runtime.distributed.host_checks import add_up_over_all_devices

    results = current.run_everywhere(add_up_over_all_devices, timeout_s=60.0)
    right = all(right for right, _ in results)
    slowest_s = max(seconds for _, seconds in results)
    return Finding(
        name="collective",
        state="good" if right else "bad",
        found=f"sum over {len(current.process_of)} devices in {slowest_s * 1e3:.2f} ms" + ("" if right else ", wrong"),
        advice="" if right else "The devices compute wrong sums together: check the network and the driver's release.",
    )


def _transfers(current: Any) -> Iterator[Finding]:
    from autopar.runtime.distributed.host_checks import send_between

    count = len(current.hosts.actors)
    for source in range(count):
        for destination in range(count):
            if source == destination:
                continue
            step = current.next_step()
            results = current.run_everywhere(send_between, source, destination, TRANSFER_BYTES, step, timeout_s=60.0)
            right, seconds = next(result for result in results if result is not None)
            yield Finding(
                name=f"process {source} to {destination}",
                state="good" if right else "bad",
                found=f"{TRANSFER_BYTES >> 20} MiB in {seconds * 1e3:.2f} ms" + ("" if right else ", altered"),
                advice="" if right else "What arrived is not what was sent: check the network between these hosts.",
            )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
