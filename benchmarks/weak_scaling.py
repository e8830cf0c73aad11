"""Weak scaling: a model that grows with the devices, on the devices of this machine or on a cluster that is modelled.

    python -m benchmarks gpt --devices 1,2,4,8 --method data,intra-only            scaled down, really run and timed
    python -m benchmarks gpt --devices 4,8 --hosts 2                               the same by the Ray runtime
    python -m benchmarks gpt --cluster p3.16xlarge --gpus 1,2,4,8,16,32,64         Alpa's models, planned and simulated
    python -m benchmarks gpt --cluster p3.16xlarge --gpus 8 --model 6.7B --plan plan.json

Times of searches are those from a cold start: nothing that an earlier search solved is used. TFLOPS count what the
model computes, without recomputation; Alpa's published figures count it, and are a third higher for the same time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from rich.console import Console

import autopar
from autopar.errors import InvalidArgument
from benchmarks.models.sizes import FAMILIES, Family, closest
from benchmarks.planned_case import METHODS, planned_row
from benchmarks.weak_scaling_local import measured_row
from benchmarks.weak_scaling_plot import check_plot, draw
from benchmarks.weak_scaling_rows import Row, merged, read_json, rows_table, write_json

_DEVICES = "1,2,4,8"
_METHOD = "auto"
_WIDE = 160  # characters, where there is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks gpt`, `moe` and `wresnet`."""
    parser.add_argument(
        "--devices", metavar="N,N", help=f"run on so many devices of this machine (default: {_DEVICES})"
    )
    parser.add_argument("--hosts", metavar="N", help="with --devices: those of a Ray cluster of so many processes here")
    parser.add_argument("--cluster", metavar="NAME", help='plan for a cluster instead: "p3.16xlarge", "8x p3.16xlarge"')
    parser.add_argument("--gpus", metavar="N,N", help="the parts of the cluster to plan for (default: all of it)")
    parser.add_argument("--model", metavar="NAME", help="this model for every number of GPUs, instead of Alpa's for it")
    parser.add_argument("--method", default=[], action="append", metavar="M,M", help=", ".join(METHODS))
    parser.add_argument("--microbatches", metavar="N", help="with --cluster: parts of the batch, by default as fit")
    parser.add_argument("--repetitions", default="5", metavar="N", help="steps of which the median is taken")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="use this plan, instead of a method")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON, beside others that it holds")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw TFLOPS/GPU and the share of linear scaling")


def main(family_name: str, arguments: argparse.Namespace) -> list[Row]:
    """Measure or simulate, and show the rows. Raises `InvalidArgument` for options that cannot be used."""
    family = FAMILIES[family_name]
    cases = _planned_cases(family, arguments) if arguments.cluster else _local_cases(family, arguments)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    progress = Console(stderr=True)
    before = [] if arguments.json is None or not arguments.json.exists() else read_json(arguments.json)
    rows: list[Row] = []
    with _nothing_remembered():
        for number, (what, run) in enumerate(cases, start=1):
            progress.print(f"[{number}/{len(cases)}] {what} ...", markup=False)
            rows.append(run())
            if arguments.json is not None:  # after every row, for they take long
                write_json(merged(rows, before), arguments.json)
    rows = merged(rows, before)
    shown = Console()
    (shown if shown.is_terminal else Console(width=_WIDE)).print(rows_table(rows))
    if arguments.plot is not None:
        draw(rows, f"Weak scaling of {family_name} on {arguments.cluster or 'this machine'}", arguments.plot)
    return rows


Case = tuple[str, Callable[[], Row]]


def _planned_cases(family: Family, arguments: argparse.Namespace) -> list[Case]:
    if arguments.devices or arguments.hosts:
        option = f"--devices {arguments.devices}" if arguments.devices else f"--hosts {arguments.hosts}"
        raise InvalidArgument(
            f"{option} runs here and --cluster {arguments.cluster} is modelled. Give one of them; "
            "the numbers of GPUs of a cluster are --gpus."
        )
    whole = autopar.Cluster.parse(arguments.cluster)
    counts = _counts("--gpus", arguments.gpus or str(whole.num_devices))
    if any(character.isspace() for character in arguments.cluster.strip()) and max(counts) > whole.num_devices:
        raise InvalidArgument(
            f"--gpus asks for {max(counts)}, {arguments.cluster} has {whole.num_devices}. Ask for at most so many, or "
            f"give the name of the machine alone (--cluster {whole.machine.name}), of which any number is taken."
        )
    plan = _given_plan(arguments, counts)
    methods = [plan] if plan is not None else _methods(arguments)
    count = None if arguments.microbatches is None else _counts("--microbatches", arguments.microbatches)[0]
    makes = [cache(family.maker(arguments.model) if arguments.model else family.maker_on(number)) for number in counts]
    return [
        (
            f"{family.name} on {number} GPUs of {whole.machine.name}: {_named(method)}",
            lambda number=number, method=method, make=make: planned_row(
                make(), whole.with_devices(number), method, num_microbatches=count
            ),
        )
        for number, make in zip(counts, makes, strict=True)
        for method in methods
    ]


def _local_cases(family: Family, arguments: argparse.Namespace) -> list[Case]:
    for option in ("gpus", "model", "microbatches"):
        if getattr(arguments, option) is not None:
            raise InvalidArgument(
                f"--{option} is for a cluster that is modelled, and --cluster is missing. Add --cluster p3.16xlarge, "
                "or give --devices for what runs here."
            )
    counts = _counts("--devices", arguments.devices or _DEVICES)
    (repetitions,) = _counts("--repetitions", arguments.repetitions)
    hosts = None if arguments.hosts is None else _counts("--hosts", arguments.hosts)[0]
    where = "this machine" if hosts is None else f"{hosts} processes of a Ray cluster"
    plan = _given_plan(arguments, counts)
    methods = [_named(plan)] if plan is not None else _methods(arguments)
    return [
        (
            f"{family.name} on {number} devices of {where}: {method}",
            lambda number=number, method=method: measured_row(
                family.name, number, method, repetitions=repetitions, plan=arguments.plan, hosts=hosts
            ),
        )
        for number in counts
        for method in methods
    ]


def _methods(arguments: argparse.Namespace) -> list[str]:
    names = [name.strip() for given in arguments.method for name in given.split(",")] or [_METHOD]
    return list(dict.fromkeys(closest("The method", name, METHODS) for name in names))


def _given_plan(arguments: argparse.Namespace, counts: Sequence[int]) -> autopar.Plan | None:
    if arguments.plan is None:
        return None
    if arguments.method or len(counts) != 1:
        raise InvalidArgument(
            f"--plan {arguments.plan} is for one number of devices and instead of a method; given were "
            f"{len(counts)} numbers and the methods {arguments.method}. Give one number, and no --method."
        )
    if not arguments.plan.is_file():
        raise InvalidArgument(f"There is no file {arguments.plan} for --plan. Write one with Plan.save.")
    return autopar.Plan.load(arguments.plan)


def _named(method: str | autopar.Plan) -> str:
    return method if isinstance(method, str) else f"plan of {method.method}"


def _counts(option: str, text: str) -> list[int]:
    """The numbers of "1,2,4"."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InvalidArgument(f"{option} is {text!r}. Give numbers of at least 1 with commas between them, like 1,2,4.")
    return list(dict.fromkeys(map(int, words)))


@contextmanager
def _nothing_remembered() -> Iterator[None]:
    """Let searches find an empty cache, also those of other processes that are started here."""
    before = os.environ.get("AUTOPAR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["AUTOPAR_CACHE_DIR"] = directory
        try:
            yield
        finally:
            del os.environ["AUTOPAR_CACHE_DIR"]
            if before is not None:
                os.environ["AUTOPAR_CACHE_DIR"] = before
