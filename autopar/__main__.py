"""The command line, also as `python -m autopar`.

autopar calibrate   measures the devices at hand
autopar doctor      checks what autopar needs, here and on a cluster
autopar plan        plans a step, and shows the plan
autopar run         runs a training script, and starts it again when its cluster is lost
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autopar import doctor, plan_command, supervisor
from autopar.errors import AutoparError
from autopar.hardware import calibrate

# Of each: the module, whose first line describes the command, its options, and the function that returns the exit
# status.
COMMANDS = {
    "calibrate": (calibrate, calibrate.add_calibrate_options, calibrate.run_calibrate),
    "doctor": (doctor, doctor.add_doctor_options, doctor.run_doctor),
    "plan": (plan_command, plan_command.add_plan_options, plan_command.run_plan),
    "run": (supervisor, supervisor.add_run_options, supervisor.run_script),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command by its words, by default those of the process; return the exit status."""
    parser = argparse.ArgumentParser(prog="autopar", description="Auto-parallelizing compiler for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, add_options, _) in COMMANDS.items():
        description = (module.__doc__ or "").partition("\n")[0]
        add_options(commands.add_parser(name, help=description, description=description))
    arguments = parser.parse_args(words)
    _, _, run = COMMANDS[arguments.command]
    try:
        return run(arguments)
    except (AutoparError, OSError) as error:
        print(f"autopar {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
