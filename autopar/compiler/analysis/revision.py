"""A plan with one decision changed: what else could have been planned, each a plan to be simulated.

Layouts that a search chose are chosen anew with it, as the user's pins, scopes and options allow. Those of the inputs
of other plans were asked for, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.schedules import SCHEDULES
from autopar.methods import Auto, Method, SearchMethod

DECISIONS = ("stages", "schedule", "num_microbatches", "remat", "mesh_shape", "shares", "machines")
"""The decisions of a plan that can be asked about, beside the layout of each input."""
_SEARCHES = frozenset(method.__name__ for method in get_args(SearchMethod))


@dataclass(frozen=True, kw_only=True)
class Price:
    """A step of a plan as simulated: seconds, and the most bytes that a device holds."""

    step_time_s: float
    peak_bytes: float
    memory_limit_bytes: float
    """The memory of that device."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """Another choice for a decision, and the plan with it; where there is none, `refused` says why.

    `against` names what the user asked for that it does not keep.
    """

    choice: str
    plan: Plan | None = None
    refused: str = ""
    against: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Planning:
    """A plan and what it was made from; `method` is None for a stored plan.

    `cut` makes the stages of a plan, `made` is the plan of another method, `price` that of a plan, and `on` all of this
    on another cluster. `limits` are the bytes that a device may hold, by machine: its memory, or what it holds in this
    plan; `fits` says whether those of another plan hold no more.
    """

    trace: Trace
    plan: Plan
    method: Method | None
    cluster: Cluster
    cut: Callable[[Plan], StageGraph]
    made: Callable[[Method], Plan]
    price: Callable[[Plan], Price]
    fits: Callable[[Plan], bool]
    limits: Mapping[str, float]
    on: Callable[[Cluster], Planning]

    @property
    def memory_bytes(self) -> float:
        """Return the bytes that a device of the first mesh may hold."""
        return self.limits[self.cluster.machine_of(self.plan.meshes[0].devices).name]

    @property
    def search(self) -> Auto:
        """Return the search whose pins, kinds and scopes hold; one that asks for nothing if there was none."""
        if isinstance(self.method, Auto):
            return self.method
        return Auto(ignore_user_shardings=not self.keeps_scopes)

    @property
    def keeps_scopes(self) -> bool:
        """True if the scopes and sharding constraints in the model hold."""
        return not (self.method is not None and self.method.ignore_user_shardings)

    @property
    def is_searched(self) -> bool:
        """True if a search chose the layouts of the inputs."""
        return self.plan.method in _SEARCHES

    def other_counts(self) -> list[int]:
        """Return the next smaller and the next larger number of microbatches that the batch divides into."""
        if not self.trace.batch_inputs or not self.trace.differentiates:
            return []
        here, rows = self.plan.num_microbatches, self.trace.num_rows
        counts = [count for count in range(1, rows + 1) if rows % count == 0]
        smaller, larger = [n for n in counts if n < here], [n for n in counts if n > here]
        return smaller[-1:] + larger[:1]

    def check_can_be_split(self, leaf: int) -> None:
        """Raise `InvalidArgument` for an input so small that every device has it whole."""
        given = self.trace.inputs[leaf]
        if below_split_size(given.aval):
            raise InvalidArgument(
                f"{given.name} has shape {given.aval.shape}, which is too small to be split: every device has it."
            )


def stages_words(plan: Plan, number: int) -> str:
    """Return the stages on a mesh as `stages 0, 2`; of a lane `lane 1` or `stage 2 of lane 1`; else `the step`."""
    if plan.num_stages == 1:
        return "the step"
    mine = plan.stages_on(number)
    lane_number, lane = next((n, lane) for n, lane in enumerate(plan.lanes) if mine[0] in lane)
    if plan.shares and len(lane) == 1:
        return f"lane {lane_number}"
    words = f"stage{'s' * (len(mine) > 1)} {', '.join(map(str, mine))}"
    return f"{words} of lane {lane_number}" if plan.shares else words


def other_schedules(plan: Plan) -> list[str]:
    """Return the other schedules of as many stages on a mesh; none for a plan of one stage."""
    several = plan.num_stages > len(plan.meshes)
    return [
        name
        for name, schedule in SCHEDULES.items()
        if plan.num_stages > len(plan.lanes) and name != plan.schedule and (schedule.virtual_stages != (1,)) == several
    ]


def given_spec(plan: Plan, name: str) -> PartitionSpec:
    """Return the layout of an input in a plan."""
    return plan.input_specs.get(name, PartitionSpec())
