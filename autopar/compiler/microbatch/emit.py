"""Trace the program of one microbatch from the steps that the analysis decided on.

    split     the parameters at the microbatch's size, p(B/M) = p(B) + (p(C) - p(B)) (B/M - B) / (C - B),
              for a batch of B rows and the other trace's of C: mostly C = B/M, and nothing has to be computed
    source    at the full size, then this microbatch's slice, right there so that XLA can fuse the two
    whole     on whole copies of the batch, once, before the microbatches

A loop, condition or rematerialised region is rebuilt around the bodies of one microbatch. What a body needs of the
whole batch is computed before it and, like the microbatch's index, read from within.

Every equation keeps its name stack and source line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.compiler.frontend.batch_dimensions import batch_axes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.evaluate import bind_bodies, evaluate_equations, read
from autopar.compiler.microbatch.accumulate import accumulate
from autopar.compiler.microbatch.states import (
    CALLS,
    COMPLETE,
    DRAW,
    FIRST,
    SHARE,
    SOURCE,
    WHOLE,
    Batched,
    BatchSizes,
    Local,
    MicrobatchBlock,
    MicrobatchStep,
    Partial,
    State,
    shape_of,
    straight_bodies,
)
from autopar.errors import NotSplittable

_jnp: Any = jnp  # annotated in part, which a strict checker does not take
_lax: Any = lax


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The microbatch that is computed: `index` is a traced number, and `sizes` are those of the two traces."""

    count: int
    index: Any
    sizes: BatchSizes

    def size(self, full: int) -> int:
        """The length of an axis in one microbatch."""
        if full % self.count:
            raise NotSplittable(_does_not_divide(full, self.count))
        return full // self.count

    def rows(self, value: Any, axis: int) -> Any:
        """This microbatch's slice of a value of the whole batch."""
        size = self.size(value.shape[axis])
        starts = [self.index * size if i == axis else np.int32(0) for i in range(value.ndim)]
        sizes = [size if i == axis else n for i, n in enumerate(value.shape)]
        return lax.dynamic_slice(value, starts, sizes, allow_negative_indices=False)


def params_at_microbatch(eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, microbatch: Microbatch) -> dict[str, Any]:
    """An equation's parameters at the microbatch's size."""
    other = jp.parameters(at_other_batch)
    return {key: at_microbatch(value, other[key], microbatch) for key, value in jp.parameters(eqn).items()}


def at_microbatch(value: Any, at_other_batch: Any, microbatch: Microbatch) -> Any:
    """A parameter at the microbatch's size. Integers that differ are affine in the batch; all else stays."""
    if type(value) is tuple:
        items = cast("tuple[Any, ...]", value)
        return tuple(at_microbatch(a, b, microbatch) for a, b in zip(items, at_other_batch, strict=True))
    if isinstance(value, int) and isinstance(at_other_batch, int) and value != at_other_batch:
        rows = microbatch.size(microbatch.sizes.full)
        change = (at_other_batch - value) * (rows - microbatch.sizes.full)
        return value + _whole_part(change, microbatch.sizes.other - microbatch.sizes.full, value, microbatch.count)
    return value


def _whole_part(change: int, of: int, size: int, count: int) -> int:
    if change % of:
        raise NotSplittable(_does_not_divide(size, count))
    return change // of


def _does_not_divide(size: int, count: int) -> str:
    return (
        f"An axis of {size}, which grows with the batch, does not divide into {count} microbatches. Choose a number of "
        f"microbatches that divides {size}."
    )


@dataclass(kw_only=True)
class _Frame:
    """The values of one block while it is traced: of the microbatch, of the whole batch, and accumulated."""

    microbatch: Microbatch
    block: MicrobatchBlock
    top: bool
    values: dict[jc.Var, Any]
    whole: dict[jc.Var, Any]
    accumulated: dict[jc.Var, Any]
    producers: dict[jc.Var, jc.JaxprEqn]

    def read(self, atom: Any) -> Any:
        return read(atom, self.values)

    def read_whole(self, atom: Any) -> Any:
        if isinstance(atom, jc.Literal):
            return atom.val
        return self.whole[atom] if atom in self.whole else self.values[atom]


def emit(
    microbatch: Microbatch,
    block: MicrobatchBlock,
    args: Sequence[Any],
    whole: Mapping[jc.Var, Any],
    *,
    top: bool = False,
) -> list[Any]:
    """Return the block's results for one microbatch; at the top, accumulated over all of them.

    `whole` has the values of the whole batch that the block reads: at the top its inputs, otherwise what was
    computed before the block.
    """
    frame = _frame(microbatch, block, args, whole, top)
    for step in block.steps:
        frame.values.update(zip(step.eqn.outvars, _results(frame, step), strict=True))
        frame.producers.update(dict.fromkeys(step.eqn.outvars, step.eqn))
    if not top:
        pairs = zip(block.jaxpr.outvars, block.outputs, block.output_uses, strict=True)
        return [_used(frame, atom, state, use) for atom, state, use in pairs]
    return [_accumulated(frame, v, s) for v, s in zip(block.jaxpr.outvars, block.outputs, strict=True)]


def _frame(
    microbatch: Microbatch, block: MicrobatchBlock, args: Sequence[Any], whole: Mapping[jc.Var, Any], top: bool
) -> _Frame:
    consts = dict(zip(block.jaxpr.constvars, block.consts, strict=True))
    sliced = {v: _sliced(microbatch, _jnp.asarray(c), block.constants[v]) for v, c in consts.items()}
    return _Frame(
        microbatch=microbatch,
        block=block,
        top=top,
        values={**sliced, **dict(zip(block.jaxpr.invars, args, strict=True))},
        whole={**consts, **whole},
        accumulated={},
        producers={},
    )


def _sliced(microbatch: Microbatch, value: Any, state: State) -> Any:
    return microbatch.rows(value, state.axis) if isinstance(state, Batched) else value


def _results(frame: _Frame, step: MicrobatchStep) -> list[Any]:
    if step.mode == WHOLE:
        return _from_whole(frame, step, _evaluate_whole(frame, step))
    if frame.top and step.mode != SOURCE and any(v in frame.block.needed_whole for v in step.eqn.outvars):
        _evaluate_whole(frame, step)
    args = [_used(frame, *operand) for operand in zip(step.eqn.invars, step.operands, step.uses, strict=True)]
    if step.bodies:
        return emit_bodies(emit, frame.microbatch, step, args, frame.read_whole)
    if step.mode == SOURCE:
        full = jc.bind_equation(step.eqn, args)
        frame.whole.update(zip(step.eqn.outvars, full))
        return _from_whole(frame, step, full)
    if step.mode == DRAW:
        args = [_folded(args[0], frame.microbatch.index)]
    return _at_microbatch(frame, step, args)


def _evaluate_whole(frame: _Frame, step: MicrobatchStep) -> list[Any]:
    """The equation on the whole batch; in a body it was evaluated before the body."""
    if frame.top:
        full = jc.bind_equation(step.eqn, [frame.read_whole(a) for a in step.eqn.invars])
        frame.whole.update(zip(step.eqn.outvars, full))
    return [frame.whole[v] for v in step.eqn.outvars]


def _from_whole(frame: _Frame, step: MicrobatchStep, full: Sequence[Any]) -> list[Any]:
    with jc.under_scope_of(step.eqn):
        return [_sliced(frame.microbatch, value, state) for value, state in zip(full, step.results)]


def _at_microbatch(frame: _Frame, step: MicrobatchStep, args: list[Any]) -> list[Any]:
    microbatch = frame.microbatch
    params = params_at_microbatch(step.eqn, step.at_other_batch, microbatch) if _grows(step) else None
    if step.identity_column is not None:
        with jc.under_scope_of(step.eqn):
            args[1] = _shifted_identity(step, step.identity_column, args[1], microbatch)
    results = jc.bind_equation(step.eqn, args, params)
    if step.local:
        with jc.under_scope_of(step.eqn):
            results = [r * _jnp.asarray(microbatch.count, r.dtype) for r in results]
    return results


def _grows(step: MicrobatchStep) -> bool:
    pairs = zip([*step.eqn.invars, *step.eqn.outvars], [*step.at_other_batch.invars, *step.at_other_batch.outvars])
    return any(batch_axes(a.aval, b.aval) for a, b in pairs)


def _shifted_identity(step: MicrobatchStep, column: int, indices: Any, microbatch: Microbatch) -> Any:
    """Indices that count the rows of the batch, made to count those of the microbatch."""
    state = step.operands[0]
    assert isinstance(state, Batched), state
    start = microbatch.index * microbatch.size(shape_of(step.eqn.invars[0])[state.axis])
    columns = _lax.broadcasted_iota(indices.dtype, indices.shape, indices.ndim - 1)
    shift = lax.convert_element_type(start, indices.dtype)
    is_own = lax.convert_element_type(lax.eq(columns, lax.full_like(columns, column)), indices.dtype)
    return lax.sub(indices, lax.mul(is_own, lax.full_like(indices, shift)))


def _folded(key: Any, index: Any) -> Any:
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, index)


def _used(frame: _Frame, atom: Any, state: State, use: str) -> Any:
    if use == COMPLETE:
        at_hand = isinstance(state, Batched) and atom in frame.whole
        return frame.whole[atom] if at_hand else _accumulated(frame, atom, state)
    value = frame.read(atom)
    if use == FIRST:
        value = _jnp.asarray(value)
        return lax.select(frame.microbatch.index == 0, value, lax.full_like(value, 0))
    if use == SHARE:
        return value / _jnp.asarray(frame.microbatch.count, value.dtype)
    return value


_KINDS: dict[type, str] = {Batched: "concatenate", Local: "mean"}


def _accumulated(frame: _Frame, atom: Any, state: State) -> Any:
    """The value over all microbatches, accumulated once however often it is used."""
    if not isinstance(state, Batched | Partial | Local):
        return frame.read(atom)
    if atom not in frame.accumulated:
        kind = state.kind if isinstance(state, Partial) else _KINDS[type(state)]
        axis = state.axis if isinstance(state, Batched) else 0
        with jc.under_scope_of(frame.producers[atom]) if atom in frame.producers else nullcontext():
            frame.accumulated[atom] = accumulate(
                frame.read(atom), kind=kind, axis=axis, num_microbatches=frame.microbatch.count
            )
    return frame.accumulated[atom]


# Equations with bodies

Emit = Callable[[Microbatch, MicrobatchBlock, Sequence[Any], Mapping[jc.Var, Any]], list[Any]]


def emit_bodies(
    emit: Emit, microbatch: Microbatch, step: MicrobatchStep, args: list[Any], read_whole: Callable[[Any], Any]
) -> list[Any]:
    """Return the results of an equation with bodies for one microbatch."""
    whole: list[Mapping[jc.Var, Any]] = [{} for _ in step.bodies]
    with jc.under_scope_of(step.eqn):
        for number, (body, offset) in enumerate(straight_bodies(step)):
            whole[number] = _hoisted(step, body, offset, read_whole)
        if step.eqn.primitive.name in CALLS:
            return emit(microbatch, step.bodies[0], args, whole[0])
    return bind_bodies(
        step.eqn, args, lambda number, inputs: emit(microbatch, step.bodies[number], inputs, whole[number])
    )


def _hoisted(
    step: MicrobatchStep, body: MicrobatchBlock, offset: int, read_whole: Callable[[Any], Any]
) -> dict[jc.Var, Any]:
    """Return the values that the body uses of the whole batch, computed outside of it."""
    whole: dict[jc.Var, Any] = dict(zip(body.jaxpr.constvars, body.consts))
    for position, var in enumerate(body.jaxpr.invars):
        if var in body.needed_whole:
            whole[var] = read_whole(step.eqn.invars[offset + position])
    for inner in body.steps:
        if inner.mode == WHOLE or any(v in body.needed_whole for v in inner.eqn.outvars):
            evaluate_equations([inner.eqn], whole)
    used = _read_whole_inside(body)
    return {var: value for var, value in whole.items() if var in used}


def _read_whole_inside(body: MicrobatchBlock) -> set[jc.Var]:
    used = {v for s in body.steps if s.mode == WHOLE for v in s.eqn.outvars}
    for step in body.steps:
        for inner, offset in straight_bodies(step):
            wanted = [i for i, v in enumerate(inner.jaxpr.invars) if v in inner.needed_whole]
            atoms = [step.eqn.invars[offset + i] for i in wanted]
            used.update(a for a in atoms if isinstance(a, jc.Var))
    return used
