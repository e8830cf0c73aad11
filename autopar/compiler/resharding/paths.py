"""Find the cheapest steps between layouts: shortest paths in the graph of all layouts of an array.

Nodes are the layouts that an array may have on a mesh, whatever the order of the axes in a dimension; edges are the
steps between them. What a path costs does not depend on the size of the array, and only the divisors of its
dimensions say which layouts it may have, unless they are split into padded parts: so all arrays share a few graphs. A
path costs

    b + c / 4n + m / 1000      b: bytes that a device sends, as a share of the array, times the slowness of the links;
                               c: number of steps that send; n: number of devices;
                               m: bytes read and written for copies, as a share of the array

that is, another step has to save a quarter of what one of n parts of the array weighs. Where the links of a mesh
differ, its `AxisLinks` tell how slow each ring is, and which sums are made in levels. Costs are counted in integers,
where equal is equal; which of equal paths is taken depends on the order of the layouts and of `_steps_from` alone.

A path makes an array a sum along those axes only along which the target is one. Padding parts with zeros and adding
them up would be a gather too, at times a cheap one, but -0.0 would become 0.0: such a detour costs more than any other.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.resharding.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    PadToPartial,
    Permute,
    ReduceScatter,
    ReshardStep,
    Slice,
    ToPartial,
    after,
    copied_share,
    exchanges,
    moved_share,
)
from autopar.compiler.sharding.layout import Axes, Layout, LogicalMesh, Reach, can_split, used_axes
from autopar.hardware.collectives import wire_bytes
from autopar.ir.axis_links import SLOWNESS_UNIT, AxisLinks


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The layouts of an array, and the steps between them, grouped by where they lead.

    The last edge into every layout is None: to stay there, at no cost.
    """

    layouts: tuple[Layout, ...]
    number: dict[Layout, int]
    steps: tuple[ReshardStep | None, ...]
    moved: np.ndarray
    """The share of the array that each edge's collective has on a device, as in `moved_share`."""
    copied: np.ndarray
    """The share of the array that each edge copies on a device, as in `copied_share`."""
    source: np.ndarray
    """The layout that each edge leaves."""
    target: np.ndarray
    """The layout that each edge leads to."""
    weight: np.ndarray
    first_into: np.ndarray
    """The first edge that leads to each layout."""


def path(graph: Graph, source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
    """The steps of the cheapest path."""
    last = last_edges(graph, graph.number[source])
    here = graph.number[target]
    backwards: list[ReshardStep] = []
    while (step := graph.steps[last[here]]) is not None:
        backwards.append(step)
        here = graph.source[last[here]]
    return tuple(reversed(backwards))


@functools.cache
def last_edges(graph: Graph, source: int) -> np.ndarray:
    """The last edge of the cheapest path from `source` to each layout."""
    distance = np.full(len(graph.layouts), np.iinfo(np.int64).max // 2)
    distance[source] = 0
    while True:
        through = distance[graph.source] + graph.weight
        shorter = np.minimum.reduceat(through, graph.first_into)
        if np.array_equal(shorter, distance):
            break
        distance = shorter
    # Staying is the last edge, so it is only taken where no step is as good: at the source.
    edges = np.where(through == distance[graph.target], np.arange(len(through)), len(through))
    return np.minimum.reduceat(edges, graph.first_into)


def graph_of(sizes: tuple[int, ...], mesh: LogicalMesh) -> Graph:
    """The graph for arrays whose dimensions have these sizes, or split alike (see `layout.split_like`)."""
    return _graph_of(sizes, mesh.shape, mesh.links)


@functools.cache
def _graph_of(sizes: tuple[int, ...], mesh_shape: tuple[int, ...], links: AxisLinks | None) -> Graph:
    mesh = LogicalMesh(shape=mesh_shape, axis_names=tuple(map(str, range(len(mesh_shape)))), links=links)
    layouts = tuple(sorted(_all_orders(sizes, mesh_shape)))
    number = {layout: n for n, layout in enumerate(layouts)}
    into: list[list[tuple[int, ReshardStep | None]]] = [[] for _ in layouts]
    for n, layout in enumerate(layouts):
        for step in _steps_from(layout, sizes, mesh_shape):
            into[number[after(layout, step)]].append((n, step))
    for source, target, step in _permutes(layouts, sizes, mesh_shape):
        into[number[target]].append((number[source], step))
    edges = [edge for target, steps in enumerate(into) for edge in [*steps, (target, None)]]
    moved, copied = (
        [0.0 if step is None else share(step, layouts[n], sizes, mesh_shape) for n, step in edges]
        for share in (moved_share, copied_share)
    )
    weights = [
        0 if step is None else _weight(step, sent, copies, mesh)
        for (_, step), sent, copies in zip(edges, moved, copied, strict=True)
    ]
    return Graph(
        layouts=layouts,
        number=number,
        steps=tuple(step for _, step in edges),
        moved=np.array(moved),
        copied=np.array(copied),
        source=np.array([n for n, _ in edges]),
        target=np.repeat(np.arange(len(layouts)), [len(steps) + 1 for steps in into]),
        weight=np.array(weights),
        first_into=np.cumsum([0, *(len(steps) + 1 for steps in into[:-1])]),
    )


def _weight(step: ReshardStep, moved: float, copied: float, mesh: LogicalMesh) -> int:
    """The cost of a step in units of the array's size / (4000 u n²), u being the unit of slowness.

    Shares of even parts are multiples of 1 / n².
    """
    devices = mesh.num_devices
    copies = round(4 * devices**2 * copied) * SLOWNESS_UNIT
    every = exchanges(step, mesh)
    if not every:
        slowest = SLOWNESS_UNIT if mesh.links is None else max(ring.by_pairs for ring in mesh.links.rings)
        detour = 400_000 * devices**2 * slowest
        return copies + (detour * len(step.axes) if isinstance(step, ToPartial | PadToPartial) else 0)
    sent = 0
    for kind, reach, parts in every:
        nbytes = wire_bytes(kind, mesh.reach(step.axes, reach), moved / parts)
        sent += round(4000 * devices**2 * nbytes) * _slowness(kind, step.axes, reach, mesh)
    return sent + 1000 * devices * SLOWNESS_UNIT + copies


def _slowness(kind: str, axes: Axes, reach: Reach, mesh: LogicalMesh) -> int:
    if mesh.links is None:
        return SLOWNESS_UNIT
    ring = mesh.links.ring(axes)
    if kind in ("all-to-all", "collective-permute"):
        return ring.by_pairs
    return ring.slowness if reach == "all" else ring.levels[reach == "across"]


def _all_orders(sizes: tuple[int, ...], mesh_shape: tuple[int, ...]) -> set[Layout]:
    """Every layout, with and without partial sums, the axes of a dimension in any order."""
    found = {Layout(((),) * len(sizes))}
    for axis in (a for a, size in enumerate(mesh_shape) if size > 1):
        more = set[Layout]()
        for dims, partial in found:
            more.add(Layout(dims, (*partial, axis)))
            for d, axes in enumerate(dims):
                if _can_split(sizes[d], (*axes, axis), mesh_shape):
                    orders = ((*axes[:i], axis, *axes[i:]) for i in range(len(axes) + 1))
                    more |= {Layout((*dims[:d], order, *dims[d + 1 :]), partial) for order in orders}
        found |= more
    return found


def _can_split(size: int, axes: Axes, mesh_shape: tuple[int, ...]) -> bool:
    return can_split(size, [mesh_shape[axis] for axis in axes])


def _steps_from(layout: Layout, sizes: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterator[ReshardStep]:
    free = [a for a, n in enumerate(mesh_shape) if n > 1 and a not in used_axes(layout) and a not in layout.partial]

    def has_room(dim: int, axes: Axes) -> bool:
        return _can_split(sizes[dim], (*layout.dims[dim], *axes), mesh_shape)

    for dim in range(len(sizes)):
        yield from (Slice(axes, dim) for axes in _ordered_subsets(free) if has_room(dim, axes))
        yield from (ReduceScatter(axes, dim) for axes in _ordered_subsets(layout.partial) if has_room(dim, axes))
    for dim, axes in enumerate(layout.dims):
        for start in range(len(axes)):
            minor = axes[start:]
            targets = (target for target in range(len(sizes)) if target != dim and has_room(target, minor))
            yield from (AllToAll(minor, dim, target) for target in targets)
            yield AllGather(minor, dim)
            yield PadToPartial(minor, dim)
    yield from (AllReduce(axes) for axes in _subsets(layout.partial))
    yield from (ToPartial(axes) for axes in _subsets(free))


def _permutes(
    layouts: Sequence[Layout], sizes: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> Iterator[tuple[Layout, Layout, Permute]]:
    """Yield the permutations between layouts that have the same parts, and are sums over the same axes."""
    alike = defaultdict[tuple[tuple[int, ...], Axes], list[Layout]](list)
    for layout in layouts:
        alike[tuple(_size(axes, mesh_shape) for axes in layout.dims), layout.partial].append(layout)
    for group in alike.values():
        for source, target in itertools.permutations(group, 2):
            changed = [d for d in range(len(sizes)) if source.dims[d] != target.dims[d]]
            if not any(sizes[d] % _size(source.dims[d], mesh_shape) for d in changed):
                yield source, target, Permute(source.dims, target.dims)


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for length in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, length)


def _ordered_subsets(axes: Sequence[int]) -> Iterator[Axes]:
    for length in range(1, len(axes) + 1):
        yield from itertools.permutations(axes, length)


def _size(axes: Sequence[int] | frozenset[int], mesh_shape: tuple[int, ...]) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)
