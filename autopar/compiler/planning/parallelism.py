"""Restrict the search to one kind of parallelism, so that its plan is provably of that kind.

Which dimension of a value carries the batch is known from the step with other numbers of examples at a time, at twice
the batch or in other microbatches: it is the one that differs. In the model (forward and backward) then

    Zero            values with a batch dimension split along it and nothing else; parameters are whole when used
    TensorParallel  no dimension with the batch is split
    ExpertParallel  values split along the batch, or along batch dimensions of products (the experts)

What only the update touches (moments, clipped gradients) is free in all of them but for its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.cse import merge_common_subexpressions
from autopar.compiler.lowering.microbatch_loop import microbatch_loop
from autopar.compiler.sharding.free_values import is_small
from autopar.compiler.sharding.layout import Layout, LogicalMesh, all_layouts, replicated
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import InvalidArgument, Unsupported
from autopar.methods import ExpertParallel, TensorParallel, Zero

Dims = tuple[tuple[int, ...], ...]
"""Of each operand and result, the dimensions that carry the batch."""


def parallelism_constraints(
    trace: Trace, closed: jc.ClosedJaxpr, method: Zero | TensorParallel | ExpertParallel, mesh: LogicalMesh
) -> Constraints:
    """The restrictions of a kind.

    Raises `Unsupported` for a step whose batch dimensions cannot be found, `InvalidArgument` for a batch that the
    devices cannot share.
    """
    batch_dims = _batch_dims(trace, closed, method)
    experts = _expert_inputs(closed) if isinstance(method, ExpertParallel) else set[int]()
    used = _used_by_the_model(closed)
    inputs: dict[int, tuple[Layout, ...]] = {}
    for i, leaf in enumerate(trace.inputs):
        if not is_small(leaf.aval):
            layouts = all_layouts(tuple(leaf.aval.shape), mesh)
            inputs[i] = tuple(
                layout
                for layout in layouts
                if _input_allowed(layout, method, mesh, i in trace.batch_inputs, i in used, i in experts)
            )
            if not inputs[i]:
                raise InvalidArgument(
                    f"{type(method).__name__} splits the batch over all {mesh.num_devices} devices, and {leaf.name} "
                    f"has {leaf.aval.shape[0]} rows. Make the batch a multiple of {mesh.num_devices}, or use Auto()."
                )

    def allowed(eqn: jc.JaxprEqn, strategy: Strategy) -> bool:
        dims = batch_dims.get(id(eqn))
        if dims is None:
            return True
        layouts = (*strategy.operands, *strategy.results)
        return all(_allowed(layout, own, method) for layout, own in zip(layouts, dims, strict=True))

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        return tuple(s for s in every if allowed(eqn, s)) or every[:1]

    def constraint_key(eqn: jc.JaxprEqn) -> Hashable:
        return batch_dims.get(id(eqn))

    return Constraints(inputs=inputs, restrict=_with_experts(restrict, method), constraint_key=constraint_key)


def _input_allowed(
    layout: Layout,
    method: Zero | TensorParallel | ExpertParallel,
    mesh: LogicalMesh,
    is_batch: bool,
    in_model: bool,
    is_expert: bool,
) -> bool:
    whole = layout == replicated(len(layout.dims))
    everything = tuple(range(len(mesh.shape)))
    match method:
        case TensorParallel():
            return whole or not is_batch
        case _ if is_batch:
            return layout.dims[0] == everything
        case Zero(stage=stage):
            return whole or stage == 3 or not in_model
        case ExpertParallel():
            return whole or not in_model or (is_expert and not any(layout.dims[1:]))


def _allowed(layout: Layout, batch: tuple[int, ...], method: Zero | TensorParallel | ExpertParallel) -> bool:
    """Whether a value of the model may be split so; `batch` are its dimensions that carry the batch."""
    split = {d for d, axes in enumerate(layout.dims) if axes}
    match method:
        case Zero():
            return split <= set(batch)
        case TensorParallel():
            return split.isdisjoint(batch)
        case ExpertParallel():
            return True


def _with_experts(
    restrict: Callable[[jc.JaxprEqn, tuple[Strategy, ...]], tuple[Strategy, ...]],
    method: Zero | TensorParallel | ExpertParallel,
) -> Callable[[jc.JaxprEqn, tuple[Strategy, ...]], tuple[Strategy, ...]]:
    """For experts: products split along their batch dimensions, or along rows of the batch, and not otherwise."""
    if not isinstance(method, ExpertParallel):
        return restrict

    def along_experts(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        if eqn.primitive.name != "dot_general":
            return restrict(eqn, every)
        _, (batch, _) = jp.dot_dimensions(eqn)
        weight = len(batch)
        kept = [s for s in every if not any(s.operands[1].dims[weight:]) or not any(s.operands[0].dims[weight:])]
        return restrict(eqn, tuple(kept) or every[:1])

    return along_experts


def _used_by_the_model(closed: jc.ClosedJaxpr) -> set[int]:
    """The inputs that the forward or backward pass reads: parameters, in contrast to the optimizer's state."""
    jaxpr, _ = jc.open_jaxpr(closed)
    read = {v for eqn in jaxpr.eqns if jc.ad_phase(eqn) is not None for v in jc.operands(eqn)}
    # A loop over microbatches is in no phase itself, but its body is.
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            inside = _used_by_the_model(jp.scan_of(eqn).body)
            read |= {v for i, v in enumerate(eqn.invars) if i in inside and isinstance(v, jc.Var)}
    return {i for i, v in enumerate(jaxpr.invars) if v in read}


def _expert_inputs(closed: jc.ClosedJaxpr) -> set[int]:
    """The inputs that stand in a product with their first dimension as a batch dimension."""
    jaxpr, _ = jc.open_jaxpr(closed)
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    found = set[int]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            for v, dims in zip(eqn.invars, jp.dot_dimensions(eqn).batch, strict=True):
                if isinstance(v, jc.Var) and v in numbers and 0 in dims:
                    found.add(numbers[v])
    return found


def _batch_dims(
    trace: Trace, closed: jc.ClosedJaxpr, method: Zero | TensorParallel | ExpertParallel
) -> dict[int, Dims]:
    """By equation of the model, the dimensions of its operands and results that grow with the batch."""
    kind = type(method).__name__
    if trace.doubled is None:
        raise Unsupported(
            f"{kind} must know which dimensions carry the batch, and {trace.name} was not traced at another batch "
            f"size: {trace.not_doubled_because}. Use Auto() instead."
        )
    other = _of_other_examples(trace, method)
    dims = None if other is None else differing_dims(closed, other)
    if dims is None:
        raise Unsupported(
            f"{kind} compares {trace.name} with itself at twice the batch or in other microbatches, and the two are "
            "different programs. Use Auto() instead."
        )
    return {id(eqn): dims[id(eqn)] for eqn, of_model in _equations(closed) if of_model}


def differing_dims(closed: jc.ClosedJaxpr, other: jc.ClosedJaxpr) -> dict[int, Dims] | None:
    """By equation at any depth, the dimensions that are of another size in `other`; None for another program."""
    mine, theirs = list(jc.all_equations(closed)), list(jc.all_equations(other))
    if [eqn.primitive.name for eqn in mine] != [eqn.primitive.name for eqn in theirs]:
        return None
    return {
        id(eqn): tuple(
            tuple(d for d, (m, n) in enumerate(zip(_shape(v), _shape(w), strict=True)) if m != n)
            for v, w in zip((*eqn.invars, *eqn.outvars), (*twin.invars, *twin.outvars), strict=True)
        )
        for eqn, twin in zip(mine, theirs, strict=True)
    }


def _of_other_examples(trace: Trace, method: Zero | TensorParallel | ExpertParallel) -> jc.ClosedJaxpr | None:
    """The step with another number of examples at a time; None if there is none that is the same program."""
    count = method.num_microbatches if trace.differentiates else 1
    if count == 1:
        assert trace.doubled is not None
        alike = _names(trace.jaxpr) == _names(trace.doubled)
        return merge_common_subexpressions(trace.doubled, like=trace.jaxpr) if alike else None
    rows = trace.inputs[trace.batch_inputs[0]].aval.shape[0]
    others = [n for n in (count // 2, 2 * count) if n > 1 and rows % n == 0 and n != count]
    if not others:
        return None
    looped = microbatch_loop(trace, others[0], method.batch_statistics, method.search().random)
    return merge_common_subexpressions(looped)


def _names(closed: jc.ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn, _ in _equations(closed)]


def _equations(closed: Any, of_model: bool = False) -> Iterator[tuple[jc.JaxprEqn, bool]]:
    """Every equation at every depth, and whether it is of the model, as all is in a remat region that is."""
    for eqn in jc.open_jaxpr(closed)[0].eqns:
        inside = of_model or jc.ad_phase(eqn) is not None
        yield eqn, inside
        for body in jc.subjaxprs(eqn):
            yield from _equations(body, inside)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))
