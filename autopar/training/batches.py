"""`autopar.shard_batch` and `autopar.prefetch`: batches where the step wants them, before it is called.

    for batch in autopar.prefetch(batches, like=step): state, metrics = step(state, batch)

On a cluster every process gets its own rows of every microbatch, so that the step's message carries none. A leaf may be
a function of an index, as in `jax.make_array_from_callback`: then each process loads its own rows itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from autopar.aot import Compiled
from autopar.api import Step
from autopar.errors import InvalidArgument
from autopar.runtime.executables import KEY_IMPLEMENTATIONS
from autopar.runtime.inputs import own_copy
from autopar.training.array_placement import (
    ArgumentPlacement,
    LeafPlacement,
    argument_placement,
    check_argument,
    compiled_like,
)

_END = object()


def shard_batch(batch: Any, *, like: Step | Compiled, argnum: int | None = None) -> Any:
    """The batch as arrays where the compiled step `like` wants it: a call with them sends nothing.

    - `batch`: arrays in the structure that the step takes. A leaf may be a function `load(index) -> array` instead:
      it is called in each process with the ranges of the whole that the devices there hold, and is sent by pickling.
    - `argnum`: which argument of the step it is; by default the first that carries the batch.

    In one process an array lies on one mesh at a time: a step of microbatches cuts it there, and what a second mesh
    reads of it is copied by the step. Raises `InvalidArgument`, which names the leaf, if the step does not take it.
    """
    number = _argnum(like, argnum)
    found = compiled_like(like, number, batch)
    arrangement, tree = argument_placement(found, number)
    check_argument(batch, arrangement, tree, "The batch has", found.trace.name)
    leaves = list(zip(arrangement.places, jax.tree.leaves(batch), strict=True))
    session = found.source.target.session
    if session is None:
        devices = found.source.target.live_devices()
        placed = [_here(place, leaf, arrangement, devices) for place, leaf in leaves]
    else:
        placed = _on_cluster(session, arrangement, leaves)
    return jax.tree.unflatten(tree, placed)


def prefetch(
    batches: Iterable[Any], *, like: Step | Compiled, size: int = 2, argnum: int | None = None
) -> Iterator[Any]:
    """The batches, placed by `shard_batch` on another thread, `size` of them ahead of the caller."""
    if size < 1:
        raise InvalidArgument(f"size is {size}; at least 1 batch must be on its way.")
    return _prefetched(iter(batches), like, size, argnum)


def _prefetched(batches: Iterator[Any], like: Step | Compiled, size: int, argnum: int | None) -> Iterator[Any]:
    def load() -> Any:
        batch = next(batches, _END)
        return batch if batch is _END else shard_batch(batch, like=like, argnum=argnum)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="autopar-prefetch") as pool:
        under_way: deque[Future[Any]] = deque(pool.submit(load) for _ in range(size))
        while (batch := under_way.popleft().result()) is not _END:
            under_way.append(pool.submit(load))
            yield batch


def _argnum(like: Step | Compiled, argnum: int | None) -> int:
    if argnum is not None:
        return argnum
    known: list[Compiled] = [like] if isinstance(like, Compiled) else getattr(like, "all_compiled", list)()
    carriers = [compiled.trace.inputs[i].argument for compiled in known[-1:] for i in compiled.trace.batch_inputs]
    return min((argument for argument in carriers if argument is not None), default=1)


def _here(place: LeafPlacement, leaf: Any, arrangement: ArgumentPlacement, devices: Any) -> jax.Array:
    sharding = arrangement.sharding(place, devices)
    if not callable(leaf):
        return jax.device_put(leaf if isinstance(leaf, jax.Array) else own_copy(leaf), sharding)
    from autopar.runtime.distributed.host_batches import loaded

    def load(index: Any) -> np.ndarray[Any, Any]:
        ranges = [part.indices(dim)[:2] for part, dim in zip(index, place.kind.shape)]
        whole = tuple(slice(*part) for part in ranges)
        return loaded(leaf, whole, tuple(stop - start for start, stop in ranges), place.kind.dtype, place.name)

    return jax.make_array_from_callback(place.kind.shape, sharding, load)


def _on_cluster(session: Any, arrangement: ArgumentPlacement, leaves: list[tuple[LeafPlacement, Any]]) -> list[Any]:
    from autopar.runtime.distributed.array import DistributedArray
    from autopar.runtime.distributed.host_batches import bring

    lie = [isinstance(leaf, DistributedArray) for _, leaf in leaves]  # on the cluster already
    names = [place.name for place, _ in leaves]
    places = [arrangement.placed(place, with_copies=True) for place, _ in leaves]
    wanted = [i for i, there in enumerate(lie) if not there]
    values = [leaf if callable(leaf) else _words(leaf, place) for i in wanted for place, leaf in [leaves[i]]]
    brought = bring(session, [names[i] for i in wanted], [places[i] for i in wanted], values)
    fresh = iter(brought)
    return [leaf if there else next(fresh) for there, (_, leaf) in zip(lie, leaves)]


def _words(leaf: Any, place: LeafPlacement) -> np.ndarray[Any, Any]:
    if place.kind.dtype in KEY_IMPLEMENTATIONS:
        return np.asarray(jax.random.key_data(leaf))
    return own_copy(leaf, jax.numpy.dtype(place.kind.dtype))
