"""Hold what is kept on the hosts against XLA's GPU compiler: the transfers, and the memory of devices and hosts.

    python -m benchmarks.compiled_offload --target h100 --json compiled_offload.json

A row is a GPT with a part of its step on the hosts. Its values come and leave by instructions of the program, between
its executables: the HLO of these has no transfer. So each kind of value that is copied is compiled as well, there and
back, which shows both transfers in the HLO (S(5) is the host's memory), and its bytes in XLA's account of the host. The
executables are compiled as they run. "XLA" is the fullest moment of the same instructions with the compiled temporaries
and host buffers in place of the modelled ones. Nothing is run, and no GPU is needed, only its compiler
(autopar[gpu-aot]).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table

import autopar
from autopar.aot import Lowered
from autopar.compiler.analysis.aot_targets import aot_devices, gpu_targets
from autopar.compiler.analysis.compiled_collectives import compile_for, executable_mesh
from autopar.hardware.machine import Machine
from autopar.ir.program import ArrayType, Copy, Free, MeshProgram
from autopar.runtime.simulator import ConstantCosts, simulate
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model

_NUM_DEVICES = 8
_LAYERS = 4
OFFLOADS = ("off", "optimizer", "parameters", "activations", ("parameters", "activations"))
_COPY = re.compile(r"= \((\S+), (\S+), \S+\) copy-start\(")
_ON_HOST = ":S(5)}"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A value's way to the host and back, compiled: transfers in its HLO, and XLA's bytes on the host per device."""

    to_host: int
    to_device: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan of one mesh, and what XLA makes of it; bytes of a device, and of the host for each device."""

    offload: str
    num_executables: int
    copies: int
    """Values that the program's instructions copy in a step, each way counted."""
    compiled_copies: int
    """The same, by what the HLO of each has."""
    planned_bytes: int
    xla_bytes: int
    planned_host_bytes: int
    xla_host_bytes: int

    @property
    def agrees(self) -> bool:
        """True if every copy is a transfer in the HLO, and takes on the host what was planned."""
        return self.copies == self.compiled_copies and self.planned_host_bytes == self.xla_host_bytes


def compiled_row(model: Model, offload: str | Sequence[str], virtual_stages: int, target: str) -> Row:
    """Plan a model's step for eight GPUs, compile it for them ahead of time, and return both accounts."""
    cluster = autopar.Cluster.of_hosts(Machine.of_kind(target), 1)
    traced = autopar.parallelize(model.step, cluster=cluster, donate_argnums=0).trace(
        model.abstract_state, model.abstract_batch
    )
    method = autopar.Megatron(
        schedule="interleaved", virtual_stages=virtual_stages, data=_NUM_DEVICES, zero=1, offload=offload
    )
    planned = traced.plan(method)
    lowered, report = planned.lower(), planned.simulate()
    (mesh,) = lowered.program.meshes
    transfers = compiled_transfers(lowered, target)
    copies = [i for i in mesh.instructions if isinstance(i, Copy)]
    found = [(i.to, transfers[on_devices(mesh, name)]) for i in copies for name in i.results]
    return Row(
        offload=offload if isinstance(offload, str) else " and ".join(offload),
        num_executables=len(lowered.program.executables),
        copies=len(found),
        compiled_copies=sum(each.to_host if to == "host" else each.to_device for to, each in found),
        planned_bytes=report.peak_bytes,
        xla_bytes=xla_peak_bytes(lowered, target),
        planned_host_bytes=report.host_bytes,
        xla_host_bytes=xla_host_bytes(lowered, transfers),
    )


def on_devices(mesh: MeshProgram, name: str) -> ArrayType:
    """Return the type of a value, or of its copy on the host, as it is on the devices."""
    return replace(mesh.values[name], memory="device")


def compiled_transfers(lowered: Lowered, target: str) -> Mapping[ArrayType, Transfer]:
    """Compile for a GPU the way to the host and back of every kind of value that a program of one mesh copies."""
    (mesh,), (planned,) = lowered.program.meshes, lowered.plan.meshes
    live = executable_mesh(planned, aot_devices(target, _NUM_DEVICES))
    copied = {on_devices(mesh, name) for i in mesh.instructions if isinstance(i, Copy) for name in i.results}

    def there_and_back(x: jax.Array) -> jax.Array:
        # Without a barrier XLA takes the two for none.
        return jax.device_put(
            jax.lax.optimization_barrier(jax.device_put(x, jax.memory.Space.Host)), jax.memory.Space.Device
        )

    found: dict[ArrayType, Transfer] = {}
    for kind in sorted(copied, key=str):
        where = NamedSharding(live, kind.spec)
        trip = jax.jit(there_and_back, in_shardings=where, out_shardings=where)
        lowered = trip.lower(jax.ShapeDtypeStruct(kind.shape, kind.dtype))
        compiled = compile_for(target, lowered, f"the copy of {kind}")
        starts = [(made.endswith(_ON_HOST), taken.endswith(_ON_HOST)) for made, taken in _COPY.findall(_text(compiled))]
        memory = compiled.memory_analysis()
        assert memory is not None
        found[kind] = Transfer(
            to_host=starts.count((True, False)),
            to_device=starts.count((False, True)),
            host_bytes=memory.host_temp_size_in_bytes,
        )
    return found


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None
    return text


def xla_peak_bytes(lowered: Lowered, target: str) -> int:
    """Return the fullest moment of a device, with what XLA's executables need beside their inputs."""
    reports = [(each.name, each.memory) for each in lowered.inspect(target)]
    beside = {
        name: sizes["temp_size_in_bytes"] + sizes["output_size_in_bytes"] - sizes["alias_size_in_bytes"]
        for name, sizes in reports
    }
    order = ConstantCosts(forward_s=1, backward_s=2, update_s=1)  # memory is that of the order, whatever it takes
    return simulate(lowered.program, order, temporary_bytes=beside).peak_bytes[0]


def xla_host_bytes(lowered: Lowered, transfers: Mapping[ArrayType, Transfer]) -> int:
    """Return the fullest moment of the host for each device, every value with the bytes that XLA gave it there."""
    (mesh,) = lowered.program.meshes

    def nbytes(names: Iterable[str]) -> int:
        return sum(transfers[on_devices(mesh, name)].host_bytes for name in names)

    there = {i.value for i in lowered.program.inputs if mesh.values[i.value].memory == "host"}
    most = nbytes(there)
    for instruction in mesh.instructions:
        match instruction:
            case Copy(to="host", results=made):
                there.update(made)
                most = max(most, nbytes(there))
            case Copy(to="device", values=taken, takes=True) | Free(values=taken):
                there.difference_update(taken)
            case _:
                pass
    return most


def table_of(rows: Sequence[Row], target: str) -> Table:
    """Return the rows as a table, in MB."""
    table = Table(
        "on the hosts", "executables", "copies", "in HLO", "device MB", "XLA", "planned / XLA", "host MB", "XLA",
        title=f"GPT for {_NUM_DEVICES} {target}, compiled ahead of time",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.offload,
            str(row.num_executables),
            str(row.copies),
            str(row.compiled_copies),
            f"{row.planned_bytes / 1e6:.1f}",
            f"{row.xla_bytes / 1e6:.1f}",
            f"{row.planned_bytes / row.xla_bytes:.2f}",
            f"{row.planned_host_bytes / 1e6:.1f}",
            f"{row.xla_host_bytes / 1e6:.1f}",
        )
    return table


def main() -> None:
    """Compile, show the rows, and end with an error if a transfer or a byte of the host is not as planned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h100", choices=gpu_targets())
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    heads = max(options.width // 64, 1)
    model = gpt(layers=_LAYERS, width=options.width, heads=heads, vocabulary=8192, length=256, batch=64)
    rows = [compiled_row(model, offload, _LAYERS + 2, options.target) for offload in OFFLOADS]
    Console(width=140).print(table_of(rows, options.target))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    wrong = [row.offload for row in rows if not row.agrees]
    if wrong:
        raise SystemExit(f"These are not compiled as planned: {'; '.join(wrong)}.")


if __name__ == "__main__":
    main()
