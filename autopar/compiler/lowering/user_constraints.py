"""Check callbacks and meshes of the user's own; drop sharding constraints where there is nothing to lay out.

On several devices the plan obeys them (`planning.demands.constraints`). Callbacks that must keep an order need one
executable that all of them are in.
"""

from __future__ import annotations

from typing import Any

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.evaluate import rewrite
from autopar.compiler.jaxprs.primitives import CONSTRAINTS, MANUAL
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.errors import Unsupported
from autopar.ir.plan import Plan


def check_callbacks(trace: Trace, plan: Plan) -> None:
    """Raise `Unsupported` for ordered callbacks in several executables, or on more devices than JAX can order."""
    several = plan.num_stages > 1 or plan.num_microbatches > 1
    for eqn in jc.all_equations(trace.jaxpr):
        if not eqn.effects:
            continue
        if several and jc.keeps_order(eqn):
            raise Unsupported(
                f"The step calls Python in order, by {jc.describe(eqn)}, and the plan has {plan.num_stages} stages and "
                f"{plan.num_microbatches} microbatches, which have no common order. Use ordered=False, or one stage "
                "and one microbatch."
            )
        if plan.num_devices > 1 and jc.runs_on_one_device(eqn):
            raise Unsupported(
                f"The step calls Python in order, by {jc.describe(eqn)}, which JAX supports on one device only; the "
                f"plan has {plan.num_devices}. Use ordered=False, or pass `devices=` with one."
            )


def check_manual_meshes(trace: Trace) -> None:
    """Raise `Unsupported` for a `shard_map` that could not be written for whole arrays."""
    for eqn in jc.all_equations(trace.jaxpr):
        if eqn.primitive.name in MANUAL:
            raise Unsupported(
                f"The step lays out arrays by hand, by {jc.describe(eqn)}, with a collective of some devices of an "
                "axis (axis_index_groups, ragged_all_to_all), a constraint on parts, or a kernel without a rule for "
                "jax.vmap. The planned mesh is another one, so that only what means the same over mapped axes is "
                "computed. Write its body for whole arrays, with jax.vmap and the same axis_name for its collectives, "
                "or declare how it splits with autopar.sharding_rule."
            )


def check_results_on_host(trace: Trace) -> None:
    """Raise `Unsupported` for a result that the step itself puts on the host and that is no state of the next step."""
    for place, line in trace.host_results.items():
        if place not in trace.state_outputs:
            raise Unsupported(
                f"{trace.name} puts its result {trace.outputs[place].name or 'itself'} into the memory of the host, by "
                f"{line}, and only state that an input brings back can live there. Leave that line out, and fetch the "
                "result with jax.device_get."
            )


def check_state_on_host(trace: Trace, plan: Plan) -> None:
    """Raise `Unsupported` for a plan that keeps state on the devices which the step itself puts on the host."""
    kept = {name for part in plan.host_state for name in part}
    lines = {trace.inputs[trace.state_outputs[place]].name: line for place, line in trace.host_results.items()}
    avals = {leaf.name: leaf.aval for leaf in trace.inputs}
    for name in trace.host_state:
        if name not in kept and not below_split_size(avals[name]):
            raise Unsupported(
                f"{trace.name} puts {name} into the memory of the host, by {lines[name]}, and {plan.method} keeps all "
                "state on the devices. Plan with Auto, Megatron (zero=3 divides all state), PipelineParallel or "
                "DataParallel, or leave that line out."
            )


def without_constraints(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """Return the program without its sharding constraints and meshes in types, which ask for nothing on one device."""
    if not (jc.says_where(closed) or any(eqn.primitive.name in CONSTRAINTS for eqn in jc.all_equations(closed))):
        return closed

    def unconstrained(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> list[Any]:
        if eqn.primitive.name in CONSTRAINTS:
            return values[:1]
        changes = {**jc.map_subjaxprs(eqn, without_constraints), **jp.without_shardings(eqn)}
        return jc.bind_equation(eqn, values, changes)

    return rewrite(closed, unconstrained)
