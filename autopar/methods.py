"""The ways to parallelize that a user may ask for: each is one frozen value, checked when it is made.

By hand, where the user gives the layouts of inputs, and those of all other values are the optimum under these:

    DataParallel       every device holds all parameters and a part of the batch
    ShardParallel      one mesh of all devices, with a spec for every input that is not replicated
    PipelineParallel   the devices in equal groups, each with a run of layers

By degrees of data, tensor and pipeline parallelism, as practitioners plan by hand:

    Megatron           the layouts within a stage are those of Megatron-LM

By search, where what is given is fixed and the solver decides the rest:

    Auto               every sharding that there is
    Zero               data parallel, with optimizer state, gradients or parameters divided among the devices
    TensorParallel     the batch on every device, the work inside of every layer divided
    ExpertParallel     data parallel, with the experts of mixture-of-experts layers divided among the devices

Nothing is decided here: the compiler works out the meaning of a value for a program and writes it into a `Plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from autopar.checks import as_reduce_dtype, check_mesh_shape, plain_value
from autopar.errors import InvalidArgument
from autopar.ir.schedule import Schedule
from autopar.ir.schedules import DEFAULT_SCHEDULE, check_virtual_stages, get_schedule
from autopar.method_fields import (
    FIELD_CHECKS,
    KINDS,
    PLACEMENTS,
    as_offload,
    axes_or_usual,
    check_layers,
    check_runs_of_layers,
    check_specs,
    given_devices,
    one_for_each_stage,
    placement_of,
    virtual_stages_of,
)


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Split the batch over all devices and replicate everything else.

    `num_microbatches` parts of the batch go through the model one after another, and their gradients are
    added: less memory for activations, the same result. `random="full_batch"` draws dropout masks that
    together equal those of the whole batch; `"per_microbatch"` draws them microbatch by microbatch, which
    takes less memory and gives other masks. For a reduction over the batch inside the model, such as batch norm,
    all microbatches wait with `batch_statistics="exact"`, so that the activations of all are kept; it is taken over
    each microbatch with `"per_microbatch"`, the usual approximation.

    Gradients that are made in fewer bits, as products in bfloat16 do, are summed over devices and microbatches in
    `reduce_dtype`, such as "float32", which sends twice the bytes; by default in the type in which they are made.
    Sharding constraints in the model are obeyed unless `ignore_user_shardings`.

    Raises `InvalidArgument` for a count below 1 or an unknown word.

    >>> DataParallel(num_microbatches=4).random
    'full_batch'
    """

    divides: ClassVar[tuple[str, ...]] = ("batch",)
    """The values that it divides among the devices wherever a size allows."""
    num_microbatches: int = 1
    random: str = "full_batch"
    batch_statistics: str = "exact"
    reduce_dtype: DTypeLike | None = None
    ignore_user_shardings: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a count below 1 or an unknown word."""
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ShardParallel:
    """Place every input on one mesh of all devices, by specs that the user gives.

    `mesh_shape` has one size per mesh axis, and their product is the number of devices. `axis_names` are by
    default the first of "data", "model", "expert". `specs` maps regular expressions to specs: an input takes
    the spec of the first pattern that `re.search` finds in its name, for example
    "state.params.h_0.kernel", and is replicated, or split along the batch, if none does. The other
    fields are those of `DataParallel`.

    Raises `InvalidArgument` for a mesh without names, an invalid pattern, or a spec with axes that the mesh
    lacks.

    >>> ShardParallel(mesh_shape=(2, 4), specs={"kernel": PartitionSpec(None, "model")}).mesh_axes
    ('data', 'model')
    """

    divides: ClassVar[tuple[str, ...]] = ("batch",)
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec], hash=False)
    num_microbatches: int = 1
    random: str = "full_batch"
    batch_statistics: str = "exact"
    reduce_dtype: DTypeLike | None = None
    ignore_user_shardings: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a mesh, pattern, spec, count or word that cannot be used."""
        _check_fields(self)
        check_mesh_shape(self.mesh_shape, self.mesh_axes)
        check_specs(self.specs, self.mesh_axes)
        object.__setattr__(self, "specs", dict(self.specs))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes; the usual ones if none were given."""
        return axes_or_usual(self.mesh_shape, self.axis_names)

    def search(self) -> Auto:
        """Return the search that this method restricts: the layouts of one program on this mesh."""
        return Auto(
            num_stages=1,
            num_microbatches=1,
            mesh_shape=self.mesh_shape,
            axis_names=self.axis_names,
            memory="off",
            remat=False,
            random=self.random,
            batch_statistics=self.batch_statistics,
            ignore_user_shardings=self.ignore_user_shardings,
        )


@dataclass(frozen=True, kw_only=True)
class PipelineParallel:
    """Cut the model into stages, each on devices of its own, and feed them microbatches in turn.

    The devices are split into `num_stages` meshes of equal size, 2 by default. Each has the logical `mesh_shape` with
    `axis_names`; `None` puts all devices of a mesh on one "data" axis. The forward is cut into `layers` layers, by
    default those that the model marks by `autopar.layer_boundary`, or else one per stage. `schedule` is "gpipe",
    "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "zero-bubble-h2", "interleaved-zero-bubble", "zero-bubble-v",
    "dualpipe-v", one that `register_schedule` made known, or a `Schedule` of your own. With an interleaved one, or one
    there and back ("-v"), each mesh has `virtual_stages` stages, 2 by default, that lie apart in the model; the others
    have one per mesh. `remat=True` recomputes the layers of each stage in its backward pass, one by one, so that only
    what goes into a layer stays in memory. `offload` is that of `Megatron`, `specs` are those of `ShardParallel`, over
    the axes of a stage's mesh, and the rest is that of `DataParallel`.

    Stages may be unequal; then each of these has an entry for every one of them:

        layers        [[0, 5], [5, 12]]   the layers of the model that it has, the last one not among them
        submeshes     [(1, 4), (1, 2)]    the hosts of its mesh, and the devices of each; what is left over is idle
        mesh_shapes   [(2, 2), (2, 1)]    the logical shape of its mesh, by default all devices on one axis

    Layers are those that the model says it has, by marks or numbered scopes, and what stands before the first and
    after the last goes with these (or counts as a layer each, in ranges that end two later); of a model that says
    nothing, as many parts of even FLOPs. With virtual stages, `layers` has an entry for each of them, stage 0 of every
    mesh first, and the other two have one for each mesh.

    `layouts="search"` has the solver lay out inputs as well: what `specs` name is as they say, everything else as it is
    fastest, and within nine tenths of a device's memory if it can be. By default ("given") the other inputs are on
    every device, or split along the batch.

    Raises `InvalidArgument` for a count below 1, an unknown word, fewer layers than stages, virtual stages
    without "interleaved", an invalid pattern, a spec with axes that the mesh lacks, layers that leave one out or have
    one twice, and entries for other numbers of stages, or of devices.

    >>> PipelineParallel(num_stages=4, num_microbatches=8, schedule="interleaved").num_virtual_stages
    8
    >>> PipelineParallel(layers=[[0, 5], [5, 12]], submeshes=[(1, 4), (1, 2)]).num_layers
    12
    """

    divides: ClassVar[tuple[str, ...]] = ("batch",)
    num_stages: int | None = None
    num_microbatches: int = 1
    schedule: str | Schedule = DEFAULT_SCHEDULE
    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    layers: int | Sequence[Sequence[int]] | None = None
    submeshes: Sequence[tuple[int, int]] | None = None
    mesh_shapes: Sequence[tuple[int, ...]] | None = None
    virtual_stages: int | None = None
    remat: bool = False
    offload: str | tuple[str, ...] = "off"
    layouts: str = "given"
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec], hash=False)
    random: str = "full_batch"
    batch_statistics: str = "exact"
    reduce_dtype: DTypeLike | None = None
    ignore_user_shardings: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a count, word, mesh, pattern or spec that cannot be used."""
        _check_fields(self)
        object.__setattr__(self, "offload", as_offload(self.offload))
        check_virtual_stages(get_schedule(self.schedule), self.stages_per_mesh)
        one_for_each_stage(
            self.num_stages,
            self.stages_per_mesh,
            {"layers": self.runs, "submeshes": self.submeshes, "mesh_shapes": self.mesh_shapes},
        )
        check_runs_of_layers(self.runs)
        check_layers(self.num_layers, self.num_virtual_stages)
        if self.mesh_shapes is not None and self.mesh_shape is not None:
            raise InvalidArgument(
                f"mesh_shape is {self.mesh_shape}, and mesh_shapes are {list(self.mesh_shapes)}. Give one of them: the "
                "shape of all meshes, or that of each."
            )
        for shape in self.mesh_shapes or (self.mesh_shape,):
            if shape is not None or self.axis_names is not None:
                check_mesh_shape(shape or (1,), self.mesh_axes)
        check_specs(self.specs, self.mesh_axes)
        object.__setattr__(self, "specs", dict(self.specs))

    @property
    def runs(self) -> tuple[tuple[int, int], ...] | None:
        """The layers `[start, stop)` of every stage, if they are given."""
        if self.layers is None or isinstance(self.layers, int):
            return None
        return tuple((start, stop) for start, stop in self.layers)

    @property
    def num_meshes(self) -> int:
        """Number of groups of devices: one for each stage, or for several virtual ones."""
        for given, per_mesh in ((self.submeshes, 1), (self.mesh_shapes, 1), (self.runs, self.stages_per_mesh)):
            if given is not None:
                return len(given) // per_mesh
        return 2 if self.num_stages is None else self.num_stages

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the axes of each stage's mesh; the usual ones if none were given."""
        first = self.mesh_shape if self.mesh_shapes is None else self.mesh_shapes[0]
        return axes_or_usual(first or (1,), self.axis_names)

    @property
    def stages_per_mesh(self) -> int:
        """Number of stages on each mesh: `virtual_stages`, or the schedule's usual number."""
        return virtual_stages_of(self.schedule, self.virtual_stages)

    @property
    def num_virtual_stages(self) -> int:
        """Number of stages on all meshes together."""
        return self.num_meshes * self.stages_per_mesh

    @property
    def num_layers(self) -> int:
        """Number of layers that the forward is cut into: `layers`, or one per stage."""
        if self.runs is not None:
            return self.runs[-1][1]
        return self.layers if isinstance(self.layers, int) else self.num_virtual_stages


@dataclass(frozen=True, kw_only=True)
class Megatron:
    """Divide the devices as Megatron-LM does, by degrees of parallelism that are given (Narayanan et al. 2021).

    `pipeline` stages get even numbers of the model's layers (what stands before the first layer and after the last
    goes with these). The devices of a stage are `data` x `tensor`: examples are split over `data`, and every
    product with a weight divides that weight over `tensor`, by columns, rows or heads (Shoeybi et al. 2019); which of
    them, and how activations lie in between, is the optimum under these restrictions. `data` is by default what
    `tensor` and `pipeline` leave of the devices.

    `num_microbatches` parts of the batch go through the stages in the order of the `schedule` ("gpipe", "1f1b",
    "eager-1f1b", "interleaved", ..., those of `PipelineParallel`), of which some have `virtual_stages` stages on each
    device, 2 by default. `remat=True` recomputes the layers in the backward pass, one by one.

    `zero` is the ZeRO stage (Rajbhandari et al. 2020), what is divided over `data` beside the examples:

        0   nothing: every replica holds the state and updates all of it
        1   the optimizer's state, what the model itself does not read (a master copy, moments)
        2   and the sums of gradients, into which those of each microbatch are reduce-scattered
        3   and the parameters, which are gathered for each forward and backward pass

    `offload` keeps in pinned memory of the hosts what no task uses, and brings it to the devices while the task before
    runs: one word or several. With `zero=1` or more each host holds and moves only its devices' share of the state.

        "optimizer"    that same state, part by part for the update (Ren et al. 2021)
        "parameters"   and the parameters, a stage at a time, with the sums of their gradients: it takes virtual stages
        "activations"  what the forward task of a microbatch leaves for its backward task

    `placement` says which devices are neighbours: "intra_node_model" has those that share an example within a host (the
    devices one by one, as without a placement), "intra_node_replica" the replicas that sum gradients, and a list for
    every stage has its devices in the order of its mesh, row-major over data x tensor: `[[0, 2, 1, 3], [4, 6, 5, 7]]`.

    `random`, `batch_statistics`, `reduce_dtype` and `ignore_user_shardings` are those of `DataParallel`. After
    `time_limit_s` seconds for a stage the best layouts so far are taken.

    Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC'21.
    Shoeybi et al.: Megatron-LM, arXiv:1909.08053. Rajbhandari et al.: ZeRO, SC'20. Ren et al.: ZeRO-Offload, ATC'21.

    Raises `InvalidArgument` for a count below 1, an unknown word, virtual stages without "interleaved", or a ZeRO
    stage without replicas to divide the state among.

    >>> Megatron(tensor=4, pipeline=2, num_microbatches=8).degrees(16)
    (2, 4, 2)
    """

    divides: ClassVar[tuple[str, ...]] = ("batch",)
    data: int | None = None
    tensor: int = 1
    pipeline: int = 1
    num_microbatches: int = 1
    schedule: str | Schedule = DEFAULT_SCHEDULE
    virtual_stages: int | None = None
    zero: int = 0
    remat: bool = False
    offload: str | tuple[str, ...] = "off"
    placement: str | Sequence[Sequence[int]] | None = None
    random: str = "full_batch"
    batch_statistics: str = "exact"
    reduce_dtype: DTypeLike | None = None
    ignore_user_shardings: bool = False
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a field that cannot be used."""
        _check_fields(self)
        check_virtual_stages(get_schedule(self.schedule), self.stages_per_mesh)
        object.__setattr__(self, "offload", as_offload(self.offload))
        if self.data is not None:
            self._check_replicas(self.data)
        if self.placement is not None:
            object.__setattr__(self, "placement", placement_of(self.placement))

    @property
    def stages_per_mesh(self) -> int:
        """Number of stages on each mesh: `virtual_stages`, or the schedule's usual number."""
        return virtual_stages_of(self.schedule, self.virtual_stages)

    def degrees(self, num_devices: int) -> tuple[int, int, int]:
        """Return the numbers of replicas of the data, of shards of the weights, and of stages.

        Raises `InvalidArgument` unless their product is the number of devices.
        """
        given = math.prod(degree for degree in (self.data, self.tensor, self.pipeline) if degree is not None)
        data = num_devices // given if self.data is None else self.data
        if data * self.tensor * self.pipeline != num_devices:
            words = f"tensor={self.tensor} x pipeline={self.pipeline}"
            if self.data is None:
                given_words, required = f"{words} does not divide {num_devices} devices", f"divisors of {num_devices}"
            else:
                given_words = f"data={self.data} x {words} is {given}, there are {num_devices} devices"
                required = f"degrees whose product is {num_devices}"
            raise InvalidArgument(f"Megatron with {given_words}. Give {required}, or another number of devices.")
        self._check_replicas(data)
        return data, self.tensor, self.pipeline

    def search(self) -> Auto:
        """Return the search that one stage with the whole batch is, for a method whose `data` is given."""
        axes = [(size, name) for size, name in ((self.data, "data"), (self.tensor, "model")) if size and size > 1]
        shape, names = zip(*(axes or [(1, "data")]), strict=True)
        return Auto(
            num_stages=1,
            num_microbatches=1,
            mesh_shape=shape,
            axis_names=names,
            memory="off",
            remat=self.remat,
            random=self.random,
            batch_statistics=self.batch_statistics,
            ignore_user_shardings=self.ignore_user_shardings,
            time_limit_s=self.time_limit_s,
        )

    def devices_of_stages(self, num_devices: int, devices_per_host: int) -> tuple[tuple[int, ...], ...]:
        """Return for every stage its devices in the order of its mesh, row-major over data x tensor.

        Raises `InvalidArgument` for a placement that the degrees or the hosts do not allow.
        """
        data, tensor, pipeline = self.degrees(num_devices)
        each = data * tensor
        if self.placement is not None and not isinstance(self.placement, str):
            return given_devices(self.placement, num_devices, (data, tensor, pipeline))
        runs = tuple(tuple(range(stage * each, (stage + 1) * each)) for stage in range(pipeline))
        replicas = self.placement == PLACEMENTS[1]
        name, inside = ("data", data) if replicas else ("tensor", tensor)
        if self.placement is not None and devices_per_host % inside:
            raise InvalidArgument(
                f'placement="{self.placement}" puts {name}={inside} devices into one host, and a host has '
                f"{devices_per_host}. Give a degree that divides them, or another placement."
            )
        if not replicas:
            return runs
        return tuple(tuple(run[d + data * t] for d in range(data) for t in range(tensor)) for run in runs)

    def _check_replicas(self, data: int) -> None:
        if self.zero and data == 1:
            raise InvalidArgument(
                f"zero={self.zero} divides the state among replicas of the data, and data is 1. Use zero=0, or make "
                "tensor or pipeline smaller, so that there are several replicas."
            )


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Search the stages, and the sharding of every value, that make the step fastest and fit into memory.

    What is given is fixed, the rest is searched. `num_stages` stages share the devices, each with a mesh of its own, of
    equal sizes or not; one is one program, unless the step is large. `mesh_shape` is the logical mesh of every stage,
    by default the best of those with two axes; `axis_names` name its axes ("data", "model", "expert").
    `num_microbatches` parts of the batch go through the model one after another, in the order of the `schedule`.
    `memory` limits what a device may hold: bytes, a fraction of its memory, or a word: "adaptive" (0.9 of it, the
    default), "slight", "moderate" and "heavy" (0.75, 0.6 and 0.4), "off" (no limit).
    Stages are runs of layers: those between the marks of `autopar.layer_boundary`, or the numbered scopes of the model
    (`h_0`, `h_1`), or where it has neither, or fewer scopes than stages, parts of even FLOPs; `layers` says how many.
    `remat` computes layers, or all those of a stage, again in the backward pass instead of keeping what they made: as
    few as make the plan fit into memory ("auto"), all that can be (True), or none (False). On one mesh the last layer
    is never among them, as its backward pass follows at once. A scan over layers is not either: put `jax.checkpoint`
    around its body.
    `offload` keeps values on the hosts as it does for `Megatron`, and searches among such plans; "auto" takes the
    fastest that fits, of those with nothing there, the optimizer's state, activations, parameters, or both. A search
    over layouts counts parameters and activations as on the devices all the time. So plans by degrees, with a layer or
    a part of one to a virtual stage, are simulated beside it, which counts them as they are: where no pins, kinds,
    scopes, `mesh_shape`, `layers` or `schedule` are given.
    `pins` maps regular expressions to specs: an input whose name (`state.params.h_0.kernel`) one of them finds is
    laid out so. Sharding constraints in the model are obeyed unless `ignore_user_shardings`; `reduce_dtype` is that of
    `DataParallel`. `effort` ("fast", "normal", "thorough") says how much of the space is looked at before the best plan
    so far is taken, with the gap that is left; a search that has worked for five times `time_limit_s` seconds ends as
    well, once it has a plan, and the plan says so.

    `kinds` restricts the search to kinds of parallelism, by default to none. Only what is named is allowed, never asked
    for, so that more kinds are never slower:

        "data"        mesh axes may split examples
        "zero"        parameters, gradients and the optimizer's state may be divided among devices that use them whole
        "tensor"      mesh axes may split parameters where the model uses them, and features of activations
        "sequence"    mesh axes may split the other dimensions of activations: positions, rows and columns of images
        "expert"      mesh axes may split a dimension of parameters that is a batch dimension in products: experts
        "pipeline"    there may be several stages

    Without "zero", axes that split examples leave the state whole, but for experts, to which the examples come.

    Raises `InvalidArgument` for values that cannot be used, fewer layers than stages, and several stages without
    "pipeline" among the kinds.

    >>> Auto(mesh_shape=(2, 4)).mesh_axes
    ('data', 'model')
    >>> Auto(kinds=["zero", "data"]).kinds
    ('data', 'zero')
    """

    divides: ClassVar[tuple[str, ...]] = ("batch", "state")
    num_stages: int | None = None
    layers: int | None = None
    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    num_microbatches: int | None = None
    schedule: str | Schedule | None = None
    memory: float | str = "adaptive"
    remat: bool | str = "auto"
    offload: str | tuple[str, ...] = "off"
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec], hash=False)
    kinds: tuple[str, ...] | None = None
    ignore_user_shardings: bool = False
    effort: str = "normal"
    time_limit_s: float = 60.0
    random: str = "full_batch"
    batch_statistics: str = "exact"
    reduce_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a field that cannot be used."""
        _check_fields(self)
        if self.layers is not None:
            if not isinstance(self.layers, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(
                    f"layers is {self.layers!r}, the layers of stages that are given. Use "
                    f'PipelineParallel(layers=..., layouts="search"), or give their number.'
                )
            check_layers(self.layers, self.num_stages or 1)
        if self.mesh_shape is not None:
            check_mesh_shape(self.mesh_shape, self.mesh_axes)
        object.__setattr__(self, "pins", dict(self.pins))
        object.__setattr__(self, "offload", as_offload(self.offload, searched=True))
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(kind for kind in KINDS if kind in self.kinds))
        if (self.num_stages or 1) > 1 and not self.allows_stages:
            raise InvalidArgument(
                f'num_stages is {self.num_stages}, and kinds {self.kinds} has no "pipeline", without which there is '
                'one stage. Add "pipeline" to kinds, or leave num_stages out.'
            )

    @property
    def allows_stages(self) -> bool:
        """Return whether there may be several stages."""
        return self.kinds is None or "pipeline" in self.kinds

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes; the usual ones if none were given."""
        return axes_or_usual(self.mesh_shape or (1, 1), self.axis_names)


@dataclass(frozen=True, kw_only=True)
class _RestrictedSearch:
    """The fields of a search that tries a part of all shardings only.

    Sharding constraints in the model are obeyed unless `ignore_user_shardings`; one that the method does not allow is
    refused. `reduce_dtype` is that of `DataParallel`.
    """

    divides: ClassVar[tuple[str, ...]] = ()
    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    num_microbatches: int = 1
    memory: float | str = "adaptive"
    ignore_user_shardings: bool = False
    time_limit_s: float = 60.0
    batch_statistics: str = "exact"
    reduce_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a field that cannot be used."""
        _check_fields(self)
        self.search()

    def search(self) -> Auto:
        """Return the search that this method restricts."""
        return Auto(
            num_stages=1,
            num_microbatches=self.num_microbatches,
            mesh_shape=self.mesh_shape,
            axis_names=self.axis_names,
            memory=self.memory,
            ignore_user_shardings=self.ignore_user_shardings,
            time_limit_s=self.time_limit_s,
            batch_statistics=self.batch_statistics,
        )


@dataclass(frozen=True, kw_only=True)
class Zero(_RestrictedSearch):
    """Data parallel with divided state (Rajbhandari et al. 2020).

    The batch is split over all devices, and what is computed of it along the batch only. So is the optimizer's state,
    and with `stage=3` the parameters: each along the dimensions that suit best, over as many devices as divide them.
    Parameters are converted to the type that the model computes in, then gathered, for the forward pass and anew for
    the backward pass. Gradients are reduce-scattered to where the state is at every stage (what ZeRO calls stage 2):
    the same bytes as the all-reduce of stage 1, and less memory.

    Raises `InvalidArgument` for another stage than 1, 2 or 3.
    """

    divides: ClassVar[tuple[str, ...]] = ("batch", "state")
    stage: int = 3


@dataclass(frozen=True, kw_only=True)
class TensorParallel(_RestrictedSearch):
    """Every device sees the whole batch; the work inside of every layer is divided (Shoeybi et al. 2019)."""


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(_RestrictedSearch):
    """The batch is split over all devices, and so are the experts: parameters with a batch dimension in a product.

    All other parameters are on every device (Lepikhin et al. 2020).
    """

    divides: ClassVar[tuple[str, ...]] = ("batch",)


HandMethod = DataParallel | ShardParallel | PipelineParallel
SearchMethod = Auto | Zero | TensorParallel | ExpertParallel
ProgramMethod = SearchMethod | ShardParallel | Megatron
"""The methods that can make a step one program on one mesh, whose layouts are searched."""
Method = HandMethod | Megatron | SearchMethod


def method_words(method: Method) -> str:
    """Return a method as it is written, without what is the default.

    >>> method_words(Megatron(tensor=8))
    'Megatron(tensor=8)'
    """
    return f"{type(method).__name__}({', '.join(given_options(method).values())})"


def given_options(method: Method) -> dict[str, str]:
    """Return the options of a method that are not the default, by name, each as it is written."""
    return {
        each.name: f"{each.name}={getattr(method, each.name)!r}"
        for each in fields(method)
        if getattr(method, each.name) != default_of(each)
    }


def default_of(field: Any) -> Any:
    """Return the default of a field of a method."""
    return field.default_factory() if callable(field.default_factory) else field.default


def _check_fields(method: Method | _RestrictedSearch) -> None:
    """Raise `InvalidArgument` for a field that cannot be used whatever the others are.

    Numbers of NumPy become Python's, lists tuples, and one size or name of an axis, or one kind, a tuple of it.
    """
    for each in fields(method):
        given = getattr(method, each.name)
        value = plain_value(given)
        if each.name == "reduce_dtype":
            value = as_reduce_dtype(value)
        if each.name in ("mesh_shape", "axis_names", "kinds") and isinstance(value, int | str):
            value = (value,)
        if value is not given:
            object.__setattr__(method, each.name, value)
        is_open = value is None and each.default is None
        if each.type == "bool" and not isinstance(value, bool):
            raise InvalidArgument(f"{each.name} is {value!r}. Give True or False.")
        if each.name in FIELD_CHECKS and not is_open:
            FIELD_CHECKS[each.name](each.name, value)


def offloaded(method: PipelineParallel | Megatron | Auto) -> frozenset[str]:
    """Return what a method keeps on the hosts, in the words of `OFFLOADS`; none if that is to be searched."""
    words = {method.offload} if isinstance(method.offload, str) else set(method.offload)
    return frozenset(words - {"off", "auto"} | ({"optimizer"} if "parameters" in words else set()))
