"""The time of one train step of a transformer: stages, pipeline, reduction of gradients, update."""

from dataclasses import dataclass

from benchmarks.training_model.layout import Layout
from benchmarks.training_model.models import Transformer
from benchmarks.training_model.operators import embedding, head, layer_backward, layer_forward
from benchmarks.training_model.pipeline import pipeline_s
from benchmarks.training_model.prices import Rates, collective_time_s, price


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, and what they are made of."""

    pipeline_s: float
    reduce_s: float
    update_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.reduce_s + self.update_s + self.fixed_s


def step_time(model: Transformer, layout: Layout, rates: Rates) -> StepTime:
    """Time and memory of one step, without the memory's limits."""
    stages = [_stage(model, layout, rates, index) for index in range(layout.pp)]
    transfer_s = _transfer_s(model, layout, rates)
    whole_s = pipeline_s(
        [forward for forward, _ in stages],
        [backward for _, backward in stages],
        layout.microbatches,
        transfer_s,
        schedule=rates.habits.schedule,
        virtual=layout.vp,
    )
    if rates.habits.frozen:
        return StepTime(pipeline_s=whole_s, reduce_s=0.0, update_s=0.0, fixed_s=rates.step_s)
    compute_s = layout.microbatches * max(forward + backward for forward, backward in stages)
    reduce_s = max(_reduce_s(model, layout, rates, index) for index in {0, layout.pp - 1})
    # What is overlapped hides behind the compute there is, and no more.
    overlap = 0.0 if rates.habits.one_stream and layout.tp * layout.pp > 1 else rates.overlap
    hidden_s = min(overlap * reduce_s, compute_s)
    update_s = max(_update_s(model, layout, rates, index) for index in {0, layout.pp - 1})
    return StepTime(pipeline_s=whole_s, reduce_s=reduce_s - hidden_s, update_s=update_s, fixed_s=rates.step_s)


def layers_of(model: Transformer, layout: Layout, stage: int) -> float:
    """Layers of one stage."""
    return layout.stage_layers[stage] if layout.stage_layers else model.layers / layout.pp


def _stage(model: Transformer, layout: Layout, rates: Rates, stage: int) -> tuple[float, float]:
    """Forward and backward seconds of one microbatch in one stage."""
    forward_s = backward_s = 0.0
    share = model.expert_layers / model.layers
    for expert_layer, part in ((True, share), (False, 1 - share)):
        if not part:
            continue
        forward = price(layer_forward(model, layout, rates.habits, expert_layer), layout, rates)
        backward = price(layer_backward(model, layout, rates.habits, expert_layer), layout, rates)
        again_s = forward.total_s if layout.recompute == "full" else 0.0
        count = part * layers_of(model, layout, stage)
        forward_s += count * forward.total_s
        backward_s += count * (again_s + backward.total_s)
    if stage == 0:
        forward_s += price(embedding(model, layout, rates.habits), layout, rates).total_s
    if stage == layout.pp - 1:
        backward_s += price(head(model, layout, rates.habits), layout, rates).total_s
    return forward_s, backward_s


def _transfer_s(model: Transformer, layout: Layout, rates: Rates) -> float:
    """Of a microbatch's activations to the next stage; each device of a tensor-parallel group sends its share."""
    if layout.pp == 1:
        return 0.0
    nbytes = rates.habits.value_bytes * layout.tokens * model.hidden / layout.tp
    return rates.machine.transfer_s(nbytes, layout.hosts("pp", rates.machine.domain) == 1)


def stage_parameters(model: Transformer, layout: Layout, stage: int) -> tuple[float, float]:
    """Of one device in one stage: those that all data parallelism holds, and those of its experts."""
    layers = layers_of(model, layout, stage)
    share = model.expert_layers / model.layers
    plain = model.attention_parameters + share * model.shared_parameters + (1 - share) * model.dense_mlp_parameters
    ends = model.vocab * model.hidden * ((stage == 0) + (stage == layout.pp - 1 and (layout.pp > 1 or not model.tied)))
    experts = share * model.experts.count * model.expert_parameters / layout.ep if model.experts else 0.0
    return (layers * plain + ends) / layout.tp, layers * experts / layout.tp


def _reduce_s(model: Transformer, layout: Layout, rates: Rates, stage: int) -> float:
    """Collectives of gradients and parameters of one step in one stage."""
    plain, experts = stage_parameters(model, layout, stage)
    total = 0.0
    for parameters, axis in ((plain, "dp"), (experts, "expert-dp")):
        if layout.stride(axis)[1] == 1 or not parameters:
            continue
        gathers = 1 if layout.zero in (1, 2) else 0
        if layout.zero == 3:
            # Parameters are gathered for each pass of each microbatch, gradients scattered after each.
            gathers = layout.microbatches * (3 if layout.recompute == "full" else 2)
            scatters = layout.microbatches
        elif layout.zero == 2:
            scatters = layout.microbatches
        else:
            scatters = 1
        kind = "reduce-scatter" if layout.zero else "all-reduce"
        reduced, held = rates.habits.reduced_bytes * parameters, rates.habits.value_bytes * parameters
        # Layer by layer, as FSDP does: each starts, and goes once around the ring of all ranks, by itself.
        others = max(layers_of(model, layout, stage) - 1, 0.0) if layout.zero >= 2 else 0.0
        for each, nbytes, times in ((kind, reduced, scatters), ("all-gather", held, gathers)):
            start_s = collective_time_s(each, 0.0, axis, layout, rates)
            total += times * (collective_time_s(each, nbytes, axis, layout, rates) + others * start_s)
    if layout.pp > 1 and model.tied:
        # The first and the last stage add their gradients of the one table they both hold.
        table = rates.habits.reduced_bytes * model.vocab * model.hidden / layout.tp
        total += 2 * rates.machine.transfer_s(table, layout.hosts("pp", rates.machine.domain) == 1)
    return total


def _update_s(model: Transformer, layout: Layout, rates: Rates, stage: int) -> float:
    """Reading and writing gradients, the optimizer's states and parameters once, norms of gradients besides."""
    plain, experts = stage_parameters(model, layout, stage)
    if layout.zero:
        plain /= layout.stride("dp")[1]
        experts /= layout.stride("expert-dp")[1]
    habits = rates.habits
    nbytes = (2 * habits.state_bytes + 2 * habits.gradient_bytes + habits.value_bytes) * (plain + experts)
    return rates.machine.memory_s(nbytes)
