"""Price attention in one kernel, as in FlashAttention-2 (Dao, 2023) and cuDNN.

    kernel      max(FLOPs of its products / matmul rate + exponentials / their rate, bytes / memory bandwidth)
    gradients   the same, and a pass through memory before and after: the first sums rows of result times gradient and
                writes zeros, the second converts the gradients of queries, which the kernel sums in float32

Scores never leave the kernel. A tile of queries meets all keys that any of its queries sees, which is half a tile too
many where attention is causal; and a tile takes time to fill and to drain. The gradients need twice the exponentials:
scores are computed again, and the derivative of the softmax takes as long.

Two figures are fitted to 22 kernels on an H100 (`python -m benchmarks.attention_kernels`): the pairs that a query costs
beside those that it sees, and that ratio. The rate of exponentials is that of data sheets.
"""

from __future__ import annotations

from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import attention_flops
from autopar.hardware.machine import Machine

_FILLING, _DIAGONAL = 256, 128
"""Keys for each query that take as long as a tile does to begin and to end, and what a causal one computes in vain."""
_DERIVATIVES = 2
"""Exponentials of a score in the gradients: it is computed anew, and differentiated."""


def kernel_flops(eqn: jc.JaxprEqn, machine: Machine) -> float:
    """Return the FLOPs that take as long as a kernel of attention, at the rate of products."""
    kernel, queries = jp.attention_of(eqn), _queries(eqn)
    causal = kernel.causal or kernel.window is not None
    pairs = kernel.pairs + kernel.num_queries * (_FILLING + (_DIAGONAL if causal else 0))
    exponentials = kernel.batch * kernel.heads * pairs * (_DERIVATIVES if kernel.backward else 1)
    rate = machine.matmul_flops(queries.dtype.name)
    return attention_flops(eqn, pairs) + exponentials * rate / machine.exponential_rate


def gradient_sums(eqn: jc.JaxprEqn) -> float:
    """Return the bytes in which the kernel of the gradients sums those of queries, for each of their bytes."""
    return 4 / _queries(eqn).dtype.itemsize if jp.attention_of(eqn).backward else 0.0


def pass_bytes(eqn: jc.JaxprEqn) -> float:
    """Return the bytes of the passes around the kernel of the gradients, for each byte of queries."""
    # The result and its gradient are read, zeros written; then the sums are read, and written in the type of queries.
    return 3 + 2 * gradient_sums(eqn) if jp.attention_of(eqn).backward else 0.0


def _queries(eqn: jc.JaxprEqn) -> Any:
    return eqn.invars[0].aval
