"""Plan, compile, and plan again for less memory, until what the compiler makes of the plan stays within the budget.

The model of memory is right to about a tenth. Where the devices are here, a plan for a budget in bytes is compiled to
see what it needs, and so may use all of its budget; elsewhere the compiler's headroom is kept free instead. Compiling
takes time, but not twice where JAX's compilation cache is on: what is compiled here is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.compiler import passes
from autopar.compiler.intra_op.figures import figures_of
from autopar.compiler.plan_by_search import memory_limit, search_of
from autopar.compiler.trace import Trace
from autopar.compiler.verify_plan import compiled_peak_bytes
from autopar.machine import Machine
from autopar.options import Method
from autopar.plan import Plan
from autopar.progress import tell
from autopar.search_methods import SearchMethod

_ATTEMPTS = 3
_BELOW = 0.98
"""Of its share of a budget, what the next plan gets after one that needed too much."""


def plan_that_fits(
    trace: Trace,
    method: Method | Plan,
    *,
    num_devices: int,
    kind: str | Machine,
    devices: Sequence[Any] | None,
    cache_directory: Path | None = None,
) -> Plan:
    """The plan of a method, as `passes.make_plan`; with `devices` and a memory budget as a number, checked on them."""

    def made(method: Method | Plan, *, checked: bool) -> Plan:
        return passes.make_plan(
            trace, method, num_devices=num_devices, kind=kind, checked=checked, cache_directory=cache_directory
        )

    if devices is None or not isinstance(method, SearchMethod) or isinstance(search_of(method).memory, str):
        return made(method, checked=False)
    plan = made(method, checked=True)
    budget = limit = memory_limit(search_of(method).memory, figures_of(kind, plan.meshes[0].shape))
    for _ in range(_ATTEMPTS):
        tell("compiling, to see what the plan needs in memory")
        needed = compiled_peak_bytes(plan, passes.lower_step(trace, plan), devices)
        if needed <= budget:
            return plan
        limit *= budget / needed * _BELOW
        plan = made(replace(method, memory=limit), checked=True)
    return made(replace(method, memory=budget), checked=False)
