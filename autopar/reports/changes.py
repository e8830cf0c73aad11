"""List what could be written instead of a method: one option changed, another method, or other devices.

    Asked, its plan or error  ->  (Change, ...), ...   each group from the smaller change to the larger

Nothing is planned here: `autopar.reports.fixes` does, and says what each comes to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from itertools import combinations
from typing import Any

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.planning.one_mesh import memory_limit, search_of
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.schedules import DEFAULT_SCHEDULE, SCHEDULES
from autopar.method_fields import MEMORY_LEVELS
from autopar.methods import Auto, DataParallel, Method, SearchMethod, Zero, default_of, method_words
from autopar.plain_text import size_words
from autopar.reports.description import PlanDescription

GAIN = 1e-3
"""Least relative gain of a fix."""
SHORT_LIMIT_S = 0.2
"""Seconds of a search that only tells whether a change fits, and by how much."""
_DOUBLINGS = 6
"""Most doublings of the number of microbatches until a plan fits."""
_A_LITTLE = 1e-6
"""Relative excess over the memory that is needed, so that rounding does not matter."""


class Size(IntEnum):
    """The part of what the user wrote that changes, the least first."""

    DONATION = 0
    OPTION = 1
    OPTIONS = 2
    METHOD = 3
    DEVICES = 4


@dataclass(frozen=True, kw_only=True)
class Change:
    """The words to write instead, `num_microbatches=8 (now 4)`, and all that is asked of planning with them."""

    words: str
    size: Size
    method: Method
    cluster: Cluster | None = None
    """The devices of the change; None: those that the step is planned for."""
    donated: tuple[int, ...] = ()
    """Arguments that the step may overwrite as well."""

    @property
    def written(self) -> str:
        """The method as it is written, with what else changes."""
        method = method_words(self.method)
        return method if Size.DONATION < self.size < Size.DEVICES else f"{method}, {self.words}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request to planning: the method, if it was none of the user's own plans, the devices, and the step."""

    method: Method | None
    cluster: Cluster
    rows: int | None
    """The examples of the batch, if it has any."""
    undonated: tuple[int, ...] = ()
    """Arguments that the step replaces by its results, and may not overwrite."""
    differentiates: bool = True

    @classmethod
    def of(cls, trace: Trace, method: Method | None, cluster: Cluster) -> Asked:
        """Return what was asked for a traced step."""
        return cls(
            method=method,
            cluster=cluster,
            rows=trace.num_rows if trace.batch_inputs else None,
            undonated=trace.undonated_state,
            differentiates=trace.differentiates,
        )

    @property
    def num_microbatches(self) -> int:
        """The number that was asked for; 1 if none was."""
        return getattr(self.method, "num_microbatches", None) or 1


def changes_that_fit(asked: Asked, now: PlanDescription | None) -> Iterator[Sequence[Change]]:
    """Yield what may fit where the present method does not; in each group a later one need only be tried after others.

    A search comes before those that it contains.
    """
    method = asked.method
    if asked.undonated and method is not None:
        words = f"donate_argnums=({', '.join(map(str, asked.undonated))}{',' * (len(asked.undonated) == 1)})"
        yield [Change(words=words, size=Size.DONATION, method=method, donated=asked.undonated)]
    if isinstance(method, Auto):
        yield from ([each] for each in _opened(method))
        yield from _changed_to_fit(asked, now)
    else:
        if method is not None:
            yield from _changed_to_fit(asked, now)
        yield [_instead(Auto())]
    if not isinstance(method, Zero):
        yield [_instead(Zero(stage=3, memory=method.memory if isinstance(method, Auto) else "adaptive"))]


def changes_that_gain(asked: Asked, now: PlanDescription | None) -> Iterator[Change]:
    """Yield what may be faster than the present plan, or be planned where there is none for another reason than memory.

    A search comes before those that it contains.
    """
    method = asked.method
    if isinstance(method, Auto):
        yield from _opened(method)
        if now is not None and now.plan.certificate is not None and now.plan.certificate.gap > GAIN:
            yield _with(method, effort="thorough", time_limit_s=10 * method.time_limit_s)
    else:
        yield _instead(Auto())
        if method is not None:
            for name, values in _options_to_try(method, asked.rows, now):
                yield from _with_each(method, name, values)
    if not isinstance(method, Zero):
        yield _instead(Zero(stage=3, memory=method.memory if isinstance(method, Auto) else "adaptive"))
    if not isinstance(method, DataParallel):
        yield _instead(DataParallel())


def more_memory(asked: Asked, share: float) -> Change:
    """Return the same with so many times the memory: a larger budget, or devices that have more."""
    method, share = asked.method, (1 + _A_LITTLE) * share
    machines = [group.machine for group in asked.cluster.groups]
    if isinstance(method, SearchMethod) and not isinstance(method.memory, str):
        now = max(memory_limit(method.memory, machine) for machine in machines)
        budget = math.ceil(share * now)
        if budget <= max(machine.memory_bytes for machine in machines):
            return _with(method, memory=budget)
        method = replace(method, memory="adaptive")  # nothing larger is of use on these devices
        share = budget / max(memory_limit("adaptive", machine) for machine in machines)
    elif isinstance(method, SearchMethod) and share * MEMORY_LEVELS[str(method.memory)] <= MEMORY_LEVELS["adaptive"]:
        return _with(method, memory="adaptive")
    missing = max((share - 1) * machine.memory_bytes for machine in machines)
    limit = next((f" ({group.jax_limit})" for group in asked.cluster.groups if group.jax_limit), "")
    return Change(
        words=f"{size_words(missing)} more memory per device{limit}",
        size=Size.DEVICES,
        method=Auto() if method is None else method,
        cluster=_with_memory(asked.cluster, share),
    )


def more_devices(asked: Asked, share: float) -> Change | None:
    """Return the same on twice the devices, if they are of one kind, or doubled until each has so many times less."""
    if asked.cluster.is_mixed or asked.method is None:
        return None
    now = asked.cluster.num_devices
    count = now << (max(1, math.ceil(math.log2(share))) if share > 1 else 1)
    words = f"{count} devices (now {now})"
    return Change(words=words, size=Size.DEVICES, method=asked.method, cluster=asked.cluster.with_devices(count))


def in_short(method: Method) -> Method:
    """Return a method that takes little work to plan by: a search that ends soon."""
    if not isinstance(method, SearchMethod):
        return method
    effort = {"effort": "fast"} if isinstance(method, Auto) else {}
    return replace(method, time_limit_s=min(method.time_limit_s, SHORT_LIMIT_S), **effort)


def leaves_open(wide: Auto, method: Method) -> bool:
    """Return whether a search contains all plans of another one."""
    if not isinstance(method, SearchMethod):
        return False
    narrow = search_of(method)
    return all(
        getattr(wide, name) == getattr(narrow, name) or (name in _OPEN and getattr(wide, name) == default_of(each))
        for name, each in _OPTIONS.items()
        if name not in ("effort", "time_limit_s", "axis_names")
    )


_OPTIONS = {each.name: each for each in fields(Auto)}
_OPEN = ("num_stages", "layers", "mesh_shape", "num_microbatches", "schedule", "remat", "pins")
"""Options of `Auto` whose default leaves everything open."""


def _opened(method: Auto) -> Iterator[Change]:
    """Yield a search with nothing fixed, and with each fixed option left open.

    An option that is open already has been searched, so that fixing it finds nothing better.
    """
    opened = {name: default_of(_OPTIONS[name]) for name in _OPEN}
    fixed = [name for name in _OPEN if getattr(method, name) != opened[name]]
    if len(fixed) > 1:
        everything = {name: opened[name] for name in fixed} | {"axis_names": None}
        yield replace(_with(method, **everything), size=Size.OPTIONS, words=f"without {', '.join(fixed)}")
    for name in fixed:
        names = ("mesh_shape", "axis_names") if name == "mesh_shape" else (name,)
        change = _with(method, **{each: opened.get(each) for each in names})
        yield replace(change, words=f"{name}={opened[name]!r} (now {getattr(method, name)!r})")


def _changed_to_fit(asked: Asked, now: PlanDescription | None) -> Iterator[list[Change]]:
    """Yield for each option the values of it that may take less memory, from the nearest on."""
    method = asked.method
    assert method is not None
    given, here = {each.name: getattr(method, each.name) for each in fields(method)}, asked.num_microbatches
    if not isinstance(method, Auto):  # a search that has no plan by a number of microbatches is opened instead
        counts = [here << doubling for doubling in range(1, _DOUBLINGS + 1)]
        counts = [n for n in counts if asked.rows and asked.rows % n == 0]
        yield list(_with_each(method, "num_microbatches", counts))
        yield list(_with_each(method, "zero", range(given.get("zero", 3) + 1, 4)))
        if given.get("remat") is False:
            yield list(_with_each(method, "remat", [True]))
        if now is not None and now.plan.num_stages == len(now.plan.meshes) > 1:
            yield list(_with_each(method, "schedule", [DEFAULT_SCHEDULE]))  # few microbatches at once
    if isinstance(method, Zero):
        yield list(_with_each(method, "stage", range(method.stage + 1, 4)))
    if given.get("offload") == "off" and asked.differentiates:
        yield list(_with_each(method, "offload", ["auto" if isinstance(method, Auto) else "optimizer"]))


def _options_to_try(
    method: Method, rows: int | None, now: PlanDescription | None
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the options of a method, each with the values that may be faster."""
    given = {each.name: getattr(method, each.name) for each in fields(method)}
    here = 1 if now is None else now.plan.num_microbatches
    if rows:
        yield "num_microbatches", [n for n in (here // 2, 2 * here, 4 * here) if n and rows % n == 0]
    if now is not None and now.plan.num_stages > 1:
        several = now.plan.num_stages > len(now.plan.meshes)
        alike = [name for name, each in SCHEDULES.items() if (each.virtual_stages != (1,)) == several]
        yield "schedule", [name for name in alike if name != now.plan.schedule]
    if given.get("remat", True) is not True:
        yield "remat", [True]
    if given.get("offload") == "off":
        yield "offload", ["optimizer"]
    yield "zero", range(given.get("zero", 3) + 1, 4)


def _with_each(method: Method, name: str, values: Sequence[Any]) -> Iterator[Change]:
    """Yield the method with one option at each of these values, where it has the option and may have the value."""
    if name not in {each.name for each in fields(method)}:
        return
    for value in values:
        with suppress(InvalidArgument):  # such as a ZeRO stage without replicas
            yield _with(method, **{name: value})


def _with(method: Method, **options: Any) -> Change:
    words = ", ".join(f"{name}={value!r} (now {getattr(method, name)!r})" for name, value in options.items())
    return Change(words=words, size=Size.OPTION, method=replace(method, **options))


def _instead(method: Method) -> Change:
    return Change(words=method_words(method), size=Size.METHOD, method=method)


def _with_memory(cluster: Cluster, share: float) -> Cluster:
    """Return the same devices with so many times the memory."""
    groups = [
        Cluster(
            num_devices=group.num_devices,
            kind=group.kind,
            machine=replace(group.machine, memory_bytes=share * group.machine.memory_bytes),
        )
        for group in cluster.groups
    ]
    links = {pair: cluster.link_between(*pair) for pair in combinations(range(len(groups)), 2)}
    return Cluster.of_groups(groups, links)
