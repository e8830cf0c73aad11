"""What a device computes and moves per second along each axis of a mesh: the figures that plans are compared by.

A collective over n devices takes, by the ring algorithms (Thakur et al. 2005, section 4; b bytes are the whole of what
one device holds before a reduction, or after a gather),

    all-reduce       2 L + 2 b (n-1)/n / bandwidth
    all-gather         L +   b (n-1)/n / bandwidth
    reduce-scatter     L +   b (n-1)/n / bandwidth
    all-to-all         L +   b (n-1)/n / bandwidth     (b: what one device holds)       with L = latency + (n-1) step

Axes that are equally fast are one ring. Axes of different levels of the network take one after the other, the fastest
first, whose n devices leave b/n for the next; of an all-to-all, a fast axis takes what stays on one device of the slow.

An axis of stride s and size k, in a mesh over consecutive devices, stays in a fast domain of D devices iff s k <= D.
Else m = D/s of its devices are in each of h = k/m domains, and `Machine.collective_s` says what it takes: in latency_s
what does not depend on b, in bandwidth the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.compiler.sharding.layout import LogicalMesh
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Link, Machine

# Passes over the ring that each collective needs: factors of (n-1)/n · bytes, and of the latency.
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}
_EXCHANGES = ("all-to-all", "collective-permute")
# The kinds that the compiler combines with others of theirs.
_COMBINED = ("all-reduce", "all-gather", "reduce-scatter")
# Vector units do a fraction of the matmul rate.
_VECTOR_SHARE = 1 / 16


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
    matmul_half_flops: float = 0.0
    """FLOPs of one product at which half of its rate is reached."""
    kernel_s: float = 0.0
    """Seconds of a kernel that does nothing."""
    step_s: tuple[float, ...] = ()
    """More latency for each device of an axis but one; nothing if not given."""
    exchange_bandwidth: tuple[float, ...] = ()
    """`bandwidth` for all-to-all and collective-permute, where it differs from that of rings."""
    vector_flops: float | None = None
    """FLOP/s of what is no matrix product; a sixteenth of `matmul_flops` if not given."""
    other_flops: tuple[tuple[str, float], ...] = ()
    """FLOP/s of products in types that are not as fast as others of their size."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for figures that no machine has."""
        for field in dataclasses.fields(self)[1:-1]:
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                allows_zero = field.name in ("latency_s", "fused", "matmul_half_flops", "kernel_s", "step_s")
                if not (number > 0 or (allows_zero and number == 0)) or math.isinf(number):
                    raise InvalidArgument(
                        f"The figure {field.name} of {self.name!r} is {value}; it must be finite and "
                        f"{'not negative' if allows_zero else 'positive'}. Measure it again, or correct the file."
                    )

    def collective_s(self, kind: str, axes: Iterable[int], nbytes: float, mesh: LogicalMesh) -> float:
        """Seconds of one collective over `axes`; `nbytes` as in `wire_bytes`."""
        levels = self._levels(kind, [a for a in axes if mesh.shape[a] > 1])
        if kind == "collective-permute":
            levels = levels[-1:]
        seconds, slower = 0.0, mesh.size(tuple(a for level in levels for a in level))
        for level in levels:
            size = mesh.size(level)
            slower //= size
            seconds += self._ring_s(kind, level, nbytes / slower if kind == "all-to-all" else nbytes, mesh)
            nbytes = nbytes if kind == "all-to-all" else nbytes / size
        return seconds

    def product_s(self, flops: float, nbytes: float, dtype: str, itemsize: int) -> float:
        """Seconds of one matrix product of operands of `dtype` that reads and writes `nbytes`."""
        usual = self.matmul_flops_16 if itemsize <= 2 else self.matmul_flops
        rate = dict(self.other_flops).get("float8" if dtype.startswith("float8") else dtype, usual)
        return self.kernel_s + max((flops + self.matmul_half_flops) / rate, nbytes / self.memory_bandwidth)

    def vector_s(self, flops: float) -> float:
        """Seconds of operations on vector units."""
        return flops / (self.matmul_flops * _VECTOR_SHARE if self.vector_flops is None else self.vector_flops)

    def _levels(self, kind: str, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The axes by bandwidth, the fastest first."""
        ranked = sorted(axes, key=lambda a: -self._bandwidth(kind, a))
        return [tuple(level) for _, level in itertools.groupby(ranked, key=lambda a: self._bandwidth(kind, a))]

    def _ring_s(self, kind: str, axes: Sequence[int], nbytes: float, mesh: LogicalMesh) -> float:
        size = mesh.size(tuple(axes))
        share = self.combined_latency if kind in _COMBINED else 1.0
        step_s = max(self.step_s[a] for a in axes) if self.step_s else 0.0
        steps = 1 if kind == "collective-permute" else size - 1
        latency = (max(self.latency_s[a] for a in axes) + steps * step_s) * PASSES[kind] * share
        return latency + wire_bytes(kind, size, nbytes) / self._bandwidth(kind, axes[0])

    def _bandwidth(self, kind: str, axis: int) -> float:
        return (self.exchange_bandwidth if kind in _EXCHANGES and self.exchange_bandwidth else self.bandwidth)[axis]


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
    )


def h100_figures(num_axes: int) -> MeshFigures:
    """H100s of one host along axes of any size, for large products: collectives wait as those of eight devices do."""
    host = mesh_figures(Machine.named("dgx-h100"), (8,))
    return dataclasses.replace(
        host,
        name="h100",
        latency_s=(host.latency_s[0] + 7 * host.step_s[0],) * num_axes,
        step_s=(),
        bandwidth=host.bandwidth * num_axes,
        matmul_half_flops=0.0,
        kernel_s=0.0,
        vector_flops=None,
    )


def figures_of(device: str | Machine, mesh_shape: Sequence[int]) -> MeshFigures:
    """The figures of a mesh of one kind of device, by the name that JAX gives it, or of a machine's devices."""
    if isinstance(device, Machine):
        return mesh_figures(device, mesh_shape)
    if device.lower() == "cpu":
        return cpu_figures(len(mesh_shape))
    return mesh_figures(Machine.of_kind(device), mesh_shape)


def mesh_figures(machine: Machine, mesh_shape: Sequence[int], *, domain: int | None = None) -> MeshFigures:
    """The figures of a mesh over consecutive devices of a machine, row-major.

    `domain` is how many of them are in one fast domain: the machine's own, unless the mesh has part of each.
    """
    axes = [_axis_figures(machine, each) for each in _spans(mesh_shape, machine.domain if domain is None else domain)]
    latency_s, step_s, bandwidth, exchange = zip(*axes) if axes else ((), (), (), ())
    rate, rate_16 = machine.matmul_flops("float32"), max(map(machine.matmul_flops, ("float16", "bfloat16")))
    sizes = {"float64": rate, "float16": rate_16, "bfloat16": rate_16, "float8": rate_16, "int8": rate_16}
    return MeshFigures(
        name=machine.name,
        matmul_flops=rate,
        matmul_flops_16=rate_16,
        memory_bandwidth=machine.memory_bandwidth,
        memory_bytes=machine.memory_bytes,
        latency_s=latency_s,
        bandwidth=bandwidth,
        matmul_half_flops=machine.matmul_half_flops,
        kernel_s=machine.kernel_s,
        step_s=step_s,
        exchange_bandwidth=() if exchange == bandwidth else exchange,
        # Where 16-bit products are that much faster, they have units of their own, and float32 is for the vector units;
        # an operation there is one of the two of a multiply-add.
        vector_flops=machine.peak_flops["float32"] / 2 if rate_16 > 4 * machine.peak_flops["float32"] else None,
        other_flops=tuple(
            (t, machine.matmul_flops(t)) for t, usual in sizes.items() if machine.matmul_flops(t) != usual
        ),
    )


def _spans(mesh_shape: Sequence[int], domain: int) -> list[tuple[int, int]]:
    """Of each axis, how many devices of a group are in one domain, and in how many domains the group is."""
    spans: list[tuple[int, int]] = []
    for axis, size in enumerate(mesh_shape):
        stride = math.prod(mesh_shape[axis + 1 :])
        local = max(part for part in range(1, size + 1) if size % part == 0 and (part == 1 or stride * part <= domain))
        spans.append((local, size // local))
    return spans


def _axis_figures(machine: Machine, span: tuple[int, int]) -> tuple[float, float, float, float]:
    """Of an axis: latency_s, step_s, bandwidth of rings and of exchanges, so that they make `Machine.collective_s`."""
    (local, hosts), intra, inter = span, machine.intra, machine.inter
    if hosts == 1 or local == 1:
        link, size = (intra, local) if hosts == 1 else (inter, hosts)
        return _ramp_s(link, size), link.latency_s, link.bandwidth, link.bandwidth
    size = local * hosts
    fixed_s = sum((n - 1) * link.latency_s + _ramp_s(link, n) for link, n in ((intra, local), (inter, hosts)))
    inside, across = (local - 1) / local / intra.bandwidth, (hosts - 1) / hosts / inter.bandwidth
    sent = (size - 1) / size
    return fixed_s, 0.0, sent / (inside + across / local), sent / (inside / hosts + across)


def _ramp_s(link: Link, size: int) -> float:
    return (size - 1) / size * link.ramp_bytes / link.bandwidth
