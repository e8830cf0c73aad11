"""What the user may ask for: each way to parallelize is one frozen value, checked when it is made.

    DataParallel       every device holds all parameters and a part of the batch
    ShardParallel      one mesh of all devices, with a spec for every input that is not replicated
    PipelineParallel   the devices in equal groups, each with a run of layers
    Megatron           data, tensor and pipeline parallelism by their degrees (`megatron.py`)

Nothing is decided here. What a value means for a program is worked out by the compiler and written into a
`Plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from autopar.checks import (
    BATCH_STATISTICS,
    RANDOM,
    SCHEDULES,
    check_choice,
    check_count,
    check_mesh_shape,
    check_spec,
)
from autopar.errors import InvalidArgument
from autopar.megatron import Megatron
from autopar.search_methods import SearchMethod

_USUAL_AXES = ("data", "model", "expert")


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Split the batch over all devices and replicate everything else.

    `num_microbatches` parts of the batch go through the model one after another, and their gradients are
    added: less memory for activations, the same result. `random="full_batch"` draws dropout masks that
    together equal those of the whole batch; `"per_microbatch"` draws them microbatch by microbatch, which
    takes less memory and gives other masks. A reduction over the batch inside the model, such as batch norm,
    is an error with `batch_statistics="exact"`, and is taken over each microbatch with `"per_microbatch"`,
    the usual approximation.

    Raises `InvalidArgument` for a count below 1 or an unknown word.

    >>> DataParallel(num_microbatches=4).random
    'full_batch'
    """

    num_microbatches: int = 1
    random: str = "full_batch"
    batch_statistics: str = "exact"

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a count below 1 or an unknown word."""
        _check_microbatches(self.num_microbatches, self.random, self.batch_statistics)


@dataclass(frozen=True, kw_only=True)
class ShardParallel:
    """Place every input on one mesh of all devices, by specs that the user gives.

    `mesh_shape` has one size per mesh axis, and their product is the number of devices. `axis_names` are by
    default the first of "data", "model", "expert". `specs` maps regular expressions to specs: an input takes
    the spec of the first pattern that `re.search` finds in its name, for example
    "state.params['h_0']['kernel']", and is replicated, or split along the batch, if none does. The other
    fields are those of `DataParallel`.

    Raises `InvalidArgument` for a mesh without names, an invalid pattern, or a spec with axes that the mesh
    lacks.

    >>> ShardParallel(mesh_shape=(2, 4), specs={"kernel": PartitionSpec(None, "model")}).mesh_axes
    ('data', 'model')
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec], hash=False)
    num_microbatches: int = 1
    random: str = "full_batch"
    batch_statistics: str = "exact"

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a mesh, pattern, spec, count or word that cannot be used."""
        _check_microbatches(self.num_microbatches, self.random, self.batch_statistics)
        check_mesh_shape(self.mesh_shape, self.mesh_axes)
        object.__setattr__(self, "specs", _checked_specs(self.specs, self.mesh_axes))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes, the usual ones if none were given."""
        return _axes_or_usual(self.mesh_shape, self.axis_names)


@dataclass(frozen=True, kw_only=True)
class PipelineParallel:
    """Cut the model into stages on equal groups of devices and feed them microbatches in turn.

    The devices are split into `num_stages` meshes. Each has the logical `mesh_shape` with `axis_names`;
    `None` puts all devices of a mesh on one "data" axis. The forward is cut into `layers` layers, by default
    one per stage. `schedule` is "gpipe", "1f1b", "eager-1f1b", "interleaved" or "zero-bubble". With
    "interleaved" each mesh has `virtual_stages` stages, 2 by default, that lie apart in the model; every
    other schedule has one per mesh. `remat=True` recomputes each stage's forward in its backward, so that
    only the inputs of a stage stay in memory. `specs` are those of `ShardParallel`, over the axes of a
    stage's mesh, and the rest is that of `DataParallel`.

    Raises `InvalidArgument` for a count below 1, an unknown word, fewer layers than stages, virtual stages
    without "interleaved", an invalid pattern, or a spec with axes that the mesh lacks.

    >>> PipelineParallel(num_stages=4, num_microbatches=8, schedule="interleaved").num_virtual_stages
    8
    """

    num_stages: int = 2
    num_microbatches: int = 1
    schedule: str = "1f1b"
    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    layers: int | None = None
    virtual_stages: int | None = None
    remat: bool = False
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec], hash=False)
    random: str = "full_batch"
    batch_statistics: str = "exact"

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a count, word, mesh, pattern or spec that cannot be used."""
        _check_microbatches(self.num_microbatches, self.random, self.batch_statistics)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_count("num_stages", self.num_stages)
        check_count("virtual_stages", self.stages_per_mesh)
        check_count("layers", self.num_layers)
        if self.schedule != "interleaved" and self.stages_per_mesh != 1:
            raise InvalidArgument(
                f'virtual_stages is {self.stages_per_mesh} with schedule="{self.schedule}", which has one '
                f'stage per mesh. Leave virtual_stages out, or use schedule="interleaved".'
            )
        if self.num_layers < self.num_virtual_stages:
            raise InvalidArgument(
                f"There are {self.num_layers} layers for {self.num_virtual_stages} stages, each needs one. "
                f"Give layers={self.num_virtual_stages} or more, or use fewer stages."
            )
        if self.mesh_shape is not None or self.axis_names is not None:
            check_mesh_shape(self.mesh_shape or (1,), self.mesh_axes)
        object.__setattr__(self, "specs", _checked_specs(self.specs, self.mesh_axes))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the axes of each stage's mesh, the usual ones if none were given."""
        return _axes_or_usual(self.mesh_shape or (1,), self.axis_names)

    @property
    def stages_per_mesh(self) -> int:
        """Number of stages on each mesh: `virtual_stages`, or the schedule's usual number."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 2 if self.schedule == "interleaved" else 1

    @property
    def num_virtual_stages(self) -> int:
        """Number of stages on all meshes together."""
        return self.num_stages * self.stages_per_mesh

    @property
    def num_layers(self) -> int:
        """Number of layers that the forward is cut into: `layers`, or one per stage."""
        return self.num_virtual_stages if self.layers is None else self.layers


HandMethod = DataParallel | ShardParallel | PipelineParallel
Method = HandMethod | Megatron | SearchMethod


def _check_microbatches(num_microbatches: int, random: str, batch_statistics: str) -> None:
    check_count("num_microbatches", num_microbatches)
    check_choice("random", random, RANDOM)
    check_choice("batch_statistics", batch_statistics, BATCH_STATISTICS)


def _axes_or_usual(mesh_shape: tuple[int, ...], axis_names: tuple[str, ...] | None) -> tuple[str, ...]:
    if axis_names is not None:
        return axis_names
    if len(mesh_shape) > len(_USUAL_AXES):
        raise InvalidArgument(
            f"The mesh shape {mesh_shape} has {len(mesh_shape)} axes, there are usual names for up to "
            f"{len(_USUAL_AXES)} only. Give axis_names, one for each axis."
        )
    return _USUAL_AXES[: len(mesh_shape)]


def _checked_specs(specs: Mapping[str, PartitionSpec], axes: tuple[str, ...]) -> dict[str, PartitionSpec]:
    """A copy of the specs, whose patterns compile and whose axes are those of the mesh."""
    for pattern, spec in specs.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidArgument(
                f"The pattern {pattern!r} of specs is no regular expression: {error}. "
                f"Escape brackets, for example with re.escape(name)."
            ) from None
        check_spec(f"the inputs that match {pattern!r}", spec, (axes,))
    return dict(specs)
