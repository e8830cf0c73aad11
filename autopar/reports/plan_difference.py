"""Compare two plans, in words and numbers: decisions, layouts by name, collectives, memory, time.

    PlanDescription, PlanDescription  ->  PlanDifference  ->  text, HTML, JSON
    Plan, Plan                        ->  the same, without what only a simulation knows

What is equal is left out.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import PlannedCollective
from autopar.plain_text import as_text
from autopar.reports.description import PlanDescription, html_table

_SCHEMA = "autopar plan difference 1"
_SAME = 5e-4
"""Relative difference up to which figures print alike, and are the same."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that differs: in words before and after, and for a figure by how much."""

    subject: str
    before: str
    after: str
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """All that differs from one plan to another. Prints as a table, shows as HTML, and gives JSON."""

    before: PlanDescription | Plan
    after: PlanDescription | Plan
    changes: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def headline(self) -> str:
        """Return the difference in one sentence."""
        if not self.changes:
            return "The plans are the same."
        if not isinstance(self.before, PlanDescription) or not isinstance(self.after, PlanDescription):
            return f"{len(self.changes)} differences."
        old, new = self.before.simulated, self.after.simulated
        share = new.step_time_s / old.step_time_s - 1 if old.step_time_s else 0.0
        pace = "as fast" if abs(share) < _SAME else f"{100 * abs(share):.3g} % {'slower' if share > 0 else 'faster'}"
        room = f"{_bytes(new.peak_bytes)} on the fullest device instead of {_bytes(old.peak_bytes)}"
        fits = "" if new.fits == old.fits else (", which fits" if new.fits else ", which DOES NOT FIT")
        return f"{_ms(new.step_time_s)} per step instead of {_ms(old.step_time_s)}, {pace}; {room}{fits}."

    def to_data(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        return {
            "schema": _SCHEMA,
            "headline": self.headline(),
            "changes": [asdict(each) for each in self.changes],
            "before": _figures(self.before),
            "after": _figures(self.after),
        }

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def to_html(self) -> str:
        """Return the same as HTML; names are escaped."""
        return f"<p>{html.escape(self.headline())}</p>\n{html_table(self.table())}"

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the headline, and a row for each difference."""
        yield Text(self.headline())
        if self.changes:
            yield self.table()

    def table(self) -> Table:
        """Return a row for each difference."""
        table = Table("what", "before", "after", "change", title="differences", title_justify="left",
                      box=box.SIMPLE_HEAD)  # fmt: skip
        for each in self.changes:
            table.add_row(*map(Text, (each.subject, each.before, each.after, each.by)))
        return table


def plan_difference(before: PlanDescription | Plan, after: PlanDescription | Plan) -> PlanDifference:
    """Return what differs; figures of a simulation only if both sides are descriptions."""
    changes = [*_decisions(_plan(before), _plan(after)), *_layouts(before, after)]
    changes += _collectives(_plan(before), _plan(after))
    if isinstance(before, PlanDescription) and isinstance(after, PlanDescription):
        changes += _simulated(before, after)
    else:
        changes += _modelled(_plan(before), _plan(after))
    return PlanDifference(before=before, after=after, changes=tuple(changes))


def _plan(side: PlanDescription | Plan) -> Plan:
    return side if isinstance(side, Plan) else side.plan


def _figures(side: PlanDescription | Plan) -> dict[str, Any]:
    plan = _plan(side)
    decided = {"method": plan.method, "fingerprint": plan.fingerprint, "num_microbatches": plan.num_microbatches,
               "schedule": plan.schedule, "num_stages": plan.num_stages}  # fmt: skip
    return decided | ({"simulated": side.simulated.to_data()} if isinstance(side, PlanDescription) else {})


def _decisions(before: Plan, after: Plan) -> Iterator[Difference]:
    for subject, words in (
        ("step", lambda plan: plan.fingerprint),
        ("method", lambda plan: plan.method),
        ("stages", lambda plan: ", ".join(f"[{a}, {b})" for a, b in (stage.layers for stage in plan.stages))),
        ("meshes", _mesh_words),
        ("microbatches", lambda plan: " + ".join(map(str, plan.shares or (plan.num_microbatches,)))),
        ("schedule", lambda plan: plan.schedule),
        ("computed again", _remat_words),
        ("gradients summed in", lambda plan: plan.reduce_dtype or "their own type"),
    ):
        old, new = words(before), words(after)
        if old != new:
            yield Difference(subject=subject, before=_short(old), after=_short(new))


def _mesh_words(plan: Plan) -> str:
    counts: dict[str, int] = {}
    for mesh in plan.meshes:
        words = " x ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
        counts[words] = counts.get(words, 0) + 1
    return ", ".join(words if count == 1 else f"{count} of {words}" for words, count in counts.items())


def _remat_words(plan: Plan) -> str:
    if plan.sharding is not None:
        return ", ".join(plan.sharding.recomputed) or "nothing"
    return plan.recomputed_in_words() or "nothing"


def _short(words: str) -> str:
    return words if len(words) <= 160 else words[:156] + " ..."


def _layouts(before: PlanDescription | Plan, after: PlanDescription | Plan) -> Iterator[Difference]:
    """Yield the inputs and results that are laid out otherwise, those alike but for numbers in one row."""
    old, new = _layout_words(before), _layout_words(after)
    rows: dict[tuple[str, str, str], int] = {}
    for name in sorted({*old, *new}):
        was, becomes = (side.get(name, "replicated") for side in (old, new))
        if was != becomes:
            key = re.sub(r"\d+", "*", name), was, becomes
            rows[key] = rows.get(key, 0) + 1
    for (name, was, becomes), count in rows.items():
        yield Difference(subject=f"layout of {name}" + (f" ({count})" if count > 1 else ""), before=was, after=becomes)


def _layout_words(side: PlanDescription | Plan) -> dict[str, str]:
    """Return layouts by name, with the sizes of the axes that split: of inputs, and of results that lie otherwise.

    A plan alone says them of the inputs that are split.
    """
    if isinstance(side, Plan):
        sizes = {name: size for mesh in side.meshes for name, size in zip(mesh.axis_names, mesh.shape, strict=True)}
        return {name: _spec_words(spec, sizes) for name, spec in side.input_specs.items() if any(spec)}
    placed = [(each.name, each) for each in side.inputs]
    placed += [(f"result {each.name}", each) for each in side.results if not each.as_input]
    found: dict[str, list[str]] = {}
    for name, each in placed:
        mesh = side.plan.meshes[each.mesh]
        words = _spec_words(each.type.spec, dict(zip(mesh.axis_names, mesh.shape, strict=True)))
        found.setdefault(name, []).append(words)
    return {name: "; ".join(dict.fromkeys(words)) for name, words in found.items()}


def _spec_words(spec: Any, sizes: Mapping[str, int]) -> str:
    def part(names: Any) -> str:
        named = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        return "*".join(f"{name}={sizes[name]}" for name in named if sizes.get(name, 1) > 1) or "-"

    parts = [part(names) for names in spec]
    while parts and parts[-1] == "-":
        parts.pop()
    return f"({', '.join(parts)})" if parts else "replicated"


def _collectives(before: Plan, after: Plan) -> Iterator[Difference]:
    old, new = _by_kind(before), _by_kind(after)
    for kind in sorted({*old, *new}):
        was, becomes = old.get(kind, []), new.get(kind, [])
        words = _collective_words(was), _collective_words(becomes)
        if words[0] != words[1]:
            seconds = sum(each.seconds for each in becomes) - sum(each.seconds for each in was)
            yield Difference(subject=kind, before=words[0], after=words[1], by=f"{1e3 * seconds:+.3g} ms")


def _by_kind(plan: Plan) -> dict[str, list[PlannedCollective]]:
    kinds: dict[str, list[PlannedCollective]] = {}
    for each in plan.planned_collectives:
        kinds.setdefault(each.kind, []).append(each)
    return kinds


def _collective_words(collectives: list[PlannedCollective]) -> str:
    if not collectives:
        return "none"
    moved = sum(each.nbytes * each.times for each in collectives)
    return f"{sum(each.times for each in collectives):g} of {_bytes(moved)}"


def _modelled(before: Plan, after: Plan) -> Iterator[Difference]:
    old, new = _modelled_s(before), _modelled_s(after)
    if old is not None and new is not None:
        yield from _figure("modelled time per step", old, new, _ms)


def _modelled_s(plan: Plan) -> float | None:
    searched = plan.certificate or plan.sharding
    return None if searched is None else searched.step_time_s


def _simulated(before: PlanDescription, after: PlanDescription) -> Iterator[Difference]:
    old, new = before.simulated, after.simulated
    if old.cluster != new.cluster:
        yield Difference(subject="cluster", before=old.cluster, after=new.cluster)
    yield from _figure("time per step", old.step_time_s, new.step_time_s, _ms)
    yield from _figure("  compute", old.compute_s, new.compute_s, _ms)
    yield from _figure("  collectives", old.collective_s, new.collective_s, _ms)
    yield from _figure("  waiting for transfers", old.exposed_transfer_s, new.exposed_transfer_s, _ms)
    yield from _figure("bubble", old.bubble_fraction, new.bubble_fraction, lambda x: f"{100 * x:.3g} %")
    yield from _figure("memory of the fullest device", old.peak_bytes, new.peak_bytes, _bytes)
    held = [_by_category(each) for each in (before, after)]
    for category in sorted({*held[0], *held[1]}):
        yield from _figure(f"  {category}", held[0].get(category, 0.0), held[1].get(category, 0.0), _bytes)
    if old.fits != new.fits:
        yield Difference(subject="fits", before="yes" if old.fits else "NO", after="yes" if new.fits else "NO")


def _by_category(side: PlanDescription) -> dict[str, float]:
    held: dict[str, float] = {}
    for part in side.simulated.memory:
        held[part.category] = held.get(part.category, 0.0) + part.nbytes
    return held


def _figure(subject: str, old: float, new: float, words: Any) -> Iterator[Difference]:
    if abs(new - old) > _SAME * max(abs(old), abs(new)):
        by = f"{100 * (new / old - 1):+.3g} %" if old else ""
        yield Difference(subject=subject, before=words(old), after=words(new), by=by)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _bytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"
