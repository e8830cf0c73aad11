"""Check a plan against its compiled program: the collectives in the program's HLO text are the planned ones.

    HLO text                          ->  CompiledCollective, ...   what each moves, among how many, how often
    Plan, Program, devices or target  ->  CollectiveCheck           planned and compiled bytes by kind of collective

XLA prints one computation after the other, the called before the calling one, one instruction to a line:

    %body (...) -> (...) {
      %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
      %sum = f32[8,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
      ...
    }
    ENTRY %main (...) -> (...) {
      ... while(%start), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}

Compilers for CPUs and GPUs print how often a loop runs; of others' the counter, its start, step and bound say it.

The operands of a collective and the size of its groups say what it moves, whatever the form of its result (which
differs between a plain collective, a combined one, and the start of an asynchronous one).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from rich import box
from rich.table import Table
from rich.text import Text

from autopar.compiler.analysis.aot_targets import aot_devices, is_gpu
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import Unsupported
from autopar.hardware.collectives import PASSES, wire_bytes
from autopar.ir.instructions import Executable
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.plan_sharding import PlannedCollective
from autopar.ir.program import Program, Run

KINDS = tuple(PASSES)
# What moves bytes between devices as well, without a figure for its time (or, the ragged one, for its bytes).
UNCOUNTED = ("collective-broadcast", "ragged-all-to-all", "send")

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
# As XLA names its copies of instructions; those that only take an element of a tuple compute nothing.
_COMPUTED_AGAIN = re.compile(r"^\s+(?:ROOT )?%?(?!gte\.)[\w.\-]+\.remat\d* = ", re.MULTILINE)
_COUNTS_WITH = ("add", "copy", "copy-start", "copy-done", "bitcast")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|[^\s,]+)"
)


@dataclass(frozen=True, kw_only=True)
class CompiledCollective:
    """One collective instruction; several arrays if the compiler combined their collectives into one."""

    name: str
    """The instruction's name, unique in the program."""
    scope: str
    """The place in JAX that made it: `jit(step)/shard_map/psum`; empty if the compiler did."""
    kind: str
    """One of `KINDS`."""
    group_size: int
    """Number of devices that exchange with each other; of a permutation, those of its longest chain or cycle."""
    operands: tuple[float, ...]
    """Bytes of each array on one device: before a reduction, after a gather (as in `wire_bytes`)."""
    dtypes: tuple[str, ...]
    """The arrays' element types in HLO's words; a reduction in bf16 may have been promoted to f32."""
    count: float
    """Runs in one execution of the program."""

    @property
    def nbytes(self) -> float:
        """Bytes of all arrays of one execution."""
        return sum(self.operands)

    def __str__(self) -> str:
        types = "+".join(dict.fromkeys(self.dtypes))
        return f"{self.count:g} x {self.kind} of {self.nbytes:.0f} bytes {types} over {self.group_size}: {self.scope}"


def compiled_collectives(hlo_text: str) -> tuple[CompiledCollective, ...]:
    """The collectives of a compiled program (`compiled.as_text()`) that communicate, in the order of the text.

    Every branch of a conditional counts as taken, and a loop as run once if the compiler did not find out how often it
    runs. A group of one device does not communicate. Raises `Unsupported` for a transfer of another kind than `KINDS`.
    """
    module = _read(hlo_text)
    times = _executions(module)
    collectives = (
        _collective(instruction, operation, computation.types, module.num_devices, times[computation.name])
        for computation in module.computations
        if times[computation.name]
        for instruction in computation.instructions
        if (operation := _operation(instruction.opcode))
    )
    return tuple(collective for collective in collectives if collective.group_size > 1)


def wire_bytes_by_kind(collectives: Iterable[CompiledCollective]) -> dict[str, float]:
    """Bytes that each device sends in one execution of the program, by kind of collective; sorted."""
    total = defaultdict[str, float](float)
    for c in collectives:
        total[c.kind] += c.count * wire_bytes(c.kind, c.group_size, c.nbytes)
    return dict(sorted(total.items()))


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    opcode: str
    operands: tuple[str, ...]
    """Names of values of the same computation."""
    attributes: str


@dataclass(frozen=True, kw_only=True)
class _Computation:
    name: str
    is_entry: bool
    types: Mapping[str, str]
    """The type of every value."""
    instructions: tuple[_Instruction, ...]
    """The instructions that communicate or call other computations."""
    definitions: Mapping[str, str]
    """The text that follows the type of every value."""
    root: str
    """The name of the value that it returns."""


@dataclass(frozen=True, kw_only=True)
class _Module:
    num_devices: int
    computations: tuple[_Computation, ...]


def _read(text: str) -> _Module:
    computations: list[_Computation] = []
    lines = iter(text.splitlines())
    header = next(lines, "")
    for line in lines:
        if opening := _COMPUTATION.match(line):
            computations.append(_read_computation(opening[2], bool(opening[1]), lines))
    sizes = [int(size) for size in re.findall(r"(?:replica_count|num_partitions)=(\d+)", header)]
    return _Module(num_devices=math.prod(sizes), computations=tuple(computations))


def _read_computation(name: str, is_entry: bool, lines: Iterator[str]) -> _Computation:
    """Read the lines up to the closing brace."""
    types: dict[str, str] = {}
    definitions: dict[str, str] = {}
    instructions: list[_Instruction] = []
    root = ""
    for line in lines:
        if line.startswith("}"):
            break
        if not (defined := _INSTRUCTION.match(line)):
            continue
        type_end = _type_end(line, defined.end())
        types[defined[1]], definitions[defined[1]] = line[defined.end() : type_end], line[type_end + 1 :]
        root = defined[1] if "ROOT" in defined[0] else root
        opcode, _, rest = definitions[defined[1]].partition("(")
        if opcode == "send" and "is_host_transfer=true" in rest:
            continue  # a callback: nothing for other devices
        if _operation(opcode) or (_CALLED.search(rest) and not opcode.endswith(("-done", "-update"))):
            close = _closing(rest, 0)
            instructions.append(
                _Instruction(
                    name=defined[1], opcode=opcode, operands=_operand_names(rest[:close]), attributes=rest[close + 1 :]
                )
            )
    return _Computation(
        name=name,
        is_entry=is_entry,
        types=types,
        instructions=tuple(instructions),
        definitions=definitions,
        root=root,
    )


def _operation(opcode: str) -> str | None:
    """The collective that an opcode performs or starts (its end moves nothing more)."""
    operation = opcode.removesuffix("-start")
    return operation if operation in KINDS or operation in UNCOUNTED else None


def _type_end(line: str, start: int) -> int:
    """Return the end of the type that begins at `start`; a tuple `(f32[8]{0}, s32[])` has blanks, an array has not."""
    return _closing(line, start + 1) + 1 if line[start] == "(" else line.index(" ", start)


def _closing(text: str, start: int) -> int:
    """Return the position where the parenthesis around `start` closes."""
    depth = 1
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _operand_names(text: str) -> tuple[str, ...]:
    """The names in `f32[8]{0} %a, /*index=1*/ %b`; types are printed on request only, and repeat the definition's."""
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _executions(module: _Module) -> dict[str, float]:
    """Return the times that each computation runs in one execution of the program."""
    times = defaultdict[str, float](float)
    by_name = {computation.name: computation for computation in module.computations}
    for computation in reversed(module.computations):  # the calling before the called
        if computation.is_entry:
            times[computation.name] = 1
        for instruction in computation.instructions:
            attributes = _QUOTED.sub("", instruction.attributes)
            trips = _trip_count(instruction, computation, by_name)
            for called in _CALLED.findall(attributes):
                for name in called.strip("{}").split(","):
                    times[name.strip().lstrip("%")] += times[computation.name] * trips
    return times


def _trip_count(instruction: _Instruction, caller: _Computation, by_name: Mapping[str, _Computation]) -> int:
    """Return the times that the computations of an instruction run: once, but for the body of a counted loop."""
    if instruction.opcode != "while":
        return 1
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes):
        return int(known[1])
    condition, body = (
        by_name.get(found[1]) if (found := re.search(rf"\b{word}=%?([\w.\-]+)", instruction.attributes)) else None
        for word in ("condition", "body")
    )
    if condition is None or body is None or not (compared := _compared(condition)):
        return 1
    first = _elements(caller, instruction.operands[0], {})
    second = _elements(body, body.root, first)
    (start, bound), (after, still) = ([_number(condition, each, of) for each in compared] for of in (first, second))
    if start is None or after is None or bound is None or bound != still or after <= start:
        return 1
    return max(-(-(bound - start) // (after - start)), 0)


def _compared(condition: _Computation) -> tuple[str, ...]:
    """Return the names of a counter and its bound where a loop runs while the one is less than the other."""
    opcode, _, rest = condition.definitions.get(condition.root, "").partition("(")
    return _operand_names(rest[: rest.index(")")]) if opcode == "compare" and "direction=LT" in rest else ()


def _elements(computation: _Computation, name: str, carried: Mapping[int, int]) -> dict[int, int]:
    """Return the whole numbers in a tuple, by place, as far as they can be told."""
    opcode, _, rest = computation.definitions.get(name, "").partition("(")
    names = _operand_names(rest[: _closing(rest, 0)]) if opcode == "tuple" else ()
    numbers = ((place, _number(computation, each, carried)) for place, each in enumerate(names))
    return {place: number for place, number in numbers if number is not None}


def _number(computation: _Computation, name: str, carried: Mapping[int, int]) -> int | None:
    """Return a whole number that a loop counts with, given those that it carries; None if it cannot be told."""
    opcode, _, rest = computation.definitions.get(name, "").partition("(")
    if opcode == "constant":
        return int(found[1]) if (found := re.match(r"(-?\d+)\)", rest)) else None
    names = _operand_names(rest[: _closing(rest, 0)])
    if opcode == "get-tuple-element" and computation.definitions.get(names[0], "").startswith("parameter("):
        return carried.get(int(found[1])) if (found := re.search(r"index=(\d+)", rest)) else None
    if opcode not in _COUNTS_WITH:
        return None
    numbers = [_number(computation, each, carried) for each in names]
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _collective(
    instruction: _Instruction, kind: str, types: Mapping[str, str], num_devices: int, count: float
) -> CompiledCollective:
    scope = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    if kind in UNCOUNTED:
        raise Unsupported(
            f"The compiled program moves data by `{kind}` ({instruction.name}, from {scope[1] if scope else '?'}); "
            f"what can be counted is {', '.join(KINDS)}. Write that part of the step with one of these."
        )
    group_size = _group_size(kind, _QUOTED.sub("", instruction.attributes), num_devices)
    arrays = [_array(types[name]) for name in instruction.operands]
    copies = group_size if kind == "all-gather" else 1
    return CompiledCollective(
        name=instruction.name,
        scope=scope[1] if scope else "",
        kind=kind,
        group_size=group_size,
        operands=tuple(copies * nbytes for _, nbytes in arrays),
        dtypes=tuple(dtype for dtype, _ in arrays),
        count=count,
    )


def _array(text: str) -> tuple[str, float]:
    """Element type and bytes of an array type: `bf16[8,16]{1,0:T(8,128)}` is ("bf16", 256.0)."""
    match = re.match(r"([a-z]\w*)\[([^\]]*)\]", text)
    assert match, text
    # The first number in the name is the width in bits, as in `f8e4m3fn` and `c64`; truth values take a byte.
    bits = re.search(r"\d+", match[1])
    sizes = [int(size.removeprefix("<=")) for size in match[2].split(",") if size]
    return match[1], math.prod(sizes) * (int(bits[0]) if bits else 8) / 8


def _group_size(kind: str, attributes: str, num_devices: int) -> int:
    """Devices per group, of every way to write groups:

    {{0,1},{2,3}}               listed
    [2,4]<=[8]                  2 groups of 4, consecutive or after a transposition that follows
    mesh['x'=2,'y'=4] {'y'}     along axes of a mesh; 'y':(2)2 is the part of size 2 of an axis
    {}                          all devices in one
    """
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
        assert pairs, attributes
        return _longest_chain([(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])])
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        groups = [group.count(",") + 1 for group in re.findall(r"\{([\d,]*)\}", listed[1])]
        return max(groups, default=num_devices)
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(counted[1])
    mesh = re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    assert mesh, attributes
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)


def _longest_chain(pairs: Sequence[tuple[int, int]]) -> int:
    """Devices of the longest chain or cycle that a permutation sends along; 1 if every device keeps its own."""
    target = dict(pairs)
    firsts = [source for source in target if source not in target.values()]

    def length(device: int) -> int:
        seen = {device}
        while (device := target.get(device, device)) not in seen:
            seen.add(device)
        return len(seen)

    return max((length(device) for device in firsts or target), default=1)


_Collective = TypeVar("_Collective", PlannedCollective, CompiledCollective)

_SUMS = ("all-reduce", "reduce-scatter")
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}

TOLERANCE = 1e-6
"""Share of the bytes of a kind by which planned and compiled may differ: figures are sums of floats."""


@dataclass(frozen=True, kw_only=True)
class KindCheck:
    """All collectives of one kind among as many devices. Bytes of one device and step; compilers combine arrays."""

    kind: str
    group_size: int
    """The number of devices that exchange with each other; 0 for permutations, which compilers cut into chains."""
    planned_count: float
    planned_bytes: float
    repeated_bytes: float
    """Planned bytes that a compiler without barriers, such as XLA's for CPUs, merges with earlier ones."""
    moved_bytes: float
    """Planned bytes of later rounds of collectives that the compiler runs once, in front of the loops around them."""
    whole_bytes: float
    """Bytes of reduce-scatters that XLA's TPU compiler makes all-reduces of, whose results it then takes parts of: less
    for the one kind, more for the other."""
    spared_bytes: float
    """Planned bytes that XLA's TPU compiler does not send: it adds up equal arrays first that are summed one by one,
    and sends in bfloat16 what products round to that."""
    compiled_count: float
    compiled_bytes: float

    @property
    def holds(self) -> bool:
        """True if the compiled bytes are the planned ones.

        Repeated ones may be merged, others moved out of loops, and on TPUs added up whole or spared.
        """
        planned_bytes = self.planned_bytes + self.whole_bytes
        fewer = self.repeated_bytes + self.spared_bytes
        return any(
            (planned - fewer) * (1 - TOLERANCE) <= self.compiled_bytes <= planned * (1 + TOLERANCE)
            for planned in (planned_bytes, planned_bytes - self.moved_bytes)
        )

    @property
    def verdict(self) -> str:
        """The relation of the compiled collectives to the planned ones, in words."""
        if not self.holds:
            return "DIFFERENT"
        lacks_bytes = (self.planned_bytes + self.whole_bytes) * (1 - TOLERANCE) - self.compiled_bytes
        if lacks_bytes <= 0:
            return "added up whole" if self.whole_bytes else "equal"
        if self.moved_bytes >= lacks_bytes:
            return "moved out of loops"
        return "repeated ones merged" if self.repeated_bytes >= lacks_bytes else "fewer or narrower"


@dataclass(frozen=True, kw_only=True)
class CollectiveCheck:
    """Planned and compiled collectives by kind, and the compiled program's memory; true when all kinds hold."""

    compiler: str
    kinds: tuple[KindCheck, ...]
    planned_peak_bytes: float
    compiled_peak_bytes: float
    computed_again: int = 0
    """Operations that XLA does a second time so as not to keep their results."""

    def __bool__(self) -> bool:
        return all(kind.holds for kind in self.kinds)

    def table(self) -> Table:
        """One row per kind and number of devices."""
        title = f"collectives of one device and step, planned and compiled for {self.compiler}"
        columns = ("kind", "devices", "planned", "compiled", "planned MB", "compiled MB", "")
        table = Table(*columns, title=title, box=box.SIMPLE_HEAD)
        for each in self.kinds:
            counts = f"{each.planned_count:g}", f"{each.compiled_count:g}"
            megabytes = f"{each.planned_bytes / 1e6:.6g}", f"{each.compiled_bytes / 1e6:.6g}"
            among = str(each.group_size or "")
            table.add_row(*(Text(cell) for cell in (each.kind, among, *counts, *megabytes, each.verdict)))
        return table


def check_collectives(
    plan: Plan,
    program: Program,
    *,
    devices: Sequence[Any] | None,
    target: str | None,
    compiled: Mapping[str, Any] | None,
) -> CollectiveCheck:
    """Compile the program for these devices, or ahead of time for a GPU or TPU that need not be here, and compare.

    `compiled` are its executables by name, where they have been compiled for these devices.
    """
    if target is not None:
        devices = target_devices(plan, target)
    assert devices is not None
    runs = Counter(i.executable for mesh in program.meshes for i in mesh.instructions if isinstance(i, Run))
    measured: list[CompiledCollective] = []
    peak_bytes, computed_again = 0.0, 0
    for executable in program.executables.values():
        if compiled is None:
            lowered = lowered_executable(executable, executable_mesh(plan.meshes[executable.mesh], devices))
            made = compile_for(target, lowered, executable.name)
        else:
            made = compiled[executable.name]
        peak_bytes, text = max(peak_bytes, _peak(made)), made.as_text()
        computed_again += count_computed_again(text)
        measured += [replace(each, count=each.count * runs[executable.name]) for each in compiled_collectives(text)]
    return CollectiveCheck(
        compiler=target or str(devices[0].device_kind),
        kinds=tuple(_compare(plan.planned_collectives, measured, platform=devices[0].platform)),
        planned_peak_bytes=0.0 if plan.sharding is None else plan.sharding.peak_bytes,
        compiled_peak_bytes=peak_bytes,
        computed_again=computed_again,
    )


def count_computed_again(hlo_text: str) -> int:
    """Count the operations that XLA does a second time so as not to keep their results (`HloRematerialization`)."""
    return len(_COMPUTED_AGAIN.findall(hlo_text))


def compiled_peak_bytes(plan: Plan, program: Program, devices: Sequence[Any]) -> float:
    """The most that an executable of a plan needs on a device, as XLA compiles it for these devices."""
    return max(
        _peak(lowered_executable(executable, executable_mesh(plan.meshes[executable.mesh], devices)).compile())
        for executable in program.executables.values()
    )


def executable_mesh(plan: MeshPlan, devices: Sequence[Any]) -> Mesh:
    """Return the mesh of a plan on devices."""
    grid = np.array([devices[ordinal] for ordinal in plan.devices]).reshape(plan.shape)
    return Mesh(grid, plan.axis_names, axis_types=(AxisType.Auto,) * len(plan.axis_names))


def target_devices(plan: Plan, target: str) -> tuple[Any, ...]:
    """Return the devices to compile a plan for that need not be here; raises what `aot_devices` does."""
    return aot_devices(target, 1 + max(max(mesh.devices) for mesh in plan.meshes))


def compile_for(target: str | None, lowered: Any, name: str) -> Any:
    """Compile an executable for devices that are here, or for a target; raise `Unsupported` if its compiler does not.

    On GPUs what would have to be tried on one is left out.
    """
    if target is None:
        return lowered.compile()
    try:
        return lowered.compile({"xla_gpu_enable_triton_gemm": False} if is_gpu(target) else None)
    except jax.errors.JaxRuntimeError as error:
        todo = "Plan for another number of devices, or verify for another target."
        if "ptxas" in str(error):
            todo = (
                "The ptxas of CUDA 13 knows no GPU before Turing: install that of CUDA 12 (nvidia-cuda-nvcc-cu12), and "
                "put its folder in front of PATH."
            )
        raise Unsupported(f"XLA's compiler for {target} does not compile {name}: {error} {todo}") from error


def lowered_executable(executable: Executable, mesh: Mesh) -> Any:
    """Return an executable as `jax.stages.Lowered`, by itself."""
    avals: list[Any] = [v.aval for v in jc.open_jaxpr(executable.jaxpr)[0].invars]
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, kind.spec))
        for aval, kind in zip(avals, executable.inputs, strict=True)
    ]
    run = jax.jit(
        jc.jaxpr_as_fun(executable.jaxpr),
        out_shardings=[NamedSharding(mesh, kind.spec) for kind in executable.outputs],
        donate_argnums=executable.donated,
        keep_unused=True,
    )
    return run.lower(*arguments)


def _compare(
    planned: Sequence[PlannedCollective], compiled: Sequence[CompiledCollective], *, platform: str
) -> list[KindCheck]:
    on_cpu, on_tpu = platform == "cpu", platform == "tpu"
    planned_by, compiled_by = _by_kind(planned), _by_kind(compiled)
    whole_bytes = _whole_bytes(planned_by, compiled_by) if on_tpu else {}
    checks: list[KindCheck] = []
    for kind, group_size in sorted({**planned_by, **compiled_by}, key=lambda each: (KINDS.index(each[0]), each[1])):
        mine, theirs = planned_by.get((kind, group_size), []), compiled_by.get((kind, group_size), [])
        # GPUs' compiler keeps apart what is done again, as planned: nothing may lack there.
        repeated = [each for each in mine if each.repeated and (on_cpu or on_tpu)]
        checks.append(
            KindCheck(
                kind=kind,
                group_size=group_size,
                planned_count=sum(each.times for each in mine),
                planned_bytes=sum(_bytes(each, on_cpu) for each in mine),
                repeated_bytes=sum(_bytes(each, on_cpu) for each in repeated),
                moved_bytes=_moved_bytes(mine, theirs, on_cpu=on_cpu),
                whole_bytes=whole_bytes.get((kind, group_size), 0.0),
                spared_bytes=_spared_bytes(kind, mine, theirs) if on_tpu else 0.0,
                compiled_count=sum(each.count * len(each.operands) for each in theirs),
                compiled_bytes=sum(map(_run_bytes, theirs)),
            )
        )
    return checks


def _by_kind(collectives: Sequence[_Collective]) -> dict[tuple[str, int], list[_Collective]]:
    by_kind = defaultdict[tuple[str, int], list[_Collective]](list)
    for each in collectives:
        by_kind[each.kind, 0 if each.kind == "collective-permute" else each.group_size].append(each)
    return dict(by_kind)


def _bytes(each: PlannedCollective, on_cpu: bool) -> float:
    return each.times * _bytes_of_run(each, on_cpu)


def _bytes_of_run(each: PlannedCollective, on_cpu: bool) -> float:
    """XLA's CPU compiler runs collectives of bfloat16 in float32."""
    return each.nbytes * (2 if on_cpu and each.dtype == "bfloat16" else 1)


def _whole_bytes(
    planned: Mapping[tuple[str, int], Sequence[PlannedCollective]],
    compiled: Mapping[tuple[str, int], Sequence[CompiledCollective]],
) -> dict[tuple[str, int], float]:
    """Return the bytes of reduce-scatters that were compiled as all-reduces of the same, as `KindCheck` has them."""
    whole: dict[tuple[str, int], float] = {}
    for kind, size in planned:
        if kind != "reduce-scatter":
            continue
        scattered, reduced = (kind, size), ("all-reduce", size)
        lacks_bytes, extra_bytes = (
            sign
            * (sum(_bytes(x, False) for x in planned.get(key, [])) - sum(_run_bytes(x) for x in compiled.get(key, [])))
            for sign, key in ((1, scattered), (-1, reduced))
        )
        if (moved := min(lacks_bytes, extra_bytes)) > 0:
            whole |= {scattered: -moved, reduced: moved}
    return whole


def _spared_bytes(kind: str, planned: Sequence[PlannedCollective], compiled: Sequence[CompiledCollective]) -> float:
    """Return the bytes of planned collectives that XLA's TPU compiler does not send, as `KindCheck` has them."""
    wanted, found = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for each in planned:
        wanted[each.dtype, round(each.nbytes)] += round(each.times)
    for each in compiled:
        for dtype, nbytes in zip(each.dtypes, each.operands, strict=True):
            found[_DTYPES.get(dtype, dtype), round(nbytes)] += round(each.count)
    lacking, more = wanted - found, found - wanted
    if kind in _SUMS:
        return float(sum(nbytes * count for (dtype, nbytes), count in lacking.items() if found[dtype, nbytes]))
    return sum(
        nbytes / 2 * min(count, more["bfloat16", nbytes // 2])
        for (dtype, nbytes), count in lacking.items()
        if dtype == "float32"
    )


def _run_bytes(each: CompiledCollective) -> float:
    return each.count * each.nbytes


def _moved_bytes(
    planned: Sequence[PlannedCollective], compiled: Sequence[CompiledCollective], *, on_cpu: bool
) -> float:
    """Return the bytes that are spared where what every round of a loop does to the same was compiled in front of it.

    Those are planned collectives on what a loop does not change, of whose bytes and runs fewer are compiled.
    """

    def key(each: PlannedCollective) -> tuple[int, int]:
        return round(_bytes_of_run(each, on_cpu)), round(each.times)

    compiled_as = Counter((round(nbytes), round(each.count)) for each in compiled for nbytes in each.operands)
    missing = Counter(map(key, planned)) - compiled_as
    moved_bytes = 0.0
    for each in planned:
        if each.invariant_trips > 1 and not each.repeated and missing[key(each)] > 0:
            missing[key(each)] -= 1
            moved_bytes += (1 - 1 / each.invariant_trips) * _bytes(each, on_cpu)
    return moved_bytes


def _peak(compiled: Any) -> float:
    memory = compiled.memory_analysis()
    whole = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return float(whole - memory.alias_size_in_bytes)
