"""One type of host as a value, and what work takes on it: matrix products, memory traffic, collectives and transfers.

Every time is a line in the work, so that least squares fit it (`hardware.calibrate`) and planners may add it up:

    product        kernel_s + max((w + matmul_half_flops) / (peak · share), bytes / memory_bandwidth)      w FLOPs
    memory         kernel_s + bytes / memory_bandwidth
    transfer       α + (b + ramp) / bandwidth                                                       b bytes, one link
    host copy      b / host_bandwidth                                                               b bytes of a device

so the rates are peak · share · w / (w + half) and bandwidth · b / (b + ramp). `collectives.py` has the formulas of
collectives. A link is a level of theirs whose step takes α, and whose start the ramp: (n-1)/n ramp / bandwidth of n
devices. A group of m·h devices, m in each of h hosts, has the intra link as its first level and the inter link as its
second.

The inter link is one device's share of its host's network cards: all devices of a host send at once, each for a group
of its own or a part of its own. "Host" means a fast domain here: `domain` devices, more than a host where NVLink or ICI
goes from host to host.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from autopar.checks import check_choice, check_count, names_alike
from autopar.errors import GenericFiguresWarning, InvalidArgument
from autopar.hardware.collectives import NetworkLevel, collective_time
from autopar.json_fields import check_figure, fields_of, json_of, text_of

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "fp8", "int8")
_VECTOR_SHARE = 1 / 16
# Beyond these a figure is in another unit: a hundred times what any device has, and gigabytes instead of bytes.
_MOST_FLOPS = 1e18
_LEAST_MEMORY_BYTES = 1e4
_GENERIC = "generic"
_BY_SIZE = ("group_bandwidths", "exchange_bandwidths")
# Where the machine has no unit for a type, JAX computes in a wider one; 32-bit products run in TF32 where there is any.
_COMPUTED_IN = {
    "float64": ("float64", "float32"),
    "float32": ("tf32", "float32"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "fp8": ("fp8", "bfloat16", "float16", "float32"),
    "int8": ("int8", "float32"),
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network, as one device sees it: inside a host, or between hosts.

    Raises `InvalidArgument` for a figure that is NaN, infinite, negative, or a bandwidth of zero.
    """

    latency_s: float
    """Seconds of one step of a collective, or of one transfer, between two devices."""
    bandwidth: float
    """Bytes/s that one device sends in large messages, all devices sending: the bus bandwidth of a ring."""
    ramp_bytes: float
    """Size of a message at which half of the bandwidth is reached."""
    group_bandwidths: tuple[tuple[int, float], ...] = ()
    """The same bandwidth within groups of fewer devices, where wires join some of them only: (devices, bytes/s)."""
    exchange_bandwidths: tuple[tuple[int, float], ...] = ()
    """Bytes/s that one device of a group sends to all others at once, where wires do not join every pair."""
    tree_share: float = 0.0
    """The share of a ring's bandwidth that sums along a tree reach, above 1 where switches sum; 0: no trees."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for figures that no link has."""
        for name in ("latency_s", "bandwidth", "ramp_bytes", "tree_share"):
            check_figure(f"The figure {name} of a link", getattr(self, name), zero=name != "bandwidth")
        for name in _BY_SIZE:
            for size, bandwidth in getattr(self, name):
                check_count(f"A number of devices in {name} of a link", size, least=2)
                check_figure(f"The bandwidth of {size} devices in {name} of a link", bandwidth)

    def bandwidth_of(self, size: int) -> float:
        """Bytes/s that each of `size` devices sends: that of the largest listed group of at most so many devices."""
        return _at_size(self.group_bandwidths, size, self.bandwidth)

    def exchange_bandwidth_of(self, size: int) -> float:
        """Bytes/s that each of `size` devices sends where all send to all."""
        return _at_size(self.exchange_bandwidths, size, self.bandwidth_of(size))

    def transfer_s(self, nbytes: float) -> float:
        """Seconds of one message between two devices."""
        return self.latency_s + (nbytes + self.ramp_bytes) / self.bandwidth_of(2)

    def level(self, size: int) -> NetworkLevel:
        """Return `size` devices with such links between them, as a level of the network."""
        bandwidth = self.bandwidth_of(size)
        start_s = (size - 1) / size * self.ramp_bytes / bandwidth
        return NetworkLevel(
            size=size,
            start_s=start_s,
            step_s=self.latency_s,
            bandwidth=bandwidth,
            exchange_bandwidth=self.exchange_bandwidth_of(size),
            tree_share=self.tree_share,
        )

    def to_data(self) -> dict[str, Any]:
        """The link as JSON values, keys in the order of the fields."""
        pairs = {name: [list(pair) for pair in getattr(self, name)] for name in _BY_SIZE}
        return {**dataclasses.asdict(self), **pairs}

    @staticmethod
    def from_data(what: str, raw: Any) -> Link:
        """The link of JSON values; `InvalidArgument` names the field that is missing, unknown or mistyped."""
        if isinstance(raw, dict):
            raw = {**{name: [] for name in _BY_SIZE}, "tree_share": 0.0, **raw}
        fields = fields_of(what, raw, [each.name for each in dataclasses.fields(Link)])
        for name in _BY_SIZE:
            pairs: Any = fields[name]
            if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                raise InvalidArgument(
                    f"{name} of {what} is {pairs!r}, it must be a list of pairs [devices, bytes/s]. Correct the file."
                )
            fields[name] = tuple((size, bandwidth) for size, bandwidth in pairs)
        return Link(**fields)


def _read(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures without those that are no longer read."""
    return {name: value for name, value in figures.items() if name not in _NO_LONGER_READ}


def _at_size(listed: Sequence[tuple[int, float]], size: int, otherwise: float) -> float:
    """Return the bandwidth of the largest listed group of at most so many devices, if there is one as large as they."""
    known = [(most, bandwidth) for most, bandwidth in listed if most <= size]
    return max(known)[1] if known and size <= max(listed)[0] else otherwise


_RULES = (
    *("schedules_for_latency", "schedules_for_memory", "product_sums", "fuses_products", "widens_bfloat16"),
    *("scatters_sums", "copies_joined", "masks_ragged_products", "transposes_kernels", "holds_rows"),
    *("transposes_operands", "fuses", "keeps_exponentials", "gathers_outermost", "copies_state", "computes_narrower"),
)
"""The fields that say how the compiler for a machine works."""
_POSITIVE = (
    *("in_step_share", "narrow_share", "batched_share", "unaligned_share", "reducing_share"),
    *("piece_bytes", "erf_flops"),
)
_NOT_NEGATIVE = (
    *("memory_bytes", "memory_bandwidth", "matmul_half_flops", "kernel_s", "product_workspace_bytes", "exponentials"),
    *("hidden_share", "combined_bytes", "chip_bytes", "compiler_share", "dispatch_s", "launch_s", "execution_s"),
    *("host_bandwidth", "host_memory_bytes", "concurrent_devices"),
)
_BY_TYPE = ("peak_flops", "matmul_share", "convolution_share")
_SHARES = (*_BY_TYPE[1:], "narrow_share", "batched_share", "unaligned_share", "reducing_share", "hidden_share")
_NO_LONGER_READ = frozenset({"overlap"})
"""Figures that files of earlier releases have."""
_MAY_BE_LEFT_OUT = (
    "narrow_share",
    "unaligned_share",
    "reducing_share",
    "piece_bytes",
    "erf_flops",
    "exponentials",
    "host_memory_bytes",
    "concurrent_devices",
    "launch_s",
    "execution_s",
    "combined_bytes",
    "chip_bytes",
    "cores",
    "compiler_share",
    "channels_last",
    *_RULES[1:],
)


_SLOP_FACTOR = 0.95
_MOVED_PER_BYTE = 2.5
"""Bytes that XLA reads and writes for each that it computes again: 2.2 to 2.8 in an MLP, a GPT and a convnet compiled
for an H100 whose memory ends just below what they need. Products of cuBLAS are not among what it computes again."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One type of host: its devices, their memory and rates, and the network inside and between hosts.

    Raises `InvalidArgument` for a figure that is NaN, infinite, negative, or zero where it divides, for less memory or
    more FLOP/s than any device has, and for a domain that neither divides a host nor consists of whole hosts.

    >>> v100 = Machine.named("p3.16xlarge")
    >>> v100.devices_per_host, v100.kind
    (8, 'v100')
    """

    name: str
    devices_per_host: int
    kind: str
    """Found in the name that JAX gives the devices, in lower case: "v100" in "Tesla V100-SXM2-16GB"."""
    memory_bytes: float
    """Capacity of one device's memory."""
    memory_bandwidth: float
    """Bytes/s between a device and its memory that large kernels reach."""
    peak_flops: Mapping[str, float] = field(hash=False)
    """FLOP/s of matrix products on paper, by type: the words of `DTYPES`."""
    matmul_share: Mapping[str, float] = field(hash=False)
    """The share of the peak that large products reach, by the same types."""
    matmul_half_flops: float
    """FLOPs of one product at which half of that rate is reached."""
    kernel_s: float
    """Seconds from the start of one kernel to that of the next, where both do nothing."""
    intra: Link
    """The link inside a fast domain: NVLink, PCIe or ICI."""
    inter: Link
    """The link between domains: one device's share of its host's network cards."""
    domain: int
    """Devices in one fast domain: `devices_per_host`, a part that divides it where wires join only some devices of a
    host, or a multiple where NVLink or ICI goes from host to host."""
    sources: Mapping[str, str] = field(hash=False)
    """The source of each figure, by field."""
    product_workspace_bytes: float = 0.0
    """Memory that a kernel of a matrix product gets while it runs, besides its operands and result."""
    in_step_share: float = 1.0
    """The share of the rate of one large product alone that products reach within a step: above 1 where a product alone
    draws so much power that clocks fall."""
    convolution_share: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """The share of the rate of products within a step that convolutions reach, by the same types; 1 if left out."""
    narrow_share: float = 1.0
    """The share of the rate of convolutions that those reach whose images have fewer channels than 16 bytes hold: by
    the FLOPs of so many channels, which libraries pad them to."""
    batched_share: float = 1.0
    """The share of the rate of products within a step that products with batch dimensions reach: 1 where the compiler
    tunes them. Those that it does not tune write their result once they have computed it."""
    unaligned_share: float = 1.0
    """The share of the rate of products that those reach whose rows are no multiples of 8 numbers long; 1 where the
    compiler pads them."""
    reducing_share: float = 1.0
    """The share of the memory bandwidth that kernels with reductions reach."""
    piece_bytes: float = 64.0
    """Bytes that memory takes in the time of a shorter piece, as transposed copies write that have few numbers
    innermost."""
    erf_flops: float = 1.0
    """FLOPs at the vector rate that XLA's error functions take for each number; 1 where other figures hold them."""
    exponentials: float = 0.0
    """Exponentials per second, which bound a softmax inside of a kernel; 0: a sixteenth of the peak in float32, as
    where 128 units multiply and add beside 16 for exponentials."""
    hidden_share: float = 0.0
    """Share of the collectives of parameters and gradients that XLA runs behind compute, by its defaults."""
    fuses: bool = True
    """True if equations are joined in kernels; else each but a view is one, as where a framework runs one by one."""
    schedules_for_latency: bool = False
    """True if XLA puts work behind collectives by its defaults, and keeps until then what it reads, fit or not."""
    schedules_for_memory: bool = True
    """True if XLA orders kernels so that few bytes are in memory, if not for latency; else they stand as written."""
    product_sums: bool = True
    """True if XLA has matrix products write their sum with what is added to them, whoever else reads that."""
    fuses_products: bool = False
    """True if XLA computes what products read in their kernels, in the type in which they multiply: it is not kept."""
    computes_narrower: bool = False
    """True if XLA's fused products compute 16-bit operands of wider arrays, too: probabilities of scores."""
    holds_rows: bool = False
    """True if XLA reduces rows and computes what follows in one kernel; exponentials are computed for each reader."""
    keeps_exponentials: bool = False
    """True if XLA, where it holds rows, keeps exponentials all the same that more than two kernels read."""
    transposes_operands: bool = False
    """True if XLA transposes operands of products whose batch, contracted or other dimensions are not side by side."""
    widens_bfloat16: bool = False
    """True if XLA computes functions of bfloat16 in float32, and keeps what only other such functions read in that."""
    scatters_sums: bool = True
    """True if XLA keeps a reduce-scatter as it is; else it adds up whole arrays on every device, each of which then
    takes its part, and computes nothing meanwhile."""
    copies_joined: bool = True
    """True if XLA copies what several all-reduces sum into one array, of which it cuts the sums; else it sums each."""
    masks_ragged_products: bool = False
    """True if XLA computes a ragged product as one in which every group meets all rows, those of others as zeros."""
    transposes_kernels: bool = False
    """True if XLA has libraries compute convolutions, which read kernels with the output channels first, and write
    gradients of kernels so: those that are written with space first are copied."""
    gathers_outermost: bool = False
    """True if XLA gathers arrays along the dimension outermost in memory: along any other they are transposed then."""
    copies_state: bool = False
    """True if XLA copies new state to the place of the old one when all else is done, where it is gathered of updated
    parts, or comes of gradients that are transposed behind their sum."""
    channels_last: tuple[str, ...] = ()
    """The types of images, of `DTYPES`, whose channels are innermost where XLA has libraries compute convolutions;
    those of other types have space innermost. What lies otherwise is copied."""
    combined_bytes: float = 30 * 2.0**20
    """XLA makes one collective of sums of gradients until their results have so many bytes."""
    chip_bytes: float = 0.0
    """Memory on the chip in which XLA has arrays from one kernel to the next that reads them; 0: none."""
    cores: int = 1
    """Cores of a device that make a part each of what a product makes."""
    compiler_share: float = 0.0
    """The share of the memory that XLA plans with: where a program needs more, it computes some values again instead of
    keeping them; above 1 where JAX may take less than that of a device; 0: it does not."""
    dispatch_s: float = 1e-4
    """Seconds of a host to start one executable on its devices, or to send or take one value."""
    launch_s: float = 0.0
    """Seconds of a host to launch one kernel, than which none is shorter where it launches each; 0: they are started by
    the device, as those of one executable."""
    execution_s: float = 0.0
    """Seconds that work takes longer as two executables, one behind the other, than as one: its devices are given it,
    and memory for its results, while its host is ahead of them."""
    host_bandwidth: float = 1.1e10
    """Bytes/s between one device and pinned memory of its host, each way, all devices copying; as of PCIe 3.0 x16."""
    host_memory_bytes: float = 0.0
    """Memory of a host, which values there share with all else that it does; 0: not known."""
    concurrent_devices: float = 0.0
    """Devices of a host that take all of its compute, where they share it, as virtual ones share its cores: more at
    once slow each other down, and all rates are those of all at once. 0: each device has its own."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for figures that no machine has."""
        check_count(f"devices_per_host of {self.name!r}", self.devices_per_host)
        check_count(f"domain of {self.name!r}", self.domain)
        check_count(f"cores of {self.name!r}", self.cores)
        if self.domain % self.devices_per_host and self.devices_per_host % self.domain:
            raise InvalidArgument(
                f"domain of {self.name!r} is {self.domain} and a host has {self.devices_per_host} devices. A fast "
                "domain is a part of a host that divides it, a host, or several whole hosts: give such a number."
            )
        for name in _NOT_NEGATIVE:
            zero = not name.startswith("memory") and name != "host_bandwidth"
            check_figure(f"The figure {name} of {self.name!r}", getattr(self, name), zero=zero)
        for name in _POSITIVE:
            check_figure(f"The figure {name} of {self.name!r}", getattr(self, name))
        for name in _RULES:
            if not isinstance(cast(object, getattr(self, name)), bool):
                raise InvalidArgument(
                    f"The figure {name} of {self.name!r} is {getattr(self, name)!r}, it must be true or false. Correct "
                    "it."
                )
        if 0 < self.concurrent_devices < 1:
            raise InvalidArgument(
                f"The figure concurrent_devices of {self.name!r} is {self.concurrent_devices!r}, and one device takes "
                "no more than all of its host. Give how many devices, 1 at least, take all of its compute; or 0 where "
                "each has its own."
            )
        if self.memory_bytes < _LEAST_MEMORY_BYTES:
            raise InvalidArgument(
                f"The figure memory_bytes of {self.name!r} is {self.memory_bytes!r}; a device has at least "
                f"{_LEAST_MEMORY_BYTES:g} bytes. Give bytes, such as 16e9."
            )
        self._check_types()
        for name in _SHARES:
            share = getattr(self, name)
            if any(each > 1 for each in (share.values() if name in _BY_TYPE else [share])):
                raise InvalidArgument(
                    f"The figure {name} of {self.name!r} is {getattr(self, name)!r}, a share is at most 1. Divide the "
                    "measured rate by the peak, or correct the peak."
                )
        unknown = sorted(set(self.sources) - {each.name for each in dataclasses.fields(self)})
        if unknown:
            raise InvalidArgument(f"The sources of {self.name!r} name the unknown fields {unknown}. Correct them.")
        untold = {name: source for name, source in self.sources.items() if not isinstance(cast(object, source), str)}
        if untold:
            raise InvalidArgument(f"The sources of {self.name!r} are {untold!r}; each must be a text. Correct them.")

    def _check_types(self) -> None:
        for name in _BY_TYPE:
            rates: Mapping[str, float] = getattr(self, name)
            for dtype, rate in rates.items():
                check_choice(f"A type in {name} of {self.name!r}", dtype, DTYPES)
                check_figure(f"The figure {name}[{dtype!r}] of {self.name!r}", rate)
                if name == "peak_flops" and rate > _MOST_FLOPS:
                    raise InvalidArgument(
                        f"The figure {name}[{dtype!r}] of {self.name!r} is {rate!r}; one device has at most "
                        f"{_MOST_FLOPS:g} FLOP/s. Give FLOP/s of one device, such as 1e15."
                    )
            object.__setattr__(self, name, dict(rates))
        if not isinstance(cast(object, self.channels_last), (list, tuple)):
            raise InvalidArgument(
                f"The figure channels_last of {self.name!r} is {self.channels_last!r}, it must be a list of types. "
                "Correct it."
            )
        object.__setattr__(self, "channels_last", tuple(self.channels_last))
        for dtype in self.channels_last:
            check_choice(f"A type in channels_last of {self.name!r}", dtype, DTYPES)
        if set(self.peak_flops) != set(self.matmul_share) or "float32" not in self.peak_flops:
            raise InvalidArgument(
                f"{self.name!r} has peak_flops for {sorted(self.peak_flops)} and matmul_share for "
                f"{sorted(self.matmul_share)}; both must be for the same types, float32 among them. Add the others."
            )

    # --- what work takes ------------------------------------------------------------------------------------

    def computed_in(self, dtype: str) -> str:
        """The type that products of arrays of `dtype` are computed in: one of `peak_flops`."""
        word = _word_of(dtype)
        return next(each for each in (*_COMPUTED_IN.get(word, (word,)), "float32") if each in self.peak_flops)

    def has_channels_last(self, dtype: str) -> bool:
        """Return true if libraries have the channels of images of `dtype` innermost."""
        return _word_of(dtype) in self.channels_last

    def matmul_flops(self, dtype: str) -> float:
        """FLOP/s that large products of arrays of `dtype` reach."""
        computed_in = self.computed_in(dtype)
        return self.peak_flops[computed_in] * self.matmul_share[computed_in]

    def share_of_convolutions(self, dtype: str) -> float:
        """The share that convolutions of arrays of `dtype` reach of the rate of products within a step."""
        return self.convolution_share.get(self.computed_in(dtype), 1.0)

    def matmul_s(self, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds of one matrix product that reads and writes `nbytes` altogether."""
        product_s = (flops + self.matmul_half_flops) / self.matmul_flops(dtype)
        return self.kernel_s + max(product_s, nbytes / self.memory_bandwidth)

    @functools.cached_property
    def vector_flops(self) -> float:
        """FLOP/s of what is no matrix product.

        Where products of 16 bits are that much faster, they have units of their own, and float32 is for the vector
        units; an operation there is one of the two of a multiply-add. Else they do a fraction of the products' rate.
        """
        peak = self.peak_flops["float32"]
        if max(map(self.matmul_flops, ("float16", "bfloat16"))) > 4 * peak:
            return peak / 2
        return self.matmul_flops("float32") * _VECTOR_SHARE

    @property
    def ends_sums_late(self) -> bool:
        """True if a compiler for its devices ends collectives as late as it can, where it need not wait for any."""
        return self.schedules_for_memory and not self.schedules_for_latency

    @property
    def exponential_rate(self) -> float:
        """Exponentials per second, as the file says or by its peak in float32."""
        return self.exponentials or self.peak_flops["float32"] / 16

    def vector_s(self, flops: float) -> float:
        """Seconds of operations on vector units."""
        return flops / self.vector_flops

    def bytes_computed_again(self, given_bytes: float, needed_bytes: float) -> float:
        """Bytes that a program needs above what XLA lets it, of which arguments and results are given to it.

        XLA holds what it adds to these against 0.95 of what they leave (xla_gpu_memory_limit_slop_factor). Where they
        leave nothing, that is all that it adds, and no more.
        """
        if not self.compiler_share:
            return 0.0
        left_bytes = max(self.compiler_share * self.memory_bytes - given_bytes, 0.0)
        return max(needed_bytes - given_bytes - _SLOP_FACTOR * left_bytes, 0.0)

    def within(self, memory_bytes: float) -> Machine:
        """The machine where JAX may take so much of the memory of each device; the compiler knows of all of it."""
        share = self.compiler_share * self.memory_bytes / memory_bytes
        return dataclasses.replace(self, memory_bytes=memory_bytes, compiler_share=share)

    def computed_again_s(self, nbytes: float) -> float:
        """Seconds that XLA takes longer where it computes so many bytes again instead of keeping them."""
        return _MOVED_PER_BYTE * nbytes / self.memory_bandwidth

    def memory_s(self, nbytes: float) -> float:
        """Seconds of one kernel that only reads and writes `nbytes` altogether."""
        return self.kernel_s + nbytes / self.memory_bandwidth

    def collective_s(self, kind: str, nbytes: float, group_size: int, num_hosts: int = 1) -> float:
        """Seconds of a collective over `group_size` devices in `num_hosts` fast domains, equally many in each.

        `nbytes` is the larger of what one device holds before and after. One device alone takes no time.
        """
        check_count("group_size", group_size)
        check_count("num_hosts", num_hosts)
        if group_size % num_hosts:
            raise InvalidArgument(
                f"A group of {group_size} devices in {num_hosts} hosts has not the same number in each. Give a number "
                "of hosts that divides the group."
            )
        levels = [self.intra.level(group_size // num_hosts), self.inter.level(num_hosts)]
        return collective_time(kind, levels, nbytes).total_s

    def transfer_s(self, nbytes: float, same_host: bool) -> float:
        """Seconds of a message from one device to another, of the same fast domain or of different ones."""
        return (self.intra if same_host else self.inter).transfer_s(nbytes)

    def host_copy_s(self, nbytes: float) -> float:
        """Seconds of one device's bytes on the way to the memory of its host, or back."""
        return nbytes / self.host_bandwidth

    def share_of_host(self, num_devices: int) -> float:
        """The share of their host's compute that so many of its devices take while the others idle; 0: none is shared.

        >>> replace(Machine.named("dgx-h100"), concurrent_devices=4).share_of_host(2)
        0.5
        """
        return min(num_devices / self.concurrent_devices, 1.0) if self.concurrent_devices else 0.0

    def when_busy(self, num_devices: int) -> Machine:
        """The machine as so many devices of a host find it whose others idle: with the compute that these leave them.

        What happens in the host is faster, links inside included; where devices have their own compute, nothing is.
        """
        share = self.idle_share(num_devices)
        return _faster(self, 1 / share) if share < 1 else self

    def idle_share(self, num_devices: int) -> float:
        """The share of its time with all at work that work on so many devices of a host takes while others idle."""
        taken = max(num_devices, self.concurrent_devices) / self.devices_per_host
        return min(taken, 1.0) if self.concurrent_devices else 1.0

    # --- as files -------------------------------------------------------------------------------------------

    def to_data(self) -> dict[str, Any]:
        """The machine as JSON values, keys in the order of the fields."""
        links = {"intra": self.intra.to_data(), "inter": self.inter.to_data()}
        return {**dataclasses.asdict(self), **links, "channels_last": list(self.channels_last)}

    @staticmethod
    def from_data(raw: Any) -> Machine:
        """The machine that `to_data` made; `InvalidArgument` names the field that is missing, unknown or mistyped."""
        kept = {each.name: each.default for each in dataclasses.fields(Machine) if each.name in _MAY_BE_LEFT_OUT}
        raw = {**kept, **_read(cast(dict[str, Any], raw))} if isinstance(raw, dict) else raw
        fields = fields_of("The machine", raw, [each.name for each in dataclasses.fields(Machine)])
        what = f"machine {fields['name']!r}"
        for name in ("name", "kind"):
            if not isinstance(fields[name], str):
                raise InvalidArgument(
                    f"{name} of the {what} is {fields[name]!r}, it must be a string. Correct the file."
                )
        for name in ("intra", "inter"):
            fields[name] = Link.from_data(f"{name} of the {what}", fields[name])
        share, peaks = fields["convolution_share"], fields["peak_flops"]
        if isinstance(share, (int, float)) and not isinstance(share, bool) and isinstance(peaks, dict):
            fields["convolution_share"] = dict.fromkeys(peaks, share)  # that of all types
        for name in (*_BY_TYPE, "sources"):
            if not isinstance(fields[name], dict):
                raise InvalidArgument(
                    f"{name} of the {what} is {fields[name]!r}, it must be an object. Correct the file."
                )
        fields["sources"] = _read(fields["sources"])
        return Machine(**fields)

    def to_json(self) -> str:
        """The machine as JSON, one field to a line."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Machine:
        """The machine that `to_json` wrote; `InvalidArgument` as for `from_data`, or if it is not JSON."""
        return Machine.from_data(json_of("The machine", text))

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON to `path`."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read the machine that `save` wrote to `path`; `InvalidArgument` as for `from_json`, or for no such file."""
        return Machine.from_json(text_of("The machine", path))

    @staticmethod
    def named(name: str) -> Machine:
        """A machine of the library; `InvalidArgument` names those that are spelled alike."""
        if name.lower() not in machines():
            known = ", ".join(machines())
            raise InvalidArgument(
                f"There is no machine {name!r}. {names_alike(name, machines())}Choose one of {known}, or load a file."
            )
        return _library()[name.lower()]

    @staticmethod
    def of_kind(device_kind: str) -> Machine:
        """The machine whose devices JAX calls `device_kind`, or one of the library by its own name.

        Where there is none, the figures of no device in particular, with a `GenericFiguresWarning`.
        """
        found = Machine.find(device_kind)
        if found is not None:
            return found
        kinds = sorted({machine.kind for machine in _library().values()} - {_GENERIC})
        warnings.warn(
            f"There are no figures for devices of kind {device_kind!r}; there are some for {', '.join(kinds)}. What is "
            "planned goes by generic figures, its seconds and its memory mean little. Measure the devices with "
            "`autopar calibrate` and load what it wrote.",
            GenericFiguresWarning,
            stacklevel=2,
        )
        return _library()[_GENERIC]

    @staticmethod
    def find(device_kind: str) -> Machine | None:
        """The machine whose devices JAX calls `device_kind`, or the one of that name; None if there is none.

        Of several, the one whose kind says most and whose memory is that of the name ("...-40GB"), or else the least.
        """
        word = device_kind.lower()
        if word in machines():
            return _library()[word]
        # An "l4" is in "NVIDIA L4", and not in "NVIDIA L40".
        fitting = [each for each in _library().values() if re.search(re.escape(each.kind) + r"(?!\d)", word)]
        most = max((len(machine.kind) for machine in fitting), default=0)
        fitting = [machine for machine in fitting if len(machine.kind) == most]
        return min(
            fitting,
            key=lambda each: (f"{each.memory_bytes / 2**30:.0f}gb" not in word, each.memory_bytes),
            default=None,
        )


def _word_of(dtype: str) -> str:
    """Return the word of `DTYPES` for arrays of a type, or its own name."""
    return "fp8" if dtype.startswith("float8") else "int8" if dtype in ("int8", "uint8") else dtype


@functools.lru_cache(maxsize=256)
def _faster(machine: Machine, factor: float) -> Machine:
    """Return a machine in which all that happens in a host takes so much less time."""
    intra = replace(
        machine.intra,
        latency_s=machine.intra.latency_s / factor,
        bandwidth=machine.intra.bandwidth * factor,
        **{name: tuple((n, factor * rate) for n, rate in getattr(machine.intra, name)) for name in _BY_SIZE},
    )
    return replace(
        machine,
        memory_bandwidth=machine.memory_bandwidth * factor,
        peak_flops={dtype: factor * peak for dtype, peak in machine.peak_flops.items()},
        exponentials=machine.exponentials * factor,
        kernel_s=machine.kernel_s / factor,
        launch_s=machine.launch_s / factor,
        execution_s=machine.execution_s / factor,
        intra=intra,
    )


def machines() -> tuple[str, ...]:
    """The names of the machines in the library, sorted."""
    return tuple(sorted(_library()))


def register_machine(machine: Machine) -> None:
    """Have `Machine.named`, `Machine.of_kind` and `Cluster.parse` know a machine, by its name and its kind."""
    library = _library()
    library[machine.name.lower()] = machine


@functools.cache
def _library() -> dict[str, Machine]:
    found = (path for path in files("autopar.hardware").joinpath("machines").iterdir() if path.name.endswith(".json"))
    every = (Machine.from_json(path.read_text(encoding="utf-8")) for path in found)
    return dict(sorted((machine.name, machine) for machine in every))
