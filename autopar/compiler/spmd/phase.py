"""Tell the phase of an equation: forward, backward or update."""

from __future__ import annotations

from autopar.compiler.jaxprs import compat as jc


def phase_of(eqn: jc.JaxprEqn, only_phase: str | None) -> str:
    """The phase of an equation in a task of one phase. The forward task of a last stage holds its backward pass."""
    if only_phase not in (None, "forward"):
        return only_phase
    own = jc.ad_phase(eqn)
    return "backward" if only_phase == "forward" and own == "backward" else only_phase or own or "update"
