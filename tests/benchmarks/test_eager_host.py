"""A host adds time to a task whose kernels it launches one by one."""

from dataclasses import replace

import pytest

from autopar.step_parts import StepParts, TaskParts
from benchmarks import eager_steps
from benchmarks.accuracy_cases import Case, case_of
from benchmarks.accuracy_fit import Scalars
from benchmarks.accuracy_frameworks import MEGATRON_LAYER
from benchmarks.eager_host import APART, host_seconds
from tests.benchmarks.measured_rows import SMALL_ROW, row

LAUNCH_S = 1e-5
ROW = {"layers": "6", "dp": "4", "tp": "1", "pp": "2", "seq": "1"}
"""A row with hardly any scores of attention."""


def took_s(case: Case, kind: str, device_s: float = 0.0, *, alone: bool = False) -> float:
    """Seconds of one task of a step; `alone`: no other task of its microbatch."""
    kinds = {kind} if alone else {"F", "B", kind}
    tasks = {each: TaskParts(kind=each, runs=1, work=(), collectives=()) for each in kinds}
    parts = StepParts(tasks=tuple(tasks.values()), transfers=(), waited_s=0.0)
    return host_seconds(case, MEGATRON_LAYER, LAUNCH_S, parts)(tasks[kind], device_s)


def test_a_device_without_work_waits_for_every_kernel_of_the_layers():
    forward, backward = MEGATRON_LAYER.forward, MEGATRON_LAYER.backward
    again, kept = (case_of(row(**ROW, recompute=each)) for each in ("full", "none"))
    assert took_s(kept, "F") == took_s(again, "F") == pytest.approx(3 * forward * LAUNCH_S)
    assert took_s(kept, "B") == pytest.approx(3 * backward * LAUNCH_S)
    assert took_s(again, "B") == pytest.approx(3 * (forward + backward) * LAUNCH_S)
    assert took_s(again, "F", alone=True) == pytest.approx(took_s(again, "F") + took_s(again, "B"))
    assert took_s(again, "U", 0.5) == 0.5


def test_a_task_takes_more_than_the_longer_of_both_and_less_than_one_after_the_other():
    case = case_of(row(**ROW))
    host_s = took_s(case, "B")
    for device_s in (host_s / 3, host_s, 3 * host_s):
        assert max(device_s, host_s) < took_s(case, "B", device_s) < device_s + host_s


def test_collectives_are_launched_and_wait_for_the_slowest_host_of_their_devices():
    alone, two, four = (case_of(row(**(ROW | {"tp": each, "dp": "1", "ngpu": ""}))) for each in ("1", "2", "4"))
    waits = [took_s(each, "F") - took_s(alone, "F") for each in (two, four)]
    shares = (1 / 2, 1 / 2 + 1 / 3 + 1 / 4)
    assert waits == pytest.approx([3 * 2 * (1 + APART * share) * LAUNCH_S for share in shares])


def test_scores_of_few_heads_or_in_32_bits_have_no_fused_softmax():
    # 16 heads among 8 devices: two each, and four only with two examples.
    one, two = (case_of(row(**(ROW | {"tp": "8", "dp": "1", "pp": "1", "mbs": each}))) for each in ("1", "2"))
    more_s = 6 * MEGATRON_LAYER.softmax * LAUNCH_S
    assert took_s(one, "F") - took_s(two, "F") == pytest.approx(more_s)
    in_one_kernel = replace(one, habits=replace(one.habits, flash=True))
    assert took_s(in_one_kernel, "F") == took_s(two, "F")
    in_32_bits = replace(two, habits=replace(two.habits, dtype="tf32"))
    assert took_s(in_32_bits, "F") == took_s(one, "F")


def test_dropout_and_scores_without_the_fused_softmax_move_more_on_the_device():
    small, large = (case_of(row(**(ROW | {"seq": each}))) for each in ("1024", "2048"))
    assert took_s(small, "F", 1.0) < took_s(large, "F", 1.0)
    for case in (small, large):
        again, in_one_kernel = took_s(case, "B", 1.0), replace(case, habits=replace(case.habits, flash=True))
        in_32_bits = replace(case, habits=replace(case.habits, dtype="tf32"))
        assert took_s(in_one_kernel, "B", 1.0) < again < took_s(in_32_bits, "B", 1.0)
        # A score in 16 bits is read and written, and so is its mask: 3 layers of 16 heads and 4 examples, twice.
        scores = 3 * 16 * 4 * case.layout.sequence**2
        moved_s = 2 * 5 * scores / case.machine.memory_bandwidth
        assert again - took_s(in_one_kernel, "B", 1.0) == pytest.approx(moved_s, rel=0.01)


def test_steps_whose_launches_are_not_counted_are_those_of_their_kernels():
    case = case_of(row(**SMALL_ROW))
    entry = eager_steps.priced(case)
    uncounted = replace(case, habits=replace(case.habits, launches=None))
    parts = StepParts.from_data(entry.parts or {})
    predict = eager_steps.by_parts({case.row.digest: entry})
    (plain,) = predict([uncounted], Scalars())
    assert plain.step_s == pytest.approx(parts.step_s(eager_steps.machine_of(case, Scalars())))
    assert predict([case], Scalars())[0].step_s == pytest.approx(entry.step_s) != plain.step_s
