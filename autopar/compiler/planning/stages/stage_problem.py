"""A search over stages: the step, the method, the devices, and what is kept while it is searched.

Trace, Auto, Cluster  ->  StageProblem     submeshes, machines, and the bytes that a device may use
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.compiler.costs.mesh_costs import with_links
from autopar.compiler.frontend.scopes import ModelScope, meshes_of
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, submesh_choices
from autopar.compiler.intra_op.plan_program import all_bytes
from autopar.compiler.planning.one_mesh import memory_budget
from autopar.compiler.planning.stages.layer_classes import LayerCutter, Layers
from autopar.compiler.planning.stages.layer_costs import LayerCosts, LayerOptimum
from autopar.compiler.planning.step_bounds import Work
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Machine
from autopar.ir.schedule import Schedule
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule
from autopar.methods import Auto, offloaded
from autopar.plain_text import size_words

_STAGE_AXES = ("data", "model")

TimeShare = Callable[[Submesh, int], float]
"""Tells of stages of so many layers on a submesh the share of their time that they are expected to take as a whole."""


class TimeIsUp(Exception):
    """The time for a search has passed before a part of its space was looked at to its end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProblem:
    """A search over stages: all that is the same for every number of microbatches."""

    trace: Trace
    method: Auto
    hardware: Cluster
    cache_directory: Path | None
    checked: bool = False
    """True if the plan will be compiled to see what it needs, and so may use all of its memory budget."""
    share: float = 1.0
    """The part of a plan's memory limit that the sum over a stage's layers may reach."""
    time_share: TimeShare | None = None
    """The part of the time by their layers that stages are expected to take."""
    deadline_s: float = math.inf
    """The seconds of `time.process_time()` until which it may be worked on."""
    cut: LayerCutter | None = None
    """The cuts between layers, if they are not to be those of the model."""
    allows: Callable[[int, int, int], bool] | None = None
    """Tells for layers [start, stop) of so many that they may be a stage; all may, if it is not given."""
    named_stages: tuple[ModelScope, ...] = ()
    """The stages that the model names, if it names several: a layer each, on as many devices as it says."""
    known: dict[tuple[int, bool, bool], tuple[Layers, LayerCosts]] = field(
        default_factory=dict[tuple[int, bool, bool], tuple[Layers, LayerCosts]]
    )
    """The layers so far and their costs, for the next search, by microbatches, `remat` and `splits`."""
    layer_optima: dict[Hashable, LayerOptimum] = field(default_factory=dict[Hashable, LayerOptimum])
    """The costs of layers so far, which other layers may have as well."""
    task_works: dict[Hashable, tuple[Work, Work]] = field(default_factory=dict[Hashable, tuple[Work, Work]])
    """The work of the tasks of layers so far (see `layer_costs`)."""
    solved_stages: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])
    """The layouts of stages as a whole so far, which other candidates may have as well (see `stage_layouts`)."""
    needed_shares: dict[Hashable, dict[int, float]] = field(default_factory=dict[Hashable, dict[int, float]])
    """The least share of the bytes by their layers that stages needed as a whole, at another price of memory.

    By submesh, layouts of the layers and price, and then by the number of microbatches.
    """

    def check_time(self) -> None:
        """Raise `TimeIsUp` behind the deadline."""
        if time.process_time() > self.deadline_s:
            raise TimeIsUp

    @property
    def offloads(self) -> bool:
        """True if values are on the hosts while no task uses them."""
        return bool(offloaded(self.method) or self.trace.host_state)

    @property
    def num_devices(self) -> int:
        """All devices there are."""
        return self.hardware.num_devices

    @property
    def machine(self) -> Machine:
        """The machine of all devices; `InvalidArgument` if there are several."""
        return self.hardware.machine

    def machine_of(self, submesh: Submesh) -> Machine:
        """Return the machine of a submesh's devices while others idle."""
        return self.machine_on(submesh.num_devices, submesh.group)

    def machine_on(self, num_devices: int, group: int) -> Machine:
        """Return the machine of so many devices of a group, of as few hosts as can be, while others idle."""
        machine = self.hardware.groups[group].machine
        return machine.when_busy(min(num_devices, machine.devices_per_host))

    @property
    def takes_all_devices(self) -> bool:
        """True if devices share their host's compute, so that those that a plan leaves out would only slow it down.

        Nor is there anything to be gained by stages on more devices than others: what one leaves, the others have.
        """
        return any(group.machine.concurrent_devices for group in self.hardware.groups) and not self.hardware.is_mixed

    @property
    def given_schedule(self) -> Schedule | None:
        """The schedule, if it is not to be searched."""
        return None if self.method.schedule is None else get_schedule(self.method.schedule)

    @property
    def first_schedule(self) -> Schedule:
        """The schedule that is given, or else the usual one."""
        return self.given_schedule or get_schedule(DEFAULT_SCHEDULE)

    @property
    def num_stages(self) -> int | None:
        """The number of stages, if it or their mesh is given."""
        if self.method.num_stages is None and self.method.mesh_shape is not None:
            return self.num_devices // math.prod(self.method.mesh_shape)
        return self.method.num_stages

    @property
    def divides_equally(self) -> bool:
        """True if all devices divide among a given number of stages."""
        return self.num_devices % (self.num_stages or 1) == 0

    @property
    def given_may_differ(self) -> bool:
        """True if a given number of stages may differ in their devices, which they may not where their mesh is given.

        Those that share their host's compute differ only where they have to.
        """
        if self.num_stages is None or self.method.mesh_shape is not None:
            return False
        return self.num_stages > 1 and not (self.takes_all_devices and self.divides_equally)

    @property
    def least_layers(self) -> int:
        """The layers that are given, or one for every stage that is given; 1 if nothing is."""
        return self.method.layers or self.num_stages or len(self.named_stages) or 1

    @property
    def stage_meshes(self) -> tuple[int, ...]:
        """The mesh of every stage that the model names, where some share one; empty where each has its own."""
        meshes = meshes_of(self.named_stages)
        return meshes if len(set(meshes)) < len(meshes) else ()

    @property
    def clusters(self) -> tuple[Submesh, ...]:
        """The devices of every group as hosts, or as parts of hosts if a given number of equal stages needs them."""
        return tuple(self._shape(group) for group in range(len(self.hardware.groups)))

    @property
    def cluster(self) -> Submesh:
        """The devices of the only group as hosts, or as parts of them."""
        (whole,) = self.clusters
        return whole

    def _shape(self, group: int) -> Submesh:
        num_devices = self.hardware.groups[group].num_devices
        whole = cluster_shape(num_devices, self.hardware.groups[group].machine.devices_per_host)
        part, rest = divmod(num_devices, self.num_stages or 1)
        per_host = whole.devices_per_host
        if not (self.hardware.is_mixed or rest or part % per_host == 0 or per_host % part == 0):
            whole = cluster_shape(num_devices, math.gcd(part, per_host))
        return replace(whole, group=group)

    def submeshes(self) -> tuple[Submesh, ...]:
        """Return the submeshes of every group that a stage may get."""
        return tuple(
            submesh
            for cluster in self.clusters
            for submesh in submesh_choices(cluster.num_devices, cluster.devices_per_host, group=cluster.group)
        )

    @property
    def memory_bytes(self) -> float:
        """The modelled bytes of a device that a plan may take; of the largest, if there are several machines."""
        return max(self.limit_bytes(group.machine) for group in self.hardware.groups)

    @cached_property
    def is_roomy(self) -> bool:
        """True if a device holds all of the step, also computed again and summed over microbatches, at once."""
        workspace = max(group.machine.product_workspace_bytes for group in self.hardware.groups)
        return not self.offloads and 3 * all_bytes(self.trace.jaxpr.jaxpr) + workspace <= min(self.expected_bytes)

    def memory_of(self, submesh: Submesh) -> float:
        """Return the modelled bytes of a submesh's device that a plan may take."""
        return self.limit_bytes(self.machine_of(submesh))

    def limit_bytes(self, machine: Machine) -> float:
        """Return the modelled bytes of a device that a plan may take: of the budget, without what is kept free."""
        return memory_budget(self.method, machine, checked=self.checked).limit_bytes

    def kept_free(self) -> str:
        """Return in words what is kept free of a budget, beside what a plan may take; nothing where nothing is."""
        largest = max((group.machine for group in self.hardware.groups), key=lambda machine: machine.memory_bytes)
        budget = memory_budget(self.method, largest, checked=self.checked)
        if not budget.headroom:
            return ""
        return (
            f" Of the budget of {size_words(budget.nbytes)}, {size_words(budget.nbytes - budget.limit_bytes)} are kept "
            "free for what compiled programs may need beyond the model."
        )

    def memory_of_groups(self) -> str:
        """Return what the devices of every group may use, in words; nothing where they are all of one kind."""
        if not self.hardware.is_mixed:
            return ""
        limits = (self.limit_bytes(group.machine) / 2**30 for group in self.hardware.groups)
        groups = zip(self.hardware.groups, limits, strict=True)
        each = ", ".join(f"{n} has {group} with {limit:.3g} GiB each" for n, (group, limit) in enumerate(groups))
        return f" Of the groups {each}; submeshes without a group lie in 0."

    @property
    def expected_bytes(self) -> tuple[float, ...]:
        """Bytes of a device that the sum over a stage's layers may reach, by group."""
        return tuple(self.share * self.memory_of(shape) for shape in self.clusters)


def submesh_mesh(problem: StageProblem, submesh: Submesh) -> LogicalMesh:
    """Return the logical mesh of a submesh, with its links."""
    return with_links(_bare_mesh(problem.method, submesh), problem.machine_of(submesh))


def _bare_mesh(method: Auto, submesh: Submesh) -> LogicalMesh:
    """Return the mesh over hosts and inside of them, or as square as can be inside of one host.

    Both axes may split one dimension, so that the product of both is in the search, too.
    """
    if method.mesh_shape is not None:
        return LogicalMesh(shape=method.mesh_shape, axis_names=method.mesh_axes)
    if submesh.num_hosts > 1:
        shape = (submesh.num_hosts, submesh.devices_per_host)
    else:
        n = submesh.num_devices
        small = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
        shape = (small, n // small)
    return LogicalMesh(shape=shape, axis_names=method.axis_names or _STAGE_AXES)
