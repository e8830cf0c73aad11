"""Order the tasks of a pipeline: on every mesh, which stage works on which microbatch, and when.

Stages form a chain, F0 -> F1 -> ... -> F(S-1) -> B(S-1) -> ... -> B0; W of a stage follows its B. With S
meshes, M microbatches, V stages per mesh, and a mesh's times f, b, w (b includes w unless it is split off):

    schedule       idle time per mesh    in flight at stage s    paper
    gpipe          (S-1)(f+b)            M                       GPipe, arXiv 1811.06965
    1f1b           (S-1)(f+b)            min(M, S-s)             PipeDream-Flush, arXiv 2006.09503
    eager-1f1b     (S-1)(f+b)            min(M, 2(S-s)-1)        overlapped transfers, arXiv 2211.05322
    interleaved    (S-1)(f+b)/V          see `_megatron`         Megatron-LM, arXiv 2104.04473
    zero-bubble    (S-1)(f+b-w)          at most S               ZB-H1, arXiv 2401.10241

Stages of one mesh that are neighbours act as one stage. Other placements are list-scheduled: a simulation in
unit time, whose order is a restriction of one global order and hence free of deadlocks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, groupby

from autopar.errors import InvalidArgument, InvalidProgram
from autopar.ir.program import Task

Order = tuple[tuple[Task, ...], ...]  # per mesh
Chain = Callable[[int, int, int], list[Task]]  # (stage, number of stages, number of microbatches)


def schedule_tasks(
    name: str, *, num_stages: int, num_meshes: int, num_microbatches: int, stage_mesh: Sequence[int]
) -> Order:
    """Per mesh the order of its forward, backward and (zero-bubble only) weight-gradient tasks."""
    if name not in SCHEDULES:
        raise InvalidArgument(f"Schedule '{name}' is unknown. Use one of: {', '.join(sorted(SCHEDULES))}.")
    if num_microbatches < 1:
        raise InvalidArgument(f"A pipeline needs at least 1 microbatch; it was given {num_microbatches}.")
    if len(stage_mesh) != num_stages or set(stage_mesh) != set(range(num_meshes)):
        raise InvalidArgument(
            f"{num_stages} stages on {num_meshes} meshes were placed on {list(stage_mesh)}. "
            "Give one mesh number per stage, and every mesh a stage."
        )
    runs = [(mesh, list(run)) for mesh, run in groupby(range(num_stages), key=stage_mesh.__getitem__)]
    if len(runs) == num_meshes:
        tasks = {
            mesh: _fused(SCHEDULES[name](depth, num_meshes, num_microbatches), run)
            for depth, (mesh, run) in enumerate(runs)
        }
        return tuple(tasks[mesh] for mesh in range(num_meshes))
    if name == "gpipe":
        return _breadth_first(num_meshes, num_microbatches, stage_mesh)
    if name == "interleaved" and _is_looping(num_meshes, stage_mesh):
        return _megatron(num_meshes, num_microbatches, stage_mesh)
    return _list_schedule(name, num_meshes, num_microbatches, stage_mesh)


def peak_in_flight(order: Order) -> tuple[int, ...]:
    """Per mesh the most (stage, microbatch) pairs whose F ran and whose last backward task did not."""
    return tuple(_peak(tasks) for tasks in order)


def _peak(tasks: Sequence[Task]) -> int:
    last = "W" if any(task.kind == "W" for task in tasks) else "B"
    in_flight = peak = 0
    for task in tasks:
        in_flight += (task.kind == "F") - (task.kind == last)
        peak = max(peak, in_flight)
    return peak


def check_order(order: Order, *, stage_mesh: Sequence[int], num_microbatches: int) -> None:
    """Raise InvalidProgram unless every task is there once, on its stage's mesh, and none waits forever."""
    kinds = "FBW" if any(task.kind == "W" for task in chain(*order)) else "FB"
    wanted = {
        _task(kind, stage, microbatch)
        for kind in kinds
        for stage in range(len(stage_mesh))
        for microbatch in range(num_microbatches)
    }
    counts = Counter(chain(*order))
    for task in sorted(wanted | set(counts), key=str):
        if counts[task] != (task in wanted):
            raise InvalidProgram(f"Task {task} is scheduled {counts[task]} times; it must be {int(task in wanted)}.")
    for mesh, tasks in enumerate(order):
        for task in tasks:
            if stage_mesh[task.stage] != mesh:
                raise InvalidProgram(f"Task {task} is on mesh {mesh}; its stage lives on {stage_mesh[task.stage]}.")
    _check_acyclic(order, len(stage_mesh))


def _check_acyclic(order: Order, num_stages: int) -> None:
    done: set[Task] = set()
    positions = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for mesh, tasks in enumerate(order):
            while positions[mesh] < len(tasks) and done.issuperset(_needs(tasks[positions[mesh]], num_stages)):
                done.add(tasks[positions[mesh]])
                positions[mesh] += 1
                moved = True
    stuck = [(mesh, tasks[at]) for mesh, (tasks, at) in enumerate(zip(order, positions)) if at < len(tasks)]
    if stuck:
        waits = ", ".join(f"mesh {mesh} at {task}" for mesh, task in stuck)
        raise InvalidProgram(f"Deadlock: {waits}. Each needs a task that comes later. Reorder one of the lists.")


def _needs(task: Task, num_stages: int) -> list[Task]:
    stage, microbatch = task.stage, task.microbatch
    if task.kind == "W":
        return [_task("B", stage, microbatch)]
    if task.kind == "F":
        return [_task("F", stage - 1, microbatch)] if stage else []
    return [_task("B", stage + 1, microbatch) if stage + 1 < num_stages else _task("F", stage, microbatch)]


def _task(kind: str, stage: int, microbatch: int | None) -> Task:
    return Task(kind=kind, stage=stage, microbatch=microbatch)


def _fused(tasks: Sequence[Task], run: list[int]) -> tuple[Task, ...]:
    """Neighbouring stages of one mesh act as one stage: each task becomes one task per stage."""
    return tuple(
        _task(task.kind, stage, task.microbatch)
        for task in tasks
        for stage in (run if task.kind == "F" else reversed(run))
    )


def _gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Task]:
    """All forward, then all backward."""
    return [_task(kind, stage, m) for kind in "FB" for m in range(num_microbatches)]


def _1f1b(stage: int, num_stages: int, num_microbatches: int) -> list[Task]:
    """S-s forward tasks fill the pipeline, then a backward task makes room for each forward task."""
    return _alternate(stage, num_microbatches, in_flight=num_stages - stage)


def _eager_1f1b(stage: int, num_stages: int, num_microbatches: int) -> list[Task]:
    """1F1B that runs one more forward task ahead per stage below, which hides the transfers behind it."""
    return _alternate(stage, num_microbatches, in_flight=2 * (num_stages - stage) - 1)


def _alternate(stage: int, num_microbatches: int, *, in_flight: int) -> list[Task]:
    forward = [_task("F", stage, m) for m in range(num_microbatches)]
    backward = [_task("B", stage, m) for m in range(num_microbatches)]
    return _merge(forward, backward, warm_up=min(in_flight, num_microbatches) - 1)


def _merge(forward: list[Task], backward: list[Task], *, warm_up: int) -> list[Task]:
    pairs = zip(forward[warm_up:], backward)
    steady = len(forward) - warm_up
    return [*forward[:warm_up], *chain(*pairs), *backward[steady:]]


def _zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> list[Task]:
    """ZB-H1: 1F1B whose W of a microbatch waits until `stage` more B have run.

    Stage s then holds S-s microbatches for their B and s for their W: S everywhere, the most that 1F1B holds
    on any stage. Late stages hand out their first B early; the W left over fill the time of 1F1B's drain.
    The idle time is (S-1)(max(f, w) + b - w) when M >= S; the paper assumes f >= w.
    """
    tasks: list[Task] = []
    for task in _1f1b(stage, num_stages, num_microbatches):
        tasks.append(task)
        if task.kind == "B" and task.microbatch is not None and task.microbatch >= stage:
            tasks.append(_task("W", stage, task.microbatch - stage))
    return tasks + [_task("W", stage, m) for m in range(max(0, num_microbatches - stage), num_microbatches)]


SCHEDULES: dict[str, Chain] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "eager-1f1b": _eager_1f1b,
    "interleaved": _1f1b,  # which it is when the stages of every mesh are neighbours
    "zero-bubble": _zero_bubble,
}


def _breadth_first(num_meshes: int, num_microbatches: int, stage_mesh: Sequence[int]) -> Order:
    """GPipe with several stages per mesh: stage after stage forward, then stage after stage backward."""
    stages = range(len(stage_mesh))
    tasks = [_task("F", s, m) for s in stages for m in range(num_microbatches)]
    tasks += [_task("B", s, m) for s in reversed(stages) for m in range(num_microbatches)]
    return tuple(tuple(t for t in tasks if stage_mesh[t.stage] == mesh) for mesh in range(num_meshes))


def _is_looping(num_meshes: int, stage_mesh: Sequence[int]) -> bool:
    first = list(stage_mesh[:num_meshes])
    return len(set(first)) == num_meshes and list(stage_mesh) == first * (len(stage_mesh) // num_meshes)


def _megatron(num_meshes: int, num_microbatches: int, stage_mesh: Sequence[int]) -> Order:
    """Megatron's interleaved order: groups of P microbatches pass through the V stages of a mesh in turn.

    Mesh d of P runs 2(P-d-1) + (V-1)P forward tasks before its first backward task, and holds one more than
    that. Where P does not divide M, this is the order of the next multiple without the tasks beyond M.
    """
    per_mesh = len(stage_mesh) // num_meshes
    orders: dict[int, tuple[Task, ...]] = {}
    for depth in range(num_meshes):
        mine = [chunk * num_meshes + depth for chunk in range(per_mesh)]
        groups = [range(first, first + num_meshes) for first in range(0, num_microbatches, num_meshes)]
        forward = [_task("F", s, m) for group in groups for s in mine for m in group]
        backward = [_task("B", s, m) for group in groups for s in reversed(mine) for m in group]
        warm_up = min(len(forward), 2 * (num_meshes - depth - 1) + (per_mesh - 1) * num_meshes)
        tasks = _merge(forward, backward, warm_up=warm_up)
        orders[stage_mesh[depth]] = tuple(t for t in tasks if (t.microbatch or 0) < num_microbatches)
    return tuple(orders[mesh] for mesh in range(num_meshes))


def _list_schedule(name: str, num_meshes: int, num_microbatches: int, stage_mesh: Sequence[int]) -> Order:
    """In every unit of time each mesh takes its most urgent ready task.

    A new microbatch enters a mesh only while fewer pairs than the limit are in flight there. Microbatches
    enter in order, so a younger one never holds back the oldest, and the simulation ends.
    """
    kinds = "FBW" if name == "zero-bubble" else "FB"
    counts = {(kind, stage): 0 for stage in range(len(stage_mesh)) for kind in kinds}  # tasks run so far
    orders: list[list[Task]] = [[] for _ in range(num_meshes)]
    stages = [[s for s, mesh in enumerate(stage_mesh) if mesh == number] for number in range(num_meshes)]
    depths = sorted(range(num_meshes), key=lambda mesh: stages[mesh][0])
    limits = {mesh: _limit(name, num_meshes, d, len(stages[mesh])) for d, mesh in enumerate(depths)}
    while any(count < num_microbatches for count in counts.values()):
        ready = [_ready(counts, mine, limits[mesh], num_microbatches) for mesh, mine in enumerate(stages)]
        for tasks, candidates in zip(orders, ready):
            if candidates:
                task = min(candidates, key=lambda task: _urgency(task, num_meshes))
                tasks.append(task)
                counts[task.kind, task.stage] += 1
    return tuple(map(tuple, orders))


def _limit(name: str, num_meshes: int, depth: int, per_mesh: int) -> int:
    """(stage, microbatch) pairs in flight above which a mesh takes no new microbatch."""
    below = num_meshes - depth  # meshes from here to the end of the chain
    match name:
        case "eager-1f1b":
            return per_mesh * (2 * below - 1)
        case "interleaved":  # as many as Megatron's
            return 2 * (below - 1) + (per_mesh - 1) * num_meshes + 1
        case "zero-bubble":
            return per_mesh * num_meshes
        case _:
            return per_mesh * below


def _ready(counts: dict[tuple[str, int], int], mine: list[int], limit: int, num_microbatches: int) -> list[Task]:
    """The next task of each kind and stage of one mesh, where what it needs has run."""
    last = "W" if ("W", 0) in counts else "B"
    full = sum(counts["F", stage] - counts[last, stage] for stage in mine) >= limit
    candidates = [_task(kind, stage, count) for (kind, stage), count in counts.items() if stage in mine]
    return [
        task
        for task in candidates
        if counts[task.kind, task.stage] < num_microbatches
        and not (full and task.kind == "F" and task.stage == mine[0])
        and all(
            counts[need.kind, need.stage] > counts[task.kind, task.stage] for need in _needs(task, _num_stages(counts))
        )
    ]


def _num_stages(counts: dict[tuple[str, int], int]) -> int:
    return sum(kind == "F" for kind, _ in counts)


def _urgency(task: Task, num_meshes: int) -> tuple[int, int, int, int]:
    """B before F before W; then groups of one microbatch per mesh, as in Megatron's order."""
    microbatch = task.microbatch or 0
    stage = -task.stage if task.kind == "B" else task.stage
    return "BFW".index(task.kind), microbatch // num_meshes, stage, microbatch
