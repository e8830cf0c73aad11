"""Find the instruction of a step that has not ended: asked while it runs, or when it takes longer than it may.

a Run, when it is started       ->  a marker: a number that is there when the instruction has ended
instructions, markers, asked    ->  the first that has not ended, and what it reads of other meshes
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from autopar.errors import StepTimeout
from autopar.ir.program import Free, Instruction, Recv, Run

_LONGEST_NAP_S = 0.01


@dataclass(frozen=True, kw_only=True)
class UnfinishedTask:
    """The first instruction of a process that has not ended; `place` is that in the order of the whole program.

    Of several processes the one with the first place waits for no other: that order never waits.
    """

    place: int
    text: str


class StepProgress:
    """The progress of the last step that was started. May be asked on any thread."""

    def __init__(self, instructions: Sequence[tuple[int, Instruction, int | None]], places: Sequence[int]) -> None:
        self._instructions = instructions
        """The instructions of this process, each with its mesh."""
        self._places = places
        self._markers: list[Any] = []
        self.started = len(instructions)
        """Number of instructions that have been started; -1 while the arguments are brought in."""

    def begin(self) -> None:
        """A step begins: its arguments are brought in."""
        self.started = -1
        self._markers = [None] * len(self._instructions)

    def marking(
        self, place: int, instruction: Instruction, functions: Mapping[str, Callable[..., Any]]
    ) -> Mapping[str, Callable[..., Any]]:
        """Return the function of an instruction that keeps its last result, which is the marker."""
        if not isinstance(instruction, Run):
            return functions
        function = functions[instruction.executable]

        def call(*arrays: Any) -> Any:
            self.started = place  # it may not return: a callback runs on this thread on CPUs
            results = function(*arrays)
            self._markers[place] = results[-1]
            return results

        return {instruction.executable: call}

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction of the last step that has not ended; None if all have."""
        if self.started < 0:
            return UnfinishedTask(place=-1, text="the arguments, which it brings in")
        for place, ((mesh, instruction, _), marker) in enumerate(zip(self._instructions, self._markers)):
            ended = place < self.started and (marker is None or marker.is_ready())
            if not ended and not isinstance(instruction, Free):
                return UnfinishedTask(place=self._places[place], text=self._waiting(place, mesh, instruction))
        return None

    def _waiting(self, place: int, mesh: int, instruction: Instruction) -> str:
        if not isinstance(instruction, Run):
            return f"'{str(instruction).strip()}' on mesh {mesh}"
        before = [i for number, i, _ in self._instructions[:place] if number == mesh and isinstance(i, Recv)]
        read = [(value, i.source) for i in before for value in i.values if value in instruction.inputs]
        received = ", ".join(f"{value} of mesh {source}" for value, source in read)
        return f"task {instruction.task} on mesh {mesh}" + (f", which reads {received}" if received else "")


class StepWatch:
    """Says on a thread of its own which instruction a step hangs in, while whoever called it cannot: once a step."""

    def __init__(self, timeout_s: float, say: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._say = say
        self._running: tuple[float, int, Callable[[], UnfinishedTask | None]] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="autopar-step-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextmanager
    def watching(self, step: int, unfinished: Callable[[], UnfinishedTask | None]) -> Generator[None]:
        """Watch a step while it is being started."""
        self._running = time.monotonic(), step, unfinished
        try:
            yield
        finally:
            self._running = None

    def _look(self) -> None:
        said = -1
        while not self._stop.wait(min(self._timeout_s / 4, 1.0)):
            running = self._running
            if running is None or running[1] == said or time.monotonic() - running[0] < self._timeout_s:
                continue
            said, task = running[1], running[2]()
            self._say(f"Step {said} has been started for {self._timeout_s:g} s. {_in_words(task)}It is waited for.")


def _in_words(task: UnfinishedTask | None) -> str:
    return "" if task is None else f"The first instruction that has not ended is {task.text}. "


def wait_until_ready(
    arrays: Sequence[Any], timeout_s: float, unfinished: Callable[[], UnfinishedTask | None], *, process: int = 0
) -> None:
    """Wait for arrays. Raises `StepTimeout` after so many seconds, which names the instruction that has not ended."""
    deadline, nap_s = time.monotonic() + timeout_s, 1e-5
    # Keys cannot be asked if they are there; their words can.
    there = [words_of(array) for array in arrays if isinstance(array, jax.Array) and not array.is_deleted()]
    waiting = there if timeout_s < math.inf else []
    while waiting := [array for array in waiting if not array.is_ready()]:
        if time.monotonic() > deadline:
            raise StepTimeout(
                f"A step has not ended within {timeout_s:g} s in process {process}. {_in_words(unfinished())}Look for "
                "what waits for ever (a callback, a lock, devices in another order), or give a longer step_timeout_s "
                "to autopar.init."
            )
        time.sleep(nap_s)
        nap_s = min(1.5 * nap_s, _LONGEST_NAP_S)
    jax.block_until_ready(there)  # raises what they failed with


def words_of(array: Any) -> Any:
    """An array as numbers: of random keys, their words."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
