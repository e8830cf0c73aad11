"""Write measured rows of JAX programs as what the compiler is given: a train step, a method, a cluster.

    Row  ->  StepCase  ->  Entry            parallelize(step, cluster=...).trace(...).plan(method).simulate()

A row with one kind of replicas, perhaps tensor parallelism and stages, is planned by its degrees (`Megatron`). Where
the state is divided over one of several mesh axes, every parameter is pinned to where the row has it, and `Auto` finds
the rest within the memory of the devices, for gathered parameters and whole activations are not kept then. Where the
row leaves the layouts to a search, `Auto` has the row's mesh, stages and microbatches, if the mesh has one axis; of
several stages within the memory, as the search of such rows takes none that does not fit (alpa-projects/alpa,
alpa/pipeline_parallel/stage_profiling.py, `max_n_succ_stages`). On two axes, that search has the examples along the
first always (alpa/shard_parallel/auto_sharding.py, `force_batch_dim_to_mesh_dim`), which are degrees: replicas, weights
divided along the second axis, and the state along the first, as all of them prefer (benchmark/alpa/exp_intra_only.py).
Unequal stages, as a row's notes list them, have their layers and devices of it, and layouts that are searched
(`PipelineParallel`). What cannot be written so is `Unusable`, with the reason.

ZeRO 2 over microbatches adds up whole gradients. Where the update is a program of its own, as in these rows, no
compiler joins their sum with the division behind it: it is an all-reduce, and the parameters are gathered beside it
(alpa-projects/tensorflow-alpa, auto_sharding.cc, `use_all_reduce_for_grad_acc`: "50% communication overhead").

ZeRO 3 gathers parameters for the forward pass and for the backward pass, where compilers share them with what is
computed again. Those of 2021 did not, as read off GPTs on 2 and 4 V100s: with ZeRO 3 they took 99 and 64 ms longer than
with ZeRO 2, which gathers once, and these are 2.1 and 2.0 times what one gather takes.

XLA's GPU compiler ends sums of gradients late, and programs of ours have what is computed again wait for them. Those of
these rows did not: with it the peak of the GPT on 4 V100s with ZeRO 2 would be 9.6 GiB, without it 12.4, which it was.
Nor did products of 2022 write their sum with an array that others read, but over one that no other does
(tensorflow/tensorflow, tensorflow/compiler/xla/service/gpu/gemm_rewriter.cc: "BLAS GeMM overwrites bias matrix").

Executors of these rows hand the memory of what an update replaces to it, which a program of ours takes over only if the
update reads it: predicted steps do (`Workload.updates_in_place`), which costs the update one more read.

Rows whose parameters are "cast in the step" have them in 32 bits, with no copy in 16. Under ZeRO 2 these are divided
and gathered once they are rounded: as many bytes are kept and sent as with a divided master copy beside a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import autopar
from autopar import Auto, Cluster, Megatron, PipelineParallel
from autopar.aot import Traced
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.errors import AutoparError
from autopar.hardware.machine import Machine, machines
from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import PlannedCollective
from benchmarks.accuracy_cases import Unusable
from benchmarks.accuracy_frameworks import compiler_settings_of
from benchmarks.accuracy_journal import Entry
from benchmarks.accuracy_rows import Row
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.models.alpa_moe import MoESize, alpa_moe
from benchmarks.models.model import Array
from benchmarks.models.wide_resnet import ResNetSize, wide_resnet
from benchmarks.models.workload import Workload, rounded_in_step

_TIME_LIMIT_S = 20.0
_DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}
_INCOMPLETE = {
    "remat": "names the values that are kept or offloaded, which no method does",
    "no": "does not say all of its sizes, its batch, its plan or its machine",
}
_WIDENINGS = range(1, 65)
_GATHERS_ARE_SHARED = 2022
"""Since then compilers share what is gathered to compute a layer again with its backward pass."""
_PRODUCTS_WRITE_SUMS = 2023
"""Since then, as far as is known, products write their sums with arrays that others read, by cuBLASLt."""
_PRESENT = 9999
_SAME_SIZE = 0.05


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model that a row trains: sizes of one family, in one type."""

    size: GPTSize | MoESize | ResNetSize
    dtype: str
    rounded_in_step: bool
    """Parameters have 32 bits and no copy in 16: the step begins by rounding them."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers [start, stop) of a model on a submesh of so many devices."""

    start: int
    stop: int
    devices: int


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Plan of a row, as far as the row gives it; `mesh` is given where layouts are searched or pinned."""

    data: int
    fsdp: int
    tensor: int
    pipeline: int
    num_microbatches: int
    schedule: str
    zero: int
    mesh: tuple[int, ...] | None
    searched: bool
    gathers_apart: bool
    """Parameters are gathered for the backward pass although they were for what is computed again."""
    stages: tuple[Stage, ...] = ()
    """Each of unequal stages; empty for equal ones."""

    @property
    def devices(self) -> int:
        if self.stages:
            return sum(stage.devices for stage in self.stages)
        return self.data * self.fsdp * self.tensor * self.pipeline

    @property
    def sums_whole_gradients(self) -> bool:
        """True if the sum of the gradients is an all-reduce although the state is divided."""
        return self.zero == 2 and self.num_microbatches > 1


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A row as the compiler takes it, and what was measured."""

    row: Row
    model: Model
    layout: Degrees
    machine: Machine
    """The machine of the row, by the rules of the compiler that was measured."""
    devices: int

    @property
    def cell(self) -> tuple[object, ...]:
        """Rows of one group are choices for one task; a row without a group stands alone."""
        return (self.row["group"],) if self.row["group"] else (self.row.line,)

    @property
    def measured_s(self) -> float | None:
        """Seconds of a step; None if it ran out of memory."""
        return None if self.out_of_memory else self.row.number("step_s")

    @property
    def measured_gib(self) -> float | None:
        """The most that one device held."""
        return self.row.number("peak_gib")

    @property
    def out_of_memory(self) -> bool | None:
        return self.row.number("oom") == 1 if self.row["oom"] else None

    @property
    def counts_tensors(self) -> bool:
        """XLA allocates all that an executable needs."""
        return False


def step_case_of(row: Row) -> StepCase:
    """Return the row as a case; raise `Unusable`, which says why, if it is none."""
    if row["complete"] not in ("yes", "search"):
        raise Unusable(_INCOMPLETE.get(row["complete"], "does not say whether it is complete"))
    if row["machine"] not in machines():
        raise Unusable(f"no machine file for {row['machine']!r}")
    if row.number("oom") != 1 and not row.number("step_s"):
        raise Unusable("has no measured time")
    devices = _whole(row, "devices")
    return StepCase(
        row=row,
        model=_model(row),
        layout=_degrees(row, devices),
        machine=_machine(row),
        devices=devices,
    )


def _machine(row: Row) -> Machine:
    """Return the machine of a row, whose compiler is that of the row's software."""
    machine, year = Machine.named(row["machine"]), _year(row["stack"])
    settings = compiler_settings_of(row["stack"], row["notes"])
    combined_bytes = machine.combined_bytes if settings.combined_bytes is None else settings.combined_bytes
    return replace(
        _Unwaiting(**{each.name: getattr(machine, each.name) for each in fields(machine)}),
        combined_bytes=combined_bytes,
        memory_bytes=settings.memory_share * machine.memory_bytes,
        product_sums=machine.product_sums and year >= _PRODUCTS_WRITE_SUMS,
    )


class _Unwaiting(Machine):
    """A machine for whose programs nothing waits for sums, as nothing does in those of these rows."""

    @property
    def ends_sums_late(self) -> bool:
        """False, however late its compiler ends them."""
        return False


def priced(case: StepCase) -> Entry:
    """Return the step as the compiler plans and simulates it; raise `Unusable` for what it refuses."""
    return _priced(case.model, case.layout, case.machine, case.devices)


@cache
def _priced(model: Model, degrees: Degrees, machine: Machine, devices: int) -> Entry:
    """Seconds and peak bytes, found once for equal rows."""
    cluster = Cluster(num_devices=devices, machine=machine)
    try:
        workload, traced = _traced(model)
        planned = traced.on_cluster(cluster).plan(method_of(workload, degrees))
        report = planned.simulate(cluster)
    except AutoparError as error:
        raise Unusable(f"{type(error).__name__}: {str(error).split('. ')[0]}") from error
    more_s = 0.0
    if degrees.sums_whole_gradients:  # an all-reduce takes as long as two reduce-scatters
        more_s = _seconds(planned.plan, lambda each: each.kind == "reduce-scatter" and each.reach == "all")
    elif degrees.gathers_apart:
        more_s = _seconds(planned.plan, lambda each: each.kind == "all-gather" and each.repeated)
    return Entry(step_s=report.step_time_s + more_s, peak_bytes=report.peak_bytes)


def _seconds(plan: Plan, counts: Callable[[PlannedCollective], bool]) -> float:
    """Seconds of collectives between the replicas of a plan, on the mesh where they take longest: all run at once."""
    seconds = [0.0] * len(plan.meshes)
    for mesh, each in plan.collectives_by_mesh():
        if "data" in each.axes and counts(each):
            seconds[mesh] += each.seconds
    return max(seconds)


@lru_cache(maxsize=1)
def _traced(model: Model) -> tuple[Workload, Traced]:
    """Trace a model once for rows that come one after the other: it is the same on all machines."""
    workload = replace(workload_of(model), updates_in_place=True)
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=Cluster.parse("1x cpu"))
    return workload, step.trace(workload.abstract_state, workload.abstract_batch)


# --- models -------------------------------------------------------------------------------------------------------


def workload_of(model: Model) -> Workload:
    """Return the train step of a model."""
    dtype = _DTYPES[model.dtype]
    match model.size:
        case GPTSize():
            workload = alpa_gpt("gpt", model.size, dtype)
        case MoESize():
            workload = alpa_moe("moe", model.size, dtype)
        case ResNetSize():
            workload = wide_resnet("wresnet", model.size, dtype)
    return rounded_in_step(workload) if model.rounded_in_step else workload


def _model(row: Row) -> Model:
    make = _SIZES.get(row["family"])
    if make is None:
        raise Unusable(f"is of the family {row['family']!r}; there are {', '.join(_SIZES)}")
    found = re.search(r"compute (\w+)", row["dtype"])
    if found is None or found[1] not in _DTYPES:
        raise Unusable(f"computes in {row['dtype']!r}; there are {', '.join(_DTYPES)}")
    return Model(
        size=make(row, _recomputed(row)),
        dtype=found[1],
        rounded_in_step="in the step" in row["dtype"] and row["zero"] != "2",
    )


def _recomputed(row: Row) -> bool:
    if row["remat"] not in ("none", "full"):
        raise Unusable(f"recomputes {row['remat']!r}; there are 'none' and 'full'")
    return row["remat"] == "full"


def _gpt(row: Row, recomputed: bool) -> GPTSize:
    return GPTSize(
        width=_whole(row, "hidden"),
        layers=_whole(row, "layers"),
        heads=_whole(row, "heads"),
        length=_whole(row, "seq"),
        vocabulary=_whole(row, "vocab"),
        batch=_whole(row, "global_batch"),
        hidden=row.whole("ffn"),
        head=_head(row),
        recomputed=recomputed,
        kernel=_in_a_kernel(row),
    )


def _head(row: Row) -> int | None:
    """The width of a head where all heads together are not as wide as the model."""
    head = row.whole("head_dim")
    if not head or head * _whole(row, "heads") == _whole(row, "hidden"):
        return None
    if not _in_a_kernel(row):
        raise Unusable("has heads that are not as wide as the model together, with attention in no kernel")
    return head


def _in_a_kernel(row: Row) -> bool:
    if row["attention"] not in ("dot", "flash", ""):
        raise Unusable(f"has the attention {row['attention']!r}; there are 'dot' and 'flash'")
    return row["attention"] == "flash"


def _moe(row: Row, recomputed: bool) -> MoESize:
    width, hidden = _whole(row, "hidden"), _whole(row, "ffn")
    if _in_a_kernel(row):
        raise Unusable("is a mixture of experts with attention in a kernel")
    group = re.search(r"group (\d+)", row["notes"])
    if hidden != 8 * width or row.number("top_k") != 2 or group is None:
        raise Unusable("is no mixture of experts eight times as wide as the model, two per token, in groups")
    return MoESize(
        width=width,
        layers=_whole(row, "layers"),
        experts=_whole(row, "experts"),
        heads=_whole(row, "heads"),
        length=_whole(row, "seq"),
        vocabulary=_whole(row, "vocab"),
        batch=_whole(row, "global_batch"),
        group=int(group[1]),
        recomputed=recomputed,
    )


def _resnet(row: Row, recomputed: bool) -> ResNetSize:
    """The widening is what the notes say, or what makes as many parameters as the model's name says."""
    fields = {"channels": _whole(row, "hidden"), "depth": _whole(row, "layers"), "batch": _whole(row, "global_batch")}
    if fields["depth"] not in (26, 50, 101):
        raise Unusable(f"has the depth {fields['depth']}; there are 26, 50 and 101")
    said = re.search(r"width factor (\d+)", row["notes"])
    if said:
        return ResNetSize(**fields, widening=int(said[1]), recomputed=recomputed)
    name = re.search(r"([\d.]+)B$", row["model"])
    if name is None:
        raise Unusable("says neither its width factor nor how many parameters it has")
    sizes = [ResNetSize(**fields, widening=widening, recomputed=recomputed) for widening in _WIDENINGS]
    wanted = 1e9 * float(name[1])
    best = min(sizes, key=lambda size: abs(_parameters(size) - wanted))
    if abs(_parameters(best) / wanted - 1) > _SAME_SIZE:
        raise Unusable(f"has no width factor for which a network of its depth has {name[1]}B parameters")
    return best


def _parameters(size: ResNetSize) -> float:
    return sum(k * k * i * o for block in size.blocks for k, i, o in block.kernels.values())


_SIZES: Mapping[str, Callable[[Row, bool], Any]] = {"gpt": _gpt, "moe": _moe, "wresnet": _resnet}


# --- plans --------------------------------------------------------------------------------------------------------


def method_of(workload: Workload, degrees: Degrees) -> Megatron | Auto | PipelineParallel:
    """Return the method that plans a workload as a row says."""
    common: dict[str, Any] = {
        "num_microbatches": degrees.num_microbatches,
        "schedule": degrees.schedule,
        "batch_statistics": workload.batch_statistics,
    }
    if degrees.stages:
        return PipelineParallel(
            layers=[[stage.start, stage.stop] for stage in degrees.stages],
            submeshes=[(1, stage.devices) for stage in degrees.stages],
            layouts="search",
            **common,
        )
    common |= {"time_limit_s": _TIME_LIMIT_S}
    if degrees.mesh is None:
        return Megatron(
            data=degrees.data * degrees.fsdp,
            tensor=degrees.tensor,
            pipeline=degrees.pipeline,
            zero=_zero(degrees),
            **common,
        )
    # As MaxText's rules have it: "embed" over fsdp, what is inside of a layer over tensor.
    pins = {} if degrees.searched else specs_of(workload, {"embed": "fsdp", **DIVIDED_BY_TENSOR})
    names = ("data", "fsdp", "tensor") if not degrees.searched else None
    limited = not degrees.searched or degrees.pipeline > 1
    return Auto(
        num_stages=degrees.pipeline,
        mesh_shape=degrees.mesh,
        axis_names=names,
        pins=pins,
        memory="adaptive" if limited else "off",
        remat=False,
        **common,
    )


def _zero(degrees: Degrees) -> int:
    """Return the ZeRO stage of a row: over microbatches whole gradients are added up, and their sum is divided once.

    That is what programs of JAX do, whatever divides the state: the collective stands behind the loop.
    """
    if degrees.data * degrees.fsdp == 1:
        return 0
    return min(degrees.zero, 1) if degrees.num_microbatches > 1 and degrees.zero == 2 else degrees.zero


DIVIDED_BY_TENSOR = dict.fromkeys(("heads", "mlp", "vocabulary"), "tensor")
"""Dimensions of weights that tensor parallelism divides."""


def specs_of(
    workload: Workload, axes: Mapping[str, str], sizes: Mapping[str, int] | None = None, inside: str = ""
) -> dict[str, PartitionSpec]:
    """Return specs of the state's weights, each of whose dimensions lies along the axis of its name, if it has one.

    Where `sizes` of axes are given, one that does not divide a dimension leaves it whole. The specs hold for all inputs
    called as a weight, or for those that have `inside`, a pattern, before that name.
    """

    def axis(name: str, size: int) -> str | None:
        along = axes.get(name)
        return None if along is None or size % (sizes or {}).get(along, 1) else along

    leaves = jax.tree_util.tree_leaves_with_path(workload.params, is_leaf=lambda leaf: isinstance(leaf, Array))
    return {
        rf"{inside}(^|\.){re.escape(leaf_name('', path))}$": PartitionSpec(*map(axis, array.names, array.shape))
        for path, array in leaves
        if len(array.shape) > 1
    }


def _degrees(row: Row, devices: int) -> Degrees:
    for column in ("sequence", "expert"):
        if (row.number(column) or 1) > 1:
            raise Unusable(f"divides the {column} among devices, which no method does by degrees")
    searched = row["complete"] == "search"
    stages = _stages(row)
    degree = {name: row.whole(name) for name in ("data", "fsdp", "tensor", "pipeline")}
    pipeline = degree["pipeline"] or 1
    mesh = _mesh(row, devices // pipeline, degree) if searched else _pinned_mesh(degree)
    zero = row.whole("zero") or 0
    if searched and mesh is not None and min(mesh) > 1:
        degree |= {"data": mesh[0], "fsdp": 1, "tensor": mesh[1]}
        searched, mesh, zero = False, None, 2
    found = Degrees(
        data=degree["data"] or 1,
        fsdp=degree["fsdp"] or 1,
        tensor=degree["tensor"] or 1,
        pipeline=pipeline,
        num_microbatches=row.whole("microbatches") or 1,
        schedule=row["schedule"] or "1f1b",
        zero=zero,
        mesh=mesh,
        searched=searched,
        stages=stages,
        gathers_apart=zero == 3 and _recomputed(row) and _year(row["stack"]) < _GATHERS_ARE_SHARED,
    )
    if not searched and found.devices != devices:
        raise Unusable("says degrees whose product is not its number of devices")
    return found


def _mesh(row: Row, devices: int, degree: Mapping[str, int | None]) -> tuple[int, ...]:
    """The mesh of a stage whose layouts were searched: what the row names, or one axis."""
    named = re.search(r"mesh (\d+)x(\d+)|on (\d+)x(\d+)", row["notes"])
    if named is not None:
        shape = tuple(int(size) for size in named.groups() if size)
        if shape[0] * shape[1] == devices:
            return shape
    if degree["data"] and degree["tensor"] and degree["data"] * degree["tensor"] == devices:
        return degree["data"], degree["tensor"]
    return (devices, 1)


def _pinned_mesh(degree: Mapping[str, int | None]) -> tuple[int, ...] | None:
    """The mesh of replicas of two kinds, or of a divided state beside tensor parallelism; None for another."""
    data, fsdp, tensor = (degree[name] or 1 for name in ("data", "fsdp", "tensor"))
    return (data, fsdp, tensor) if fsdp > 1 and data * tensor > 1 else None


def _year(stack: str) -> int:
    """The year of the software, by the first date that its name has; the present, later than all, for none."""
    found = re.search(r"\b(20\d\d)-\d\d", stack)
    return int(found[1]) if found else _PRESENT


def _stages(row: Row) -> tuple[Stage, ...]:
    """The stages that the notes list, where they differ in devices or in layers; none where they are equal."""
    noted = re.findall(r"(\d+)-(\d+) on (\d+)x(\d+)", row["notes"])
    pieces = [(int(first), int(last) + 1, int(rows) * int(columns)) for first, last, rows, columns in noted]
    if len({(stop - start, devices) for start, stop, devices in pieces}) <= 1:
        return ()
    piece = re.search(r"pieces of (\d+) layers", row["notes"])
    if piece is None or max(devices for _, _, devices in pieces) > Machine.named(row["machine"]).devices_per_host:
        raise Unusable("has unequal stages of parts that it does not size, or of several hosts")
    size = int(piece[1])
    return tuple(Stage(start=size * start, stop=size * stop, devices=devices) for start, stop, devices in pieces)


def _whole(row: Row, column: str) -> int:
    number = row.whole(column)
    if not number:
        raise Unusable(f"does not say {column}")
    return number
