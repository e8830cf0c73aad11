"""`autopar.Checkpoints`: training states in a directory, in Orbax's format, whatever plan and runtime they come from.

    checkpoints = autopar.Checkpoints("runs/7")
    checkpoints.save(100, state)                            goes on while training does
    step, state = checkpoints.restore(like=train_step)      the last good one, where the step wants it
    ocp.StandardCheckpointer().restore("runs/7/100", abstract_state)      without autopar

A checkpoint is a directory named by its step. It is written under another name and then renamed, so that it is there
as a whole or not at all. On a cluster every process writes its own shards; the directory must be one that all share.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import jax

from autopar.checkpoint_reading import Target, check_stored, is_complete, target_of
from autopar.checkpoint_writing import ClusterSave, LocalSave, Save
from autopar.errors import AutoparError, CheckpointFailed, ClusterFailed, InvalidArgument
from autopar.runtime.distributed.distributed_array import DistributedArray
from autopar.session import current_session

_WRITING = ".orbax-checkpoint-tmp"  # what Orbax adds to the name of a directory that it still writes
_REMOVED = ".removed"


class Checkpoints:
    """The checkpoints of a directory; `keep` of the newest are kept, all if it is None."""

    def __init__(self, directory: str | Path, *, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise InvalidArgument(f"keep is {keep}; at least 1 checkpoint must be kept, or None to keep all.")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._saving: Save | None = None

    def steps(self) -> list[int]:
        """The steps of all checkpoints that are complete, oldest first."""
        if not self.directory.is_dir():
            return []
        names = [path.name for path in self.directory.iterdir() if path.name.isdigit() and is_complete(path)]
        return sorted(map(int, names))

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any) -> None:
        """Start to write a state, and return when it may be donated; the save before must end first.

        Raises `CheckpointFailed` if this or the save before cannot be written, and then the last good checkpoint is
        still there; `InvalidArgument` if there is a checkpoint of this step, or the state went with its cluster.
        """
        self.wait()
        target = self.directory / str(step)
        if step < 0 or is_complete(target):
            raise InvalidArgument(
                f"The checkpoint {target} is there already, or has no possible name. Save another step, or delete it."
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for rest in self.directory.glob(f"{step}{_WRITING}*"):  # of a run that was ended while it wrote
                shutil.rmtree(rest)
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

    def restore(self, like: Any, *, step: int | None = None) -> tuple[int, Any]:
        """The step and the state of a checkpoint, by default of the newest that can be read.

        - `like`: a compiled step, or a parallelized one that has been compiled: the state lies where it wants it. Or a
          state, of arrays or `jax.ShapeDtypeStruct`s: the arrays lie where its arrays do.

        Raises `InvalidArgument` if there is no checkpoint, or it holds another state (naming the key and the shapes);
        `CheckpointFailed` if none can be read.
        """
        self.wait()
        candidates = self.steps()[::-1] if step is None else [step]
        if not candidates:
            raise InvalidArgument(f"There is no complete checkpoint in {self.directory}. Save one first.")
        target = target_of(like)
        for number, candidate in enumerate(candidates):
            try:
                return candidate, self._restore(candidate, target)
            except CheckpointFailed as error:
                if number == len(candidates) - 1:
                    raise
                warnings.warn(f"{error} Its predecessor is used.", stacklevel=2)
        raise AssertionError

    def _restore(self, step: int, target: Target) -> Any:
        path = self.directory / str(step)
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
            removed = (self.directory / str(step)).rename(self.directory / f"{step}{_REMOVED}")
            shutil.rmtree(removed, ignore_errors=True)
