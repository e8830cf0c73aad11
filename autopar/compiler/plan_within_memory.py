"""Plan, compile, and plan again for less memory, until what the compiler makes of the plan stays within the budget.

The model of memory is right to about a tenth. Where the devices are here, a plan for a budget in bytes is compiled to
see what it needs, and so may use all of its budget; elsewhere the model's headroom is kept free instead. Compiling
takes time, but not twice where JAX's compilation cache is on: what is compiled here is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.compiler import passes
from autopar.compiler.analysis.compiled_collectives import compiled_peak_bytes
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.planning.by_hand.follow import Followed
from autopar.compiler.planning.one_mesh import memory_limit, search_of
from autopar.compiler.planning.search.best_first import Simulated
from autopar.errors import MemoryTooSmall
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.methods import Method, SearchMethod
from autopar.progress import tell

_ATTEMPTS = 4
_BELOW = 0.98
"""Factor on the limit that a plan which needed too much would have just kept to: the next plan gets that."""


def plan_that_fits(
    trace: Trace,
    method: Method | Plan | Followed,
    *,
    cluster: Cluster,
    devices: Sequence[Any] | None,
    simulated: Simulated,
    cache_directory: Path | None,
) -> Plan:
    """The plan of a method, as `passes.make_plan`; with `devices` and a memory budget as a number, checked on them.

    Raises `MemoryTooSmall` if no plan is found that keeps the budget when it is compiled.
    """

    def made(method: Method | Plan | Followed, *, checked: bool) -> Plan:
        return passes.make_plan(
            trace,
            method,
            cluster=cluster,
            simulated=simulated,
            checked=checked,
            cache_directory=cache_directory,
        )

    if (
        devices is None
        or cluster.is_mixed
        or not isinstance(method, SearchMethod)
        or isinstance(search_of(method).memory, str)
    ):
        return made(method, checked=False)
    plan = made(method, checked=True)
    budget = limit = memory_limit(search_of(method).memory, cluster.machine)
    tried: list[float] = []
    while True:
        tell("compiling, to see what the plan needs in memory")
        tried.append(compiled_peak_bytes(plan, passes.lower_step(trace, plan), devices))
        if tried[-1] <= budget:
            return plan
        if len(tried) == _ATTEMPTS:
            raise MemoryTooSmall(_shortage(budget, tried), least_share=min(tried) / budget)
        limit *= budget / tried[-1] * _BELOW
        try:
            plan = made(replace(method, memory=limit), checked=True)
        except MemoryTooSmall as error:
            raise MemoryTooSmall(
                f"{_shortage(budget, tried)} For {limit / 2**20:.1f} MiB: {error.shortage}",
                least_share=min(tried) / budget,
            ) from None


def _shortage(budget: float, tried: Sequence[float]) -> str:
    plans = "The plan" if len(tried) == 1 else f"Each of the {len(tried)} plans"
    return (
        f"{plans} made for {budget / 2**20:.1f} MiB per device needs more when it is compiled, at least "
        f"{min(tried) / 2**20:.1f} MiB."
    )
