"""Explain a plan: what each other choice would take instead, and which line causes a collective.

    Planning, a question  ->  Explanation         of an input or a decision: every other choice as a plan of its own
                          ->  CollectiveCauses    of a collective, a scope or a line: when, where, how much, how long

The prices are those of whole plans as simulated: a plan made so takes what is printed here. What a method has an option
for, which decides the rest by itself, is planned by that option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import track
from rich.table import Table
from rich.text import Text

from autopar.compiler.analysis.asked import asked_of_decision, asked_of_input
from autopar.compiler.analysis.revise_machines import Deciding, deciding
from autopar.compiler.analysis.revise_program import program_decisions, program_layouts, remat_words, searched_anew
from autopar.compiler.analysis.revise_stages import laid_out_anew, shares_words, stage_decisions, stage_layouts
from autopar.compiler.analysis.revision import (
    DECISIONS,
    Planning,
    Price,
    Revision,
    given_spec,
    other_schedules,
    stages_words,
)
from autopar.compiler.frontend.scopes import as_written, scopes_in
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.planning.one_mesh import mesh_choices
from autopar.errors import AutoparError, InvalidArgument
from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import PlannedCollective
from autopar.methods import Auto, Method, SearchMethod
from autopar.plain_text import as_text

_SAME_TIME = 1e-3
"""Relative difference from the plan's time from which a plan with the same choice and the rest anew is shown."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A choice, and the plan with it; `plan` and `price` are None if there is none, for the reason in `refused`.

    `against` names what the user asked for that it does not keep; `decides` of another machine what it is worse for.
    """

    choice: str
    plan: Plan | None
    price: Price | None
    fits: bool
    refused: str = ""
    against: str = ""
    decides: Deciding | None = None

    def remarks(self) -> list[str]:
        """Return in words what is to be said of it beside its price."""
        unfit = ["does not fit"] * (self.price is not None and not self.fits)
        decides = [] if self.decides is None else [str(self.decides)]
        return [words for words in (self.refused, self.against) if words] + unfit + decides

    @property
    def step_time_s(self) -> float:
        """Seconds per step; infinite where there is no plan."""
        return float("inf") if self.price is None else self.price.step_time_s


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The choice that a plan took and the others, the fastest that fit first."""

    subject: str
    chosen: Alternative
    others: tuple[Alternative, ...]
    memory_limit_bytes: float
    """The memory of one device; of the plan's device that has the least left, where they differ."""
    asked: tuple[str, ...] = ()
    """The user's requests that decide it, as `the scope autopar.split(name='head')`; empty if a search was free."""

    def why(self) -> str:
        """Return in a sentence what the user asked for that decides it; "" where a search was free."""
        return f"Because you asked for it by {', by '.join(self.asked)}." if self.asked else ""

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All choices, the one that the plan took among them, sorted alike."""
        return tuple(sorted((self.chosen, *self.others), key=_order))

    def to_data(self) -> dict[str, Any]:
        """Return the explanation as JSON values, without the plans."""
        return {
            "subject": self.subject,
            "chosen": self.chosen.choice,
            "asked": self.asked,
            "memory_limit_bytes": self.memory_limit_bytes,
            "alternatives": [
                {"choice": each.choice, "fits": each.fits, "refused": each.refused, "against": each.against}
                | ({} if each.price is None else asdict(each.price))
                | ({} if each.decides is None else {"decides": each.decides.to_data()})
                for each in self.alternatives
            ],
        }

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the choice in words, and a row for each."""
        here = self.chosen.price
        assert here is not None
        yield Text(f"{self.subject}: {self.chosen.choice}, {1e3 * here.step_time_s:.4g} ms per step as modelled")
        if self.asked:
            yield Text(self.why())
        table = Table("choice", "ms", "Δ ms", "Δ %", "peak MB", "Δ MB", "", box=box.SIMPLE_HEAD)
        for each in self.alternatives:
            if each.price is None:
                table.add_row(Text(each.choice), "", "", "", "", "", Text(", ".join(each.remarks())))
                continue
            slower, more = each.price.step_time_s - here.step_time_s, each.price.peak_bytes - here.peak_bytes
            table.add_row(
                Text(each.choice),
                f"{1e3 * each.price.step_time_s:.4g}",
                f"{1e3 * slower:+.3g}",
                f"{100 * slower / here.step_time_s:+.3g}",
                f"{each.price.peak_bytes / 1e6:.4g}",
                f"{more / 1e6:+.3g}",
                Text(", ".join(["as planned"] * (each is self.chosen) + each.remarks())),
            )
        yield table
        if not self.others:
            yield Text("The plan leaves no other choice here.")


@dataclass(frozen=True, kw_only=True)
class CollectiveCauses:
    """The collectives that a question finds, each with the line of the model that needs it; one step, one device."""

    question: str
    collectives: tuple[tuple[int, PlannedCollective], ...]
    """The collectives, each with the number of its mesh."""

    @property
    def seconds(self) -> float:
        """Seconds of a step that the busiest mesh spends in them."""
        by_mesh: dict[int, float] = {}
        for mesh, each in self.collectives:
            by_mesh[mesh] = by_mesh.get(mesh, 0.0) + each.seconds
        return max(by_mesh.values())

    @property
    def asked(self) -> tuple[str, ...]:
        """The scopes in the model that they stand in, as the user wrote them."""
        return tuple(str(scope) for scope in scopes_in("".join(each.scope for _, each in self.collectives)))

    def to_data(self) -> dict[str, Any]:
        """Return the collectives as JSON values."""
        return {
            "question": self.question,
            "asked": self.asked,
            "collectives": [{"mesh": n, **asdict(each)} for n, each in self.collectives],
        }

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render a row for all collectives of a kind that one line needs for one value."""
        moved = sum(each.nbytes * each.times for _, each in self.collectives)
        yield Text(
            f"{self.question}: {sum(each.times for _, each in self.collectives):g} collectives per step of "
            f"{moved / 1e6:.4g} MB, {1e3 * self.seconds:.4g} ms on the mesh with most"
        )
        for scope in self.asked:
            inside = sum(each.times for _, each in self.collectives if scope in as_written(each.scope))
            yield Text(f"Because you asked for it by the scope {scope}: {inside:g} of them.")
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("line", "scope", "kind", "axes", "value", "mesh", "times", "MB", "ms"):
            table.add_column(column, overflow="fold")
        rows: dict[tuple[str, ...], list[tuple[int, PlannedCollective]]] = {}
        for mesh, each in self.collectives:
            scope = re.sub(r"\d+", "*", as_written(each.scope))
            key = (each.line or "no line of the model", scope, each.kind, "*".join(each.axes), each.what)
            rows.setdefault(key, []).append((mesh, each))
        for key, alike in sorted(rows.items(), key=lambda row: -sum(each.seconds for _, each in row[1])):
            meshes = sorted({mesh for mesh, _ in alike})
            figures = (
                ", ".join(map(str, meshes)) if len(meshes) < 4 else f"{meshes[0]} to {meshes[-1]}",
                f"{sum(each.times for _, each in alike):g}",
                f"{sum(each.nbytes * each.times for _, each in alike) / 1e6:.3g}",
                f"{1e3 * sum(each.seconds for _, each in alike):.3g}",
            )
            table.add_row(*map(Text, (*key, *figures)))
        yield table


def explain(planning: Planning, question: str) -> Explanation | CollectiveCauses:
    """Return what else an input's layout or a decision could be, or what causes the collectives that are meant.

    A question is the name of an input, its end, or a regular expression that finds one; a decision, one of
    `DECISIONS`; or a part of the line, the scope or the kind of a collective. Raises `InvalidArgument` for what is none
    of these, and for an input that is too small to be split.
    """
    trace, plan = planning.trace, planning.plan
    leaf = _input_by_name(trace, question)
    if leaf is None and question in DECISIONS:
        asked = asked_of_decision(planning, question)
        found = _explained(planning, _decision_words(planning, question), _decisions(planning, question), asked)
        return _with_deciding(planning, found) if question == "machines" else found
    if leaf is None:
        leaf = _input_by_pattern(trace, question)
    if leaf is not None:
        asked = asked_of_input(planning, leaf)
        return _explained(planning, _layout_words(planning, leaf), _layouts(planning, leaf), asked)
    found = tuple((mesh, each) for mesh, each in plan.collectives_by_mesh() if _is_meant(each, question))
    if found:
        return CollectiveCauses(question=question, collectives=found)
    kinds = sorted({each.kind for each in plan.planned_collectives}) or ["no collective"]
    raise InvalidArgument(
        f"No input of {trace.name} is called {question!r}, and no collective of the plan has it in its line, scope or "
        f"kind ({', '.join(kinds)}). Inputs are named like {[each.name for each in trace.inputs[:4]]}: give a name, "
        f"its end, a regular expression that finds one, or one of {', '.join(DECISIONS)}."
    )


def _decisions(planning: Planning, decision: str) -> Iterator[Revision]:
    if planning.method is not None and not isinstance(planning.method, Auto) and not planning.plan.shares:
        options = list(_options(planning, planning.method, decision))
        if options:
            return (_made(planning, planning.method, choice, changes) for choice, changes in options)
    if planning.plan.sharding is not None:
        return program_decisions(planning, decision)
    return stage_decisions(planning, decision)


def _options(planning: Planning, method: Method, decision: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the neighbors of a decision for which a method that decides by itself has an option, and its new values."""
    plan, names = planning.plan, {each.name for each in fields(method)}
    if decision == "num_microbatches" and decision in names:
        yield from ((str(count), {decision: count}) for count in planning.other_counts())
    if decision == "schedule" and decision in names:
        yield from ((name, {decision: name}) for name in other_schedules(plan))
    if decision == "mesh_shape" and isinstance(method, SearchMethod):
        for mesh in mesh_choices(Auto(), plan.num_devices):
            if tuple(sorted(mesh.shape)) != tuple(sorted(plan.meshes[0].shape)):
                yield "x".join(map(str, mesh.shape)), {decision: mesh.shape, "axis_names": mesh.axis_names}


def _made(planning: Planning, method: Method, choice: str, changes: Mapping[str, Any]) -> Revision:
    try:
        return Revision(choice=choice, plan=planning.made(replace(method, **changes)))
    except AutoparError as error:
        return Revision(choice=choice, refused=str(error))


def _layouts(planning: Planning, leaf: int) -> Iterator[Revision]:
    if planning.plan.num_devices == len(planning.plan.meshes):
        return iter(())  # one device for each stage: there is nothing to lay out
    if planning.plan.sharding is not None:
        return program_layouts(planning, leaf)
    return stage_layouts(planning, leaf)


def _explained(
    planning: Planning,
    words: tuple[str, str],
    revisions: Iterator[Revision],
    asked: tuple[str, ...],
) -> Explanation:
    subject, choice = words

    def alternative(each: Revision) -> Alternative:
        plan = each.plan
        found = None if plan is None else planning.price(plan)
        fits = plan is not None and planning.fits(plan)
        return Alternative(
            choice=each.choice, plan=plan, price=found, fits=fits, refused=each.refused, against=each.against
        )

    chosen = alternative(Revision(choice=choice, plan=planning.plan))
    shown = track(list(revisions), f"pricing {subject}", console=Console(stderr=True), transient=True)
    others = [alternative(each) for each in shown]
    same = [each for each in others if each.choice == choice]
    others = [each for each in others if each.choice != choice]
    for each in same:
        if each.price is not None and abs(each.step_time_s / chosen.step_time_s - 1) > _SAME_TIME:
            others.append(replace(each, choice=f"{choice}, the rest anew"))
    assert chosen.price is not None
    return Explanation(
        subject=subject,
        chosen=chosen,
        others=tuple(sorted(others, key=_order)),
        memory_limit_bytes=chosen.price.memory_limit_bytes,
        asked=asked,
    )


def _with_deciding(planning: Planning, found: Explanation) -> Explanation:
    """Return the answer with the figure that each other machine is worse for."""

    def anew(there: Planning, plan: Plan) -> Plan:
        return laid_out_anew(there, plan) if plan.sharding is None else searched_anew(there, plan)

    others = (
        each if each.plan is None else replace(each, decides=deciding(planning, each.plan, anew))
        for each in found.others
    )
    return replace(found, others=tuple(others))


def _order(each: Alternative) -> tuple[bool, bool, float, str]:
    return each.price is None, not each.fits, each.step_time_s, each.choice


def _layout_words(planning: Planning, leaf: int) -> tuple[str, str]:
    given, plan = planning.trace.inputs[leaf], planning.plan
    pieces = [name for name in plan.input_specs if name == given.name or name.startswith(f"{given.name}[")]
    return f"{given.name} of shape {given.aval.shape}", str(given_spec(plan, pieces[0] if pieces else given.name))


def _decision_words(planning: Planning, decision: str) -> tuple[str, str]:
    plan = planning.plan
    match decision:
        case "machines":
            lie = (planning.cluster.machine_of(mesh.devices).name for mesh in plan.meshes)
            return decision, ", ".join(f"{stages_words(plan, number)} on {name}" for number, name in enumerate(lie))
        case "stages":
            return "stages", "layers " + ", ".join(f"[{a}, {b})" for a, b in (stage.layers for stage in plan.stages))
        case "schedule":
            return "schedule", plan.schedule
        case "num_microbatches":
            return "num_microbatches", str(plan.num_microbatches)
        case "shares":
            return "shares of the lanes", shares_words(plan.shares)
        case "remat":
            if plan.sharding is not None:
                return "remat", remat_words(len(plan.sharding.recomputed_layers), plan.sharding.num_layers)
            return "remat", plan.remat_policy().rstrip(".")
        case _:
            shapes = dict.fromkeys("x".join(map(str, mesh.shape)) for mesh in plan.meshes)
            return "mesh_shape", ", ".join(shapes)


def _input_by_name(trace: Trace, name: str) -> int | None:
    named = (n for n, leaf in enumerate(trace.inputs) if leaf.name == name or leaf.name.endswith("." + name))
    return next(named, None)


def _input_by_pattern(trace: Trace, pattern: str) -> int | None:
    try:
        return next((n for n, leaf in enumerate(trace.inputs) if re.search(pattern, leaf.name)), None)
    except re.error:
        return None


def _is_meant(each: PlannedCollective, question: str) -> bool:
    return question == each.kind or question in each.line or question in as_written(each.scope)
