"""Hash values by their content: equal in every process for values that mean the same, a traced program among them.

    content_digest(program, options, ...)  ->  64 hexadecimal digits, or None

Numbers, texts, arrays, collections and dataclasses are their contents; a program is its equations, with their
parameters, types, name stacks and source lines, and its values by number. A function of JAX's or ours is its name and
what it closes over, as long as the releases are hashed with it. Whatever else a value may be, such as a function of
the user's, has no content that can be read, and then there is no digest: better none than one that two values share.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp

_RELEASED = ("autopar", "jax", "jaxlib", "numpy")
"""Packages whose classes and functions are known by their names."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class _NoContent(Exception):
    """A value is nothing but itself."""


def content_digest(*values: Any) -> str | None:
    """Return a hash of the contents of values; None if one of them has none that can be read."""
    writer = _Writer()
    try:
        writer.write(values)
    except _NoContent:
        return None
    return writer.digest.hexdigest()


class _Writer:
    """Writes values into a hash, each by its kind and length first, so that no two sequences read the same."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.texts: dict[int, tuple[Any, str]] = {}
        """By identity, the text of what many equations share, kept with it so that the identity stays its own."""

    def put(self, kind: str, data: str | bytes = b"") -> None:
        """Write one piece."""
        data = data.encode() if isinstance(data, str) else data
        self.digest.update(f"{kind} {len(data)} ".encode())
        self.digest.update(data)

    def write(self, value: Any) -> None:
        """Write the content of a value."""
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() if not isinstance(value, enum.Enum):
                self.put(type(value).__name__, repr(value))
            case jc.ClosedJaxpr() | jc.Jaxpr():
                self.write_program(value)
            case type():
                self.put("class", _name(value))
            case tuple() | list():
                self.put(_name(type(value)), str(len(value)))  # pyright: ignore[reportUnknownArgumentType]
                for each in value:  # pyright: ignore[reportUnknownVariableType]
                    self.write(each)
            case set() | frozenset():
                self.write(sorted(map(_digest_of, value)))  # pyright: ignore[reportUnknownArgumentType]
            case Mapping():
                self.put("mapping", str(len(value)))  # pyright: ignore[reportUnknownArgumentType]
                for key, each in value.items():  # pyright: ignore[reportUnknownVariableType]
                    self.write(key)
                    self.write(each)
            case np.ndarray() | np.generic():
                if value.dtype.hasobject:
                    raise _NoContent
                self.put(f"array {value.shape} {value.dtype}", np.asarray(value).tobytes())
            case _ if hasattr(value, "__array__") and hasattr(value, "dtype"):
                self.write_array(value)
            case functools.partial():
                self.write((value.func, value.args, value.keywords))
            case enum.Enum():
                self.put(_name(type(value)), value.name)
            case FunctionType():
                self.put("function", _name(value))
                self.write(tuple(cell.cell_contents for cell in value.__closure__ or ()))
            case _ if is_dataclass(value):
                self.put(_name(type(value)))
                self.write(tuple(getattr(value, each.name) for each in fields(value)))
            case _:
                self.put("object", _text(value))

    def write_array(self, value: Any) -> None:
        """Write an array of JAX's that a program holds."""
        here = getattr(value, "is_fully_addressable", True)
        if not here or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise _NoContent
        self.write(np.asarray(value))

    def write_program(self, program: jc.ClosedJaxpr | jc.Jaxpr) -> None:
        """Write the equations of a program, with its values by number."""
        jaxpr, consts = jc.open_jaxpr(program)
        numbers = {v: number for number, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
        self.put("program", f"{len(jaxpr.constvars)} {len(jaxpr.invars)} {len(jaxpr.eqns)} {len(jaxpr.outvars)}")
        self.put("types", " ".join(self.type_of(v) for v in numbers))
        self.write(tuple(consts))
        for eqn in jaxpr.eqns:
            self.write_atoms(eqn.invars, numbers)
            for v in eqn.outvars:
                numbers[v] = len(numbers)
            types = " ".join(map(self.type_of, eqn.outvars))
            self.put("equation", "\n".join((eqn.primitive.name, types, jc.provenance(eqn), _effects(eqn))))
            self.write(tuple(sorted(jp.parameters(eqn).items())))
        self.write_atoms(jaxpr.outvars, numbers)

    def write_atoms(self, atoms: Any, numbers: Mapping[Any, int]) -> None:
        """Write what is read, values by number."""
        literals = [atom for atom in atoms if isinstance(atom, jc.Literal)]
        places = (f"{atom.aval}" if isinstance(atom, jc.Literal) else str(numbers[atom]) for atom in atoms)
        self.put("reads", " ".join(places))
        for literal in literals:
            self.write(literal.val)

    def type_of(self, v: Any) -> str:
        """Return the type of a value as a text."""
        aval = v.aval
        if id(aval) not in self.texts:
            sharding = jc.explicit_sharding(v)
            text = f"{aval.str_short()} {getattr(aval, 'weak_type', None)} {'' if sharding is None else sharding}"
            self.texts[id(aval)] = aval, text
        return self.texts[id(aval)][1]


def _digest_of(value: Any) -> str:
    writer = _Writer()
    writer.write(value)
    return writer.digest.hexdigest()


def _effects(eqn: jc.JaxprEqn) -> str:
    return " ".join(sorted(map(str, eqn.effects)))


def _is_released(module: str) -> bool:
    return module.partition(".")[0] in (*_RELEASED, "builtins")


def _name(kind: type | Callable[..., Any]) -> str:
    """Return the name of a released class or function, which says all of it but what a function closes over."""
    if not _is_released(kind.__module__) or "<lambda>" in kind.__qualname__:
        raise _NoContent
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(value: Any) -> str:
    """Return a text that says all of a value of a released class."""
    text = f"{_name(type(value))} {value!r}"
    if _ADDRESS.search(text) or type(value).__repr__ is object.__repr__:
        raise _NoContent
    return text
