"""Count the programs that XLA compiles while a function runs."""

from collections.abc import Callable
from typing import Any

import jax


def compiled_by_xla(function: Callable[[], Any]) -> int:
    """Return how many programs XLA compiled meanwhile."""
    compiled: list[bool] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        compiled.append(event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return sum(compiled)
