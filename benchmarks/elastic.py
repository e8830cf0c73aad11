"""Train on while hosts of a Ray cluster are lost, leave, return, and come as another kind; see that no step is lost.

    python -m benchmarks.elastic --events 200 --json elastic.json
    python -m benchmarks.elastic --events 20 --method zero

A Ray cluster of nodes on this machine, with room for one process of two devices each, trains a small model by
`autopar.fit(elastic=(1, 3))`. Between steps one thing after another happens to it, each once the run has done a step
after the one before and spare processes stand by:

    lost         a node ends without a word
    lost twice   the same, and one of the processes that are to go on dies when they load the new plan
    leaves       a node says that it will go, and goes when training has left it
    joins        a node comes
    other kind   a node comes whose processor is of a kind that the others are not

The run is right if every step was done once, in order, and losses and last state are those of an undisturbed run on one
device, up to the rounding of sums that another plan takes in another order, and if no checkpoint was read but where a
shard of the state was on no host that is left. The table says how many seconds passed from each event to the end of the
next step with the new hosts, for how many of them no step ended at all, how often a shard was lost, and how often a
checkpoint was read: training goes on while the processes of a host that joins start. Only what Ray itself says is known
to the run: the benchmark tells it of no loss. The JSON file is written after every event; SIGTERM ends the run after
the event under way.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_worker_niceness", "0")  # as hosts of their own would: Ray's processes wait for nothing else

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import GenericFiguresWarning
from autopar.hardware.cluster import DeviceKind
from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.session import RaySession
from autopar.session import ray_session

LEAST, MOST, DEVICES_PER_HOST, ROWS, WIDTH, LAYERS = 1, 3, 2, 24, 32, 4
OTHER_KIND = "another processor"
_MARK = "accelerator_type:OTHER"  # how a node says its kind to Ray
METHODS = {"auto": autopar.Auto, "data": autopar.DataParallel, "zero": autopar.Zero}
TOLERANCE = 1e-4
"""Tolerance of float32 sums in another order, over hundreds of steps of gradient descent."""
PATIENCE_S = 300.0


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """One step of a small perceptron."""

    def loss_fn(weights: Any) -> jax.Array:
        x = batch["x"]
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), {"loss": loss}


def first_state() -> list[jax.Array]:
    """The same at every start."""
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) * 0.3, jnp.float32) for _ in range(LAYERS)]


def batch_of(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """A batch of its own for every step, so that one that is left out or done twice shows."""
    draw = np.random.default_rng(1000 + number)
    return {name: draw.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


@dataclass(kw_only=True)
class Event:
    """An event of the cluster: what happened after which step, and what came of it."""

    what: str
    step: int
    hosts_before: int
    hosts_after: int = 0
    to_next_step_s: float | None = None
    pause_s: float = 0.0
    shard_lost: bool = False
    from_storage: bool = False
    at_s: float = 0.0
    """Seconds from the beginning of the run to the event."""
    load: float = 0.0
    """Load of the machine, as the system says it for the last minute."""


class Nodes:
    """The nodes of a Ray cluster on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.there = [self.cluster.add_node(num_cpus=1) for _ in range(2)]

    def add(self, *, other_kind: bool = False) -> None:
        """A node joins."""
        marks = {_MARK: 1} if other_kind else {}
        self.there.append(self.cluster.add_node(num_cpus=1, resources=marks))

    def remove(self, node: Any) -> None:
        """A node ends."""
        self.there.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


class Disturbances:
    """Called after each step: sees what came of the last event, and brings about the next."""

    def __init__(
        self, nodes: Nodes, count: int, seed: int, until_s: float, on_event: Callable[[Sequence[Event]], None]
    ) -> None:
        self.nodes = nodes
        self.count = count
        self.until_s = until_s
        self.on_event = on_event
        self.events: list[Event] = []
        self.steps: list[int] = []
        self._draw = random.Random(seed)
        self._began_s = self._step_s = 0.0
        self._start_s = time.monotonic()
        self._leaving: Any = None
        self._rest = 1
        self._restart = importlib.import_module("autopar.training.elastic").restart

    def __call__(self, step: int, metrics: Any) -> None:
        """After a step."""
        self.steps.append(step)
        if not self._look(step, time.monotonic() - max(self._step_s, self._began_s)):
            time.sleep(0.3)  # what starts beside the training gets the processor
        self._step_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if all events have been absorbed, or the last one for which there was time."""
        ended = len(self.events) == self.count or time.monotonic() > self.until_s
        return ended and (not self.events or self.events[-1].to_next_step_s is not None)

    def _look(self, step: int, pause_s: float) -> bool:
        """See what came of the last event, or bring about the next; False if there is nothing to do yet."""
        hosts = ray_session().num_processes
        if self.events and self.events[-1].to_next_step_s is None:
            self.events[-1].pause_s = max(self.events[-1].pause_s, pause_s)
            if not self._absorbed():
                if time.monotonic() - self._began_s > PATIENCE_S:
                    raise RuntimeError(f"the run took no notice of {self.events[-1]} for {PATIENCE_S:g} s")
                return False
            event = self.events[-1]
            event.hosts_after, event.to_next_step_s = hosts, time.monotonic() - self._began_s
            event.at_s, event.load = self._began_s - self._start_s, os.getloadavg()[0]
            print(f"event {len(self.events)}: {event}", flush=True)
            self.on_event(self.events)
            if self._leaving is not None:
                self.nodes.remove(self._leaving)
                self._leaving = None
            self._rest = self._draw.randint(1, 3)
        elif self._rest or not self._spares_stand_by():
            self._rest = max(self._rest - 1, 0)
            return False
        elif not self.is_over:
            self._next(step, hosts)
        return True

    def _absorbed(self) -> bool:
        """Return whether training goes on with the processes that the last event left."""
        there = {node.node_id for node in self.nodes.there if node is not self._leaving}
        return set(ray_session().hosts.node_names) == there

    def _spares_stand_by(self) -> bool:
        hosts = ray_session().hosts
        return len(hosts.spares.warm(hosts.node_names)) == len(hosts.node_names)

    def _next(self, step: int, hosts: int) -> None:
        fewer, more = ["lost", "lost", "leaves"], ["joins", "other kind"]
        fewer += ["lost twice"] if hosts > LEAST + 1 else []
        what = self._draw.choice((fewer if hosts > LEAST else []) + (more if hosts < MOST else []))
        self.events.append(Event(what=what, step=step, hosts_before=hosts))
        node = self._draw.choice(self.nodes.there)
        if what == "lost twice":
            self._kill_after_restart()
        if what.startswith("lost"):
            self._began_s = time.monotonic()
            self.nodes.remove(node)
            return
        if what == "leaves":
            self._leaving = node
            autopar.host_leaves(node.node_id, in_s=120)
        else:
            self.nodes.add(other_kind=what == "other kind")
        self._began_s = time.monotonic()

    def _kill_after_restart(self) -> None:
        """Let the first of the next processes die before it loads anything."""
        module = importlib.import_module("autopar.training.elastic")

        def restart(count: int | None = None) -> RaySession:
            started = self._restart(count)
            module.restart = self._restart
            os.kill(started.reports[0].pid, signal.SIGKILL)
            return started

        module.restart = restart


def is_whole(state: Any, nodes: Sequence[str]) -> bool:
    """Return whether every shard of a state lies on one of these nodes, or it is not on the cluster at all."""
    if not all(isinstance(leaf, DistributedArray) for leaf in jax.tree.leaves(state)):
        return True
    session = ray_session()
    there = [name in nodes for name in session.hosts.node_names]
    for piece in (piece for leaf in jax.tree.leaves(state) for piece in leaf.placed.pieces):
        boxes = piece.device_boxes()
        if set(boxes.values()) - {box for ordinal, box in boxes.items() if there[session.process_of[ordinal]]}:
            return False
    return True


def watch_storage(disturbances: Disturbances) -> None:
    """Note at the event under way that a shard is lost, and that a checkpoint is read."""
    fit = importlib.import_module("autopar.training.fit")
    moving = fit._moving

    def looked_at(state: Any) -> Any:
        there = [node.node_id for node in disturbances.nodes.there]
        disturbances.events[-1].shard_lost |= not is_whole(state, there)
        return moving(state)

    fit._moving = looked_at
    checkpoints = importlib.import_module("autopar.training.checkpoints").Checkpoints
    restore = checkpoints.restore

    def noted(*arguments: Any, **options: Any) -> Any:
        disturbances.events[-1].from_storage = True
        return restore(*arguments, **options)

    checkpoints.restore = noted


def tell_kinds_apart() -> None:
    """Let the processes of marked nodes report another kind of device: those here are all of one."""
    join = RaySession._join

    def joined(session: RaySession) -> Any:
        marked = {node["NodeID"] for node in session.hosts.ray.nodes() if _MARK in node["Resources"]}
        return [
            replace(report, device_kind=DeviceKind(OTHER_KIND)) if name in marked else report
            for report, name in zip(join(session), session.hosts.node_names, strict=True)
        ]

    RaySession._join = joined  # type: ignore[method-assign]


def undisturbed(count: int) -> tuple[Any, list[float]]:
    """The last state and the losses of so many steps, by `jax.jit` alone."""
    state, losses, step = first_state(), [], jax.jit(train_step)
    for number in range(count):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def batches_until(disturbances: Disturbances) -> Any:
    """Batches, until all events have happened."""
    number = 0
    while not disturbances.is_over:
        yield batch_of(number)
        number += 1


def run(args: argparse.Namespace, on_event: Callable[[Sequence[Event]], None]) -> tuple[list[Event], int, float, bool]:
    """The events, the number of steps, the largest difference of losses and state, and whether steps were in order."""
    nodes = Nodes()
    try:
        autopar.init(cluster="ray", address=nodes.cluster.address, num_hosts=2, devices_per_host=DEVICES_PER_HOST)
        disturbances = Disturbances(nodes, args.events, args.seed, time.monotonic() + 60 * args.minutes, on_event)
        watch_storage(disturbances)
        signal.signal(signal.SIGTERM, lambda *_: setattr(disturbances, "until_s", 0.0))
        with tempfile.TemporaryDirectory(prefix="autopar-elastic-") as folder:
            state, history = autopar.fit(
                autopar.parallelize(train_step, method=METHODS[args.method]()),
                first_state(),
                batches_until(disturbances),
                checkpoint_dir=folder,
                checkpoint_every=args.checkpoint_every,
                elastic=(LEAST, MOST),
                max_failures=10 * args.events,
                on_step=disturbances,
            )
        state = [np.asarray(leaf) for leaf in state]
    finally:
        autopar.shutdown()
        nodes.cluster.shutdown()
    expected, losses = undisturbed(len(history))
    got = [float(metrics["loss"]) for metrics in history]
    pairs = [*zip(state, expected, strict=True), (np.array(got), np.array(losses))]
    difference = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)
    return disturbances.events, len(history), difference, disturbances.steps == list(range(len(history)))


def show(console: Console, events: Sequence[Event]) -> None:
    """Print a row for each sort of event."""
    columns = ("event", "times", "to the next step s", "without a step s", "a shard lost", "from a checkpoint")
    table = Table(*columns, caption="seconds: median, and the worst in brackets")
    for what in (*dict.fromkeys(event.what for event in events), None):
        rows = [event for event in events if what in (None, event.what)]
        times = [(event.to_next_step_s, event.pause_s) for event in rows if event.to_next_step_s is not None]
        cells = [f"{statistics.median(each):.1f} ({max(each):.1f})" for each in zip(*times)] or ["", ""]
        counts = [sum(event.shard_lost for event in rows), sum(event.from_storage for event in rows)]
        table.add_row(what or "all", str(len(rows)), *cells, *map(str, counts))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the events; 1 if a step was lost, or done twice, or the state is another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=200, metavar="N")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="no event after so long")
    parser.add_argument("--method", choices=METHODS, default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", GenericFiguresWarning)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    tell_kinds_apart()
    said = {"jax": jax.__version__, "python": platform.python_version(), "seed": args.seed, "method": args.method}

    def write(events: Sequence[Event], **found: Any) -> None:
        if args.json:
            whole = {**said, **found, "events": [asdict(event) for event in events]}
            args.json.write_text(json.dumps(whole, indent=1) + "\n")

    events, steps, difference, in_order = run(args, write)
    write(events, steps=steps, difference=difference, in_order=in_order)
    console = Console(width=None if Console().is_terminal else 120)
    show(console, events)
    needless = sum(event.from_storage and not event.shard_lost for event in events)
    right = difference <= TOLERANCE and in_order and not needless
    console.print(
        f"{len(events)} events in {steps} steps: {'right' if right else 'WRONG'}; every step once and in order: "
        f"{in_order}; losses and state differ by {difference:.1e} of the largest number at most; "
        f"checkpoints read though no shard was lost: {needless}"
    )
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
