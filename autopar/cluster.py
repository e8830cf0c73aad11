"""The hardware as a value: how many devices there are, and of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_devices` equal devices of one machine; `kind` as JAX names it, for example "NVIDIA H200"."""

    num_devices: int
    kind: str

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` if there is no device."""
        if self.num_devices < 1:
            raise InvalidArgument(
                f"The cluster has {self.num_devices} devices, it needs at least 1. Pass jax.devices()."
            )

    @staticmethod
    def from_devices(devices: Sequence[Any]) -> Cluster:
        """The cluster of these JAX devices; `InvalidArgument` if there is none or they differ in kind."""
        kinds = sorted({str(device.device_kind) for device in devices})
        if len(kinds) > 1:
            raise InvalidArgument(f"The devices are of {len(kinds)} kinds, {kinds}. Pass devices of one kind only.")
        return Cluster(num_devices=len(devices), kind=kinds[0] if kinds else "")
