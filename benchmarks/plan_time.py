"""Measure how long planning takes, from a cold start: Llama train steps of several sizes and depths on several meshes.

    python -m benchmarks.plan_time --json plan_time.json
    python -m benchmarks.plan_time --model llama-8b --layers 64 --mesh 4x4x4 --unrolled

Every case runs in a process of its own, so that nothing is known from the case before. Times are of the wall clock,
in seconds: `start` imports JAX and autopar, `trace` traces the step, `rules` finds the sharding rules of its
equations, `graph` lists strategies and resharding times, `solve` finds the optimum. `cpu` is the processor time of all
that together, which tells more than `total` where other processes run as well.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

MODELS = ("llama-8b", "llama-405b")


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str = "llama-8b"
    layers: int | None = None  # None: as many as the model has
    scanned: bool = True
    mesh: tuple[int, ...] = (8, 8)
    target_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    case: Case
    equations: int
    nodes: int
    edge_variables: int
    start_s: float
    trace_s: float
    rules_s: float
    graph_s: float
    solve_s: float
    total_s: float
    cpu_s: float
    step_time_s: float  # as modelled
    gap: float  # proven distance from the optimum, of the folded problem


CASES = (
    Case(target_s=5),
    Case(scanned=False, target_s=5),
    Case(mesh=(4, 4, 4), target_s=10),
    Case(scanned=False, mesh=(4, 4, 4), target_s=10),
    Case(model="llama-405b", target_s=10),
    Case(model="llama-405b", scanned=False),
    Case(layers=8),
    Case(layers=1024),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="one case only, of this model")
    parser.add_argument("--layers", type=int, help="layers of that model")
    parser.add_argument("--unrolled", action="store_true", help="one layer after the other instead of a scan")
    parser.add_argument("--mesh", default="8x8", help="sizes of its axes, like 8x8 or 4x4x4")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--here", action="store_true", help="plan in this process, and print the row as JSON")
    args = parser.parse_args(argv)
    mesh = tuple(map(int, args.mesh.split("x")))
    one = Case(model=args.model or MODELS[0], layers=args.layers, scanned=not args.unrolled, mesh=mesh)
    if args.here:
        print(json.dumps(asdict(measure(one))))
        return
    rows = [measure_cold(case) for case in ((one,) if args.model else CASES)]
    print_table(rows)
    if args.json:
        result = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def measure_cold(case: Case) -> Row:
    """Plan in a new process. Its start counts from before the process is there."""
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "benchmarks.plan_time", "--here"]
    command += ["--model", case.model, "--mesh", "x".join(map(str, case.mesh))]
    command += [] if case.layers is None else ["--layers", str(case.layers)]
    command += [] if case.scanned else ["--unrolled"]
    begin = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    total = time.perf_counter() - begin
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
    row = json.loads(run.stdout.splitlines()[-1])
    inside = sum(row[key] for key in ("trace_s", "rules_s", "graph_s", "solve_s"))
    return Row(**{**row, "case": case, "total_s": total, "start_s": total - inside})


def measure(case: Case) -> Row:
    """Plan in this process."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    begin = time.perf_counter()
    # Imported here, for the time that it takes is measured.
    import autopar
    from autopar.compiler.costs.mesh_costs import MeshCosts
    from autopar.compiler.intra_op.plan_program import plan_intra_op
    from autopar.compiler.jaxprs import compat as jc
    from autopar.compiler.jaxprs.primitives import NESTED
    from autopar.compiler.sharding.layout import LogicalMesh
    from autopar.compiler.sharding.rule_lookup import sharding_rules
    from autopar.hardware.machine import Machine
    from benchmarks.models.llama import LLAMA_8B, LLAMA_405B, abstract_step

    imported = time.perf_counter()
    model = {"llama-8b": LLAMA_8B, "llama-405b": LLAMA_405B}[case.model]
    model = replace(model, num_layers=case.layers or model.num_layers, scanned=case.scanned)
    step, state, tokens = abstract_step(model)
    trace = autopar.parallelize(step, batch_argnums=(1,)).trace(state, tokens).trace
    traced = time.perf_counter()
    sharding_rules([eqn for eqn in jc.all_equations(trace.jaxpr) if eqn.primitive.name not in NESTED])
    ruled = time.perf_counter()
    mesh = LogicalMesh(shape=case.mesh, axis_names=("x", "y", "z")[: len(case.mesh)])
    found = plan_intra_op(
        trace.jaxpr,
        MeshCosts(machine=Machine.named("dgx-h100"), mesh=mesh),
        state_outputs=dict(trace.state_outputs),
        input_names=[leaf.name for leaf in trace.inputs],
    )
    end = time.perf_counter()
    return Row(
        case=case,
        equations=sum(1 for _ in jc.all_equations(trace.jaxpr)),
        nodes=len(found.table.costs),
        edge_variables=sum(matrix.size for matrix in found.table.edges.values()),
        start_s=imported - begin,
        trace_s=traced - imported,
        rules_s=ruled - traced,
        graph_s=end - ruled - found.optimum.seconds,
        solve_s=found.optimum.seconds,
        total_s=end - begin,
        cpu_s=time.process_time(),
        step_time_s=found.optimum.value,
        gap=found.optimum.gap,
    )


def print_table(rows: Iterable[Row]) -> None:
    console = Console(width=None if Console().is_terminal else 170)
    table = Table(title="Seconds to plan one train step, from a cold start")
    names = ("model", "mesh", "equations", "nodes", "edge variables")
    for column in (
        *names,
        "start",
        "trace",
        "rules",
        "graph",
        "solve",
        "total",
        "cpu",
        "target",
        "modelled step",
        "gap",
    ):
        table.add_column(column, justify="left" if column in ("model", "mesh") else "right")
    for row in rows:
        case = row.case
        layers = "" if case.layers is None else f" {case.layers} layers"
        parts = (row.start_s, row.trace_s, row.rules_s, row.graph_s, row.solve_s, row.total_s, row.cpu_s)
        table.add_row(
            f"{case.model}{layers} {'scan' if case.scanned else 'unrolled'}",
            "x".join(map(str, case.mesh)),
            str(row.equations),
            str(row.nodes),
            f"{row.edge_variables:,}",
            *(f"{part:.1f}" for part in parts),
            "" if case.target_s is None else f"{case.target_s:g}",
            f"{row.step_time_s:.3f}",
            f"{row.gap:.0e}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
