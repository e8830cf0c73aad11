"""List the ways to split one equation over a mesh.

    equation, Rule, mesh  ->  every Strategy: the layouts of its operands and of its results

Each mesh axis is given to one factor of the equation's rule, or to none (all devices along it do the same), or to a
set of operands that the equation is linear in, which then are partial sums along it; an axis of one device is given to
none. Splitting a factor that is summed away leaves the result a partial sum; one whose maximum or minimum is taken is
combined at once.

A factor that the axes do not divide is split into padded parts. Padding never reaches what is no padding: an equation
computes every place of a factor by itself, and before one is summed away the padding is masked.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.linearity import EXACT_IN_FIRST, linear_operands
from autopar.compiler.jaxprs.primitives import ADDITIONS, COMPRESSED_SUM, MASKED, VISIBLE, WIDENING
from autopar.compiler.sharding.layout import (
    Axes,
    Layout,
    LogicalMesh,
    can_split,
    num_parts,
    padded_dims,
    replicated,
    split_like,
    used_axes,
)
from autopar.compiler.sharding.rule import Dims, Rule, shapes_of


class Strategy(NamedTuple):
    """Layouts of operands (scalars too) and results; `combined` are axes over which results are combined at once."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    combined: Axes = ()
    devices: float = 1
    """The number of devices among which the work is divided, less what padding takes."""


def strategies(
    eqn: jc.JaxprEqn, rule: Rule, mesh: LogicalMesh, *, maybe_partial: Collection[int] = ()
) -> tuple[Strategy, ...]:
    """Return every strategy, the one that splits nothing first; operands in `maybe_partial` may arrive as sums."""
    # On the first device only, whose results are those of all.
    if eqn.primitive.name in VISIBLE:
        return (_on_one_device(eqn, mesh),)
    every = _strategies_of(
        tuple(_split_like(size, mesh) for size in rule.sizes),
        rule.operands,
        rule.results,
        tuple(rule.reductions.items()),
        rule.blocked,
        possible_sums(eqn, maybe_partial),
        eqn.primitive.name in MASKED,
        mesh,
    )
    return _exchanging(eqn, every, mesh) if eqn.primitive.name == COMPRESSED_SUM else every


def possible_sums(eqn: jc.JaxprEqn, maybe_partial: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of operands that may be summands, some of which may arrive as sums."""
    return tuple(o for o in summands(eqn) if not set(o).isdisjoint(maybe_partial)) if maybe_partial else ()


def _split_like(size: int, mesh: LogicalMesh) -> int:
    """Return a size that the axes of a mesh split as they split this one: into even parts, uneven ones, or single ones.

    Equations of many sizes then have the strategies of one.
    """
    # A factor that no axis divides: of the multiple more than single elements are left, however it is split.
    alike = size if size <= mesh.num_devices else split_like(size, mesh.shape)
    return size if alike == size else alike * (mesh.num_devices + 1)


@functools.lru_cache(maxsize=4096)
def _strategies_of(
    sizes: tuple[int, ...],
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    reductions: tuple[tuple[int, str], ...],
    blocked: frozenset[int],
    linear: tuple[tuple[int, ...], ...],
    masked: bool,
    mesh: LogicalMesh,
) -> tuple[Strategy, ...]:
    """Return the strategies of all equations with a rule like this: what else they are does not matter.

    The operands in `linear` may be sums. `masked` says whether padding of what is summed can be masked.
    """
    rule = Rule(
        sizes=sizes, operands=operands, results=results, reductions=dict(reductions), blocked=blocked, source=""
    )
    free = [f for f in range(len(sizes)) if f not in blocked]
    feasible: dict[Strategy, None] = {}
    choices = (None, *free, *linear)
    known: dict[tuple[int | None, ...], Strategy | None] = {}  # by the factors that axes split, if all that may be sum
    for owners in itertools.product(*(choices if size > 1 else (None,) for size in mesh.shape)):
        split = tuple([owner if isinstance(owner, int) else None for owner in owners])
        if split not in known:
            known[split] = _split_strategy(rule, mesh, split, masked)
        strategy = known[split]
        if strategy is not None:
            late = {axis: owner for axis, owner in enumerate(owners) if isinstance(owner, tuple)}
            feasible[_with_sums(strategy, late) if late else strategy] = None
    return tuple(feasible)


def _can_split(rule: Rule, factor: int, counts: Sequence[int], masked: bool) -> bool:
    """Return whether axes of these sizes may split a factor. Padding needs a dimension of its own, and a known sum."""
    size = rule.sizes[factor]
    if size % math.prod(counts) == 0:
        return True
    dims = (factors for array in (*rule.operands, *rule.results) for factors in array if factor in factors)
    known = factor not in rule.reductions or masked
    return known and all(factors == (factor,) for factors in dims) and can_split(size, counts)


def masked_dims(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> list[list[int]]:
    """Return for each operand the dimensions that are reduced and whose parts have padding, which must be masked."""
    # What a gather takes of an array it takes by its index, which is never one of padding.
    if eqn.primitive.name not in MASKED or eqn.primitive.name == "gather":
        return [[] for _ in eqn.invars]
    padded = list(map(padded_dims, shapes_of(eqn.invars), strategy.operands, itertools.repeat(mesh)))
    if not any(padded):
        return padded
    kept = {axis for layout in strategy.results for axis in used_axes(layout)}
    return [
        [d for d in dims if kept.isdisjoint(layout.dims[d])]
        for dims, layout in zip(padded, strategy.operands, strict=True)
    ]


def _on_one_device(eqn: jc.JaxprEqn, mesh: LogicalMesh) -> Strategy:
    """The results are sums, to which the other devices add nothing."""
    whole, results = ([replicated(len(shape)) for shape in shapes_of(atoms)] for atoms in (eqn.invars, eqn.outvars))
    everything = tuple(range(len(mesh.shape)))
    return Strategy(tuple(whole), tuple(Layout(layout.dims, everything) for layout in results))


def _exchanging(eqn: jc.JaxprEqn, every: Sequence[Strategy], mesh: LogicalMesh) -> tuple[Strategy, ...]:
    """Return strategies whose results are no sums: all get the whole of it, or each its part of a dimension.

    Blocks of numbers share a scale, so that no part may have padding.
    """
    (shape,) = shapes_of(eqn.outvars)
    found: list[Strategy] = []
    for strategy in every:
        dims, partial = strategy.results[0]
        axes = tuple(axis for axis in partial if mesh.shape[axis] > 1)
        if padded_dims(shape, strategy.results[0], mesh):
            continue
        found.append(strategy._replace(results=(Layout(dims),), combined=axes))
        if axes:
            for d, size in enumerate(shape):
                split = (*dims[d], *axes)
                if size % mesh.size(split) == 0 and list(split) == sorted(split):
                    result = Layout((*dims[:d], split, *dims[d + 1 :]))
                    found.append(strategy._replace(results=(result,), combined=axes))
    return tuple(found)


def _split_strategy(rule: Rule, mesh: LogicalMesh, split: Sequence[int | None], masked: bool) -> Strategy | None:
    """Return the strategy whose axes split these factors; None if they cannot."""
    factors = {f: tuple([axis for axis, owner in enumerate(split) if owner == f]) for f in split if f is not None}
    counts = {f: [mesh.shape[axis] for axis in axes] for f, axes in factors.items()}
    if not all(_can_split(rule, f, parts, masked) for f, parts in counts.items()):
        return None
    arrays: list[tuple[Axes, ...]] = []
    for dims in (*rule.operands, *rule.results):
        axes = _split_dims(dims, factors, rule, mesh)
        if axes is None:
            return None
        arrays.append(axes)
    partial = tuple(sorted(_axes_of(factors, rule, "sum")))
    combined = (*_axes_of(factors, rule, "max"), *_axes_of(factors, rule, "min"))
    return Strategy(
        operands=tuple([Layout(dims) for dims in arrays[: len(rule.operands)]]),
        results=tuple([Layout(dims, partial) for dims in arrays[len(rule.operands) :]]),
        combined=tuple(sorted(combined)),
        devices=math.prod([num_parts(rule.sizes[f], parts) for f, parts in counts.items()]),
    )


def _with_sums(strategy: Strategy, late: Mapping[int, tuple[int, ...]]) -> Strategy:
    """Return the same with operands, by axis, that are sums along it."""
    return strategy._replace(
        operands=tuple(
            Layout(operand.dims, tuple([axis for axis, owner in late.items() if number in owner]))
            for number, operand in enumerate(strategy.operands)
        ),
        results=tuple(Layout(dims, tuple(sorted({*partial, *late}))) for dims, partial in strategy.results),
    )


def _axes_of(factors: dict[int, Axes], rule: Rule, kind: str) -> Axes:
    return tuple([axis for f, axes in factors.items() if rule.reductions.get(f) == kind for axis in axes])


def _split_dims(
    dims: Sequence[Sequence[int]], factors: dict[int, Axes], rule: Rule, mesh: LogicalMesh
) -> tuple[Axes, ...] | None:
    """The axes of every dimension; None if the parts would be no blocks, or their order not that of the mesh."""
    result: list[Axes] = []
    for dimension in dims:
        if len(dimension) < 2:
            result.append(factors.get(dimension[0], ()) if dimension else ())
            continue
        axes: list[int] = []
        whole = True  # all factors so far are split completely
        for factor in dimension:
            own = factors.get(factor, ())
            if own and not whole:
                return None
            axes += own
            whole = whole and mesh.size(own) == rule.sizes[factor]
        if axes != sorted(axes):
            return None
        result.append(tuple(axes))
    return tuple(result)


# Operands that are partial sums

# Arithmetic on summands rounds each of them: in 16 bits that would be seen in the sum.
_LEAST_BYTES = 4


def summands(eqn: jc.JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """Return the sets of operands that may be summands; none if the equation is not linear, or sums in too few bits.

    An equation f is linear in a set of operands if f(a + b) = f(a) + f(b) on them together, the others fixed. Then a
    device that holds summands of these operands computes a summand of the result, and the reduction can wait: one
    all-reduce for the sum of three gradients instead of three, one for all microbatches instead of one for each.
    """
    types = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in types if dtype is not None):
        return ()
    name, linear = eqn.primitive.name, linear_operands(eqn)
    if name in ("compress_gradient", COMPRESSED_SUM, WIDENING):
        # The user's word: summands are rounded to be sent in fewer bits, or widened to be summed in more.
        return ((0,),)
    # Additions are rounded in any order, and no more often in this one: gradients of microbatches are summed up so.
    exact = name in ADDITIONS or (name in EXACT_IN_FIRST and name != "gather") or _sums_nothing(eqn)
    if not exact and any(dtype.itemsize < _LEAST_BYTES for dtype in types if dtype is not None):
        return ()
    match name:
        case "convert_element_type":
            # Rounding summands to fewer bits loses what rounding their sum keeps.
            source, target = (_bits(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
            return linear if 0 < source <= target else ()
        case "reduce_precision":
            return ()
        case "gather":
            # A sum of what fills the places outside would be another number, unless that is none.
            return linear if jp.gather_of(eqn).fill_value in (None, 0) else ()
        case "pad":
            return ((0,),) if _is_zero(eqn.invars[1]) else ()
        case _:
            return linear


def _sums_nothing(eqn: jc.JaxprEqn) -> bool:
    """Return true for a sum along dimensions of one element, as the gradient of what was broadcast along them is."""
    if eqn.primitive.name != "reduce_sum":
        return False
    before, after = (cast(Any, atom.aval) for atom in (eqn.invars[0], eqn.outvars[0]))
    return before.size == after.size


def _bits(aval: Any) -> int:
    return 8 * aval.dtype.itemsize if jnp.issubdtype(aval.dtype, jnp.floating) else 0


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jc.Literal) and not atom.val
