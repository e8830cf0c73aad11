"""Move values between meshes whose devices belong to several processes: carry out plans of tiles in one of them.

    send      shards -> cut into tiles -> post, one message per process;  tiles for devices of this process: device_put
    receive   pull -> join the tiles of a box -> copy it to the devices here that want the same -> one jax.Array

Whatever can be known before the first step is: which shards, compiled functions that cut and join (one call per
device and message, none for tiles that are whole shards), and what is pulled. Nothing waits: arrays are posted
before they are computed, and returned before they arrived.

Each process knows of its own tiles only, but all make the same plans, so that the two ends of a message agree on
the order of the tiles in it without a word. The tag of a message holds the step, the message and the destination:

    tag  =  (step mod 2²⁶) · 2³⁶  +  message · 2¹⁴  +  destination process

Random keys travel as their words, which servers know to move.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.ir.instructions import KEY_BYTES
from autopar.ir.program import Program, Run, Send
from autopar.runtime.executables import KEY_IMPLEMENTATIONS, jax_dtype
from autopar.runtime.interfaces import Device, Endpoint, Sender
from autopar.runtime.transfer.endpoints import WORD_BYTES, Empty, ProcessOf, ShardCut, ShardJoin, incoming, outgoing
from autopar.runtime.transfer.tiles import Box, TransferPlan

STEP_BITS, MESSAGE_BITS, PROCESS_BITS = 26, 22, 14

Arrays = list[Any]  # jax.Arrays on one device each


def lasting_values(program: Program) -> frozenset[tuple[int, str]]:
    """The values (mesh, name) whose buffers nobody overwrites while a message with them is on its way.

    Arguments and results are in the hands of the user, who may donate them to the next call.
    """
    sent = {
        (n, v) for n, m in enumerate(program.meshes) for i in m.instructions if isinstance(i, Send) for v in i.values
    }
    donated = {
        (number, i.inputs[position])
        for number, mesh in enumerate(program.meshes)
        for i in mesh.instructions
        if isinstance(i, Run)
        for position in program.executables[i.executable].donated
    }
    held = {(i.mesh, i.value) for i in program.inputs} | {part for o in program.outputs for part in o.parts}
    return frozenset(sent - donated - held)


class Exchange:
    """The messages of one process. Between two processes, messages are sent and received in one common order."""

    def __init__(
        self, process: int, process_of: ProcessOf, devices: Mapping[int, Device], endpoint: Endpoint | None
    ) -> None:
        self.process = process
        self.process_of = process_of
        self.devices = devices
        self.endpoint = endpoint
        self.wire_bytes_sent = 0
        self._step = 0
        self._moved: dict[int, deque[Arrays]] = defaultdict(deque)  # message -> tiles from this process to itself
        self._compiled: dict[tuple[ShardCut | ShardJoin, ...], Callable[..., Arrays]] = {}

    def begin_step(self, step: int) -> None:
        """Number the messages from now on; what a step before left behind is not found any more."""
        self._step = step
        self._moved.clear()

    def sender(self, plans: Sequence[TransferPlan], message: int, *, lasting: Collection[int] = ()) -> Sender:
        """A function that posts this process's tiles of the values, one per plan.

        `lasting` are the positions of values whose buffers nothing overwrites later (see `lasting_values`). Others are
        copied if they are sent whole: an executable that they are donated to would not wait for the receiver.
        """
        end = outgoing(plans, self.process, self.process_of, lasting)
        shards = [(value, position, self.devices[ordinal]) for value, position, ordinal in end.shards]
        cuts = [(self._compile(cuts, _cut_all), places) for places, cuts in end.cuts]
        posts = [(self._reached().poster(process, parcels), process, places) for process, parcels, places in end.posts]
        moved = [place for place, _ in end.moves]
        moved_to = [self.devices[ordinal] for _, ordinal in end.moves]

        def send(arrays: Sequence[jax.Array]) -> None:
            held: Arrays = []
            for value, position, device in shards:
                shard = arrays[value].addressable_shards[position]
                assert shard.device is device, f"value {value} of message {message} is laid out otherwise than planned"
                held.append(shard.data)
            for cut, places in cuts:
                held += cut(*[held[place] for place in places])
            for post, process, places in posts:
                tiles = [held[place] for place in places]
                self.wire_bytes_sent += sum(tile.nbytes for tile in tiles)
                post(self._tag(message, process), tiles)
            if moved:
                self._moved[message].append(jax.device_put([held[place] for place in moved], moved_to))

        return send

    def receiver(
        self, plans: Sequence[TransferPlan], message: int, shardings: Sequence[NamedSharding]
    ) -> Callable[[], Arrays]:
        """A function that returns the values in these shardings, this process's shards of them.

        A plan whose destination cuts finer than the sharding (see `scattered`) is completed by an all-gather, which all
        processes of the sharding take part in.
        """
        end = incoming(plans, self.process, self.process_of)
        pulls = [self._reached().puller(process, parcels) for process, parcels in end.pulls]
        joins = [(self._compile(joins, _join_all), places) for places, joins in end.joins]
        copied = [place for place, _ in end.copies]
        copied_to = [self.devices[ordinal] for _, ordinal in end.copies]
        empties = [_empty(empty, self.devices[empty.device]) for empty in end.empties]
        finish = [_finish(*parts) for parts in zip(plans, shardings, end.shards, strict=True)]

        def receive() -> list[jax.Array]:
            held: Arrays = self._moved[message].popleft() if end.moves else []
            for pull in pulls:
                held += pull(self._tag(message, self.process))
            for join, places in joins:
                held += join(*[held[place] for place in places])
            if copied:
                held += jax.device_put([held[place] for place in copied], copied_to)
            held += [make() for make in empties]
            return [make(held) for make in finish]

        return receive

    def open(self) -> None:
        """Reach the other ends of all messages. Called when senders and receivers were made, by all processes."""
        if self.endpoint is not None:
            self.endpoint.open()

    def _tag(self, message: int, destination: int) -> int:
        assert message < 1 << MESSAGE_BITS and destination < 1 << PROCESS_BITS
        return ((self._step % (1 << STEP_BITS)) << MESSAGE_BITS | message) << PROCESS_BITS | destination

    def _reached(self) -> Endpoint:
        assert self.endpoint is not None, "messages between processes need an endpoint"
        return self.endpoint

    def _compile(self, key: tuple[Any, ...], make: Callable[..., Callable[..., Arrays]]) -> Callable[..., Arrays]:
        """One jitted function for all messages that do the same."""
        if key not in self._compiled:
            self._compiled[key] = jax.jit(make(key))
        return self._compiled[key]


def _cut_all(cuts: Sequence[ShardCut]) -> Callable[..., Arrays]:
    def cut(*shards: jax.Array) -> Arrays:
        return [_cut(shards[cut.input], cut) for cut in cuts]

    return cut


def _cut(shard: jax.Array, cut: ShardCut) -> jax.Array:
    words = jax.random.key_data(shard) if cut.is_key else shard
    return jnp.copy(words) if cut.box is None else words[tuple(slice(*limits) for limits in cut.box)]


def _join_all(joins: Sequence[ShardJoin]) -> Callable[..., Arrays]:
    def join(*tiles: jax.Array) -> Arrays:
        left = iter(tiles)
        wholes = [_joined([(box, next(left)) for box in join.boxes]) for join in joins]
        return [
            jax.random.wrap_key_data(whole, impl=KEY_IMPLEMENTATIONS[join.dtype]) if join.dtype in KEY_BYTES else whole
            for whole, join in zip(wholes, joins, strict=True)
        ]

    return join


def _joined(tiles: Sequence[tuple[Box, jax.Array]]) -> jax.Array:
    """The tiles form a grid: join those that lie alike along the first axis that cuts them, then the rows along it."""
    if len(tiles) == 1:
        return tiles[0][1]
    boxes = [box for box, _ in tiles]
    axis = next(axis for axis in range(len(boxes[0])) if len({box[axis] for box in boxes}) > 1)
    rows = [[tile for tile in tiles if tile[0][axis] == limits] for limits in sorted({box[axis] for box in boxes})]
    return jnp.concatenate([_joined(row) for row in rows], axis)


def _empty(empty: Empty, device: Device) -> Callable[[], jax.Array]:
    # A new one each time, because it may be donated.
    if empty.dtype not in KEY_BYTES:
        return lambda: jax.device_put(np.zeros(empty.shape, jax_dtype(empty.dtype)), device)
    words = np.zeros((*empty.shape, KEY_BYTES[empty.dtype] // WORD_BYTES), np.uint32)
    implementation = KEY_IMPLEMENTATIONS[empty.dtype]
    return lambda: jax.random.wrap_key_data(jax.device_put(words, device), impl=implementation)


def _finish(plan: TransferPlan, sharding: NamedSharding, places: tuple[int, ...]) -> Callable[[Arrays], jax.Array]:
    box = plan.destination_boxes[plan.destination.devices[0]]
    if tuple(stop - start for start, stop in box) == sharding.shard_shape(plan.shape):
        return lambda held: jax.make_array_from_single_device_arrays(
            plan.shape, sharding, [held[place] for place in places]
        )
    parts = NamedSharding(sharding.mesh, plan.destination.spec)
    gather = jax.jit(lambda array: array, out_shardings=sharding)
    return lambda held: gather(
        jax.make_array_from_single_device_arrays(plan.shape, parts, [held[place] for place in places])
    )
