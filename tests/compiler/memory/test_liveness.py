"""Arrays that reach memory, and for how long: ops by hand, with the lifetimes that XLA would give them."""

import pytest

from autopar.compiler.memory.liveness import Op, lifetimes

PRODUCT = Op("apart", ("x", "w"), ("a",))


def spans(ops: list[Op], *, inputs: str, outputs: str) -> dict[str, tuple[int, int]]:
    found = lifetimes(ops, inputs, outputs, dict.fromkeys("abcdefgwxyz", 1))
    return {key: (life.start, life.stop) for key, life in found.whole.items() if life.allocated}


def test_elementwise_chain_with_one_reader_reads_its_source_later():
    ops = [PRODUCT, Op("fused", ("a",), ("b",)), Op("reduction", ("b",), ("c",))]
    assert spans(ops, inputs="xw", outputs="c") == {"a": (0, 3), "c": (2, 4)}


def test_what_a_product_reads_is_in_memory():
    ops = [PRODUCT, Op("fused", ("a",), ("b",)), Op("apart", ("b", "w"), ("c",))]
    # "b" is written over "a", which nobody else reads.
    assert spans(ops, inputs="xw", outputs="c") == {"a": (0, 1), "b": (1, 3), "c": (2, 4)}


@pytest.mark.parametrize(
    ("size", "narrower", "kept"),
    [
        pytest.param(1, False, {"a": (0, 3)}, id="a product computes what it reads"),
        pytest.param(0.5, False, {"a": (0, 2), "b": (1, 3)}, id="but not what is smaller than what it would read"),
        pytest.param(0.5, True, {"a": (0, 3)}, id="unless the compiler has it do so"),
    ],
)
def test_what_a_product_computes_that_reads_no_more_for_it(size: float, narrower: bool, kept):
    ops = [PRODUCT, Op("fused", ("a",), ("b",)), Op("product", ("b", "w"), ("c",), computes_narrower=narrower)]
    found = lifetimes(ops, "xw", "c", dict.fromkeys("acwx", 1.0) | {"b": size})
    spans = {key: (life.start, life.stop) for key, life in found.whole.items() if key in "ab"}
    assert spans == kept


@pytest.mark.parametrize("expensive, kept", [(True, {"b": (1, 4)}), (False, {})])
def test_only_what_is_dear_is_kept_for_two_readers(expensive, kept):
    ops = [
        PRODUCT,
        Op("fused", ("a",), ("b",), expensive=expensive),
        Op("reduction", ("b",), ("c",)),
        Op("reduction", ("b",), ("d",)),
    ]
    found = spans(ops, inputs="xw", outputs="cd")
    assert {key: found[key] for key in "b" if key in found} == kept
    # The kernel that makes "b" sums it, too, so that it cannot write it over "a".
    assert found["a"] == ((0, 2) if expensive else (0, 4))


@pytest.mark.parametrize(
    ("gathers", "num_readers", "kept"),
    [
        pytest.param(True, 2, {"a": (0, 3), "c": (2, 5)}, id="what is computed of parts of a table is kept for two"),
        pytest.param(True, 1, {"a": (0, 4)}, id="for one reader they are picked when it reads them"),
        pytest.param(False, 2, {"a": (0, 5)}, id="what is not picked is computed again"),
    ],
)
def test_what_is_gathered_of_a_table_is_not_gathered_again_for_every_reader(gathers, num_readers, kept):
    readers = [Op("reduction", ("c",), (name,)) for name in "de"[:num_readers]]
    ops = [PRODUCT, Op("fused", ("a",), ("b",), gathers=gathers), Op("fused", ("b", "x"), ("c",)), *readers]
    sizes = dict.fromkeys("bcdewx", 1.0) | {"a": 64.0}
    found = lifetimes(ops, "xw", "de"[:num_readers], sizes).whole
    assert {key: (found[key].start, found[key].stop) for key in "abc" if key in found} == kept


@pytest.mark.parametrize(
    ("growth", "num_readers", "kept"),
    [
        pytest.param(1.0, 3, "a", id="what is larger than its source is computed again"),
        pytest.param(2.0, 3, "b", id="but not where the compiler keeps it"),
        pytest.param(2.0, 2, "a", id="for many readers"),
    ],
)
def test_what_is_dear_and_larger_than_its_source_is_kept_where_the_compiler_does(growth, num_readers, kept):
    readers = [Op("reduction", ("b",), (name,)) for name in "cde"[:num_readers]]
    ops = [PRODUCT, Op("fused", ("a",), ("b",), expensive=True, growth=growth), *readers]
    found = lifetimes(ops, "xw", "cde"[:num_readers], dict.fromkeys("acdewx", 1.0) | {"b": 2.0})
    last = len(ops) - 1
    assert {key for key, life in found.whole.items() if key in "ab" and life.stop > last} == {kept}


@pytest.mark.parametrize("recomputed, kept", [(False, {"a", "b"}), (True, {"c"})])
def test_what_a_recomputed_region_is_given_is_kept_itself(recomputed, kept):
    # A residual sum of two products, which is read again at the end.
    ops = [
        PRODUCT,
        Op("apart", ("x", "y"), ("b",)),
        Op("fused", ("a", "b"), ("c",)),
        Op("reduction", ("c",), ("d",)),
        *([Op("barrier", ("c",), ())] if recomputed else []),
        Op("reduction", ("c",), ("e",)),
    ]
    found = spans(ops, inputs="wxy", outputs="de")
    assert {key for key in "abc" if key in found and found[key][1] >= len(ops)} == kept


@pytest.mark.parametrize(
    ("reads", "reorders", "kept"),
    [
        pytest.param("a", False, (1, 4), id="what a product reads is read there by others"),
        pytest.param("a", True, (1, 3), id="unless the product reads a copy in an order of its own"),
        pytest.param("ay", True, (1, 4), id="but then, too, if others would compute it of several arrays"),
    ],
)
def test_what_an_op_apart_reads_is_read_there_by_all(reads: str, reorders: bool, kept: tuple[int, int]):
    ops = [
        PRODUCT,
        Op("fused", tuple(reads), ("b",)),
        Op("apart", ("b",), ("c",), reorders=reorders),
        Op("reduction", ("b",), ("d",)),
    ]
    assert spans(ops, inputs="xwy", outputs="cd")["b"] == kept


@pytest.mark.parametrize(
    ("reader", "library", "kept"),
    [
        pytest.param("c", False, {"b", "c"}, id="in two orders"),
        pytest.param("b", False, {"c"}, id="copied alone"),
        pytest.param("c", True, {"c"}, id="in the order in which it is made"),
    ],
)
def test_what_is_computed_of_several_arrays_for_two_orders_is_kept(reader: str, library: bool, kept: set[str]):
    ops = [
        PRODUCT._replace(reorders=library),
        PRODUCT._replace(results=("g",), reorders=library),
        Op("fused", ("a", "g"), ("b",)),
        Op("fused", ("b",), ("c",)),
        Op("apart", ("c",), ("d",), reorders=True),
        Op("reduction", (reader,), ("e",)),
        Op("reduction", ("b",), ("f",)),
    ]
    assert kept == {"b", "c"} & set(spans(ops, inputs="xw", outputs="def"))


@pytest.mark.parametrize(
    ("made", "until"),
    [
        pytest.param([PRODUCT], 4, id="in its own order it is read there by others"),
        pytest.param([PRODUCT._replace(reorders=True)], 3, id="in that of a library it is copied"),
        pytest.param(
            [PRODUCT._replace(results=("g",), reorders=True), Op("apart", ("g",), ("a",))], 5, id="sent before"
        ),
        pytest.param(
            [PRODUCT._replace(results=("g",), reorders=True), Op("apart", ("g",), ("a",), keeps_order=True)],
            4,
            id="a library's array under windows",
        ),
    ],
)
def test_a_collective_copies_what_has_the_order_of_a_library(made: list[Op], until: int):
    ops = [
        *made,
        Op("fused", ("a",), ("b",)),
        Op("apart", ("b",), ("c",), collective="all-gather"),
        Op("reduction", ("b",), ("d",)),
    ]
    assert spans(ops, inputs="xw", outputs="cd")["b"] == (len(made), until)


def test_what_a_barrier_holds_is_in_memory_until_it_is_read_behind_it():
    ops = [PRODUCT, Op("fused", ("a",), ("b",)), Op("fused", ("b",), ("c",)), Op("apart", ("c",), ("d",))]
    assert "b" not in spans(ops, inputs="xw", outputs="d")
    ops[2] = ops[2]._replace(behind_barrier=True)
    assert spans(ops, inputs="xw", outputs="d")["b"] == (1, 2)


@pytest.mark.parametrize(("summed", "until"), [("b", 2), ("w", 1)])
def test_what_a_kernel_sums_as_it_makes_it_is_written_over_nothing(summed: str, until: int):
    ops = [PRODUCT, Op("fused", ("a",), ("b",)), Op("apart", ("b",), ("c",)), Op("reduction", (summed,), ("d",))]
    assert spans(ops, inputs="xw", outputs="cd")["a"] == (0, until)


def test_views_are_the_array_itself():
    ops = [PRODUCT, Op("view", ("a",), ("b",)), Op("apart", ("b", "w"), ("c",))]
    assert spans(ops, inputs="xw", outputs="c") == {"a": (0, 3), "c": (2, 4)}


def test_works_in_place_take_the_memory_of_their_operand():
    ops = [PRODUCT, Op("apart", ("a", "x"), ("b",), over=True)]
    assert spans(ops, inputs="xw", outputs="b") == {"a": (0, 1), "b": (1, 3)}


def test_a_form_is_wanted_within_the_life_of_its_array():
    ops = [
        PRODUCT,
        Op("form", ("a",), ("b",)),
        Op("apart", ("b",), ("c",)),
        Op("form", ("b",), ("d",)),
        Op("apart", ("d",), ("e",)),
    ]
    found = lifetimes(ops, "xw", "e", dict.fromkeys("abcdexw", 1))
    assert "b" not in found.whole and "d" not in found.whole
    parts = {key: (life.start, life.stop) for key, life in found.parts.items() if key in "abd"}
    assert parts == {"a": (0, 2), "b": (1, 4), "d": (3, 5)}
    assert (found.whole["a"].start, found.whole["a"].stop) == (0, 5)
    unread = lifetimes([*ops[:3], Op("form", ("b",), ("f",))], "xw", "c", dict.fromkeys("abcfxw", 1))
    assert (unread.parts["b"].start, unread.parts["b"].stop, unread.whole["a"].stop) == (1, 3, 3)


def test_what_a_loop_writes_piece_by_piece_is_there_from_the_beginning():
    loop = Op("apart", ("b",), ("c", "d"), over=True, early=("d",))
    ops = [Op("view", ("y",), ("z",)), PRODUCT, Op("apart", ("a",), ("b",)), loop]
    assert spans(ops, inputs="xwy", outputs="cd") == {"a": (1, 3), "b": (2, 3), "c": (3, 5), "d": (1, 5)}


@pytest.mark.parametrize(
    ("reduces_rows", "others", "stop"),
    [
        pytest.param(True, 0, 4, id="a kernel that reduces rows reads them twice"),
        pytest.param(True, 1, 3, id="not if another reads what they are reduced to"),
        pytest.param(False, 0, 3, id="nor if another kernel reduces them"),
    ],
)
def test_a_kernel_does_not_write_over_rows_that_it_reduces(reduces_rows: bool, others: int, stop: int):
    ops = [
        PRODUCT,
        Op("fused", ("a",), ("g",), expensive=True),
        Op("reduction", ("g",), ("b",), reduces_rows=reduces_rows),
        Op("fused", ("g", "b"), ("c",)),
        Op("apart", ("c",), ("d",)),
        *[Op("apart", ("b",), ("e",))] * others,
    ]
    assert spans(ops, inputs="xw", outputs="de"[: 1 + others])["g"][1] == stop


@pytest.mark.parametrize(
    ("sources", "readers", "kept"),
    [
        pytest.param("ab", 2, False, id="twice two arrays are no more than two, the sum, and that twice"),
        pytest.param("ab", 3, True, id="three times two are as many"),
        pytest.param("abc", 2, True, id="twice three are as many"),
    ],
)
def test_a_sum_of_gradients_is_kept_where_that_moves_no_more(sources: str, readers: int, kept: bool):
    made = [Op("apart", ("x",), (key,)) for key in sources]
    ops = [*made, Op("fused", tuple(sources), ("g",), adds_gradients=True)]
    ops += [Op("reduction", ("g",), (key,)) for key in "def"[:readers]]
    assert ("g" in spans(ops, inputs="x", outputs="def"[:readers])) == kept
