"""The command line, also as `python -m autopar`.

autopar calibrate   measures the devices at hand
autopar doctor      checks what autopar needs, here and on a cluster
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autopar import doctor
from autopar.errors import AutoparError
from autopar.hardware import calibrate

# Each has `add_arguments(parser)` and `run(arguments) -> exit status`; its module's first line says what it is for.
COMMANDS = {"calibrate": calibrate, "doctor": doctor}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command by its words, those of the process by default; returns the exit status."""
    parser = argparse.ArgumentParser(prog="autopar", description="Auto-parallelizing compiler for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        says = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=says, description=says))
    arguments = parser.parse_args(words)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except (AutoparError, OSError) as error:
        print(f"autopar {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
