"""How far from the optimum are the plans of the zoo at most? Every model of the test suite on every mesh.

    python -m benchmarks.optimality_gaps --json optimality_gaps.json
    python -m benchmarks.optimality_gaps --cases sum_loss moe --meshes 2x4 2x2x2 --kind h100

Each is planned by `Auto` from nothing kept before, as `objective` (modelled seconds per step) and `lower bound`: no
plan of the same choices is faster. `solve` are seconds of the wall clock, `cpu` those of the processor for tracing,
rules, graph and solving together. The program ends with an error if a gap exceeds `--most`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

import autopar
from benchmarks.overhead import describe_machine
from tests.zoo import ZOO

MESHES = ("8", "2x4", "4x2", "2x2x2")
MOST = 1e-3
"""The gap that every plan should reach."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one model on one mesh."""

    case: str
    mesh: str
    kind: str
    objective_s: float
    lower_bound_s: float
    gap: float
    nodes: int
    solve_s: float
    cpu_s: float
    how: str


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the number of gaps that are too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="NAME")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), metavar="2x4")
    parser.add_argument("--kind", default="cpu", help="the devices whose figures count, like cpu or h100")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="of the search, per plan")
    parser.add_argument("--most", type=float, default=MOST, help="the largest gap to accept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every plan")
    args = parser.parse_args(argv)
    rows = list[Row]()
    for row in measure_all(args.cases, args.meshes, args.kind, args.time_limit):
        rows.append(row)
        print(f"{row.case} {row.mesh}: {100 * row.gap:.4f} %, {row.solve_s:.1f} s", file=sys.stderr)
        if args.json:
            result = {"machine": describe_machine(), "time_limit_s": args.time_limit, "rows": [asdict(r) for r in rows]}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    print_table(rows, args.most)
    return sum(row.gap > args.most for row in rows)


def measure_all(cases: Iterable[str], meshes: Sequence[str], kind: str, time_limit_s: float) -> Iterator[Row]:
    """A row for every model and mesh. Computes in 64 bits, as the models of the zoo do."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        for case in cases:
            for mesh in meshes:
                yield measure(case, mesh, kind, time_limit_s)
    finally:
        jax.config.update("jax_enable_x64", before)


def measure(name: str, mesh: str, kind: str, time_limit_s: float) -> Row:
    """Plan one model on one mesh; what the search was like is read from where optima are kept."""
    case, shape = ZOO[name], tuple(map(int, mesh.split("x")))
    fun, *arguments = case.make()
    method = autopar.Auto(mesh_shape=shape, time_limit_s=time_limit_s, batch_statistics=case.batch_statistics)
    cluster = autopar.Cluster(num_devices=8, kind=kind)
    step = autopar.parallelize(fun, method=method, batch_argnums=case.batch_argnums, cluster=cluster)
    kept = os.environ.get("AUTOPAR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["AUTOPAR_CACHE_DIR"] = directory
        try:
            began = time.process_time()
            sharding = step.trace(*arguments, **case.kwargs).plan().plan.sharding
            cpu_s = time.process_time() - began
        finally:
            if kept is None:
                del os.environ["AUTOPAR_CACHE_DIR"]
            else:
                os.environ["AUTOPAR_CACHE_DIR"] = kept
        optima = [json.loads(file.read_text()) for file in Path(directory).glob("*.json")]
    assert sharding is not None
    return Row(
        case=name,
        mesh=mesh,
        kind=kind,
        objective_s=sharding.step_time_s,
        lower_bound_s=sharding.lower_bound_s,
        gap=sharding.gap,
        nodes=max(len(optimum["states"]) for optimum in optima),
        solve_s=sum(optimum["seconds"] for optimum in optima),
        cpu_s=cpu_s,
        how="; ".join(optimum["how"] for optimum in optima),
    )


def print_table(rows: Sequence[Row], most: float) -> None:
    """One line per model and mesh, those above `most` marked."""
    table = Table(title="Gap between plan and lower bound")
    for column in ("case", "mesh"):
        table.add_column(column)
    for column in ("nodes", "objective ms", "lower bound ms", "gap %", "solve s", "cpu s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            row.mesh,
            str(row.nodes),
            f"{1e3 * row.objective_s:.6g}",
            f"{1e3 * row.lower_bound_s:.6g}",
            f"{100 * row.gap:.4f}" + " !" * (row.gap > most),
            f"{row.solve_s:.1f}",
            f"{row.cpu_s:.1f}",
        )
    Console(width=120).print(table)
    reached = sum(row.gap <= most for row in rows)
    print(f"{reached} of {len(rows)} plans are within {100 * most:g} % of the lower bound")


if __name__ == "__main__":
    sys.exit(main())
