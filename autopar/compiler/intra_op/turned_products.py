"""Make a product in the order in which its result is read, where that copies no more of its operands.

    transpose(a x b)  ->  b x a

`jax.grad` makes the gradient of a matrix as the product of two activations, and transposes it. Compilers whose kernels
read rows copy the left of these two operands into columns first, whichever it is: the smaller one is best there. Where
that is the right one, and where both are alike, the product is made the other way round and nothing is left to
transpose.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from autopar.compiler.intra_op.operand_order import Order, unsorted_elements
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import NESTED


def turn_products(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """The same program with every product that is only read transposed made that way."""
    jaxpr, consts = jc.open_jaxpr(closed)
    turned = _turned(jaxpr)
    bodies = {
        number: jc.map_subjaxprs(eqn, turn_products)
        for number, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name in NESTED
    }
    if not turned and not bodies:
        return closed
    transposes = {jaxpr.eqns[number].outvars[0] for number in turned}

    def run(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for number, eqn in enumerate(jaxpr.eqns):
            values = [a.val if isinstance(a, jc.Literal) else env[a] for a in eqn.invars]
            if number in turned:
                results = jc.bind_equation(eqn, values[::-1], turned[number])
            elif eqn.primitive.name == "transpose" and eqn.invars[0] in transposes:
                results = values
            else:
                results = jc.bind_equation(eqn, values, bodies.get(number))
            env.update(zip(eqn.outvars, results, strict=True))
        return [a.val if isinstance(a, jc.Literal) else env[a] for a in jaxpr.outvars]

    return jc.trace(run, [v.aval for v in jaxpr.invars])


def _turned(jaxpr: jc.Jaxpr) -> dict[int, dict[str, Any]]:
    """By the number of a product that is to be turned: the parameters with which its operands change places."""
    reads = Counter(a for eqn in jaxpr.eqns for a in jc.operands(eqn))
    reads.update(a for a in jaxpr.outvars if isinstance(a, jc.Var))
    wanted = {eqn.invars[0]: eqn.params["permutation"] for eqn in jaxpr.eqns if eqn.primitive.name == "transpose"}
    found: dict[int, dict[str, Any]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "dot_general" or reads[eqn.outvars[0]] != 1 or eqn.outvars[0] not in wanted:
            continue
        params = _changed_places(eqn)
        if tuple(wanted[eqn.outvars[0]]) == _right_first(eqn) and params is not None and _copies_no_more(eqn, params):
            found[number] = params
    return found


def _right_first(eqn: jc.JaxprEqn) -> Order:
    """The dimensions of a product's result: those of the batch, of the right operand, of the left operand."""
    (left_summed, _), (left_batch, _) = eqn.params["dimension_numbers"]
    left: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    batch = len(left_batch)
    first_right = left.ndim - len(left_summed)
    return (*range(batch), *range(first_right, result.ndim), *range(batch, first_right))


def _changed_places(eqn: jc.JaxprEqn) -> dict[str, Any] | None:
    """The parameters of the same product with its operands in the other order; None if they cannot be told."""
    summed, batch = eqn.params["dimension_numbers"]
    precision: Any = eqn.params["precision"]
    if eqn.params.get("out_sharding") is not None or not (precision is None or type(precision) is tuple):
        return None
    return dict(
        eqn.params,
        dimension_numbers=((summed[1], summed[0]), (batch[1], batch[0])),
        precision=precision and precision[::-1],
    )


def _copies_no_more(eqn: jc.JaxprEqn, turned: dict[str, Any]) -> bool:
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [tuple(aval.shape) for aval in avals]
    after = unsorted_elements(turned["dimension_numbers"], shapes[::-1])
    return after <= unsorted_elements(eqn.params["dimension_numbers"], shapes)
