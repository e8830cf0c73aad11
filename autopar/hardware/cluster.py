"""The hardware as a value: how many devices there are, and on which machines.

    Cluster.parse("8x p3.16xlarge")  ->  64 devices, 8 to a host  ->  .machine: what work takes there

A cluster is devices of one machine: a planner of mixed hardware takes several clusters.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.checks import check_count, is_text, is_whole
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Machine
from autopar.json_fields import fields_of, json_of, text_of


@dataclass(frozen=True, kw_only=True, init=False)
class Cluster:
    """`num_devices` equal devices of one machine; `kind` as JAX names it, for example "NVIDIA H200".

    The machine is the one given, or else the library's for that kind, looked up when it is first needed.
    Raises `InvalidArgument` if there is no device, or neither a kind nor a machine.

    >>> cluster = Cluster.parse("8x p3.16xlarge")
    >>> cluster.num_devices, cluster.num_hosts, cluster.kind
    (64, 8, 'v100')
    """

    num_devices: int
    kind: str
    _machine: Machine | None = field(default=None, repr=False)

    def __init__(self, *, num_devices: int, kind: str | None = None, machine: Machine | None = None) -> None:
        """Raise `InvalidArgument` if there is no device, or nothing says which."""
        if kind is not None and not is_text(kind):
            raise InvalidArgument(f"The kind of the devices is {kind!r}. Give a string, as JAX names them.")
        if not is_whole(num_devices) or num_devices < 1:
            raise InvalidArgument(f"The cluster has {num_devices} devices, it needs at least 1. Pass jax.devices().")
        if kind is None and machine is None:
            raise InvalidArgument(
                f"The cluster of {num_devices} devices has neither a kind nor a machine. Give one of them, or write "
                'autopar.Cluster.parse("8x p3.16xlarge").'
            )
        object.__setattr__(self, "num_devices", num_devices)
        object.__setattr__(self, "kind", machine.kind if kind is None and machine is not None else kind)
        object.__setattr__(self, "_machine", machine)

    @functools.cached_property
    def machine(self) -> Machine:
        """The hosts that the devices are in; `InvalidArgument` if none was given and the library has none."""
        return Machine.of_kind(self.kind) if self._machine is None else self._machine

    @property
    def num_hosts(self) -> int:
        """Hosts that so many devices fill, the last one perhaps in part."""
        return -(-self.num_devices // self.machine.devices_per_host)

    @staticmethod
    def parse(text: str) -> Cluster:
        """The cluster of "8x p3.16xlarge", "p3.16xlarge" (one host), or "4x my-machine.json" (a file).

        Raises `InvalidArgument` for no hosts, and for a machine that the library does not have, naming those alike.
        """
        if not is_text(text):
            raise InvalidArgument(f'The cluster is {text!r}. Give a string such as "8x p3.16xlarge".')
        match = re.fullmatch(r"\s*(?:(\d+)\s*[x×]\s+)?(\S+)\s*", text)
        if match is None:
            raise InvalidArgument(
                f'The cluster is {text!r}. Write how many hosts of which machine: "8x p3.16xlarge", "p3.16xlarge".'
            )
        hosts, name = int(match[1] or 1), match[2]
        if name.endswith(".json"):
            return Cluster.of_hosts(Cluster.load(name).machine, hosts)
        return Cluster.named(name, num_hosts=hosts)

    @staticmethod
    def named(name: str, *, num_hosts: int = 1) -> Cluster:
        """Whole hosts of a machine of the library; `InvalidArgument` if there are none, or no such machine."""
        return Cluster.of_hosts(Machine.named(name), num_hosts)

    @staticmethod
    def of_hosts(machine: Machine, num_hosts: int) -> Cluster:
        """Whole hosts of a machine; `InvalidArgument` if there are none."""
        check_count(f"The number of hosts {machine.name!r}", num_hosts)
        return Cluster(num_devices=num_hosts * machine.devices_per_host, machine=machine)

    @staticmethod
    def from_devices(devices: Sequence[Any]) -> Cluster:
        """The cluster of these JAX devices; `InvalidArgument` if there is none or they differ in kind."""
        kinds = sorted({str(device.device_kind) for device in devices})
        if len(kinds) > 1:
            raise InvalidArgument(f"The devices are of {len(kinds)} kinds, {kinds}. Pass devices of one kind only.")
        return Cluster(num_devices=len(devices), kind=kinds[0] if kinds else "")

    def with_devices(self, num_devices: int) -> Cluster:
        """As many devices of the same machine."""
        return Cluster(num_devices=num_devices, kind=self.kind, machine=self._machine)

    def to_json(self) -> str:
        """The cluster as JSON, the figures of its machine included."""
        data = {"num_devices": self.num_devices, "kind": self.kind, "machine": self.machine.to_data()}
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Cluster:
        """The cluster that `to_json` wrote, or one host of the machine that `Machine.to_json` wrote.

        `InvalidArgument` if it is neither, naming the field.
        """
        raw = json_of("The cluster", text)
        if isinstance(raw, dict) and "devices_per_host" in raw:
            return Cluster.of_hosts(Machine.from_data(raw), 1)
        fields = fields_of("The cluster", raw, ("num_devices", "kind", "machine"))
        check_count("num_devices of the cluster", fields["num_devices"])
        if not isinstance(fields["kind"], str):
            raise InvalidArgument(f"kind of the cluster is {fields['kind']!r}, it must be a string. Correct the file.")
        return Cluster(
            num_devices=fields["num_devices"], kind=fields["kind"], machine=Machine.from_data(fields["machine"])
        )

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON to `path`."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read what `save`, `Machine.save` or `autopar calibrate` wrote.

        Raises `InvalidArgument` as `from_json`, or if there is no such file.
        """
        return Cluster.from_json(text_of("The cluster", path))
