"""One process of a world in which values are moved for tests: every process draws the same messages.

    python -m tests.runtime.exchange_process PROCESS NUM_PROCESSES COORDINATOR ENDPOINT

The endpoint is the "server" of JAX, or "nccl" between GPUs. It prints its address, reads those of all on its standard
input, and prints what it found.
"""

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.instructions import KEY_BYTES, item_bytes
from autopar.runtime.executables import KEY_IMPLEMENTATIONS, jax_dtype
from autopar.runtime.transfer.exchange import Exchange
from autopar.runtime.transfer.jax_transfer import TransferServer
from autopar.runtime.transfer.nccl import Nccl
from autopar.runtime.transfer.tiles import DeviceLayout, TransferPlan, plan_transfer, scattered
from tests.runtime.random_layouts import random_layout, random_shape, some

DTYPES = ("float32", "bfloat16", "bool", "int8", "float16", "complex64", "float8_e4m3fn", "key<fry>", "key<rbg>")
DEVICES_EACH = 2
MESSAGES = 22
MARK = "exchange: "
GIVE_UP_S = 150


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A value as numpy, words if it is random keys, and how it goes."""

    whole: np.ndarray
    plan: TransferPlan


def drawn_messages(num_devices: int, process_of: Sequence[int], *, seed: int = 0) -> list[list[Moved]]:
    """Messages of two to four values of any shape, dtype and layout between any devices."""
    rng = np.random.default_rng(seed)
    messages: list[list[Moved]] = []
    for _ in range(MESSAGES):
        ends = [some(rng, list(range(num_devices))) for _ in range(2)]
        messages.append([drawn_value(rng, ends, process_of) for _ in range(rng.integers(2, 5))])
    return messages


def drawn_value(rng: np.random.Generator, ends: list[list[int]], process_of: Sequence[int]) -> Moved:
    rank, dtype = int(rng.integers(0, 4)), str(rng.choice(DTYPES))
    source, destination = (random_layout(rng, ordinals, rank) for ordinals in ends)
    shape = random_shape(rng, [source, destination], rank)
    plan = plan_transfer(shape, item_bytes(dtype), source, destination, process_of, dtype=dtype)
    if dtype in KEY_BYTES:
        return Moved(whole=rng.integers(0, 2**32, (*shape, KEY_BYTES[dtype] // 4), np.uint32), plan=plan)
    return Moved(whole=np.asarray(rng.integers(-9, 9, shape)).astype(jax_dtype(dtype)), plan=plan)


def sharding_of(layout: DeviceLayout) -> NamedSharding:
    grid = np.array([jax.devices()[ordinal] for ordinal in layout.devices]).reshape(layout.mesh_shape)
    return NamedSharding(Mesh(grid, layout.axis_names), layout.spec)


def array_of(moved: Moved) -> jax.Array:
    """The value in the layout of its source."""
    sharding, plan = sharding_of(moved.plan.source), moved.plan
    indices = sharding.addressable_devices_indices_map(plan.shape)
    shards = [jax.device_put(moved.whole[index], device) for device, index in indices.items()]
    if plan.dtype in KEY_BYTES:
        shards = [jax.random.wrap_key_data(words, impl=KEY_IMPLEMENTATIONS[plan.dtype]) for words in shards]
    return jax.make_array_from_single_device_arrays(plan.shape, sharding, shards)


def is_right(array: jax.Array, moved: Moved) -> bool:
    """True if the shards here are bit for bit those of the destination's layout."""
    same = array.dtype == jax_dtype(moved.plan.dtype) and array.shape == moved.plan.shape
    for shard in array.addressable_shards:
        words = jax.random.key_data(shard.data) if moved.plan.dtype in KEY_BYTES else shard.data
        wanted = moved.whole[shard.index]
        same &= words.shape == wanted.shape and np.asarray(words).tobytes() == wanted.tobytes()
    return same


def carried_out(exchange: Exchange, messages: list[list[Moved]], steps: int) -> list[str]:
    """Send and receive every message in every step; what did not arrive as it was sent."""
    own = set(exchange.devices)
    ends = []
    for number, values in enumerate(messages):
        plans = [moved.plan for moved in values]
        shardings = [sharding_of(plan.destination) for plan in plans]
        lasting = range(number % 2 * len(values))  # all, or none
        sends = own & set(plans[0].source.devices)
        send = exchange.sender(plans, number, lasting=lasting) if sends else None
        receives = own & set(plans[0].destination.devices)
        receive = exchange.receiver(plans, number, shardings) if receives else None
        ends.append((send, [array_of(moved) for moved in values] if sends else [], receive))
    exchange.open()
    wrong: list[str] = []
    for step in range(steps):
        exchange.begin_step(step)
        for (send, arrays, receive), values in zip(ends, messages, strict=True):
            if send is not None:
                send(arrays)
            if receive is not None:
                received = receive()
                wrong += [str(m.plan) for m, a in zip(values, received, strict=True) if not is_right(a, m)]
    return wrong


def donated_is_received(exchange: Exchange, message: int) -> bool:
    """A value sent by process 0 before it was computed, and then donated, arrives; the receiver begins after that."""
    source, destination = (DeviceLayout(devices=(d,), mesh_shape=(1,), axis_names=("x",), spec=P()) for d in (0, 2))
    plan = plan_transfer((1 << 16,), 4, source, destination, exchange.process_of, dtype="float32")
    compute = jax.jit(lambda x: jax.lax.fori_loop(0, 4000, lambda _, y: -y, x))
    overwrite = jax.jit(lambda x: -x, donate_argnums=0)
    if exchange.process == 0:
        value = compute(jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32), sharding_of(source)))
        exchange.sender([plan], message)([value])
        done = overwrite(value).block_until_ready()
        exchange.sender([plan], message + 1)([done])
        return value.is_deleted()
    if exchange.process == 1:
        later, sooner = (exchange.receiver([plan], message + n, [sharding_of(destination)])() for n in (1, 0))
        jax.block_until_ready(later)
        return bool((sooner[0] == -later[0]).all()) and bool((sooner[0] == jnp.arange(1 << 16)).all())
    return True


def scattered_is_gathered(exchange: Exchange, message: int) -> bool:
    """Two processes that want the same all receive a half each, and gather the other one."""
    source = DeviceLayout(devices=(0, 1), mesh_shape=(2,), axis_names=("x",), spec=P("x"))
    wanted = DeviceLayout(devices=(2, 3, 4, 5), mesh_shape=(2, 2), axis_names=("x", "y"), spec=P("y"))
    spread = scattered(wanted, (8, 6), exchange.process_of)
    assert spread is not None
    plan = plan_transfer((8, 6), 4, source, spread, exchange.process_of, dtype="float32")
    moved = Moved(whole=np.arange(48, dtype=np.float32).reshape(8, 6), plan=plan)
    if exchange.process == 0:
        exchange.sender([plan], message)([array_of(moved)])
        return plan.wire_bytes == moved.whole.nbytes
    received = exchange.receiver([plan], message, [sharding_of(wanted)])()[0]
    return received.sharding.is_equivalent_to(sharding_of(wanted), 2) and is_right(received, moved)


def tell(value: object) -> None:
    # Gloo prints, too.
    print(MARK + json.dumps(value), flush=True)


def main(process: int, num_processes: int, coordinator: str, kind: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes, process)
    ordinals = {device: ordinal for ordinal, device in enumerate(jax.devices())}
    process_of = [device.process_index for device in jax.devices()]
    own = {ordinals[device]: device for device in jax.local_devices()}
    endpoint = TransferServer(own) if kind == "server" else Nccl(process, process_of, own)
    tell(endpoint.address())
    endpoint.connect(dict(enumerate(json.loads(sys.stdin.readline()))))
    exchange = Exchange(process, process_of, own, endpoint)
    messages = drawn_messages(len(ordinals), process_of)
    found = {"wrong": carried_out(exchange, messages, steps=2), "wire_bytes": exchange.wire_bytes_sent}
    if kind == "server":
        found["donated"] = donated_is_received(exchange, 1000)
        found["scattered"] = scattered_is_gathered(exchange, 2000)
    tell(found)
    sys.stdin.readline()  # The others may still pull.
    os._exit(0)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(GIVE_UP_S, exit=True)
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at an ordinary end JAX would wait for the others
