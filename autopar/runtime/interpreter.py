"""The one interpreter of instructions: each becomes a function of an environment, once, to be just called.

An environment is a flat list with one slot per value and per message, and all that a call has of its own: two
calls of one program, from two threads or one interrupted, know nothing of each other. All names, executables and
channels are looked up when a program is loaded, so that what a step pays per instruction is one call and a few list
accesses.

    Run   env[outputs] = executable(env[inputs]);  env[donated] = None
    Copy  env[results] = device_put(env[values])
    Send  env[message] = sender(env[values])
    Recv  env[values] = receiver(env[message]);  env[message] = None
    Free  env[values] = None
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

import jax
from jax.sharding import NamedSharding

from autopar.ir.program import Copy, Free, Instruction, Program, Recv, Run, Send
from autopar.runtime.executables import has_effects
from autopar.runtime.interfaces import Channel, Receiver, Sender

Environment = list[Any]
ResolvedInstruction = Callable[[Environment], None]


def numbered(program: Program) -> list[tuple[int, Instruction, int | None]]:
    """Return (mesh, instruction, number) in linear order.

    A Send and its Recv have one number, that of their message; a Run with effects has a number of its own; all others
    have None.
    """
    on_the_way: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    found: list[tuple[int, Instruction, int | None]] = []
    numbers = itertools.count()
    for mesh, instruction in program.linear_order():
        number = None
        if isinstance(instruction, Send):
            number = next(numbers)
            on_the_way[mesh, instruction.to].append(number)
        elif isinstance(instruction, Recv):
            number = on_the_way[instruction.source, mesh].popleft()
        elif isinstance(instruction, Run) and has_effects(program.executables[instruction.executable]):
            number = next(numbers)
        found.append((mesh, instruction, number))
    return found


def resolve(
    instruction: Instruction,
    *,
    slots: Mapping[str, int],
    layouts: Mapping[str, NamedSharding],
    functions: Mapping[str, Callable[..., Sequence[Any]]],
    donated: Mapping[str, tuple[int, ...]],
    channel: Channel,
    extra: int | None = None,
) -> ResolvedInstruction:
    """Return the instruction as a function of an environment whose values have these slots and layouts.

    `extra` is the slot of the message of a Send or Recv, and of what stands for the effects of a Run that has some.
    """
    match instruction:
        case Run():
            inputs = [slots[name] for name in instruction.inputs]
            gone = [inputs[position] for position in donated[instruction.executable]]
            outputs = [slots[name] for name in instruction.outputs]
            if extra is not None:
                outputs.append(extra)
            return _run(functions[instruction.executable], inputs, gone, outputs)
        case Send():
            assert extra is not None
            values = [slots[name] for name in instruction.values]
            return _send(channel.sender(instruction.values, instruction.to), values, extra)
        case Recv():
            assert extra is not None
            values = [slots[name] for name in instruction.values]
            return _receive(channel.receiver(instruction.values, instruction.source), values, extra)
        case Copy():
            values, results = ([slots[name] for name in names] for names in (instruction.values, instruction.results))
            shardings = [layouts[name] for name in instruction.results]
            return _copy(shardings, values, results, instruction.takes)
        case Free():
            values, after = ([slots[name] for name in names] for names in (instruction.values, instruction.after))
            return _free(values, after)
        case _:
            assert_never(instruction)


def _run(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[int],
    donated: Sequence[int],
    outputs: Sequence[int],
) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        results = function(*[env[slot] for slot in inputs])
        for slot in donated:
            env[slot] = None
        for slot, result in zip(outputs, results):
            env[slot] = result

    return step


def _send(sender: Sender, slots: Sequence[int], message: int) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        env[message] = sender([env[slot] for slot in slots])

    return step


def _receive(receiver: Receiver, slots: Sequence[int], message: int) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        for slot, array in zip(slots, receiver(env[message])):
            env[slot] = array
        env[message] = None

    return step


def _copy(
    shardings: list[NamedSharding], values: Sequence[int], results: Sequence[int], takes: bool
) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        arrays = [env[slot] for slot in values]
        for slot, array in zip(results, jax.device_put(arrays, shardings)):
            env[slot] = array
        if takes:
            for slot, array in zip(values, arrays):
                env[slot] = None
                array.delete()

    return step


def _free(slots: Sequence[int], after: Sequence[int]) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        # What is dispatched next takes its memory at once, and this is free only when what lay there has left.
        if after:
            jax.block_until_ready([env[slot] for slot in after])
        for slot in slots:
            env[slot] = None

    return step
