"""Read plans, clusters and machines from JSON: exact keys, finite numbers, and errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from autopar.checks import is_text
from autopar.errors import AutoparError, InvalidArgument


def check_figure(what: str, value: object, *, zero: bool = False) -> None:
    """Raise `InvalidArgument` unless `value` is a finite positive number, or zero where that is allowed."""
    number = _number(value)
    if not (number > 0 or (zero and number == 0)) or math.isinf(number):
        raise InvalidArgument(
            f"{what} is {value!r}; it must be finite and {'not negative' if zero else 'positive'}. Measure it "
            "again, or correct the file."
        )


def _number(value: object) -> float:
    """Return the value as a float: NaN for what is no number, infinity for one that is too large."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def text_of(what: str, path: str | Path) -> str:
    """Return the text of a file; raise `InvalidArgument` if there is none, or it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as reason:
        raise InvalidArgument(f"{what} {str(path)!r} cannot be read: {reason.strerror}. Give a file.") from None
    except UnicodeDecodeError as reason:
        raise InvalidArgument(
            f"{what} {str(path)!r} holds the byte {reason.object[reason.start]:#x}, but must be text in UTF-8. Load a "
            "file that `save` wrote."
        ) from None


def json_of(what: str, text: str, *, error: type[AutoparError] = InvalidArgument) -> Any:
    """Return the value of a JSON text; raise `error` if it is none."""
    if not is_text(text):
        raise error(f"{what} is {text!r}, it must be JSON as a string. Give the text of a file that `save` wrote.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{what} is not JSON: {reason}. Load a file that `save` wrote.") from None


def fields_of(
    what: str, raw: Any, keys: Iterable[str], *, error: type[AutoparError] = InvalidArgument
) -> dict[str, Any]:
    """Return a JSON object as a dictionary; unless it has exactly these keys, raise `error`, which names the others."""
    if not isinstance(raw, dict):
        raise error(f"{what} is {raw!r}, it must be a JSON object. Load a file that `save` wrote.")
    fields, keys = dict(cast(dict[str, Any], raw)), list(keys)
    missing, unknown = [key for key in keys if key not in fields], sorted(set(fields) - set(keys))
    if missing or unknown:
        raise error(
            f"{what} lacks the keys {missing} and has the unknown keys {unknown}. It must have exactly the keys "
            f"{keys}: correct the file, or save it again."
        )
    return fields
