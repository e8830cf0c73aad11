"""Habits of the frameworks, machines and compilers of the measurements, by their names.

The habits are what the frameworks' documentation, sources and defaults say; 10 us for the launch of one kernel from
eager PyTorch are an estimate, and those of checkpointed layers are off measured steps.
"""

import re
from dataclasses import dataclass, replace

BEHIND_COMPUTE = 0.5
"""Share of the collectives of gradients and parameters that frameworks with streams of their own hide: estimate."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Kernels that a host launches for a layer and microbatch, by the framework's source; without collectives."""

    forward: int
    backward: int
    """Gradients that are added to those of the microbatches before included."""
    softmax: int
    """More of them in each pass where the softmax of scores is no kernel of its own."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Habits of a framework, the same for every model."""

    dtype: str = "bfloat16"
    """The type of the matrix products."""
    flash: bool = True
    """Attention in one kernel, its scores never in memory."""
    launch_s: float = 0.0
    """Seconds of one kernel from Python; the machine's own gap where that is more. 0: none is launched one by one."""
    launches: Launches | None = None
    """Launches of a layer; None if they are not counted, and each kernel that XLA would launch takes one at least."""
    hidden_share: float = 0.0
    """Share of the collectives of gradients and ZeRO-3's parameters that runs behind compute."""
    overlaps_products: bool = False
    """Collectives of tensor parallelism are cut up, and run behind the products that they feed."""
    sums_in_32_bits: bool = False
    """Gradients of 16 bits are added up over microbatches, and over replicas, in 32."""
    kept_gradient_bytes: float = 0.0
    """For each parameter, of gradients that stay beside their sums."""
    frozen: bool = False
    """Only adapters beside the weights are trained (LoRA): weights have no gradients, and are not updated."""
    held_bytes: float = 4 * 2**30
    """Bytes of CUDA's context and libraries, NCCL's buffers for each group, and cuBLAS's workspaces: estimate."""
    fragmentation: float = 1.1
    """Bytes held by a caching allocator over those in use, estimate; 1 if memory is planned ahead of the step. CUDA's
    allocator in PyTorch frees what it caches where there would be no room else (c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True, kw_only=True)
class CompilerSettings:
    """Settings of a program's software that its compiler's defaults do not have."""

    combined_bytes: float | None = None
    """Sums are one collective up to that; None: as the compiler has it."""
    memory_share: float = 1.0
    """The share of a device's memory that the program may take."""


EAGER_S = 10e-6
CHECKPOINTED_S = 40e-6
"""Seconds of a launch with autograd, modules and checkpoints of layers, which keep and restore the state of random
numbers: chosen off a half of the measured steps of GPTs on eight A100s, to be tested on the other."""

# Megatron-LM, megatron/model/transformer.py with fused kernels. Forward: 2 norms, 4 products, 2 of the scores, softmax,
# dropout of it, copy of the heads, bias and GELU, 2 x 2 of bias, dropout and sum. Backward: 2 x 3 of norms, 2 x 4
# products, 4 sums of biases, 4 products of the scores and 2 that scale them, softmax, dropout, joined heads and a copy,
# GELU, 2 dropouts, 2 sums; 12 gradients added to the sums. Scores without the fused kernel: two casts, scale and mask.
MEGATRON_LAYER = Launches(forward=16, backward=33 + 12, softmax=4)

MEGATRON_2021 = Habits(dtype="float16", flash=False, launch_s=CHECKPOINTED_S, launches=MEGATRON_LAYER)
"""Megatron-LM and Megatron-DeepSpeed before fused attention."""
# Sailor's ae_scripts/clariden_scripts/run_opt.slurm asks for no mixed precision; NVIDIA's containers of PyTorch
# multiply float32 in TF32.
SAILOR = replace(MEGATRON_2021, dtype="tf32")
MEGATRON_CORE = Habits(launch_s=EAGER_S, hidden_share=BEHIND_COMPUTE, overlaps_products=True, sums_in_32_bits=True)
"""Megatron-Core with tp_comm_overlap, as recipes of NeMo and Megatron-Bridge and submissions to MLPerf set it."""
ONEFLOW = replace(MEGATRON_2021, launch_s=0.0, launches=None, hidden_share=BEHIND_COMPUTE)
"""OneFlow compiles the whole step to a graph that its C++ actors run, each as soon as its inputs are there: collectives
of gradients beside the backward pass too (Yuan et al. 2021)."""
FSDP = Habits(launch_s=EAGER_S, hidden_share=BEHIND_COMPUTE)
# XLA plans a step's memory before it runs, which leaves little between buffers; its groups are few.
XLA = Habits(hidden_share=BEHIND_COMPUTE, held_bytes=2.5 * 2**30, fragmentation=1.04)
PYTORCH = Habits(launch_s=EAGER_S)
"""Any other framework, as PyTorch runs a transformer; a row's kernel says what differs."""
PARAX = replace(XLA, dtype="float16", flash=False, hidden_share=0.0)

# Pattern of the framework in lower case -> habits.
FRAMEWORKS: tuple[tuple[str, Habits], ...] = (
    (r"^sailor\(megatron-deepspeed\)", SAILOR),
    (r"^megatron-deepspeed|^zero-3$", MEGATRON_2021),
    # No release of Megatron-Core is named.
    (r"^megatron(-lm)?( v2\.\d+| ptd-p)?$", MEGATRON_2021),
    (r"^oneflow-gpt|^libai", ONEFLOW),
    # SimuMax docs/b200/b200_real_repro_guide.md: nothing overlaps.
    (r"^megatron-lm 0\.14", replace(MEGATRON_CORE, hidden_share=0.0, overlaps_products=False)),
    (r"megatron-bridge", MEGATRON_CORE),
    (r"nemo pretrain|mlperf training", MEGATRON_CORE),
    (r"composer fsdp", FSDP),
    (r"maxtext", XLA),
    (r"^parax", PARAX),
)  # fmt: skip

# Pattern of a JAX program's software in lower case -> what it sets for the compiler.
COMPILERS: tuple[tuple[str, CompilerSettings], ...] = (
    # alpa-projects/alpa: one collective of all sums of gradients (alpa/shard_parallel/auto_sharding.py,
    # `all_reduce_threshold`), and alpa/global_env.py, `xla_client_mem_fraction`.
    (r"\balpa\b", CompilerSettings(combined_bytes=2.0**60, memory_share=0.9)),
)

# Pattern of the hardware in lower case -> machine of the library.
MACHINES: tuple[tuple[str, str], ...] = (
    (r"^dgx-gb300", "gb300-nvl72"),
    (r"^dgx-gb200", "gb200-nvl72"),
    (r"^dgx-b300", "dgx-b300"),
    (r"^(dgx-)?b200", "dgx-b200"),
    (r"^(dgx-)?h100|h100_80gb|dgxh100|hgxh100|^eos|nd_h100|h100\.8", "dgx-h100"),
    (r"^carina", "gb200-nvl72"),
    (r"^a100_40gb", "p4d.24xlarge"),
    (r"^a100", "dgx-a100-80"),
    (r"p3\.16xlarge", "p3.16xlarge"),
    (r"^v100-32gb", "dgx-1v-32"),
    (r"^v100", "dgx-1v-32"),
    (r"^gh-96", "gh200-4"),
    (r"^trillium", "tpu-v6e"),
    (r"^v5p", "tpu-v5p"),
)


def habits_of(framework: str) -> Habits | None:
    """The habits of a framework, those of PyTorch if it is unknown, or None if it is not named."""
    if not framework:
        return None
    return next((habits for pattern, habits in FRAMEWORKS if re.search(pattern, framework.lower())), PYTORCH)


def compiler_settings_of(stack: str, notes: str) -> CompilerSettings:
    """Return the settings of a JAX program's software, with the threshold of sums that a row's notes name."""
    known = (settings for pattern, settings in COMPILERS if re.search(pattern, stack.lower()))
    settings = next(known, CompilerSettings())
    said = re.search(r"all_reduce_threshold set to (\d+) MiB", notes)
    return settings if said is None else replace(settings, combined_bytes=int(said[1]) * 2.0**20)


def with_kernel(habits: Habits, kernel: str) -> Habits:
    """The habits with the kernel of attention that a row names."""
    return replace(habits, flash="flash" in kernel.lower()) if kernel else habits


def machine_of(hardware: str) -> str | None:
    """The library's name of the hardware, or None if it is unknown."""
    return next((name for pattern, name in MACHINES if re.search(pattern, hardware.lower())), None)
