"""Break a cluster in every way we know while it trains, and see that training goes on right or ends with one reason.

    python -m benchmarks.cluster_faults --json faults.json
    python -m benchmarks.cluster_faults --only "kill backward 1 of 2" "stop save 0 of 2" --break-after 0

A small model trains by `autopar.fit` in two or four stages, each in a process of its own, with a checkpoint every three
steps. A fault breaks one process in one phase, and is right if

    recovers    the losses of all steps equal those of the undisturbed run, bit for bit
    one error   fit raises that error; a new fit goes on from the newest checkpoint, or from the start where there can
                be none yet, and its losses are equal

and no process of ours and no file in shared memory is left. The tables say after how many seconds the driver knew,
after how many there were new processes, and after how many it trained again. Faults follow each other on one cluster,
but those of its start and its end, each once the spare processes of the last recovery have started. "load again" is the
load in the processes that take the place of others; `elastic` keeps the number of hosts here, and `benchmarks.elastic`
changes it. A run with `--json FILE` that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_ADDRESS", "local")  # a cluster of its own

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar import session
from autopar.errors import AutoparError, CheckpointFailed, ClusterFailed, HostLost, NonFiniteLoss, StepFailed
from autopar.ir.program import Recv, Run, Send

NUM_STEPS, EVERY, BREAK_AFTER, WIDTH = 12, 3, 4, 16
STEP_TIMEOUT_S = 8.0
LEAVING_S = 60.0
"""How long services of Ray may take to see that their cluster has ended; they look every few seconds."""


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """One step of a small perceptron."""

    def loss_fn(weights: Any) -> jax.Array:
        x = batch["x"]
        for number, weight in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), {"loss": loss}


def first_state() -> Any:
    """The same at every start."""
    draw = np.random.RandomState(0)
    return [jnp.asarray(draw.randn(WIDTH, WIDTH).astype(np.float32) * 0.3) for _ in range(4)]


def batch_of(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """A batch of its own for every step, so that a step that is left out or done twice shows."""
    draw = np.random.RandomState(100 + number)
    return {name: draw.randn(8, WIDTH).astype(np.float32) for name in "xy"}


# What runs in a process of the cluster, to break it. `host` is the process.


def arm(host: Any, process: int, phase: str, act: str, file: str) -> None:
    """Let one process break when it comes to a phase next; it notes the time in a file."""
    if host.world.process != process:
        return
    if phase == "load":
        keep = host.keep
        host.keep = lambda *arguments: (break_here(act, file), keep(*arguments))[1]
    elif phase in ("save", "restore"):
        from autopar.runtime.distributed import host_checkpoint

        name = {"save": "start_save", "restore": "restore_values"}[phase]
        function = getattr(host_checkpoint, name)

        @functools.wraps(function)
        def broken(*arguments: Any) -> Any:
            if phase == "save":  # when it has begun to write
                function(*arguments)
            break_here(act, file)
            return None if phase == "save" else function(*arguments)

        setattr(host_checkpoint, name, broken)
    else:
        _arm_instruction(host, phase, lambda: break_here(act, file))


def _arm_instruction(host: Any, phase: str, act: Callable[[], None]) -> None:
    program = list(host.programs.values())[-1]
    kinds = {"send": Send, "receive": Recv}
    tasks = {"forward": "F", "backward": "B", "update": "U"}
    for number, (_, instruction, _) in enumerate(program.instructions):
        kind = instruction.task.kind if isinstance(instruction, Run) else None
        if kind == tasks.get(phase, "") or isinstance(instruction, kinds.get(phase, ())):
            before = program.steps[number]
            program.steps[number] = lambda env, before=before: (act(), before(env))[1]
            return
    raise ValueError(f"process {host.world.process} has no {phase}")


def break_here(act: str, file: str) -> None:
    """Break this process, and note when."""
    Path(file).write_text(str(time.time()))
    match act:
        case "kill" | "terminate" | "stop":
            os.kill(os.getpid(), SIGNALS[act])
        case "hang":
            time.sleep(1e6)
        case _:
            raise RuntimeError("this process was told to fail")


def allow_files_of(host: Any, num_bytes: int) -> None:
    """Let no file of this process grow beyond so many bytes: what a full disk looks like to a program."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: the act in which of how many processes, how training goes on, and the error if it does not."""

    phase: str
    act: str
    process: int
    processes: int = 2
    on_failure: str = "restart"
    error: type[AutoparError] | None = None

    @property
    def name(self) -> str:
        """The words by which a fault is asked for."""
        how = "" if self.on_failure == "restart" else ", no recovery" if self.on_failure == "raise" else ", elastic"
        return f"{self.act} {self.phase} {self.process} of {self.processes}{how}"


def _tasks_of(process: int, processes: int) -> tuple[str, ...]:
    # The last stage's forward pass is part of its backward pass.
    forward = ("forward",) if process < processes - 1 else ()
    return (*forward, "backward", "update", "send", "receive")


def faults() -> list[Fault]:
    """All of them."""
    found: list[Fault] = []
    for process in range(2):
        tasks = _tasks_of(process, 2)
        on: Callable[..., Fault] = functools.partial(Fault, process=process)
        for act, phases in {
            "kill": ("plan", "load", *tasks, "save", "between steps", "restore", "load again", "start", "shutdown"),
            "raise": ("load", *tasks, "save", "restore", "load again"),
            "hang": tasks,
            "stop": ("plan", "backward", "save", "between steps", "restore", "shutdown"),
            "terminate": ("between steps",),
        }.items():
            found += [
                on(phase=phase, act=act, on_failure="elastic" if phase == "load again" else "restart")
                for phase in phases
            ]
        found += [
            on(phase="update", act="kill", on_failure="elastic"),
            on(phase="backward", act="kill", on_failure="raise", error=HostLost),
            on(phase="backward", act="raise", on_failure="raise", error=StepFailed),
        ]
    found += [
        Fault(phase="save", act="fill the disk", process=0, error=CheckpointFailed),
        Fault(phase="forward", act="a loss that is not a number", process=0, error=NonFiniteLoss),
    ]
    for process in range(4):
        phases = ("plan", "load", *_tasks_of(process, 4), "save", "between steps", "restore", "load again")
        found += [
            Fault(
                phase=phase,
                act="kill",
                process=process,
                processes=4,
                on_failure="elastic" if phase == "load again" else "restart",
            )
            for phase in phases
        ]
        found.append(Fault(phase="backward", act="hang", process=process, processes=4))
    found += [
        Fault(phase="start", act="kill", process=3, processes=4),
        Fault(phase="shutdown", act="kill", process=3, processes=4),
    ]
    return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a fault; seconds since the process broke."""

    name: str
    phase: str
    processes: int
    right: bool
    said: str
    known_after_s: float | None
    restarted_after_s: float | None
    trained_again_after_s: float | None
    left_behind: str


class Trainings:
    """Trainings on one cluster of some processes, and what an undisturbed one gives."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.before = _traces()
        self.expected: list[float] | None = None

    def ready(self) -> Any:
        """Return a session whose processes are all there."""
        current = session.current_session()
        if current is None:
            autopar.init(cluster="ray", num_hosts=self.processes, devices_per_host=1, step_timeout_s=STEP_TIMEOUT_S)
        elif current.failure is not None:
            session.restart()
        return session.current_session()

    def undisturbed(self) -> list[float]:
        """Return the losses without a fault."""
        if self.expected is None:
            self.ready()
            self.expected = self.train(None, batch_of)
        return self.expected

    def train(self, folder: Path | None, batches: Any, **options: Any) -> list[float]:
        """Return the losses of a training."""
        method = autopar.PipelineParallel(num_stages=self.processes, num_microbatches=4)
        step = autopar.parallelize(train_step, method=method)
        _, history = autopar.fit(
            step,
            first_state(),
            batches,
            num_steps=NUM_STEPS,
            checkpoint_dir=folder,
            checkpoint_every=EVERY,
            on_bad_loss="raise",
            **options,
        )
        return [float(metrics["loss"]) for metrics in history]

    def run(self, fault: Fault, break_after: int) -> Outcome:
        """Train with one fault."""
        if fault.phase in ("start", "shutdown"):
            autopar.shutdown()
        folder = Path(tempfile.mkdtemp(prefix="autopar-faults-"))
        seen, said = _Seen(str(folder / "broken")), ""
        try:
            expected = self.undisturbed() if fault.phase != "start" else self._start_broken(fault, seen)
            self.ready()
            right, said = self._train_broken(fault, folder, seen, break_after, expected)
        except Exception as error:
            right, said = False, f"{type(error).__name__}: {error}"
        finally:
            seen.stop.set()
        if fault.phase == "shutdown":
            seen.broke_at(time.time())
            os.kill(session.current_session().reports[fault.process].pid, SIGNALS[fault.act])
            autopar.shutdown()
            left = _left_behind(lambda: _traces() - self.before)
        else:
            left = _left_behind(self._strangers)
        known, restarted, again = seen.after()
        broke = seen.broken_at is not None
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(
            name=fault.name,
            phase=fault.phase,
            processes=self.processes,
            right=right and broke and not left,
            said=said,
            known_after_s=known,
            restarted_after_s=restarted,
            trained_again_after_s=again,
            left_behind=left,
        )

    def _start_broken(self, fault: Fault, seen: _Seen) -> list[float]:
        """Kill one of the processes as soon as it is there; the error must be one of a cluster that failed."""

        def kill_first() -> None:
            while not seen.stop.is_set():
                there = sorted(pid for pid, words in _marked() if "HostActor" in words)
                if len(there) > fault.process:
                    seen.broke_at(time.time())
                    os.kill(there[fault.process], signal.SIGKILL)
                    return
                time.sleep(0.05)

        threading.Thread(target=kill_first, daemon=True).start()
        try:
            self.ready()
        except ClusterFailed:
            seen.failures.append(time.time())
            return self.undisturbed()
        raise AssertionError("autopar.init did not notice that a process died")

    def _train_broken(
        self, fault: Fault, folder: Path, seen: _Seen, break_after: int, expected: Sequence[float]
    ) -> tuple[bool, str]:
        first_batches = iter([True])

        def at(place: str) -> None:
            current: Any = session.current_session()
            if place == "step":
                _spares()
                seen.watch()
            if fault.phase in ("plan", "between steps"):
                seen.broke_at(time.time())
                os.kill(current.reports[fault.process].pid, SIGNALS[fault.act])
            elif fault.act == "fill the disk":
                seen.broke_at(time.time())
                current.run_everywhere(allow_files_of, 64)
            elif place == "step" and fault.phase in ("restore", "load again"):  # the fault itself comes in the recovery
                os.kill(current.reports[0].pid, signal.SIGKILL)
            else:
                phase = "load" if fault.phase == "load again" else fault.phase
                current.run_everywhere(arm, fault.process, phase, fault.act, seen.file)

        def batches(number: int) -> Any:
            if number == 0 and fault.phase in ("plan", "load") and next(first_batches, False):
                _spares()
                seen.watch()
                at("first batch")
            bad = fault.error is NonFiniteLoss and number > break_after + 2
            if bad:
                seen.broke_at(time.time())
            return {key: value * np.nan if bad else value for key, value in batch_of(number).items()}

        def on_step(number: int, metrics: Any) -> None:
            seen.steps.append(time.time())
            in_step = fault.phase not in ("plan", "load", "start", "shutdown") and fault.error is not NonFiniteLoss
            if number == break_after and in_step:
                at("step")

        recovering = [importlib.import_module(f"autopar.training.{name}") for name in ("fit", "elastic")]
        restart, first_restarts = session.restart, iter([True])

        def restarted(*arguments: Any) -> Any:
            result = restart(*arguments)
            seen.restarts.append(time.time())
            if fault.phase in ("restore", "load again") and next(first_restarts, False):
                at("restart")
            return result

        for module in recovering:
            module.restart = restarted
        checkpoints = folder / "checkpoints"
        elastic = {"elastic": (fault.processes, fault.processes)} if fault.on_failure == "elastic" else None
        options = {**(elastic or {"on_failure": fault.on_failure}), "on_step": on_step}
        try:
            losses = self.train(checkpoints, batches, **options)
        except AutoparError as error:
            if fault.error is None or not isinstance(error, fault.error):
                raise
            return self._goes_on(checkpoints, fault, error, expected, break_after)
        finally:
            for module in recovering:
                module.restart = restart
        right = fault.error is None and losses == list(expected)
        return right, "trained on, equal" if right else "other losses"

    def _goes_on(
        self, folder: Path, fault: Fault, error: Exception, expected: Sequence[float], break_after: int
    ) -> tuple[bool, str]:
        kept = sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
        session.restart()  # limits of a process stay
        losses = self.train(folder, batch_of)
        first = NUM_STEPS - len(losses)
        # Without recovery the first checkpoint is that of step EVERY, which is there before EVERY more are.
        can_be_there = fault.on_failure != "raise" or break_after >= EVERY
        right = losses == list(expected[first:]) and first in (kept or [0]) and (bool(kept) or not can_be_there)
        return right, f"{type(error).__name__}; kept {kept}, went on at {first}"

    def _strangers(self) -> set[str]:
        """Return processes of clusters before this one."""
        current: Any = session.current_session()
        own = {report.pid for report in current.reports} | _spares() if current is not None else set[int]()
        return {f"process {pid} {words[:40]}" for pid, words in _marked() if "HostActor" in words and pid not in own}


class _Seen:
    """When a process broke, when the driver knew, when there were new processes, and when steps were done."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.steps: list[float] = []
        self.failures: list[float] = []
        self.restarts: list[float] = []
        self.stop = threading.Event()

    def broke_at(self, at: float) -> None:
        Path(self.file).write_text(str(at))
        self.broken_at = at

    @functools.cached_property
    def broken_at(self) -> float | None:
        return float(Path(self.file).read_text()) if Path(self.file).exists() else None

    def watch(self) -> None:
        """Note the failures of every session from now on."""
        failed: list[Any] = []

        def look() -> None:
            while not self.stop.is_set():
                current = session.current_session()
                if current is not None and current.failure is not None and current not in failed:
                    failed.append(current)
                    self.failures.append(time.time())
                time.sleep(0.01)

        threading.Thread(target=look, daemon=True).start()

    def after(self) -> tuple[float | None, float | None, float | None]:
        """Return the seconds until the driver knew, until there were new processes, and until it trained again."""
        known = _next(self.failures, self.broken_at)
        restarted = _next(self.restarts, known)
        times = known, restarted, _next(self.steps, known)
        began = self.broken_at
        known_s, restarted_s, again_s = (None if at is None or began is None else at - began for at in times)
        return known_s, restarted_s, again_s


def _spares() -> set[int]:
    """Return the numbers of the spare processes, when they have started."""
    hosts = session.ray_session().hosts
    return {hosts.ray.get(spare.warm) for spare in hosts.spares.waiting}


def _next(times: Sequence[float], since: float | None) -> float | None:
    return None if since is None else next((at for at in times if at >= since), None)


MARK = f"AUTOPAR_FAULTS_{os.getpid()}"


def _marked() -> list[tuple[int, str]]:
    """Return the processes that inherited our mark, and their command lines."""
    found: list[tuple[int, str]] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            marked = MARK.encode() in (folder / "environ").read_bytes()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended, or is not ours
            continue
        if marked and words.strip():  # a zombie has no words
            found.append((int(folder.name), words))
    return found


def _traces() -> set[str]:
    """Return what a cluster could leave behind: processes that inherited our mark, and files in shared memory."""
    processes = {f"process {pid} {words[:40]}" for pid, words in _marked()}
    return processes | {str(path) for path in Path("/dev/shm").iterdir()}


def _left_behind(found: Callable[[], set[str]]) -> str:
    deadline = time.time() + LEAVING_S
    while (left := found()) and time.time() < deadline:
        time.sleep(0.2)
    return ", ".join(sorted(left))


DRIVER = "kill driver"


def driver_killed(expected: Sequence[float], break_after: int) -> Outcome:
    """Kill the driver itself in the middle: its processes must end, and a new driver must go on."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-faults-"))
    before = _traces()
    command = [sys.executable, "-m", "benchmarks.cluster_faults", "--driver", str(folder)]
    losses: list[float] = []
    with subprocess.Popen([*command, "--stop-after", str(break_after)], stdout=subprocess.PIPE, text=True) as first:
        losses += _losses(first)
    broken_at = time.time()
    ours = _left_behind(lambda: {words for _, words in _marked() if "HostActor" in words})
    ended_after_s = time.time() - broken_at
    left = ours or _left_behind(lambda: _traces() - before)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        again = _losses(second)
    shutil.rmtree(folder, ignore_errors=True)
    first_step = NUM_STEPS - len(again)
    right = again == list(expected[first_step:]) and losses[:first_step] == list(expected[:first_step]) and not left
    return Outcome(
        name=DRIVER,
        phase="driver",
        processes=2,
        right=right and 0 <= first_step <= break_after + 1,
        said=f"a new driver went on at step {first_step}",
        known_after_s=ended_after_s,
        restarted_after_s=None,
        trained_again_after_s=None,
        left_behind=left,
    )


def _losses(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdout is not None
    return [float(line.split()[1]) for line in process.stdout if line.startswith("loss ")]


def drive(folder: str, stop_after: int | None) -> None:
    """A driver of its own, which may kill itself after a step."""

    def on_step(number: int, metrics: Any) -> None:
        print("loss", float(metrics["loss"]), flush=True)
        if number == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    trainings = Trainings(2)
    trainings.ready()
    trainings.train(Path(folder) / "checkpoints", batch_of, on_step=on_step)
    autopar.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults; 1 if one of them did not end right."""
    known = {fault.name: fault for fault in faults()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*known, DRIVER], metavar="FAULT")
    parser.add_argument("--break-after", type=int, default=BREAK_AFTER, metavar="STEP", help="from 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the outcomes there, also those that it has")
    parser.add_argument("--driver", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.driver:
        drive(args.driver, args.stop_after)
        return 0
    unknown = [name for name in args.only if name not in known and name != DRIVER]
    if unknown:
        parser.error(f"there is no fault {unknown[0]!r}; there are {', '.join(known)}, {DRIVER}.")
    console = Console(width=None if Console().is_terminal else 160)
    os.environ[MARK] = "1"  # every process that we start inherits it
    outcomes = _kept(args.json)
    done = {outcome.name for outcome in outcomes}
    trainings = Trainings(2)
    for name in args.only:
        if name in done:
            continue
        processes = 2 if name == DRIVER else known[name].processes
        if processes != trainings.processes:
            autopar.shutdown()
            trainings = Trainings(processes)
        if name == DRIVER:
            expected = trainings.undisturbed()
            autopar.shutdown()
            outcome = driver_killed(expected, args.break_after)
        else:
            outcome = trainings.run(known[name], args.break_after)
        outcomes.append(outcome)
        console.print(f"{name}: {'right' if outcome.right else 'WRONG'}: {outcome.said}", markup=False)
        if args.json:
            said = {"jax": jax.__version__, "python": platform.python_version(), "break_after": args.break_after}
            rows = [asdict(outcome) for outcome in outcomes]
            args.json.write_text(json.dumps({**said, "faults": rows}, indent=1) + "\n")
    autopar.shutdown()
    show(console, outcomes)
    return int(not all(outcome.right for outcome in outcomes))


def _kept(file: Path | None) -> list[Outcome]:
    if file is None or not file.exists():
        return []
    return [Outcome(**row) for row in json.loads(file.read_text())["faults"]]


def show(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print a row per phase and number of processes: medians, and the worst in brackets."""
    right = sum(outcome.right for outcome in outcomes)
    columns = ("phase", "processes", "right", "known after s", "new processes after s", "trains again after s")
    table = Table(*columns, title=f"{right} of {len(outcomes)} right")
    places = dict.fromkeys((o.phase, o.processes) for o in outcomes)
    for name, processes in (*places, ("all", None)):
        rows = [o for o in outcomes if processes is None or (o.phase, o.processes) == (name, processes)]
        times = [
            [t for o in rows if (t := getattr(o, field)) is not None]
            for field in ("known_after_s", "restarted_after_s", "trained_again_after_s")
        ]
        cells = [f"{statistics.median(t):.2f} ({max(t):.2f})" if t else "" for t in times]
        table.add_row(name, str(processes or ""), f"{sum(o.right for o in rows)} of {len(rows)}", *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
