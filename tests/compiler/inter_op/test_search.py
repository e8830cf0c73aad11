"""The stage search finds what enumeration finds, proves it, and says what is missing where nothing fits."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from autopar.compiler.inter_op.bounds import most_stages, prefix_bounds
from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.inter_op.submeshes import submesh_choices
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.ir.schedules import SCHEDULES
from tests.compiler.inter_op.stage_problems import search, tables_of

CASES = 300
NAMES = list(SCHEDULES)
MOST_VIRTUAL = {"interleaved": 3, "interleaved-zero-bubble": 3, "zero-bubble-v": 2, "dualpipe-v": 2}


def random_problem(seed: int) -> dict:
    """At most 6 layers and 8 devices; every range and submesh has 0 to 3 costs, and memory is often too small."""
    draw = random.Random(seed)
    num_layers, per_host = draw.randint(1, 6), draw.choice([1, 2, 3, 4, 8])
    num_devices = per_host * draw.randint(1, 8 // per_host)
    submeshes = submesh_choices(num_devices, per_host)
    even = draw.random() < 0.5  # costs that grow with the layers and shrink with the devices
    costs = {
        (i, k, m): random_front(draw, (k - i) / m.num_devices if even else 1.0)
        for i, k in itertools.combinations(range(num_layers + 1), 2)
        for m in submeshes
    }
    slow = draw.choice([0.0, 0.1, 2.0])
    transfers = {
        (cut, m, n): draw.random() * slow for cut in range(1, num_layers) for m in submeshes for n in submeshes
    }
    schedule = NAMES[seed % len(NAMES)]
    fewest = draw.choice([1, 1, 2, 3])
    return {
        "num_layers": num_layers,
        "num_devices": num_devices,
        "submeshes": submeshes,
        "costs": costs,
        "transfers": transfers,
        "num_microbatches": draw.choice([1, 2, 3, 4, 8, 16]),
        "schedule": schedule,
        "virtual_stages": draw.choice(range(1, MOST_VIRTUAL.get(schedule, 1) + 1)),
        "memory_bytes": draw.choice([1, 2, 4, 6, 12, 1000]),
        "min_stages": min(fewest, num_layers),
        "max_stages": draw.choice([None, None, *range(min(fewest, num_layers), 4)]),
    }


def random_front(draw: random.Random, scale: float) -> list[StageCost]:
    return [
        StageCost(
            forward_s=scale * draw.uniform(0.5, 1.5),
            backward_s=scale * draw.uniform(1.0, 3.0),
            weight_s=scale * draw.uniform(0.2, 0.9),
            update_s=draw.choice([0.0, draw.uniform(0, 4)]),
            state_bytes=draw.randint(0, 4),
            activation_bytes=draw.randint(0, 4),
            temporary_bytes=draw.randint(0, 2),
            choice=number,
        )
        for number in range(draw.choice([0, 1, 1, 2, 3]))
    ]


def every_partition(problem: dict):
    """Ranges with a submesh and a cost each, on no more devices and stages than there are."""
    num_layers = problem["num_layers"]
    for cuts in itertools.product([False, True], repeat=num_layers - 1):
        ends = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), num_layers]
        ranges = list(itertools.pairwise(ends))
        if not problem["min_stages"] <= len(ranges) <= (problem["max_stages"] or num_layers):
            continue
        for submeshes in itertools.product(problem["submeshes"], repeat=len(ranges)):
            if sum(m.num_devices for m in submeshes) > problem["num_devices"]:
                continue
            yield ranges, submeshes


def microbatches_held(problem: dict, stage: int, num_stages: int) -> float:
    """As in the papers; written for this test."""
    m, v, behind = problem["num_microbatches"], problem["virtual_stages"], num_stages - 1 - stage
    if problem["schedule"] == "interleaved" and v > 1:
        return min(m, (2 * behind + (v - 1) * num_stages + 1) / v)
    if problem["schedule"] == "dualpipe-v" and v > 1:
        return min(m, num_stages + 0.5)
    if problem["schedule"] == "zero-bubble-h2":
        return min(m, 2 * num_stages - 1)
    held = {"gpipe": m, "1f1b": behind + 1, "interleaved": behind + 1, "eager-1f1b": 2 * behind + 1}
    return min(m, held.get(problem["schedule"], num_stages))


def time_of(problem: dict, costs, transfers) -> float:
    """The step time from the table of formulas; written for this test."""
    m, v, schedule = problem["num_microbatches"], problem["virtual_stages"], problem["schedule"]
    total, slowest = 0.0, 0.0
    for cost, x in zip(costs, [*transfers, 0.0]):
        f, b, w = cost.forward_s, cost.backward_s, cost.weight_s
        t, split = f + b, schedule.startswith("zero-bubble") or schedule in ("interleaved-zero-bubble", "dualpipe-v")
        if split and m == 1:
            total += t - w + v * x  # all but the weight gradients, one after the other
        elif split and (v > 1 or schedule == "zero-bubble-h2"):
            in_v_shape = schedule in ("zero-bubble-v", "dualpipe-v")
            ways = {
                "zero-bubble-h2": f + max(0, b - 3 * w),
                "interleaved-zero-bubble": max(f, b - w, f + b - 2 * w) / v,
            }
            own = max(f, b - w) / v if in_v_shape else ways[schedule]
            total += own + v * x
            steady = m * t - own
            slowest = max(slowest, steady + (m - 1) * x if v == 1 else max(steady, (m - 1) * v * x))
        elif split:
            total += max(f, w) + b - 2 * w + x
            slowest = max(slowest, (m - 1) * (f + b + x) + w + min(f, w))
        elif schedule == "interleaved" and v > 1:
            total += (f + b) / v + v * x
            slowest = max(slowest, m * (f + b) - (f + b) / v, (m - 1) * v * x)
        elif schedule in ("1f1b", "interleaved"):
            total += f + b + x
            slowest = max(slowest, (m - 1) * (f + b + x))
        else:
            total += f + b + x
            slowest = max(slowest, (m - 1) * (f + b), (m - 1) * x)
    end = 0.0
    for cost, x in zip(reversed(costs), [0.0, *reversed(transfers)]):
        own = cost.weight_s if split and m == 1 else 0.0
        earlier = 0.0 if split and m > 1 else (cost.backward_s - own) / v + x / 2
        end = max(cost.update_s + own / v, end - earlier)
    return total + slowest + end


def brute_force(problem: dict) -> float:
    best = math.inf
    for ranges, submeshes in every_partition(problem):
        count = len(ranges)
        transfers = [problem["transfers"][k, m, n] for (_, k), (m, n) in zip(ranges, itertools.pairwise(submeshes))]
        choices = [
            [
                cost
                for cost in problem["costs"][i, k, m]
                if cost.state_bytes
                + cost.temporary_bytes
                + microbatches_held(problem, stage, count) * cost.activation_bytes
                <= problem["memory_bytes"]
            ]
            for stage, ((i, k), m) in enumerate(zip(ranges, submeshes))
        ]
        for costs in itertools.product(*choices):
            best = min(best, time_of(problem, costs, transfers))
    return best


@pytest.mark.parametrize("way", ["few", "usual bounds", "by stages"])
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_search_equals_enumeration(number, way, monkeypatch) -> None:
    if way != "few":
        monkeypatch.setattr("autopar.compiler.inter_op.search._FEW_CHOICES", -1)
    if way == "by stages":
        monkeypatch.setattr("autopar.compiler.inter_op.search.MANY_LABELS", -1)
    infeasible = 0
    for seed in range(number, CASES, len(NAMES)):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if math.isinf(expected):
            infeasible += 1
            with pytest.raises((MemoryTooSmall, InvalidArgument)):
                search(problem)
            continue
        result = search(problem)
        assert result.step_time_s == pytest.approx(expected, rel=1e-9), seed
        assert result.gap <= 1e-9, seed
    assert infeasible >= 3


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_partitions_are_what_they_say(seed) -> None:
    problem = random_problem(seed) | {"memory_bytes": 1000, "max_stages": None}
    if math.isinf(brute_force(problem)):
        pytest.skip("no partition")
    result = search(problem, top=3)
    partitions = [result.best, *result.runners_up]
    assert len(partitions) <= 1 + 3 + 3
    on = [tuple(stage.submesh for stage in each.stages) for each in partitions]
    assert all(each not in on[:place] for place, each in enumerate(on) if place >= 1 + 3)
    times = [partition.step_time_s for partition in partitions]
    assert times == sorted(times)
    shapes = {tuple((s.start, s.stop, s.submesh) for s in partition.stages) for partition in partitions}
    assert len(shapes) == len(partitions)
    for partition in partitions:
        stages = partition.stages
        assert [s.start for s in stages] == [0, *(s.stop for s in stages[:-1])]
        assert stages[-1].stop == problem["num_layers"]
        assert partition.num_devices <= problem["num_devices"]
        assert all(s.cost in problem["costs"][s.start, s.stop, s.submesh] for s in stages)
        transfers = [problem["transfers"][a.stop, a.submesh, b.submesh] for a, b in itertools.pairwise(stages)]
        assert partition.step_time_s == pytest.approx(time_of(problem, [s.cost for s in stages], transfers))


def test_runners_up_are_those_that_are_known() -> None:
    problem = random_problem(11) | {"memory_bytes": 1000, "max_stages": None}
    every, known = search(problem), search(problem, is_known=lambda each: len(each.stages) == 2)
    assert known.best == every.best
    assert {len(each.stages) for each in every.runners_up} == {2, 3}
    assert {len(each.stages) for each in known.runners_up} == {2}


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("zero-bubble", 1), ("1f1b", 1), ("1f1b", 4)])
def test_stages_on_more_devices_that_take_little_longer_are_runners_up(schedule, num_microbatches) -> None:
    """As a whole they may be faster: the layouts of whole stages are not known yet."""
    one, two = submeshes = submesh_choices(2, 2)
    seconds = {(0, 1, one): 2.0, (0, 1, two): 1.0, (1, 2, one): 1.0, (1, 2, two): 1.02}
    seconds |= {(0, 2, one): 3.0, (0, 2, two): 2.9}
    costs = {
        place: [StageCost(forward_s=each_s / 3, backward_s=2 * each_s / 3, weight_s=each_s / 3)]
        for place, each_s in seconds.items()
    }
    problem = {"num_layers": 2, "num_devices": 4, "submeshes": submeshes, "costs": costs, "memory_bytes": 1.0}
    problem["transfers"] = {(1, m, n): 0.0 for m in submeshes for n in submeshes}
    result = search(problem, schedule=schedule, num_microbatches=num_microbatches)
    on = [[stage.submesh for stage in each.stages] for each in (result.best, *result.runners_up)]
    assert on[:2] == [[two, one], [two, two]]
    assert 1 < result.runners_up[0].step_time_s / result.best.step_time_s < 1.02


def test_of_few_partitions_those_that_others_beat_in_everything_are_runners_up(monkeypatch) -> None:
    """Formulas count what is sent in full: as a whole, and simulated, such partitions may be faster all the same."""
    (one,) = submesh_choices(1, 1)
    seconds = {(0, 1): 1.1, (1, 2): 1.0, (2, 3): 1.0, (0, 2): 2.1, (1, 3): 1.0, (0, 3): 4.0}
    costs = {(*place, one): [StageCost(forward_s=each / 3, backward_s=2 * each / 3)] for place, each in seconds.items()}
    problem = {"num_layers": 3, "num_devices": 4, "submeshes": [one], "costs": costs, "memory_bytes": 1.0}
    problem["transfers"] = {(cut, one, one): 0.0 for cut in (1, 2)}

    def cuts_met() -> list[list[int]]:
        result = search(problem, schedule="1f1b", num_microbatches=4)
        assert result.gap == 0
        return [[stage.stop for stage in each.stages] for each in (result.best, *result.runners_up)]

    assert cuts_met()[:2] == [[1, 3], [1, 2, 3]]
    monkeypatch.setattr("autopar.compiler.inter_op.search._FEW_CHOICES", -1)
    assert cuts_met()[0] == [1, 3] and [1, 2, 3] not in cuts_met()


def even_problem(num_layers: int, num_devices: int, **changes) -> dict:
    """Equal layers whose devices share the work, at a price that grows with their number."""
    submeshes = submesh_choices(num_devices, 4)
    costs = {
        (i, k, m): [
            StageCost(
                forward_s=(k - i) / m.num_devices * (1 + 0.1 * m.num_devices),
                backward_s=2 * (k - i) / m.num_devices + extra_s,
                activation_bytes=(k - i) * held / m.num_devices,
                state_bytes=(k - i) / m.num_devices,
            )
            for extra_s, held in ((0.0, 4), (0.1, 1))
        ]
        for i, k in itertools.combinations(range(num_layers + 1), 2)
        for m in submeshes
    }
    transfers = {(cut, m, n): 0.01 for cut in range(1, num_layers) for m in submeshes for n in submeshes}
    return {
        "num_layers": num_layers,
        "num_devices": num_devices,
        "submeshes": submeshes,
        "costs": costs,
        "transfers": transfers,
        "num_microbatches": 16,
        "schedule": "1f1b",
        "virtual_stages": 1,
        "memory_bytes": 6.0,
    } | changes


@pytest.mark.parametrize("limit", [{"time_limit_s": 0.0}, {"most_labels": 0}], ids=["time", "work"])
def test_a_search_that_is_out_of_time_or_work_has_a_valid_bound(limit) -> None:
    problem = even_problem(16, 16)
    optimum = search(problem)
    early = search(problem, **limit)
    assert optimum.num_explored > early.num_explored
    assert optimum.gap <= 1e-9
    assert early.lower_bound_s <= optimum.step_time_s * (1 + 1e-9) <= early.step_time_s * (1 + 2e-9)
    assert early.gap > 0.0


@pytest.mark.parametrize("memory_bytes", [2.5, 3.5])
def test_where_memory_is_short_stages_behind_a_cut_bound_what_is_before_it(memory_bytes, monkeypatch) -> None:
    problem = even_problem(24, 32, memory_bytes=memory_bytes)
    explored: list[int] = []
    for many in (math.inf, -1):
        monkeypatch.setattr("autopar.compiler.inter_op.search.MANY_LABELS", many)
        found = search(problem, top=0)
        assert found.gap <= 1e-9
        explored.append(found.num_explored)
    assert explored[1] < explored[0] / 2


@pytest.mark.parametrize("seed", range(30))
def test_no_more_stages_than_the_bound_says_are_below_a_sum(seed) -> None:
    problem = random_problem(seed) | {"memory_bytes": 1000, "min_stages": 1, "max_stages": None}
    tables = tables_of(problem)
    sums_s: dict[int, float] = {}
    for ranges, submeshes in every_partition(problem):
        each = [tables.warmup_s[problem["submeshes"].index(m), i, k].min() for (i, k), m in zip(ranges, submeshes)]
        sums_s[len(ranges)] = min(sums_s.get(len(ranges), math.inf), float(sum(each)))
    limits = tables.limits([1000.0], num_stages=problem["num_layers"])
    for sum_s in (0.5, 1.0, 3.0, 8.0, 20.0):
        most = most_stages(tables, limits, math.inf, sum_s)
        assert most >= max((stages for stages, least_s in sums_s.items() if least_s < sum_s), default=0)


def test_work_that_is_enough_changes_nothing() -> None:
    problem = even_problem(16, 16)
    optimum = search(problem)
    assert search(problem, most_labels=optimum.num_explored) == optimum


@pytest.mark.parametrize("seed", range(40))
def test_what_takes_longer_than_is_of_interest_is_only_bounded(seed) -> None:
    problem = random_problem(seed)
    try:
        best = search(problem)
    except (MemoryTooSmall, InvalidArgument):
        return
    above = search(problem, below_s=1.1 * best.step_time_s)
    assert (above.best, above.lower_bound_s) == (best.best, best.lower_bound_s)
    for share in (0.9, 0.3):
        below = search(problem, below_s=share * best.step_time_s)
        least_s = min(share * best.step_time_s, best.lower_bound_s)
        assert below.step_time_s >= best.step_time_s >= below.lower_bound_s >= least_s


def test_a_step_that_ends_before_its_update_takes_none() -> None:
    cost = StageCost(forward_s=1.0, backward_s=2.0, update_s=5.0)
    timing = Timing(schedule=SCHEDULES["1f1b"], num_microbatches=1)
    assert timing.step_time_s([cost], []) == 8.0
    assert replace(timing, counts_updates=False).step_time_s([cost], []) == 3.0


def test_what_cannot_be_placed_is_not_chosen_and_keeps_the_bound() -> None:
    problem = even_problem(8, 8, memory_bytes=1000)
    free = search(problem)

    def can_place(submeshes) -> bool:
        return list(submeshes) != [stage.submesh for stage in free.best.stages]

    other = search(problem, can_place=can_place)
    assert can_place([stage.submesh for stage in other.best.stages])
    assert other.lower_bound_s == pytest.approx(free.step_time_s)
    assert other.step_time_s >= free.step_time_s


def test_stages_are_no_more_than_asked_for() -> None:
    assert len(search(even_problem(8, 8, memory_bytes=1000)).best.stages) > 1
    assert len(search(even_problem(8, 8, memory_bytes=1000, max_stages=1)).best.stages) == 1


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7])
def test_stages_are_as_many_as_asked_for_and_the_bound_is_that_of_so_many(number) -> None:
    problem = even_problem(10, 7, memory_bytes=1000, num_microbatches=2)
    free, given = search(problem), search(problem, min_stages=number, max_stages=number)
    assert {len(each.stages) for each in (given.best, *given.runners_up)} == {number}
    assert given.gap <= 1e-9
    assert given.step_time_s >= free.step_time_s


def test_a_least_number_of_stages_leaves_more() -> None:
    problem = even_problem(10, 8, memory_bytes=1000)
    free = search(problem)
    assert search(problem, min_stages=len(free.best.stages)).best == free.best
    assert len(search(problem, min_stages=1 + len(free.best.stages)).best.stages) > len(free.best.stages)


def test_too_little_memory_is_told_with_the_least_that_was_found() -> None:
    problem = even_problem(8, 8, memory_bytes=1.5)
    with pytest.raises(MemoryTooSmall, match=r"No partition of 8 layers.*its stage \d.*GiB are missing\.$"):
        search(problem)


def test_that_nothing_fits_is_known_without_a_bound_for_every_number_of_stages(monkeypatch) -> None:
    bounds: list[int] = []

    def counted(*arguments, num_stages, **options):
        bounds.append(num_stages)
        return prefix_bounds(*arguments, num_stages=num_stages, **options)

    monkeypatch.setattr("autopar.compiler.inter_op.search.prefix_bounds", counted)
    problem = even_problem(32, 32, memory_bytes=13.0, virtual_stages=2, schedule="interleaved-zero-bubble")
    problem["submeshes"] = problem["submeshes"][:2]
    with pytest.raises(MemoryTooSmall):
        search(problem)
    assert len(bounds) < 12  # of 26 numbers and ranges of numbers of stages that bounds leave possible


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"submeshes": ()}, r"no way to run 8 layers .* submeshes \(none\), whatever memory"),
        ({"num_layers": 0}, r"0 layers cannot be cut"),
        ({"max_stages": 0}, r"at most 0 stages. Give at least 1"),
        ({"min_stages": 9}, r"At least 9 stages were asked for of 8 layers, and at most 8"),
        ({"min_stages": 3, "max_stages": 2}, r"At least 3 stages were asked for of 8 layers, and at most 2"),
    ],
)
def test_a_search_that_cannot_be_is_refused(changes, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        search(even_problem(8, 8) | changes)
