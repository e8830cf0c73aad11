"""Find losses of a training that are not finite, or far above those before them.

    spike    a loss above  median + deviations * max(1.4826 * MAD, 0.01 * |median|)  of the last 50 good losses

MAD is the median distance from the median; times 1.4826 it is the standard deviation of a normal distribution. The
second term lets a loss that hardly moves move by a hundredth. Nothing is a spike before 20 losses have been seen.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.errors import AutoparError, LossSpike, NonFiniteLoss

WINDOW, FEWEST, LEAST_SHARE = 50, 20, 0.01


class LossGuard:
    """The losses of one training so far: of the metrics whose name has "loss" in it, or all single numbers."""

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def judge(self, number: int, metrics: Any) -> AutoparError | None:
        """Return what is wrong with the losses of a step, as an error to raise; None if nothing is."""
        for name, loss in _losses(metrics):
            called = f" ({name})" if name else ""
            if not math.isfinite(loss):
                return NonFiniteLoss(
                    f"The loss of step {number} is {loss}{called}. Look at the batch of this step, lower the learning "
                    "rate, go on from an earlier checkpoint, or let parallelize(check_finite=True) name the line."
                )
            seen = self._seen[name]
            if len(seen) >= FEWEST:
                middle = median(seen)
                spread = max(1.4826 * median(abs(x - middle) for x in seen), LEAST_SHARE * abs(middle))
                if loss > middle + self._deviations * spread:
                    return LossSpike(
                        f"The loss of step {number} is {loss:.6g}{called}, {(loss - middle) / spread:.1f} deviations "
                        f"above the median of the last {len(seen)}, {middle:.6g}; {self._deviations:g} are allowed. "
                        "Look at the batch of this step, or give more spike_deviations."
                    )
            seen.append(loss)
        return None


def _losses(metrics: Any) -> Iterator[tuple[str, float]]:
    leaves = [(leaf_name("", path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(metrics)]
    numbers = [(key, leaf) for key, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size == 1]
    for key, leaf in [item for item in numbers if "loss" in item[0].lower()] or numbers:
        yield key, float(np.asarray(leaf, np.float64).reshape(()))
