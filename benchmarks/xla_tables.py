"""Hold what plans have for collectives and products against what XLA measured of its own.

    python -m benchmarks.xla_tables --json xla_tables.json                        # with autopar[gpu-aot]
    python -m benchmarks.xla_tables --plugin site-packages/jax_plugins/xla_cuda12/xla_cuda_plugin.so

XLA's GPU compiler carries tables of what collectives of float32 and products took on its authors' machines, as text in
its library (openxla/xla, xla/service/gpu/model: default_collective_perf_table.txtpb, default_matmul_perf_table.txtpb).
A collective has bytes per second there: those of its operand or its result, whichever is larger, over its time
(xla/tools/collective_perf_table_gen.cc).

Modelled is what the library's machine files say of the same, collectives on a mesh of the table's groups (`MeshCosts`),
products alone (`Machine.matmul_s`), for no step is around them. Collectives of fewer than 64 KB are left out, the start
of which decides there and varies tenfold in the table, and so are products that are faster than any device can be.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.errors import AutoparError, InvalidArgument
from autopar.hardware.machine import Machine

MACHINES = {
    "sm_90": "dgx-h100",
    "sm_100_B200": "dgx-b200",
    "sm_100_GB200": "gb200-nvl72",
    "sm_103": "gb300-nvl72",
}
"""The machine of a device of the tables."""
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
LEAST_BYTES = 64 * 1024
LARGE_BYTES = 1024 * 1024
_FLOAT32_BYTES = 4
_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_TEXT = re.compile(rb'[^\0]*key: "sm_[^\0]*')
_FIELDS = re.compile(
    r'key: "(?P<device>sm_\w+)"|opcode: "(?P<kind>[\w-]+)"|dimensions: (?P<elements>\d+)\s+layout'
    r"|num_replica_groups: (?P<groups>\d+)|num_devices_per_group: (?P<size>\d+)"
    r'|\b(?P<side>[bmnk]): (?P<length>\d+)|flops \{\s*key: "(?P<types>[^"]+)"\s+value: (?P<flops>\d+)'
    r"|source_target_pairs \{(?: source: (?P<source>\d+))?(?: target: (?P<target>\d+))? \}"
    r"|network_throughput_bytes_per_sec: (?P<rate>\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A collective or a product: seconds in the table, and modelled."""

    device: str
    what: str
    """The kind of a collective, or "product"."""
    detail: str
    """Devices of a group, or the type of a product's operands."""
    work: float
    """Bytes of a collective, FLOPs of a product."""
    measured_s: float
    modelled_s: float


def main(argv: Sequence[str] | None = None) -> None:
    """Read, price, print, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plugin", type=Path, metavar="FILE", help="the library of XLA's GPU compiler")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        plugin = options.plugin or installed_plugin()
        rows, skipped = timed(tables_of(plugin))
    except AutoparError as error:
        parser.error(str(error))
    figures = figures_of(rows)
    Console().print(table_of(figures))
    for why, count in sorted(skipped.items()):
        Console().print(f"{count:4} entries left out: {why}", highlight=False)
    if options.json:
        found = {"figures": figures, "left_out": dict(skipped)}
        options.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def installed_plugin() -> Path:
    """Return the library of the GPU compiler that is installed; `InvalidArgument` if there is none."""
    if importlib.util.find_spec("jax_plugins") is not None:
        for name in PLUGINS:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                return Path(spec.origin).with_name("xla_cuda_plugin.so")
    raise InvalidArgument(
        f"None of {', '.join(PLUGINS)} is installed, and the tables are in XLA's GPU compiler. Install "
        "autopar[gpu-aot], or name its library with --plugin."
    )


def tables_of(plugin: Path) -> tuple[str, ...]:
    """Return the tables in the library as text; `InvalidArgument` if it has none."""
    if not plugin.is_file():
        raise InvalidArgument(f"There is no file {plugin}. Name the library of XLA's GPU compiler with --plugin.")
    texts = tuple(found.group().decode("ascii", "replace") for found in _TEXT.finditer(plugin.read_bytes()))
    if not texts:
        raise InvalidArgument(
            f"{plugin} has no table of devices sm_... as text: it is no GPU compiler, or of a release that keeps its "
            "tables in another form. Name the library of a release that has them, as of jaxlib 0.10, with --plugin."
        )
    return texts


def timed(tables: Iterable[str]) -> tuple[list[Timed], Counter[str]]:
    """Return the entries of the tables with what is modelled of them, and why others are left out, counted."""
    rows: list[Timed] = []
    skipped = Counter[str]()
    for text in tables:
        for entry in _entries(text):
            if entry["device"] not in MACHINES:
                skipped[f"no machine file says which machine {entry['device']} is in"] += 1
            elif "types" in entry:
                _add_product(entry, rows, skipped)
            else:
                _add_collective(entry, rows, skipped)
    return rows, skipped


def _entries(text: str) -> Iterator[dict[str, str]]:
    """Each collective and each product, by the names of `_FIELDS`, b, m, n, k among them."""
    device, entry = "", dict[str, str]()
    for found in _FIELDS.finditer(text):
        fields = {name: value for name, value in found.groupdict().items() if value is not None}
        if "device" in fields:
            device = fields["device"]
        elif "kind" in fields or fields.get("side") == "b":
            entry = {"device": device}
        if "side" in fields:
            entry[fields["side"]] = fields["length"]
        elif {"source", "target"} & fields.keys():
            devices = max(int(number) + 1 for number in fields.values())
            entry |= {"groups": "1", "size": str(max(devices, int(entry.get("size", 1))))}
        else:
            entry |= fields
        if "types" in fields or "rate" in fields:
            yield dict(entry)


def _add_collective(entry: dict[str, str], rows: list[Timed], skipped: Counter[str]) -> None:
    size, kind = int(entry["size"]), entry["kind"]
    # What a reduce-scatter reads is larger than what it leaves, which is the entry's shape.
    nbytes = _FLOAT32_BYTES * int(entry["elements"]) * (size if kind == "reduce-scatter" else 1)
    if nbytes < LEAST_BYTES:
        skipped[f"collectives of fewer than {LEAST_BYTES // 1024} KB"] += 1
        return
    mesh = LogicalMesh(shape=(int(entry["groups"]), size), axis_names=("groups", "group"))
    costs = MeshCosts(machine=Machine.named(MACHINES[entry["device"]]), mesh=mesh)
    rows.append(
        Timed(
            device=entry["device"],
            what=kind,
            detail=str(size),
            work=nbytes,
            measured_s=nbytes / int(entry["rate"]),
            modelled_s=costs.collective_s(kind, (1,), nbytes),
        )
    )


def _add_product(entry: dict[str, str], rows: list[Timed], skipped: Counter[str]) -> None:
    batch, m, n, k = (int(entry[name]) for name in "bmnk")
    operands, result = entry["types"].split("->")
    operand = operands.partition("x")[0]
    machine, dtype = Machine.named(MACHINES[entry["device"]]), _DTYPES.get(operand, "float8")
    if int(entry["flops"]) > machine.peak_flops[machine.computed_in(dtype)]:
        skipped[f"products of {operand} faster than the peak of an {machine.kind}"] += 1
        return
    flops = 2 * batch * m * n * k
    nbytes = batch * ((m + n) * k * _BYTES.get(operand, 1) + m * n * _BYTES[result])
    rows.append(
        Timed(
            device=entry["device"],
            what="product",
            detail=operand if dtype != "float8" else "fp8",
            work=flops,
            measured_s=flops / int(entry["flops"]),
            modelled_s=machine.matmul_s(flops, nbytes, dtype),
        )
    )


def figures_of(rows: Sequence[Timed]) -> list[dict[str, Any]]:
    """Errors by device, kind, and group or type: of all, and of collectives of a megabyte and more."""
    groups: defaultdict[tuple[str, str, str], list[Timed]] = defaultdict(list)
    for row in rows:
        details = ("all", row.detail) if row.what != "product" else (row.detail,)
        for detail in details:
            groups[row.device, row.what, detail].append(row)
    return [
        {"device": device, "machine": MACHINES[device], "what": what, "detail": detail}
        | _errors(each)
        | {"large": _errors([row for row in each if what == "product" or row.work >= LARGE_BYTES])}
        for (device, what, detail), each in groups.items()
    ]


def _errors(rows: Sequence[Timed]) -> dict[str, float]:
    """Mean of the errors' sizes; `bias` is the mean factor, less one."""
    ratios = np.array([row.modelled_s / row.measured_s for row in rows])
    mape, bias = float(np.abs(ratios - 1).mean()), float(np.exp(np.log(ratios).mean()) - 1)
    return {"rows": len(rows), "mape": round(mape, 4), "bias": round(bias, 4)}


def table_of(figures: Sequence[dict[str, Any]]) -> Table:
    """A line for each kind on each machine, and for each type of products."""
    table = Table(title="Modelled against XLA's own tables", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("machine", "what", "of"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "mape", "bias", "large", "mape", "bias"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in figures:
        if each["what"] == "product" or each["detail"] == "all":
            counted = [each, each["large"]]
            cells = [(f"{of['rows']}", f"{of['mape']:.1%}", f"{of['bias']:+.1%}") for of in counted]
            table.add_row(each["machine"], each["what"], each["detail"], *cells[0], *cells[1])
    return table


if __name__ == "__main__":
    main()
