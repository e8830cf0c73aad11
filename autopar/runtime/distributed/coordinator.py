"""JAX's coordinator, in the driver: where the processes of a Ray cluster meet, and which none of them takes with it.

JAX starts one in process 0, and every process ends when it is gone. Here the processes must outlive process 0 for as
long as it takes to hand on what they hold. `jax.distributed.initialize` has no way to use another one in process 0, so
that one is started there too, at an address that nobody is told.
"""

from __future__ import annotations

import socket
from typing import Any


def start_coordinator(host: str, num_processes: int, heartbeat_timeout_s: int) -> tuple[str, Any]:
    """Start a coordinator at a free port of this host; its address, and what `shutdown` is called of at the end."""
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    address = f"{host}:{free_port(host)}"
    return address, _jax.get_distributed_runtime_service(address, num_processes, heartbeat_timeout=heartbeat_timeout_s)


def free_port(host: str) -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
