"""Write a `shard_map` (or `pmap`) of the user's for whole arrays: as `jax.vmap` over the parts that its mesh makes.

    shard_map(f, in_specs=P("a"), out_specs=P())(x)     x[a·b]
    vmap(f, axis_name="a", out_axes=None)(x′)           x′[a, b] = x, its first dimension in two

A device of the user's mesh is an index along mapped axes, a collective over an axis of that mesh an operation along a
dimension. So the step means what it meant, on any devices, and the plan is free to split the mapped dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.evaluate import bind_bodies, evaluate_jaxpr
from autopar.compiler.jaxprs.primitives import CONSTRAINTS, MANUAL, NESTED

_jnp: Any = jnp


Axes = tuple[tuple[Any, ...], ...]
"""The axes that split each dimension of an array, major to minor."""


@dataclass(frozen=True, kw_only=True)
class _Region:
    """A `shard_map` by the axes that split its arrays."""

    axes: dict[Any, int]
    """The mesh axes over which the body runs, in the order of the mesh, with their sizes."""
    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    body: Any


def mapped_region(eqn: jc.JaxprEqn) -> jc.ClosedJaxpr | None:
    """Return a `shard_map` equation as a function of its whole operands.

    None where a collective of it has no meaning for mapped axes (groups of devices, ragged exchanges), or it constrains
    the layout of its parts.
    """
    region = _read(eqn)
    avals: list[Any] = [v.aval for v in eqn.invars]
    # What no spec names is the same in all parts. Where JAX cannot see that, the first part's is taken, as it is there.
    for known_alike in (True, False):
        try:
            with jc.under_scope_of(eqn):
                return jc.trace(partial(_over_parts, region, known_alike), avals)
        except ValueError:
            continue
        except NotImplementedError:
            return None
    return None


def _read(eqn: jc.JaxprEqn) -> _Region:
    mapped, axes = jp.shard_map_of(eqn), jp.manual_axes(eqn)

    def dims(atom: Any, spec: Any) -> Axes:
        named = [() if names is None else names if isinstance(names, tuple) else (names,) for names in spec]
        return (*named, *[()] * (len(atom.aval.shape) - len(named)))

    return _Region(
        axes={name: axes[name] for name in mapped.mesh.axis_names if name in axes},
        operands=tuple(map(dims, eqn.invars, mapped.in_specs)),
        results=tuple(map(dims, eqn.outvars, mapped.out_specs)),
        body=mapped.body,
    )


def _over_parts(region: _Region, known_alike: bool, *operands: Any) -> list[Any]:
    axes = list(region.axes)

    def run(*parts: Any) -> list[Any]:
        return evaluate_jaxpr(*jc.open_jaxpr(region.body), parts, _in_part)

    for axis in reversed(axes):
        run = jax.vmap(
            run,
            in_axes=[0 if axis in itertools.chain(*dims) else None for dims in region.operands],
            out_axes=[0 if axis in itertools.chain(*dims) or not known_alike else None for dims in region.results],
            axis_name=axis,
            axis_size=region.axes[axis],
        )
    results = run(*[_parts(x, dims, region.axes) for x, dims in zip(operands, region.operands, strict=True)])
    return [_whole(x, dims, region.axes, known_alike) for x, dims in zip(results, region.results, strict=True)]


def _parts(x: Any, dims: Axes, sizes: dict[Any, int]) -> Any:
    """Return the parts of an array: a dimension for each axis that splits it, as the mesh orders them, then its own."""
    shape: list[int] = []
    places: dict[Any, int] = {}
    own: list[int] = []
    for size, names in zip(x.shape, dims, strict=True):
        for name in names:
            places[name] = len(shape)
            shape.append(sizes[name])
        own.append(len(shape))
        shape.append(size // math.prod(sizes[name] for name in names))
    return _jnp.transpose(_jnp.reshape(x, shape), [*(places[name] for name in sizes if name in places), *own])


def _whole(x: Any, dims: Axes, sizes: dict[Any, int], known_alike: bool) -> Any:
    """Return the array that parts make up, the inverse of `_parts`."""
    named = set(itertools.chain(*dims))
    if not known_alike:
        x = x[tuple(slice(None) if name in named else 0 for name in sizes)]
    places = {name: place for place, name in enumerate(name for name in sizes if name in named)}
    own = x.shape[len(places) :]
    order = [place for d, names in enumerate(dims) for place in (*(places[n] for n in names), len(places) + d)]
    shape = [size * math.prod(sizes[name] for name in names) for size, names in zip(own, dims, strict=True)]
    return _jnp.reshape(_jnp.transpose(x, order), shape)


def _in_part(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """The results of an equation of the body, which knows no types of a mesh any more, nor do its literals."""
    values = [value if isinstance(value, jax.Array) else np.asarray(value) for value in values]
    called = jp.called_function(eqn)
    if called is not None:
        with jc.under_scope_of(eqn):
            return evaluate_jaxpr(*jc.open_jaxpr(called), values, _in_part)
    if eqn.primitive.name in NESTED:
        bodies = [jc.open_jaxpr(body) for body in jp.bodies_of(eqn)]
        return bind_bodies(eqn, values, lambda number, inputs: evaluate_jaxpr(*bodies[number], inputs, _in_part))
    if eqn.primitive.name in MANUAL:
        with jc.under_scope_of(eqn):
            return _over_parts(_read(eqn), True, *values)
    if eqn.primitive.name in CONSTRAINTS:
        raise NotImplementedError
    with jc.under_scope_of(eqn):
        plain = jp.without_mesh_types(eqn, values)
    return jc.bind_equation(eqn, values, jp.without_shardings(eqn)) if plain is None else plain
