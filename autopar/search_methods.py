"""Methods that leave the decisions to the solver: what is given is fixed, the rest is searched.

Auto             every sharding that there is
Zero             data parallel, with optimizer state, gradients or parameters divided among the devices
TensorParallel   the batch on every device, the work inside of every layer divided
ExpertParallel   data parallel, with the experts of mixture-of-experts layers divided among the devices
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from autopar.checks import BATCH_STATISTICS, RANDOM, SCHEDULES, check_choice, check_count, check_mesh_shape
from autopar.errors import InvalidArgument

MEMORY_LEVELS = {"off": math.inf, "adaptive": 0.9, "slight": 0.75, "moderate": 0.6, "heavy": 0.4}
"""The share of a device's memory that a plan may use, a tenth being left to what is not modelled; "off": no limit."""

_USUAL_AXES = ("data", "model", "expert")


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Search the stages, and the sharding of every value, that make the step fastest and fit into memory.

    What is given is fixed, the rest is searched. `num_stages` stages share the devices, each with a mesh of its own;
    with one stage the whole step is one program, unless it is large. `mesh_shape` is the logical mesh of every stage,
    by default the best of those with two axes; `axis_names` name its axes ("data", "model", "expert").
    `num_microbatches` parts of the batch go through the model one after another, in the order of the `schedule`.
    `memory` limits what a device may hold: bytes, a fraction of its memory, or a word: "adaptive" (0.9 of it, the
    default), "slight", "moderate" and "heavy" (0.75, 0.6 and 0.4), "off" (no limit).
    `remat` computes layers again in the backward pass instead of keeping what they made: as few as make the plan fit
    into memory ("auto"), all that can be (True), or none (False). Layers are the numbered scopes of the model (`h_0`,
    `h_1`), or parts of even FLOPs where it has none; the last one is never among them, as its backward pass follows at
    once. A scan over layers is not recomputed: put `jax.checkpoint` around its body.
    `pins` maps regular expressions to specs: an input whose key path (`state/params/h_0/kernel`) one of them finds is
    laid out so. Sharding constraints in the model are obeyed unless `ignore_user_shardings`. After `time_limit_s`
    seconds the best plan so far is taken, with the gap that is left.

    Raises `InvalidArgument` for values that cannot be used.

    >>> Auto(mesh_shape=(2, 4)).mesh_axes
    ('data', 'model')
    """

    num_stages: int | None = None
    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    memory: float | str = "adaptive"
    remat: bool | str = "auto"
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec], hash=False)
    ignore_user_shardings: bool = False
    time_limit_s: float = 60.0
    random: str = "full_batch"
    batch_statistics: str = "exact"

    def __post_init__(self) -> None:
        """Raise for a field that cannot be used."""
        for name in ("num_stages", "num_microbatches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_choice("random", self.random, RANDOM)
        check_choice("batch_statistics", self.batch_statistics, BATCH_STATISTICS)
        if self.schedule is not None:
            check_choice("schedule", self.schedule, SCHEDULES)
        if self.mesh_shape is not None:
            check_mesh_shape(self.mesh_shape, self.mesh_axes)
        _check_memory(self.memory)
        _check_remat(self.remat)
        if not self.time_limit_s > 0:
            raise InvalidArgument(f"time_limit_s is {self.time_limit_s}; give a positive number of seconds.")
        for pattern in self.pins:
            _check_pattern(pattern)
        object.__setattr__(self, "pins", dict(self.pins))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes, the usual ones if none were given."""
        if self.axis_names is not None:
            return self.axis_names
        rank = 2 if self.mesh_shape is None else len(self.mesh_shape)
        if rank > len(_USUAL_AXES):
            raise InvalidArgument(
                f"The mesh shape {self.mesh_shape} has {rank} axes, there are usual names for up to "
                f"{len(_USUAL_AXES)} only. Give axis_names, one for each axis."
            )
        return _USUAL_AXES[:rank]


@dataclass(frozen=True, kw_only=True)
class _Restricted:
    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    num_microbatches: int = 1
    memory: float | str = "adaptive"
    time_limit_s: float = 60.0
    batch_statistics: str = "exact"

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a field that cannot be used."""
        self.search()

    def search(self) -> Auto:
        """The search that this method restricts."""
        return Auto(
            num_stages=1,
            num_microbatches=self.num_microbatches,
            mesh_shape=self.mesh_shape,
            axis_names=self.axis_names,
            memory=self.memory,
            time_limit_s=self.time_limit_s,
            batch_statistics=self.batch_statistics,
        )


@dataclass(frozen=True, kw_only=True)
class Zero(_Restricted):
    """Data parallel with divided state (Rajbhandari et al. 2020): the batch split over all devices, and

    `stage=1` and `stage=2` also the optimizer's state, `stage=3` also the parameters; activations are split along the
    batch only. Gradients are reduce-scattered to where the state is in all of them (what ZeRO calls stage 2): the same
    bytes as the all-reduce of stage 1, and less memory.

    Raises `InvalidArgument` for a stage that there is not.
    """

    stage: int = 3

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for another stage."""
        super().__post_init__()
        if self.stage not in (1, 2, 3):
            raise InvalidArgument(f"Zero has stage={self.stage!r}; there are the stages 1, 2 and 3. Give one of them.")


@dataclass(frozen=True, kw_only=True)
class TensorParallel(_Restricted):
    """Every device sees the whole batch; the work inside of every layer is divided (Shoeybi et al. 2019)."""


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(_Restricted):
    """The batch is split over all devices, and so are the experts: parameters with a batch dimension in a product.

    All other parameters are on every device (Lepikhin et al. 2020).
    """


SearchMethod = Auto | Zero | TensorParallel | ExpertParallel


def _check_memory(memory: float | str) -> None:
    if isinstance(memory, str):
        check_choice("memory", memory, tuple(MEMORY_LEVELS))
    elif not memory > 0:
        raise InvalidArgument(
            f"memory is {memory}; give bytes, a fraction of a device's memory above 0, or one of "
            f"{', '.join(MEMORY_LEVELS)}."
        )


def _check_remat(remat: bool | str) -> None:
    if remat not in (True, False, "auto"):
        raise InvalidArgument(f'remat is {remat!r}; give True, False, or "auto".')


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(
            f"The pattern {pattern!r} of pins is no regular expression: {error}. Escape what is meant literally, for "
            "example with re.escape(path)."
        ) from None
