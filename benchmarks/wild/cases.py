"""All train steps that other people wrote, by their names: `CASES`."""

from benchmarks.wild import flax_optax_keras, haiku_equinox, language_models, probabilistic, reinforcement
from benchmarks.wild.case import CASES, Wild

__all__ = ["CASES", "Wild", "flax_optax_keras", "haiku_equinox", "language_models", "probabilistic", "reinforcement"]
