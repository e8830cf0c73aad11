"""Gradients of embeddings as ids and rows, gathered where that is less than the sum of whole tables."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Auto, DataParallel, Megatron, Zero
from autopar.plain_text import as_text
from tests.small_steps import draw

VOCABULARY, WIDTH, LENGTH = 16384, 256, 8


def train_step(params, batch):
    def loss(params):
        h = params["table"][batch["ids"]]
        for w in params["layers"]:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(rows: int):
    params = {"table": draw(0, VOCABULARY, WIDTH), "layers": [draw(n, WIDTH, WIDTH) for n in (1, 2, 3, 4)]}
    ids = jax.random.randint(jax.random.key(3), (rows, LENGTH), 0, VOCABULARY).at[:, 1].set(7)  # one that all share
    return params, {"ids": ids, "y": draw(4, rows, LENGTH, WIDTH)}


def planned(method, rows: int):
    # Of a mesh of GPUs, where products take no time beside collectives.
    cluster = autopar.Cluster(num_devices=8, kind="v100")
    return autopar.parallelize(train_step, method=method, cluster=cluster).trace(*arguments(rows)).plan()


def of_table(found) -> tuple[list[float], list[float]]:
    """The bytes of the rows that are gathered, and of the table's gradients that are summed."""
    every = found.plan.planned_collectives
    rows = [each.nbytes for each in every if f"rows for float32[{VOCABULARY},{WIDTH}]" in each.what]
    table = f"float32[{VOCABULARY},{WIDTH}]"
    return rows, [each.nbytes for each in every if each.what.startswith(table) and "+" in each.what]


METHODS = [
    DataParallel(),
    Auto(kinds="data", num_stages=1, num_microbatches=1),
    Zero(stage=1),
    Zero(stage=2),
    Zero(stage=3),
    Megatron(),
    Megatron(zero=1),
    Megatron(zero=2),
]
over_methods = pytest.mark.parametrize("method", METHODS, ids=[str(autopar.methods.method_words(m)) for m in METHODS])


@over_methods
def test_rows_of_few_examples_are_gathered(method):
    rows = 64
    found = planned(method, rows)
    gathered, summed = of_table(found)
    assert gathered == [4 * rows * LENGTH * WIDTH] and not summed
    assert f"rows for float32[{VOCABULARY},{WIDTH}]" in " ".join(str(as_text(found.plan.collectives())).split())


@pytest.mark.parametrize("method", [DataParallel(), Zero(stage=2), Megatron(zero=1)], ids=lambda m: type(m).__name__)
def test_rows_are_gathered_as_planned_in_the_compiled_step_and_results_equal_those_of_jit(method):
    rows = 64
    found = planned(method, rows)
    report = found.verify(*arguments(rows))
    assert report, str(report)
    wanted, got = jax.jit(train_step)(*arguments(rows)), found.lower().compile()(*arguments(rows))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@over_methods
def test_of_many_examples_the_table_is_summed(method):
    gathered, summed = of_table(planned(method, 16384))
    assert not gathered and math.prod((VOCABULARY, WIDTH)) * 4 in summed
