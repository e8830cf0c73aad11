"""The plan: every decision of a parallelization as plain data, printed as a table and kept as JSON.

A plan is made once and obeyed afterwards. It names no live device and holds no array, so it can be made on a
laptop, committed beside the model, and loaded on the cluster:

    layers   0   1   2 | 3   4   5      `cuts` split the forward into layers,
    stages   └── 0 ──┘   └── 1 ──┘      `stages` are runs of layers,
    meshes   devices 0-3  devices 4-7   `meshes` are the devices that a stage lives on.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

from jax.sharding import PartitionSpec
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.checks import (
    BATCH_STATISTICS,
    RANDOM,
    as_reduce_dtype,
    check_choice,
    check_count,
    check_mesh_shape,
    check_spec,
)
from autopar.errors import InvalidArgument, PlanMismatch
from autopar.ir.axis_links import AxisLinks
from autopar.ir.plan_sharding import Certificate, MeshSharding, PlannedCollective, ShardingPlan, collectives_table
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule
from autopar.json_fields import fields_of, json_of
from autopar.plain_text import as_text, microbatches_in_words

PLAN_FORMAT = 5

HOST_VALUES = ("activations", "gradients")
"""Values of a step that can be on the hosts while no task uses them."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Devices of the cluster by ordinal, row-major over the logical `shape`, whose axes have names.

    `sharding` holds the layouts of its stages; a mesh of one device needs none.
    """

    devices: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    sharding: MeshSharding | None = None
    machine: str = ""
    """The machine of its devices, where the cluster has several."""
    links: AxisLinks | None = None
    """The links along its axes, where they are not all equal."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` unless the devices fill the shape and each axis has its own name."""
        check_mesh_shape(self.shape, self.axis_names)
        if len(self.devices) != math.prod(self.shape):
            raise InvalidArgument(
                f"A mesh lists {len(self.devices)} devices, its shape {self.shape} needs "
                f"{math.prod(self.shape)}. List one device for each position, or change the shape."
            )
        repeated = [device for device, count in Counter(self.devices).items() if count > 1]
        if repeated or min(self.devices) < 0:
            raise InvalidArgument(
                f"The devices of a mesh are {self.devices}. They must be distinct ordinals, counted from 0."
            )


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A run of layers `[start, stop)` and the mesh that it lives on.

    Stages with `microbatches` form lanes, pipelines side by side: one begins at each stage that begins at layer 0, has
    all layers, is on meshes of its own, and runs as many microbatches of the step as its stages say, one lane behind
    the other. The first one holds the state and updates it. None: the stage runs all.
    """

    layers: tuple[int, int]
    mesh: int
    recomputed: int = 0  # so many layers, the first, the backward task computes again from what goes into each
    microbatches: int | None = None

    @property
    def num_layers(self) -> int:
        """The number of its layers."""
        return self.layers[1] - self.layers[0]

    def with_layers(self, start: int, stop: int) -> StagePlan:
        """Return the stage with other layers, of which it computes as many again, or all as before."""
        again = stop - start if self.recomputed == self.num_layers else min(self.recomputed, stop - start)
        return dataclasses.replace(self, layers=(start, stop), recomputed=again)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Every decision for one program; an input without a spec is `PartitionSpec()`, replicated.

    `fingerprint` is that of the program it was made for, and `""` fits any program. `cuts[k]` is the index of
    the forward equation at which layer `k + 1` begins. Several stages on one mesh are virtual stages.
    """

    fingerprint: str
    method: str
    meshes: tuple[MeshPlan, ...]
    stages: tuple[StagePlan, ...]
    cuts: tuple[int, ...]
    loop_pieces: int = 1
    num_microbatches: int = 1
    schedule: str = DEFAULT_SCHEDULE
    input_specs: Mapping[str, PartitionSpec]
    batch_statistics: str = "exact"
    random: str = "full_batch"
    sharding: ShardingPlan | None = None
    """The layouts of every value of a step that is one program on several devices; otherwise the meshes have them."""
    certificate: Certificate | None = None
    """The quality of the stages, if a search decided them."""
    host_state: tuple[tuple[str, ...], ...] = ()
    """Inputs that live in pinned memory of the host between steps, in the parts in which an update brings them in."""
    host_values: tuple[str, ...] = ()
    """Values of the step that are there while no task uses them: "activations", "gradients" (their sums)."""
    reduce_dtype: str | None = None
    """The type in which gradients of fewer bits are summed over devices and microbatches; None: their own."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` unless layers, stages, meshes and specs fit together."""
        get_schedule(self.schedule)
        check_choice("batch_statistics", self.batch_statistics, BATCH_STATISTICS)
        check_choice("random", self.random, RANDOM)
        check_count("num_microbatches", self.num_microbatches)
        check_count("loop_pieces", self.loop_pieces)
        as_reduce_dtype(self.reduce_dtype)
        _check_cuts(self.cuts)
        _check_stages(self.stages, self.num_layers, len(self.meshes))
        _check_lanes(self)
        _check_devices_disjoint(self.meshes)
        # A copy, because the caller's dictionary could change later.
        object.__setattr__(self, "input_specs", dict(self.input_specs))
        axes = tuple(mesh.axis_names for mesh in self.meshes)
        for name, spec in self.input_specs.items():
            check_spec(name, spec, axes)
        _check_host_state(self)

    @property
    def num_layers(self) -> int:
        """Number of layers that the cuts make."""
        return len(self.cuts) + 1

    @property
    def num_stages(self) -> int:
        """Number of stages, virtual ones included."""
        return len(self.stages)

    @property
    def is_single_program(self) -> bool:
        """True if one executable on one mesh runs the whole step."""
        plain = self.num_stages == 1 and self.num_microbatches == 1 and self.meshes[0].sharding is None
        return (plain and not self.on_host) or self.sharding is not None

    @property
    def on_host(self) -> tuple[str, ...]:
        """The values in the memory of the hosts: names of inputs, and kinds of what the step makes."""
        return (*(name for part in self.host_state for name in part), *self.host_values)

    @property
    def shares(self) -> tuple[int, ...]:
        """The numbers of microbatches of the lanes, in order; empty for a plan without lanes."""
        return tuple(
            stage.microbatches for stage in self.stages if stage.microbatches is not None and stage.layers[0] == 0
        )

    @property
    def lanes(self) -> tuple[range, ...]:
        """The stages of each lane, in order; all of them for a plan without lanes."""
        return lanes_of([stage.layers for stage in self.stages])

    def stages_on(self, mesh: int) -> tuple[int, ...]:
        """Return the numbers of the stages that live on a mesh."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.mesh == mesh)

    @property
    def num_devices(self) -> int:
        """Number of devices of all meshes together."""
        return sum(len(mesh.devices) for mesh in self.meshes)

    def collectives_by_mesh(self) -> Iterator[tuple[int, PlannedCollective]]:
        """Yield the collectives of one step, each with the number of its mesh."""
        for number, mesh in enumerate(self.meshes):
            sharding = self.sharding or mesh.sharding
            for each in () if sharding is None else sharding.collectives:
                yield number, each

    @property
    def planned_collectives(self) -> tuple[PlannedCollective, ...]:
        """The collectives of one step on every mesh."""
        return tuple(each for _, each in self.collectives_by_mesh())

    def to_json(self) -> str:
        """The plan as JSON with sorted keys; a spec is a list of null, an axis name, or a list of names."""
        fields: dict[str, Any] = dataclasses.asdict(self) | {"format": PLAN_FORMAT}
        for mesh, planned in zip(fields["meshes"], self.meshes, strict=True):
            mesh["links"] = None if planned.links is None else planned.links.to_data()
            if not mesh["machine"]:
                del mesh["machine"]
            if mesh["links"] is None:
                del mesh["links"]
        for name in ("host_state", "host_values", "reduce_dtype"):
            if not fields[name]:
                del fields[name]
        for stage in fields["stages"]:
            if stage["microbatches"] is None:
                del stage["microbatches"]
        fields["input_specs"] = {name: list(spec) for name, spec in self.input_specs.items()}
        fields["sharding"] = None if self.sharding is None else self.sharding.to_data()
        lines = (f" {json.dumps(key)}: {_json_lines(fields[key])}" for key in sorted(fields))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; `PlanMismatch` if it is not JSON, or of another format or keys."""
        raw = json_of("The plan", text, error=PlanMismatch)
        since = {"host_state": [], "host_values": [], "reduce_dtype": None}
        raw = since | cast(dict[str, Any], raw) if isinstance(raw, dict) else raw
        given = cast(dict[str, Any], raw).get("format") if isinstance(raw, dict) else None
        if given != PLAN_FORMAT:
            raise PlanMismatch(
                f"The plan has format {given}, this version of autopar reads format {PLAN_FORMAT}. "
                f"Make the plan again with this version, or install the version that wrote it."
            )
        keys = ("format", *(field.name for field in dataclasses.fields(Plan)))
        fields = fields_of("The plan", raw, keys, error=PlanMismatch)
        words: dict[str, Any] = {
            word: _typed(word, fields[word], str)
            for word in ("fingerprint", "method", "schedule", "batch_statistics", "random")
        }
        return Plan(
            **words,
            num_microbatches=_typed("num_microbatches", fields["num_microbatches"], int),
            loop_pieces=_typed("loop_pieces", fields["loop_pieces"], int),
            meshes=tuple(_mesh_from_json(*item) for item in enumerate(_typed("meshes", fields["meshes"], list[Any]))),
            stages=tuple(_stage_from_json(*item) for item in enumerate(_typed("stages", fields["stages"], list[Any]))),
            cuts=_listed("cuts", fields["cuts"], int),
            input_specs=_specs_from_json(fields["input_specs"]),
            sharding=None if fields["sharding"] is None else ShardingPlan.from_data(fields["sharding"]),
            certificate=None if fields["certificate"] is None else Certificate.from_data(fields["certificate"]),
            host_state=tuple(
                _listed("a part of host_state", part, str)
                for part in _typed("host_state", fields["host_state"], list[Any])
            ),
            host_values=_listed("host_values", fields["host_values"], str),
            reduce_dtype=None
            if fields["reduce_dtype"] is None
            else _typed("reduce_dtype", fields["reduce_dtype"], str),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON to `path`."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read the plan that `save` wrote to `path`; `PlanMismatch` as for `from_json`."""
        return Plan.from_json(Path(path).read_text(encoding="utf-8", errors="replace"))

    def verify(self, step: Any, args: Sequence[Any], *, target: str | None = None) -> Any:
        """Hold the plan against what a compiler makes of it: `Planned.verify` of `step` on `args`."""
        return step.trace(*args).plan(self).verify(*args, target=target)

    def explain(self, question: str, step: Any, args: Sequence[Any]) -> Any:
        """Return what else could have been planned, or what causes a collective: `Planned.explain` of `step`."""
        return step.trace(*args).plan(self).explain(question)

    def simulate(self, step: Any, args: Sequence[Any], *, cluster: Any = None) -> Any:
        """Return the modelled time of a step on a cluster: `Planned.simulate` of `step` on `args`."""
        return step.trace(*args).plan(self).simulate(cluster)

    def collectives(self) -> Table:
        """The planned collectives as a table: where, kind, axes, value, times, megabytes, milliseconds."""
        return collectives_table(self.planned_collectives)

    def remat_policy(self) -> str:
        """Return the layers that the plan computes again in the backward pass, as `jax.checkpoint` would."""
        if self.sharding is None:
            again = self.recomputed_in_words()
            return f"Computed again, layer by layer: {again}." if again else "No stage is computed again."
        return self.sharding.remat_policy()

    def recomputed_in_words(self) -> str:
        """Return which stages are computed again, and how many layers of those that are in part; nothing for none."""
        whole = [str(number) for number, stage in enumerate(self.stages) if stage.recomputed == stage.num_layers]
        parts = [
            f"{stage.recomputed} of {stage.num_layers} layers of stage {number}"
            for number, stage in enumerate(self.stages)
            if 0 < stage.recomputed < stage.num_layers
        ]
        return ", ".join([*([f"stages {', '.join(whole)}"] if whole else []), *parts])

    def stage_rows(self) -> list[tuple[str, ...]]:
        """Return for every stage, as text: number, layers, mesh, devices, mesh shape, whether it is recomputed."""
        rows: list[tuple[str, ...]] = []
        for number, stage in enumerate(self.stages):
            mesh = self.meshes[stage.mesh]
            shape = ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
            layers = f"[{stage.layers[0]}, {stage.layers[1]})"
            remat = "yes" if stage.recomputed == stage.num_layers else f"{stage.recomputed} of {stage.num_layers}"
            remat = remat if stage.recomputed else "no"
            layers += f" of {stage.microbatches} microbatches" * (stage.microbatches is not None)
            devices = _ranges(mesh.devices) + f" {mesh.machine}" * bool(mesh.machine)
            rows.append((str(number), layers, str(stage.mesh), devices, shape, remat))
        return rows

    def __repr__(self) -> str:
        """One line; `print` shows the whole plan."""
        stages = f"{self.stages_in_words()} on {self.num_devices} devices"
        return f"<Plan {self.method}: {stages}, {self._schedule_words()}>"

    def stages_in_words(self) -> str:
        """Return the number of stages, `3 stages`; of lanes, `2 lanes`, or `2 lanes of 2 + 1 stages`."""
        if not self.shares:
            return f"{self.num_stages} stage{'s' * (self.num_stages > 1)}"
        each = " + ".join(str(len(lane)) for lane in self.lanes)
        several = f" of {each} stages" if self.num_stages > len(self.lanes) else ""
        return f"{len(self.lanes)} lane{'s' * (len(self.lanes) > 1)}{several}"

    def choice(self) -> str:
        """Return in a line what a search chose, and why: its simulated time, and that of the next best plan."""
        meshes = ["x".join(map(str, mesh.shape)) for mesh in self.meshes]
        if self.num_stages == 1 and self.meshes[0].sharding is None:
            places = f"one program on {meshes[0]} devices"
        else:
            each = meshes[0] if len(set(meshes)) == 1 else " | ".join(meshes)
            places = f"{self.stages_in_words()} on {each} devices"
        chosen = f"{places}, {self._schedule_words()}"
        if self.certificate is None:
            return chosen
        found = self.certificate
        others = "".join(f"; {words} takes {1e3 * s:.4g} ms" for words, s in found.runners_up[:1])
        least = f"the least that was found{found.of_kinds}"
        return f"{chosen}: {1e3 * found.step_time_s:.4g} ms per step as simulated, {least}{others}"

    def _schedule_words(self) -> str:
        microbatches = microbatches_in_words(self.num_microbatches)
        shares = f" ({' + '.join(map(str, self.shares))})" if self.shares else ""
        return f"{microbatches}{shares}, schedule {self.schedule}"

    def summary(self) -> str:
        """Return the lines above the tables: method, schedule, program, and the quality of what was searched."""
        fits = f"for {self.fingerprint}" if self.fingerprint else "for any program"
        searched = [str(each) for each in (self.certificate, self.sharding) if each is not None]
        summed = [f"gradients of fewer bits are summed in {self.reduce_dtype}"] if self.reduce_dtype else []
        return "\n".join([f"{self.method}: {self._schedule_words()}, {fits}", *summed, *searched])

    def __str__(self) -> str:
        """The plan as a table in plain text, the same on every terminal."""
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the header, one row per stage, and what is sharded."""
        # Text objects, because rich would read the brackets of "params['kernel']" as markup.
        yield Text(self.summary())
        table = Table("stage", "layers", "mesh", "devices", "mesh shape", "remat", box=box.SIMPLE_HEAD)
        for row in self.stage_rows():
            table.add_row(*map(Text, row))
        yield table
        yield from map(Text, _levels_in_words(self.meshes))
        sharded = {name: spec for name, spec in self.input_specs.items() if any(spec)}
        yield Text(f"inputs: {len(sharded)} sharded, " + ("all others replicated" if sharded else "all replicated"))
        if sharded:
            yield _spec_table(sharded)
        if self.host_state:
            named = [name for part in self.host_state for name in part]
            parts = f"{len(self.host_state)} parts" if len(self.host_state) > 1 else "one part"
            yield Text(f"in pinned memory of the host between steps: {len(named)} inputs, brought in {parts}")
            yield _host_table(self.host_state)
        if self.host_values:
            what = " and ".join({"gradients": "sums of gradients"}.get(kind, kind) for kind in self.host_values)
            yield Text(f"in pinned memory of the host while no task uses them: {what}")


def _levels_in_words(meshes: Sequence[MeshPlan]) -> Iterator[str]:
    """Yield for every mesh a line on the all-reduces that it makes in levels; meshes that are alike share one."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, mesh in enumerate(meshes):
        alike.setdefault((mesh.links, mesh.shape, mesh.axis_names), []).append(number)
    for (links, shape, names), numbers in alike.items():
        if links is None:
            continue
        for ring in (ring for ring in links.rings if ring.levels):
            inside = math.prod(links.inside[axis] for axis in ring.axes)
            across = math.prod(shape[axis] for axis in ring.axes) // inside
            yield (
                f"all-reduces over {'*'.join(names[axis] for axis in ring.axes)} of mesh {_ranges(numbers)}: "
                f"hierarchical, {inside} devices in each of {across} hosts"
            )


def lanes_of(layers: Sequence[tuple[int, int]]) -> tuple[range, ...]:
    """Return the stages of each lane, of stages with these layers: a lane begins at each that begins at layer 0."""
    starts = [number for number, (start, _) in enumerate(layers) if start == 0]
    return tuple(itertools.starmap(range, itertools.pairwise([*starts, len(layers)])))


def _check_cuts(cuts: tuple[int, ...]) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *cuts))):
        raise InvalidArgument(
            f"The cuts are {cuts}. They must increase strictly from 1 on: each layer needs an equation."
        )


def _check_host_state(plan: Plan) -> None:
    named = Counter(plan.on_host)
    repeated = [name for name, count in named.items() if count > 1]
    if repeated or not all(plan.host_state):
        raise InvalidArgument(
            f"The parts of host_state have {repeated or 'an empty one'}. Each has inputs, and each input is in one "
            "part."
        )
    for kind in plan.host_values:
        check_choice("a kind of host_values", kind, HOST_VALUES)
    if named and plan.sharding is not None:
        raise InvalidArgument(
            f"The plan keeps {next(iter(named))} on the host, and its step is one program, which brings nothing in. "
            "Give the layouts by mesh, as a plan made with offload has them."
        )


def _check_stages(stages: tuple[StagePlan, ...], num_layers: int, num_meshes: int) -> None:
    if not stages:
        raise InvalidArgument("The plan has no stage. Give at least one stage, with the layers [0, num_layers).")
    next_layer = 0
    for number, stage in enumerate(stages):
        start, stop = stage.layers
        if next_layer == num_layers and stage.microbatches is not None:
            next_layer = 0  # of another lane
        if start != next_layer or stop <= start:
            raise InvalidArgument(
                f"Stage {number} has the layers [{start}, {stop}), it must begin at layer {next_layer} and "
                f"have at least one layer. Make the stages follow each other without a gap."
            )
        next_layer = stop
        if not 0 <= stage.mesh < num_meshes:
            raise InvalidArgument(
                f"Stage {number} lives on mesh {stage.mesh}, the plan has {num_meshes} meshes. "
                f"Choose a mesh from 0 to {num_meshes - 1}, or add one."
            )
    if next_layer != num_layers:
        raise InvalidArgument(
            f"The stages have {next_layer} layers together, the cuts make {num_layers}. Give every layer to a stage."
        )


def _check_lanes(plan: Plan) -> None:
    stages, num_microbatches = plan.stages, plan.num_microbatches
    shares = [stage.microbatches for stage in stages]
    if all(share is None for share in shares):
        return
    lanes = [[stages[number] for number in lane] for lane in plan.lanes]
    if None in shares or any(len({stage.microbatches for stage in lane}) > 1 for lane in lanes):
        raise InvalidArgument(
            f"The stages run {shares} microbatches of their own, as lanes do, and a lane begins with each that begins "
            "at layer 0. Give all stages of a lane the same number of microbatches, or give no stage any."
        )
    if sum(plan.shares) != num_microbatches or min(plan.shares) < 1:
        raise InvalidArgument(
            f"The lanes run {list(plan.shares)} microbatches, and the step has {num_microbatches}. Give each lane one "
            "or more, so that they are all."
        )
    used = [mesh for lane in lanes for mesh in {stage.mesh for stage in lane}]
    if sorted(used) != [*range(len(plan.meshes))]:
        raise InvalidArgument(
            f"The lanes live on the meshes {used}, of {len(plan.meshes)}. Give each lane meshes of its own, and each "
            "mesh a lane."
        )
    if plan.on_host:
        raise InvalidArgument(
            "What is on the host has one lane only. Leave host_state and host_values empty, or give no stage "
            "microbatches of its own."
        )


def _check_devices_disjoint(meshes: tuple[MeshPlan, ...]) -> None:
    owner: dict[int, int] = {}
    for number, mesh in enumerate(meshes):
        for device in mesh.devices:
            if device in owner:
                raise InvalidArgument(
                    f"Device {device} is in mesh {owner[device]} and in mesh {number}, it can be in one. "
                    f"Put both stages on the same mesh, or give each mesh devices of its own."
                )
            owner[device] = number


def _json_lines(value: Any) -> str:
    """JSON with a line for each spec, mesh and stage, so that the difference of two plans can be read."""
    if isinstance(value, Mapping):
        specs = cast(Mapping[str, Any], value)
        entries = [f"  {json.dumps(key)}: {json.dumps(specs[key])}" for key in sorted(specs)]
        return "{\n" + ",\n".join(entries) + "\n }" if entries else "{}"
    if isinstance(value, tuple) and value and isinstance(value[0], Mapping):
        entries = [f"  {json.dumps(entry, sort_keys=True)}" for entry in cast(tuple[Any, ...], value)]
        return "[\n" + ",\n".join(entries) + "\n ]"
    return json.dumps(value)


def _typed(what: str, raw: Any, kind: type[T]) -> T:
    """A JSON value, if it is of the Python type `kind`."""
    if type(raw) is not (get_origin(kind) or kind):  # `type`, because True is an int to isinstance
        raise PlanMismatch(
            f"In the plan, {what} is {raw!r} of type {type(raw).__name__}. "
            f"It must be of type {(get_origin(kind) or kind).__name__}: correct the file."
        )
    return raw


def _listed(what: str, raw: Any, kind: type[T]) -> tuple[T, ...]:
    """A JSON list of values of one type."""
    return tuple(_typed(f"an entry of {what}", entry, kind) for entry in _typed(what, raw, list[Any]))


def _mesh_from_json(number: int, raw: Any) -> MeshPlan:
    keys = ("devices", "shape", "axis_names", "sharding", "machine", "links")
    given = {"machine": "", "links": None} | raw if isinstance(raw, dict) else raw
    fields = fields_of(f"Mesh {number}", given, keys, error=PlanMismatch)
    links, num_axes = fields["links"], len(_listed(f"shape of mesh {number}", fields["shape"], int))
    return MeshPlan(
        devices=_listed(f"devices of mesh {number}", fields["devices"], int),
        shape=_listed(f"shape of mesh {number}", fields["shape"], int),
        axis_names=_listed(f"axis_names of mesh {number}", fields["axis_names"], str),
        sharding=None if fields["sharding"] is None else MeshSharding.from_data(fields["sharding"]),
        machine=_typed(f"machine of mesh {number}", fields["machine"], str),
        links=None if links is None else AxisLinks.from_data(f"mesh {number}", links, num_axes),
    )


def _stage_from_json(number: int, raw: Any) -> StagePlan:
    fields = fields_of(
        f"Stage {number}",
        {"microbatches": None} | raw if isinstance(raw, dict) else raw,
        ("layers", "mesh", "recomputed", "microbatches"),
        error=PlanMismatch,
    )
    share = fields["microbatches"]
    layers = _listed(f"layers of stage {number}", fields["layers"], int)
    if len(layers) != 2:
        raise PlanMismatch(f"Stage {number} has the layers {list(layers)}. Write them as [start, stop].")
    recomputed = _typed(f"recomputed layers of stage {number}", fields["recomputed"], int)
    if not 0 <= recomputed <= layers[1] - layers[0]:
        raise PlanMismatch(
            f"Stage {number} has {layers[1] - layers[0]} layers, and computes {recomputed} of them again. Write a "
            f"number from 0 to {layers[1] - layers[0]}."
        )
    return StagePlan(
        layers=(layers[0], layers[1]),
        mesh=_typed(f"mesh of stage {number}", fields["mesh"], int),
        recomputed=recomputed,
        microbatches=None if share is None else _typed(f"microbatches of stage {number}", share, int),
    )


def _specs_from_json(raw: Any) -> dict[str, PartitionSpec]:
    specs: dict[str, PartitionSpec] = {}
    for name, entries in _typed("input_specs", raw, dict[str, Any]).items():
        spec = f"the spec of {name}"
        parts = (
            part if part is None or isinstance(part, str) else _listed(spec, part, str)
            for part in _typed(spec, entries, list[Any])
        )
        specs[name] = PartitionSpec(*parts)
    return specs


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6, in the order given."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _host_table(parts: Sequence[Sequence[str]]) -> Table:
    """Return a table with one row per name on the host; names that differ in their numbers only share a row."""
    table = Table("name", "on the host", box=None, padding=(0, 2))
    for pattern, count in Counter(re.sub(r"\d+", "*", name) for part in parts for name in part).items():
        table.add_row(Text(pattern), Text(str(count)))
    return table


def _spec_table(specs: Mapping[str, PartitionSpec]) -> Table:
    """Return a table with one row per spec and name; names that differ in their numbers only share a row."""
    table = Table("name", "spec", "count", box=None, padding=(0, 2))
    rows: dict[tuple[str, PartitionSpec], list[str]] = {}
    for name, spec in specs.items():
        rows.setdefault((re.sub(r"\d+", "*", name), spec), []).append(name)
    for (pattern, spec), names in rows.items():
        table.add_row(Text(pattern if len(names) > 1 else names[0]), Text(str(spec)), Text(str(len(names))))
    return table
