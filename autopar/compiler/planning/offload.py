"""Search with and without state on the host, and take the faster plan.

    StageProblem with offload="auto"  ->  Plan

State on the host takes the time of its bytes over the links; where memory is short, the plans without take time as
well: layers that are computed again, state that is gathered, more stages. Both are searched, and simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.compiler.planning.search import search_plan
from autopar.compiler.planning.stage_costs import StageProblem
from autopar.errors import AutoparError, MemoryTooSmall
from autopar.ir.plan import Plan


def search_with_offload(problem: StageProblem, simulated_s: Callable[[Plan], float]) -> Plan:
    """Return the best plan for what the method says of `offload`.

    Raises as `search_plan`; where nothing fits, the error is that of plans that keep all state on the devices.
    """
    if problem.method.offload != "auto":
        try:
            return search_plan(problem, simulated_s)
        except MemoryTooSmall as error:
            if problem.offloads or not problem.trace.differentiates:
                raise
            raise MemoryTooSmall(
                f'{error} Or let state that only the update reads live in the memory of the hosts: offload="auto".'
            ) from None
    found: list[Plan] = []
    refused: list[AutoparError] = []
    for offload in ("off", "optimizer"):
        method = replace(problem.method, offload=offload)
        try:
            found.append(search_plan(replace(problem, method=method, known={}, solved_stages={}), simulated_s))
        except AutoparError as error:
            if offload == "off" and not isinstance(error, MemoryTooSmall):
                raise
            refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=simulated_s)
