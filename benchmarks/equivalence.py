"""Run models of the zoo in many configurations, and say where they equal the plain `jax.jit` step.

    python -m benchmarks.equivalence --models mlp gpt_linen --stages 2 4 --json equivalence.json
    python -m benchmarks.equivalence --searched --json searched.json      (`Auto`, instead of stages by hand)

Without options this is the full product of all models, stages, schedules and microbatches. The tests run a part of it
that covers every model, number and schedule. Exits with 1 if anything differs or fails; a batch that cannot be split
exactly is refused, as it must be. Rows that the file of `--json` holds already are not run again, so that a run that
was stopped goes on.

A model is traced once, and what several configurations compile alike is compiled once, and cheaply: schedules of as
many stages and microbatches differ in the order of their tasks, not in the tasks.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.cheap_compilation import cheap_xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = cheap_xla_flags(os.environ.get("XLA_FLAGS", ""), xla_force_host_platform_device_count="8")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopar.api import Compiled, Traced
from autopar.errors import AutoparError, NotSplittable
from tests.equivalence import SCHEDULES, Configuration, compare, example_of, parallelized
from tests.zoo import ZOO, Case


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model in one configuration."""

    model: str
    num_stages: int
    num_microbatches: int
    schedule: str  # of several stages; "" for one, and what was given for a search
    equal: bool
    difference: float | None  # of the leaf that differs most, relative to its size
    tolerance: float
    message: str  # that leaf, or why the step did not run
    refused: bool  # the batch cannot be split exactly
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="NAME")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--searched", action="store_true", help="Auto(), and Auto for two stages, instead of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row; its rows stand")
    args = parser.parse_args(argv)
    wanted = searches() if args.searched else list(configurations(args.stages, args.microbatches, args.schedules))
    rows = read_rows(args.json)
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    for name in args.models:
        known = {(row.num_stages, row.num_microbatches, row.schedule) for row in rows if row.model == name}
        missing = [each for each in wanted if _place(each) not in known]
        with compile_cache():
            for configuration in track(missing, description=name, console=Console(stderr=True), transient=True):
                rows.append(measure(ZOO[name], configuration))
                if args.json:
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        jax.clear_caches()  # Executables of a model are not used by the next.
    jax.config.update("jax_enable_x64", before)
    print_table(rows)
    return int(not all(row.equal or row.refused for row in rows))


def read_rows(path: Path | None) -> list[Row]:
    """Return the rows of an earlier run."""
    if path is None or not path.exists():
        return []
    return [Row(**entry) for entry in json.loads(path.read_text())]


@contextmanager
def compile_cache() -> Iterator[None]:
    """Keep executables in files for as long as a model takes; a directory that the user named stays."""
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        reset_cache()
        yield
        jax.config.update("jax_compilation_cache_dir", None)
        reset_cache()


def configurations(
    stages: Sequence[int], microbatches: Sequence[int], schedules: Sequence[str]
) -> Iterator[Configuration]:
    """The product; one stage has no schedule."""
    for num_stages, schedule, num_microbatches in itertools.product(stages, schedules, microbatches):
        if num_stages > 1 or schedule == schedules[0]:
            yield Configuration(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule)


def searches() -> list[Configuration]:
    """All devices as the search likes it, and in two stages."""
    given: list[dict[str, int]] = [{}, {"num_stages": 2, "num_microbatches": 2}]
    return [Configuration(num_stages=1, num_microbatches=1, searched=True, options=options) for options in given]


def measure(case: Case, configuration: Configuration) -> Row:
    """One comparison; a step that cannot be parallelized is a row as well."""
    start = time.perf_counter()
    refused = False
    try:
        agreement = compare(case, configuration, compiled(case, configuration))
        equal, difference, message = agreement.holds, agreement.difference, agreement.leaf
    except (AutoparError, AssertionError) as error:
        equal, difference, message = False, None, f"{type(error).__name__}: {error}"
        refused = isinstance(error, NotSplittable)
    return Row(
        model=case.name,
        num_stages=configuration.num_stages,
        num_microbatches=configuration.num_microbatches,
        schedule=_schedule_words(configuration),
        equal=equal,
        difference=difference,
        tolerance=case.tolerance,
        message=message,
        refused=refused,
        seconds=time.perf_counter() - start,
    )


def compiled(case: Case, configuration: Configuration) -> Compiled:
    """Return the step for a configuration; what several of them trace is traced once."""
    return traced(case.name).plan(configuration.method(case)).lower().compile()


@lru_cache(maxsize=1)
def traced(name: str) -> Traced:
    """Return the trace of a model, which all of its configurations start from."""
    case = ZOO[name]
    return parallelized(case, Configuration(num_stages=1, num_microbatches=1)).trace(*example_of(case), **case.kwargs)


def _place(configuration: Configuration) -> tuple[int, int, str]:
    return configuration.num_stages, configuration.num_microbatches, _schedule_words(configuration)


def _schedule_words(configuration: Configuration) -> str:
    if configuration.searched:
        return str(configuration)
    return configuration.schedule if configuration.num_stages > 1 else ""


def print_table(rows: Sequence[Row]) -> None:
    """One line per model: how many configurations are equal, and the largest difference; then what is not equal."""
    console = Console()
    table = Table(title="Equal to plain jax.jit after three steps")
    for column in ("model", "equal", "largest difference", "tolerance", "leaf", "s"):
        table.add_column(column, justify="left" if column in ("model", "leaf") else "right")
    for model, group in itertools.groupby(rows, key=lambda row: row.model):
        mine = list(group)
        worst = max(mine, key=lambda row: -1.0 if row.difference is None else row.difference)
        equal = f"{sum(row.equal for row in mine)} of {len(mine)}"
        difference = "" if worst.difference is None else f"{worst.difference:.1e}"
        seconds = f"{sum(row.seconds for row in mine):.0f}"
        table.add_row(model, equal, difference, f"{worst.tolerance:.0e}", worst.message, seconds)
    console.print(table)
    for row in rows:
        if not row.equal:
            where = f"{row.num_stages} stages, {row.num_microbatches} microbatches {row.schedule}"
            console.print(f"{row.model}, {where}: {row.message}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
