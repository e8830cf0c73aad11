"""Hold plans of models in scopes against plain jit and against the collectives that they plan.

    python -m benchmarks.scopes --groups "two deep" bridges --json scopes.json

A step of two layers and a head trains on eight virtual devices in 64 bits, by `Auto`, with its scopes in every order:

    two deep, three deep    every nesting of `replicate` and `split`, their devices given or left open
    in stages               every nesting of two in each of two stages
    bridges                 every pair of them, of equal and unequal degrees, one behind the other

The compiled collectives are those of the plan, the results those of `jax.jit`, and of what is split over p devices each
holds a p-th at most. Scopes that ask for more devices than there are, are refused. Exits with 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar

NUM_DEVICES = 8
ROWS, WIDTH, CLASSES = 16, 64, 64

Written = tuple[str, int | None]
"""A scope: "replicate" or "split", and its devices, if they are given."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The scopes around the layers, the outermost first, and those around the head."""

    group: str
    layers: tuple[Written, ...]
    head: tuple[Written, ...]

    def __str__(self) -> str:
        around = (
            " > ".join(f"{kind}({n or ''})" for kind, n in scopes) or "none" for scopes in (self.layers, self.head)
        )
        return " | ".join(around)

    @property
    def asks_too_much(self) -> bool:
        """True if some scopes in each other ask for more devices than a mesh has."""
        each = NUM_DEVICES // 2 if self.group == "in stages" else NUM_DEVICES
        return any(replicas(s) * parts(s) > each for s in (self.layers, self.head))


def replicas(scopes: Sequence[Written]) -> int:
    """Return the devices over which the examples are divided at least."""
    return math.prod(n or 1 for kind, n in scopes if kind == "replicate")


def parts(scopes: Sequence[Written]) -> int:
    """Return the devices over which the work on an example is divided at least: two where no `split` gives any."""
    given = [n for kind, n in scopes if kind == "split"]
    return math.prod(n for n in given if n) if any(given) else 2 if given else 1


def cases() -> Iterator[Case]:
    """Yield all, group by group."""
    written = [(kind, n) for kind in ("replicate", "split") for n in (None, 2, 4)]
    for two in itertools.product(written, repeat=2):
        yield Case(group="two deep", layers=two, head=())
    for three in itertools.product(written, repeat=3):
        yield Case(group="three deep", layers=three, head=())
    few = [(kind, n) for kind in ("replicate", "split") for n in (None, 2)]
    for two in itertools.product(few, repeat=2):
        yield Case(group="in stages", layers=two, head=tuple(reversed(two)))
    of_each = [(kind, n) for kind in ("replicate", "split") for n in (None, 2, 4, 8)]
    for one, other in itertools.product(of_each, repeat=2):
        yield Case(group="bridges", layers=(one,), head=(other,))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case, its plan, and what is wrong with it; nothing for one that is as it should be."""

    case: str
    group: str
    mesh: str
    collectives: int
    megabytes: float
    difference: float | None
    """The largest from `jax.jit`, of the result's size; None for a case that is refused."""
    refused: str
    wrong: str
    seconds: float


def entered(scopes: Sequence[Written]) -> AbstractContextManager[None]:
    """Return the scopes as one."""
    stack = ExitStack()
    for kind, n in scopes:
        stack.enter_context({"replicate": autopar.replicate, "split": autopar.split}[kind](devices=n))
    return stack


def step_of(case: Case) -> Any:
    """Return a step of training in the scopes of a case."""

    def stage(name: str) -> AbstractContextManager[None]:
        return autopar.stage(name, devices=NUM_DEVICES // 2) if case.group == "in stages" else ExitStack()

    def loss(params: Any, x: Any, y: Any) -> Any:
        with stage("layers"), entered(case.layers):
            for w in params["layers"]:
                x = jnp.tanh(x @ w)
        with stage("head"), entered(case.head):
            x = x @ params["head"]
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()

    def train_step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


def arguments() -> tuple[Any, Any]:
    """Return parameters and a batch in 64 bits."""
    rng = np.random.default_rng(0)
    layers = [jnp.array(rng.normal(size=(WIDTH, WIDTH)) / 8) for _ in range(2)]
    params = {"layers": layers, "head": jnp.array(rng.normal(size=(WIDTH, CLASSES)) / 8)}
    return params, (jnp.array(rng.normal(size=(ROWS, WIDTH))), jnp.array(rng.integers(0, CLASSES, ROWS)))


def measure(case: Case) -> Row:
    """Plan, compile, run and compare a case."""
    start = time.perf_counter()
    # Every degree is there as axes of a mesh of twos; nestings are planned on the meshes that a search has by itself.
    method = autopar.Auto(mesh_shape=(2, 2, 2)) if case.group in ("bridges", "three deep") else autopar.Auto()
    mesh, collectives, megabytes, difference, refused, wrong = "", 0, 0.0, None, "", ""
    try:
        planned = autopar.parallelize(step_of(case), method=method).trace(*arguments()).plan()
        mesh = " | ".join("x".join(map(str, each.shape)) for each in planned.plan.meshes)
        collectives = len(planned.plan.planned_collectives)
        megabytes = sum(each.nbytes * each.times for each in planned.plan.planned_collectives) / 1e6
        report = planned.verify(*arguments())
        assert report.numbers is not None
        difference = float(report.numbers.difference)
        wrong = "" if report else str(report)
        wrong = wrong or "; ".join(_too_whole(case, planned))
    except autopar.InvalidArgument as error:
        refused = str(error)
        wrong = "" if case.asks_too_much and "autopar." in refused else f"refused: {refused}"
    if case.asks_too_much and not refused:
        wrong = "it asks for more devices than there are, and is planned"
    return Row(
        case=str(case),
        group=case.group,
        mesh=mesh,
        collectives=collectives,
        megabytes=megabytes,
        difference=difference,
        refused=refused,
        wrong=wrong,
        seconds=time.perf_counter() - start,
    )


def _too_whole(case: Case, planned: autopar.Planned) -> Iterator[str]:
    """Yield the parameters of which a device holds more than its part."""
    whole = {leaf.name: leaf.aval.size * leaf.aval.dtype.itemsize for leaf in planned.trace.inputs}
    for each in planned.describe().inputs:
        scopes = case.layers if "layers" in each.name else case.head if "head" in each.name else ()
        most = whole[each.name] / parts(scopes)
        if each.bytes_per_device > most:
            yield f"{each.name}: {each.bytes_per_device} bytes on a device, {most:g} at most were asked for"


GROUPS = tuple(dict.fromkeys(case.group for case in cases()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases of the groups, and print a line for each group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    rows: list[Row] = []
    for group in args.groups:
        mine = [case for case in cases() if case.group == group]
        for number, case in enumerate(track(mine, description=group, console=Console(stderr=True), transient=True)):
            rows.append(measure(case))
            if number % 16 == 15:
                jax.clear_caches()
    jax.config.update("jax_enable_x64", before)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    Console(width=140).print(table_of(rows))
    return int(any(row.wrong for row in rows))


def table_of(rows: Sequence[Row]) -> Table:
    """Return a line for each group, and below it the cases that are not as they should be."""
    table = Table(title="models in scopes beside plain jit, compiled collectives beside planned ones")
    for column in ("group", "cases", "refused", "collectives", "largest difference", "wrong", "s"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        largest = max((row.difference for row in mine if row.difference is not None), default=0.0)
        counts = len(mine), sum(bool(r.refused) for r in mine), sum(r.collectives for r in mine)
        wrong, seconds = sum(bool(row.wrong) for row in mine), sum(row.seconds for row in mine)
        table.add_row(group, *map(str, counts), f"{largest:.1e}", str(wrong), f"{seconds:.0f}")
        for row in mine:
            if row.wrong:
                table.add_row(f"  {row.case}: {row.wrong}", *[""] * 6)
    return table


if __name__ == "__main__":
    sys.exit(main())
