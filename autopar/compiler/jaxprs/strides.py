"""Model how XLA lays out the arrays of a jaxpr in memory, and find the operands that it has to transpose.

    jaxpr  ->  by equation and operand: the order to which the operand is transposed, None where it is read as it is

A layout is a stride for each dimension, in elements:

    inputs, results of products    row-major: the last dimension is innermost
    elementwise results            the layout of the operand that was computed first
    transpositions, reshapes       views of their operand

These read a transposed copy of an operand:

    a product                  unless batch dimensions are outermost, and contracted and other dimensions each adjacent
    a reshape                  that no strides can express
    an elementwise equation    that meets two layouts: the operand that was computed later is copied
    a kernel of attention      unless the last dimension is innermost and the first outermost
    a convolution              libraries read a kernel (height, width, in, out) as (out, height, width, in), and write
                               the gradients of kernels so
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import (
    ARGUMENT_REDUCTIONS,
    ATTENTION,
    CONSTRAINTS,
    COPIES,
    ELEMENTWISE,
    JOINS,
    LABELS,
    MATRIX_PRODUCTS,
    REDUCTIONS,
    REMAT,
    RESHAPES,
    SLICINGS,
)

Strides = tuple[int, ...]
Layout = tuple[tuple[int, int], ...]
"""The size and the stride, in what is transposed, of each dimension, from the outermost to the innermost."""
_TILE = 128
"""Elements of the innermost dimension in a tile of memory, where compilers lay arrays out in tiles, as for TPUs."""
_LARGE = 8
"""Largest multiple of an operand's size at which it still decides about the layout of a result."""
_KEEPS_LAYOUT = ELEMENTWISE | JOINS | SLICINGS | {"pad", "rev"}
_REDUCTIONS = REDUCTIONS | ARGUMENT_REDUCTIONS
_VIEWS = CONSTRAINTS | COPIES | LABELS
_CONVOLUTION = "conv_general_dilated"


def reads_transposed(eqn: jc.JaxprEqn) -> bool:
    """Return true if a library reads the second operand of an equation in another order of dimensions.

    Gradients of images read a kernel as their convolution does, but for one of a single place and no strides: only its
    channels have an order, which is the one wanted there.
    """
    if eqn.primitive.name != _CONVOLUTION:
        return False
    convolution = jp.convolution_of(eqn)
    made, read, *space = convolution.rhs_spec
    shape = _shape(eqn.invars[1])
    if math.prod(shape[dim] for dim in space) == 1 and not any(by > 1 for by in convolution.lhs_dilation):
        return _space_is_first(convolution.rhs_spec) and made > read
    return _space_is_first(convolution.rhs_spec)


def writes_transposed(eqn: jc.JaxprEqn) -> bool:
    """Return true if a library writes the result of an equation in another order of dimensions."""
    return eqn.primitive.name == _CONVOLUTION and _space_is_first(jp.convolution_of(eqn).out_spec)


def adds_ones(eqn: jc.JaxprEqn) -> bool:
    """Return true if an equation only adds dimensions of size 1 to an array."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    (given, *_), (made,) = (map(_shape, atoms) for atoms in (eqn.invars, eqn.outvars))
    return bool(given) and math.prod(given) == math.prod(made)


def merged_form(eqn: jc.JaxprEqn, number: int, swapped: bool) -> Hashable:
    """Return the form in which a `dot_general` reads an operand; None if it reads it as it is.

    Dimensions of one kind are merged: batch, then free, then contracted ones on the left, contracted, then free ones on
    the right, where the result is not `swapped`, that is transposed. Operands that are merged in their own order have
    the same form.
    """
    dimensions = jp.dot_dimensions(eqn)
    batch, contracted = dimensions.batch[number], dimensions.contracted[number]
    free = [dim for dim in range(len(_shape(eqn.invars[number]))) if dim not in {*batch, *contracted}]
    if max(len(free), len(contracted)) <= 1:
        return None
    order = [*batch, *free, *contracted] if (number == 0) != swapped else [*batch, *contracted, *free]
    return "merged" if order == sorted(order) else "transposed"


def reorders_images(eqn: jc.JaxprEqn, channels_last: bool) -> bool:
    """Return true if a library that has the channels of images innermost, or else space, reads what is in row-major
    order otherwise."""
    if eqn.primitive.name != _CONVOLUTION:
        return False
    images: Any = eqn.invars[0].aval
    return channels_last == (images.ndim - 1 in jp.convolution_of(eqn).lhs_spec[2:])


def turns_tiles(eqn: jc.JaxprEqn, shape: Sequence[int]) -> bool:
    """Return true if a transposition into an array of this shape changes its order in memory, where that is in tiles.

    Arrays whose last dimension fills tiles have it innermost; others have what fills them better there, whatever order
    their dimensions are written in.
    """
    innermost = jp.permutation_of(eqn)[-1]
    return innermost != len(shape) - 1 and shape[-1] % _TILE == 0


def channel_bytes(eqn: jc.JaxprEqn) -> int:
    """Return the bytes of all channels of one place of the images of a convolution.

    That which makes a kernel's gradient has examples for features and channels for examples: it is known by windows,
    the gradients of images, that are larger than what it makes.
    """
    convolution = jp.convolution_of(eqn)
    images: Any = eqn.invars[0].aval
    window, made = (
        math.prod(_shape(v)[dim] for dim in spec[2:])
        for v, spec in ((eqn.invars[1], convolution.rhs_spec), (eqn.outvars[0], convolution.out_spec))
    )
    return images.shape[convolution.lhs_spec[0 if window > made else 1]] * images.dtype.itemsize


def transposed_results(eqn: jc.JaxprEqn) -> list[Any]:
    """Return the results that a library writes in another order of dimensions, and those of what is in a region."""
    if writes_transposed(eqn):
        return list(eqn.outvars)
    if eqn.primitive.name not in REMAT:
        return []
    inside = {v for body in _regions(eqn) for inner in body.eqns for v in transposed_results(inner)}
    return [v for body in _regions(eqn) for v, made in zip(eqn.outvars, body.outvars, strict=True) if made in inside]


def transposed_operands(eqn: jc.JaxprEqn) -> list[Any]:
    """Return the operands that a library reads in another order of dimensions, and those of what is in a region."""
    if reads_transposed(eqn):
        return [eqn.invars[1]]
    if eqn.primitive.name not in REMAT:
        return []
    inside = {v for body in _regions(eqn) for inner in body.eqns for v in transposed_operands(inner)}
    return [v for body in _regions(eqn) for v, read in zip(eqn.invars, body.invars, strict=True) if read in inside]


def _regions(eqn: jc.JaxprEqn) -> list[jc.Jaxpr]:
    return [jc.open_jaxpr(body)[0] for body in jc.subjaxprs(eqn)]


def _space_is_first(spec: Sequence[int]) -> bool:
    """Return true if a dimension of space is the outermost: libraries have examples or channels there."""
    return 0 in spec[2:]


@dataclass(kw_only=True, eq=False)
class Layouts:
    """The layouts of the arrays of a jaxpr."""

    transposed: list[dict[int, Layout]] = field(default_factory=list[dict[int, Layout]])
    """The layout of each transposed copy that an equation reads, by equation, then by place of the operand."""
    rows: list[bool] = field(default_factory=list[bool])
    """True for equations that reduce the innermost dimensions of their operand."""
    strides: dict[Any, Strides] = field(default_factory=dict[Any, Strides])
    """The strides of arrays. Those with the same ones everywhere, and those too small to matter, have none."""
    made: dict[Any, int] = field(default_factory=dict[Any, int])
    """The number of the equation that makes each array, or makes that of which it is a view; -1 for inputs."""

    def note(self, number: int, eqn: jc.JaxprEqn) -> None:
        """Find the layout of an equation's results, and the operands that it has transposed."""
        name = eqn.primitive.name
        self.transposed.append({})
        self.rows.append(False)
        self.made.update((v, number) for v in eqn.outvars)
        if name == "broadcast_in_dim":
            return
        if name in _VIEWS or name == "transpose" or name in RESHAPES:
            self._view(eqn)
            return
        if name in _REDUCTIONS:
            self._reduce(eqn)
            return
        if name in _KEEPS_LAYOUT:
            self._compute(eqn)
            return
        if name in MATRIX_PRODUCTS:
            self._multiply(eqn)
        elif name in ATTENTION:
            self._attend(eqn)
        self.strides.update((v, _compact(_shape(v))) for v in eqn.outvars)

    def transpose_early(self, jaxpr: jc.Jaxpr) -> None:
        """Have the operands of an equation element by element transposed in place of its result, if one reads that."""
        readers: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
        for number, eqn in enumerate(jaxpr.eqns):
            for place, v in enumerate(eqn.invars):
                if not isinstance(v, jc.Literal):
                    readers[v].append((number, place))
        left = {v for v in jaxpr.outvars if not isinstance(v, jc.Literal)}
        for number in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[number]
            if eqn.primitive.name not in ELEMENTWISE or self.transposed[number]:
                continue
            (result,) = eqn.outvars
            if result in left or len(readers[result]) != 1:
                continue
            reader, place = readers[result][0]
            if jaxpr.eqns[reader].primitive.name in ELEMENTWISE and place in self.transposed[reader]:
                layout = self.transposed[reader].pop(place)
                large = [n for n, v in enumerate(eqn.invars) if self._of(v) is not None and _shape(v) == _shape(result)]
                self.transposed[number].update(dict.fromkeys(large, layout))

    def _of(self, atom: Any) -> Strides | None:
        """Return the strides of an operand."""
        if isinstance(atom, jc.Literal):
            return None
        return self.strides.get(atom) if atom in self.made else _compact(_shape(atom))

    def _view(self, eqn: jc.JaxprEqn) -> None:
        (operand, *_), (result,) = eqn.invars, eqn.outvars
        strides = self._of(operand)
        self.made[result] = -1 if isinstance(operand, jc.Literal) else self.made.get(operand, -1)
        if strides is None:
            return
        if eqn.primitive.name == "transpose":
            self.strides[result] = tuple(strides[dim] for dim in jp.permutation_of(eqn))
            return
        if eqn.primitive.name in RESHAPES:
            shape = _shape(operand)
            found = _reshaped(shape, strides, _shape(result))
            if found is None:
                self.transposed[-1][0] = _merged(shape, strides, range(len(shape)))
                found = _compact(_shape(result))
            strides = found
        self.strides[result] = strides

    def _compute(self, eqn: jc.JaxprEqn) -> None:
        """Lay a result out as the operand that was made first, and have those that lie otherwise transposed."""
        rank, size = len(_shape(eqn.outvars[0])), math.prod(_shape(eqn.outvars[0]))
        places = [
            (self.made.get(v, -1), place)
            for place, v in enumerate(eqn.invars)
            if self._of(v) is not None and len(_shape(v)) == rank and math.prod(_shape(v)) * _LARGE >= size
        ]
        if not places:
            return
        of = {place: self._of(eqn.invars[place]) or () for _, place in places}
        _, first = min(places)
        order = _order(of[first])
        self.strides.update((v, _in_order(_shape(v), order)) for v in eqn.outvars)
        for place, strides in of.items():
            shape = _shape(eqn.invars[place])
            moved = [dim for dim in order if shape[dim] > 1]
            if moved != [dim for dim in _order(strides) if shape[dim] > 1]:
                self.transposed[-1][place] = _merged(shape, strides, moved)

    def _reduce(self, eqn: jc.JaxprEqn) -> None:
        operand = eqn.invars[0]
        strides, shape = self._of(operand), _shape(operand)
        if strides is None:
            return
        reduced = set(jp.dimensions_of(eqn))
        inner = [strides[dim] for dim in reduced if shape[dim] > 1]
        outer = [strides[dim] for dim in range(len(shape)) if dim not in reduced and shape[dim] > 1]
        self.rows[-1] = bool(inner) and max(inner) < min(outer, default=math.inf)
        order = [dim for dim in _order(strides) if dim not in reduced]
        kept = [dim for dim in range(len(shape)) if dim not in reduced]
        for v in eqn.outvars:
            self.strides[v] = _in_order(_shape(v), [kept.index(dim) for dim in order])

    def _multiply(self, eqn: jc.JaxprEqn) -> None:
        """Have operands transposed whose batch, contracted or other dimensions are not side by side."""
        dimensions = jp.dot_dimensions(eqn)
        left = self._of(eqn.invars[0])
        pairs = sorted(zip(*dimensions.contracted, strict=True), key=lambda pair: -left[pair[0]] if left else 0)
        for place in (0, 1):
            operand = eqn.invars[place]
            strides, shape = self._of(operand), _shape(operand)
            if strides is None:
                continue
            contracted, batch = [pair[place] for pair in pairs], dimensions.batch[place]
            free = [dim for dim in range(len(shape)) if dim not in {*contracted, *batch}]
            sides = [_merged(shape, strides, dims) for dims in (contracted, free)]
            batches = _merged(shape, strides, batch)
            together = all(len(each) <= 1 for each in (batches, *sides))
            outermost = not batches or all(stride < batches[0][1] for side in sides for _, stride in side)
            if not (together and outermost):
                # Either side may be innermost.
                outer, inner = sorted(sides, key=lambda side: -min((stride for _, stride in side), default=0))
                self.transposed[-1][place] = (*batches, *outer, *inner)

    def _attend(self, eqn: jc.JaxprEqn) -> None:
        """Have operands transposed that do not lie as an input does."""
        for place, operand in enumerate(eqn.invars):
            strides, shape = self._of(operand), _shape(operand)
            if strides is not None and len(layout := _merged(shape, strides, range(len(shape)))) > 1:
                self.transposed[-1][place] = layout


_known: weakref.WeakKeyDictionary[jc.Jaxpr, Layouts] = weakref.WeakKeyDictionary()


def layouts_of(jaxpr: jc.Jaxpr) -> Layouts:
    """Return the layouts of a jaxpr's arrays, found once."""
    if jaxpr not in _known:
        layouts = Layouts()
        for number, eqn in enumerate(jaxpr.eqns):
            layouts.note(number, eqn)
        layouts.transpose_early(jaxpr)
        _known[jaxpr] = layouts
    return _known[jaxpr]


def writings(layout: Layout, itemsize: int, piece_bytes: float) -> float:
    """Return how many bytes memory could take in the time of each byte of a transposed copy that is written there.

    A kernel has tiles of the innermost dimensions of what it reads and of what it writes. Where others lie between
    these, it writes no more at once than the innermost has, in the time of `piece_bytes`.
    """
    *outer, (size, stride) = layout or ((1, 1),)
    if stride == 1 or (outer and outer[-1][1] == 1):
        return 1.0
    return max(1.0, piece_bytes / (size * itemsize))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _compact(shape: Sequence[int]) -> Strides:
    """Return the strides of an array whose last dimension is innermost."""
    return _in_order(shape, range(len(shape)))


def _in_order(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Return the strides of an array without gaps, from the outermost dimension to the innermost."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _order(strides: Strides) -> list[int]:
    """Return the dimensions from the outermost to the innermost."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _merged(shape: Sequence[int], strides: Strides, dims: Sequence[int]) -> Layout:
    """Return size and stride of dimensions, those that lie inside each other without gaps as one."""
    found: list[tuple[int, int]] = []
    for dim in dims:
        size, stride = shape[dim], strides[dim]
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            size *= found.pop()[0]
        found.append((size, stride))
    return tuple(found)


def _reshaped(shape: Sequence[int], strides: Strides, new: Sequence[int]) -> Strides | None:
    """Return the strides of the same elements in another shape; None if no strides express that."""
    parts = list(_merged(shape, strides, range(len(shape))))
    found = [1] * len(new)
    for dim in reversed(range(len(new))):
        size = new[dim]
        if size == 1:
            continue
        if not parts or parts[-1][0] % size:
            return None
        rest, stride = parts.pop()
        found[dim] = stride
        if rest > size:
            parts.append((rest // size, stride * size))
    return tuple(found)
