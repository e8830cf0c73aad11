"""Break a cluster in every way we know while it trains, and see that training goes on right or ends with one reason.

    python -m benchmarks.cluster_faults --json faults.json
    python -m benchmarks.cluster_faults --cases "kill forward 0" "stop 1" --break-after 0

A small model trains by `autopar.fit` in two stages, each in a process of its own, with a checkpoint every three steps.
A case breaks something after a step, and is right if

    recovers    the losses of all steps equal those of the undisturbed run, bit for bit
    one error   fit raises that error, and the newest good checkpoint is there

and no process and no file in shared memory is left when the cluster has been shut down. The table says after how many
seconds the driver knew, and after how many it trained again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import shutil
import signal
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
from autopar.errors import AutoparError, CheckpointFailed, NonFiniteLoss
from autopar.ir.program import Recv, Run, Send

NUM_STEPS, EVERY, BREAK_AFTER, WIDTH = 12, 3, 4, 16
STEP_TIMEOUT_S = 8.0


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


# What runs in a process of the cluster, to break it. `host` is the process; it breaks itself at its next step.


def _at(host: Any, kind: str, act: Callable[[], None]) -> None:
    program = list(host.programs.values())[-1]
    wanted = {"forward": "F", "backward": "B", "update": "U"}.get(kind)
    for number, (_, instruction, _) in enumerate(program.instructions):
        is_task = isinstance(instruction, Run) and instruction.task.kind == wanted
        if (
            is_task
            or (kind == "send" and isinstance(instruction, Send))
            or (kind == "receive" and isinstance(instruction, Recv))
        ):
            before = program.steps[number]
            program.steps[number] = lambda env, before=before: (act(), before(env))[1]
            return
    raise ValueError(f"process {host.world.process} has no {kind}")


def _die() -> None:
    Path(os.environ["AUTOPAR_FAULT_FILE"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    Path(os.environ["AUTOPAR_FAULT_FILE"]).write_text(str(time.time()))
    time.sleep(1e6)


def _raise() -> None:
    Path(os.environ["AUTOPAR_FAULT_FILE"]).write_text(str(time.time()))
    raise RuntimeError("this process was told to fail")


ACTS = {"kill": _die, "hang": _hang, "raise": _raise}


def break_at(host: Any, process: int, act: str, kind: str, file: str) -> None:
    """Let one process break at the first instruction of a kind in its next step."""
    os.environ["AUTOPAR_FAULT_FILE"] = file
    if host.world.process == process:
        _at(host, kind, ACTS[act])


def break_while_saving(host: Any, process: int, file: str) -> None:
    """Let one process die just after it has begun to write a checkpoint."""
    os.environ["AUTOPAR_FAULT_FILE"] = file
    if host.world.process != process:
        return
    from autopar.runtime.distributed import host_checkpoint

    start = host_checkpoint.start_save

    @functools.wraps(start)
    def start_and_die(*arguments: Any) -> Any:
        start(*arguments)
        _die()

    host_checkpoint.start_save = start_and_die


def allow_files_of(host: Any, num_bytes: int) -> None:
    """Let no file of this process grow beyond so many bytes: what a full disk looks like to a program."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


# The cases, as the driver starts them; each gets the session, and the file where a process notes when it broke.

Break = Callable[[Any, str], None]


def kill_at(kind: str, process: int) -> Break:
    return lambda current, file: current.run_everywhere(break_at, process, "kill", kind, file)


def act_at(act: str, kind: str, process: int) -> Break:
    return lambda current, file: current.run_everywhere(break_at, process, act, kind, file)


def kill_while_saving(process: int) -> Break:
    return lambda current, file: current.run_everywhere(break_while_saving, process, file)


def send_signal(number: int, process: int) -> Break:
    def act(current: Any, file: str) -> None:
        Path(file).write_text(str(time.time()))
        os.kill(current.reports[process].pid, number)

    return act


def fill_disk(current: Any, file: str) -> None:
    Path(file).write_text(str(time.time()))
    current.run_everywhere(_limited)


def _limited(host: Any) -> None:
    allow_files_of(host, 64)


def not_a_number(current: Any, file: str) -> None:
    Path(file).write_text(str(time.time()))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault: what to break, how training goes on, and the error if it does not."""

    act: Break
    on_failure: str = "restart"
    error: type[AutoparError] | None = None


CASES: dict[str, Case] = {
    **{f"kill {kind} 0": Case(act=kill_at(kind, 0)) for kind in ("forward", "backward", "send", "receive", "update")},
    **{f"kill {kind} 1": Case(act=kill_at(kind, 1)) for kind in ("backward", "send", "receive", "update")},
    **{f"kill while saving {p}": Case(act=kill_while_saving(p)) for p in (0, 1)},
    **{f"kill between steps {p}": Case(act=send_signal(signal.SIGKILL, p)) for p in (0, 1)},
    **{f"terminate {p}": Case(act=send_signal(signal.SIGTERM, p)) for p in (0, 1)},
    **{f"stop {p}": Case(act=send_signal(signal.SIGSTOP, p)) for p in (0, 1)},
    **{f"hang {p}": Case(act=act_at("hang", "backward", p)) for p in (0, 1)},
    **{f"raise {p}": Case(act=act_at("raise", "backward", p)) for p in (0, 1)},
    "kill, replan": Case(act=kill_at("update", 1), on_failure="replan"),
    "kill, no recovery": Case(act=kill_at("backward", 1), on_failure="raise", error=autopar.HostLost),
    "disk full": Case(act=fill_disk, error=CheckpointFailed),
    "loss not a number": Case(act=not_a_number, error=NonFiniteLoss),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a case."""

    case: str
    right: bool
    said: str
    known_after_s: float | None
    trained_again_after_s: float | None
    left_behind: str


def run_case(name: str, case: Case, expected: Sequence[float], break_after: int) -> Outcome:
    """One training with one fault, on a cluster of its own."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-faults-"))
    file = str(folder / "broken")
    before = _traces()
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=1, step_timeout_s=STEP_TIMEOUT_S)
    seen = _Seen()
    error: BaseException | None = None
    losses: list[float] = []

    def on_step(number: int, metrics: Any) -> None:
        seen.steps.append((number, time.time()))
        if number == break_after:
            seen.watch()
            case.act(session.current_session(), file)

    def batches(number: int) -> Any:
        bad = name == "loss not a number" and number > break_after + 2
        return {key: value * np.nan if bad else value for key, value in batch_of(number).items()}

    step = autopar.parallelize(train_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=4))
    try:
        _, history = autopar.fit(
            step,
            first_state(),
            batches,
            num_steps=NUM_STEPS,
            checkpoint_dir=folder / "checkpoints",
            checkpoint_every=EVERY,
            on_failure=case.on_failure,
            on_step=on_step,
            on_bad_loss="raise",
        )
        losses = [float(metrics["loss"]) for metrics in history]
    except AutoparError as caught:
        error = caught
    finally:
        seen.stop.set()
        kept = sorted(int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit())
        autopar.shutdown()
    left = _left_behind(before)
    again = [at for _, at in seen.steps if seen.failed_at is not None and at > seen.failed_at]
    broken_at = float(Path(file).read_text()) if Path(file).exists() else None
    shutil.rmtree(folder, ignore_errors=True)
    if case.error is None:
        right = error is None and losses == list(expected)
        said = "trained on, equal" if right else f"{type(error).__name__}: {error}" if error else "other losses"
    else:
        right = isinstance(error, case.error) and bool(kept)
        said = f"{type(error).__name__}: {str(error)[:90]}; kept {kept}"
    return Outcome(
        case=name,
        right=right and broken_at is not None and not left,
        said=said,
        known_after_s=_after(broken_at, seen.failed_at),
        trained_again_after_s=_after(broken_at, again[0] if again else None),
        left_behind=left,
    )


class _Seen:
    """When the driver knew of a failure, and when steps were done."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self.failed_at: float | None = None
        self.stop = threading.Event()

    def watch(self) -> None:
        current = session.current_session()

        def look() -> None:
            while not self.stop.is_set() and self.failed_at is None:
                if current is not None and current.failure is not None:
                    self.failed_at = time.time()
                time.sleep(0.01)

        threading.Thread(target=look, daemon=True).start()


def _after(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else max(stop - start, 0.0)


MARK = f"AUTOPAR_FAULTS_{os.getpid()}"


def _traces() -> set[str]:
    """Return what a cluster could leave behind: processes that inherited our mark, and files in shared memory."""
    found: set[str] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            marked = MARK.encode() in (folder / "environ").read_bytes()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended, or is not ours
            continue
        if marked and words.strip():  # a zombie has no words
            found.add(f"process {folder.name} {words[:40]}")
    return found | {str(path) for path in Path("/dev/shm").iterdir()}


def _left_behind(before: set[str]) -> str:
    deadline = time.time() + 30.0  # agents of Ray look every few seconds whether theirs is there
    while (left := _traces() - before) and time.time() < deadline:
        time.sleep(0.2)
    return ", ".join(sorted(left))


def driver_dropped(expected: Sequence[float], break_after: int) -> Outcome:
    """Kill the driver itself in the middle: its processes must end, and a new driver must go on."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-faults-"))
    before = _traces()
    command = [sys.executable, "-m", "benchmarks.cluster_faults", "--driver", str(folder)]
    losses: list[float] = []
    with subprocess.Popen([*command, "--stop-after", str(break_after)], stdout=subprocess.PIPE, text=True) as first:
        losses += _losses(first)
    broken_at = time.time()
    left = _left_behind(before)
    ended_after_s = time.time() - broken_at
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        again = _losses(second)
    shutil.rmtree(folder, ignore_errors=True)
    first_step = NUM_STEPS - len(again)
    right = again == list(expected[first_step:]) and losses[:first_step] == list(expected[:first_step]) and not left
    return Outcome(
        case="driver killed",
        right=right and 0 <= first_step <= break_after + 1,
        said=f"a new driver went on at step {first_step}",
        known_after_s=ended_after_s,
        trained_again_after_s=None,
        left_behind=left,
    )


def _losses(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdout is not None
    return [float(line.split()[1]) for line in process.stdout if line.startswith("loss ")]


def drive(folder: str, stop_after: int | None) -> None:
    """A driver of its own, which may kill itself after a step."""
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=1)

    def on_step(number: int, metrics: Any) -> None:
        print("loss", float(metrics["loss"]), flush=True)
        if number == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    step = autopar.parallelize(train_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=4))
    autopar.fit(
        step,
        first_state(),
        batch_of,
        num_steps=NUM_STEPS,
        checkpoint_dir=Path(folder) / "checkpoints",
        checkpoint_every=EVERY,
        on_step=on_step,
    )
    autopar.shutdown()


def undisturbed() -> list[float]:
    """The losses of a run without faults."""
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=1)
    step = autopar.parallelize(train_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=4))
    _, history = autopar.fit(step, first_state(), batch_of, num_steps=NUM_STEPS)
    autopar.shutdown()
    return [float(metrics["loss"]) for metrics in history]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; 1 if one of them did not end right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[*CASES, "driver killed"], metavar="CASE")
    parser.add_argument("--break-after", type=int, default=BREAK_AFTER, metavar="STEP", help="from 0")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--driver", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.driver:
        drive(args.driver, args.stop_after)
        return 0
    unknown = [name for name in args.cases if name not in CASES and name != "driver killed"]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}, driver killed.")
    console = Console(width=None if Console().is_terminal else 160)
    os.environ[MARK] = "1"  # every process that we start inherits it
    expected = undisturbed()
    outcomes: list[Outcome] = []
    for name in args.cases:
        if name == "driver killed":
            outcome = driver_dropped(expected, args.break_after)
        else:
            outcome = run_case(name, CASES[name], expected, args.break_after)
        outcomes.append(outcome)
        console.print(f"{name}: {'right' if outcome.right else 'WRONG'}: {outcome.said}", markup=False)
        if args.json:
            said = {
                "jax": jax.__version__,
                "python": platform.python_version(),
                "load": os.getloadavg()[0],
                "break_after": args.break_after,
            }
            rows = [asdict(outcome) for outcome in outcomes]
            args.json.write_text(json.dumps({**said, "cases": rows}, indent=1) + "\n")
    show(console, outcomes)
    return int(not all(outcome.right for outcome in outcomes))


def show(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    right = sum(outcome.right for outcome in outcomes)
    table = Table(
        "case",
        "right",
        "known after s",
        "trains again after s",
        "left behind",
        title=f"{right} of {len(outcomes)} right",
    )
    for o in outcomes:
        times = [f"{t:.2f}" if t is not None else "" for t in (o.known_after_s, o.trained_again_after_s)]
        table.add_row(o.case, "yes" if o.right else "NO", *times, o.left_behind)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
