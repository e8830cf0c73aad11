"""Tell the inputs of a step apart by what they are for: the names of the memory that they take.

Trace  ->  category and path of every input
"""

from __future__ import annotations

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.ir.memory_part import Category


def input_parts(trace: Trace) -> tuple[tuple[Category, str], ...]:
    """Return the category and the path of every input.

    State is what an output replaces; of it, parameters are what a differentiated equation reads.
    """
    jaxpr = jc.open_jaxpr(trace.jaxpr)[0]
    differentiated = {id(atom) for eqn in jaxpr.eqns if jc.ad_phase(eqn) for atom in eqn.invars}
    replaced = set(trace.state_outputs.values())

    def category(number: int) -> Category:
        if number in trace.batch_inputs:
            return "batch"
        if number not in replaced:
            return "other inputs"
        return "parameters" if id(jaxpr.invars[number]) in differentiated else "optimizer"

    return tuple((category(number), leaf.name) for number, leaf in enumerate(trace.inputs))
