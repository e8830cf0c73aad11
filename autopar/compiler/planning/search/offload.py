"""Search with and without offloading to the hosts, and take the fastest plan that fits.

    StageProblem with offload="auto"  ->  Plan

Offloaded bytes take time on the links. Where memory is short, plans without offloading take time, too: for recomputed
layers, for state that is gathered, for more stages. So all are searched and simulated: those with all state on the
devices, or with the optimizer's on the hosts, over all layouts; those that offload parameters or activations by degrees
of parallelism (`planning.by_hand.degree_plans`).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.compiler.planning.by_hand.degree_plans import plans_by_degrees
from autopar.compiler.planning.one_mesh import memory_budget
from autopar.compiler.planning.search.best_first import Simulated, search_plan
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.errors import AutoparError, MemoryTooSmall
from autopar.ir.plan import Plan
from autopar.methods import offloaded

_SEARCHED = ("off", "optimizer")
_BY_DEGREES = ("activations", "parameters", ("parameters", "activations"))


def search_with_offload(problem: StageProblem, simulated: Simulated) -> Plan:
    """Return the best plan for what the method says of `offload`.

    Raises as `search_plan`; where nothing fits, the error is that of plans that keep all state on the devices.
    """
    asked = problem.method.offload
    if asked == "auto":
        return _fastest(problem, simulated)
    found: list[Plan] = []
    refused: AutoparError | None = None
    try:
        found.append(search_plan(problem, simulated))
    except AutoparError as error:
        refused = error
    if not problem.offloads and found:
        return found[0]  # nothing to be held against, nor a host that may be too small
    if not offloaded(problem.method).isdisjoint({"parameters", "activations"}):
        found += _fitting(problem, asked, simulated)
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=simulated.step_s)


def _fastest(problem: StageProblem, simulated: Simulated) -> Plan:
    found: list[Plan] = []
    refused: list[AutoparError] = []
    for offload in _SEARCHED:
        method = replace(problem.method, offload=offload)
        try:
            found.append(
                search_plan(
                    replace(problem, method=method, known={}, layer_optima={}, solved_stages={}, needed_shares={}),
                    simulated,
                )
            )
        except AutoparError as error:
            if offload == "off" and not isinstance(error, MemoryTooSmall):
                raise
            refused.append(error)
    # Where nothing is computed again for want of room, there is nothing that more room could make faster.
    if not found or all(map(_computes_again, found)):
        for offload in _BY_DEGREES:
            found += _fitting(problem, offload, simulated)
    if not found:
        raise refused[0]
    return min(found, key=simulated.step_s)


def _computes_again(plan: Plan) -> bool:
    recomputed = plan.sharding is not None and bool(plan.sharding.recomputed_layers)
    return recomputed or any(stage.recomputed for stage in plan.stages)


def _fitting(problem: StageProblem, offload: str | tuple[str, ...], simulated: Simulated) -> list[Plan]:
    """Return the fastest plan by degrees that fits, if one does: with the headroom of compilers, or else without."""
    fitting: list[tuple[bool, float, int, Plan]] = []
    for number, plan in enumerate(plans_by_degrees(problem, offload)):
        try:
            step_s = simulated.step_s(plan)
        except MemoryTooSmall:  # of a host
            continue
        peak_bytes = max(simulated.peak_bytes(plan))
        budget = memory_budget(problem.method, problem.machine, checked=problem.checked)
        if peak_bytes <= budget.nbytes:
            fitting.append((peak_bytes > budget.limit_bytes, step_s, number, plan))
    return [min(fitting)[-1]] if fitting else []
