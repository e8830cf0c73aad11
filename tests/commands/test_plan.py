"""`autopar plan` plans a step by the name of what makes it, shows it, and says what is missing."""

import json
import os
import subprocess
import sys

import pytest

import autopar
from autopar.__main__ import COMMANDS, main
from tests.reports.test_description import arguments, deep_loss
from tests.small_steps import sgd

MODEL = """
import jax, jax.numpy as jnp, autopar

def step(params, batch):
    value, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(batch @ p["up"]) @ p["down"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

def shapes():
    shape = jax.ShapeDtypeStruct
    return {"up": shape((64, 128), "float32"), "down": shape((128, 64), "float32")}, shape((32, 64), "float32")

def make_step():
    return step, *shapes()

def make_pipeline():
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    return autopar.parallelize(step, method=method), *shapes()

def make_unfit():
    params, _ = shapes()
    return step, params, jax.ShapeDtypeStruct((32, 63), "float32")

def make_mistake():
    return step, shapes()["params"]

def make_nothing():
    return step

def make_shapes():
    return shapes()

number = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "planned_model.py").write_text(MODEL)
    (tmp_path / "broken_model.py").write_text("1 / 0")
    (tmp_path / "ending_model.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_step_is_planned_shown_and_written(model, capsys):
    words = ["plan", "planned_model:make_step", "--cluster", "1x dgx-h100"]
    assert main([*words, "-o", "plan.json", "--view", "plan.html"]) == 0
    text = capsys.readouterr().out
    assert "devices of dgx-h100" in text and "params.up" in text
    assert (model / "plan.html").read_text().startswith("<!doctype html>")
    plan = autopar.Plan.load(model / "plan.json")
    assert main([*words, "--plan", "plan.json", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] == plan.fingerprint and shown["method"] == "Auto"
    assert {each["name"] for each in shown["inputs"]} == {"params.up", "params.down", "batch"}


def test_a_step_that_has_a_method_keeps_it(model, capsys):
    assert main(["plan", "planned_model:make_pipeline", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["method"], len(shown["stages"]), shown["num_microbatches"]) == ("PipelineParallel", 2, 2)


def test_a_stored_plan_is_asked_from_the_command_line(model, capsys):
    assert main(["plan", "planned_model:make_pipeline", "-o", "two.json"]) == 0
    assert main(["plan", "planned_model:make_step", "--method", "DataParallel()", "-o", "one.json"]) == 0
    capsys.readouterr()

    def printed(*words):
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    stored = ["planned_model:make_pipeline", "--plan", "two.json"]
    report = printed("simulate", *stored)
    counts = {each["choice"]: each for each in printed("explain", *stored, "num_microbatches")["alternatives"]}
    assert counts["2"]["step_time_s"] == report["step_time_s"] and counts["1"]["step_time_s"] > 0
    changes = printed("what-if", *stored[:1], "--set", "num_microbatches=4", "--set", "schedule=gpipe")["changes"]
    assert {each["subject"]: each["after"] for each in changes}["schedule"] == "gpipe"
    subjects = {each["subject"] for each in printed("diff", "one.json", "two.json")["changes"]}
    assert {"method", "meshes", "stages", "microbatches"} <= subjects
    both = printed("diff", "one.json", "two.json", "--step", "planned_model:make_pipeline")
    assert both["after"]["simulated"]["step_time_s"] == report["step_time_s"]
    asked = ["--ask", "num_microbatches", "--ask", "all-reduce"]
    assert printed("view", *stored, *asked, "-o", 'page "1".html') == {"page": 'page "1".html'}
    page = (model / 'page "1".html').read_text()
    assert "Why it communicates" in page and "as planned" in page


def test_machines_are_listed_with_their_sources(capsys):
    assert main(["machines", "--json"]) == 0
    known = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert known["dgx-h100"]["devices_per_host"] == 8 and known["dgx-h100"]["sources"]
    assert main(["machines"]) == 0
    assert "dgx-h100" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "The plan is not JSON"),
        ('{"format": 2}', "The plan has format 2"),
        ("[]", "format None"),
        ("\0\xff", "The plan is not JSON"),
    ],
)
def test_a_plan_file_that_is_damaged_or_of_another_version_is_refused(model, capsys, text, said):
    (model / "plan.json").write_bytes(text.encode("latin-1"))
    assert main(["diff", "plan.json", "plan.json"]) == 1
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_stages():
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(sgd(deep_loss), method=method)
    return json.loads(step.trace(*arguments()).plan().plan.to_json())


@pytest.mark.parametrize(
    "path, value, said",
    [
        (["format"], 3, "The plan has format 3"),
        (["schedule"], "<script>", "schedule is '<script>'. Choose one of"),
        (["num_microbatches"], 10**9, "do not divide into 1000000000 microbatches"),
        (["stages", 0, "layers"], [0, 9], "layers"),
        (["stages", 1, "mesh"], 7, "mesh"),
        (["meshes", 0, "devices"], [0, 0, 0, 0], "distinct ordinals"),
        (["meshes", 0, "sharding"], {"layouts": []}, "sharding"),
        (["cuts"], "<script>", "cuts"),
        (["fingerprint"], "forged", "another"),
    ],
)
def test_a_forged_plan_is_refused(tmp_path, monkeypatch, capsys, two_stages, path, value, said):
    forged = json.loads(json.dumps(two_stages))
    there = forged
    for key in path[:-1]:
        there = there[key]
    there[path[-1]] = value
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(forged))
    (tmp_path / "deep_model.py").write_text(
        "from tests.small_steps import sgd\nfrom tests.reports.test_description import arguments, deep_loss\n"
        "def make_step():\n    return sgd(deep_loss), *arguments()\n"
    )
    assert main(["simulate", "deep_model:make_step", "--plan", "plan.json"]) == 1
    assert said in (told := capsys.readouterr().err) and "Traceback" not in told


def test_a_plan_that_was_cut_off_is_refused(tmp_path, capsys, two_stages):
    text = json.dumps(two_stages)
    for share in (0.1, 0.5, 0.99):
        (tmp_path / "plan.json").write_text(text[: int(share * len(text))])
        assert main(["diff", str(tmp_path / "plan.json"), str(tmp_path / "plan.json")]) == 1
        assert "The plan is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["plan", "--method", "os.system('true')"], "The method is"),
        (["plan", "--method", "Auto(num_stages=two)"], "Write one of"),
        (["plan", "--method", "Auto(stages=2)"], "unexpected keyword"),
        (["plan", "--method", "Auto()", "--plan", "plan.json"], "Both --plan and --method"),
        (["simulate", "--plan", "none.json"], "none.json"),
        (["what-if", "--set", "num_microbatches"], "has no value"),
        (["plan", "--cluster", "8x abacus"], "abacus"),
    ],
)
def test_words_that_cannot_be_used_are_said(model, capsys, words, said):
    assert main([words[0], "planned_model:make_pipeline", *words[1:]]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "step, said",
    [
        ("planned_model", 'Name a module and a function of it, as "model:make_step"'),
        ("no_such_model:make", "The module no_such_model cannot be imported"),
        ("broken_model:make", "ZeroDivisionError: division by zero, at broken_model.py:1"),
        ("ending_model:make", "The module ending_model cannot be imported: SystemExit: 0"),
        ("planned_model:make_unfit", "cannot be traced for its arguments: TypeError: dot_general requires"),
        ("planned_model:make_unfit", ", at planned_model.py:5 (<lambda>)."),
        ("planned_model:make_mistake", "does not return the step and its arguments: TypeError: tuple indices"),
        ("planned_model:make", "planned_model has no function 'make'; it has step, shapes, make_step"),
        ("planned_model:number", "has no function 'number'"),
        ("planned_model:make_nothing", "returned function; it must return the step and its arguments"),
        ("planned_model:make_shapes", "returned dict first; it must return the step"),
    ],
)
def test_what_cannot_be_planned_is_said(model, capsys, step, said):
    assert main(["plan", step]) == 1
    assert said in (told := capsys.readouterr().err) and "Traceback" not in told


def test_every_command_that_answers_prints_json(capsys):
    for name in COMMANDS.keys() - {"run", "bench"}:  # they run a script, or a benchmark with options of its own
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and "--json" in capsys.readouterr().out, name


def test_the_benchmarks_are_a_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "gpt", "--help"])
    assert ended.value.code == 0 and "--cluster" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["bench", "abacus"])
    assert ended.value.code == 2 and "abacus" in capsys.readouterr().err


def test_a_shell_completes_commands(tmp_path):
    pytest.importorskip("argcomplete")
    line, written = "autopar sim", tmp_path / "completed"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    words = {**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(written)}
    subprocess.run([sys.executable, "-m", "autopar"], env=words, check=True, timeout=120)
    assert written.read_text().split() == ["simulate"]
