"""Find the arrays that compilers make beside those of a program: copies, and zeros.

Libraries of GPUs compute convolutions in another order of dimensions than programs:

    kernel (height, width, in, out)    ->  a copy (out, height, width, in), read by the convolutions in its place
    gradient (height, width, in, out)  <-  a library writes (out, height, width, in), and the update transposes it

An update that transposes what it reads cannot write over the state that it reads beside it: the compiler has copied
that to other memory since the program began. By then the state's own place is free, and the copy of an equal array that
is updated earlier stands there: the one that is updated last of all of a size takes memory of its own.

Compilers that insert copies before they order a program (those for TPUs) do not make new state in the place of the old
one if it is gathered of updated parts, or updated in another order of dimensions: that of a sum of gradients which the
program transposes, as no product can write through a sum what is transposed behind it. Such state is copied to its
place when all else is done, what was made last first: it may lie in the place of what was made before it. It is updated
then, too: some of it is earlier, but arrays in such places leave gaps, and need about as much.

The zeros that gradients of windows are added to are those that a linear rectifier of the same shape compares with: the
kernel that rectifies writes them, and they are there until the gradients are.

Others are not there at all: a sum of an array and of what is scattered onto zeros is that scattered onto the array, as
the gradient of an embedding that is the last product's kernel, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.memory.liveness import Key, Op

ADDED_TO_ZEROS = "select_and_scatter_add"
"""The primitive that adds gradients of windows to zeros of the shape of its second operand."""


def rectifies(eqn: jc.JaxprEqn) -> bool:
    """Return true if an equation takes zero where its operand is less."""
    return eqn.primitive.name == "max" and any(map(_is_zero, eqn.invars))


@dataclass(frozen=True, kw_only=True)
class TransposingUpdate:
    """The kernel that writes over an array and reads, beside it, something transposed."""

    reads: frozenset[int]
    """The fused ops in it that read the array."""
    number: int
    """The first op in it that reads something transposed: kernels with the same one are one kernel."""


def transposing_updates(
    ops: Sequence[Op], roots: Mapping[Key, Key], replaced: Iterable[tuple[Key, Key]], transposed: Collection[Key]
) -> dict[Key, TransposingUpdate]:
    """Return the kernels that transpose what they read, by array that they write over.

    `roots` are the arrays of views and forms, `replaced` results with the arrays whose places they take.
    """
    makers = {key: number for number, op in enumerate(ops) for key in op.results}
    found: dict[Key, TransposingUpdate] = {}
    for result, old in replaced if transposed else ():
        reads: dict[int, set[Key]] = {}
        left = [result]
        while left:
            key = left.pop()
            number = makers.get(roots.get(key, key))
            if number is not None and number not in reads and ops[number].kind == "fused":
                reads[number] = {roots.get(each, each) for each in ops[number].reads}
                left += reads[number]
        transposing = [number for number, arrays in reads.items() if not arrays.isdisjoint(transposed)]
        reading = frozenset(number for number, arrays in reads.items() if old in arrays)
        if transposing and reading:
            found[old] = TransposingUpdate(reads=reading, number=min(transposing))
    return found


def made_elsewhere(
    ops: Sequence[Op], roots: Mapping[Key, Key], replaced: Iterable[tuple[Key, Key]], turned: Collection[Key]
) -> list[tuple[Key, int]]:
    """Return the results that are not made in the places of the arrays that they replace, with the ops that make them.

    They are in the order in which they are copied there. `turned` is what the program transposes.
    """
    makers = {key: number for number, op in enumerate(ops) for key in op.results}
    origins = {roots.get(key, key) for key in turned}
    sums = {key: makers[key] for key in origins if key in makers and ops[makers[key]].collective}
    pairs = [*replaced]
    transposing = transposing_updates(ops, roots, pairs, sums)
    found: list[tuple[int, Key, int]] = []
    for result, old in pairs:
        number = makers.get(roots.get(result, result))
        if number is not None and old in transposing:
            read = {roots.get(key, key) for key in ops[transposing[old].number].reads}
            found.append((max(sums[key] for key in read.intersection(sums)), result, number))
        elif number is not None and ops[number].collective == "all-gather":
            found.append((number, result, number))
    return [(result, number) for _, result, number in sorted(found, key=lambda each: -each[0])]


def scattered_onto(ops: Sequence[Op], eqns: Sequence[jc.JaxprEqn | None]) -> list[tuple[int, int, tuple[Key, ...]]]:
    """Return the ops that scatter onto zeros, with the one that adds each to other arrays alone, and these arrays.

    `eqns` are those of the ops that evaluate one.
    """
    names = [eqn.primitive.name if eqn is not None else "" for eqn in eqns]
    scattering = [number for number, name in enumerate(names) if name == "scatter-add" and ops[number].results]
    if not scattering:
        return []
    zeros: set[Key] = set()
    readers: dict[Key, list[int]] = {}
    roots: dict[Key, Key] = {}
    for number, (op, eqn) in enumerate(zip(ops, eqns, strict=True)):
        if op.kind == "form":
            roots[op.results[0]] = roots.get(op.reads[0], op.reads[0])
        for key in op.reads if op.kind != "form" else ():
            readers.setdefault(roots.get(key, key), []).append(number)
        made = op.kind == "constant" and eqn is not None and _is_zero(eqn.invars[0])
        if made or (op.kind in ("fused", "view", "form") and op.reads and zeros.issuperset(op.reads)):
            zeros.update(op.results)
    found: list[tuple[int, int, tuple[Key, ...]]] = []
    for number in scattering:
        (result,), reading = ops[number].results, readers.get(ops[number].results[0], ())
        if ops[number].reads[0] in zeros and len(reading) == 1 and names[reading[0]] in ("add", "add_any"):
            others = tuple(key for key in ops[reading[0]].reads if roots.get(key, key) != result)
            found.append((number, reading[0], others))
    return [each for each in found if each[-1]]


def _is_zero(value: object) -> bool:
    return isinstance(value, jc.Literal) and not np.any(value.val)


def without_places(updated: Mapping[Key, int], nbytes: Mapping[Key, float]) -> list[Key]:
    """Return the arrays whose copies take memory of their own; `updated` is when each is, in one kernel if at once."""
    found: list[Key] = []
    places: dict[float, list[int]] = {}
    for key in sorted(updated, key=lambda key: -updated[key]):
        free = places.setdefault(nbytes[key], [])
        later = next((time for time in free if time > updated[key]), None)
        if later is None:
            found.append(key)
        else:
            free.remove(later)
        free.append(updated[key])
    return found
