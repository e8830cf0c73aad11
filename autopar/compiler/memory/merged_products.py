"""Find products of one array that the compiler merges, and until when it keeps what they make together.

    queries = x @ a, keys = x @ b, values = x @ c   ->   x @ [a b c], of which each is a part

A product in batches reads an operand with the batch outermost: a left one goes on with what it is not contracted over,
a right one with what it is. Parts are copied into that order where they are made, for all that read them so. One that
is wanted in a second order is copied into that just before it is read, of the merged product, which is kept for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.memory.liveness import Key, Op

_MERGED_BYTES = 64 * 2**20
"""Most bytes of operands and result of products that are merged: XLA's `xla_gpu_dot_merger_threshold_mb`."""


class KeptProduct(NamedTuple):
    """A merged product that is kept for a part which is wanted in a second order."""

    others: tuple[Key, ...]
    """The other parts."""
    maker: int
    """The last of the products that are merged."""
    reader: int
    """The last op that reads a copy of the part in its second order."""


def kept_products(
    ops: Sequence[Op],
    eqns: Sequence[jc.JaxprEqn | None],
    nbytes: Mapping[Key, float],
    shape_of: Callable[[Key], tuple[int, ...]],
) -> list[KeptProduct]:
    """Return the merged products that are kept; `eqns` are those of the ops that evaluate one."""
    ops = _without_forms(ops)
    orders: dict[Key, dict[tuple[int, ...], int]] = {}
    for number, (op, eqn) in enumerate(zip(ops, eqns, strict=True)):
        if eqn is not None and _is_product(eqn) and len(op.reads) == 2 and jp.dot_dimensions(eqn).batch[0]:
            for place, key in enumerate(op.reads):
                orders.setdefault(key, {})[_order(eqn, place, shape_of(key))] = number
    found: list[KeptProduct] = []
    for members in _merged(ops, eqns, nbytes):
        parts = [ops[number].results[0] for number in members]
        if not all(part in orders and all(orders[part]) for part in parts):
            continue
        second = [(max(orders[part].values()), part) for part in parts if len(orders[part]) > 1]
        if second:
            reader, part = max(second, key=lambda each: each[0])
            others = tuple(other for other in parts if other != part)
            found.append(KeptProduct(others=others, maker=members[-1], reader=reader))
    return found


def _without_forms(ops: Sequence[Op]) -> list[Op]:
    """Return the ops as they read arrays, not forms of these."""
    roots: dict[Key, Key] = {}
    for op in ops:
        if op.kind == "form":
            roots[op.results[0]] = roots.get(op.reads[0], op.reads[0])
    return [op._replace(reads=tuple(roots.get(key, key) for key in op.reads)) for op in ops]


def _is_product(eqn: jc.JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general"


def _order(eqn: jc.JaxprEqn, place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions, those of size 1 aside, of an operand in the order in which a product reads it.

    It reads it as it lies, in no order of its own, if the dimensions of the batch are side by side.
    """
    dimensions = jp.dot_dimensions(eqn)
    batch, contracted = dimensions.batch[place], dimensions.contracted[place]
    free = [dim for dim in range(len(shape)) if dim not in {*batch, *contracted}]
    sides = (*free, *contracted) if place == 0 else (*contracted, *free)
    places = [dim for dim in range(len(shape)) if shape[dim] > 1]
    outer = [places.index(dim) for dim in batch if shape[dim] > 1]
    if all(after == before + 1 for before, after in itertools.pairwise(outer)):
        return ()
    return tuple(dim for dim in (*batch, *sides) if shape[dim] > 1)


def _merged(ops: Sequence[Op], eqns: Sequence[jc.JaxprEqn | None], nbytes: Mapping[Key, float]) -> list[list[int]]:
    """Return the products that are merged: those of one left operand, contracted alike and in no batches."""
    groups: dict[Hashable, list[int]] = {}
    for number, (op, eqn) in enumerate(zip(ops, eqns, strict=True)):
        if eqn is None or not _is_product(eqn) or len(op.reads) != 2 or len(op.results) != 1:
            continue
        dimensions = jp.dot_dimensions(eqn)
        if not dimensions.batch[0] and sum(nbytes[key] for key in (*op.reads, *op.results)) <= _MERGED_BYTES:
            groups.setdefault((op.reads[0], dimensions.contracted), []).append(number)
    return [members for members in groups.values() if len(members) > 1]
