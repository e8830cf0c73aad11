"""Take an array from one layout to another: by which steps, what they move, and how long that takes.

    source, target, shape, mesh  ->  steps  ->  collectives and seconds; `resharding.emit` carries the steps out

Mesh axes of size 1 and dimensions of size 1 take no part: nothing is ever done about them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.resharding.paths import Graph, graph_of, last_edges, path
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
from autopar.compiler.sharding.collective import Collective
from autopar.compiler.sharding.layout import (
    Layout,
    LogicalMesh,
    local_shape,
    may_have,
    part_size,
    split_like,
    without_ones,
)

STATE_COPIES = 4.0
"""Times that state is read or written which is copied elsewhere when a step begins, and its successor to its place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReshardLines:
    """Seconds of resharding an array, as the least of some lines in its bytes: [line, source, target]."""

    fixed: np.ndarray
    """Seconds for no bytes."""
    per_byte: np.ndarray
    """Seconds more for every byte of the array."""

    def seconds(self, nbytes: float) -> np.ndarray:
        """Return the seconds from every source to every target for an array of so many bytes."""
        return (self.fixed + self.per_byte * nbytes).min(axis=0)


@functools.cache
def reshard_steps(source: Layout, target: Layout, shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[ReshardStep, ...]:
    """The steps that take an array from `source` to `target` with the fewest bytes sent over the slowest links."""
    assert may_have(shape, source, mesh) and may_have(shape, target, mesh), (source, target, shape, mesh)
    short = path(_graph(shape, mesh), _short(source, shape, mesh), _short(target, shape, mesh))
    return tuple(_in_full(step, shape) for step in short)


def step_collectives(
    steps: Sequence[ReshardStep], source: Layout, shape: tuple[int, ...], itemsize: float, mesh: LogicalMesh
) -> tuple[tuple[Collective, ...], ...]:
    """The collectives of those `steps` that send anything, for an array that arrives in the layout `source`."""
    nbytes = math.prod(shape) * itemsize
    found: list[tuple[Collective, ...]] = []
    layout = without_ones(source, mesh)
    for step in steps:
        if every := exchanges(step, mesh):
            moved = nbytes * moved_share(step, layout, shape, mesh.shape)
            if len(every) > 1:
                # The parts of a sum in levels are of one size: its elements are padded to divide.
                size, inside = math.prod(local_shape(shape, layout, mesh)), mesh.reach(step.axes, "inside")
                moved = part_size(size, inside) * inside * itemsize
            found.append(
                tuple(
                    Collective(kind=kind, axes=step.axes, nbytes=moved / parts, reach=reach)
                    for kind, reach, parts in every
                )
            )
        layout = after(layout, step)
    return tuple(found)


def copied_bytes(
    steps: Sequence[ReshardStep], source: Layout, shape: tuple[int, ...], itemsize: float, mesh: LogicalMesh
) -> float:
    """Return the bytes that `steps` read from a device's memory and write there besides their collectives."""
    layout, share = without_ones(source, mesh), 0.0
    for step in steps:
        share += copied_share(step, layout, shape, mesh.shape)
        layout = after(layout, step)
    return share * math.prod(shape) * itemsize


@functools.cache
def reshard_s(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: float, mesh_costs: MeshCosts) -> float:
    """Seconds that resharding takes: its collectives, and the memory traffic of its copies."""
    return float(reshard_matrix((source,), (target,), shape, itemsize, mesh_costs)[0, 0])


def reshard_matrix(
    sources: Sequence[Layout], targets: Sequence[Layout], shape: tuple[int, ...], itemsize: float, mesh_costs: MeshCosts
) -> np.ndarray:
    """`reshard_s` from every source to every target."""
    return reshard_lines(sources, targets, shape, mesh_costs).seconds(math.prod(shape) * itemsize)


def reshard_lines(
    sources: Sequence[Layout], targets: Sequence[Layout], shape: tuple[int, ...], mesh_costs: MeshCosts
) -> ReshardLines:
    """Return the seconds from every source to every target, as a function of the array's bytes.

    They are those of all shapes that are `split_alike`.
    """
    mesh = mesh_costs.mesh
    starts, ends = (_numbers(tuple(layouts), shape, mesh) for layouts in (sources, targets))
    every = _edge_lines(_graph(shape, mesh), mesh_costs)
    lines = np.array([every.from_source(start) for start in starts])[..., ends]
    return ReshardLines(fixed=lines[:, :, 0].swapaxes(0, 1), per_byte=lines[:, :, 1].swapaxes(0, 1))


@functools.lru_cache(maxsize=16_384)
def _numbers(layouts: tuple[Layout, ...], shape: tuple[int, ...], mesh: LogicalMesh) -> list[int]:
    """Return the numbers of layouts in the graph of an array."""
    number = _graph(shape, mesh).number
    if 1 not in shape and all(layout in number for layout in layouts):  # as they are
        return [number[layout] for layout in layouts]
    assert all(may_have(shape, layout, mesh) for layout in layouts), (layouts, shape, mesh)
    return [number[_short(layout, shape, mesh)] for layout in layouts]


def split_alike(shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[int, ...]:
    """Return the least shape whose parts on a mesh are the same shares of it as those of this one."""
    return tuple(size if size == 1 else split_like(size, mesh.shape) for size in shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class _EdgeLines:
    """The lines from layouts to each other, found from a layout when they are first asked for."""

    graph: Graph
    of_edges: np.ndarray
    """[line, 2, edge], of the steps."""
    known: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    def from_source(self, source: int) -> np.ndarray:
        """Return the cost from one layout to every one, by size of arrays: [seconds for no bytes, and per byte]."""
        if source not in self.known:
            last = last_edges(self.graph, source)
            here = np.arange(len(self.graph.layouts))
            total = np.zeros((*self.of_edges.shape[:2], len(here)))
            # Back along all paths at once; a path that has arrived at the source stays there, at no cost.
            while (here != source).any():
                edges = last[here]
                total += self.of_edges[..., edges]
                here = self.graph.source[edges]
            self.known[source] = total
        return self.known[source]


@functools.lru_cache(maxsize=64)
def _edge_lines(graph: Graph, mesh_costs: MeshCosts) -> _EdgeLines:
    """Return the lines of every step for few and for many bytes; one for both where they are the same."""
    lines = functools.cache(lambda kind, axes, reach: np.array(mesh_costs.lines(kind, axes, reach)))
    seconds = np.zeros((2, 2, len(graph.steps)))
    seconds[:, 1] = graph.copied / mesh_costs.machine.memory_bandwidth
    for edge, step in enumerate(graph.steps):
        if step is None:
            continue
        for kind, reach, parts in exchanges(step, mesh_costs.mesh):
            seconds[..., edge] += lines(kind, step.axes, reach) * (1.0, graph.moved[edge] / parts)
    same = bool((seconds[0] == seconds[1]).all())
    return _EdgeLines(graph=graph, of_edges=seconds[:1] if same else seconds)


# --- arrays without what does not matter --------------------------------------------------------------------


def _graph(shape: tuple[int, ...], mesh: LogicalMesh) -> Graph:
    return graph_of(tuple(split_like(size, mesh.shape) for size in shape if size != 1), mesh)


def _short(layout: Layout, shape: tuple[int, ...], mesh: LogicalMesh) -> Layout:
    """The layout without mesh axes and dimensions of size 1."""
    dims, partial = without_ones(layout, mesh)
    return Layout(tuple(axes for axes, size in zip(dims, shape, strict=True) if size != 1), partial)


def _in_full(step: ReshardStep, shape: tuple[int, ...]) -> ReshardStep:
    """The step for an array that has its dimensions of size 1 again."""
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    match step:
        case AllToAll():
            return replace(step, source=dims[step.source], target=dims[step.target])
        case Permute():
            at = {dim: short for short, dim in enumerate(dims)}
            full = (
                [split[at[d]] if d in at else () for d in range(len(shape))] for split in (step.source, step.target)
            )
            return Permute(*map(tuple, full))
        case AllReduce() | ToPartial():
            return step
        case Slice() | AllGather() | ReduceScatter() | PadToPartial():
            return replace(step, dim=dims[step.dim])
        case _:
            assert_never(step)
