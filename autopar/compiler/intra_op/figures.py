"""What a device computes and moves per second: the figures that plans are compared by.

A collective over n devices takes, by the ring algorithms (Thakur et al. 2005, section 4; b bytes are the whole of what
one device holds before a reduction, or after a gather),

    all-reduce       2 α + 2 b (n-1)/n / bandwidth
    all-gather         α +   b (n-1)/n / bandwidth
    reduce-scatter     α +   b (n-1)/n / bandwidth
    all-to-all         α +   b (n-1)/n / bandwidth     (b: what one device holds)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.compiler.intra_op.layout import LogicalMesh
from autopar.errors import InvalidArgument

# Passes over the ring that each collective needs: factors of (n-1)/n · bytes, and of the latency.
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}


@dataclass(frozen=True, kw_only=True)
class MeshFigures:
    """Figures of one device and of the links along each axis of a mesh. Times in seconds, rates per second.

    Raises `InvalidArgument` for a figure that is NaN, negative, or zero where it divides.
    """

    name: str
    matmul_flops: float
    """Achievable FLOP/s of large matrix products in 32 bits."""
    matmul_flops_16: float
    """The same in 16 bits."""
    memory_bandwidth: float
    """Bytes/s between a device and its memory."""
    memory_bytes: float
    """Capacity of a device's memory."""
    latency_s: tuple[float, ...]
    """Time that a collective of no bytes takes, per mesh axis."""
    bandwidth: tuple[float, ...]
    """Bytes/s that one device sends along each mesh axis."""
    fused: float = 0.35
    """Share of the bytes of elementwise equations that reach memory: XLA fuses the rest away."""
    combined_latency: float = 1.0
    """Share of its latency that a collective costs which the compiler combines with many others."""
    combines: tuple[str, ...] = ("all-reduce", "all-gather", "reduce-scatter")
    """The kinds that it combines."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for figures that no machine has."""
        for field in dataclasses.fields(self)[1:-1]:
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                allows_zero = field.name in ("latency_s", "fused")
                if not (number > 0 or (allows_zero and number == 0)) or math.isinf(number):
                    raise InvalidArgument(
                        f"The figure {field.name} of {self.name!r} is {value}; it must be finite and "
                        f"{'not negative' if allows_zero else 'positive'}. Measure it again, or correct the file."
                    )

    def collective_s(self, kind: str, axes: Iterable[int], nbytes: float, mesh: LogicalMesh) -> float:
        """Seconds of one collective over `axes`; `nbytes` as in `wire_bytes`."""
        axes = tuple(axes)
        if mesh.size(axes) == 1:
            return 0.0
        share = self.combined_latency if kind in self.combines else 1.0
        latency = max(self.latency_s[a] for a in axes) * PASSES[kind] * share
        return latency + wire_bytes(kind, mesh.size(axes), nbytes) / min(self.bandwidth[a] for a in axes)


def wire_bytes(kind: str, group: int, nbytes: float) -> float:
    """Bytes that each of `group` devices sends; `nbytes` is the larger of its operand and its result."""
    return PASSES[kind] * nbytes * (group - 1) / group


def cpu_figures(num_axes: int) -> MeshFigures:
    """A virtual CPU device, one of eight on a small machine; the orders of magnitude, not a measurement."""
    return MeshFigures(
        name="cpu",
        matmul_flops=8e9,
        matmul_flops_16=4e9,
        memory_bandwidth=2e9,
        memory_bytes=2 * 2**30,
        latency_s=(3e-4,) * num_axes,
        bandwidth=(1e9,) * num_axes,
        combines=("all-reduce",),
    )


def h100_figures(num_axes: int) -> MeshFigures:
    """An H100-SXM in one NVLink domain, after NVIDIA's data sheet, at the rates that large kernels reach."""
    return MeshFigures(
        name="h100",
        matmul_flops=350e12,
        matmul_flops_16=650e12,
        memory_bandwidth=2.8e12,
        memory_bytes=80 * 2**30,
        latency_s=(1.2e-5,) * num_axes,
        bandwidth=(3.6e11,) * num_axes,
    )


def figures_of(kind: str, num_axes: int) -> MeshFigures:
    """The figures of a kind of device, by the name that JAX gives it."""
    for name, make in (("h100", h100_figures), ("h200", h100_figures), ("cpu", cpu_figures)):
        if name in kind.lower():
            return make(num_axes)
    raise InvalidArgument(
        f"There are no figures for devices of kind {kind!r}; there are some for cpu, h100 and h200. Plan for one of "
        "these with cluster=autopar.Cluster(num_devices=..., kind=...)."
    )
