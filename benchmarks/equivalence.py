"""Run models of the zoo in many configurations, and say where they equal the plain `jax.jit` step.

    python -m benchmarks.equivalence --models mlp gpt_linen --stages 2 4 --json equivalence.json
    python -m benchmarks.equivalence --searched --json searched.json      (`Auto`, instead of stages by hand)

Without options this is the full product of all models, stages, schedules and microbatches, which takes two hours. The
tests run a part of it that covers every model, number and schedule. Exits with 1 if anything differs or fails; a batch
that cannot be split exactly is refused, as it must be.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopar.errors import AutoparError, NotSplittable
from tests.equivalence import SCHEDULES, Configuration, compare
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every model")
    args = parser.parse_args(argv)
    wanted = searches() if args.searched else list(configurations(args.stages, args.microbatches, args.schedules))
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    rows: list[Row] = []
    for name in args.models:
        shown = track(wanted, description=name, console=Console(stderr=True), transient=True)
        rows += [measure(ZOO[name], configuration) for configuration in shown]
        jax.clear_caches()  # Executables of a model are not used by the next.
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    jax.config.update("jax_enable_x64", before)
    print_table(rows)
    return int(not all(row.equal or row.refused for row in rows))


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
        agreement = compare(case, configuration)
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
