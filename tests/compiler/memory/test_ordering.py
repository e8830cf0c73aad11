"""The order in which XLA runs ops where it schedules for memory, and the sums of gradients that it joins."""

from collections.abc import Sequence

import pytest

from autopar.compiler.memory import ordering
from autopar.compiler.memory.liveness import Key, Op
from autopar.compiler.memory.ordering import JoinedCollectives, OpOrder

MIB = 2**20


def order_ops(
    ops: list[Op],
    nbytes: dict[Key, float],
    *,
    outputs: Sequence[Key] = (),
    combined_bytes: float = 30 * MIB,
    scatters_sums: bool = True,
    for_memory: bool = True,
) -> OpOrder:
    joins = JoinedCollectives(scatters_sums=scatters_sums, most_bytes=combined_bytes)
    return ordering.order_ops(ops, outputs, nbytes, joins, for_memory=for_memory)


# A backward pass: the gradient of a layer's weights, then that of what it read, which the layer before needs.
WEIGHTS = Op("apart", ("a", "x"), ("dw",))
BEFORE = Op("apart", ("a",), ("b",))
LAST = Op("apart", ("b",), ("end",))


def test_where_the_compiler_schedules_for_memory_products_that_make_more_than_they_read_wait_for_the_end():
    nbytes = {"a": 2, "x": 1, "dw": 4, "b": 2, "sw": 4, "end": 1}
    total = Op("apart", ("dw",), ("sw",), collective="all-reduce", steps="sum")
    assert order_ops([WEIGHTS, BEFORE, LAST, total], nbytes).ops == [BEFORE, LAST, WEIGHTS, total]
    small = nbytes | {"dw": 3}
    assert order_ops([WEIGHTS, BEFORE, LAST, total], small).ops[0] == WEIGHTS
    found = order_ops([WEIGHTS, BEFORE, LAST, total], nbytes, for_memory=False)
    assert found.ops[0] == WEIGHTS


def test_gradients_that_wait_are_made_summed_and_used_one_sum_after_the_other():
    mib = 2**20
    makes = [Op("apart", (f"a{n}",), (f"d{n}",)) for n in range(2)]
    sums = [Op("apart", (f"d{n}",), (f"s{n}",), collective="all-reduce", steps="sum") for n in range(2)]
    updates = [Op("fused", (f"s{n}", f"w{n}"), (f"new{n}",)) for n in range(2)]
    nbytes = {f"{kind}{n}": 20 * mib for kind in ("d", "s", "w", "new") for n in range(2)} | {"a0": mib, "a1": mib}
    found = order_ops([*makes, *sums, BEFORE, LAST, *updates], nbytes)
    assert found.ops == [BEFORE, LAST, makes[0], sums[0], updates[0], makes[1], sums[1], updates[1]]


def test_gradients_without_a_sum_that_wait_are_made_and_used_one_after_the_other():
    makes = [Op("apart", (f"a{n}",), (f"d{n}",)) for n in range(2)]
    updates = [Op("fused", (f"d{n}", f"w{n}"), (f"new{n}",)) for n in range(2)]
    nbytes = {f"{kind}{n}": 2 for kind in ("d", "w", "new") for n in range(2)} | {"a0": 1, "a1": 1}
    found = order_ops([*makes, BEFORE, LAST, *updates], nbytes)
    assert found.ops == [BEFORE, LAST, makes[0], updates[0], makes[1], updates[1]]


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
    assert order_ops(ops, nbytes).ops.index(part) == place
    as_written = order_ops(ops, nbytes, for_memory=False)
    assert as_written.ops.index(part) == 2


@pytest.mark.parametrize("mib, joined", [(15, True), (16, False)])
def test_sums_of_gradients_are_one_collective_up_to_30_mib(mib, joined):
    weights = [Op("apart", (name,), (f"d{name}",)) for name in ("x", "y")]
    sums = [Op("apart", (f"d{name}",), (f"s{name}",), collective="reduce-scatter", steps="rows") for name in ("x", "y")]
    written = [weights[0], sums[0], weights[1], sums[1]]
    found = order_ops(written, dict.fromkeys(("sx", "sy"), mib * 2**20))
    # One collective needs the operands of both until both results are there.
    both = sums[1]._replace(reads=("dx", "dy"))
    assert found.ops == ([*weights, sums[0], both] if joined else written)


def test_sums_of_any_size_are_one_collective_where_the_compiler_has_them_so():
    weights = [Op("apart", (name,), (f"d{name}",)) for name in ("x", "y")]
    sums = [Op("apart", (f"d{name}",), (f"s{name}",), collective="all-reduce", steps="sum") for name in ("x", "y")]
    written = [weights[0], sums[0], weights[1], sums[1]]
    nbytes = dict.fromkeys(("dx", "dy", "sx", "sy"), 2.0**40)
    found = order_ops(written, nbytes, combined_bytes=2.0**60)
    assert found.ops == [*weights, sums[0], sums[1]._replace(reads=("dx", "dy"))]


def test_sums_that_are_not_scattered_are_as_large_as_whole_gradients():
    weights = [Op("apart", (name,), (f"d{name}",)) for name in ("x", "y")]
    sums = [Op("apart", (f"d{name}",), (f"s{name}",), collective="reduce-scatter", steps="rows") for name in ("x", "y")]
    written = [weights[0], sums[0], weights[1], sums[1]]
    nbytes = {"dx": 16 * 2**20, "dy": 16 * 2**20, "sx": 2**20, "sy": 2**20}
    both = sums[1]._replace(reads=("dx", "dy"))
    assert order_ops(written, nbytes).ops == [*weights, sums[0], both]
    assert order_ops(written, nbytes, scatters_sums=False).ops == written


@pytest.mark.parametrize("scatters_sums", [True, False])
def test_updates_wait_for_other_work_unless_nothing_runs_beside_their_sums(scatters_sums: bool):
    total = Op("apart", ("dw",), ("sw",), collective="all-reduce", steps="sum")
    update = Op("fused", ("sw", "w"), ("new",))
    nbytes = {"dw": 1, "sw": 1, "w": 1, "new": 1}
    found = order_ops([WEIGHTS, BEFORE, LAST, total, update], nbytes, for_memory=False, scatters_sums=scatters_sums)
    assert found.ops.index(update) == (4 if scatters_sums else 2)


def test_sums_are_joined_in_the_order_of_the_results_of_the_program():
    names = ("x", "y", "z")
    weights = [Op("apart", (name,), (f"d{name}",)) for name in names]
    sums = [Op("apart", (f"d{name}",), (f"s{name}",), collective="all-reduce", steps="sum") for name in names]
    updates = [Op("fused", (f"s{name}", f"w{name}"), (f"new{name}",)) for name in names]
    ops = [*weights, *sums, *updates]
    nbytes = {f"{kind}{name}": 14.0 * MIB for kind in ("d", "s", "w", "new") for name in names} | dict.fromkeys(
        names, 0.0
    )
    for outputs, both in ((("newx", "newy", "newz"), ("dx", "dy")), (("newz", "newx", "newy"), ("dx", "dz"))):
        found = order_ops(ops, nbytes, outputs=outputs)
        assert [op.reads for op in found.ops if op.collective and len(op.reads) > 1] == [both]
