"""Cutting into layers: equal to trying every cut, even where bytes are equal, and quick on large programs."""

import doctest
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.compiler.pipeline import layers
from autopar.compiler.pipeline.layers import cut_layers, liveness_bytes
from autopar.errors import InvalidArgument


def best_by_trial(flops, crossing_bytes, num_layers, tolerance, allowed):
    """The promise, word for word: try every cut, relax as documented."""
    possible = [k for k in range(1, len(flops)) if allowed[k]]
    candidates = []
    for cuts in itertools.combinations(possible, num_layers - 1):
        sums = [sum(flops[i:j]) for i, j in itertools.pairwise((0, *cuts, len(flops)))]
        crossing = sum(crossing_bytes[k] for k in cuts)
        candidates.append((crossing, max(sums), sum(f * f for f in sums), cuts))
    while True:
        limit = (1 + tolerance) * sum(flops) / num_layers * (1 + 1e-12)
        if feasible := [candidate for candidate in candidates if candidate[1] <= limit]:
            return min(feasible)[-1]
        tolerance = 2 * max(tolerance, 0.025)


@st.composite
def problems(draw: st.DrawFn):
    n = draw(st.integers(1, 9))
    flops = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 50]), min_size=n, max_size=n))
    crossing = draw(st.lists(st.integers(0, draw(st.sampled_from([0, 1, 2, 20]))), min_size=n, max_size=n))
    allowed = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=n, max_size=n))
    num_layers = draw(st.integers(1, 1 + sum(allowed[1:])))
    tolerance = draw(st.sampled_from([0, 0.1, 0.25, 0.5, 1.0, 4.0]))
    return flops, crossing, num_layers, tolerance, allowed


@settings(max_examples=500, deadline=None)
@given(problems())
def test_cuts_are_those_found_by_trying_all(problem):
    flops, crossing, num_layers, tolerance, allowed = problem
    expected = best_by_trial(flops, crossing, num_layers, tolerance, allowed)
    assert cut_layers(flops, crossing, num_layers, tolerance=tolerance, allowed=allowed) == expected


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([1.37e12, 3.1e15, 1e-3]))
def test_cuts_do_not_depend_on_the_unit_of_the_flops(problem, unit):
    flops, crossing, num_layers, tolerance, allowed = problem
    expected = cut_layers(flops, crossing, num_layers, tolerance=tolerance, allowed=allowed)
    scaled = [unit * f for f in flops]
    assert cut_layers(scaled, crossing, num_layers, tolerance=tolerance, allowed=allowed) == expected


@pytest.mark.parametrize(
    ("flops", "crossing", "num_layers", "cuts"),
    [
        ([1] * 12, [5] * 12, 4, (3, 6, 9)),  # equal bytes everywhere: even layers
        ([1] * 8, [5] * 8, 3, (2, 5)),  # (2, 5), (3, 5) and (3, 6) are equally even: the first
        (
            [1] * 12,
            [5, 5, 5, 5, 1, 5, 5, 5, 1, 5, 5, 5],
            3,
            (4, 8),
        ),  # residual streams are narrow between layers
        ([1] * 10, [9] * 5 + [9, 1, 9, 9, 9], 2, (6,)),  # 6 : 4 is within the tolerance of 5 : 5
        ([1] * 10, [9] * 5 + [9, 9, 1, 9, 9], 2, (5,)),  # 7 : 3 is not
        ([0, 0, 100, 0, 0], [0, 3, 2, 4, 1], 3, (2, 4)),  # the layer with all FLOPs is above any tolerance
        ([], [], 1, ()),
        ([3], [0], 1, ()),
    ],
)
def test_known_programs_are_cut_where_expected(flops, crossing, num_layers, cuts):
    assert cut_layers(flops, crossing, num_layers) == cuts


@pytest.mark.parametrize(
    ("num_equations", "num_layers", "allowed", "pieces"),
    [(3, 4, None, 3), (3, 3, [True, False, True], 2), (3, 0, None, 3), (0, 2, None, 1)],
)
def test_more_layers_than_pieces_is_refused_with_both_numbers(num_equations, num_layers, allowed, pieces):
    with pytest.raises(InvalidArgument, match=f"{num_layers} layers were asked for.*1 to {pieces}"):
        cut_layers([1] * num_equations, [1] * num_equations, num_layers, allowed=allowed)


@pytest.mark.parametrize("skew", [1, 1000])
@pytest.mark.parametrize("bytes_kinds", [1, 10**9])
def test_five_thousand_equations_are_cut_into_even_layers(skew, bytes_kinds):
    random = np.random.default_rng(0)
    flops = random.integers(1, 1000, 5000) * np.where(random.random(5000) < 0.05, skew, 1)
    crossing = random.integers(0, bytes_kinds, 5000)
    cuts = cut_layers(flops.tolist(), crossing.tolist(), 32)
    sums = np.add.reduceat(flops, [0, *cuts])
    assert len(cuts) == 31
    assert sums.max() <= 1.25 * flops.sum() / 32


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 5), st.integers(-1, 5)), max_size=8),
)
def test_value_crosses_each_cut_between_its_producer_and_its_last_consumer(values):
    expected = tuple(sum(size for size, producer, last in values if producer < k <= last) for k in range(6))
    assert liveness_bytes(values, 6) == expected


def test_examples_of_the_docstrings_hold():
    assert doctest.testmod(layers).failed == 0


def test_a_chain_of_which_every_value_is_read_twice_is_walked_once():
    def step(state, batch):
        weights, rate = state
        for _ in range(60):  # as a solver's step sizes: 2^60 ways from the last to the first
            rate = jnp.sin(rate) + rate

        def loss(weights):
            return jnp.mean((jnp.tanh(batch @ weights[0] * rate) @ weights[1] * rate) ** 2)

        grads = jax.grad(loss)(weights)
        return ([w - g for w, g in zip(weights, grads, strict=True)], rate), rate

    weights = [jnp.ones((8, 8))] * 2
    parallel = autopar.parallelize(step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=2))
    planned = parallel.trace((weights, jnp.float32(0.1)), jnp.ones((16, 8))).plan()
    assert len(planned.plan.meshes) == 2
