"""An endpoint by NCCL, through CuPy: arrays go from GPU to GPU without passing through a host.

    device s -> device d     one communicator (rank 0 sends, rank 1 receives) and one stream at each end
    post                     our stream waits until JAX made the array, then sends its bytes
    pull                     our stream receives bytes, JAX's waits for that, and copies them into an array of its own

There is a communicator per *direction*, because a pair of processes sends and receives in any relation:

    process A:  send 1, receive 2             with one queue for both directions, "send 1" waits for "receive 1",
    process B:  send 2, receive 1             which is behind "send 2", which waits for "receive 2", behind "send 1"

Within one direction both ends have the messages in the same order (that of the Sends of two meshes) and the tiles of
a message in the order of the plan, so the k-th send meets the k-th receive; `sequence` says it as a value. The host
never waits, but to open communicators, which `open` does in one order of all pairs, so that it cannot wait in a circle.
Of two processes that open one, the sender draws the number that both must know, and the receiver fetches it from the
sender's `Rendezvous`.

Bytes are sent as bytes, whatever the dtype. JAX copies what arrived, because a buffer of CuPy must neither be donated
to an executable nor go back to CuPy's pool while JAX's stream may still read it; CuPy's is kept until the copy is made.

Not run on any GPU yet: all but `sequence`, `opening_order` and `taking`, which are tested without one. What to look
at first there: waiting kernels of NCCL hold a few multiprocessors each, beside the collectives of XLA; CUDA maps
streams to 8 hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS=32` gives more), and a stream that waits in a queue holds up
those behind it; and CuPy takes memory beside JAX's (`XLA_PYTHON_CLIENT_MEM_FRACTION`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.errors import HostLost, Unsupported
from autopar.runtime.executables import PACKED_DTYPES
from autopar.runtime.interfaces import Device, Parcel, Post, Pull
from autopar.runtime.transfer.endpoints import ProcessOf

WAIT_S = 60.0
"""Seconds that a process waits for the number of a communicator."""

Pair = tuple[int, int]  # source device, destination device


class Nccl:
    """The endpoint of this process; `host` is where the other processes reach it."""

    def __init__(
        self, process: int, process_of: ProcessOf, devices: Mapping[int, Device], *, host: str = "127.0.0.1"
    ) -> None:
        self._cupy = _cupy(devices)
        self._process = process
        self._process_of = process_of
        self._devices = devices
        self._rendezvous = Rendezvous(host)
        self._addresses: dict[int, str] = {}
        self._wanted: set[Pair] = set()
        self._lines: dict[Pair, _Line] = {}

    def address(self) -> str:
        """The address at which this process tells the numbers of communicators."""
        return self._rendezvous.address()

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Take the addresses of all processes."""
        self._addresses.update(addresses)

    def poster(self, process: int, parcels: Sequence[Parcel]) -> Post:
        """Send the arrays, in one group; the streams wait for them."""
        self._wanted.update((p.source, p.destination) for p in parcels)
        planned = sequence(parcels)

        def post(tag: int, arrays: Sequence[jax.Array]) -> None:
            lines = [self._lines[t.pair] for t in planned]
            ready = [self._read(line, array) for line, array in zip(lines, arrays, strict=True)]
            self._cupy.cuda.nccl.groupStart()
            for line, transmission, (pointer, _) in zip(lines, planned, ready, strict=True):
                self._send(line, pointer, transmission.num_bytes)
            self._cupy.cuda.nccl.groupEnd()
            for line, (_, capsule), array in zip(lines, ready, arrays, strict=True):
                with line.device, line.stream:
                    line.kept.append((line.stream.record(), capsule, array))

        return post

    def puller(self, process: int, parcels: Sequence[Parcel]) -> Pull:
        """Receive the bytes in one group, and let JAX make its arrays of them."""
        self._wanted.update((p.source, p.destination) for p in parcels)
        planned = sequence(parcels)
        # One compiled function per tile, which the loader makes once.
        takes = [taking(p, self._devices[p.destination]) for p in parcels]

        def pull(tag: int) -> Sequence[jax.Array]:
            lines = [self._lines[t.pair] for t in planned]
            buffers = [self._buffer(line, t.num_bytes) for line, t in zip(lines, planned, strict=True)]
            self._cupy.cuda.nccl.groupStart()
            for line, buffer in zip(lines, buffers, strict=True):
                self._receive(line, buffer)
            self._cupy.cuda.nccl.groupEnd()
            return [self._taken(*parts) for parts in zip(lines, buffers, takes, strict=True)]

        return pull

    def open(self) -> None:
        """Open the communicators of the posters and pullers made so far; every process comes here before it posts."""
        for pair in opening_order([*(self._wanted - self._lines.keys())], self._process, self._process_of):
            self._lines[pair] = self._opened(*pair)

    def close(self) -> None:
        """Abort what is under way: the other end may be gone."""
        self._rendezvous.close()
        for line in self._lines.values():
            line.communicator.abort()
        self._lines.clear()

    def _opened(self, source: int, destination: int) -> _Line:
        name, sends = f"{source}->{destination}", self._process_of[source] == self._process
        if sends:
            number = self._cupy.cuda.nccl.get_unique_id()
            # Bytes in newer releases of CuPy, signed characters in older ones.
            text = number if isinstance(number, bytes) else np.array(number, np.int8).tobytes()
            self._rendezvous.publish(name, text)
        else:
            text = fetch(self._addresses[self._process_of[source]], name)
        device = self._cupy.cuda.Device(self._devices[source if sends else destination].local_hardware_id)
        with device:
            communicator = self._communicator(text, 0 if sends else 1)
            stream = self._cupy.cuda.Stream(non_blocking=True)
        line = _Line(communicator=communicator, device=device, stream=stream, peer=1 if sends else 0)
        # NCCL connects two peers when they first exchange something, and waits for both then: here, not in a step.
        signal = self._buffer(line, 1)
        if sends:
            self._send(line, signal.data.ptr, 1)
        else:
            self._receive(line, signal)
        stream.synchronize()
        return line

    def _communicator(self, text: bytes, rank: int) -> Any:
        make = self._cupy.cuda.nccl.NcclCommunicator
        try:
            return make(2, text, rank)
        except TypeError:  # an older release
            return make(2, tuple(np.frombuffer(text, np.int8).tolist()), rank)

    def _read(self, line: _Line, array: jax.Array) -> tuple[int, Any]:
        """The address of the array's bytes, and what keeps them; the stream waits until they are computed."""
        while line.kept and line.kept[0][0].done:
            line.kept.popleft()
        exported: Any = array
        capsule = exported.__dlpack__(stream=line.stream.ptr)
        return array.unsafe_buffer_pointer(), capsule

    def _send(self, line: _Line, pointer: int, num_bytes: int) -> None:
        line.communicator.send(pointer, num_bytes, self._cupy.cuda.nccl.NCCL_UINT8, line.peer, line.stream.ptr)

    def _buffer(self, line: _Line, num_bytes: int) -> Any:
        while line.kept and line.kept[0][0].is_ready():
            line.kept.popleft()
        with line.device, line.stream:
            return self._cupy.empty(num_bytes, self._cupy.uint8)

    def _receive(self, line: _Line, buffer: Any) -> None:
        kind = self._cupy.cuda.nccl.NCCL_UINT8
        line.communicator.recv(buffer.data.ptr, buffer.nbytes, kind, line.peer, line.stream.ptr)

    def _taken(self, line: _Line, buffer: Any, take: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> jax.Array:
        with line.device, line.stream:
            raw = jax.dlpack.from_dlpack(buffer)  # JAX's stream waits for ours from here on
        array, copied = take(raw)
        line.kept.append((copied, raw, buffer))
        return array


@dataclass(kw_only=True)
class _Line:
    """An open pair at one of its ends: what is under way must not be freed."""

    communicator: Any
    device: Any
    stream: Any
    peer: int
    kept: deque[tuple[Any, ...]] = field(default_factory=deque[tuple[Any, ...]])


@dataclass(frozen=True, kw_only=True)
class Transmission:
    """One send and its receive: so many bytes, in the queue of the pair."""

    pair: Pair
    num_bytes: int


def sequence(parcels: Sequence[Parcel]) -> tuple[Transmission, ...]:
    """Return the sends that a message puts into the queues of its pairs, in order; the same at both ends."""
    packed = sorted({np.dtype(p.dtype).name for p in parcels} & PACKED_DTYPES)
    if packed:
        raise Unsupported(
            f"Values of {packed[0]} have less than a byte per element, and GPUs pack them; NCCL is given whole bytes. "
            "Convert them to int8 before they leave their stage."
        )
    return tuple(Transmission(pair=(p.source, p.destination), num_bytes=_num_bytes(p)) for p in parcels)


def opening_order(pairs: Sequence[Pair], process: int, process_of: ProcessOf) -> tuple[Pair, ...]:
    """The pairs that a process opens, sorted: the least pair that is not open yet is next at both of its ends."""
    return tuple(sorted(p for p in set(pairs) if process in (process_of[p[0]], process_of[p[1]])))


def from_bytes(raw: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The array of these bytes, in memory of its own; compiled by the caller."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return raw.reshape(shape) != 0
    if dtype.kind == "c":
        real, imaginary = jnp.moveaxis(from_bytes(raw, (*shape, 2), np.dtype(f"f{dtype.itemsize // 2}")), -1, 0)
        return jax.lax.complex(real, imaginary)
    if dtype.itemsize == 1:
        return jnp.copy(jax.lax.bitcast_convert_type(raw, dtype).reshape(shape))
    return jax.lax.bitcast_convert_type(raw.reshape(*shape, dtype.itemsize), dtype)


def taking(parcel: Parcel, device: Device) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return what makes bytes on the device the parcel's array, and a scalar that is ready when they have been copied.

    The array itself cannot tell: it may be donated before anybody asks.
    """

    def take(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
        return from_bytes(raw, parcel.shape, parcel.dtype), raw[0]

    # The bytes come uncommitted; the layout says that they stay where they are.
    return jax.jit(take, out_shardings=SingleDeviceSharding(device))


def _num_bytes(parcel: Parcel) -> int:
    return int(np.prod(parcel.shape, dtype=np.int64)) * np.dtype(parcel.dtype).itemsize


class Rendezvous:
    """Gives short texts of this process to others, by name: who asks before the text is there waits for it.

    `host` is where others reach it. Any process may ask; a text is no secret, and a question is nothing but the name.
    """

    def __init__(self, host: str = "127.0.0.1", *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._listener = Listener((host, 0), backlog=128)
        self._texts: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._accepting = _in_background(self._accept)

    def address(self) -> str:
        """Host and port."""
        host, port = self._listener.address
        return f"{host}:{port}"

    def publish(self, name: str, text: bytes) -> None:
        """Answer with the text whoever asks for the name, before or after."""
        with self._changed:
            self._texts[name] = text
            self._changed.notify_all()

    def close(self) -> None:
        """Answer no more."""
        self._closed = True
        # The accepting thread does not notice that its socket is closed, but that somebody comes.
        Client(self._listener.address).close()
        self._accepting.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                connection = self._listener.accept()
                if self._closed:
                    connection.close()
                    return
                _in_background(lambda asked=connection: self._answer(asked))

    def _answer(self, connection: Connection) -> None:
        with suppress(OSError, EOFError), connection:  # of who has gone, or came for something else
            name = connection.recv_bytes().decode()
            with self._changed:
                self._changed.wait_for(lambda: name in self._texts, timeout=self._wait_s)
                connection.send_bytes(self._texts.get(name, b""))


def fetch(address: str, name: str) -> bytes:
    """The text that the process at the address publishes under the name; waits for it."""
    host, _, port = address.rpartition(":")
    try:
        with Client((host, int(port))) as connection:
            connection.send_bytes(name.encode())
            text = connection.recv_bytes()
    except (OSError, EOFError) as error:
        raise HostLost(
            f"The process at {address} was asked for '{name}' and did not answer: {error!r}. "
            "See whether it is still there, and whether its host can be reached from here."
        ) from error
    if not text:
        raise HostLost(
            f"The process at {address} has not made '{name}' in time. "
            "All processes must load the same programs; look for an error in that one."
        )
    return text


def _in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def nccl_version(devices: Sequence[Device]) -> int:
    """The release of NCCL that CuPy has, as its own number; raises `Unsupported` for what is missing."""
    return int(_cupy(dict(enumerate(devices))).cuda.nccl.get_version())


def _cupy(devices: Mapping[int, Device]) -> Any:
    """CuPy with NCCL, or why it is not to be had."""
    platforms = sorted({device.platform for device in devices.values()})
    if platforms != ["gpu"]:
        raise Unsupported(
            f"NCCL moves arrays between NVIDIA GPUs; the devices here are {', '.join(platforms)}. Use JAX's transfer "
            "server for these."
        )
    try:
        import cupy  # pyright: ignore[reportMissingImports]
        from cupy.cuda import nccl  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unsupported(
            f"Moving arrays between processes by NCCL needs CuPy with NCCL, which cannot be imported: {error}. "
            "Install autopar[cuda12] or autopar[cuda13], by the major version of CUDA."
        ) from error
    if not nccl.available:
        raise Unsupported(
            f"CuPy {cupy.__version__} is installed without NCCL. Install the package nvidia-nccl-cu12 or "
            "nvidia-nccl-cu13, by the major version of CUDA."
        )
    return cupy
