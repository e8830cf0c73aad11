"""Models of plain JAX to plan, to compile and to time, of any size; the defaults suit eight devices of one CPU."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.models.gpt import gpt
from benchmarks.models.images import convnet, vit
from benchmarks.models.llama import llama
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model
from benchmarks.models.moe import moe, moe_ragged
from benchmarks.models.sequences import encoder_decoder, lstm

MODELS: dict[str, Callable[..., Model]] = {
    make.__name__: make for make in (mlp, gpt, llama, moe, moe_ragged, convnet, vit, lstm, encoder_decoder)
}

LARGE: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"width": 4096, "hidden": 16384, "batch": 8192},
    "gpt": {"width": 1024, "heads": 16, "length": 1024, "vocabulary": 32768},
    "llama": {"width": 1024, "heads": 16, "kv_heads": 8, "hidden": 2816, "length": 1024, "vocabulary": 32768},
    "moe": {
        "width": 1024,
        "heads": 16,
        "experts": 16,
        "hidden": 4096,
        "length": 1024,
        "vocabulary": 32768,
        "batch": 32,
    },
    "moe_ragged": {"width": 1024, "heads": 16, "hidden": 4096, "length": 512, "vocabulary": 32768, "batch": 32},
    "convnet": {"stages": 4, "channels": 128, "image": 64, "batch": 256},
    "vit": {"width": 1024, "heads": 16, "image": 224, "patch": 14, "classes": 1024, "batch": 256},
    "lstm": {"width": 2048, "vocabulary": 32768, "length": 128, "batch": 256},
    "encoder_decoder": {"width": 1024, "heads": 16, "vocabulary": 32768, "source_length": 1024, "target_length": 512},
}
"""Sizes to compile for real accelerators."""
