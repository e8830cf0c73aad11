# PYTHON_ARGCOMPLETE_OK
"""The command line, also as `python -m autopar`.

autopar plan        plans a step, and shows the plan
autopar simulate    says how long a step of a plan takes, and what it holds
autopar explain     says what else could have been planned, and what causes a collective
autopar what-if     plans a step in another way, and says what differs
autopar diff        says what differs between two stored plans
autopar view        writes a plan as a page for the browser
autopar machines    lists the machines that can be planned for
autopar calibrate   measures the devices at hand
autopar doctor      checks what autopar needs, here and on a cluster
autopar bench       compares with Alpa's evaluation
autopar run         runs a training script, and starts it again when its cluster is lost
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from autopar.commands import doctor, machines, plan, supervisor
from autopar.errors import AutoparError
from autopar.hardware import calibrate


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the words of a benchmark."""
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, help="as for python -m benchmarks: gpt, moe, wresnet, accuracy"
    )


def run_bench(arguments: argparse.Namespace) -> int:
    """Run a benchmark; 0."""
    installed = Path(__file__).parent / "bench"
    if installed.is_dir():  # no package of ours stands beside those of others under so common a name
        sys.path.insert(0, str(installed))
    from benchmarks.__main__ import main as run_benchmark

    run_benchmark(arguments.words)
    return 0


# Of each: the module that reads its options, what adds them, and what runs it and returns the exit status; the first
# sentence of the last one says what the command does.
COMMANDS = {
    "plan": (plan, plan.add_plan_options, plan.run_plan),
    "simulate": (plan, plan.add_simulate_options, plan.run_simulate),
    "explain": (plan, plan.add_explain_options, plan.run_explain),
    "what-if": (plan, plan.add_what_if_options, plan.run_what_if),
    "diff": (plan, plan.add_diff_options, plan.run_diff),
    "view": (plan, plan.add_view_options, plan.run_view),
    "machines": (machines, machines.add_machines_options, machines.run_machines),
    "calibrate": (calibrate, calibrate.add_calibrate_options, calibrate.run_calibrate),
    "doctor": (doctor, doctor.add_doctor_options, doctor.run_doctor),
    "bench": (sys.modules[__name__], add_bench_options, run_bench),
    "run": (supervisor, supervisor.add_run_options, supervisor.run_script),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command by its words, by default those of the process; return the exit status."""
    parser = argparse.ArgumentParser(prog="autopar", description="Auto-parallelizing compiler for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, add_options, run) in COMMANDS.items():
        said = (run.__doc__ or "").partition(";")[0]
        add_options(commands.add_parser(name, help=said, description=said))
    with suppress(ModuleNotFoundError):  # the extra autopar[completion]
        importlib.import_module("argcomplete").autocomplete(parser)
    arguments = parser.parse_args(words)
    _, _, run = COMMANDS[arguments.command]
    try:
        return run(arguments)
    except (AutoparError, OSError) as error:
        print(f"autopar {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
