"""Look whether arrays are finite: one number for each, 0 if it is, 1 if it holds an infinity, 2 if a NaN."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def kinds_of_values(arrays: Sequence[Any]) -> list[int]:
    """Return the number of every array, by its parts in this process: the largest of them."""
    found = [0] * len(arrays)
    by_device: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
    for place, array in enumerate(arrays):
        if isinstance(array, jax.Array):
            if jnp.issubdtype(array.dtype, jnp.inexact):
                for shard in array.addressable_shards:
                    by_device[shard.device].append((place, shard.data))
        elif array is not None and jnp.issubdtype(np.asarray(array).dtype, jnp.inexact):
            by_device[None].append((place, np.asarray(array)))
    rows = [(parts, _kinds([data for _, data in parts])) for parts in by_device.values()]
    for parts, row in rows:
        for (place, _), kind in zip(parts, np.asarray(row)):
            found[place] = max(found[place], int(kind))
    return found


@jax.jit
def _kinds(arrays: Sequence[Any]) -> Any:
    nans = jnp.stack([jnp.isnan(x).any() for x in arrays])
    infinite = jnp.stack([jnp.isinf(x).any() for x in arrays])
    return jnp.where(nans, 2, infinite.astype(jnp.int32))
