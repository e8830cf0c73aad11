"""One microbatch of a batch: its slice of a value, and its share of a parameter that grows with the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jax import lax

from autopar.errors import NotSplittable


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Which microbatch is computed: `index` is a traced number."""

    count: int
    index: Any

    def size(self, full: int) -> int:
        """The length of an axis in one microbatch."""
        if full % self.count:
            raise NotSplittable(
                f"An axis of {full}, which grows with the batch, does not divide into {self.count} "
                f"microbatches. Choose a number of microbatches that divides {full}."
            )
        return full // self.count

    def rows(self, value: Any, axis: int) -> Any:
        """This microbatch's slice of a value of the whole batch."""
        size = self.size(value.shape[axis])
        starts = [self.index * size if i == axis else np.int32(0) for i in range(value.ndim)]
        sizes = [size if i == axis else n for i, n in enumerate(value.shape)]
        return lax.dynamic_slice(value, starts, sizes, allow_negative_indices=False)


def params_at_microbatch(
    params: Mapping[str, Any], doubled: Mapping[str, Any], microbatch: Microbatch
) -> dict[str, Any]:
    """An equation's parameters at the microbatch's size."""
    return {key: at_microbatch(value, doubled[key], microbatch) for key, value in params.items()}


def at_microbatch(value: Any, doubled: Any, microbatch: Microbatch) -> Any:
    """A parameter at the microbatch's size. Integers that differ are affine in the batch; all else stays."""
    if type(value) is tuple:
        items = cast("tuple[Any, ...]", value)
        return tuple(at_microbatch(a, b, microbatch) for a, b in zip(items, doubled, strict=True))
    if isinstance(value, int) and isinstance(doubled, int) and value != doubled:
        grown = doubled - value
        return value - grown + microbatch.size(grown)
    return value
