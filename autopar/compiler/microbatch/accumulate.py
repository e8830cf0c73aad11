"""The primitive that marks where the results of all microbatches become one value.

    accumulate[kind axis num_microbatches]   sum | max | min | and | or | mean | concatenate

Its operand is evaluated for every microbatch; its result is there once, after the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp

from autopar.compiler.jaxprs import compat as jc

accumulate_p: Any = jc.unlowered_primitive(
    "accumulate", "an `accumulate` equation stands between microbatches and has no code of its own"
)


def accumulate(value: Any, *, kind: str, axis: int = 0, num_microbatches: int) -> Any:
    """The completed value, of which each microbatch has `value`."""
    return accumulate_p.bind(value, kind=kind, axis=axis, num_microbatches=num_microbatches)


def accumulation_kind(eqn: jc.JaxprEqn) -> str:
    """Return the way in which an `accumulate` equation combines the microbatches' values."""
    return eqn.params["kind"]


def accumulation_axis(eqn: jc.JaxprEqn) -> int:
    """The axis along which an `accumulate` equation joins slices."""
    return eqn.params["axis"]


def of_microbatches(closed: jc.ClosedJaxpr, num_microbatches: int) -> jc.ClosedJaxpr:
    """Return the program of a microbatch with its values completed by so many; no body of an equation completes any."""
    return jc.with_equations(
        closed,
        [
            eqn.replace(params=eqn.params | {"num_microbatches": num_microbatches})
            if eqn.primitive is accumulate_p
            else eqn
            for eqn in jc.open_jaxpr(closed)[0].eqns
        ],
    )


def combine(kind: str, axis: int, parts: Sequence[Any]) -> Any:
    """Return the parts of all microbatches as one value, which is the meaning of `accumulate`."""
    match kind:
        case "sum":
            return reduce(jnp.add, parts)
        case "mean":
            return reduce(jnp.add, parts) / len(parts)
        case "max":
            return reduce(jnp.maximum, parts)
        case "min":
            return reduce(jnp.minimum, parts)
        case "and":
            return reduce(jnp.logical_and, parts)
        case "or":
            return reduce(jnp.logical_or, parts)
        case _:
            assert kind == "concatenate", kind
            return jnp.concatenate(parts, axis=axis)


def _abstract(aval: Any, *, kind: str, axis: int, num_microbatches: int) -> Any:
    if kind != "concatenate":
        return aval
    shape = [n * num_microbatches if i == axis else n for i, n in enumerate(aval.shape)]
    return aval.update(shape=tuple(shape))


accumulate_p.def_abstract_eval(_abstract)
