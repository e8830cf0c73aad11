"""Hold the model of a plan's memory against XLA: modelled and compiled peak per device, on the CPU and for GPUs.

    python -m benchmarks.memory_model [--target cpu|h100] [--models mlp gpt] [--meshes 8 2x4] --json FILE

A case is a model, a mesh, and a plan: "free" is the plan of least time, "data parallel" keeps the whole state on every
device, "0.8" is the best plan within that share of the memory of the free one. The compiled peak is temporaries,
arguments and results less donated ones, as `memory_analysis` gives them; nothing is run, and no GPU is needed.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if "XLA_FLAGS" not in os.environ:  # This only adds devices to the CPU; accelerators are used where there are any.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

import autopar
from autopar.compiler.gpu_aot import gpu_devices
from autopar.compiler.intra_op.figures import h100_figures
from autopar.compiler.intra_op.layout import LogicalMesh, replicated, to_spec
from autopar.compiler.intra_op.local_program import LocalBlock, Value, local_block
from autopar.compiler.intra_op.localize import localize
from autopar.compiler.intra_op.memory_model import MemoryEstimate, peak_memory
from autopar.compiler.intra_op.search import IntraOpPlan, Wishes, plan_intra_op
from autopar.compiler.trace import Trace
from autopar.errors import MemoryTooSmall
from benchmarks.models.gpt import gpt
from benchmarks.models.images import convnet
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model
from benchmarks.models.moe import moe

_GPT = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 8192, "length": 256, "batch": 64}
MODELS: dict[str, Callable[[], Model]] = {
    "mlp, much data": lambda: mlp(layers=8, width=1024, hidden=4096, batch=4096),
    "mlp, large": lambda: mlp(layers=8, width=2048, hidden=8192, batch=256),
    "gpt": lambda: gpt(**_GPT),
    "gpt, wide": lambda: gpt(layers=4, width=1024, heads=16, vocabulary=8192, length=256, batch=8),
    "gpt, scan": lambda: gpt(**_GPT, scan=True),
    "gpt, scan, remat": lambda: gpt(**_GPT, scan=True, remat=True),
    "gpt, remat": lambda: gpt(**_GPT, remat=True),
    "gpt, bfloat16": lambda: gpt(**_GPT, dtype=jnp.bfloat16),
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

    @property
    def error(self) -> float:
        """By which share of the compiled peak the modelled one lies above it."""
        return self.modelled_mib / self.compiled_mib - 1


def cases(name: str, mesh: LogicalMesh, target: str, shares: list[float]) -> Iterator[Case]:
    """The plans of one model on one mesh."""
    model = MODELS[name]()
    trace = autopar.parallelize(model.step).trace(model.abstract_state, model.abstract_batch).trace
    state = sorted(set(dict(trace.state_outputs).values()))
    avals = [v.aval for v in trace.jaxpr.jaxpr.invars]
    whole = Wishes(inputs={number: (replicated(avals[number].ndim),) for number in state})
    free = _plan(trace, mesh)
    plans = {"free": lambda: free, "data parallel": lambda: _plan(trace, mesh, wishes=whole)}
    peak_bytes = _estimate(trace, mesh, free, state)[1].peak_bytes
    for share in shares:
        plans[f"{share:g}"] = lambda share=share: _plan(trace, mesh, memory_budget=share * peak_bytes, donated=state)
    for plan, make in plans.items():
        try:
            block, estimate = _estimate(trace, mesh, make(), state)
        except MemoryTooSmall:
            continue
        yield Case(
            model=name,
            mesh="x".join(map(str, mesh.shape)),
            plan=plan,
            target=target,
            modelled_mib=estimate.peak_bytes / 2**20,
            compiled_mib=_compiled_bytes(trace, block, mesh, state, target) / 2**20,
            arguments_mib=estimate.arguments_bytes / 2**20,
            at=estimate.at,
        )


def _plan(trace: Trace, mesh: LogicalMesh, **how: Any) -> IntraOpPlan:
    return plan_intra_op(
        trace.jaxpr, mesh, h100_figures(len(mesh.shape)), state_outputs=dict(trace.state_outputs), **how
    )


def _estimate(
    trace: Trace, mesh: LogicalMesh, found: IntraOpPlan, donated: list[int]
) -> tuple[LocalBlock, MemoryEstimate]:
    block = local_block(trace.jaxpr.jaxpr, found.plan, mesh)
    return block, peak_memory(block, mesh, donated)


def _compiled_bytes(trace: Trace, block: LocalBlock, mesh: LogicalMesh, donated: list[int], target: str) -> int:
    devices = jax.devices() if target == "cpu" else gpu_devices(target, mesh.num_devices)
    concrete = Mesh(np.reshape(devices[: mesh.num_devices], mesh.shape), mesh.axis_names)
    options = {} if target == "cpu" else {"xla_gpu_enable_triton_gemm": False}  # timing these needs a GPU
    step = jax.jit(
        jaxpr_as_fun(localize(trace.jaxpr, block, mesh)),
        in_shardings=[NamedSharding(concrete, to_spec(v.layout, mesh)) for v in block.inputs],
        out_shardings=[NamedSharding(concrete, to_spec(v.layout, mesh)) for v in block.outputs if isinstance(v, Value)],
        donate_argnums=tuple(donated),
    )
    sizes = step.lower(*(v.variable.aval for v in block.inputs)).compile(options).memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + results


def table_of(found: list[Case]) -> Table:
    table = Table(title="Peak memory per device, MiB")
    for title in ("model", "mesh", "plan", "target", "arguments", "modelled", "compiled", "error", "at"):
        table.add_column(title, justify="left" if title in ("model", "plan", "target", "at") else "right")
    for case in found:
        numbers = f"{case.arguments_mib:.0f}", f"{case.modelled_mib:.0f}", f"{case.compiled_mib:.0f}"
        table.add_row(case.model, case.mesh, case.plan, case.target, *numbers, f"{case.error:+.1%}", case.at)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", help="cpu, or a GPU that gpu_aot knows")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--meshes", nargs="*", default=["8", "2x4"])
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.8], help="shares of the free plan's memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Case] = []
    for name in options.models:
        for text in options.meshes:
            shape = tuple(map(int, text.split("x")))
            mesh = LogicalMesh(shape=shape, axis_names=("data", "model", "expert")[: len(shape)])
            found += cases(name, mesh, options.target, options.budgets)
    console = Console(width=160)
    console.print(table_of(found))
    errors = sorted(abs(case.error) for case in found)
    mean = math.fsum(errors) / len(errors)
    console.print(f"error: mean {mean:.1%}, median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}")
    if options.json:
        lines = [asdict(case) | {"error": case.error} for case in found]
        options.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
