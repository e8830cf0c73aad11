"""Models of plain JAX to plan, to compile and to time, of any size; the defaults suit eight devices of one CPU."""

from collections.abc import Callable

from benchmarks.models.gpt import gpt
from benchmarks.models.images import convnet, vit
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model
from benchmarks.models.moe import moe, moe_ragged
from benchmarks.models.sequences import encoder_decoder, lstm

MODELS: dict[str, Callable[..., Model]] = {
    make.__name__: make for make in (mlp, gpt, moe, moe_ragged, convnet, vit, lstm, encoder_decoder)
}
