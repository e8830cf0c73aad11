"""List the ways to split one equation over a mesh.

    equation, Rule, mesh  ->  every Strategy: the layouts of its operands and of its results

Each mesh axis is given to one factor of the equation's rule, or to none (all devices along it do the same), or to a
set of operands that the equation is linear in, which then are partial sums along it. Splitting a factor that is summed
away leaves the result a partial sum; one whose maximum or minimum is taken is combined at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from autopar.compiler.intra_op.layout import Axes, Layout, LogicalMesh, replicated
from autopar.compiler.intra_op.linearity import linear_operands
from autopar.compiler.intra_op.rule import Rule, shapes_of
from autopar.compiler.jaxprs import compat as jc

RUN_ONCE = frozenset({"debug_callback", "debug_print", "io_callback"})
"""What a user sees: on the first device only, whose results are those of all."""


class Strategy(NamedTuple):
    """Layouts of operands (scalars too) and results; `combined` are axes over which a max or min is taken at once."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    combined: Axes = ()
    devices: int = 1
    """Among how many devices the work is divided."""


def strategies(
    eqn: jc.JaxprEqn, rule: Rule, mesh: LogicalMesh, *, maybe_partial: Collection[int] = ()
) -> tuple[Strategy, ...]:
    """Every strategy, the one that splits nothing first; `maybe_partial` are operands that may arrive as sums."""
    if eqn.primitive.name in RUN_ONCE:
        return (_on_one_device(eqn, mesh),)
    free = [f for f in range(len(rule.sizes)) if f not in rule.blocked]
    linear = [o for o in linear_operands(eqn) if not set(o).isdisjoint(maybe_partial)]
    found: dict[Strategy, None] = {}
    for owners in itertools.product((None, *free, *linear), repeat=len(mesh.shape)):
        factors = {f: tuple(a for a, o in enumerate(owners) if o == f) for f in owners if isinstance(f, int)}
        if any(rule.sizes[f] % mesh.size(axes) for f, axes in factors.items()):
            continue
        strategy = _strategy(eqn, rule, mesh, factors, owners)
        if strategy is not None:
            found[strategy] = None
    return tuple(found)


def _on_one_device(eqn: jc.JaxprEqn, mesh: LogicalMesh) -> Strategy:
    """The results are sums, to which the other devices add nothing."""
    whole, results = ([replicated(len(shape)) for shape in shapes_of(atoms)] for atoms in (eqn.invars, eqn.outvars))
    everything = tuple(range(len(mesh.shape)))
    return Strategy(tuple(whole), tuple(Layout(layout.dims, everything) for layout in results))


def _strategy(
    eqn: jc.JaxprEqn,
    rule: Rule,
    mesh: LogicalMesh,
    factors: dict[int, Axes],
    owners: Sequence[int | tuple[int, ...] | None],
) -> Strategy | None:
    operands = [_split_dims(dims, factors, rule, mesh) for dims in rule.operands]
    results = [_split_dims(dims, factors, rule, mesh) for dims in rule.results]
    summed = _axes_of(factors, rule, "sum")
    late = {axis: owner for axis, owner in enumerate(owners) if isinstance(owner, tuple)}
    complete = [dims for dims in (*operands, *results) if dims is not None]
    if len(complete) < len(operands) + len(results):
        return None
    partial = tuple(sorted({*summed, *late}))
    combined = (*_axes_of(factors, rule, "max"), *_axes_of(factors, rule, "min"))
    return Strategy(
        operands=tuple(
            Layout(dims, tuple(axis for axis, owner in late.items() if number in owner))
            for number, dims in enumerate(complete[: len(operands)])
        ),
        results=tuple(Layout(dims, partial) for dims in complete[len(operands) :]),
        combined=tuple(sorted(combined)),
        devices=math.prod(mesh.size(axes) for axes in factors.values()),
    )


def _axes_of(factors: dict[int, Axes], rule: Rule, kind: str) -> Axes:
    return tuple(axis for f, axes in factors.items() if rule.reductions.get(f) == kind for axis in axes)


def _split_dims(
    dims: Sequence[Sequence[int]], factors: dict[int, Axes], rule: Rule, mesh: LogicalMesh
) -> tuple[Axes, ...] | None:
    """The axes of every dimension; None if the parts would be no blocks, or their order not that of the mesh."""
    result: list[Axes] = []
    for dimension in dims:
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
