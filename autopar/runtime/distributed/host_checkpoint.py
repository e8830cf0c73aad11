"""Write and read checkpoints in the processes of a cluster: each its own shards, by Orbax, into one directory.

    save      shards -> host memory, then Orbax's threads write, meet at a barrier, and process 0 renames the directory
    restore   each process reads the ranges of its own devices, and waits for no other

Orbax knows arrays that have shards on every process. A value of a pipeline lies on some of them: it is shown to Orbax
as `Shown`, where a process without a shard has a second copy of one, and second copies are never written.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import CheckpointFailed
from autopar.runtime.digests import commit
from autopar.runtime.distributed.host import Host
from autopar.runtime.distributed.host_inputs import Values, assembled, sharding_on
from autopar.runtime.distributed.pieces import Placed
from autopar.runtime.distributed.whole_arrays import whole_sharding
from autopar.runtime.executables import KEY_IMPLEMENTATIONS, jax_dtype


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A value that the processes keep, or are to keep: its number, and where it lies as one array."""

    number: int
    placed: Placed


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A value that the driver holds; of random keys, their words."""

    words: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard as Orbax reads it."""

    index: tuple[slice, ...]
    data: Any
    replica_id: int


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An array as Orbax reads it."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    addressable_shards: Sequence[Shard]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.size * self.itemsize


@dataclass(frozen=True, kw_only=True)
class SaveStatus:
    """The state of a save in a process, and what went wrong; `lost`: with the other processes."""

    done: bool
    error: str | None = None
    lost: bool = False


@dataclass(kw_only=True)
class _Saving:
    """A save under way on threads of this process."""

    thread: threading.Thread
    errors: list[tuple[str, bool]] = field(default_factory=list)


# What is raised when another process dies: transfers break off, and barriers wait in vain.
_LOST = (jax.errors.JaxRuntimeError, TimeoutError)

# Of this process, by the driver's numbers: threads cannot be part of a message.
_under_way: dict[int, _Saving] = {}


def start_save(host: Host, number: int, path: str, target: str, tree: Any, items: Sequence[Kept | Sent]) -> None:
    """Copy this process's shards, and start to write them; `tree` has numbers of `items` as its leaves.

    Process 0 gives the checkpoint at `path` its name `target` when all have written.
    """
    import orbax.checkpoint as ocp
    import orbax.checkpoint.experimental.v1 as v1

    shown = [_shown(host, item) for item in items]
    together = ocp.options.MultiprocessingOptions(primary_host=0, barrier_sync_key_prefix=f"autopar{number}")
    # Second copies must not be asked to write a part; layouts name devices that a reader need not have.
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=False,
        enable_write_sharding_file=False,
        array_metadata_store=v1.options.ArrayOptions.Saving().array_metadata_store,  # says which words are keys
    )
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, ocp.type_handlers.NumpyHandler()))
    registry.add(Shown, arrays, func=lambda kind: issubclass(kind, Shown | jax.Array))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=together)
    checkpointer = ocp.AsyncCheckpointer(handler, multiprocessing_options=together)
    try:
        checkpointer.save(path, args=ocp.args.PyTreeSave(jax.tree.map(lambda item: shown[item], tree)))
    except _LOST:
        raise  # not the directory's fault
    except Exception as error:
        raise CheckpointFailed(f"{type(error).__name__}: {error}") from error
    errors: list[tuple[str, bool]] = []

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
            if host.world.process == 0:
                commit(Path(path), Path(target))
        except BaseException as error:
            errors.append((f"{type(error).__name__}: {error}", isinstance(error, _LOST)))

    thread = threading.Thread(target=finish, name="autopar-checkpoint", daemon=True)
    _under_way[number] = _Saving(thread=thread, errors=errors)
    thread.start()


def save_status(host: Host, number: int) -> SaveStatus:
    """The progress of a save in this process; asked for until it is done."""
    saving = _under_way[number]
    if saving.thread.is_alive():
        return SaveStatus(done=False)
    del _under_way[number]
    error, lost = saving.errors[0] if saving.errors else (None, False)
    return SaveStatus(done=True, error=error, lost=lost)


def _shown(host: Host, item: Kept | Sent) -> Any:
    if isinstance(item, Sent):
        return _everywhere(item) if item.dtype in KEY_IMPLEMENTATIONS else item.words
    world, placed = host.world, item.placed
    sharding = whole_sharding(placed, world.devices)
    here = {
        shard.device: shard.data
        for piece in host.pieces(item.number)
        if piece is not None
        for shard in piece.addressable_shards
    }
    copies: Counter[str] = Counter()
    shards: list[Shard] = []
    for device, index in sharding.devices_indices_map(placed.shape).items():
        if device in here:
            shards.append(Shard(index=index, data=here[device], replica_id=copies[str(index)]))
        copies[str(index)] += 1
    dtype = jax_dtype(placed.dtype)
    if not shards:
        nothing = np.broadcast_to(np.zeros((), dtype), sharding.shard_shape(placed.shape))
        index = tuple(slice(0, size) for size in nothing.shape)
        shards = [Shard(index=index, data=nothing, replica_id=-1)]
    return Shown(shape=placed.shape, dtype=dtype, sharding=sharding, addressable_shards=shards)


def _everywhere(item: Sent) -> jax.Array:
    """Random keys, which Orbax writes only if they are JAX's own arrays: a copy on each device."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("copy",), axis_types=(AxisType.Auto,))
    local = [device for device in devices if device.process_index == jax.process_index()]
    return assembled(item.shape, item.dtype, NamedSharding(mesh, PartitionSpec()), [item.words] * len(local), local)


def restore_values(host: Host, path: str, tree: Any, items: Mapping[int, Kept]) -> None:
    """Read the ranges of this process's devices, and keep them. Raises `CheckpointFailed` for what cannot be read.

    `tree` is that of the checkpoint, with numbers of `items` as its leaves; what has none of these is not read.
    """
    import orbax.checkpoint as ocp

    world = host.world
    wanted: dict[int, Any] = {}
    for number, item in items.items():
        sharding = whole_sharding(item.placed, world.devices)
        if sharding.addressable_devices:
            wanted[number] = jax.ShapeDtypeStruct(item.placed.shape, jax_dtype(item.placed.dtype), sharding=sharding)
    arguments = {number: ocp.checkpoint_utils.construct_restore_args(item) for number, item in wanted.items()}
    found: dict[int, Any] = {}
    if wanted:
        alone = ocp.options.MultiprocessingOptions(
            primary_host=world.process,
            active_processes={world.process},
            barrier_sync_key_prefix=f"autopar-alone{world.process}",
        )
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        checkpointer = ocp.Checkpointer(handler, multiprocessing_options=alone)
        request = ocp.args.PyTreeRestore(
            item=jax.tree.map(lambda number: wanted.get(number, ocp.PLACEHOLDER), tree),
            restore_args=jax.tree.map(lambda number: arguments.get(number, ocp.PLACEHOLDER), tree),
        )
        try:
            restored = checkpointer.restore(path, args=request)
        except Exception as error:
            raise CheckpointFailed(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
        for number, array in zip(jax.tree.leaves(tree), jax.tree.leaves(restored, is_leaf=_is_placeholder)):
            found[number] = array
    for number, item in items.items():
        host.put(item.number, _pieces(host, item.placed, found.get(number)))


def _is_placeholder(leaf: Any) -> bool:
    return leaf is ...


def _pieces(host: Host, placed: Placed, array: Any) -> Values:
    if array is None or _is_placeholder(array):
        return [None] * len(placed.pieces)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    pieces: Values = []
    for piece in placed.pieces:
        sharding = sharding_on(piece.layout, host.world.devices)
        own = [shards[device] for device in sharding.addressable_devices_indices_map(piece.shape)]
        whole = jax.make_array_from_single_device_arrays(piece.shape, sharding, own) if own else None
        pieces.append(whole)
    return pieces
