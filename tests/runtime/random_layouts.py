"""Random layouts of random values on random meshes, for tests of what moves between them."""

import math

import numpy as np
from jax.sharding import PartitionSpec

from autopar.runtime.transfer.tiles import DeviceLayout

AXES = ("x", "y", "z")


def random_layout(rng: np.random.Generator, ordinals: list[int], rank: int) -> DeviceLayout:
    """The ordinals in any order as a mesh of up to three axes, each on some dimension or on none."""
    devices = rng.permutation(ordinals).tolist()
    shape: list[int] = []
    left = len(devices)
    while len(shape) < 2 and rng.random() < 0.7:
        shape.append(int(rng.choice([n for n in range(1, left + 1) if left % n == 0])))
        left //= shape[-1]
    shape.append(left)
    entries: list[list[str]] = [[] for _ in range(rank)]
    for axis in rng.permutation(AXES[: len(shape)]).tolist():
        place = rng.integers(-1, rank)
        if place >= 0:
            entries[place].append(axis)
    spec = PartitionSpec(*(tuple(e) if len(e) > 1 else (e[0] if e else None) for e in entries))
    return DeviceLayout(devices=tuple(devices), mesh_shape=tuple(shape), axis_names=AXES[: len(shape)], spec=spec)


def random_shape(rng: np.random.Generator, layouts: list[DeviceLayout], rank: int) -> tuple[int, ...]:
    """A shape that every layout can cut, of any size, now and then zero."""
    counts = [layout.parts((0,) * rank) for layout in layouts]
    return tuple(
        math.lcm(*parts) * int(rng.choice([0, 1, 1, 2, 3], p=[0.04, 0.3, 0.26, 0.3, 0.1])) for parts in zip(*counts)
    )


def some(rng: np.random.Generator, ordinals: list[int]) -> list[int]:
    """One of them or more."""
    return rng.permutation(ordinals)[: rng.integers(1, len(ordinals) + 1)].tolist()
