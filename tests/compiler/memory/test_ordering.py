"""The order in which XLA runs ops: what only results need waits for collectives where it schedules for latency."""

from autopar.compiler.memory.liveness import Op
from autopar.compiler.memory.ordering import order_ops

# A backward pass: the gradient of a layer's weights, then that of what it read, which the layer before needs.
WEIGHTS = Op("apart", ("a", "x"), ("dw",))
BEFORE = Op("apart", ("a",), ("b",))
LAST = Op("apart", ("b",), ("end",))
LOSS = Op("apart", ("loss",), ("total",), collective="all-reduce")


def test_products_stand_where_they_are_written_unless_the_compiler_schedules_for_latency():
    found = order_ops([WEIGHTS, BEFORE, LAST, LOSS], for_latency=False)
    assert [op for op in found.ops if op != LOSS] == [WEIGHTS, BEFORE, LAST]
    assert found.deferred is None


def test_gradients_of_weights_wait_for_the_end_where_they_hide_a_collective():
    found = order_ops([WEIGHTS, BEFORE, LAST, LOSS], for_latency=True)
    assert found.ops.index(BEFORE) < found.ops.index(WEIGHTS)
    assert found.deferred is not None
    assert set(found.ops[found.deferred :]) >= {WEIGHTS, LAST}


def test_without_a_collective_there_is_nothing_to_hide():
    found = order_ops([WEIGHTS, BEFORE, LAST], for_latency=True)
    assert found.ops == [WEIGHTS, BEFORE, LAST]
    assert found.deferred is None
