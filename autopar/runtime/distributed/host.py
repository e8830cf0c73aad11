"""One process of the cluster: it joins the world, loads programs, runs its part of every step, and keeps values.

A plain object, so that it can be driven without Ray. It starts nothing before `join`: the platform and the number of
devices are set there, before JAX looks at its machine. What its methods wait for:

    join, load     the other processes, which do the same
    step           the work of the step before; its own is under way when it returns
    wait, fetch    that the values are computed
    stay           for ever
"""

from __future__ import annotations

import gc
import math
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import InvalidArgument, PlanMismatch, StepFailed, StepTimeout
from autopar.hardware.cluster import DeviceKind
from autopar.ir.program import Free, Program, Run
from autopar.runtime.distributed.coordinator import free_port
from autopar.runtime.distributed.host_inputs import Values
from autopar.runtime.distributed.host_program import HostProgram
from autopar.runtime.distributed.messages import (
    HostReport,
    ShardRequest,
    StepMessage,
    StepReport,
    WorldSpec,
    installed_versions,
    unpacked,
)
from autopar.runtime.distributed.world import World
from autopar.runtime.timeline import InstructionTime, instruction_name
from autopar.runtime.transfer.choice import chosen_endpoint
from autopar.runtime.transfer.exchange import Exchange
from autopar.runtime.transfer.jax_transfer import TransferServer
from autopar.runtime.transfer.nccl import Nccl
from autopar.runtime.unfinished import UnfinishedTask, wait_until_ready, words_of

# A process that hears nothing of the others for so long gives up; the driver is faster, if it lives.
HEARTBEAT_TIMEOUT_S = 60
END_S = 10.0
"""A process that was killed is gone before; one that the system does not let end keeps nobody waiting longer."""


class Host:
    """A process of the cluster, driven by messages."""

    def __init__(self) -> None:
        self.programs: dict[int, HostProgram] = {}
        """The programs by the driver's numbers, in the order in which they were loaded."""
        self._values: dict[int, Values] = {}
        self._previous: tuple[int, list[Any]] = (0, [])
        self._failed: StepFailed | None = None
        self.dispatch_s: deque[float] = deque(maxlen=100)
        """The seconds that each of the last steps took to start all of its work."""
        self._running: HostProgram | None = None
        self._world: World | None = None
        self._endpoint: TransferServer | Nccl | None = None

    @property
    def world(self) -> World:
        """The world that `join` and `connect` made."""
        if self._world is None:
            raise InvalidArgument("The process has not joined a world yet. Call join and connect first.")
        return self._world

    def join(self, spec: WorldSpec) -> HostReport:
        """Set up JAX as the driver has it, meet the others, and open the channel."""
        _quiet_standard_output()
        _wait_for_end(spec.after)
        os.environ.update(spec.environment)
        sys.path.extend(path for path in spec.search_path if path not in sys.path)
        _set(spec.jax_settings)
        if spec.num_processes > 1:
            if os.environ.get("JAX_PLATFORMS") == "cpu":
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                spec.coordinator,
                spec.num_processes,
                spec.process,
                heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
                initialization_timeout=math.ceil(spec.start_timeout_s),
                # Of the one in process 0, which is not used: JAX listens on all addresses otherwise.
                coordinator_bind_address=f"127.0.0.1:{free_port('127.0.0.1')}",
            )
        return self.enter(spec.process, spec.num_devices, spec.nodes)

    def enter(self, process: int, num_devices: int, nodes: Sequence[str]) -> HostReport:
        """Open the channel, in a world that has met; `nodes` are the addresses at which all processes are reached."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        local = [device for device in devices if device.process_index == process]
        if len(local) != num_devices:
            raise InvalidArgument(
                f"Process {process} has {len(local)} {local[0].platform} devices, the cluster was to have "
                f"{num_devices} per host. Give devices_per_host={len(local)}, or free the devices."
            )
        process_of = tuple(device.process_index for device in devices)
        here = {n: device for n, device in enumerate(devices) if device.process_index == process}
        self._endpoint = chosen_endpoint(process, process_of, here, host=nodes[process])
        self._world = World(
            process=process,
            devices=devices,
            process_of=process_of,
            node_of=nodes,
            exchange=Exchange(
                process=process,
                process_of=process_of,
                devices=here,
                endpoint=self._endpoint,
            ),
        )
        return HostReport(
            versions=installed_versions(),
            node=platform.node(),
            pid=os.getpid(),
            device_kind=min(map(DeviceKind.of, local), key=lambda kind: kind.memory_bytes or 0.0),
            platform=local[0].platform,
            num_devices=len(local),
            process_of=process_of,
            address=self._endpoint.address(),
            endpoint=type(self._endpoint).__name__,
        )

    def leave(self) -> None:
        """Close the channel, and forget all programs and values."""
        self.programs.clear()
        self._values.clear()
        self._running = None
        if self._endpoint is not None:
            self._endpoint.close()
        gc.collect()  # JAX's server listens until nothing refers to it; programs refer to it, and to themselves

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Reach the channels of all other processes."""
        assert self._endpoint is not None
        self._endpoint.connect({p: address for p, address in addresses.items() if p != self.world.process})

    def load(
        self, number: int, make_program: Callable[[], Program], fingerprint: str, settings: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Make the program anew from what the driver sent, compile its part, and return the meshes that are here.

        Raises `PlanMismatch` unless it is the driver's program to the letter.
        """
        _set(settings)
        program = make_program()
        if program.fingerprint() != fingerprint:
            raise PlanMismatch(
                f"Process {self.world.process} made the program {program.fingerprint()} of {program.name}, the driver "
                f"{fingerprint}. Both must trace the same step: let it depend on its arguments alone, not on the "
                "process, the time, or the environment, and install the same code on every host."
            )
        return self.keep(number, program)

    def keep(self, number: int, program: Program) -> tuple[int, ...]:
        """Compile this process's part of a program, and return the meshes that are here."""
        self.programs[number] = HostProgram(program, self.world)
        return tuple(n for n, mesh in enumerate(program.meshes) if self.world.is_here(mesh.devices))

    def unload(self, number: int) -> None:
        """Forget a program."""
        self.programs.pop(number, None)

    def step(self, sent: StepMessage | bytes) -> StepReport:
        """Start this process's part of a step, when its work of the step before is done. Raises `StepFailed`."""
        message = unpacked(sent)
        for number in message.dropped:
            self._values.pop(number, None)
        try:
            self._finish_previous()
            return self._start(message)
        except StepFailed as error:
            self._failed = error  # whoever asks for the results is told, too
            raise
        except Exception as error:
            self._failed = self._failure(message.step, error)
            raise self._failed from error

    def settle(self, timeout_s: float) -> None:
        """Wait for this process's work of the last step. Raises `StepFailed`, and `StepTimeout` after so long."""
        self._finish_previous(timeout_s)

    def _finish_previous(self, timeout_s: float = math.inf) -> None:
        number, arrays = self._previous
        self._previous = number, []  # or what the driver dropped would be freed a step later
        try:
            wait_until_ready(arrays, timeout_s, self.unfinished, process=self.world.process)
        except StepTimeout:
            raise
        except Exception as error:
            raise self._failure(number, error) from error

    def _failure(self, step: int, error: Exception) -> StepFailed:
        return StepFailed(
            f"Step {step} failed in process {self.world.process}: {type(error).__name__}: {error}. It cannot be "
            "finished; correct what the message says, and start again from the last checkpoint."
        )

    def _start(self, message: StepMessage) -> StepReport:
        program, world = self.programs[message.program], self.world
        if message.new_routing is not None:
            program.expect(message.routing, message.new_routing)
        world.exchange.begin_step(message.step)
        arguments = [None if n is None else self.pieces(n) for n in message.arguments]
        for number in message.donated:
            del self._values[number]
        self._running = program
        clock: list[tuple[float, float]] | None = [] if message.timed else None
        start_s = time.perf_counter()
        results = program.run(message.routing, arguments, message.sent, clock)
        self.dispatch_s.append(time.perf_counter() - start_s)
        for number, pieces in zip(message.results, results, strict=True):
            if number is not None:
                self._values[number] = pieces
        self._previous = message.step, [array for pieces in results for array in pieces if array is not None]
        return StepReport(times=_times(world.process, program, clock or []))

    def put(self, number: int, pieces: Values) -> None:
        """Keep a value."""
        self._values[number] = pieces

    def pieces(self, number: int) -> Values:
        """A value that is kept here: one array per piece, None for a piece that lies elsewhere."""
        if number not in self._values and self._failed is not None:
            raise self._failed
        return self._values[number]

    def kept(self, number: int) -> Values:
        """A value as far as it is kept here; nothing of one that never came to be."""
        return self._values.get(number, [])

    def fetch(self, numbers: Sequence[int], requests: Sequence[Sequence[ShardRequest]]) -> list[list[Any]]:
        """The bytes of shards, per value: of random keys, their words."""
        return [[self._shard(n, request) for request in wanted] for n, wanted in zip(numbers, requests, strict=True)]

    def _shard(self, number: int, request: ShardRequest) -> np.ndarray[Any, Any]:
        device = self.world.devices[request.ordinal]
        array = self.pieces(number)[request.piece]
        shard = next(shard.data for shard in array.addressable_shards if shard.device == device)
        return np.asarray(words_of(shard))

    def wait(self, numbers: Sequence[int], timeout_s: float = math.inf) -> None:
        """Return when these values have been computed. Raises `StepTimeout` after so long."""
        arrays = [array for number in numbers for array in self.pieces(number)]
        wait_until_ready(arrays, timeout_s, self.unfinished, process=self.world.process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with this host: for checkpoints, state that is made here, and checks."""
        return function(self, *arguments)

    def ping(self) -> int:
        """Answer, to say that the process is alive; returns how many values it keeps."""
        return len(self._values)

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction of the last step that has not ended; None if all have."""
        return None if self._running is None else self._running.progress.unfinished()

    def stay(self) -> None:
        """Never return: that this call ends tells that the process has died."""
        threading.Event().wait()


def _times(process: int, program: HostProgram, clock: Sequence[tuple[float, float]]) -> tuple[InstructionTime, ...]:
    return tuple(
        InstructionTime(
            process=process,
            mesh=mesh,
            name=instruction_name(instruction),
            start_s=start,
            stop_s=stop,
            is_task=isinstance(instruction, Run),
        )
        for (mesh, instruction, _), (start, stop) in zip(program.instructions, clock)
        if not isinstance(instruction, Free)
    )


def _set(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)


def _wait_for_end(pids: Sequence[int]) -> None:
    """Return when none of these processes is there any more, or after `END_S`."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):
        time.sleep(0.02)


def _quiet_standard_output() -> None:
    """Let only Python print: Gloo writes a line per connection to the standard output of its process."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
