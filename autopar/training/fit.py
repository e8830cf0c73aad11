"""`autopar.fit`: the loop around a step, which survives the loss of processes and of the driver.

batch i: state i -> state i + 1         checkpoint n: state n, so that the next batch is n

failure   ->  new processes, the last good checkpoint, and the batches since then again
elastic   ->  as many processes as there are hosts, and the state from the memory of those that still hold all of it
driver    ->  started again with the same directory, it goes on at the batch after the last checkpoint
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.aot import Compiled
from autopar.api import Step
from autopar.checks import check_choice, check_count, is_number
from autopar.errors import AutoparError, ClusterFailed, InvalidArgument
from autopar.ir.plan import Plan
from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.handover import HandedValue, gather, place
from autopar.runtime.unfinished import StepWatch
from autopar.session import current_session, ray_session, restart, step_timeout_s, survivors_stay
from autopar.training.array_placement import argument_placement
from autopar.training.checkpoints import Checkpoints
from autopar.training.elastic import ElasticHosts, HostsChange, elastic_hosts
from autopar.training.loss_guard import LossGuard

ON_FAILURE = ("raise", "restart")
ON_BAD_LOSS = ("ignore", "warn", "raise", "restore")
_END = object()
_UNREAD = 2  # so many steps are under way before the metrics of the first of them are waited for

_log = logging.getLogger("autopar")

Batches = Iterable[Any] | Callable[[int], Any]
OnStep = Callable[[int, Any], None]


def fit(
    step: Step,
    state: Any,
    batches: Batches,
    *,
    checkpoint_dir: str | Path | None = None,
    num_steps: int | None = None,
    checkpoint_every: int = 100,
    on_failure: str = "raise",
    elastic: tuple[int, int] | None = None,
    max_failures: int = 3,
    on_step: OnStep | None = None,
    on_bad_loss: str = "ignore",
    spike_deviations: float = 10.0,
    straggler_every: int | None = None,
    keep: int | None = 3,
    verify: bool = True,
) -> tuple[Any, list[Any]]:
    """Train; returns the last state, and the metrics of every step of this call as NumPy arrays.

    - `step`: a parallelized `(state, batch) -> (state, metrics)`.
    - `batches`: an iterable from the first batch on, or a function of the step's number, from 0; then `num_steps` is
      required. A run that goes on skips the batches before its checkpoint.
    - `checkpoint_dir`: where states are saved, every `checkpoint_every` steps and at the end, of which the newest
      `keep` are kept. If there is a checkpoint at the start, training goes on from it, and not from `state`; from its
      predecessor, if it is damaged.
    - `on_failure`: when a process of the cluster is lost or a step fails there, "raise" the error; or "restart" as many
      processes with the same plan. Then the last checkpoint is restored, and the batches since then, which are kept
      until the next one is complete, are trained again.
    - `elastic`: the least and the largest number of hosts of a Ray cluster to train on. Losses are survived on those
      that are left, with a plan for them, and hosts that join, or that `autopar.host_leaves` says will leave, are
      taken or left between two steps. The state is moved from the memory of the processes that hold it; where a part
      is lost with its only holder, or the step had taken its state (`donate_argnums`), from the last checkpoint. Each
      step is waited for before the next is sent.
    - `max_failures`: how many failures a call survives.
    - `on_step`: called with each step's number and metrics, in order and once for each, up to two steps late. Steps
      that are trained again after a failure replace theirs in the returned list.
    - `on_bad_loss`: when a loss is infinite or not a number, or more than `spike_deviations` above the median of the
      last ones (see `training.loss_guard`; `math.inf` looks for the former alone), "ignore" it; "warn"; "raise"
      `NonFiniteLoss` or `LossSpike`; or "restore" the last checkpoint and leave out the batches since then, that one
      included (Chowdhery et al.: PaLM, 2022, section 5.1), up to `max_failures` times. If the first loss from that
      checkpoint is bad, too, the one before it is taken; if there is none, the error is raised. Losses are the metrics
      whose name has "loss" in it, or, if none has, all that are single floating-point numbers.
    - `straggler_every`: wait in every so many steps for each instruction, and warn with `StragglerWarning` of stages
      that take longer than their share.
    - `verify`: compare a checkpoint with its digests before it is read; for very large states it may be left out.

    Raises `InvalidArgument` for options that contradict each other, for batches that end before `num_steps`, and for
    `elastic` without a plan for the least number of hosts; `HostLost` if fewer are left; and `CheckpointFailed` if no
    checkpoint can be written, or those that are there are all damaged.
    """
    check_choice("on_failure", on_failure, ON_FAILURE)
    _check_guards(on_bad_loss, spike_deviations, straggler_every, checkpoint_dir)
    _check(step, batches, checkpoint_dir, num_steps, checkpoint_every, on_failure, max_failures)
    hosts = elastic_hosts(elastic, current_session(), step.target.names_devices, checkpoint_dir)
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, keep=keep, verify=verify)
    recovers = on_failure != "raise" or hosts is not None
    first = None if checkpoints is None else checkpoints.latest_sound()
    run = _Run(
        step=step,
        state=state,
        done=first or 0,
        start=first or 0,
        batches=NumberedBatches(batches, first or 0, replays=recovers or on_bad_loss == "restore"),
        num_steps=num_steps,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        recovers=recovers,
        hosts=hosts,
        on_step=on_step,
        on_bad_loss=on_bad_loss,
        losses=LossGuard(spike_deviations),
        straggler_every=straggler_every,
        restores_left=max_failures,
    )
    with _progress() as progress, StepWatch(step_timeout_s(), _log.error) as run.watch:
        shown = progress.add_task("training", total=num_steps, completed=run.done)
        run.on_progress = lambda done: progress.update(shown, completed=done)
        with survivors_stay() if hosts is not None else nullcontext():
            return _trained(run, first is not None, max_failures)


def _trained(run: _Run, resumed: bool, max_failures: int) -> tuple[Any, list[Any]]:
    """The result of a run, through failures and changes of its hosts."""
    failures, reason = 0, None
    while True:
        try:
            if reason is not None:
                resumed = run.renew(reason)
            run.train(resumed=resumed)
            return run.state, run.history
        except HostsChange as change:
            reason = change
        except BaseException as error:
            lost = error if isinstance(error, ClusterFailed) else run.lost_elsewhere(error)
            if lost is None and run.checkpoints is not None:  # complete what is under way: it was good
                with suppress(AutoparError):
                    run.checkpoints.wait()
            reason, failures = lost, failures + 1
            if lost is None or not run.recovers or failures > max_failures or current_session() is None:
                raise
            _log.warning("%s Going on (%d of %d).", lost, failures, max_failures)


def _check(
    step: Any,
    batches: Any,
    checkpoint_dir: Any,
    num_steps: int | None,
    checkpoint_every: int,
    on_failure: str,
    max_failures: int,
) -> None:
    if not isinstance(step, Step):
        raise InvalidArgument(
            f"fit was given a {type(step).__name__} as its step; it takes what autopar.parallelize returns."
        )
    if on_failure != "raise" and checkpoint_dir is None:
        raise InvalidArgument(f"on_failure={on_failure!r} needs a checkpoint_dir, where states are saved.")
    if callable(batches) and num_steps is None:
        raise InvalidArgument("batches is a function, which never ends. Give num_steps.")
    if not callable(batches) and not isinstance(batches, Iterable):
        raise InvalidArgument(
            f"batches is a {type(batches).__name__}; it must be an iterable, or a function of the step's number."
        )
    session = current_session()
    if on_failure != "raise" and session is not None and not session.has_driver:
        raise InvalidArgument(
            f"on_failure={on_failure!r} needs a driver that outlives the processes, as with "
            "autopar.init(cluster='ray'). Let the launcher start the processes again: fit goes on from the last "
            "checkpoint."
        )
    limits = (("num_steps", num_steps, 0), ("checkpoint_every", checkpoint_every, 1), ("max_failures", max_failures, 0))
    for name, number, least in limits:
        if number is not None and number < least:
            raise InvalidArgument(f"{name} is {number}; at least {least} is required.")


class _BadLoss(Exception):
    """A loss after which training goes back."""

    def __init__(self, step: int, error: AutoparError) -> None:
        super().__init__(step, error)
        self.step = step
        self.error = error


def _check_guards(on_bad_loss: str, spike_deviations: Any, straggler_every: Any, checkpoint_dir: Any) -> None:
    check_choice("on_bad_loss", on_bad_loss, ON_BAD_LOSS)
    if not is_number(spike_deviations) or not spike_deviations > 0:
        raise InvalidArgument(f"spike_deviations is {spike_deviations!r}; it must be a number above 0, or math.inf.")
    if straggler_every is not None:
        check_count("straggler_every", straggler_every)
    if on_bad_loss == "restore" and checkpoint_dir is None:
        raise InvalidArgument("on_bad_loss='restore' needs a checkpoint_dir, where states are saved.")


@dataclass(kw_only=True)
class _Run:
    """One call of `fit`: `state` is that after `done` steps."""

    step: Step
    state: Any
    done: int
    start: int
    batches: NumberedBatches
    num_steps: int | None
    checkpoints: Checkpoints | None
    checkpoint_every: int
    recovers: bool
    hosts: ElasticHosts | None
    on_step: OnStep | None
    on_bad_loss: str
    losses: LossGuard
    straggler_every: int | None
    restores_left: int
    history: list[Any] = field(default_factory=list)
    on_progress: Callable[[int], None] = lambda done: None
    watch: StepWatch | None = None
    _session: Any = None
    """The session in which the state of this run lies."""
    _plan: Plan | None = None
    _moving: list[Any] | None = None
    """The leaves of the state between two worlds."""
    _unread: deque[tuple[int, Any, Compiled]] = field(default_factory=deque)
    _told: int = 0
    """Steps below this number have been told to `on_step`."""
    _saved: int | None = None
    _restored: tuple[int, int] | None = None
    """The checkpoint of the last bad loss, and the step after that loss."""

    def train(self, *, resumed: bool) -> None:
        """Train from the state, or, `resumed`, from what was moved or the last checkpoint, to the last step."""
        self._session = current_session()
        batch = self._next_batch_or_none()
        if self._moving is not None and batch is not None:
            self._arrive(self._moving, batch)
        elif resumed:
            expected = self.done
            self._restore(batch)
            if self.done != expected:  # the newest checkpoint could not be read
                batch = self._next_batch_or_none()
        elif (self.recovers or self.on_bad_loss == "restore") and batch is not None:
            assert self.checkpoints is not None
            self._compile(self.state, batch)
            self._save()
            self.checkpoints.wait()
        if self.recovers and current_session() is not None:
            ray_session().hosts.prepare_spares()
        while True:
            try:
                while batch is not None:
                    self._train_one(batch)
                    if self.checkpoints is not None and self.done % self.checkpoint_every == 0:
                        self._save()
                    batch = self._next_batch_or_none()
                    if self.hosts is not None and batch is not None:
                        self.hosts.look(ray_session())
                self._finish()
                return
            except _BadLoss as bad:
                self._leave_out(bad)
            batch = self._next_batch_or_none()

    def _next_batch_or_none(self) -> Any:
        """The batch of the next step; None after the last."""
        if self.num_steps is not None and self.done >= self.num_steps:
            return None
        try:
            return self.batches.get(self.done)
        except StopIteration:
            return None

    def _compile(self, state: Any, batch: Any) -> Compiled:
        if self.hosts is not None:
            self.hosts.begin(ray_session(), lambda: self.step.trace(state, batch))
        compiled = self.step.compiled_for(self.step.arguments.split((state, batch), {}), self._plan)
        self._plan = compiled.plan
        if self.hosts is not None:
            self.hosts.keep(ray_session().cluster, compiled.plan)
        return compiled

    def _arrive(self, moving: list[Any], batch: Any) -> None:
        """Put the state that was moved where the new plan wants it."""
        compiled = self._compile(self.state, batch)
        self._moving = None  # if a host takes its part with it now, there is the checkpoint
        arrangement, _ = argument_placement(compiled, 0)
        there = [n for n, leaf in enumerate(moving) if isinstance(leaf, HandedValue)]
        places = [arrangement.placed(arrangement.places[n]) for n in there]
        placed = place(ray_session(), [moving[n] for n in there], places)
        for n, leaf in zip(there, placed, strict=True):
            moving[n] = leaf
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), moving)
        del self.history[self.done - self.start :]
        _log.warning(
            "Step %d goes on with %d hosts, with the state that they held.", self.done, len(ray_session().reports)
        )

    def _restore(self, batch: Any) -> None:
        assert self.checkpoints is not None
        self._moving = None
        shapes = jax.tree.map(_abstract, self.state)
        known = self.step.all_compiled()
        like = self._compile(shapes, batch) if batch is not None else known[-1] if known else shapes
        self.done, self.state = self.checkpoints.restore(like=like)
        self._saved = self.done
        self.start = min(self.start, self.done)
        del self.history[self.done - self.start :]
        self.on_progress(self.done)

    def lost_elsewhere(self, error: BaseException) -> ClusterFailed | None:
        """Return why the state of this run is gone, if another thread's run has already made new processes."""
        session: Any = self._session
        if not isinstance(error, AutoparError) or session is None or current_session() is session:
            return None
        failure = session.failure if session.has_driver else None
        return failure if isinstance(failure, ClusterFailed) else None

    def renew(self, reason: ClusterFailed | HostsChange) -> bool:
        """New processes, in place of those of the session; whether there is a state to go on from.

        That is the state which the processes held, if hosts are elastic and all of it is there; else the last
        checkpoint. Without one training begins again, from the given state if the driver holds it; else the failure is
        raised.
        """
        assert self.checkpoints is not None
        failed = isinstance(reason, ClusterFailed)
        if failed:
            self.checkpoints.abandon()
        else:
            self.checkpoints.wait()
        self._unread.clear()
        if self.hosts is not None and self._moving is None:
            self._moving = _moving(self.state)
        saved = None
        if self._moving is None:
            saved = self.checkpoints.latest_sound()
            if saved is None and any(isinstance(leaf, DistributedArray) for leaf in jax.tree.leaves(self.state)):
                raise reason
            if self.hosts is not None:
                _log.warning("A part of the state of step %d is gone; it goes on from a checkpoint.", self.done)
            self.done = saved or 0
        if self._moving is not None or saved is not None:
            self.state = jax.tree.map(_abstract, self.state)
        if self.hosts is None:
            restart(instead_of=self._session)
        else:
            self._plan = self.hosts.restart()
        return self._moving is not None or saved is not None

    def _train_one(self, batch: Any) -> None:
        call = self.step.arguments.split((self.state, batch), {})
        compiled = self.step.compiled_for(call)
        assert self.watch is not None
        with self.watch.watching(self.done, compiled.loaded.unfinished):
            if self.straggler_every is not None and (self.done - self.start) % self.straggler_every == 1:
                result, times = compiled.timed(call)
                compiled.warn_of_stragglers(times)
            else:
                result = compiled.run(call)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidArgument(
                f"{self.step.arguments.name} returned a {type(result).__name__}; fit trains steps that return "
                "(state, metrics). Let it return these two."
            )
        state, metrics = result
        self._unread.append((self.done, metrics, compiled))
        if self.hosts is not None:  # what the step began with is kept until nothing of it can be lost
            ray_session().wait([leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, DistributedArray)])
            self._read(0)
        self.state, self.done = state, self.done + 1
        self._read(_UNREAD)

    def _read(self, left: int) -> None:
        """Wait for metrics, until only `left` steps are unread."""
        while len(self._unread) > left:
            number, metrics, compiled = self._unread[0]
            compiled.loaded.wait(jax.tree.leaves(metrics))
            metrics = jax.tree.map(_on_driver, metrics)
            self._unread.popleft()
            bad = None if self.on_bad_loss == "ignore" else self.losses.judge(number, metrics)
            if bad is not None and self.on_bad_loss == "warn":
                warnings.warn(str(bad), stacklevel=2)
            elif bad is not None and (self.on_bad_loss == "raise" or not self.restores_left):
                raise bad
            self.history.append(metrics)
            if number >= self._told:
                self._told = number + 1
                if self.on_step is not None:
                    self.on_step(number, metrics)
            self.on_progress(number + 1)
            if bad is not None and self.on_bad_loss == "restore":
                raise _BadLoss(number, bad)

    def _leave_out(self, bad: _BadLoss) -> None:
        """Go on after the step with the bad loss, with the state before all batches since the last checkpoint.

        A state whose first loss is bad is no better: then the checkpoint before it is taken. Raises the error of the
        loss if there is none before it.
        """
        assert self.checkpoints is not None
        self.restores_left -= 1
        self._unread.clear()
        self.checkpoints.wait()
        step = None
        if self._restored is not None and bad.step == self._restored[1]:
            earlier = [step for step in self.checkpoints.steps() if step < self._restored[0]]
            if not earlier:
                raise bad.error
            step = earlier[-1]
        restored, self.state = self.checkpoints.restore(like=self.step.all_compiled()[-1], step=step)
        _log.warning("%s Going on after it, with the state before step %d.", bad.error, restored)
        self._saved, self.done = restored, bad.step + 1
        self._restored = restored, self.done

    def _save(self) -> None:
        assert self.checkpoints is not None
        self._read(0)  # so that what is saved has been seen to be finite
        if self._saved != self.done:
            before = self._saved
            self.checkpoints.save(self.done, self.state)
            self._saved = self.done
            if before is not None:  # that save is complete now
                self.batches.forget_before(before)

    def _finish(self) -> None:
        self._read(0)
        if self.checkpoints is not None:
            self._save()
            self.checkpoints.wait()
        if self.num_steps is not None and self.done < self.num_steps:
            raise InvalidArgument(
                f"The batches ended after {self.done} steps, num_steps is {self.num_steps}. Give more batches, or "
                "fewer steps."
            )


def _moving(state: Any) -> list[Any] | None:
    """The leaves of a state in the memory of the hosts that hold it; None if a part is lost, or none is there."""
    leaves = jax.tree.leaves(state)
    there = [n for n, leaf in enumerate(leaves) if isinstance(leaf, DistributedArray)]
    handed = gather(ray_session(), [leaves[n] for n in there]) if there else None
    if handed is None:
        return None
    for n, value in zip(there, handed, strict=True):
        leaves[n] = value
    return leaves


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    kind = leaf.aval if isinstance(leaf, DistributedArray) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=bool(getattr(kind, "weak_type", False)))


def _on_driver(leaf: Any) -> Any:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.asarray(leaf)
    return np.asarray(leaf)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class NumberedBatches:
    """Batches by the number of their step, so that a step can be trained again; from number `first` on.

    Of an iterable, batch i is its element i, and `replays` keeps those that were given until `forget_before`; of a
    function, batch i is f(i).
    """

    def __init__(self, source: Batches, first: int, *, replays: bool) -> None:
        self._source = source
        self._replays = replays
        self._kept: deque[Any] = deque()
        self._begin(first)

    def _begin(self, first: int) -> None:
        self._first = first
        self._kept.clear()
        self._iterator: Iterator[Any] = iter(()) if callable(self._source) else iter(self._source)
        for number in range(0 if callable(self._source) else first):
            if next(self._iterator, _END) is _END:
                raise InvalidArgument(
                    f"The checkpoint is of step {first}, but there are only {number} batches. Give the batches from "
                    "the first one on, as in the run that saved it."
                )

    def get(self, number: int) -> Any:
        """The batch of a step. Raises `StopIteration` if there is none."""
        if callable(self._source):
            return self._source(number)
        if number < self._first:
            if iter(self._source) is self._source:
                raise InvalidArgument(
                    f"Step {number} is to be trained again, but the batches before step {self._first} were given out "
                    "by an iterator, and are gone. Give a function of the step's number, or a list."
                )
            self._begin(number)
        while number >= self._first + len(self._kept):
            self._kept.append(self._checked(next(self._iterator)))
        batch = self._kept[number - self._first]
        if not self._replays:
            self.forget_before(number + 1)
        return batch

    def _checked(self, batch: Any) -> Any:
        if self._replays and any(isinstance(leaf, DistributedArray) for leaf in jax.tree.leaves(batch)):
            raise InvalidArgument(
                "A batch lies on the cluster, and would be lost with it. Give batches of the driver, or "
                "on_failure='raise'."
            )
        return batch

    def forget_before(self, number: int) -> None:
        """These will not be asked for again."""
        while self._kept and self._first < number:
            self._kept.popleft()
            self._first += 1
