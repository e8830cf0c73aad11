"""Bring the arguments of a step to where the program wants them, in one process of many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.ir.instructions import item_bytes
from autopar.ir.program import MeshProgram, Program
from autopar.runtime.distributed.input_routing import FromDevices, FromDriver, InPlace, InputRouting, RoutedPart
from autopar.runtime.distributed.world import World
from autopar.runtime.executables import KEY_IMPLEMENTATIONS, mesh_of
from autopar.runtime.interfaces import Device
from autopar.runtime.interpreter import Environment
from autopar.runtime.transfer.tiles import DeviceLayout, plan_transfer

Values = list[Any]  # the pieces of one value: an array, or None for a piece that has no device here
# (slots, the arguments that lie here, what the driver sent)
Bring = Callable[[Environment, Sequence[Values | None], Sequence[np.ndarray[Any, Any]]], None]


def sharding_on(layout: DeviceLayout, devices: Sequence[Device]) -> NamedSharding:
    """The layout on live devices; pieces that lie alike have equal shardings."""
    mesh = MeshProgram(
        devices=tuple(layout.devices),
        shape=tuple(layout.mesh_shape),
        axis_names=tuple(layout.axis_names),
        values={},
        instructions=(),
    )
    return NamedSharding(mesh_of(mesh, devices), layout.spec)


class HostInputs:
    """Fills the slots of the inputs that have devices here."""

    def __init__(
        self,
        program: Program,
        world: World,
        shardings: Mapping[tuple[int, str], NamedSharding],
        slots: Mapping[tuple[int, str], int],
        *,
        first_message: int,
    ) -> None:
        self.world = world
        self.first_message = first_message
        self.keys = [(item.mesh, item.value) for item in program.inputs]
        self.slots = [slots.get(key) for key in self.keys]
        self.shardings = [shardings.get(key) for key in self.keys]
        self.constants = [
            (slot, self._everywhere(np.int32(item.constant), sharding))
            for item, slot, sharding in zip(program.inputs, self.slots, self.shardings, strict=True)
            if item.constant is not None and slot is not None and sharding is not None
        ]

    def bringing(self, routing: InputRouting) -> Bring:
        """A function that puts every input into its slot. All processes make it together, for it opens transfers."""
        firsts = itertools.accumulate((len(item.parts) for item in routing.from_devices), initial=self.first_message)
        moves = [self._mover(item, first) for item, first in zip(routing.from_devices, firsts)]
        self.world.exchange.open()
        boxes = {box: n for n, box in enumerate(routing.sent_to(self.world.ordinals))}

        def bring(env: Environment, arguments: Sequence[Values | None], sent: Sequence[np.ndarray[Any, Any]]) -> None:
            for slot, constant in self.constants:
                env[slot] = constant
            for item in routing.in_place:
                self._take(env, item, arguments)
            for item in routing.from_driver:
                self._give(env, item, sent, boxes)
            for move in moves:
                move(env, arguments)

        return bring

    def _take(self, env: Environment, item: InPlace, arguments: Sequence[Values | None]) -> None:
        slot = self.slots[item.place]
        if slot is None:
            return
        pieces = arguments[item.leaf]
        assert pieces is not None
        array, sharding = pieces[item.piece], self.shardings[item.place]
        # The same shards under the program's own names of axes.
        if array.sharding != sharding and sharding is not None:
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            own = [shards[device] for device in sharding.addressable_devices_indices_map(array.shape)]
            array = jax.make_array_from_single_device_arrays(array.shape, sharding, own)
        env[slot] = array

    def _give(
        self, env: Environment, item: FromDriver, sent: Sequence[np.ndarray[Any, Any]], boxes: Mapping[Any, int]
    ) -> None:
        slot, sharding = self.slots[item.place], self.shardings[item.place]
        if slot is None or sharding is None:
            return
        ordinals = [o for o in item.layout.devices if self.world.process_of[o] == self.world.process]
        parts = [sent[boxes[item.leaf, item.boxes[o]]] for o in ordinals]
        env[slot] = assembled(item.shape, item.dtype, sharding, parts, [self.world.devices[o] for o in ordinals])

    def _everywhere(self, value: np.generic, sharding: NamedSharding) -> jax.Array:
        devices = [d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index()]  # type: ignore[union-attr]
        return assembled((), "int32", sharding, [np.asarray(value)] * len(devices), devices)

    def _mover(self, item: FromDevices, message: int) -> Callable[[Environment, Sequence[Values | None]], None]:
        """Cut, send, receive and put together; on a process that has no part in it, nothing."""
        steps = [self._part_mover(item, part, message + n) for n, part in enumerate(item.parts)]
        slot, sharding = self.slots[item.place], self.shardings[item.place]
        join = _join(item.axis, sharding) if len(steps) > 1 and sharding is not None else None

        def move(env: Environment, arguments: Sequence[Values | None]) -> None:
            pieces = arguments[item.leaf]
            received = [step(None if pieces is None else pieces) for step in steps]
            if slot is not None:
                env[slot] = received[0] if join is None else join(*received)

        return move

    def _part_mover(self, item: FromDevices, part: RoutedPart, message: int) -> Callable[[Values | None], Any]:
        exchange, process_of = self.world.exchange, self.world.process_of
        plan = plan_transfer(part.shape, item_bytes(item.dtype), part.source, part.target, process_of, dtype=item.dtype)
        sends, receives = self.world.is_here(part.source.devices), self.world.is_here(part.target.devices)
        cut: Callable[[Any], Any] | None = None
        if sends and part.cut is not None:
            cut = _cut(part, sharding_on(part.source, self.world.devices))
        send = exchange.sender([plan], message) if sends else None
        receive = None
        if receives:
            receive = exchange.receiver([plan], message, [sharding_on(part.target, self.world.devices)])

        def step(pieces: Values | None) -> Any:
            if send is not None:
                assert pieces is not None
                array = pieces[part.piece]
                send([array if cut is None else cut(array)])
            return receive()[0] if receive is not None else None

        return step


def _cut(part: RoutedPart, sharding: NamedSharding) -> Callable[[Any], Any]:
    assert part.cut is not None
    window = part.cut
    index = (*(slice(None),) * window.axis, slice(window.start, window.stop))
    return jax.jit(lambda array: array[index], out_shardings=sharding)


def _join(axis: int, sharding: NamedSharding) -> Callable[..., Any]:
    return jax.jit(lambda *parts: jnp.concatenate(parts, axis), out_shardings=sharding)


def assembled(
    shape: tuple[int, ...], dtype: str, sharding: NamedSharding, parts: Sequence[Any], devices: Sequence[Device]
) -> jax.Array:
    """A value from the parts on the devices of this process; of random keys, from their words."""
    if dtype in KEY_IMPLEMENTATIONS:
        implementation = KEY_IMPLEMENTATIONS[dtype]
        shards = [
            jax.random.wrap_key_data(jax.device_put(part, device), impl=implementation)
            for part, device in zip(parts, devices, strict=True)
        ]
    else:
        shards = jax.device_put(list(parts), list(devices))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
