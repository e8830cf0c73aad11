"""Two processes that run the same script train as one does, each its own part; what differs between them is named."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.errors import InvalidArgument
from tests.runtime.controller_process import MARK

PROCESSES, DEVICES = 2, 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of every process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "JAX_PLATFORMS": "cpu",
        "NPROC": "16",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    command = [sys.executable, "-m", "tests.runtime.controller_process"]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(PROCESSES), coordinator, folder],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    lines = [next((x for x in output.splitlines() if x.startswith(MARK)), None) for output in outputs]
    assert all(lines), [process.returncode for process in processes]
    return [json.loads(line.removeprefix(MARK)) for line in lines]


@pytest.mark.parametrize(
    "how", ["one mesh", "pipeline", "searched", "placement", "global arrays", "restored", "goes on"]
)
def test_step_of_two_processes_equals_the_plain_step(reports, how):
    assert [report["devices"] for report in reports] == [PROCESSES * DEVICES] * PROCESSES
    assert all(report[how] < 1e-6 for report in reports), [report[how] for report in reports]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("wrong size", "InvalidArgument: num_hosts is 3, the JAX world has 2"),
        ("other code", "PlanMismatch: Process 1 has not the step other of process 0: "),
        (
            "other settings",
            "PlanMismatch: Process 1 has not the releases and settings of JAX of process 0: 'jax",
        ),
        (
            "other flags",
            "PlanMismatch: Process 1 has not the releases and settings of JAX of process 0: "
            "'XLA_FLAGS --xla_cpu_enable_fast_math=true' in place of 'XLA_FLAGS --xla_force_host",
        ),
        ("on failure", "InvalidArgument: on_failure='restart' needs a driver that outlives the processes"),
    ],
)
def test_differences_between_processes_are_refused_in_all_of_them(reports, what, message):
    assert all(report[what].startswith(message) for report in reports), [report[what] for report in reports]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "planning fails",
            "StepFailed: Planning other failed in process 0: ZeroDivisionError: a link without bandwidth",
        ),
        ("call fails", "StepFailed: Calling raise_in failed in process 1: KeyError: 'weights'"),
    ],
)
def test_what_one_process_raises_all_raise(reports, what, message):
    assert [report[what] for report in reports] == [message] * PROCESSES


def test_processes_listen_before_during_and_after_as_the_page_on_security_says(reports):
    for before, during, after in (report["listeners"] for report in reports):
        # Beside what JAX's world has open itself, three of the transfer server.
        assert sorted(during) == sorted([*before, *["127.0.0.1"] * 3])
        assert sorted(after) == sorted(before)
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith('| `autopar.init(cluster="jax")`')]
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["0", "3", "0"]


def test_difference_is_shown(reports):
    assert "0.2" in reports[0]["other code"] and "in place of" in reports[1]["other code"]


def test_process_without_a_world_is_told_how_to_join_one():
    with pytest.raises(InvalidArgument, match=r"has not joined a JAX world.*jax.distributed.initialize"):
        autopar.init(cluster="jax")
