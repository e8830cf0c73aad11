"""Plans of `Auto` for two kinds of GPU in the simulator of another planner, Sailor's, and its measured steps in ours.

    git clone https://github.com/eth-easl/sailor        # and its four planners, by ae_scripts/planner/run_het.sh
    python -m benchmarks.sailor_simulator sailor --results ae_results/planner/fig8b --json sailor.json
    python -m benchmarks.sailor_simulator sailor --records --json records.json

Sailor (SOSP 2025, arXiv 2504.17096) compares planners for mixed clusters in a simulator (figure 8b): OPT-350M in 32
bits, batches of 1024 sequences of 2048 tokens, on 32 + 96, 80 + 240 and 128 + 384 A100s of 40 GB and V100s of 16 GB,
four to a host. It knows stages of replicas, each of the devices of one host or fewer with tensor parallelism; times of
a layer are measured ones, by kind, examples and degree. `Auto` is asked for such plans (`kinds`, no rematerialisation,
1F1B), for the hardware as that simulator has it. Rates are read off the same measurements: products reach what the head
does alone on one device, and memory what makes a whole step take as long. A link between hosts takes what its formula
says of two messages, for each device, which has a card of its own. Its sums of gradients know no hosts, one ring goes
through all devices at the rate of one: the collectives are registered with such a cost. Where replicas differ in number
from stage to stage, each stage is timed with the examples of its own replicas.

`--records` plays steps that were measured on hosts of four GH200s (sailor/Planner/simulations/validation/clariden)
through the simulator of this library, and through Sailor's: by degrees, with the stages that were run. As there, one
microbatch without other replicas takes what was measured of its layers: the rates of the machine file are divided by
one factor for it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import math
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import autopar
from autopar.hardware.collectives import (
    PASSES,
    CollectiveCost,
    CollectiveTime,
    NetworkLevel,
    collective_cost,
    register_collective_cost,
)
from autopar.hardware.machine import Link, Machine
from autopar.ir.plan import Plan
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.models.workload import Workload
from benchmarks.published_clusters import A100, BLOCKS, MACHINES, PER_HOST, V100, cluster_of, staged

MODEL, ZONE = "OPT-350", "us-central1-a"
NAMES = {A100: "A100-40", V100: "V100-16"}
SIZES = {"32+96": (32, 96), "80+240": (80, 240), "128+384": (128, 384)}
TIMED = {A100: 8, V100: 4}
"""Examples of the measurements that the rates are read off: the most there are on one device."""
LENGTH, WIDTH, VOCABULARY = 2048, 1024, 50272
MESSAGES = tuple(4.0 * LENGTH * WIDTH * examples for examples in (1, 4))
"""Bytes of which a link takes what that simulator says: the activations of one example and of four."""
SUMMED = 2.0**28
"""Bytes of gradients for which a ring begins: those of a stage, a sixth of the model."""
WEIGHTS = {
    "attention.query": 1,
    "attention.key": 1,
    "attention.value": 1,
    "attention.out": 1,
    "mlp.up": 4,
    "mlp.down": 4,
}
"""Weights of a block, and their relative sizes."""
RECORDED: Mapping[str, tuple[str, Mapping[str, int], str]] = {
    MODEL: ("OPT-350", {"width": WIDTH, "layers": BLOCKS, "heads": 16}, "training_config_opt_350.json"),
    "GPT-Neo-2.7": ("GPT-NEO", {"width": 2560, "layers": 32, "heads": 32}, "training_config_gpt_neo27.json"),
}
"""The folder, the sizes and the configuration of each model of the records."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan in Sailor's simulator: the seconds of a step there, whether it has room, the stages."""

    cluster: str
    planner: str
    step_time_s: float
    fits: bool
    choice: str
    simulated_here_s: float | None = None
    plan_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Its layers as Sailor counts them, the kind of its devices, its replicas and the devices of each."""

    layers: list[int]
    kind: str
    replicas: int
    tensor: int


class Simulator:
    """Sailor's simulator of its sources in a folder."""

    def __init__(self, sources: Path) -> None:
        """Load its code and its measurements; it imports PyTorch and pandas, and calls neither here."""
        sys.path.insert(0, str(sources))
        for name in ("torch", "pandas"):
            sys.modules.setdefault(name, types.ModuleType(name))
        self.code = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
        planner = sources / "sailor" / "Planner"
        self.profiles = json.loads((planner / "simulations" / "profiles_tmp.json").read_text())
        training = json.loads((planner / "simulations" / "configs" / "training_config_opt_350.json").read_text())
        sizes = json.loads((planner / "llm_info.json").read_text())
        self._sizes, self._sources = sizes, sources
        self.simulator = self.of(training, ZONE)
        self.batch = int(training["global_batch_size"])

    def of(self, training: Mapping[str, Any], zone: str) -> Any:
        """Return its simulator of a model and a batch; it reads <folder>/sailor/sailor."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "sailor").symlink_to(self._sources.resolve())
            return self.code.Simulator(folder, training, self._sizes, False, self.profiles, zone)

    def link(self, kind: str) -> Link:
        """Return the link that takes what its formula says of messages from one device of a kind to another."""
        known = self.simulator.inter_network_coeffs
        coefficients = known.get_zone_coeffs(ZONE, NAMES[kind], 1, ZONE, NAMES[kind], 1)[0]
        small_s, large_s = (float(self.code.estimate_send_time(nbytes, coefficients)) for nbytes in MESSAGES)
        bandwidth = (MESSAGES[1] - MESSAGES[0]) / (large_s - small_s)
        return Link(latency_s=small_s - MESSAGES[0] / bandwidth, bandwidth=bandwidth, ramp_bytes=0.0)

    def measured(self, kind: str, examples: int, tensor: int) -> list[list[float]]:
        """Seconds of each layer, forward, backward and update.

        Those of more examples than were measured are twice those of half as many.
        """
        known = self.profiles[MODEL][NAMES[kind]]
        if str(examples) not in known and examples > max(map(int, known)):
            half = self.measured(kind, examples // 2, tensor)
            return [[2 * forward, 2 * backward, update] for forward, backward, update, *_ in half]
        return list(known[str(examples)][str(tensor)].values())

    def step_time(self, stages: Sequence[Stage], num_microbatches: int) -> tuple[float, bool]:
        """Seconds of a step as its `get_time_per_pipeline` adds them up, and whether all stages have room."""
        examples = self.batch // num_microbatches
        parts: list[tuple[float, float, float]] = []
        fits = True
        for number, stage in enumerate(stages):
            each = examples // stage.replicas
            measured = self.measured(stage.kind, each, stage.tensor)
            plan = self._plan(stages, each)
            pipeline = plan.pipeline_list[0]
            sent = self.code.estimate_p2p_pipeline_times(
                self.simulator.activation_sizes_per_layer, pipeline, each,
                self.simulator.inter_network_coeffs, self.simulator.intra_network_coeffs,
            )  # fmt: skip
            work = sum(measured[layer][0] + measured[layer][1] for layer in stage.layers)
            parts.append((work, sent[number], measured[stage.layers[0]][2]))
            fits = fits and self._has_room(stages, number, each)
        slowest = max(work + sent for work, sent, _ in parts)
        pipeline_s = (num_microbatches - 1) * slowest + sum(work + sent for work, sent, _ in parts)
        update_s = max(update for _, _, update in parts)
        return pipeline_s + update_s + self.simulator.estimate_sync_time(self._plan(stages, 1)), fits

    def _plan(self, stages: Sequence[Stage], examples: int) -> Any:
        code = self.code
        configs = [
            [code.TMPconfig([code.VMconfig(NAMES[each.kind], each.tensor, ZONE)], each.tensor)] * each.replicas
            for each in stages
        ]
        replicas = [each.replicas for each in stages]
        pipeline = code.Pipeline(len(stages), [each.layers for each in stages], replicas, configs)
        return code.Plan([pipeline], examples, False, replicas[0])

    def _has_room(self, stages: Sequence[Stage], number: int, examples: int) -> bool:
        """Ask its check of a whole plan, with all stages but one without layers."""
        kept = [replace(each, layers=each.layers if at == number else []) for at, each in enumerate(stages)]
        convert = self.code.convert_homogeneous
        self.code.convert_homogeneous = lambda plan, training: plan
        try:
            return bool(self.simulator.check_config_fits(self._plan(kept, examples)))
        finally:
            self.code.convert_homogeneous = convert


def rated(kind: str, measured: Sequence[Sequence[float]]) -> Machine:
    """Return the machine whose products take what the head takes, and a whole step what all layers take."""
    examples = TIMED[kind]
    peak = 6 * LENGTH * WIDTH * VOCABULARY * examples / sum(measured[-1][:2])
    found = Machine.named(MACHINES[kind])
    shares = {"matmul_share": {"float32": 1.0}, "in_step_share": 1.0, "batched_share": 1.0}
    found = replace(found, peak_flops={"float32": peak}, sources={}, **shares)
    wanted = sum(forward + backward for forward, backward, *_ in measured)
    inverse, times = [1.0, 2.0], []
    for each in inverse:
        machine = replace(found, memory_bandwidth=found.memory_bandwidth / each, memory_bytes=1e13)
        times.append(
            plan_of(autopar.Cluster.of_hosts(replace(machine, devices_per_host=1, domain=1), 1), examples, 1)[1]
        )
    share = inverse[0] + (wanted - times[0]) * (inverse[1] - inverse[0]) / (times[1] - times[0])
    return replace(found, memory_bandwidth=found.memory_bandwidth / share)


@contextlib.contextmanager
def rings_without_hosts(machines: Sequence[Machine]) -> Iterator[None]:
    """Have all-reduces between hosts of these machines go around one ring of all devices, at the rate of one.

    It has no others: reduce-scatters and all-gathers inside of hosts, by which sums would pass their networks in parts,
    take what they would between hosts.
    """
    between = {machine.inter.bandwidth for machine in machines}
    before = {kind: collective_cost(kind) for kind in ("all-reduce", "all-gather", "reduce-scatter")}

    def cost_of(kind: str) -> CollectiveCost:
        def cost(levels: Sequence[NetworkLevel], nbytes: float) -> CollectiveTime:
            if kind == "all-reduce" and levels[-1].bandwidth not in between:
                return before[kind](levels, nbytes)
            size, bandwidth = math.prod(level.size for level in levels), min(*between, levels[-1].bandwidth)
            message_s = levels[-1].step_s * nbytes / SUMMED + nbytes / size / bandwidth
            return CollectiveTime(0.0, PASSES[kind] * (size - 1) * message_s)

        return cost

    for kind in before:
        register_collective_cost(kind, cost_of(kind))
    try:
        yield
    finally:
        for kind, cost in before.items():
            register_collective_cost(kind, cost)


def workload(batch: int) -> Workload:
    """Return OPT-350M in 32 bits."""
    size = GPTSize(
        width=WIDTH, layers=BLOCKS, heads=16, recomputed=False, batch=batch, length=LENGTH, vocabulary=VOCABULARY
    )
    return alpa_gpt("350M", size, dtype=jnp.float32)


def plan_of(cluster: autopar.Cluster, batch: int, microbatches: int | None = None) -> tuple[Plan, float]:
    """Return the plan in words that Sailor's simulator has, and its seconds by ours."""
    model = workload(batch)
    method = autopar.Auto(
        kinds=("data", "tensor", "pipeline"), remat=False, schedule="1f1b", num_microbatches=microbatches
    )
    step = autopar.parallelize(model.step, method=method, cluster=cluster)
    found = step.trace(model.abstract_state, model.abstract_batch).plan()
    return found.plan, found.simulate().step_time_s


def stages_of(plan: Plan) -> list[Stage]:
    """Return the stages in Sailor's words: the embedding, each block and the head are a layer each.

    What divides most of the weights of its blocks is tensor parallelism, and replicas are what is left of the devices.
    How often an argument is divided says neither: activations may come to a stage in one part for each device.
    """
    if plan.stages[-1].layers[1] != BLOCKS + 1:
        raise ValueError(f"The plan has {plan.stages[-1].layers[1]} layers; expected {BLOCKS + 1}, one for each block.")
    found: list[Stage] = []
    for number, stage in enumerate(plan.stages):
        first, stop = stage.layers
        mesh = plan.meshes[stage.mesh]
        size = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        weights: Counter[int] = Counter()
        for name, share in WEIGHTS.items():
            for block in range(first, min(stop, BLOCKS)):
                spec = plan.input_specs.get(f"state.params.h_{block}.{name}", ())  # whole
                weights[math.prod(size[axis] for axis in axes_of(spec))] += share
        tensor, share = weights.most_common(1)[0]
        if tensor > PER_HOST or 2 * share <= weights.total():
            raise ValueError(
                f"Stage {number} divides its weights {sorted(weights)} ways; expected most of them at most {PER_HOST} "
                "ways. Read its layouts by hand."
            )
        layers = list(range(first + 1 if first else 0, stop + 1))
        found.append(Stage(layers=layers, kind=mesh.machine, replicas=len(mesh.devices) // tensor, tensor=tensor))
    return found


def axes_of(spec: Sequence[str | tuple[str, ...] | None]) -> Iterator[str]:
    """Yield the mesh axes that divide an array."""
    for entry in spec:
        yield from () if entry is None else (entry,) if isinstance(entry, str) else entry


def ours(words: str, simulator: Simulator, machines: Mapping[str, Machine]) -> Row:
    """Return the row of `Auto`."""
    began = time.process_time()
    cards = {kind: PER_HOST * machine.inter.bandwidth for kind, machine in machines.items()}
    cluster = cluster_of(dict(zip((A100, V100), SIZES[words], strict=True)), cards, machines)
    with rings_without_hosts([group.machine for group in cluster.groups]):
        plan, simulated_s = plan_of(cluster, simulator.batch)
    stages = stages_of(plan)
    step_s, fits = simulator.step_time(stages, plan.num_microbatches)
    words_of = (f"{len(each.layers)} on {each.replicas}x{each.tensor} {each.kind}" for each in stages)
    return Row(
        cluster=words,
        planner="Auto",
        step_time_s=step_s,
        fits=fits,
        choice=f"{plan.num_microbatches} microbatches: " + " | ".join(words_of),
        simulated_here_s=simulated_s,
        plan_time_s=time.process_time() - began,
    )


def theirs(words: str, results: Path) -> list[Row]:
    """Return the rows of the planners whose results Sailor's own script left in a folder."""
    rows: list[Row] = []
    for file in sorted(results.glob(f"*_{MODEL}.json")):
        for entry in json.loads(file.read_text()):
            if tuple(entry["num_gpus"].values()) == SIZES[words] and entry["throughput"]:
                pipeline = entry["plan"]["pipelines"][0]
                layers = [len(each) for each in pipeline["layers_per_stage"]]
                choice = f"{entry['plan']['mbs']} examples: " + " | ".join(
                    f"{count} on {each}" for count, each in zip(layers, pipeline["dp_degrees"], strict=True)
                )
                rows.append(
                    Row(
                        cluster=words,
                        planner=file.name.partition("_")[0],
                        step_time_s=1 / entry["throughput"],
                        fits=True,
                        choice=choice,
                    )
                )
    return rows


@dataclass(frozen=True, kw_only=True)
class Record:
    """A measured step, and what both simulators say of it, in seconds."""

    name: str
    degrees: str
    measured_s: float
    ours_s: float
    sailors_s: float


def gpt_of(model: str, batch: int) -> Workload:
    """Return a model of the records, in 32 bits."""
    size = GPTSize(recomputed=False, batch=batch, length=LENGTH, vocabulary=VOCABULARY, **RECORDED[model][1])
    return alpa_gpt(model, size, dtype=jnp.float32)


def simulated_s(model: Workload, machine: Machine, num_hosts: int, method: autopar.Megatron) -> float:
    """Seconds of a step by degrees."""
    step = autopar.parallelize(model.step, method=method, cluster=autopar.Cluster.of_hosts(machine, num_hosts))
    return step.trace(model.abstract_state, model.abstract_batch).plan().simulate().step_time_s


def slowed(simulator: Simulator, model: str, examples: int, tensor: int) -> Machine:
    """Return the machine file by whose rates, divided by a factor, one microbatch takes what was measured of it."""
    measured = list(simulator.profiles[model]["GH-96"][str(examples)][str(tensor)].values())
    wanted = sum(sum(layer[:2]) for layer in measured) + max(layer[2] for layer in measured)
    found = replace(Machine.named("gh200-4"), memory_bytes=1e13, dispatch_s=0.0, sources={})

    def by(factor: float) -> Machine:
        rates = {"float32": found.matmul_flops("float32") / factor}
        times = {"memory_bandwidth": found.memory_bandwidth / factor, "kernel_s": found.kernel_s * factor}
        return replace(found, peak_flops=rates, matmul_share={"float32": 1.0}, **times)

    factors, method = (1.0, 4.0), autopar.Megatron(tensor=tensor)
    alone = (replace(by(each), devices_per_host=tensor, domain=tensor) for each in factors)
    low, high = (simulated_s(gpt_of(model, examples), machine, 1, method) for machine in alone)
    return by(max(0.05, factors[0] + (wanted - low) * (factors[1] - factors[0]) / (high - low)))


def records(simulator: Simulator, sources: Path) -> Iterator[Record]:
    """Yield the records on GH200s; those whose stages are not of the model's layers are left out, and said."""
    folder = sources / "sailor" / "Planner" / "simulations"
    machine_of = functools.cache(functools.partial(slowed, simulator))
    for file in sorted((folder / "validation" / "clariden").rglob("*.json")):
        raw = json.loads(file.read_text())
        model = next(name for name in RECORDED if RECORDED[name][0] in file.parts)
        pipeline, examples, name = raw["pipeline_list"][0], raw["mbs"], f"{file.parts[-3]}/{file.stem}"
        layers = [len(each) for each in pipeline["layers_per_stage"]]
        if sum(layers) != RECORDED[model][1]["layers"] + 2:
            Console(stderr=True).print(f"{name} has {sum(layers)} layers, which {model} has not: left out")
            continue
        data, tensor, count = pipeline["dp"][0], pipeline["tmp_per_stage"][0][0][1], raw["gbs"] // examples
        method = autopar.Megatron(data=data, tensor=tensor, pipeline=len(layers), num_microbatches=count // data)
        step = staged(gpt_of(model, raw["gbs"]), layers, lambda number: jax.named_scope(f"h_{number}"))
        training = json.loads((folder / "configs" / RECORDED[model][2]).read_text()) | {"global_batch_size": raw["gbs"]}
        with contextlib.redirect_stdout(io.StringIO()):
            theirs_s = simulator.of(training, raw["zone"]).simulate_iteration_time(raw)[0]
        machine = machine_of(model, examples, tensor)
        yield Record(
            name=name,
            degrees=f"{data} x {tensor} x {len(layers)}, {examples} of {raw['gbs']}",
            measured_s=raw["real"],
            ours_s=simulated_s(step, machine, data * tensor * len(layers) // machine.devices_per_host, method),
            sailors_s=float(theirs_s),
        )


def print_records(found: Sequence[Record]) -> None:
    """Print a row for each record, and the mean errors."""
    table = Table("record", "data x tensor x pipeline, examples", "measured s", "ours %", "Sailor's %")
    errors = [(each.ours_s / each.measured_s - 1, each.sailors_s / each.measured_s - 1) for each in found]
    for each, both in zip(found, errors, strict=True):
        table.add_row(each.name, each.degrees, f"{each.measured_s:.3f}", *(f"{100 * error:+.1f}" for error in both))
    means = (100 * sum(abs(both[at]) for both in errors) / len(errors) for at in range(2))
    table.add_row(f"mean of {len(found)}", "", "", *(f"{mean:.1f}" for mean in means))
    Console(width=180).print(table)


def print_plans(found: Sequence[Row]) -> None:
    """Print the plans for a cluster, Auto's first."""
    table = Table("devices", "planner", "step s", "over Auto", "fits", "what")
    for row in found:
        over = f"{row.step_time_s / found[0].step_time_s:.2f}"
        table.add_row(row.cluster, row.planner, f"{row.step_time_s:.3f}", over, "yes" if row.fits else "no", row.choice)
    Console(width=180).print(table)


def main() -> None:
    """Print a row for each planner, or for each record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a clone of eth-easl/sailor")
    parser.add_argument("--results", type=Path, help="the folder that its run_het.sh wrote")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--records", action="store_true", help="simulate its measured steps instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    if not options.records and options.results is None:
        parser.error("--results is missing: the folder that run_het.sh wrote, of the plans to stand beside.")
    simulator = Simulator(options.sources)
    rows: list[Row | Record] = []
    if options.records:
        measured = list(records(simulator, options.sources))
        print_records(measured)
        rows += measured
    else:
        rates = {kind: rated(kind, simulator.measured(kind, TIMED[kind], 1)) for kind in NAMES}
        machines = {kind: replace(each, inter=simulator.link(kind)) for kind, each in rates.items()}
        for words in options.sizes:
            found = [ours(words, simulator, machines), *theirs(words, options.results)]
            print_plans(found)
            rows += found
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
