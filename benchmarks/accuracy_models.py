"""Transformers that measurements name: their sizes, each with its source, and the parameters these make.

L layers, hidden size h, a heads (g of them with keys and values) of d channels, MLP width f:

    attention       h·d·(a + 2g) + a·d·h
    MLP             2·h·f, or 3·h·f if gated; a layer of experts has E of width f_e, of which each token takes k
    embeddings      V·h, twice unless tied
"""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts of a transformer's MLPs."""

    count: int
    chosen: int
    """Experts that each token goes to."""
    width: int
    shared_width: int = 0
    """MLP width of what every token goes through besides."""
    dense_layers: int = 0
    """Layers that have a plain MLP instead."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes of a GPT, BERT or Llama-like model, with or without experts."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    mlp_width: int = 0
    """0: four times the hidden size."""
    kv_heads: int = 0
    """0: as many as heads."""
    head_size: int = 0
    """0: hidden size / heads."""
    gated: bool = False
    tied: bool = True
    attention_layers: int = -1
    """Layers that have attention; the others of a hybrid model have an operator linear in the sequence instead."""
    latent_ranks: tuple[int, int] = (0, 0)
    """Ranks of the queries and of the keys and values in multi-head latent attention; 0 without."""
    experts: Experts | None = None
    positions: int = 0
    """The longest sequence, where positions are a learnt table; 0 if that is not known."""

    @property
    def width(self) -> int:
        return self.mlp_width or 4 * self.hidden

    @property
    def query_size(self) -> int:
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def parameters(self) -> int:
        """All of them; norms and biases are left out."""
        factors, experts = 3 if self.gated else 2, self.experts
        dense_layers = experts.dense_layers if experts else self.layers
        layers = self.layers * self._attention_parameters + dense_layers * factors * self.hidden * self.width
        if experts:
            routed = factors * (experts.count * experts.width + experts.shared_width) + experts.count
            layers += (self.layers - dense_layers) * self.hidden * routed
        return layers + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def _attention_parameters(self) -> int:
        queries, keys = self.latent_ranks
        if keys:
            down = self.hidden * (queries + keys)
            up = queries * self.query_size + 2 * keys * self.query_size
            return down + up + self.query_size * self.hidden
        key_value_size = (self.kv_heads or self.heads) * (self.head_size or self.hidden // self.heads)
        return self.hidden * (2 * self.query_size + 2 * key_value_size)


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, tied: bool = True) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=vocab, tied=tied)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, width: int, vocab: int) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=width,
        vocab=vocab,
        gated=True,
        tied=False,
    )


# Pattern of the name in lower case -> sizes, from the papers' tables and the config.json that the authors published.
TRANSFORMERS: tuple[tuple[str, Transformer], ...] = (
    # GPT-3 (Brown et al. 2020, table 2.1); 5B and 20B as in NeMo's gpt3/5b.yaml and 20b.yaml; MT-NLG (Smith et al.
    # 2022).
    (r"gpt-?3?[- ]175b", _gpt(96, 12288, 96)),
    (r"gpt-?3[- ]5b", _gpt(24, 4096, 32)),
    (r"gpt-?3[- ]20b", _gpt(44, 6144, 48)),
    (r"gpt[- ]530b", _gpt(105, 20480, 128)),
    (r"megatron-22b", _gpt(48, 6144, 64)),
    # Llama and Llama 2 (Touvron et al. 2023) and 3 (Dubey et al. 2024), table 3.
    (r"llama-?_?2[-_]7b", _llama(32, 4096, 32, 32, 11008, 32000)),
    (r"llama-?_?2[-_]13b", _llama(40, 5120, 40, 40, 13824, 32000)),
    (r"llama-?_?2[-_]70b", _llama(80, 8192, 64, 8, 28672, 32000)),
    (r"llama[-_ ]?(1[-_ ])?7b", _llama(32, 4096, 32, 32, 11008, 32000)),
    (r"llama[-_ ]?(1[-_ ])?13b", _llama(40, 5120, 40, 40, 13824, 32000)),
    (r"llama[-_ ]?(1[-_ ])?30b", _llama(60, 6656, 52, 52, 17920, 32000)),
    (r"llama[-_ ]?(1[-_ ])?65b", _llama(80, 8192, 64, 64, 22016, 32000)),
    (r"llama-?_?3(\.1)?[-_]8b", _llama(32, 4096, 32, 8, 14336, 128256)),
    (r"llama-?_?3(\.1)?[-_]70b", _llama(80, 8192, 64, 8, 28672, 128256)),
    (r"llama-?_?3(\.1)?[-_]405b", _llama(126, 16384, 128, 8, 53248, 128256)),
    # Nemotron-3 8B and Nemotron-4 22B: NeMo-Framework-Launcher, conf/training/nemotron.
    (r"nemotron-8b", _gpt(32, 4096, 32, vocab=256000, tied=False)),
    (r"nemotron-22b", _gpt(40, 6144, 48, vocab=256000, tied=False)),
    # Nemotron-4 15B (Parmar et al. 2024, table 1) and 340B (Nvidia 2024, table 1).
    (
        r"nemotron-?4?[-_ ]15b",
        Transformer(layers=32, hidden=6144, heads=48, kv_heads=8, vocab=256000, tied=False),
    ),
    (
        r"nemotron-?4?[-_ ]340b",
        Transformer(layers=96, hidden=18432, heads=96, kv_heads=8, vocab=256000, tied=False),
    ),
    # MPT: mosaicml/llm-foundry scripts/train/yamls/pretrain.
    (r"mpt-125m", _gpt(12, 768, 12, vocab=50368)),
    (r"mpt-350m", _gpt(24, 1024, 16, vocab=50368)),
    (r"mpt-760m", _gpt(24, 1536, 12, vocab=50368)),
    (r"mpt-1b", _gpt(24, 2048, 16, vocab=50368)),
    (r"mpt-3b", _gpt(32, 2560, 20, vocab=50368)),
    (r"mpt-7b", _gpt(32, 4096, 32, vocab=50368)),
    (r"mpt-13b", _gpt(40, 5120, 40, vocab=50368)),
    (r"mpt-30b", _gpt(48, 7168, 56, vocab=50368)),
    (r"mpt-70b", _gpt(80, 8192, 64, vocab=50368)),
    # OPT (Zhang et al. 2022) and GPT-Neo (EleutherAI's config.json), with their max_position_embeddings.
    (r"opt-350m", replace(_gpt(24, 1024, 16, vocab=50272), positions=2048)),
    (r"gpt-neo-2\.7b", replace(_gpt(32, 2560, 20, vocab=50257), positions=2048)),
    # Mixtral (Jiang et al. 2024).
    (
        r"mixtral-8x7b",
        Transformer(
            layers=32, hidden=4096, heads=32, kv_heads=8, mlp_width=14336, vocab=32000, gated=True, tied=False,
            experts=Experts(count=8, chosen=2, width=14336),
        ),
    ),
    # DeepSeek-V2 (DeepSeek-AI 2024, section 3.1.2), V3 (DeepSeek-AI 2024, section 4.2) and Kimi K2 (Moonshot AI 2025,
    # table 2).
    (
        r"deepseek-?v2$",
        Transformer(
            layers=60, hidden=5120, heads=128, head_size=160, mlp_width=12288, vocab=102400, gated=True, tied=False,
            latent_ranks=(1536, 576),
            experts=Experts(count=160, chosen=6, width=1536, shared_width=3072, dense_layers=1),
        ),
    ),
    (
        r"deepseek-?v3",
        Transformer(
            layers=61, hidden=7168, heads=128, head_size=160, mlp_width=18432, vocab=129280, gated=True, tied=False,
            latent_ranks=(1536, 576),
            experts=Experts(count=256, chosen=8, width=2048, shared_width=2048, dense_layers=3),
        ),
    ),
    (
        r"kimi[-_](k2|1t)",
        Transformer(
            layers=61, hidden=7168, heads=64, head_size=160, mlp_width=18432, vocab=163840, gated=True, tied=False,
            latent_ranks=(1536, 576),
            experts=Experts(count=384, chosen=8, width=2048, shared_width=2048, dense_layers=1),
        ),
    ),
    # Qwen3 (Qwen team 2025, table 1 and config.json).
    (
        r"qwen3[-_]30b",
        Transformer(
            layers=48, hidden=2048, heads=32, kv_heads=4, head_size=128, vocab=151936, gated=True, tied=False,
            experts=Experts(count=128, chosen=8, width=768),
        ),
    ),
    (
        r"qwen3[-_]235b",
        Transformer(
            layers=94, hidden=4096, heads=64, kv_heads=4, head_size=128, vocab=151936, gated=True, tied=False,
            experts=Experts(count=128, chosen=8, width=1536),
        ),
    ),
    # gpt-oss-20b and -120b (OpenAI 2025, model card, table 1): half of their layers look at 128 tokens only.
    (
        r"gpt[- ]oss[- ]20b",
        Transformer(
            layers=24, hidden=2880, heads=64, kv_heads=8, head_size=64, vocab=201088, gated=True, tied=False,
            attention_layers=12, experts=Experts(count=32, chosen=4, width=2880),
        ),
    ),
    (
        r"gpt[- ]oss[- ]120b",
        Transformer(
            layers=36, hidden=2880, heads=64, kv_heads=8, head_size=64, vocab=201088, gated=True, tied=False,
            attention_layers=18, experts=Experts(count=128, chosen=4, width=2880),
        ),
    ),
)  # fmt: skip


# GPTs that benchmarks train (Narayanan et al. 2021, table 1; alpa-projects/alpa, benchmark/alpa/suite_manual_gpt.py):
# billions of parameters -> layers, hidden size, heads.
GPTS = {
    0.35: (24, 1024, 16),
    0.76: (24, 1536, 16),
    1.3: (24, 2048, 32),
    2.6: (32, 2560, 32),
    6.7: (32, 4096, 32),
    15.0: (48, 5120, 40),
    39.0: (48, 8192, 64),
    76.0: (60, 10240, 80),
}


# Heads of published GPTs by hidden size (Brown et al. 2020, table 2.1; Narayanan et al. 2021, table 1).
GPT_HEADS = {1536: 16, 2304: 24, 2560: 32, 3072: 32, 4096: 32, 6144: 48, 8192: 64, 10240: 80, 12288: 96, 16384: 128}


def gpt_of_size(billions: float) -> Transformer | None:
    """The GPT of about that many parameters that benchmarks train, or None if there is none."""
    near = min(GPTS, key=lambda each: abs(each / billions - 1))
    return _gpt(*GPTS[near], tied=False) if abs(near / billions - 1) < 0.04 else None


def gpt_heads(hidden: int) -> int:
    """Heads of a GPT of that hidden size: those of a published one, or one for 64 channels."""
    return GPT_HEADS.get(hidden) or max(1, hidden // 64)


def named_transformer(name: str) -> Transformer | None:
    """The sizes of a model by its name, or None."""
    found = (model for pattern, model in TRANSFORMERS if re.search(pattern, name.lower()))
    return next(found, None)
