"""Derive the layers of a step for a number of microbatches from those for two other numbers.

    Layers of 2 microbatches, of 4 microbatches  ->  Layers of 8, of 16, ...

Between numbers of microbatches only the sizes of dimensions with examples change. So once the layers are found for two
numbers, those for every other number are written down class by class, without cutting the step again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.jaxprs.sizes_between import NotBetween, program_between
from autopar.compiler.microbatch.accumulate import of_microbatches
from autopar.compiler.pipeline.phases import find_phases
from autopar.compiler.pipeline.prepare import PreparedStep
from autopar.compiler.planning.stages.layer_classes import LayerClass, Layers


def layers_between(
    one: Layers, other: Layers, num_microbatches: int, prepare: Callable[[], PreparedStep]
) -> Layers | None:
    """Return the layers for a number of microbatches; None if those of the two differ in more than sizes.

    All three are more than one: a single microbatch is the batch, and nothing is summed over several. `prepare`
    prepares the step for them where those of the two do not tell it.
    """
    if (one.cuts, one.loop_pieces, one.class_of) != (other.cuts, other.loop_pieces, other.class_of):
        return None
    rows, first, second = (Fraction(1, n) for n in (num_microbatches, one.num_microbatches, other.num_microbatches))
    at = (rows - first) / (second - first)
    try:
        counts = one.num_microbatches, other.num_microbatches, num_microbatches
        classes = tuple(_class_between(a, b, at, counts) for a, b in zip(one.classes, other.classes, strict=True))
    except NotBetween:
        return None
    return replace(
        one,
        num_microbatches=num_microbatches,
        prepare=partial(_prepared_between, one, other, at, num_microbatches, prepare),
        classes=classes,
        crossing_bytes=tuple(
            a + (b - a) * float(at) for a, b in zip(one.crossing_bytes, other.crossing_bytes, strict=True)
        ),
    )


def _prepared_between(
    one: Layers, other: Layers, at: Fraction, num_microbatches: int, prepare: Callable[[], PreparedStep]
) -> PreparedStep:
    """Return the step that is cut into these layers, written down by those of two numbers of microbatches."""
    mine, theirs = one.prepared, other.prepared
    if _inputs(mine) != _inputs(theirs):
        return prepare()
    first, second = (of_microbatches(each.phases.step.jaxpr, num_microbatches) for each in (mine, theirs))
    counts = one.num_microbatches, other.num_microbatches, num_microbatches
    try:
        jaxpr = program_between(first, second, at, counts)
    except NotBetween:
        return prepare()
    step = replace(mine.phases.step, jaxpr=jaxpr, num_microbatches=num_microbatches)
    return replace(mine, phases=find_phases(step))


def _inputs(step: PreparedStep) -> object:
    by_name = step.inputs, step.outputs, step.input_names, dict(step.state_outputs)
    return by_name, step.recomputes, step.phases.step.inputs


def _class_between(one: LayerClass, other: LayerClass, at: Fraction, counts: tuple[int, int, int]) -> LayerClass:
    if _without_sizes(one) != _without_sizes(other):
        raise NotBetween
    pairs = zip(one.tasks, other.tasks, strict=True)
    return replace(
        one,
        tasks=tuple(_task_between(a, b, at, counts) for a, b in pairs),
        batch_axes=_batch_axes(one, other),
    )


def _task_between(one: GroupTask, other: GroupTask, at: Fraction, counts: tuple[int, int, int]) -> GroupTask:
    times = one.times if one.times == other.times else float(counts[-1])
    return replace(one, jaxpr=program_between(one.jaxpr, other.jaxpr, at, counts), times=times)


def _without_sizes(layer: LayerClass) -> object:
    """Return what has to be the same of two layers."""
    tasks = [(t.name, t.inputs, t.outputs, t.phase, t.donated, t.parameters, t.gradients) for t in layer.tasks]
    sets = layer.state, layer.on_host, layer.kept, layer.fed, frozenset(layer.constraints.sums)
    maps = layer.constraints.alike, layer.pins, layer.in_parts, layer.kinds
    return tasks, sets, [dict(each) for each in maps], layer.batch_axes.keys()


def _batch_axes(one: LayerClass, other: LayerClass) -> dict[str, int | None]:
    """Return the axes that hold examples: where the guesses by their size differ, the one whose size does."""
    types, twins = one.types, other.types
    axes: dict[str, int | None] = {}
    for name, axis in one.batch_axes.items():
        axes[name] = axis
        if axis != other.batch_axes[name]:
            sizes = zip(types[name].shape, twins[name].shape, strict=True)
            axes[name] = next((place for place, (a, b) in enumerate(sizes) if a != b), None)
    return axes
