"""Search a plan in full, the best first: one program on one mesh, or stages, for every number of microbatches.

    StageProblem, the seconds that a plan is simulated to take  ->  Plan, the fastest that there is

A *region* is a part of the space, with a time that no plan in it undercuts:

    OneProgram       one mesh shape, for a number of microbatches      its integer program     planning.one_mesh
    Stages           some numbers of stages, for one of microbatches   ranges of layers        planning.candidates
    Lanes            one on every machine, for a number of them        stages and shares       planning.lanes
    Completion       stages that were found there                      layouts of each stage   planning.stage_layouts

The region with the lowest bound is next. It is solved for its best plan, or gives way to regions with higher bounds;
when no bound is below the time of the best plan, that plan is the best. Plans are compared by what they are simulated
to take. What the user fixes takes regions away, and adds none.

How much is looked at is counted in regions and not in seconds, so that a busy machine finds the same plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.frontend.training_loops import refuse_long_training_loops, unroll_training_loops, without_gradient
from autopar.compiler.inter_op.stage_costs import StageCost
from autopar.compiler.inter_op.submeshes import place_in_groups
from autopar.compiler.intra_op.plan_program import FOLD_FROM
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.host_state import with_offload
from autopar.compiler.planning.candidates import (
    PipelineCandidate,
    StagesKind,
    likely_times_s,
    microbatch_counts,
    stage_candidates,
    worth_splitting,
)
from autopar.compiler.planning.constraints import pins_of_inputs
from autopar.compiler.planning.lanes import lanes_of_machines
from autopar.compiler.planning.layer_costs import ESTIMATE_GAP
from autopar.compiler.planning.manual import plan_by_hand
from autopar.compiler.planning.one_mesh import memory_limit, mesh_choices, plan_by_search
from autopar.compiler.planning.stage_costs import KnownLayers, StageProblem, submesh_mesh
from autopar.compiler.planning.stage_layouts import stage_shardings, with_input_specs
from autopar.compiler.planning.step_bounds import StepBounds, step_bounds
from autopar.compiler.solver.problem import NoneBelow
from autopar.compiler.solver.solve import MAX_GAP
from autopar.errors import AutoparError, InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.plan_sharding import TIME_LIMIT, Certificate
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule
from autopar.methods import EFFORTS, DataParallel, offloaded
from autopar.plain_text import microbatches_in_words
from autopar.progress import tell, tell_best

_ATTEMPTS = 4
"""Searches for less and less memory, until stages as a whole fit."""
_NEXT_SHARE = 0.97
"""Of the memory that one search had, the most that the next one gets."""
_WHOLE_SHARE = 0.97
"""Of the time of stages by their layers: as a whole they rarely take less, unless plans of this step were seen to."""
_UNSEEN_SHARE = 0.85
"""The same as long as no such stages of this step were simulated: small layers gain more by standing together."""
_OTHER_KINDS_SHARE = 0.95
"""Of the least share that stages of some kinds were simulated to take: those of other kinds rarely take less."""
_SLACK = 0.97
"""Of the likely time of stages: what is likely is no bound, so that those that are nearly as good are looked at too."""
_LIKELY_SHARE = 0.9
"""Of the time of equal stages by the layers of other microbatches: the best ones rarely take less."""
_SIMULATED_SHARE = 0.98
"""Of the least share that plans were simulated to take of the time by their stages: others rarely take less."""
_LANES_SHARE = 0.95
"""Of the time of lanes by their formula: they rarely take less when they are simulated."""
_MUCH_MEMORY = 0.8
"""Of a budget: with a plan that needs no more, memory does not matter, and more microbatches only take longer."""
_MICROBATCHES_PER_STAGE = 8
"""A usual number, where nothing else tells numbers apart."""
_STAGES_PER_MACHINE = 2
"""A usual number in a cluster of several, each of which has many hosts for a stage."""
_NUM_RUNNERS_UP = 5
_FEW_KINDS = 2
"""Fewer kinds of stages that were simulated say nothing of other kinds."""

SimulatedTime = Callable[[Plan], float]


@dataclass(frozen=True, kw_only=True, eq=False)
class OneProgram:
    """The plans of one program on one mesh of some devices; a shape of None: of the best of the usual shapes."""

    num_devices: int
    shape: tuple[int, ...] | None
    num_microbatches: int
    bound_s: float
    group: int = 0
    """That of the cluster whose devices these are."""

    @property
    def likely_s(self) -> float:
        """The time that its best plan is taken to need at least."""
        return self.bound_s

    def __str__(self) -> str:
        shape = f"{self.num_devices}" if self.shape is None else "x".join(map(str, self.shape))
        of_group = f" of group {self.group}" if self.group else ""
        return f"one program on {shape}{of_group}, {microbatches_in_words(self.num_microbatches)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """The plans of `num_stages` stages, from the first to the second of these."""

    num_microbatches: int
    num_stages: tuple[int, int]
    bound_s: float
    likely_s: float
    even_s: float
    """The time of equal stages that do nothing but their work: no bound, but it tells regions apart."""
    by_others_s: float = 0.0
    """The least time of equal stages by the layers of other microbatches; 0 as long as it is not known."""
    share: float = 1.0
    """Of the memory: as much as the sum over a stage's layers may reach."""
    attempt: int = 0

    def __str__(self) -> str:
        few, most = self.num_stages
        return f"{few} to {most} stages, {microbatches_in_words(self.num_microbatches)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Lanes:
    """The plan in which every machine runs the step on a share of the microbatches."""

    num_microbatches: int
    bound_s: float

    @property
    def likely_s(self) -> float:
        """The time that it is taken to need at least."""
        return self.bound_s

    def __str__(self) -> str:
        return f"a lane on every machine, {microbatches_in_words(self.num_microbatches)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """The plans of one candidate, whose layouts are to be chosen."""

    candidate: PipelineCandidate
    region: Stages
    first: bool
    """The fastest of its region with stages of its kind: one of which the time as a whole is to be known."""
    estimated_s: float = 0.0
    """Seconds that its plan takes at least, by layouts up to a gap; 0 if there are none yet."""

    def __str__(self) -> str:
        return str(self.candidate)


Region = OneProgram | Stages | Lanes | Completion


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedPlan:
    """The plan of a candidate with its layouts, the costs of its stages, its seconds, and the peak bytes of a device.

    That is one of the devices that use the largest share of the `memory_bytes` that they may use.
    """

    costs: tuple[StageCost, ...]
    step_time_s: float
    peak_bytes: float
    memory_bytes: float
    gap: float
    """The share of its time that the best layouts of these stages may take less."""
    make_plan: Callable[[], Plan]

    @cached_property
    def plan(self) -> Plan:
        """The plan, made when it is first asked for."""
        return self.make_plan()


def shard_candidate(problem: StageProblem, candidate: PipelineCandidate, max_gap: float = MAX_GAP) -> ShardedPlan:
    """Return the plan of a candidate, whose layouts are chosen anew for every stage as a whole, up to a gap."""
    stages = candidate.stages
    devices = place_in_groups([stage.submesh for stage in stages], problem.clusters)
    assert devices is not None
    layers, trace, method = candidate.layers, problem.trace, problem.method
    meshes: list[MeshPlan] = []
    for stage, mine in zip(stages, devices, strict=True):
        mesh = submesh_mesh(problem, stage.submesh)
        meshes.append(MeshPlan(devices=mine, shape=mesh.shape, axis_names=mesh.axis_names, links=mesh.links))
    bare = Plan(
        fingerprint=trace.fingerprint,
        method="Auto",
        meshes=tuple(meshes),
        stages=tuple(
            StagePlan(
                layers=stage.layers,
                mesh=stage.mesh,
                remat=stages[stage.mesh].cost.choice.remat or layers.prepared.recomputes,
            )
            for stage in candidate.virtual_stages
        ),
        cuts=layers.cuts,
        loop_pieces=layers.loop_pieces,
        num_microbatches=layers.num_microbatches,
        schedule=candidate.timing.schedule.name,
        input_specs={},
        batch_statistics=method.batch_statistics,
        random=method.random,
    )
    graph = cut_stages(layers.prepared, StageCut.of(bare))
    if problem.offloads:
        bare = with_offload(bare, graph, offloaded(problem.method), problem.trace.host_state)
        graph = cut_stages(layers.prepared, StageCut.of(bare))
    shardings = stage_shardings(problem, layers, graph, bare, stages, candidate.timing, max_gap)

    def make_plan() -> Plan:
        planned = (replace(mesh, sharding=each.sharding) for mesh, each in zip(meshes, shardings, strict=True))
        return with_input_specs(replace(bare, meshes=tuple(planned)), graph)

    peaks = [(each.peak_bytes, problem.memory_of(stage.submesh)) for each, stage in zip(shardings, stages, strict=True)]
    peak_bytes, memory_bytes = max(peaks, key=lambda peak: peak[0] / peak[1])
    costs = tuple(each.cost for each in shardings)
    return ShardedPlan(
        make_plan=make_plan,
        costs=costs,
        step_time_s=candidate.simulate_s(costs),
        peak_bytes=peak_bytes,
        memory_bytes=memory_bytes,
        gap=max(each.gap for each in shardings),
    )


def search_plan(problem: StageProblem, simulated_s: SimulatedTime) -> Plan:
    """Return the fastest plan that the method allows, with its certificate.

    Raises `MemoryTooSmall` where nothing fits, `InvalidArgument` for what the devices, the layers or the pins cannot
    keep, and `NotSplittable` or `Unsupported` for a step that cannot be cut as it is asked for.
    """
    pins_of_inputs(problem.trace, problem.method.pins)
    if problem.num_devices == 1 and not problem.offloads:
        return _plan_on_one_device(problem, simulated_s)
    if problem.hardware.is_mixed and problem.num_stages is not None:
        raise InvalidArgument(
            f"A number of stages or a mesh_shape was given for {problem.hardware}, whose stages differ in size. "
            "Leave both to the search, or use PipelineParallel for equal stages by hand."
        )
    return _Search.of(problem, simulated_s).run()


def _plan_on_one_device(problem: StageProblem, simulated_s: SimulatedTime) -> Plan:
    """Return the plan of the step as it is, where that fits for sure; else a search says what is computed again.

    A budget that is a word asks for what is fastest within a usual device. Where nothing is, the step runs as it is:
    there is no other device to help.
    """
    trace, method = problem.trace, problem.method
    made = sum(aval_bytes(v.aval) for eqn in jc.all_equations(trace.jaxpr) for v in eqn.outvars)
    needed = made + sum(aval_bytes(leaf.aval) for leaf in trace.inputs) + problem.machine.product_workspace_bytes
    given = method.num_stages, method.mesh_shape, method.schedule, method.num_microbatches, method.remat is True or None
    if any(each is not None for each in given):
        return _Search.of(problem, simulated_s).run()
    if needed > problem.memory_bytes:
        try:
            return _Search.of(problem, simulated_s).run()
        except MemoryTooSmall:
            if not isinstance(method.memory, str):
                raise
    as_it_is = DataParallel(
        random=method.random,
        batch_statistics=method.batch_statistics,
        ignore_user_shardings=method.ignore_user_shardings,
    )
    return replace(plan_by_hand(trace, as_it_is, cluster=problem.hardware), method="Auto")


@dataclass(kw_only=True, eq=False)
class _Search:
    """The state of a search; only its own methods change it."""

    problem: StageProblem
    cuttable: StageProblem
    """The same, with training loops unrolled, as stages need it."""
    simulated_s: SimulatedTime
    known: KnownLayers | None
    """None where the step cannot be cut."""
    bounds: StepBounds | None
    open: list[Region] = field(default_factory=list[Region])
    best: Plan | None = None
    best_s: float = math.inf
    best_in_words: str = ""
    beside: tuple[Plan, float, str] | None = None
    """The best pipelines side by side, their time, and both in words: they never put off what else is looked at."""
    closed_s: float = math.inf
    """The least bound of the regions that are done."""
    others: dict[str, float] = field(default_factory=dict[str, float])
    """Other plans that were met, in words, and their times."""
    found: set[object] = field(default_factory=set[object])
    """The stages that were found, each for a number of microbatches and a share of the memory."""
    tried: set[int] = field(default_factory=set[int])
    shares: dict[StagesKind, float] = field(default_factory=dict[StagesKind, float])
    """By the kind of stages, the least share of their time by their layers that they were simulated to take."""
    lanes_share: float = 0.0
    """The least multiple of its bound that a plan of lanes was simulated to take; 0 for none yet."""
    times_by: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict[tuple[int, int], dict[int, float]])
    """By numbers of microbatches, and those whose layers' costs were taken: the times by the number of equal stages."""
    wholes: dict[object, StageCost] = field(default_factory=dict[object, StageCost])
    """The costs of stages as a whole that are known."""
    expected: dict[tuple[PipelineCandidate, float, tuple[bool, ...]], float] = field(
        default_factory=dict[tuple[PipelineCandidate, float, tuple[bool, ...]], float]
    )
    """The times of candidates of which some stages are known as a whole."""
    simulated_shares: dict[int, float] = field(default_factory=dict[int, float])
    """By the number of stages, the least share of the time by these as a whole that plans were simulated to take."""
    errors: list[AutoparError] = field(default_factory=list[AutoparError])

    @classmethod
    def of(cls, problem: StageProblem, simulated_s: SimulatedTime) -> _Search:
        """Return the search at its start: every region is open."""
        cuttable = replace(problem, trace=unroll_training_loops(problem.trace))
        known, bounds = _if_it_can_be_cut(cuttable)
        search = cls(problem=problem, cuttable=cuttable, simulated_s=simulated_s, known=known, bounds=bounds)
        search.open += search.programs()
        search.open += search.stages()
        search.open += () if problem.offloads else search.lanes()
        if problem.offloads and not search.open:
            raise Unsupported(
                f"offload={problem.method.offload!r} brings values in for the tasks of a step, as its own transfers to "
                "the host do, and "
                f'{problem.trace.name} cannot be cut into a gradient and an update. Use offload="off".'
            )
        return search

    # --- the space ----------------------------------------------------------------------------------------------------

    def programs(self) -> Iterator[Region]:
        """Yield the regions of one program."""
        problem, method = self.problem, self.problem.method
        if problem.named_stages:
            return
        if problem.offloads:
            return  # only updates apart from the rest have their state brought in
        if problem.hardware.is_mixed:
            yield from () if self.is_large else self.programs_of_groups()
            return
        every = problem.num_devices
        divides = method.mesh_shape is None or every % math.prod(method.mesh_shape) == 0
        if self.known is not None and divides and (problem.num_stages or 1) > 1:
            return
        if self.is_large and (problem.num_stages is None or method.num_microbatches is None):
            return  # as a stage: the whole step in one program takes too long to be planned within memory
        sizes = self.sizes() if method.num_stages is None and method.mesh_shape is None else [every]
        for num_devices in reversed(sizes):
            # On few devices, the state alone may be too much; on all of them, the search says what is missing.
            if num_devices == every or self.state_bytes <= num_devices * problem.memory_bytes:
                for mesh in mesh_choices(method, num_devices):
                    yield self.program(num_devices, mesh.shape, method.num_microbatches or 1)

    def programs_of_groups(self) -> Iterator[Region]:
        """Yield the regions of one program on all devices of one machine."""
        method, hardware = self.problem.method, self.problem.hardware
        for number, group in enumerate(hardware.groups):
            for mesh in mesh_choices(method, group.num_devices):
                yield self.program(group.num_devices, mesh.shape, method.num_microbatches or 1, group=number)

    def program(self, num_devices: int, shape: tuple[int, ...], num_microbatches: int, *, group: int = 0) -> OneProgram:
        """Return a region of one program with its bound."""
        bound_s = 0.0 if self.bounds is None else self.bounds.one_program_s(num_devices, num_microbatches)
        return OneProgram(
            num_devices=num_devices, shape=shape, num_microbatches=num_microbatches, bound_s=bound_s, group=group
        )

    def stages(self) -> Iterator[Region]:
        """Yield the regions of stages."""
        if self.known is None:
            return
        assert self.bounds is not None
        if self.state_bytes > self.problem.num_devices * self.problem.memory_bytes and self.open:
            return  # nothing can fit: one program says what is missing
        given = self.cuttable.num_stages
        for count in microbatch_counts(self.cuttable):
            for few, most in self.numbers_of_stages():
                bound_s = self.bounds.stages_s(count, few, most, self.sizes() if given is None else [self.part(given)])
                even_s = min(self.bounds.even_stages_s(count, number) for number in range(few, most + 1))
                yield Stages(
                    num_microbatches=count, num_stages=(few, most), bound_s=bound_s, likely_s=bound_s, even_s=even_s
                )

    def lanes(self) -> Iterator[Region]:
        """Yield the regions of lanes, of which every machine of a mixed cluster gets one, as stages or as one."""
        method = self.problem.method
        asked = self.problem.named_stages or method.remat is True or method.kinds is not None
        if self.known is None or not self.problem.hardware.is_mixed or asked:
            return
        if method.schedule is not None and get_schedule(method.schedule).name != DEFAULT_SCHEDULE:
            return
        assert self.bounds is not None
        for count in microbatch_counts(self.cuttable):
            if count >= len(self.problem.hardware.groups):
                yield Lanes(num_microbatches=count, bound_s=self.bounds.lanes_s(count))

    def numbers_of_stages(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of stages, in ranges: 2, 3 to 4, 5 to 8, ..., or the one that is given."""
        assert self.known is not None
        given = self.cuttable.num_stages
        if given is not None:
            large = self.is_large and self.problem.method.num_microbatches is None
            if given > 1 or large or self.problem.offloads:
                yield given, given
            return
        if self.problem.named_stages:
            yield len(self.problem.named_stages), len(self.problem.named_stages)
            return
        if self.is_large or self.problem.offloads:
            yield 1, 1
        if not self.problem.method.allows_stages:
            return
        most, few = min(self.known.num_layers, self.problem.num_devices), 2
        while few <= most:
            yield few, min(2 * (few - 1), most)
            few = 2 * few - 1

    def sizes(self) -> list[int]:
        """Return the numbers of devices that a mesh can have, smallest first."""
        return sorted({each.num_devices for each in self.cuttable.submeshes()})

    def part(self, num_stages: int) -> int:
        """Return the devices of one of so many equal stages."""
        return max(1, self.problem.num_devices // num_stages)

    @cached_property
    def is_large(self) -> bool:
        """True if the whole step in one program is too much to be planned within a memory that matters in seconds."""
        jaxpr, bounds = jc.open_jaxpr(self.problem.trace.jaxpr)[0], self.bounds
        return len(jaxpr.eqns) >= FOLD_FROM and bounds is not None and bounds.whole_bytes > self.problem.memory_bytes

    @cached_property
    def num_hosts(self) -> int:
        """The hosts of all groups, or the parts of hosts that equal stages divide them into."""
        return sum(cluster.num_hosts for cluster in self.cuttable.clusters)

    @property
    def state_bytes(self) -> float:
        """The bytes that stay from step to step."""
        return 0.0 if self.bounds is None else self.bounds.state_bytes

    # --- the search ---------------------------------------------------------------------------------------------------

    def run(self) -> Plan:
        """Solve regions, the most promising first, until none can hold a better plan."""
        method = self.problem.method
        most, deadline = EFFORTS[method.effort], time.process_time() + method.time_limit_s
        taken, stopped = 0, ""
        while self.open:
            promising = [each for each in self.open if self.best is None or self.likely_s(each) < self.best_s]
            if not promising:
                break
            region = min(promising, key=self.order)
            if not self.is_there(region):
                self.open = [each for each in self.open if self.is_there(each)]
                continue
            if self.best is not None or self.beside is not None:
                if taken >= most:
                    stopped = f'effort="{method.effort}" ended the search'
                    break
                if time.process_time() > deadline:
                    stopped = f"{TIME_LIMIT} of {method.time_limit_s:g} s ended the search"
                    break
            self.open.remove(region)
            taken += self.take(region)
        if self.beside is not None and self.beside[1] < self.best_s:
            self.best, self.best_s, self.best_in_words = self.beside
        if self.best is None:
            raise self.reason()
        bound_s = min(self.best_s, self.closed_s)
        for region in self.open:
            if not isinstance(region, Completion) and region.bound_s < bound_s and self.is_there(region):
                bound_s = region.bound_s
        others = sorted(
            (seconds, words)
            for words, seconds in self.others.items()
            if seconds >= self.best_s and words != self.best_in_words
        )
        certificate = Certificate(
            step_time_s=self.best_s,
            lower_bound_s=bound_s,
            tried=tuple(sorted(self.tried)),
            runners_up=tuple((words, seconds) for seconds, words in others[:_NUM_RUNNERS_UP]),
            stopped=stopped,
            kinds=method.kinds or (),
        )
        return replace(self.best, certificate=certificate)

    def is_there(self, region: Region) -> bool:
        """Return false for several microbatches where there is nothing in them."""
        return isinstance(region, Completion) or region.num_microbatches == 1 or self.splits

    @cached_property
    def splits(self) -> bool:
        """True if several microbatches may be better than one."""
        return worth_splitting(self.cuttable)

    def order(self, region: Region) -> tuple[float, ...]:
        """Return by what regions are sorted: the time that is likely, of stages if even, then how usual they are.

        One program on one mesh is the first plan of all, against which the others are held; or on several machines,
        where that takes too long to be planned, the best stages of a usual number of microbatches.
        """
        likely_s, first = self.likely_s(region), self.best is None
        on_machines = self.problem.hardware.is_mixed and self.is_large
        match region:
            case Completion():
                return (-1.0, likely_s) if first else (likely_s, 0.0)
            case OneProgram():
                return (0.0 if first else likely_s), -1.0
            case Lanes(num_microbatches=count):
                if not self.lanes_share:  # nothing tells them apart yet
                    likely_s = min(each.bound_s for each in self.open if isinstance(each, Lanes))
                return likely_s, self.unusual(count)
            case Stages(num_microbatches=count, num_stages=(few, _), attempt=0) if on_machines:
                usual = min(microbatch_counts(self.cuttable), key=self.unusual)
                return (-2.0, float(few)) if count == usual else (likely_s, self.unusual(count))
            case Stages(num_microbatches=count):
                return max(likely_s, region.even_s), self.unusual(count)

    def unusual(self, num_microbatches: int) -> float:
        """Return how far a number of microbatches is from a usual one."""
        hardware, num_layers = self.problem.hardware, 1 if self.known is None else self.known.num_layers
        most = _STAGES_PER_MACHINE * len(hardware.groups) if hardware.is_mixed else self.num_hosts
        stages, trace = max(1, min(self.num_hosts, num_layers // 2, most)), self.problem.trace
        rows = trace.num_rows if trace.batch_inputs else 1
        # With fewer examples in a microbatch than a stage has devices, some would have none.
        usual = min(_MICROBATCHES_PER_STAGE * stages, max(1, rows * stages // self.problem.num_devices))
        return abs(math.log2(num_microbatches / usual))

    def likely_s(self, region: Region) -> float:
        """Return the time that the best plan of a region is taken to need at least."""
        if isinstance(region, Lanes):
            return max(region.bound_s, _LIKELY_SHARE * self.lanes_share * region.bound_s)
        if isinstance(region, Stages):
            unknown = self.known is not None and region.num_microbatches not in self.known.solved
            return max(region.likely_s, _LIKELY_SHARE * self.unseen_share * region.by_others_s if unknown else 0.0)
        if isinstance(region, OneProgram):
            return region.likely_s
        if region.estimated_s:
            return region.estimated_s
        candidate = region.candidate
        if region.first:
            share = min(_WHOLE_SHARE, self.shares.get(candidate.kind, self.unseen_share))
        else:
            share = min(1.0, self.shares.get(candidate.kind, 1.0))
        return max(self.expected_s(candidate, _SLACK * share), region.region.bound_s)

    def expected_s(self, candidate: PipelineCandidate, share: float) -> float:
        """Return the time of stages, those as a whole that are known, the others a share of that by their layers."""
        wholes = [self.wholes.get(key) for key in candidate.stage_keys]
        known = tuple(whole is not None for whole in wholes)
        if not any(known):
            return share * candidate.step_time_s
        key = candidate, share, known
        if key not in self.expected:
            pairs = zip(candidate.stages, wholes, strict=True)
            costs = [stage.cost.in_time(share) if whole is None else whole for stage, whole in pairs]
            self.expected[key] = candidate.simulate_s(costs)
        simulated_share = self.simulated_shares.get(len(known), 1.0) if all(known) else 1.0
        return _SIMULATED_SHARE * simulated_share * self.expected[key]

    @property
    def unseen_share(self) -> float:
        """The share of their time by their layers that stages of kinds without a simulated plan may take."""
        if len(self.shares) < _FEW_KINDS:
            return _UNSEEN_SHARE
        return max(_UNSEEN_SHARE, _OTHER_KINDS_SHARE * min(self.shares.values()))

    def take(self, region: Region) -> bool:
        """Solve or divide a region. Return whether that was work worth counting."""
        tell(str(region))
        try:
            match region:
                case OneProgram():
                    self.solve_program(region)
                case Stages():
                    return self.search_stages(region)
                case Lanes():
                    self.solve_lanes(region)
                case Completion():
                    self.complete(region)
        except (MemoryTooSmall, InvalidArgument, NotSplittable, Unsupported) as error:
            self.errors.append(error)
            if isinstance(region, OneProgram) and isinstance(error, MemoryTooSmall):
                self.open += self.with_more_microbatches(region)
        return True

    def solve_program(self, region: OneProgram) -> None:
        """Find the best layouts of one program on one mesh."""
        problem = self.problem
        method = replace(
            problem.method, num_stages=1, num_microbatches=region.num_microbatches, mesh_shape=region.shape
        )
        try:
            plan = plan_by_search(
                problem.trace,
                method,
                num_devices=region.num_devices,
                machine=problem.hardware.groups[region.group].machine,
                checked=problem.checked,
                below_s=self.best_s,
                cache_directory=problem.cache_directory,
            )
        except NoneBelow as none:
            self.closed_s = min(self.closed_s, max(region.bound_s, none.bound))
            self.tried.add(region.num_microbatches)
            return
        sharding = plan.sharding
        assert sharding is not None
        first, (mesh,) = problem.hardware.first_devices[region.group], plan.meshes
        plan = replace(plan, meshes=(replace(mesh, devices=tuple(first + device for device in mesh.devices)),))
        self.closed_s = min(self.closed_s, max(region.bound_s, sharding.lower_bound_s))
        self.tried.add(region.num_microbatches)
        self.add(plan, str(region), sharding.step_time_s)
        memory = memory_limit(problem.method.memory, problem.hardware.groups[region.group].machine)
        if sharding.recomputed or sharding.peak_bytes > _MUCH_MEMORY * memory:
            self.open += self.with_more_microbatches(region)

    def solve_lanes(self, region: Lanes) -> None:
        """Find the stages of the lanes, one each or the best pipelines, their shares, and the best layouts of each."""
        assert self.known is not None
        layers, costs = self.known(region.num_microbatches, remat=False, splits=False)
        self.tried.add(region.num_microbatches)
        self.closed_s = min(self.closed_s, region.bound_s)
        try:
            for lanes in lanes_of_machines(self.cuttable, layers, costs, self.best_s):
                several = lanes.bare.num_stages > len(lanes.bare.lanes)
                words, step_time_s = f"{region}{', pipelines' * several}", _LANES_SHARE * lanes.step_time_s
                if step_time_s < min(self.best_s, self.beside[1] if self.beside else math.inf):
                    plan = lanes.plan()
                    step_time_s = self.simulated_s(plan)
                    self.add(plan, words, step_time_s, beside=several)
                self.note(words, step_time_s)
                share = step_time_s / region.bound_s
                self.lanes_share = min(self.lanes_share, share) if self.lanes_share else share
        except MemoryTooSmall:
            few = region.num_microbatches  # with fewer, each is larger
            self.open = [r for r in self.open if not (isinstance(r, Lanes) and r.num_microbatches < few)]
            raise

    def with_more_microbatches(self, region: OneProgram) -> list[Region]:
        """Return the region of the next number of microbatches, if that is not given."""
        never = self.state_bytes > region.num_devices * self.problem.memory_bytes
        if never or self.problem.method.num_microbatches is not None or self.known is None or region.shape is None:
            return []
        more = [n for n in microbatch_counts(self.cuttable) if n > region.num_microbatches]
        return [self.program(region.num_devices, region.shape, more[0], group=region.group)] if more else []

    def search_stages(self, region: Stages) -> bool:
        """Find the best stages of every schedule; return False if only another time is likely than was thought."""
        assert self.known is not None
        count = region.num_microbatches
        put_off = replace(region, by_others_s=self.by_others_s(region))
        if self.likely_s(put_off) > self.likely_s(region):
            self.open.append(put_off)
            return False
        problem = replace(self.cuttable, share=region.share)
        known = replace(self.known, problem=problem)
        below_s = self.best_s / min(_WHOLE_SHARE, self.unseen_share, *self.shares.values())
        self.tried.add(count)
        found = stage_candidates(problem, known, count, region.num_stages, below_s)
        lower_s = [(1 - known.gap) * each.bound_s for each in found]
        self.closed_s = min(self.closed_s, max(region.bound_s, min([below_s, *lower_s])))
        kinds: set[StagesKind] = set()
        for each in sorted(found, key=lambda each: each.step_time_s):
            self.note(str(each), each.step_time_s)
            key = count, region.share, each.stages_key  # of several schedules the fastest is completed
            if key not in self.found:
                self.found.add(key)
                self.open.append(Completion(candidate=each, region=region, first=each.kind not in kinds))
            kinds.add(each.kind)
        return True

    def by_others_s(self, region: Stages) -> float:
        """Return the time that is least by the layers of the nearest number of microbatches whose costs are known.

        Infinity where neither so many equal stages fit, nor the next fewer and more: those between need as much memory.
        """
        count = region.num_microbatches
        assert self.known is not None
        solved = self.known.solved
        if not solved or count in solved or self.problem.method.effort == "thorough":
            return region.by_others_s
        like = min(solved, key=lambda other: (abs(math.log2(other / count)), other))
        if (count, like) not in self.times_by:
            self.times_by[count, like] = likely_times_s(self.cuttable, self.known, count, like)
        times_s, (few, most) = self.times_by[count, like], region.num_stages
        fewer, more = (n for n in times_s if n <= few), (n for n in times_s if n >= most)
        near = range(max(fewer, default=few), min(more, default=most) + 1)
        fits = any(math.isfinite(seconds) for number, seconds in times_s.items() if number in near)
        return max(region.by_others_s, min(times_s.values(), default=0.0) if fits else math.inf)

    def complete(self, region: Completion) -> None:
        """Choose the layouts of all stages of a candidate, and simulate its plan."""
        candidate, problem = region.candidate, self.cuttable
        stages = candidate.stages
        alone = len(stages) == 1 and candidate.layers.num_microbatches == 1 and len(candidate.virtual_stages) == 1
        if alone and not problem.offloads:
            # The layouts of one program on one mesh are searched in one piece.
            self.solve_program(
                OneProgram(
                    num_devices=stages[0].submesh.num_devices,
                    group=stages[0].submesh.group,
                    shape=None,
                    num_microbatches=1,
                    bound_s=region.region.bound_s,
                )
            )
            return
        sharded = shard_candidate(problem, candidate, MAX_GAP if region.estimated_s else ESTIMATE_GAP)
        self.wholes.update(zip(candidate.stage_keys, sharded.costs, strict=True))
        if sharded.peak_bytes <= sharded.memory_bytes:
            best_share = (1 - sharded.gap) * self.simulated_shares.get(len(stages), 1.0)
            least_s = _SIMULATED_SHARE * best_share * sharded.step_time_s
            if least_s >= self.best_s and problem.method.effort != "thorough":
                self.learn(candidate, least_s)
                self.note(str(candidate), max(least_s, candidate.step_time_s))
                return
            simulated_s = self.simulated_s(sharded.plan)
            if sharded.gap > MAX_GAP and not region.estimated_s:
                self.open.append(replace(region, estimated_s=(1 - sharded.gap) * simulated_s))
            by_stages = simulated_s / sharded.step_time_s
            self.simulated_shares[len(stages)] = min(by_stages, self.simulated_shares.get(len(stages), by_stages))
            self.learn(candidate, simulated_s)
            self.add(sharded.plan, str(candidate), simulated_s)
            return
        # Stages as a whole may need more than the sum over their layers: then all are expected to need as much more.
        before = region.region
        share = before.share * min(_NEXT_SHARE, sharded.memory_bytes / sharded.peak_bytes)
        self.errors.append(
            MemoryTooSmall(
                f"The best stages need {sharded.peak_bytes / 2**30:.3g} GiB of a device with their layouts, and may "
                f"use {sharded.memory_bytes / 2**30:.3g} GiB; there are none that need less. Use more devices, more "
                "and smaller microbatches, or a larger budget."
            )
        )
        if before.attempt + 1 < _ATTEMPTS:
            most = candidate.peak_share(problem)
            self.open = [each for each in self.open if not self.is_as_large(each, before, most)]
            likely_s = max(before.likely_s, _WHOLE_SHARE * candidate.step_time_s)
            self.open.append(replace(before, share=share, attempt=before.attempt + 1, likely_s=likely_s))

    def is_as_large(self, region: Region, before: Stages, share: float) -> bool:
        """Return whether a region completes stages of another one that need as large a share of the memory."""
        if not isinstance(region, Completion) or region.region is not before:
            return False
        return region.candidate.peak_share(self.cuttable) >= share

    def learn(self, candidate: PipelineCandidate, seconds: float) -> None:
        """Keep how much less than by their layers stages of such a kind take as a whole."""
        share = seconds / candidate.step_time_s
        self.shares[candidate.kind] = min(share, self.shares.get(candidate.kind, share))

    def add(self, plan: Plan, words: str, step_time_s: float, *, beside: bool = False) -> None:
        """Keep the plan if it is the fastest so far; beside the others until they are all looked at, if it asks so."""
        if beside and (self.beside is None or step_time_s < self.beside[1]):
            self.beside = plan, step_time_s, words
        elif step_time_s < self.best_s and not beside:
            self.best, self.best_s, self.best_in_words = plan, step_time_s, words
            tell_best(step_time_s)
        self.note(words, step_time_s)

    def note(self, words: str, seconds: float) -> None:
        """Keep the time of a plan in words."""
        self.others[words] = min(seconds, self.others.get(words, math.inf))

    def reason(self) -> AutoparError:
        """Return the error that says best why there is no plan: memory before all, if that is what is missing."""
        shortages = [error for error in self.errors if isinstance(error, MemoryTooSmall)]
        return (shortages or self.errors)[-1]


def _if_it_can_be_cut(problem: StageProblem) -> tuple[KnownLayers | None, StepBounds | None]:
    """Return the layers of a step and its bounds; None where there is nothing but one program."""
    trace, method = problem.trace, problem.method
    if not _may_be_cut(trace, method.num_stages, 2 if problem.offloads else problem.num_devices):
        return None, None
    if (method.num_stages or 1) > 1 and not trace.differentiates:
        refuse_long_training_loops(trace, f"{method.num_stages} stages")
        raise without_gradient(trace, method.num_stages or 1)
    if not trace.differentiates:
        return None, None
    try:
        options = {"batch_statistics": method.batch_statistics, "random": method.random}
        return KnownLayers.of(problem), step_bounds(trace, problem.hardware, **options)
    except (NotSplittable, Unsupported):
        if method.num_stages is not None or (method.num_microbatches or 1) > 1:
            raise
        return None, None


def _may_be_cut(trace: Trace, num_stages: int | None, num_devices: int) -> bool:
    """Return whether a step might be more than one program."""
    if num_devices == 1 or (num_stages is None and not trace.batch_inputs):
        return False
    return not any(jc.keeps_order(eqn) for eqn in jc.all_equations(trace.jaxpr))
