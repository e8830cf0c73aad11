"""Divide all plans of a step into regions, each with a time that no plan in it undercuts.

    StageProblem  ->  Space  ->  Region, ...

What the user fixes takes regions away, and adds none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.layer_boundaries import is_layer_boundary
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.frontend.training_loops import refuse_whole_training, unroll_training_loops, without_gradient
from autopar.compiler.intra_op.plan_program import FOLD_FROM
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.planning.demands.constraints import names_axes
from autopar.compiler.planning.one_mesh import mesh_choices
from autopar.compiler.planning.search.candidates import equal_counts, microbatch_counts, worth_splitting
from autopar.compiler.planning.search.learned_memory import usual_share
from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stages.stage_costs import KnownLayers
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.planning.step_bounds import StepBounds, step_bounds
from autopar.errors import NotSplittable, Unsupported
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule
from autopar.plain_text import microbatches_in_words

_MICROBATCHES_PER_STAGE = 8
"""A usual number, where nothing else tells numbers apart."""
_STAGES_PER_MACHINE = 2
"""A usual number in a cluster of several, each of which has many hosts for a stage."""

_KEPT_SHARE = 1 / 3
"""Rough share of all that a step makes that is kept for the backward pass."""
_KEPT_LAYERS = 3
"""Rough number of layers whose values are in memory if layers are computed again: those kept, and those made again."""
_GRADIENTS = 1 / 4
"""Rough size of the gradients as a share of the state, beside moments and parameters."""
_ALIKE = math.log(1.05)
"""Times that differ by no more are taken for equal before layouts are known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OneProgram:
    """The plans of one program on one mesh of some devices; a shape of None: of the best of the usual shapes."""

    num_devices: int
    shape: tuple[int, ...] | None
    num_microbatches: int
    bound_s: float
    group: int = 0
    """The number of the cluster's group whose devices these are."""
    is_tight: bool = False
    """True once it is known that its fastest layouts do not fit: `bound_s` is what they take."""

    @property
    def likely_s(self) -> float:
        """The least seconds that its best plan is expected to take."""
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
    """The time that tells those of equal stages apart, by the layers of other microbatches; 0 if it is not known."""
    share: float = 1.0
    """Share of the memory that the sum over a stage's layers may reach."""
    attempt: int = 0
    searched: tuple[float, float] | None = None
    """Set once those that may be better by their layers were searched: the share of their time by layers that stages
    were taken to need at least, and the seconds that no other stages undercut up to that share."""

    def joins(self, others: Stages) -> bool:
        """Return whether the microbatches are those of others joined."""
        return self.num_stages == others.num_stages and others.num_microbatches % self.num_microbatches == 0

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
        """The least seconds that it is expected to take."""
        return self.bound_s

    def __str__(self) -> str:
        return f"a lane on every machine, {microbatches_in_words(self.num_microbatches)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """The plans of one candidate, whose layouts are to be chosen."""

    candidate: PipelineCandidate
    region: Stages
    estimated_s: float = 0.0
    """Seconds that its plan takes at least, by layouts up to a gap; 0 if there are none yet."""

    def __str__(self) -> str:
        return str(self.candidate)


Region = OneProgram | Stages | Lanes | Completion


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """All plans that a method allows for a step, in regions."""

    problem: StageProblem
    cuttable: StageProblem
    """The same, with training loops unrolled, as stages need it."""
    known: KnownLayers | None
    """The layers of the step; None where it cannot be cut."""
    bounds: StepBounds | None
    splits: list[bool] = field(default_factory=list[bool])
    """True if several microbatches may be better than one; empty until that is asked for."""
    finer: dict[int, KnownLayers] = field(default_factory=dict[int, KnownLayers])
    """The layers for numbers of stages for which those of `known` are too few: cut as if that number were given."""

    @classmethod
    def of(cls, problem: StageProblem) -> Space:
        """Return the space of a problem."""
        cuttable = replace(problem, trace=unroll_training_loops(problem.trace))
        known, bounds = _if_it_can_be_cut(cuttable)
        return cls(problem=problem, cuttable=cuttable, known=known, bounds=bounds)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """All regions. Raises `Unsupported` where the offload that is asked for needs stages that there are not."""
        found = (*self.programs(), *self.stages(), *(() if self.problem.offloads else self.lanes()))
        if self.problem.offloads and not found:
            raise Unsupported(
                f"offload={self.problem.method.offload!r} brings values in for the tasks of a step, as its own "
                "transfers to the host do, and "
                f'{self.problem.trace.name} cannot be cut into a gradient and an update. Use offload="off".'
            )
        return found

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
        given = method.num_stages is not None or method.mesh_shape is not None
        sizes = [every] if given or problem.takes_all_devices else self.sizes()
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

    def program(
        self, num_devices: int, shape: tuple[int, ...] | None, num_microbatches: int, *, group: int = 0
    ) -> OneProgram:
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
        given, bounds = self.cuttable.num_stages, self.bounds
        for count in microbatch_counts(self.cuttable):
            for few, most in self.numbers_of_stages():
                sizes = self.sizes() if given is None or self.cuttable.given_may_differ else [self.part(given)]
                each = [(few, most, sizes)]
                if self.are_equal:
                    each = [(number, number, [self.part(number)]) for number in equal_counts(self.cuttable, few, most)]
                yield Stages(
                    num_microbatches=count,
                    num_stages=(few, most),
                    bound_s=min(bounds.stages_s(count, *stages) for stages in each),
                    likely_s=min(bounds.likely_stages_s(count, *stages) for stages in each),
                    even_s=min(bounds.even_stages_s(count, number) for number in range(few, most + 1)),
                    share=usual_share(most),
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
        """Yield the numbers of stages, in ranges: 2, 3 to 4, 5 to 8, ..., or the one that is given.

        Of a large step all from 2 on are searched at once: there what hosts have to start tells no numbers apart.
        """
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
        most, few = min(self.most_of_known, self.problem.num_devices), 2
        while few <= most:
            last = most if self.is_large else min(2 * (few - 1), most)
            if not self.are_equal or equal_counts(self.cuttable, few, last):
                yield few, last
            few = last + 1
        if self.cuttable.takes_all_devices and self.problem.method.layers is None and not self.marks_layers:
            # All are of one size, so that between too few of them and more than the layers there may be none.
            yield from ((number, number) for number in equal_counts(self.cuttable, most + 1, self.problem.num_devices))

    @property
    def are_equal(self) -> bool:
        """True if all stages are of one size, in devices."""
        return self.cuttable.takes_all_devices and self.cuttable.num_stages is None and not self.cuttable.named_stages

    @cached_property
    def marks_layers(self) -> bool:
        """True if the model says where layers end."""
        return any(is_layer_boundary(eqn) for eqn in jc.all_equations(self.cuttable.trace.jaxpr))

    @cached_property
    def most_of_known(self) -> int:
        """The most stages of the layers of `known`; where all are of one size, the most that these are sure to be."""
        assert self.known is not None
        return self.known.num_worthwhile if self.cuttable.takes_all_devices else self.known.num_layers

    def known_of(self, num_stages: tuple[int, int]) -> KnownLayers:
        """Return the layers that so many stages consist of, with their costs."""
        assert self.known is not None
        number, given = num_stages[0], self.cuttable.num_stages or self.cuttable.named_stages
        if given or number <= self.most_of_known:
            return self.known
        if number not in self.finer:
            method = replace(self.cuttable.method, num_stages=number)
            self.finer[number] = KnownLayers.of(replace(self.cuttable, method=method, known={}))
        return self.finer[number]

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

    @property
    def rows(self) -> int:
        """The examples of a batch; 1 where there is none."""
        trace = self.problem.trace
        return trace.num_rows if trace.batch_inputs else 1

    @cached_property
    def num_hosts(self) -> int:
        """The hosts of all groups, or the parts of hosts that equal stages divide them into."""
        return sum(cluster.num_hosts for cluster in self.cuttable.clusters)

    def is_solved(self, known: KnownLayers, num_microbatches: int, num_stages: int) -> bool:
        """Return whether layers of a number of microbatches are solved for on the submesh of one of equal stages."""
        devices = self.part(num_stages)
        return devices == 1 or any(
            submesh.num_devices == devices
            for (count, _, _), (_, costs) in known.problem.known.items()
            if count == num_microbatches
            for submesh in costs.solved
        )

    def rank(self, region: Stages) -> tuple[float, ...]:
        """Return the sort key of a region before any layouts are known: what may fit, then what is roughly fast.

        Of equal times the fewest microbatches, whose collectives are the fewest.
        """
        (few, most), count = region.num_stages, region.num_microbatches
        numbers = [*range(few, min(most, self.num_hosts) + 1)] or [few]
        seconds, number = min((self._roughly_s(count, number), number) for number in numbers)
        tight = few > self.num_hosts or not self._may_fit(count, number)
        return float(tight), math.log(seconds) // _ALIKE, float(count)

    def _may_fit(self, num_microbatches: int, num_stages: int) -> bool:
        """Return whether equal stages may have the memory that they need."""
        assert self.bounds is not None and self.known is not None
        again = self.problem.method.remat or self.bounds.recomputes
        kept = min(_KEPT_SHARE, _KEPT_LAYERS / self.known.num_layers) if again else _KEPT_SHARE
        in_flight = min(1.0, num_stages / num_microbatches)
        needed = self.state_bytes + kept * in_flight * (self.bounds.whole_bytes - self.state_bytes)
        return needed <= self.problem.num_devices * self.problem.memory_bytes

    def _roughly_s(self, num_microbatches: int, num_stages: int) -> float:
        """Return the seconds of equal stages: their work, and their gradients, which are summed up between hosts."""
        assert self.bounds is not None
        seconds, hosts = self.bounds.even_stages_s(num_microbatches, num_stages), self.num_hosts / num_stages
        if hosts <= 1:
            return seconds
        per_host = self.problem.num_devices / self.num_hosts
        nbytes = _GRADIENTS * self.state_bytes / num_stages / per_host * (1 - 1 / hosts)
        return seconds + 2 * self.problem.machine.transfer_s(nbytes, False)

    @property
    def state_bytes(self) -> float:
        """The bytes that stay from step to step."""
        return 0.0 if self.bounds is None else self.bounds.state_bytes

    def with_more_microbatches(self, region: OneProgram) -> list[Region]:
        """Return the region of the next number of microbatches, if that is not given."""
        if self.problem.method.num_microbatches is not None or self.known is None or region.shape is None:
            return []
        more = [n for n in microbatch_counts(self.cuttable) if n > region.num_microbatches]
        return [self.program(region.num_devices, region.shape, more[0], group=region.group)] if more else []

    def without_joined(self, regions: Sequence[Region], too_large: Stages) -> list[Region]:
        """Return regions without those whose microbatches are some that do not fit, joined: they need no less memory.

        Less they may need where some devices of a stage have none of a microbatch's rows, but have of several joined.
        """
        if self.rows < too_large.num_microbatches * self.problem.num_devices:
            return [*regions]
        return [each for each in regions if not (isinstance(each, Stages) and each.joins(too_large))]

    def is_there(self, region: Region) -> bool:
        """Return false for several microbatches where there is nothing in them: the first number asked for tells."""
        if isinstance(region, Completion) or region.num_microbatches == 1:
            return True
        if not self.splits:
            self.splits.append(worth_splitting(self.cuttable, region.num_microbatches))
        return self.splits[0]

    def may_be_there(self, region: Region) -> bool:
        """Return false for what is known not to be there; nothing is traced to know."""
        return isinstance(region, Completion) or region.num_microbatches == 1 or self.splits != [False]

    def is_part(self, region: OneProgram, whole: OneProgram) -> bool:
        """Return whether a program is on a part of the mesh of another, which may do the same, its other axes idle."""
        alike = (region.group, region.num_microbatches) == (whole.group, whole.num_microbatches)
        fewer = region.num_devices < whole.num_devices
        if not (alike and fewer and region.shape and whole.shape) or self.demands_axes:
            return False
        return self.mesh_costs(region).is_part_of(self.mesh_costs(whole))

    def mesh_costs(self, region: OneProgram) -> MeshCosts:
        """Return the costs of the mesh of one program, whose shape is known."""
        (mesh,) = mesh_choices(replace(self.problem.method, mesh_shape=region.shape), region.num_devices)
        return MeshCosts(machine=self.problem.machine_on(region.num_devices, region.group), mesh=mesh)

    @cached_property
    def demands_axes(self) -> bool:
        """True if the user asks for something of the axes of a mesh, so that some of them may not idle."""
        return self.problem.method.kinds is not None or names_axes(self.problem.trace, self.problem.method)

    def pads(self, region: OneProgram) -> bool:
        """Return whether some devices stay idle for a mesh with an axis that divides no dimension evenly."""
        idle = region.num_devices < self.problem.hardware.groups[region.group].num_devices
        axes = [size for size in region.shape or () if size > 1]
        return idle and not all(any(size % axis == 0 for size in self.dimension_sizes) for axis in axes)

    @cached_property
    def dimension_sizes(self) -> frozenset[int]:
        """The sizes of the dimensions of what the step computes."""
        results = (v for eqn in jc.all_equations(self.problem.trace.jaxpr) for v in eqn.outvars)
        return frozenset(size for v in results for size in getattr(v.aval, "shape", ()) if isinstance(size, int))

    def unusual(self, num_microbatches: int) -> float:
        """Return how far a number of microbatches is from a usual one."""
        hardware, num_layers = self.problem.hardware, 1 if self.known is None else self.known.num_layers
        most = _STAGES_PER_MACHINE * len(hardware.groups) if hardware.is_mixed else self.num_hosts
        stages = max(1, min(self.num_hosts, num_layers // 2, most))
        # With fewer examples in a microbatch than a stage has devices, some would have none.
        usual = min(_MICROBATCHES_PER_STAGE * stages, max(1, self.rows * stages // self.problem.num_devices))
        return abs(math.log2(num_microbatches / usual))


def _if_it_can_be_cut(problem: StageProblem) -> tuple[KnownLayers | None, StepBounds | None]:
    """Return the layers of a step and its bounds; None where there is nothing but one program."""
    trace, method = problem.trace, problem.method
    if not _may_be_cut(trace, method.num_stages, 2 if problem.offloads else problem.num_devices):
        return None, None
    if (method.num_stages or 1) > 1 and not trace.differentiates:
        refuse_whole_training(trace, f"{method.num_stages} stages")
        raise without_gradient(trace, method.num_stages or 1)
    if not trace.differentiates:
        return None, None
    try:
        options = {"batch_statistics": method.batch_statistics, "random": method.random}
        given = problem.given_schedule
        splits = given is None or given.splits_weight_gradients
        return KnownLayers.of(problem), step_bounds(trace, problem.hardware, splits_weight_gradients=splits, **options)
    except (NotSplittable, Unsupported):
        if method.num_stages is not None or (method.num_microbatches or 1) > 1:
            raise
        return None, None


def _may_be_cut(trace: Trace, num_stages: int | None, num_devices: int) -> bool:
    """Return whether a step might be more than one program."""
    if num_devices == 1 or (num_stages is None and not trace.batch_inputs):
        return False
    return not any(jc.keeps_order(eqn) for eqn in jc.all_equations(trace.jaxpr))
