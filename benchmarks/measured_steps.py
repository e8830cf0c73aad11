"""Train steps on one device: the time and memory that the plan says beside what they take when they run.

    python -m benchmarks.measured_steps --json measured_steps.json                  # GPUs: five models of 0.3 to 1.5B
    python -m benchmarks.measured_steps --figures machine.json                      # also by what `calibrate` wrote
    python -m benchmarks.measured_steps --models small                              # a small GPT, for any device
    python -m benchmarks.measured_steps --details FOLDER                            # programs, and times of kernels

Every model goes the way of users: `parallelize` alone, planned, simulated, compiled and called. The time is that of one
step of several in a row, each on the state that the one before returned: the median of rounds, each waited for. Memory
is what the plan says, what the compiled program says (`memory_analysis`), and the most that the device had in use.
Every model has a process of its own, whose memory is gone before the next.

`--details` keeps the optimized program of each model (`MODEL.hlo.txt.gz`) and when each kernel of a few steps ran on
the device, as JAX's profiler saw them (`MODEL.kernels.json.gz`): what an error is made of.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import autopar
from autopar.hardware.cluster import Cluster
from benchmarks.compiled_figures import peak_bytes
from benchmarks.models.alpa_gpt import GPT_SIZES, GPTSize, alpa_gpt
from benchmarks.models.alpa_moe import MOE_SIZES, alpa_moe
from benchmarks.models.llama import Llama, llama_workload
from benchmarks.models.wide_resnet import RESNET_SIZES, wide_resnet
from benchmarks.models.workload import State, Workload
from benchmarks.overhead import describe_machine, median_interval

ALLOWED, CALIBRATED = 0.10, 0.05
"""Largest errors of a step that are asked for: by figures of a machine file, and by those measured on the device."""
_LLAMA = Llama(
    num_layers=16, width=2048, num_heads=32, num_kv_heads=8, hidden=8192, sequence=2048, batch=4, scanned=False
)
_16_BITS = jnp.bfloat16
Step = Callable[[Any, Any], Any]
MODELS: Mapping[str, Callable[[], Workload]] = {
    "gpt-350m": lambda: alpa_gpt("gpt-350m", replace(GPT_SIZES["350M"], batch=16), _16_BITS),
    "gpt-1.3b": lambda: alpa_gpt("gpt-1.3b", replace(GPT_SIZES["1.3B"], batch=8), _16_BITS),
    "llama-1b": lambda: llama_workload("llama-1b", _LLAMA),
    "wide-resnet": lambda: wide_resnet("wide-resnet", replace(RESNET_SIZES["250M"], batch=64), _16_BITS),
    "moe-380m": lambda: alpa_moe("moe-380m", replace(MOE_SIZES["380M"], batch=16), _16_BITS),
    # Nothing computed again, 32 bits, other shapes: what no figure was set by.
    "gpt-125m, kept": lambda: alpa_gpt(
        "gpt-125m, kept", replace(GPT_SIZES["125M"], batch=16, recomputed=False), _16_BITS
    ),
    "llama-1b, kept": lambda: llama_workload("llama-1b, kept", replace(_LLAMA, batch=2, remat=False)),
    # Attention in one kernel.
    "gpt-350m, cudnn": lambda: alpa_gpt("gpt-350m, cudnn", replace(GPT_SIZES["350M"], batch=16, cudnn=True), _16_BITS),
    "llama-1b, cudnn": lambda: llama_workload("llama-1b, cudnn", replace(_LLAMA, cudnn=True)),
    "wide-resnet, float32": lambda: wide_resnet(
        "wide-resnet, float32", replace(RESNET_SIZES["250M"], batch=32, recomputed=False)
    ),
    "small": lambda: alpa_gpt(
        "small", GPTSize(width=128, layers=2, heads=4, length=64, vocabulary=512, batch=4), jnp.float32
    ),
}
ASKED = ("gpt-350m", "gpt-1.3b", "llama-1b", "wide-resnet", "moe-380m")
_STEPS, _ROUNDS, _TRACED = 5, 6, 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model: milliseconds of a step and bytes at its fullest, as planned, as compiled and as measured."""

    model: str
    planned_ms: float
    calibrated_ms: float | None
    """Milliseconds by the figures of `--figures`."""
    measured_ms: float
    interval_ms: tuple[float, float]
    """95 % of the median of rounds."""
    planned_bytes: float
    compiled_bytes: float
    used_bytes: float | None
    """None where the device does not tell."""
    plan_s: float
    compile_s: float
    machine: Mapping[str, Any]

    def error(self, milliseconds: float) -> float:
        """Return how far a modelled time lies above the measured one, as a share of that."""
        return milliseconds / self.measured_ms - 1


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; exits with 1 where a model is further off than is asked for, or did not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=ASKED, metavar="MODEL")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="written by `autopar calibrate --json`")
    parser.add_argument("--details", type=Path, metavar="FOLDER", help="write programs and times of kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    parser.add_argument("--here", action="store_true", help="the one model, in this process")
    args = parser.parse_args(argv)
    if args.details is not None:
        args.details.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failed: list[str] = []
    for name in args.models:
        row = (measured if args.here else in_a_process)(name, args.figures, args.details)
        if row is None:
            failed.append(name)
            continue
        rows.append(row)
        if args.json is not None:
            data = {"figures": str(args.figures), "rows": [asdict(row) for row in rows]}
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if args.here:
        return
    Console(width=None if Console().is_terminal else 150).print(table_of(rows))
    off = [row.model for row in rows if abs(row.error(row.planned_ms)) > ALLOWED]
    off += [row.model for row in rows if row.calibrated_ms and abs(row.error(row.calibrated_ms)) > CALIBRATED]
    if off or failed:
        sys.exit(
            f"Further off than is asked for: {', '.join(dict.fromkeys(off)) or 'none'}. Not run: {failed or 'none'}."
        )


def in_a_process(name: str, figures: Path | None, details: Path | None) -> Row | None:
    """Measure a model in a new process; None, with what it printed, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        options = [f"--{key}={value}" for key, value in (("figures", figures), ("details", details)) if value]
        command = [sys.executable, "-m", "benchmarks.measured_steps", "--here", "--models", name, "--json", str(result)]
        done = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not result.exists():
            print(f"{name}: exit status {done.returncode}\n{done.stdout[-3000:]}", flush=True)
            return None
        (row,) = json.loads(result.read_text(encoding="utf-8"))["rows"]
    print(json.dumps(row), flush=True)
    return Row(**row | {"interval_ms": tuple(row["interval_ms"])})


def measured(name: str, figures: Path | None, details: Path | None) -> Row:
    """Plan a step for one device, simulate it, compile it, and run it."""
    model = MODELS[name]()
    begin = time.perf_counter()
    one = jax.devices()[:1]
    step = autopar.parallelize(model.step, donate_argnums=(0,), devices=one)
    planned = step.trace(model.abstract_state, model.abstract_batch).plan()
    simulated = planned.simulate()
    planned_at = time.perf_counter()
    compiled = planned.lower().compile()
    (executable,) = compiled.loaded.functions.values()  # pyright: ignore[reportAttributeAccessIssue]
    compiled_at = time.perf_counter()
    batch = jax.device_put(model.create_batch(), one[0])
    state, seconds = timed(compiled, model.draw_state(), batch)
    told = one[0].memory_stats()
    if details is not None:
        stem = details / "".join(c if c.isalnum() or c in ".-" else "_" for c in name)
        with gzip.open(f"{stem}.hlo.txt.gz", "wt", encoding="utf-8") as file:
            file.write(executable.as_text())
        with gzip.open(f"{stem}.kernels.json.gz", "wt", encoding="utf-8") as file:
            json.dump(kernels_of(compiled, state, batch), file)
    median_s, interval_s = median_interval(seconds)
    return Row(
        model=name,
        planned_ms=1e3 * simulated.step_time_s,
        calibrated_ms=None if figures is None else 1e3 * simulated_by(figures, model),
        measured_ms=1e3 * median_s,
        interval_ms=(1e3 * interval_s[0], 1e3 * interval_s[1]),
        planned_bytes=float(simulated.meshes[0].peak_bytes),
        compiled_bytes=peak_bytes(executable),
        used_bytes=float(told["peak_bytes_in_use"]) if told else None,
        machine=describe_machine(),
        plan_s=planned_at - begin,
        compile_s=compiled_at - planned_at,
    )


def simulated_by(figures: Path, model: Workload) -> float:
    """Seconds of a step on one device of a measured machine, planned for it."""
    cluster = Cluster.load(figures).with_devices(1)
    step = autopar.parallelize(model.step, donate_argnums=(0,), cluster=cluster)
    return step.trace(model.abstract_state, model.abstract_batch).plan().simulate().step_time_s


def timed(step: Step, state: State, batch: Any) -> tuple[State, list[float]]:
    """The state after some rounds of several steps, and the seconds of a step in each."""
    found: list[float] = []
    for settled in range(-1, _ROUNDS):
        begin = time.perf_counter()
        for _ in range(_STEPS):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        if settled >= 0:
            found.append((time.perf_counter() - begin) / _STEPS)
    return state, found


def kernels_of(step: Step, state: State, batch: Any) -> list[dict[str, Any]]:
    """Kernels of a few steps in the order in which they began: their stream, instruction, and microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_TRACED):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    found = [
        {
            "line": line.name,
            "kernel": event.name,
            "hlo_op": next((str(value) for key, value in event.stats if key == "hlo_op"), None),
            "start_us": event.start_ns / 1e3,
            "us": event.duration_ns / 1e3,
        }
        for plane in profile.planes
        if plane.name.startswith("/device:")
        for line in plane.lines
        for event in line.events
    ]
    return sorted(found, key=lambda each: each["start_us"])


def table_of(rows: Sequence[Row]) -> Table:
    """Planned beside measured, and by how much each is off."""
    table = Table(title=f"Steps on one {rows[0].machine['device'] if rows else 'device'}")
    for column in ("", "measured ms", "planned", "error", "calibrated", "error", "used GiB", "planned", "compiled"):
        table.add_column(column, justify="right" if column else "left")
    gib = "{:.2f}".format
    for row in rows:
        calibrated = row.calibrated_ms
        table.add_row(
            row.model,
            f"{row.measured_ms:.2f}",
            f"{row.planned_ms:.2f}",
            f"{row.error(row.planned_ms):+.1%}",
            "" if calibrated is None else f"{calibrated:.2f}",
            "" if calibrated is None else f"{row.error(calibrated):+.1%}",
            "" if row.used_bytes is None else gib(row.used_bytes / 2**30),
            gib(row.planned_bytes / 2**30),
            gib(row.compiled_bytes / 2**30),
        )
    return table


if __name__ == "__main__":
    main()
