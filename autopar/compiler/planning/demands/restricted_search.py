"""Restrict the layouts of a step to one form of parallelism, so that its plan is provably of that form.

Which dimensions carry examples, count experts or are others is known from `frontend.dimension_kinds`. Axes then split

    method            values with examples           values without              inputs
    Zero              data                           any kind                    state is in as many parts as there can
                                                                                 be: the optimizer's, at stage 3 all
    TensorParallel    tensor, sequence and expert    any kind                    batches are whole
    ExpertParallel    data and expert                expert                      experts are in as many parts as there
                                                                                 can be

and batches are split over all devices, but by `TensorParallel`. So parameters are converted to another type, and
gradients summed, in parts where the state is divided. At stage 3 parameters are gathered for every pass anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.compiler.frontend.dimension_kinds import StepKinds, step_kinds
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.planning.demands.kinds import AllowedSplits, allowed_splits, has_examples, within_kinds
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, num_shards, replicated, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.strategies import Strategy
from autopar.methods import ExpertParallel, TensorParallel, Zero

RestrictedMethod = Zero | TensorParallel | ExpertParallel

_KINDS = {
    Zero: ("data", "zero"),
    TensorParallel: ("tensor", "sequence", "expert", "zero"),
    ExpertParallel: ("data", "expert"),
}


def restricted_constraints(
    trace: Trace, closed: jc.ClosedJaxpr, method: RestrictedMethod, mesh: LogicalMesh
) -> Constraints:
    """Return the constraints of a method on one program on one mesh."""
    kinds, (allowed,) = step_kinds(closed, trace.batch_axes), allowed_splits(_KINDS[type(method)], mesh)
    assert allowed is not None
    within = within_kinds(Constraints(), allowed, kinds, mesh)
    constraints = replace(within, inputs=_input_layouts(trace, closed, method, mesh, kinds, allowed))
    if not isinstance(method, Zero):
        return constraints
    axes = _axes(mesh)

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        examples = [any(map(has_examples, kinds.of(atom))) for atom in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name == "scatter-add" and examples[2] and not examples[0]:
            return every  # to the gradient of an embedding, of which each device may add all rows to a part
        kept = within.restrict(eqn, every)
        return tuple(s for s in kept if _splits_examples(s, examples, axes)) or kept

    return replace(constraints, restrict=restrict, keep_split=axes if method.stage == 3 else frozenset[int]())


def _axes(mesh: LogicalMesh) -> frozenset[int]:
    """The axes of several devices."""
    return frozenset(axis for axis, size in enumerate(mesh.shape) if size > 1)


def _splits_examples(strategy: Strategy, examples: Sequence[bool], axes: frozenset[int]) -> bool:
    """True if every device works on examples of its own."""
    layouts = zip((*strategy.operands, *strategy.results), examples, strict=True)
    return all(axes <= frozenset(used_axes(layout)) for layout, has in layouts if has)


def _input_layouts(
    trace: Trace,
    closed: jc.ClosedJaxpr,
    method: RestrictedMethod,
    mesh: LogicalMesh,
    kinds: StepKinds,
    allowed: AllowedSplits,
) -> dict[int, tuple[Layout, ...]]:
    """Return the layouts that inputs may have, by number; those of few elements are whole in any case."""
    used, state = used_by_the_model(closed), set(trace.state_outputs.values())
    found: dict[int, tuple[Layout, ...]] = {}
    for i, leaf in enumerate(trace.inputs):
        if below_split_size(leaf.aval):
            continue
        shape = tuple(leaf.aval.shape)
        layouts = allowed.layouts(even_layouts(shape, mesh), (kinds.inputs[i],), mesh)
        match method:
            case TensorParallel():
                found[i] = (replicated(len(shape)),) if i in trace.batch_axes else layouts
            case _ if i in trace.batch_axes:
                found[i] = _in_rows(layouts, trace.batch_axes[i], mesh)
            case Zero(stage=stage) if i in state and i in used and stage < 3:
                found[i] = (replicated(len(shape)),)
            case _:
                found[i] = _most_divided(shape, layouts, mesh) if i in state else layouts
    return found


def _in_rows(layouts: Sequence[Layout], axis: int, mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Return the layout of a batch over all devices, or if they do not divide its rows, those over some of them."""
    everything = tuple(sorted(_axes(mesh)))
    split = tuple(layout for layout in layouts if layout.dims[axis] == everything)
    return split or tuple(each for each in layouts if not any((*each.dims[:axis], *each.dims[axis + 1 :])))


def _most_divided(shape: tuple[int, ...], layouts: Sequence[Layout], mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Return those layouts of an array that have the most parts."""
    parts = [num_shards(shape, layout, mesh) for layout in layouts]
    return tuple(layout for layout, each in zip(layouts, parts, strict=True) if each == max(parts))


def used_by_the_model(closed: jc.ClosedJaxpr) -> set[int]:
    """The inputs that the forward or backward pass reads: parameters, in contrast to the optimizer's state."""
    jaxpr, _ = jc.open_jaxpr(closed)
    read = {v for eqn in jaxpr.eqns if jc.ad_phase(eqn) is not None for v in jc.operands(eqn)}
    # A loop over microbatches is in no phase itself, but its body is.
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            inside = used_by_the_model(jp.scan_of(eqn).body)
            read |= {v for i, v in enumerate(eqn.invars) if i in inside and isinstance(v, jc.Var)}
    return {i for i, v in enumerate(jaxpr.invars) if v in read}
