"""Read a value back from its shards: which to ask of which process, and the whole that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.runtime.distributed.distributed_array import DistributedArray
from autopar.runtime.distributed.messages import ShardRequest
from autopar.runtime.distributed.placed import Placed
from autopar.runtime.tiles import Box


def cover(placed: Placed, process_of: Sequence[int]) -> dict[int, list[tuple[ShardRequest, Box]]]:
    """By process: the shards that together are the whole value, each once, with their boxes of the whole."""
    plan: dict[int, list[tuple[ShardRequest, Box]]] = {}
    seen: set[Box] = set()
    for number, piece in enumerate(placed.pieces):
        for ordinal, box in piece.device_boxes().items():
            if box not in seen:
                seen.add(box)
                plan.setdefault(process_of[ordinal], []).append((ShardRequest(piece=number, ordinal=ordinal), box))
    return plan


def assemble(value: DistributedArray, shards: Sequence[tuple[Box, np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
    """The whole value from its shards and their boxes; of random keys, their words."""
    if len(shards) == 1:
        return np.array(shards[0][1])
    words = shards[0][1].shape[value.ndim :]
    whole = np.empty((*value.shape, *words), shards[0][1].dtype)
    for box, shard in shards:
        whole[tuple(slice(*part) for part in box)] = shard
    return whole
