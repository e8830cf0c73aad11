"""Look for what to write instead of a method: each change planned and simulated.

    Asked, its plan or error  ->  Change, ...   one option changed, another method, other devices (`reports.changes`)
                              ->  Fixes         those that fit or are faster

Nothing is estimated: a change has the time and the memory of the plan that it makes. Where the present plan fits, the
fastest comes first; where nothing fits, the smallest change. What leaves most open is tried first, and a search that
keeps more fixed than one without a plan is not made: it has none either.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_program import FOLD_FROM
from autopar.errors import AutoparError, MemoryTooSmall, ReplicatedWarning
from autopar.ir.plan import Plan
from autopar.methods import Auto, Method, SearchMethod, method_words
from autopar.plain_text import as_text, size_words
from autopar.reports.changes import (
    GAIN,
    SHORT_LIMIT_S,
    Asked,
    Change,
    changes_that_fit,
    changes_that_gain,
    in_short,
    leaves_open,
    more_devices,
    more_memory,
)
from autopar.reports.description import PlanDescription

_BUDGETS = 3
"""The larger budgets that are tried, each the least that was found to be enough by the one before."""
_UNKNOWN_SHARE = 1.25
"""Factor from a budget to the next larger one, where nothing says what is enough."""
_NUM_NAMED = 3
QUICK_S, MOST_S = 5.0, 10.0
"""Processor seconds: an error of planning that took no longer looks for what fits, and begins nothing after so long."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A change, and what its plan runs; without a plan, `refused` says why."""

    change: Change
    described: PlanDescription | None
    refused: str = ""
    is_short: bool = False
    """True if memory is what a plan lacks."""
    least_share: float = math.nan
    """The multiple of the memory that was found to be enough for one that does not fit; NaN if none was."""

    @property
    def method(self) -> Method:
        """The method to write instead."""
        return self.change.method

    @property
    def words(self) -> str:
        """The method as it is written, with what else changes."""
        return self.change.written

    @property
    def fits(self) -> bool:
        """True if there is a plan that every device has room for."""
        return self.described is not None and self.described.simulated.fits

    @property
    def step_time_s(self) -> float:
        """Seconds per step as simulated; infinite without a plan."""
        return float("inf") if self.described is None else self.described.simulated.step_time_s


@dataclass(frozen=True, kw_only=True)
class Fixes:
    """Everything that was tried for a step: what fits first, by its time, or by its size where the present does not.

    `now` is what the present method makes, and `reason` the error if it makes no plan.
    """

    now: PlanDescription | None
    reason: str
    tried: tuple[Fix, ...]
    stopped: bool = False
    """True if time ended it before everything was tried."""

    @property
    def better(self) -> tuple[Fix, ...]:
        """The fixes that fit where the present plan does not, or are faster and fit."""
        here = self.now
        if here is None or not here.simulated.fits:
            return tuple(each for each in self.tried if each.fits)
        most_s = (1 - GAIN) * here.simulated.step_time_s
        return tuple(each for each in self.tried if each.fits and each.step_time_s < most_s)

    def lesson(self) -> str:
        """Return the changes that fit in words, the smallest first, or that none does."""
        rest = " Others were not planned, for want of time: trace(...).fixes() does." * self.stopped
        if not self.better:
            tried = ", ".join(dict.fromkeys(each.change.words for each in self.tried))
            return (f"None of the changes that were planned fits: {tried}." * bool(tried) + rest).lstrip()
        searched = any(isinstance(each.method, SearchMethod) for each in self.better)
        limit = f' by effort="fast" and {SHORT_LIMIT_S:g} s: more may find faster plans' * searched
        lines = (f"  {each.change.words}: {_price(each, self.now)}" for each in self.better)
        return "\n".join([f"Each of these was planned and fits, the smallest change first{limit}.{rest}", *lines])

    def to_data(self) -> dict[str, Any]:
        """Return everything that was tried as JSON values."""
        return {
            "now": None if self.now is None else _figures(self.now),
            "reason": self.reason,
            "better": [each.words for each in self.better],
            "tried": [
                {"method": each.words, "change": each.change.words, "refused": each.refused}
                | ({} if each.described is None else _figures(each.described))
                for each in self.tried
            ],
        }

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render what there is now, and a row for each method that was tried."""
        now, better = self.now, self.better
        if now is None:
            yield Text(f"There is no plan: {self.reason}")
        else:
            report = now.simulated
            fits = "fits" if report.fits else "DOES NOT FIT"
            yield Text(f"Now: {1e3 * report.step_time_s:.4g} ms per step, {report.peak_bytes / 1e6:.4g} MB, {fits}")
        yield Text(f"{len(better)} of {len(self.tried)} changes are better." if better else "Nothing tried is better.")
        table = Table("write", "ms", "change", "MB", "", box=box.SIMPLE_HEAD)
        for each in self.tried:
            if each.described is None:
                table.add_row(Text(each.words), "", "", "", Text(f"refused: {each.refused}"))
                continue
            report = each.described.simulated
            gain = "" if now is None else f"{100 * (report.step_time_s / now.simulated.step_time_s - 1):+.3g} %"
            words = "better" if each in better else "" if report.fits else "does not fit"
            figures = f"{1e3 * report.step_time_s:.4g}", gain, f"{report.peak_bytes / 1e6:.4g}"
            table.add_row(Text(each.words), *figures, words)
        yield table


def find_fixes(
    asked: Asked,
    describe: Callable[[Change], PlanDescription],
    *,
    now: PlanDescription | AutoparError,
    most_s: float = math.inf,
) -> Fixes:
    """Return what changes make of a step, beside what there is `now`, or the error if there is no plan.

    `describe` plans with a change and simulates; where nothing fits, at most 25 times, and begins none after `most_s`
    seconds of the processor.
    """
    end_s = time.process_time() + most_s
    here = None if isinstance(now, AutoparError) else now
    is_short = isinstance(now, MemoryTooSmall) if here is None else not here.simulated.fits
    without_plan = [asked.method] if here is None and is_short and isinstance(asked.method, Auto) else []
    tried, known = list[Fix](), [asked.method]

    def attempt(change: Change) -> Fix:
        wider = None if change.donated else next((m for m in without_plan if leaves_open(m, change.method)), None)
        if wider is not None:
            refused = f"{method_words(wider)} leaves open what this fixes, and no plan of it fits"
            return Fix(change=change, described=None, refused=refused)
        fix = _planned(replace(change, method=in_short(change.method)) if is_short else change, describe)
        if fix.is_short and isinstance(change.method, Auto) and not change.donated:
            without_plan.append(change.method)
        return fix

    groups = changes_that_fit(asked, here) if is_short else ([each] for each in changes_that_gain(asked, here))
    stopped = False
    for group in groups:
        for change in group:
            if change.donated or change.method not in known:
                stopped = stopped or time.process_time() >= end_s
                if stopped:
                    break
                known.append(change.method)
                tried.append(attempt(change))
                if is_short and tried[-1].fits:
                    break
    if is_short and asked.method is not None:
        stopped = stopped or time.process_time() >= end_s
        tried += () if stopped else _on_other_devices(asked, describe, now)
    order = sorted(tried, key=lambda each: (not each.fits, is_short and each.change.size, each.step_time_s, each.words))
    return Fixes(
        now=here,
        reason=_reason(now) if isinstance(now, AutoparError) else "",
        tried=tuple(order),
        stopped=stopped,
    )


def with_changes(
    error: MemoryTooSmall, find: Callable[[float], Fixes], trace: Trace, planned_s: float
) -> MemoryTooSmall:
    """Return an error that, once it is read, says which changes fit; `find` plans them, within so many CPU seconds.

    Of planning that took long it says who does, for each change may take as long; and of a large step, which may be
    refused at once.
    """
    takes_long = planned_s >= QUICK_S or len(trace.jaxpr.eqns) >= FOLD_FROM

    def changes() -> str:
        if takes_long:
            return "To plan what would fit takes long here: trace(...).fixes() does, the smallest change first."
        return find(MOST_S).lesson()

    return MemoryTooSmall(lambda: error.shortage, least_share=lambda: error.least_share, changes=changes)


def _planned(change: Change, describe: Callable[[Change], PlanDescription]) -> Fix:
    """Return what a change comes to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicatedWarning)  # it is about what is planned, and not chosen yet
            return Fix(change=change, described=describe(change))
    except MemoryTooSmall as error:
        share = error.least_share
        return Fix(change=change, described=None, refused=_reason(error), is_short=True, least_share=share)
    except AutoparError as error:
        return Fix(change=change, described=None, refused=str(error))


def _on_other_devices(
    asked: Asked, describe: Callable[[Change], PlanDescription], now: PlanDescription | AutoparError
) -> Iterator[Fix]:
    """Yield what more memory comes to, the least that is known to be enough, and what more devices do."""
    if isinstance(now, MemoryTooSmall):
        share = now.least_share
    else:
        assert isinstance(now, PlanDescription)
        share = max(mesh.peak_bytes / mesh.memory_limit_bytes for mesh in now.simulated.meshes)
    assert asked.method is not None
    brief = replace(asked, method=in_short(asked.method))
    for _ in range(_BUDGETS):
        share = share if share > 1 else _UNKNOWN_SHARE
        fix = _planned(more_memory(brief, share), describe)
        yield fix
        if fix.fits:
            break
        share *= fix.least_share if fix.least_share > 1 else _UNKNOWN_SHARE
    larger = more_devices(brief, now.least_share if isinstance(now, MemoryTooSmall) else 1.0)
    if larger is not None:
        yield _planned(larger, describe)


def _reason(error: AutoparError) -> str:
    return error.shortage if isinstance(error, MemoryTooSmall) else str(error)


def _price(fix: Fix, now: PlanDescription | None) -> str:
    """Return the time and the memory of a plan that fits, what it computes again, and what is largest in it."""
    assert fix.described is not None
    report = fix.described.simulated
    gain = "" if now is None else f" ({100 * (report.step_time_s / now.simulated.step_time_s - 1):+.3g} %)"
    taken, limit = size_words(report.peak_bytes), size_words(report.memory_limit_bytes)
    again = _computed_again(fix.described.plan)
    largest = ", ".join(f"{size_words(each.nbytes)} {each.category} {each.name}" for each in report.memory[:_NUM_NAMED])
    holds = f"; the most of it {largest}" if fix.change.cluster is not None else ""
    return f"{1e3 * report.step_time_s:.4g} ms per step{gain}, {taken} of {limit} per device{again}{holds}"


def _computed_again(plan: Plan) -> str:
    if again := plan.recomputed_in_words():
        return f"; {again} computed again"
    names = () if plan.sharding is None else plan.sharding.recomputed
    rest = ", ..." * (len(names) > _NUM_NAMED)
    return f"; {len(names)} layers computed again: {', '.join(names[:_NUM_NAMED])}{rest}" if names else ""


def _figures(described: PlanDescription) -> dict[str, Any]:
    report = described.simulated
    return {"step_time_s": report.step_time_s, "peak_bytes": report.peak_bytes, "fits": report.fits}
