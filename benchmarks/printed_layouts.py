"""Hold the layouts that a plan prints against those of the arrays that run.

    python -m benchmarks.printed_layouts --models mlp gpt_linen --methods zero "two stages" --json printed_layouts.json

Every model of the zoo runs a step by every method on eight virtual devices, in 64 bits. Of each input on each mesh, of
each value that one mesh sends to another, on both sides, and of each result that is state for the next step, the
devices and the part of the array that each of them has are those that `describe` prints. Exits with 1 if one is not.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.description import PlanDescription
from autopar.errors import AutoparError
from autopar.ir.program import ArrayType, Recv, Send
from autopar.methods import Method
from autopar.runtime.in_process import InProcess
from tests.zoo import ZOO, Case

METHODS: dict[str, Method] = {
    "data parallel": autopar.DataParallel(),
    "microbatches": autopar.DataParallel(num_microbatches=2),
    "by specs": autopar.ShardParallel(mesh_shape=(2, 4), specs={r"w$|kernel$|embedding$": P(None, "model")}),
    "two stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    "interleaved": autopar.PipelineParallel(num_stages=2, virtual_stages=2, num_microbatches=2, schedule="interleaved"),
    "megatron": autopar.Megatron(data=4, tensor=2),
    "megatron stages": autopar.Megatron(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1),
    "zero": autopar.Zero(),
    "tensor": autopar.TensorParallel(),
    "expert": autopar.ExpertParallel(),
    "auto": autopar.Auto(),
    "auto stages": autopar.Auto(num_stages=2, num_microbatches=2),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The arrays of one step whose layouts were printed, and those that lie otherwise."""

    model: str
    method: str
    refused: str
    """Why there is no plan."""
    inputs: int
    crossings: int
    results: int
    wrong: tuple[str, ...]
    seconds: float


def measure(model: str, method: str) -> Row:
    """Run a step of a model by a method, and compare; a step that the method refuses is a row as well."""
    start, case = time.perf_counter(), ZOO[model]
    step, *arguments = case.make()
    counts, wrong, refused = [0, 0, 0], list[str](), ""
    try:
        parallel = autopar.parallelize(step, method=METHODS[method], batch_argnums=case.batch_argnums)
        planned = parallel.trace(*arguments, **case.kwargs).plan()
        for kind, words in _compared(planned, case, arguments):
            counts[kind] += 1
            wrong += [words] if words else []
    except AutoparError as error:
        refused = f"{type(error).__name__}: {error}"
    inputs, crossings, results = counts
    seconds = time.perf_counter() - start
    return Row(model=model, method=method, refused=refused, inputs=inputs, crossings=crossings, results=results,
               wrong=tuple(wrong), seconds=seconds)  # fmt: skip


def _compared(planned: autopar.Planned, case: Case, arguments: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Yield for each array whether it is an input, a crossing value or a result, and how it differs; "" if it does not.

    The instructions are carried out one by one as a call does it, and each array is looked at where it is made.
    """
    described, program = planned.describe(), planned.lower().program
    loaded: Any = InProcess(jax.devices()).load(program)
    leaves = planned.source.arguments.split(tuple(arguments), dict(case.kwargs)).leaves
    env = loaded.place(leaves) + loaded.unset
    loaded.progress.begin()
    printed = {(each.name, each.mesh): each for each in described.inputs}
    names, seen = [leaf.name for leaf in planned.trace.inputs], dict[tuple[str, int], int]()
    for given, array in zip(program.inputs, env, strict=False):
        if given.leaf is not None:
            key = names[given.leaf], given.mesh
            yield 0, _difference(f"input {key}", described, given.mesh, printed[key].type, array)
            seen[key] = seen.get(key, 0) + _part_bytes(array)
    for key, each in printed.items():
        words = f"input {key}: {each.bytes_per_device} bytes per device are printed, {seen.get(key)} are there"
        yield 0, "" if seen.get(key) == each.bytes_per_device else words
    crossings = {(each.source, each.destination, each.value): each for each in described.crossings}
    for (mesh, instruction, _), run in zip(loaded.order, loaded.steps, strict=True):
        sides = {name: env[loaded.slots[mesh, name]] for name in getattr(instruction, "values", ())}
        run(env)
        if isinstance(instruction, Send):
            for name, array in sides.items():
                each = crossings[mesh, instruction.to, name.partition("@")[0]]
                yield 1, _difference(f"sent {name}", described, mesh, each.sent, array)
        if isinstance(instruction, Recv):
            for name in sides:
                each = crossings[instruction.source, mesh, name.partition("@")[0]]
                array = env[loaded.slots[mesh, name]]
                yield 1, _difference(f"received {name}", described, mesh, each.received, array)
    results = [read(env) for read in loaded.results]
    for number, leaf in planned.trace.state_outputs.items():
        name, array = names[leaf], results[number]
        places = [each for each in described.inputs if each.name == name]
        if places and isinstance(array, jax.Array) and all(each.parts == 1 for each in places):
            first = places[0]
            yield 2, _difference(f"result {name}", described, first.mesh, first.type, array)


def _difference(what: str, described: PlanDescription, mesh: int, printed: ArrayType, array: jax.Array) -> str:
    planned = described.plan.meshes[mesh]
    devices = tuple(sorted(shard.device.id for shard in array.addressable_shards))
    if devices != tuple(sorted(planned.devices)):
        return f"{what}: on devices {devices}, and mesh {mesh} has {planned.devices}"
    sizes = dict(zip(planned.axis_names, planned.shape, strict=True))
    parts = [_size(entry, sizes) for entry in (*printed.spec, *[None] * (len(printed.shape) - len(printed.spec)))]
    wanted = tuple(n // count for n, count in zip(printed.shape, parts, strict=True))
    found = {shard.data.shape for shard in array.addressable_shards}
    different = tuple(array.shape) != tuple(printed.shape) or found != {wanted}
    # Which part of it, too: of an axis that is split, a device has that of its place on the mesh.
    places = {shard.device.id: shard.index for shard in array.addressable_shards}
    grid = jax.sharding.NamedSharding(
        jax.sharding.Mesh(_devices(planned.devices, planned.shape), planned.axis_names), printed.spec
    )
    wanted_places = {device.id: index for device, index in grid.devices_indices_map(array.shape).items()}
    if different or _plain(places, array.shape) != _plain(wanted_places, array.shape):
        return f"{what}: printed as {printed}, and lies as {array.sharding} in parts of {sorted(found)}"
    return ""


def _devices(ordinals: Sequence[int], shape: Sequence[int]) -> Any:
    return np.array([jax.devices()[ordinal] for ordinal in ordinals]).reshape(shape)


def _plain(places: dict[int, Any], shape: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    return {device: [each.indices(n)[:2] for each, n in zip(index, shape)] for device, index in places.items()}


def _size(entry: Any, sizes: dict[str, int]) -> int:
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    count = 1
    for name in names:
        count *= sizes[name]
    return count


def _part_bytes(array: jax.Array) -> int:
    return max(shard.data.nbytes for shard in array.addressable_shards)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all models by all methods, and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every plan")
    args = parser.parse_args(argv)
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.ReplicatedWarning)
        for name in args.models:
            shown = track(args.methods, description=name, console=Console(stderr=True), transient=True)
            for method in shown:
                rows.append(measure(name, method))
                if args.json:
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
            jax.clear_caches()  # executables of a model are not used by the next
    jax.config.update("jax_enable_x64", before)
    Console(width=140).print(table_of(rows))
    return int(any(row.wrong for row in rows))


def table_of(rows: Sequence[Row]) -> Table:
    """Return a line for each model, and below it the arrays that lie otherwise than printed."""
    table = Table(title="printed layouts beside those of the arrays that run")
    for column in ("model", "methods", "no plan", "inputs", "crossings", "results", "wrong", "s"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        counts = [(not r.refused, bool(r.refused), r.inputs, r.crossings, r.results, len(r.wrong)) for r in mine]
        table.add_row(
            model, *(str(sum(each)) for each in zip(*counts, strict=True)), f"{sum(r.seconds for r in mine):.0f}"
        )
        for row in mine:
            for words in row.wrong:
                table.add_row(f"  {row.method}: {words}", *[""] * 7)
    return table


if __name__ == "__main__":
    sys.exit(main())
