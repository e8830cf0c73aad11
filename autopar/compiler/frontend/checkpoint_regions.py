"""Keep `jax.checkpoint` compatible with layer cuts: no cut inside a region, no region wider than a layer.

`jax.grad` leaves the forward half of a rematerialised region inline and its backward half as one equation (`remat2`),
which computes the forward again from the region's inputs:

    forward    h_1 = block_1(w_1, x);  h_2 = block_2(w_2, h_1)
    backward   g_1, dw_2 = remat2[again block_2, then transposed](w_2, h_1, g_2)

A region within one layer stays as it is, and cuts keep out of it (`pipeline.layers:cut_allowed`). A region wider than a
layer cannot stay one equation, for it would pull several layers to one stage. `inline_regions` dissolves it: its
equations read the forward's values instead of computing them again, and stages that compute all of their layers again
(`StagePlan.recomputed`) save the memory: the same promise, on several devices. What a policy saves is then recomputed
too. A branch (`cond`) inside of a dissolved region, and what follows from it, is recomputed as before: correct, but not
on the stage of its layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any

from autopar.compiler.frontend.dedup_recomputation import join_recomputed
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr, rewrite
from autopar.compiler.jaxprs.flops import equation_flops
from autopar.compiler.jaxprs.primitives import CONTROL_FLOW, REMAT

WIDE = 1.5
"""A region is wide if its FLOPs are more than this times an even layer's share of the backward.

Blocks are not quite even (the first has no input to differentiate, the last may carry the head), and a layer that is
uneven by up to twice the tolerance of the cut (25 %) costs less than to give up a region that the user has drawn around
a block. The whole loss is wide from two layers on, one of two blocks is not.
"""

Path = tuple[int, ...]
"""The path to a region: the index of its equation in the step, then in the body of that region, and so on."""


@lru_cache(maxsize=6)
def find_wide_regions(closed: jc.ClosedJaxpr, *, num_layers: int) -> frozenset[Path]:
    """The backward regions with more FLOPs than one of `num_layers` layers should have, nested ones too.

    The last few answers are remembered: layers are found anew for every number of microbatches.
    """
    jaxpr, _ = jc.open_jaxpr(closed)
    backward = {i: eqn for i, eqn in enumerate(jaxpr.eqns) if jc.ad_phase(eqn) == "backward"}
    limit = WIDE * sum(equation_flops(eqn) for eqn in backward.values()) / num_layers
    return frozenset(path for i, eqn in backward.items() for path in _wide(eqn, (i,), limit))


def find_regions(closed: jc.ClosedJaxpr) -> frozenset[Path]:
    """All backward regions, nested ones too."""
    jaxpr, _ = jc.open_jaxpr(closed)
    backward = [(i, eqn) for i, eqn in enumerate(jaxpr.eqns) if jc.ad_phase(eqn) == "backward"]
    return frozenset(path for i, eqn in backward for path in _wide(eqn, (i,), -1))


def _wide(eqn: jc.JaxprEqn, path: Path, limit: float) -> Iterator[Path]:
    if eqn.primitive.name in REMAT and equation_flops(eqn) > limit:
        yield path
        for i, inner in enumerate(_body(eqn).eqns):
            yield from _wide(inner, (*path, i), limit)


def _body(eqn: jc.JaxprEqn) -> jc.Jaxpr:
    (body,) = jc.subjaxprs(eqn)
    return jc.open_jaxpr(body)[0]


def inline_regions(
    closed: jc.ClosedJaxpr, regions: Collection[Path], at_other_batch: jc.ClosedJaxpr | None = None
) -> jc.ClosedJaxpr:
    """The step with these regions dissolved.

    The same regions can be dissolved in the step at another batch size. Two steps of the same equations, each given
    the other as `at_other_batch`, have the same equations afterwards too.
    """
    if not regions:
        return closed
    flat = _flattened(closed, regions)
    recomputes = [jc.ad_phase(eqn) == "backward" for eqn in flat.jaxpr.eqns]
    twin = None if at_other_batch is None else _flattened(at_other_batch, regions)
    return eliminate_dead(join_recomputed(flat, recomputes, twin))


def _flattened(closed: jc.ClosedJaxpr, regions: Collection[Path]) -> jc.ClosedJaxpr:
    """The regions' equations in their place; the forward keeps no region at any depth: only a backward recomputes."""

    def inlined(number: int, eqn: jc.JaxprEqn, values: list[Any]) -> list[Any]:
        if jc.ad_phase(eqn) != "backward":
            return _forward(number, eqn, values)
        return _backward(eqn, values, (number,), regions)

    return rewrite(closed, inlined)


def _backward(eqn: jc.JaxprEqn, values: Sequence[Any], path: Path, regions: Collection[Path]) -> list[Any]:
    """Evaluate an equation of the backward with these regions inlined."""
    if eqn.primitive.name not in REMAT or path not in regions:
        return jc.bind_equation(eqn, values)
    with jc.under_scope_of(eqn):
        return evaluate_jaxpr(
            _body(eqn), (), values, lambda number, inner, inputs: _backward(inner, inputs, (*path, number), regions)
        )


def _forward(_: int, eqn: jc.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate an equation of the forward with all regions inlined."""
    if eqn.primitive.name in REMAT:
        with jc.under_scope_of(eqn):
            return evaluate_jaxpr(_body(eqn), (), values, _forward)
    enters = eqn.primitive.name in CONTROL_FLOW
    return jc.bind_equation(eqn, values, jc.map_subjaxprs(eqn, _without_regions) if enters else None)


def _without_regions(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """A loop body or branch of the forward without regions."""
    return rewrite(closed, _forward)
