"""Check that compilers make of a plan what was planned: the bytes of every kind of collective, and the numbers.

    python -m benchmarks.planned_vs_compiled --json planned_vs_compiled.json
    python -m benchmarks.planned_vs_compiled --models gpt moe --meshes 2x4 8x8 --compilers cpu h100:64

The CPU compiler compiles for eight devices of this machine, where one step of 32 bits is taken, too, and held against
plain `jax.jit`; "h100:8" and "h100:64" compile ahead of time for GPUs that are not here (needs autopar[gpu-aot]), the
models in sizes of `benchmarks.models.LARGE`. `Auto` is tried on every mesh, the methods that restrict it on one mesh of
two axes. Every model, mesh and compiler has a process of its own, so that memory stays small; there the model is traced
once, and what several of them compile alike, the plain step above all, is compiled once. Cases of which the file of
`--json` holds a result already are not checked again, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import autopar
from autopar.api import Planned, Traced
from autopar.compiler.analysis.aot_targets import aot_devices
from autopar.compiler.analysis.compiled_collectives import TOLERANCE
from autopar.methods import Method
from autopar.verification import VerificationReport
from benchmarks.models import LARGE, MODELS
from benchmarks.models.model import Model
from benchmarks.overhead import describe_machine

COMPILERS = ("cpu", "h100:8", "h100:64")
MESHES = {8: ("8", "2x4", "4x2", "2x2x2"), 64: ("8x8", "4x4x4", "2x4x8")}
TIGHT = "ZeRO-3 in 7/8 of its memory"  # which gathers parameters twice where compilers let it
RESTRICTED_ON = ("2x4", "8x8")

# Few layers: a third one is compiled like the second. On CPUs, where steps are taken, parameters of tens of megabytes;
# few pixels, for where a rectifier is at zero but for rounding, two exact programs differ by more than rounding.
FEW_LAYERS: dict[str, dict[str, Any]] = {"gpt": {"layers": 2}, "vit": {"layers": 2}, "convnet": {"blocks": 1}}
ON_CPU: dict[str, dict[str, Any]] = {
    "mlp": {"width": 1024, "hidden": 2048},
    "gpt": {"width": 512, "length": 64, "batch": 16},
    "moe": {"layers": 1, "length": 64, "width": 512},
    "moe_ragged": {"layers": 1, "length": 32, "width": 512},
    "convnet": {"channels": 64, "image": 8, "batch": 32},
    "vit": {"width": 384, "image": 32, "batch": 16},
    "lstm": {"width": 512, "length": 16},
    "encoder_decoder": {"layers": 1, "width": 512, "source_length": 32, "target_length": 16},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MODELS},
    "gpt bfloat16": ("gpt", {"dtype": jnp.bfloat16}),
    "gpt remat": ("gpt", {"remat": True}),
    "gpt scan remat": ("gpt", {"remat": True, "scan": True, "dtype": jnp.bfloat16}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, the method that plans it, and the compiler of the plan."""

    model: str
    mesh: str
    method: str
    compiler: str

    def __str__(self) -> str:
        return f"{self.model}, {self.mesh}, {self.method}, {self.compiler}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Outcome of a case. Bytes of one device and step."""

    case: Case
    kinds: tuple[dict[str, Any], ...]  # each a KindCheck, and whether it holds
    holds: bool
    merged_bytes: float  # of what was planned to be repeated, and was not
    difference: float | None  # of the numbers from those of plain jax.jit, as a share of what is allowed
    planned_peak_bytes: float
    compiled_peak_bytes: float
    plan_s: float
    verify_s: float
    message: str  # why there is no result

    @property
    def planned_bytes(self) -> float:
        return sum(kind["planned_bytes"] for kind in self.kinds)

    @property
    def compiled_bytes(self) -> float:
        return sum(kind["compiled_bytes"] for kind in self.kinds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--meshes", nargs="+", metavar="2x4", help="those of each compiler's number of devices")
    parser.add_argument("--compilers", nargs="+", choices=COMPILERS, default=list(COMPILERS))
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="only these, like Auto or ZeRO-3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every process; its results stand")
    parser.add_argument("--here", metavar="CASES", help="check these cases in this process, and print rows as JSON")
    args = parser.parse_args(argv)
    if args.here:
        for entry in json.loads(args.here):
            print(json.dumps(asdict(check(Case(**entry)))), flush=True)
        return
    rows = read_rows(args.json)
    known = {row.case for row in rows}
    groups = [
        [case for case in group if case not in known and (args.methods is None or case.method in args.methods)]
        for group in case_groups(args.models, args.meshes, args.compilers)
    ]
    with Progress(console=Console(stderr=True)) as progress, compile_cache():
        task = progress.add_task("", total=sum(map(len, groups)))
        for group in filter(None, groups):
            progress.update(task, description=str(group[0]))
            for row in check_apart(group):
                rows.append(row)
                progress.advance(task)
                if row.message or not row.holds or (row.difference or 0) > 1:
                    progress.console.print(f"{row.case}: {row.message or 'DIFFERENT'}")
            if args.json:
                result = {"machine": describe_machine(), "tolerance": TOLERANCE, "rows": [asdict(row) for row in rows]}
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    print_table(rows)


def read_rows(path: Path | None) -> list[Row]:
    """Return the results of an earlier run, without the cases that had none."""
    if path is None or not path.exists():
        return []
    rows = [Row(**entry | {"case": Case(**entry["case"])}) for entry in json.loads(path.read_text())["rows"]]
    return [row for row in rows if not row.message]


@contextmanager
def compile_cache() -> Iterator[None]:
    """Have the processes that are started share what they compile; a directory that the user named stays."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": directory,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        before = dict(os.environ)
        os.environ.update(settings | before)
        yield
        os.environ.clear()
        os.environ.update(before)


def case_groups(models: Sequence[str], meshes: Sequence[str] | None, compilers: Sequence[str]) -> Iterator[list[Case]]:
    """The cases of each process."""
    for compiler in compilers:
        for model in models:
            for mesh in MESHES[num_devices_of(compiler)]:
                if meshes is None or mesh in meshes:
                    methods = ["Auto", *(restricted_methods(model) if mesh in RESTRICTED_ON else ())]
                    yield [Case(model=model, mesh=mesh, method=each, compiler=compiler) for each in methods]


def restricted_methods(model: str) -> tuple[str, ...]:
    if model == "moe_ragged":  # Sorting all tokens mixes the batch, which these methods follow.
        return ()
    if model not in MODELS:
        return ("ZeRO-3",)
    expert = ("expert parallel",) if model == "moe" else ()
    loop = ("4 microbatches",) if model in ("mlp", "gpt", "vit") else ()
    tight = (TIGHT,) if model == "mlp" else ()
    return ("ZeRO-1", "ZeRO-3", "tensor parallel", *expert, *loop, *tight)


def method_of(case: Case, peak_bytes: float = math.inf) -> Method:
    """Return the method that `case.method` names; `peak_bytes` are those of ZeRO-3 without a limit."""
    shape = tuple(map(int, case.mesh.split("x")))
    match case.method:
        case "Auto":
            return autopar.Auto(mesh_shape=shape, memory="off")
        case "4 microbatches":
            return autopar.Auto(mesh_shape=shape, memory="off", num_microbatches=4)
        case "tensor parallel":
            return autopar.TensorParallel(mesh_shape=shape, memory="off")
        case "expert parallel":
            return autopar.ExpertParallel(mesh_shape=shape, memory="off")
        case name if name == TIGHT:
            return autopar.Zero(mesh_shape=shape, memory=7 / 8 * peak_bytes, stage=3)
        case zero:
            return autopar.Zero(mesh_shape=shape, memory="off", stage=int(zero.removeprefix("ZeRO-")))


def model_of(variant: str, compiler: str) -> Model:
    name, sizes = VARIANTS[variant]
    chosen = {**FEW_LAYERS.get(name, {}), **(ON_CPU if compiler == "cpu" else LARGE)[name], **sizes}
    if compiler == "h100:64":
        chosen["batch"] = max(chosen.get("batch", 64), 64)
    return MODELS[name](**chosen)


def num_devices_of(compiler: str) -> int:
    return 8 if compiler == "cpu" else int(compiler.removeprefix("h100:"))


def check_apart(group: Sequence[Case]) -> Iterator[Row]:
    """Check cases in a process of their own; one that dies leaves a message instead of the rest of its rows."""
    command = [sys.executable, "-m", "benchmarks.planned_vs_compiled", "--here", json.dumps(list(map(asdict, group)))]
    left = list(group)
    # Messages go to a file: a pipe that nobody reads would stop the process once it is full.
    with tempfile.TemporaryFile("w+") as messages:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                entry = json.loads(line)
                case = Case(**entry["case"])
                left.remove(case)
                yield Row(**entry | {"case": case})
        messages.seek(0)
        last = (messages.read().strip().splitlines() or ["no message"])[-1]
    for case in left:
        yield failed(case, f"the process ended with {process.returncode}: {last}", 0.0)


def check(case: Case) -> Row:
    """Plan, compile, and compare, in this process."""
    on_cpu = case.compiler == "cpu"
    start = time.perf_counter()
    try:
        if not on_cpu:
            aot_devices("h100", num_devices_of(case.compiler))
        traced = traced_model(case.model, case.compiler)
        planned = plan_case(traced, case)
        planned_at = time.perf_counter()
        # In 16 bits rounding decides the signs of small gradients, which are Adam's first step: nothing to compare.
        runs = on_cpu and VARIANTS[case.model][1].get("dtype", jnp.float32) == jnp.float32
        report = planned.verify(*(arguments_of(case.model) if runs else ()), target=None if on_cpu else "h100")
    except Exception as error:  # The other cases shall be checked.
        return failed(case, f"{type(error).__name__}: {error}", time.perf_counter() - start)
    verified_at = time.perf_counter()
    jax.clear_caches()
    return row_of(case, report, plan_s=planned_at - start, verify_s=verified_at - planned_at)


@cache
def traced_model(name: str, compiler: str) -> Traced:
    """Return the step of a model for the devices of a compiler."""
    model = model_of(name, compiler)
    cluster = None if compiler == "cpu" else autopar.Cluster(num_devices=num_devices_of(compiler), kind="h100")
    step = autopar.parallelize(model.step, donate_argnums=0, cluster=cluster)
    return step.trace(model.abstract_state, model.abstract_batch)


@cache
def arguments_of(name: str) -> tuple[Any, Any]:
    """Return the state and the batch that the CPU's plans of a model run on."""
    model = model_of(name, "cpu")
    return model.create_state(), model.create_batch()


def plan_case(traced: Traced, case: Case) -> Planned:
    if case.method != TIGHT:
        return traced.plan(method_of(case))
    sharding = traced.plan(method_of(replace(case, method="ZeRO-3"))).plan.sharding
    assert sharding is not None
    return traced.plan(method_of(case, sharding.peak_bytes))


def row_of(case: Case, report: VerificationReport, *, plan_s: float, verify_s: float) -> Row:
    check, numbers = report.collectives, report.numbers
    return Row(
        case=case,
        kinds=tuple(asdict(kind) | {"holds": kind.holds} for kind in check.kinds),
        holds=bool(check),
        merged_bytes=sum(max(kind.planned_bytes - kind.compiled_bytes, 0) for kind in check.kinds),
        difference=None if numbers is None else numbers.difference / numbers.tolerance,
        planned_peak_bytes=check.planned_peak_bytes,
        compiled_peak_bytes=check.compiled_peak_bytes,
        plan_s=plan_s,
        verify_s=verify_s,
        message="",
    )


def failed(case: Case, message: str, seconds: float) -> Row:
    return Row(
        case=case,
        kinds=(),
        holds=False,
        merged_bytes=0.0,
        difference=None,
        planned_peak_bytes=0.0,
        compiled_peak_bytes=0.0,
        plan_s=seconds,
        verify_s=0.0,
        message=message,
    )


def print_table(rows: Sequence[Row]) -> None:
    console = Console(width=140)
    table = Table(title="Collectives of one device and step, planned and as compiled")
    names = ("model", "mesh", "method", "compiler", "kind")
    for column in (*names, "planned MB", "compiled MB", "planned arrays", "compiled", "numbers", ""):
        table.add_column(column, justify="left" if column in names else "right")
    for row in rows:
        case = row.case
        cells = [case.model, case.mesh, case.method, case.compiler]
        if row.message:
            table.add_row(*cells, "", *[""] * 5, row.message)
        numbers = "" if row.difference is None else f"{row.difference:.1e}"
        for kind in row.kinds or ({},) * (not row.message):
            table.add_row(*cells, *_cells(kind), numbers, _verdict(kind))
            cells, numbers = [""] * 4, ""
    console.print(table)
    done = [row for row in rows if not row.message]
    equal = [row for row in done if row.holds]
    merged = [row for row in equal if row.merged_bytes > TOLERANCE * row.planned_bytes]
    agree = [row for row in done if row.difference is not None and row.difference <= 1]
    console.print(
        f"{len(equal)} of {len(rows)} programs have the planned collectives, of these {len(merged)} with repeated ones "
        f"merged; {len(done) - len(equal)} differ, {len(rows) - len(done)} could not be made. "
        f"{len(agree)} of {sum(row.difference is not None for row in done)} that ran agree with jax.jit."
    )


def _cells(kind: dict[str, Any]) -> list[str]:
    if not kind:
        return ["none", "0", "0", "0", "0"]
    megabytes = [f"{kind[f'{which}_bytes'] / 1e6:.6g}" for which in ("planned", "compiled")]
    counts = [f"{kind[f'{which}_count']:g}" for which in ("planned", "compiled")]
    return [" ".join((kind["kind"], str(kind["group_size"] or ""))), *megabytes, *counts]


def _verdict(kind: dict[str, Any]) -> str:
    if not kind:
        return "equal"
    if not kind["holds"]:
        return "DIFFERENT"
    return "repeated ones merged" if kind["compiled_bytes"] < kind["planned_bytes"] * (1 - TOLERANCE) else "equal"


if __name__ == "__main__":
    main()
