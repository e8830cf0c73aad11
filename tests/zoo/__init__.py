"""The zoo: small train steps as users write them, which every plan must leave equal to plain `jax.jit`."""

from tests.zoo import (
    control_flow,
    gpt_equinox,
    gpt_linen,
    gpt_nnx,
    images,
    low_precision,
    mlp,
    moe,
    random_draws,
    sequences,
)
from tests.zoo.case import BATCH, Case, losses

_MODULES = (mlp, gpt_linen, gpt_nnx, gpt_equinox, moe, images, sequences, random_draws, control_flow, low_precision)

ZOO: dict[str, Case] = {case.name: case for module in _MODULES for case in module.CASES}

HEAVY = frozenset(
    {
        *("gpt_linen", "gpt_scan", "gpt_bfloat16", "gpt_nnx", "gpt_equinox", "moe", "convnet", "convnet_batch_norm"),
        *("vit", "recurrent", "encoder_decoder", "masked_lm", "dropout", "gan"),
    }
)
"""The models that take long to compile."""

__all__ = ["BATCH", "HEAVY", "ZOO", "Case", "losses"]
