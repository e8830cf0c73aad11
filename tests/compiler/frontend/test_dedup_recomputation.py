"""Recomputed values are computed once, at every depth, and only where it is the same value."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autopar.compiler.frontend.dedup_recomputation import join_recomputed
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize

pytestmark = pytest.mark.usefixtures("float64")

LENGTH = 3


def inputs() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=4)), jnp.asarray(rng.normal(size=(LENGTH, 4)))


def scan(body: Callable[..., Any], h: Any, xs: Any, **options: Any) -> Any:
    return lax.scan(body, h, xs, **options)


def step(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
    return jnp.sin(h) + row, None


def step_with_residuals(h: jax.Array, row: jax.Array) -> tuple[jax.Array, Any]:
    return jnp.sin(h) + row, (h, jnp.cos(h))


def invariant(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
    return jnp.sin(h) * jnp.exp(jnp.arange(4.0)) + row, None


def hoisted(h: jax.Array, rows: jax.Array) -> Any:
    scale = jnp.exp(jnp.arange(4.0))
    return scan(lambda h, row: (jnp.sin(h) * scale + row, h), h, rows)


def nested(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
    return scan(step, h, jnp.stack([row, h]))[0], None


def nested_with_residuals(h: jax.Array, row: jax.Array) -> tuple[jax.Array, Any]:
    return scan(step_with_residuals, h, jnp.stack([row, h]))


def saving(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    wave = jnp.sin(h)
    return wave + row, wave


Half = Callable[..., Any]
SHARED: dict[str, tuple[Half, Half]] = {
    "elementwise": (lambda x, xs: jnp.sin(x), lambda x, xs, _: jnp.sin(x) * 2),
    "behind a barrier": (lambda x, xs: jnp.sin(x), lambda x, xs, _: jnp.sin(lax.optimization_barrier(x))),
    "behind a name": (
        lambda x, xs: jnp.sin(x),
        lambda x, xs, _: jnp.sin(checkpoint_name(x, "x")),
    ),
    "random bits": (
        lambda x, xs: jnp.sin(jax.random.uniform(jax.random.key(3), (4,))),
        lambda x, xs, _: jnp.sin(jax.random.uniform(jax.random.key(3), (4,))),
    ),
    "a literal": (lambda x, xs: jnp.sin(x + 0.25), lambda x, xs, _: jnp.sin(x + 0.25)),
    "the same scan": (lambda x, xs: scan(step, x, xs)[0], lambda x, xs, _: scan(step, x, xs)[0] * 2),
    "a scan with residuals": (lambda x, xs: scan(step, x, xs)[0], lambda x, xs, _: scan(step_with_residuals, x, xs)),
    "what follows from its carry": (
        lambda x, xs: jnp.sin(scan(step, x, xs)[0]),
        lambda x, xs, _: jnp.sin(scan(step_with_residuals, x, xs)[0]),
    ),
    "a reversed scan": (
        lambda x, xs: scan(step, x, xs, reverse=True)[0],
        lambda x, xs, _: scan(step_with_residuals, x, xs, reverse=True),
    ),
    "a scan recomputed twice": (
        lambda x, xs: scan(step, x, xs)[0],
        lambda x, xs, _: (scan(saving, x, xs), scan(step_with_residuals, x, xs)),
    ),
    "what the scan hoists": (lambda x, xs: scan(invariant, x, xs)[0], lambda x, xs, _: hoisted(x, xs)),
    "a scan in a scan": (
        lambda x, xs: scan(nested, x, xs)[0],
        lambda x, xs, _: scan(nested_with_residuals, x, xs),
    ),
    "a scan that saved a part": (
        lambda x, xs: scan(saving, x, xs),
        lambda x, xs, kept: scan(lambda h, wr: (wr[0] + wr[1], (h, jnp.cos(h))), x, (kept[1], xs)),
    ),
}
DIFFERENT: dict[str, tuple[Half, Half]] = {
    "another operand": (lambda x, xs: jnp.sin(x), lambda x, xs, _: jnp.sin(xs[0])),
    "another literal": (lambda x, xs: jnp.sin(x + 0.25), lambda x, xs, _: jnp.sin(x + 0.5)),
    "another start": (lambda x, xs: scan(step, x, xs)[0], lambda x, xs, _: scan(step_with_residuals, xs[0], xs)),
    "another order": (
        lambda x, xs: scan(step, x, xs)[0],
        lambda x, xs, _: scan(step_with_residuals, x, xs, reverse=True),
    ),
    "another body": (
        lambda x, xs: scan(step, x, xs)[0],
        lambda x, xs, _: scan(lambda h, row: (jnp.sin(h) - row, h), x, xs),
    ),
    "other rows": (lambda x, xs: scan(step, x, xs)[0], lambda x, xs, _: scan(step_with_residuals, x, xs[::-1])),
    "rows that the scan makes": (
        lambda x, xs: scan(saving, x, xs),
        lambda x, xs, kept: scan(lambda h, row: (jnp.sin(h) + row, jnp.sum(kept[1])), x, kept[1]),
    ),
    "an effect": (
        lambda x, xs: jax.debug.callback(lambda _: None, x) or jnp.sin(x),
        lambda x, xs, _: jax.debug.callback(lambda _: None, x) or jnp.sin(xs[1]),
    ),
}


def program(forward: Half, again: Half) -> tuple[jc.ClosedJaxpr, list[bool]]:
    """Both halves, and which equations are of the second."""

    def both(x, xs):
        with jax.named_scope("first"):
            kept = forward(x, xs)
        with jax.named_scope("again"):
            return kept, again(x, xs, kept)

    closed = normalize(jax.make_jaxpr(both)(*inputs()))
    return closed, [jc.scope_of(eqn).startswith("again") for eqn in closed.jaxpr.eqns]


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, int]]:
    for eqn in jc.open_jaxpr(jaxpr)[0].eqns:
        yield eqn.primitive.name, times
        for inner in jc.subjaxprs(eqn):
            yield from equations(inner, times * eqn.params.get("length", 1))


def count(closed: jc.ClosedJaxpr) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, times in equations(closed):
        counts[name] += times
    return counts


over_all = pytest.mark.parametrize(
    ("forward", "again"), [*SHARED.values(), *DIFFERENT.values()], ids=[*SHARED, *DIFFERENT]
)


@over_all
def test_joining_keeps_every_value(forward: Half, again: Half) -> None:
    closed, recomputes = program(forward, again)
    expected = jc.jaxpr_as_fun(closed)(*inputs())
    results = jc.jaxpr_as_fun(join_recomputed(closed, recomputes))(*inputs())
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-13)


@pytest.mark.parametrize(("forward", "again"), SHARED.values(), ids=SHARED)
def test_what_both_halves_compute_is_computed_once(forward: Half, again: Half) -> None:
    closed, recomputes = program(forward, again)
    joined = count(join_recomputed(closed, recomputes))
    alone = count(normalize(jax.make_jaxpr(forward)(*inputs())))
    for name in ("sin", "scan", "random_bits"):
        assert joined[name] == alone[name], name


@pytest.mark.parametrize(("forward", "again"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_computed_apart(forward: Half, again: Half) -> None:
    closed, recomputes = program(forward, again)
    after = count(join_recomputed(closed, recomputes))
    for name in ("sin", "scan", "debug_callback"):
        assert after[name] == count(closed)[name], name


def test_joined_equations_stand_where_the_forward_stood() -> None:
    joined = join_recomputed(*program(*SHARED["a scan with residuals"]))
    scopes = {eqn.primitive.name: jc.scope_of(eqn) for eqn in joined.jaxpr.eqns}
    assert scopes["scan"] == "first"


def test_without_marks_nothing_is_joined() -> None:
    closed, recomputes = program(*SHARED["elementwise"])
    assert count(join_recomputed(closed, [False] * len(recomputes))) == count(closed)
