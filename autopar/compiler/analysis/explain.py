"""Explain the layout of an input: the time and memory of every other layout of it, all else chosen anew.

Trace, Plan, name  ->  Explanation
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from jax.sharding import PartitionSpec
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import track
from rich.table import Table
from rich.text import Text

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.choice_graph import block_plan_of
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.memory.estimate import peak_memory
from autopar.compiler.planning.one_mesh import MeshSearchResult, search_on
from autopar.compiler.sharding.layout import to_spec
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.solver.problem import Infeasible
from autopar.compiler.solver.solve import solve
from autopar.compiler.spmd.local_program import local_block
from autopar.errors import InvalidArgument, Unsupported
from autopar.hardware.machine import Machine
from autopar.ir.plan import Plan
from autopar.methods import Auto, HandMethod


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One layout of the input, with the best that the rest can do then: seconds per step, bytes per device."""

    spec: PartitionSpec
    step_time_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The chosen layout of an input and all others, the fastest first."""

    path: str
    shape: tuple[int, ...]
    chosen: PartitionSpec
    alternatives: tuple[Alternative, ...]

    @property
    def of_chosen(self) -> Alternative:
        """The alternative that the plan took."""
        return next(each for each in self.alternatives if each.spec == self.chosen)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=110, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the chosen layout, and a row for each layout."""
        here = self.of_chosen
        yield Text(f"{self.path} of shape {self.shape} is {self.chosen}: {1e3 * here.step_time_s:.4g} ms per step")
        table = Table("spec", "Δ time (ms)", "Δ memory (MB)", "", box=box.SIMPLE_HEAD)
        for each in self.alternatives:
            slower = f"{1e3 * (each.step_time_s - here.step_time_s):+.4g}"
            more = f"{(each.peak_bytes - here.peak_bytes) / 1e6:+.4g}"
            table.add_row(Text(str(each.spec)), slower, more, "chosen" if each is here else "")
        yield table


def explain_plan(trace: Trace, plan: Plan, name: str, *, machine: Machine) -> Explanation:
    """Price every layout of the input that `name`, a path or a regular expression, finds first.

    The layouts of all other inputs are those of the plan, if they were given by hand, and free if they were searched.
    Raises `InvalidArgument` for a name that finds no input, `Unsupported` for a plan of several tasks or stages.
    """
    if plan.sharding is None:
        raise Unsupported(
            f"The plan has {plan.num_stages} stages, {plan.num_microbatches} microbatches and {plan.num_devices} "
            "devices; only the layouts of one program on one mesh of several devices can be explained. Plan with "
            "Auto(num_stages=1), or read plan.certificate and plan.collectives()."
        )
    number = _find(trace, name)
    leaf, mesh = trace.inputs[number], logical_mesh(plan.meshes[0])
    auto = Auto(
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        pins=_given_layouts(trace, plan, number),
        num_microbatches=plan.num_microbatches,
        memory="off",
        random=plan.random,
        batch_statistics=plan.batch_statistics,
    )
    searched = search_on(
        trace,
        auto,
        mesh,
        machine=machine,
        recomputed_layers=plan.sharding.recomputed_layers,
        num_layers=plan.sharding.num_layers,
    )
    choice = searched.intra_op.choices.arguments[number]
    if choice is None:
        raise InvalidArgument(
            f"{leaf.name} has shape {leaf.aval.shape}, which is too small to be split: every device has it."
        )
    specs = [to_spec(layout, mesh) for layout in choice.layouts]
    shown = track(list(enumerate(specs)), "pricing layouts", console=Console(stderr=True), transient=True)
    priced = [_price(trace, searched, choice.number, state, spec) for state, spec in shown]
    return Explanation(
        path=leaf.name,
        shape=tuple(leaf.aval.shape),
        chosen=plan.input_specs.get(leaf.name, PartitionSpec()),
        alternatives=tuple(sorted((p for p in priced if p is not None), key=lambda p: (p.step_time_s, str(p.spec)))),
    )


def _given_layouts(trace: Trace, plan: Plan, number: int) -> dict[str, PartitionSpec]:
    """Return the specs of all inputs but one, by patterns for their names, if a method by hand gave them."""
    if plan.method not in {method.__name__ for method in get_args(HandMethod)}:
        return {}
    return {
        f"^{re.escape(leaf.name)}$": plan.input_specs.get(leaf.name, PartitionSpec())
        for i, leaf in enumerate(trace.inputs)
        if i != number and not below_split_size(leaf.aval)
    }


def _find(trace: Trace, name: str) -> int:
    paths = [leaf.name for leaf in trace.inputs]
    for number, path in enumerate(paths):
        if path == name or path.endswith("." + name):
            return number
    for number, path in enumerate(paths):
        if re.search(name, path):
            return number
    raise InvalidArgument(
        f"No input of {trace.name} is called {name!r}. Inputs are named like {paths[:4]}: give a name, its end, or a "
        "regular expression that finds one."
    )


def _price(trace: Trace, searched: MeshSearchResult, node: int, state: int, spec: PartitionSpec) -> Alternative | None:
    """The best plan with one layout fixed; None where there is none."""
    table, mesh = searched.intra_op.table, searched.mesh
    costs: list[np.ndarray] = list(table.costs)
    costs[node] = np.where(np.arange(len(costs[node])) == state, costs[node], np.inf)
    problem = table.problem()
    try:
        optimum = solve(replace(problem, costs=tuple(costs)))
    except Infeasible:
        return None
    plan = block_plan_of(searched.intra_op.choices, optimum.assignment)
    block = local_block(jc.open_jaxpr(searched.closed)[0], plan, mesh)
    workspace = table.mesh_costs.machine.product_workspace_bytes
    memory = peak_memory(block, mesh, trace.donated_inputs, product_workspace=workspace)
    return Alternative(spec=spec, step_time_s=optimum.value, peak_bytes=memory.peak_bytes)
