"""Measured steps of eager frameworks by the compiler's own path, beside `training_model`, by which `accuracy` goes.

    python -m benchmarks.eager_steps --measurements measurements.csv --rows 200 --json eager_steps.json

Each row is a GPT of `models`, planned by the row's degrees (`Megatron`) and simulated, on the machine of the row with
what its executor does: a host launches each kernel, and none is shorter than a launch (`launch_s`); gradients are
reduced, and parameters of ZeRO 3 gathered, behind compute where the framework has streams for that (`hidden_share`).
Frameworks of these rows have norms, softmax, activations and dropout as kernels written by hand, about what XLA fuses;
`--unfused` has every equation as a kernel instead, as an executor without any.

Rows come in the order of a digest, so that the first of them are a sample, the same in every run. A run that was
stopped goes on where it stopped. Not expressed, and counted: models that are no GPT, parts of a layer computed again,
context and expert parallelism, stages of unequal layers, products in 8 bits or TF32. Unlike most of these rows, models
here have a table of embeddings apart from the head, and drop nothing out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

import autopar
from autopar import Cluster, Megatron
from autopar.aot import Traced
from autopar.errors import AutoparError, InvalidArgument
from autopar.hardware.machine import Machine
from benchmarks.accuracy_cases import Case, Unusable, case_of
from benchmarks.accuracy_fit import predicted_times
from benchmarks.accuracy_journal import Entry, Journal
from benchmarks.accuracy_rows import RUNS, read_measurements
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.training_model.models import Transformer
from benchmarks.training_model.prices import Scalars

_DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
_TIME_LIMIT_S = 20.0


def main(argv: Sequence[str] | None = None) -> None:
    """Predict, and say how far off both are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measurements", type=Path, required=True, metavar="FILE", help="CSV of measured runs")
    parser.add_argument("--rows", type=int, default=200, metavar="N", help="of those that can be expressed")
    parser.add_argument("--unfused", action="store_true", help="every equation is a kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a run that is stopped continues")
    args = parser.parse_args(argv)
    cases, skipped = expressible(args.measurements)
    cases = sorted(cases, key=lambda case: case.row.digest)[: args.rows]
    journal = Journal(args.json and args.json.with_suffix(".unfused.journal" if args.unfused else ".journal"))
    console, rows, began_s = Console(stderr=True), list[dict[str, Any]](), time.process_time()
    for number, case in enumerate(sorted(cases, key=_model_key), start=1):
        entry = journal.known(case.row)
        if entry is None:
            entry = predicted(case, unfused=args.unfused)
            journal.add(case.row, entry)
        if entry.unusable:
            skipped[entry.unusable] += 1
            continue
        rows.append(row_of(case, entry.step_s))
        console.print(f"[{number}/{len(cases)}] {told(rows)}", markup=False, highlight=False)
    report = {
        "all": {name: figures(rows, name) for name in ("path_s", "model_s")},
        "rows": sorted(rows, key=lambda row: row["line"]),
        "unfused": args.unfused,
        "skipped": dict(skipped.most_common()),
    }
    Console().print(told(rows), highlight=False)
    for why, count in skipped.most_common():
        Console().print(f"{count:4} rows skipped: {why}", highlight=False)
    Console().print(f"{len(rows)} rows took {time.process_time() - began_s:.0f} s of a processor", highlight=False)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    journal.close()


def expressible(measurements: Path) -> tuple[list[Case], Counter[str]]:
    """Return the rows that the models and methods here express, and why others are not, counted."""
    read = read_measurements(measurements)
    if read.columns is not RUNS:
        raise InvalidArgument(f"{measurements} has steps of JAX programs, which are not eager. Give a file of runs.")
    found: list[Case] = []
    skipped = Counter[str]()
    for row in read.rows:
        try:
            case = case_of(row)
        except Unusable as why:
            skipped[str(why)] += 1
            continue
        if why := _why_not(case):
            skipped[why] += 1
        else:
            found.append(case)
    return found, skipped


def _why_not(case: Case) -> str:
    model, layout, habits = case.model, case.layout, case.habits
    plain = not (model.gated or model.experts or any(model.latent_ranks)) and model.attention_layers == -1
    reasons = {
        "ran out of memory": case.measured_s is None,
        "its executor is no eager one": habits.launch_s == 0,
        "is no GPT": not plain or model.kv_heads not in (0, model.heads),
        "multiplies in 8 bits": habits.dtype == "fp8",
        "multiplies in TF32": habits.dtype == "tf32",
        "trains adapters": habits.frozen,
        "divides sequences or experts": layout.cp * layout.ep > 1,
        "has stages of unequal layers": bool(layout.stage_layers) or model.layers % (layout.pp * layout.vp) > 0,
        "computes parts of a layer again": layout.recompute == "selective",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def predicted(case: Case, *, unfused: bool) -> Entry:
    """Plan and simulate a row; the entry says why where that is refused."""
    layout = case.layout
    pipeline: dict[str, Any] = {"schedule": "1f1b"}
    if layout.vp > 1:
        pipeline = {"schedule": "interleaved", "virtual_stages": layout.vp}
    method = Megatron(
        data=layout.dp,
        tensor=layout.tp,
        pipeline=layout.pp,
        zero=layout.zero if layout.dp > 1 else 0,
        num_microbatches=layout.microbatches,
        time_limit_s=_TIME_LIMIT_S,
        **pipeline,
    )
    cluster = Cluster(num_devices=layout.devices, machine=replace(machine_of(case), fuses=not unfused))
    try:
        planned = traced(*_traced_key(case)).on_cluster(cluster).plan(method)
        return Entry(step_s=planned.simulate(cluster).step_time_s)
    except AutoparError as error:
        return Entry(unusable=f"{type(error).__name__}: {str(error).split('. ')[0]}")


def machine_of(case: Case) -> Machine:
    """The machine of a row by what its executor does."""
    machine, habits = case.machine, case.habits
    hidden = machine.overlap if habits.overlaps else 0.0
    return replace(machine, launch_s=max(machine.kernel_s, habits.launch_s), hidden_share=hidden)


def _traced_key(case: Case) -> tuple[Transformer, int, int, bool, bool, str]:
    layout, habits = case.layout, case.habits
    batch = layout.dp * layout.microbatch * layout.microbatches
    return case.model, batch, layout.sequence, layout.recompute == "full", habits.flash, habits.dtype


def _model_key(case: Case) -> str:
    """By which rows of one model come one after the other."""
    return repr(_traced_key(case))


@lru_cache(maxsize=1)
def traced(model: Transformer, batch: int, sequence: int, recomputed: bool, kernel: bool, dtype: str) -> Traced:
    """Trace the train step of a model once for rows that come one after the other."""
    size = GPTSize(
        width=model.hidden,
        layers=model.layers,
        heads=model.heads,
        head=model.head_size or None,
        length=sequence,
        vocabulary=model.vocab,
        batch=batch,
        hidden=model.width,
        recomputed=recomputed,
        kernel=kernel,
    )
    workload = alpa_gpt("gpt", size, _DTYPES[dtype])
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=Cluster.parse("1x cpu"))
    return step.trace(workload.abstract_state, workload.abstract_batch)


def row_of(case: Case, path_s: float) -> dict[str, Any]:
    """A row as the JSON holds it: seconds measured, by the compiler's path, and by the list of operators."""
    (by_operators,) = predicted_times([case], Scalars())
    times = {"measured_s": case.measured_s, "path_s": path_s, "model_s": by_operators.total_s}
    return {"line": case.row.line, "source": case.row.source} | times


def figures(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Mean of the errors' sizes, of the errors, and their median."""
    if not rows:
        return {"rows": 0}
    errors = np.array([row[name] / row["measured_s"] - 1 for row in rows])
    sizes = np.abs(errors)
    return {
        "rows": len(rows),
        "mape": float(sizes.mean()),
        "bias": float(errors.mean()),
        "median": float(np.median(sizes)),
    }


def told(rows: Sequence[dict[str, Any]]) -> str:
    """Both errors, in words."""
    if not rows:
        return "No row was predicted."
    path, model = figures(rows, "path_s"), figures(rows, "model_s")
    return (
        f"{len(rows)} rows: by the compiler's path {path['mape']:.1%} off ({path['bias']:+.1%} in the mean), by a list "
        f"of operators {model['mape']:.1%} ({model['bias']:+.1%})"
    )


if __name__ == "__main__":
    main()
