"""Turn a step over the full batch into a step over microbatches with equal results.

    split_batch(full, at_other_batch, ...)  ->  MicrobatchedStep

Nothing is assumed about the scale of the loss: literals such as 1/B are those of the full batch, so a sum
over microbatches is the sum over the batch. `accumulate` equations say where the microbatches' results
become one value; what follows from one is computed once per step, or, if it meets the examples again, in a
further round over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.frontend.batch_dimensions import batch_axes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr
from autopar.compiler.microbatch.accumulate import accumulate_p, accumulation_axis, accumulation_kind, combine
from autopar.compiler.microbatch.analysis import analyse, input_states
from autopar.compiler.microbatch.emit import Microbatch, emit
from autopar.compiler.microbatch.states import AnalysisState, Batched, BatchSizes, MicrobatchBlock, shape_of
from autopar.errors import InvalidArgument

_SMALL = 16
"""Integers of no more elements than this are keys or counters, not state."""


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """An input of the microbatched step: a whole leaf, a microbatch of one, or the microbatch's number."""

    kind: str  # "whole" | "microbatch" | "index"
    leaf: int | None
    axis: int = 0
    """Along which axis a microbatch is sliced."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchedStep:
    """The program of one microbatch, with an `accumulate` where the results of all of them meet."""

    jaxpr: jc.ClosedJaxpr
    inputs: tuple[StepInput, ...]
    num_microbatches: int


def split_batch(
    full: jc.ClosedJaxpr,
    at_other_batch: jc.ClosedJaxpr,
    *,
    batch_inputs: Sequence[int],
    num_microbatches: int,
    batch_statistics: str = "exact",
    random: str = "full_batch",
    input_names: Sequence[str] = (),
) -> MicrobatchedStep:
    """Return the step of one microbatch, from normalised traces at the batch and at another one, best a microbatch.

    `batch_statistics="per_microbatch"` accepts that reductions over the batch that meet the same examples
    again, as in batch normalisation, are taken within each microbatch, instead of in a round before;
    `random="per_microbatch"` that random bits are drawn from a key folded with the microbatch's number, instead of
    being those of the full batch. Raises `Unfinished` where a region or loop would have to be left for a further round.
    """
    invars = jc.open_jaxpr(full)[0].invars
    sizes = _sizes(invars, jc.open_jaxpr(at_other_batch)[0].invars)
    analysis = AnalysisState(
        num_microbatches=num_microbatches,
        sizes=sizes,
        # One microbatch is the batch, so its own statistics are exact.
        exact=batch_statistics == "exact" and num_microbatches > 1,
        draw_per_microbatch=random == "per_microbatch" and num_microbatches > 1,
    )
    stateful = {i: i not in batch_inputs and _is_state(v.aval) for i, v in enumerate(invars)}
    states = input_states(sizes, full, at_other_batch, stateful)
    for i, (var, state) in enumerate(zip(invars, states)):
        size = shape_of(var)[state.axis] if isinstance(state, Batched) else 0
        if size % num_microbatches:
            raise _does_not_divide(size, num_microbatches, _name(i, input_names))
    return _traced_step(analyse(analysis, full, at_other_batch, states), sizes, num_microbatches)


def _sizes(invars: Sequence[jc.Var], at_other_batch: Sequence[jc.Var]) -> BatchSizes:
    grown = (
        BatchSizes(full=shape_of(var)[axis], other=shape_of(twin)[axis])
        for var, twin in zip(invars, at_other_batch, strict=True)
        for axis in batch_axes(var.aval, twin.aval)
    )
    return next(grown, BatchSizes(full=1, other=1))


def _is_state(aval: Any) -> bool:
    """Return whether an input outside of the batch is state: all are but random keys and small integers."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return False
    return not (jnp.issubdtype(aval.dtype, jnp.integer) and aval.size <= _SMALL)


def _name(position: int, input_names: Sequence[str]) -> str:
    return f"`{input_names[position]}`" if position < len(input_names) else f"input {position}"


def _does_not_divide(size: int, num_microbatches: int, name: str) -> InvalidArgument:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - num_microbatches))
    return InvalidArgument(
        f"The batch axis of {name} has {size} rows, which do not divide into {num_microbatches} microbatches "
        f"of equal size. Use a number of microbatches that divides {size} (the nearest is {nearest}), or "
        "another batch size."
    )


def _traced_step(block: MicrobatchBlock, sizes: BatchSizes, num_microbatches: int) -> MicrobatchedStep:
    invars = block.jaxpr.invars
    copies = [i for i, v in enumerate(invars) if v in block.needed_whole and isinstance(block.inputs[i], Batched)]
    inputs = [
        *(
            StepInput(kind="microbatch", leaf=i, axis=s.axis)
            if isinstance(s, Batched)
            else StepInput(kind="whole", leaf=i)
            for i, s in enumerate(block.inputs)
        ),
        StepInput(kind="index", leaf=None),
        *(StepInput(kind="whole", leaf=i) for i in copies),
    ]

    def run(*args: Any) -> list[Any]:
        index, whole = args[len(invars)], args[len(invars) + 1 :]
        microbatch = Microbatch(count=num_microbatches, index=index, sizes=sizes)
        return emit(microbatch, block, args[: len(invars)], dict(zip([invars[i] for i in copies], whole)), top=True)

    avals = [_aval(block, given, num_microbatches) for given in inputs]
    closed = eliminate_dead(jc.trace(run, avals))
    return _without_unused(closed, inputs, num_microbatches)


def _aval(block: MicrobatchBlock, given: StepInput, num_microbatches: int) -> Any:
    if given.leaf is None:
        return jax.ShapeDtypeStruct((), jnp.int32)
    aval: Any = block.jaxpr.invars[given.leaf].aval
    state, shape = block.inputs[given.leaf], list(shape_of(block.jaxpr.invars[given.leaf]))
    if given.kind == "microbatch" and isinstance(state, Batched):
        shape[state.axis] //= num_microbatches
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _without_unused(closed: jc.ClosedJaxpr, inputs: Sequence[StepInput], num_microbatches: int) -> MicrobatchedStep:
    """Drop the microbatch's number and the whole copies where nothing reads them."""
    jaxpr, _ = jc.open_jaxpr(closed)
    read = {a for eqn in jaxpr.eqns for a in eqn.invars if isinstance(a, jc.Var)}
    read.update(a for a in jaxpr.outvars if isinstance(a, jc.Var))
    first = next(i for i, given in enumerate(inputs) if given.kind == "index")
    kept = [i for i, v in enumerate(jaxpr.invars) if i < first or v in read]
    return MicrobatchedStep(
        jaxpr=jc.with_inputs(closed, kept),
        inputs=tuple(inputs[i] for i in kept),
        num_microbatches=num_microbatches,
    )


@dataclass(frozen=True)
class _Each:
    """The values that the microbatches have for one value of the step."""

    values: tuple[Any, ...]


def evaluate_microbatched(step: MicrobatchedStep, leaves: Sequence[Any]) -> list[Any]:
    """The step's results, by plain loops over the microbatches: what every other way to run it must equal."""
    count = step.num_microbatches

    def equation(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> list[Any]:
        each = [[v.values[m] if isinstance(v, _Each) else v for v in values] for m in range(count)]
        if eqn.primitive is accumulate_p:
            return [combine(accumulation_kind(eqn), accumulation_axis(eqn), [parts[0] for parts in each])]
        if not any(isinstance(v, _Each) for v in values):
            return jc.bind_equation(eqn, values)
        return [_Each(results) for results in zip(*(jc.bind_equation(eqn, own) for own in each), strict=True)]

    args = [
        leaves[_leaf(given)]
        if given.kind == "whole"
        else _Each(tuple(_given(given, leaves, m, count) for m in range(count)))
        for given in step.inputs
    ]
    return evaluate_jaxpr(*jc.open_jaxpr(step.jaxpr), args, equation)


def _leaf(given: StepInput) -> int:
    assert given.leaf is not None
    return given.leaf


def _given(given: StepInput, leaves: Sequence[Any], m: int, count: int) -> Any:
    if given.kind == "index":
        return np.int32(m)
    leaf = leaves[_leaf(given)]
    size = leaf.shape[given.axis] // count
    return leaf[tuple(slice(m * size, (m + 1) * size) if i == given.axis else slice(None) for i in range(leaf.ndim))]
