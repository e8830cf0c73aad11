"""Find the bytes that a program need not move, since arrays stay in the memory on the chip between its kernels.

    LocalBlock, its kernels    ->  bytes that are neither read from the device's memory nor written there

As XLA for TPUs does, an array that one kernel makes or reads is still on the chip for the next that reads it, if what
runs in between takes at most twenty times as long as to copy the array, and if there is room for it meanwhile. Else it
is read from memory, and was written there first. Room goes first to arrays of many bytes moved for the root of their
size. Where several cores of a device make a part each of what a product or a collective makes, these parts meet in the
device's memory; what a loop makes is there, too. Results of the program are written in any case.

Only what compiled programs are held against knows of it (`block_times.moved_bytes`): times, bounds and plans do not.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.compiler.costs.compute import equation_bytes, equation_work
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs.fusion import Fused
from autopar.compiler.jaxprs.fusion_kinds import kind_beside_products
from autopar.compiler.jaxprs.primitives import PRODUCTS
from autopar.compiler.resharding.steps import collective_of
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, Reshard, RunBody, Value, value_bytes
from autopar.hardware.machine import Machine

_LONGEST = 20.0
"""Times as long as to copy it that an array may stay on the chip unread: an estimate. Of 16 plans compiled for TPUs
that move 0.2 to 7 GB, bytes are 22 % off on average with 10, 18 with 20, 16 with 30."""
_LOOP_S = 1.0
"""Seconds of a loop: longer than any array stays on the chip."""


@dataclass(kw_only=True, eq=False)
class MovedArray:
    """An array with what a program moves of it where none stays on the chip."""

    nbytes: float
    made: int
    """The kernel that makes it; below 0 if it is given."""
    in_memory: bool = False
    """True if it is in memory as soon as it is there."""
    written: float = 0.0
    """Bytes that are written of it."""
    leaves: bool = False
    """True if it is written in any case."""
    reads: dict[int, float] = field(default_factory=lambda: defaultdict[int, float](float))
    """Bytes that are read of it, by kernel."""


def bytes_on_chip(block: LocalBlock, mesh_costs: MeshCosts, found: Fused, copied: Collection[Value] = ()) -> float:
    """Return the bytes that one run of a program does not move for what stays on the chip.

    `found` are its kernels; `copied` are results that are copied to other places when all else is done.
    """
    machine = mesh_costs.machine
    if not machine.chip_bytes:
        return 0.0
    arrays, seconds = _Kernels(block=block, mesh_costs=mesh_costs, found=found).run(copied)
    return saved_bytes(arrays, seconds, machine)


def saved_bytes(arrays: Sequence[MovedArray], seconds: Sequence[float], machine: Machine) -> float:
    """Return the bytes of arrays that are not moved; `seconds` are those of each kernel."""
    before = [0.0, *itertools.accumulate(seconds)]
    free = [machine.chip_bytes] * len(seconds)
    saved = 0.0
    moved = [array for array in arrays if array.reads and 0 < array.nbytes <= machine.chip_bytes]
    for array in sorted(moved, key=_worth, reverse=True):
        last, is_on_chip, is_read = array.made, array.made >= 0 and not array.in_memory, False
        for kernel, nbytes in sorted(array.reads.items()):
            # It takes room from where it was made or read last, there not twice.
            span = range(last + is_read, kernel + 1)
            unread_s = before[kernel] - before[min(last + 1, kernel)]
            stays = unread_s <= _LONGEST * array.nbytes / machine.memory_bandwidth
            if is_on_chip and stays and all(free[time] >= array.nbytes for time in span):
                for time in span:
                    free[time] -= array.nbytes
                saved += nbytes
            else:
                array.leaves = True
            last, is_on_chip, is_read = kernel, True, True
        saved += 0.0 if array.leaves or array.in_memory else array.written
    return saved


def _worth(array: MovedArray) -> float:
    return (array.written + sum(array.reads.values())) / math.sqrt(array.nbytes)


@dataclass(kw_only=True, eq=False)
class _Kernels:
    """Find the arrays of a block, and the seconds of its kernels, each at the number of its last equation."""

    block: LocalBlock
    mesh_costs: MeshCosts
    found: Fused
    origins: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The array that each view or equal form is one of."""
    arrays: dict[Value, MovedArray] = field(default_factory=dict[Value, MovedArray])

    def run(self, copied: Collection[Value] = ()) -> tuple[list[MovedArray], list[float]]:
        eqns = self.block.jaxpr.eqns
        numbers = {id(eqn): number for number, eqn in enumerate(eqns)}
        reads: defaultdict[int, list[tuple[int, int]]] = defaultdict(list[tuple[int, int]])
        for number, place, kernel in self.found.reads:
            reads[number].append((place, kernel))
        handed: defaultdict[int, float] = defaultdict(float)
        seconds, number = [0.0] * (len(eqns) + 1), 0
        for value in self.block.inputs:
            self._add(value, made=-1, in_memory=True)
        for action in self.block.actions:
            match action:
                case Reshard(operand=Value() as operand, result=result, steps=steps) if not collective_of(steps):
                    self.origins[result] = operand
                case Reshard(result=result):
                    self._add(result, made=number, in_memory=self.mesh_costs.machine.cores > 1)
                case RunBody(eqn=eqn, results=results):
                    number = numbers[id(eqn)]
                    seconds[number] = _LOOP_S
                    for result in results:
                        self._add(result, made=number, in_memory=True)
                case Evaluate(eqn=eqn, operands=operands, results=results):
                    number = numbers[id(eqn)]
                    if kind_beside_products(eqn) == "view" and isinstance(operands[0], Value):
                        self.origins.update((result, operands[0]) for result in results)
                        continue
                    seconds[number] += self._evaluate(action, number, reads[number], handed)
        copies = [self.arrays[self._root(value)] for value in copied]
        for array in copies:
            array.reads[len(eqns)] += array.nbytes
        for value in self.block.outputs:
            if isinstance(value, Value) and (array := self.arrays.get(self._root(value))) is not None:
                array.leaves |= array not in copies
        return list(self.arrays.values()), seconds

    def _evaluate(
        self, action: Evaluate, number: int, reads: Sequence[tuple[int, int]], handed: dict[int, float]
    ) -> float:
        """Note what an equation moves, and return its seconds; `handed` is what kernels write of later results."""
        eqn, strategy, traffic = action.eqn, action.strategy, self.found.traffic[number]
        machine, mesh = self.mesh_costs.machine, self.mesh_costs.mesh
        written = [
            (value, times * value_bytes(value, mesh))
            for value, times in zip(action.results, traffic.writes, strict=True)
        ]
        read = [
            (operand, kernel, min(traffic.reads[place], 1.0) * value_bytes(operand, mesh))
            for place, kernel in reads
            if isinstance(operand := action.operands[place], Value)
        ]
        whole = sum(nbytes for _, nbytes in written) + sum(nbytes for _, _, nbytes in read)
        # Of what picks rows, less is moved than the whole arrays.
        share = min(1.0, equation_bytes(eqn, strategy, mesh, traffic) / whole) if whole else 1.0
        for operand, kernel, nbytes in read:
            self.arrays[self._root(operand)].reads[kernel] += share * nbytes
        is_product = eqn.primitive.name in PRODUCTS
        end = self.found.ends.get(number, number)
        for value, nbytes in written:
            if end == number:
                self._add(value, made=number, in_memory=is_product and machine.cores > 1)
                self.arrays[value].written = share * nbytes
            else:
                handed[end] += share * nbytes
                self._add(value, made=number)
        if number in handed:
            (value,) = action.results
            self._add(value, made=number, in_memory=machine.cores > 1)
            self.arrays[value].written = handed[number]
        return float(equation_work(eqn, strategy, self.mesh_costs, traffic).seconds(machine))

    def _add(self, value: Value, *, made: int, in_memory: bool = False) -> None:
        nbytes = value_bytes(value, self.mesh_costs.mesh)
        self.arrays[value] = MovedArray(nbytes=nbytes, made=made, in_memory=in_memory)

    def _root(self, value: Value) -> Value:
        while value in self.origins:
            value = self.origins[value]
        return value
