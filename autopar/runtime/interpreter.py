"""The one interpreter of instructions: each becomes a function of an environment, once, to be just called.

An environment is a flat list with one slot per value. All names, executables and channels are looked up when
a program is loaded, so that what a step pays per instruction is one call and a few list accesses.

    Run   env[outputs] = executable(env[inputs]);  env[donated] = None
    Send  sender(env[values])          Recv  env[values] = receiver()          Free  env[values] = None
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from autopar.ir.program import Free, Instruction, Recv, Run, Send
from autopar.runtime.interfaces import Channel, Receiver, Sender

Environment = list[Any]
ResolvedInstruction = Callable[[Environment], None]


def resolve(
    instruction: Instruction,
    *,
    slots: Mapping[str, int],
    functions: Mapping[str, Callable[..., Sequence[Any]]],
    donated: Mapping[str, tuple[int, ...]],
    channel: Channel,
) -> ResolvedInstruction:
    """The instruction as a function of an environment whose values have these slots."""
    match instruction:
        case Run():
            inputs = [slots[name] for name in instruction.inputs]
            gone = [inputs[position] for position in donated[instruction.executable]]
            outputs = [slots[name] for name in instruction.outputs]
            return _run(functions[instruction.executable], inputs, gone, outputs)
        case Send():
            return _send(
                channel.sender(instruction.values, instruction.to),
                [slots[name] for name in instruction.values],
            )
        case Recv():
            return _receive(
                channel.receiver(instruction.values, instruction.source),
                [slots[name] for name in instruction.values],
            )
        case Free():
            return _free([slots[name] for name in instruction.values])
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


def _send(sender: Sender, slots: Sequence[int]) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        sender([env[slot] for slot in slots])

    return step


def _receive(receiver: Receiver, slots: Sequence[int]) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        for slot, array in zip(slots, receiver()):
            env[slot] = array

    return step


def _free(slots: Sequence[int]) -> ResolvedInstruction:
    def step(env: Environment) -> None:
        for slot in slots:
            env[slot] = None

    return step
