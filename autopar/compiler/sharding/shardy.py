"""Ask Shardy for the sharding rules of StableHLO operations.

    jitted functions  ->  their operations, each with the factors of its operands and results

The pass `sdy-populate-op-sharding-rules` of the stock jaxlib wheel writes a rule to every operation that it knows.
JAX promises nothing of this: only this file knows how the pass is called and what it prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from autopar.compiler.sharding.rule import Dims, FactorRule, Function, Operation

_sdy: Any = sdy
_PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
# Elementwise operations that a lowering may leave to XLA, and that Shardy has no rule for.
_ELEMENTWISE = frozenset(
    f"chlo.{name}"
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "conj", "cosh", "digamma", "erf", "erf_inv",
        "erfc", "is_inf", "is_neg_inf", "is_pos_inf", "lgamma", "next_after", "polygamma", "sinh", "square", "tan",
        "zeta",
    )
)  # fmt: skip
# Where Shardy's rule says what can be split with communication: local parts alone are not enough.
_POSITIONAL = frozenset(
    f"stablehlo.{name}"
    for name in (
        "convolution", "custom_call", "dynamic_update_slice", "gather", "rng", "rng_bit_generator", "scatter",
        "select_and_scatter",
    )
)  # fmt: skip


def lowered_functions(
    functions: Sequence[Callable[..., Any]], avals: Sequence[Sequence[Any]]
) -> tuple[list[str], dict[str, Function]]:
    """Lower the functions in one module: their names in it, and every function of the module by name."""
    names = [f"equation_{i}" for i in range(len(functions))]
    jitted = [_named(function, name) for function, name in zip(functions, names, strict=True)]

    def everything(arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return [function(*own) for function, own in zip(jitted, arguments, strict=True)]

    structs = [[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in own] for own in avals]
    # The rules are those of the mathematics: what a kernel of some other platform would be called has none.
    lowered: Any = jax.jit(everything, keep_unused=True).trace(structs).lower(lowering_platforms=("cpu",))
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(_PASS).run(module.operation)
        by_name = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in module.body if _is_function(op)}
        return names, {name: _read_function(op) for name, op in by_name.items() if name != "main"}


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = name
    return jax.jit(call)


def _is_function(op: Any) -> bool:
    return op.operation.name == "func.func"


def _read_function(op: Any) -> Function:
    (block,) = op.regions[0].blocks
    numbers: dict[Any, int] = {argument: i for i, argument in enumerate(block.arguments)}
    arguments = tuple(tuple(argument.type.shape) for argument in block.arguments)
    operations: list[Operation] = []
    for inner in block.operations:
        inner = inner.operation
        if inner.name == "func.return":
            results = tuple(numbers[value] for value in inner.operands)
            return Function(arguments=arguments, operations=tuple(operations), results=results)
        called = inner.name == "func.call"
        rule = None if called else _read_rule(inner)
        if rule is None and not called:
            break
        for value in inner.results:
            numbers[value] = len(numbers)
        operations.append(
            Operation(
                operands=tuple(numbers[value] for value in inner.operands),
                results=tuple(numbers[value] for value in inner.results),
                rule=rule,
                callee=ir.FlatSymbolRefAttr(inner.attributes["callee"]).value if called else "",
            )
        )
    return Function(arguments=arguments, operations=None, results=())


def _read_rule(op: Any) -> FactorRule | None:
    operands, results = ([tuple(v.type.shape) for v in side] for side in (op.operands, op.results))
    if op.name in _ELEMENTWISE:
        dims = tuple((d,) for d in range(len(results[0])))
        return _rule(results[0], [dims] * len(operands), [dims], operands, results)
    if op.name == "stablehlo.constant":
        is_splat = ir.DenseElementsAttr(op.attributes["value"]).is_splat
        return _created(results[0], () if is_splat else range(len(results[0])))
    if op.name == "stablehlo.iota":
        return _created(results[0], [ir.IntegerAttr(op.attributes["iota_dimension"]).value])
    if op.name in _POSITIONAL or "sdy.sharding_rule" not in op.attributes:
        return None
    attribute = _sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
    return _rule(
        tuple(attribute.factor_sizes),
        [_dims(mapping) for mapping in attribute.operand_mappings],
        [_dims(mapping) for mapping in attribute.result_mappings],
        operands,
        results,
        reduced=attribute.reduction_factors,
        blocked=(*attribute.need_replication_factors, *attribute.permutation_factors),
    )


def _created(shape: tuple[int, ...], blocked: Sequence[int]) -> FactorRule:
    dims = tuple((d,) for d in range(len(shape)))
    return _rule(shape, [], [dims], [], [shape], blocked=blocked)


def _dims(mapping: Any) -> Dims:
    dims = _sdy.TensorMappingAttr(mapping).dim_mappings
    return tuple(tuple(_sdy.DimMappingAttr(dim).factor_indices) for dim in dims)


def _rule(
    sizes: Sequence[int],
    operands: Sequence[Dims],
    results: Sequence[Dims],
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    *,
    reduced: Sequence[int] = (),
    blocked: Sequence[int] = (),
) -> FactorRule:
    """The rule, with a blocked factor of its own for each dimension whose size is not that of its factors."""
    sizes, never = list(sizes), set(blocked)

    def exact(dims: Dims, shape: tuple[int, ...]) -> Dims:
        return tuple(own(factors, size) for factors, size in zip(dims, shape, strict=True))

    def own(factors: tuple[int, ...], size: int) -> tuple[int, ...]:
        if math.prod(sizes[f] for f in factors) == size:
            return factors
        never.update((*factors, len(sizes)))
        sizes.append(size)
        return (len(sizes) - 1,)

    operand_dims = tuple(exact(dims, shape) for dims, shape in zip(operands, operand_shapes, strict=True))
    result_dims = tuple(exact(dims, shape) for dims, shape in zip(results, result_shapes, strict=True))
    return FactorRule(
        sizes=tuple(sizes),
        operands=operand_dims,
        results=result_dims,
        reduced=frozenset(reduced),
        blocked=frozenset(never),
    )
