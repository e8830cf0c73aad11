"""Search a plan in full, the best first: one program on one mesh, or stages, for every number of microbatches.

    StageProblem, the seconds that a plan is simulated to take  ->  Plan, the fastest that there is

A *region* is a part of the space, with a time that no plan in it undercuts:

    OneProgram    one mesh shape, for a number of microbatches     its integer program    planning.one_mesh
    Stages        some numbers of stages, for one of microbatches  ranges of layers       planning.search.candidates
    Lanes         one on every machine, for a number of them       stages and shares      planning.search.lanes
    Completion    stages that were found there                     layouts of each stage  planning.stages.sharded_plan

All of them are the space (`planning.search.space`). The region with the lowest bound is next. It is solved for its
best plan, or gives way to regions with higher bounds; when no bound is below the time of the best plan, that plan is
the best. Plans are compared by what they are simulated to take.

How much is looked at is counted in regions and not in seconds, so that a busy machine finds the same plan. Those that
turn out not to fit into memory are counted apart: they tell where no plan is, and leave the others their effort.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Protocol

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.by_hand.manual import plan_by_hand
from autopar.compiler.planning.demands.constraints import pins_of_inputs
from autopar.compiler.planning.one_mesh import plan_by_search
from autopar.compiler.planning.search.candidates import stage_candidates
from autopar.compiler.planning.search.lanes import lanes_of_machines
from autopar.compiler.planning.search.learned_memory import LearnedMemory
from autopar.compiler.planning.search.learned_numbers import ToldNumbers
from autopar.compiler.planning.search.learned_times import LearnedTimes
from autopar.compiler.planning.search.search_state import SearchState
from autopar.compiler.planning.search.space import Completion, Lanes, OneProgram, Region, Space, Stages
from autopar.compiler.planning.stages.layer_costs import ESTIMATE_GAP
from autopar.compiler.planning.stages.pipeline_candidate import WHOLE_SHARE, PipelineCandidate
from autopar.compiler.planning.stages.sharded_plan import ShardedPlan, shard_candidate
from autopar.compiler.planning.stages.stage_layouts import StageLayouts, StagesTooSlow
from autopar.compiler.planning.stages.stage_problem import StageProblem, TimeIsUp
from autopar.compiler.planning.state_bound import refuse_too_large_a_state
from autopar.compiler.solver.problem import NoneBelow
from autopar.compiler.solver.solve import MAX_GAP
from autopar.errors import AutoparError, InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported
from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import TIME_LIMIT, Certificate
from autopar.method_fields import EFFORTS
from autopar.methods import DataParallel, offloaded
from autopar.progress import tell, tell_best

_ATTEMPTS = 4
"""Searches for less and less memory, until stages as a whole fit."""
_LESS_MEMORY_SHARE = 0.97
"""Share of the time, by layers, of stages that need too much memory; those that need less memory rarely undercut it."""
_MUCH_MEMORY = 0.8
"""Share of what a plan may take. One that needs less gains nothing by more microbatches."""
_USUAL_SHARE = 0.97
"""Share of the time by their layers that stages usually take at least as a whole."""
_NUM_RUNNERS_UP = 5
_UNLIKELY = "what others tell to be slower was not searched"
"""The reason that a search ended with bounds below its best plan, where nothing stopped it."""
_CLOCK = 5
"""Multiple of the time limit, which counts work, after which the clock ends a search: a busy machine is as slow."""


class StepSeconds(Protocol):
    """The simulated seconds of a step by a plan, whose stages are cut already where `graph` is given."""

    def __call__(self, plan: Plan, graph: StageGraph | None = None, /) -> float:
        """Return the seconds. Raises `MemoryTooSmall` for what the hosts have no room for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The simulator: the seconds and the peak bytes of a plan."""

    step_s: StepSeconds
    peak_bytes: Callable[[Plan], Sequence[float]]
    """Peak bytes of a device, by mesh."""


def search_plan(problem: StageProblem, simulated: Simulated) -> Plan:
    """Return the fastest plan that the method allows, with its certificate.

    Raises `MemoryTooSmall` where nothing fits, `InvalidArgument` for what the devices, the layers or the pins cannot
    keep, and `NotSplittable` or `Unsupported` for a step that cannot be cut as it is asked for.
    """
    pins_of_inputs(problem.trace, problem.method.pins)
    if problem.num_devices == 1 and not problem.offloads:
        return _plan_on_one_device(problem, simulated)
    if problem.hardware.is_mixed and problem.num_stages is not None:
        raise InvalidArgument(
            f"A number of stages or a mesh_shape was given for {problem.hardware}, whose stages differ in size. "
            "Leave both to the search, or use PipelineParallel for equal stages by hand."
        )
    return _Search.of(problem, simulated).run()


def _plan_on_one_device(problem: StageProblem, simulated: Simulated) -> Plan:
    """Return the plan of the step as it is, where that fits for sure; else a search says what is computed again.

    A budget that is a word asks for what is fastest within a usual device. Where nothing is, the step runs as it is:
    there is no other device to help.
    """
    trace, method = problem.trace, problem.method
    made = sum(aval_bytes(v.aval) for eqn in jc.all_equations(trace.jaxpr) for v in eqn.outvars)
    needed = made + sum(aval_bytes(leaf.aval) for leaf in trace.inputs) + problem.machine.product_workspace_bytes
    given = method.num_stages, method.mesh_shape, method.schedule, method.num_microbatches, method.remat is True or None
    if any(each is not None for each in given):
        return _Search.of(problem, simulated).run()
    if needed > problem.memory_bytes:
        try:
            return _Search.of(problem, simulated).run()
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
class _Search(SearchState):
    """A search, which alone changes its state."""

    simulated: Simulated
    deadline_s: float
    """Seconds of `time.process_time()` at which the search ends once there is a plan."""
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
    errors: list[AutoparError] = field(default_factory=list[AutoparError])

    @classmethod
    def of(cls, problem: StageProblem, simulated: Simulated) -> _Search:
        """Return the search at its start: every region is open."""
        method = problem.method
        deadline_s = time.process_time() + _CLOCK * method.time_limit_s
        refuse_too_large_a_state(problem.trace, method.memory, problem.hardware, offloaded=offloaded(method))
        space = Space.of(problem)
        return cls(
            space=space,
            simulated=simulated,
            deadline_s=deadline_s,
            told=ToldNumbers(space=space),
            open=list(space.regions),
            learned=LearnedTimes(is_roomy=space.cuttable.is_roomy),
            memory=LearnedMemory(problem=space.cuttable),
        )

    def run(self) -> Plan:
        """Solve regions, the most promising first, until none can hold a better plan."""
        method = self.space.problem.method
        most, taken, too_large, stopped = EFFORTS[method.effort], 0, 0, ""
        out_of_time = f"{TIME_LIMIT} of {_CLOCK} x {method.time_limit_s:g} s ended the search"
        while self.open:
            region = self.next_region()
            if region is None:
                break
            if isinstance(region, Stages) and (self.is_done(region) if region.searched else self.is_put_off(region)):
                continue
            if not self.space.is_there(region):
                self.open = [each for each in self.open if self.space.is_there(each)]
                continue
            if self.best is not None or self.beside is not None:
                if max(taken, too_large) >= most:
                    stopped = f'effort="{method.effort}" ended the search'
                    break
                if time.process_time() > self.deadline_s:
                    stopped = out_of_time
                    break
            self.open.remove(region)
            try:
                if self.take(region):
                    taken += 1
                else:
                    too_large += 1
            except TimeIsUp:
                self.open.append(region)
                stopped = out_of_time
                break
        if self.beside is not None and self.beside[1] < self.best_s:
            self.best, self.best_s, self.best_in_words = self.beside
        if self.best is None:
            raise self.reason()
        bound_s, left_out = min(self.best_s, self.closed_s), False
        for region in self.open:
            if not isinstance(region, Completion) and region.bound_s < bound_s and self.space.may_be_there(region):
                bound_s = region.bound_s
                left_out = left_out or region.bound_s < self.enough_s
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
            stopped=stopped or _UNLIKELY * left_out,
            kinds=method.kinds or (),
        )
        return replace(self.best, certificate=certificate)

    def take(self, region: Region) -> bool:
        """Solve or divide a region; return false where it does not fit into memory."""
        tell(str(region))
        try:
            match region:
                case OneProgram():
                    self.solve_program(region)
                case Stages():
                    self.search_stages(region)
                case Lanes():
                    self.solve_lanes(region)
                case Completion():
                    self.complete(region)
        except NoneBelow:
            return False
        except (MemoryTooSmall, InvalidArgument, NotSplittable, Unsupported) as error:
            if not (isinstance(error, MemoryTooSmall) and self.has_less(region)):
                self.errors.append(error)
            if isinstance(region, OneProgram) and isinstance(error, MemoryTooSmall):
                self.open += self.space.with_more_microbatches(region)
            if isinstance(region, Stages) and isinstance(error, MemoryTooSmall) and not region.attempt:
                self.open = self.space.without_joined(self.open, region)
            return not isinstance(error, MemoryTooSmall)
        return True

    def has_less(self, region: Region) -> bool:
        """Return whether a region is searched with less memory than there is, since some of its stages did not fit."""
        return isinstance(region, Stages) and region.attempt > 0

    def solve_program(self, region: OneProgram) -> float:
        """Find the best layouts of one program on one mesh; return their seconds, or those that they take at least.

        Where the fastest do not fit, others come first: what they take says what layouts that save memory, which take
        long to find, have to undercut. Then the region is open again, and `NoneBelow` raised.
        """
        problem, place = self.space.problem, (region.group, region.num_devices, region.num_microbatches)
        if region.is_tight:
            self.tight.add(place)
        method = replace(
            problem.method, num_stages=1, num_microbatches=region.num_microbatches, mesh_shape=region.shape
        )
        try:
            plan = plan_by_search(
                problem.trace,
                method,
                num_devices=region.num_devices,
                machine=problem.machine_on(region.num_devices, region.group),
                checked=problem.checked,
                below_s=self.best_s,
                saves_memory=region.is_tight,
                cache_directory=problem.cache_directory,
            )
        except NoneBelow as none:
            least_s = max(region.bound_s, none.bound)
            self.bound_parts(region, least_s)
            if none.limited and not region.is_tight:
                self.open.append(replace(region, is_tight=True, bound_s=least_s))
                raise
            self.closed_s = min(self.closed_s, least_s)
            self.tried.add(region.num_microbatches)
            self.open += self.space.with_more_microbatches(region) if none.limited else []
            return least_s
        sharding = plan.sharding
        assert sharding is not None
        first, (mesh,) = problem.hardware.first_devices[region.group], plan.meshes
        plan = replace(plan, meshes=(replace(mesh, devices=tuple(first + device for device in mesh.devices)),))
        least_s = max(region.bound_s, sharding.lower_bound_s)
        self.bound_parts(region, least_s)
        self.closed_s = min(self.closed_s, least_s)
        self.tried.add(region.num_microbatches)
        self.add(plan, str(region), sharding.step_time_s)
        limit_bytes = problem.limit_bytes(problem.hardware.groups[region.group].machine)
        if sharding.recomputed or sharding.peak_bytes > _MUCH_MEMORY * limit_bytes:
            self.open += self.space.with_more_microbatches(region)
        return sharding.step_time_s

    def bound_parts(self, whole: OneProgram, least_s: float) -> None:
        """Raise the bounds of programs on parts of a mesh, of which none takes less than the best one there."""
        for place, region in enumerate(self.open):
            if isinstance(region, OneProgram) and self.space.is_part(region, whole):
                self.open[place] = replace(region, bound_s=max(region.bound_s, least_s))

    def solve_lanes(self, region: Lanes) -> None:
        """Find the stages of the lanes, one each or the best pipelines, their shares, and the best layouts of each."""
        assert self.space.known is not None
        layers, costs = self.space.known(region.num_microbatches, remat=False, splits=False)
        self.tried.add(region.num_microbatches)
        self.closed_s = min(self.closed_s, region.bound_s)
        try:
            for lanes in lanes_of_machines(self.space.cuttable, layers, costs, self.best_s):
                several = lanes.bare.num_stages > len(lanes.bare.lanes)
                words, least_s = f"{region}{', pipelines' * several}", lanes.least_s
                if least_s < min(self.best_s, self.beside[1] if self.beside else math.inf):
                    plan = lanes.plan()
                    least_s = self.simulated.step_s(plan)
                    self.add(plan, words, least_s, beside=several)
                self.note(words, least_s)
                share = least_s / region.bound_s
                self.lanes_share = min(self.lanes_share, share) if self.lanes_share else share
        except MemoryTooSmall:
            few = region.num_microbatches  # with fewer, each is larger
            self.open = [r for r in self.open if not (isinstance(r, Lanes) and r.num_microbatches < few)]
            raise

    def is_put_off(self, region: Stages) -> bool:
        """Return whether more is known by now of the time that stages take; then they are open with that time."""
        others_s = region.by_others_s
        if self.space.problem.method.effort != "thorough":
            others_s = self.told.equal_s(region)
        if others_s <= region.by_others_s:
            return False
        self.open[self.open.index(region)] = replace(region, by_others_s=others_s)
        return True

    def is_done(self, region: Stages) -> bool:
        """Close a region that was searched, if stages gain no more than they were taken to; return whether it is."""
        least_share, least_s = region.searched or (0.0, 0.0)
        if self.learned.least_share < least_share or self.learned.gains(several=region.num_microbatches > 1):
            return False
        self.open.remove(region)
        self.closed_s = min(self.closed_s, max(region.bound_s, least_s))
        return True

    def search_stages(self, region: Stages) -> None:
        """Find the best stages of every schedule: at first if they gain as much as usual, then as others did."""
        count, known = region.num_microbatches, self.space.known_of(region.num_stages)
        problem = replace(self.within_time(known.problem), share=region.share)
        thorough, mixed = problem.method.effort == "thorough", problem.hardware.is_mixed
        first = not (self.learned.of_stages or region.searched or mixed)
        least_share = _USUAL_SHARE if first and not thorough else self.learned.least_share
        below_s = limit_s = self.best_s / least_share
        if not first and self.learned.gains(several=count > 1):
            expected = partial(self.learned.share_on, several=count > 1, saves=False)
            problem, limit_s = replace(problem, time_share=expected), self.best_s / _USUAL_SHARE
        known, whole_share = replace(known, problem=problem), least_share if first else WHOLE_SHARE
        self.tried.add(count)
        try:
            found = stage_candidates(problem, known, count, region.num_stages, limit_s, whole_share)
        except MemoryTooSmall:
            if problem.share > 1:  # the error is to tell of the memory that there is
                stage_candidates(replace(problem, share=1.0), known, count, region.num_stages, limit_s, whole_share)
            raise
        lower_s = min([below_s, *((1 - known.gap) * each.bound_s for each in found)])
        found.sort(key=lambda each: each.step_time_s)
        if first:
            self.open.append(replace(region, searched=(least_share, lower_s), by_others_s=0.0))
        else:
            self.closed_s = min(self.closed_s, max(region.bound_s, lower_s))
        if found or not first:
            self.numbers.learn(region, found, below_s)
        for each in found:
            self.note(str(each), each.step_time_s)
            key = count, region.share, each.stages_key  # of several schedules the fastest is completed
            if key not in self.found:
                self.found.add(key)
                self.open.append(Completion(candidate=each, region=region))
        self.look_for_smaller(region)

    def within_time(self, problem: StageProblem) -> StageProblem:
        """Return the problem with the deadline, once there is a plan to return."""
        there_is_one = self.best is not None or self.beside is not None
        return replace(problem, deadline_s=self.deadline_s) if there_is_one else problem

    def complete(self, region: Completion) -> None:
        """Choose the layouts of all stages of a candidate, and simulate its plan."""
        candidate, problem = region.candidate, self.space.known_of(region.region.num_stages).problem
        problem, stages, on = self.within_time(problem), candidate.stages, candidate.stages[0].submesh
        alone = len(stages) == 1 and len(candidate.virtual_stages) == 1
        loops = self.space.is_large and candidate.layers.num_microbatches > 1
        if alone and not problem.offloads and not loops:
            # The layouts of one program on one mesh are searched in one piece. A large loop over microbatches takes
            # minutes so; its tasks apart, as those of other stages, take seconds, and hosts little to start.
            program = self.space.program(on.num_devices, None, candidate.layers.num_microbatches, group=on.group)
            seconds = self.solve_program(replace(program, bound_s=region.region.bound_s))
            self.learned.learn_step(candidate, seconds)
            return
        try:
            max_gap = MAX_GAP if region.estimated_s else ESTIMATE_GAP
            sharded = shard_candidate(problem, candidate, max_gap, partial(self.are_too_slow, region))
        except StagesTooSlow as slow:
            self.leave(candidate, slow.known)
            return
        self.learn_memory(region, sharded)
        self.learned.learn_stages(candidate, dict(enumerate(sharded.costs)), sharded.gap)
        if sharded.fits:
            best_share = (1 - sharded.gap) * self.learned.least_simulated_share(candidate)
            least_s = best_share * sharded.step_time_s
            if least_s >= self.enough_s and problem.method.effort != "thorough":
                self.learned.learn_step(candidate, least_s)
                self.note(str(candidate), max(least_s, candidate.step_time_s))
                return
            plan = sharded.plan
            simulated_s = self.simulated.step_s(plan, sharded.graph)
            if sharded.gap > MAX_GAP and not region.estimated_s:
                self.open.append(replace(region, estimated_s=(1 - sharded.gap) * simulated_s))
            self.learned.learn_simulated(candidate, simulated_s / sharded.step_time_s)
            self.learned.learn_step(candidate, simulated_s)
            sharded = replace(sharded, peaks=tuple(self.simulated.peak_bytes(plan)))
            if sharded.fits:
                self.add(plan, str(candidate), simulated_s)
                return
            self.learn_memory(region, sharded)
        # Stages as a whole may need more than the sum over their layers: then all are expected to need as much more.
        before, fullest = region.region, sharded.fullest
        if before.attempt + 1 < _ATTEMPTS:
            alike = [each for each in self.open if isinstance(each, Completion) and each.region is before]
            large = [each for each in alike if self.memory.is_as_large(each.candidate, candidate, fullest)]
            self.open = [each for each in self.open if each not in large]
            share = self.memory.next_share(candidate, sharded.peak_shares, before.share)
            likely_s = max(before.likely_s, _LESS_MEMORY_SHARE * candidate.step_time_s)
            self.open.append(replace(before, share=share, attempt=before.attempt + 1, likely_s=likely_s))
        raise MemoryTooSmall(
            f"The best stages need {sharded.peaks[fullest] / 2**30:.3g} GiB of a device with their layouts, and may "
            f"use {sharded.limits[fullest] / 2**30:.3g} GiB; there are none that need less.",
            least_share=max(sharded.peak_shares),
        )

    def are_too_slow(self, region: Completion, known: Mapping[int, StageLayouts]) -> bool:
        """Return whether a candidate is unlikely to be better, given what some of its stages take as a whole.

        The others are still found where they may tell of memory what to expect elsewhere.
        """
        candidate, problem = region.candidate, self.space.cuttable
        if self.best is None or problem.method.effort == "thorough" or region.estimated_s:
            return False
        if any(each.peak_bytes > problem.memory_of(candidate.stages[number].submesh) for number, each in known.items()):
            return False
        costs = {number: each.cost.in_time(1 - each.gap) for number, each in known.items()}
        return self.learned.least_with_s(candidate, costs) >= self.enough_s

    def leave(self, candidate: PipelineCandidate, known: Mapping[int, StageLayouts]) -> None:
        """Learn what some stages take of a candidate that is not worth completing."""
        costs, gap = {number: each.cost for number, each in known.items()}, max(each.gap for each in known.values())
        least_s = self.learned.least_with_s(candidate, {n: cost.in_time(1 - gap) for n, cost in costs.items()})
        self.learned.learn_stages(candidate, costs, gap)
        self.learned.learn_step(candidate, least_s)
        self.note(str(candidate), max(least_s, candidate.step_time_s))

    def learn_memory(self, done: Completion, sharded: ShardedPlan) -> None:
        """Keep how much more stages need as a whole than by their layers, once some did not fit.

        Those of other regions that are likely to need too much are searched for again, with as much less room.
        """
        if not self.memory.learn(done.candidate, sharded.peak_shares):
            return
        for region in {id(each.region): each.region for each in self.open if isinstance(each, Completion)}.values():
            if region is not done.region:
                self.look_for_smaller(region)

    def look_for_smaller(self, region: Stages) -> None:
        """Open a region again for stages that need less memory, once, if some found there are likely not to fit.

        These stay open: if others like them fit later, they are likely to do so too.
        """
        mine = [each for each in self.open if isinstance(each, Completion) and each.region is region]
        less = {each.candidate: self.memory.exceeded_share(each.candidate) for each in mine}
        too_large = {candidate: share for candidate, share in less.items() if share is not None}
        if region.attempt > 0 or not too_large:
            return
        share = max(too_large.values())
        likely_s = max(region.likely_s, _LESS_MEMORY_SHARE * min(each.step_time_s for each in too_large))
        again = replace(region, share=share, attempt=1, likely_s=likely_s)
        self.open = [each for each in self.open if each not in mine]
        self.open += [again, *(replace(each, region=again) for each in mine)]

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
        if not shortages:
            return self.errors[-1]

        @cache
        def least() -> MemoryTooSmall:
            return min(shortages, key=lambda each: math.inf if math.isnan(each.least_share) else each.least_share)

        kept_free, groups = self.space.problem.kept_free, self.space.problem.memory_of_groups
        return MemoryTooSmall(
            lambda: least().shortage + kept_free() + groups(), least_share=lambda: least().least_share
        )
