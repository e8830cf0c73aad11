"""Habits of the frameworks, machines and compilers of the measurements, by their names.

The habits are what the frameworks' documentation and defaults say; the launch of one kernel from eager PyTorch, about
10 us forward and twice that with autograd and recomputation, is an estimate.
"""

import re
from dataclasses import dataclass, replace

from benchmarks.training_model.layout import Habits


@dataclass(frozen=True, kw_only=True)
class CompilerSettings:
    """What a program's software sets that its compiler's defaults do not."""

    combined_bytes: float | None = None
    """Sums are one collective up to that; None: as the compiler has it."""
    memory_share: float = 1.0
    """Of a device's memory, what the program may take."""


EAGER_S = 10e-6
CHECKPOINTED_S = 30e-6

MEGATRON_2021 = Habits(dtype="float16", flash=False, dropout=True, launch_s=CHECKPOINTED_S, causal_half=False)
"""Megatron-LM and Megatron-DeepSpeed before fused attention: fused softmax, bias-dropout-add and bias-GeLU."""
# Sailor's ae_scripts/clariden_scripts/run_opt.slurm asks for no mixed precision; NVIDIA's containers of PyTorch
# multiply float32 in TF32. Its opt_model.py and gpt_neo_model.py drop no scores out. AdamW holds two moments.
SAILOR = replace(
    MEGATRON_2021, dtype="tf32", value_bytes=4.0, gradient_bytes=4.0, reduced_bytes=4.0, state_bytes=8.0, dropout=False
)
MEGATRON_CORE = Habits(
    dtype="bfloat16", flash=True, sequence_parallel=True, launch_s=EAGER_S, overlaps=True, causal_half=True,
    gradient_bytes=4.0, reduced_bytes=4.0, compiled=True, overlaps_products=True, fused_accumulation=True,
)  # fmt: skip
"""With tp_comm_overlap, as the recipes of NeMo and Megatron-Bridge and the submissions to MLPerf set it."""
ONEFLOW = replace(MEGATRON_2021, compiled=True, launch_s=0.0, overlaps=True, one_stream=True)
"""OneFlow compiles the whole step to a graph that its C++ actors run, each as soon as its inputs are there: collectives
of gradients beside the backward pass too (Yuan et al. 2021), but for models that are split (LiBai's
libai/models/utils/graph_base.py)."""
# FlashAttention of 2022 reaches 25 to 40 % of an A100's peak (Dao 2023, section 1): 0.37 of what products do.
FSDP = Habits(
    dtype="bfloat16",
    flash=True,
    launch_s=EAGER_S,
    overlaps=True,
    causal_half=True,
    attention_share=0.37,
)
# XLA plans a step's memory before it runs, which leaves little between buffers; its groups are few.
XLA = Habits(
    dtype="bfloat16", flash=True, overlaps=True, causal_half=True, compiled=True,
    held_bytes=2.5 * 2**30, fragmentation=1.04,
)  # fmt: skip
# FlashAttention-2 reaches 50 to 73 % of an A100's peak (Dao 2023): three quarters of what products do.
PYTORCH = Habits(
    dtype="bfloat16",
    flash=True,
    launch_s=EAGER_S,
    causal_half=True,
    attention_share=0.75,
    gradient_bytes=4.0,
)
"""Any other framework, as PyTorch runs a transformer; a row's kernel says what differs."""
PARAX = replace(XLA, dtype="float16", flash=False, overlaps=False, causal_half=False)

# Pattern of the framework in lower case -> habits.
FRAMEWORKS: tuple[tuple[str, Habits], ...] = (
    (r"^sailor\(megatron-deepspeed\)", SAILOR),
    (r"^megatron-deepspeed|^zero-3$", MEGATRON_2021),
    # No release of Megatron-Core is named.
    (r"^megatron(-lm)?( v2\.\d+| ptd-p)?$", MEGATRON_2021),
    (r"^oneflow-gpt|^libai", ONEFLOW),
    # SimuMax docs/b200/b200_real_repro_guide.md: nothing overlaps.
    (r"^megatron-lm 0\.14", replace(MEGATRON_CORE, overlaps_products=False, overlaps=False)),
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
    """What the software of a JAX program sets, with the threshold of sums that a row's notes name."""
    known = (settings for pattern, settings in COMPILERS if re.search(pattern, stack.lower()))
    settings = next(known, CompilerSettings())
    said = re.search(r"all_reduce_threshold set to (\d+) MiB", notes)
    return settings if said is None else replace(settings, combined_bytes=int(said[1]) * 2.0**20)


def with_kernel(habits: Habits, kernel: str) -> Habits:
    """The habits with the kernels that a row names: of attention, and of norms ("rms")."""
    words = kernel.lower()
    if not words:
        return habits
    if "flash" not in words:
        return replace(habits, flash=False, compiled=False)
    share = 0.75 if re.search(r"flash[^\d]*2", words) else 0.37
    return replace(habits, flash=True, attention_share=share, compiled="rms" in words)


def with_release(habits: Habits, framework: str, note: str) -> Habits:
    """The habits with what a release of Megatron-Bridge changed for models with experts: from 26.06, its recipes in
    MXFP8 run experts as one kernel (NVTE_CUTEDSL_FUSED_GROUPED_MLP) and whole iterations as one CUDA graph."""
    release = re.search(r"megatron-bridge (\d+)\.(\d+)", framework.lower())
    if not release or (int(release[1]), int(release[2])) < (26, 6) or "mxfp8" not in note.lower():
        return habits
    return replace(habits, fused_experts=True, launch_s=0.0)


def machine_of(hardware: str) -> str | None:
    """The library's name of the hardware, or None if it is unknown."""
    return next((name for pattern, name in MACHINES if re.search(pattern, hardware.lower())), None)
