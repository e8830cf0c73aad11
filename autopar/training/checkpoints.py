"""`autopar.Checkpoints`: training states in a directory, in Orbax's format, whatever plan and runtime they come from.

    checkpoints = autopar.Checkpoints("runs/7")
    checkpoints.save(100, state)                            goes on while training does
    step, state = checkpoints.restore(like=train_step)      the last good one, where the step wants it
    ocp.StandardCheckpointer().restore("runs/7/100", abstract_state)      without autopar

A checkpoint is a directory named by its step. It is written under another name, every file is digested, and then it is
renamed, so that it is there as a whole or not at all (`runtime.digests`). One whose files have changed since is set
aside for its predecessor. In one process Orbax writes on its threads; on a cluster every process writes its own shards,
and reads its own ranges, so that the directory must be one that all share.

    100                         a checkpoint
    100.writing-host-4711.0     one that process 4711 writes, or wrote when it was ended
    100.damaged                 one that was set aside
    100.removed                 one too many, of which a part may be gone
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.aot import Compiled
from autopar.api import Step
from autopar.checks import check_names
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.errors import AutoparError, CheckpointFailed, ClusterFailed, InvalidArgument
from autopar.runtime.digests import commit, damage, discard
from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.pieces import Placed
from autopar.session import current_session
from autopar.training.array_placement import argument_placement, compiled_like

_WRITING = ".writing-"
_REMOVED = ".removed"
_POLL_S = 0.02
_saves = itertools.count()
_orbax_saves = threading.Lock()
"""Held from the beginning of a save to its end: Orbax numbers the saves of a process, and its threads ask for the
number of the last one. Of two at a time one would wait for the directories of the other."""
_NOT_READ = -1
_LEFT_BEHIND_S = 24 * 3600  # what a process of another host has not touched for so long, it has left behind


class Checkpoints:
    """The checkpoints of a directory; `keep` of the newest are kept, all if it is None.

    `verify`: before one is read, all its files are compared with their digests, which reads them a second time.
    Without, damage in the middle of an array goes unnoticed.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3, verify: bool = True) -> None:
        if keep is not None and keep < 1:
            raise InvalidArgument(f"keep is {keep}; at least 1 checkpoint must be kept, or None to keep all.")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.verify = verify
        self._saving: Save | None = None
        self._verified: set[int] = set()

    def steps(self) -> list[int]:
        """The steps of all checkpoints that are complete, oldest first."""
        if not self.directory.is_dir():
            return []
        names = [path.name for path in self.directory.iterdir() if path.name.isdigit() and is_complete(path)]
        return sorted(map(int, names))

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def latest_sound(self) -> int | None:
        """The step of the newest checkpoint that is as it was written; None if there is none at all.

        Damaged ones after it are set aside, with a warning. Raises `CheckpointFailed` if all are damaged, and leaves
        them where they are.
        """
        found: dict[int, str] = {}
        for step in self.steps()[::-1]:
            reason = self._damage(step)
            if reason is None:
                self._set_aside(found, step)
                return step
            found[step] = reason
        if found:
            raise self._none_sound(found)
        return None

    def _damage(self, step: int) -> str | None:
        if not self.verify or step in self._verified:
            return None
        reason = damage(self.directory / str(step))
        if reason is None:
            self._verified.add(step)
        return reason

    def _set_aside(self, damaged: Mapping[int, str], used: int) -> None:
        """Rename damaged checkpoints, so that training may save these steps again, and warn."""
        for step, reason in damaged.items():
            names = (f"{step}.damaged{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
            aside = next(self.directory / name for name in names if not (self.directory / name).exists())
            with suppress(FileNotFoundError):  # another process was first
                (self.directory / str(step)).rename(aside)
            warnings.warn(
                f"The checkpoint {self.directory / str(step)} is damaged: {reason}. It was set aside as {aside.name}, "
                f"and that of step {used} is used.",
                stacklevel=4,
            )

    def _none_sound(self, damaged: Mapping[int, str]) -> CheckpointFailed:
        reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        return CheckpointFailed(
            f"No checkpoint in {self.directory} can be used: {reasons}. Restore one from a copy, or give another "
            "directory to begin anew."
        )

    def save(self, step: int, state: Any) -> None:
        """Start to write a state, and return when it may be donated; the save before must end first.

        Raises `CheckpointFailed` if this or the save before cannot be written, and then the last good checkpoint is
        still there; `InvalidArgument` if there is a checkpoint of this step, or the state went with its cluster.
        """
        self.wait()
        self._verified.discard(step)
        target = self.directory / str(step)
        if step < 0 or is_complete(target):
            raise InvalidArgument(
                f"The checkpoint {target} is there already, or has no possible name. Save another step, or delete it."
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_what_was_left()
        except OSError as error:
            raise self._failed(step, error) from error
        session = current_session()
        leaves = jax.tree.leaves(state)
        on_cluster = any(isinstance(leaf, DistributedArray) for leaf in leaves)
        try:
            self._saving = (
                ClusterSave(session, target, state) if on_cluster and session is not None else LocalSave(target, state)
            )
        except (ClusterFailed, InvalidArgument):
            raise
        except (OSError, ValueError, AutoparError) as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Wait until the save under way is complete. Raises `CheckpointFailed` if it cannot be written."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            saving.finish()
        except ClusterFailed:
            raise
        except Exception as error:
            raise self._failed(int(saving.target.name), error) from error
        self._remove_old()

    def restore(
        self, like: Any, *, step: int | None = None, only: Sequence[str] | str | None = None
    ) -> tuple[int, Any]:
        r"""The step and the state of a checkpoint, by default of the newest that can be read.

        - `like`: a compiled step, or a parallelized one that has been compiled: the state lies where it wants it. Or a
          state, of arrays or `jax.ShapeDtypeStruct`s: the arrays lie where its arrays do.
        - `only`: regular expressions that find, by name, the arrays to read (`"params"`, `r"params\.h_\d+"`); the
          others are those of the state `like`, and the checkpoint may have others in their place, or none.

        Raises `InvalidArgument` if there is no checkpoint, or it holds another state (naming the key and the shapes);
        `CheckpointFailed` if none can be read.
        """
        self.wait()
        target = restore_target(like)
        if only is not None:
            target = _Part(target, like, check_names("only", only))
        if step is not None:
            return step, self._restore(step, target)
        candidates = self.steps()[::-1]
        if not candidates:
            raise InvalidArgument(f"There is no complete checkpoint in {self.directory}. Save one first.")
        failed: dict[int, str] = {}
        for candidate in candidates:
            try:
                state = self._restore(candidate, target)
            except CheckpointFailed as error:
                failed[candidate] = str(error)
            else:
                self._set_aside(failed, candidate)
                return candidate, state
        raise self._none_sound(failed)

    def _restore(self, step: int, target: RestoreTarget) -> Any:
        path = self.directory / str(step)
        reason = self._damage(step)
        if reason is not None:
            raise CheckpointFailed(f"The checkpoint {path} cannot be read: {reason}.")
        check_stored(path, target)
        return target.read(path)

    def abandon(self) -> None:
        """Forget the save under way, whose processes are gone; what it wrote is no checkpoint, and is removed later."""
        self._saving = None

    def _failed(self, step: int, error: Exception) -> CheckpointFailed:
        last = self.latest()
        kept = "There is no earlier one." if last is None else f"The last good one is {self.directory / str(last)}."
        return CheckpointFailed(
            f"The checkpoint {self.directory / str(step)} cannot be written: {type(error).__name__}: {error}. {kept} "
            "Make room or correct the permissions there, and start again from it."
        )

    def _remove_old(self) -> None:
        if self.keep is None:
            return
        for step in self.steps()[: -self.keep]:
            # By another name first: one half of which is gone must not pass for a checkpoint.
            with suppress(FileNotFoundError):  # another process was first
                removed = (self.directory / str(step)).rename(self.directory / f"{step}{_REMOVED}")
                shutil.rmtree(removed, ignore_errors=True)

    def _remove_what_was_left(self) -> None:
        """Remove what runs that were ended were writing or removing."""
        for path in self.directory.glob(f"*{_REMOVED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(f"*{_WRITING}*"):
            if _is_left_behind(path):
                shutil.rmtree(path, ignore_errors=True)


def _written_as(target: Path) -> Path:
    """Return the name of a checkpoint until it is complete, which no other save has."""
    return target.with_name(f"{target.name}{_WRITING}{socket.gethostname()}-{os.getpid()}.{next(_saves)}")


def _is_left_behind(path: Path) -> bool:
    """Return True if the process that wrote this directory is gone, as far as one can tell."""
    host, _, rest = path.name.partition(_WRITING)[2].rpartition("-")
    number = rest.partition(".")[0]
    if host != socket.gethostname() or not number.isdigit():
        with suppress(FileNotFoundError):
            return time.time() - path.stat().st_mtime > _LEFT_BEHIND_S
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class Save(Protocol):
    """A save under way."""

    target: Path

    def finish(self) -> None:
        """Wait until it is complete, and raise what kept it from that."""
        ...


class LocalSave:
    """A save in this process, on Orbax's threads, and on one that waits for them and gives the checkpoint its name."""

    def __init__(self, target: Path, state: Any) -> None:
        import orbax.checkpoint as ocp

        self.target = target
        self._written = _written_as(target)
        self._error: BaseException | None = None
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        plain = jax.tree.map(_as_array, plain_tree(state))
        self._thread = threading.Thread(target=self._commit, name="autopar-checkpoint")
        _orbax_saves.acquire()
        try:
            self._checkpointer.save(self._written, args=ocp.args.PyTreeSave(plain))
            self._thread.start()
        except BaseException:
            _orbax_saves.release()
            raise

    def _commit(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
            commit(self._written, self.target)
        except BaseException as error:
            self._error = error
            discard(self._written)
        finally:
            _orbax_saves.release()

    def finish(self) -> None:
        """Wait for the threads."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class ClusterSave:
    """A save in all processes of a cluster."""

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
        paths = session.of_first((str(_written_as(target)), str(target)))
        session.run_everywhere(start_save, self._number, *paths, numbered, items)

    def finish(self) -> None:
        """Ask the processes until all are done, or one has failed."""
        from autopar.runtime.distributed.host_checkpoint import save_status

        waiting = list(range(self._session.num_processes))
        while waiting:
            found = self._session.run_on(waiting, save_status, self._number)
            for process, status in zip(waiting, found, strict=True):
                if status.error is not None:
                    raise self._session.save_failed(process, status.error, status.lost)
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
    from autopar.runtime.distributed.driver import ClusterProgram
    from autopar.runtime.distributed.whole_arrays import Moving

    found = list(leaves)
    away = {i: place for i, place in enumerate(places) if place is not None and leaves[i].placed != place}
    if away:
        moving = Moving(to=tuple(away.values()))
        move = ClusterProgram(session, moving(), [], moving)
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


class RestoreTarget(Protocol):
    """A state to be read, and the place where it is to lie."""

    abstract: Any
    """The state as `jax.ShapeDtypeStruct`s."""
    wanted: frozenset[str] | None
    """The names of the arrays to read; None: all, and there are no others."""

    def read_leaves(self, path: Path, stored: Any, numbers: Mapping[str, int]) -> dict[int, Any]:
        """Read some of the arrays of a checkpoint, which are in it by these names: by their numbers in the state."""
        ...

    def read(self, path: Path) -> Any:
        """The state of a checkpoint that has been found to hold this one."""
        ...


class _Part:
    """Some arrays of a state, which are read to where they lie; all others stay."""

    def __init__(self, whole: RestoreTarget, state: Any, patterns: Sequence[str]) -> None:
        self.abstract = whole.abstract
        self._whole = whole
        self._leaves, self._tree = jax.tree.flatten(state)
        if isinstance(state, Step | Compiled) or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._leaves):
            raise InvalidArgument(
                "only leaves the other arrays as they are in the state given as like, which has none. Give a state of "
                "arrays, such as autopar.create_state makes."
            )
        self._numbers = _numbers_by_name(self.abstract)
        self.wanted: frozenset[str] | None = frozenset(
            name for pattern in patterns for name in _names_found(pattern, list(self._numbers))
        )

    def read(self, path: Path) -> Any:
        """Return the state with the arrays of the checkpoint in their places."""
        numbers = {name: self._numbers[name] for name in self.wanted or ()}
        read = self._whole.read_leaves(path, stored_tree(path), numbers)
        return jax.tree.unflatten(self._tree, [read.get(n, leaf) for n, leaf in enumerate(self._leaves)])

    def read_leaves(self, path: Path, stored: Any, numbers: Mapping[str, int]) -> dict[int, Any]:
        """Read them as the whole state does."""
        return self._whole.read_leaves(path, stored, numbers)


def _names_found(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a pattern finds, also after `state.`. Raises `InvalidArgument` for none."""
    try:
        found = [name for name in names if re.search(pattern, name) or re.search(pattern, f"state.{name}")]
    except re.error as error:
        raise InvalidArgument(f"only has {pattern!r}, which is no regular expression: {error}.") from None
    if not found:
        raise InvalidArgument(
            f"only has {pattern!r}, which finds no array of the state. There are {', '.join(sorted(names)[:6])}, ..."
        )
    return found


def _numbers_by_name(abstract: Any) -> dict[str, int]:
    """Return the number of every leaf of an abstract state by the name that it has in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(plain_tree(_numbered(abstract)))
    return {leaf_name("", key): leaf.number for key, leaf in leaves}


def _numbered(abstract: Any) -> Any:
    """Return an abstract state whose leaves have their numbers."""
    leaves, tree = jax.tree.flatten(abstract)
    return jax.tree.unflatten(tree, [_Numbered(n, leaf) for n, leaf in enumerate(leaves)])


class _Here:
    """A reader in this process; `abstract` has the shardings."""

    wanted: frozenset[str] | None = None

    def __init__(self, abstract: Any) -> None:
        self.abstract = abstract

    def read_leaves(self, path: Path, stored: Any, numbers: Mapping[str, int]) -> dict[int, Any]:
        """By Orbax alone."""
        import orbax.checkpoint as ocp

        leaves = jax.tree.leaves(self.abstract)
        places = jax.tree_util.tree_leaves_with_path(stored)
        chosen = [numbers.get(leaf_name("", key)) for key, _ in places]
        wanted = [ocp.PLACEHOLDER if n is None else leaves[n] for n in chosen]
        arguments = [
            leaf if leaf is ocp.PLACEHOLDER else ocp.checkpoint_utils.construct_restore_args(leaf) for leaf in wanted
        ]
        structure = jax.tree.structure(stored)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(
                    path,
                    args=ocp.args.PyTreeRestore(
                        item=jax.tree.unflatten(structure, wanted),
                        restore_args=jax.tree.unflatten(structure, arguments),
                    ),
                )
        except Exception as error:
            raise CheckpointFailed(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}.") from error
        found = jax.tree.leaves(restored, is_leaf=lambda leaf: leaf is ocp.PLACEHOLDER)
        return {n: array for n, array in zip(chosen, found, strict=True) if n is not None}

    def read(self, path: Path) -> Any:
        """By Orbax alone. It is told no tree of the user's: nodes of these may take nothing but arrays."""
        found = self.read_leaves(path, stored_tree(path), _numbers_by_name(self.abstract))
        return jax.tree.unflatten(jax.tree.structure(self.abstract), [found[n] for n in range(len(found))])


class _OnCluster:
    """A reader on a cluster, in these places."""

    wanted: frozenset[str] | None = None

    def __init__(self, session: Any, abstract: Any, places: Sequence[Placed]) -> None:
        self.abstract = abstract
        self.session = session
        self.places = places

    def read(self, path: Path) -> Any:
        """Read in every process its own ranges."""
        tree = jax.tree.structure(self.abstract)
        numbered = plain_tree(_numbered(self.abstract))
        found = self._read(path, jax.tree.map(lambda leaf: leaf.number, numbered), range(tree.num_leaves))
        return jax.tree.unflatten(tree, [found[n] for n in range(tree.num_leaves)])

    def read_leaves(self, path: Path, stored: Any, numbers: Mapping[str, int]) -> dict[int, Any]:
        """Read in every process its own ranges of these."""
        places = jax.tree_util.tree_leaves_with_path(stored)
        numbered = [numbers.get(leaf_name("", key), _NOT_READ) for key, _ in places]
        return self._read(path, jax.tree.unflatten(jax.tree.structure(stored), numbered), list(numbers.values()))

    def _read(self, path: Path, tree: Any, wanted: Sequence[int]) -> dict[int, Any]:
        from autopar.runtime.distributed.host_checkpoint import Kept, restore_values
        from autopar.runtime.distributed.whole_arrays import in_one_piece

        session = self.session
        places = [in_one_piece(self.places[n]) for n in wanted]
        numbers = session.next_numbers(len(places))
        handles = [DistributedArray(session, n, p, session.number_of_layout(p)) for n, p in zip(numbers, places)]
        items = {n: Kept(number=number, placed=placed) for n, number, placed in zip(wanted, numbers, places)}
        session.run_everywhere(restore_values, str(path), tree, items)
        return dict(zip(wanted, moved(session, handles, [self.places[n] for n in wanted]), strict=True))


class _Numbered(jax.ShapeDtypeStruct):
    """A leaf of an abstract state with its number."""

    def __init__(self, number: int, leaf: jax.ShapeDtypeStruct) -> None:
        super().__init__(leaf.shape, leaf.dtype)
        self.number = number


def restore_target(like: Any) -> RestoreTarget:
    """Return the places of the state of `like`, a step or a state."""
    if isinstance(like, Step | Compiled):
        compiled = compiled_like(like, 0, None)
        arrangement, tree = argument_placement(compiled, 0)
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


def check_stored(path: Path, target: RestoreTarget) -> None:
    """Raise unless the checkpoint holds such a state: `CheckpointFailed` if that cannot be read from it."""
    stored = _stored(path)
    paths = jax.tree_util.tree_leaves_with_path(plain_tree(target.abstract))
    wanted = {leaf_name("", key): _words_of(leaf) for key, leaf in paths}
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if target.wanted is not None:
        wanted = {name: words for name, words in wanted.items() if name in target.wanted}
        missing, extra = sorted(target.wanted - stored.keys()), []
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
    leaves = jax.tree_util.tree_leaves_with_path(stored_tree(path))
    return {leaf_name("", key): (tuple(leaf.shape), str(np.dtype(leaf.dtype))) for key, leaf in leaves}


def stored_tree(path: Path) -> Any:
    """Return the tree of a checkpoint, with a description in place of each array.

    Raises `InvalidArgument` if there is none, `CheckpointFailed` for what is none.
    """
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
    return found.tree


def is_complete(path: Path) -> bool:
    """Return True if Orbax has completed the checkpoint in a directory."""
    return (path / "_CHECKPOINT_METADATA").is_file() and (path / "_METADATA").is_file()
