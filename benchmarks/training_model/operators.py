"""The operators of a transformer's train step, as one device runs them on one microbatch.

A block is a list of operators that run one after the other: a layer forward or backward, an end of the model, the
update. n tokens, hidden size h, t-fold tensor parallelism; the bytes of passes over memory count reads and writes, of
values of 2 bytes (`prices` widens what is kept in 4):

    products        QKV, output, MLP: 2·n·(parameters)/t FLOPs forward, twice that backward
    attention       4·n·s·d·a/t FLOPs; its scores take a·n·s/t elements, passed over by softmax and dropout
    collectives     2 all-reduces of n·h elements per layer and direction (Shoeybi et al. 2019), or the gathers and
                    scatters of sequence parallelism (Korthikanti et al. 2022), which move as much
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.training_model.layout import Habits, Layout
from benchmarks.training_model.models import Experts, Transformer


@dataclass(frozen=True, kw_only=True)
class Product:
    """`count` matrix products of `flops` and `nbytes` each."""

    flops: float
    nbytes: float
    count: int = 1
    narrowest: float = 1e9
    """The smallest of the three sizes: narrow products fill fewer tiles, and read each factor for less work."""
    attention: bool = False
    """One fused kernel of attention, in 2-byte types."""
    aligned: bool = True
    """All of its sizes are multiples of what a load of 16 bytes holds."""
    head: bool = False
    """Logits: in 2-byte types where other products are in FP8."""
    routed: bool = False
    """Of experts, on the tokens that were sent to them."""
    backward: bool = False
    """Of a gradient: a factor lies in memory transposed, and sums are exact."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """`kernels` kernels that read and write `nbytes` altogether."""

    nbytes: float
    kernels: int = 1
    exact: bool = False
    """`nbytes` are what they are, whatever bytes a value has."""
    epilogue: bool = False
    """Products do it as they write what they computed."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """`count` collectives of `nbytes` each over an axis of the layout."""

    kind: str
    nbytes: float
    axis: str
    count: int = 1
    copies: int = 1
    """Of an all-to-all: each token is in `nbytes` that often, and goes to each host at most once."""


Operator = Product | Pass | Collective


def product(rows: float, inner: float, columns: float, count: int = 1) -> Product:
    """Products of 2-byte matrices (rows, inner) and (inner, columns)."""
    nbytes = 2 * (rows * inner + inner * columns + rows * columns)
    narrowest = min(rows, inner, columns)
    return Product(flops=2 * rows * inner * columns, nbytes=nbytes, count=count, narrowest=narrowest)


def backward_products(forward: tuple[Operator, ...], *, frozen: bool = False) -> tuple[Operator, ...]:
    """Those of the gradients of both factors, or of the activations alone if the weights are frozen."""
    found = (each for each in forward if isinstance(each, Product))
    return tuple(
        replace(each, count=each.count if frozen else 2 * each.count, backward=True)
        if not each.attention
        # A fused kernel of attention computes the scores again: 5 products for the 2 of the forward pass.
        else Product(flops=2.5 * each.flops, nbytes=2.5 * each.nbytes, count=each.count, attention=True)
        for each in found
    )


@lru_cache(maxsize=4096)
def layer_forward(model: Transformer, layout: Layout, habits: Habits, expert_layer: bool) -> tuple[Operator, ...]:
    """One layer of the forward pass; its collectives are the last."""
    n, h, t = layout.tokens, model.hidden, layout.tp
    split = n / t if habits.sequence_parallel else n  # tokens of a norm or a dropout on one device
    kernels = 1 if habits.compiled else 2
    masks = 2 * split * h if habits.dropout else 0
    around = Pass(nbytes=(8 + 12) * split * h + masks, kernels=2 * kernels)
    mlp = _expert_mlp(model, layout, habits) if expert_layer else _dense_mlp(model, layout, habits)
    products = (*_attention_products(model, layout, habits), *mlp)
    return (around, *_attention_passes(model, layout, habits), *products, *_layer_collectives(model, layout, habits))


@lru_cache(maxsize=4096)
def layer_backward(model: Transformer, layout: Layout, habits: Habits, expert_layer: bool) -> tuple[Operator, ...]:
    """One layer of the backward pass, without what is computed again."""
    forward = layer_forward(model, layout, habits, expert_layer)
    n, h, t = layout.tokens, model.hidden, layout.tp
    split = n / t if habits.sequence_parallel else n
    passes = sum(each.nbytes for each in forward if isinstance(each, Pass))
    kernels = sum(each.kernels for each in forward if isinstance(each, Pass))
    # Gradients of norms, residuals and activations read what the forward pass read, and the gradient besides.
    around = Pass(nbytes=1.5 * passes + 6 * split * h, kernels=2 * kernels)
    experts = model.experts.count // layout.ep if model.experts and expert_layer else 0
    weights = (
        model.attention_parameters + (model.shared_parameters if expert_layer else model.dense_mlp_parameters)
    ) / t
    weights += experts * model.expert_parameters / t
    if habits.frozen:
        weights = 0.0
    fused = habits.fused_accumulation  # then the gradient of one microbatch is never written
    read = ((0.0 if fused else habits.value_bytes) + 2 * habits.gradient_bytes) * weights
    accumulated = Pass(nbytes=read, kernels=2 if habits.compiled else 12, exact=True, epilogue=fused)
    collectives = tuple(each for each in forward if isinstance(each, Collective))
    return (around, accumulated, *backward_products(forward, frozen=habits.frozen), *collectives)


def _attention_products(model: Transformer, layout: Layout, habits: Habits) -> tuple[Operator, ...]:
    n, h, t = layout.tokens, model.hidden, layout.tp
    queries, keys = model.query_size / t, model.key_value_size / max(1, min(t, model.kv_heads or t))
    if model.latent_ranks[1]:
        inputs = product(n, h, model.attention_parameters / h / t - queries)
    else:
        inputs = product(n, h, queries + 2 * keys)
    outputs = product(n, queries, h)
    share = 1.0 if model.attention_layers < 0 else model.attention_layers / model.layers
    flops = 2 * n * layout.sequence * queries * share
    if habits.causal_half:
        flops /= 2
    if habits.flash:
        fused = Product(flops=2 * flops, nbytes=2 * n * (2 * queries + 2 * keys), attention=True)
        return inputs, fused, outputs
    scores = layout.microbatch * model.heads / t * layout.sequence * layout.sequence / layout.cp
    head = model.query_size / model.heads
    attended = Product(flops=flops, nbytes=2 * (scores + 2 * n * queries), count=2, narrowest=head)
    return inputs, attended, outputs


def _attention_passes(model: Transformer, layout: Layout, habits: Habits) -> tuple[Operator, ...]:
    n, t = layout.tokens, layout.tp
    copies = Pass(nbytes=16 * n * model.query_size / t, kernels=1 if habits.compiled else 4)
    if habits.flash:
        return (copies,)
    scores = layout.microbatch * model.heads / t * layout.sequence * layout.sequence / layout.cp
    if fused_softmax(model, layout, habits):
        nbytes, kernels = 4, 1
    else:
        # Masked in place, then normalized; scores of 2 bytes are widened, scaled and narrowed besides.
        nbytes, kernels = (36, 5) if habits.value_bytes == 2 else (8, 2)
    if habits.dropout and habits.compiled:
        nbytes += 3  # in the same kernel, as OneFlow's fused_tril_scale_softmax_mask_scale
    elif habits.dropout:
        nbytes, kernels = nbytes + 5, kernels + 1
    passes = Pass(nbytes=nbytes * scores, kernels=kernels)
    return copies, passes


def fused_softmax(model: Transformer, layout: Layout, habits: Habits) -> bool:
    """True if one kernel scales, masks and normalizes the scores: Megatron-LM's takes values of 2 bytes, and numbers of
    heads and samples that four warps divide among them (megatron/model/fused_softmax.py, is_kernel_available)."""
    return habits.compiled or (habits.value_bytes == 2 and layout.microbatch * model.heads // layout.tp % 4 == 0)


def _dense_mlp(model: Transformer, layout: Layout, habits: Habits) -> tuple[Operator, ...]:
    n, t = layout.tokens, layout.tp
    width = model.width / t
    activation = Pass(nbytes=(6 if model.gated else 4) * n * width, kernels=1)
    into = product(n, model.hidden, width * (2 if model.gated else 1))
    return activation, into, product(n, width, model.hidden)


def _expert_mlp(model: Transformer, layout: Layout, habits: Habits) -> tuple[Operator, ...]:
    experts = model.experts
    assert experts is not None
    n, h, t = layout.tokens, model.hidden, layout.tp
    local = max(1, experts.count // layout.ep)
    rows = n * experts.chosen / local  # all devices of a group send their tokens: n·k·ep/E of them to each expert
    width, gates = experts.width / t, 2 if model.gated else 1
    into, out = product(rows, h, width * gates, local), product(rows, width, h, local)
    sent = n * experts.chosen
    if habits.fused_experts:
        passes = Pass(nbytes=6 * sent * h, kernels=4)  # gathering what is sent, and the weighted sum
    else:
        # Permuting, sorting by experts and padding the tokens, each read and written, and back; the weighted sum.
        passes = Pass(nbytes=(26 * h + 6 * width * gates) * sent, kernels=12)
    shared = _shared_expert(model, experts, n, t)
    return (replace(into, routed=True), replace(out, routed=True), passes, *shared)


def _shared_expert(model: Transformer, experts: Experts, n: float, t: int) -> tuple[Operator, ...]:
    if not experts.shared_width:
        return ()
    width = experts.shared_width / t
    into = product(n, model.hidden, width * (2 if model.gated else 1))
    return into, product(n, width, model.hidden), Pass(nbytes=6 * n * width, kernels=1)


def _layer_collectives(model: Transformer, layout: Layout, habits: Habits) -> tuple[Operator, ...]:
    found: list[Operator] = []
    activations = 2.0 * layout.tokens * model.hidden
    if layout.tp > 1:
        found.append(Collective(kind="all-reduce", nbytes=activations, axis="tp", count=2))
    if layout.cp > 1:
        keys = 4 * layout.tokens * layout.cp * model.key_value_size / layout.tp
        found.append(Collective(kind="all-gather", nbytes=keys, axis="cp"))
    if model.experts and layout.ep > 1:
        sent = activations * model.experts.chosen / layout.tp
        found.append(Collective(kind="all-to-all", nbytes=sent, axis="ep", count=2, copies=model.experts.chosen))
    return tuple(found)


# --- the ends of the model ------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def embedding(model: Transformer, layout: Layout, habits: Habits) -> tuple[Operator, ...]:
    """Looking tokens up and adding gradients to the table: forward and backward."""
    n, h = layout.tokens, model.hidden
    # The table's gradient is dense.
    table = 0.0 if habits.frozen else habits.gradient_bytes * model.vocab * h / layout.tp
    found: tuple[Operator, ...] = (Pass(nbytes=20 * n * h, kernels=11), Pass(nbytes=2 * table, exact=True))
    if layout.tp > 1:
        found = (*found, Collective(kind="all-reduce", nbytes=2.0 * n * h, axis="tp"))
    return found


@lru_cache(maxsize=4096)
def head(model: Transformer, layout: Layout, habits: Habits) -> tuple[Operator, ...]:
    """Logits and cross entropy, forward and backward: the logits are passed over in float32."""
    n, h, t = layout.tokens, model.hidden, layout.tp
    columns = model.vocab / t
    # A vocabulary that is divided is padded so that each device has as much of it.
    aligned = t > 1 or model.vocab % 8 == 0
    logits = replace(product(n, h, columns, 2 if habits.frozen else 3), head=True, aligned=aligned)
    read = (24 if habits.compiled else 56) * n * columns
    passes = Pass(nbytes=read, kernels=4 if habits.compiled else 24, exact=True)
    found: tuple[Operator, ...] = (logits, passes, Pass(nbytes=20 * n * h, kernels=4))
    if t > 1:
        found = (*found, Collective(kind="all-reduce", nbytes=2.0 * n * h, axis="tp"))
        found = (*found, Collective(kind="all-reduce", nbytes=4.0 * n, axis="tp", count=3))
    return found
