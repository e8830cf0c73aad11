"""Predict every row of a file of published measurements, and say how right that is.

    python -m benchmarks.accuracy --measurements measurements.csv --json accuracy.json
    python -m benchmarks.accuracy --measurements measurements.csv --calibrate 0.2 --json accuracy.json
    python -m benchmarks.accuracy --measurements measurements.csv --leave-out --calibrate 0.2

No accelerator is needed: the machines are those of `autopar/hardware/machines`. Steps of JAX programs with their plans
are planned and simulated by the compiler (`accuracy_steps`), others are lists of operators (`training_model`). Steps
take seconds each: what is predicted is kept in a journal beside the JSON, from which the same command goes on; a run
that is interrupted reports on the rows before. With
--calibrate, ten physical scalars per source and machine are fitted to that fraction of the rows, and both columns, with
the machine files alone and calibrated, are of the other rows only. With --leave-out, a source is predicted as one that
was never seen: its name is hidden, so that no rule asks for it, and the scalars are those of the other sources' rows on
the same machine.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError, InvalidArgument
from benchmarks.accuracy_cases import Case, Unusable, case_of
from benchmarks.accuracy_fit import chosen_for_fit, fitted_scalars, predicted_times
from benchmarks.accuracy_journal import Entry, Journal
from benchmarks.accuracy_report import Predicted, summary
from benchmarks.accuracy_rows import RUNS, STEPS, Measurements, Row, read_measurements
from benchmarks.accuracy_steps import StepCase, step_case_of
from benchmarks.accuracy_steps import predicted as predicted_step
from benchmarks.training_model.memory import peak_memory
from benchmarks.training_model.prices import Scalars

_NOT_REACHED = "was not reached: the run was stopped, and the same command goes on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--measurements", type=Path, required=True, metavar="FILE", help="CSV of measured steps")
    parser.add_argument("--calibrate", type=float, metavar="FRACTION", help="fit scalars to this share of the rows")
    parser.add_argument(
        "--sample", type=float, default=1.0, metavar="FRACTION", help="of the rows, by a digest of each"
    )
    parser.add_argument("--leave-out", action="store_true", help="predict each source without its name or its rows")
    parser.add_argument("--rows", action="store_true", help="the JSON holds every row's prediction too")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results there; a run that is stopped continues"
    )


def main(arguments: argparse.Namespace) -> None:
    """Read, predict, print, and write the results."""
    if arguments.calibrate is not None and not 0 < arguments.calibrate < 1:
        raise InvalidArgument(
            f"--calibrate is {arguments.calibrate:g}, it must be a fraction between 0 and 1, for the other rows are "
            "tested. Give one like 0.2."
        )
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    measurements = sampled(read_measurements(arguments.measurements), arguments.sample)
    journal = Journal(arguments.json and arguments.json.with_suffix(".journal"))
    report = accuracy_report(
        measurements, arguments.calibrate, rows=arguments.rows, leave_out=arguments.leave_out, journal=journal
    )
    Console().print(_table({**report["sources"], "all": report["all"]}))
    for each in report["skipped"]:
        Console().print(f"{each['rows']:4} rows skipped of {each['source']}: {each['reason']}", highlight=False)
    for each in report["unreadable"]:
        Console().print(f"line {each['line']} cannot be read: it {each['reason']}", highlight=False)
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    Console().print(f"{len(measurements.rows)} rows took {took_s:.0f} s, {took_cpu_s:.0f} of them of a processor")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if not any(each["reason"] == _NOT_REACHED for each in report["skipped"]):
        journal.close()


def accuracy_report(
    measurements: Measurements,
    fraction: float | None,
    *,
    rows: bool = False,
    leave_out: bool = False,
    journal: Journal | None = None,
) -> dict[str, Any]:
    """Return what the JSON holds: per source with the machine files alone, and calibrated if a fraction is given."""
    skipped: Counter[tuple[str, str]] = Counter()
    if measurements.columns is STEPS:
        _check_steps(fraction, leave_out)
        sources, predictions, plain = _read_steps(measurements, skipped, journal or Journal(None))
    else:
        sources, predictions, plain = _read_runs(measurements, fraction, leave_out, skipped)
    report: dict[str, Any] = {
        "calibrate": fraction,
        "leave_out": leave_out,
        "sources": sources,
        "all": summary([each for each, fitted in predictions if not fitted]),
        "skipped": [
            {"source": source, "reason": reason, "rows": count} for (source, reason), count in sorted(skipped.items())
        ],
        "unreadable": [{"line": line, "reason": reason} for line, reason in measurements.unreadable],
    }
    if fraction:
        report["all"]["uncalibrated"] = summary(plain)
    if rows:
        report["predictions"] = [_row_report(each, fitted) for each, fitted in predictions]
    return report


def sampled(measurements: Measurements, fraction: float) -> Measurements:
    """Return about this fraction of the rows, the same ones in every run; `InvalidArgument` for no fraction."""
    if not 0 < fraction <= 1:
        raise InvalidArgument(f"--sample is {fraction:g}, it must be above 0 and at most 1. Give a fraction like 0.2.")

    def place(row: Row) -> float:
        return int(row.digest[:8], 16) / 2**32

    return replace(measurements, rows=tuple(row for row in measurements.rows if place(row) < fraction))


Read = tuple[dict[str, Any], list[tuple[Predicted, bool]], list[Predicted]]
"""The figures of every source; every prediction, with whether its row was fitted to; those of tested rows unfitted."""


def _read_runs(
    measurements: Measurements, fraction: float | None, leave_out: bool, skipped: Counter[tuple[str, str]]
) -> Read:
    """The figures of runs as lists of operators; what cannot be predicted is counted in `skipped`."""
    cases: defaultdict[str, list[Case]] = defaultdict(list)
    for row in measurements.rows:
        try:
            cases[row.source].append(case_of(without_source(row) if leave_out else row))
        except Unusable as why:
            skipped[row.source, str(why)] += 1
    sources: dict[str, Any] = {}
    predictions: list[tuple[Predicted, bool]] = []
    plain: list[Predicted] = []
    for source in sorted(cases):
        others = [case for other in sorted(cases) if other != source for case in cases[other]]
        known = others if leave_out else cases[source]
        sources[source], predicted, unfitted = _source_report(cases[source], fraction, known)
        predictions += predicted
        plain += unfitted
    return sources, predictions, plain


def without_source(row: Row) -> Row:
    """Return a row whose source nobody can tell."""
    return replace(row, cells=tuple((name, "" if name == RUNS.source else text) for name, text in row.cells))


def _check_steps(fraction: float | None, leave_out: bool) -> None:
    if fraction is not None:
        raise InvalidArgument(
            f"--calibrate is {fraction:g}, and steps of JAX programs are priced from machine files alone. Leave it out."
        )
    if leave_out:
        raise InvalidArgument(
            "--leave-out is given, and steps of JAX programs are priced by no rule of a source, nor is anything fitted "
            "to them. Give the command without it."
        )


def _read_steps(measurements: Measurements, skipped: Counter[tuple[str, str]], journal: Journal) -> Read:
    """The figures of JAX programs as the compiler prices them; what cannot be predicted is counted in `skipped`."""
    by_model: defaultdict[object, list[StepCase]] = defaultdict(list)
    for row in measurements.rows:
        try:
            case = step_case_of(row)
            by_model[case.model].append(case)
        except Unusable as why:
            skipped[row.source, str(why)] += 1
    # Rows of one model one after the other: it is traced once.
    cases = [case for alike in by_model.values() for case in alike]
    found: list[Predicted] = []
    progress = Console(stderr=True)
    for number, case in enumerate(cases, start=1):
        progress.print(f"[{number}/{len(cases)}] {case.row['id']}", markup=False, highlight=False)
        try:
            each = _predicted_step(case, journal)
            found.append(each)
            error = "" if case.measured_s is None else f", {100 * each.error:+.1f} %"
            progress.print(f"    {each.step_s:.4g} s{error}", markup=False, highlight=False)
        except Unusable as why:
            skipped[case.row.source, str(why)] += 1
        except KeyboardInterrupt:
            skipped.update((each.row.source, _NOT_REACHED) for each in cases[number - 1 :])
            break
    return _by_source(found), [(each, False) for each in sorted(found, key=lambda each: each.case.row.line)], found


def _by_source(predictions: Sequence[Predicted]) -> dict[str, Any]:
    sources = sorted({each.case.row.source for each in predictions})
    return {source: summary([each for each in predictions if each.case.row.source == source]) for source in sources}


def _predicted_step(case: StepCase, journal: Journal) -> Predicted:
    """What the journal knows of a row, or else what the compiler says; `Unusable` from either."""
    entry = journal.known(case.row)
    if entry is None:
        try:
            each = predicted_step(case)
            entry = Entry(step_s=each.step_s, peak_bytes=each.peak_bytes)
        except Unusable as why:
            entry = Entry(unusable=str(why))
        journal.add(case.row, entry)
    if entry.unusable:
        raise Unusable(entry.unusable)
    return Predicted(case=case, step_s=entry.step_s, peak_bytes=entry.peak_bytes, tensor_bytes=entry.peak_bytes)


def _source_report(cases: Sequence[Case], fraction: float | None, known: Sequence[Case]) -> Read:
    """The figures of one source, scalars fitted to some `known` cases, and its predictions: was a row fitted to?"""
    fitted = chosen_for_fit(known, fraction) if fraction else set()
    by_machine: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_machine[case.machine.name].append(case)
    plain: list[Predicted] = []
    calibrated: list[Predicted] = []
    scalars: dict[str, Any] = {}
    for name, here in sorted(by_machine.items()):
        plain += _predictions(here, Scalars())
        if fraction:
            alike = [case for case in known if case.machine.name == name]
            found = fitted_scalars([case for case in alike if case.row.line in fitted])
            scalars[name] = {key: round(value, 6) for key, value in asdict(found).items()}
            calibrated += _predictions(here, found)
    tested = [each for each in plain if each.case.row.line not in fitted]
    if not fraction:
        return summary(tested), [(each, False) for each in plain], tested
    report = summary([each for each in calibrated if each.case.row.line not in fitted])
    report |= {"fitted_rows": len(fitted), "scalars": scalars, "uncalibrated": summary(tested)}
    return report, [(each, each.case.row.line in fitted) for each in calibrated], tested


def _predictions(cases: Sequence[Case], scalars: Scalars) -> list[Predicted]:
    times = predicted_times(cases, scalars)
    peaks = [peak_memory(case.model, case.layout, case.habits) for case in cases]
    return [
        Predicted(case=case, step_s=time.total_s, peak_bytes=peak.total_bytes, tensor_bytes=peak.tensor_bytes)
        for case, time, peak in zip(cases, times, peaks)
    ]


def _row_report(each: Predicted, fitted: bool) -> dict[str, Any]:
    return {
        "line": each.case.row.line,
        "id": dict(each.case.row.cells).get("id", ""),
        "source": each.case.row.source,
        "measured_gib": each.case.measured_gib,
        "measured_s": each.case.measured_s,
        "predicted_s": each.step_s,
        "predicted_gib": each.recorded_bytes / 2**30,
        "fitted": fitted,
    }


def _table(sources: dict[str, Any]) -> Table:
    """One line per source and one for all rows; `file` is the mean error with the machine files alone."""
    table = Table(title="Predicted against measured step times", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("source", no_wrap=True, max_width=20)
    for name in ("rows", "mape", "file", "median", "worst", "spearman", "regret", "pairs", "labels"):
        table.add_column(name, justify="right", no_wrap=True, min_width=4 if name == "rows" else 6)
    for source, figures in sources.items():
        before = figures.get("uncalibrated", figures)
        labels = figures["oom_right"] + figures["oom_wrong"]
        if not figures["rows"] and not labels:
            continue
        shown = (figures["mape"], before["mape"], figures["median"], figures["worst"])
        table.add_row(
            source.rpartition("/")[2].removesuffix(".csv"),
            str(figures["rows"]),
            *map(_percent, shown),
            "–" if figures["spearman"] is None else f"{figures['spearman']:.3f}",
            _percent(figures["regret_mean"]),
            f"{figures['pairs_right']}/{figures['pairs']}" if figures["pairs"] else "–",
            f"{figures['oom_right']}/{labels}" if labels else "–",
        )
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    try:
        main(parser.parse_args())
    except AutoparError as error:
        parser.error(str(error))
