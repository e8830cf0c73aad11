"""Searches say what they are at: on terminals as a bar, elsewhere as lines, unless they are short."""

import io

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import autopar
from autopar.progress import search_progress, tell, tell_best


@pytest.fixture(autouse=True)
def progress_is_shown(monkeypatch):
    monkeypatch.delenv("AUTOPAR_PROGRESS", raising=False)


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


def test_elsewhere_nothing_is_shown_of_a_short_search():
    assert not shown_by(terminal=False)


def lines_of_a_minute() -> list[str]:
    text, seconds = io.StringIO(), 0.0
    with search_progress("planning train_step", Console(file=text, force_terminal=False), clock=lambda: seconds):
        for number in range(60):
            tell(f"layout {number}")
            tell_best((60 - number) / 100)
            seconds += 1.0
    return text.getvalue().splitlines()


def test_elsewhere_a_long_search_writes_a_line_every_ten_seconds_with_the_best_plan_so_far():
    lines = lines_of_a_minute()
    assert lines[0] == "planning train_step: 10 s, best so far 510 ms, layout 10"
    assert [line.split(",")[0].rpartition(" ")[0] for line in lines] == [
        f"planning train_step: {seconds}" for seconds in (10, 20, 30, 40, 50)
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_both_are_turned_off_by_the_environment(monkeypatch, terminal):
    monkeypatch.setenv("AUTOPAR_PROGRESS", "0")
    assert not lines_of_a_minute()
    assert "best so far" not in shown_by(terminal)


def test_a_search_says_what_it_is_at(monkeypatch, tmp_path):
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"]) ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    console = Console(file=io.StringIO(), force_terminal=False)
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))  # where no such plan is known
    monkeypatch.setattr("autopar.progress.Console", lambda **_: console)
    monkeypatch.setattr("autopar.progress._LINE_EVERY_S", 0.0)  # all that is told, however short the search
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    cluster = autopar.Cluster.parse("2x p3.16xlarge")
    method = autopar.Auto(num_stages=2, num_microbatches=4)
    autopar.parallelize(step, method=method, cluster=cluster).trace(params, jnp.ones((16, 8))).plan()
    text = console.file.getvalue()
    assert "planning step" in text and "layouts of stage 1 of 2" in text and "best so far" in text
