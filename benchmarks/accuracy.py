"""Predict every row of a file of published measurements, and say how right that is.

    python -m benchmarks.accuracy --measurements measurements.csv --json accuracy.json
    python -m benchmarks.accuracy --measurements measurements.csv --calibrate 0.2 --json accuracy.json
    python -m benchmarks.accuracy --measurements measurements.csv --leave-out --calibrate 0.2

No accelerator is needed: the machines are those of `autopar/hardware/machines`. Every row is planned and simulated by
the compiler: steps of JAX programs by their plans (`accuracy_steps`), runs of other frameworks by their degrees
(`eager_steps`). That takes seconds a row, so that of runs a fifth is predicted by default, the same one in every run.
What is predicted is kept in a journal beside the JSON, from which the same command goes on; a run that is interrupted
reports on the rows before.

No rule asks where a row is from: its source, which may be empty, is a label that rows are reported by. With
--calibrate, ten physical scalars per site, which is an executor on a kind of hardware, of one host or of several, are
fitted to that fraction of the rows, and all columns are of the other rows only. With --leave-out besides, the column
`unseen` predicts each source by scalars of the other sources' rows on the same machine.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError, InvalidArgument
from benchmarks.accuracy_cases import Case as RunCase
from benchmarks.accuracy_cases import Unusable, case_of
from benchmarks.accuracy_fit import Scalars, evaluated_runs
from benchmarks.accuracy_journal import Entry, Journal
from benchmarks.accuracy_report import Case, Evaluated, Predicted, by_source, figures, without_the_largest
from benchmarks.accuracy_rows import RUNS, STEPS, Measurements, Row, read_measurements
from benchmarks.accuracy_steps import StepCase, step_case_of
from benchmarks.accuracy_steps import priced as priced_step
from benchmarks.eager_steps import by_parts, check_expressed, traced_key
from benchmarks.eager_steps import priced as priced_run

_SAMPLE = {RUNS: 0.2, STEPS: 1.0}
_NOT_REACHED = "was not reached: the run was stopped, and the same command goes on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--measurements", type=Path, required=True, metavar="FILE", help="CSV of measured steps")
    parser.add_argument("--calibrate", type=float, metavar="FRACTION", help="fit scalars to this share of the rows")
    parser.add_argument(
        "--sample", type=float, metavar="FRACTION", help="of the rows, by a digest of each; of runs 0.2 by default"
    )
    parser.add_argument("--leave-out", action="store_true", help="predict each source without its rows too")
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
    measurements = read_measurements(arguments.measurements)
    measurements = sampled(
        measurements, _SAMPLE[measurements.columns] if arguments.sample is None else arguments.sample
    )
    journal = Journal(arguments.json and arguments.json.with_suffix(".journal"))
    report = accuracy_report(
        measurements, arguments.calibrate, rows=arguments.rows, leave_out=arguments.leave_out, journal=journal
    )
    Console().print(_table(report))
    if arguments.leave_out and not arguments.calibrate:
        Console().print("No rule asks for a source: without --calibrate, each is predicted as one left out.")
    for each in report["skipped"]:
        where = f"{each['rows']:4} rows skipped of {each['source']} (lines {_ranges(each['lines'])})"
        Console().print(f"{where}: {each['reason']}", highlight=False)
    for each in report["unreadable"]:
        Console().print(f"line {each['line']} cannot be read: it {each['reason']}", highlight=False)
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    Console().print(f"{len(measurements.rows)} rows took {took_s:.0f} s, {took_cpu_s:.0f} of them of a processor")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if not any(each["reason"] == _NOT_REACHED for each in report["skipped"]):
        journal.close()


Skipped = defaultdict[tuple[str, str], list[Row]]
"""The rows that cannot be predicted, by source and reason."""


def accuracy_report(
    measurements: Measurements,
    fraction: float | None,
    *,
    rows: bool = False,
    leave_out: bool = False,
    journal: Journal | None = None,
) -> dict[str, Any]:
    """Return what the JSON holds: per source with the machine files alone, and calibrated if a fraction is given."""
    skipped: Skipped = defaultdict(list)
    journal = journal or Journal(None)
    scalars: dict[str, Scalars] = {}
    if measurements.columns is STEPS:
        _check_steps(fraction, leave_out)
        evaluated = _evaluated_steps(measurements, skipped, journal)
    else:
        cases, entries = _priced(_runs(measurements, skipped), priced_run, skipped, journal)
        evaluated, scalars = evaluated_runs(cases, fraction, by_parts(entries), leave_out=leave_out)
    report: dict[str, Any] = {
        "calibrate": fraction,
        "leave_out": leave_out,
        "sources": {name: figures(each) for name, each in by_source(evaluated).items()},
        "all": figures(evaluated),
        "all_but_the_largest_source": without_the_largest(evaluated),
        "scalars": {site: _rounded(each) for site, each in scalars.items()},
        "skipped": [_skipped_report(source, reason, each) for (source, reason), each in sorted(skipped.items())],
        "unreadable": [{"line": line, "reason": reason} for line, reason in measurements.unreadable],
    }
    if rows:
        report["predictions"] = [_row_report(each) for each in evaluated]
    return report


def _rounded(scalars: Scalars) -> dict[str, float]:
    return {name: round(value, 6) for name, value in asdict(scalars).items()}


def _skipped_report(source: str, reason: str, rows: Sequence[Row]) -> dict[str, Any]:
    lines, names = [row.line for row in rows], [row.name for row in rows]
    return {"source": source, "reason": reason, "rows": len(rows), "lines": lines, "ids": names}


def sampled(measurements: Measurements, fraction: float) -> Measurements:
    """Return about this fraction of the rows, the same ones in every run; `InvalidArgument` for no fraction."""
    if not 0 < fraction <= 1:
        raise InvalidArgument(f"--sample is {fraction:g}, it must be above 0 and at most 1. Give a fraction like 0.2.")

    def place(row: Row) -> float:
        return int(row.digest[:8], 16) / 2**32

    return replace(measurements, rows=tuple(row for row in measurements.rows if place(row) < fraction))


_C = TypeVar("_C", bound=Case)


def _usable(measurements: Measurements, make: Callable[[Row], _C], skipped: Skipped) -> list[_C]:
    """The rows that are cases; the others are put in `skipped`."""
    cases: list[_C] = []
    for row in measurements.rows:
        try:
            cases.append(make(row))
        except Unusable as why:
            skipped[row.source, str(why)].append(row)
    return cases


def _runs(measurements: Measurements, skipped: Skipped) -> list[RunCase]:
    """The runs that can be predicted: small models first, and rows of one model, which is traced once, in a row."""
    cases = _usable(measurements, lambda row: check_expressed(case_of(row)), skipped)
    return sorted(cases, key=lambda case: (case.model.layers, repr(traced_key(case))))


def _steps(measurements: Measurements, skipped: Skipped) -> list[StepCase]:
    """The steps of JAX programs that can be predicted, rows of one model in a row."""
    cases, models = _usable(measurements, step_case_of, skipped), dict[object, int]()
    return sorted(cases, key=lambda case: models.setdefault(case.model, len(models)))


def _priced(
    cases: Sequence[_C], price: Callable[[_C], Entry], skipped: Skipped, journal: Journal
) -> tuple[list[_C], dict[str, Entry]]:
    """The cases that the compiler plans, and what it says of each by the digest of its row; the journal's word first.

    Cases that are refused, and those that are left when the run is interrupted, are put in `skipped`.
    """
    found: list[_C] = []
    entries: dict[str, Entry] = {}
    progress = Console(stderr=True)
    for number, case in enumerate(cases, start=1):
        progress.print(f"[{number}/{len(cases)}] {case.row.name}", markup=False, highlight=False)
        entry = journal.known(case.row)
        if entry is None:
            try:
                entry = price(case)
            except Unusable as why:
                entry = Entry(unusable=str(why))
            except KeyboardInterrupt:
                for each in cases[number - 1 :]:
                    skipped[each.row.source, _NOT_REACHED].append(each.row)
                break
            journal.add(case.row, entry)
        if entry.unusable:
            skipped[case.row.source, entry.unusable].append(case.row)
            continue
        found.append(case)
        entries[case.row.digest] = entry
        error = "" if case.measured_s is None else f", {100 * (entry.step_s / case.measured_s - 1):+.1f} %"
        progress.print(f"    {entry.step_s:.4g} s{error}", markup=False, highlight=False)
    return found, entries


def _check_steps(fraction: float | None, leave_out: bool) -> None:
    if fraction is not None:
        raise InvalidArgument(
            f"--calibrate is {fraction:g}, and steps of JAX programs are priced from machine files alone. Leave it out."
        )
    if leave_out:
        raise InvalidArgument(
            "--leave-out is given, and of steps of JAX programs nothing of a source can be left out: no rule asks for "
            "one, nothing is fitted in a run, and what machine files have from published steps stays in them "
            "(docs/model-figures.md says what). Give the command without it."
        )


def _evaluated_steps(measurements: Measurements, skipped: Skipped, journal: Journal) -> list[Evaluated]:
    """The predictions of JAX programs as the compiler prices them."""
    cases, entries = _priced(_steps(measurements, skipped), priced_step, skipped, journal)
    found: list[Evaluated] = []
    for case in cases:
        entry = entries[case.row.digest]
        peak_bytes = entry.peak_bytes
        plain = Predicted(case=case, step_s=entry.step_s, peak_bytes=peak_bytes, tensor_bytes=peak_bytes)
        found.append(Evaluated(plain=plain))
    return sorted(found, key=lambda each: each.row.line)


def _row_report(each: Evaluated) -> dict[str, Any]:
    case = each.plain.case
    return {
        "line": case.row.line,
        "id": case.row.name,
        "source": case.row.source,
        "measured_gib": case.measured_gib,
        "measured_s": case.measured_s,
        "predicted_s": each.best.step_s,
        "predicted_gib": each.best.recorded_bytes / 2**30,
        "fitted": each.fitted,
    }


def _table(report: dict[str, Any]) -> Table:
    """One line per source and one for all rows; `file` is the mean error with the machine files alone, `unseen` that
    with what other sources' rows make of them."""
    table = Table(title="Predicted against measured step times", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("source", no_wrap=True, max_width=20)
    left_out = ("unseen",) if "left_out" in report["all"] else ()
    for name in ("rows", "mape", "file", *left_out, "median", "worst", "spearman", "regret", "pairs", "labels"):
        table.add_column(name, justify="right", no_wrap=True, min_width=4 if name == "rows" else 6)
    lines = {source.rpartition("/")[2]: row for source, row in report["sources"].items()}
    rest = report["all_but_the_largest_source"]
    if rest:
        lines[f"all but {rest['largest'].rpartition('/')[2]}"] = rest
    for name, row in {**lines, "all": report["all"]}.items():
        before = row.get("uncalibrated", row)
        labels = row["oom_right"] + row["oom_wrong"]
        if not row["rows"] and not labels:
            continue
        unseen = [row["left_out"]["mape"]] if left_out else []
        shown = (row["mape"], before["mape"], *unseen, row["median"], row["worst"])
        table.add_row(
            name,
            str(row["rows"]),
            *map(_percent, shown),
            "–" if row["spearman"] is None else f"{row['spearman']:.3f}",
            _percent(row["regret_mean"]),
            f"{row['pairs_right']}/{row['pairs']}" if row["pairs"] else "–",
            f"{row['oom_right']}/{labels}" if labels else "–",
        )
    return table


def _ranges(lines: Sequence[int]) -> str:
    """The numbers of lines with a dash for those that follow one another: 3-5, 8."""
    ends = [line for line in lines if line + 1 not in lines]
    starts = [line for line in lines if line - 1 not in lines]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    try:
        main(parser.parse_args())
    except AutoparError as error:
        parser.error(str(error))
