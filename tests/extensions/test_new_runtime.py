"""A runtime of one's own: whoever has `load(program) -> Loaded` carries out a program, here without compiling any.

The pieces of a program are public: the order in which nothing waits, the interpreter that makes a function of each
instruction, and where arguments come from. A runtime gives functions for executables, and a channel for values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from autopar.compiler import passes
from autopar.hardware.cluster import Cluster
from autopar.ir.program import Executable, Input, Program
from autopar.runtime.interpreter import numbered, resolve
from tests.small_steps import mlp_batch, mlp_params, mlp_step, traced, two_stages


class AsTheyAre:
    """A channel of all meshes: a message is the arrays themselves."""

    def sender(self, values: tuple[str, ...], to: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
        return lambda arrays: arrays

    def receiver(self, values: tuple[str, ...], source: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
        return lambda message: message


@dataclass(frozen=True)
class OnPaper:
    """Every mesh on the default device, every executable evaluated equation by equation."""

    def load(self, program: Program) -> Callable[[Sequence[Any]], list[Any]]:
        program.verify()
        names = [(item.mesh, item.value) for item in program.inputs]
        names += [(number, name) for number, mesh in enumerate(program.meshes) for name in mesh.values]
        slots = {name: slot for slot, name in enumerate(dict.fromkeys(names))}
        order = numbered(program)
        steps = [
            resolve(
                instruction,
                slots={name: slots[mesh, name] for name in program.meshes[mesh].values},
                layouts={},  # of values that are copied between memories: here are none
                functions={name: evaluator(executable) for name, executable in program.executables.items()},
                donated={name: executable.donated for name, executable in program.executables.items()},
                channel=AsTheyAre(),
                extra=None if number is None else len(slots) + number,
            )
            for mesh, instruction, number in order
        ]

        def step(leaves: Sequence[Any]) -> list[Any]:
            env: list[Any] = [argument(item, leaves) for item in program.inputs]
            env += [None] * (len(slots) + len(order) - len(env))
            for run in steps:
                run(env)
            return [env[slots[output.parts[0]]] for output in program.outputs]

        return step


def evaluator(executable: Executable) -> Callable[..., list[Any]]:
    closed = executable.jaxpr
    return lambda *arrays: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)


def argument(item: Input, leaves: Sequence[Any]) -> Any:
    if item.leaf is None:
        return np.int32(item.constant)
    if item.window is None:
        return leaves[item.leaf]
    part = [slice(None)] * leaves[item.leaf].ndim
    part[item.window.axis] = slice(item.window.start, item.window.stop)
    return leaves[item.leaf][tuple(part)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_runtime_of_ones_own_computes_what_the_step_does(schedule, float64):
    args = jax.tree.map(lambda x: x.astype("float64"), (mlp_params(), mlp_batch()))
    trace = traced(mlp_step, *args, donated=(0,))
    plan = passes.make_plan(trace, two_stages(schedule=schedule), cluster=Cluster(num_devices=2, kind="cpu"))
    results = OnPaper().load(passes.lower_step(trace, plan))(jax.tree.leaves(args))
    # Sums over microbatches instead of one over the batch.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), results, jax.tree.leaves(mlp_step(*args)))
