"""Enter loops, branches and remat regions: their bodies are planned like the rest, once for all iterations.

    scan     consts and carry are laid out before the loop, a slice of xs like the stack without its first axis; the
             carry has one layout, in and out of every iteration; the body's costs count `length` times
    while    the same, and the condition is known to every device
    cond     operands and results have one layout for all branches; the branch taken is known to every device
    remat    operands and results have a layout of their own at the border of the region

A carry that is only added to may stay a sum over mesh axes through the whole loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.compiler.intra_op.choice_graph import BlockBuilder, BlockGraph, EquationNode, LayoutNode
from autopar.compiler.intra_op.fold_layers import Fold, unfolded
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.trip_counts import trip_count
from autopar.compiler.sharding.layout import Layout, LogicalMesh, all_layouts, replicated, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size, free_carry, free_in_body, free_results
from autopar.compiler.sharding.rule import shapes_of
from autopar.compiler.spmd.combining import combined_in_body


def enter(block: BlockBuilder, eqn: jc.JaxprEqn, weight: float, folded: Fold | None) -> EquationNode:
    """Return the nodes of an equation with bodies, which stands `weight` times in the step.

    `folded` is the body of a loop whose layers are planned as one.
    """
    match eqn.primitive.name:
        case "scan":
            return _scan(block, eqn, weight, folded)
        case "while":
            return _while(block, eqn, weight)
        case "cond":
            return _cond(block, eqn, weight)
        case _:
            return _remat(block, eqn, weight)


def _scan(block: BlockBuilder, eqn: jc.JaxprEqn, weight: float, folded: Fold | None) -> EquationNode:
    loop = jp.scan_of(eqn)
    body = jc.open_jaxpr(loop.body)[0]
    folded = folded or unfolded(body)
    is_free = free_in_body(loop, [_is_free(block, atom) for atom in eqn.invars])
    first_xs = loop.num_consts + loop.num_carry
    sums, same = _sums(body, loop), folded.equivalent_inputs
    sums -= {body.invars[first] for number, first in same.items() if body.invars[number] not in sums}
    arguments: list[LayoutNode | None] = []
    for number, (v, free) in enumerate(zip(body.invars, is_free, strict=True)):
        if (first := same.get(number, number)) < number:
            arguments.append(arguments[first])
        else:
            arguments.append(None if free else _argument(block, f"scan operand {number}", v, v in sums))
    inside = _body(block, eqn, body, arguments, weight * loop.length, folded)
    carry = arguments[loop.num_consts : first_xs]
    ends = _ends(inside, carry, folded.equivalent_results)
    outside = [node if number < first_xs else _stacked(node) for number, node in enumerate(arguments)]
    results = [node if number < loop.num_carry else _stacked(node) for number, node in enumerate(ends)]
    return EquationNode(arguments=tuple(outside), results=tuple(results), bodies=(inside.finish(ends),))


def _while(block: BlockBuilder, eqn: jc.JaxprEqn, weight: float) -> EquationNode:
    loop = jp.while_of(eqn)
    body, cond = jc.open_jaxpr(loop.body)[0], jc.open_jaxpr(loop.cond)[0]
    is_free = [_is_free(block, atom) for atom in eqn.invars]
    freed = free_results(eqn, is_free)
    first_carry = loop.cond_consts + loop.body_consts
    is_free[first_carry:] = free_carry(body, is_free[loop.cond_consts : first_carry], is_free[first_carry:], [])
    arguments = [
        None if free else _argument(block, f"while operand {number}", atom)
        for number, (atom, free) in enumerate(zip(eqn.invars, is_free, strict=True))
    ]
    carry = arguments[first_carry:]
    weight *= trip_count(eqn)
    asked = _body(block, eqn, cond, [*arguments[: loop.cond_consts], *carry], weight)
    inside = _body(block, eqn, body, [*arguments[loop.cond_consts : first_carry], *carry], weight)
    # Every device counts rounds for itself; when they end is known by data, so that the count is not free after them.
    results = [
        None if free else node or _everywhere(block, len(shape))
        for node, free, shape in zip(carry, freed, shapes_of(eqn.outvars), strict=True)
    ]
    return EquationNode(
        arguments=tuple(arguments),
        results=tuple(results),
        bodies=(_finished(asked, [_everywhere(block, 0)]), inside.finish(_ends(inside, carry))),
    )


def _cond(block: BlockBuilder, eqn: jc.JaxprEqn, weight: float) -> EquationNode:
    branches = [jc.open_jaxpr(branch)[0] for branch in jp.branches_of(eqn)]
    index = None if _is_free(block, eqn.invars[0]) else _everywhere(block, 0)
    arguments = [
        None if _is_free(block, atom) else _argument(block, f"cond operand {number}", atom)
        for number, atom in enumerate(eqn.invars[1:])
    ]
    insides = [_body(block, eqn, branch, arguments, weight / len(branches)) for branch in branches]
    known = [all(_is_free(b, b.jaxpr.outvars[number]) for b in insides) for number in range(len(eqn.outvars))]
    results = [
        None if free and index is None else _argument(block, f"cond result {number}", v)
        for number, (v, free) in enumerate(zip(eqn.outvars, known, strict=True))
    ]
    return EquationNode(
        arguments=(index, *arguments),
        results=tuple(results),
        bodies=tuple(_finished(inside, results) for inside in insides),
    )


def _remat(block: BlockBuilder, eqn: jc.JaxprEqn, weight: float) -> EquationNode:
    body = jc.open_jaxpr(next(jc.subjaxprs(eqn)))[0]
    arguments = [
        None if _is_free(block, atom) else _argument(block, f"remat operand {number}", atom)
        for number, atom in enumerate(eqn.invars)
    ]
    inside = _body(block, eqn, body, arguments, weight)
    ends = _ends(inside, [])
    return EquationNode(arguments=tuple(arguments), results=tuple(ends), bodies=(inside.finish(ends),))


def _body(
    block: BlockBuilder,
    eqn: jc.JaxprEqn,
    jaxpr: jc.Jaxpr,
    arguments: Sequence[LayoutNode | None],
    weight: float,
    folded: Fold | None = None,
) -> BlockBuilder:
    folded = folded or unfolded(jaxpr)
    inside = BlockBuilder(
        planner=block.planner,
        jaxpr=jaxpr,
        arguments=tuple(arguments),
        weight=weight,
        nested=True,
        within=eqn,
        folded=folded,
        equivalent={jaxpr.invars[i]: jaxpr.invars[first] for i, first in folded.equivalent_inputs.items()},
        combined=combined_in_body(jaxpr, eqn, block.combined),
    )
    inside.collect()
    return inside


def _ends(
    inside: BlockBuilder, carry: Sequence[LayoutNode | None], equivalent: Mapping[int, int] | None = None
) -> list[LayoutNode | None]:
    """Return the nodes of a body's results: the carry's, then one of its own for each of the others.

    Those that are `equivalent` to an earlier one share its node.
    """
    ends: list[LayoutNode | None] = []
    for number, atom in enumerate(inside.jaxpr.outvars):
        first = (equivalent or {}).get(number, number)
        if number < len(carry):
            end = carry[number]
        elif first < number:
            end = ends[first]
        else:
            source = inside.source(atom)
            sums = source is not None and any(layout.partial for layout in source.layouts)
            end = None if source is None else _argument(inside, f"body result {number}", atom, sums)
        if end is not None:
            inside.read(atom, end, ("result", first), phase="body")
        ends.append(end)
    return ends


def _finished(inside: BlockBuilder, results: Sequence[LayoutNode | None]) -> BlockGraph:
    for number, (atom, end) in enumerate(zip(inside.jaxpr.outvars, results, strict=True)):
        if end is not None:
            inside.read(atom, end, ("result", number), phase="body")
    return inside.finish(results)


def _is_free(block: BlockBuilder, atom: Any) -> bool:
    return isinstance(atom, jc.Literal) or atom in block.free


def _argument(block: BlockBuilder, name: str, v: Any, sums: bool = False) -> LayoutNode:
    mesh, shape = block.planner.table.mesh, tuple(v.aval.shape)
    layouts = (replicated(len(shape)),)
    if not below_split_size(v.aval):
        layouts = block.planner.forms(v, all_layouts(shape, mesh))
    if sums and jnp.issubdtype(v.aval.dtype, jnp.floating):
        layouts = tuple(summed for layout in layouts for summed in _summed(layout, mesh))
    return block.planner.table.add_layouts(name, layouts)


def _summed(layout: Layout, mesh: LogicalMesh) -> list[Layout]:
    """Return the layout, and it as a sum over every set of the axes that do not split it."""
    left = [axis for axis in range(len(mesh.shape)) if axis not in used_axes(layout)]
    sets = itertools.chain.from_iterable(itertools.combinations(left, count) for count in range(len(left) + 1))
    return [Layout(layout.dims, axes) for axes in sets]


def _everywhere(block: BlockBuilder, rank: int) -> LayoutNode:
    return block.planner.table.add_layouts("known everywhere", (replicated(rank),))


def _stacked(node: LayoutNode | None) -> LayoutNode | None:
    """Return the same node for a stack of such values along a new first axis, which is not split."""
    if node is None:
        return None
    return LayoutNode(node.number, tuple(Layout(((), *layout.dims), layout.partial) for layout in node.layouts))


def _sums(body: jc.Jaxpr, loop: jp.Scan) -> set[jc.Var]:
    """Return the parts of the carry that the body does nothing with but add to."""
    carry = body.invars[loop.num_consts : loop.num_consts + loop.num_carry]
    readers: dict[jc.Var, list[jc.JaxprEqn]] = {v: [] for v in carry}
    for eqn in body.eqns:
        for v in dict.fromkeys(jc.operands(eqn)):
            if v in readers:
                readers[v].append(eqn)
    return {
        v
        for v, result in zip(carry, body.outvars, strict=False)
        if len(readers[v]) == 1
        and readers[v][0].primitive.name in ("add", "add_any")
        and readers[v][0].outvars[0] is result
    }
