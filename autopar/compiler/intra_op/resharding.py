"""Take an array from one layout to another: by which steps, what they move, and how long that takes.

    source, target, shape, mesh  ->  steps  ->  collectives, seconds, and the program (`resharding_emit.apply_steps`)

Mesh axes of size 1 and dimensions of size 1 take no part: nothing is ever done about them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np

from autopar.compiler.intra_op.figures import MeshFigures
from autopar.compiler.intra_op.layout import Axes, Layout, LogicalMesh, fits, num_shards
from autopar.compiler.intra_op.resharding_emit import apply_steps
from autopar.compiler.intra_op.resharding_search import Graph, graph_of, last_edges, path
from autopar.compiler.intra_op.resharding_steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Pad,
    Permute,
    ReduceScatter,
    Slice,
    Step,
    Summand,
    after,
    collective_kind,
    copied_share,
    moved_share,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Collective",
    "Pad",
    "Permute",
    "ReduceScatter",
    "Slice",
    "Step",
    "Summand",
    "apply_steps",
    "reshard_matrix",
    "reshard_s",
    "reshard_steps",
    "step_collectives",
]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What the devices along `axes` exchange."""

    kind: str
    axes: Axes
    nbytes: float
    """The larger of one device's operand and result, as in `figures.wire_bytes`."""


@functools.cache
def reshard_steps(source: Layout, target: Layout, shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[Step, ...]:
    """The steps that take an array from `source` to `target` with the fewest bytes sent (see `resharding_search`)."""
    assert fits(shape, source, mesh) and fits(shape, target, mesh), (source, target, shape, mesh)
    short = path(_graph(shape, mesh), _short(source, shape, mesh), _short(target, shape, mesh))
    return tuple(_in_full(step, shape) for step in short)


def step_collectives(
    steps: Sequence[Step], source: Layout, shape: tuple[int, ...], itemsize: float, mesh: LogicalMesh
) -> tuple[Collective, ...]:
    """The collectives of `steps`, in their order, for an array that arrives in the layout `source`."""
    nbytes = math.prod(shape) * itemsize
    found: list[Collective] = []
    layout = _without_ones(source, mesh)
    for step in steps:
        before, layout = layout, after(layout, step)
        kind = collective_kind(step)
        if kind is not None:
            moved = nbytes * moved_share(num_shards(before, mesh), num_shards(layout, mesh), step)
            found.append(Collective(kind=kind, axes=step.axes, nbytes=moved))
    return tuple(found)


@functools.cache
def reshard_s(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: float, mesh: LogicalMesh, figures: MeshFigures
) -> float:
    """Seconds that resharding takes: its collectives, and the memory traffic of its copies."""
    return float(reshard_matrix((source,), (target,), shape, itemsize, mesh, figures)[0, 0])


@functools.lru_cache(maxsize=4096)
def reshard_matrix(
    sources: tuple[Layout, ...],
    targets: tuple[Layout, ...],
    shape: tuple[int, ...],
    itemsize: float,
    mesh: LogicalMesh,
    figures: MeshFigures,
) -> np.ndarray:
    """`reshard_s` from every source to every target; not to be written to, for it is kept."""
    assert all(fits(shape, layout, mesh) for layout in {*sources, *targets}), (sources, targets, shape, mesh)
    short_sources = tuple(_short(source, shape, mesh) for source in sources)
    short_targets = tuple(_short(target, shape, mesh) for target in targets)
    fixed, per_byte = _seconds_of_paths(_graph(shape, mesh), short_sources, short_targets, mesh, figures)
    seconds = fixed + per_byte * (math.prod(shape) * itemsize)
    seconds.setflags(write=False)
    return seconds


@functools.lru_cache(maxsize=1024)
def _seconds_of_paths(
    graph: Graph, sources: tuple[Layout, ...], targets: tuple[Layout, ...], mesh: LogicalMesh, figures: MeshFigures
) -> tuple[np.ndarray, np.ndarray]:
    """Of the steps from every source to every target: seconds for no bytes, and more seconds per byte of the array."""
    fixed, per_byte = _seconds_of_edges(graph, mesh, figures)
    starts, ends = ([graph.number[layout] for layout in layouts] for layouts in (sources, targets))
    last = last_edges(graph, starts)
    total = np.zeros((2, len(starts), len(ends)))
    rows, here = np.arange(len(starts))[:, None], np.array([ends] * len(starts))
    # Back along all paths at once; a path that has arrived at its source stays there, at no cost.
    while (here != np.array(starts)[:, None]).any():
        edges = last[rows, here]
        total[0] += fixed[edges]
        total[1] += per_byte[edges]
        here = graph.source[edges]
    return total[0], total[1]


@functools.cache
def _seconds_of_edges(graph: Graph, mesh: LogicalMesh, figures: MeshFigures) -> tuple[np.ndarray, np.ndarray]:
    """Of every step: seconds for no bytes, and more seconds per byte of the array."""
    fixed, per_byte = np.zeros(len(graph.steps)), np.zeros(len(graph.steps))
    latency_and_rate = functools.cache(lambda kind, axes: _line(figures, kind, axes, mesh))
    for edge, (step, source, target) in enumerate(zip(graph.steps, graph.source, graph.target, strict=True)):
        if step is None:
            continue
        parts = graph.parts[source], graph.parts[target]
        per_byte[edge] = copied_share(*parts, step) / figures.memory_bandwidth
        kind = collective_kind(step)
        if kind is not None:
            fixed[edge], rate = latency_and_rate(kind, step.axes)
            per_byte[edge] += rate * moved_share(*parts, step)
    return fixed, per_byte


def _line(figures: MeshFigures, kind: str, axes: Axes, mesh: LogicalMesh) -> tuple[float, float]:
    """Seconds of a collective without bytes, and per byte: its time is a line."""
    latency = figures.collective_s(kind, axes, 0.0, mesh)
    return latency, figures.collective_s(kind, axes, 1.0, mesh) - latency


# --- arrays without what does not matter --------------------------------------------------------------------


def _graph(shape: tuple[int, ...], mesh: LogicalMesh) -> Graph:
    return graph_of(tuple(math.gcd(size, mesh.num_devices) for size in shape if size != 1), mesh.shape)


def _short(layout: Layout, shape: tuple[int, ...], mesh: LogicalMesh) -> Layout:
    """The layout without mesh axes and dimensions of size 1."""
    dims, partial = _without_ones(layout, mesh)
    return Layout(tuple(axes for axes, size in zip(dims, shape, strict=True) if size != 1), partial)


def _without_ones(layout: Layout, mesh: LogicalMesh) -> Layout:
    """The layout without mesh axes of size 1, and with the summed axes in order."""
    dims = (tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in layout.dims)
    return Layout(tuple(dims), tuple(sorted(axis for axis in layout.partial if mesh.shape[axis] > 1)))


def _in_full(step: Step, shape: tuple[int, ...]) -> Step:
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
        case AllReduce() | Summand():
            return step
        case Slice() | AllGather() | ReduceScatter() | Pad():
            return replace(step, dim=dims[step.dim])
        case _:
            assert_never(step)
