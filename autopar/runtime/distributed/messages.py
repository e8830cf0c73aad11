"""The messages between the driver and the processes: plain data, one per process and step."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from autopar.hardware.cluster import DeviceKind
from autopar.runtime.distributed.input_routing import InputRouting
from autopar.runtime.timeline import InstructionTime


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """A world to join: the number of the process among how many, where they meet, and the driver's settings."""

    process: int
    num_processes: int
    coordinator: str | None
    """host:port in the driver; None in a world of one."""
    nodes: tuple[str, ...]
    """The IP address of the node of every process, at which the others reach it."""
    num_devices: int
    environment: Mapping[str, str]
    jax_settings: Mapping[str, Any]
    search_path: tuple[str, ...]
    start_timeout_s: float
    """Seconds that the processes may take to meet."""
    after: tuple[int, ...] = ()
    """Processes of this host that have been told to end: their devices are free when they have."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """A process as it describes itself when it has joined."""

    versions: Mapping[str, str]
    node: str
    pid: int
    device_kind: DeviceKind
    platform: str
    num_devices: int
    process_of: tuple[int, ...]
    """The process of every device of the world, in the order of their ordinals."""
    address: str
    """The address at which the others reach its channel."""
    endpoint: str
    """The kind of that channel."""


@dataclass(frozen=True, kw_only=True)
class StepMessage:
    """One step for one process. Values have numbers; `arguments` and `results` name them by leaf."""

    step: int
    program: int
    routing: int
    new_routing: InputRouting | None = None
    """Sent with the first step that uses it."""
    arguments: Sequence[int | None] = ()
    """Value numbers per argument; None for one that the driver holds."""
    sent: Sequence[np.ndarray[Any, Any]] = ()
    results: Sequence[int | None] = ()
    """Value numbers that the results get; None for a result that is a constant."""
    donated: Sequence[int] = ()
    """Values that this step may overwrite; they are gone after it."""
    dropped: Sequence[int] = ()
    """Values that the driver holds no longer; gone before the step."""
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """The shard of one piece on one device."""

    piece: int
    ordinal: int


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The reply of a process that has started all work of a step."""

    times: tuple[InstructionTime, ...] = ()
    """The times at which each instruction of a timed step ran."""


# The driver and every process make each program, so that they must have these releases in common.
COMMON_PACKAGES = ("jax", "jaxlib", "numpy", "autopar")


def installed_versions() -> dict[str, str]:
    """Return the releases here of Python and of the packages that driver and processes must have in common."""
    return {"python": platform.python_version().rpartition(".")[0]} | {name: version(name) for name in COMMON_PACKAGES}


# Ray sends bytes in half the time of an object; but it shares the memory of large arrays, which bytes would copy.
PACKED_BYTES = 1 << 16


def packed(message: StepMessage) -> StepMessage | bytes:
    """The message as it goes over the wire."""
    small = sum(array.nbytes for array in message.sent) <= PACKED_BYTES
    return pickle.dumps(message, protocol=5) if small else message


def unpacked(sent: StepMessage | bytes) -> StepMessage:
    """The message that `packed` was given."""
    return pickle.loads(sent) if isinstance(sent, bytes) else sent
