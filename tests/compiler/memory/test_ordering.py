"""The order in which XLA runs ops: what only results need waits for collectives where it schedules for latency."""

from typing import Any

import pytest

from autopar.compiler.memory import ordering
from autopar.compiler.memory.liveness import Op
from autopar.compiler.memory.ordering import OpOrder

MIB = 2**20


def order_ops(*args: Any, combined_bytes: float = 30 * MIB, **how: Any) -> OpOrder:
    return ordering.order_ops(*args, combined_bytes=combined_bytes, **how)


def listed(ops: list[Op], *args: Any, **how: Any) -> list[Op]:
    """The ops in their order, as they are listed: reading nothing for the sake of collectives that they hide."""
    return [ops[number] for number in order_ops(ops, *args, **how).order]


# A backward pass: the gradient of a layer's weights, then that of what it read, which the layer before needs.
WEIGHTS = Op("apart", ("a", "x"), ("dw",))
BEFORE = Op("apart", ("a",), ("b",))
LAST = Op("apart", ("b",), ("end",))
LOSS = Op("apart", ("loss",), ("total",), collective="all-reduce")


def test_products_stand_where_they_are_written_unless_the_compiler_schedules_for_latency():
    found = order_ops([WEIGHTS, BEFORE, LAST, LOSS], {"total": 0}, for_latency=False, scatters_sums=True)
    assert [op for op in found.ops if op != LOSS] == [WEIGHTS, BEFORE, LAST]
    assert found.deferred is None


def test_where_the_compiler_schedules_for_memory_products_that_make_more_than_they_read_wait_for_the_end():
    nbytes = {"a": 2, "x": 1, "dw": 4, "b": 2, "sw": 4, "end": 1}
    total = Op("apart", ("dw",), ("sw",), collective="all-reduce", steps="sum")
    greedy = {"for_latency": False, "scatters_sums": True}
    assert order_ops([WEIGHTS, BEFORE, LAST, total], nbytes, **greedy).ops == [BEFORE, LAST, WEIGHTS, total]
    small = nbytes | {"dw": 3}
    assert order_ops([WEIGHTS, BEFORE, LAST, total], small, **greedy).ops[0] == WEIGHTS
    found = order_ops([WEIGHTS, BEFORE, LAST, total], nbytes, **greedy, for_memory=False)
    assert found.ops[0] == WEIGHTS


def test_gradients_that_wait_are_made_summed_and_used_one_sum_after_the_other():
    mib = 2**20
    makes = [Op("apart", (f"a{n}",), (f"d{n}",)) for n in range(2)]
    sums = [Op("apart", (f"d{n}",), (f"s{n}",), collective="all-reduce", steps="sum") for n in range(2)]
    updates = [Op("fused", (f"s{n}", f"w{n}"), (f"new{n}",)) for n in range(2)]
    nbytes = {f"{kind}{n}": 20 * mib for kind in ("d", "s", "w", "new") for n in range(2)} | {"a0": mib, "a1": mib}
    found = order_ops([*makes, *sums, BEFORE, LAST, *updates], nbytes, for_latency=False, scatters_sums=True)
    assert found.ops == [BEFORE, LAST, makes[0], sums[0], updates[0], makes[1], sums[1], updates[1]]


def test_gradients_without_a_sum_that_wait_are_made_and_used_one_after_the_other():
    makes = [Op("apart", (f"a{n}",), (f"d{n}",)) for n in range(2)]
    updates = [Op("fused", (f"d{n}", f"w{n}"), (f"new{n}",)) for n in range(2)]
    nbytes = {f"{kind}{n}": 2 for kind in ("d", "w", "new") for n in range(2)} | {"a0": 1, "a1": 1}
    found = order_ops([*makes, BEFORE, LAST, *updates], nbytes, for_latency=False, scatters_sums=True)
    assert found.ops == [BEFORE, LAST, makes[0], updates[0], makes[1], updates[1]]


def test_sums_over_rows_that_only_results_need_hide_collectives_too():
    gain = Op("reduction", ("a",), ("dg",))
    found = order_ops([gain, BEFORE, LAST, LOSS], {"total": 0}, for_latency=True, scatters_sums=True)
    assert found.ops.index(BEFORE) < found.ops.index(gain)
    scalar = gain._replace(results=())
    found = order_ops([scalar, BEFORE, LAST, LOSS], {"total": 0}, for_latency=True, scatters_sums=True)
    assert found.ops.index(scalar) < found.ops.index(BEFORE)


def test_sums_do_not_wait_that_are_one_kernel_with_others_of_equal_size():
    gain, mean = Op("reduction", ("a",), ("dg",)), Op("reduction", ("a",), ("m",))
    last = LAST._replace(reads=("b", "m"))
    nbytes = {"total": 0, "a": 8, "dg": 1, "m": 1}
    found = order_ops([gain, mean, BEFORE, last, LOSS], nbytes, for_latency=True, scatters_sums=True)
    assert found.ops.index(gain) < found.ops.index(BEFORE)
    found = order_ops([gain, mean, BEFORE, last, LOSS], nbytes | {"m": 2}, for_latency=True, scatters_sums=True)
    assert found.ops.index(BEFORE) < found.ops.index(gain)


@pytest.mark.parametrize("slices", [True, False])
def test_slices_of_arrays_in_memory_wait_for_what_reads_them(slices: bool):
    part = Op("fused", ("a",), ("part",), slices=slices)
    weights = WEIGHTS._replace(reads=("part", "x"))
    found = order_ops([part, weights, BEFORE, LAST, LOSS], {"total": 0}, for_latency=True, scatters_sums=True)
    assert found.ops.index(BEFORE) < found.ops.index(weights)
    assert (found.ops.index(BEFORE) < found.ops.index(part)) == slices


@pytest.mark.parametrize(
    ("how", "place"),
    [
        pytest.param({}, 1, id="behind the last other reader where the compiler schedules for memory"),
        pytest.param({"behind_barrier": True}, 2, id="unless a barrier holds the array"),
        pytest.param({"slices": False}, 2, id="and nothing else does so"),
    ],
)
def test_slices_that_let_their_array_go_come_early(how: dict[str, bool], place: int):
    part = Op("fused", ("a",), ("part",), slices=True)._replace(**how)
    ops = [BEFORE, LAST, part, Op("apart", ("part",), ("c",))]
    nbytes = dict.fromkeys(("a", "b", "end", "part", "c"), 1.0)
    assert order_ops(ops, nbytes, for_latency=False, scatters_sums=True).ops.index(part) == place
    as_written = order_ops(ops, nbytes, for_latency=False, for_memory=False, scatters_sums=True)
    assert as_written.ops.index(part) == 2


def test_gradients_of_weights_wait_for_the_end_where_they_hide_a_collective():
    found = order_ops([WEIGHTS, BEFORE, LAST, LOSS], {"total": 0}, for_latency=True, scatters_sums=True)
    assert found.ops.index(BEFORE) < found.ops.index(WEIGHTS)
    assert found.deferred is not None
    assert set(found.ops[found.deferred :]) >= {WEIGHTS, LAST}


def test_without_a_collective_there_is_nothing_to_hide():
    found = order_ops([WEIGHTS, BEFORE, LAST], {}, for_latency=True, scatters_sums=True)
    assert found.ops == [WEIGHTS, BEFORE, LAST]
    assert found.deferred is None


def test_products_wait_for_no_more_than_the_next_collective_that_they_can_hide():
    gather = Op("apart", ("b",), ("whole b",), collective="all-gather", seconds=1.5)
    before = Op("apart", ("whole b",), ("c",))
    more_weights, late_weights = (
        Op("apart", ("whole b", name), (f"d{name}",), seconds=1.0) for name in ("more", "late")
    )
    weights = [Op("apart", ("a", name), (f"d{name}",), seconds=1.0) for name in ("x", "y", "z")]
    loss = LOSS._replace(seconds=1.0)
    written = [BEFORE, *weights, gather, more_weights, before, Op("apart", ("c",), ("end",), seconds=1.0), loss]
    written.append(late_weights)
    first = Op("apart", ("start",), ("a",), collective="all-reduce", seconds=1.5)
    place = listed([first, *written], {"total": 0}, for_latency=True, scatters_sums=True).index
    # The last one hides the loss; two of the first three hide the gathering.
    assert place(weights[0]) < place(gather) < place(weights[1]) < place(weights[2]) < place(before)
    found = order_ops([first, *written], {"total": 0}, for_latency=True, scatters_sums=True)
    assert found.deferred == place(late_weights)
    # All of them do if no collective stands before it that it delays.
    place = listed(written, {"total": 0}, for_latency=True, scatters_sums=True).index
    assert place(gather) < min(map(place, weights))


def test_updates_stand_behind_their_gradients_and_hide_collectives_with_them():
    first = Op("apart", ("start",), ("a",), collective="all-reduce", seconds=1.0)
    gather = Op("apart", ("b",), ("whole b",), collective="all-gather", seconds=1.0)
    weights = [Op("apart", ("a", name), (f"d{name}",), seconds=0.25) for name in "xyz"]
    updates = [Op("fused", (f"d{name}", f"w{name}"), (f"new{name}",)) for name in "xyz"]
    written = [first, BEFORE, *weights, gather, Op("apart", ("whole b",), ("end",), seconds=1.0), *updates]
    nbytes = {f"{kind}{name}": 1.0 for kind in ("d", "new") for name in "xyz"}
    replaced = [(f"new{name}", f"w{name}") for name in "xyz"]
    found = listed(written, nbytes, replaced, for_latency=True, scatters_sums=True)
    behind = found[found.index(gather) + 1 :]
    assert behind[:6] == [op for pair in zip(weights, updates, strict=True) for op in pair]
    # The state is read and written, and the gradient read: 3 bytes in 0.3 s, beside 0.25 s. Two take a second.
    slow = listed(written, nbytes, replaced, for_latency=True, scatters_sums=True, memory_bandwidth=10.0)
    place = slow.index
    assert place(weights[0]) < place(updates[0]) < place(gather) < place(weights[1]) < place(weights[2])


@pytest.mark.parametrize(
    ("num_gradients", "num_sums", "first"),
    [
        pytest.param(3, 1, True, id="more gradients than products of the region"),
        pytest.param(2, 1, False, id="as many"),
        pytest.param(3, 2, False, id="two sums: gradients of one hide the other"),
    ],
)
def test_gradients_whose_sum_nothing_hides_stand_before_what_is_computed_again_last(num_gradients, num_sums, first):
    weights = [Op("apart", ("a", f"x{n}"), (f"d{n}",)) for n in range(num_gradients)]
    sums = [
        Op("apart", (f"d{n}",), (f"s{n}",), collective="all-reduce", steps=f"sum {n % num_sums}")
        for n in range(num_gradients)
    ]
    chain = [("b", "again"), ("again", "back"), ("back", "end")]  # the last product leads to results only, too
    region = [Op("barrier", ("b",), ()), *(Op("apart", (read,), (made,)) for read, made in chain)]
    nbytes = {f"{kind}{n}": 1.0 for kind in "ds" for n in range(num_gradients)}
    found = order_ops([BEFORE, *weights, *region, *sums], nbytes, for_latency=True, scatters_sums=True)
    place = found.ops.index
    assert {place(BEFORE) < place(each) < place(region[0]) for each in weights} == {first}
    assert {place(each) > place(region[-2]) for each in weights} == {not first}


@pytest.mark.parametrize(
    ("kind", "steps", "reads", "behind"),
    [
        pytest.param("reduction", "other", "d", True, id="a reduction for another sum"),
        pytest.param("apart", "", "d", True, id="a product for none"),
        pytest.param("reduction", "sum", "d", False, id="not what is summed with the products"),
        pytest.param("reduction", "other", "b", False, id="other products hide the sum that needs not all of these"),
    ],
)
def test_what_waits_stands_behind_the_sum_of_all_products(kind: Any, steps: str, reads: str, behind: bool):
    bias, weights = Op(kind, ("a",), ("db",)), WEIGHTS._replace(reads=(reads, "x"))
    total = Op("apart", ("dw",), ("sw",), collective="all-reduce", steps="sum")
    more = [Op("apart", ("db",), ("sb",), collective="all-reduce", steps=steps)] if steps else []
    nbytes = dict.fromkeys(("a", "b", "d", "x", "dw", "sw", "db", "sb"), 1.0)
    written = [BEFORE, bias, LAST, Op("apart", ("b",), ("d",)), Op("apart", ("d",), ("end of all",)), weights]
    place = order_ops([*written, total, *more], nbytes, for_latency=True, scatters_sums=True).ops.index
    assert (place(bias) > place(total)) == behind


def test_products_hide_no_sum_that_they_lead_to_but_the_collective_before_it():
    first = Op("apart", ("start",), ("a",), collective="all-reduce", seconds=1.0)
    other, weights = (Op("apart", ("a", name), (f"d{name}",), seconds=1.0) for name in ("y", "x"))
    gather = Op("apart", ("b",), ("whole b",), collective="all-gather", seconds=1.0)
    total = Op("apart", ("dx",), ("sx",), collective="reduce-scatter", seconds=2.0)
    nbytes = dict.fromkeys(("a", "b", "whole b", "x", "y", "dx", "dy", "sx", "end"), 1.0)
    written = [first, other, weights, BEFORE, gather, LAST._replace(reads=("whole b",)), total]
    place = listed(written, nbytes, for_latency=True, scatters_sums=True).index
    assert place(gather) < place(weights) < place(total) < place(other)


def test_what_a_collective_sends_is_kept_until_the_last_product_that_hides_it_is_done():
    first, gather = (
        Op("apart", (read,), (made,), collective="all-gather", seconds=1.0) for read, made in (("s", "a"), ("b", "c"))
    )
    weights = Op("apart", ("a", "x"), ("dx",), seconds=1.0)
    total = Op("apart", ("dx",), ("sx",), collective="reduce-scatter", seconds=2.0)
    last, other = Op("apart", ("c",), ("end",)), Op("apart", ("a", "y"), ("dy",), seconds=1.0)
    nbytes = dict.fromkeys(("a", "b", "c", "x", "y", "dx", "dy", "sx", "end"), 1.0)
    found = order_ops(
        [first, other, weights, BEFORE, gather, last, total], nbytes, for_latency=True, scatters_sums=True
    )
    reads = {op.results[0]: op.reads for op in found.ops}
    assert reads["dx"] == ("b", "a", "x")  # hides the gathering of "b"
    assert "dx" in found.ops[-1].reads


def test_a_reduction_of_columns_is_no_kernel_with_one_of_rows():
    gain, mean = Op("reduction", ("a",), ("dg",)), Op("reduction", ("a",), ("m",), reduces_rows=True)
    nbytes = {"total": 0, "a": 8, "dg": 1, "m": 1}
    last = LAST._replace(reads=("b", "m"))
    found = order_ops([gain, mean, BEFORE, last, LOSS], nbytes, for_latency=True, scatters_sums=True)
    assert found.ops.index(BEFORE) < found.ops.index(gain)


@pytest.mark.parametrize("mib, joined", [(15, True), (16, False)])
def test_sums_of_gradients_are_one_collective_up_to_30_mib(mib, joined):
    weights = [Op("apart", (name,), (f"d{name}",)) for name in ("x", "y")]
    sums = [Op("apart", (f"d{name}",), (f"s{name}",), collective="reduce-scatter", steps="rows") for name in ("x", "y")]
    written = [weights[0], sums[0], weights[1], sums[1]]
    found = order_ops(written, dict.fromkeys(("sx", "sy"), mib * 2**20), for_latency=False, scatters_sums=True)
    # One collective needs the operands of both until both results are there.
    both = sums[1]._replace(reads=("dx", "dy"))
    assert found.ops == ([*weights, sums[0], both] if joined else written)


def test_sums_of_any_size_are_one_collective_where_the_compiler_has_them_so():
    weights = [Op("apart", (name,), (f"d{name}",)) for name in ("x", "y")]
    sums = [Op("apart", (f"d{name}",), (f"s{name}",), collective="all-reduce", steps="sum") for name in ("x", "y")]
    written = [weights[0], sums[0], weights[1], sums[1]]
    nbytes = dict.fromkeys(("dx", "dy", "sx", "sy"), 2.0**40)
    found = order_ops(written, nbytes, for_latency=False, scatters_sums=True, combined_bytes=2.0**60)
    assert found.ops == [*weights, sums[0], sums[1]._replace(reads=("dx", "dy"))]


def test_sums_that_are_not_scattered_are_as_large_as_whole_gradients():
    weights = [Op("apart", (name,), (f"d{name}",)) for name in ("x", "y")]
    sums = [Op("apart", (f"d{name}",), (f"s{name}",), collective="reduce-scatter", steps="rows") for name in ("x", "y")]
    written = [weights[0], sums[0], weights[1], sums[1]]
    nbytes = {"dx": 16 * 2**20, "dy": 16 * 2**20, "sx": 2**20, "sy": 2**20}
    both = sums[1]._replace(reads=("dx", "dy"))
    assert order_ops(written, nbytes, for_latency=False, scatters_sums=True).ops == [*weights, sums[0], both]
    assert order_ops(written, nbytes, for_latency=False, scatters_sums=False).ops == written


@pytest.mark.parametrize("scatters_sums", [True, False])
def test_updates_wait_for_other_work_unless_nothing_runs_beside_their_sums(scatters_sums: bool):
    total = Op("apart", ("dw",), ("sw",), collective="all-reduce", steps="sum")
    update = Op("fused", ("sw", "w"), ("new",))
    nbytes = {"dw": 1, "sw": 1, "w": 1, "new": 1}
    found = order_ops(
        [WEIGHTS, BEFORE, LAST, total, update], nbytes, for_latency=False, for_memory=False, scatters_sums=scatters_sums
    )
    assert found.ops.index(update) == (4 if scatters_sums else 2)


def test_products_stand_before_what_reads_them_where_the_compiler_schedules_for_latency():
    other = Op("apart", ("a",), ("v",), seconds=1.0)
    written = [
        other,
        BEFORE._replace(seconds=1.0),
        Op("apart", ("b",), ("c",)),
        Op("apart", ("v", "c"), ("end",)),
        LOSS,
    ]
    late = order_ops(written, {"total": 0}, for_latency=True, scatters_sums=True).ops
    assert late.index(other) > late.index(written[2])
    soon = order_ops(written, {"total": 0}, for_latency=False, scatters_sums=True).ops
    assert soon.index(other) == 0


def test_state_is_written_over_when_the_product_that_reads_it_has_waited():
    reads = Op("apart", ("a", "w"), ("v",), seconds=1.0)
    update = Op("fused", ("w", "dw"), ("new",))
    written = [WEIGHTS, reads, Op("apart", ("a",), ("c",)), Op("apart", ("v", "c"), ("end",)), update, LOSS]
    nbytes = dict.fromkeys(("total", "w", "dw", "new", "end", "v", "c"), 1.0)
    found = order_ops(written, nbytes, [("new", "w")], for_latency=True, scatters_sums=True).ops
    assert found.index(update) > found.index(reads) > found.index(written[2])


@pytest.mark.parametrize("nbytes, last", [(4096, True), (8192, False)])
def test_a_loss_of_few_numbers_is_summed_behind_everything_else(nbytes: int, last: bool):
    pick, loss = Op("fused", ("a",), ("picked",)), Op("reduction", ("picked",), ())
    written = [pick, loss, BEFORE, LAST, Op("apart", ("a", "x"), ("dw",)), LOSS]
    sizes = {"picked": nbytes, "total": 0}
    found = order_ops(written, sizes, for_latency=True, scatters_sums=True).ops
    assert (found[-1] == loss) == last


def test_every_collective_that_hides_products_takes_one_at_least():
    weights = [Op("apart", ("a", f"x{n}"), (f"d{n}",), seconds=4.0) for n in range(3)]
    sums = [Op("apart", (f"d{n}",), (f"s{n}",), collective="all-reduce", steps=n, seconds=1.0) for n in range(3)]
    gather = Op("apart", ("w",), ("x0",), collective="all-gather", seconds=1.0)
    written = [gather, *weights, BEFORE, LAST, *sums]
    nbytes = dict.fromkeys([f"{kind}{n}" for kind in "ds" for n in range(3)], 1.0)
    found = order_ops(written, nbytes, for_latency=True, scatters_sums=True).ops
    assert all(found.index(each) > found.index(BEFORE) for each in weights)
