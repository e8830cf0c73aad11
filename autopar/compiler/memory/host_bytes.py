"""Count what a program's own transfers keep on the host: the values that its types put there, by when they are read.

jaxpr of a device  ->  bytes on its host at the worst moment
"""

from __future__ import annotations

from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes


def makes_host_values(closed: Any) -> bool:
    """Return whether a program puts any value on the host."""
    return any(jc.is_on_host(v) for eqn in jc.all_equations(closed) for v in eqn.outvars)


def host_bytes(closed: Any) -> int:
    """Return the most bytes on the host that a program has made there and still reads; 0 for most programs.

    What it returns there counts where it is called.
    """
    jaxpr, _ = jc.open_jaxpr(closed)
    last = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in jc.operands(eqn)}
    returned = {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    there: dict[Any, int] = {}
    most = 0
    for number, eqn in enumerate(jaxpr.eqns):
        there |= {v: int(aval_bytes(v.aval)) for v in eqn.outvars if jc.is_on_host(v) and v not in returned}
        inside = max(map(host_bytes, jc.subjaxprs(eqn)), default=0)
        most = max(most, sum(there.values()) + inside)
        there = {v: size for v, size in there.items() if last.get(v, 0) > number}
    return most
