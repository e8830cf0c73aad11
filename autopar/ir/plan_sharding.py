"""The part of a plan that a search decided: layouts inside of a program, the collectives they mean, and their time.

`layouts` is JSON data that `compiler/spmd/block_plan.py` writes and reads: for every equation the mesh axes that
split its operands and results. Everything else here is for the reader, and for checks against what was compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rich import box
from rich.table import Table
from rich.text import Text

from autopar.checks import is_text, is_whole
from autopar.errors import PlanMismatch
from autopar.ir.memory_part import MemoryPart

_NUM_NAMED = 4
TIME_LIMIT = "the time limit"
"""The beginning of the reason for which a search ended that its time limit ended."""


@dataclass(frozen=True, kw_only=True)
class PlannedCollective:
    """One collective of a step. Bytes are those of one device, the larger of its operand and its result."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    nbytes: float
    times: float
    """Runs per step: more than one in loops."""
    seconds: float
    """Modelled time of all these runs."""
    dtype: str
    what: str
    """The value and its layouts before and after."""
    scope: str
    """The place in the model: the name stack of the equation that reads it."""
    repeated: bool = False
    """True if the same was done before, and is done again to save memory: a compiler may merge the two."""
    invariant_trips: float = 1.0
    """Rounds of the loops around it in which its operand is the same: a compiler may run it once for them all."""
    line: str = ""
    """The user's line that needs it, or that made what it is for, as `model.py:41 (attention)`; empty for none."""
    reach: str = "all"
    """The devices along the axes that exchange: "all", those "inside" a fast domain, or one of each, "across" them."""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Layouts of every value on one mesh. Times in seconds for one step, bytes for one device."""

    layouts: Mapping[str, Any] = field(hash=False)
    collectives: tuple[PlannedCollective, ...]
    step_time_s: float
    lower_bound_s: float
    peak_bytes: float
    figures: str
    """The machine whose figures the times are made of."""
    recomputed: tuple[str, ...] = ()
    """Names of the layers that are computed again in the backward pass, for the reader."""
    recomputed_layers: tuple[int, ...] = ()
    """The numbers of these, among the `num_layers` that the forward pass is cut into."""
    num_layers: int = 1

    @property
    def gap(self) -> float:
        """The time by which the best plan could be faster, as a share of the lower bound."""
        return self.step_time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    def __str__(self) -> str:
        total = sum(each.nbytes * each.times for each in self.collectives)
        return (
            f"modelled for {self.figures}: {1e3 * self.step_time_s:.4g} ms per step, at most {100 * self.gap:.2g} % "
            f"above the best layouts on this mesh; {self.peak_bytes / 1e6:.4g} MB per device; "
            f"{len(self.collectives)} collectives of {total / 1e6:.4g} MB" + self._recomputed_words()
        )

    def _recomputed_words(self) -> str:
        if not self.recomputed:
            return ""
        named = ", ".join(self.recomputed[:_NUM_NAMED]) + ", ..." * (len(self.recomputed) > _NUM_NAMED)
        return f"; {len(self.recomputed)} of {self.num_layers} layers computed again: {named}"

    def remat_policy(self) -> str:
        """Return the places in the model where `jax.checkpoint` would do what the plan does without it."""
        if not self.recomputed:
            return "No layer is computed again: the model needs no jax.checkpoint."
        lines = (f"  {name}" for name in self.recomputed)
        return "\n".join(["The plan computes these layers again, as with jax.checkpoint around each of them:", *lines])

    def to_data(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_data(raw: Any) -> ShardingPlan:
        """The plan that `to_data` wrote; `PlanMismatch` if it is something else."""
        try:
            fields = dict(cast(Mapping[str, Any], raw))
            collectives = tuple(
                PlannedCollective(**dict(entry, axes=tuple(entry["axes"]))) for entry in fields["collectives"]
            )
            layers = {key: tuple(fields[key]) for key in ("recomputed", "recomputed_layers")}
            if not all(map(is_text, layers["recomputed"])) or not all(map(is_whole, layers["recomputed_layers"])):
                raise TypeError("what is computed again are names of values, and numbers of layers")
            return ShardingPlan(**dict(fields, collectives=collectives, **layers))
        except (TypeError, KeyError, ValueError) as error:
            raise PlanMismatch(
                f"The sharding of the plan cannot be read: {type(error).__name__}: {error}. It must be as Plan.save "
                "wrote it: make the plan again, or correct the file."
            ) from None


@dataclass(frozen=True, kw_only=True)
class TaskTimes:
    """Modelled seconds of one run of a task: its equations, and its collectives."""

    compute_s: float
    collective_s: float

    @property
    def total_s(self) -> float:
        """Both, one after the other."""
        return self.compute_s + self.collective_s


@dataclass(frozen=True, kw_only=True)
class MeshSharding:
    """Layouts of everything on the mesh of some stages. Seconds of one step, but `times` of one run of a task.

    `layouts` is JSON data that `compiler/planning/mesh_sharding.py` writes and `compiler/lowering/stage_programs.py`
    reads: those of the values between tasks, and for every task those of its equations.
    """

    layouts: Mapping[str, Any] = field(hash=False)
    times: Mapping[str, TaskTimes] = field(hash=False)
    collectives: tuple[PlannedCollective, ...]
    objective_s: float
    lower_bound_s: float
    figures: str
    """The machine whose figures the times are made of."""
    temporary_bytes: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """Bytes that one run of a task needs on a device beside its inputs, where they were modelled: for results that take
    no input's place, and for what lives in between."""
    temporary_parts: Mapping[str, tuple[MemoryPart, ...]] = field(
        default_factory=dict[str, tuple[MemoryPart, ...]], hash=False
    )
    """The parts of these bytes at the task's fullest moment."""

    def to_data(self) -> dict[str, Any]:
        """The sharding as JSON data."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_data(raw: Any) -> MeshSharding:
        """The sharding that `to_data` wrote; `PlanMismatch` if it is something else."""
        try:
            fields = dict(cast(Mapping[str, Any], raw))
            collectives = tuple(
                PlannedCollective(**dict(entry, axes=tuple(entry["axes"]))) for entry in fields["collectives"]
            )
            times = {name: TaskTimes(**entry) for name, entry in fields["times"].items()}
            parts = {
                name: tuple(MemoryPart(*part) for part in entry)
                for name, entry in fields.get("temporary_parts", {}).items()
            }
            return MeshSharding(**dict(fields, collectives=collectives, times=times, temporary_parts=parts))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise PlanMismatch(
                f"The sharding of a mesh cannot be read: {type(error).__name__}: {error}. It must be as Plan.save "
                "wrote it: make the plan again, or correct the file."
            ) from None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A bound on how good a plan is: the simulated seconds of a step, and seconds that no plan asked for undercuts.

    The bound is for one program and for stages, on every part of the cluster, for every number of microbatches and
    every schedule. It does not cover other cuts into layers than the model's, other layouts where layers of a stage
    meet, meshes of more than two axes, and slices of a value that several equations read: each is charged for its own.
    That of stages is by formulas, less 5 % for unequal ones, as none of those that were enumerated needs more.
    """

    step_time_s: float
    lower_bound_s: float
    tried: tuple[int, ...]
    runners_up: tuple[tuple[str, float], ...]
    """Other plans that were met, in words, and their step times."""
    stopped: str = ""
    """The reason that the search ended before the bounds of the rest met its plan within 0.1 %; empty if they did."""
    kinds: tuple[str, ...] = ()
    """The kinds of parallelism to which the search was restricted; empty if to none."""

    @property
    def of_kinds(self) -> str:
        """The kinds in words."""
        return f" with no parallelism but {', '.join(self.kinds)}" if self.kinds else ""

    @property
    def gap(self) -> float:
        """The time by which the best plan could be faster, as a share of the lower bound."""
        return self.step_time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def stopped_by_clock(self) -> bool:
        """True if the search ended for want of time, so that a faster machine might find another plan."""
        return self.stopped.startswith(TIME_LIMIT)

    def __str__(self) -> str:
        best = f"; next best: {self.runners_up[0][0]}, {1e3 * self.runners_up[0][1]:.4g} ms" if self.runners_up else ""
        return (
            f"{1e3 * self.step_time_s:.4g} ms per step as simulated, at most {100 * self.gap:.2g} % above the best "
            f"plan{self.of_kinds} that was asked for (other layers, other layouts between layers, slices that several "
            "equations read and meshes of three axes not counted)"
            + (f"; {self.stopped}" if self.stopped else "")
            + best
        )

    @staticmethod
    def from_data(raw: Any) -> Certificate:
        """Return the certificate of which `dataclasses.asdict` made `raw`; `PlanMismatch` if it is something else."""
        try:
            fields = dict(cast(Mapping[str, Any], raw))
            runners_up = tuple((str(words), float(seconds)) for words, seconds in fields["runners_up"])
            tuples = {"tried": tuple(fields["tried"]), "kinds": tuple(fields.get("kinds", ()))}
            return Certificate(**dict(fields, **tuples, runners_up=runners_up))
        except (TypeError, KeyError, ValueError) as error:
            raise PlanMismatch(
                f"The certificate of the plan cannot be read: {type(error).__name__}: {error}. It must be as Plan.save "
                "wrote it: make the plan again, or correct the file."
            ) from None


def collectives_table(collectives: tuple[PlannedCollective, ...], title: str | None = None) -> Table:
    """Return a row for all collectives of a kind over the same axes at the same place of the model."""
    columns = ("where", "kind", "axes", "value", "times", "MB", "ms")
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    rows: dict[tuple[str, str, str, str], list[PlannedCollective]] = {}
    for each in collectives:
        axes = "*".join(each.axes) + f" {each.reach} hosts" * (each.reach != "all")
        rows.setdefault((_starred(each.scope), each.kind, axes, each.what), []).append(each)
    for (scope, kind, axes, what), alike in rows.items():
        times = sum(each.times for each in alike)
        megabytes = sum(each.nbytes * each.times for each in alike) / 1e6
        milliseconds = 1e3 * sum(each.seconds for each in alike)
        cells = (scope, kind, axes, what, f"{times:g}", f"{megabytes:.3g}", f"{milliseconds:.3g}")
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _starred(scope: str) -> str:
    return "".join("*" if c.isdigit() else c for c in scope)
