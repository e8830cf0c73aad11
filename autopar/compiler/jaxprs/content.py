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
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp

_RELEASED = ("autopar", "jax", "jaxlib", "ml_dtypes", "numpy")
"""Packages whose classes and functions are known by their names."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose texts say all of a value."""
_SHORT = 64
"""Bytes that are written as a text."""
_AT_ONCE = 10_000
"""Pieces that are hashed together."""
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
    return writer.hexdigest()


class _Writer:
    """Writes values into a hash, each by its kind and length first, so that no two sequences read the same."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.pieces: list[str] = []
        """Pieces of text that are not hashed yet: many short ones are hashed at once."""
        self.texts: dict[int, tuple[Any, str]] = {}
        """The text of what many equations share, by identity; what is shared is kept, so that this stays its own."""
        self.types: dict[int, tuple[Any, str]] = {}
        """The text of each type of values, kept likewise."""
        self.places: dict[Hashable, str] = {}
        """The text of each place where equations come from."""

    def hexdigest(self) -> str:
        """Return the hash of all that was written."""
        self.flush()
        return self.digest.hexdigest()

    def flush(self) -> None:
        """Hash what is not hashed yet."""
        self.digest.update("".join(self.pieces).encode())
        self.pieces.clear()

    def put(self, kind: str, text: str = "") -> None:
        """Write one piece."""
        self.pieces.append(f"{kind} {len(text)} {text}")

    def put_bytes(self, kind: str, data: bytes) -> None:
        """Write one piece of data."""
        if len(data) <= _SHORT:
            self.put(kind, data.hex())
            return
        self.put(kind, str(len(data)))
        self.flush()
        self.digest.update(data)

    def write(self, value: Any) -> None:
        """Write the content of a value."""
        if type(value) in _PLAIN:
            self.put(type(value).__name__, repr(value))
        elif type(value) is tuple:
            self.put("builtins.tuple", str(len(value)))
            for each in value:
                self.write(each)
        elif id(value) in self.texts:
            self.put("object", self.texts[id(value)][1])
        else:
            self.write_other(value)

    def write_other(self, value: Any) -> None:
        """Write the content of a value that is neither plain nor a tuple nor was written before."""
        match value:
            case bool() | int() | float() | complex() | str() | bytes() if not isinstance(value, enum.Enum):
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
                self.put_bytes(f"array {value.shape} {value.dtype}", np.asarray(value).tobytes())
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
                self.texts[id(value)] = value, _text(value)
                self.put("object", self.texts[id(value)][1])

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
            self.put("equation", "\n".join((eqn.primitive.name, types, self.place_of(eqn), _effects(eqn))))
            if len(self.pieces) > _AT_ONCE:
                self.flush()
            self.write(tuple(sorted(jp.parameters(eqn).items())))
        self.write_atoms(jaxpr.outvars, numbers)

    def write_atoms(self, atoms: Any, numbers: Mapping[Any, int]) -> None:
        """Write what is read, values by number."""
        literals = [atom for atom in atoms if isinstance(atom, jc.Literal)]
        places = [self.type_of(atom) if isinstance(atom, jc.Literal) else str(numbers[atom]) for atom in atoms]
        self.put("reads", ", ".join(places))
        for literal in literals:
            self.write(literal.val)

    def place_of(self, eqn: jc.JaxprEqn) -> str:
        """Return where an equation comes from as a text."""
        place = jc.place_of(eqn)
        if place not in self.places:
            self.places[place] = jc.provenance(eqn)
        return self.places[place]

    def type_of(self, v: Any) -> str:
        """Return the type of a value as a text."""
        aval = v.aval
        if id(aval) not in self.types:
            sharding = jc.explicit_sharding(v)
            text = f"{aval.str_short()} {getattr(aval, 'weak_type', None)} {'' if sharding is None else sharding}"
            self.types[id(aval)] = aval, text
        return self.types[id(aval)][1]


def _digest_of(value: Any) -> str:
    writer = _Writer()
    writer.write(value)
    return writer.hexdigest()


def _effects(eqn: jc.JaxprEqn) -> str:
    return " ".join(sorted(map(str, eqn.effects))) if eqn.effects else ""


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
