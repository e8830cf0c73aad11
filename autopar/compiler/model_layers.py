"""Find the layers of a model in its forward pass: by the numbered scopes that it has, or by FLOPs where it has none.

    GPT/h_0/..., GPT/h_1/...  ->  start | GPT/h_0 | GPT/h_1 | end

Scopes are what `jax.named_scope` and Flax write. What comes before the first numbered scope and after the last is a
layer too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.compiler.cut_forward import cut_forward
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.placement import layer_order
from autopar.compiler.regions import Regions

_MOST_BY_FLOPS = 16
# A layer of fewer products than this keeps little that is not at its border.
_PRODUCTS_PER_LAYER = 4
# Scopes of fewer products than this are one layer with the next: single products with a norm, an activation.
_ENOUGH_PRODUCTS = 2
_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")

Scope = tuple[str, ...]


def count_layers(regions: Regions) -> int:
    """The number of layers that the model has by its scopes, or else a good number of layers by FLOPs."""
    scopes = _numbered_layers(regions)
    if scopes:
        return len(scopes)
    order = layer_order(regions)
    products = sum(regions.equations[i].primitive.name in _PRODUCTS for i in order)
    return min(_MOST_BY_FLOPS, max(2, products // _PRODUCTS_PER_LAYER), len(order))


def has_numbered_layers(regions: Regions) -> bool:
    """Whether the model says by its scopes what its layers are."""
    return bool(_numbered_layers(regions))


def layer_cuts(regions: Regions, num_layers: int) -> tuple[int, ...]:
    """Where layers 1, 2, ... begin, as positions in `layer_order(regions)`: between scopes, if so many are numbered."""
    scopes = _numbered_layers(regions)
    if len(scopes) == num_layers:
        return tuple(start for _, start in scopes[1:])
    return cut_forward(regions, num_layers)


def layer_names(regions: Regions, num_layers: int, parameters: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """A name for every layer: its scope, the `parameters` that only it reads, or the line that it begins at."""
    scopes = _numbered_layers(regions)
    if len(scopes) == num_layers:
        return tuple(name for name, _ in scopes)
    order = layer_order(regions)
    starts = [0, *layer_cuts(regions, num_layers)]
    lines = [jc.source_line(regions.equations[order[start]]) for start in starts]
    return tuple(
        " ... ".join(dict.fromkeys((own[0], own[-1]))) if (own := parameters.get(number)) else f"layer from {line}"
        for number, line in enumerate(lines)
    )


def _numbered_layers(regions: Regions) -> list[tuple[str, int]]:
    """The name and the first position of every layer; empty where scopes have no numbers."""
    eqns = [regions.equations[i] for i in layer_order(regions)]
    labels = _labels([_scope(eqn) for eqn in eqns])
    inside = [position for position, label in enumerate(labels) if label is not None]
    if not inside:
        return []
    found: list[tuple[str, int]] = []
    products, current = _ENOUGH_PRODUCTS, None
    for position in inside:
        name, number = labels[position] or ("", ())
        if number != current and products >= _ENOUGH_PRODUCTS:
            found.append((name, position))
            products = 0
        current = number
        products += eqns[position].primitive.name in _PRODUCTS
    before = [("start", 0)] if inside[0] > 0 else []
    after = [("end", inside[-1] + 1)] if inside[-1] + 1 < len(eqns) else []
    return [*before, *found, *after] if len(found) > 1 else []


def _labels(scopes: Sequence[Scope]) -> list[tuple[str, Scope] | None]:
    """For every scope its outermost part up to a number of which there are several, and that number where it stands.

    `GPT/h_3` and (`GPT`, `3`) for `GPT/h_3/mlp`; with `GPT/norm_3` beside it, both are of the same number.
    """
    numbers: dict[Scope, set[str]] = defaultdict(set)
    for scope in set(scopes):
        for depth, part in enumerate(scope):
            stem, number = _numbered(part)
            if number:
                numbers[*scope[:depth], stem].add(number)

    def label(scope: Scope) -> tuple[str, Scope] | None:
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


def _scope(eqn: jc.JaxprEqn) -> Scope:
    """The names around an equation, without the transformations: `jvp(GPT)/h_3` is `GPT`, `h_3`."""
    parts = jc.scope_of(eqn).split("/")
    while parts != (bare := [re.sub(r"^\w+\((.*)\)$", r"\1", part) for part in parts]):
        parts = bare
    return tuple(part for part in parts if part)
