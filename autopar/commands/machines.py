"""List the machines whose figures are in the library: what a cluster in words, such as "8x dgx-h100", can be made of.

autopar machines           a row for each
autopar machines --json    every figure, with its source
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.hardware.machine import Machine, machines


def add_machines_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print every figure with its source")


def run_machines(arguments: argparse.Namespace) -> int:
    """Print the machines; 0."""
    known = [Machine.named(name) for name in machines()]
    if arguments.json:
        print(json.dumps([asdict(machine) for machine in known], indent=1))
        return 0
    columns = ("name", "devices", "memory GB", "peak TFLOP/s", "inside GB/s", "between GB/s", "estimated")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for machine in known:
        dtype, peak = max(machine.peak_flops.items(), key=lambda each: (each[0] == "bfloat16", each[1]))
        estimates = sum(source.startswith("estimate") for source in machine.sources.values())
        cells = (
            machine.name,
            f"{machine.devices_per_host} x {machine.kind}",
            f"{machine.memory_bytes / 1e9:.4g}",
            f"{peak / 1e12:.4g} {dtype}",
            f"{machine.intra.bandwidth / 1e9:.4g}",
            f"{machine.inter.bandwidth / 1e9:.4g}",
            f"{estimates} of {len(machine.sources)} figures" if estimates else "",
        )
        table.add_row(*map(Text, cells))
    Console(width=None if Console().is_terminal else 160).print(table)
    return 0
