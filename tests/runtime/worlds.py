"""Start the processes of a world, let them meet, and hear what they found."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.runtime.exchange_process import MARK


@contextmanager
def world(endpoint: str, environments: Sequence[Mapping[str, str]]) -> Iterator[list[dict[str, Any]]]:
    """Return the processes' reports, one per environment; they stay until the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.runtime.exchange_process"]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(len(environments)), coordinator, endpoint],
            env=os.environ | path | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, environment in enumerate(environments)
    ]
    try:
        addresses = [told(process) for process in processes]
        for process in processes:
            process.stdin.write(json.dumps(addresses) + "\n")
            process.stdin.flush()
        yield [told(process) for process in processes]
        for process in reversed(processes):  # the first one is the coordinator, without which the others abort
            process.communicate("\n", timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def told(process: subprocess.Popen[str]) -> Any:
    """The next thing that the process says to us."""
    line = next((line for line in process.stdout if line.startswith(MARK)), None)
    assert line is not None, f"process {process.args} ended with {process.wait()}"
    return json.loads(line.removeprefix(MARK))
