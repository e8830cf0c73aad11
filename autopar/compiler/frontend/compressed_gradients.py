"""Let users have gradients sent in fewer bits: `grads = autopar.compress_gradients(grads)`.

    g  ->  compress_gradient            ->  g in 16 bits  ->  convert_element_type  ->  g in its own type
    g  ->  compress_gradient_in_blocks  ->  g in its own type, rounded to 8 bits with a scale for every block

The first equation of each line may be done on summands. Of 16 bits the search finds the all-reduce of half the bytes
behind it. 8 bits are too few to add up in: there the equation is the sum, of codes that were sent (`spmd`'s
`compressed_sums`). Nothing else rounds summands, and sums over microbatches are made before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from autopar.checks import check_choice
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import COMPRESSED_SUM
from autopar.compiler.sharding.scaled_blocks import CODE, rounded
from autopar.errors import InvalidArgument

_TYPES = ("bfloat16", "float16", CODE)
_compress: Any = jc.calling_primitive("compress_gradient")
_compress_in_blocks: Any = jc.calling_primitive(COMPRESSED_SUM)
jc.leave_lines_to_callers(__file__)


def compress_gradients(grads: Any, dtype: str = "bfloat16") -> Any:
    """Return gradients rounded to fewer bits, in their own types, so that a plan may send them so.

    Call it on the gradients (any pytree of floating arrays) before the optimizer's update; moments, master copies and
    the update keep their types. By `dtype`, of float32:

    - "bfloat16", "float16": half of the bytes. Devices round their summands, and add them up in that type.
    - "float8_e4m3fn": about a quarter. Every 128 numbers, at most, share a scale, their largest magnitude / 448. Each
      device sends the codes and scales of its summands to the one that adds them up, in float32, and that one those of
      the sum to all, unless each goes on with a part. Arrays whose sums take less time in their own type, as small ones
      and those that fast links carry, are summed so, and rounded then.

    Nothing is compressed that is not handed to it: losses and statistics stay exact. Arrays that have no more bits than
    `dtype` stay as they are. The planned collectives show the type.

        grads = jax.grad(loss)(params, batch)
        updates, opt_state = optimizer.update(autopar.compress_gradients(grads), opt_state, params)

    Raises `InvalidArgument` for an array that is no floating one, which must stay exact, and, when the step is planned,
    for one that the backward pass did not make.
    """
    check_choice("dtype", dtype, _TYPES)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _compressed(leaf_name("grads", path), leaf, dtype), grads
    )


def _compressed(name: str, leaf: Any, dtype: str) -> Any:
    found = jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
    if not jnp.issubdtype(found, jnp.floating):
        raise InvalidArgument(
            f"compress_gradients was given {name} of type {found}, which {dtype} does not hold exactly. Give it the "
            "gradients of floating parameters only, and leave integers, keys and complex numbers out."
        )
    if found.itemsize <= jnp.dtype(dtype).itemsize:
        return leaf
    if dtype == CODE:
        return _compress_in_blocks.bind(leaf, function=_in_blocks)[0]
    (short,) = _compress.bind(leaf, function=_rounding_to(dtype))
    return short.astype(found)


@functools.cache
def _rounding_to(dtype: str) -> Callable[..., list[Any]]:
    # One object for all calls alike, so that they are equal equations.
    return lambda leaf: [jax.lax.convert_element_type(leaf, jnp.dtype(dtype))]


def _in_blocks(leaf: Any) -> list[Any]:
    return [rounded(leaf)]


def check_compressed(closed: jc.ClosedJaxpr) -> None:
    """Raise `InvalidArgument` for something compressed that was not made by a backward pass."""
    jaxpr, _ = jc.open_jaxpr(closed)
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive in (_compress, _compress_in_blocks) and not _is_gradient(eqn, producers):
            aval: Any = eqn.invars[0].aval
            line = Path(jc.source_line(eqn)).name
            raise InvalidArgument(
                f"compress_gradients was given {aval.str_short()}{f' at {line}' if line else ''}, which no backward "
                "pass made: what is no gradient, such as a loss or the statistics of batch norm, must stay exact. Give "
                "it what jax.grad returns."
            )


def _is_gradient(eqn: jc.JaxprEqn, producers: dict[jc.Var, jc.JaxprEqn]) -> bool:
    """Return whether the nearest equations of a forward or backward pass before this one are of a backward pass."""
    waiting, seen = list(jc.operands(eqn)), set[jc.Var]()
    while waiting:
        v = waiting.pop()
        made = producers.get(v)
        if v in seen or made is None:
            continue
        seen.add(v)
        phase = jc.ad_phase(made)
        if phase == "backward":
            return True
        if phase is None:
            waiting += jc.operands(made)
    return False


def rounding_of_compressed(closed: jc.ClosedJaxpr) -> float:
    """Return the relative rounding error of the type in which gradients are sent; 0 where none is compressed."""
    every: list[Any] = list(jc.all_equations(closed))
    types = [eqn.outvars[0].aval.dtype for eqn in every if eqn.primitive is _compress]
    types += [CODE for eqn in every if eqn.primitive is _compress_in_blocks]
    return max((float(jnp.finfo(dtype).eps) for dtype in types), default=0.0)
