"""One program that loops over the microbatches: equal to the step, with the order of things that saves memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import autopar
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.lowering.microbatch_loop import loop_over, microbatch_loop
from autopar.compiler.microbatch.split import MicrobatchedStep, evaluate_microbatched
from tests.compiler.microbatch.microbatched import BATCH, PARAMS, WIDTH, X, assert_equal, hidden, sgd, split
from tests.random_programs import make_arguments, make_step, models
from tests.small_steps import traced
from tests.zoo import HEAVY, ZOO

pytestmark = pytest.mark.usefixtures("float64")

QUICK = (
    *("mlp", "sum_loss", "arange_loss", "remat_whole", "several_arguments", "moe", "convnet"),
    *("dropout_legacy_key", "vae", "control_flow", "scan_layers", "nested_jit"),
)
KEY = jax.random.PRNGKey(1)
EXACT = [case for case in ZOO.values() if case.batch_statistics == "exact"]


def flat(tree: Any) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def run(closed: jc.ClosedJaxpr, args: Any) -> list[Any]:
    return jax.jit(jc.jaxpr_as_fun(closed))(*flat(args))


def evaluated(step: MicrobatchedStep, leaves: Any) -> list[Any]:
    return jax.jit(lambda *leaves: evaluate_microbatched(step, leaves))(*leaves)


def looped(step: Any, *args: Any, microbatches: int = 4, **options: Any) -> jc.ClosedJaxpr:
    options = {"batch_statistics": "exact", "random": "full_batch", **options}
    return microbatch_loop(traced(step, *args), microbatches, **options)


def assert_loop_equals_step(step: Any, *args: Any, microbatches: int = 4, tolerance: float = 1e-9) -> None:
    want = jax.jit(step)(*args)
    got = run(looped(step, *args, microbatches=microbatches), args)
    assert_equal(jax.tree.unflatten(jax.tree.structure(want), got), want, tolerance=tolerance)


@functools.cache
def zoo_trace(name: str) -> Any:
    """The trace of a case, its arguments, and the results of the plain step."""
    case = ZOO[name]
    step, *args = case.make()
    trace = traced(functools.partial(step, **case.kwargs), *args, batch=case.batch_argnums)
    return trace, args, run(trace.jaxpr, args)


@pytest.mark.parametrize(
    ("case", "microbatches"),
    [
        pytest.param(c, m, id=f"{c}-{m}", marks=[pytest.mark.slow] * (c.name not in QUICK))
        for c in EXACT
        # The heavy ones run as loops in `tests/test_end_to_end.py`.
        if c.name not in HEAVY - {"moe", "convnet"}
        for m in ([2] if c.name in HEAVY else [2, 4])
    ],
)
def test_loop_over_microbatches_equals_the_plain_step(case, microbatches):
    trace, args, want = zoo_trace(case.name)
    got = run(microbatch_loop(trace, microbatches, "exact", "full_batch"), args)
    assert_equal(got, want, tolerance=case.tolerance)


def test_one_microbatch_is_the_step_as_it_is_traced():
    trace = traced(sgd(lambda p, b: jnp.mean(hidden(p, b["x"]))), PARAMS, X)
    assert microbatch_loop(trace, 1, "exact", "full_batch") is trace.jaxpr


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(model=models)
def test_loop_over_microbatches_equals_random_steps(model):
    assert_loop_equals_step(make_step(model), *make_arguments(), microbatches=2)


def batch_normalised(p: Any, batch: Any) -> Any:
    x = hidden(p, batch["x"])
    return jnp.mean(((x - x.mean(0)) / (1 + x.std(0)) * p["b"]) ** 3)


def noisy(p: Any, batch: Any) -> Any:
    return jnp.mean(hidden(p, batch["x"]) * jax.random.normal(jax.random.key(5), batch["x"].shape))


def test_loop_over_microbatches_takes_the_statistics_of_the_whole_batch_in_loops_of_their_own():
    assert_loop_equals_step(sgd(batch_normalised), PARAMS, X, microbatches=2)


@pytest.mark.parametrize(
    ("loss", "options"),
    [(batch_normalised, {"batch_statistics": "per_microbatch"}), (noisy, {"random": "per_microbatch"})],
)
def test_what_is_taken_per_microbatch_is_that_of_each_microbatch(loss, options):
    step, leaves = split(sgd(loss), PARAMS, X, **options)
    assert_equal(run(looped(sgd(loss), PARAMS, X, **options), leaves), evaluated(step, leaves))


def test_zoo_model_with_batch_statistics_equals_its_microbatches():
    trace, args, _ = zoo_trace("convnet_batch_norm")
    method = autopar.DataParallel(num_microbatches=2, batch_statistics="per_microbatch")
    step = autopar.parallelize(ZOO["convnet_batch_norm"].make()[0], method=method, devices=jax.devices()[:1])
    loop = microbatch_loop(trace, 2, "per_microbatch", "full_batch")
    assert_equal(run(loop, args), jax.tree.leaves(step(*args)))


# --- how results of microbatches become one ----------------------------------------------------------------------


RESULTS = {
    "sum": lambda h, b: jnp.sum(h),
    "mean": lambda h, b: jnp.mean(h),
    "max": lambda h, b: jnp.max(h, axis=0),
    "min": lambda h, b: jnp.min(h),
    "largest integer": lambda h, b: jnp.max(b["label"]),
    "smallest integer": lambda h, b: jnp.min(b["tokens"] - 20),
    "all": lambda h, b: jnp.all(h < 0.99, axis=0),
    "any": lambda h, b: jnp.any(h > 0.5, axis=0),
    "count": lambda h, b: jnp.sum(h > 0),
    "rows": lambda h, b: h.sum(axis=1),
    "rows along the second axis": lambda h, b: 2 * h.T,
    "rows along the last axis": lambda h, b: jnp.einsum("bi,bj->ijb", h, h),
    "numbers of the rows": lambda h, b: jnp.arange(len(h)) * b["label"],
    "same rows": lambda h, b: jnp.ones((len(h), 3)),
    "the batch": lambda h, b: b,
    "keys of the rows": lambda h, b: jax.vmap(lambda n: jax.random.fold_in(jax.random.key(1), n))(b["label"]),
    "a constant": lambda h, b: 3,
    "a parameter": lambda h, b: PARAMS["a"] + 1,
}


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_result_of_all_microbatches_is_that_of_the_batch(result, microbatches):
    def step(params, batch):
        return result(hidden(params, batch["x"]), batch)

    assert_loop_equals_step(step, PARAMS, X, microbatches=microbatches)


def test_rows_of_a_microbatch_are_contiguous():
    loop = looped(lambda p, batch: jnp.sum(p["b"] * batch), PARAMS, np.arange(8.0)[:, None], microbatches=2)
    (eqn,) = loops(loop)
    reads = eqn.params["jaxpr"]
    seen = jc.jaxpr_as_fun(jc.with_outputs(reads, [0]))
    first, second = (seen(PARAMS["b"], np.float64(0), rows)[0] for rows in np.arange(8.0).reshape(2, 4, 1))
    assert first == pytest.approx(PARAMS["b"].sum() * 6)
    assert second == pytest.approx(PARAMS["b"].sum() * 22)


# --- what runs when ----------------------------------------------------------------------------------------------


def loops(closed: jc.ClosedJaxpr) -> list[jc.JaxprEqn]:
    """The loops over microbatches, which are those at the top here."""
    return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]


def body_of(closed: jc.ClosedJaxpr) -> list[str]:
    (eqn,) = loops(closed)
    return [e.primitive.name for e in jc.open_jaxpr(eqn.params["jaxpr"])[0].eqns]


def test_loop_carries_one_total_for_each_gradient_and_the_loss():
    (eqn,) = loops(looped(sgd(lambda p, b: jnp.mean(hidden(p, b["x"]) @ p["c"])), PARAMS, X))
    loop = jp.scan_of(eqn)
    assert (loop.num_carry, loop.length) == (4, 4)
    assert len(eqn.outvars) == loop.num_carry
    assert len(eqn.invars) - loop.num_carry - loop.num_consts == 1


def test_forward_and_backward_are_in_the_loop_and_the_update_is_behind_it():
    # The parameters that the loss does not read have zeros for a gradient.
    closed = looped(sgd(lambda p, b: jnp.mean(hidden(p, b["x"]))), PARAMS, X)
    (eqn,) = loops(closed)
    phases = {jc.ad_phase(e) for e in jc.open_jaxpr(eqn.params["jaxpr"])[0].eqns}
    assert phases == {"forward", "backward"}
    behind = closed.jaxpr.eqns[closed.jaxpr.eqns.index(eqn) + 1 :]
    assert {e.primitive.name for e in behind} == {"mul", "sub", "broadcast_in_dim"}


SHARED = {
    "a parameter cast to fewer bits": (
        lambda p, b: b["x"].astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16),
        {"convert_element_type": 2},  # of the examples, and of the product
    ),
    "a function of a parameter": (lambda p, b: b["x"] @ jnp.sin(p["a"]), {"sin": 0}),
    "a product of parameters": (lambda p, b: b["x"] @ (p["a"] @ p["c"]), {"dot_general": 1}),
    "a parameter that is moved": (lambda p, b: b["x"] @ p["a"].T, {"transpose": 1}),
    "a slice of a parameter": (lambda p, b: b["x"] @ p["table"][2:8], {"slice": 1}),
    "a slice of a function of a parameter": (lambda p, b: b["x"] @ jnp.sin(p["table"])[2:8], {"slice": 0}),
    "a mask made from a position": (
        lambda p, b: b["series"] * (jnp.arange(5)[:, None] > jnp.arange(WIDTH)),
        {"iota": 2, "gt": 1},
    ),
    "bits of the full batch": (
        lambda p, b: b["x"] * jax.random.normal(jax.random.fold_in(KEY, 1), b["x"].shape),
        {"random_bits": 1, "random_fold_in": 0},
    ),
}


@pytest.mark.parametrize(("value", "inside"), SHARED.values(), ids=SHARED)
def test_what_is_shared_is_made_once_unless_the_loop_can_make_it_cheaply_and_save_memory(value, inside):
    names = body_of(looped(lambda p, b: jnp.mean(value(p, b) * p["b"]), PARAMS, X))
    assert {name: names.count(name) for name in inside} == inside


def two_updates(params: Any, batch: Any) -> Any:
    """The second gradient is taken at parameters that the first one made; what both have in common is frozen."""

    def loss(p, frozen):
        return jnp.mean((jnp.tanh(batch["x"] @ frozen) @ p) ** 2)

    def judged(p, frozen):
        return jnp.mean(jnp.cos(jnp.sin(batch["x"] @ PARAMS["c"]) @ p) @ frozen)

    first, grad = jax.value_and_grad(loss)(params["a"], params["c"])
    new = params["a"] - 0.1 * grad
    second, grad = jax.value_and_grad(judged)(new, params["c"])
    return new - 0.1 * grad, (first, second)


def test_second_gradient_is_a_second_loop_that_keeps_nothing_of_the_first():
    first, second = loops(looped(two_updates, PARAMS, X))
    assert [len(eqn.outvars) - jp.scan_of(eqn).num_carry for eqn in (first, second)] == [0, 0]
    scopes = [[e.primitive.name for e in jc.open_jaxpr(eqn.params["jaxpr"])[0].eqns] for eqn in (first, second)]
    assert ["cos" in names for names in scopes] == [False, True], "what the second loop reads is made there"
    assert_loop_equals_step(two_updates, PARAMS, X)


def shared_features(params: Any, batch: Any) -> Any:
    features = jnp.tanh(batch["x"] @ PARAMS["c"])

    def loss(p):
        return jnp.mean(jnp.sin(features @ p)), features @ p

    (first, logits), grad = jax.value_and_grad(loss, has_aux=True)(params["a"])
    second, again = jax.grad(loss, has_aux=True)(params["a"] - 0.1 * grad)
    accuracy = jnp.mean(jnp.argmax(logits, axis=1) == batch["label"])
    return params["a"] - 0.1 * second, (first, jnp.mean(jnp.exp(logits)), accuracy, again)


def test_values_of_microbatches_that_two_loops_read_are_kept_between_them():
    first, second = loops(looped(shared_features, PARAMS, X))
    kept = [v.aval.shape for v in first.outvars[jp.scan_of(first).num_carry :]]
    assert kept == [(4, BATCH // 4, WIDTH)], "the features, and nothing for the metrics of the first gradient"
    assert [v.aval.shape for v in second.outvars[jp.scan_of(second).num_carry :]] == kept
    assert_loop_equals_step(shared_features, PARAMS, X)


def test_step_without_examples_in_it_has_no_loop():
    def step(params, batch):
        return params["a"] + 1, batch["x"].shape[0]

    assert not loops(looped(step, PARAMS, X))
    assert_loop_equals_step(step, PARAMS, X)


# --- callbacks ---------------------------------------------------------------------------------------------------


def shown_by(make_step: Any, microbatches: int) -> list[Any]:
    found: list[Any] = []
    show = functools.partial(jax.debug.callback, lambda *v: found.append([np.shape(a) for a in v]), ordered=True)
    jax.block_until_ready(run(looped(make_step(show), PARAMS, X, microbatches=microbatches), (PARAMS, X)))
    jax.effects_barrier()
    return found


def test_callback_on_examples_runs_for_each_microbatch_and_one_on_results_once():
    def make_step(show):
        def loss(p, batch):
            h = hidden(p, batch["x"])
            show(h)
            return jnp.mean(h)

        def step(p, batch):
            new, value = sgd(loss)(p, batch)
            show(value, p["b"])
            return new

        return step

    assert shown_by(make_step, 2) == [[(4, WIDTH)], [(4, WIDTH)], [(), (WIDTH,)]]


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(autopar.InvalidArgument, match=r"8 rows.*3 microbatches.*divides 8"):
        looped(sgd(lambda p, b: jnp.mean(hidden(p, b["x"]))), PARAMS, X, microbatches=3)


def test_loop_over_takes_a_split_step_of_any_inputs():
    step, leaves = split(sgd(lambda p, b: jnp.mean(hidden(p, b["x"]))), PARAMS, X, microbatches=2)
    assert_equal(run(loop_over(step, leaves), leaves), evaluated(step, leaves))
