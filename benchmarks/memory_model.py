"""Hold the model of a plan's memory against XLA: modelled and compiled peak per device, and bytes moved per step.

    python -m benchmarks.memory_model [--targets h100 tpu-v5p] [--models mlp gpt] [--meshes 8 2x4] --json FILE

A case is a model, a mesh, a plan and a target: "free" is the plan of least time, "data parallel" keeps the whole state
on every device, "0.5" is the best plan within that share of the compiled memory of the data-parallel one, if there is
any; its compiled peak must stay within the budget. The compiled peak is temporaries, arguments and results less
donated ones, as `memory_analysis` gives them; the bytes moved are what its kernels read from memory and write there
(`hlo_roofline.py`), collectives aside. Nothing is run, and no GPU or TPU is needed, only its compiler
(autopar[gpu-aot], autopar[tpu-aot]).
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

import autopar
from autopar.compiler.analysis.aot_targets import aot_devices, gpu_targets, tpu_targets
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_program import Constraints, IntraOpPlan, plan_intra_op
from autopar.compiler.lowering.sharded_step import one_jaxpr
from autopar.compiler.memory.estimate import MemoryBudget, peak_memory
from autopar.compiler.sharding.layout import LogicalMesh, replicated, to_spec
from autopar.compiler.spmd.block_times import block_bytes
from autopar.compiler.spmd.emit import emit_spmd
from autopar.compiler.spmd.local_program import LocalBlock, Value, local_block
from autopar.errors import MemoryTooSmall
from autopar.hardware.machine import Machine
from benchmarks.compiled_figures import peak_bytes
from benchmarks.hlo_roofline import work_of
from benchmarks.models.gpt import gpt
from benchmarks.models.images import convnet
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model
from benchmarks.models.moe import moe

_SOLVE_S = 30.0
# The same rates for every target, that the plans are the same.
_PLANNED_FOR = Machine.named("dgx-h100")
_GPT = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 8192, "length": 256, "batch": 64}
# Values of hundreds of MiB, which no memory on a TPU's chip holds.
_LARGE = {"layers": 2, "width": 2048, "heads": 16, "vocabulary": 32768, "length": 1024, "batch": 64}
MODELS: dict[str, Callable[[], Model]] = {
    "mlp, much data": lambda: mlp(layers=8, width=1024, hidden=4096, batch=4096),
    "mlp, large": lambda: mlp(layers=8, width=2048, hidden=8192, batch=256),
    "gpt": lambda: gpt(**_GPT),
    "gpt, wide": lambda: gpt(layers=4, width=1024, heads=16, vocabulary=8192, length=256, batch=8),
    "gpt, scan": lambda: gpt(**_GPT, scan=True),
    "gpt, scan, remat": lambda: gpt(**_GPT, scan=True, remat=True),
    "gpt, remat": lambda: gpt(**_GPT, remat=True),
    "gpt, bfloat16": lambda: gpt(**_GPT, dtype=jnp.bfloat16),
    "gpt, large": lambda: gpt(**_LARGE),
    "gpt, large, bfloat16": lambda: gpt(**_LARGE, dtype=jnp.bfloat16),
    "moe": lambda: moe(batch=64),
    "convnet": lambda: convnet(batch=256),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    mesh: str
    plan: str
    target: str
    modelled_mib: float
    compiled_mib: float
    arguments_mib: float
    at: str
    moved_mib: float
    """Read and written in a step, as its time has it."""
    compiled_moved_mib: float
    budget_mib: float | None = None
    solve_s: float | None = None

    @property
    def exceeds(self) -> bool:
        """True if the compiled plan needs more than it was given."""
        return self.budget_mib is not None and self.compiled_mib > self.budget_mib

    @property
    def error(self) -> float:
        """The excess of the modelled peak over the compiled one, as a share of that."""
        return self.modelled_mib / self.compiled_mib - 1

    @property
    def moved_error(self) -> float:
        """The excess of the modelled bytes moved over the compiled ones, as a share of those."""
        return self.moved_mib / self.compiled_moved_mib - 1


def cases(name: str, mesh: LogicalMesh, targets: Sequence[str], shares: Sequence[float]) -> Iterator[Case]:
    """The plans of one model on one mesh, each for every target."""
    model = MODELS[name]()
    trace = autopar.parallelize(model.step).trace(model.abstract_state, model.abstract_batch).trace
    trace = replace(trace, jaxpr=one_jaxpr(trace, num_microbatches=1, batch_statistics="exact", random="full_batch"))
    state = sorted(set(dict(trace.state_outputs).values()))
    avals = [v.aval for v in trace.jaxpr.jaxpr.invars]
    whole = Constraints(inputs={number: (replicated(avals[number].ndim),) for number in state})

    def case(plan: str, target: str, found: IntraOpPlan, **more: Any) -> Case:
        block = local_block(trace.jaxpr.jaxpr, found.plan, mesh)
        machine = Machine.of_kind(target)
        costs = MeshCosts(machine=machine, mesh=mesh)
        estimate = peak_memory(block, mesh, state, machine=machine)
        compiled = _compiled(trace, block, mesh, state, target)
        return Case(
            model=name,
            mesh="x".join(map(str, mesh.shape)),
            plan=plan,
            target=target,
            modelled_mib=estimate.peak_bytes / 2**20,
            compiled_mib=peak_bytes(compiled) / 2**20,
            arguments_mib=estimate.arguments_bytes / 2**20,
            at=estimate.at,
            moved_mib=block_bytes(block, costs, copied=estimate.copied) / 2**20,
            compiled_moved_mib=work_of(compiled.as_text()).memory_bytes / 2**20,
            **more,
        )

    free, replicas = _plan(trace, mesh), _plan(trace, mesh, constraints=whole)
    for target in targets:
        yield case("free", target, free)
        whole_state = case("data parallel", target, replicas)
        yield whole_state
        for share in shares:
            mib, began = share * whole_state.compiled_mib, time.monotonic()
            budget = MemoryBudget(nbytes=mib * 2**20)
            with contextlib.suppress(MemoryTooSmall):
                found = _plan(trace, mesh, budget=budget, donated=state, time_limit_s=_SOLVE_S)
                yield case(f"{share:g}", target, found, budget_mib=mib, solve_s=time.monotonic() - began)


def _plan(trace: Trace, mesh: LogicalMesh, **how: Any) -> IntraOpPlan:
    mesh_costs = MeshCosts(machine=_PLANNED_FOR, mesh=mesh)
    return plan_intra_op(trace.jaxpr, mesh_costs, state_outputs=dict(trace.state_outputs), **how)


def _compiled(
    trace: Trace, block: LocalBlock, mesh: LogicalMesh, donated: Sequence[int], target: str
) -> jax.stages.Compiled:
    devices = Mesh(np.reshape(np.array(aot_devices(target, mesh.num_devices)), mesh.shape), mesh.axis_names)
    step = jax.jit(
        jaxpr_as_fun(emit_spmd(trace.jaxpr, block, mesh)),
        in_shardings=[NamedSharding(devices, to_spec(v.layout, mesh)) for v in block.inputs],
        out_shardings=[NamedSharding(devices, to_spec(v.layout, mesh)) for v in block.outputs if isinstance(v, Value)],
        donate_argnums=tuple(donated),
    )
    lowered = step.lower(*(v.variable.aval for v in block.inputs))
    # Timing these needs a GPU.
    return lowered.compile({} if target in tpu_targets() else {"xla_gpu_enable_triton_gemm": False})


def table_of(found: Sequence[Case]) -> Table:
    table = Table(title="Peak memory per device and bytes moved in a step, MiB")
    for title in ("model", "mesh", "plan", "target", "arguments", "peak", "compiled", "error"):
        table.add_column(title, justify="left" if title in ("model", "plan", "target") else "right")
    for title in ("moved", "compiled", "error", "budget"):
        table.add_column(title, justify="right")
    table.add_column("at")
    for case in found:
        peaks = (
            f"{case.arguments_mib:.0f}",
            f"{case.modelled_mib:.0f}",
            f"{case.compiled_mib:.0f}",
            f"{case.error:+.1%}",
        )
        moved = f"{case.moved_mib:.0f}", f"{case.compiled_moved_mib:.0f}", f"{case.moved_error:+.1%}"
        table.add_row(case.model, case.mesh, case.plan, case.target, *peaks, *moved, *_ends(case))
    return table


def _ends(case: Case) -> tuple[str, str]:
    exceeded = " exceeded" if case.exceeds else ""
    return "" if case.budget_mib is None else f"{case.budget_mib:.0f}{exceeded}", case.at


def _errors(case: Case) -> dict[str, float]:
    return {"error": case.error, "moved_error": case.moved_error}


def _summary(found: Sequence[Case]) -> Iterator[str]:
    """Yield in words how many cases are near, over all and by target."""
    for name in ("all", *sorted({case.target for case in found})):
        mine = [case for case in found if name in ("all", case.target)]
        errors = [abs(case.error) for case in mine]
        moved = [abs(case.moved_error) for case in mine]
        yield (
            f"{name}: {sum(error <= 0.05 for error in errors)} of {len(mine)} peaks within 5 %, "
            f"{sum(error <= 0.1 for error in errors)} within 10 %, mean {math.fsum(errors) / len(mine):.1%}, "
            f"worst {max(errors):.1%}; bytes moved within 15 % in {sum(error <= 0.15 for error in moved)}, "
            f"mean {math.fsum(moved) / len(mine):.1%}, worst {max(moved):.1%}"
        )
    budgets = [case for case in found if case.budget_mib is not None]
    yield f"{sum(case.exceeds for case in budgets)} of {len(budgets)} exceed their budget"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*gpu_targets(), *tpu_targets()]
    parser.add_argument("--targets", nargs="+", default=["h100", "a100", "b200"], choices=known, help="to compile for")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--meshes", nargs="*", default=["8", "2x4"])
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.75, 0.5, 0.3], help="shares of data parallel")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Case] = []
    for name in options.models:
        for text in options.meshes:
            shape = tuple(map(int, text.split("x")))
            mesh = LogicalMesh(shape=shape, axis_names=("data", "model", "expert")[: len(shape)])
            for case in cases(name, mesh, options.targets, options.budgets):
                found.append(case)
                if options.json:
                    lines = [asdict(each) | _errors(each) for each in found]
                    options.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    console = Console(width=160)
    console.print(table_of(found))
    for line in _summary(found):
        console.print(line)


if __name__ == "__main__":
    main()
