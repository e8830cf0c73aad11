"""The zoo: small train steps as users write them, which every plan must leave equal to plain `jax.jit`."""

from tests.zoo import (
    control_flow,
    gpt_equinox,
    gpt_linen,
    gpt_nnx,
    images,
    mlp,
    moe,
    random_draws,
    sequences,
)
from tests.zoo.case import BATCH, Case, losses

_MODULES = (mlp, gpt_linen, gpt_nnx, gpt_equinox, moe, images, sequences, random_draws, control_flow)

ZOO: dict[str, Case] = {case.name: case for module in _MODULES for case in module.CASES}

__all__ = ["BATCH", "ZOO", "Case", "losses"]
