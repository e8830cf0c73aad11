"""Write rows of floating numbers as codes of 8 bits, with a scale for every block of them, and read them again.

    [rows, n] floating  ->  [rows, encoded_bytes(n)] bytes  ->  [rows, n] float32

    scale = max |x| of a block / 448        code = x / scale as float8_e4m3fn        a row: its codes, then its scales

A number is off by at most 1/16 of itself, or by 1/458,752 of the largest in its block where that is more: 448 is the
largest code, 2⁻⁹ the smallest above zero. float8_e5m2, whose codes reach further down, is off by 1/8, and the scales
make the reach needless. A block with a number that is not finite is read as NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.compiler.sharding.layout import part_size

CODE = "float8_e4m3fn"
"""The type of the codes."""
_LARGEST_BLOCK = 128
"""Numbers that share a scale: its 4 bytes are 3 % of theirs."""
_SCALE_BYTES = 4


def encoded_bytes(size: int) -> int:
    """Return the bytes of a row of `size` numbers: its codes, and a scale for every block."""
    blocks, block = _blocks(size)
    return blocks * (block + _SCALE_BYTES)


def encode(rows: Any) -> Any:
    """Return the bytes, uint8 [rows, encoded_bytes(n)], of numbers [rows, n]."""
    blocks, block = _blocks(rows.shape[1])
    padded = jnp.pad(rows.astype(jnp.float32), ((0, 0), (0, blocks * block - rows.shape[1])))
    numbers = padded.reshape(-1, blocks, block)
    largest = jnp.max(jnp.abs(numbers), axis=2)
    scales = largest / float(jnp.finfo(CODE).max)
    # What is too small for a scale, as zeros are, has codes of zero.
    codes = (numbers / jnp.where(scales == 0, jnp.inf, scales)[:, :, None]).astype(CODE)
    parts = (codes, scales.astype(jnp.float32))
    return jnp.concatenate([_as_bytes(part).reshape(rows.shape[0], -1) for part in parts], axis=1)


def decode(encoded: Any, size: int) -> Any:
    """Return the numbers, float32 [rows, size], of the bytes that `encode` wrote."""
    blocks, block = _blocks(size)
    codes, scales = encoded[:, : blocks * block], encoded[:, blocks * block :]
    numbers = _from_bytes(codes.reshape(-1, blocks, block), CODE).astype(jnp.float32)
    whole = numbers * _from_bytes(scales.reshape(-1, blocks, _SCALE_BYTES), "float32")[:, :, None]
    return whole.reshape(-1, blocks * block)[:, :size]


def rounded(x: Any) -> Any:
    """Return an array as it is read again after it was written so, in its own type."""
    return decode(encode(x.reshape(1, -1)), x.size).reshape(x.shape).astype(x.dtype)


def _blocks(size: int) -> tuple[int, int]:
    """Return how many blocks numbers are cut into, and how many are in each, the last one padded."""
    blocks = max(part_size(size, _LARGEST_BLOCK), 1)
    return blocks, part_size(size, blocks)


def _as_bytes(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def _from_bytes(x: Any, dtype: str) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
