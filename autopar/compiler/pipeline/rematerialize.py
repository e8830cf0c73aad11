"""Compute layers of the forward pass again in the backward pass, instead of keeping what they made until then.

    Trace, layers  ->  Trace          as if each of these layers stood in `jax.checkpoint`

    forward    h_1 = block(w_1, h_0);  h_2 = block(w_2, h_1)
    backward   g_1, dw_2 = region[again block, then transposed](w_2, h_1, g_2)

A region is one equation (`remat2`), which XLA does not join with the equal work in the forward pass. It holds what
computes a layer's residuals from its inputs, and the backward equations that read them. Backward equations belong to
the lowest layer among their activations, so no region waits for one of a lower layer. These are not computed again:

- what the layer above, or a backward equation outside of regions, has kept alive until then
- numbers of the batch that need no parameters (how many rows count): a region could not complete such sums if the batch
  were split
- layers that the user rematerialises stay as they are, and so do scans over layers: to keep less of one, put
  `jax.checkpoint` around its body
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from autopar.compiler.frontend.layer_scans import find_layer_scans
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.equation_keys import same_equations
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.microbatch.unsplit import whole_batch
from autopar.compiler.pipeline.layers import count_layers, layer_cuts, layer_names
from autopar.compiler.pipeline.phases import Phase, find_phases
from autopar.compiler.pipeline.placement import layer_order
from autopar.compiler.pipeline.regions import Recomputed, find_region, in_order, region_equation
from autopar.errors import InvalidArgument

_OUTSIDE = -1


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The layers of a step that can be computed again, by number, those first for which it is worth most."""

    num_layers: int
    layers: tuple[int, ...]
    names: tuple[str, ...]
    """The names of all layers, for the reader."""


def offered_layers(trace: Trace, num_layers: int | None = None) -> Offer:
    """The layers of a step that can be rematerialised, those first that keep most bytes for the FLOPs that made them.

    The layers are its own unless `num_layers` says how many. The last one is never among them: its backward pass begins
    where its forward pass ends. Layers that the user rematerialises are not either, nor a scan over layers, whose body
    needs a `jax.checkpoint` of the user's.
    """
    step = LayeredStep(trace)
    if not step.order:
        return Offer(num_layers=1, layers=(), names=("the step",))
    num_layers = num_layers or count_layers(step.phases)
    regions = step.recomputed(range(num_layers - 1), num_layers)
    worth = {
        layer: step.saved_bytes(region) / max(step.repeated_flops(region), 1.0) for layer, region in regions.items()
    }
    return Offer(
        num_layers=num_layers,
        layers=tuple(sorted(regions, key=lambda layer: (-worth[layer], layer))),
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
    regions = tuple(step.recomputed(layers, num_layers).values())
    same: dict[str, Any] = {field.name: getattr(trace, field.name) for field in fields(trace)}
    changed: dict[str, Any] = {"jaxpr": _emitted(trace.jaxpr, regions), "step": step, "regions": regions}
    return _RematerializedTrace(**same | changed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _RematerializedTrace(Trace):
    """A step some of whose layers are recomputed."""

    step: LayeredStep
    regions: tuple[Recomputed, ...]

    def at_batch_of(self, rows: int) -> tuple[jc.ClosedJaxpr | None, str]:
        """The same step on a batch of so many rows, with the same layers recomputed."""
        twin, reason = self.step.trace.at_batch_of(rows)
        if twin is None or not same_equations(self.step.trace.jaxpr, twin):
            return None, reason or f"it has other equations with a batch of {rows}"
        return _emitted(twin, self.regions), ""

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the step as it was traced, which is the one that plans name."""
        return self.step.trace.fingerprint


class LayeredStep:
    """A traced step, and what is known of its equations, by index."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.eqns = trace.jaxpr.jaxpr.eqns
        self.phases = find_phases(whole_batch(trace.jaxpr, batch_inputs=trace.batch_inputs))
        at = [i for i, own in enumerate(self.phases.of) if Phase.ACCUMULATE not in own]
        assert [self.phases.equations[i].primitive for i in at] == [eqn.primitive for eqn in self.eqns]
        self.phases_of = [self.phases.of[i] for i in at]
        self.rounds = [self.phases.rounds[i] for i in at]
        self.costly = [not self.phases.costly.isdisjoint(self.phases.equations[i].outvars) for i in at]
        index = {i: number for number, i in enumerate(at)}
        self.order = [index[i] for i in layer_order(self.phases)]
        self.producer = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.loops = frozenset(find_layer_scans(trace.jaxpr.jaxpr, trace.batch_inputs))

    def recomputed(self, layers: Collection[int], num_layers: int) -> dict[int, Recomputed]:
        """The regions of those layers that have something to compute again."""
        if any(jc.keeps_order(eqn) for eqn in self.eqns if jc.ad_phase(eqn) == "backward"):
            return {}  # regions move equations, and these have an order
        owners, inputs = self._owners(num_layers)
        layer_of_backward = self._backward_layers(owners, inputs, num_layers)
        readers = self._readers(layer_of_backward)
        regions: dict[int, Recomputed] = {}
        for layer in sorted(layers, reverse=True):
            backward = {i for i, owner in layer_of_backward.items() if owner == layer}
            forward = {i for i, owner in owners.items() if owner == layer}
            if self._stays(forward, backward):
                continue
            region = self._region(layer, forward, backward, readers)
            if region is not None:
                regions[layer] = region
                for v in self.operands(region):
                    readers[v].add(layer)
        return regions

    def names(self, num_layers: int) -> tuple[str, ...]:
        """A name for every layer, for the reader."""
        _, inputs = self._owners(num_layers)
        parameters: defaultdict[int, list[str]] = defaultdict(list)
        for i, (v, leaf) in enumerate(zip(self.trace.jaxpr.jaxpr.invars, self.trace.inputs, strict=True)):
            if v in inputs and i not in self.trace.batch_inputs:
                parameters[inputs[v]].append(leaf.name)
        return layer_names(self.phases, num_layers, parameters)

    @cached_property
    def at_other_batch(self) -> jc.ClosedJaxpr | None:
        """The step on another batch, if it has the same equations."""
        twin = self.trace.at_other_batch
        return twin if twin is not None and same_equations(self.trace.jaxpr, twin) else None

    def operands(self, region: Recomputed) -> set[jc.Var]:
        """Return the values that a region reads."""
        read = {v for i in region.equations for v in jc.operands(self.eqns[i])}
        return {v for v in read if self.producer.get(v) not in region.equations}

    def saved_bytes(self, region: Recomputed) -> float:
        """Bytes of what the region's backward equations read and nobody keeps for them any more."""
        read = {v for i in region.backward for v in jc.operands(self.eqns[i])}
        again = {i for i in region.again if not self._cheap(i)}
        return sum(aval_bytes(v.aval) for v in read if self.producer.get(v) in again)

    def repeated_flops(self, region: Recomputed) -> float:
        """FLOPs of what runs again."""
        return sum(equation_flops(self.eqns[i]) for i in region.again)

    # --- whose equations ------------------------------------------------------------------------------------------

    def _backward_layers(
        self, owners: Mapping[int, int], inputs: Mapping[jc.Var, int], num_layers: int
    ) -> dict[int, int]:
        """The layer of every backward equation of the first round: the lowest among the values that it reads.

        An activation that the forward pass has sent on counts where it was sent last.
        """
        value = {v: layer for v, layer in inputs.items() if layer != _OUTSIDE}
        backward: dict[int, int] = {}
        for i, eqn in enumerate(self.eqns):
            known = [v for v in jc.operands(eqn) if v in value]
            if self.rounds[i] > 0:
                continue
            if Phase.FORWARD in self.phases_of[i]:
                layer = owners[i] if owners[i] != _OUTSIDE else max((value[v] for v in known), default=0)
                value.update((v, max(layer, value[v])) for v in known)
                value.update((v, layer) for v in eqn.outvars)
            elif Phase.BACKWARD in self.phases_of[i]:
                backward[i] = min((value[v] for v in known), default=num_layers - 1)
                value.update((v, backward[i]) for v in eqn.outvars)
            elif owners.get(i, _OUTSIDE) != _OUTSIDE:
                value.update((v, owners[i]) for v in eqn.outvars)
        return backward

    def _owners(self, num_layers: int) -> tuple[dict[int, int], dict[jc.Var, int]]:
        """The layer of every forward equation, and of an unplaced one or an input the layer that alone needs it."""
        cuts = layer_cuts(self.phases, num_layers)
        layer_of = {i: bisect_right(cuts, position) for position, i in enumerate(self.order)}
        owners: dict[int, int] = {}
        inputs: dict[jc.Var, int] = {}
        for i in reversed(range(len(self.eqns))):
            if Phase.FORWARD in self.phases_of[i]:
                owners[i] = layer_of.get(i, _OUTSIDE)
            if i in owners:
                for v in jc.operands(self.eqns[i]):
                    source = self.producer.get(v)
                    if source is not None and Phase.UNPLACED in self.phases_of[source]:
                        alone = owners.get(source, owners[i]) == owners[i]
                        owners[source] = owners[i] if alone else _OUTSIDE
                    elif source is None:
                        inputs[v] = owners[i] if inputs.get(v, owners[i]) == owners[i] else _OUTSIDE
        return owners, inputs

    def _readers(self, layer_of_backward: Mapping[int, int]) -> defaultdict[jc.Var, set[int]]:
        """The layers whose backward pass reads a value, `_OUTSIDE` for what is later and in none."""
        readers: defaultdict[jc.Var, set[int]] = defaultdict(set)
        for i, eqn in enumerate(self.eqns):
            if Phase.BACKWARD in self.phases_of[i] or (self.rounds[i] > 0 and Phase.FORWARD in self.phases_of[i]):
                for v in jc.operands(eqn):
                    readers[v].add(layer_of_backward.get(i, _OUTSIDE))
        return readers

    # --- what is in a region --------------------------------------------------------------------------------------

    def _stays(self, forward: set[int], backward: set[int]) -> bool:
        """True for a layer that stays as it is: rematerialised by the user, a loop over layers, with side effects."""
        special = any(self.eqns[i].primitive.name in REMAT or self.eqns[i].effects for i in backward)
        return special or not self.loops.isdisjoint(forward | backward)

    def _region(
        self, layer: int, forward: set[int], backward: set[int], readers: Mapping[jc.Var, set[int]]
    ) -> Recomputed | None:
        def kept(v: jc.Var) -> bool:
            """True if a value is alive until the region runs, or just before, for another reader."""
            return any(other < layer or other == layer + 1 for other in readers.get(v, ()))

        def runs_again(v: jc.Var) -> bool:
            i = self.producer.get(v)
            return i is not None and i in forward and self._may_repeat(i) and not kept(v)

        return find_region(self.eqns, self.producer, backward, runs_again=runs_again, is_cheap=self._cheap)

    def _may_repeat(self, i: int) -> bool:
        if self.eqns[i].effects or self.eqns[i].primitive.name in REMAT:
            return False
        return Phase.FORWARD in self.phases_of[i] or i in self._growing

    def _cheap(self, i: int) -> bool:
        """Masks from positions, casts of parameters: made where they are needed rather than kept."""
        return Phase.UNPLACED in self.phases_of[i] and not self.costly[i] and not self.eqns[i].effects

    @cached_property
    def _growing(self) -> frozenset[int]:
        """Equations whose results grow with the batch; all of them where that cannot be known."""
        if self.at_other_batch is None:
            return frozenset(range(len(self.eqns)))
        pairs = enumerate(zip(self.eqns, self.at_other_batch.jaxpr.eqns, strict=True))
        return frozenset(i for i, (eqn, twin) in pairs if all(map(_grows, eqn.outvars, twin.outvars)))


def _grows(var: Any, twin: Any) -> bool:
    return var.aval.shape != twin.aval.shape


# --- the program --------------------------------------------------------------------------------------------------


def _emitted(closed: jc.ClosedJaxpr, regions: Sequence[Recomputed]) -> jc.ClosedJaxpr:
    jaxpr, _ = jc.open_jaxpr(closed)
    readers: defaultdict[jc.Var, list[int]] = defaultdict(list)
    for i, eqn in enumerate([*jaxpr.eqns, None]):
        for v in jc.operands(eqn) if eqn is not None else jaxpr.outvars:
            if isinstance(v, jc.Var):
                readers[v].append(i)
    moved = frozenset[int]().union(*(region.backward for region in regions))
    units = [(i, eqn) for i, eqn in enumerate(jaxpr.eqns) if i not in moved]
    units += [(region.place, region_equation(closed, region, readers)) for region in regions]
    eqns = [eqn for _, eqn in units]
    order = in_order(eqns, [place for place, _ in units])
    return eliminate_dead(jc.with_equations(closed, [eqns[number] for number in order]))
