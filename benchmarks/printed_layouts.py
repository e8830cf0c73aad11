"""Hold the layouts that a plan prints against those of the arrays that run.

    python -m benchmarks.printed_layouts --models mlp gpt_linen --methods zero "two stages" --json printed_layouts.json

Every model of the zoo runs a step by every method on eight virtual devices, in 64 bits. Of each input on each mesh, of
each value that one mesh sends to another, on both sides, and of each result, the devices, their memory and the part of
the array that each of them has are those that `describe` prints; and as many arrays as it prints are there, and sent.
Exits with 1 if one is not so.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.ir.program import ArrayType, Program, Recv, Send
from autopar.reports.description import PlacedInput, PlacedResult, PlanDescription
from autopar.runtime.in_process import InProcess
from benchmarks.every_method import every_method
from tests.zoo import ZOO, Case

METHODS = every_method(8)


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
    counts, wrong, refused = dict.fromkeys(("input", "crossing", "result"), 0), list[str](), ""
    try:
        parallel = autopar.parallelize(step, method=METHODS[method], batch_argnums=case.batch_argnums)
        planned = parallel.trace(*arguments, **case.kwargs).plan()
        for kind, words in _compared(planned, case, arguments):
            counts[kind] += 1
            wrong += [words] if words else []
    except AutoparError as error:
        refused = f"{type(error).__name__}: {error}"
    inputs, crossings, results = counts.values()
    seconds = time.perf_counter() - start
    return Row(model=model, method=method, refused=refused, inputs=inputs, crossings=crossings, results=results,
               wrong=tuple(wrong), seconds=seconds)  # fmt: skip


def _compared(planned: autopar.Planned, case: Case, arguments: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield for each array if it is an input, a crossing value or a result, and how it differs; "" if it does not.

    The instructions are carried out one by one as a call does it, and each array is looked at where it is made.
    """
    described, program = planned.describe(), planned.lower().program
    loaded: Any = InProcess(jax.devices()).load(program)
    leaves = planned.source.arguments.split(tuple(arguments), dict(case.kwargs)).leaves
    env = loaded.place(leaves) + loaded.unset
    loaded.progress.begin()
    yield from _inputs(planned, described, program, env)
    crossings = {(each.source, each.destination, each.value): each for each in described.crossings}
    times, sent = Counter[tuple[int, int, str]](), Counter[tuple[int, int, str]]()
    for (mesh, instruction, _), run in zip(loaded.order, loaded.steps, strict=True):
        sides = {name: env[loaded.slots[mesh, name]] for name in getattr(instruction, "values", ())}
        run(env)
        if isinstance(instruction, Send):
            for name, array in sides.items():
                key = mesh, instruction.to, name.partition("@")[0]
                times[key], sent[key] = times[key] + 1, sent[key] + array.nbytes
                yield "crossing", _difference(f"sent {name}", described, mesh, crossings[key].sent, array)
        if isinstance(instruction, Recv):
            for name in sides:
                each = crossings[instruction.source, mesh, name.partition("@")[0]]
                array = env[loaded.slots[mesh, name]]
                yield "crossing", _difference(f"received {name}", described, mesh, each.received, array)
    for key, each in crossings.items():
        same = (each.times, each.nbytes) == (times[key], sent[key])
        yield "crossing", "" if same else f"{key}: {each.times} sends are printed, and {times[key]} were seen"
    yield from _results(planned, described, program, [read(env) for read in loaded.results])


def _inputs(
    planned: autopar.Planned, described: PlanDescription, program: Program, env: Sequence[Any]
) -> Iterator[tuple[str, str]]:
    """Hold each array that a step begins with against one that is printed; each of these is taken once."""
    left = [each for each in described.inputs for _ in range(each.parts)]
    names = [leaf.name for leaf in planned.trace.inputs]
    here: dict[tuple[str, int], int] = {}
    for given, array in zip(program.inputs, env, strict=False):
        if given.leaf is not None:
            key = names[given.leaf], given.mesh
            here[key] = here.get(key, 0) + _part_bytes(array)
            yield "input", _taken(f"input {key}", described, left, *key, array)
    for each in left:
        yield "input", f"input {each.name}: printed as {each.type} on mesh {each.mesh}, and is not there"
    for key, found in here.items():
        most = sum(each.bytes_per_device for each in described.inputs if (each.name, each.mesh) == key)
        words = f"input {key}: {most} bytes per device are printed, {found} are there"
        yield "input", "" if found == most else words


def _results(
    planned: autopar.Planned, described: PlanDescription, program: Program, results: Sequence[jax.Array]
) -> Iterator[tuple[str, str]]:
    """Hold each result against what is printed of it, mesh by mesh; constants are in no program, and left out."""
    names, replaced = planned.trace.outputs, planned.trace.state_outputs
    inputs = [leaf.name for leaf in planned.trace.inputs]
    constants = {output.leaf for output in program.outputs if not output.parts}
    for number, array in enumerate(results):
        if number in constants:
            continue
        key = names[number].name, inputs[replaced[number]] if number in replaced else ""
        printed = [each for each in described.results if (each.name, each.replaces) == key]
        yield "result", _spread(f"result {key[0]}", described, printed, array)


def _taken(
    what: str, described: PlanDescription, left: list[PlacedInput], name: str, mesh: int, array: jax.Array
) -> str:
    printed = [each for each in left if (each.name, each.mesh) == (name, mesh)]
    differences = [_difference(what, described, mesh, each.type, array) for each in printed]
    if "" in differences:
        left.remove(printed[differences.index("")])
        return ""
    return next(iter(differences), f"{what}: an array in {array.sharding} is there, and none is printed")


def _spread(what: str, described: PlanDescription, printed: Sequence[PlacedResult], array: jax.Array) -> str:
    """Return how a result differs whose rows are on the printed meshes, one after the other; "" if it does not."""
    wanted, first, memories = dict[int, list[tuple[int, int]]](), 0, set[str]()
    for each in printed:
        rows = each.type.shape[0] if each.type.shape else 0
        memories.add(each.type.memory)
        for device, place in _places(described, each.mesh, each.type).items():
            shifted = [(start + first, stop + first) for start, stop in place[:1]]
            wanted[device] = [*shifted, *place[1:]]
        first += rows
    shape = (first, *printed[0].type.shape[1:]) if printed and printed[0].type.shape else ()
    same = array.shape == shape and memories == {_memory(array)} and str(array.dtype) == printed[0].type.dtype
    if not same or _found(array) != wanted:
        words = "; ".join(f"{each.type} on mesh {each.mesh}" for each in printed)
        return f"{what}: printed as {words}, and lies as {array.sharding} of {array.shape}"
    return ""


def _difference(what: str, described: PlanDescription, mesh: int, printed: ArrayType, array: jax.Array) -> str:
    """Return how an array differs from what is printed: devices, memory, and which part of it each device has."""
    devices, planned = sorted(_found(array)), sorted(described.plan.meshes[mesh].devices)
    if devices != planned:
        return f"{what}: on devices {devices}, and mesh {mesh} has {planned}"
    same = (array.shape, str(array.dtype), _memory(array)) == (printed.shape, printed.dtype, printed.memory)
    if not same or _found(array) != _places(described, mesh, printed):
        parts = sorted({shard.data.shape for shard in array.addressable_shards})
        return f"{what}: printed as {printed}, and lies as {array.sharding} in parts of {parts}"
    return ""


def _places(described: PlanDescription, mesh: int, printed: ArrayType) -> dict[int, list[tuple[int, int]]]:
    """Return the range of each dimension that each device has, by the printed layout."""
    planned = described.plan.meshes[mesh]
    grid = np.array([jax.devices()[ordinal] for ordinal in planned.devices]).reshape(planned.shape)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(grid, planned.axis_names), printed.spec)
    return _plain(sharding.devices_indices_map(printed.shape), printed.shape)


def _found(array: jax.Array) -> dict[int, list[tuple[int, int]]]:
    """The same by its shards, whose data must be of that size."""
    assert all(shard.data.shape == array.sharding.shard_shape(array.shape) for shard in array.addressable_shards)
    return _plain({shard.device: shard.index for shard in array.addressable_shards}, array.shape)


def _plain(places: Mapping[Any, Any], shape: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    return {device.id: [each.indices(n)[:2] for each, n in zip(index, shape)] for device, index in places.items()}


def _memory(array: jax.Array) -> str:
    kind = array.sharding.memory_kind
    return "device" if kind in (None, "device") else "host"


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
