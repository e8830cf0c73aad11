"""Time the train step of a scaled-down model on devices of this machine, in a process of its own.

    python -m benchmarks.weak_scaling_local --family gpt --devices 4 --method data --repetitions 5

prints one row as JSON. The time is the median of the repetitions, after steps that compile and settle. With `--hosts 2`
the devices are those of a Ray cluster of two processes, started here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax

import autopar
from autopar.errors import AutoparError, InvalidArgument, MemoryTooSmall
from autopar.methods import Method
from benchmarks.models.sizes import FAMILIES, closest
from benchmarks.models.workload import Workload
from benchmarks.planned_case import METHODS, summary
from benchmarks.weak_scaling_rows import Row, row_of

_WARM_UP = 2
_MICROBATCHES_PER_STAGE = 4
_WRONG = 2  # exit code of a mistake of the user's


def measured_row(
    family: str, num_devices: int, method: str, *, repetitions: int, plan: Path | None = None, hosts: int | None = None
) -> Row:
    """Time a step in a new process. Raises `InvalidArgument` with what that process found to be wrong."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    command = [sys.executable, "-m", "benchmarks.weak_scaling_local", "--family", family]
    command += ["--devices", str(num_devices), "--method", method, "--repetitions", str(repetitions)]
    command += [] if plan is None else ["--plan", str(plan)]
    command += [] if hosts is None else ["--hosts", str(hosts)]
    environment = os.environ | {"XLA_FLAGS": flags.strip()}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if run.returncode == _WRONG:
        raise InvalidArgument(run.stderr.strip().splitlines()[-1])
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {run.returncode}:\n{run.stderr}")
    return Row(**json.loads(run.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the row of one case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=tuple(FAMILIES), required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--hosts", type=int)
    args = parser.parse_args(argv)
    try:
        workload = FAMILIES[args.family].scaled_down(args.devices)
        plan = None if args.plan is None else autopar.Plan.load(args.plan)
        devices = _devices(args.devices) if args.hosts is None else _start_hosts(args.hosts, args.devices)
        row = timed(workload, devices, plan or args.method, repetitions=args.repetitions)
    except AutoparError as error:
        print(error, file=sys.stderr)
        raise SystemExit(_WRONG) from None
    finally:
        autopar.shutdown()
    print(json.dumps(asdict(row)))


def timed(
    workload: Workload,
    devices: Sequence[jax.Device] | autopar.Cluster,
    method: str | autopar.Plan,
    *,
    repetitions: int,
) -> Row:
    """Plan, compile and run the step on these devices, or on those of the Ray cluster that was started."""
    remote = isinstance(devices, autopar.Cluster)
    count = devices.num_devices if remote else len(devices)
    name = (method if isinstance(method, str) else f"plan of {method.method}") + (", ray" if remote else "")
    chosen = _method_here(method, workload, count) if isinstance(method, str) else method
    begin = time.perf_counter()
    here = None if remote else devices
    step = autopar.parallelize(workload.step, method=chosen, donate_argnums=(0,), devices=here)
    try:
        planned = step.trace(workload.abstract_state, workload.abstract_batch).plan()
    except MemoryTooSmall as error:
        return row_of(workload, gpus=count, method=name, step_time_s=None, plan=f"out of memory: {error.shortage}")
    plan_time_s = time.perf_counter() - begin
    sharding = planned.plan.sharding
    step_time_s = _median_s(planned.lower().compile(), workload, repetitions)
    measured = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in here or ()]
    peaks = [peak for peak in measured if peak is not None]
    return row_of(
        workload,
        gpus=count,
        method=name,
        step_time_s=step_time_s,
        # CPUs do not say what they used: then it is what the plan says.
        peak_bytes=max(peaks) if peaks else None if sharding is None else sharding.peak_bytes,
        plan_time_s=plan_time_s,
        lower_bound_s=None if sharding is None else sharding.lower_bound_s,
        plan=summary(planned.plan),
    )


def _median_s(run: autopar.Compiled, workload: Workload, repetitions: int) -> float:
    state, batch = workload.create_state(), workload.create_batch()
    seconds: list[float] = []
    for _ in range(_WARM_UP + repetitions):
        begin = time.perf_counter()
        state, metrics = run(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[_WARM_UP:])


def _devices(count: int) -> Sequence[jax.Device]:
    devices = jax.devices()
    if len(devices) < count:
        raise InvalidArgument(
            f"--devices asks for {count}, this machine has {len(devices)} of {devices[0].device_kind!r}. Ask for at "
            f"most {len(devices)}, or plan for a cluster with --cluster and --gpus."
        )
    return devices[:count]


def _start_hosts(num_hosts: int, num_devices: int) -> autopar.Cluster:
    per_host, rest = divmod(num_devices, num_hosts)
    if rest:
        raise InvalidArgument(
            f"{num_devices} devices do not divide among --hosts {num_hosts}. Give a number of hosts that divides every "
            "number of --devices."
        )
    cluster = autopar.init(cluster="ray", address="local", num_hosts=num_hosts, devices_per_host=per_host)
    assert cluster is not None
    return cluster


def _method_here(name: str, workload: Workload, num_devices: int) -> Method:
    match closest("The method", name, METHODS):
        case "auto":
            return autopar.Auto(batch_statistics=workload.batch_statistics)
        case "data":
            return autopar.DataParallel()
        case "zero3":
            return autopar.Zero(stage=3)
        case "megatron":
            return autopar.TensorParallel()
        case "intra-only":
            return autopar.Auto(num_stages=1)
        case "inter-only":
            count = min(workload.batch_size, _MICROBATCHES_PER_STAGE * num_devices)
            return autopar.PipelineParallel(
                num_stages=num_devices, num_microbatches=count, batch_statistics=workload.batch_statistics
            )
        case _:
            raise InvalidArgument(
                f"The method {name} is a search without one of its decisions, for clusters that are modelled. Add "
                "--cluster p3.16xlarge, or run auto here."
            )


if __name__ == "__main__":
    main()
