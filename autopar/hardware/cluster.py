"""The hardware as a value: how many devices there are, on which machines, and what joins them.

    Cluster.parse("8x p3.16xlarge")                               64 devices of one machine
    Cluster.parse("2x p4d.24xlarge + 1x p3.16xlarge @ 25 Gbit/s") 24 devices of two, with links between the two groups

A group is devices of one machine, numbered on from those of the group before; a cluster of one group is that group. A
figure is asked of the devices that it is for: `machine_of` a mesh, which lies in one group, and `transfer_s` between
two meshes.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax

from autopar.checks import check_count, is_text, is_whole
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Link, Machine
from autopar.json_fields import fields_of, json_of, text_of
from autopar.plain_text import size_words


class DeviceKind(NamedTuple):
    """A device's kind, as JAX names it, and the bytes of its memory that JAX may take, as a process tells them."""

    name: str
    memory_bytes: float | None = None
    """Bytes of its memory that JAX may take; None if the device does not tell."""

    @staticmethod
    def of(device: Any) -> DeviceKind:
        """The kind of a JAX device; devices of other processes tell nothing of their memory."""
        is_here = getattr(device, "process_index", None) == jax.process_index()
        limit = (device.memory_stats() or {}).get("bytes_limit") if is_here else None
        return DeviceKind(str(device.device_kind), None if limit is None else float(limit))


@dataclass(frozen=True, kw_only=True, init=False)
class Cluster:
    """`num_devices` equal devices of one machine; `kind` as JAX names it, for example "NVIDIA H200".

    The machine is the one given, or else the library's for that kind, looked up when it is first needed;
    `memory_bytes`, if given, is what JAX may take of the memory of each device, and replaces the machine's.
    `Cluster.of_groups` makes a cluster of several such groups, whose `kind` names them all.
    Raises `InvalidArgument` if there is no device, or neither a kind nor a machine.

    >>> cluster = Cluster.parse("8x p3.16xlarge")
    >>> cluster.num_devices, cluster.num_hosts, cluster.kind
    (64, 8, 'v100')
    """

    num_devices: int
    kind: str
    _machine: Machine | None = field(default=None, repr=False)
    _memory_bytes: float | None = field(default=None, repr=False)
    _parts: tuple[Cluster, ...] = field(default=(), repr=False)
    _links: tuple[Link, ...] = field(default=(), repr=False)
    """The link between each pair of groups, in the order of `itertools.combinations`: one device's share."""

    def __init__(
        self,
        *,
        num_devices: int,
        kind: str | None = None,
        machine: Machine | None = None,
        memory_bytes: float | None = None,
    ) -> None:
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
        object.__setattr__(self, "_memory_bytes", memory_bytes)
        object.__setattr__(self, "_parts", ())
        object.__setattr__(self, "_links", ())

    @functools.cached_property
    def machine(self) -> Machine:
        """The hosts that the devices are in.

        Those of a kind that the library does not have get generic figures, with a `GenericFiguresWarning`. Raises
        `InvalidArgument` if the devices are of several machines.
        """
        if self.is_mixed:
            raise InvalidArgument(
                f"The cluster has devices of {len(self.groups)} machines, {self}. This needs devices of one: use "
                "Auto, PipelineParallel or Megatron, which give every stage devices of one machine, or one group of "
                "cluster.groups."
            )
        machine = Machine.of_kind(self.kind) if self._machine is None else self._machine
        return machine if self._memory_bytes is None else machine.within(self._memory_bytes)

    @property
    def jax_limit(self) -> str:
        """A warning in words that JAX may not take all memory of each device; "" where it may, or none tells."""
        machine = self._machine or Machine.find(self.kind)
        if self._memory_bytes is None or machine is None or self._memory_bytes >= machine.memory_bytes:
            return ""
        shares = f"{size_words(self._memory_bytes)} of {size_words(machine.memory_bytes)}"
        return f"JAX may take {shares}; of a GPU, XLA_PYTHON_CLIENT_MEM_FRACTION says how much"

    @property
    def num_hosts(self) -> int:
        """Hosts that so many devices fill, the last one of a group perhaps in part."""
        return sum(-(-group.num_devices // group.machine.devices_per_host) for group in self.groups)

    # --- groups -------------------------------------------------------------------------------------------------

    @staticmethod
    def of_groups(groups: Sequence[Cluster], links: Mapping[tuple[int, int], Link] | Link | None = None) -> Cluster:
        """Return the devices of several machines together, numbered group after group.

        `links` join the groups, each by the numbers of a pair `(0, 1)`, or one link all of them: one device's share of
        the network between them. Without, two groups are joined by the slower of their links between hosts. Raises
        `InvalidArgument` for no group, and for a pair that has no link.
        """
        parts = tuple(part for group in groups for part in group.groups)
        if not parts or (len(parts) > len(groups) and links is not None):
            raise InvalidArgument(
                f"A cluster was made of {len(groups)} groups with {len(parts)} machines. Give at least one group, and "
                "with links groups of one machine each."
            )
        if len(parts) == 1:
            return parts[0]
        pairs = list(combinations(range(len(parts)), 2))
        if isinstance(links, Link):
            links = dict.fromkeys(pairs, links)
        if links is None:
            links = {(a, b): _slower(parts[a].machine.inter, parts[b].machine.inter) for a, b in pairs}
        found = {(min(pair), max(pair)): link for pair, link in links.items()}
        if set(found) != set(pairs):
            raise InvalidArgument(
                f"{len(parts)} groups need a link for each of the pairs {pairs}; there are links for {sorted(found)}. "
                "Give those that are missing, or one link for all."
            )
        cluster = Cluster(num_devices=sum(part.num_devices for part in parts), kind=" + ".join(p.kind for p in parts))
        object.__setattr__(cluster, "_parts", parts)
        object.__setattr__(cluster, "_links", tuple(found[pair] for pair in pairs))
        return cluster

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """The devices of each machine by themselves."""
        return self._parts or (self,)

    @property
    def is_mixed(self) -> bool:
        """True if the devices are of several groups."""
        return len(self._parts) > 1

    @property
    def first_devices(self) -> tuple[int, ...]:
        """The number of the first device of every group."""
        return tuple(accumulate((group.num_devices for group in self.groups[:-1]), initial=0))

    def group_of(self, devices: Iterable[int]) -> int:
        """Return the number of the group that a mesh of these devices lies in.

        Raises `InvalidArgument` for devices of several groups: one program runs on devices of one kind.
        """
        if not self.is_mixed:
            return 0
        firsts = self.first_devices
        numbers = sorted({sum(device >= first for first in firsts) - 1 for device in devices})
        if len(numbers) > 1:
            kinds = ", ".join(f"{self.groups[n].machine.name} from device {firsts[n]} on" for n in numbers)
            raise InvalidArgument(
                f"A mesh has devices of {len(numbers)} groups: {kinds}. One program runs on devices of one kind: give "
                "every mesh devices of one group, with stages that divide each of them."
            )
        return numbers[0]

    def machine_of(self, devices: Iterable[int]) -> Machine:
        """Return the machine of a mesh of these devices while others idle; `InvalidArgument` as for `group_of`."""
        devices = tuple(devices)
        machine = self.groups[self.group_of(devices)].machine
        return machine.when_busy(max(self.devices_by_host(devices).values())) if machine.concurrent_devices else machine

    def link_between(self, one: int, other: int) -> Link:
        """Return the link between two groups, one device's share; of one group, that between its hosts."""
        if one == other:
            return self.groups[one].machine.inter
        pairs = list(combinations(range(len(self.groups)), 2))
        return self._links[pairs.index((min(one, other), max(one, other)))]

    def transfer_s(self, nbytes: float, source: Sequence[int], target: Sequence[int]) -> float:
        """Return the seconds of one message of every device of two meshes, over the slowest link that may join them.

        Within a group that is the link of a fast domain if both meshes lie in one.
        """
        return self.joining_link(source, target).transfer_s(nbytes)

    def joining_link(self, source: Sequence[int], target: Sequence[int]) -> Link:
        """Return the slowest link that may join the devices of two meshes."""
        if len({self.domain_of(device) for device in (*source, *target)}) == 1:
            return self.groups[self.group_of(source)].machine.intra
        return self.link_between(self.group_of(source), self.group_of(target))

    def domain_of(self, device: int) -> tuple[int, int]:
        """Return the group of a device, and the number of its fast domain there."""
        group = self.group_of([device])
        return group, (device - self.first_devices[group]) // self.groups[group].machine.domain

    def hosts_of(self, devices: Iterable[int]) -> dict[int, float]:
        """Return the hosts of a mesh of these devices, by number, each with its `Machine.dispatch_s`."""
        devices = tuple(devices)
        return dict.fromkeys(self.devices_by_host(devices), self.groups[self.group_of(devices)].machine.dispatch_s)

    def devices_by_host(self, devices: Iterable[int]) -> Counter[int]:
        """Return how many of the devices of a mesh each of its hosts has, by the number of the host."""
        devices = tuple(devices)
        group = self.group_of(devices)
        first, per_host = self.first_devices[group], self.groups[group].machine.devices_per_host
        before = sum(each.num_hosts for each in self.groups[:group])
        return Counter(before + (device - first) // per_host for device in devices)

    def __str__(self) -> str:
        return " + ".join(f"{group.num_devices} devices of {group.machine.name}" for group in self.groups)

    # --- from words, devices and files --------------------------------------------------------------------------

    @staticmethod
    def parse(text: str) -> Cluster:
        """The cluster of "8x p3.16xlarge", "p3.16xlarge" (one host), or "4x my-machine.json" (a file).

        Several are joined by "+"; behind "@" stands the network between them, per host: "2x p4d.24xlarge +
        1x p3.16xlarge @ 25 Gbit/s". Without it that is the slower network card of the two.

        Raises `InvalidArgument` for no hosts, and for a machine that the library does not have, naming those alike.
        """
        if not is_text(text):
            raise InvalidArgument(f'The cluster is {text!r}. Give a string such as "8x p3.16xlarge".')
        words, at, network = text.partition("@")
        groups = [_parse_group(part, text) for part in words.split("+")]
        if not at:
            return Cluster.of_groups(groups)
        rate = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*Gbit/s\s*", network)
        if rate is None or len(groups) == 1 or float(rate[1]) <= 0:
            raise InvalidArgument(
                f'The cluster is {text!r}. Behind "@" stands the network between several machines: '
                '"2x p4d.24xlarge + 1x p3.16xlarge @ 25 Gbit/s".'
            )
        return Cluster.of_groups(groups, _links_of_cards(groups, float(rate[1]) * 1e9 / 8))

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
        """The cluster of these JAX devices, a group for each kind; `InvalidArgument` as for `of_kinds`."""
        return Cluster.of_kinds([DeviceKind.of(device) for device in devices])

    @staticmethod
    def of_kinds(kinds: Sequence[DeviceKind]) -> Cluster:
        """The cluster of devices of these kinds, one after another, each kind with the least memory that one tells.

        Raises `InvalidArgument` if there is none, or if those of one kind do not stand together.
        """
        runs = [(name, list(run)) for name, run in groupby(kinds, key=lambda kind: kind.name)]
        if len(runs) > len(dict(runs)):
            raise InvalidArgument(
                f"The devices are of the kinds {[kind.name for kind in kinds]}, by turns. Put those of each kind "
                "together: pass devices=sorted(jax.devices(), key=lambda device: device.device_kind), or on a cluster "
                "start hosts of one kind only."
            )
        groups: list[Cluster] = []
        for name, run in runs:
            told = [kind.memory_bytes for kind in run if kind.memory_bytes is not None]
            groups.append(Cluster(num_devices=len(run), kind=name, memory_bytes=min(told, default=None)))
        return Cluster.of_groups(groups) if groups else Cluster(num_devices=0, kind="")

    def with_devices(self, num_devices: int) -> Cluster:
        """Return so many devices of the same machine; `InvalidArgument` if there are several machines."""
        machine = self.machine if self.is_mixed else self._machine
        return Cluster(num_devices=num_devices, kind=self.kind, machine=machine, memory_bytes=self._memory_bytes)

    def to_data(self) -> dict[str, Any]:
        """The cluster as JSON values, the figures of its machines included."""
        if self.is_mixed:
            pairs = combinations(range(len(self.groups)), 2)
            links = [{"groups": list(pair), **link.to_data()} for pair, link in zip(pairs, self._links, strict=True)]
            return {"groups": [group.to_data() for group in self.groups], "links": links}
        return {"num_devices": self.num_devices, "kind": self.kind, "machine": self.machine.to_data()}

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Cluster:
        """The cluster that `to_json` wrote, or one host of the machine that `Machine.to_json` wrote.

        `InvalidArgument` if it is neither, naming the field.
        """
        return Cluster.from_data(json_of("The cluster", text))

    @staticmethod
    def from_data(raw: Any) -> Cluster:
        """The cluster of JSON values; `InvalidArgument` as for `from_json`."""
        if isinstance(raw, dict) and "devices_per_host" in raw:
            return Cluster.of_hosts(Machine.from_data(raw), 1)
        if isinstance(raw, dict) and "groups" in raw:
            return _mixed_from_data(raw)
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


def _parse_group(words: str, text: str) -> Cluster:
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x×]\s+)?(\S+)\s*", words)
    if match is None:
        raise InvalidArgument(
            f'The cluster is {text!r}. Write how many hosts of which machine: "8x p3.16xlarge", "p3.16xlarge".'
        )
    hosts, name = int(match[1] or 1), match[2]
    if name.endswith(".json"):
        return Cluster.of_hosts(Cluster.load(name).machine, hosts)
    return Cluster.named(name, num_hosts=hosts)


def _slower(one: Link, other: Link) -> Link:
    """Return the link of two whose large messages take longer, with the longer latency of both."""
    slower = min(one, other, key=lambda link: link.bandwidth)
    return replace(slower, latency_s=max(one.latency_s, other.latency_s))


def _links_of_cards(groups: Sequence[Cluster], bandwidth: float) -> dict[tuple[int, int], Link]:
    """Return the links over network cards of so many bytes/s per host, of which each device has its share."""
    links: dict[tuple[int, int], Link] = {}
    for a, b in combinations(range(len(groups)), 2):
        machines = groups[a].machine, groups[b].machine
        share = min(bandwidth / machine.devices_per_host for machine in machines)
        slower = _slower(machines[0].inter, machines[1].inter)
        links[a, b] = replace(slower, bandwidth=share, group_bandwidths=(), exchange_bandwidths=())
    return links


def _mixed_from_data(raw: Any) -> Cluster:
    fields = fields_of("The cluster", raw, ("groups", "links"))
    groups, links = fields["groups"], fields["links"]
    if not isinstance(groups, list) or not isinstance(links, list):
        raise InvalidArgument("groups and links of the cluster must be lists. Correct the file, or save it again.")
    joined: dict[tuple[int, int], Link] = {}
    for number, item in enumerate(cast(list[Any], links)):
        what = f"link {number} of the cluster"
        pair: Any = cast(dict[str, Any], item).get("groups") if isinstance(item, dict) else None
        if not (isinstance(pair, list) and len(pair) == 2 and all(is_whole(each) for each in pair)):
            raise InvalidArgument(
                f"groups of the {what} is {pair!r}, it must be the numbers of two groups. Correct it."
            )
        rest = {name: value for name, value in item.items() if name != "groups"}
        joined[pair[0], pair[1]] = Link.from_data(f"the {what}", rest)
    return Cluster.of_groups([Cluster.from_data(each) for each in groups], joined)
