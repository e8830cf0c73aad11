"""Write a state as a checkpoint: on the threads of this process, or each process of a cluster its own shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import CheckpointFailed, InvalidArgument, StepFailed
from autopar.runtime.distributed.distributed_array import DistributedArray
from autopar.runtime.distributed.placed import Placed

_POLL_S = 0.02


class Save(Protocol):
    """A save under way."""

    target: Path

    def finish(self) -> None:
        """Wait until it is complete, and raise what kept it from that."""
        ...


class LocalSave:
    """In this process, on Orbax's threads."""

    def __init__(self, target: Path, state: Any) -> None:
        import orbax.checkpoint as ocp

        self.target = target
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._checkpointer.save(target, args=ocp.args.PyTreeSave(jax.tree.map(_as_array, plain_tree(state))))

    def finish(self) -> None:
        """Wait for the threads."""
        self._checkpointer.wait_until_finished()


class ClusterSave:
    """In all processes of a cluster."""

    def __init__(self, session: Any, target: Path, state: Any) -> None:
        from autopar.runtime.distributed.host_checkpoint import start_save

        self.target = target
        self._session = session
        leaves, tree = jax.tree.flatten(plain_tree(state))
        if any(isinstance(leaf, DistributedArray) and leaf.owner is not session for leaf in leaves):
            raise InvalidArgument("the state lies on a cluster that was shut down or restarted, and is gone with it")
        self._gathered = _as_one_array(session, leaves)
        items = [_item(leaf) for leaf in self._gathered]
        [self._number] = session.next_numbers(1)
        numbered = jax.tree.unflatten(tree, range(len(leaves)))
        session.run_everywhere(start_save, self._number, str(target), numbered, items)

    def finish(self) -> None:
        """Ask the processes until all are done, or one has failed."""
        from autopar.runtime.distributed.host_checkpoint import save_status

        answers = self._session.answers
        waiting = list(range(len(self._session.hosts.actors)))
        while waiting:
            found = self._session.run_on(waiting, save_status, self._number)
            for process, status in zip(waiting, found, strict=True):
                if status.error is not None:
                    answers.blame_the_dead("saving a checkpoint")
                    text = f"{answers.describe(process)}: {status.error}"
                    raise answers.fail(StepFailed(f"Saving failed: {text}")) if status.lost else CheckpointFailed(text)
            waiting = [process for process, status in zip(waiting, found, strict=True) if not status.done]
            if waiting:
                time.sleep(_POLL_S)


def plain_tree(state: Any) -> Any:
    """The state in dictionaries and lists, as Orbax names it."""
    from orbax.checkpoint import tree

    return tree.serialize_tree(state, keep_empty_nodes=True)


def _as_one_array(session: Any, leaves: Sequence[Any]) -> list[Any]:
    """The leaves, with those moved to one layout whose pieces are no array as they lie."""
    from autopar.runtime.distributed.whole_arrays import in_one_piece

    places = [in_one_piece(leaf.placed) if isinstance(leaf, DistributedArray) else None for leaf in leaves]
    return moved(session, leaves, places)


def moved(session: Any, leaves: Sequence[Any], places: Sequence[Placed | None]) -> list[Any]:
    """The leaves, with those on the cluster moved that lie elsewhere than in these places."""
    from autopar.runtime.distributed.ray_runtime import RayLoaded
    from autopar.runtime.distributed.whole_arrays import Moving

    found = list(leaves)
    away = {i: place for i, place in enumerate(places) if place is not None and leaves[i].placed != place}
    if away:
        moving = Moving(to=tuple(away.values()))
        move = RayLoaded(session, moving(), [], moving)
        for i, leaf in zip(away, move.once([leaves[i] for i in away]), strict=True):
            found[i] = leaf
    return found


def _as_array(leaf: Any) -> Any:
    """Python's and NumPy's numbers as JAX takes them."""
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype=jax.dtypes.result_type(leaf))


def _item(leaf: Any) -> Any:
    from autopar.runtime.distributed.host_checkpoint import Kept, Sent

    if isinstance(leaf, DistributedArray):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return Kept(number=leaf.identity, placed=leaf.placed)
        return Sent(words=leaf.words(), shape=leaf.shape, dtype=leaf.placed.dtype)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return Sent(words=np.asarray(jax.random.key_data(leaf)), shape=leaf.shape, dtype=str(leaf.dtype))
    words = np.asarray(_as_array(leaf))
    return Sent(words=words, shape=words.shape, dtype=str(words.dtype))
