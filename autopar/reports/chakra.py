"""Write a simulated step as Chakra execution traces: a graph of work and messages for each device.

    Program, Timeline, runs by executable  ->  step.0.et, step.1.et, ...  comm_groups.json

Chakra is MLCommons' exchange format for simulators of distributed training, such as ASTRA-sim; field numbers are those
of its `et_def.proto`, version 0.0.4. A file is messages of protobuf, each behind its length as a varint: a
`GlobalMetadata`, then a `Node` for everything that the device does. As in the simulation, a task computes and then has
its collectives, one after the other, and waits for what it receives; sends and copies to the host go beside.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, assert_never

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from autopar.compiler.analysis.executable_runs import ExecutableRun, RunCollective
from autopar.ir.instructions import item_bytes
from autopar.ir.plan_sharding import PlannedCollective
from autopar.ir.program import ArrayType, Copy, Free, Program, Recv, Run, Send
from autopar.runtime.timeline import Event, HostCopy, Timeline, Transfer
from autopar.runtime.transfer.tiles import DeviceLayout, plan_transfer

_VERSION = "0.0.4"
_TYPES = {"uint64": 4, "int64": 3, "int32": 5, "bool": 8, "string": 9, "double": 1}
"""Numbers of protobuf's own types in a descriptor."""
_NODE_TYPES = {"load": 2, "store": 3, "compute": 4, "send": 5, "recv": 6, "collective": 7}
_COLLECTIVES = {"all-reduce": 0, "all-gather": 2, "all-to-all": 6, "reduce-scatter": 7}
_ATTRIBUTES = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "pg_name": "string_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "duration_s": "double_val",
}
"""Attributes of a node, as readers of the format know them, and their types. `duration_s` is ours: durations are whole
microseconds there."""
_FIELDS: Mapping[str, Sequence[tuple[str, int, str, bool]]] = {
    "AttributeProto": (
        ("name", 1, "string", False),
        ("double_val", 3, "double", False),
        ("int32_val", 7, "int32", False),
        ("int64_val", 9, "int64", False),
        ("uint64_val", 13, "uint64", False),
        ("bool_val", 27, "bool", False),
        ("string_val", 29, "string", False),
    ),
    "GlobalMetadata": (("version", 1, "string", False),),
    "Node": (
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "int32", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("attr", 10, "AttributeProto", True),
    ),
}
"""Name, number and type of each field that is written, and whether it repeats, by message. An enum is an int32."""


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Work of a mesh, as all of its devices do it: when, and by which values it hangs on other work."""

    name: str
    start_s: float
    stop_s: float
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: bool = True
    """True if what follows on the mesh waits for it."""


@dataclass(frozen=True, kw_only=True)
class _Work(_Span):
    """A task's computation, or a copy to the other memory, by its bytes on a device."""

    kind: str
    num_ops: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class _Exchange(_Span):
    """A collective: the number of each device's group, or for a permute where it sends to and receives from."""

    collective: PlannedCollective
    groups: Mapping[int, int]
    sends: Mapping[int, int]
    receives: Mapping[int, int]
    tag: int


@dataclass(frozen=True, kw_only=True)
class _Messages(_Span):
    """One side of a transfer: source, destination and bytes of each message, numbered from `tag` on."""

    kind: str
    messages: tuple[tuple[int, int, int], ...]
    tag: int


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """A wait of all that follows on the mesh until these values are there."""

    reads: tuple[str, ...]


def write_chakra(
    folder: Path,
    program: Program,
    timeline: Timeline,
    runs: Mapping[str, ExecutableRun],
    devices: Sequence[int] | None,
) -> Path:
    """Write the trace of each device, or of `devices`, and the groups of collectives; return the folder.

    `timeline` is that of the simulated program. Raises `OSError` for a folder that cannot be written to.
    """
    builder = _Builder(program=program, timeline=timeline, runs=runs)
    meshes = builder.build()
    folder.mkdir(parents=True, exist_ok=True)
    for mesh, spans in zip(program.meshes, meshes, strict=True):
        for device in mesh.devices:
            if devices is None or device in devices:
                with (folder / f"step.{device}.et").open("wb") as file:
                    _write(file, _MESSAGES["GlobalMetadata"](version=_VERSION))
                    for node in _nodes(spans, device):
                        _write(file, node)
    groups = {str(number): list(group) for group, number in builder.groups.items()}
    (folder / "comm_groups.json").write_text(json.dumps(groups, indent=1) + "\n", encoding="utf-8")
    return folder


@dataclass(kw_only=True, eq=False)
class _Builder:
    """Turns the instructions of every mesh into spans, with numbers for groups and messages that all devices share."""

    program: Program
    timeline: Timeline
    runs: Mapping[str, ExecutableRun]
    groups: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    tag: int = 0
    sent: dict[tuple[int, int], list[_Messages]] = field(default_factory=lambda: defaultdict(list))
    """The messages on their way, by source and destination mesh."""
    known: dict[Any, tuple[tuple[int, int, int], ...]] = field(default_factory=dict[Any, Any])

    def build(self) -> list[list[_Span | _Wait]]:
        """Return for each mesh what its devices do, in order."""
        spans: list[list[_Span | _Wait]] = [[] for _ in self.program.meshes]
        events, transfers = iter(self.timeline.events), iter(self.timeline.transfers)
        copies = iter(self.timeline.copies)
        for mesh, instruction in self.program.linear_order():
            match instruction:
                case Run():
                    spans[mesh] += self._run(instruction, next(events))
                case Send():
                    spans[mesh].append(self._send(mesh, instruction, next(transfers)))
                case Recv():
                    spans[mesh].append(self._receive(mesh, instruction))
                case Copy():
                    spans[mesh].append(self._copy(mesh, instruction, next(copies)))
                case Free(after=after):
                    spans[mesh] += [_Wait(reads=after)] if after else []
                case _:
                    assert_never(instruction)
        return spans

    def _run(self, run: Run, event: Event) -> Iterator[_Span]:
        work = self.runs[run.executable]
        middle_s = event.stop_s - event.collective_s
        yield _Work(
            name=event.label,
            start_s=event.start_s,
            stop_s=middle_s,
            reads=run.inputs,
            writes=run.outputs,
            kind="compute",
            num_ops=round(work.flops),
            nbytes=round(work.nbytes),
        )
        # Of a step on one mesh latencies are shared, so that its collectives take less than each by itself.
        alone_s = sum(each.planned.seconds for each in work.collectives)
        share = event.collective_s / alone_s if alone_s else 0.0
        for each in work.collectives:
            seconds = share * each.planned.seconds / max(round(each.planned.times), 1)
            for _ in range(round(each.planned.times)):
                yield self._exchange(each, run, event.label, middle_s, middle_s + seconds)
                middle_s += seconds

    def _exchange(self, each: RunCollective, run: Run, label: str, start_s: float, stop_s: float) -> _Exchange:
        numbers = {group: self.groups.setdefault(group, len(self.groups) + 1) for group in each.groups}
        self.tag += bool(each.pairs)
        return _Exchange(
            name=f"{label} {each.planned.kind} {each.planned.what}",
            start_s=start_s,
            stop_s=stop_s,
            writes=run.outputs,
            collective=each.planned,
            groups={device: number for group, number in numbers.items() for device in group},
            sends=dict(each.pairs),
            receives={b: a for a, b in each.pairs},
            tag=self.tag,
        )

    def _send(self, mesh: int, send: Send, transfer: Transfer) -> _Messages:
        messages = tuple(each for value in send.values for each in self._tiles(mesh, send.to, value))
        found = _Messages(
            name=f"send {transfer.label} to mesh {send.to}",
            start_s=transfer.start_s,
            stop_s=transfer.stop_s,
            reads=send.values,
            waits=False,
            kind="send",
            messages=messages,
            tag=self.tag + 1,
        )
        self.tag += len(messages)
        self.sent[mesh, send.to].append(found)
        return found

    def _receive(self, mesh: int, recv: Recv) -> _Messages:
        sent = self.sent[recv.source, mesh].pop(0)
        return _Messages(
            name=f"recv {', '.join(recv.values)} from mesh {recv.source}",
            start_s=sent.start_s,
            stop_s=sent.stop_s,
            writes=recv.values,
            kind="recv",
            messages=sent.messages,
            tag=sent.tag,
        )

    def _copy(self, mesh: int, copy: Copy, made: HostCopy) -> _Work:
        return _Work(
            name=f"copy {made.label} to the {made.to}",
            start_s=made.start_s,
            stop_s=made.stop_s,
            reads=copy.values,
            writes=copy.results,
            waits=False,
            kind="store" if copy.to == "host" else "load",
            num_ops=0,
            nbytes=sum(self._type(mesh, value).bytes_per_device(self.program.meshes[mesh]) for value in copy.values),
        )

    def _tiles(self, source: int, destination: int, value: str) -> tuple[tuple[int, int, int], ...]:
        """Return source, destination and bytes of the messages that bring a value to every device that wants it."""
        sent, received = (self._type(mesh, value) for mesh in (source, destination))
        key = source, destination, sent, received
        if key not in self.known:
            there, here = self._layout(source, sent), self._layout(destination, received)
            size, alone = item_bytes(sent.dtype), {device: device for device in (*there.devices, *here.devices)}
            plan = plan_transfer(sent.shape, size, there, here, alone, dtype=sent.dtype)
            self.known[key] = tuple((tile.source, tile.destination, size * _count(tile.box)) for tile in plan.tiles)
        return self.known[key]

    def _type(self, mesh: int, value: str) -> ArrayType:
        return self.program.meshes[mesh].values[value]

    def _layout(self, mesh: int, kind: ArrayType) -> DeviceLayout:
        there = self.program.meshes[mesh]
        return DeviceLayout(devices=there.devices, mesh_shape=there.shape, axis_names=there.axis_names, spec=kind.spec)


def _count(box: Sequence[tuple[int, int]]) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def _nodes(spans: Sequence[_Span | _Wait], device: int) -> Iterator[Any]:
    """Yield what one device does: each node after those that it waits for."""
    before: list[int] = []
    makers: dict[str, list[int]] = {}
    number = 0
    for span in spans:
        ids: list[int] = []
        needed = sorted({maker for value in span.reads for maker in makers.get(value, ())})
        if isinstance(span, _Wait):
            before = sorted({*before, *needed})
            continue
        for kind, attributes in _parts(span, device):
            number += 1
            ids.append(number)
            yield _node(span, number, kind, attributes, before, needed)
        if ids and span.waits:
            before = ids
        makers.update(dict.fromkeys(span.writes, ids or before))


def _parts(span: _Span, device: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the nodes of a span on one device, by kind and attributes."""
    match span:
        case _Work(kind=kind, num_ops=num_ops, nbytes=nbytes):
            yield kind, {"is_cpu_op": False, "num_ops": num_ops, "tensor_size": nbytes}
        case _Exchange(collective=collective, tag=tag):
            size = {"is_cpu_op": False, "comm_size": round(collective.nbytes)}
            if collective.kind in _COLLECTIVES:
                kind = _COLLECTIVES[collective.kind]
                yield "collective", size | {"comm_type": kind, "pg_name": str(span.groups[device])}
            if device in span.sends:
                yield "send", size | {"comm_src": device, "comm_dst": span.sends[device], "comm_tag": tag}
            if device in span.receives:
                yield "recv", size | {"comm_src": span.receives[device], "comm_dst": device, "comm_tag": tag}
        case _Messages(kind=kind, messages=messages, tag=first):
            for tag, (source, destination, nbytes) in enumerate(messages, first):
                if device == (source if kind == "send" else destination):
                    yield kind, {"is_cpu_op": False, "comm_size": nbytes, "comm_src": source, "comm_dst": destination,
                                 "comm_tag": tag}  # fmt: skip
        case _:
            raise AssertionError(span)


def _node(
    span: _Span, number: int, kind: str, attributes: Mapping[str, Any], before: Sequence[int], needed: Sequence[int]
) -> Any:
    start, stop = round(1e6 * span.start_s), round(1e6 * span.stop_s)
    values = {**attributes, "duration_s": span.stop_s - span.start_s}
    return _MESSAGES["Node"](
        id=number,
        name=span.name,
        type=_NODE_TYPES[kind],
        ctrl_deps=before,
        data_deps=needed,
        start_time_micros=start,
        duration_micros=stop - start,
        attr=[_MESSAGES["AttributeProto"](**{"name": name, _ATTRIBUTES[name]: v}) for name, v in values.items()],
    )


def _write(file: BinaryIO, message: Any) -> None:
    data: bytes = message.SerializeToString()
    left, prefix = len(data), bytearray()
    while left > 127:
        prefix.append(left & 127 | 128)
        left >>= 7
    file.write(bytes([*prefix, left]) + data)


def read_chakra(path: Path) -> list[Any]:
    """Return the nodes of a trace that `write_chakra` wrote, as protobuf messages."""
    data, place, found = path.read_bytes(), 0, list[Any]()
    while place < len(data):
        size = shift = 0
        while True:
            byte = data[place]
            place, size, shift = place + 1, size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        kind = "Node" if found else "GlobalMetadata"
        found.append(_MESSAGES[kind].FromString(data[place : place + size]))
        place += size
    return found[1:]


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="autopar_chakra.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for label, number, kind, repeats in fields:
            each = message.field.add(name=label, number=number, label=3 if repeats else 1)
            each.type = _TYPES.get(kind, 11)  # type: ignore[assignment]
            if kind not in _TYPES:
                each.type_name = f".ChakraProtoMsg.{kind}"
            elif message.name == "AttributeProto" and label != "name":
                each.oneof_index = 0
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}") for name in _FIELDS]
    return dict(zip(_FIELDS, map(message_factory.GetMessageClass, found), strict=True))


_MESSAGES = _messages()
