"""Every equation of a microbatched step runs when its phase says: per microbatch, once, or wherever it is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.phases import Phase, Phases, is_replicated_scalar
from autopar.compiler.pipeline.prepare import prepare
from tests.small_steps import WIDTH, draw, gan_params, gan_step, mlp_batch, mlp_params, mlp_step, traced

UNPLACED, FORWARD, BACKWARD, STEP = Phase.UNPLACED, Phase.FORWARD, Phase.BACKWARD, Phase.STEP


def phases(step, *args, num_microbatches: int = 2) -> Phases:
    trace = traced(step, *args)
    prepared = prepare(
        trace,
        num_layers=2,
        num_microbatches=num_microbatches,
        loop_pieces=1,
        batch_statistics="exact",
        random="full_batch",
    )
    return prepared.phases


def step_of_many_phases(state, batch):
    """Every named scope holds equations of one kind; `expected` below says which."""
    with jax.named_scope("counter"):
        temperature = 1.0 / (1.0 + state["count"].astype(jnp.float32))
        key = jax.random.fold_in(state["key"], state["count"])
    with jax.named_scope("normalised weights"):
        first = state["first"] / jnp.sqrt(jnp.sum(state["first"] ** 2))

    def loss(params):
        first, second = params
        with jax.named_scope("cast"):
            low = first.astype(jnp.bfloat16).astype(jnp.float32)
        with jax.named_scope("mask"):
            x = batch[0] * (batch[0] > 0).astype(jnp.float32)
        with jax.named_scope("dropout"):
            dropout = jax.random.bernoulli(key, 0.5, batch[0].shape).astype(jnp.float32)
        with jax.named_scope("activation"):
            h = jnp.tanh(x @ low) * dropout
            out = jnp.tanh(h @ second) * temperature
        return jnp.mean((out - batch[1]) ** 2), out

    (value, out), grads = jax.value_and_grad(loss, has_aux=True)((first, state["second"]))
    with jax.named_scope("metric of examples"):
        error = jnp.sum(jnp.abs(out - batch[1]), axis=-1)
    with jax.named_scope("gradient of examples"):
        backwards = jnp.sum(jnp.sin(grads[0]))
    with jax.named_scope("update"):
        rate = 0.1 / jnp.sqrt(state["count"].astype(jnp.float32) + 1.0)
        new = {"first": state["first"] - rate * grads[0], "second": state["second"] - rate * grads[1]}
    return new, (value, error, backwards)


def state() -> dict[str, jax.Array]:
    key = jax.random.key(0)
    return {"first": draw(0, WIDTH, WIDTH), "second": draw(1, WIDTH, WIDTH), "count": jnp.int32(0), "key": key}


EXPECTED = {
    "counter": {frozenset({UNPLACED})},
    "normalised weights": {frozenset({STEP})},
    "cast": {frozenset({UNPLACED})},
    "mask": {frozenset({UNPLACED})},
    "dropout": {frozenset({UNPLACED})},
    "activation": {frozenset({FORWARD})},
    "gradient of examples": {frozenset({STEP})},
    "update": {frozenset({STEP})},
}


@pytest.fixture(scope="module", params=[1, 2], ids=["whole batch", "two microbatches"])
def many(request) -> Phases:
    return phases(step_of_many_phases, state(), mlp_batch(), num_microbatches=request.param)


@pytest.mark.parametrize(("scope", "kinds"), EXPECTED.items(), ids=EXPECTED)
def test_equations_run_when_they_must(many, scope, kinds):
    found = [
        kind
        for eqn, kind in zip(many.equations, many.of, strict=True)
        if scope in jc.scope_of(eqn) and jc.ad_phase(eqn) != "backward" and Phase.ACCUMULATE not in kind
    ]
    assert found and set(found) == kinds


def test_what_is_made_of_each_example_runs_with_its_microbatch_and_once_if_there_is_one(many):
    found = {k for eqn, k in zip(many.equations, many.of) if "metric of examples" in jc.scope_of(eqn)}
    assert found - {frozenset({Phase.ACCUMULATE})} == {frozenset({FORWARD if many.step.num_microbatches > 1 else STEP})}


def test_transposed_equations_run_backward_and_accumulations_on_the_border(many):
    for eqn, kind in zip(many.equations, many.of, strict=True):
        if eqn.primitive.name == "accumulate":
            assert kind == {Phase.ACCUMULATE}
        elif jc.ad_phase(eqn) == "backward":
            assert kind in ({BACKWARD}, {UNPLACED})


def test_every_equation_has_a_phase_and_nothing_of_a_microbatch_runs_once(many):
    micro = {v for v, spec in zip(many.step.jaxpr.jaxpr.invars, many.step.inputs) if spec.kind != "whole"}
    for eqn, kind in zip(many.equations, many.of, strict=True):
        assert kind
        if Phase.ACCUMULATE not in kind and any(v in micro for v in eqn.invars if isinstance(v, jc.Var)):
            assert Phase.STEP not in kind
            micro.update(eqn.outvars)


def test_random_draws_and_what_is_made_of_the_batch_are_kept_for_the_backward_pass(many):
    def costly(scope):
        eqns = [eqn for eqn in many.equations if scope in jc.scope_of(eqn)]
        return [v in many.costly for eqn in eqns for v in eqn.outvars]

    assert any(costly("dropout")) and any(costly("mask")) and not any(costly("cast"))


def test_counters_and_keys_have_no_home_and_weights_have():
    trace = traced(step_of_many_phases, state(), mlp_batch())
    found = phases(step_of_many_phases, state(), mlp_batch())
    replicated_scalars = {
        trace.inputs[spec.leaf].name
        for v, spec in zip(found.step.jaxpr.jaxpr.invars, found.step.inputs)
        if spec.leaf is not None and v in found.replicated_scalars
    }
    assert replicated_scalars == {"a.count", "a.key"}


@pytest.mark.parametrize(
    ("value", "small"),
    [
        (jnp.float32(0), True),
        (jax.random.key(0), True),
        (jax.random.PRNGKey(0), True),
        (jnp.zeros(16, jnp.uint32), True),
        (jnp.zeros(17, jnp.uint32), False),
        (jnp.zeros(1), False),
        (jnp.zeros(4), False),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else "",
)
def test_small_inputs_are_scalars_keys_and_counters(value, small):
    assert is_replicated_scalar(jax.typeof(value)) == small


def test_plain_step_is_one_round():
    found = phases(mlp_step, mlp_params(), mlp_batch())
    assert found.num_rounds == 1
    assert {r for r, k in zip(found.rounds, found.of) if STEP in k} == {1}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradient_through_what_an_earlier_gradient_updated_is_a_second_round(num_microbatches):
    found = phases(gan_step, gan_params(), mlp_batch(), num_microbatches=num_microbatches)
    assert found.num_rounds == 2
    per_kind = {kind: {r for r, k in zip(found.rounds, found.of) if kind in k} for kind in (FORWARD, BACKWARD, STEP)}
    assert per_kind == {FORWARD: {0, 1}, BACKWARD: {0, 1}, STEP: {1, 2}}


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("keys", ["one", "one for each example"])
def test_a_draw_with_what_the_model_computed_is_an_operation_of_the_model(num_stages, keys):
    def step(params, batch):
        x, y = batch

        def loss(params):
            key = jax.random.key(0)
            shape = jax.nn.softplus(jnp.tanh(x @ params["first"]) @ params["second"])
            if keys == "one":
                drawn = jax.random.gamma(key, shape)
            else:
                drawn = jax.vmap(jax.random.gamma)(jax.random.split(key, len(x)), shape)
            return jnp.mean((drawn - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"first": draw(0, WIDTH, WIDTH), "second": draw(1, WIDTH, WIDTH)}
    method = autopar.PipelineParallel(num_stages=num_stages, num_microbatches=2)
    found = autopar.parallelize(step, method=method)(params, mlp_batch())
    wanted = jax.jit(step)(params, mlp_batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)
