"""Split every scan over layers, and the stacked values around it, into pieces that stages can own.

    params (4, ...) ──┐                          params[0:2] ──┐      params[2:4] ──┐
    h ─────────── scan(4) ── h'        →         h ─────── scan(2) ── h ──────── scan(2) ── h'
    mu, nu (4, ...) ── update (4, ...)           mu[0:2] ── update (2, ...)   mu[2:4] ── update (2, ...)

A *layer scan* is a scan that reads stacked parameters: floating-point values computed from floating-point
inputs other than the batch. Its cut travels along axis 0, in both directions through every equation that
keeps rows apart (`layer_scan_rules`), until nothing changes: so it reaches the inputs, the optimizer's moments, and
the results. Loops that read the batch alone (time steps, microbatches) are left as they are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from jax import numpy as jnp

from autopar.compiler.frontend.layer_scan_rules import (
    AxisLink,
    Bounds,
    PieceRule,
    Pieces,
    array_shape,
    dtype_of,
    filled,
    rows,
    rule_of,
    size_of,
    whole,
)
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    ad_phase,
    bind_equation,
    open_jaxpr,
    trace,
    under_scope_of,
)
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr

__all__ = ["LeafRows", "SplitScans", "find_layer_scans", "layer_scan_lengths", "split_layer_scans"]

# A difference of neighbouring rows carries a cut on from row to row: what would get more pieces stays whole.
MOST_PIECES = 512


@dataclass(frozen=True, kw_only=True)
class LeafRows:
    """The rows `[start, stop)` of an input or output of the original step; None and None: all of it."""

    leaf: int
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class SplitScans:
    """A step whose layer scans are split, and which piece of the original step each input and output is."""

    jaxpr: ClosedJaxpr
    inputs: tuple[LeafRows, ...]
    outputs: tuple[LeafRows, ...]


def layer_scan_lengths(closed: ClosedJaxpr, *, batch_inputs: Collection[int]) -> tuple[int, ...]:
    """Return the lengths of the layer scans in order, without those of the backward pass; () if there are none."""
    jaxpr, _ = open_jaxpr(closed)
    scans = (jaxpr.eqns[i] for i in find_layer_scans(jaxpr, batch_inputs))
    return tuple(jp.scan_of(eqn).length for eqn in scans if ad_phase(eqn) != "backward")


def split_layer_scans(
    closed: ClosedJaxpr,
    num_pieces: int,
    *,
    batch_inputs: Collection[int],
    state_outputs: Mapping[int, int] | None = None,
) -> SplitScans:
    """Return the step with every layer scan in `num_pieces` scans, or one per layer if it has fewer layers.

    Stacked inputs and outputs come in the same pieces, whose sizes differ by at most one; the batch is not
    split. `state_outputs` says which input an output replaces (output number -> input number): these two get
    the same pieces even if no equation ties them.
    """
    assert num_pieces >= 1, num_pieces
    jaxpr, consts = open_jaxpr(closed)
    cuts = _find_cuts(jaxpr, num_pieces, batch_inputs, state_outputs or {})
    inputs = [cuts.of_value(v) for v in jaxpr.invars]
    outputs = [cuts.of_value(v) for v in jaxpr.outvars]

    def split_step(*flat: Any) -> list[Any]:
        remaining = iter(flat)
        args = [_take(remaining, bounds) for bounds in inputs]
        return _results(jaxpr, outputs, evaluate_jaxpr(jaxpr, consts, args, cuts.run_on_pieces))

    avals = [aval for v, bounds in zip(jaxpr.invars, inputs) for aval in _avals(v.aval, bounds)]
    return SplitScans(
        jaxpr=trace(split_step, avals) if cuts.points else closed,
        inputs=_pieces(inputs),
        outputs=_pieces(outputs),
    )


# Which scans are cut, and where


def find_layer_scans(jaxpr: Jaxpr, batch_inputs: Collection[int]) -> list[int]:
    """Return the numbers of the equations that scan over parameters.

    They scan over floating-point values computed from floating-point inputs, but not from the batch. Random keys
    are not floating-point, so a scan over time with a key per step is none of them.
    """
    batch = {jaxpr.invars[i] for i in batch_inputs}
    stacked = {v for v in jaxpr.invars if v not in batch and _is_float(v)}
    scans: list[int] = []
    for i, eqn in enumerate(jaxpr.eqns):
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        if not batch.isdisjoint(operands):
            batch.update(eqn.outvars)
        elif not stacked.isdisjoint(operands):
            stacked.update(v for v in eqn.outvars if _is_float(v))
        if eqn.primitive.name == "scan" and not stacked.isdisjoint(_scanned(eqn)):
            scans.append(i)
    return scans


def _is_float(v: Any) -> bool:
    return jnp.issubdtype(dtype_of(v), jnp.inexact)


def _scanned(eqn: JaxprEqn) -> list[Var]:
    loop = jp.scan_of(eqn)
    return [v for v in eqn.invars[loop.num_consts + loop.num_carry :] if isinstance(v, Var)]


_Axis = tuple[int, int]  # equation, and which of its axes


@dataclass(frozen=True, kw_only=True)
class _Cuts:
    """The points at which variables and the axes of equations are cut, without their two ends."""

    points: Mapping[Hashable, frozenset[int]]
    rules: Sequence[PieceRule | None]

    def of_value(self, v: Any) -> Bounds | None:
        """The bounds of a variable's pieces; None if it stays whole."""
        points = self.points.get(v) if isinstance(v, Var) else None
        return (0, *sorted(points), array_shape(v)[0]) if points else None

    def of_axes(self, i: int) -> list[Bounds]:
        """The bounds along each axis of equation `i`."""
        rule = self.rules[i]
        lengths = rule.lengths if rule else ()
        return [(0, *sorted(self.points.get((i, a), ())), n) if n else () for a, n in enumerate(lengths)]

    def run_on_pieces(self, i: int, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Run equation `i`, on pieces if one of its axes or operands is cut."""
        rule, bounds = self.rules[i], self.of_axes(i)
        if rule and (any(isinstance(x, Pieces) for x in values) or any(len(b) > 2 for b in bounds)):
            return rule.apply(values, bounds)
        with under_scope_of(eqn):
            values = [whole(x) for x in values]
        return bind_equation(eqn, values)


def _find_cuts(jaxpr: Jaxpr, num_pieces: int, batch_inputs: Collection[int], state_outputs: Mapping[int, int]) -> _Cuts:
    """Cut the layer scans, and carry each cut along the links until nothing changes.

    Points are only ever added, so this ends, and all values that one axis ties together agree.
    """
    rules = [rule_of(eqn) for eqn in jaxpr.eqns]
    axes: dict[_Axis, tuple[int, list[AxisLink]]] = {}
    for i, rule in enumerate(rules):
        if rule is not None:
            links = [link for link in rule.links if isinstance(link.value, Var)]
            axes |= {(i, a): (n, [k for k in links if k.axis == a]) for a, n in enumerate(rule.lengths)}
    for result, leaf in state_outputs.items():
        tied = [jaxpr.invars[leaf], jaxpr.outvars[result]]
        length = size_of(tied[0])
        if length is not None and array_shape(tied[0]) == array_shape(tied[1]):
            axes[-1, result] = length, [AxisLink(value=v) for v in tied if isinstance(v, Var)]
    start = {(i, 0): _equal_parts(axes[i, 0][0], num_pieces) for i in find_layer_scans(jaxpr, batch_inputs)}
    fixed = {jaxpr.invars[i] for i in batch_inputs}
    return _Cuts(points=_carry_cuts(axes, start, fixed), rules=rules)


def _equal_parts(length: int, num_pieces: int) -> frozenset[int]:
    n = min(num_pieces, length)
    return frozenset(length * i // n for i in range(1, n))


def _carry_cuts(
    axes: Mapping[_Axis, tuple[int, Sequence[AxisLink]]],
    start: Mapping[_Axis, frozenset[int]],
    fixed: Collection[Any],
) -> dict[Hashable, frozenset[int]]:
    """The cuts of all values and axes. What would burst into too many pieces is left whole from the start."""
    kept_whole: set[Any] = set(fixed)
    while True:
        points, burst = _carry_once(axes, start, kept_whole)
        if burst is None:
            return points
        kept_whole.add(burst)


def _carry_once(
    axes: Mapping[_Axis, tuple[int, Sequence[AxisLink]]],
    start: Mapping[_Axis, frozenset[int]],
    kept_whole: Collection[Any],
) -> tuple[dict[Hashable, frozenset[int]], Any]:
    """The cuts, and the first value or axis with too many of them, if one has."""
    places: dict[Any, list[tuple[_Axis, AxisLink]]] = defaultdict(list)
    for axis, (_, links) in axes.items():
        for link in links:
            places[link.value].append((axis, link))
    points: dict[Hashable, frozenset[int]] = {}
    changed: deque[Any] = deque()

    def add(node: Any, size: int, new: Collection[int]) -> None:
        before = points.get(node, frozenset())
        after = before.union(p for p in new if 0 < p < size)
        if after != before and node not in kept_whole:
            points[node] = after
            changed.append(node)

    for axis, new in start.items():
        add(axis, axes[axis][0], new)
    while changed:
        node = changed.popleft()
        if len(points[node]) >= MOST_PIECES:
            return points, node
        for link in axes[node][1] if node in axes else ():
            add(link.value, array_shape(link.value)[0], _on_value(link, points[node]))
        for axis, link in places.get(node, ()):
            add(axis, axes[axis][0], _on_axis(link, points[node]))
    return points, None


def _on_value(link: AxisLink, points: Collection[int]) -> list[int]:
    places = [(p - link.offset) / link.ratio for p in points]
    return [int(p) for p in places if p.denominator == 1]


def _on_axis(link: AxisLink, points: Collection[int]) -> list[int]:
    """The value's cuts on the axis, and its ends: what lies outside of it is no part of its pieces."""
    places = [p * link.ratio + link.offset for p in (0, *points, array_shape(link.value)[0])]
    return [int(p) for p in places if p.denominator == 1]


# The step on pieces


def _take(flat: Iterator[Any], bounds: Bounds | None) -> Any:
    if bounds is None:
        return next(flat)
    return Pieces(bounds=bounds, values=tuple(next(flat) for _ in bounds[1:]))


def _results(jaxpr: Jaxpr, outputs: Sequence[Bounds | None], results: Sequence[Any]) -> list[Any]:
    """The outputs in their pieces; cutting or joining one for that counts to the equation that made it."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    flat: list[Any] = []
    for v, bounds, value in zip(jaxpr.outvars, outputs, results, strict=True):
        if not isinstance(v, Var):
            flat.append(value)
            continue
        with under_scope_of(makers[v]) if v in makers else nullcontext():
            flat += [whole(value)] if bounds is None else [filled(rows(value, *s)) for s in pairwise(bounds)]
    return flat


def _avals(aval: Any, bounds: Bounds | None) -> list[Any]:
    if bounds is None:
        return [aval]
    shapes = [(stop - start, *aval.shape[1:]) for start, stop in pairwise(bounds)]
    return [jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type) for shape in shapes]


def _pieces(bounds: Sequence[Bounds | None]) -> tuple[LeafRows, ...]:
    return tuple(
        LeafRows(leaf=leaf, start=start, stop=stop)
        for leaf, spans in enumerate([(None, None)] if b is None else pairwise(b) for b in bounds)
        for start, stop in spans
    )
