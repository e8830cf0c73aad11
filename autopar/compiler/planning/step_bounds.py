"""Bound the seconds of a step from below without choosing a layout: by its work, and by what hosts have to start.

    Trace, Machine                          ->  StepBounds
    StepBounds, devices, microbatches, ...  ->  seconds that no plan takes less than

On p devices an equation takes at least what does not divide (its kernels start, a product reaches its rate) and a p-th
of the rest. With k and w these sums of the forward and backward pass over the whole batch, a microbatch takes at least

    t(p) = k + w / (M p)

for M microbatches. Collectives and transfers are counted as nothing. Stages add, for S of them on D devices:

    chain     stage s waits for those before it, and they for its last gradient:  T >= sum before s of t + M t_s, so
              T >= t(p) / (1 - (1 - 1/M)^S)           p the most devices that one stage can have
              with t without gradients of weights, for which no other stage waits, where these are tasks of their own
    work      some stage has as much to do as all have on average:  T >= (M k + w) / D  and  T >= M t(p) / S
    lanes     every machine g, as stages or as one, runs a share of the microbatches, and one of them, h, all updates,
              which take its devices u_h together:  T >= (1 + u_h / (M k_h + w_h)) / sum over g of D_g / (M k_g + w_g)
    machines  an equation e is run by one machine or several: with any weights m_g, sum over g of D_g m_g = 1,
              T >= sum over e of min over g of m_g (M k_eg + w_eg)      m_g as what is to be done takes on g, inverse
    starting  a host starts one piece of work after another: S M forward tasks, (S-1) M transfers, at least M backward
              tasks and an update, 2 S M + 1 in all. Stages that all have a gradient and an update, as is usual, start
              2 S M tasks, 2 (S-1) M transfers and S updates: that is likely, and no bound
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.compiler.costs.compute import equation_work
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import equation_classes
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.fusion import Traffic, fused_traffic
from autopar.compiler.jaxprs.fusion_kinds import FusionRules
from autopar.compiler.jaxprs.primitives import NESTED, REMAT
from autopar.compiler.pipeline.phases import Phase
from autopar.compiler.pipeline.prepare import prepare
from autopar.compiler.sharding.layout import LogicalMesh, replicated
from autopar.compiler.sharding.strategies import Strategy
from autopar.compiler.spmd.collectives import taken, trips
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one device: what more devices take as well, and what they divide."""

    fixed_s: float = 0.0
    divisible_s: float = 0.0

    def on(self, parts: float) -> float:
        """Return the seconds that one of so many equal parts takes at least."""
        return self.fixed_s + self.divisible_s / parts


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupWork:
    """The work of a step's equations on the devices of one machine, one after another."""

    num_devices: int
    fixed_s: NDArray[np.float64]
    divisible_s: NDArray[np.float64]
    repeats: NDArray[np.bool_]
    """True for equations that are run for every microbatch."""

    def seconds(self, num_microbatches: int) -> NDArray[np.float64]:
        """Return the seconds of one device, by equation."""
        return np.where(self.repeats, num_microbatches, 1) * self.fixed_s + self.divisible_s


@dataclass(frozen=True, kw_only=True)
class StepBounds:
    """The work of a step, and the bytes that it has to hold from step to step."""

    per_batch: Work
    """The work of the forward and backward pass; `fixed_s` is that of every microbatch."""
    per_chain: Work
    """The part of it that stages wait for."""
    per_step: Work
    of_groups: tuple[GroupWork, ...]
    """The work on the devices of each group of the cluster."""
    state_bytes: float
    whole_bytes: float
    """Bytes of all that a step is given and makes, at once."""
    recomputes: bool
    """True if the model says itself that its backward pass computes parts of the forward pass again."""
    num_devices: int
    num_hosts: int
    dispatch_s: float
    sharing: tuple[tuple[float, int], ...] = ()
    """Devices in groups in which those of a host share its compute: how many take all of it, how many a host has. All
    work is what it takes with all of them at work."""
    execution_s: float = 0.0
    """Seconds that one executable more takes with all devices at work, where those of a host share its compute; 0 on
    machines of several kinds."""

    def idle_share(self, num_devices: int) -> float:
        """Return the share of its time that work on so many devices takes at least while all others idle."""
        return min([1.0, *(max(num_devices, most) / max(there, most) for most, there in self.sharing)])

    def one_program_s(self, num_devices: int, num_microbatches: int) -> float:
        """Return the least seconds of one program on so many devices."""
        repeated_s = (num_microbatches - 1) * self.per_batch.fixed_s
        each_s = self.per_batch.on(num_devices) + repeated_s + self.per_step.on(num_devices)
        return self.idle_share(num_devices) * each_s

    def lanes_s(self, num_microbatches: int) -> float:
        """Return the least seconds of lanes, one on every machine, that end their microbatches together."""
        each_s = [
            (float(seconds[group.repeats].sum()), float(seconds[~group.repeats].sum()), group.num_devices)
            for group in self.of_groups
            for seconds in [group.seconds(num_microbatches)]
        ]
        ended_per_s = sum(num_devices / batch_s for batch_s, _, num_devices in each_s)
        return min(1 + update_s / batch_s for batch_s, update_s, _ in each_s) / ended_per_s

    def divided_s(self, num_microbatches: int) -> float:
        """Return the least seconds in which all devices together end a step, whichever runs what."""
        each_s = np.stack([group.seconds(num_microbatches) for group in self.of_groups])
        weights = 1 / each_s.sum(axis=1)
        weights /= sum(group.num_devices * weight for group, weight in zip(self.of_groups, weights, strict=True))
        return float((weights[:, None] * each_s).min(axis=0).sum())

    def stages_s(self, num_microbatches: int, fewest: int, most: int, sizes: Sequence[int]) -> float:
        """Return the least seconds of `fewest` to `most` stages, each on one of these numbers of devices."""
        counts = range(fewest, max(fewest, most) + 1)
        return min(
            self._stages_s(
                num_microbatches,
                count,
                sizes,
                2 * count * num_microbatches + 1,
                (count + 1) * num_microbatches,  # stages may have no parameters, or none that are trained
            )
            for count in counts
        )

    def likely_stages_s(self, num_microbatches: int, fewest: int, most: int, sizes: Sequence[int]) -> float:
        """Return the same if all stages have a gradient and an update, as is usual."""
        per_microbatch = {count: 4 * count - 2 for count in range(fewest, max(fewest, most) + 1)}
        return min(
            self._stages_s(
                num_microbatches, count, sizes, each * num_microbatches + count, (2 * num_microbatches + 1) * count
            )
            for count, each in per_microbatch.items()
        )

    def even_stages_s(self, num_microbatches: int, num_stages: int) -> float:
        """Return the seconds of so many equal stages that do nothing but their work; unequal ones may take less."""
        devices = self.num_devices / num_stages
        each_s = self.per_batch.fixed_s + self.per_batch.divisible_s / num_microbatches / devices
        return ((num_microbatches + num_stages - 1) * each_s + self.per_step.on(devices)) / num_stages

    def _stages_s(
        self, num_microbatches: int, num_stages: int, sizes: Sequence[int], started: int, executed: int
    ) -> float:
        """Return the least seconds of stages that start so many pieces of work, of which so many are executables.

        Where devices share their host's compute, what executables take besides their work adds up, each by the share of
        the devices that it is on; the first of all takes none.
        """
        largest = max((n for n in sizes if n + (num_stages - 1) * min(sizes) <= self.num_devices), default=0)
        if not largest:
            return math.inf
        micro_s, link_s = (
            Work(fixed_s=work.fixed_s, divisible_s=work.divisible_s / num_microbatches).on(largest)
            for work in (self.per_batch, self.per_chain)
        )
        chain_s = self.idle_share(min(sizes)) * link_s / (1 - (1 - 1 / num_microbatches) ** num_stages)
        by_stage_s = (num_microbatches * micro_s + self.per_step.on(largest)) / num_stages
        by_stage_s *= self.idle_share(min(sizes))
        starting_s = self.dispatch_s * (math.ceil(started / min(num_stages, self.num_hosts)) - 1)
        on_devices = executed * min(sizes) - largest
        divided_s = self.divided_s(num_microbatches) + self.execution_s * on_devices / self.num_devices
        return max(chain_s, by_stage_s, divided_s, starting_s)


def step_bounds(
    trace: Trace, cluster: Cluster, *, batch_statistics: str, random: str, splits_weight_gradients: bool = True
) -> StepBounds:
    """Return the bounds of a step on the devices of a cluster; of several machines, any may have any part.

    Those of stages whose weight gradients may be tasks of their own, or may not.
    """
    machines = [
        group.machine.when_busy(min(group.num_devices, group.machine.devices_per_host)) for group in cluster.groups
    ]
    prepared = prepare(
        trace, num_layers=1, num_microbatches=1, loop_pieces=1, batch_statistics=batch_statistics, random=random
    )
    phases = prepared.phases
    once = {i for i, of in enumerate(phases.of) if of <= {Phase.STEP, Phase.ACCUMULATE}}
    of_groups = [_work_of_equations(phases.step.jaxpr.jaxpr, machine) for machine in machines]
    each = [*map(_least, zip(*of_groups))]
    state = [leaf.aval for i, leaf in enumerate(trace.inputs) if i not in trace.batch_inputs]
    per_batch = total_work([work for i, work in enumerate(each) if i not in once])
    shared = len(machines) == 1 and machines[0].concurrent_devices
    return StepBounds(
        per_batch=per_batch,
        per_chain=_work_of_chain(phases.equations, each, once, machines) if splits_weight_gradients else per_batch,
        per_step=total_work([work for i, work in enumerate(each) if i in once]),
        of_groups=tuple(
            GroupWork(
                num_devices=group.num_devices,
                fixed_s=np.array([work.fixed_s for work in own]),
                divisible_s=np.array([work.divisible_s for work in own]),
                repeats=np.array([i not in once for i in range(len(own))]),
            )
            for group, own in zip(cluster.groups, of_groups, strict=True)
        ),
        state_bytes=sum(map(aval_bytes, state)),
        whole_bytes=sum(aval_bytes(v.aval) for eqn in phases.equations for v in eqn.outvars)
        + sum(aval_bytes(leaf.aval) for leaf in trace.inputs),
        recomputes=any(eqn.primitive.name in REMAT for eqn in jc.all_equations(trace.jaxpr)),
        num_devices=cluster.num_devices,
        num_hosts=cluster.num_hosts,
        dispatch_s=min(machine.dispatch_s for machine in machines),
        sharing=tuple(
            (machine.concurrent_devices, min(group.num_devices, machine.devices_per_host))
            for machine, group in zip(machines, cluster.groups, strict=True)
            if machine.concurrent_devices
        ),
        execution_s=machines[0].execution_s if shared else 0.0,
    )


def _least(each: Sequence[Work]) -> Work:
    """Return what an equation takes at least on whichever of several machines."""
    return Work(fixed_s=min(w.fixed_s for w in each), divisible_s=min(w.divisible_s for w in each))


def _work_of_chain(
    equations: Sequence[jc.JaxprEqn], each: Sequence[Work], once: Collection[int], machines: Sequence[Machine]
) -> Work:
    """Return the work that the last gradient of a batch needs: the forward pass, and back to the first layer.

    The gradients of other weights are left out, which no stage waits for; `each` is the work by equation, `once` those
    that are not of the batch.
    """
    read = {v for i in once for v in jc.operands(equations[i])}
    of_batch = [i for i in range(len(equations)) if i not in once]
    last = next((i for i in reversed(of_batch) if not read.isdisjoint(equations[i].outvars)), None)
    if last is None:
        return Work()
    batch = [equations[i] for i in of_batch]

    def within(eqn: jc.JaxprEqn, outputs: Collection[int]) -> tuple[Work, Sequence[bool]]:
        each = [_needed_of_body(eqn, outputs, machine) for machine in machines]
        return _least([work for work, _ in each]), each[0][1]

    return _needed(batch, [each[i] for i in of_batch], set(equations[last].outvars), within)


def _needed(
    equations: Sequence[jc.JaxprEqn],
    each: Sequence[Work],
    wanted: set[Any],
    within: Callable[[jc.JaxprEqn, Collection[int]], tuple[Work, Sequence[bool]]],
) -> Work:
    """Return the work of the equations that some values need, and add to these what they need in turn.

    `within` says it of an equation with bodies, by the places of results, with the operands that it needs.
    """
    found: list[Work] = []
    for eqn, work in zip(reversed(equations), reversed(each), strict=True):
        outputs = [place for place, v in enumerate(eqn.outvars) if v in wanted]
        if outputs:
            nested = eqn.primitive.name in NESTED
            work, reads = within(eqn, outputs) if nested else (work, [True] * len(eqn.invars))
            found.append(work)
            wanted.update(v for v, needed in zip(eqn.invars, reads, strict=True) if needed and isinstance(v, jc.Var))
    return total_work(found)


def _needed_of_body(eqn: jc.JaxprEqn, outputs: Collection[int], machine: Machine) -> tuple[Work, list[bool]]:
    """Return the work of a body that some results need at least, and the operands that it needs.

    All that a loop carries is needed, and of what its turns make nothing. Of branches, and of loops without an end
    that is known, nothing is.
    """
    body = jc.open_jaxpr(next(jc.subjaxprs(eqn)))[0]
    if eqn.primitive.name == "scan":
        outputs = range(jp.scan_of(eqn).num_carry)
    elif eqn.primitive.name not in REMAT:
        return Work(), [True] * len(eqn.invars)
    wanted = {body.outvars[place] for place in outputs}
    each = _work_of_equations(body, machine, eqn)
    work = _needed(body.eqns, each, wanted, lambda inner, places: _needed_of_body(inner, places, machine))
    reads = [v in wanted for v in body.invars]
    times = trips(eqn)
    return Work(fixed_s=times * work.fixed_s, divisible_s=times * work.divisible_s), reads


def work_of_program(
    jaxpr: jc.Jaxpr, machine: Machine, given: Collection[int], totals: Collection[int]
) -> tuple[Work, Work]:
    """Return the work of a program, and the part of it that begins anew for each microbatch, whatever its rows.

    That is what takes to begin, what is made of the `given` inputs alone, and what adds to the `totals`: input numbers.
    """
    each = _work_of_equations(jaxpr, machine)
    known, sums = ({jaxpr.invars[place] for place in places} for places in (given, totals))
    anew: list[Work] = []
    for eqn, work in zip(jaxpr.eqns, each, strict=True):
        read = set(jc.operands(eqn))
        is_known = bool(read) and read <= known and not _spreads(eqn)
        if is_known:
            known.update(eqn.outvars)
        anew.append(work if is_known or read & sums else Work(fixed_s=work.fixed_s))
    return total_work(each), total_work(anew)


def seconds_on_one_device(jaxpr: jc.Jaxpr, machine: Machine) -> float:
    """Return the seconds of a program on one device, which leaves nothing to choose."""
    return total_work(_work_of_equations(jaxpr, machine, as_it_is=True)).on(1)


def _spreads(eqn: jc.JaxprEqn) -> bool:
    """Return whether an equation makes more than it reads, as for every row."""
    made, read = ([aval_bytes(v.aval) for v in each] for each in (eqn.outvars, jc.operands(eqn)))
    return sum(made) > 2 * sum(read)


@dataclass(frozen=True, kw_only=True, eq=False)
class _OneDevice:
    """The costs of one device of a machine, and the work of equations that it found: layers repeat, and programs."""

    costs: MeshCosts
    at_once: Machine
    """The machine whose kernels take nothing to begin."""
    known: dict[Hashable, Work] = field(default_factory=dict[Hashable, Work])

    @classmethod
    def of(cls, machine: Machine, as_it_is: bool) -> _OneDevice:
        # Smaller microbatches need less of the memory on a chip.
        priced = replace(machine, chip_bytes=_ENDLESS) if machine.chip_bytes and not as_it_is else machine
        return cls(costs=MeshCosts(machine=priced, mesh=_ONE_DEVICE), at_once=replace(priced, kernel_s=0.0))


_one_device = lru_cache(maxsize=64)(_OneDevice.of)


def _work_of_equations(
    jaxpr: jc.Jaxpr, machine: Machine, within: jc.JaxprEqn | None = None, *, as_it_is: bool = False
) -> list[Work]:
    """Return the work of each equation, that of equal ones once it is found.

    It is the least whichever other equations a program has, or that in this one, `as_it_is`.
    """
    device, found = _one_device(machine, as_it_is), list[Work]()
    rules = FusionRules.of(machine)
    if not as_it_is:  # what crosses the border of a stage is laid out anew
        rules = rules._replace(transposes_operands=False)
    moved = fused_traffic(jaxpr, within, rules=rules)
    for eqn, kind, traffic in zip(jaxpr.eqns, equation_classes(jaxpr), moved, strict=True):
        if eqn.primitive.name in NESTED:
            found.append(_work_of_bodies(eqn, machine, as_it_is))
            continue
        # What is computed again in several kernels here, stages may find in memory.
        if within is None and not as_it_is and max(traffic.reads, default=0) > 1:
            traffic = traffic._replace(reads=tuple(min(count, 1) for count in traffic.reads))
        key = (kind, traffic, jc.moves_memory(eqn))
        work = device.known.get(key)
        if work is None:
            work = device.known[key] = _work(eqn, traffic, device)
        found.append(work)
    return found


def _work_of_bodies(eqn: jc.JaxprEqn, machine: Machine, as_it_is: bool) -> Work:
    bodies = [_work_of_equations(jc.open_jaxpr(body)[0], machine, eqn, as_it_is=as_it_is) for body in jc.subjaxprs(eqn)]
    total, times = total_work([total_work(each) for each in bodies]), taken(eqn) * trips(eqn)
    return Work(fixed_s=times * total.fixed_s, divisible_s=times * total.divisible_s)


def _work(eqn: jc.JaxprEqn, traffic: Traffic, device: _OneDevice) -> Work:
    """Return the work of an equation without bodies: what takes to begin is fixed."""
    alone = Strategy(
        operands=tuple(replicated(len(getattr(v.aval, "shape", ()))) for v in eqn.invars),
        results=tuple(replicated(len(getattr(v.aval, "shape", ()))) for v in eqn.outvars),
    )
    work = equation_work(eqn, alone, device.costs, traffic)
    divisible_s = float(work._replace(half_s=0.0).seconds(device.at_once))
    return Work(fixed_s=float(work.seconds(device.costs.machine)) - divisible_s, divisible_s=divisible_s)


_ENDLESS = 1e30
"""Memory on a chip in which all stays that may."""
_ONE_DEVICE = LogicalMesh(shape=(1,), axis_names=("data",))


def total_work(each: Sequence[Work]) -> Work:
    """Return the work of several parts, one after another."""
    return Work(fixed_s=sum(w.fixed_s for w in each), divisible_s=sum(w.divisible_s for w in each))
