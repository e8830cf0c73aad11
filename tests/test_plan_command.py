"""`autopar plan` plans a step by the name of what makes it, shows it, and says what is missing."""

import json

import pytest

import autopar
from autopar.__main__ import main

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

def make_nothing():
    return step

def make_shapes():
    return shapes()

number = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "planned_model.py").write_text(MODEL)
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


@pytest.mark.parametrize(
    "step, said",
    [
        ("planned_model", 'Name a module and a function of it, as "model:make_step"'),
        ("no_such_model:make", "The module no_such_model cannot be imported"),
        ("planned_model:make", "planned_model has no function 'make'; it has step, shapes, make_step"),
        ("planned_model:number", "has no function 'number'"),
        ("planned_model:make_nothing", "returned function; it must return the step and its arguments"),
        ("planned_model:make_shapes", "returned dict first; it must return the step"),
    ],
)
def test_what_cannot_be_planned_is_said(model, capsys, step, said):
    assert main(["plan", step]) == 1
    assert said in capsys.readouterr().err
