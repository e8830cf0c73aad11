"""All train steps that other people wrote, by their names: `CASES`."""

from benchmarks.wild import (  # noqa: F401  # each adds its own
    flax_optax_keras,
    haiku_equinox,
    language_models,
    probabilistic,
    reinforcement,
    vision,
)
from benchmarks.wild.case import CASES

__all__ = ["CASES"]
