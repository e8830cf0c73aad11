"""Find what a compiler copies because libraries compute convolutions in another order of dimensions than programs.

    kernel (height, width, in, out)    ->  a copy (out, height, width, in), read by the convolutions in its place
    gradient (height, width, in, out)  <-  a library writes (out, height, width, in), and the update transposes it

An update that transposes what it reads cannot write over the state that it reads beside it: the compiler has copied
that to other memory since the program began. By then the state's own place is free, and the copy of an equal array that
is updated earlier stands there: the one that is updated last of all of a size takes memory of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.memory.liveness import Key, Op

_CONVOLUTION = "conv_general_dilated"


def reads_transposed(eqn: jc.JaxprEqn) -> bool:
    """Return true if a library reads the second operand of an equation in another order of dimensions."""
    return eqn.primitive.name == _CONVOLUTION and _space_is_first(jp.convolution_of(eqn).rhs_spec)


def writes_transposed(eqn: jc.JaxprEqn) -> bool:
    """Return true if a library writes the result of an equation in another order of dimensions."""
    return eqn.primitive.name == _CONVOLUTION and _space_is_first(jp.convolution_of(eqn).out_spec)


def _space_is_first(spec: Sequence[int]) -> bool:
    """Return true if a dimension of space is the outermost: libraries have examples or channels there."""
    return 0 in spec[2:]


def transposing_updates(
    ops: Sequence[Op], replaced: Sequence[tuple[Key, Key]], transposed: Collection[Key]
) -> dict[Key, frozenset[int]]:
    """Return, by array that is replaced, the fused ops that read it and something transposed for what replaces it.

    `replaced` are results with the arrays whose places they take.
    """
    makers = {key: number for number, op in enumerate(ops) for key in op.results}
    found: dict[Key, frozenset[int]] = {}
    for result, old in replaced if transposed else ():
        numbers, reads, left = set[int](), set[Key](), [result]
        while left:
            number = makers.get(left.pop())
            if number is not None and number not in numbers and ops[number].kind in ("fused", "view", "form"):
                numbers.add(number)
                reads.update(ops[number].reads)
                left += ops[number].reads
        if old in reads and not reads.isdisjoint(transposed):
            found[old] = frozenset(numbers)
    return found


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
