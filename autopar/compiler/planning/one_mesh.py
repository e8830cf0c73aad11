"""Search a plan for one mesh: the layout of every value, by integer programming.

Trace, Auto | Zero | TensorParallel | ExpertParallel | ShardParallel | Megatron, devices  ->  Plan
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Protocol

from autopar.compiler.costs.mesh_costs import MeshCosts, with_links
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.frontend.training_loops import in_microbatches
from autopar.compiler.intra_op.plan_program import IntraOpPlan, IntraOpProblem, intra_op_problem
from autopar.compiler.lowering.sharded_step import one_jaxpr
from autopar.compiler.memory.estimate import HEADROOM, MemoryBudget
from autopar.compiler.pipeline.rematerialize import Offer, offered_layers, rematerialize
from autopar.compiler.planning.demands.constraints import constraints_of
from autopar.compiler.planning.demands.kinds import AllowedSplits, allowed_splits
from autopar.compiler.planning.mesh_sharding import priced_collectives
from autopar.compiler.sharding.layout import LogicalMesh, to_spec
from autopar.compiler.solver.problem import NoneBelow, Optimum
from autopar.compiler.solver.solve import ROUND_OFF
from autopar.compiler.spmd.block_plan import to_data
from autopar.compiler.spmd.block_times import block_times
from autopar.compiler.spmd.local_program import LocalBlock
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.hardware.machine import Machine
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.plan_sharding import ShardingPlan
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule
from autopar.method_fields import MEMORY_LEVELS
from autopar.methods import Auto, ProgramMethod, ShardParallel
from autopar.progress import tell


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshSearchResult:
    """A search's result on one mesh, and what it was made from."""

    mesh_costs: MeshCosts
    intra_op: IntraOpPlan
    block: LocalBlock
    peak_bytes: float
    recomputed_layers: tuple[int, ...]
    """The layers that are recomputed, by their numbers among those that are offered."""

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of the program on every device, which a plan is compared by."""
        return block_times(self.block, self.mesh_costs, self.intra_op.program.memory.copied).total_s

    @property
    def lower_bound_s(self) -> float:
        """A lower bound on the seconds of the program of any layouts.

        The solver bounds its objective, which is not always the time of a program. It is less where readers want
        different parts of a constant; it is more where readers share a part of a value that the objective charges to
        each of them. The bound is lowered by twice that excess of the chosen layouts: others may share as much again.
        """
        return self.intra_op.optimum.lower_bound - 2 * max(0.0, self.intra_op.optimum.value - self.step_time_s)


def plan_by_search(
    trace: Trace,
    method: ProgramMethod,
    *,
    num_devices: int,
    machine: Machine,
    checked: bool = False,
    below_s: float = math.inf,
    saves_memory: bool = True,
    order: tuple[int, ...] | None = None,
    cache_directory: Path | None = None,
) -> Plan:
    """Return the best plan that a method allows, for devices of a machine; `order` is as in `LogicalMesh`.

    Solved problems are kept on disk. A plan that will be `checked` by compiling it may use all of its memory budget.
    Raises `InvalidArgument` for a mesh that does not fill the devices, or constraints that contradict each other,
    `Unsupported` for microbatches of a step whose gradient stays in a loop, `MemoryTooSmall` where no plan fits, and
    `NoneBelow` where none takes less than `below_s`; or, if nothing that `saves_memory` is to be looked for, where the
    fastest layouts do not fit: then it is limited.
    """
    auto = search_of(method)
    trace = in_microbatches(trace, auto.num_microbatches or 1)
    offered = cache(lambda: offered_layers(trace, auto.layers))  # computed when it is first asked for
    options = {"machine": machine, "checked": checked, "cache_directory": cache_directory}
    places = [
        _Place(begin=partial(begin_on, trace, method, replace(mesh, order=order), allowed, **options))
        for mesh in mesh_choices(auto, num_devices)
        for allowed in allowed_splits(auto.kinds, mesh)
    ]
    fitting: list[MeshSearchResult] = []
    refused: list[MemoryTooSmall | InvalidArgument] = []
    slow: list[NoneBelow] = []
    unlimited: Mapping[_Place, Optimum | None] = dict.fromkeys(places)
    if len(places) > 1 and auto.remat is not True:
        unlimited = _most_promising_first(places, refused)
    limit = memory_budget(method, machine, checked=checked).limit_bytes
    for place, optimum in unlimited.items():
        try:
            fitting.append(_search_layers(method, place, offered, limit, below_s, optimum, saves_memory))
            below_s = min(below_s, fitting[-1].step_time_s)
        except NoneBelow as none:
            if none.limited and not saves_memory:  # other places may fit, and still be slower
                raise
            slow.append(none)
        except (MemoryTooSmall, InvalidArgument) as error:  # another mesh may have the axes that the user asks for
            refused.append(error)
    if not fitting:
        raise min(slow, key=lambda none: none.bound) if slow else refused[-1]
    return plan_of(trace, method, min(fitting, key=lambda searched: searched.step_time_s), offered)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Place:
    """A mesh and what its axes may split."""

    begin: Callable[..., BegunSearch]
    """`begin_on` with its first arguments given; it takes those that follow."""

    @cached_property
    def plain(self) -> BegunSearch:
        """The search there if nothing is recomputed."""
        return self.begin()


def _most_promising_first(
    places: Sequence[_Place], refused: list[MemoryTooSmall | InvalidArgument]
) -> dict[_Place, Optimum]:
    """Return the best layouts of each place without a memory limit, the fastest first; add errors to `refused`.

    If the first of them fits, the programs of the other places need not be built.
    """
    found: dict[_Place, Optimum] = {}
    for place in places:
        try:
            found[place] = place.plain.problem.unlimited()
        except InvalidArgument as error:
            refused.append(error)
    return dict(sorted(found.items(), key=lambda each: each[1].value))


def _search_layers(
    method: ProgramMethod,
    place: _Place,
    offered: Callable[[], Offer],
    limit_bytes: float,
    below_s: float,
    optimum: Optimum | None,
    saves_memory: bool,
) -> MeshSearchResult:
    """Search on one mesh; recompute the layers that the method asks for, or those that make it fit in the least time.

    Layouts that save memory take long to search. So they are only looked for where they may be faster than to recompute
    as few layers as make the fastest layouts fit; or where those do not fit, whatever is recomputed.

    `optimum` are the best layouts without recomputation and without a memory limit, if they are known. Raises
    `NoneBelow` if no plan that fits takes less than `below_s`.
    """

    def search(count: int, below_s: float, memory: float | str | None = None) -> MeshSearchResult:
        if not count:
            return place.plain.found(below_s, optimum)
        recomputed = tuple(sorted(offered().layers[:count]))
        within = method if memory is None or isinstance(method, ShardParallel) else replace(method, memory=memory)
        begun = place.begin(recomputed_layers=recomputed, num_layers=offered().num_layers, within=within)
        return begun.found(below_s)

    remat = search_of(method).remat
    if remat is True:
        return search(len(offered().layers), below_s)
    if not place.plain.problem.search.is_limited:
        return search(0, below_s)
    optimum = place.plain.problem.unlimited(below_s) if optimum is None else optimum
    if optimum.lower_bound >= (1 - ROUND_OFF) * below_s:
        raise NoneBelow(optimum.lower_bound)
    fits = place.plain.problem.fits(optimum)
    if not (fits or saves_memory):
        raise NoneBelow(optimum.lower_bound, limited=True)
    if fits or remat is False or not offered().layers:
        return search(0, below_s)
    return _saving_memory(search, len(offered().layers), limit_bytes, below_s)


class _Search(Protocol):
    """The search of layouts with so many layers recomputed that take less than some seconds, within a memory limit."""

    def __call__(self, count: int, below_s: float, memory: float | str | None = None, /) -> MeshSearchResult:
        """Return the best; raise `MemoryTooSmall` or `NoneBelow` if there are none."""
        ...


def _saving_memory(search: _Search, most: int, limit_bytes: float, below_s: float) -> MeshSearchResult:
    """Return the best of layouts that save memory, and of recomputing up to `most` layers; errors are as of a search.

    The fastest layouts with as few layers recomputed as make them fit are soon found. What they take is what layouts
    that save memory have to undercut.
    """
    refused: list[MemoryTooSmall | NoneBelow] = []

    def fastest(count: int) -> MeshSearchResult | None:
        unbounded = search(count, below_s, "off")
        return unbounded if unbounded.peak_bytes <= limit_bytes else None

    def within_budget(count: int) -> MeshSearchResult | None:
        try:
            new = search(count, min(below_s, found.step_time_s) if found else below_s)
            return new if found is None or new.step_time_s < found.step_time_s else found
        except MemoryTooSmall as error:
            refused.append(error)
        except NoneBelow as none:
            if not none.limited:
                raise
            refused.append(none)
        return None

    found = again = _fewest(fastest, most)
    with suppress(NoneBelow) if found else nullcontext():
        found = within_budget(0) or found
    if found is None:
        found = _fewest(within_budget, most)
    elif again is None:
        with suppress(NoneBelow):
            found = within_budget(most) or found
    if found is None:
        slow = [each for each in refused if isinstance(each, NoneBelow)]
        raise min(slow, key=lambda none: none.bound) if slow else refused[-1]
    return found


def _fewest(search: Callable[[int], MeshSearchResult | None], most: int) -> MeshSearchResult | None:
    """Return the result for the smallest count in (0, most] for which the search has one, by bisection.

    The search returns none where a count is too small, and raises `NoneBelow` where it is too large.
    """
    best, least, too_few, count = None, most + 1, 0, most
    while least - too_few > 1:
        try:
            fewer = search(count)
        except NoneBelow:
            least = count
        else:
            best, least, too_few = (best, least, count) if fewer is None else (fewer, count, too_few)
        count = (least + too_few) // 2
    return best


def search_of(method: ProgramMethod) -> Auto:
    """Return the search that a method is, or restricts."""
    return method if isinstance(method, Auto) else method.search()


@dataclass(frozen=True, kw_only=True, eq=False)
class BegunSearch:
    """A search on one mesh that is stated, and not solved yet."""

    mesh_costs: MeshCosts
    problem: IntraOpProblem
    recomputed_layers: tuple[int, ...]

    def found(self, below_s: float = math.inf, unlimited: Optimum | None = None) -> MeshSearchResult:
        """Solve it; raise `MemoryTooSmall` if no layouts fit, `NoneBelow` if none take less than `below_s`.

        `unlimited` is as in `IntraOpProblem.best`.
        """
        intra_op = self.problem.best(below_s, unlimited)
        return MeshSearchResult(
            mesh_costs=self.mesh_costs,
            intra_op=intra_op,
            block=intra_op.program.block,
            peak_bytes=intra_op.program.memory.peak_bytes,
            recomputed_layers=self.recomputed_layers,
        )


def search_on(
    trace: Trace,
    method: ProgramMethod,
    mesh: LogicalMesh,
    *,
    machine: Machine,
    allowed: AllowedSplits | None = None,
    recomputed_layers: tuple[int, ...] = (),
    num_layers: int = 1,
    checked: bool = False,
) -> MeshSearchResult:
    """Search on one logical mesh, whose axes split what is `allowed`, with these of the step's layers recomputed."""
    return begin_on(
        trace,
        method,
        mesh,
        allowed,
        machine=machine,
        checked=checked,
        cache_directory=None,
        recomputed_layers=recomputed_layers,
        num_layers=num_layers,
    ).found()


def begin_on(
    trace: Trace,
    method: ProgramMethod,
    mesh: LogicalMesh,
    allowed: AllowedSplits | None,
    *,
    machine: Machine,
    checked: bool,
    cache_directory: Path | None,
    recomputed_layers: tuple[int, ...] = (),
    num_layers: int = 1,
    within: ProgramMethod | None = None,
) -> BegunSearch:
    """State the search on one logical mesh; `within` is the method with another memory limit, if there is one."""
    recomputed = f", {len(recomputed_layers)} layers recomputed" if recomputed_layers else ""
    tell(f"layouts on {'x'.join(map(str, mesh.shape))}{recomputed}")
    method = method if within is None else within
    auto = search_of(method)
    mesh = with_links(mesh, machine)
    mesh_costs = MeshCosts(machine=machine, mesh=mesh)
    trace = rematerialize(trace, recomputed_layers, num_layers)
    closed = one_jaxpr(
        trace,
        num_microbatches=(auto.num_microbatches or 1) if trace.differentiates else 1,
        batch_statistics=auto.batch_statistics,
        random=auto.random,
    )
    problem = intra_op_problem(
        closed,
        mesh_costs,
        state_outputs=dict(trace.state_outputs),
        constraints=constraints_of(trace, closed, method, mesh, allowed),
        input_names=[leaf.name for leaf in trace.inputs],
        budget=memory_budget(method, machine, checked=checked),
        donated=trace.donated_inputs,
        time_limit_s=auto.time_limit_s,
        cache_directory=cache_directory,
    )
    return BegunSearch(mesh_costs=mesh_costs, problem=problem, recomputed_layers=recomputed_layers)


def plan_of(trace: Trace, method: ProgramMethod, searched: MeshSearchResult, offered: Callable[[], Offer]) -> Plan:
    """Return a search's result as a plan."""
    auto, mesh, block = search_of(method), searched.mesh_costs.mesh, searched.block
    recomputed = searched.recomputed_layers
    sharding = ShardingPlan(
        layouts=to_data(searched.intra_op.plan, mesh),
        collectives=tuple(priced_collectives(block, searched.mesh_costs)),
        step_time_s=searched.step_time_s,
        lower_bound_s=searched.lower_bound_s,
        peak_bytes=searched.peak_bytes,
        figures=searched.mesh_costs.machine.name,
        recomputed=tuple(offered().names[layer] for layer in recomputed),
        recomputed_layers=recomputed,
        num_layers=offered().num_layers if recomputed else 1,
    )
    specs = {leaf.name: to_spec(value.layout, mesh) for leaf, value in zip(trace.inputs, block.inputs, strict=True)}
    return Plan(
        fingerprint=trace.fingerprint,
        method=type(method).__name__,
        meshes=(
            MeshPlan(
                devices=mesh.order or tuple(range(mesh.num_devices)),
                shape=mesh.shape,
                axis_names=mesh.axis_names,
                links=mesh.links,
            ),
        ),
        stages=(StagePlan(layers=(0, 1), mesh=0),),
        cuts=(),
        num_microbatches=(auto.num_microbatches or 1) if trace.differentiates else 1,
        schedule=get_schedule(auto.schedule or DEFAULT_SCHEDULE).name,
        input_specs={name: spec for name, spec in specs.items() if any(spec)},
        batch_statistics=auto.batch_statistics,
        random=auto.random,
        sharding=sharding,
    )


def mesh_choices(auto: Auto, num_devices: int) -> list[LogicalMesh]:
    """Return the logical meshes to try on so many devices; raise `InvalidArgument` for a shape of another number."""
    if auto.mesh_shape is not None:
        size = math.prod(auto.mesh_shape)
        if size != num_devices:
            raise InvalidArgument(
                f"mesh_shape {auto.mesh_shape} needs {size} devices, there are {num_devices}. Give a shape whose "
                f"product is {num_devices}, or pass `devices=` with {size} of them."
            )
        return [LogicalMesh(shape=auto.mesh_shape, axis_names=auto.mesh_axes)]
    # Both axes may split one dimension, but a collective over one axis of n devices can take less than one over two.
    shapes = [(a, num_devices // a) for a in range(1, math.isqrt(num_devices) + 1) if num_devices % a == 0]
    names = replace(auto, mesh_shape=shapes[-1]).mesh_axes
    return [LogicalMesh(shape=shape, axis_names=names) for shape in shapes]


def memory_budget(method: ProgramMethod, machine: Machine, *, checked: bool) -> MemoryBudget:
    """Return what a method's plans may use of a device; those that will be `checked` by compiling them, all of that.

    A word for `memory` leaves a share of the device free by itself.
    """
    memory = search_of(method).memory
    headroom = 0.0 if checked or isinstance(memory, str) else HEADROOM
    return MemoryBudget(nbytes=memory_limit(memory, machine), headroom=headroom)


def memory_limit(memory: float | str, machine: Machine) -> float:
    """Return the bytes that a plan may use on a device."""
    if isinstance(memory, str):
        return MEMORY_LEVELS[memory] * machine.memory_bytes
    return memory * machine.memory_bytes if memory <= 1 else memory
