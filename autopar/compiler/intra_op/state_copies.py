"""Find the sums of gradients for which new state is copied, before their layouts are chosen.

    jaxpr, state  ->  bytes of state that are copied for every byte of such a sum

Where a compiler copies state (`memory.twins:made_elsewhere`), it does so if a gradient is transposed behind its sum. A
sum behind the transposition, which sends as much, leaves the state in its place: that is for the layouts to choose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.fusion_kinds import kind_of
from autopar.compiler.jaxprs.primitives import ELEMENTWISE, REARRANGEMENTS
from autopar.compiler.jaxprs.strides import turns_tiles

_BY_ELEMENTS = ELEMENTWISE | REARRANGEMENTS


def transposed_gradients(jaxpr: jc.Jaxpr, state_outputs: Mapping[int, int]) -> dict[jc.Var, float]:
    """Return the values that updates of state transpose, with its bytes for each of theirs.

    `state_outputs` are the numbers of the inputs that results of these numbers replace.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found: defaultdict[jc.Var, float] = defaultdict(float)
    for number, old in state_outputs.items():
        new: Any = jaxpr.outvars[number]
        left, seen = [new] if isinstance(new, jc.Var) else [], set[Any]()
        turned = set[Any]()
        while left:
            if (v := left.pop()) in seen:
                continue
            seen.add(v)
            eqn = makers.get(v)
            if eqn is None or eqn.primitive.name not in _BY_ELEMENTS:
                continue
            aval: Any = v.aval
            if eqn.primitive.name == "transpose" and turns_tiles(eqn, tuple(aval.shape)):
                turned.update(jc.operands(eqn))
            else:
                left += jc.operands(eqn)
        for v in _with_origins(turned, makers) if jaxpr.invars[old] in seen else ():
            found[v] += aval_bytes(new.aval) / aval_bytes(v.aval)
    return dict(found)


def _with_origins(values: Iterable[jc.Var], makers: Mapping[jc.Var, jc.JaxprEqn]) -> set[jc.Var]:
    """Return values with the arrays that they are views of: any of these may be the sum."""
    found = set[jc.Var]()
    for value in values:
        v = value
        while v not in found:
            found.add(v)
            eqn = makers.get(v)
            if eqn is not None and kind_of(eqn) == "view":
                v = next(iter(jc.operands(eqn)), v)
    return found
