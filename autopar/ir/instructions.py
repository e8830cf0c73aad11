"""The words of a program: array types, executables, and the instructions run, send, receive, copy and free.

A value has a name and lives on one mesh; a mesh is a number; nothing here is a live handle. `autopar.ir.program`
tells what the words mean together.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.errors import Unsupported
from autopar.ir.callback_errors import CallbackErrors
from autopar.ir.tasks import Task

KEY_BYTES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
Memory = Literal["device", "host"]
"""The memory that a value lives in: that of its mesh's devices, or pinned memory of their hosts."""
LISTED = 6  # A listing shows this many names of a longer list, then how many follow.


@dataclass(frozen=True, kw_only=True)
class ArrayType:
    """Shape and dtype of a whole value, how it is laid out over its mesh, and in which memory.

    A value on the host is laid out over the same devices: each finds its shard in its own host's memory.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec = field(default_factory=PartitionSpec)
    memory: Memory = "device"
    weak_type: bool = field(default=False, compare=False)
    """True if the dtype is that of a Python number, which gives way to others; no place or byte depends on it."""

    @classmethod
    def of(cls, aval: Any, spec: PartitionSpec) -> "ArrayType":
        """Return the type of a value of a program on the devices, laid out so."""
        weak_type = bool(getattr(aval, "weak_type", False))
        return cls(shape=tuple(aval.shape), dtype=str(aval.dtype), spec=spec, weak_type=weak_type)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value, counted once."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    def bytes_per_device(self, mesh: "MeshProgram") -> int:
        """Bytes of each device's shard; an uneven dimension counts its largest shard."""
        parts = spec_parts(self.spec, dict(zip(mesh.axis_names, mesh.shape, strict=True)))
        shard = (-(-dim // n) for dim, n in itertools.zip_longest(self.shape, parts, fillvalue=1))
        return math.prod(shard) * item_bytes(self.dtype)

    def __str__(self) -> str:
        entries = ["·".join(spec_axes(entry)) or "-" for entry in self.spec]
        spec = f" ({', '.join(entries)})" if any(entry != "-" for entry in entries) else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{spec}" + " on the host" * (self.memory == "host")


@dataclass(frozen=True, kw_only=True)
class Executable:
    """A function that a mesh compiles once: its types, which inputs it may overwrite, and its work."""

    name: str
    mesh: int
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    donated: tuple[int, ...] = ()  # positions in `inputs`
    flops: float = 0.0
    bytes_accessed: float = 0.0
    host_bytes: int = 0
    """Bytes that it keeps on the host for each device while it runs, by transfers of its own."""
    # A ClosedJaxpr, which neither compares nor pickles.
    jaxpr: Any = field(default=None, compare=False, repr=False)
    # Its jaxpr with callbacks that keep what they raise, so that other devices do not wait in vain; None without any.
    guarded: Callable[[CallbackErrors], Any] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        donated = f", donates {listed(self.donated)}" if self.donated else ""
        sizes = f"{len(self.inputs)} inputs, {len(self.outputs)} outputs, {self.flops:.3g} flop"
        return f"{self.name} on mesh {self.mesh}: {sizes}{donated}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Call an executable."""

    task: Task
    executable: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.task!s:8} {listed(self.outputs)} <- {self.executable}({listed(self.inputs)})"


@dataclass(frozen=True, kw_only=True)
class Send:
    """Copy values to another mesh; they stay here too."""

    values: tuple[str, ...]
    to: int

    def __str__(self) -> str:
        return f"{'send':8} {listed(self.values)} to mesh {self.to}"


@dataclass(frozen=True, kw_only=True)
class Recv:
    """Wait for the values of the matching Send, in the layout that this mesh declares for them."""

    values: tuple[str, ...]
    source: int

    def __str__(self) -> str:
        return f"{'recv':8} {listed(self.values)} from mesh {self.source}"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy values to the other memory of the same mesh; they stay where they are, too, unless it takes them over.

    A copy goes beside the mesh's work: what reads its results waits for them.
    """

    values: tuple[str, ...]
    results: tuple[str, ...]
    to: Memory
    takes: bool = False  # the values are gone after it

    def __str__(self) -> str:
        return f"{'copy':8} {listed(self.results)} <- {listed(self.values)} to the {self.to}"


@dataclass(frozen=True, kw_only=True)
class Free:
    """Forget values; their memory is free once the work that reads them is done."""

    values: tuple[str, ...]
    after: tuple[str, ...] = ()  # results of copies that must have arrived before the mesh goes on

    def __str__(self) -> str:
        after = f", after {listed(self.after)}" if self.after else ""
        return f"{'free':8} {listed(self.values)}{after}"


Instruction = Run | Send | Recv | Copy | Free


@dataclass(frozen=True, kw_only=True)
class MeshProgram:
    """One mesh: its devices, the type of every value that ever lives there, and its instructions."""

    devices: tuple[int, ...]  # ordinals in the cluster, row-major over `shape`
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    values: Mapping[str, ArrayType]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The slice [start, stop) of one axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Input:
    """The source of a value before the first instruction: a leaf of the arguments, or a constant."""

    leaf: int | None  # index in the flat arguments; None: the constant below
    mesh: int
    value: str
    window: Window | None = None  # a microbatch, or the piece of a stacked parameter
    constant: int | None = None  # int32 scalar: the microbatch's number

    def __str__(self) -> str:
        if self.leaf is None:
            return f"{self.value} = {self.constant}"
        window = self.window
        part = "" if window is None else f"[{window.start}:{window.stop} on axis {window.axis}]"
        return f"{self.value} = leaf {self.leaf}{part}"


@dataclass(frozen=True, kw_only=True)
class Output:
    """The place of a leaf of the result after the last instruction; several parts are stacked along axis 0."""

    leaf: int
    parts: tuple[tuple[int, str], ...]  # (mesh, value)
    literal: Any = None  # a result that is a constant; then `parts` is empty
    copied: bool = False  # a part is an argument that the caller keeps, so the result must not share its buffer

    def __str__(self) -> str:
        parts = " ++ ".join(f"mesh {mesh} {value}" for mesh, value in self.parts)
        return f"leaf {self.leaf} = {parts or repr(self.literal)}" + (", copied" if self.copied else "")


def item_bytes(dtype: str) -> int:
    """Bytes of one element; a random key counts its words."""
    if not dtype.startswith("key<"):
        return jnp.dtype(dtype).itemsize
    if dtype not in KEY_BYTES:
        raise Unsupported(
            f"Random keys of type {dtype} have an unknown size; the known ones are {', '.join(KEY_BYTES)}."
        )
    return KEY_BYTES[dtype]


def spec_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_parts(spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return into how many parts each entry of a PartitionSpec splits its dimension."""
    return tuple(math.prod(axis_sizes[axis] for axis in spec_axes(entry)) for entry in spec)


def listed(names: tuple[Any, ...]) -> str:
    shown = names if len(names) <= LISTED + 1 else names[:LISTED]
    more = "" if len(shown) == len(names) else f" (+{len(names) - len(shown)})"
    return ", ".join(map(str, shown)) + more
