"""What the time of a step and the memory of a stage are under a schedule, in closed form.

With stages s = 0..S-1, their times per microbatch f, b (w of it for the weight gradient), t = f + b, the time x of
the transfers over the cut behind a stage (both directions), M microbatches and V virtual stages per mesh:

    T = sum_s (fill_s + c x_s) + max_s hold_s + max_s once_s                              → step_time_s

    schedule      fill               c  hold                            in flight, a stages behind
    gpipe         t                  1  (M-1) max(t, x)                 M
    1f1b          t                  1  (M-1) (t + x)                   min(M, a+1)
    eager-1f1b    t                  1  (M-1) max(t, x)                 min(M, 2a+1)
    interleaved   t/V                V  max(M t - t/V, (M-1) V x)       min(M, (2a + (V-1) S + 1) / V)
    zero-bubble   max(f, w) + b-2w   1  (M-1) (t + x) + w + min(f, w)   min(M, S)

The first microbatch fills and drains the pipeline, the others follow at the pace of the slowest stage. A stage of
1F1B has no microbatch to spare while a transfer is under way: with S equal stages its period is t + x (S-1)/S, which
eager 1F1B avoids. For equal stages and x = 0 each T is what the simulation of the schedule takes (interleaved: if S
divides M; zero-bubble: if S <= M). For unequal stages the simulation of 1F1B takes at most T, and GPipe's at most
(M-1) (max f + max b - max t) more, as its two halves wait for different stages.
The interleaved schedule is priced as if each mesh's share of the layers were one range of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.compiler.inter_op.stage_costs import StageCost
from autopar.errors import InvalidArgument

SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A schedule, and the numbers that its formulas take."""

    schedule: str
    num_microbatches: int
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for an unknown schedule or a count below 1."""
        if self.schedule not in SCHEDULES:
            raise InvalidArgument(f"Schedule '{self.schedule}' is unknown. Use one of: {', '.join(SCHEDULES)}.")
        if self.num_microbatches < 1 or self.virtual_stages < 1:
            raise InvalidArgument(
                f"A pipeline needs at least 1 microbatch and 1 virtual stage per mesh; it was given "
                f"{self.num_microbatches} and {self.virtual_stages}."
            )

    @property
    def formulas(self) -> str:
        """The row of the table; with one stage per mesh the interleaved schedule is 1F1B."""
        return "1f1b" if self.schedule == "interleaved" and self.virtual_stages == 1 else self.schedule

    @property
    def depends_on_num_stages(self) -> bool:
        """Whether the memory of a stage depends on more than the number of stages behind it."""
        return self.formulas in ("interleaved", "zero-bubble")

    @property
    def crossings(self) -> int:
        """How often a microbatch crosses a cut."""
        return self.virtual_stages if self.formulas == "interleaved" else 1


def fill_s(timing: Timing, forward_s: Any, backward_s: Any, weight_s: Any) -> Any:
    """Seconds that a stage adds to the way of the first microbatch; numbers or arrays."""
    match timing.formulas:
        case "zero-bubble":
            return np.maximum(forward_s, weight_s) + backward_s - 2 * weight_s
        case "interleaved":
            return (forward_s + backward_s) / timing.virtual_stages
        case _:
            return forward_s + backward_s


def hold_s(timing: Timing, forward_s: Any, backward_s: Any, weight_s: Any) -> Any:
    """Seconds that the other microbatches take, if this stage is the slowest and transfers are free."""
    stage_s = forward_s + backward_s
    others_s = (timing.num_microbatches - 1) * stage_s
    match timing.formulas:
        case "zero-bubble":
            return others_s + weight_s + np.minimum(forward_s, weight_s)
        case "interleaved":
            return others_s + stage_s * (1 - 1 / timing.virtual_stages)
        case _:
            return others_s


def with_transfer_s(timing: Timing, stage_hold_s: Any, transfer_s: Any) -> Any:
    """`hold_s` of a stage together with the cut behind it."""
    link_s = (timing.num_microbatches - 1) * timing.crossings * transfer_s
    if timing.formulas in ("1f1b", "zero-bubble"):
        return stage_hold_s + link_s
    return np.maximum(stage_hold_s, link_s)


def in_flight(timing: Timing, *, stages_behind: int, num_stages: int) -> float:
    """Microbatches whose activations a stage holds at its fullest; it never falls if there are more stages."""
    match timing.formulas:
        case "gpipe":
            most = float(timing.num_microbatches)
        case "1f1b":
            most = float(stages_behind + 1)
        case "eager-1f1b":
            most = float(2 * stages_behind + 1)
        case "zero-bubble":
            most = float(num_stages)
        case _:
            most = (2 * stages_behind + (timing.virtual_stages - 1) * num_stages + 1) / timing.virtual_stages
    return min(float(timing.num_microbatches), most)


def step_time_s(timing: Timing, costs: Sequence[StageCost], transfers_s: Sequence[float]) -> float:
    """T of the formula, for the costs of all stages and the transfers over the cuts between them."""
    behind_s = [*transfers_s, 0.0]
    fills_s = sum(float(fill_s(timing, c.forward_s, c.backward_s, c.weight_s)) for c in costs)
    holds_s = [
        float(with_transfer_s(timing, hold_s(timing, c.forward_s, c.backward_s, c.weight_s), x))
        for c, x in zip(costs, behind_s)
    ]
    return fills_s + timing.crossings * sum(behind_s) + max(holds_s) + max(c.once_s for c in costs)
