"""Measure how long a plan with stages takes, tracing included: from a cold start, again, and with one host lost.

    python -m benchmarks.pipeline_plan_time --json plan_time.json
    python -m benchmarks.pipeline_plan_time --model 39B --gpus 64 --cluster p3.16xlarge
    python -m benchmarks.pipeline_plan_time --model llama-3-8b --remat --cluster dgx-h100 --what cold loaded

Every row is a process of its own. The first one of a case finds an empty cache; the second finds what the first kept,
and so does the third, which plans for a host less, where there are several, or, of a cluster of two kinds, for the
first kind alone: what elastic training plans when it loses hosts. The last row does so again. `loaded`, which has to
be asked for, plans with an empty cache too, beside eight processes that do nothing but compute; it fails where its plan
is another one than the cold one, byte for byte. Times are of the wall clock, in seconds: `start` imports JAX and
autopar, `trace` traces the step, `plan` is the search. `cpu` is the processor time of all that together, which tells
more than `total` where other processes run as well, as `load` says; targets are of it. `first` is of the processor as
well, until a plan was at hand.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of `benchmarks.models.sizes` on so many devices of a machine."""

    model: str
    """A name of its family; "small" is the one of four layers, or of the least width."""
    gpus: int
    family: str = "gpt"
    cluster: str = "p3.16xlarge"
    remat: bool = False
    """True if layers may be computed again; else only where the model says so itself."""
    what: str = "cold"
    target_s: float | None = None
    """Seconds of the processor."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measured figures; the last fields are the plan's."""

    case: Case
    start_s: float
    trace_s: float
    plan_s: float
    total_s: float
    cpu_s: float
    first_s: float | None
    """Seconds of the processor until the search had a plan; None for a plan that was kept."""
    load: float
    plan: str
    digest: str
    """Digest of all that the plan holds."""
    step_time_s: float | None
    gap: float | None


CASES = (
    Case(model="small", gpus=8, cluster="dgx-h100", remat=True, target_s=2),
    Case(model="llama-3-8b", gpus=64, cluster="dgx-h100", remat=True, target_s=8),
    Case(model="39B", gpus=64, target_s=10),
    Case(family="wresnet", model="6.8B", gpus=32, target_s=15),
    Case(family="moe", model="70B", gpus=64, target_s=15),
    Case(model="76B", gpus=1024, target_s=30),
    Case(model="small", gpus=32, cluster="2x p4d.24xlarge + 2x p3.16xlarge"),
    Case(model="llama-3-405b", gpus=10240, cluster="dgx-h100", remat=True, target_s=60),
)
_WHAT = ("cold", "again", "one host lost", "one kind lost", "one kind lost, again")
_LOADED = "loaded"
_BUSY_PROCESSES = 8
_LAYERS_OF_SMALL = 4
_PER_HOST = 8


def main() -> None:
    """Measure the cases, and show the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="one case only, of this model")
    parser.add_argument("--family", default="gpt")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--remat", action="store_true", help="layers may be computed again")
    parser.add_argument("--cluster", default="p3.16xlarge")
    parser.add_argument("--what", nargs="*", default=_WHAT, metavar="ROW")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    parser.add_argument("--here", action="store_true", help="plan in this process, and print the row as JSON")
    options = parser.parse_args()
    one = Case(
        family=options.family,
        model=options.model or CASES[0].model,
        gpus=options.gpus,
        cluster=options.cluster,
        remat=options.remat,
    )
    if options.here:
        print(json.dumps(asdict(measured(one))))
        return
    compileall.compile_dir(Path(__file__).parents[1] / "autopar", quiet=1)  # installations have byte code too
    rows: list[Row] = []
    for row in (row for case in ((one,) if options.model else CASES) for row in rows_of(case, options.what)):
        rows.append(row)
        if options.json is not None:
            found = {"cpus": os.cpu_count(), "rows": [asdict(each) for each in rows]}
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    Console(width=150).print(table_of(rows))


def rows_of(case: Case, what: Iterable[str]) -> Iterator[Row]:
    """The rows of a case, which share a cache, but for `loaded`; `RuntimeError` where load makes another plan."""
    digests: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as empty:
        for each in what:
            left = remaining(case, each)
            if left is None:
                continue
            with busy(_BUSY_PROCESSES if each == _LOADED else 0):
                row = measured_apart(replace(left, what=each), empty if each == _LOADED else directory)
            digests[each] = row.digest
            yield row
    if _LOADED in digests and digests[_LOADED] != digests.get("cold", digests[_LOADED]):
        raise RuntimeError(f"{case.family} {case.model} has another plan beside {_BUSY_PROCESSES} busy processes.")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Have so many processes compute all the while."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def remaining(case: Case, what: str) -> Case | None:
    """Return a case with what is left of its cluster, a host or a kind less; None if that cannot be lost."""
    first, *others = case.cluster.split(" + ")
    again = replace(case, target_s=2.0)
    match what:
        case "cold" | "loaded":
            return case
        case "again":
            return again
        case "one host lost":
            return None if others or case.gpus <= _PER_HOST else replace(again, gpus=case.gpus - _PER_HOST)
        case _:  # the kinds have equally many devices
            return replace(again, gpus=case.gpus // 2, cluster=first) if others else None


def measured_apart(case: Case, cache_directory: str) -> Row:
    """Plan in a new process. Its start counts from before the process is there."""
    command = [sys.executable, "-m", "benchmarks.pipeline_plan_time", "--here", "--model", case.model]
    command += ["--family", case.family, "--gpus", str(case.gpus), "--cluster", case.cluster]
    command += ["--remat"] if case.remat else []
    environment = os.environ | {"AUTOPAR_CACHE_DIR": cache_directory, "JAX_PLATFORMS": "cpu"}
    begin = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    total_s = time.perf_counter() - begin
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
    row = json.loads(run.stdout.splitlines()[-1])
    return Row(**{**row, "case": case, "total_s": total_s, "start_s": total_s - row["trace_s"] - row["plan_s"]})


def measured(case: Case) -> Row:
    """Plan in this process."""
    begin = time.perf_counter()
    # Imported here, for the time that it takes is measured.
    import autopar
    from autopar.progress import hearing_best
    from benchmarks.models.sizes import FAMILIES
    from benchmarks.planned_case import summary

    family = FAMILIES[case.family]
    workload = family.scaled_down(_LAYERS_OF_SMALL // 2) if case.model == "small" else family.maker(case.model)()
    cluster = autopar.Cluster.parse(case.cluster)
    cluster = cluster if cluster.is_mixed else cluster.with_devices(case.gpus)
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=cluster)
    started = time.perf_counter()
    traced = step.trace(workload.abstract_state, workload.abstract_batch)
    at_hand = time.perf_counter()
    method = autopar.Auto(remat="auto" if case.remat else False, batch_statistics=workload.batch_statistics)
    first_s: list[float] = []
    with hearing_best(lambda _: first_s.append(time.process_time())):
        plan = traced.plan(method).plan
    end = time.perf_counter()
    certificate = plan.certificate
    return Row(
        case=case,
        start_s=started - begin,
        trace_s=at_hand - started,
        plan_s=end - at_hand,
        total_s=end - begin,
        cpu_s=time.process_time(),
        first_s=first_s[0] if first_s else None,
        load=os.getloadavg()[0],
        plan=summary(plan),
        digest=hashlib.sha256(plan.to_json().encode()).hexdigest(),
        step_time_s=None if certificate is None else certificate.step_time_s,
        gap=None if certificate is None else certificate.gap,
    )


def table_of(rows: Iterable[Row]) -> Table:
    """One line for each row."""
    table = Table(title="Seconds to plan one train step with stages")
    figures = ("start", "trace", "plan", "total", "first", "cpu", "target", "load", "step s")
    for column in ("model", "GPUs", "", *figures, "what"):
        table.add_column(column, justify="left" if column in ("model", "", "what") else "right")
    for row in rows:
        case = row.case
        parts = (f"{part:.1f}" for part in (row.start_s, row.trace_s, row.plan_s, row.total_s))
        first = "" if row.first_s is None else f"{row.first_s:.1f}"
        target = "" if case.target_s is None else f"{case.target_s:g}"
        step = "" if row.step_time_s is None else f"{row.step_time_s:.4g}"
        table.add_row(
            f"{case.family}-{case.model}",
            str(case.gpus),
            case.what,
            *parts,
            first,
            f"{row.cpu_s:.1f}",
            target,
            f"{row.load:.1f}",
            step,
            row.plan,
        )
    return table


if __name__ == "__main__":
    main()
