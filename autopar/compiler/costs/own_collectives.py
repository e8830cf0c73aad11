"""List the collectives that an equation makes itself, as its strategy combines results: what each moves, and its type.

    a maximum or minimum of split values     an all-reduce
    a sum of compressed gradients            codes to their adder; the sums' codes to all, unless every device keeps one

The second, in the domains of a machine whose links between them are slow, adds up inside first, exactly, so that codes
of fewer numbers go across:

    one level     all-to-all                                   all-gather
    two levels    reduce-scatter inside, all-to-all across     all-gather across, all-gather inside
"""

from __future__ import annotations

import math
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.primitives import COMPRESSED_SUM
from autopar.compiler.sharding.collective import Collective
from autopar.compiler.sharding.layout import (
    Axes,
    LogicalMesh,
    Reach,
    local_shape,
    num_shards,
    part_size,
    used_axes,
)
from autopar.compiler.sharding.scaled_blocks import CODE, encoded_bytes
from autopar.compiler.sharding.strategies import Strategy


def own_collectives(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> tuple[tuple[Collective, str], ...]:
    """Return the collectives of one evaluation of an equation on a device, in order, each with the type that it moves.

    Those of resharding its operands and results are not among them.
    """
    axes = strategy.combined
    if not axes:  # of equations without a result, too
        return ()
    aval: Any = eqn.outvars[0].aval
    if eqn.primitive.name != COMPRESSED_SUM:
        nbytes = aval_bytes(aval) / num_shards(aval.shape, strategy.results[0], mesh)
        return ((Collective(kind="all-reduce", axes=axes, nbytes=nbytes), str(aval.dtype)),)
    size = math.prod(local_shape(aval.shape, strategy.operands[0], mesh))
    if not used_axes(strategy.results[0]).isdisjoint(axes):
        count = mesh.size(axes)
        return (_codes("all-to-all", axes, count, part_size(size, count), "all"),)
    if not mesh.sums_in_levels(axes):
        count = mesh.size(axes)
        return tuple(_codes(kind, axes, count, part_size(size, count), "all") for kind in ("all-to-all", "all-gather"))
    inside, across = mesh.reach(axes, "inside"), mesh.reach(axes, "across")
    share = part_size(size, inside)
    part = part_size(share, across)
    return (
        (Collective(kind="reduce-scatter", axes=axes, nbytes=4 * inside * share, reach="inside"), "float32"),
        _codes("all-to-all", axes, across, part, "across"),
        _codes("all-gather", axes, across, part, "across"),
        _codes("all-gather", axes, inside * across, part, "inside"),
    )


def _codes(kind: str, axes: Axes, parts: int, size: int, reach: Reach) -> tuple[Collective, str]:
    """Return a collective that moves so many parts of `size` encoded numbers."""
    return Collective(kind=kind, axes=axes, nbytes=parts * encoded_bytes(size), reach=reach), CODE
