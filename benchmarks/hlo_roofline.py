"""Count the operations of products and the traffic to memory of a compiled program, loops as often as they run.

XLA's own cost analysis counts the body of a loop once, and its GPU compiler gives none ahead of time. Here every
product counts 2 x the elements of its result x those summed into each of them (of a convolution, the padding too), and
every kernel (what the entry and the bodies of loops call) reads its operands and writes its result; of an array that it
needs only a slice of, or updates a slice of, the slice: `slice(a + b)` fused into one reads a slice of each. What a
library call may work in is reserved for it and not counted: only some of its algorithms write there, and which one runs
is not known before.

    time = sum over kernels of what one takes to start + max(FLOPs / rate of products, bytes / memory bandwidth)

A device runs its kernels one after the other, so an update that only waits for memory is not hidden behind products.
Collectives are not among the kernels: they are timed by the links.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.compiler.analysis.compiled_collectives import KINDS
from autopar.hardware.machine import Machine

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_ON_CHIP = re.compile(r"[a-z]\w*\[[\d,]*\]\{[^}]*S\(1\)[^}]*\}")
_WHOLE_ARRAY = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# What cuBLAS and cuDNN may work in, as much as the largest of their kernels asks for: it stands last in what they make.
_LIBRARY_CALL = re.compile(r'custom_call_target="__cu(?:blas|dnn)')
_SCRATCH = re.compile(r", [su]8\[\d*\](?:\{[^}]*\})?\)$")
_RUN = re.compile(r"(?:body|condition|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|\S+)")
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "s8": "int8",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_CUTS = frozenset({"dynamic-slice", "slice", "gather"})
_COPIES = {"copy-start": 0, "slice-start": 1}
"""Beside other kernels: which array of its type is the copy."""
_CALLS = frozenset({"while", "conditional", "call"})
_MOVES_NOTHING = _CALLS | {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("partition-id", "replica-id", "async-start", "async-update", "async-done", "copy-done", "slice-done"),
    # The bandwidth of a link, by which collectives are timed, holds what they read and write.
    *(f"{kind}{end}" for kind in KINDS for end in ("", "-start", "-done")),
}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """FLOPs and bytes of one run of a kernel."""

    flops: float  # of products
    nbytes: float
    times: float
    written: float = 0.0  # of `nbytes`
    dtype: str = "float32"  # of what is multiplied

    def seconds(self, machine: Machine) -> float:
        """One run, as the planner estimates it for a whole product."""
        if not self.flops:
            return machine.memory_s(self.nbytes)
        return machine.matmul_s(self.flops, self.nbytes, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one device and step."""

    kernels: tuple[Kernel, ...]

    @property
    def flops(self) -> float:
        return sum(kernel.flops * kernel.times for kernel in self.kernels)

    @property
    def memory_bytes(self) -> float:
        return sum(kernel.nbytes * kernel.times for kernel in self.kernels)

    @property
    def written_bytes(self) -> float:
        return sum(kernel.written * kernel.times for kernel in self.kernels)

    def seconds(self, machine: Machine) -> float:
        """The kernels one after the other."""
        return sum(kernel.seconds(machine) * kernel.times for kernel in self.kernels)


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    number: int  # of a parameter
    rest: str


@dataclass(kw_only=True, eq=False)
class _Computation:
    name: str
    is_entry: bool
    instructions: list[_Instruction] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)


def work_of(hlo_text: str) -> Work:
    """The work of a compiled program (`compiled.as_text()`)."""
    computations = {each.name: each for each in _read(hlo_text)}
    times = _executions(computations)
    return Work(
        kernels=tuple(
            _kernel(instruction, computation, computations, moved, times[name])
            for name, computation in computations.items()
            if times[name]
            for instruction in computation.instructions
            if sum(moved := _traffic(instruction, computation, computations))
        )
    )


def _kernel(
    i: _Instruction,
    home: _Computation,
    computations: dict[str, _Computation],
    moved: tuple[float, float],
    times: float,
) -> Kernel:
    parts = [
        (flops, each, body) for each, body in _parts(i, home, computations) if (flops := _product_flops(each, body))
    ]
    dtypes = [_ARRAY.search(body.types[each.operands[0]]) for _, each, body in parts]
    dtype = _DTYPES.get(dtypes[0][1], "float32") if dtypes and dtypes[0] else "float32"
    flops = sum(flops for flops, _, _ in parts)
    return Kernel(flops=flops, nbytes=sum(moved), times=times, written=moved[1], dtype=dtype)


def _read(text: str) -> Iterator[_Computation]:
    current: _Computation | None = None
    for line in text.splitlines():
        if current is None and (header := _HEADER.match(line)):
            current = _Computation(name=header[2], is_entry=bool(header[1]))
        elif current is not None and line.startswith("}"):
            yield current
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            operands, _, rest = found[4].partition(")")
            current.types[found[1]] = found[2]
            current.instructions.append(
                _Instruction(
                    name=found[1],
                    type=found[2],
                    opcode=found[3],
                    operands=tuple(_NAME.findall(operands)),
                    number=int(operands) if found[3] == "parameter" else -1,
                    rest=rest,
                )
            )


def _executions(computations: dict[str, _Computation]) -> dict[str, float]:
    """Return how often each computation runs whose instructions are kernels of their own."""
    executions = defaultdict[str, float](float)
    for name in reversed(computations):  # XLA prints the called before the calling
        if computations[name].is_entry:
            executions[name] = 1.0
        for i in computations[name].instructions:
            if i.opcode in _CALLS:
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.rest)
                times = int(known[1]) if known and i.opcode == "while" else 1
                for called in _called(i):
                    executions[called] += executions[name] * times
    return executions


def _called(i: _Instruction) -> list[str]:
    fused = re.findall(r"calls=%?([\w.\-]+)", i.rest)
    run = [name for found in _RUN.findall(i.rest) for name in re.findall(r"[\w.\-]+", found.rstrip(","))]
    return [*fused, *run] if i.opcode in ("fusion", "while", "conditional", "call") else []


def _parts(
    i: _Instruction, home: _Computation, computations: dict[str, _Computation]
) -> Iterator[tuple[_Instruction, _Computation]]:
    """An instruction, or those that are fused into it, each with the computation that it is in."""
    if i.opcode != "fusion":
        yield i, home
        return
    for name in _called(i):
        for each in computations[name].instructions:
            yield from _parts(each, computations[name], computations)


def _product_flops(i: _Instruction, home: _Computation) -> float:
    target = re.search(r'custom_call_target="([^"]*)"', i.rest)
    name = target[1] if target else ""
    if i.opcode == "dot" or "gemm" in name or "matmul" in name:
        left = _dims(home.types[i.operands[0]])
        numbers = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', i.rest)
        summed = [int(n) for n in re.findall(r"\d+", numbers[1])] if numbers else [len(left) - 1]
        return 2.0 * math.prod(_dims(i.type)) * math.prod(left[n] for n in summed)
    if i.opcode == "convolution" or "conv" in name:
        return _convolution_flops(i, home, name)
    return 0.0


def _convolution_flops(i: _Instruction, home: _Computation, target: str) -> float:
    """Every element of a kernel meets every pixel of the smaller image; XLA says by `dim_labels` which is which."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
    assert labels, i.rest
    operands = [_dims(home.types[name]) for name in i.operands[:2]]
    image, kernel = operands
    result = _dims(i.type)
    # XLA's calls of cuDNN name the kernel and images as in the forward pass, whichever of them is computed.
    if "BackwardFilter" in target:
        kernel, result = result, operands[1]
    elif "BackwardInput" in target:
        result, image = image, result
    outputs = kernel[labels[2].index("o")]
    return 2.0 * math.prod(result) * math.prod(kernel) / outputs


def _traffic(i: _Instruction, home: _Computation, computations: dict[str, _Computation]) -> tuple[float, float]:
    """The bytes that an instruction reads, and those that it writes."""
    if i.opcode in _MOVES_NOTHING:
        return 0.0, 0.0
    if i.opcode in _COPIES:
        return _copied(i, home)
    if i.opcode in _CUTS:
        return _bytes(i.type), _bytes(i.type)
    if i.opcode == "dynamic-update-slice":
        return _bytes(home.types[i.operands[1]]), _bytes(home.types[i.operands[1]])
    if i.opcode == "fusion":
        return _fusion_traffic(i, home, computations[_called(i)[0]])
    made = _SCRATCH.sub(")", i.type) if _LIBRARY_CALL.search(i.rest) else i.type
    return sum(_bytes(home.types[name]) for name in i.operands), _bytes(made)


def _copied(i: _Instruction, home: _Computation) -> tuple[float, float]:
    """Return what a copy reads and writes that goes on beside other kernels; its type names both ends of it."""
    arrays = [found[0] for found in _WHOLE_ARRAY.finditer(i.type)]
    made = arrays[_COPIES[i.opcode]]
    return min(_bytes(home.types[i.operands[0]]), _bytes(made.replace("S(1)", ""))), _bytes(made)


def _fusion_traffic(i: _Instruction, home: _Computation, body: _Computation) -> tuple[float, float]:
    read, written = 0.0, _bytes(i.type)
    needed = _needed_shares(body)
    for number, operand in enumerate(i.operands):
        parameter = next(each.name for each in body.instructions if each.number == number)
        readers = [each for each in body.instructions if parameter in each.operands]
        if readers and all(_updates(each, parameter) for each in readers):
            # In place: the slice is written, and the rest neither read nor written.
            written += sum(_bytes(body.types[each.operands[1]]) - _bytes(each.type) for each in readers)
        else:
            read += needed.get(parameter, 1.0) * _bytes(home.types[operand])
    return read, max(written, 0.0)


def _needed_shares(body: _Computation) -> dict[str, float]:
    """Return the share of every value in a fusion that its result depends on; XLA computes no more of it."""
    cut, whole = defaultdict[str, float](float), defaultdict[str, float](float)
    shares: dict[str, float] = {}
    for i in reversed(body.instructions):  # the root first, and readers before what they read
        share = shares[i.name] = min(1.0, cut[i.name] + whole[i.name]) if shares else 1.0
        for number, name in enumerate(i.operands):
            if number == 0 and i.opcode in _CUTS:
                cut[name] += share * _bytes(i.type) / max(_bytes(body.types[name]), 1.0)
            else:
                whole[name] = max(whole[name], share)
    return shares


def _updates(i: _Instruction, array: str) -> bool:
    return i.opcode == "dynamic-update-slice" and i.operands[0] == array and array not in i.operands[1:]


def _dims(type: str) -> tuple[int, ...]:
    """The dimensions of an array, or of the first in a tuple (the others are what a library call works in)."""
    found = _ARRAY.search(type)
    assert found, type
    return tuple(int(size) for size in found[2].split(",") if size)


def _bytes(type: str) -> float:
    """The bytes of an array or of all in a tuple that are in a device's memory, not in its fast one on the chip.

    The first number in a dtype's name is its width in bits.
    """
    total = 0.0
    for dtype, dims in _ARRAY.findall(_ON_CHIP.sub("", type)):
        bits = re.search(r"\d+", dtype)
        total += math.prod(int(size) for size in dims.split(",") if size) * (int(bits[0]) if bits else 8) / 8
    return total
