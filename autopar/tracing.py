"""From a call of a step to its trace, and with a plan to its program: the same in every process that does it."""

from __future__ import annotations

from autopar.arguments import Arguments, Call, abstract
from autopar.compiler import passes
from autopar.compiler.trace import Leaf, Trace
from autopar.ir.plan import Plan
from autopar.ir.program import Program


def trace_call(arguments: Arguments, call: Call) -> Trace:
    """The trace of a step on one call's arguments."""
    described = arguments.describe_leaves(call)
    leaves = [
        Leaf(name=name, argument=position, aval=abstract(leaf, name))
        for (name, position), leaf in zip(described, call.leaves, strict=True)
    ]
    return passes.trace_step(
        arguments.call_flat(call),
        leaves,
        name=arguments.name,
        batch_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in arguments.batch],
        donated_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in arguments.donated],
    )


def program_of(arguments: Arguments, call: Call, plan: Plan) -> Program:
    """The program of a step by a plan: what every process of a cluster makes for itself."""
    return passes.lower_step(trace_call(arguments, call), plan)
