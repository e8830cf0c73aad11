"""Add up many arrays in one collective, for compilers that leave each its own.

    reduce-scatter of x, of y, ...   ->   one of [n, all parts of x | all parts of y | ...]

A collective waits for the slowest device, so that twenty of them wait twenty times. When the first of some reductions
along the same axes is wanted, the others that can be made by then are made with it: at the end of a backward pass,
those of all gradients. What of an array goes to one device is copied in pieces, in whichever dimension it is split; so
a transpose before the reduction may as well come after it, and is one of parts then.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.resharding.emit import apply_steps, rows_by_device
from autopar.compiler.resharding.steps import ReduceScatter
from autopar.compiler.sharding.layout import Axes, LogicalMesh, num_shards
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, Reshard, Value, operands_of


class Reduction(NamedTuple):
    """A sum over devices that each of them wants a part of, and the transpose, if any, that is made of the parts."""

    action: Reshard
    operand: Value
    transpose: Evaluate | None

    @property
    def axes(self) -> Axes:
        """Along which is added up."""
        return self.action.steps[0].axes

    @property
    def dim(self) -> int:
        """The dimension of the operand that is split."""
        step = self.action.steps[0]
        assert isinstance(step, ReduceScatter)
        return step.dim if self.transpose is None else self.transpose.eqn.params["permutation"][step.dim]

    def nbytes(self, mesh: LogicalMesh) -> float:
        """What one device has of the operand."""
        return aval_bytes(self.operand.variable.aval) / num_shards(self.operand.layout, mesh)


def reductions(block: LocalBlock) -> Mapping[Value, Reduction]:
    """The reductions that may be made together with others, by their results, in order."""
    transposes = _transposed_sums(block)
    found: dict[Value, Reduction] = {}
    for action in block.actions:
        if isinstance(action, Reshard) and isinstance(action.operand, Value) and _is_reduction(action):
            transpose = transposes.get(action.operand)
            operand = action.operand if transpose is None else transpose.operands[0]
            assert isinstance(operand, Value)
            found[action.result] = Reduction(action, operand, transpose)
    return found


def made_with(
    first: Reduction, others: Iterable[Reduction], known: Collection[Value], mesh: LogicalMesh, most_bytes: float
) -> list[Reduction]:
    """The reductions to make with the first: those along the same axes whose operands are known."""
    chosen, nbytes = [first], first.nbytes(mesh)
    for each in others:
        alike = each.axes == first.axes and each.operand.variable.aval.dtype == first.operand.variable.aval.dtype
        if each.action is first.action or not alike or each.operand not in known:
            continue
        if nbytes + each.nbytes(mesh) <= most_bytes:
            chosen.append(each)
            nbytes += each.nbytes(mesh)
    return chosen


def reduce_together(together: Sequence[Reduction], arrays: Sequence[Any], mesh: LogicalMesh) -> dict[Value, Any]:
    """The results of some reductions along the same axes; `arrays` are their operands."""
    first = together[0]
    parts = _reduced([(x, each.dim) for x, each in zip(arrays, together, strict=True)], first.axes, mesh)
    results: dict[Value, Any] = {}
    for each, part in zip(together, parts, strict=True):
        turned = part if each.transpose is None else lax.transpose(part, each.transpose.eqn.params["permutation"])
        results[each.action.result] = apply_steps(turned, each.action.steps[1:], mesh, in_rows=True)
    return results


def _is_reduction(action: Reshard) -> bool:
    if not action.steps or not isinstance(action.steps[0], ReduceScatter) or action.after is not None:
        return False
    assert isinstance(action.operand, Value)
    return jnp.issubdtype(action.operand.variable.aval.dtype, jnp.inexact)


def _transposed_sums(block: LocalBlock) -> Mapping[Value, Evaluate]:
    """The transposes of sums that nobody reads but one reduction: it is made first."""
    reads = Counter(value for action in block.actions for value in operands_of(action))
    reads.update(value for value in block.outputs if isinstance(value, Value))
    reduced = {
        action.operand
        for action in block.actions
        if isinstance(action, Reshard) and isinstance(action.operand, Value) and _is_reduction(action)
    }
    return {
        action.results[0]: action
        for action in block.actions
        if isinstance(action, Evaluate) and action.eqn.primitive.name == "transpose"
        if action.results[0] in reduced and reads[action.results[0]] == 1
        if not isinstance(action.operands[0], jc.Literal)
    }


def _reduced(arrays: Sequence[tuple[Any, int]], axes: Axes, mesh: LogicalMesh) -> list[Any]:
    """This device's parts of sums: each array is split along its own dimension."""
    names, size = mesh.names(axes), mesh.size(axes)
    if len(arrays) == 1:
        ((x, dim),) = arrays
        return [lax.psum_scatter(rows_by_device(x, dim, size), names, scatter_dimension=0)]
    rows = jnp.concatenate([rows_by_device(x, dim, size).reshape(size, -1) for x, dim in arrays], axis=1)
    mine: Any = lax.psum_scatter(rows, names, scatter_dimension=0, tiled=False)
    shapes = [(*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]) for x, dim in arrays]
    stops = list(itertools.accumulate(map(math.prod, shapes)))
    return [
        lax.slice(mine, (stop - math.prod(shape),), (stop,)).reshape(shape)
        for shape, stop in zip(shapes, stops, strict=True)
    ]
