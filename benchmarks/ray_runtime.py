"""Measure the Ray runtime: what the driver pays per step, what an instruction costs, and how stages overlap.

    python -m benchmarks.ray_runtime --json ray-runtime.json
    python -m benchmarks.ray_runtime --soak 2000

driver       the host's time from the call of a step until it returns, 4 processes, nothing in flight; and the processor
             time of its thread, because with fewer cores than processes those that it wakes take its core
instruction  the time a process takes to dispatch all instructions of a step with tiny tensors, over their number
overlap      4 stages in 4 processes whose tasks sleep: the simulated makespan over the measured one, for the times that
             the tasks of one step took alone. Sleeping needs no core, so that this shows order and latencies
soak         so many steps: the memory and the open files of the driver and of every process, at times between
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_ADDRESS", "local")  # a cluster of its own

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar import session
from autopar.ir.program import Executable, Task
from autopar.runtime.simulator import simulate
from autopar.runtime.timeline import InstructionTime
from benchmarks.models.sleeping import sleep_step

LAYERS, WIDTH = 4, 16


def plain_step(state: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """A train step of four small layers."""

    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for number, weight in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ weight)
        return (x**2).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss


class MeasuredCosts:
    """The median time of each kind of task on each stage, as one timed step measured it; transfers take no time."""

    def __init__(self, times: Sequence[InstructionTime]) -> None:
        seconds: dict[str, list[float]] = {}
        for time_ in times:
            seconds.setdefault(time_.name.partition(".")[0], []).append(time_.stop_s - time_.start_s)
        self.median_s = {name: statistics.median(values) for name, values in seconds.items()}

    def run_time_s(self, executable: Executable, task: Task) -> float:
        """The median of its kind and stage."""
        return self.median_s[f"{task.kind}{task.stage}"]

    def transfer_time_s(self, num_bytes: int, source: int, destination: int) -> float:
        """Nothing: what transfers take is for the measured step to show."""
        return 0.0


def measure_overlap(num_microbatches: int, repetitions: int) -> dict[str, Any]:
    """The measured makespan of a pipeline of sleeping stages beside the simulated one."""
    method = autopar.PipelineParallel(num_stages=4, num_microbatches=num_microbatches)
    step = autopar.parallelize(sleep_step, method=method)
    state = [jnp.ones(WIDTH) for _ in range(LAYERS)]
    batch = np.ones((num_microbatches, WIDTH), np.float32)
    compiled = step.trace(state, batch).plan().lower().compile()
    loaded = compiled.loaded
    loaded(jax.tree.leaves((state, batch)))
    _, times = loaded.timed(jax.tree.leaves((state, batch)))
    simulated_s = simulate(compiled.program, MeasuredCosts(times)).makespan_s
    jax.block_until_ready(step(state, batch))
    measured: list[float] = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(step(state, batch))
        measured.append(time.perf_counter() - start)
    median_s = statistics.median(measured)
    return {
        "num_microbatches": num_microbatches,
        "task_s": MeasuredCosts(times).median_s,
        "simulated_s": simulated_s,
        "measured_s": median_s,
        "share_of_simulated_speed": simulated_s / median_s,
    }


def measure_driver(repetitions: int) -> dict[str, Any]:
    """The driver's time per step, and a process's per instruction."""
    step = autopar.parallelize(plain_step, method=autopar.PipelineParallel(num_stages=4, num_microbatches=8))
    state: Any = [jnp.full((WIDTH, WIDTH), 0.1) for _ in range(LAYERS)]
    batch = np.ones((8, WIDTH), np.float32)
    for _ in range(3):
        state, loss = step(state, batch)
    times: list[float] = []
    own: list[float] = []
    for _ in range(4 * repetitions):
        jax.block_until_ready(state)
        start, own_start = time.perf_counter(), time.thread_time()
        state, loss = step(state, batch)
        own.append(time.thread_time() - own_start)
        times.append(time.perf_counter() - start)
    compiled = step.trace(state, batch).plan().lower()
    current = session.current_session()
    assert current is not None
    current.settle()
    per_process = current.run_everywhere(dispatch_times)
    counts = [len(mesh.instructions) for mesh in compiled.program.meshes]
    per_instruction = [
        statistics.median(seconds) / count for seconds, count in zip(per_process, counts, strict=True) if seconds
    ]
    return {
        "driver_ms_per_step": statistics.median(times) * 1e3,
        "driver_cpu_ms_per_step": statistics.median(own) * 1e3,
        "us_per_instruction": max(per_instruction) * 1e6,
        "instructions_per_process": counts,
        "loss": float(loss),
    }


def dispatch_times(host: Any) -> list[float]:
    """The seconds that each step so far took a process to dispatch."""
    return list(host.dispatch_s)


def soak(num_steps: int) -> list[dict[str, Any]]:
    """Memory and open files of the driver and of every process, ten times during so many steps."""
    step = autopar.parallelize(
        plain_step, method=autopar.PipelineParallel(num_stages=4, num_microbatches=8), donate_argnums=0
    )
    state: Any = [jnp.full((WIDTH, WIDTH), 0.1) for _ in range(LAYERS)]
    batch = np.ones((8, WIDTH), np.float32)
    current = session.current_session()
    assert current is not None
    rows: list[dict[str, Any]] = []
    for number in track(range(num_steps), "soak", console=Console(stderr=True)):
        state, loss = step(state, batch)
        if number % max(num_steps // 10, 1) == 0 or number == num_steps - 1:
            processes = current.run_everywhere(resources)
            rows.append({"step": number, "loss": float(loss), "driver": own_resources(), "processes": processes})
    return rows


def resources(_: Any) -> dict[str, float]:
    """Resident MiB and open files of this process."""
    return own_resources()


def own_resources() -> dict[str, float]:
    """Resident MiB and open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20, "files": len(list(Path("/proc/self/fd").iterdir()))}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS", help="run so many steps instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    autopar.init(cluster="ray", num_hosts=4, devices_per_host=1)
    try:
        result: dict[str, Any] = {
            "jax": jax.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
        if args.soak:
            result["soak"] = soak(args.soak)
        else:
            result |= measure_driver(args.repetitions)
            result["overlap"] = [measure_overlap(m, args.repetitions) for m in (4, 8, 16)]
    finally:
        autopar.shutdown()
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("figure", "measured", "wanted", title="Ray runtime, 4 processes")
    if "soak" in result:
        for row in result["soak"]:
            sizes = [f"{p['mib']:.0f} MiB, {p['files']} files" for p in (row["driver"], *row["processes"])]
            table.add_row(f"step {row['step']}", "; ".join(sizes), "flat")
    else:
        wall = f"{result['driver_ms_per_step']:.2f} ms, of these {result['driver_cpu_ms_per_step']:.2f} on its thread"
        table.add_row("driver per step", wall, "<= 2 ms")
        table.add_row("per instruction", f"{result['us_per_instruction']:.0f} µs", "<= 150 µs")
        for row in result["overlap"]:
            share = f"{row['share_of_simulated_speed']:.1%} ({row['measured_s']:.3f} s of {row['simulated_s']:.3f} s)"
            table.add_row(f"overlap, {row['num_microbatches']} microbatches", share, ">= 90 %")
    Console(width=None if Console().is_terminal else 160).print(table)


if __name__ == "__main__":
    main()
