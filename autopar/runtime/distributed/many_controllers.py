"""Every process drives itself: the same script runs in all processes of one JAX world, and each carries out its part.

    one driver (Ray)      a message per process and step
    many controllers      every process makes every message, and takes its own

What is decided once is decided by process 0: a plan is made there and sent to the others, after all have been seen to
trace the same step. What each makes for itself, programs above all, is compared by its digest; where it differs, all
raise `PlanMismatch`, which shows the first difference. So all processes must make the same calls in the same order, as
JAX itself asks of them; reading a value that does not lie in every process is such a call. What one of them raises
while it plans, loads, reads or saves, all raise.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import socket
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from autopar.errors import AutoparError, CheckpointFailed, InvalidArgument, PlanMismatch, StepFailed, StepTimeout
from autopar.hardware.cluster import Cluster
from autopar.ir.program import Program
from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.host import Host
from autopar.runtime.distributed.messages import ShardRequest, StepMessage, StepReport, installed_versions
from autopar.runtime.distributed.pieces import Piece, Placed
from autopar.runtime.distributed.replies import sentence
from autopar.runtime.distributed.session import (
    Numbering,
    assemble,
    calling,
    cover,
    described_cluster,
    jax_settings,
)
from autopar.runtime.transfer.choice import check_endpoints
from autopar.runtime.transfer.tiles import Box, DeviceLayout
from autopar.runtime.unfinished import UnfinishedTask


def meet(num_hosts: int | None, devices_per_host: int | None) -> None:
    """Join JAX's world if that has not been done. Raises `InvalidArgument` for one of another size, or none."""
    if not jax.distributed.is_initialized():
        try:
            jax.distributed.initialize()
        except Exception as error:  # JAX has several for this
            raise InvalidArgument(
                f"This process has not joined a JAX world, and cannot tell which; JAX says: {error}. Call "
                "jax.distributed.initialize(coordinator_address, num_processes, process_id) before autopar.init, or "
                "start the script by Slurm, mpirun or on Cloud TPUs, where JAX finds the others itself."
            ) from error
    for name, wanted, found in (
        ("num_hosts", num_hosts, jax.process_count()),
        ("devices_per_host", devices_per_host, jax.local_device_count()),
    ):
        if wanted is not None and wanted != found:
            raise InvalidArgument(
                f"{name} is {wanted}, the JAX world has {found}. Start as many processes and devices as that, or "
                "leave it out."
            )


class JaxSession(Numbering):
    """This process's side of a world whose processes all make the same calls."""

    has_driver = False

    def __init__(self, *, step_timeout_s: float, described_by: Cluster | None = None) -> None:
        super().__init__()
        self.step_timeout_s = step_timeout_s
        self.host = Host()
        self.process = jax.process_index()
        self._report = StepReport()
        self.failure: AutoparError | None = None
        counts = {int(n) for n in multihost_utils.process_allgather(np.int32(jax.local_device_count())).flat}
        if len(counts) > 1:
            raise InvalidArgument(f"The processes have {sorted(counts)} devices; all must have as many.")
        settings = [f"{name} {value}" for name, value in (installed_versions() | jax_settings()).items()]
        self.agree("the releases and settings of JAX", "\n".join([*settings, *_flags()]))
        names = self._gather((socket.gethostname(), _address()))
        alone = len({name for name, _ in names}) == 1
        nodes = tuple("127.0.0.1" if alone else address for _, address in names)
        report = self.host.enter(self.process, jax.local_device_count(), nodes)
        check_endpoints(self._gather(report.endpoint))
        self.host.connect(dict(enumerate(self._gather(report.address))))
        self.process_of = report.process_of
        self.described_by = described_by
        kinds = self._gather(report.device_kind)
        self.cluster = described_cluster([kinds[process] for process in report.process_of], described_by)

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return jax.process_count()

    def close(self) -> None:
        """Stop serving; the world is the caller's to leave."""
        self.failure = InvalidArgument("autopar.shutdown() was called, and the values of its steps are gone.")
        self.host.leave()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _gather(self, value: Any) -> list[Any]:
        """Return the value of every process. All call it."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = multihost_utils.process_allgather(np.int32(data.size)).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: data.size] = data
        rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def agree(self, what: str, text: str) -> None:
        """Raise `PlanMismatch` in all processes, with the first line that differs, unless all have the same text."""
        text = re.sub(r"0x[0-9a-f]+", "0x", text)  # addresses of callbacks differ
        digests = self._gather(hashlib.sha256(text.encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        first = zlib.decompress(self.of_first(zlib.compress(text.encode()))).decode()
        differences = self._gather(_difference(first, text))
        process = next(n for n, digest in enumerate(digests) if digest != digests[0])
        raise PlanMismatch(
            f"Process {process} has not {what} of process 0: {differences[process]}. Every process must run the same "
            "code on the same releases and settings, and depend on its arguments alone, not on the process, the time, "
            "or the environment."
        )

    def of_first(self, value: Any) -> Any:
        """Return the value that process 0 has."""
        return self._gather(value if self.process == 0 else None)[0]

    def agree_on_plan(self, step: str, traced: Callable[[], str], make: Callable[[], str]) -> str:
        """Return the plan that process 0 makes; raise in all processes what it raises."""
        self._check()
        self.agree(f"the step {step}", traced())
        [plan] = self._together(f"planning {step}", [0], make)
        return plan

    def load(self, program: Program, make_program: Callable[[], Program]) -> int:
        """Load this process's part of a program that all have made; its number."""
        self._check()
        self._unload_dropped()
        number = next(self._programs)
        self.agree(f"the program {program.name}", f"{program}\n{program.fingerprint()}")
        everyone = range(self.num_processes)
        self._together(f"loading {program.name}", everyone, lambda: self.host.keep(number, program))
        return number

    def unload(self, number: int) -> None:
        """Forget a program."""
        self.host.unload(number)

    def _unload_dropped(self) -> None:
        while self._dropped_programs:
            self.unload(self._dropped_programs.popleft())

    def make_room(self) -> None:
        """Nothing: a step waits for the one before."""
        self._check()

    def submit(self, messages: Sequence[StepMessage]) -> None:
        """Start this process's part of a step. Raises `StepFailed`."""
        self._check()
        self._unload_dropped()
        try:
            self._report = self.host.step(messages[self.process])
        except StepFailed as error:
            self.failure = error
            raise

    def settle(self) -> list[Any]:
        """Wait for all processes; their reports of the last step."""
        return self._together("the last step", range(self.num_processes), lambda: self._report)

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction of this process that has not ended."""
        return self.host.unfinished()

    def adopt(self, array: jax.Array) -> DistributedArray:
        """Return an array over several processes as a value of the session; no byte moves."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):
            raise InvalidArgument(
                f"An argument of shape {array.shape} lies over several processes with {sharding}. Lay it out by a "
                "jax.sharding.NamedSharding, or give every process the whole as a NumPy array."
            )
        ordinals = {device: n for n, device in enumerate(self.host.world.devices)}
        mesh: Any = sharding.mesh
        layout = DeviceLayout(
            devices=tuple(ordinals[device] for device in mesh.devices.flat),
            mesh_shape=tuple(mesh.devices.shape),
            axis_names=tuple(mesh.axis_names),
            spec=sharding.spec,
        )
        shape = tuple(array.shape)
        placed = Placed(shape=shape, dtype=str(array.dtype), pieces=(Piece(layout=layout, shape=shape),))
        [number] = self.next_numbers(1)
        self.host.put(number, [array if array.addressable_shards else None])
        return DistributedArray(self, number, placed, self.number_of_layout(placed))

    def fetch(self, values: Sequence[DistributedArray]) -> list[np.ndarray[Any, Any]]:
        """Return the bytes of values. All processes call it, unless each holds all of them."""
        self._check()
        processes = range(self.num_processes)
        away = [n for n, value in enumerate(values) if not all(self._whole_in(value, p) for p in processes)]
        shards: list[list[tuple[Box, Any]]] = []

        def read() -> list[list[tuple[Box, Any]]]:
            for number, value in enumerate(values):
                whole, part = self._whole_in(value, self.process), cover(value.placed, self.process_of)
                shards.append(self._shards(value, part.get(self.process, []) if number in away else whole or []))
            return [shards[n] for n in away]

        if away:
            parts = self._together("fetching values", processes, read)
        else:
            self.wait(values)
            parts = [read()]
        for place, n in enumerate(away):
            shards[n] = [shard for part in parts for shard in part[place]]
        return [assemble(value, each) for value, each in zip(values, shards, strict=True)]

    def _whole_in(self, value: DistributedArray, process: int) -> list[tuple[ShardRequest, Box]] | None:
        """Return the shards of one process that make the whole; None if they do not."""
        boxes: dict[Box, ShardRequest | None] = {}
        for number, piece in enumerate(value.placed.pieces):
            for ordinal, box in piece.device_boxes().items():
                here = self.process_of[ordinal] == process
                boxes[box] = ShardRequest(piece=number, ordinal=ordinal) if here else boxes.get(box)
        found = [(request, box) for box, request in boxes.items() if request is not None]
        return found if len(found) == len(boxes) else None

    def _shards(self, value: DistributedArray, wanted: Sequence[tuple[ShardRequest, Box]]) -> list[tuple[Box, Any]]:
        if not wanted:
            return []
        [arrays] = self.host.fetch([value.identity], [[request for request, _ in wanted]])
        return [(box, array) for (_, box), array in zip(wanted, arrays, strict=True)]

    def wait(self, values: Sequence[DistributedArray]) -> None:
        """Return when the parts of values that are here have been computed. Raises `StepTimeout`."""
        self._check()
        self.host.wait([value.identity for value in values], self.step_timeout_s)

    def run_everywhere(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `function(host, *arguments)` in every process; the results of all. All call it."""
        return self.run_each(function, [arguments] * self.num_processes)

    def run_each(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """The same with arguments for each process."""
        return self._run(range(self.num_processes), function, arguments[self.process])

    def run_on(self, processes: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same in some processes; all call it."""
        return self._run(processes, function, arguments)

    def _run(self, processes: Sequence[int], function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        self._check()
        return self._together(calling(function), processes, lambda: function(self.host, *arguments))

    def _together(self, doing: str, processes: Sequence[int], work: Callable[[], Any]) -> list[Any]:
        """Return what `work` returned in some processes; all call this, and what one of them raises, all raise.

        What is no `AutoparError` becomes a `StepFailed`, which names the process.
        """
        result, error, cause = None, None, None
        try:
            self.host.settle(self.step_timeout_s)
            result = work() if self.process in processes else None
        except StepTimeout as caught:  # the others wait as long, and cannot be told while the devices are busy
            self.failure = caught
            raise
        except AutoparError as caught:
            error = caught
        except Exception as caught:
            cause = caught
            error = StepFailed(f"{sentence(doing)} failed in process {self.process}: {type(caught).__name__}: {caught}")
        outcomes = self._gather((result, error))
        first = next((raised for _, raised in outcomes if raised is not None), None)
        if first is not None:
            raise first from cause
        return [outcomes[process][0] for process in processes]

    def save_failed(self, process: int, error: str, lost: bool) -> Exception:
        """Return the error for a checkpoint that a process could not write."""
        return CheckpointFailed(f"process {process}: {error}")


def _flags() -> list[str]:
    """Return the options of the compiler that decide what it makes; where it writes its dumps does not."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return [f"XLA_FLAGS {flag}" for flag in sorted(flags) if not flag.startswith("--xla_dump")]


def _difference(one: str, other: str) -> str:
    """Return the first line in which two texts differ."""
    for number, (a, b) in enumerate(zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing"), 1):
        if a != b and not a.startswith("Trace of"):  # its digest, which shows nothing
            return f"'{_cut(b)}' in place of '{_cut(a)}' (line {number})"
    return "nothing differs"


def _cut(line: str) -> str:
    text = line.strip()
    return text if len(text) <= 160 else f"{text[:157]}..."


def _address() -> str:
    """Return the address of this host's way out, at which other hosts reach it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation
            return str(probe.getsockname()[0])
        except OSError:  # no network
            return "127.0.0.1"
