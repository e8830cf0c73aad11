"""Find the layers of a model in its forward pass: by its marks or numbered scopes, or else by bytes and FLOPs.

    h = layer_boundary(f(x)), g(h)  ->  f | g
    GPT/h_0/..., GPT/h_1/...        ->  start | GPT/h_0 | GPT/h_1 | end

Scopes are what `jax.named_scope` and Flax write. What comes before the first numbered scope and after the last is a
layer too. Where there are neither, the forward is a row of n equations with f_i FLOPs; c_k bytes are alive just before
equation k: the activations, and for a parameter that is used on both sides (tied) its bytes twice per step, once as a
copy, once as a gradient. Unplaced equations (casts, masks) count where they are first needed. No cut falls inside of a
rematerialised block as long as there are enough other places. Of all ways to cut the row into L layers, take the least
in this order (the clustering of Alpa, OSDI'22, section 6.2, with exact ties):

    1. C = Σ c_k over the cuts k              → crossing_bytes   bytes that stages may have to send
    2. M = max over layers of Σ f_i           → limit            the slowest stage sets the pace
    3. V = Σ over layers of (Σ f_i)²          → squares          the variance, as the mean is fixed
    4. the cuts that come first

    subject to  Σ f_i ≤ (1 + tolerance) · Σ_all f / L  for every layer.

C is found by a dynamic program over suffixes. All layers that begin at i and respect the limit end in a window
[i + 1, last_i], so one step is a minimum over sliding windows, O(n log n) in numpy. C falls as the limit rises, so M is
the least limit at which C keeps its value, found by bisection. V is additive, and is minimised over the cuts that lie
on some optimal path only.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.compiler.frontend.layer_boundaries import is_layer_boundary
from autopar.compiler.frontend.scopes import stage_of
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops
from autopar.compiler.jaxprs.primitives import PRODUCTS, REMAT
from autopar.compiler.pipeline.phases import Phase, Phases, parameter_sources
from autopar.compiler.pipeline.placement import layer_order
from autopar.errors import InvalidArgument

_MOST_BY_FLOPS = 16
# A layer of fewer products than this keeps little that is not at its border.
_PRODUCTS_PER_LAYER = 4
# Scopes of fewer products than this are one layer with the next: single products with a norm, an activation.
_ENOUGH_PRODUCTS = 2

_Scope = tuple[str, ...]
_Floats = NDArray[np.float64]
_Indices = NDArray[np.int64]

# FLOPs are sums of doubles: two that differ by less than this are equal.
_RELATIVE_ERROR = 1e-12


def count_layers(phases: Phases, num_stages: int = 1) -> int:
    """Return the number of layers for a model in so many stages: those that it has, or a good number by FLOPs.

    Raises `InvalidArgument` if the model marks fewer layers than there are stages; numbered scopes, if they are fewer,
    are not its layers then.
    """
    marked = count_marked_layers(phases)
    if 0 < marked < num_stages:
        raise InvalidArgument(
            f"{num_stages} stages were asked for, and the model marks {marked} layers with autopar.layer_boundary "
            f"or autopar.stage; each stage needs one. Use at most {marked} stages, put more marks into the model, or "
            f"give layers={num_stages} to have it cut by FLOPs."
        )
    own = len(_own_layers(phases))
    if own >= max(1, num_stages):
        return own
    order = layer_order(phases)
    products = sum(phases.equations[i].primitive.name in PRODUCTS for i in order)
    return max(num_stages, min(_MOST_BY_FLOPS, max(2, products // _PRODUCTS_PER_LAYER), len(order)))


def count_marked_layers(phases: Phases) -> int:
    """Return the number of stages that the model names, or layers between its marks; 0 if there are none."""
    return len(_stage_scopes(phases) or _marked_layers(phases))


def has_own_layers(phases: Phases) -> bool:
    """True if the model says what its layers are, by marks or by numbered scopes."""
    return bool(_own_layers(phases))


def layer_cuts(phases: Phases, num_layers: int) -> tuple[int, ...]:
    """Return the positions in `layer_order(phases)` where layers 1, 2, ... begin: those of the model's own if possible.

    Raises `InvalidArgument` for more layers than the forward pass can be cut into.
    """
    own = _own_layers(phases)
    if len(own) == num_layers:
        return tuple(start for _, start in own[1:])
    return cut_forward(phases, num_layers)


def numbered_layers(phases: Phases, num_layers: int) -> list[int]:
    """Return the layers that begin one of the model's: what stands before the first and after the last goes with it."""
    names = layer_names(phases, num_layers, {})
    return [0, *(n for n in range(1, num_layers) if names[n - 1] != "start" and names[n] != "end")]


def layer_names(phases: Phases, num_layers: int, parameters: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """A name for every layer: its scope, the `parameters` that only it reads, or the line that it begins at."""
    own = _own_layers(phases)
    if len(own) == num_layers and all(name for name, _ in own):
        return tuple(name for name, _ in own)
    order = layer_order(phases)
    starts = [0, *layer_cuts(phases, num_layers)]
    lines = [jc.source_line(phases.equations[order[start]]) for start in starts]
    return tuple(
        " ... ".join(dict.fromkeys((own[0], own[-1]))) if (own := parameters.get(number)) else f"layer from {line}"
        for number, line in enumerate(lines)
    )


def _own_layers(phases: Phases) -> list[tuple[str, int]]:
    """The layers that the model says it has: name (marks give none) and first position."""
    return _stage_scopes(phases) or _marked_layers(phases) or _numbered_layers(phases)


def _stage_scopes(phases: Phases) -> list[tuple[str, int]]:
    """The name and the first position of every `autopar.stage` of the model; empty where there are none.

    What stands between two stages belongs to the first of them, what stands before all to the first one.
    """
    starts: list[tuple[str, int]] = []
    place = ""
    for position, i in enumerate(layer_order(phases)):
        scope = stage_of(phases.equations[i])
        if scope is None or scope.place == place:
            continue
        place = scope.place
        if scope.name in dict(starts):
            raise InvalidArgument(
                f"{scope} is entered again after {starts[-1][0]!r}, at {jc.source_line(phases.equations[i])}. A stage "
                "is one run of the forward pass: give the second part a name of its own, or write "
                f"autopar.colocate({scope.place!r}) around it instead."
            )
        starts.append((str(scope.name), position if starts else 0))
    return starts


def _marked_layers(phases: Phases) -> list[tuple[str, int]]:
    """The first position of every layer between marks, without a name; empty where there are none."""
    marks = [is_layer_boundary(phases.equations[i]) for i in layer_order(phases)]
    starts = [p for p in range(1, len(marks)) if marks[p - 1] and not marks[p] and not all(marks[:p])]
    return [("", start) for start in (0, *starts)] if starts else []


def _numbered_layers(phases: Phases) -> list[tuple[str, int]]:
    """The name and the first position of every layer; empty where scopes have no numbers."""
    eqns = [phases.equations[i] for i in layer_order(phases)]
    labels = _labels([_scope(eqn) for eqn in eqns])
    inside = [position for position, label in enumerate(labels) if label is not None]
    if not inside:
        return []
    layers: list[tuple[str, int]] = []
    products, current = _ENOUGH_PRODUCTS, None
    for position in inside:
        name, number = labels[position] or ("", ())
        if number != current and products >= _ENOUGH_PRODUCTS:
            layers.append((name, position))
            products = 0
        current = number
        products += eqns[position].primitive.name in PRODUCTS
    before = [("start", 0)] if inside[0] > 0 else []
    after = [("end", inside[-1] + 1)] if inside[-1] + 1 < len(eqns) else []
    return [*before, *layers, *after] if len(layers) > 1 else []


def _labels(scopes: Sequence[_Scope]) -> list[tuple[str, _Scope] | None]:
    """Return every scope's outermost part up to a number of which there are several, and that number where it stands.

    `GPT/h_3` and (`GPT`, `3`) for `GPT/h_3/mlp`; with `GPT/norm_3` beside it, both are of the same number.
    """
    numbers: dict[_Scope, set[str]] = defaultdict(set)
    for scope in set(scopes):
        for depth, part in enumerate(scope):
            stem, number = _numbered(part)
            if number:
                numbers[*scope[:depth], stem].add(number)

    def label(scope: _Scope) -> tuple[str, _Scope] | None:
        for depth, part in enumerate(scope):
            stem, number = _numbered(part)
            if number and len(numbers[*scope[:depth], stem]) > 1:
                return "/".join(scope[: depth + 1]), (*scope[:depth], number)
        return None

    return [label(scope) for scope in scopes]


def _numbered(part: str) -> tuple[str, str]:
    """`h_3` as `h_` and `3`; the number is empty where there is none."""
    stem = part.rstrip("0123456789")
    return stem, part[len(stem) :]


def _scope(eqn: jc.JaxprEqn) -> _Scope:
    """The names around an equation, without the transformations: `jvp(GPT)/h_3` is `GPT`, `h_3`."""
    return _names_of(jc.scope_of(eqn))


@lru_cache(maxsize=4096)
def _names_of(scope: str) -> _Scope:
    parts = scope.split("/")
    while parts != (bare := [re.sub(r"^\w+\((.*)\)$", r"\1", part) for part in parts]):
        parts = bare
    return tuple(part for part in parts if part)


def cut_forward(phases: Phases, num_layers: int) -> tuple[int, ...]:
    """Return the positions in `layer_order(phases)` where layers 1, 2, ... begin: `num_layers - 1` of them."""
    order = layer_order(phases)
    if not order:
        region = next((eqn for eqn in phases.equations if eqn.primitive.name in REMAT), None)
        if region is not None and Phase.FORWARD in {phase for own in phases.of for phase in own}:
            raise InvalidArgument(
                f"{num_layers} layers were asked for, and the first pass through the model is {jc.describe(region)} "
                "in one with its backward pass, as nothing else reads what it makes. Put jax.checkpoint around the "
                "layers instead of the whole loss, or use one stage."
            )
        raise InvalidArgument(
            f"{num_layers} layers were asked for, but no operation of the forward depends on parameters and batch: "
            "name the arguments that carry the batch in batch_argnums, shuffle examples outside of the step (those "
            "that it picks itself are no part of a microbatch), or use DataParallel or ShardParallel."
        )
    if num_layers > len(order):
        raise InvalidArgument(
            f"{num_layers} layers were asked for, at least one for each stage, but the forward pass has only "
            f"{len(order)} equations to cut between. Ask for at most {len(order)} layers and stages."
        )
    if num_layers == 1:
        return ()
    flops, crossing = forward_costs(phases, order)
    allowed = cut_allowed(phases, order)
    if num_layers > 1 + sum(allowed[1:]):  # more layers than rematerialised blocks: some of them must be cut
        allowed = None
    return cut_layers(flops, crossing, num_layers, allowed=allowed)


def forward_costs(phases: Phases, order: Sequence[int]) -> tuple[list[float], list[float]]:
    """FLOPs of every forward equation (unplaced ones added to their first reader), and bytes crossing before each."""
    eqns = phases.equations
    position = {i: p for p, i in enumerate(order)}
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    flops = [equation_flops(eqns[i]) for i in order]
    first: dict[jc.Var, int] = {}
    last: dict[jc.Var, int] = {}
    counted: set[int] = set()
    for p, i in enumerate(order):
        stack = list(eqns[i].invars)
        seen = set[jc.Var]()  # ways through unplaced equations are many more than these
        while stack:
            v = stack.pop()
            if not isinstance(v, jc.Var) or v in seen:
                continue
            seen.add(v)
            source = producer.get(v)
            if source is not None and Phase.UNPLACED in phases.of[source]:
                if source not in counted:
                    counted.add(source)
                    flops[p] += equation_flops(eqns[source])
                stack.extend(eqns[source].invars)
            else:
                first.setdefault(v, position.get(source, p) if source is not None else p)
                last[v] = p
    tied = 2 / phases.step.num_microbatches
    micro_inputs = {
        v
        for v, spec in zip(phases.step.jaxpr.jaxpr.invars, phases.step.inputs, strict=True)
        if spec.kind != "whole" or v in phases.replicated_scalars
    }
    values = [
        (aval_bytes(v.aval) * (1.0 if producer.get(v) in position else tied), first[v], last[v])
        for v in first
        if v not in micro_inputs and first[v] < last[v]
    ]
    return flops, list(liveness_bytes(values, len(order)))


def group_layers(phases: Phases, cuts: Sequence[int], num_stages: int) -> list[tuple[int, int]]:
    """Runs of layers `[start, stop)` for each stage, with even FLOPs and few bytes across."""
    num_layers = len(cuts) + 1
    if num_layers == num_stages:
        return [(s, s + 1) for s in range(num_stages)]
    order = layer_order(phases)
    flops, crossing = forward_costs(phases, order)
    starts = [0, *cuts]
    stops = [*cuts, len(order)]
    layer_flops = [sum(flops[a:b]) for a, b in zip(starts, stops, strict=True)]
    borders = cut_layers(layer_flops, [crossing[a] for a in starts], num_stages)
    return list(zip([0, *borders], [*borders, num_layers], strict=True))


def cut_layers(
    flops: Sequence[float],
    crossing_bytes: Sequence[float],
    num_layers: int,
    *,
    tolerance: float = 0.25,
    allowed: Sequence[bool] | None = None,
) -> tuple[int, ...]:
    """The equations at which layers 1, 2, ... begin, `num_layers - 1` of them, strictly increasing.

    `crossing_bytes[k]` are the bytes alive just before equation k, and `allowed[k]` says whether a layer may
    begin there; their entries 0 are not used. If no cuts are within the tolerance, it is doubled, to at least
    5 %, until some are. The result is deterministic.

    Raises `InvalidArgument` if there are more layers than the allowed cuts make pieces.

    >>> cut_layers([1, 1, 1, 1, 1, 1], [0, 9, 9, 9, 2, 9], 2)
    (3,)
    >>> cut_layers([1, 1, 1, 1, 1, 1], [0, 9, 9, 9, 2, 9], 2, tolerance=0.5)
    (4,)
    """
    num_equations = len(flops)
    assert len(crossing_bytes) == num_equations, (len(crossing_bytes), num_equations)
    may_cut = np.ones(num_equations, bool) if allowed is None else np.array(allowed, bool)
    num_pieces = 1 + int(np.count_nonzero(may_cut[1:]))
    if not 1 <= num_layers <= num_pieces:
        raise InvalidArgument(
            f"{num_layers} layers were asked for, the forward can be cut into 1 to {num_pieces}. "
            f"Ask for at most {num_pieces} layers."
        )
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(flops, np.float64))])
    # A forbidden cut costs infinitely much; so does one at the end, which leaves a layer without equations.
    costs = np.concatenate([np.where(may_cut, np.asarray(crossing_bytes, np.float64), np.inf), [np.inf]])

    limit = _feasible_limit(ends, costs, num_layers, tolerance)
    limit = _least_limit(ends, costs, num_layers, limit)
    last = _last_ends(ends, limit)
    tables = _least_bytes(costs, last, num_layers)
    return _most_even_cuts(ends, costs, last, tables)


def liveness_bytes(values: Iterable[tuple[float, int, int]], num_equations: int) -> tuple[float, ...]:
    """`crossing_bytes` of values given as (bytes, producing equation, last consuming equation).

    A value crosses every cut after its producer, up to its last consumer; -1 produces what is there at the
    start.

    >>> liveness_bytes([(4, 0, 2), (8, 1, 2)], 4)
    (0.0, 4.0, 12.0, 0.0)
    """
    change = np.zeros(num_equations + 1)
    for nbytes, producer, last_consumer in values:
        if last_consumer > producer:
            change[producer + 1] += nbytes
            change[last_consumer + 1] -= nbytes
    return tuple(float(alive) for alive in np.cumsum(change)[:num_equations])


def _feasible_limit(ends: _Floats, costs: _Floats, num_layers: int, tolerance: float) -> float:
    """The FLOPs that a layer may have: (1 + tolerance) of the mean, relaxed until there are such cuts."""
    while True:
        limit = (1 + tolerance) * ends[-1] / num_layers * (1 + _RELATIVE_ERROR)
        if np.isfinite(_least_bytes(costs, _last_ends(ends, limit), num_layers)[-1][0]):
            return float(limit)
        assert limit <= ends[-1], "a single layer may have everything, so some cuts must be possible"
        tolerance = 2 * max(tolerance, 0.025)


def _least_limit(ends: _Floats, costs: _Floats, num_layers: int, limit: float) -> float:
    """The least limit, up to rounding, at which no more bytes must cross than at `limit`."""
    least = _least_bytes(costs, _last_ends(ends, limit), num_layers)[-1][0]
    low = float(ends[-1]) / num_layers * (1 - _RELATIVE_ERROR)
    while limit - low > _RELATIVE_ERROR * limit:
        middle = (low + limit) / 2
        if _least_bytes(costs, _last_ends(ends, middle), num_layers)[-1][0] == least:
            limit = middle
        else:
            low = middle
    return limit * (1 + _RELATIVE_ERROR)


def _last_ends(ends: _Floats, limit: float) -> _Indices:
    """For each beginning i, the last end j with FLOPs of [i, j) within the limit; j = i if there is none."""
    return np.searchsorted(ends, ends + limit, side="right").astype(np.int64) - 1


def _least_bytes(costs: _Floats, last: _Indices, num_layers: int) -> list[_Floats]:
    """Entry [l][i]: the least bytes that cross within equations [i, n) if they are l + 1 layers."""
    n = len(costs) - 1
    tables = [np.where((last == n) & (np.arange(n + 1) < n), 0.0, np.inf)]
    if n == 0:
        tables = [np.zeros(1)]
    first = np.arange(n + 1) + 1
    for _ in range(num_layers - 1):
        tables.append(_window_minima(costs + tables[-1], first, last + 1))
    return tables


def _window_minima(values: _Floats, start: _Indices, stop: _Indices) -> _Floats:
    """min(values[start_i:stop_i]), infinite if empty: two overlapping windows of a power of two."""
    length = stop - start
    minima = np.full(len(values), np.inf)
    window, size = values, 1
    while True:
        here = np.flatnonzero((length >= size) & (length < 2 * size))
        minima[here] = np.minimum(window[start[here]], window[stop[here] - size])
        if 2 * size > len(values):
            return minima
        window = np.minimum(window[:-size], window[size:])
        size *= 2


def _most_even_cuts(ends: _Floats, costs: _Floats, last: _Indices, tables: list[_Floats]) -> tuple[int, ...]:
    """Return, among the cuts that fewest bytes cross, those with the least sum of squared FLOPs, and then the first."""
    num_layers, n = len(tables), len(costs) - 1
    tails = [costs + table for table in tables]

    def next_cuts(begin: int, cut: int) -> _Indices:
        """Return where the next layer may begin so that the least bytes cross."""
        ahead = tails[num_layers - 2 - cut][begin + 1 : last[begin] + 1]
        return begin + 1 + np.flatnonzero(ahead == tables[num_layers - 1 - cut][begin])

    reached: list[list[int]] = [[0]]
    for cut in range(num_layers - 1):
        mark = np.zeros(n + 1, bool)
        for begin in reached[-1]:
            mark[next_cuts(begin, cut)] = True
        reached.append([int(begin) for begin in np.flatnonzero(mark)])

    squares = np.full(n + 1, np.inf)
    squares[reached[-1]] = (ends[-1] - ends[reached[-1]]) ** 2
    chosen: list[dict[int, int]] = []
    for cut in reversed(range(num_layers - 1)):
        before, best = np.full(n + 1, np.inf), dict[int, int]()
        for begin in reached[cut]:
            cuts = next_cuts(begin, cut)
            sums = (ends[cuts] - ends[begin]) ** 2 + squares[cuts]
            # The first of those that are equal up to rounding.
            best[begin] = int(cuts[np.argmax(sums <= sums.min() * (1 + _RELATIVE_ERROR))])
            before[begin] = sums.min()
        squares = before
        chosen.append(best)
    path = itertools.accumulate(reversed(chosen), lambda begin, best: best[begin], initial=0)
    return tuple(path)[1:]


def cut_allowed(phases: Phases, order: Sequence[int]) -> list[bool]:
    """Return, for each position of `order`, the forward equations, whether a layer may begin there and cut no region.

    A region's forward reaches from what follows its input activations to the last equation that reads one of its own
    parameters: those that no other backward equation reads.
    """
    forward = _ForwardReads(phases, order)
    allowed = [True] * len(order)
    for first, last in forward.spans():
        allowed[first + 1 : last + 1] = [False] * (last - first)
    return allowed


class _ForwardReads:
    """The readers of each value along the forward pass, by position in `order`."""

    def __init__(self, phases: Phases, order: Sequence[int]) -> None:
        self.eqns = phases.equations
        self.order = order
        self.parameters = parameter_sources(phases)
        self.backward = [eqn for eqn, own in zip(self.eqns, phases.of, strict=True) if Phase.BACKWARD in own]
        self.producer = {v: p for p, i in enumerate(order) for v in self.eqns[i].outvars}
        self.readers: dict[jc.Var, list[int]] = {}
        for p, i in enumerate(order):
            for parameter in self._read(self.eqns[i]):
                self.readers.setdefault(parameter, []).append(p)

    def spans(self) -> Iterator[tuple[int, int]]:
        """The first and last position of each region's forward."""
        num_readers = Counter(v for eqn in self.backward for v in self._read(eqn))
        for eqn in self.backward:
            if eqn.primitive.name in REMAT:
                own = [v for v in self._read(eqn) if num_readers[v] == 1 and v in self.readers]
                inside = self._inside(eqn, own)
                if inside:
                    yield min(inside), max(inside)

    def _read(self, eqn: jc.JaxprEqn) -> set[jc.Var]:
        return {p for v in jc.operands(eqn) for p in self.parameters.get(v, ())}

    def _inside(self, eqn: jc.JaxprEqn, own: Sequence[jc.Var]) -> set[int]:
        """The readers of the region's own parameters, and what leads there from its input activations."""
        activations = {v for v in jc.operands(eqn) if v in self.producer}
        before = self._ancestors([self.producer[v] for v in activations], set())
        after = set(activations)
        for i in self.order:
            if not after.isdisjoint(jc.operands(self.eqns[i])):
                after.update(self.eqns[i].outvars)
        follows = {p for p, i in enumerate(self.order) if not after.isdisjoint(jc.operands(self.eqns[i]))}
        # A parameter that is also read elsewhere (a tied embedding) says nothing about the region.
        readers = [p for v in own if not activations or follows.issuperset(self.readers[v]) for p in self.readers[v]]
        return {*readers, *(self._ancestors(readers, before) & follows)}

    def _ancestors(self, positions: Iterable[int], known: Collection[int]) -> set[int]:
        """These positions and those that they follow from, without the known ones."""
        ancestors: set[int] = set()
        stack = list(positions)
        while stack:
            p = stack.pop()
            if p not in ancestors and p not in known:
                ancestors.add(p)
                operands = jc.operands(self.eqns[self.order[p]])
                stack.extend(self.producer[v] for v in operands if v in self.producer)
        return ancestors
