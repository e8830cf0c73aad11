"""Searches say what they are at, on terminals only."""

import io

import jax
import jax.numpy as jnp
from rich.console import Console

import autopar
from autopar.progress import search_progress, tell, tell_best


def shown_by(terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=140)
    with search_progress("planning train_step", console):
        tell("layers on 1x8")
        tell_best(0.81)
    tell("told to nobody")
    return text.getvalue()


def test_a_terminal_shows_what_is_told():
    text = shown_by(terminal=True)
    assert "planning train_step" in text and "layers on 1x8" in text and "best so far 810 ms" in text
    assert "nobody" not in text


def test_elsewhere_nothing_is_shown():
    assert not shown_by(terminal=False).strip()


def test_a_search_says_what_it_is_at(monkeypatch):
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"]) ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    monkeypatch.setattr("autopar.progress.Console", lambda **_: console)
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    cluster = autopar.Cluster.parse("2x p3.16xlarge")
    method = autopar.Auto(num_stages=2, num_microbatches=4)
    autopar.parallelize(step, method=method, cluster=cluster).trace(params, jnp.ones((16, 8))).plan()
    text = console.file.getvalue()
    assert "planning step" in text and "layouts of stage 2 of 2" in text and "best so far" in text
