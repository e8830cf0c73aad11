"""Run a program in this process: one loop over the instructions of all meshes, in an order that never waits.

JAX dispatches asynchronously and every device has a queue of its own, so the loop runs ahead of the devices
and the meshes work at the same time; `device_put` between meshes is the channel, and starts at the Send.

Any number of threads may call: a call has an environment of its own, and starts its work while no other does.
A step whose parts have effects is waited for, so that a callback that raises fails the call. Who waits here for
longer than a step may take is told which instruction has not ended.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.ir.instructions import KEY_BYTES
from autopar.ir.program import Copy, Free, Instruction, Program, Recv, Run
from autopar.runtime.executables import (
    compile_all,
    compile_at_first_call,
    debugging,
    jaxpr_as_fun,
    mesh_of,
    sharding_of,
    without_mesh,
)
from autopar.runtime.inputs import donated_leaves, lies, own_copy, placement, with_own_donated
from autopar.runtime.interfaces import Device, LoadedProgram, Receiver, Sender
from autopar.runtime.interpreter import Environment, ResolvedInstruction, numbered, resolve
from autopar.runtime.results import ReadResult, collection
from autopar.runtime.timeline import InstructionTime, instruction_name
from autopar.runtime.unfinished import StepProgress, UnfinishedTask, wait_until_ready

# Executions that reach the devices in different orders would wait for each other in their collectives, so that one
# call at a time starts its work. Reentrant, for callbacks that run on the thread which calls.
_starting = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class InProcessChannel:
    """The channel of one mesh: arrays are laid out on the destination by the sender."""

    mesh: int
    layouts: Mapping[tuple[int, str], NamedSharding]

    def sender(self, values: tuple[str, ...], to: int) -> Sender:
        """Start the copy, which is the message."""
        shardings = [self.layouts[to, value] for value in values]
        return lambda arrays: jax.device_put(list(arrays), shardings)

    def receiver(self, values: tuple[str, ...], source: int) -> Receiver:
        """Take the copy."""
        return lambda message: message


@dataclass(frozen=True)
class InProcess:
    """The runtime of one process; ordinals in a program index `devices`."""

    devices: Sequence[Device]
    step_timeout_s: float = math.inf

    def load(self, program: Program, *, leaf_names: Sequence[str] = (), at_first_call: bool = False) -> LoadedProgram:
        """Check the program, compile its executables, and look up everything that its instructions name.

        With `at_first_call` each executable is compiled when it runs first.
        """
        program.verify()
        program, errors = program.guarded()
        meshes = [mesh_of(mesh, self.devices) for mesh in program.meshes]
        layouts = {
            (number, name): sharding_of(kind, meshes[number])
            for number, mesh in enumerate(program.meshes)
            for name, kind in mesh.values.items()
        }
        slots = _slots(program)
        # What may raise the errors of callbacks is to be waited for.
        whole = _whole_step(program) if errors is None else None
        compiled = compile_at_first_call if at_first_call else compile_all
        functions = compiled([*program.executables.values()], meshes, marked=whole is None)
        donated = {e.name: e.donated for e in program.executables.values()}
        local = [{name: slots[number, name] for name in mesh.values} for number, mesh in enumerate(program.meshes)]
        lying = [{name: layouts[number, name] for name in mesh.values} for number, mesh in enumerate(program.meshes)]
        order = numbered(program)
        progress = StepProgress(order, range(len(order)))
        steps = [
            resolve(
                instruction,
                slots=local[mesh],
                layouts=lying[mesh],
                functions=functions if whole is not None else progress.marking(place, instruction, functions),
                donated=donated,
                channel=InProcessChannel(mesh=mesh, layouts=layouts),
                extra=None if number is None else len(slots) + number,
            )
            for place, (mesh, instruction, number) in enumerate(order)
        ]
        return InProcessProgram(
            place=placement(program, [layouts[item.mesh, item.value] for item in program.inputs], leaf_names),
            unset=[None] * (len(slots) + len(order) - len(program.inputs)),
            order=order,
            steps=steps,
            slots=slots,
            results=collection(program, slots, layouts),
            functions=functions,
            whole=None if whole is None else functions[whole],
            donated=donated_leaves(program),
            keys=_keys(program, layouts),
            context=errors or nullcontext(),
            progress=progress,
            step_timeout_s=self.step_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class InProcessProgram:
    """A program that is loaded in this process."""

    place: Callable[[Sequence[Any]], list[Any]]
    unset: Environment
    """The slots of what is no input: values, then messages and effects by their numbers."""
    order: Sequence[tuple[int, Instruction, int | None]]
    steps: Sequence[ResolvedInstruction]
    slots: Mapping[tuple[int, str], int]
    results: Sequence[ReadResult]
    functions: Mapping[str, Callable[..., Any]]
    """The executables by name, as JAX compiled them unless that waits for the first call."""
    whole: Callable[..., list[Any]] | None
    """The one executable that takes the arguments and returns the results as they are, if there is one."""
    donated: Sequence[int]
    """The arguments that some executable overwrites."""
    keys: Sequence[tuple[int, NamedSharding]]
    """The arguments that are random keys, by their places, and their layouts."""
    context: AbstractContextManager[None]
    """Context of a call until its effects are there; it raises what callbacks raised."""
    progress: StepProgress
    step_timeout_s: float

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Carry out one step; what the program donates is gone afterwards."""
        # Looked up here, because either of these on several devices crashes the process in jaxlib 0.10: a deleted
        # array, and random keys in another layout, which an executable that has run before takes as they are.
        if self.whole is None or _any_deleted(leaves) or _any_elsewhere(leaves, self.keys):
            return self._step(leaves)  # which places keys, and says which array is deleted
        try:
            # Its effects are not waited for: it makes all results, so that reading any tells of a failure.
            with _starting, debugging():
                own = with_own_donated(leaves, self.donated)
                own = [own_copy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in own]
                return self.whole(*own)[: len(self.results)]
        except (TypeError, ValueError):  # another layout or number type: to be placed, or to be explained
            pass
        except jax.errors.JaxRuntimeError as error:  # what JAX may not bring here by itself is placed
            if "Disallowed" not in str(error):
                raise
        return self._step(leaves)

    def _step(self, leaves: Sequence[Any]) -> list[Any]:
        with self.context, without_mesh():
            with _starting, debugging():
                env = self.place(leaves) + self.unset
                self.progress.begin()
                for run in self.steps:
                    run(env)
                self.progress.started = len(self.steps)
                found = [result(env) for result in self.results]
            self.wait([env[slot] for slot in self._effects])
        return found

    def wait(self, arrays: Sequence[Any]) -> None:
        """Wait for results of the last step. Raises `StepTimeout`, which names the instruction that has not ended."""
        wait_until_ready(arrays, self.step_timeout_s, self.progress.unfinished)

    @cached_property
    def _effects(self) -> list[int]:
        return [len(self.slots) + n for _, step, n in self.order if isinstance(step, Run) and n is not None]

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction of the last step that has not ended."""
        return self.progress.unfinished()

    def timed(self, leaves: Sequence[Any]) -> tuple[list[Any], list[InstructionTime]]:
        """The same, waiting for every instruction: one mesh works at a time, and when each ran."""
        times: list[InstructionTime] = []
        with self.context, without_mesh():
            with _starting:
                env = self.place(leaves) + self.unset
                self.progress.begin()
            for (mesh, instruction, number), run in zip(self.order, self.steps):
                start_s = time.time()
                with _starting:
                    run(env)
                # A Send has nothing to wait for here: its Recv waits for the copy.
                names = instruction.outputs if isinstance(instruction, Run) else ()
                names = instruction.values if isinstance(instruction, Recv) else names
                names = instruction.results if isinstance(instruction, Copy) else names
                jax.block_until_ready([env[self.slots[mesh, name]] for name in names])
                if number is not None:
                    jax.block_until_ready(env[len(self.slots) + number])
                if not isinstance(instruction, Free):
                    name, stop_s = instruction_name(instruction), time.time()
                    times.append(
                        InstructionTime(
                            process=0,
                            mesh=mesh,
                            name=name,
                            start_s=start_s,
                            stop_s=stop_s,
                            is_task=isinstance(instruction, Run),
                        )
                    )
            self.progress.started = len(self.steps)
        return [result(env) for result in self.results], times


@dataclass(frozen=True, kw_only=True)
class FunctionOnOneDevice:
    """A program that is one function on one device: flat arguments in, flat results out."""

    function: Callable[..., list[Any]]
    device: Device


def function_on_one_device(program: Program, devices: Sequence[Device]) -> FunctionOnOneDevice | None:
    """Return the program as a function that JAX can trace; None if it is more than that."""
    whole = _whole_step(program)
    if whole is None or len(program.meshes[0].devices) > 1:
        return None
    (device,) = mesh_of(program.meshes[0], devices).devices.flat
    return FunctionOnOneDevice(function=jaxpr_as_fun(program.executables[whole].jaxpr), device=device)


def _whole_step(program: Program) -> str | None:
    """The executable that a program consists of, if its arguments are the leaves and its results the outputs."""
    runs = [i for mesh in program.meshes for i in mesh.instructions if not isinstance(i, Free)]
    if len(runs) != 1 or not isinstance(runs[0], Run):
        return None
    whole_leaves = [i.value for i in program.inputs if i.window is None and i.leaf is not None]
    outputs = [value for o in program.outputs for _, value in o.parts if len(o.parts) == 1]
    straight = (
        tuple(whole_leaves) == runs[0].inputs
        and [i.leaf for i in program.inputs] == list(range(len(program.inputs)))
        and tuple(outputs) == runs[0].outputs
        and [o.leaf for o in program.outputs] == list(range(len(outputs)))
    )
    return runs[0].executable if straight else None


_is_deleted = methodcaller("is_deleted")


def _any_deleted(leaves: Sequence[Any]) -> bool:
    try:
        return any(map(_is_deleted, leaves))
    except AttributeError:  # of numpy, or a number
        return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def _keys(program: Program, layouts: Mapping[tuple[int, str], NamedSharding]) -> list[tuple[int, NamedSharding]]:
    return [
        (item.leaf, layouts[item.mesh, item.value])
        for item in program.inputs
        if item.leaf is not None and program.meshes[item.mesh].values[item.value].dtype in KEY_BYTES
    ]


def _any_elsewhere(leaves: Sequence[Any], keys: Sequence[tuple[int, NamedSharding]]) -> bool:
    there = [(leaves[number], layout) for number, layout in keys]
    return any(
        isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 and not lies(leaf, layout)
        for leaf, layout in there
    )


def _slots(program: Program) -> dict[tuple[int, str], int]:
    """A place in the environment for every value: the inputs in their order, then all others."""
    values = [(item.mesh, item.value) for item in program.inputs]
    values += [(number, name) for number, mesh in enumerate(program.meshes) for name in mesh.values]
    return {value: slot for slot, value in enumerate(dict.fromkeys(values))}
