"""Memory on the chip that arrays take from one kernel to the next that reads them."""

import math

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.costs.compute import equation_bytes, equation_s
from autopar.compiler.jaxprs.reuse import NO_SPANS, Touch, spans_of
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import strategies
from autopar.hardware.machine import Machine, machines
from tests.compiler.jaxprs.test_fusion import ONE, X, traffic
from tests.compiler.planned_steps import LINE, mesh_costs

NEVER = math.inf
SUMS = traffic(lambda x: ((x + x) + (x + x)) + x, X)[0].eqns


def products(x, w):
    y = x @ w
    return (y @ w) @ y


def spans(fn, **compiler: float):
    """Of each equation that moves anything, the spans of readings and writings, in arrays of X."""
    _, found = traffic(fn, X, X, fuses_products=True, chip_bytes=1.0, **compiler)
    every = [each.spans for each in found if each.spans is not NO_SPANS]
    return [[[span / ONE for span in spans] for spans in (*each.reads, *each.writes)] for each in every]


def test_an_array_takes_its_bytes_and_those_that_kernels_move_until_it_is_read():
    # Products read what products make in bfloat16. The second reads y and w again at once; the third its result, and y.
    assert spans(products) == [[[NEVER], [NEVER], [0.5]], [[0.5], [1.0], [0.5]], [[0.5], [0.5], [NEVER]]]


def test_what_cores_make_parts_of_is_in_memory_and_on_the_chip_for_the_third_that_reads_it():
    def more(x, w):
        y = x @ w
        return y @ w, y @ x, y @ y.T

    y = spans(more, cores=2)
    assert y[0] == [[NEVER], [NEVER], [NEVER]]
    assert [reader[0] for reader in y[1:]] == [[NEVER], [NEVER], [0.5 + 0.5 - 0.5]]
    assert [reader[0] for reader in spans(more)[1:]] == [[0.5]] * 3


def test_loops_have_what_they_read_and_make_in_memory():
    def looped(x, w):
        y = x @ w
        z, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), y, None, 4)
        return z @ y

    first, *_, last = spans(looped)
    assert first[2] == [NEVER]
    assert all(span > 2.0**30 for (span,) in last[:2])


@pytest.mark.parametrize(
    ("touched", "reads", "written"),
    [
        pytest.param([("array", 1)], [1], 1, id="at once"),
        pytest.param([("other", 1), ("array", 2)], [6], 6, id="what is moved between"),
        pytest.param([("array", 1), ("other", 2), ("array", 3)], [1, 6], 6, id="from the last time on"),
        pytest.param([("array", 1), ("other", 1), ("array", 2)], [1, 1], 1, id="beside it, and not between"),
    ],
)
def test_a_span_is_what_is_moved_since_the_last_time(touched, reads, written):
    sizes = {"array": 1.0, "other": 5.0}
    touches = [Touch(0, "array", 1.0, 0, 0, written=True), Touch(1, "result", 0.0, 1, 0, written=True)]
    touches += [Touch(kernel, name, sizes[name], kernel, name != "array") for name, kernel in touched]
    found = spans_of(SUMS, [*touches, Touch(3, "result", 0.0, 3, 1)], (), leaving=(), parted=())
    assert found[0].writes == ((written,),)
    assert [span for _, each in sorted(found.items()) for span in each.reads[0]] == reads


def test_what_only_makes_results_runs_as_soon_as_its_operands_are_there():
    touches = [
        Touch(0, "gradient", 1.0, 0, 0, written=True),
        Touch(1, "other", 9.0, 1, 0, written=True),
        Touch(2, "other", 9.0, 2, 0),
        Touch(2, "more", 9.0, 2, 0, written=True),
        Touch(3, "gradient", 1.0, 3, 0),
        Touch(3, "parameter", 1.0, 3, 1),
        Touch(3, "new", 1.0, 3, 0, written=True),
    ]
    found = spans_of(SUMS, touches, (), leaving={"new"}, parted=())
    assert found[3].reads == ((1.0,), (NEVER,))
    assert found[0].writes == ((1.0,),)
    assert found[3].writes == ((NEVER,),)


def test_a_device_moves_what_its_chip_has_no_room_for_by_its_parts_of_arrays():
    # The second product reads y, of which half of the bytes are kept, and w, and its result is read at once.
    jaxpr, found = traffic(products, X, X, fuses_products=True, chip_bytes=1.0)
    eqn, moved = jaxpr.eqns[1], found[1]
    whole, split = strategies(eqn, *sharding_rules([eqn]), LINE)[:2]

    def both(strategy, room: float):
        costs = mesh_costs(LINE, chip_bytes=room * ONE, memory_bandwidth=1e3)
        nbytes = equation_bytes(eqn, strategy, costs, moved)
        return nbytes / ONE, equation_s(eqn, strategy, costs, moved) * costs.machine.memory_bandwidth / ONE

    assert both(whole, 0.0) == pytest.approx((2.0, 2.0))
    assert both(whole, 0.5) == pytest.approx((1.0, 1.0 + 1.0 / 22))
    assert both(whole, 1.0) == pytest.approx((0.0, 2.0 / 22))
    # Split by rows, as y and the result are, and w is not.
    assert both(split, 0.0)[0] == pytest.approx(1.0 + 1.0 / 8)
    assert both(split, 0.5 / 8)[0] == pytest.approx(1.0)


def test_only_machines_with_memory_on_their_chips_have_arrays_looked_for_there():
    assert [name for name in machines() if Machine.named(name).chip_bytes] == ["tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu7x"]
    assert all(each.spans is NO_SPANS for each in traffic(products, X, X, fuses_products=True)[1])
