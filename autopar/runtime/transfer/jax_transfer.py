"""An endpoint by JAX's transfer server: a process offers arrays under a tag, another one pulls them over sockets.

It works between CPU processes, in one JAX world or in several, in any order of tags. Measured on jaxlib 0.10:

    an offered array that is donated before it was pulled arrives as an error, so that it must be copied first;
    an array of no elements ends the connection, so that it must not be offered;
    64 MB take 75 to 120 ms between two processes of a busy host of two cores, with one, two or four sockets alike; a
    server listens on two, for hosts with more cores.

`jax.experimental.transfer` is the one module for which JAX promises nothing from release to release.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from autopar.errors import InvalidArgument
from autopar.runtime.interfaces import Device, Parcel, Post, Pull

SOCKETS = 2


class TransferServer:
    """The endpoint of this process; `host` is where the other processes reach it."""

    def __init__(self, devices: Mapping[int, Device], *, host: str = "127.0.0.1") -> None:
        client = next(iter(devices.values())).client
        self._server: Any = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"] * SOCKETS)
        self._devices = devices
        self._addresses: dict[int, str] = {}
        self._connections: dict[int, Any] = {}

    def address(self) -> str:
        """Host and port."""
        return self._server.address()

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Take the addresses of all processes; a connection is opened when the first puller needs it."""
        self._addresses.update(addresses)

    def poster(self, process: int, parcels: Sequence[Parcel]) -> Post:
        """Offer the arrays; they are kept until pulled."""
        # By way of us: the server listens until nobody refers to it.
        return lambda tag, arrays: self._server.await_pull(tag, arrays)

    def puller(self, process: int, parcels: Sequence[Parcel]) -> Pull:
        """Ask for the arrays; they arrive asynchronously."""
        connection = self._connection(process)
        wanted = [
            jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=SingleDeviceSharding(self._devices[p.destination]))
            for p in parcels
        ]

        def pull(tag: int) -> Sequence[jax.Array]:
            return connection.pull(tag, wanted)

        return pull

    def open(self) -> None:
        """Nothing: who pulls has connected."""

    def close(self) -> None:
        """Drop the connections and the server."""
        self._connections.clear()
        self._server = None

    def _connection(self, process: int) -> Any:
        if process not in self._addresses:
            raise InvalidArgument(
                f"The address of process {process} is not known; known are those of {sorted(self._addresses)}. "
                "Connect the endpoint to the addresses of all processes before programs are loaded."
            )
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        return self._connections[process]
