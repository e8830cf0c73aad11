"""The errors a user can meet: each says what was found, what is required, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable


class AutoparError(Exception):
    """Base of every error that autopar raises for a user's mistake or an unsupported program."""


class InvalidArgument(AutoparError, ValueError):
    """An option, argument, batch or device count that cannot be used as given."""


class PlanMismatch(AutoparError, ValueError):
    """A plan that was made for another program, another cluster, or another format."""


class NotSplittable(AutoparError, ValueError):
    """A step whose result cannot be computed exactly from microbatches."""


class Unsupported(AutoparError, NotImplementedError):
    """A program that autopar does not parallelize; the message names the equation and its source line."""


class DonatedBuffer(AutoparError, RuntimeError):
    """An argument whose buffer was donated to an earlier call and is gone."""


class InvalidProgram(AutoparError, ValueError):
    """A program that reads what was never written, leaves a transfer unmatched, or waits forever."""


class SolverFailed(AutoparError, RuntimeError):
    """The integer-programming solver ended in a state that gives no plan; the message says which."""


class MemoryTooSmall(InvalidArgument):
    """A memory budget that no plan fits: the least that was found, what takes it, and the changes that would fit.

    What takes long to find is given as a function, which is called when it is first read: a search meets many of these
    errors, and shows one at most.
    """

    def __init__(
        self,
        shortage: str | Callable[[], str],
        *,
        least_share: float | Callable[[], float] = math.nan,
        changes: str | Callable[[], str] = "",
    ) -> None:
        """Keep what is missing, the budget that was found to be enough (1.5: half as much again), and what helps."""
        super().__init__(shortage)
        self._shortage, self._least_share, self._changes = shortage, least_share, changes

    @property
    def shortage(self) -> str:
        """The shortage in words: what is missing, and what takes the memory, without what helps."""
        if callable(self._shortage):
            self._shortage = self._shortage()
        return self._shortage

    @property
    def least_share(self) -> float:
        """The least budget that was found to be enough, as a multiple of the one that is too small; NaN if none was."""
        if callable(self._least_share):
            self._least_share = self._least_share()
        return self._least_share

    def __str__(self) -> str:
        """Return the message."""
        if callable(self._changes):
            self._changes = self._changes()
        return f"{self.shortage} {self._changes}".rstrip()

    def __reduce__(self) -> tuple[type[MemoryTooSmall], tuple[str]]:
        """Return what makes an equal error in another process."""
        return type(self), (str(self),)


class ReplicatedWarning(UserWarning):
    """Arrays or work that every device has whole, or several alike, because nothing that is allowed divides them."""


class GenericFiguresWarning(UserWarning):
    """Devices of a kind that no machine file describes: plans for them go by figures of no device in particular."""


class UntriedWarning(UserWarning):
    """A part that has not been run on such devices yet; the message names it."""


class ClusterFailed(AutoparError, RuntimeError):
    """A cluster whose processes were ended, and why; every later call raises it again."""


class HostLost(ClusterFailed):
    """A process of a cluster that died, or does not answer; the message names its host and its meshes."""


class StepTimeout(ClusterFailed):
    """A step, or what else was asked of a cluster, that took longer than it may."""


class StepFailed(ClusterFailed):
    """A step that raised in a process of a cluster; the message names the instruction."""


class CannotSerialize(AutoparError, TypeError):
    """A step that cannot be sent to the processes of a cluster; the message names what in it."""


class CheckpointFailed(AutoparError, OSError):
    """A checkpoint that could not be written or read; the message names its directory and what went wrong."""


class NonFiniteValue(AutoparError, ArithmeticError):
    """A step that computed an infinity or a NaN; the message names the first such value and its line."""


class LossSpike(AutoparError, ArithmeticError):
    """A training step whose loss is far above those before it; the message names the step."""


class StragglerWarning(UserWarning):
    """A stage that takes longer than its share of a step; the message names it, its processes, and both times."""


class NonFiniteLoss(AutoparError, ArithmeticError):
    """A training step whose loss is infinite or not a number; the message names the step."""
