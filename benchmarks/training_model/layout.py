"""How a model is trained: degrees of parallelism, microbatches, recomputation, and the habits of a framework.

Devices are numbered with tensor parallelism innermost, then context, data and pipeline parallelism, as Megatron-LM does
(Narayanan et al. 2021): an axis of stride s and size k has min(k, domain/s) of its devices in one fast domain.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism and sizes of batches."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Virtual stages of each device: interleaved 1F1B if more than one."""
    cp: int = 1
    ep: int = 1
    """Experts are spread over `ep` devices of those that hold different data."""
    zero: int = 0
    """1 shards the optimizer's states over data parallelism, 2 the gradients too, 3 the parameters too."""
    microbatch: int
    """Samples of one microbatch in one data-parallel group."""
    microbatches: int
    """Of one step, in one data-parallel group."""
    sequence: int
    recompute: str = "none"
    """"none", "selective" (attention's scores) or "full" (whole layers)."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: equally many."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> int:
        """Of one microbatch on one device."""
        return self.microbatch * self.sequence // self.cp

    def stride(self, axis: str) -> tuple[int, int]:
        """The stride and size of an axis over consecutive devices."""
        match axis:
            case "tp":
                return 1, self.tp
            case "cp":
                return self.tp, self.cp
            case "ep":
                return self.tp, self.ep
            case "dp":
                return self.tp, self.cp * self.dp
            case "expert-dp":
                return self.tp * self.ep, max(1, self.cp * self.dp // self.ep)
            case _:
                return self.tp * self.cp * self.dp, self.pp

    def hosts(self, axis: str, domain: int) -> int:
        """Fast domains of `domain` devices that one group of the axis is spread over."""
        stride, size = self.stride(axis)
        local = min(size, max(1, domain // stride))
        while size % local:
            local -= 1
        return size // local


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Habits of a framework, the same for every model."""

    dtype: str = "bfloat16"
    """Of the matrix products."""
    value_bytes: float = 2.0
    """Of one activation or parameter as it is kept and sent; 4 if nothing is in mixed precision."""
    flash: bool = True
    """Attention in one kernel, its scores never in memory."""
    sequence_parallel: bool = False
    """Norms and dropouts are split over tensor parallelism as well."""
    dropout: bool = False
    launch_s: float = 0.0
    """Of one kernel from Python; the machine's own gap where that is more."""
    overlaps: bool = False
    """Gradients are reduced, and ZeRO-3's parameters gathered, behind compute."""
    one_stream: bool = False
    """Models that are split by tensor or pipeline parallelism have their collectives queue with their kernels."""
    overlaps_products: bool = False
    """Collectives of tensor parallelism are cut up and run behind the products that they feed."""
    causal_half: bool = False
    """The kernel of attention skips what the mask hides."""
    attention_share: float = 0.8
    """Rate of the fused kernel of attention, over that of large products."""
    state_bytes: float = 12.0
    """Of the optimizer, per parameter: master copy and two moments in float32."""
    gradient_bytes: float = 2.0
    """Of one accumulated gradient."""
    reduced_bytes: float = 2.0
    """Of one gradient as it is reduced."""
    compiled: bool = False
    """Elementwise operators are fused into few kernels."""
    fused_accumulation: bool = False
    """Products of weights' gradients add to what is accumulated themselves, instead of a pass after them."""
    block_scaled: bool = False
    """Products in FP8 have a scale for each block of 32 values along what they sum over (MXFP8)."""
    frozen: bool = False
    """Only adapters beside the weights are trained (LoRA): weights have no gradients, and are not updated."""
    fused_experts: bool = False
    """Experts' products, activations and quantization run in one kernel on tokens that arrive in their order, and no
    number of tokens goes over the host."""
    held_bytes: float = 4 * 2**30
    """By CUDA's context and libraries, NCCL's buffers for each of the groups, and cuBLAS's workspaces: estimate."""
    fragmentation: float = 1.1
    """Bytes held by a caching allocator over those in use, estimate; 1 if memory is planned ahead of the step."""
    schedule: str = "1f1b"
