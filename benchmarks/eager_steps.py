"""Price measured steps of training frameworks by the compiler's own path: planned by their degrees, and simulated.

    Case  ->  train step, Megatron(...), machine  ->  StepParts  ->  seconds, on the machine or with other figures

Each row is a model of `models`, planned by the row's degrees, on the machine of the row with what its executor does: no
product is padded (`unaligned_share`); gradients are reduced, and parameters of ZeRO 3 gathered for both passes, behind
compute where the framework has streams for that (`hidden_share`). Frameworks of these rows have norms, softmax,
activations and dropout as kernels written by hand, about what XLA fuses, each of which its host launches (`launch_s`).
Where those of a layer are counted, the tasks of a plan's path are priced by what device and host take (`eager_host`).

    equal stages          Megatron
    stages of other       PipelineParallel with these layers, weights pinned along the tensor axis, and with ZeRO 1 the
    numbers of layers     optimizer's state along the data axis, too
    experts               PipelineParallel with experts along an axis of the replicas, and tokens constrained to it

A row is planned once: its parts along the critical path are kept, and priced anew for other figures of the machine.

Not expressed, and counted: latent attention and layers without any, parts of a layer computed again, context
parallelism, adapters. Unlike most of these rows, models here have a table of embeddings apart from the head, and drop
nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import autopar
from autopar import Cluster, Megatron, PipelineParallel
from autopar.aot import Traced
from autopar.errors import AutoparError
from autopar.hardware.machine import Link, Machine
from autopar.step_parts import CollectivePart, StepParts
from benchmarks.accuracy_cases import Case, Layout, Unusable
from benchmarks.accuracy_fit import Predict, Scalars
from benchmarks.accuracy_journal import Entry
from benchmarks.accuracy_models import Transformer
from benchmarks.accuracy_report import Predicted
from benchmarks.accuracy_steps import DIVIDED_BY_TENSOR, specs_of
from benchmarks.eager_host import FASTER, host_seconds
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.models.cudnn import traced_as_if_there
from benchmarks.models.llama import Llama, llama_workload
from benchmarks.models.workload import Workload

_DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16, "fp8": jnp.bfloat16, "tf32": jnp.float32}
"""Types of a model's values, by that of its products."""
_TIME_LIMIT_S = 20.0
_UNBOUNDED = 1e15
_EXPERTS = r"layer_\d+\.(gate|up|down)$"
"""Weights of a layer's experts."""
PARTIAL = 0.1
"""Exponent of the rate of collectives in a part of a host, over that in the whole: (devices / 8) ** PARTIAL. All-reduce
of 256 MB on 2, 4 and 8 A100: 184, 209 and 217 GB/s (vTrain trace/*_LUT), which makes 0.12 and 0.06."""
WHOLE_GROUP = 8
UNALIGNED = 0.4
"""Share of the rate of products with a size that is no multiple of 8: of GPTs with 50,257 words on one device."""


def check_expressed(case: Case) -> Case:
    """Return the case; raise `Unusable`, which says why, if no model and method here expresses it."""
    model, layout, experts = case.model, case.layout, case.model.experts
    counts = layers_of_stages(case)
    by_hand = experts is not None or len(set(counts)) > 1
    reasons = {
        "has latent attention, or layers without any": any(model.latent_ranks) or model.attention_layers != -1,
        "has experts in some layers, or for all tokens": experts is not None
        and bool(experts.dense_layers or experts.shared_width),
        "divides experts otherwise than their tokens": experts is not None
        and (layout.tp > 1 or layout.dp % layout.ep > 0),
        "trains adapters": case.habits.frozen,
        "divides sequences": layout.cp > 1,
        "has unequal stages and does not say of which layers": sum(counts) != model.layers,
        "has experts or unequal stages with ZeRO 2 or 3": layout.zero > 1 and by_hand,
        "divides the state among replicas that divide no weight": layout.zero > 0
        and all(size % layout.dp for size in (model.hidden, model.width // layout.tp)),
        "computes parts of a layer again": layout.recompute == "selective",
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unusable(reason)
    return case


def priced(case: Case) -> Entry:
    """Plan and simulate a case, and take its step apart; raise `Unusable` for what the compiler refuses."""
    cluster = Cluster(num_devices=case.layout.devices, machine=machine_of(case, Scalars()))
    try:
        with traced_as_if_there():
            workload, step = traced(traced_key(case))
            planned = step.on_cluster(cluster).plan(method_of(case, workload))
        parts = _as_run(case, planned.parts(cluster))
        peak_bytes = planned.simulate(cluster).peak_bytes
        return Entry(step_s=_step_s(case, parts, Scalars()), peak_bytes=peak_bytes, parts=parts.to_data())
    except AutoparError as error:
        raise Unusable(f"{type(error).__name__}: {str(error).split('. ')[0]}") from error


def method_of(case: Case, workload: Workload) -> Megatron | PipelineParallel:
    """Return the method that plans a case by its degrees: stages with experts, or of unequal layers, by hand."""
    layout, counts = case.layout, layers_of_stages(case)
    common: dict[str, Any] = {
        "num_microbatches": layout.microbatches,
        "reduce_dtype": "float32" if case.habits.sums_in_32_bits else None,
        "schedule": "interleaved" if layout.vp > 1 else "1f1b",
        "virtual_stages": layout.vp if layout.vp > 1 else None,
    }
    zero = layout.zero if layout.dp > 1 else 0
    if case.model.experts is None and len(set(counts)) == 1:
        degrees = {"data": layout.dp, "tensor": layout.tp, "pipeline": layout.pp}
        return Megatron(**degrees, zero=zero, time_limit_s=_TIME_LIMIT_S, **common)
    if case.model.experts is None:
        sizes = {"data": layout.dp, "tensor": layout.tp}
        divided = {"embed": "data", **DIVIDED_BY_TENSOR}
        specs = specs_of(workload, divided, sizes, "(master|opt_state).*") if zero else {}
        specs |= specs_of(workload, DIVIDED_BY_TENSOR, sizes)
    else:
        sizes = _expert_mesh(layout)
        specs = {_EXPERTS: PartitionSpec("expert")}
    devices = layout.dp * layout.tp
    hosts = max(1, devices // case.machine.devices_per_host)
    stops = [*accumulate(counts)]
    return PipelineParallel(
        layers=[[stop - count, stop] for stop, count in zip(stops, counts)],
        submeshes=[(hosts, devices // hosts)] * layout.pp,
        mesh_shapes=[tuple(sizes.values())] * layout.pp,
        axis_names=tuple(sizes),
        specs=specs,
        layouts="search",
        **common,
    )


def layers_of_stages(case: Case) -> list[int]:
    """The layers of each stage: as many each, or as the row says, or with the ends of the model as a layer each."""
    layers, layout, stages = case.model.layers, case.layout, case.layout.pp * case.layout.vp
    if layout.stage_layers or layers % stages == 0:
        return list(layout.stage_layers) or [layers // stages] * stages
    inside = [(layers + 2) // stages] * (stages - 2)
    return [(layers + 2) // stages - 1, *inside, (layers + 2) // stages - 1]


def _expert_mesh(layout: Layout) -> dict[str, int]:
    """The mesh of a stage whose experts are divided: replicas of all experts, each of several devices."""
    return {"data": layout.dp // layout.ep, "expert": layout.ep}


def by_parts(entries: Mapping[str, Entry]) -> Predict:
    """Return what predicts cases by the parts of their steps, which `entries` have by the digests of their rows."""
    parts = {digest: StepParts.from_data(entry.parts) for digest, entry in entries.items() if entry.parts}

    def predict(cases: Sequence[Case], scalars: Scalars) -> list[Predicted]:
        found: list[Predicted] = []
        for case in cases:
            habits, digest = case.habits, case.row.digest
            step_s = _step_s(case, parts[digest], scalars)
            parameters = case.model.parameters / (case.layout.tp * case.layout.pp)
            tensor_bytes = entries[digest].peak_bytes + habits.kept_gradient_bytes * parameters
            each = Predicted(
                case=case,
                step_s=step_s,
                peak_bytes=tensor_bytes + habits.held_bytes,
                tensor_bytes=tensor_bytes,
                cached_bytes=(habits.fragmentation - 1) * tensor_bytes,
            )
            found.append(each)
        return found

    return predict


def _step_s(case: Case, parts: StepParts, scalars: Scalars) -> float:
    machine, launches = machine_of(case, scalars), case.habits.launches
    rates = {"product": scalars.matmul_rate, "half": scalars.matmul_half, "memory": scalars.memory_rate}
    if launches is None:
        return parts.step_s(machine, **rates) + scalars.step_s
    task_s = host_seconds(case, launches, machine.launch_s, parts)
    return parts.step_s(replace(machine, launch_s=0.0), **rates, vector=FASTER, task_s=task_s) + scalars.step_s


def _as_run(case: Case, parts: StepParts) -> StepParts:
    """Return the parts with what the framework runs beside compute.

    Parameters of ZeRO 3 are gathered ahead for the backward pass too, as by a stream of its own. Collectives of tensor
    parallelism in as many parts as devices have the first waited for (Transformer Engine's user buffers).
    """
    ahead = case.habits.hidden_share > 0 and case.layout.zero == 3
    tensor = case.layout.tp if case.habits.overlaps_products else 1

    def run(each: CollectivePart, times: float) -> tuple[CollectivePart, float]:
        if ahead and each.kind == "all-gather":
            return each._replace(combined=True), times
        return each, times / tensor if not each.combined and each.inside * each.across == tensor else times

    tasks = (replace(task, collectives=tuple(run(*each) for each in task.collectives)) for task in parts.tasks)
    return replace(parts, tasks=tuple(tasks))


def machine_of(case: Case, scalars: Scalars) -> Machine:
    """The machine of a case by what its executor does, its kernels' starts and its links multiplied by scalars.

    Its memory bounds no plan: a case is planned as it was run, and held against the memory afterwards.
    """
    machine, habits = case.machine, case.habits
    launch_s = max(machine.kernel_s, habits.launch_s) if habits.launch_s else 0.0
    return replace(
        machine,
        memory_bytes=_UNBOUNDED,
        compiler_share=0.0,
        kernel_s=machine.kernel_s * scalars.launch,
        launch_s=launch_s * scalars.launch,
        hidden_share=min(1.0, habits.hidden_share * scalars.overlap),
        unaligned_share=UNALIGNED if habits.launch_s else 1.0,
        intra=_scaled_link(machine, scalars),
        inter=replace(machine.inter, bandwidth=machine.inter.bandwidth * scalars.inter_rate),
    )


def _scaled_link(machine: Machine, scalars: Scalars) -> Link:
    """The link inside a domain; groups of a part of it have another share of its bandwidth."""
    link, whole = machine.intra, min(machine.domain, WHOLE_GROUP)
    exponent = PARTIAL * (scalars.intra_partial - 1)
    shares = {size: link.bandwidth_of(size) * (size / whole) ** exponent for size in range(2, whole)}
    shares |= {size: rate for size, rate in link.group_bandwidths if size >= whole}
    return replace(
        link,
        latency_s=link.latency_s * scalars.intra_latency,
        bandwidth=link.bandwidth * scalars.intra_rate,
        group_bandwidths=tuple((size, rate * scalars.intra_rate) for size, rate in shares.items()),
        exchange_bandwidths=tuple((size, rate * scalars.intra_rate) for size, rate in link.exchange_bandwidths),
    )


class StepKey(NamedTuple):
    """All that the train step of a case is made of: those with the same are best priced one after the other."""

    model: Transformer
    batch: int
    sequence: int
    recomputed: bool
    kernel: bool
    dtype: str
    expert_mesh: tuple[tuple[str, int], ...]


def traced_key(case: Case) -> StepKey:
    """Return what `traced` is given for a case."""
    model, layout, habits = case.model, case.layout, case.habits
    if model.vocab % layout.tp:
        # Padded, that devices share it (Megatron-LM, megatron/training/tokenizer, _vocab_size_with_padding).
        model = replace(model, vocab=-(-model.vocab // (128 * layout.tp)) * 128 * layout.tp)
    expert_mesh = tuple(_expert_mesh(layout).items()) if model.experts else ()
    recomputed = layout.recompute == "full"
    return StepKey(model, layout.batch, layout.sequence, recomputed, habits.flash, habits.dtype, expert_mesh)


@lru_cache(maxsize=1)
def traced(key: StepKey) -> tuple[Workload, Traced]:
    """Trace the train step of a model once for rows that come one after the other."""
    model = key.model
    as_llama = model.gated or model.kv_heads not in (0, model.heads) or key.dtype == "fp8"
    workload = _llama(key) if as_llama else _gpt(key)
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=Cluster.parse("1x cpu"))
    return workload, step.trace(workload.abstract_state, workload.abstract_batch)


def _gpt(key: StepKey) -> Workload:
    model = key.model
    size = GPTSize(
        width=model.hidden,
        layers=model.layers,
        heads=model.heads,
        head=model.head_size or None,
        length=key.sequence,
        vocabulary=model.vocab,
        batch=key.batch,
        hidden=model.width,
        recomputed=key.recomputed,
        kernel=key.kernel,
    )
    return alpa_gpt("gpt", size, _DTYPES[key.dtype])


def _llama(key: StepKey) -> Workload:
    model, experts = key.model, key.model.experts
    size = Llama(
        num_layers=model.layers,
        width=model.hidden,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads or model.heads,
        head=model.head_size or None,
        hidden=experts.width if experts else model.width,
        experts=experts.count if experts else 0,
        chosen=experts.chosen if experts else 1,
        sharding=_at_experts(dict(key.expert_mesh)) if experts else None,
        vocabulary=model.vocab,
        sequence=key.sequence,
        batch=key.batch,
        scanned=False,
        remat=key.recomputed,
        cudnn=key.kernel,
        gated=model.gated,
        in_8_bits=key.dtype == "fp8",
        dtype=_DTYPES[key.dtype],
    )
    return llama_workload("llama", size)


def _at_experts(sizes: Mapping[str, int]) -> NamedSharding:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return NamedSharding(mesh, PartitionSpec("data", "expert"))
