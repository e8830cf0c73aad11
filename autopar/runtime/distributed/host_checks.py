"""Checks that run in the processes of a cluster: a collective over all devices, and a transfer between two hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.runtime.distributed.host import Host
from autopar.runtime.distributed.host_inputs import sharding_on
from autopar.runtime.finite import kinds_of_values
from autopar.runtime.transfer.tiles import DeviceLayout, plan_transfer


def add_up_over_all_devices(host: Host) -> tuple[bool, float]:
    """Add one number per device, all over the cluster: whether the sum is right, and the seconds of the second time."""
    devices = host.world.devices
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec("all"))
    numbers = np.arange(len(devices), dtype=np.float32)
    array = jax.make_array_from_callback(numbers.shape, everywhere, lambda index: numbers[index])
    add = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    add(array).block_until_ready()
    start = time.perf_counter()
    found = add(array).block_until_ready()
    return float(found.addressable_shards[0].data) == float(numbers.sum()), time.perf_counter() - start


def kinds_of_kept_values(host: Host, numbers: Sequence[int]) -> list[int]:
    """Return for every value 0 if it is finite, 1 if it holds an infinity, 2 if a NaN, by its parts here."""
    pieces = [[piece for piece in host.pieces(number) if piece is not None] for number in numbers]
    kinds = iter(kinds_of_values([piece for each in pieces for piece in each]))
    return [max((next(kinds) for _ in each), default=0) for each in pieces]


def send_between(host: Host, source: int, destination: int, num_bytes: int, step: int) -> tuple[bool, float] | None:
    """Send bytes from one process's first device to another's: what the receiver found, and its seconds.

    Every process calls it; None from those that do not receive. The seconds are those of the second transfer.
    """
    world = host.world
    first = {process: world.process_of.index(process) for process in (source, destination)}
    layouts = [
        DeviceLayout(devices=(first[p],), mesh_shape=(1,), axis_names=("x",), spec=PartitionSpec())
        for p in (source, destination)
    ]
    shape = (num_bytes // 4,)
    plan = plan_transfer(shape, 4, layouts[0], layouts[1], world.process_of, dtype="float32")
    exchange, expected, messages = world.exchange, np.arange(shape[0], dtype=np.float32), range(2)
    here, there = (sharding_on(layout, world.devices) for layout in layouts)
    sends = [exchange.sender([plan], message) for message in messages] if world.process == source else []
    receives = (
        [exchange.receiver([plan], message, [there]) for message in messages] if world.process == destination else []
    )
    exchange.open()
    exchange.begin_step(step)
    for send in sends:
        send([jax.device_put(expected, here)])
    found = None
    for receive in receives:
        start = time.perf_counter()
        [received] = receive()
        received.block_until_ready()
        seconds = time.perf_counter() - start
        found = bool(np.array_equal(np.asarray(received), expected)), seconds
    return found
