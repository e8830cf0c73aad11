"""Run a training script, and start it again when its cluster or its process is lost.

    autopar run [--restarts N] train.py [its options]

A driver can end without a word: Ray aborts it when the head of the cluster is gone, the kernel kills it for memory. So
the script runs in a process of its own, and is started again when that was ended by a signal, or failed with an error
that says that the cluster is lost. `autopar.fit` with a `checkpoint_dir` goes on from the last checkpoint then. Every
other error is the script's own and ends the run.
"""

from __future__ import annotations

import argparse
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from autopar.checks import check_count
from autopar.errors import ClusterFailed, InvalidArgument

CLUSTER_LOST = 75
"""The exit status of a script whose cluster is lost: that of a failure that may pass, in BSD's sysexits.h."""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--restarts", type=int, default=3, help="start the script again at most so often")
    parser.add_argument("--pause-s", type=float, default=1.0, help="seconds before that, doubled each time")
    parser.add_argument("--once", action="store_true", help="run the script in this process, without a supervisor")
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")


def run_script(arguments: argparse.Namespace) -> int:
    """Run the script until it ends by itself, and return its exit status."""
    check_count("--restarts", arguments.restarts, least=0)
    if not arguments.script.is_file():
        raise InvalidArgument(f"There is no file {arguments.script}. Give the path of a Python script.")
    if arguments.once:
        return _run_here(arguments.script, arguments.options)
    command = [sys.executable, "-m", "autopar", "run", "--once", str(arguments.script), *arguments.options]
    for restart in range(arguments.restarts + 1):
        status = _run_and_wait(command)
        if status >= 0 and status != CLUSTER_LOST:
            return status
        ended = "its cluster is lost" if status == CLUSTER_LOST else f"it was ended by {_signal_name(-status)}"
        if restart == arguments.restarts:
            print(f"autopar run: {arguments.script}: {ended}; no restart is left.", file=sys.stderr)
            return status if status > 0 else 128 - status
        left = arguments.restarts - restart - 1
        print(f"autopar run: {arguments.script}: {ended}; starting it again ({left} more).", file=sys.stderr)
        time.sleep(arguments.pause_s * 2**restart)
    raise AssertionError


def _run_here(script: Path, options: list[str]) -> int:
    sys.argv[:] = [str(script), *options]
    sys.path[0:0] = [str(script.resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ClusterFailed:
        traceback.print_exc()
        return CLUSTER_LOST
    return 0


def _run_and_wait(command: list[str]) -> int:
    """Return the exit status of a command, or minus the number of the signal that ended it."""
    with subprocess.Popen(command) as process, _passing_on(process, signal.SIGTERM, signal.SIGINT) as stopped:
        status = process.wait()
    # Who stops the supervisor means the script, too.
    return 128 - status if stopped and status < 0 else status


@contextmanager
def _passing_on(process: subprocess.Popen[bytes], *signals: signal.Signals) -> Generator[list[int]]:
    """Hand signals for this process to another one; gives those that came."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
