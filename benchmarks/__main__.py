"""The benchmarks that compare with Alpa's evaluation, by one command.

python -m benchmarks gpt | moe | wresnet      weak scaling, here or on a modelled cluster
python -m benchmarks accuracy                 modelled times beside measured ones
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from autopar.errors import AutoparError
from benchmarks.models.sizes import FAMILIES, closest


def main(argv: Sequence[str] | None = None) -> None:
    """Run one benchmark; a mistake in the options ends with a message and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = (*FAMILIES, "accuracy")
    try:
        if words and not words[0].startswith("-"):
            closest("The benchmark", words[0], names)
        _run(_parser(names, words), words)
    except AutoparError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _parser(names: Sequence[str], words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="|".join(names))
    for name in names:
        command = commands.add_parser(name)
        if name in words[:1]:  # Only what is asked for is imported.
            _module(name).add_arguments(command)
    return parser


def _run(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    arguments = parser.parse_args(words)
    if arguments.benchmark == "accuracy":
        _module("accuracy").main(arguments)
    else:
        _module(arguments.benchmark).main(arguments.benchmark, arguments)


def _module(name: str) -> ModuleType:
    if name == "accuracy":
        from benchmarks import accuracy

        return accuracy
    from benchmarks import weak_scaling

    return weak_scaling


if __name__ == "__main__":
    main()
