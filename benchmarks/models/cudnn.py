"""Trace kernels of cuDNN where there is none, to plan for GPUs elsewhere: XLA compiles them all the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

_OF_JAX = "jax._src.cudnn.fused_attention_stablehlo"
_VERSION = 91_800


@contextmanager
def traced_as_if_there() -> Generator[None]:
    """A context in which JAX asks neither for the version of cuDNN nor for a GPU as it traces attention."""
    with (
        patch(f"{_OF_JAX}.check_cudnn_version", return_value=_VERSION),
        patch(f"{_OF_JAX}.check_is_flash_attention", return_value=None),
        patch(f"{_OF_JAX}.check_is_flash_attention_fp8", return_value=None),
    ):
        yield
