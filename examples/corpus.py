"""Real text that every machine has: the source files of Python's standard library, byte by byte."""

import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 256


def read_standard_library(max_bytes: int = 8_000_000) -> np.ndarray:
    """The modules on the top level of the standard library, in order of name, as one array of bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    if len(text) < 100_000:
        raise FileNotFoundError(
            f"Found {len(text)} bytes of Python source in {sysconfig.get_path('stdlib')}, at least 100,000"
            " are needed. This Python came without its source files: run the example with another one."
        )
    return np.frombuffer(text[:max_bytes], np.uint8)


def draw_batches(text: np.ndarray, *, num_batches: int, batch_size: int, length: int) -> list[np.ndarray]:
    """Batches (batch_size, length + 1) of passages drawn at random, the same ones in every run."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(text) - length - 1, size=(num_batches, batch_size))
    return [text[rows[:, None] + np.arange(length + 1)].astype(np.int32) for rows in starts]
