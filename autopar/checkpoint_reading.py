"""Read a checkpoint to where it is wanted: into this process, or each process of a cluster its own ranges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api import Step
from autopar.argument_places import argument_arrangement, compiled_like
from autopar.checkpoint_writing import moved, plain_tree
from autopar.errors import CheckpointFailed, InvalidArgument
from autopar.ladder import Compiled
from autopar.runtime.distributed.distributed_array import DistributedArray
from autopar.runtime.distributed.placed import Placed
from autopar.session import current_session


class Target(Protocol):
    """What is to be read, and where it is to lie."""

    abstract: Any
    """The state as `jax.ShapeDtypeStruct`s."""

    def read(self, path: Path) -> Any:
        """The state of a checkpoint that has been found to hold this one."""
        ...


class _Here:
    """In this process; `abstract` has the shardings."""

    def __init__(self, abstract: Any) -> None:
        self.abstract = abstract

    def read(self, path: Path) -> Any:
        """By Orbax alone."""
        import orbax.checkpoint as ocp

        try:
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(path, self.abstract)
        except Exception as error:
            raise CheckpointFailed(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}.") from error


class _OnCluster:
    """On a cluster, in these places."""

    def __init__(self, session: Any, abstract: Any, places: Sequence[Placed]) -> None:
        self.abstract = abstract
        self.session = session
        self.places = places

    def read(self, path: Path) -> Any:
        """In every process its own ranges."""
        from autopar.runtime.distributed.host_checkpoint import Kept, restore_values
        from autopar.runtime.distributed.whole_arrays import in_one_piece

        session = self.session
        places = [in_one_piece(place) for place in self.places]
        numbers = session.next_numbers(len(places))
        handles = [DistributedArray(session, n, p, session.number_of_layout(p)) for n, p in zip(numbers, places)]
        items = [Kept(number=number, placed=placed) for number, placed in zip(numbers, places)]
        plain = jax.tree.map(
            lambda leaf: leaf.number, plain_tree(jax.tree.unflatten(self._tree(), map(_Number, range(len(items)))))
        )
        session.run_everywhere(restore_values, str(path), plain, items)
        return jax.tree.unflatten(self._tree(), moved(session, handles, self.places))

    def _tree(self) -> Any:
        return jax.tree.structure(self.abstract)


class _Number:
    """The number of a leaf, as a leaf."""

    def __init__(self, number: int) -> None:
        self.number = number


def target_of(like: Any) -> Target:
    """Where `like`, a step or a state, has its state."""
    if isinstance(like, Step | Compiled):
        compiled = compiled_like(like, 0, None)
        arrangement, tree = argument_arrangement(compiled, 0)
        source = compiled.source.target
        kinds = [leaf.aval for leaf in compiled.trace.inputs if leaf.argument == 0]
        if source.session is not None:
            placed = [arrangement.placed(place) for place in arrangement.places]
            return _OnCluster(source.session, jax.tree.unflatten(tree, kinds), placed)
        devices = source.live_devices()
        shaped = [
            jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=arrangement.sharding(place, devices))
            for kind, place in zip(kinds, arrangement.places, strict=True)
        ]
        return _Here(jax.tree.unflatten(tree, shaped))
    leaves, tree = jax.tree.flatten(like)
    if leaves and all(isinstance(leaf, DistributedArray) for leaf in leaves):
        session, places = current_session(), [leaf.placed for leaf in leaves]
        have = 0 if session is None else len(session.process_of)
        last = max(ordinal for place in places for ordinal in place.devices)
        if last >= have:
            raise InvalidArgument(
                f"The state given as like lies on device {last} of a cluster, counted from 0; there are {have} now. "
                "Give a step that was compiled for these, or jax.ShapeDtypeStructs."
            )
        return _OnCluster(session, jax.tree.map(lambda a: a.aval, like), places)
    return _Here(jax.tree.unflatten(tree, [_shape(leaf) for leaf in leaves]))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    # Without a layout Orbax gives arrays of NumPy, and words for random keys.
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)


def check_stored(path: Path, target: Target) -> None:
    """Raise unless the checkpoint holds such a state: `CheckpointFailed` if that cannot be read from it."""
    stored = _stored(path)
    paths = jax.tree_util.tree_leaves_with_path(plain_tree(target.abstract))
    wanted = {jax.tree_util.keystr(key): _words_of(leaf) for key, leaf in paths}
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or extra:
        difference = f"{missing[0]} is not in it" if missing else f"it also has {extra[0]}"
        raise InvalidArgument(
            f"The checkpoint {path} holds another state: {difference}; it has {len(stored)} arrays, {len(wanted)} are "
            "required. Give the step or the state that it was saved from, or another directory."
        )
    for key, (shape, dtype) in wanted.items():
        if stored[key] != (shape, dtype):
            there, there_dtype = stored[key]
            raise InvalidArgument(
                f"The checkpoint {path} holds {there_dtype}{list(there)} at {key}, where {dtype}{list(shape)} is "
                "required. Give the step or the state that it was saved from, or another directory."
            )


def _words_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return tuple(leaf.shape), str(np.dtype(leaf.dtype))


def _stored(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shapes and dtypes of a checkpoint, by key. Raises `CheckpointFailed` for what is none."""
    import orbax.checkpoint as ocp

    if not path.is_dir():
        raise InvalidArgument(f"There is no checkpoint {path}. Choose another step, or leave it out for the newest.")
    if not is_complete(path):
        raise CheckpointFailed(f"{path} is no checkpoint that Orbax has completed. Choose another step, or delete it.")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(path).item_metadata
        if found is None:
            raise FileNotFoundError("files of its arrays are missing")
    except Exception as error:
        raise CheckpointFailed(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}.") from error
    leaves = jax.tree_util.tree_leaves_with_path(found.tree)
    return {jax.tree_util.keystr(key): (tuple(leaf.shape), str(np.dtype(leaf.dtype))) for key, leaf in leaves}


def is_complete(path: Path) -> bool:
    """Whether Orbax has completed the checkpoint in a directory."""
    return (path / "_CHECKPOINT_METADATA").is_file() and (path / "_METADATA").is_file()
