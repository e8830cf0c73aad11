"""The plans that a practitioner would try by hand for a model on a cluster, as degrees of parallelism.

    Workload, Cluster, method  ->  Megatron, ...      the leanest last

With P parameters, of which the model's copy and its gradient have g bytes each and the rest of the state s bytes, a
GPU among n holds under t-way tensor and p-way pipeline parallelism, the optimizer's state divided (ZeRO-1),

    2 g / (t p)  +  s / n

and t p is the least for which that leaves room for activations, t within a host (Narayanan et al. 2021, section 3.3:
"use tensor parallelism up to the servers' GPUs, then pipeline parallelism, and data parallelism to scale out").
Microbatches are as many as keep a pipeline filled, of a few examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

import autopar
from autopar import Megatron
from benchmarks.models.workload import Workload

HAND_METHODS = ("data", "zero3", "megatron", "inter-only")
_ROWS = (8, 2, 1)
"""Examples of a microbatch for each replica."""
_MOST_FOR_MANY = 0.4
"""Share of the memory that the state may take for as many as there can be to be tried."""
_PER_STAGE = 8
"""Least microbatches of a pipeline for each of its stages, so that its bubble is an eighth at most."""
_ROOM = 0.7
"""Share of the memory that the state may take."""


def hand_candidates(
    name: str, workload: Workload, cluster: autopar.Cluster, num_microbatches: int | None = None
) -> list[Megatron]:
    """Return the plans to try; none if the batch has not an example for each replica.

    A pipeline of single GPUs has at most a stage for each layer, and leaves other GPUs idle.
    """
    count = cluster.num_devices
    match name:
        case "data" | "zero3":
            found = list(_replicas(workload, cluster, zero=3 if name == "zero3" and count > 1 else 0))
        case "inter-only":
            found = list(_stages(workload, cluster, min(count, _num_layers(workload))))
        case "megatron":
            found = list(_mixed(workload, cluster)) if count > 1 else list(_replicas(workload, cluster, 0))
        case _:
            raise AssertionError(name)
    if num_microbatches is None:
        return found
    return list(dict.fromkeys(replace(each, num_microbatches=num_microbatches) for each in found))


def _replicas(workload: Workload, cluster: autopar.Cluster, zero: int) -> Iterator[Megatron]:
    """One replica for each GPU."""
    count = cluster.num_devices
    weights, rest = _state_bytes(workload)
    held = (2 * weights + rest) / (count if zero else 1)
    for rows in _rows(held, cluster):
        microbatches = _microbatches(workload, count, rows)
        if microbatches is not None:
            yield _method(workload, data=count, num_microbatches=microbatches, zero=zero)


def _stages(workload: Workload, cluster: autopar.Cluster, count: int) -> Iterator[Megatron]:
    """One stage for each of so many GPUs."""
    weights, rest = _state_bytes(workload)
    for rows in _rows((2 * weights + rest) / count, cluster):
        microbatches = _microbatches(workload, 1, rows, least=_PER_STAGE * count)
        assert microbatches is not None
        yield _method(workload, data=1, pipeline=count, num_microbatches=microbatches)


def _rows(held_bytes: float, cluster: autopar.Cluster) -> tuple[int, ...]:
    """Examples of a microbatch to try, beside so many bytes of state."""
    return _ROWS if held_bytes <= _MOST_FOR_MANY * cluster.machine.memory_bytes else _ROWS[1:]


def _mixed(workload: Workload, cluster: autopar.Cluster) -> Iterator[Megatron]:
    """The least model parallelism that has room, with tensor and pipeline parallelism in two ways; then the next."""
    count, inside, layers = cluster.num_devices, cluster.machine.devices_per_host, _num_layers(workload)
    weights, rest = _state_bytes(workload)
    room = _ROOM * cluster.machine.memory_bytes
    degrees = [n for n in range(1, count + 1) if count % n == 0]
    having_room = [n for n in degrees if 2 * weights / n + rest / count <= room] or degrees[-1:]
    for parallel, most in zip(having_room, (2, 1) if count <= inside else (2,)):
        data, even = count // parallel, math.log2(min(parallel, inside)) / 2
        inside_host = [t for t in degrees if parallel % t == 0 and inside % t == 0 and parallel // t <= layers]
        tensors = [t for t in inside_host if layers % (parallel // t) == 0] or inside_host
        for tensor in sorted(tensors, key=lambda t: abs(math.log2(t) - even))[:most]:
            pipeline = parallel // tensor
            least = _PER_STAGE * pipeline if pipeline > 1 else 1
            microbatches = _microbatches(workload, data, 2 * tensor, least)
            if microbatches is not None:
                degree = {"data": data, "tensor": tensor, "pipeline": pipeline, "num_microbatches": microbatches}
                yield _method(workload, **degree, zero=1 if data > 1 else 0)


def _method(workload: Workload, **fields: Any) -> Megatron:
    return Megatron(batch_statistics=workload.batch_statistics, **fields)


def _microbatches(workload: Workload, data: int, rows: int, least: int = 1) -> int | None:
    """The fewest microbatches from `least` on with at most so many examples for each replica, or the most.

    None if there is not an example for each replica.
    """
    each, left = divmod(workload.batch_size, data)
    if left:
        return None
    counts = [count for count in range(1, each + 1) if each % count == 0]
    return next((count for count in counts if count >= least and each // count <= rows), counts[-1])


def replica_bytes(workload: Workload) -> float:
    """Return the bytes that a GPU with the whole state holds at least: that, and gradients."""
    weights, rest = _state_bytes(workload)
    return 2 * weights + rest


def _num_layers(workload: Workload) -> int:
    return sum(name.startswith("h_") for name in workload.params)


def _state_bytes(workload: Workload) -> tuple[float, float]:
    """Return the bytes of the parameters that the model reads, and of the rest of the state."""

    def nbytes(tree: Any) -> float:
        return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))

    state = workload.abstract_state
    return nbytes(state.params), nbytes(state) - nbytes(state.params)
