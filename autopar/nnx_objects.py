"""Flax NNX objects as arguments: modules, optimizers, metrics and random streams, which a step changes in place.

    objects   --split-->            arrays and a structure                       outside of the trace
    arrays    --merge-->            copies of the objects                        inside, where the step changes them
    copies    --split_changed-->    arrays and the structure that they have now  inside
    results   --update-->           the objects, changed as their copies were    outside

All objects of a call are one graph, so references that they share stay shared, between arguments too, and an object
that the step returns is the caller's own. This is the protocol that `flax.nnx.update_context` describes. Only a program
that has imported flax.nnx can have such objects, so nothing here imports it before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax


@jax.tree_util.register_static
@dataclass(frozen=True)
class ObjectPlace:
    """The place of object `number` of a call in its arguments or results."""

    number: int


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["structure"])
@dataclass(frozen=True)
class ObjectGraph:
    """Objects as a pytree of arrays; `structure` is all else, and can be hashed and compared."""

    arrays: list[Any]
    structure: Any


def is_object(value: Any) -> bool:
    """Return whether `value` is an NNX object: a module or the like, no single variable."""
    nnx = _nnx()
    return nnx is not None and nnx.graphlib.is_graph_node(value) and not isinstance(value, nnx.Variable)


def is_variable(value: Any) -> bool:
    """Return whether `value` is an NNX variable."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Variable)


def may_hold_objects() -> bool:
    """Return whether any value can be an NNX object."""
    return _nnx() is not None


def take_objects(tree: Any, first: int = 0) -> tuple[Any, list[Any]]:
    """Return the tree with places for its objects, numbered from `first`, and the objects."""
    objects: list[Any] = []

    def take(value: Any) -> Any:
        if not is_object(value):
            return value
        objects.append(value)
        return ObjectPlace(first + len(objects) - 1)

    return jax.tree.map(take, tree, is_leaf=is_object), objects


def put_objects(tree: Any, objects: Sequence[Any]) -> Any:
    """Return the tree with the objects at their places."""
    is_place = partial(_is_instance, ObjectPlace)
    return jax.tree.map(lambda x: objects[x.number] if is_place(x) else x, tree, is_leaf=is_place)


def split(objects: Sequence[Any]) -> tuple[ObjectGraph, Any]:
    """Return the objects as arrays, and the references by which `update` finds them again."""
    nnx = _nnx()
    references = nnx.graphlib.RefMap()
    structure, arrays = _flatten(list(objects), ref_index=references)
    return ObjectGraph(arrays, structure), references


def merge(graph: ObjectGraph) -> tuple[list[Any], Any]:
    """Return new objects that hold the arrays, and the references by which `split_changed` knows them."""
    nnx = _nnx()
    index = nnx.graphlib.IndexMap()
    objects = nnx.unflatten(graph.structure, list(graph.arrays), index_ref=index)
    return objects, nnx.graphlib.RefMap.from_indexmap(index)


def split_changed(objects: Sequence[Any], merged: Any) -> ObjectGraph:
    """Return what `merge` made, and what the step made beside it, as arrays."""
    structure, arrays = _flatten(list(objects), ref_index=_nnx().graphlib.RefMap(), ref_outer_index=merged)
    return ObjectGraph(arrays, structure)


def update(graph: ObjectGraph, references: Any) -> list[Any]:
    """Change the objects of a call as their copies were changed; return them, and after them those that are new."""
    nnx = _nnx()
    known = nnx.graphlib.IndexMap.from_refmap(references)
    return nnx.unflatten(
        graph.structure, list(graph.arrays), index_ref=nnx.graphlib.IndexMap(), outer_index_outer_ref=known
    )


def array_paths(graph: ObjectGraph) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield of every array, as `jax.tree.leaves` orders them: the number of its object, and its path in there."""
    objects, _ = merge(graph)
    _, state = _flatten(objects, with_paths=True, ref_index=_nnx().graphlib.RefMap())
    for (number, *path), value in zip(state.paths, graph.arrays, strict=True):
        for inner, _ in jax.tree_util.tree_leaves_with_path(value):
            yield number, (*path, *inner)


def jitted_function(fun: Callable[..., Any]) -> Any:
    """Return the `jax.jit` inside of what `flax.nnx.jit` returned; None for anything else."""
    return getattr(fun, "jitted_fn", None) if type(fun).__module__.startswith("flax.nnx.") else None


def _is_instance(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def _flatten(objects: list[Any], *, with_paths: bool = False, **references: Any) -> tuple[Any, Any]:
    return _nnx().flatten(objects, with_paths=with_paths, **_as_graph(), **references)


@cache
def _as_graph() -> dict[str, bool]:
    """Return the option by which references are kept, whatever the user's default; older releases know nothing else."""
    return {"graph": True} if "graph" in inspect.signature(_nnx().flatten).parameters else {}


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")
