"""Ask about the plan of a train step without its devices: as text, as JSON, as a page for the browser.

    autopar plan     model:make_step --cluster "8x dgx-h100" -o plan.json --view plan.html
    autopar simulate model:make_step --plan plan.json
    autopar explain  model:make_step "state.params.h_0.kernel" --plan plan.json
    autopar what-if  model:make_step --set num_microbatches=8 --on "4x dgx-h100"
    autopar diff     one.json other.json
    autopar view     model:make_step --plan plan.json --ask schedule -o plan.html

`make_step()` returns the step and its arguments, arrays or `jax.ShapeDtypeStruct`s: `(step, state, batch)`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jax
from rich.console import Console

from autopar.aot import Planned, Traced
from autopar.api import Step, parallelize
from autopar.errors import AutoparError, InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.methods import Auto, Method
from autopar.reports.plan_difference import plan_difference


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `autopar plan`."""
    _add_step(parser)
    parser.add_argument("-o", "--output", type=Path, help="write the plan, for parallelize(method=Plan.load(path))")
    parser.add_argument("--view", type=Path, help="write what the plan runs as a page for the browser")


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan the step, print what runs, and write what was asked for; 0."""
    planned = _planned(arguments)
    described = planned.describe()
    if arguments.output is not None:
        planned.plan.save(arguments.output)
    if arguments.view is not None:
        planned.view(arguments.view)
    return _show(described, arguments)


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `autopar simulate`."""
    _add_step(parser)
    parser.add_argument("--trace", type=Path, help="write the timeline, for https://ui.perfetto.dev")
    parser.add_argument("--chakra", type=Path, metavar="DIR", help="write a Chakra trace of each device, for other "
                        "simulators")  # fmt: skip


def run_simulate(arguments: argparse.Namespace) -> int:
    """Print time, memory and a timeline of one step of a plan; 0."""
    planned = _planned(arguments)
    report = planned.simulate()
    if arguments.trace is not None:
        report.timeline.write(arguments.trace)
    if arguments.chakra is not None:
        planned.chakra(arguments.chakra)
    return _show(report, arguments)


def add_explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `autopar explain`."""
    _add_step(parser)
    parser.add_argument("question", help="an input, a line or scope of the model, a collective, or stages, schedule, "
                        "num_microbatches, remat, mesh_shape")  # fmt: skip


def run_explain(arguments: argparse.Namespace) -> int:
    """Print what else could have been planned, or what causes a collective; 0."""
    return _show(_planned(arguments).explain(arguments.question), arguments)


def add_what_if_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `autopar what-if`."""
    _add_step(parser)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of the method, repeatable")
    parser.add_argument("--instead", metavar="METHOD", help='another method, as "Megatron(tensor=8)"')
    parser.add_argument("--on", metavar="CLUSTER", help='another cluster, as "4x dgx-h100"')
    parser.add_argument("--fixes", action="store_true", help="try what may help, and print it by gain")


def run_what_if(arguments: argparse.Namespace) -> int:
    """Print how another plan differs, or what would be better; 0."""
    traced = _traced(arguments)
    if arguments.fixes:
        return _show(traced.fixes(_method(arguments.method)), arguments)
    options = dict(_option(words) for words in arguments.set)
    instead = _method(arguments.instead)
    return _show(_plan_of(traced, arguments).what_if(method=instead, cluster=arguments.on, **options), arguments)


def add_view_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `autopar view`."""
    _add_step(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("plan.html"), help="the page; plan.html")
    parser.add_argument("--ask", action="append", default=[], metavar="QUESTION", help="as for explain, "
                        "repeatable: the page has the answers")  # fmt: skip


def run_view(arguments: argparse.Namespace) -> int:
    """Write what a plan runs as a page for the browser; 0."""
    planned = _planned(arguments)
    path = planned.view(arguments.output, answers=[planned.explain(question) for question in arguments.ask])
    if arguments.json:
        print(json.dumps({"page": str(path)}))
    else:
        print(f"{path}: open it in a browser; it needs no network")
    return 0


def add_diff_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `autopar diff`."""
    parser.add_argument("before", type=Path, help="a plan, as autopar plan -o writes it")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--step", metavar="MODULE:FUNCTION", help="of both plans, to compare time and memory as well")
    parser.add_argument("--cluster", help="of both plans, with --step")
    _add_json(parser)


def run_diff(arguments: argparse.Namespace) -> int:
    """Print what differs between two stored plans; 0."""
    before, after = Plan.load(arguments.before), Plan.load(arguments.after)
    if arguments.step is None:
        return _show(plan_difference(before, after), arguments)
    traced = _traced(arguments)
    return _show(traced.plan(before).diff(traced.plan(after)), arguments)


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", metavar="MODULE:FUNCTION", help="a function that returns the step and its arguments")
    parser.add_argument("--cluster", help='to plan for, as "8x dgx-h100"; by default the devices that are here')
    parser.add_argument("--method", help='as "Megatron(tensor=8)"; by default that of the step, or Auto()')
    parser.add_argument("--plan", type=Path, help="a stored plan in place of a new one")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, and not tables")


def _show(shown: Any, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(shown.to_json(), end="")
    else:
        Console(width=None if Console().is_terminal else 160).print(shown)
    return 0


def _planned(arguments: argparse.Namespace) -> Planned:
    return _plan_of(_traced(arguments), arguments)


def _plan_of(traced: Traced, arguments: argparse.Namespace) -> Planned:
    if arguments.plan is not None and arguments.method is not None:
        raise InvalidArgument("Both --plan and --method were given. Give a stored plan, or a method for a new one.")
    return traced.plan(_method(arguments.method) if arguments.plan is None else Plan.load(arguments.plan))


def _traced(arguments: argparse.Namespace) -> Traced:
    """Return the step that a function returns, traced for its arguments and the cluster that is asked for."""
    cluster = None if arguments.cluster is None else Cluster.parse(arguments.cluster)
    step, *given = _made(arguments.step)
    if not callable(step):
        raise InvalidArgument(
            f"{arguments.step}() returned {type(step).__name__} first; it must return the step, a function, and its "
            "arguments: return step, state, batch."
        )
    parallelized = step if isinstance(step, Step) else parallelize(step, method=Auto())
    with _told_of(f"{arguments.step}() returned a step that cannot be traced for its arguments"):
        traced = parallelized.trace(*given)
    return traced if cluster is None else traced.on_cluster(cluster)


def _method(words: str | None) -> Method | None:
    """Return the method that is written out, of literals only."""
    if words is None:
        return None
    known = {method.__name__: method for method in get_args(Method)}
    lesson = f'The method is {words!r}. Write one of {", ".join(known)} with its options, as "Megatron(tensor=8)".'
    try:
        call = ast.parse(words, mode="eval").body
        call = ast.Call(func=call, args=[], keywords=[]) if isinstance(call, ast.Name) else call
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise InvalidArgument(lesson)
        options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return known[call.func.id](**options)
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{lesson} ({error})") from None


def _option(words: str) -> tuple[str, Any]:
    """Return name and value of `name=value`; a value that is no literal is text."""
    name, equals, value = words.partition("=")
    if not equals:
        raise InvalidArgument(f"--set {words!r} has no value. Write it as --set num_microbatches=8.")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _made(name: str) -> Sequence[Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise InvalidArgument(f'The step is called {name!r}. Name a module and a function of it, as "model:make_step".')
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _told_of(f"The module {module_name} cannot be imported", " Run the command where it can."):
            module = importlib.import_module(module_name)
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        there = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        raise InvalidArgument(
            f"{module_name} has no function {function_name!r}; it has {', '.join(there[:8]) or 'none'}. Name one that "
            "returns the step and its arguments."
        )
    with _told_of(f"{name}() does not return the step and its arguments"):
        made = function()
    if not isinstance(made, tuple) or len(made) < 2:
        raise InvalidArgument(
            f"{name}() returned {type(made).__name__}; it must return the step and its arguments: "
            "return step, state, batch."
        )
    return made


@contextmanager
def _told_of(words: str, advice: str = "") -> Generator[None]:
    """Report what the user's code raised, and on which of its lines, in place of a traceback."""
    try:
        yield
    except AutoparError:
        raise
    except (Exception, SystemExit) as error:  # a module may raise anything, and may end its process
        library = tuple(str(Path(module.__file__ or "").parent) for module in (jax, sys.modules["autopar"], importlib))
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(library)]
        mine = [each for each in frames if "<" not in each.filename]
        where = f", at {Path(mine[-1].filename).name}:{mine[-1].lineno} ({mine[-1].name})" if mine else ""
        first = str(error).partition("\n")[0].rstrip(".")
        raise InvalidArgument(f"{words}: {type(error).__name__}: {first}{where}.{advice}") from error
