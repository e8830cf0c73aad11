"""The GPT models of Alpa's evaluation: untied, 16 bits with a master copy in 32, each layer recomputed, AdamW.

Sizes are those of benchmark/alpa/suite_manual_gpt.py in alpa-projects/alpa, layers those of its models (`alpa_layers`);
with attention in a kernel they are decoders of today, with norms in front. FLOPs of a step are counted as there
(benchmark/alpa/util.py, `compute_gpt_tflops`), but without the recomputation of the forward pass, for which Alpa has 96
where this has 72: B sequences of S tokens, width H, L layers, V words,

    72 B S H² L (1 + S / 6H) + 6 B S H V

With heads A wide altogether and a perceptron F wide inside, which are H and 4 H there, a layer has 6 B S (4 H A + 2 H F
+ 2 S A) of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import alpa_layers, transformer
from benchmarks.models.model import Tree, constant, integers, unmarked, weights
from benchmarks.models.workload import Workload, adamw


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """The sizes of a model, and of its batch."""

    width: int
    layers: int
    heads: int
    length: int = 1024
    vocabulary: int = 51200
    batch: int = 1024
    hidden: int | None = None
    """Width inside a perceptron; by default four times that of the model."""
    head: int | None = None
    """Width of a head; by default all heads together are as wide as the model."""
    recomputed: bool = True
    """Every layer is computed again in the backward pass."""
    kernel: bool = False
    """Norms stand in front, and causal attention is one kernel, whose scores never reach memory."""
    cudnn: bool = False
    """Attention of Alpa's layers is a kernel of cuDNN, for GPUs and 16 bits."""

    @property
    def flops(self) -> float:
        """FLOPs of a step, as in the module's formula."""
        tokens, width = self.batch * self.length, self.width
        heads = self.heads * (self.head or width // self.heads)
        layer = 4 * width * heads + 2 * width * (self.hidden or 4 * width) + 2 * self.length * heads
        return 6 * tokens * (self.layers * layer + width * self.vocabulary)


GPT_SIZES: Mapping[str, GPTSize] = {
    "125M": GPTSize(width=768, layers=12, heads=12),
    "350M": GPTSize(width=1024, layers=24, heads=16),
    "760M": GPTSize(width=1536, layers=24, heads=16),
    "1.3B": GPTSize(width=2048, layers=24, heads=32),
    "2.6B": GPTSize(width=2560, layers=32, heads=32),
    "6.7B": GPTSize(width=4096, layers=32, heads=32),
    "15B": GPTSize(width=5120, layers=48, heads=40),
    "39B": GPTSize(width=8192, layers=48, heads=64),
    "76B": GPTSize(width=10240, layers=60, heads=80),
}


def alpa_gpt(name: str, size: GPTSize, dtype: Any = jnp.float16) -> Workload:
    """A train step of this size."""
    own = partial(alpa_layers.layer, cudnn=size.cudnn)
    layer = partial(transformer.block, mark=unmarked, causal=True, kernel=True) if size.kernel else own
    params_of = partial(transformer.block_params, head=size.head) if size.kernel else alpa_layers.layer_params
    cross_entropy = transformer.cross_entropy if size.kernel else alpa_layers.cross_entropy

    def loss(params: Tree, statistics: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        x = params["embedding"][batch["tokens"]] + params["positions"]
        x = x if size.kernel else transformer.norm(params["norm"], x)
        for number in range(size.layers):
            with jax.named_scope(f"h_{number}"):
                x = (jax.checkpoint(layer) if size.recomputed else layer)(params[f"h_{number}"], x)
        x = transformer.norm(params["norm"], x) if size.kernel else x
        return cross_entropy(x @ params["head"] + params["head_bias"], batch["targets"]), statistics

    layer_params = params_of(size.width, size.heads, size.hidden or 4 * size.width, dtype)
    return Workload(
        name=name,
        params={
            "embedding": weights(dtype, vocabulary=size.vocabulary, embed=size.width),
            "positions": weights(dtype, positions=size.length, embed=size.width),
            **{f"h_{number}": layer_params for number in range(size.layers)},
            "norm": transformer.norm_params(size.width, dtype),
            "head": weights(dtype, embed=size.width, vocabulary=size.vocabulary),
            "head_bias": constant(0, dtype, vocabulary=size.vocabulary),
        },
        batch={name: integers(size.vocabulary, batch=size.batch, length=size.length) for name in ("tokens", "targets")},
        loss=loss,
        optimizer=adamw(),
        flops=size.flops,
        tokens=size.batch * size.length,
    )
