"""A dump has each value of the chain as a file, and what XLA says of each executable."""

import json
import os

import pytest

import autopar
from autopar.reports.dump import dump_name
from tests.reports.test_description import METHODS, arguments, deep_loss
from tests.small_steps import sgd


@pytest.fixture(scope="module")
def lowered():
    return autopar.parallelize(sgd(deep_loss), method=METHODS["two stages"]).trace(*arguments()).plan().lower()


def test_every_executable_is_reported_as_the_compiler_has_it(lowered):
    reports = {each.name: each for each in lowered.inspect()}
    assert reports.keys() == lowered.program.executables.keys() and len(reports) > 4
    for name, each in reports.items():
        planned = lowered.program.executables[name]
        assert "module @" in each.stablehlo and "HloModule" in each.hlo and repr(each).count("\n") == 0
        assert each.memory["argument_size_in_bytes"] >= 0 and each.mesh == planned.mesh
    forward = max(reports.values(), key=lambda each: each.cost.get("flops", 0.0))
    # At least a forward pass of two layers of 32 x 128 weights twice, for the 2 of a microbatch's 8 rows of a device.
    assert forward.cost["flops"] >= 2 * 2 * 2 * 2 * 32 * 128


def test_a_dump_can_be_read_back(lowered, tmp_path):
    folder = lowered.dump(tmp_path / "dump")
    assert autopar.Plan.load(folder / "plan.json") == lowered.plan
    assert (folder / "program.txt").read_text() == f"{lowered.program}\n"
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]
    figures = json.loads((folder / "executables.json").read_text())
    for name in figures:
        assert (folder / f"{name}.hlo.txt").stat().st_size and (folder / f"{name}.stablehlo.mlir").stat().st_size


def test_every_step_that_is_compiled_is_dumped_where_the_environment_says(lowered, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path))
    lowered.compile()
    assert os.listdir(tmp_path) == [dump_name(lowered.trace, lowered.plan)]
    monkeypatch.setenv("AUTOPAR_DUMP", "")
    lowered.compile()
    assert len(os.listdir(tmp_path)) == 1


def test_a_plan_for_devices_that_are_not_here_is_dumped_without_executables(tmp_path):
    cluster = autopar.Cluster.parse("8x dgx-h100")
    step = autopar.parallelize(sgd(deep_loss), method=autopar.Megatron(data=32, pipeline=2), cluster=cluster)
    folder = step.trace(*arguments()).plan().lower().dump(tmp_path / "far")
    assert {each.name for each in folder.iterdir()} == {
        "step.jaxpr.txt", "plan.json", "plan.txt", "program.txt", "timeline.json"
    }  # fmt: skip


def test_a_folder_that_cannot_be_made_is_said(lowered, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(autopar.InvalidArgument, match="cannot be written to"):
        lowered.dump(tmp_path / "file" / "dump")
