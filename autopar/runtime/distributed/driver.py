"""The runtime of a cluster: a loaded program is called with flat arguments, and each call is one step everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import InvalidArgument
from autopar.ir.program import Program
from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.host_checks import kinds_of_kept_values
from autopar.runtime.distributed.input_routing import InputRouting, route_inputs
from autopar.runtime.distributed.messages import StepMessage
from autopar.runtime.distributed.pieces import placed_output, program_layouts
from autopar.runtime.distributed.session import Session
from autopar.runtime.finite import kinds_of_values
from autopar.runtime.inputs import ArgumentType, argument_types, donated_leaves, own_copy
from autopar.runtime.timeline import InstructionTime
from autopar.runtime.unfinished import UnfinishedTask


class ClusterProgram:
    """A program on a cluster: called like every loaded program; its results stay on the cluster.

    The processes forget the program when the last reference is dropped.
    """

    def __init__(
        self, session: Session, program: Program, leaf_names: Sequence[str], make_program: Callable[[], Program]
    ) -> None:
        self.session = session
        self.program = program
        self.number = session.load(program, make_program)
        self._finalizer = weakref.finalize(self, session.forget_program, self.number)
        self._finalizer.atexit = False
        self.arguments = argument_types(program, leaf_names)
        layouts = program_layouts(program)
        outputs = sorted(program.outputs, key=lambda output: output.leaf)
        self.results = [placed_output(program, output, layouts) if output.parts else None for output in outputs]
        self.literals = [output.literal for output in outputs]
        self.result_layouts = [None if placed is None else session.number_of_layout(placed) for placed in self.results]
        self.donated = donated_leaves(program)
        self._routings: dict[tuple[int, ...], tuple[int, InputRouting, list[tuple[Any, ...]]]] = {}
        self._routings_sent: set[int] = set()
        self.ordinals = [
            frozenset(o for o, process in enumerate(session.process_of) if process == number)
            for number in range(session.num_processes)
        ]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Send one step to every process; what it donates is gone afterwards."""
        return self.step(leaves)

    def once(self, leaves: Sequence[Any]) -> list[Any]:
        """One step, the last one: the processes forget the program after it."""
        results = self.step(leaves)
        self._finalizer.detach()
        self.session.unload(self.number)
        return results

    def timed(self, leaves: Sequence[Any]) -> tuple[list[Any], list[InstructionTime]]:
        """One step in which every instruction is waited for, and when each ran."""
        with self.session.stepping:
            self.session.settle()
            results = self.step(leaves, timed=True)
            return results, [time for report in self.session.settle() for time in report.times]

    def wait(self, arrays: Sequence[Any]) -> None:
        """Nothing: who reads a value of the cluster waits for it, and not longer than a step may take."""

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction here of the last step that has not ended; None where a driver is told."""
        return self.session.unfinished()

    def step(self, leaves: Sequence[Any], *, timed: bool = False) -> list[Any]:
        """One step; `timed` makes the processes wait for every instruction and report when it ran."""
        with self.session.stepping:
            return self._step(leaves, timed)

    def _step(self, leaves: Sequence[Any], timed: bool) -> list[Any]:
        leaves = [
            self.session.adopt(leaf) if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable else leaf
            for leaf in leaves
        ]
        self._check(leaves)
        number, routing, sent_to = self._routing(leaves)
        session = self.session
        session.make_room()  # first: who is interrupted here has lost nothing
        host_arrays = {
            item.leaf: _words(leaves[item.leaf], self.arguments.types[item.leaf]) for item in routing.from_driver
        }
        count = sum(placed is not None for placed in self.results)
        fresh = iter(session.next_numbers(count))
        results = [None if placed is None else next(fresh) for placed in self.results]
        identities = [leaf.identity if isinstance(leaf, DistributedArray) else None for leaf in leaves]
        donated = [leaves[i] for i in self.donated if isinstance(leaves[i], DistributedArray)]
        message = StepMessage(
            step=session.next_step(),
            program=self.number,
            routing=number,
            new_routing=None if number in self._routings_sent else routing,
            arguments=identities,
            results=results,
            donated=[leaf.identity for leaf in donated],
            dropped=session.take_dropped(),
            timed=timed,
        )
        messages = [replace(message, sent=[host_arrays[leaf][index] for leaf, index in boxes]) for boxes in sent_to]
        session.submit(messages)
        self._routings_sent.add(number)
        for leaf in donated:
            leaf.mark_donated()
        return [
            jnp.asarray(literal)
            if placed is None or identity is None or layout is None
            else DistributedArray(session, identity, placed, layout)
            for placed, identity, layout, literal in zip(self.results, results, self.result_layouts, self.literals)
        ]

    def _routing(self, leaves: Sequence[Any]) -> tuple[int, InputRouting, list[tuple[Any, ...]]]:
        key = tuple(leaf.layout if isinstance(leaf, DistributedArray) else -1 for leaf in leaves)
        known = self._routings.get(key)
        if known is None:
            placed = [leaf.placed if isinstance(leaf, DistributedArray) else None for leaf in leaves]
            routing = route_inputs(self.program, placed)
            sent_to = [
                tuple((leaf, tuple(slice(*part) for part in box)) for leaf, box in routing.sent_to(ordinals))
                for ordinals in self.ordinals
            ]
            known = self._routings[key] = (len(self._routings), routing, sent_to)
        return known

    def _check(self, leaves: Sequence[Any]) -> None:
        self.arguments.check(leaves)
        for number, wanted in self.arguments.types.items():
            leaf = leaves[number]
            if isinstance(leaf, DistributedArray) and leaf.owner is not self.session:
                raise InvalidArgument(
                    f"Argument {wanted.name} lies on a cluster that was shut down or restarted. Restore it from a "
                    "checkpoint, or pass np.asarray of a value that was fetched before."
                )
        self._check_donated(leaves)

    def _check_donated(self, leaves: Sequence[Any]) -> None:
        firsts: dict[int, int] = {}
        for number in self.donated:
            leaf = leaves[number]
            first = firsts.setdefault(leaf.identity, number) if isinstance(leaf, DistributedArray) else number
            if first != number:
                one, other = (self.arguments.types[i].name for i in (first, number))
                raise InvalidArgument(
                    f"Arguments {one} and {other} are one value on the cluster, and both are donated; it can be "
                    "overwritten only once. Pass jnp.asarray of one of them, or donate neither."
                )


def kinds_of_distributed_values(session: Session, values: Sequence[Any]) -> list[int]:
    """Return for every value 0 if it is finite, 1 if it holds an infinity, 2 if a NaN."""
    there = [place for place, value in enumerate(values) if isinstance(value, DistributedArray)]
    found = kinds_of_values([None if isinstance(value, DistributedArray) else value for value in values])
    replies = session.run_everywhere(kinds_of_kept_values, [values[place].identity for place in there])
    for place, *kinds in zip(there, *replies):
        found[place] = max(kinds)
    return found


def _words(leaf: Any, wanted: ArgumentType) -> np.ndarray[Any, Any]:
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return own_copy(leaf, wanted.dtype)
