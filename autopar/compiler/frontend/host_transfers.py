"""Read what a step itself says of memories: transfers within it, and results that it puts on the host.

    device_put(x, NamedSharding(mesh, spec, memory_kind="pinned_host"))  ->  a constraint to the spec, and a transfer
    device_put(moment, Space.Host) as a result                           ->  the moment, and the line that puts it there

Where state lives is the program's to see to: it brings state on the host to the devices part by part and back
(`lowering.host_memory`), where the step, as one program, has all of it come and leave at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import rewrite
from autopar.compiler.jaxprs.params import targets_of


def transfers_by_memory(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """Return the program with devices named in none of its transfers: the plan says on which it runs."""
    if not any(_names_devices(eqn) for eqn in jc.all_equations(closed)):
        return closed

    def equation(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if not _names_devices(eqn):
            return jc.bind_equation(eqn, values, jc.map_subjaxprs(eqn, transfers_by_memory))
        spaces = [jax.memory.Space.Host if jc.is_on_host(v) else jax.memory.Space.Device for v in eqn.outvars]
        laid_out = [_laid_out(x, to) for x, to in zip(values, targets_of(eqn), strict=True)]
        return jc.bind_equation(eqn, laid_out, {"devices": tuple(spaces)})

    return rewrite(closed, equation)


def _names_devices(eqn: jc.JaxprEqn) -> bool:
    return eqn.primitive.name == "device_put" and any(isinstance(to, Sharding) for to in targets_of(eqn))


def _laid_out(x: Any, to: Any) -> Any:
    given = isinstance(to, NamedSharding) and any(to.spec)
    return jax.lax.with_sharding_constraint(x, to.with_memory_kind("device")) if given else x


def results_on_devices(closed: jc.ClosedJaxpr) -> tuple[jc.ClosedJaxpr, dict[int, str]]:
    """Return the program without the transfers of its results to the host, and by output what made each."""
    jaxpr, _ = jc.open_jaxpr(closed)
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    outputs, placed = list(jaxpr.outvars), dict[int, str]()
    for place, v in enumerate(outputs):
        while isinstance(v, jc.Var) and v in made_by and made_by[v].primitive.name == "device_put" and jc.is_on_host(v):
            placed.setdefault(place, jc.describe(made_by[v]))
            v = made_by[v].invars[made_by[v].outvars.index(v)]
        outputs[place] = v
    return (eliminate_dead(jc.with_results(closed, outputs)), placed) if placed else (closed, {})
