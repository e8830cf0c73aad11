"""In which order a product wants the dimensions of its operands, on compilers whose kernels read rows.

    dot_general             [batch, free, contracted] x [batch, contracted, free]
    conv_general_dilated    [batch, *space, channels] x [*space, channels, channels of the result]

A matrix product also reads the transposed right matrix, as long as each operand is one: with several free or several
contracted dimensions they are reshaped to one, which takes a copy unless they lie in order. A left matrix in columns is
copied by `products_in_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from autopar.compiler.costs.compilers import Compiler
from autopar.compiler.jaxprs import compat as jc

Order = tuple[int, ...]
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Of a product: the summed dimensions of both operands, then those of the batch."""
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


class OperandCopy(NamedTuple):
    """How an operand is copied before it is read."""

    order: Order | None = None
    wide: bool = False
    """An argument of 16 bits is read in 32."""


def copies_of_operands(eqn: jc.JaxprEqn, compiler: Compiler) -> tuple[OperandCopy, ...]:
    """For every operand of an equation, how it is copied."""
    orders = wanted_orders(eqn) if compiler.turns_operands else (None,) * len(eqn.invars)
    product = eqn.primitive.name in _PRODUCTS
    return tuple(
        OperandCopy(order, product and compiler.widens(v.aval)) for order, v in zip(orders, eqn.invars, strict=True)
    )


def wanted_orders(eqn: jc.JaxprEqn) -> tuple[Order | None, ...]:
    """For every operand of an equation, the order in which it must be copied; None where it need not."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [tuple(aval.shape) for aval in avals]
    match eqn.primitive.name:
        case "dot_general":
            return _of_product(eqn.params["dimension_numbers"], shapes)
        case "conv_general_dilated":
            numbers = eqn.params["dimension_numbers"]
            batch, channels, *space = numbers.lhs_spec
            results, inputs, *kernel_space = numbers.rhs_spec
            orders = (batch, *space, channels), (*kernel_space, inputs, results)
            return tuple(_unless_sorted(order, shape) for order, shape in zip(orders, shapes, strict=True))
        case _:
            return (None,) * len(shapes)


def is_in_columns(eqn: jc.JaxprEqn) -> bool:
    """Whether a product adds up along the first dimensions of its operands, of which the left one is a matrix."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    return _in_columns(eqn.params["dimension_numbers"], [tuple(aval.shape) for aval in avals])


def _in_columns(numbers: DimensionNumbers, shapes: Sequence[tuple[int, ...]]) -> bool:
    contracted = tuple(tuple(side) for side in numbers[0])
    return contracted == ((0,), (0,)) and not numbers[1][0] and len(shapes[0]) == 2 and 1 not in shapes[0]


def unsorted_elements(numbers: DimensionNumbers, shapes: Sequence[tuple[int, ...]]) -> int:
    """How many elements of a product's operands do not lie as a product of matrices reads them, row by row."""
    orders = _product_orders(numbers, shapes)
    return sum(
        math.prod(shape)
        for order, shape in zip(orders, shapes, strict=True)
        if _unless_sorted(order, shape) is not None
    )


def _product_orders(numbers: DimensionNumbers, shapes: Sequence[tuple[int, ...]]) -> tuple[Order, Order]:
    """[batch, free, contracted] and [batch, contracted, free]."""
    contracted, batch = numbers
    free = [
        [d for d in range(len(shape)) if d not in contracted[side] and d not in batch[side]]
        for side, shape in enumerate(shapes)
    ]
    return (*batch[0], *free[0], *contracted[0]), (*batch[1], *contracted[1], *free[1])


def _of_product(numbers: DimensionNumbers, shapes: Sequence[tuple[int, ...]]) -> tuple[Order | None, ...]:
    contracted, batch = numbers
    orders = _product_orders(numbers, shapes)
    matrices = [
        len(orders[side]) - len(contracted[side]) - len(batch[side]) <= 1
        and len(contracted[side]) <= 1
        and sorted(batch[side]) == list(range(len(batch[side])))
        for side in (0, 1)
    ]
    left = orders[0] if _in_columns(numbers, shapes) else None
    return tuple(
        unless if matrices[side] else _unless_sorted(order, shapes[side])
        for side, (order, unless) in enumerate(zip(orders, (left, None), strict=True))
    )


def _unless_sorted(order: Order, shape: tuple[int, ...]) -> Order | None:
    """The order, unless the dimensions longer than one are in it already."""
    long = [dim for dim in order if shape[dim] > 1]
    return None if long == sorted(long) else order
