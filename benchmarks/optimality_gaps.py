"""How far from the optimum are the plans of the zoo at most? Every model of the test suite on every mesh.

    python -m benchmarks.optimality_gaps --json optimality_gaps.json
    python -m benchmarks.optimality_gaps --cases sum_loss moe --meshes 2x4 2x2x2 --kind h100
    python -m benchmarks.optimality_gaps --meshes 2x4 --without contraction "beam search"

Each is planned by `Auto` from nothing kept before, as `objective` (modelled seconds per step) and `lower bound`: no
plan of the same options is faster. `solve` are seconds of the wall clock, `cpu` those of the processor for tracing,
rules, graph and solving together. The program ends with an error if a gap exceeds `--most`.

`--without` measures what steps of the solver are worth: the problem of every plan is solved again with all steps, and
without each of these; `cpu` are then the seconds of the processor for solving alone.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.compiler.planning.one_mesh import search_on
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.solver.problem import Optimum
from autopar.compiler.solver.solve import STEPS, solve
from benchmarks.overhead import describe_machine
from tests.zoo import ZOO

MESHES = ("8", "2x4", "4x2", "2x2x2")
MOST = 1e-3
"""The gap that every plan should reach."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one model on one mesh."""

    case: str
    mesh: str
    kind: str
    without: str | None
    """The step that the solver left out; None for the plan, "nothing" for the problem solved once more."""
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
    parser.add_argument("--kind", default="cpu", help="the devices whose mesh_costs count, like cpu or h100")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="of the search, per plan")
    parser.add_argument("--without", nargs="+", choices=STEPS, default=[], metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--most", type=float, default=MOST, help="the largest gap to accept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every plan")
    args = parser.parse_args(argv)
    rows = list[Row]()
    for row in measure_all(args.cases, args.meshes, args.kind, args.time_limit, args.without):
        rows.append(row)
        without = f" without {row.without}" if row.without else ""
        print(f"{row.case} {row.mesh}{without}: {100 * row.gap:.4f} %, {row.solve_s:.1f} s", file=sys.stderr)
        if args.json:
            result = {"machine": describe_machine(), "time_limit_s": args.time_limit, "rows": [asdict(r) for r in rows]}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    print_table(rows, args.most)
    return sum(row.gap > args.most for row in rows)


def measure_all(
    cases: Iterable[str], meshes: Sequence[str], kind: str, time_limit_s: float, without: Sequence[str] = ()
) -> Iterator[Row]:
    """A row for every model and mesh. Computes in 64 bits, as the models of the zoo do."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        for case in cases:
            for mesh in meshes:
                yield from measure(case, mesh, kind, time_limit_s, without)
    finally:
        jax.config.update("jax_enable_x64", before)


def measure(name: str, mesh: str, kind: str, time_limit_s: float, without: Sequence[str] = ()) -> Iterator[Row]:
    """Plan one model on one mesh, and solve its problem again without steps."""
    case = ZOO[name]
    fun, *arguments = case.make()
    shape = tuple(map(int, mesh.split("x")))
    method = autopar.Auto(mesh_shape=shape, time_limit_s=time_limit_s, batch_statistics=case.batch_statistics)
    cluster = autopar.Cluster(num_devices=8, kind=kind)
    step = autopar.parallelize(fun, method=method, batch_argnums=case.batch_argnums, cluster=cluster)

    def row(optimum: Optimum, began: float, left_out: str | None) -> Row:
        return Row(
            case=name,
            mesh=mesh,
            kind=kind,
            without=left_out,
            objective_s=optimum.value,
            lower_bound_s=optimum.lower_bound,
            gap=optimum.gap,
            nodes=len(optimum.assignment),
            solve_s=optimum.seconds,
            cpu_s=time.process_time() - began,
            how=optimum.how,
        )

    began = time.process_time()
    trace = step.trace(*arguments, **case.kwargs).trace
    mesh_axes = LogicalMesh(shape=shape, axis_names=method.mesh_axes)
    found = search_on(trace, method, mesh_axes, machine=cluster.machine).intra_op
    yield row(found.optimum, began, None)
    for left_out in ("nothing", *without) if without else ():
        began = time.process_time()
        optimum = solve(found.table.problem(), time_limit_s=time_limit_s, without=[left_out])
        yield row(optimum, began, left_out)


def print_table(rows: Sequence[Row], most: float) -> None:
    """One line per model and mesh, those above `most` marked."""
    table = Table(title="Gap between plan and lower bound")
    for column in ("case", "mesh", "without"):
        table.add_column(column)
    for column in ("nodes", "objective ms", "lower bound ms", "gap %", "solve s", "cpu s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            row.mesh,
            row.without or "",
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
