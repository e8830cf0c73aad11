"""A script is started again when its process or its cluster is lost, and only then."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.__main__ import main
from autopar.commands.supervisor import CLUSTER_LOST

SCRIPT = """\
import os, pathlib, sys
from autopar.errors import HostLost
runs = pathlib.Path(sys.argv[1])
runs.write_text(runs.read_text() + "." if runs.exists() else ".")
match len(runs.read_text()):
    case 1: os.kill(os.getpid(), 9)
    case 2: raise HostLost("Lost process 1.")
print("done after", sys.argv[2:])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*words):
    command = [sys.executable, "-m", "autopar", "run", "--pause-s", "0", *map(str, words)]
    root = Path(__file__).parent.parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_script_that_was_killed_or_lost_its_cluster_is_started_again(script, tmp_path):
    ended = run(script, tmp_path / "runs", "--rate", "3")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "done after ['--rate', '3']\n"
    assert "it was ended by SIGKILL; starting it again (2 more)" in ended.stderr
    assert "its cluster is lost; starting it again (1 more)" in ended.stderr


def test_a_script_is_not_started_again_for_ever(script, tmp_path):
    ended = run("--restarts", "0", script, tmp_path / "runs")
    assert ended.returncode == 128 + signal.SIGKILL
    assert "no restart is left" in ended.stderr


def once(path, text, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path.write_text(text)
    return main(["run", "--once", str(path)])


def test_a_lost_cluster_has_an_exit_status_of_its_own(script, monkeypatch, capfd):
    text = "import autopar.errors\nraise autopar.errors.StepTimeout('too long')"
    assert once(script, text, monkeypatch) == CLUSTER_LOST
    assert "StepTimeout: too long" in capfd.readouterr().err


def test_other_errors_are_the_scripts_own(script, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        once(script, "1 / 0", monkeypatch)
    with pytest.raises(SystemExit, match="7"):
        once(script, "raise SystemExit(7)", monkeypatch)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nosuch.py"], "There is no file nosuch.py"), (["--restarts", "-1", "x.py"], "Give 0 or more")],
)
def test_what_cannot_be_run_is_refused(words, message, capsys):
    assert main(["run", *words]) == 1
    assert message in capsys.readouterr().err
