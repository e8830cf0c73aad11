"""Plan a train step for a cluster, without its devices: as text, as JSON, as a page for the browser.

    autopar plan model:make_step --cluster "8x dgx-h100" -o plan.json --view plan.html

`make_step()` returns the step and its arguments, arrays or `jax.ShapeDtypeStruct`s: `(step, state, batch)`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from autopar.aot import Traced
from autopar.api import Step, parallelize
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.methods import Auto


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("step", metavar="MODULE:FUNCTION", help="a function that returns the step and its arguments")
    parser.add_argument("--cluster", help='to plan for, as "8x dgx-h100"; by default the devices that are here')
    parser.add_argument("--plan", type=Path, help="a plan to show, as -o wrote it, in place of a new one")
    parser.add_argument("-o", "--output", type=Path, help="write the plan, for parallelize(method=Plan.load(path))")
    parser.add_argument("--view", type=Path, help="write what the plan runs as a page for the browser")
    parser.add_argument("--json", action="store_true", help="print what the plan runs as JSON, and not as tables")


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan the step, print what runs, and write what was asked for; 0."""
    cluster = None if arguments.cluster is None else Cluster.parse(arguments.cluster)
    given = None if arguments.plan is None else Plan.load(arguments.plan)
    traced = _on_cluster(_traced(arguments.step), cluster)
    planned = traced.plan(given)
    described = planned.describe()
    if arguments.output is not None:
        planned.plan.save(arguments.output)
    if arguments.view is not None:
        planned.view(arguments.view)
    if arguments.json:
        print(described.to_json(), end="")
    else:
        Console(width=None if Console().is_terminal else 160).print(described)
    return 0


def _traced(name: str) -> Traced:
    """Return the step that a function returns, traced for the arguments beside it."""
    step, *arguments = _made(name)
    if not callable(step):
        raise InvalidArgument(
            f"{name}() returned {type(step).__name__} first; it must return the step, a function, and its arguments: "
            "return step, state, batch."
        )
    parallelized = step if isinstance(step, Step) else parallelize(step, method=Auto())
    return parallelized.trace(*arguments)


def _made(name: str) -> Sequence[Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise InvalidArgument(f'The step is called {name!r}. Name a module and a function of it, as "model:make_step".')
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidArgument(
            f"The module {module_name} cannot be imported: {error}. Run the command where `import {module_name}` works."
        ) from error
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        there = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        raise InvalidArgument(
            f"{module_name} has no function {function_name!r}; it has {', '.join(there[:8]) or 'none'}. Name one that "
            "returns the step and its arguments."
        )
    made = function()
    if not isinstance(made, tuple) or len(made) < 2:
        raise InvalidArgument(
            f"{name}() returned {type(made).__name__}; it must return the step and its arguments: "
            "return step, state, batch."
        )
    return made


def _on_cluster(traced: Traced, cluster: Cluster | None) -> Traced:
    if cluster is None:
        return traced
    target = replace(traced.source.target, cluster=cluster, devices=None, session=None)
    return replace(traced, source=replace(traced.source, target=target))
