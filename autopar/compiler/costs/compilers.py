"""What XLA's compilers do to memory that the program does not say: one value per compiler.

The rules are those seen in the buffer assignments of XLA as of jaxlib 0.10.2, for the CPU and for GPUs of NVIDIA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.compiler.jaxprs.flops import aval_bytes


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """How a compiler orders works, what it copies, and what its kernels need besides operands and results."""

    name: str
    keeps_barriers: bool = True
    """It computes again what stands behind a barrier, as recomputed layers do outside of loops."""
    turns_operands: bool = False
    """Products read rows: an operand in another order is copied, as soon as it is there."""
    reduces_by_library: bool = False
    """Its reductions take one operation before them in, no more."""
    combines_all_reduces: bool = False
    """All-reduces of the update become one, whose operands and results are there together."""
    joined_bytes: float = 0.0
    """It makes every reduce-scatter by itself: those of up to so many bytes of operands are joined before it sees them.
    They are copied for that, which takes as much memory."""
    collects_rows: bool = False
    """A collective along another dimension than the first makes it, and all products around it, write columns."""
    updates_after_collectives: bool = True
    """What follows a collective of the update is done at once, rather than when everything else is done."""
    saves_donated: bool = False
    """A donated input is copied first, if anything reads it that its successor does not depend on: these may come in
    any order."""
    clears_stacks_early: bool = False
    """The zeros that a loop writes its results into are there from the start of the program."""
    widens_16_bits: bool = False
    """It computes in 32 bits what is in 16, and keeps it so."""
    product_workspace_bytes: float = 0.0
    """Of every product, while it runs."""
    headroom: float = 0.0
    """Share of the modelled peak by which a compiled one may lie above it: what a budget leaves free."""

    def nbytes(self, aval: Any) -> float:
        """Bytes of a whole array that the program makes; arguments are as the caller gives them."""
        return aval_bytes(aval) * (2 if self.widens(aval) else 1)

    def widens(self, aval: Any) -> bool:
        """Whether it computes an array of this type in more bits."""
        return self.widens_16_bits and getattr(aval.dtype, "itemsize", 0) == 2

    def needed_bytes(self, peak_bytes: float) -> float:
        """The budget that a plan of a modelled peak asks for, with the headroom."""
        return peak_bytes * (1 + self.headroom)


CPU = Compiler(
    name="cpu",
    keeps_barriers=False,
    turns_operands=True,
    reduces_by_library=True,
    combines_all_reduces=True,
    joined_bytes=8 * 2**20,
    collects_rows=True,
    clears_stacks_early=True,
    saves_donated=True,
    widens_16_bits=True,
    headroom=0.35,
)
# The headrooms are those of the worst plans measured (benchmarks.memory_model): plans that were made to fit keep arrays
# split and gather them again, and what the compilers prefetch or merge of that is not modelled.
# cuBLAS gets 4 MiB for each product where it cannot be tuned.
GPU = Compiler(name="gpu", updates_after_collectives=False, product_workspace_bytes=4 * 2**20, headroom=0.21)


def compiler_for(figures_name: str) -> Compiler:
    """The compiler for the devices that figures of this name describe."""
    return CPU if "cpu" in figures_name.lower() else GPU
