"""Look for what to write instead of a method: by what it gains, each suggestion planned and simulated.

    Method, its plan  ->  Method, ...   one option changed, or another way to parallelize
                      ->  Fixes         those that fit or are faster, the best first

Nothing is estimated: a suggestion has the time and the memory of the plan that it makes. What leaves most open comes
first, and a search that keeps more fixed than one without a plan is not made: it has none either.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.description import PlanDescription
from autopar.errors import AutoparError, InvalidArgument, MemoryTooSmall, ReplicatedWarning
from autopar.ir.schedules import SCHEDULES
from autopar.methods import Auto, DataParallel, Method, SearchMethod, Zero, default_of, method_words
from autopar.plain_text import as_text

_GAIN = 1e-3
"""Relative: what gains less is no fix."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A method to write instead, and what its plan runs; without a plan, `refused` says why."""

    method: Method
    described: PlanDescription | None
    refused: str = ""

    @property
    def words(self) -> str:
        """The method as it is written."""
        return method_words(self.method)

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
    """Everything that was tried for a step, what fits first and then the fastest.

    `now` is what the present method makes, and `reason` the error if it makes no plan.
    """

    now: PlanDescription | None
    reason: str
    tried: tuple[Fix, ...]

    @property
    def better(self) -> tuple[Fix, ...]:
        """What fits where the present plan does not, or is faster and fits."""
        here = self.now
        if here is None or not here.simulated.fits:
            return tuple(each for each in self.tried if each.fits)
        most_s = (1 - _GAIN) * here.simulated.step_time_s
        return tuple(each for each in self.tried if each.fits and each.step_time_s < most_s)

    def to_data(self) -> dict[str, Any]:
        """Return everything that was tried as JSON values."""
        return {
            "now": None if self.now is None else _figures(self.now),
            "reason": self.reason,
            "better": [each.words for each in self.better],
            "tried": [
                {"method": each.words, "refused": each.refused}
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
    method: Method | None,
    describe: Callable[[Method], PlanDescription],
    *,
    now: PlanDescription | AutoparError,
    rows: int | None,
) -> Fixes:
    """Return what other methods make of a step, beside what there is `now`, or the error if there is no plan.

    `describe` plans by a method and simulates; `rows` are the examples of the batch, if it has any.
    """
    here = None if isinstance(now, AutoparError) else now
    without_plan = [method] if isinstance(now, MemoryTooSmall) and isinstance(method, Auto) else []
    tried: list[Fix] = []
    for other in dict.fromkeys(each for each in _others(method, here, rows) if each != method):
        wider = next((each for each in without_plan if _leaves_open(each, other)), None)
        if wider is not None:
            refused = f"{method_words(wider)} leaves open what this fixes, and no plan of it fits"
            tried.append(Fix(method=other, described=None, refused=refused))
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ReplicatedWarning)  # it is about what is planned, and not chosen yet
                tried.append(Fix(method=other, described=describe(other)))
        except AutoparError as error:
            tried.append(Fix(method=other, described=None, refused=str(error)))
            without_plan += [other] if isinstance(error, MemoryTooSmall) and isinstance(other, Auto) else []
    order = sorted(tried, key=lambda each: (not each.fits, each.step_time_s, each.words))
    return Fixes(now=here, reason=str(now) if here is None else "", tried=tuple(order))


def _others(method: Method | None, now: PlanDescription | None, rows: int | None) -> Iterator[Method]:
    """Yield the method with one option changed, and other methods; a search before those that it contains."""
    if isinstance(method, Auto):
        yield from _opened(method, now)
    else:
        yield Auto()
        if method is not None:
            yield from _changed(method, now, rows)
    if not isinstance(method, Zero):
        yield Zero(stage=3, memory=method.memory if isinstance(method, Auto) else "adaptive")
    if not isinstance(method, DataParallel):
        yield DataParallel()


def _opened(method: Auto, now: PlanDescription | None) -> Iterator[Method]:
    """Yield a search with nothing fixed, or all of a device's memory, or with each fixed option left open.

    An option that is open already has been searched, so that fixing it finds nothing better.
    """
    opened = {name: default_of(each) for name, each in _OPTIONS.items() if name in _OPEN} | {"axis_names": None}
    everything = replace(method, **opened)
    yield everything
    if now is None:
        yield replace(everything, memory=1.0)
    elif now.plan.certificate is not None and now.plan.certificate.gap > _GAIN:
        yield replace(method, effort="thorough", time_limit_s=10 * method.time_limit_s)
    for name in _OPEN:
        names = ("mesh_shape", "axis_names") if name == "mesh_shape" else (name,)
        yield replace(method, **{each: opened[each] for each in names})


_OPTIONS = {each.name: each for each in fields(Auto)}
_OPEN = ("num_stages", "layers", "mesh_shape", "num_microbatches", "schedule", "remat", "pins")
"""Options of `Auto` whose default leaves everything open."""


def _leaves_open(wide: Auto, method: Method) -> bool:
    """Return whether a search contains all plans of another one."""
    if not isinstance(method, SearchMethod):
        return False
    narrow = method if isinstance(method, Auto) else method.search()
    return all(
        getattr(wide, name) == getattr(narrow, name) or (name in _OPEN and getattr(wide, name) == default_of(each))
        for name, each in _OPTIONS.items()
        if name not in ("effort", "time_limit_s", "axis_names")
    )


def _changed(method: Method, now: PlanDescription | None, rows: int | None) -> Iterator[Method]:
    """Yield the method with one of its options changed."""
    given = {each.name: getattr(method, each.name) for each in fields(method)}
    here = 1 if now is None else now.plan.num_microbatches
    changes: list[tuple[str, Any]] = []
    if "num_microbatches" in given and rows:
        changes += [("num_microbatches", n) for n in (here // 2, 2 * here, 4 * here) if n and rows % n == 0]
    if "schedule" in given and now is not None and now.plan.num_stages > 1:
        several = now.plan.num_stages > len(now.plan.meshes)
        alike = [name for name, each in SCHEDULES.items() if (each.virtual_stages != (1,)) == several]
        changes += [("schedule", name) for name in alike if name != now.plan.schedule]
    if given.get("remat", True) is not True:
        changes.append(("remat", True))
    if given.get("offload") == "off":
        changes.append(("offload", "optimizer"))
    changes += [("zero", stage) for stage in range(given.get("zero", 3) + 1, 4)]
    for name, value in changes:
        with suppress(InvalidArgument):  # such as a ZeRO stage without replicas
            yield replace(method, **{name: value})


def _figures(described: PlanDescription) -> dict[str, Any]:
    report = described.simulated
    return {"step_time_s": report.step_time_s, "peak_bytes": report.peak_bytes, "fits": report.fits}
