"""The compiler on one screen.

    trace_step      step        -> Trace        its jaxpr, normalised
    make_plan       Trace       -> Plan         every decision
    cut_step        Trace, Plan -> StageGraph   the planned stages, one jaxpr per task
    lower_step      Trace, Plan -> Program      instructions per mesh

What comes before the plan decides; what comes after it only carries out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.trace import Trace, trace_step
from autopar.compiler.lowering.lower import lower
from autopar.compiler.lowering.single_program import whole_step_program
from autopar.compiler.lowering.user_constraints import check_callbacks
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.prepare import prepare
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.manual import plan_by_hand
from autopar.compiler.planning.megatron import plan_megatron
from autopar.compiler.planning.one_mesh import plan_by_search
from autopar.compiler.planning.search import plan_by_stages, searches_stages
from autopar.compiler.planning.stage_costs import StageProblem
from autopar.errors import PlanMismatch
from autopar.hardware.machine import Machine
from autopar.ir.instructions import listed, spec_parts
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.program import Program
from autopar.methods import Auto, Megatron, Method, SearchMethod
from autopar.progress import collector_paused

__all__ = ["check_plan", "cut_step", "lower_step", "make_plan", "trace_step"]


@collector_paused()
def make_plan(
    trace: Trace,
    method: Method | Plan,
    *,
    num_devices: int,
    kind: str | Machine,
    checked: bool = False,
    cache_directory: Path | None = None,
) -> Plan:
    """The plan that a method means for this program on devices of a kind, or the given one if it fits.

    Searches keep what they solved in `cache_directory`, if one is given, and use all of a memory budget if the plan is
    `checked` by compiling it.
    """
    if isinstance(method, Plan):
        check_plan(method, trace, num_devices=num_devices)
        return method
    if isinstance(method, Auto) and searches_stages(trace, method, num_devices):
        machine = kind if isinstance(kind, Machine) else Machine.of_kind(kind)
        found, certificate = plan_by_stages(
            StageProblem(
                trace=trace,
                method=method,
                num_devices=num_devices,
                machine=machine,
                kind=kind,
                cache_directory=cache_directory,
            )
        )
        if isinstance(found, Plan):
            return found
        plan = plan_by_search(
            trace, found, num_devices=num_devices, kind=kind, checked=checked, cache_directory=cache_directory
        )
        return replace(plan, certificate=certificate)
    if isinstance(method, SearchMethod):
        return plan_by_search(
            trace, method, num_devices=num_devices, kind=kind, checked=checked, cache_directory=cache_directory
        )
    if isinstance(method, Megatron):
        return plan_megatron(trace, method, num_devices=num_devices, kind=kind, cache_directory=cache_directory)
    return plan_by_hand(trace, method, num_devices=num_devices)


def check_plan(plan: Plan, trace: Trace, *, num_devices: int) -> None:
    """Raise `PlanMismatch` unless the plan was made for this program and its devices are there."""
    if plan.fingerprint not in ("", trace.fingerprint):
        raise PlanMismatch(
            f"The plan was made for the program {plan.fingerprint}, {trace.name} on these arguments is "
            f"{trace.fingerprint}: another step, other shapes, or another release of JAX. Make a new plan with "
            "step.trace(...).plan(), or load the one that belongs to this program."
        )
    needed = max(max(mesh.devices) for mesh in plan.meshes) + 1
    if needed > num_devices:
        raise PlanMismatch(
            f"The plan uses {plan.num_devices} devices numbered up to {needed - 1}, there are {num_devices}. "
            f"Run it where there are {needed} devices, or make a plan for {num_devices}."
        )
    shapes = {leaf.name: leaf.aval.shape for leaf in trace.inputs}
    for name, spec in sorted(plan.input_specs.items()):
        if name not in shapes:
            raise PlanMismatch(
                f"The plan gives a spec to {name!r}, which is no input of {trace.name}. Its inputs are "
                f"{listed(tuple(sorted(shapes)))}. Use one of these names, or leave the spec out."
            )
        for mesh in plan.meshes:
            _check_spec_fits(name, shapes[name], spec, mesh)


def _check_spec_fits(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: MeshPlan) -> None:
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    parts = spec_parts(spec, defaultdict(lambda: 1, sizes))  # the spec may be over the axes of another mesh
    if len(parts) > len(shape) or any(size % count for size, count in zip(shape, parts)):
        raise PlanMismatch(
            f"The plan splits {name}, of shape {shape}, by {spec} over a mesh of {sizes}. Every entry needs an axis of "
            "the array, whose size it divides: give another spec, or make a new plan."
        )


def cut_step(trace: Trace, plan: Plan) -> StageGraph:
    """The stages of a plan as programs of their own."""
    prepared = prepare(
        trace,
        num_layers=plan.num_layers,
        num_microbatches=plan.num_microbatches,
        loop_pieces=plan.loop_pieces,
        batch_statistics=plan.batch_statistics,
        random=plan.random,
    )
    graph = cut_stages(prepared, StageCut.of(plan))
    for name, spec in sorted(plan.cut_specs.items()):
        if name not in graph.values:
            crossing = listed(tuple(sorted(graph.crossing)))
            raise PlanMismatch(
                f"The plan gives a spec to {name!r}, which is no value between the stages of {trace.name}. These are "
                f"{crossing}. Use one of these names, or leave the spec out."
            )
        for mesh in plan.meshes:
            _check_spec_fits(name, graph.values[name].shape, spec, mesh)
    return graph


@collector_paused()
def lower_step(trace: Trace, plan: Plan) -> Program:
    """The program of a plan, verified. Raises `Unsupported` for callbacks that it could not keep in order."""
    check_callbacks(trace, plan)
    whole = plan.num_stages == 1 and plan.num_microbatches == 1 and plan.meshes[0].sharding is None
    if plan.sharding is not None or whole:
        program = whole_step_program(trace, plan)
    else:
        program = lower(
            cut_step(trace, plan),
            plan,
            leaf_sizes={i: trace.inputs[i].aval.shape[0] for i in trace.batch_inputs},
            donated_leaves=trace.donated_inputs,
        )
    program.verify()
    return program
