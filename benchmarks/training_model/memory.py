"""The memory one device needs: parameters, gradients, optimizer states, and activations of the microbatches in flight.

states          parameters P and their copies, ZeRO dividing by the data parallelism d what its stage names
                (Rajbhandari et al. 2020): 2·P, g·P gradients, 12·P states
activations     of a layer of n tokens and hidden size h, in bytes (Korthikanti et al. 2022, table 2):
                n·h·(10 + 24/t) + 5·scores,  sequence parallelism dividing the 10 by t;
                dropouts' masks included, 2·scores without dropout, none if attention is fused or recomputed
                ("selective"); all of it twice where values have 4 bytes;
                2·n·h if the whole layer is recomputed
in flight       1F1B keeps p - i microbatches in stage i, GPipe all; interleaving 1 + (p-1)/(p·v) as much
ends            logits in float32 and their gradient in the last stage
besides         one layer being recomputed, buckets of gradients being reduced, and what the framework holds
"""

from dataclasses import dataclass

from benchmarks.training_model.layout import Habits, Layout
from benchmarks.training_model.models import Transformer
from benchmarks.training_model.step import layers_of, stage_parameters


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest device."""

    states_bytes: float
    activation_bytes: float
    other_bytes: float
    held_bytes: float = 0.0
    fragmentation: float = 1.0

    @property
    def tensor_bytes(self) -> float:
        """In use, as an allocator counts."""
        return self.states_bytes + self.activation_bytes + self.other_bytes

    @property
    def total_bytes(self) -> float:
        """Of the device, as its driver counts."""
        return self.tensor_bytes * self.fragmentation + self.held_bytes


def peak_memory(model: Transformer, layout: Layout, habits: Habits) -> Memory:
    """That of the stage that needs most."""
    stages = {0, layout.pp - 1, layout.pp // 2}
    return max((stage_memory(model, layout, habits, stage) for stage in stages), key=lambda each: each.total_bytes)


def stage_memory(model: Transformer, layout: Layout, habits: Habits, stage: int) -> Memory:
    """Of one device in one stage."""
    layers = layers_of(model, layout, stage)
    kept = layers * layer_activations(model, layout, habits, layout.recompute) * in_flight(layout, habits, stage)
    again = layer_activations(model, layout, habits, "none") if layout.recompute == "full" else 0.0
    logits = 0.0
    if stage == layout.pp - 1:
        logits = (8.0 if habits.compiled else 10.0) * layout.tokens * model.vocab / layout.tp
    return Memory(
        states_bytes=_state_bytes(model, layout, habits, stage),
        activation_bytes=kept + max(again, logits),
        other_bytes=_gathered_bytes(model, layout, habits, stage),
        held_bytes=habits.held_bytes,
        fragmentation=habits.fragmentation,
    )


def layer_activations(model: Transformer, layout: Layout, habits: Habits, recompute: str) -> float:
    """Bytes that one microbatch leaves in one layer until its backward pass."""
    n, h, t = layout.tokens, model.hidden, layout.tp
    split = t if habits.sequence_parallel else 1
    wider = habits.value_bytes / 2
    if recompute == "full":
        return 2.0 * wider * n * h / split
    masks = 2 if habits.dropout else 0
    expert = model.experts
    width = model.width if expert is None else expert.chosen * expert.width + expert.shared_width
    mlp = 2 * width * (3 if model.gated else 2) / t
    attention = 2 * (2 * model.query_size + 2 * model.key_value_size) / t
    routed = 4 * expert.chosen * h / t if expert else 0
    around = (8 + masks) * h / split
    scores = 0.0
    if not habits.flash and recompute != "selective":
        # What the softmax wrote, and what a dropout of it wrote with its mask.
        kept = habits.value_bytes * (2 if habits.dropout else 1) + (1 if habits.dropout else 0)
        scores = kept * layout.microbatch * model.heads / t * layout.sequence * layout.sequence / layout.cp
    return wider * n * (around + attention + mlp + routed) + scores


def in_flight(layout: Layout, habits: Habits, stage: int) -> float:
    """Microbatches whose activations a stage holds at most."""
    if habits.schedule == "gpipe":
        return layout.microbatches
    ahead = min(layout.microbatches, layout.pp - stage)
    return ahead * (1 + (layout.pp - 1) / (layout.pp * layout.vp)) if layout.vp > 1 else ahead


def _state_bytes(model: Transformer, layout: Layout, habits: Habits, stage: int) -> float:
    total = 0.0
    for parameters, axis in zip(stage_parameters(model, layout, stage), ("dp", "expert-dp")):
        shards = layout.stride(axis)[1]
        total += parameters * habits.value_bytes / (shards if layout.zero == 3 else 1)
        if habits.frozen:
            continue
        total += parameters * habits.gradient_bytes / (shards if layout.zero >= 2 else 1)
        total += parameters * habits.state_bytes / (shards if layout.zero >= 1 else 1)
    return total


def _gathered_bytes(model: Transformer, layout: Layout, habits: Habits, stage: int) -> float:
    """Whole parameters of two layers at a time under ZeRO-3, and the gradients of one."""
    if layout.zero != 3:
        return 0.0
    plain, experts = stage_parameters(model, layout, stage)
    return 3 * habits.value_bytes * (plain + experts) / max(1.0, layers_of(model, layout, stage))
