"""Orders of kernels in which few bytes are in memory, and those that programs have."""

import random

import pytest

from autopar.compiler.memory.latency_hiding import Kernel
from autopar.compiler.memory.memory_scheduling import as_written, scheduled_for_memory


class Program:
    """Kernels by name; arrays are called as what makes them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kernels: list[Kernel] = []
        self.nbytes: dict[object, float] = {}

    def add(self, name: str, reads: str = "", nbytes: float = 1.0, **how: bool) -> None:
        needs = [self.names.index(each) for each in reads.split()]
        self.names.append(name)
        self.nbytes[name] = nbytes
        made = [] if how.get("is_free") else [name]
        kernel = Kernel(needs=needs, reads=list(reads.split()), makes=list(made), position=len(self.names) - 1, **how)
        self.kernels.append(kernel)

    def input(self, name: str) -> None:
        self.add(name, is_free=True)

    def scheduled(self, outputs: str = "", early: str = "", taken: str = "") -> list[str]:
        early_numbers = [self.names.index(each) for each in early.split()]
        found = scheduled_for_memory(self.kernels, self.nbytes, outputs.split(), taken.split(), early_numbers)
        return [f"{self.names[number]} done" if is_end else self.names[number] for number, is_end in found]

    def written(self, tail: str = "", at_once: str = "", **last_reads: str) -> list[str]:
        numbers = [[self.names.index(each) for each in words.split()] for words in (tail, at_once)]
        reads = {self.names.index(n): [self.names.index(r) for r in words.split()] for n, words in last_reads.items()}
        found = as_written(self.kernels, numbers[0], reads, numbers[1])
        return [f"{self.names[number]} done" if is_end else self.names[number] for number, is_end in found]


def test_what_frees_most_comes_first():
    program = Program()
    program.add("large", nbytes=8.0)
    program.add("first", "large")
    program.add("next", "first", 6.0)
    program.add("last", "large")
    # On a walk from the results, "next" would be made while "large" is there.
    assert program.scheduled("first next last") == ["large", "first", "last", "next"]


def test_inputs_free_nothing_and_nobody_frees_results():
    program = Program()
    program.input("weights")
    program.add("kept", nbytes=9.0)
    program.add("passing", nbytes=9.0)
    program.add("a", "weights", 2.0)
    program.add("b", "kept", 3.0)
    program.add("c", "passing", 4.0)
    found = program.scheduled("kept a b c")
    # Both take nine bytes first: "c" frees them again, and "b" does not.
    assert found.index("c") < found.index("b")
    assert found.index("a") < found.index("kept")


def test_of_equals_the_one_that_more_need_comes_first_then_the_last_one():
    program = Program()
    program.add("start")
    for name in "abc":
        program.add(name, "start")
    program.add("d", "a")
    program.add("e", "a")
    assert program.scheduled("b c d e")[:4] == ["start", "a", "e", "d"]
    assert program.scheduled("b c d e")[4:] == ["c", "b"]


def updates() -> Program:
    """Two gradients and updates, which make more than they read."""
    program = Program()
    program.add("start", nbytes=1.0)
    for n in "xy":
        program.add(f"d{n}", "start", 4.0)
        program.add(f"new_{n}", f"d{n}", 8.0)
    return program


def test_the_results_one_after_the_other_where_less_is_in_memory_then():
    program = updates()
    assert program.scheduled("new_x new_y") == ["start", "dy", "dx", "new_x", "new_y"]
    # What is written over inputs takes no memory of its own.
    walked = program.scheduled("new_x new_y", taken="new_x new_y")
    assert walked == ["start", "dx", "new_x", "dy", "new_y"]


def test_the_end_of_a_collective_frees_what_it_sends_unless_that_is_written_over():
    for in_place, order in (
        (False, ["start", "other", "sum", "sum done", "end"]),
        (True, ["start", "sum", "sum done", "other", "end"]),
    ):
        program = Program()
        program.add("start", nbytes=6.0)
        program.add("sum", "start", 6.0, is_collective=True, is_in_place=in_place)
        program.add("other", "start", 8.0)
        program.add("end", "sum other")
        # Elsewhere, it needs as much for what it sends as for the sum until it is done.
        assert program.scheduled("end") == order


def test_sums_start_as_early_as_they_can_and_end_as_late():
    program = Program()
    program.add("a", nbytes=2.0)
    program.add("sum", "a", 2.0, is_collective=True)
    program.add("b", nbytes=1.0)
    program.add("c", "b", 1.0)
    program.add("end", "sum c", 1.0)
    found = program.scheduled("end", early="sum")
    assert found.index("sum") == found.index("a") + 1
    assert found.index("sum done") == found.index("end") - 1


def test_kernels_that_need_each_other_are_an_error():
    kernels = [Kernel(needs=[1], makes=["a"], reads=["b"]), Kernel(needs=[0], makes=["b"], reads=["a"])]
    with pytest.raises(ValueError, match="2 kernels cannot be ordered: some of them need each other"):
        scheduled_for_memory(kernels, {}, ["a"], [], [])


def backward(**how: bool) -> Program:
    """A gradient and its sum, what follows of the layer, and the update behind all of that."""
    program = Program()
    program.input("weights")
    program.add("a")
    program.add("dw", "a")
    program.add("sum", "dw", is_collective=True, **how)
    program.add("b", "a weights")
    program.add("c", "b")
    program.add("update", "sum weights")
    return program


def test_as_written_what_only_results_need_comes_as_soon_as_it_can():
    program = backward()
    assert program.written() == ["weights", "a", "dw", "sum", "sum done", "b", "c", "update"]
    at_once = program.written(tail="sum update", at_once="sum")
    assert at_once == ["weights", "a", "dw", "sum", "sum done", "update", "b", "c"]
    # The state is read once more before the update writes over it.
    later = program.written(tail="sum update", at_once="sum", update="b")
    assert later == ["weights", "a", "dw", "sum", "sum done", "b", "update", "c"]


def test_as_written_what_stands_behind_a_collective_beside_which_others_run_stays():
    assert backward().written(tail="sum update")[-1] == "update"


@pytest.mark.parametrize("seed", range(40))
def test_random_orders_are_possible_and_the_same_each_time(seed: int):
    rng = random.Random(seed)
    program = Program()
    for number in range(60):
        near = program.names[max(0, number - 15) :]
        reads = rng.sample(near, k=min(len(near), rng.randint(0, 3)))
        collective = rng.random() < 0.2
        program.add(
            f"k{number}",
            " ".join(reads),
            float(rng.randint(1, 20)),
            is_collective=collective,
            is_in_place=collective and rng.random() < 0.5,
        )
    sums = " ".join(n for n, kernel in zip(program.names, program.kernels, strict=True) if kernel.is_in_place)
    outputs = " ".join(rng.sample(program.names, k=12))
    for found in (program.scheduled(outputs, early=sums), program.written(tail=outputs)):
        there: set[str] = set()
        for name in found:
            number = program.names.index(name.removesuffix(" done"))
            if not name.endswith(" done"):
                ends = [
                    f"{n} done" if program.kernels[program.names.index(n)].is_collective else n
                    for n in program.kernels[number].reads
                ]
                assert there.issuperset(ends)
            else:
                assert program.names[number] in there
            there.add(name)
        assert len(there) == 60 + sum(kernel.is_collective for kernel in program.kernels)
    assert program.scheduled(outputs, early=sums) == program.scheduled(outputs, early=sums)
