"""Simulate a plan on a cluster before it runs there.

    Program, Plan, Cluster  ->  SimulationReport

Every executable takes its modelled time, its compute and then its collectives; values between meshes take
`Cluster.joining_link`, within a fast domain if both meshes lie in the same one; sends go on behind compute, receives
wait. A host takes `Machine.dispatch_s` to start each of them, one after the other, ahead of its devices. Over
all devices on average,

    step_time_s  =  compute_s  +  collective_s  +  exposed_transfer_s  +  idle_s            bubble = the last two

with exposed transfers the wait for what is made already, and idle the wait for what is not, or for nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.errors import MemoryTooSmall, PlanMismatch
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Link, Machine
from autopar.ir.clocks import Hosts
from autopar.ir.memory_part import Category, MemoryPart, joined_parts
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.plan_sharding import TaskTimes
from autopar.ir.program import Copy, Executable, Program, Run, Task
from autopar.plain_text import WIDTH, as_text, microbatches_in_words
from autopar.runtime.simulator import simulate
from autopar.runtime.timeline import PeakMoment, Timeline

_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class MeshReport:
    """One mesh in one step: seconds of each of its devices, and the most that one of them holds."""

    devices: tuple[int, ...]
    compute_s: float
    collective_s: float
    exposed_transfer_s: float
    idle_s: float
    peak_bytes: int
    memory: tuple[MemoryPart, ...]
    """The parts of its memory at its fullest moment, the largest first."""
    machine: str
    memory_limit_bytes: float
    """The memory of one of its devices."""
    host_bytes: int = 0
    """The most that values take in pinned memory of the host, for each of its devices."""
    computed_again_bytes: float = 0.0
    """The most that one executable needs above what XLA lets it: XLA computes about so much of it again."""


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """One step of a plan on a cluster, as modelled. `timeline.write("trace.json")` is for Perfetto."""

    plan: str
    cluster: str
    step_time_s: float
    meshes: tuple[MeshReport, ...]
    memory_limit_bytes: float
    """The memory of one device of the mesh that has the least left."""
    counts_temporaries: bool
    """True if the peaks include what executables need while they run, and not only the values between them."""
    model_flops: float
    """FLOPs of the whole step as it was written: nothing that is computed again counts twice."""
    dtype: str
    """The type in which most of its products are computed."""
    peak_flops: float
    """FLOP/s of one device in that type, on paper; the average where the plan uses devices of several machines."""
    examples: int | None
    tokens: int | None
    timeline: Timeline = field(repr=False)
    all_on_host_bytes: int = 0
    """The most that values take in the memory of one host, for all of its devices."""
    host_memory_bytes: float = 0.0
    """The memory of that host; 0 where its machine does not say."""
    computed_again_s: float = 0.0
    """Seconds of its step in which the device that does most of that computes again what XLA does not keep."""

    @property
    def num_devices(self) -> int:
        """The devices that the plan uses."""
        return sum(len(mesh.devices) for mesh in self.meshes)

    @property
    def compute_s(self) -> float:
        """Seconds of its step in which a device computes, on average over the devices."""
        return self._average(lambda mesh: mesh.compute_s)

    @property
    def collective_s(self) -> float:
        """Seconds of its step that a device spends in collectives, on average."""
        return self._average(lambda mesh: mesh.collective_s)

    @property
    def exposed_transfer_s(self) -> float:
        """Seconds of its step in which a device waits for values on their way from another mesh, on average."""
        return self._average(lambda mesh: mesh.exposed_transfer_s)

    @property
    def bubble_fraction(self) -> float:
        """The share of all devices' time in which they run nothing."""
        return max(1 - (self.compute_s + self.collective_s) / self.step_time_s, 0.0) if self.step_time_s else 0.0

    @property
    def peak_bytes(self) -> int:
        """The most that any device holds; where their memory differs, one of those that have the least left."""
        return _fullest(self.meshes).peak_bytes

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        """The parts of the memory of the device that holds the most, the largest first."""
        return _fullest(self.meshes).memory

    @property
    def host_bytes(self) -> int:
        """The most that values take in pinned memory of the host, for one device."""
        return max(mesh.host_bytes for mesh in self.meshes)

    @property
    def computed_again_bytes(self) -> float:
        """The most that an executable needs above what XLA lets it, which XLA computes again, as far as it can."""
        return max(mesh.computed_again_bytes for mesh in self.meshes)

    @property
    def fits(self) -> bool:
        """True if every device has that much memory, and every host of which it is known."""
        return self.fits_on_hosts and all(mesh.peak_bytes <= mesh.memory_limit_bytes for mesh in self.meshes)

    @property
    def fits_on_hosts(self) -> bool:
        """True unless a host is known to have less memory than values take there."""
        return not 0 < self.host_memory_bytes < self.all_on_host_bytes

    @property
    def examples_per_s(self) -> float | None:
        """Examples of the batch per second; None for a step without a batch."""
        return self._rate(self.examples)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; None for a batch without an integer array of several axes."""
        return self._rate(self.tokens)

    @property
    def tflops_per_device(self) -> float:
        """Teraflops per second and device that go into the model."""
        return (self._rate(self.model_flops) or 0.0) / self.num_devices / 1e12

    @property
    def mfu(self) -> float:
        """The share of the device's peak that the model's FLOPs reach: model FLOPs utilization."""
        return self.tflops_per_device * 1e12 / self.peak_flops

    def _average(self, seconds: Callable[[MeshReport], float]) -> float:
        return sum(len(mesh.devices) * seconds(mesh) for mesh in self.meshes) / self.num_devices

    def _rate(self, amount: float | None) -> float | None:
        return None if amount is None or not self.step_time_s else amount / self.step_time_s

    def gantt(self, width: int = WIDTH) -> str:
        """The step as text, a line for each mesh."""
        return self.timeline.gantt(width)

    def to_data(self) -> dict[str, Any]:
        """Every figure as JSON values, without the timeline."""
        derived = (
            "num_devices", "compute_s", "collective_s", "exposed_transfer_s", "bubble_fraction", "peak_bytes",
            "host_bytes", "computed_again_bytes", "fits", "examples_per_s", "tokens_per_s", "tflops_per_device", "mfu",
        )  # fmt: skip
        shown = {name: value for name, value in vars(self).items() if name not in ("timeline", "meshes")}
        meshes = [asdict(mesh) | {"memory": [part._asdict() for part in mesh.memory]} for mesh in self.meshes]
        return shown | {name: getattr(self, name) for name in derived} | {"meshes": meshes}

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the step in words, a row for every mesh, and the step as a chart."""
        yield Text(f"{self.plan} on {self.cluster}: {1e3 * self.step_time_s:.4g} ms per step, as modelled")
        rates = [(self.examples_per_s, "examples/s"), (self.tokens_per_s, "tokens/s")]
        yield Text(", ".join(f"{rate:.4g} {unit}" for rate, unit in rates if rate is not None) or "no batch")
        yield Text(
            f"{self.tflops_per_device:.3g} TFLOP/s per device, {100 * self.mfu:.3g} % of the peak in {self.dtype}; "
            f"bubble {100 * self.bubble_fraction:.3g} %"
        )
        verdict = "fits" if self.fits else "DOES NOT FIT (fixes() looks for what does)"
        extra = "" if self.counts_temporaries else "; what tasks need while they run is not counted"
        on_host = f"; {_gb(self.host_bytes)} GB of the host for each device" if self.host_bytes else ""
        if self.host_bytes and self.host_memory_bytes:
            on_host += f", {_gb(self.all_on_host_bytes)} of {_gb(self.host_memory_bytes)} GB of a host"
        yield Text(f"memory: {verdict}, {_gb(self.peak_bytes)} of {_gb(self.memory_limit_bytes)} GB{on_host}{extra}")
        if self.computed_again_s:
            yield Text(
                f"XLA keeps a program within less than a device has: it will compute up to "
                f"{_gb(self.computed_again_bytes)} GB again, in {1e3 * self.computed_again_s:.3g} ms of the step"
            )
        yield self._table()
        yield self.memory_table()
        if len(self.timeline.events) > 1:
            yield self.timeline.chart(options.max_width)

    def _table(self) -> Table:
        columns = ("mesh", "devices", "compute ms", "collective ms", "exposed transfer ms", "idle ms", "peak GB")
        table = Table(*columns, box=box.SIMPLE_HEAD)
        for number, mesh in enumerate(self.meshes):
            seconds = (mesh.compute_s, mesh.collective_s, mesh.exposed_transfer_s, mesh.idle_s)
            cells = (f"{1e3 * each:.4g}" for each in seconds)
            of_machine = f" {mesh.machine}" * (len({each.machine for each in self.meshes}) > 1)
            table.add_row(str(number), f"{len(mesh.devices)}{of_machine}", *cells, _gb(mesh.peak_bytes))
        return table

    def memory_table(self) -> Table:
        """Return a row for each category of what the fullest device holds at its fullest moment."""
        table = Table("at the fullest moment", "GB", "most of it", box=box.SIMPLE_HEAD)
        for category in get_args(Category):
            mine = [part for part in self.memory if part.category == category]
            largest = ", ".join(f"{part.name} {_gb(part.nbytes)}" for part in mine[:_NUM_NAMED] if part.name)
            if mine:
                table.add_row(category, _gb(sum(part.nbytes for part in mine)), Text(largest))
        return table


def _fullest(meshes: Sequence[MeshReport]) -> MeshReport:
    """Return the mesh whose devices use the largest share of their memory."""
    return max(meshes, key=lambda mesh: mesh.peak_bytes / mesh.memory_limit_bytes)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g}"


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """Durations of a program: its tasks by modelled times, its transfers on a cluster.

    What all microbatches share is found once.
    """

    program: Program
    cluster: Cluster
    times: Mapping[str, TaskTimes]
    _moved_s: dict[str, float] = field(default_factory=dict[str, float], init=False, repr=False, compare=False)
    """Seconds of the executables that only move memory, by name."""
    _links: dict[tuple[int, int], Link] = field(
        default_factory=dict[tuple[int, int], Link], init=False, repr=False, compare=False
    )
    """The link from one mesh to another."""

    def run_time_s(self, executable: Executable, task: Task) -> float:
        """The modelled time; what starts and joins accumulators only moves memory."""
        if executable.name in self.times:
            return self.times[executable.name].total_s
        assert task.kind in "ZC", f"{executable.name} has no modelled time"
        if executable.name not in self._moved_s:
            mesh = self.program.meshes[executable.mesh]
            self._moved_s[executable.name] = self.cluster.machine_of(mesh.devices).memory_s(
                sum(each.bytes_per_device(mesh) for each in (*executable.inputs, *executable.outputs))
            )
        return self._moved_s[executable.name]

    def transfer_time_s(self, num_bytes: int, source: int, destination: int) -> float:
        """One message of every device at once; as slow as between domains unless all devices are in one."""
        ends = (source, destination)
        if ends not in self._links:
            meshes = self.program.meshes
            self._links[ends] = self.cluster.joining_link(meshes[source].devices, meshes[destination].devices)
        return self._links[ends].transfer_s(num_bytes)

    def copy_time_s(self, num_bytes: int, mesh: int) -> float:
        """All devices of a mesh copy at once, each its own bytes."""
        return self.cluster.machine_of(self.program.meshes[mesh].devices).host_copy_s(num_bytes)


def check_devices(plan: Plan, cluster: Cluster) -> None:
    """Raise `PlanMismatch` for a cluster that lacks devices of the plan."""
    needed = max(max(mesh.devices) for mesh in plan.meshes) + 1
    if needed > cluster.num_devices:
        raise PlanMismatch(
            f"The plan uses devices up to number {needed - 1}, the cluster has {cluster.num_devices}. Simulate it on a "
            f"cluster of {needed} devices, or make a plan for {cluster.num_devices}."
        )


def simulate_plan(
    program: Program,
    plan: Plan,
    cluster: Cluster,
    *,
    model_flops: float,
    dtype: str,
    inputs: Sequence[tuple[Category, str]],
    examples: int | None,
    tokens: int | None,
) -> SimulationReport:
    """Carry out the program of a plan whose meshes all have times, as `price_plan` gives them.

    `inputs` are the category and the name of each leaf of the arguments.

    Raises `PlanMismatch` for a cluster that lacks devices of the plan.
    """
    check_devices(plan, cluster)
    machines = [cluster.machine_of(mesh.devices) for mesh in plan.meshes]
    shardings = [mesh.sharding for mesh in plan.meshes if mesh.sharding is not None]
    assert len(shardings) == len(plan.meshes), "every mesh has times"
    times = {name: times for sharding in shardings for name, times in sharding.times.items()}
    temporary_bytes = {n: size for sharding in shardings for n, size in sharding.temporary_bytes.items()}
    temporary_parts = {n: parts for sharding in shardings for n, parts in sharding.temporary_parts.items()}
    again_bytes = _computed_again(program, machines, temporary_bytes)
    again_s = {n: machines[program.executables[n].mesh].computed_again_s(more) for n, more in again_bytes.items()}
    times |= {n: replace(times[n], compute_s=times[n].compute_s + seconds) for n, seconds in again_s.items()}
    timeline = simulate(
        program,
        ClusterCosts(program=program, cluster=cluster, times=times),
        hosts=Hosts.of_devices([mesh.devices for mesh in program.meshes], cluster),
        collective_s={name: times.collective_s for name, times in times.items()},
        temporary_bytes=temporary_bytes,
    )
    meshes = _mesh_reports(program, timeline, _Namer(program, inputs, temporary_parts), machines, again_bytes)
    runs = ((i.executable for i in mesh.instructions if isinstance(i, Run)) for mesh in program.meshes)
    all_on_host_bytes, host_memory_bytes = _fullest_host(meshes, cluster)
    peaks = [(len(mesh.devices), _peak_flops(plan, cluster, mesh, dtype)) for mesh in plan.meshes]
    return SimulationReport(
        plan=_plan_words(plan),
        cluster=_cluster_words(plan, cluster),
        step_time_s=timeline.makespan_s,
        meshes=meshes,
        memory_limit_bytes=_fullest(meshes).memory_limit_bytes,
        counts_temporaries=set(times) <= set(temporary_bytes),
        model_flops=model_flops,
        dtype=dtype,
        peak_flops=peaks[0][1] if not cluster.is_mixed else sum(n * peak for n, peak in peaks) / plan.num_devices,
        examples=examples,
        tokens=tokens,
        timeline=timeline,
        all_on_host_bytes=all_on_host_bytes,
        host_memory_bytes=host_memory_bytes,
        computed_again_s=max(sum(again_s.get(name, 0.0) for name in each) for each in runs),
    )


def _computed_again(
    program: Program, machines: Sequence[Machine], temporary_bytes: Mapping[str, float]
) -> dict[str, float]:
    """Return the bytes that executables need above what XLA lets each of them; it knows of nothing beside it."""
    above: dict[str, float] = {}
    for name, temporary in temporary_bytes.items():
        executable = program.executables[name]
        mesh, machine = program.meshes[executable.mesh], machines[executable.mesh]
        inputs = [each.bytes_per_device(mesh) for each in executable.inputs]
        overwritten = sum(inputs[place] for place in executable.donated)
        results = sum(each.bytes_per_device(mesh) for each in executable.outputs)
        given = sum(inputs) + max(results - overwritten, 0)
        if more := machine.bytes_computed_again(given, sum(inputs) + temporary):
            above[name] = more
    return above


def _peak_flops(plan: Plan, cluster: Cluster, mesh: MeshPlan, dtype: str) -> float:
    """Return the FLOP/s on paper of a device of a mesh with all devices of the plan there at work."""
    group = cluster.group_of(mesh.devices)
    there = (each.devices for each in plan.meshes if cluster.group_of(each.devices) == group)
    machine = cluster.machine_of(itertools.chain.from_iterable(there))
    return machine.peak_flops[machine.computed_in(dtype)]


def check_hosts(report: SimulationReport, name: str) -> None:
    """Raise `MemoryTooSmall` for a plan of a step that keeps more on a host than it has memory."""
    if not report.fits_on_hosts:
        raise MemoryTooSmall(
            f"The plan keeps {_gb(report.all_on_host_bytes)} GB of {name} in the memory of one host, which has "
            f"{_gb(report.host_memory_bytes)} GB. Keep less there (offload), or use hosts with more memory."
        )


def _fullest_host(meshes: Sequence[MeshReport], cluster: Cluster) -> tuple[int, float]:
    """Return what values take in the memory of the host that has the least left, and its memory; 0 if not known."""
    taken: dict[int, int] = {}
    memory: dict[int, float] = {}
    for mesh in (mesh for mesh in meshes if mesh.host_bytes):
        machine = cluster.machine_of(mesh.devices)
        for host in (host for device in mesh.devices for host in cluster.hosts_of([device])):
            taken[host] = taken.get(host, 0) + mesh.host_bytes
            memory[host] = machine.host_memory_bytes
    fullest = max(taken, key=lambda host: taken[host] / (memory[host] or math.inf), default=None)
    return (0, 0.0) if fullest is None else (taken[fullest], memory[fullest])


def _plan_words(plan: Plan) -> str:
    microbatches = microbatches_in_words(plan.num_microbatches)
    return f"{plan.method}, {plan.stages_in_words()}, {microbatches}, schedule {plan.schedule}"


def _cluster_words(plan: Plan, cluster: Cluster) -> str:
    used, there = plan.num_devices, cluster.num_devices
    count = f"{used} of {there}" if used < there else str(there)
    return f"{count} device{'s' * (there > 1)} of {' and '.join(group.machine.name for group in cluster.groups)}"


class _Namer:
    """Says what the values of a program are: inputs by their leaves, all else by the task that makes it."""

    def __init__(
        self,
        program: Program,
        inputs: Sequence[tuple[Category, str]],
        temporaries: Mapping[str, Sequence[MemoryPart]],
    ) -> None:
        self.temporaries = temporaries
        self.known: dict[str, tuple[Category, str]] = {}
        runs = (i for mesh in program.meshes for i in mesh.instructions if isinstance(i, Run))
        for run in runs:
            made = ("activations" if run.task.kind == "F" else "gradients"), f"stage {run.task.stage}"
            for value in run.outputs:
                self.known.setdefault(value, made)
            if run.task.kind == "U":
                self.known |= dict.fromkeys(run.outputs, ("temporaries", "results of the update"))
        for item in program.inputs:
            self.known[item.value] = ("other inputs", "constants") if item.leaf is None else inputs[item.leaf]
        for copy in (i for mesh in program.meshes for i in mesh.instructions if isinstance(i, Copy)):
            for value, result in zip(copy.values, copy.results, strict=True):
                if copy.to == "device" and value in self.known:
                    self.known[result] = self.known[value]

    def parts(self, moment: PeakMoment) -> tuple[MemoryPart, ...]:
        """Return what is in memory at a moment."""
        parts = [MemoryPart(*self.known[value], nbytes) for value, nbytes in moment.values.items()]
        if moment.executable in self.temporaries:
            parts += self.temporaries[moment.executable]
        else:
            parts.append(MemoryPart("temporaries", f"while {moment.executable} runs", moment.temporary_bytes))
        return joined_parts(parts)


def _mesh_reports(
    program: Program,
    timeline: Timeline,
    namer: _Namer,
    machines: Sequence[Machine],
    again_bytes: Mapping[str, float],
) -> tuple[MeshReport, ...]:
    again = [0.0] * len(machines)
    for name, nbytes in again_bytes.items():
        again[program.executables[name].mesh] = max(again[program.executables[name].mesh], nbytes)
    return tuple(
        MeshReport(
            devices=mesh.devices,
            compute_s=busy_s - collective_s,
            collective_s=collective_s,
            exposed_transfer_s=exposed_s,
            idle_s=max(timeline.makespan_s - busy_s - exposed_s, 0.0),
            peak_bytes=peak,
            memory=namer.parts(moment),
            machine=machine.name,
            memory_limit_bytes=machine.memory_bytes,
            host_bytes=on_host,
            computed_again_bytes=more,
        )
        for mesh, busy_s, collective_s, exposed_s, peak, moment, on_host, machine, more in zip(
            program.meshes,
            timeline.busy_s,
            timeline.collective_s,
            timeline.exposed_s,
            timeline.peak_bytes,
            timeline.at_peak,
            timeline.host_bytes,
            machines,
            again,
            strict=True,
        )
    )
