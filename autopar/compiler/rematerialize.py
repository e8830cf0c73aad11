"""Compute layers of the forward pass again in the backward pass, instead of keeping what they made until then.

    Trace, layers  ->  Trace                as if each of these layers stood in `jax.checkpoint`

    forward    h_1 = block(w_1, h_0);  h_2 = block(w_2, h_1)
    backward   g_1, dw_2 = region[again block, then transposed](w_2, h_1, g_2)

A region is one equation (`remat2`), which XLA does not join with the equal work in the forward pass.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import eliminate_dead
from autopar.compiler.model_layers import count_layers
from autopar.compiler.recomputed_layers import LayeredStep, Recomputed
from autopar.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What of a step can be computed again: layers by number, in the order in which it is worth most."""

    num_layers: int
    layers: tuple[int, ...]
    names: tuple[str, ...]
    """Of all layers, for the reader."""


def offered_layers(trace: Trace) -> Offer:
    """The layers of a step that can be rematerialised, those first that keep most bytes for the FLOPs that made them.

    The last layer is never among them: its backward pass begins where its forward pass ends. Layers that the user
    rematerialises are not either, nor a scan over layers, whose body needs a `jax.checkpoint` of the user's.
    """
    step = LayeredStep(trace)
    if not step.order:
        return Offer(num_layers=1, layers=(), names=("the step",))
    num_layers = count_layers(step.regions)
    found = step.recomputed(range(num_layers - 1), num_layers)
    worth = {layer: step.saved_bytes(region) / max(step.repeated_flops(region), 1.0) for layer, region in found.items()}
    return Offer(
        num_layers=num_layers,
        layers=tuple(sorted(found, key=lambda layer: (-worth[layer], layer))),
        names=step.names(num_layers),
    )


def rematerialize(trace: Trace, layers: Collection[int], num_layers: int) -> Trace:
    """The same step, with equal results, that does not keep what these of its `num_layers` layers made.

    Plans name the step as it was traced, so the fingerprint stays. Raises `InvalidArgument` for layers that there are
    not.
    """
    if not layers:
        return trace
    if not 0 <= min(layers) <= max(layers) < num_layers:
        raise InvalidArgument(
            f"The layers {sorted(layers)} are to be computed again, {trace.name} is cut into {num_layers} layers. Give "
            f"numbers from 0 to {num_layers - 1}."
        )
    step = LayeredStep(trace)
    units = _in_order(step, list(step.recomputed(layers, num_layers).values()))
    same: dict[str, Any] = {field.name: getattr(trace, field.name) for field in fields(trace)}
    changed: dict[str, Any] = {"jaxpr": _emitted(trace.jaxpr, units), "step": step, "units": tuple(units)}
    return _RematerializedTrace(**same | changed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _RematerializedTrace(Trace):
    """A step some of whose layers are recomputed."""

    step: LayeredStep
    units: tuple[int | Recomputed, ...]

    @cached_property
    def doubled(self) -> jc.ClosedJaxpr | None:
        """The same step at twice the batch, with the same layers recomputed."""
        return None if self.step.doubled is None else _emitted(self.step.doubled, self.units)

    @cached_property
    def fingerprint(self) -> str:
        """That of the step as it was traced, which is what plans name."""
        return self.step.trace.fingerprint


# --- the order of equations and regions ---------------------------------------------------------------------------


def _in_order(step: LayeredStep, regions: Sequence[Recomputed]) -> list[int | Recomputed]:
    """Equations by number, and regions, as near to program order as what they read allows."""
    # A region stands for the first of its backward equations.
    place = {i: min(region.backward) for region in regions for i in region.backward}
    units: dict[int, int | Recomputed] = {i: i for i in range(len(step.eqns)) if i not in place}
    units |= {min(region.backward): region for region in regions}
    needs: dict[int, set[int]] = {}
    ordered: set[int] = set()
    for key, unit in units.items():
        read = jc.operands(step.eqns[unit]) if isinstance(unit, int) else step.operands(unit)
        made = [step.producer[v] for v in read if v in step.producer]
        needs[key] = {place.get(i, i) for i in made}
        if isinstance(unit, int) and jc.keeps_order(step.eqns[unit]):
            needs[key] |= ordered
            ordered = {key}
    return [units[key] for key in _sorted(needs)]


def _sorted(needs: Mapping[int, set[int]]) -> Iterator[int]:
    """Keys after those that they need, the smallest first."""
    waits = {key: len(needed) for key, needed in needs.items()}
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for key, needed in needs.items():
        for other in needed:
            followers[other].append(key)
    ready = sorted(key for key, count in waits.items() if not count)
    done = 0
    while ready:
        key = heapq.heappop(ready)
        yield key
        done += 1
        for follower in followers[key]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, follower)
    assert done == len(needs), "regions wait for one another"


# --- the program --------------------------------------------------------------------------------------------------


def _emitted(closed: jc.ClosedJaxpr, units: Sequence[int | Recomputed]) -> jc.ClosedJaxpr:
    jaxpr, consts = jc.open_jaxpr(closed)
    regions = [unit for unit in units if isinstance(unit, Recomputed)]
    results = {region: _results(jaxpr, region) for region in regions}

    def run(*args: Any) -> list[Any]:
        env: dict[jc.Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for unit in units:
            if isinstance(unit, int):
                _evaluate(jaxpr.eqns[unit], env)
            else:
                _evaluate_region(jaxpr, unit, results[unit], env)
        return [_read(atom, env) for atom in jaxpr.outvars]

    return eliminate_dead(jc.trace(run, [v.aval for v in jaxpr.invars]))


def _results(jaxpr: jc.Jaxpr, region: Recomputed) -> list[jc.Var]:
    """What of a region's backward equations is read outside of it."""
    read = {v for i, eqn in enumerate(jaxpr.eqns) if i not in region.backward for v in jc.operands(eqn)}
    read.update(v for v in jaxpr.outvars if isinstance(v, jc.Var))
    return [v for i in sorted(region.backward) for v in jaxpr.eqns[i].outvars if v in read]


def _evaluate_region(jaxpr: jc.Jaxpr, region: Recomputed, results: Sequence[jc.Var], env: dict[jc.Var, Any]) -> None:
    backward = [jaxpr.eqns[i] for i in sorted(region.backward)]
    eqns = [*(jaxpr.eqns[i] for i in sorted(region.again)), *backward]
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in jc.operands(eqn))
    operands = [v for v in read if v not in made]

    def run(*args: Any) -> list[Any]:
        inside: dict[jc.Var, Any] = dict(zip(operands, args, strict=True))
        for eqn in eqns:
            _evaluate(eqn, inside)
        return [inside[v] for v in results]

    with jc.common_scope(backward):
        env.update(zip(results, jc.bind_recomputation(run, [env[v] for v in operands]), strict=True))


def _evaluate(eqn: jc.JaxprEqn, env: dict[jc.Var, Any]) -> None:
    values = [_read(atom, env) for atom in eqn.invars]
    env.update(zip(eqn.outvars, jc.bind_equation(eqn, values), strict=True))


def _read(atom: Any, env: Mapping[jc.Var, Any]) -> Any:
    return atom.val if isinstance(atom, jc.Literal) else env[atom]
