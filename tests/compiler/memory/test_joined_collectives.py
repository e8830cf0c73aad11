"""The collectives that are one, and the ops that stand for them."""

import random
from collections.abc import Sequence

import pytest

from autopar.compiler.memory.joined_collectives import (
    JoinedArray,
    JoinedCollectives,
    JoinedOps,
    join_collectives,
    predecessors,
)
from autopar.compiler.memory.liveness import Key, Op

MIB = 2**20


def joined(
    ops: Sequence[Op],
    nbytes: dict[Key, float],
    outputs: Sequence[Key] = (),
    *,
    most_bytes: float = 30 * MIB,
    scatters_sums: bool = True,
    copies_joined: bool = True,
) -> JoinedOps:
    joins = JoinedCollectives(scatters_sums=scatters_sums, copies_joined=copies_joined, most_bytes=most_bytes)
    return join_collectives(ops, outputs, nbytes, joins)


def product(reads: str, made: str) -> Op:
    return Op("apart", tuple(reads.split()), (made,))


def collective(kind: str, read: str, made: str, steps: object = "all", us: float = 10.0, fixed_us: float = 4.0) -> Op:
    return Op("apart", (read,), (made,), collective=kind, steps=steps, seconds=us * 1e-6, latency_s=fixed_us * 1e-6)


def results_of(found: JoinedOps, kind: str) -> list[tuple[Key, ...]]:
    return [op.results for op in found.ops if op.collective == kind]


def gradients(kind: str, names: str = "xy") -> list[Op]:
    return [op for n in names for op in (product(n, f"d{n}"), collective(kind, f"d{n}", f"s{n}"))]


@pytest.mark.parametrize(("mib", "is_one"), [(15, True), (16, False)])
def test_scattered_sums_are_one_collective_up_to_30_mib(mib: float, is_one: bool):
    found = joined(gradients("reduce-scatter"), dict.fromkeys(("sx", "sy"), mib * MIB))
    assert results_of(found, "reduce-scatter") == ([("sx", "sy")] if is_one else [("sx",), ("sy",)])


def test_sums_of_any_size_are_one_collective_where_the_compiler_has_them_so():
    found = joined(gradients("reduce-scatter"), dict.fromkeys(("sx", "sy"), 2.0**40), most_bytes=2.0**60)
    assert results_of(found, "reduce-scatter") == [("sx", "sy")]


def test_sums_that_are_not_scattered_are_as_large_as_whole_gradients():
    nbytes = {"dx": 16.0 * MIB, "dy": 16.0 * MIB, "sx": 1.0 * MIB, "sy": 1.0 * MIB}
    ops = gradients("reduce-scatter")
    assert results_of(joined(ops, nbytes), "reduce-scatter") == [("sx", "sy")]
    assert results_of(joined(ops, nbytes, scatters_sums=False), "reduce-scatter") == [("sx",), ("sy",)]


def test_what_all_reduces_sum_is_copied_nowhere_where_the_compiler_sums_each():
    nbytes = dict.fromkeys(("dx", "dy", "sx", "sy"), 4.0 * MIB)
    found = joined(gradients("all-reduce"), nbytes, copies_joined=False)
    assert results_of(found, "all-reduce") == [("sx", "sy")] and not found.nbytes


def test_what_all_reduces_sum_is_copied_into_one_array_and_cut_out_of_it():
    nbytes = dict.fromkeys(("dx", "dy", "sx", "sy"), 4.0 * MIB)
    found = joined(gradients("all-reduce"), nbytes)
    terms = JoinedArray(("sx", "sy"))
    summed = terms._replace(summed=True)
    assert [(op.reads, op.results) for op in found.ops] == [
        (("x",), ("dx",)),
        (("y",), ("dy",)),
        (("dx", "dy"), (terms,)),
        ((terms,), (summed,)),
        ((summed,), ("sx",)),
        ((summed,), ("sy",)),
    ]
    assert found.nbytes == {terms: 8.0 * MIB, summed: 8.0 * MIB}
    assert [op.over for op in found.ops if op.collective] == [True]
    assert [op.slices for op in found.ops] == [False, False, False, False, True, True]
    # The latency of one is that of both.
    assert sum(op.seconds for op in found.ops if op.seconds) == pytest.approx(16e-6)


def test_sums_are_joined_in_the_order_of_the_results_of_the_program():
    updates = [Op("fused", (f"s{name}", f"w{name}"), (f"new{name}",)) for name in "xyz"]
    ops = [*gradients("reduce-scatter", "xyz"), *updates]
    nbytes = {f"s{name}": 14.0 * MIB for name in "xyz"}
    for outputs, both in ((("newx", "newy", "newz"), ("sx", "sy")), (("newz", "newx", "newy"), ("sx", "sz"))):
        assert both in results_of(joined(ops, nbytes, outputs), "reduce-scatter")


def test_collectives_of_which_one_needs_the_other_are_none():
    chain = [
        collective("all-gather", "x", "whole_x"),
        product("whole_x", "y"),
        collective("all-gather", "y", "whole_y"),
    ]
    assert results_of(joined(chain, {}), "all-gather") == [("whole_x",), ("whole_y",)]
    apart = [chain[0], product("x", "y"), chain[2]]
    assert results_of(joined(apart, {}), "all-gather") == [("whole_x", "whole_y")]


def test_equal_sums_alone_are_one_and_gathers_along_the_same_axes():
    for kind, is_one in (("reduce-scatter", False), ("all-gather", True)):
        both = [
            collective(kind, "x", "sx", steps=(Along(("data",), 0),)),
            collective(kind, "y", "sy", steps=(Along(("data",), 1),)),
        ]
        assert (len(results_of(joined(both, {}), kind)) == 1) == is_one
    others = [collective("all-gather", n, f"s{n}", steps=(Along((n,), 0),)) for n in "xy"]
    assert len(results_of(joined(others, {}), "all-gather")) == 2


class Along:
    """A step along axes of a mesh, of one dimension."""

    def __init__(self, axes: tuple[str, ...], dim: int) -> None:
        self.axes, self.dim = axes, dim


def test_what_is_too_small_to_count_is_joined_as_well():
    ops = [
        Op("apart", (), (), waits_for=(n,), small_results=(f"whole_{n}",), collective="all-gather", steps="rows")
        for n in "xy"
    ]
    (both,) = joined(ops, {}).ops
    assert both.small_results == ("whole_x", "whole_y") and both.waits_for == ("x", "y")


def test_a_gather_stands_where_the_first_of_its_results_is_read_and_a_sum_where_the_last_is_made():
    layers = [
        op
        for n in range(3)
        for op in (
            Op("fused", (f"w{n}",), (f"cast{n}",)),
            collective("all-gather", f"cast{n}", f"whole{n}"),
            product(f"whole{n} a{n}", f"a{n + 1}"),
        )
    ]
    backward = [
        op for n in range(3) for op in (product(f"a{3 - n}", f"d{n}"), collective("all-reduce", f"d{n}", f"s{n}"))
    ]
    nbytes = {key: 1.0 for op in (*layers, *backward) for key in (*op.reads, *op.results)}
    found = joined([*layers, *backward], nbytes)
    made = [key for op in found.ops for key in op.results]
    assert made[:4] == ["cast0", "cast1", "cast2", "whole0"]
    assert made.index("d2") < made.index(JoinedArray(("s0", "s1", "s2"))) < made.index("s0")


@pytest.mark.parametrize("seed", range(60))
def test_random_collectives_that_are_one_never_need_each_other(seed: int):
    rng = random.Random(seed)
    ops: list[Op] = []
    for number in range(120):
        made = [f"v{other}" for other in range(max(0, number - 25), number)]
        reads = tuple(rng.sample(made, k=min(len(made), rng.randint(1, 2)))) or ("input",)
        kind = rng.choice(["", "", "all-gather", "all-reduce", "reduce-scatter"])
        ops.append(Op("apart", reads if not kind else reads[:1], (f"v{number}",), collective=kind, steps=("sum",)))
    nbytes = {f"v{number}": float(rng.randint(1, 9)) for number in range(120)}
    found = joined(ops, nbytes, [f"v{n}" for n in rng.sample(range(120), k=30)], most_bytes=20.0)
    there: set[int] = set()
    for number, before in enumerate(predecessors(found.ops)):
        assert before <= there
        there.add(number)
    made = [key for op in found.ops for key in op.results if not isinstance(key, JoinedArray)]
    assert sorted(map(str, made)) == sorted(f"v{number}" for number in range(120))
    assert len([op for op in found.ops if op.collective]) < len([op for op in ops if op.collective])
