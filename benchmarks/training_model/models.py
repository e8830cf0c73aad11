"""Models that are trained: the sizes of a transformer, and the parameters these make.

A transformer of L layers, hidden size h, a heads (g of them with keys and values) of d channels, MLP width f:

    attention       h·d·(a + 2g) + a·d·h
    MLP             2·h·f, or 3·h·f if gated; a layer of experts has E of width f_e, of which each token takes k
    embeddings      V·h, twice unless tied
"""

from dataclasses import dataclass


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
    def key_value_size(self) -> int:
        """Channels of the keys, and again of the values."""
        return (self.kv_heads or self.heads) * (self.head_size or self.hidden // self.heads)

    @property
    def attention_parameters(self) -> int:
        queries, keys = self.latent_ranks
        if keys:
            down = self.hidden * (queries + keys)
            up = queries * self.query_size + 2 * keys * self.query_size
            return down + up + self.query_size * self.hidden
        return self.hidden * (2 * self.query_size + 2 * self.key_value_size)

    @property
    def dense_mlp_parameters(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.width

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.experts.width if self.experts else 0

    @property
    def shared_parameters(self) -> int:
        """Of what every token goes through in a layer of experts: the shared expert and the router."""
        if self.experts is None:
            return 0
        return (3 if self.gated else 2) * self.hidden * self.experts.shared_width + self.hidden * self.experts.count

    @property
    def expert_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def parameters(self) -> int:
        """All of them; norms and biases are left out."""
        experts = self.experts.count if self.experts else 0
        layers = self.layers * self.attention_parameters
        layers += (self.layers - self.expert_layers) * self.dense_mlp_parameters
        layers += self.expert_layers * (experts * self.expert_parameters + self.shared_parameters)
        return layers + (1 if self.tied else 2) * self.vocab * self.hidden
