"""The order in which kernels hide collectives: one rule of the scheduler at a time, and orders that are possible."""

import itertools
import random

import pytest

from autopar.compiler.memory.latency_hiding import Kernel, scheduled

US = 1e-6


class Program:
    """Kernels by name, in the order of the program."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kernels: list[Kernel] = []

    def add(self, name: str, *needs: str, us: float = 10.0, free: bool = False) -> None:
        numbers = [self.names.index(need) for need in needs]
        position = -1 if free else len(self.names)
        seconds = 0.0 if free else us * US
        self.kernels.append(Kernel(needs=numbers, seconds=seconds, is_free=free, position=position))
        self.names.append(name)

    def add_collective(self, name: str, *needs: str, us: float = 10.0) -> None:
        self.add(name, *needs, us=us)
        self.kernels[-1].is_collective = True

    @property
    def order(self) -> list[str]:
        """The names in their new order, with "/" for the end of a collective."""
        return [self.names[number] + ("/" if is_end else "") for number, is_end in scheduled(self.kernels)]


def test_a_chain_keeps_its_order_and_what_is_free_stands_before_what_reads_it():
    program = Program()
    program.add("input", free=True)
    program.add("late", free=True)
    for name, needs in (("a", ["input"]), ("b", ["a"]), ("c", ["b", "late"])):
        program.add(name, *needs)
    assert [name for name in program.order if len(name) == 1] == ["a", "b", "c"]
    assert program.order.index("late") > program.order.index("b")


@pytest.mark.parametrize(("us", "hidden"), [(5.0, ["w2"]), (15.0, ["w1", "w2"])])
def test_what_only_results_need_hides_a_collective_as_long_as_that_takes(us: float, hidden: list[str]):
    program = Program()
    program.add("a")
    program.add("w1", "a")
    program.add("w2", "a")
    program.add("b", "a")
    program.add_collective("first", "b")
    program.add("c", "first")
    program.add_collective("gather", "c", us=us)
    program.add("d", "gather")
    order = program.order
    assert order[order.index("gather") + 1 : order.index("gather/")] == hidden


def test_one_collective_runs_at_a_time():
    program = Program()
    program.add("a")
    for number in range(3):
        program.add(f"w{number}", "a")
        program.add_collective(f"sum{number}", f"w{number}", us=100.0)
    for name, place in zip(order := program.order, itertools.count(), strict=False):
        if name.startswith("sum") and not name.endswith("/"):
            rest = [other for other in order[place + 1 :] if other.startswith("sum")]
            assert rest[0] == f"{name}/"


def test_of_what_may_fill_a_gap_what_fits_best_is_taken():
    program = Program()
    program.add("a")
    for name, us in (("small", 2.0), ("right", 20.0), ("large", 90.0)):
        program.add(name, "a", us=us)
    program.add("b", "a")
    program.add_collective("first", "b")
    program.add("c", "first")
    program.add_collective("gather", "c", us=20.0)
    program.add("d", "gather")
    order = program.order
    assert order[order.index("gather") + 1 : order.index("gather/")] == ["right"]


def test_the_first_collective_starts_as_early_as_it_can_unless_another_one_waits_for_it():
    program = Program()
    program.add("a")
    program.add_collective("first", "a", us=1.0)
    for number in range(3):
        program.add(f"w{number}", "a")
    program.add("b", "first")
    assert program.order[:2] == ["a", "first"]
    program.add("more")
    program.add_collective("second", "more", us=1.0)
    order = program.order
    assert (
        abs(order.index("first") - order.index("first/")) < 3 or abs(order.index("second") - order.index("second/")) < 3
    )


def test_of_equals_the_one_that_alone_reads_more_comes_last_then_the_later_one():
    program = Program()
    program.add("shared", free=True)
    program.add("alone", free=True)
    program.add("one", "alone")
    program.add("two", "shared")
    program.add("three", "shared")
    assert [name for name in program.order if name in ("one", "two", "three")] == ["two", "three", "one"]


def test_kernels_that_need_each_other_are_an_error():
    kernels = [Kernel(needs=[1], position=0), Kernel(needs=[0], position=1)]
    with pytest.raises(ValueError, match="2 kernels cannot be ordered: some of them need each other"):
        scheduled(kernels)


@pytest.mark.parametrize("seed", range(20))
def test_every_order_is_possible_and_the_same_each_time(seed: int):
    rng = random.Random(seed)
    kernels: list[Kernel] = []
    for number in range(60):
        needs = rng.sample(range(number), k=min(number, rng.randint(0, 3)))
        kernels.append(
            Kernel(
                needs=needs,
                seconds=rng.choice([0.0, 1e-8, 1e-5, 1e-4]),
                is_collective=rng.random() < 0.3,
                position=number,
            )
        )
        kernels[-1].is_free = not kernels[-1].is_collective and rng.random() < 0.2
    order = scheduled(kernels)
    assert order == scheduled(kernels)
    begins = {number: place for place, (number, is_end) in enumerate(order) if not is_end}
    ends = {number: place for place, (number, is_end) in enumerate(order) if is_end}
    assert begins.keys() == set(range(60))
    assert ends.keys() == {number for number, kernel in enumerate(kernels) if kernel.is_collective}
    for number, kernel in enumerate(kernels):
        assert all(ends.get(need, begins[need]) < begins[number] for need in kernel.needs)
        assert begins[number] <= ends.get(number, begins[number])
    running = 0
    for number, is_end in order:
        running += kernels[number].is_collective * (-1 if is_end else 1)
        assert running <= 1
