"""Plans for devices of two and three kinds: exact, how much all orders of kinds gain, and how long they take.

    python -m benchmarks.mixed_clusters exact          random small cases against enumeration, and against two rules
    python -m benchmarks.mixed_clusters shares         shares of a batch against enumeration, and against one rule
    python -m benchmarks.mixed_clusters time           two kinds of 8, 32 and 64 devices each, in processor seconds

`exact` counts the cases in which the best stages with every kind in one run (Metis, USENIX ATC 2024, section 4), and
those with kinds by falling memory (Whale, USENIX ATC 2022, section 3.3), take longer than the best ones, or do not fit.
Both rules get their optimum by enumeration, so that nothing but their restriction counts. `shares` divides microbatches
among lanes that start for a while, compute in tiles and have memory for so many; the rule is Whale's (section 3.3.1,
algorithm 1): by the rate of the devices, and what is too much for one goes where the load is least.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.compiler.inter_op.search import search_stages
from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, submesh_choices
from autopar.compiler.inter_op.uneven_shares import minmax_split
from autopar.errors import MemoryTooSmall
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule
from benchmarks.stage_search_time import GIB, model

SPEEDS, MEMORIES = (1.0, 2.0, 3.0), (8.0, 16.0, 32.0)
SIZES = (8, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Layers by work, bytes of parameters and of activations; kinds by devices, speed and memory."""

    work: tuple[float, ...]
    state: tuple[float, ...]
    activations: tuple[float, ...]
    devices: tuple[int, ...]
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    microbatches: int

    @property
    def submeshes(self) -> list[Submesh]:
        """One device, or both of a kind."""
        return [each for group, count in enumerate(self.devices) for each in submesh_choices(count, 2, group=group)]

    def cost(self, start: int, stop: int, submesh: Submesh) -> list[StageCost]:
        """Seconds by work and speed; data parallelism over the devices of a stage."""
        rate = self.speeds[submesh.group] * submesh.num_devices
        return [
            StageCost(
                forward_s=sum(self.work[start:stop]) / 3 / rate,
                backward_s=sum(self.work[start:stop]) * 2 / 3 / rate,
                state_bytes=sum(self.state[start:stop]),
                activation_bytes=sum(self.activations[start:stop]) / submesh.num_devices,
            )
        ]

    @property
    def timing(self) -> Timing:
        """1F1B."""
        return Timing(schedule=get_schedule(DEFAULT_SCHEDULE), num_microbatches=self.microbatches)


def random_case(seed: int, kinds: int) -> Case:
    """Six layers on one or two devices of each kind, with little memory to spare."""
    draw = random.Random(1000 * kinds + seed)
    layers = 6 if kinds == 2 else 5
    state = tuple(draw.uniform(0.5, 3.0) for _ in range(layers))
    activations = tuple(draw.uniform(0.1, 1.5) for _ in range(layers))
    scale = draw.uniform(0.6, 1.6) * sum(state) / 24
    return Case(
        work=tuple(draw.uniform(0.5, 3.0) for _ in range(layers)),
        state=state,
        activations=activations,
        devices=tuple(draw.randint(1, 2) for _ in range(kinds)),
        speeds=tuple(draw.choice(SPEEDS) for _ in range(kinds)),
        memory=tuple(scale * draw.choice(MEMORIES) for _ in range(kinds)),
        microbatches=draw.choice([4, 8, 16]),
    )


def every_partition_s(case: Case) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the seconds of every partition that fits, and the kinds of its stages."""
    num_layers = len(case.work)
    orders = [
        order
        for count in range(1, num_layers + 1)
        for order in itertools.product(case.submeshes, repeat=count)
        if all(sum(m.num_devices for m in order if m.group == g) <= n for g, n in enumerate(case.devices))
    ]
    for order in orders:
        for cuts in itertools.combinations(range(1, num_layers), len(order) - 1):
            ranges = itertools.pairwise([0, *cuts, num_layers])
            costs = [case.cost(start, stop, m)[0] for (start, stop), m in zip(ranges, order)]
            behind = range(len(order) - 1, -1, -1)
            held = [case.timing.num_in_flight(stages_behind=n, num_stages=len(order)) for n in behind]
            if all(c.peak_bytes(n) <= case.memory[m.group] for c, n, m in zip(costs, held, order)):
                yield case.timing.step_time_s(costs, [0.0] * len(cuts)), tuple(m.group for m in order)


def is_contiguous(kinds: Sequence[int]) -> bool:
    """Return whether every kind is in one run."""
    return len([kind for kind, _ in itertools.groupby(kinds)]) == len(set(kinds))


def by_falling_memory(case: Case) -> Callable[[Sequence[int]], bool]:
    """Return whether kinds with more memory come first, and none idles."""
    return lambda kinds: (
        all(case.memory[a] >= case.memory[b] for a, b in itertools.pairwise(kinds))
        and set(kinds) == set(range(len(case.devices)))
    )


def searched_s(case: Case) -> float:
    """Return the seconds of the best stages that the search finds and proves; infinity if none fit."""
    try:
        found = search_stages(
            len(case.work),
            case.devices,
            case.submeshes,
            case.cost,
            lambda cut, source, target: 0.0,
            timing=case.timing,
            memory_bytes=case.memory,
        )
    except MemoryTooSmall:
        return math.inf
    assert found.gap == 0.0
    return found.step_time_s


def compare(num_cases: int, kinds: int) -> list[str]:
    """Return a row: cases, that do not fit, mismatches, and of each rule the cases behind, lost, mean and worst."""
    mismatches = infeasible = 0
    ratios: dict[str, list[float]] = {"contiguous": [], "memory": []}
    for seed in range(num_cases):
        case = random_case(seed, kinds)
        every = list(every_partition_s(case))
        best_s = min((seconds for seconds, _ in every), default=math.inf)
        found_s = searched_s(case)
        mismatches += not (found_s == best_s or abs(found_s - best_s) <= 1e-9 * best_s)
        if math.isinf(best_s):
            infeasible += 1
            continue
        for name, keeps in (("contiguous", is_contiguous), ("memory", by_falling_memory(case))):
            ratios[name].append(min((s for s, order in every if keeps(order)), default=math.inf) / best_s)
    row = [str(kinds), str(num_cases), str(infeasible), str(mismatches)]
    for each in ratios.values():
        behind = [ratio for ratio in each if ratio > 1 + 1e-9]
        finite = [ratio for ratio in each if math.isfinite(ratio)]
        lost = len(each) - len(finite)
        row += [f"{len(behind) / len(each):.1%}", str(lost), f"{sum(finite) / len(finite):.3f}", f"{max(finite):.2f}"]
    return row


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The rate of a lane's devices, the seconds in which it starts, the size of its tiles, and its room."""

    rate: float
    start_s: float
    tile: int
    room: int

    def seconds(self, count: int) -> float:
        """Return the seconds of so many microbatches; with none, the lane is not started."""
        return (self.start_s + -(-count // self.tile) * self.tile / self.rate) if count else 0.0


def random_lanes(seed: int, *, plain: bool) -> tuple[list[Lane], int]:
    """Return two to four lanes and a number of microbatches; `plain` ones start at once, and have no tiles."""
    draw = random.Random(seed)
    lanes = [
        Lane(
            rate=draw.choice(SPEEDS) * draw.uniform(0.8, 1.2),
            start_s=0.0 if plain else draw.uniform(0.0, 4.0),
            tile=1 if plain else draw.choice((1, 2, 4)),
            room=draw.randint(3, 12),
        )
        for _ in range(draw.randint(2, 4))
    ]
    return lanes, draw.randint(len(lanes), sum(lane.room for lane in lanes))


def slowest_s(lanes: Sequence[Lane], shares: Sequence[int]) -> float:
    """Return the seconds in which the last lane ends."""
    return max(lane.seconds(share) for lane, share in zip(lanes, shares, strict=True))


def shares_by_rate(lanes: Sequence[Lane], total: int) -> list[int]:
    """Return Whale's shares: by rate, whole numbers by largest remainder, and what has no room where load is least."""
    ideal = [total * lane.rate / sum(each.rate for each in lanes) for lane in lanes]
    shares = [int(each) for each in ideal]
    for lane in sorted(range(len(lanes)), key=lambda n: shares[n] - ideal[n])[: total - sum(shares)]:
        shares[lane] += 1
    while full := [n for n, lane in enumerate(lanes) if shares[n] > lane.room]:
        peak = max(full, key=lambda n: shares[n] / lanes[n].room)
        free = [n for n, lane in enumerate(lanes) if shares[n] < lane.room]
        valley = min(free, key=lambda n: (shares[n] / lanes[n].rate, shares[n] / lanes[n].room))
        moved = min(shares[peak] - lanes[peak].room, lanes[valley].room - shares[valley])
        shares[peak] -= moved
        shares[valley] += moved
    return shares


def compare_shares(num_cases: int, *, plain: bool) -> list[str]:
    """Return a row: the lanes, cases, mismatches, and of the rule the cases behind, its mean and its worst ratio."""
    mismatches, ratios = 0, list[float]()
    for seed in range(num_cases):
        lanes, total = random_lanes(seed, plain=plain)
        tables = [[lane.seconds(count) for count in range(lane.room + 1)] for lane in lanes]
        found_s = slowest_s(lanes, minmax_split(tables, total))
        first = (division for division in itertools.product(*(range(lane.room + 1) for lane in lanes[:-1])))
        every = ((*rest, total - sum(rest)) for rest in first if 0 <= total - sum(rest) <= lanes[-1].room)
        mismatches += found_s != min(slowest_s(lanes, division) for division in every)
        ratios.append(slowest_s(lanes, shares_by_rate(lanes, total)) / found_s)
    behind = sum(ratio > 1 + 1e-9 for ratio in ratios) / len(ratios)
    return ["by rate" if plain else "with starts and tiles", str(num_cases), str(mismatches), f"{behind:.1%}",
            f"{min(ratios):.3f}", f"{sum(ratios) / len(ratios):.3f}", f"{max(ratios):.2f}"]  # fmt: skip


def search_time(devices: int, layers: int, microbatches: int, limit_s: float) -> list[str]:
    """Return a row: devices of each kind, layers, step time, gap, labels, processor seconds.

    A transformer by formula (`stage_search_time`); the second kind takes 2.5 times as long, and has 0.4 of the memory.
    """
    costs, transfer_s = model(layers)

    def of_kind(start: int, stop: int, submesh: Submesh) -> list[StageCost]:
        slower = 2.5 if submesh.group else 1.0
        return [
            replace(
                each,
                forward_s=slower * each.forward_s,
                backward_s=slower * each.backward_s,
                weight_s=slower * each.weight_s,
                update_s=slower * each.update_s,
            )
            for each in costs(start, stop, replace(submesh, group=0))
        ]

    choices = [m for group in range(2) for m in submesh_choices(devices, 8, any_host_count=False, group=group)]
    start_s = time.process_time()
    found = search_stages(
        layers,
        [devices, devices],
        choices,
        of_kind,
        lambda cut, source, target: (
            (10.0 if source.group != target.group else 1.0)
            * transfer_s(cut, replace(source, group=0), replace(target, group=0))
        ),
        timing=Timing(schedule=get_schedule(DEFAULT_SCHEDULE), num_microbatches=microbatches),
        memory_bytes=[80 * GIB, 32 * GIB],
        time_limit_s=limit_s,
    )
    order = " ".join(f"{s.stop - s.start}@{s.submesh}" for s in found.best.stages)
    seconds = time.process_time() - start_s
    return [f"2 x {devices}", str(layers), f"{found.step_time_s:.3f}", f"{found.gap:.2%}", str(found.num_explored),
            f"{seconds:.2f}", order.replace(" of group 1", "'")]  # fmt: skip


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exact", "shares", "time"))
    parser.add_argument("--cases", type=int, default=250, help="random cases for each number of kinds")
    parser.add_argument("--devices", type=int, nargs="*", default=SIZES, help="of each of the two kinds")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds, after which the gap tells the rest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    if options.what == "exact":
        rule = ("behind", "do not fit", "mean ratio", "worst")
        columns = (
            "kinds",
            "cases",
            "none fits",
            "mismatches",
            *(f"{name}: {each}" for name in ("runs", "memory") for each in rule),
        )
        rows = [compare(options.cases, kinds) for kinds in (2, 3)]
    elif options.what == "shares":
        columns = ("lanes", "cases", "mismatches", "rule behind", "best ratio", "mean ratio", "worst ratio")
        rows = [compare_shares(options.cases, plain=plain) for plain in (True, False)]
    else:
        columns = ("devices", "layers", "step s", "gap", "labels", "CPU s", "stages (' slow)")
        rows = [search_time(n, options.layers, options.microbatches, options.time_limit) for n in options.devices]
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(width=200).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
