"""`autopar doctor` says what it found, and what to do about what is not good."""

import argparse
import json

import jax
import pytest

from autopar.__main__ import main
from autopar.commands import doctor


def test_this_machine_is_good(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("Python", "jaxlib", "8 cpu", "highspy", "orbax-checkpoint"):
        assert word in printed


def test_findings_are_also_json_and_a_step_runs(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["a step"]["state"] == "good" and "on 8 devices" in found["a step"]["found"]
    assert "cpu" in found["figures"]["found"]


def test_a_single_cpu_device_is_told_of_virtual_ones(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(doctor.jax, "devices", lambda: one)
    found = {finding.name: finding for finding in doctor.check_machine()}
    assert "8 virtual devices" in found["devices"].advice and found["a step"].state == "good"


def test_address_without_a_cluster_is_bad_and_says_what_to_do(capsys):
    assert main(["doctor", "--ray", "--address", "127.0.0.1:1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Ray cluster" in printed and "127.0.0.1:1" in printed


def test_package_that_is_missing_is_found(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "highspy" else "1.0")
    found = {finding.name: finding for finding in doctor.check_machine()}
    assert found["highspy"].state == "bad" and "pip install 'highspy'" in found["highspy"].advice
    assert found["ray"].state == "good"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_cluster_of_two_processes_is_good():
    arguments = argparse.Namespace(ray=True, address=None, num_hosts=2, devices_per_host=1)
    found = list(doctor.check_processes(arguments))
    assert {finding.name: finding.state for finding in found} == {
        "process 0": "good",
        "process 1": "good",
        "collective": "good",
        "process 0 to 1": "good",
        "process 1 to 0": "good",
    }
