"""Time of operators on a machine, corrected by at most ten physical scalars.

A block of operators that one device runs takes

    max(Σ work + Σ collectives, launches · launch_s + Σ latencies)

where work and collectives are those of `autopar.machine`: kernels that are launched faster than they run hide the
launches, others wait for them, and collectives wait for the slowest of their devices, which empty messages measure.
Products reach less than their machine's best rate: the narrow ones, and all of them within a step. A ring over n
devices, k of each host, sends (n - 1) / n of what it reduces through k cards of each host:

    max(inside, (n - 1) / n · passes · bytes / (k · rate of a card))
"""

from dataclasses import dataclass, fields, replace

from autopar.hardware.machine import Link, Machine
from benchmarks.training_model.layout import Habits, Layout
from benchmarks.training_model.operators import Collective, Operator, Pass, Product

HOPPER_BACKWARD = {"tf32": 0.5, "fp8": 0.85}
"""Of the rate of products on Hopper: what those of the backward pass reach, estimates. Its units transpose factors of 2
bytes only (PTX ISA, wgmma.mma_async), so TF32 takes the instructions of older generations; in FP8, Transformer Engine
has gradients summed outside of the units every few steps, for precision (module/base.py, _2X_ACC_DGRAD and _WGRAD)."""
HOPPER = ("h100", "h200", "gh200")
BLACKWELL = ("b200", "b300", "gb200", "gb300")
"""Their units accumulate in a memory of their own, and compute a tile while the one before is written."""

PARTIAL = 0.1
"""Exponent of the rate of collectives in a part of a host, over that in the whole: (devices / 8) ** PARTIAL. All-reduce
of 256 MB on 2, 4 and 8 A100: 184, 209 and 217 GB/s (vTrain trace/*_LUT), which makes 0.12 and 0.06."""
WHOLE_GROUP = 8

UNALIGNED = 0.4
"""Of the rate of products, where a size is no multiple of 8, that rows of GPTs with 50,257 words on one device show."""

HALF_WIDTH = 128
"""Smallest size of a product at which half of the rate of large ones is reached: estimate, one tile."""


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """Factors on the figures of a machine, 1 without calibration; what is fitted, and nothing else is."""

    matmul_rate: float = 1.0
    matmul_half: float = 1.0
    memory_rate: float = 1.0
    launch: float = 1.0
    intra_latency: float = 1.0
    intra_rate: float = 1.0
    intra_partial: float = 1.0
    inter_rate: float = 1.0
    overlap: float = 1.0
    step_s: float = 0.0
    """Added to every step, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A machine, the habits of a framework, and the scalars: all that prices depend on."""

    machine: Machine
    habits: Habits
    overlap: float
    partial: dict[int, Machine]
    """The machine as groups of so many devices of a host find it."""
    launch_s: float
    step_s: float


def rates_of(machine: Machine, habits: Habits, scalars: Scalars) -> Rates:
    """The machine with its figures multiplied by the scalars."""
    shares = {
        name: min(1.0, share * machine.in_step_share * scalars.matmul_rate)
        for name, share in machine.matmul_share.items()
    }
    corrected = replace(
        machine,
        matmul_share=shares,
        matmul_half_flops=machine.matmul_half_flops * scalars.matmul_half,
        memory_bandwidth=machine.memory_bandwidth * scalars.memory_rate,
        kernel_s=machine.kernel_s * scalars.launch,
        intra=_scaled(machine.intra, scalars.intra_latency, scalars.intra_rate),
        inter=_scaled(machine.inter, 1.0, scalars.inter_rate),
    )
    partial = _partial(corrected, PARTIAL * scalars.intra_partial)
    overlap = min(1.0, machine.overlap * scalars.overlap) if habits.overlaps else 0.0
    launch_s = max(machine.kernel_s, habits.launch_s) * scalars.launch
    return Rates(
        machine=corrected,
        habits=habits,
        overlap=overlap,
        partial=partial,
        launch_s=launch_s,
        step_s=scalars.step_s,
    )


def _partial(machine: Machine, exponent: float) -> dict[int, Machine]:
    whole = min(machine.domain, WHOLE_GROUP)
    rates = {size: (size / whole) ** exponent for size in range(2, whole)}
    return {size: replace(machine, intra=_scaled(machine.intra, 1.0, rate)) for size, rate in rates.items()}


def _scaled(link: Link, latency: float, rate: float) -> Link:
    """The link with other figures; groups of fewer devices have their share of it by `PARTIAL`."""
    return replace(link, latency_s=link.latency_s * latency, bandwidth=link.bandwidth * rate, group_bandwidths=())


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of a block: kernels and collectives."""

    compute_s: float
    collective_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.collective_s


def price(operators: tuple[Operator, ...], layout: Layout, rates: Rates) -> Price:
    """Seconds of the operators, one after the other."""
    work_s = collective_s = waits_s = 0.0
    launches, wider = 0, rates.habits.value_bytes / 2
    for each in operators:
        match each:
            case Product(count=count):
                work_s += count * _product_s(replace(each, nbytes=wider * each.nbytes), rates)
                launches += count * _kernels(each, rates.habits)
            case Pass(epilogue=True) if rates.machine.kind in BLACKWELL:
                continue
            case Pass(nbytes=nbytes, kernels=kernels, exact=exact):
                work_s += kernels * rates.machine.memory_s((1 if exact else wider) * nbytes / kernels)
                launches += kernels
            case Collective(count=count):
                # In as many parts as devices, of which the first is waited for (Transformer Engine's user buffers).
                hidden = 1 - 1 / layout.tp if rates.habits.overlaps_products and each.axis == "tp" else 0.0
                sent = replace(each, nbytes=wider * each.nbytes)
                collective_s += (1 - hidden) * count * _collective_s(sent, layout, rates)
                waits_s += count * collective_time_s(each.kind, 0.0, each.axis, layout, rates)
                launches += count
    return Price(compute_s=max(work_s, launches * rates.launch_s + waits_s - collective_s), collective_s=collective_s)


def _kernels(each: Product, habits: Habits) -> int:
    """Launches of one product: of an expert in FP8, both factors are quantized in both orders, expert by expert."""
    return 5 if each.routed and habits.dtype == "fp8" and not habits.fused_experts else 1


def _product_s(each: Product, rates: Rates) -> float:
    habits = rates.habits
    dtype = "bfloat16" if habits.dtype == "fp8" and (each.attention or each.head) else habits.dtype
    if each.attention:
        return rates.machine.matmul_s(each.flops / habits.attention_share, each.nbytes, dtype)
    share = each.narrowest / (each.narrowest + HALF_WIDTH) * (1 if each.aligned else UNALIGNED)
    if each.backward and rates.machine.kind in HOPPER:
        share *= HOPPER_BACKWARD.get(dtype, 1.0)
    work_s = rates.machine.matmul_s(each.flops / share, each.nbytes, dtype)
    if dtype != "fp8":
        return work_s
    # Both factors are read in 2 bytes and written in 1, as they are and transposed: about the bytes of the product;
    # a quarter where norms and activations write them so, a half with scales of blocks, which need both orders by their
    # own kernels, none in experts that are one kernel.
    if each.routed and habits.fused_experts:
        return work_s
    fused = (2 if habits.block_scaled else 4) if habits.compiled and not each.routed else 1
    return work_s + rates.machine.memory_s(each.nbytes / fused)


def _collective_s(each: Collective, layout: Layout, rates: Rates) -> float:
    hosts = layout.hosts(each.axis, rates.machine.domain)
    if each.copies == 1 or hosts == 1:
        return collective_time_s(each.kind, each.nbytes, each.axis, layout, rates)
    # Tokens go once to each host that has experts for them (DeepSeek-AI 2024, section 3.2.2), then on inside it.
    _, size = layout.stride(each.axis)
    reached = hosts * (1 - (1 - 1 / hosts) ** each.copies)
    # Where the framework overlaps, other microbatches compute meanwhile (Megatron-Core, overlap of expert parallelism).
    shown = 1 - rates.overlap
    across_s = shown * rates.machine.inter.ring_s(each.kind, each.nbytes * reached / each.copies, hosts)
    return across_s + rates.machine.intra.ring_s(each.kind, each.nbytes, size // hosts)


def collective_time_s(kind: str, nbytes: float, axis: str, layout: Layout, rates: Rates) -> float:
    """Of one collective over an axis of the layout."""
    _, size = layout.stride(axis)
    hosts = layout.hosts(axis, rates.machine.domain)
    return rates.partial.get(size // hosts, rates.machine).collective_s(kind, nbytes, size, hosts)


SCALARS = tuple(each.name for each in fields(Scalars))
