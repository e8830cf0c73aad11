"""A task: the unit of work that schedules order, programs run and simulations time."""

from typing import NamedTuple


class Task(NamedTuple):
    """The work of one executable in one step: a pass of a stage over a microbatch, or an update.

    A tuple, for schedules make and look up tens of thousands.
    """

    # F forward, B backward, W weight gradient, U update, P prologue, Z zero accumulators, C concatenate
    kind: str
    stage: int
    microbatch: int | None = None
    round: int = 0
    update_round: int = 0  # numbers the update tasks of one stage

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f".m{self.microbatch}"
        later = (f".r{self.round}" if self.round else "") + (f".w{self.update_round}" if self.update_round else "")
        return f"{self.kind}{self.stage}{microbatch}{later}"
