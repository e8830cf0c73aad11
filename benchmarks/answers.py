"""Ask about the plans of every method, and hold each answer against a plan made anew.

    python -m benchmarks.answers --models mlp scan_layers --methods zero "two stages" --json answers.json

Of each model of the zoo, by each method: `explain` for the largest input, each decision and a kind of collective,
`what_if` for other options, `diff` with another plan, and `fixes`. Whatever has a price is made again, of a step traced
anew and without what is kept on disk, and simulated: time and memory must be those that were printed. Another number of
microbatches is planned by the method's own option as well: by hand or by a restricted search, that is the plan that
`explain` has the price of, and `Auto`, which may choose all else anew, must find one as fast. Of the prices of a long
answer four are made again: of the chosen, the fastest, the slowest and one between. Exits with 1 if an answer does not
hold. Plans that the file of `--json` has already are not asked about again, so that a run that was stopped goes on.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.compiler.analysis.explain import CollectiveCauses
from autopar.compiler.analysis.revision import DECISIONS
from autopar.errors import AutoparError
from autopar.hardware.machine import Link, Machine
from autopar.methods import Method
from autopar.reports.plan_difference import PlanDifference
from autopar.simulation import SimulationReport
from benchmarks.every_method import every_method
from tests.zoo import HEAVY, ZOO, Case

METHODS: dict[str, Method] = {
    **every_method(4),
    "two kinds": autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    "auto on two kinds": autopar.Auto(num_microbatches=2),
}
MODELS = [name for name in ZOO if name not in HEAVY]
_SAME = 1e-9
"""Relative: a plan has one simulation."""
_AS_FAST = 1e-3
"""Relative: within it, a search finds a plan as fast as one that is known."""


def two_kinds() -> autopar.Cluster:
    """Two devices, and two more that compute half as fast and hold half as much."""
    cpu = Machine.named("cpu")
    groups = [
        autopar.Cluster(
            num_devices=2,
            machine=replace(
                cpu,
                name=name,
                kind=name,
                devices_per_host=2,
                domain=2,
                memory_bytes=cpu.memory_bytes / times,
                peak_flops={dtype: rate / times for dtype, rate in cpu.peak_flops.items()},
            ),
        )
        for name, times in (("fast", 1), ("slow", 2))
    ]
    return autopar.Cluster.of_groups(groups, Link(latency_s=1e-6, bandwidth=1e9, ramp_bytes=0.0))


@dataclass(frozen=True, kw_only=True)
class Row:
    """The answers about one plan: how many there were, how many prices were made again, and those that do not hold."""

    model: str
    method: str
    plan: str
    refused: str
    """Why there is no plan."""
    answers: int
    prices: int
    refusals: tuple[str, ...]
    """The answers that say why there is no such plan."""
    wrong: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """True if all answers hold, or there is no plan to ask about."""
        return not self.wrong


class Asked:
    """A plan, and the same step traced anew; notes every answer that the latter contradicts."""

    def __init__(self, case: Case, name: str) -> None:
        step, *arguments = case.make()
        self.method = METHODS[name]
        cluster = two_kinds() if "two kinds" in name else autopar.Cluster(num_devices=4, kind="cpu")
        options: dict[str, Any] = {"cluster": cluster, "batch_argnums": case.batch_argnums}
        self.planned = self._traced(step, arguments, case, options).plan()
        self.anew = self._traced(step, arguments, case, options)
        self.answers = self.prices = 0
        self.wrong: list[str] = []
        self.refusals: list[str] = []

    def _traced(self, step: Any, arguments: Sequence[Any], case: Case, options: dict[str, Any]) -> autopar.Traced:
        return autopar.parallelize(step, method=self.method, **options).trace(*arguments, **case.kwargs)

    def ask_all(self) -> None:
        """Ask everything."""
        plan = self.planned.plan
        largest = max(self.planned.trace.inputs, key=lambda leaf: leaf.aval.size).name
        kinds = {each.kind for each in plan.planned_collectives}
        for question in (largest, *DECISIONS, *sorted(kinds)[:1]):
            with self._answer(f"explain({question!r})"):
                self._hold_explanation(question, self.planned.explain(question))
        for options in self._options():
            with self._answer(f"what_if({options})"):
                self._hold_difference(f"what_if({options})", self.planned.what_if(**options), self._changed(options))
        with self._answer("fixes()"):
            for fix in self.planned.fixes().better[:2]:
                self._same(f"fixes(): {fix.words}", fix.step_time_s, self._report(fix.method).step_time_s)

    def _hold_explanation(self, question: str, answer: Any) -> None:
        if isinstance(answer, CollectiveCauses):
            planned = [each for each in self.planned.plan.planned_collectives if each.kind == question]
            self._same(f"explain({question!r}): seconds", sum(each.seconds for _, each in answer.collectives),
                       sum(each.seconds for each in planned))  # fmt: skip
            return
        priced = [each for each in answer.alternatives if each.plan is not None]
        some = {id(each): each for each in (answer.chosen, priced[0], priced[len(priced) // 2], priced[-1])}
        for each in some.values():
            report = self._report(autopar.Plan.from_json(each.plan.to_json()))
            words = f"explain({question!r}): {each.choice}"
            self._same(words, each.step_time_s, report.step_time_s)
            self._same(words, each.price.peak_bytes, report.peak_bytes)
        decided = [each.decides for each in answer.others if each.decides is not None]
        for words, figure in ((f"explain({question!r}): {each}", each) for each in decided[:1]):
            there = self.anew.on_cluster(figure.cluster)
            for plan, printed in ((figure.plan, figure.step_time_s), (figure.instead_of, figure.planned_s)):
                self._same(words, printed, self._report(autopar.Plan.from_json(plan.to_json()), there).step_time_s)
        if question == "num_microbatches" and "num_microbatches" in {each.name for each in fields(self.method)}:
            for each in answer.others[:1]:
                found = self._report(replace(self.method, num_microbatches=int(each.choice))).step_time_s
                words = f"explain('num_microbatches'): {each.choice} by the method"
                if isinstance(self.method, autopar.Auto):
                    self._same(words, each.step_time_s, max(found, each.step_time_s), _AS_FAST)
                else:
                    self._same(words, each.step_time_s, found)

    def _hold_difference(self, words: str, answer: PlanDifference, method: Method) -> None:
        self._same(words, answer.after.simulated.step_time_s, self._report(method).step_time_s)
        self._same(words, answer.before.simulated.step_time_s, self._report(self.planned.plan).step_time_s)
        again = self.planned.diff(self.anew.plan(answer.after.plan))
        shown = {each.subject: (each.before, each.after) for each in answer.changes}
        if shown != {each.subject: (each.before, each.after) for each in again.changes}:
            self.wrong.append(f"{words}: diff of the two plans says otherwise")
        step_time_ms = 1e3 * answer.after.simulated.step_time_s
        if "time per step" in shown and shown["time per step"][1] != f"{step_time_ms:.4g} ms":
            self.wrong.append(f"{words}: {shown['time per step'][1]} is written, and {step_time_ms} ms was simulated")

    def _options(self) -> Iterator[dict[str, Any]]:
        """Yield changes of the method, and another one."""
        given = {each.name for each in fields(self.method)}
        if "num_microbatches" in given:
            yield {"num_microbatches": 4}
        if "schedule" in given and self.planned.plan.num_stages == 2:
            yield {"schedule": "gpipe"}
        if not self.anew.source.target.cluster.is_mixed:
            other = autopar.Zero() if not isinstance(self.method, autopar.Zero) else autopar.DataParallel()
            yield {"method": other}

    def _changed(self, options: dict[str, Any]) -> Method:
        options = dict(options)
        return replace(options.pop("method", self.method), **options)

    def _report(self, method: Method | autopar.Plan, there: autopar.Traced | None = None) -> SimulationReport:
        """Return the simulation of a plan made now, by nothing that is known of other plans."""
        self.prices += 1
        kept = os.environ.get("AUTOPAR_CACHE_DIR")
        with tempfile.TemporaryDirectory() as empty:
            os.environ["AUTOPAR_CACHE_DIR"] = empty
            try:
                return (there or self.anew).plan(method).simulate()
            finally:
                os.environ.pop("AUTOPAR_CACHE_DIR")
                if kept is not None:
                    os.environ["AUTOPAR_CACHE_DIR"] = kept

    def _same(self, words: str, printed: float, found: float, most: float = _SAME) -> None:
        if abs(printed - found) > most * max(abs(printed), abs(found)):
            self.wrong.append(f"{words}: {printed:.6g} was printed, {found:.6g} came out")

    def _answer(self, words: str) -> "_Answer":
        return _Answer(self, words)


@dataclass(frozen=True)
class _Answer:
    """The context of one question: what is refused with an error of autopar's own is an answer as well."""

    asked: Asked
    words: str

    def __enter__(self) -> None:
        self.asked.answers += 1

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, AutoparError):
            self.asked.refusals.append(f"{self.words}: {error}")
        elif isinstance(error, Exception):
            self.asked.wrong.append(f"{self.words}: {type(error).__name__}: {error}")
        return isinstance(error, Exception)


def measure(model: str, method: str) -> Row:
    """Ask about one plan; a step that the method refuses is a row as well."""
    start, refused, asked = time.perf_counter(), "", None
    try:
        asked = Asked(ZOO[model], method)
        asked.ask_all()
    except AutoparError as error:
        refused = str(error)
    return Row(
        model=model,
        method=method,
        plan="" if asked is None else asked.planned.plan.summary(),
        refused=refused,
        answers=0 if asked is None else asked.answers,
        prices=0 if asked is None else asked.prices,
        refusals=() if asked is None else tuple(asked.refusals),
        wrong=() if asked is None else tuple(asked.wrong),
        seconds=time.perf_counter() - start,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Ask about the plans of all models by all methods, and print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=MODELS, metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every plan; those that it has stand")
    args = parser.parse_args(argv)
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    rows = read_rows(args.json)
    known = {(row.model, row.method) for row in rows}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.ReplicatedWarning)
        for name in args.models:
            missing = [method for method in args.methods if (name, method) not in known]
            shown = track(missing, description=name, console=Console(stderr=True), transient=True)
            for method in shown:
                rows.append(measure(name, method))
                if args.json:
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
            jax.clear_caches()  # executables of a model are not used by the next
    jax.config.update("jax_enable_x64", before)
    Console(width=140).print(table_of(rows))
    return int(not all(row.holds for row in rows))


def read_rows(path: Path | None) -> list[Row]:
    """Return the rows of an earlier run."""
    if path is None or not path.exists():
        return []
    return [Row(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def table_of(rows: Sequence[Row]) -> Table:
    """Return a line for each method, and below it what does not hold."""
    table = Table(title="answers about plans, each price held against a plan made anew")
    for column in ("method", "models", "no plan", "answers", "refusals", "prices", "wrong", "s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        counts = [
            (1 - bool(r.refused), bool(r.refused), r.answers, len(r.refusals), r.prices, len(r.wrong)) for r in mine
        ]
        sums = (str(sum(each)) for each in zip(*counts, strict=True))
        table.add_row(method, *sums, f"{sum(row.seconds for row in mine):.0f}")
        for row in mine:
            for words in row.wrong:
                table.add_row(f"  {row.model}: {words}", "", "", "", "", "", "", "")
    return table


if __name__ == "__main__":
    sys.exit(main())
