"""One train step of the zoo, with what a test must know to split it: where the batch is, what is exact."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BATCH = 16  # Four microbatches of four examples, so that a stage of four devices holds one each.

# A bias on all keys of an attention has a gradient of zero, computed as rounding: 1e-17 or so. Adam divides by the
# gradient's size, and with the usual 1e-8 beside it the update keeps a visible part of that noise.
ADAM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its step. `make()` gives `(step, state, *batch)`; call it in 64 bits (fixture `float64`).

    `step(state, *batch, **kwargs)` returns `(state, metrics)`, as users write it.
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    note: str  # what is special about it, for the reader of a failing test
    batch_argnums: tuple[int, ...] = (1,)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_statistics: str = "exact"  # "per_microbatch": equal to the plain step with one microbatch only
    random: bool = False  # draws random numbers, from a key in the state
    loss_falls: bool = True  # the loss is lower after a few steps on the same batch
    tolerance: float = 1e-9  # relative; wider only where the model itself computes in fewer bits

    def __str__(self) -> str:
        return self.name


def losses(metrics: Any) -> list[float]:
    """The scalar losses among a step's metrics: a bare scalar, or every entry whose name ends in `loss`."""
    if not isinstance(metrics, Mapping):
        return [float(metrics)]
    return [float(value) for name, value in metrics.items() if name.endswith("loss")]


def draw(seed: int) -> np.random.Generator:
    """Numbers for batches and parameters: numpy's, so that no device or jax version has a say."""
    return np.random.default_rng(seed)
