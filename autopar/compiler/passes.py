"""The compiler on one screen.

    trace_step      step        -> Trace        its jaxpr, normalised
    make_plan       Trace       -> Plan         every decision
    cut_step        Trace, Plan -> StageGraph   the planned stages, one jaxpr per task
    lower_step      Trace, Plan -> Program      instructions per mesh

What comes before the plan decides; what comes after it only carries out.
"""

from __future__ import annotations

from autopar.compiler.lower import lower
from autopar.compiler.plan_by_hand import plan_by_hand
from autopar.compiler.prepare import prepare, stage_graph
from autopar.compiler.stage_graph import StageGraph
from autopar.compiler.trace import Trace, trace_step
from autopar.compiler.user_wishes import check_callbacks
from autopar.compiler.whole_step import whole_step_program
from autopar.errors import PlanMismatch
from autopar.options import Method
from autopar.plan import Plan
from autopar.program import Program

__all__ = ["check_plan", "cut_step", "lower_step", "make_plan", "trace_step"]


def make_plan(trace: Trace, method: Method | Plan, *, num_devices: int) -> Plan:
    """The plan that a method means for this program, or the given one if it fits."""
    if isinstance(method, Plan):
        check_plan(method, trace, num_devices=num_devices)
        return method
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
            f"The plan uses {plan.num_devices} devices numbered up to {needed - 1}, there are {num_devices}. Run it "
            "where "
            f"there are {needed} devices, or make a plan for {num_devices}."
        )
    names = {leaf.name for leaf in trace.inputs}
    unknown = sorted(set(plan.input_specs) - names)
    if unknown:
        raise PlanMismatch(
            f"The plan gives a spec to {unknown[0]!r}, which is no input of {trace.name}. Its inputs are named like "
            f"{sorted(names)[0]!r}."
        )


def cut_step(trace: Trace, plan: Plan) -> StageGraph:
    """The stages of a plan as programs of their own."""
    prepared = prepare(
        trace,
        num_microbatches=plan.num_microbatches,
        loop_pieces=plan.loop_pieces,
        batch_statistics=plan.batch_statistics,
        random=plan.random,
    )
    return stage_graph(prepared, plan)


def lower_step(trace: Trace, plan: Plan) -> Program:
    """The program of a plan, verified. Raises `Unsupported` for callbacks that it could not keep in order."""
    check_callbacks(trace, plan)
    if plan.num_stages == 1 and plan.num_microbatches == 1:
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
