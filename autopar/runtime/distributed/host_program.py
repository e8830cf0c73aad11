"""A program in one process of many: the instructions of the meshes that have devices here, and no others.

Every process walks the program's one linear order and leaves out what is not its own, so that of two processes
which share a mesh both run its executables in the same order, and the two ends of a transfer are numbered alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.errors import StepFailed
from autopar.ir.instructions import item_bytes
from autopar.ir.program import Copy, Free, Program, Recv, Run, Send
from autopar.runtime.distributed.host_inputs import Bring, HostInputs, Values
from autopar.runtime.distributed.input_routing import InputRouting
from autopar.runtime.distributed.pieces import value_layout
from autopar.runtime.distributed.world import World
from autopar.runtime.executables import compile_all, mesh_of, sharding_of
from autopar.runtime.interfaces import Receiver, Sender
from autopar.runtime.interpreter import Environment, ResolvedInstruction, numbered, resolve
from autopar.runtime.transfer.exchange import lasting_values
from autopar.runtime.transfer.tiles import DeviceLayout, TransferPlan, plan_transfer, scattered
from autopar.runtime.unfinished import StepProgress

# Gloo hangs when more than 32 executions with collectives between processes are under way with two devices each
# (measured on jaxlib 0.10); so a process waits for its work after every so many.
RUNS_IN_FLIGHT = 8


@dataclass(frozen=True, kw_only=True)
class HostChannel:
    """The channel of one mesh: messages go by their number (`numbered`)."""

    mesh: int
    program: Program
    world: World
    layouts: Mapping[tuple[int, str], NamedSharding]
    plans: dict[Any, list[TransferPlan]]
    """The plans of messages that are alike: every microbatch sends the same."""
    lasting: frozenset[tuple[int, str]]
    message: int

    def sender(self, values: tuple[str, ...], to: int) -> Sender:
        """Post the tiles that other processes pull."""
        lasting = [n for n, value in enumerate(values) if (self.mesh, value) in self.lasting]
        return self.world.exchange.sender(self._plans(values, self.mesh, to), self.message, lasting=lasting)

    def receiver(self, values: tuple[str, ...], source: int) -> Receiver:
        """Pull the tiles of this process's devices."""
        shardings = [self.layouts[self.mesh, value] for value in values]
        pull = self.world.exchange.receiver(self._plans(values, source, self.mesh), self.message, shardings)
        return lambda message: pull()

    def _plans(self, values: tuple[str, ...], source: int, to: int) -> list[TransferPlan]:
        types = self.program.meshes[source].values, self.program.meshes[to].values
        key = (source, to, tuple((types[0][value].spec, types[1][value]) for value in values))
        if key not in self.plans:
            self.plans[key] = transfer_plans(self.program, values, source, to, self.world)
        return self.plans[key]


def transfer_plans(program: Program, values: Sequence[str], source: int, to: int, world: World) -> list[TransferPlan]:
    """The tiles of every value of one message; replicas of the source share the sending."""
    sent_bytes: Counter[int] = Counter()
    plans: list[TransferPlan] = []
    for value in values:
        kind = program.meshes[to].values[value]
        there, here = value_layout(program, source, value), value_layout(program, to, value)
        plans.append(
            plan_transfer(
                kind.shape,
                item_bytes(kind.dtype),
                there,
                sent_layout(there, here, kind.shape, world.process_of, world.node_of),
                world.process_of,
                dtype=kind.dtype,
                sent_bytes=sent_bytes,
            )
        )
    return plans


def sent_layout(
    source: DeviceLayout, target: DeviceLayout, shape: Sequence[int], process_of: Sequence[int], node_of: Sequence[str]
) -> DeviceLayout:
    """The layout to send to: the target, or a finer one of which the processes of one node gather the target.

    That is cheaper where several processes of a node want the same from another node: each byte crosses between the
    nodes once, and an all-gather within the node does the rest (Alpa, Fig. 11: "local all-gather").
    """
    to = {node_of[process_of[ordinal]] for ordinal in target.devices}
    since = {node_of[process_of[ordinal]] for ordinal in source.devices}
    if len(to) > 1 or to & since:
        return target
    return scattered(target, shape, process_of) or target


class HostProgram:
    """A loaded program: `run` carries out this process's part of one step."""

    def __init__(self, program: Program, world: World) -> None:
        program.verify()
        program, self.callback_errors = program.guarded()
        self.program = program
        self.world = world
        here = [number for number, mesh in enumerate(program.meshes) if world.is_here(mesh.devices)]
        meshes = {number: mesh_of(program.meshes[number], world.devices) for number in here}
        self.shardings = {
            (number, name): sharding_of(kind, meshes[number])
            for number in here
            for name, kind in program.meshes[number].values.items()
        }
        self.slots = {value: slot for slot, value in enumerate(self.shardings)}
        order = numbered(program)
        self.instructions = [step for step in order if step[0] in meshes]
        places = [place for place, step in enumerate(order) if step[0] in meshes]
        self.progress = StepProgress(self.instructions, places)
        self.num_extras = len({number for _, _, number in order if number is not None})
        self.steps = self._resolved(meshes)
        self.with_effects = [
            (place, len(self.slots) + number)
            for place, (_, instruction, number) in enumerate(self.instructions)
            if isinstance(instruction, Run) and number is not None
        ]
        self.inputs = HostInputs(program, world, self.shardings, self.slots, first_message=self.num_extras)
        self.outputs = self._outputs()
        self._brings: dict[int, Bring] = {}
        world.exchange.open()

    def expect(self, number: int, routing: InputRouting) -> None:
        """Prepare for arguments that arrive so; `run` is told the number."""
        self._brings[number] = self.inputs.bringing(routing)

    def _resolved(self, meshes: Mapping[int, Mesh]) -> list[ResolvedInstruction]:
        executables = [e for e in self.program.executables.values() if e.mesh in meshes]
        functions = compile_all(executables, meshes, marked=True)
        donated = {e.name: e.donated for e in executables}
        local: dict[int, dict[str, int]] = {number: {} for number in meshes}
        layouts: dict[int, dict[str, NamedSharding]] = {number: {} for number in meshes}
        for (number, name), slot in self.slots.items():
            local[number][name] = slot
            layouts[number][name] = self.shardings[number, name]
        throttled = {number for number in meshes if self._uses_gloo(number)}
        lasting = lasting_values(self.program)
        plans: dict[Any, list[TransferPlan]] = {}
        steps: list[ResolvedInstruction] = []
        runs = 0
        for place, (mesh, instruction, number) in enumerate(self.instructions):
            channel = HostChannel(
                mesh=mesh,
                program=self.program,
                world=self.world,
                layouts=self.shardings,
                plans=plans,
                lasting=lasting,
                message=-1 if number is None else number,
            )
            step = resolve(
                instruction,
                slots=local[mesh],
                layouts=layouts[mesh],
                functions=self.progress.marking(place, instruction, functions),
                donated=donated,
                channel=channel,
                extra=None if number is None else len(self.slots) + number,
            )
            if isinstance(instruction, Run) and mesh in throttled:
                runs += 1
                if runs % RUNS_IN_FLIGHT == 0:
                    step = _and_wait(step, [local[mesh][name] for name in instruction.outputs])
            steps.append(step)
        return steps

    def _uses_gloo(self, number: int) -> bool:
        processes = {self.world.process_of[ordinal] for ordinal in self.program.meshes[number].devices}
        return len(processes) > 1 and self.world.devices[0].platform == "cpu"

    def _outputs(self) -> list[list[tuple[int, bool] | None]]:
        """Per result and part: its slot and whether it has to be copied; None for a part that lies elsewhere."""
        given: set[tuple[int, str]] = set()
        found: list[list[tuple[int, bool] | None]] = []
        for output in sorted(self.program.outputs, key=lambda output: output.leaf):
            parts = [
                (self.slots[part], output.copied or part in given) if part in self.slots else None
                for part in output.parts
            ]
            given.update(output.parts)
            found.append(parts)
        return found

    def run(
        self,
        routing: int,
        arguments: Sequence[Values | None],
        sent: Sequence[np.ndarray[Any, Any]],
        clock: list[tuple[float, float]] | None = None,
    ) -> list[Values]:
        """One step: `arguments` are the values that lie here, `sent` what the driver sent; the pieces of all results.

        Raises `StepFailed`, which names the instruction. `clock`, if given, gets the start and end of each instruction
        in seconds, and every instruction is waited for.
        """
        env: Environment = [None] * (len(self.slots) + self.num_extras)
        progress, number = self.progress, -1
        progress.begin()
        try:
            with self.callback_errors or nullcontext():
                self._brings[routing](env, arguments, sent)
                for number, step in enumerate(self.steps):
                    progress.started = number
                    if clock is None:
                        step(env)
                    else:
                        self._run_timed(step, number, env, clock)
                for place, slot in self.with_effects:
                    number = place
                    jax.block_until_ready(env[slot])
                progress.started = number = len(self.steps)
            return [[_result(env, part) for part in parts] for parts in self.outputs]
        except Exception as error:
            raise StepFailed(
                f"{self._where(number)} failed: {type(error).__name__}: {error}. The step cannot be finished; "
                "correct what the message says, and start again from the last checkpoint."
            ) from error

    def _run_timed(
        self, step: ResolvedInstruction, number: int, env: Environment, clock: list[tuple[float, float]]
    ) -> None:
        start_s = time.time()
        step(env)
        mesh, instruction, _ = self.instructions[number]
        if not isinstance(instruction, Free):
            match instruction:
                case Run():
                    names = instruction.outputs
                case Copy():
                    names = instruction.results
                case Send() | Recv():
                    names = instruction.values
            jax.block_until_ready([env[self.slots[mesh, name]] for name in names])
        clock.append((start_s, time.time()))

    def _where(self, number: int) -> str:
        process = f"process {self.world.process}"
        if number < 0:
            return f"Bringing the arguments into {process}"
        if number == len(self.steps):
            return f"Giving back the results of {process}"
        mesh, instruction, _ = self.instructions[number]
        task = f"task {instruction.task}" if isinstance(instruction, Run) else f"'{str(instruction).strip()}'"
        return f"On mesh {mesh} in {process}, {task}"


def _result(env: Environment, part: tuple[int, bool] | None) -> jax.Array | None:
    if part is None:
        return None
    slot, copied = part
    return env[slot].copy() if copied else env[slot]


def _and_wait(step: ResolvedInstruction, outputs: Sequence[int]) -> ResolvedInstruction:
    def run(env: Environment) -> None:
        step(env)
        jax.block_until_ready([env[slot] for slot in outputs])

    return run
