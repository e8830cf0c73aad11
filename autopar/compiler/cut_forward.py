"""Cut the forward pass of a microbatched step into layers: what the equations cost, and what a cut would send.

    Regions, number of layers  ->  positions in the forward order at which layers begin

A cut costs the activations alive across it, and for a parameter that is used on both sides (tied) its bytes twice per
step: once as a copy, once as a gradient. Free equations (casts, masks) count where they are first needed. No cut falls
inside of a rematerialised block as long as there are enough other places.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.compiler.cuts_outside_regions import cut_allowed
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops
from autopar.compiler.layers import cut_layers, liveness_bytes
from autopar.compiler.placement import layer_order
from autopar.compiler.regions import Region, Regions
from autopar.errors import InvalidArgument


def cut_forward(regions: Regions, num_layers: int) -> tuple[int, ...]:
    """Where layers 1, 2, ... begin, as positions in `layer_order(regions)`: `num_layers - 1` of them."""
    order = layer_order(regions)
    if not order:
        raise InvalidArgument(
            f"{num_layers} layers were asked for, but no operation of the forward depends on parameters and batch: "
            "name the arguments that carry the batch in batch_argnums, or use DataParallel or ShardParallel."
        )
    if num_layers > len(order):
        raise InvalidArgument(
            f"{num_layers} layers were asked for, but the forward pass has only {len(order)} equations to cut between. "
            f"Ask for at most {len(order)}."
        )
    if num_layers == 1:
        return ()
    flops, crossing = forward_costs(regions, order)
    allowed = cut_allowed(regions, order)
    if num_layers > 1 + sum(allowed[1:]):  # more layers than rematerialised blocks: some of them must be cut
        allowed = None
    return cut_layers(flops, crossing, num_layers, allowed=allowed)


def forward_costs(regions: Regions, order: Sequence[int]) -> tuple[list[float], list[float]]:
    """FLOPs of every forward equation (free ones added to their first reader), and bytes crossing before each."""
    eqns = regions.equations
    position = {i: p for p, i in enumerate(order)}
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    flops = [equation_flops(eqns[i]) for i in order]
    first: dict[jc.Var, int] = {}
    last: dict[jc.Var, int] = {}
    counted: set[int] = set()
    for p, i in enumerate(order):
        stack = list(eqns[i].invars)
        while stack:
            v = stack.pop()
            if not isinstance(v, jc.Var):
                continue
            source = producer.get(v)
            if source is not None and Region.FREE in regions.kinds[source]:
                if source not in counted:
                    counted.add(source)
                    flops[p] += equation_flops(eqns[source])
                stack.extend(eqns[source].invars)
            else:
                first.setdefault(v, position.get(source, p) if source is not None else p)
                last[v] = p
    tied = 2 / regions.step.num_microbatches
    micro_inputs = {
        v
        for v, spec in zip(regions.step.jaxpr.jaxpr.invars, regions.step.inputs, strict=True)
        if spec.kind != "whole" or v in regions.homeless
    }
    values = [
        (aval_bytes(v.aval) * (1.0 if producer.get(v) in position else tied), first[v], last[v])
        for v in first
        if v not in micro_inputs and first[v] < last[v]
    ]
    return flops, list(liveness_bytes(values, len(order)))


def group_layers(regions: Regions, cuts: Sequence[int], num_stages: int) -> list[tuple[int, int]]:
    """Runs of layers `[start, stop)` for each stage, with even FLOPs and few bytes across."""
    num_layers = len(cuts) + 1
    if num_layers == num_stages:
        return [(s, s + 1) for s in range(num_stages)]
    order = layer_order(regions)
    flops, crossing = forward_costs(regions, order)
    starts = [0, *cuts]
    stops = [*cuts, len(order)]
    layer_flops = [sum(flops[a:b]) for a, b in zip(starts, stops, strict=True)]
    borders = cut_layers(layer_flops, [crossing[a] for a in starts], num_stages)
    return list(zip([0, *borders], [*borders, num_layers], strict=True))
