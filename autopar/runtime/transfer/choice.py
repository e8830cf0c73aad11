"""Choose how this process exchanges values with others, by what is there.

    CPU devices                        JAX's transfer server
    GPUs, and CuPy with NCCL           NCCL: GPU to GPU, past the hosts
    GPUs without it                    JAX's transfer server

All processes of a world must come to the same; `check_endpoints` says where they do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from autopar.errors import PlanMismatch, Unsupported, UntriedWarning
from autopar.runtime.interfaces import Device
from autopar.runtime.transfer.endpoints import ProcessOf
from autopar.runtime.transfer.jax_transfer import TransferServer
from autopar.runtime.transfer.nccl import Nccl


def chosen_endpoint(
    process: int, process_of: ProcessOf, devices: Mapping[int, Device], *, host: str
) -> TransferServer | Nccl:
    """Return the endpoint of this process, which others reach at `host`; `devices` are its own, by ordinal."""
    if all(device.platform != "gpu" for device in devices.values()):
        return TransferServer(devices, host=host)
    try:
        endpoint, how = Nccl(process, process_of, devices, host=host), "NCCL"
    except Unsupported as reason:
        endpoint, how = TransferServer(devices, host=host), f"JAX's transfer server ({reason})"
    warnings.warn(
        f"Values go between processes with GPUs by {how}, which has been tested without GPUs only. Compare some steps "
        "with jax.jit's before you rely on it.",
        UntriedWarning,
        stacklevel=2,
    )
    return endpoint


def check_endpoints(kinds: Sequence[str]) -> None:
    """Raise `PlanMismatch` unless all processes have chosen the same."""
    other = next((process for process, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise PlanMismatch(
            f"Process {other} exchanges values by {kinds[other]}, process 0 by {kinds[0]}. All must do so alike: give "
            "every host the same kind of devices, and install CuPy on all of them or on none."
        )
