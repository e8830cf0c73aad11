"""The kernels that compilers order, and what each of them needs."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.compiler.memory import kernel_order
from autopar.compiler.memory.liveness import Key, Op
from autopar.hardware.machine import Machine

HIDES = replace(Machine.named("dgx-h100"), memory_bandwidth=1e12)
SAVES = replace(HIDES, schedules_for_latency=False)
AS_WRITTEN = replace(SAVES, schedules_for_memory=False)


def ordered(ops: Sequence[Op], outputs: Sequence[Key] = (), machine: Machine = HIDES, **nbytes: float) -> list[Op]:
    """The ops in their order; arrays have a byte unless it is said."""
    made = [key for op in ops for key in (*op.results, *op.reads)]
    inputs = [key for key in dict.fromkeys(made) if not any(key in op.results for op in ops)]
    found = kernel_order.order_kernels(ops, inputs, outputs, dict.fromkeys(made, 1.0) | nbytes, (), machine)
    assert sorted(found.order) == list(range(len(ops)))
    return found.ops


def place_of(found: Sequence[Op], name: str) -> int:
    return next(place for place, op in enumerate(found) if name in (*op.results, *op.small_results))


def apart(reads: str, made: str, us: float = 10.0, **how: object) -> Op:
    return Op("apart", tuple(reads.split()), (made,), seconds=us * 1e-6)._replace(**how)


def gather(reads: str, made: str, us: float = 10.0) -> Op:
    return apart(reads, made, us, collective="all-gather", steps="rows")


def backward(*more: Op) -> list[Op]:
    """A chain of products with two gatherings in it, and the gradients of weights of what it begins with."""
    return [
        apart("start", "a"),
        apart("a", "dw"),
        apart("a", "b"),
        gather("b", "whole_b"),
        apart("whole_b", "c"),
        gather("c", "whole_c"),
        apart("whole_c", "end"),
        *more,
    ]


def test_a_gradient_of_weights_hides_a_collective():
    found = ordered(backward(), ["end", "dw"])
    assert place_of(found, "whole_c") < place_of(found, "dw") < place_of(found, "end")


def test_what_a_collective_sends_is_kept_until_what_hides_it_is_done():
    found = ordered(backward(), ["end", "dw"])
    assert found[place_of(found, "dw")].reads == ("a", "c")
    assert found[place_of(found, "c")].reads == ("whole_b",)


def test_what_is_fused_stands_with_the_kernel_that_it_is_in():
    square = Op("fused", ("a",), ("square",))
    weights = apart("square x", "dw")
    found = ordered([backward()[0], square, weights, *backward()[2:]], ["end", "dw"])
    # A product reads it from memory, so it is a kernel; what reads it is not before it.
    assert place_of(found, "square") < place_of(found, "dw")
    both = [Op("fused", ("a",), ("twice",)), Op("fused", ("twice",), ("four",))]
    found = ordered([backward()[0], *both, *backward()[2:]], ["end", "four"])
    assert place_of(found, "four") == place_of(found, "twice") + 1


def test_dependencies_go_through_what_is_too_small_to_count():
    mean = Op("reduction", ("a",), (), small_results=("mean",), extent=4096.0)
    shift = apart("b", "shifted")._replace(waits_for=("mean",))
    chain = [gather("shifted", "whole_b"), apart("whole_b", "c"), gather("c", "whole_c"), apart("whole_c", "end")]
    found = ordered([apart("start", "a"), mean, apart("a", "b"), shift, *chain], ["end"])
    assert place_of(found, "mean") < place_of(found, "shifted")


def test_reductions_of_rows_are_computed_where_they_are_read():
    rows = Op("reduction", ("a",), ("mean",), reduces_rows=True, extent=4096.0)
    centred = Op("fused", ("a", "mean"), ("centred",), extent=4096.0)
    others = [apart("centred", "b"), gather("b", "whole_b"), apart("whole_b", "c"), apart("a", "dw")]
    last = [gather("c", "whole_c"), apart("whole_c", "end")]
    found = ordered([apart("start", "a"), rows, *others[:0], centred, *others, *last], ["end", "dw"])
    assert place_of(found, "centred") == place_of(found, "mean") + 1


def siblings(**how: object) -> list[Op]:
    """A gradient of a bias, and what goes on from the same array."""
    return [
        apart("start", "a"),
        Op("reduction", ("a",), ("bias",), extent=4096.0)._replace(**how),
        Op("fused", ("a",), ("next",), extent=4096.0),
        apart("next", "b"),
        gather("b", "whole_b"),
        apart("whole_b", "c"),
        gather("c", "whole_c", us=1.0),
        apart("whole_c", "end"),
    ]


@pytest.mark.parametrize(
    ("how", "joined"),
    [
        pytest.param({}, True, id="loops of one size over one array"),
        pytest.param({"extent": 8192.0}, False, id="of two sizes"),
        pytest.param({"extent": 64.0}, False, id="few numbers"),
        pytest.param({"reads": ("z",)}, False, id="two arrays"),
    ],
)
def test_kernels_that_read_the_same_array_in_equal_loops_are_one(how: dict[str, object], joined: bool):
    found = ordered(siblings(**how), ["end", "bias"])
    assert (place_of(found, "bias") < place_of(found, "b")) == joined


def test_products_that_read_an_array_with_dimensions_merged_read_one_form_of_it():
    merged = [apart(f"a {name}", f"d{name}")._replace(forms=("merged", None)) for name in "xy"]
    found = ordered([*backward()[:1], *merged, *backward()[2:]], ["end", "dx", "dy"])
    assert place_of(found, "a") < min(place_of(found, "dx"), place_of(found, "dy"))


def test_what_reads_from_outside_of_a_region_stands_behind_all_that_the_region_needs():
    barrier = Op("barrier", ("a", "b"), (), small_results=("region",))
    again = apart("a", "again")._replace(waits_for=("region",))
    chain = [apart("start", "a"), apart("a", "b"), barrier, again, gather("again", "whole"), apart("whole_b", "end")]
    found = ordered(chain, ["end"])
    assert place_of(found, "b") < place_of(found, "again")
    free = [op._replace(waits_for=()) for op in chain]
    found = ordered(free, ["end"])
    assert place_of(found, "again") < place_of(found, "b")


def test_what_nothing_reads_stands_behind_what_it_reads():
    form = Op("form", ("a",), ("form_of_a",))
    found = ordered([*backward()[:1], form, *backward()[1:]], ["end", "dw"])
    assert place_of(found, "form_of_a") == place_of(found, "a") + 1


@pytest.mark.parametrize("machine", [HIDES, SAVES, AS_WRITTEN])
def test_a_form_stands_just_before_what_reads_it(machine: Machine):
    chain = [apart("start", "a"), Op("form", ("a",), ("form_of_a",)), apart("a", "b"), gather("b", "c")]
    found = ordered([*chain, apart("c form_of_a", "end")], ["end"], machine)
    assert place_of(found, "form_of_a") == place_of(found, "end") - 1


def test_an_update_is_one_kernel_which_reads_what_it_writes():
    total = apart("dw", "sw", collective="all-reduce", steps="sum")
    momentum = Op("fused", ("sw", "m"), ("new_m",), extent=4096.0)
    update = Op("fused", ("new_m", "w"), ("new_w",), extent=4096.0)
    other = apart("w2", "other", 2.0)
    found = ordered([*backward(), total, momentum, update, other], ["end", "new_m", "new_w", "other"])
    assert place_of(found, "new_w") == place_of(found, "new_m") + 1


# A backward pass: the gradient of a layer's weights, then that of what it read, which the layer before needs.
LAYER = [
    apart("a x", "dw"),
    apart("a", "b"),
    apart("b", "end"),
    apart("dw", "sw", collective="all-reduce", steps="sum"),
]


def test_products_that_make_more_than_they_read_wait_for_the_end_where_memory_is_saved():
    nbytes = {"a": 2.0, "x": 1.0, "dw": 4.0, "b": 2.0, "sw": 4.0}
    begin = apart("start", "a")
    names = [op.results[0] for op in ordered([begin, *LAYER], ["sw", "end"], SAVES, **nbytes)]
    assert names == ["a", "b", "end", "dw", "sw"]
    names = [op.results[0] for op in ordered([begin, *LAYER], ["sw", "end"], AS_WRITTEN, **nbytes)]
    assert names == ["a", "dw", "sw", "b", "end"]


def test_an_update_stands_behind_the_last_other_reader_of_what_it_writes_over():
    ops = [*LAYER, Op("fused", ("sw", "w"), ("new_w",)), apart("end w", "last")]
    nbytes = dict.fromkeys((key for op in ops for key in (*op.reads, *op.results)), 1.0)
    found = kernel_order.order_kernels(
        ops, ["a", "x", "w"], ["new_w", "last"], nbytes, [("new_w", "w")], replace(AS_WRITTEN, scatters_sums=False)
    )
    assert found.ops[-1].results == ("new_w",)


@pytest.mark.parametrize("machine", [HIDES, SAVES, AS_WRITTEN])
@pytest.mark.parametrize("seed", range(40))
def test_every_op_stands_behind_what_it_reads(seed: int, machine: Machine):
    rng = random.Random(seed)
    ops: list[Op] = []
    for number in range(80):
        made = [f"v{other}" for other in range(number)]
        near = rng.sample(made[-12:], k=min(len(made), rng.randint(1, 3))) if made else ["input"]
        kind = rng.choice(["fused", "fused", "fused", "reduction", "apart", "collective"])
        extent = rng.choice([512.0, 4096.0, 4096.0])
        if kind == "collective":
            name = rng.choice(["all-gather", "all-reduce", "reduce-scatter"])
            op = Op("apart", (near[0],), (), collective=name, seconds=1e-5, steps=("sum",), extent=extent)
        else:
            op = Op(kind, tuple(near), (), extent=extent, reduces_rows=kind == "reduction" and rng.random() < 0.4)
        small = rng.random() < 0.2
        ops.append(op._replace(**{"small_results" if small else "results": (f"v{number}",)}))
    small = {key for op in ops for key in op.small_results}
    split = [
        op._replace(
            reads=tuple(key for key in op.reads if key not in small),
            waits_for=tuple(key for key in op.reads if key in small),
        )
        for op in ops
    ]
    outputs = [key for op in rng.sample(split, k=20) for key in op.results]
    found = ordered(split, outputs, machine)
    there = {"input"}
    for op in found:
        own = next(each for each in split if (each.results, each.small_results) == (op.results, op.small_results))
        assert there.issuperset((*own.reads, *own.waits_for))
        there.update((*op.results, *op.small_results))
