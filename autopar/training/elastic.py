"""Decide on how many hosts of a Ray cluster training goes on, as hosts are lost, leave and join.

lost      those that are left, at most `most`; if they are fewer than `least`, their return is waited for
leaves    the others, between two steps; if they are fewer than `least`, training goes on until the host is gone
joins     one more, between two steps, up to `most`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.checks import is_whole
from autopar.errors import AutoparError, HostLost, InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.session import ray_session, restart

if TYPE_CHECKING:
    from autopar.aot import Traced
    from autopar.runtime.distributed.session import RaySession

LOOK_EVERY_S = 2.0
"""Seconds between two looks for new hosts."""
NOT_USED_S = 60.0
"""Hosts that could not be used, for there was no plan or others took their room, are tried again after so long."""

_log = logging.getLogger("autopar")


class HostsChange(Exception):
    """Training is to go on with other hosts, from the state that there is."""


@dataclass(kw_only=True)
class ElasticHosts:
    """The hosts of a run, `least` to `most`, with its plans, and the time to look for new hosts next."""

    least: int
    most: int
    _traced: Traced | None = None
    _plans: list[tuple[Cluster, Plan]] = field(default_factory=list)
    _look_at_s: float = 0.0
    _not_used: tuple[frozenset[str], float] = (frozenset(), 0.0)
    """The hosts that could not be used, and until when they are not tried."""

    def begin(self, session: RaySession, trace: Callable[[], Traced]) -> None:
        """Know the step. Raises `InvalidArgument` if there is no plan for the least number of hosts."""
        if self._traced is not None:
            return
        self._traced = trace()
        try:
            if self.least < session.num_processes:
                self._plan_for(session.cluster_of(self.least))
        except AutoparError as error:
            raise InvalidArgument(
                f"elastic=({self.least}, {self.most}): there is no plan for {self.least} hosts of "
                f"{session.hosts.devices_per_host} devices: {error} Give a larger least number of hosts."
            ) from error

    def keep(self, cluster: Cluster, plan: Plan) -> None:
        """Know a plan."""
        if all(known != cluster for known, _ in self._plans):
            self._plans.append((cluster, plan))

    def _plan_for(self, cluster: Cluster) -> Plan | None:
        """The plan for a cluster; None before the step is known. Raises what planning raises."""
        for known, plan in self._plans:
            if known == cluster:
                return plan
        if self._traced is None:
            return None
        self.keep(cluster, self._traced.on_cluster(cluster).plan().plan)
        return self._plans[-1][1]

    def look(self, session: RaySession) -> None:
        """Raise `HostsChange` if a host is about to leave, or there is another one that a plan can use."""
        if session.is_left and session.hosts.room() >= self.least:
            raise HostsChange("a host leaves")
        if session.num_processes < self.most and time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_EVERY_S
            known, until_s = self._not_used
            if known == session.hosts.there() and time.monotonic() < until_s:
                return
            beside = session.hosts.ready_beside()
            if not beside:
                return
            if (self._usable(session, session.num_processes + beside) or 0) > session.num_processes:
                raise HostsChange("a host has joined")
            self._leave_out(session)

    def _leave_out(self, session: RaySession) -> None:
        """Do not try the hosts that are there for a while, unless others come."""
        self._not_used = session.hosts.there(), time.monotonic() + NOT_USED_S

    def restart(self) -> Plan | None:
        """Start new processes in place of the session's, on as many hosts as there are and a plan can use: that plan.

        None before the step is known. Raises `HostLost` if too few hosts are there in time.
        """
        session = ray_session()
        deadline = time.monotonic() + session.hosts.options.start_timeout_s
        bound = self.most if session.failure is not None else session.num_processes + session.hosts.ready_beside()
        while True:
            session = ray_session()
            count = self._usable(session, min(session.hosts.room(), bound))
            if count is None:
                self._wait(session, deadline)
                bound = self.most
                continue
            try:
                # Those that came may be of another kind than was expected.
                return self._plan_for(restart(count).cluster)
            except AutoparError as error:  # Ray notices late that a node is gone, and room may go to others
                if time.monotonic() > deadline:
                    raise
                _log.warning("Training cannot go on with %d hosts: %s", count, error)
                bound = max(count - 1, self.least)
                self._leave_out(session)

    def _usable(self, session: RaySession, there: int) -> int | None:
        """The largest number of hosts, up to so many, that there is a plan for; None if there is none."""
        for count in range(min(there, self.most), self.least - 1, -1):
            try:
                self._plan_for(session.cluster_of(count))
            except AutoparError as error:
                _log.warning("There is no plan for %d hosts: %s", count, error)
            else:
                return count
        return None

    def _wait(self, session: RaySession, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise HostLost(
                f"The Ray cluster has room for {session.hosts.room()} hosts, and training needs {self.least} at least; "
                f"no more have come within {session.hosts.options.start_timeout_s:g} s. Add nodes to the cluster, and "
                "start again from the last checkpoint; or give a longer start_timeout_s to autopar.init."
            )
        time.sleep(1.0)


def elastic_hosts(elastic: Any, session: Any, names_devices: bool, checkpoint_dir: Any) -> ElasticHosts | None:
    """Return the hosts that `fit(elastic=)` may use; None without that option. Raises `InvalidArgument`."""
    if elastic is None:
        return None
    if (
        not isinstance(elastic, Sequence)
        or len(elastic) != 2
        or not all(is_whole(count) and count >= 1 for count in elastic)
        or elastic[0] > elastic[1]
    ):
        raise InvalidArgument(
            f"elastic is {elastic!r}; it must be the least and the largest number of hosts, such as elastic=(1, 4)."
        )
    least, most = elastic
    if session is None or not session.has_driver or names_devices:
        raise InvalidArgument(
            f"elastic={elastic!r} needs processes that a driver can start and end. Call "
            "autopar.init(cluster='ray') first, and parallelize the step without devices= and cluster=."
        )
    if checkpoint_dir is None:
        raise InvalidArgument(
            f"elastic={elastic!r} needs a checkpoint_dir: a part of the state may be lost with the only host that has "
            "it. Give one that all hosts share."
        )
    if not session.hosts.owns_group or (session.described_by is not None and session.described_by.is_mixed):
        raise InvalidArgument(
            f"elastic={elastic!r} needs a cluster whose hosts may change; autopar.init was given a placement group or "
            "the machines of a mixed cluster. Give neither: hosts and their kinds are asked of Ray."
        )
    if not least <= session.num_processes <= most:
        raise InvalidArgument(
            f"elastic={elastic!r}: the cluster has {session.num_processes} hosts now. Give a range that this number "
            "is in, or other num_hosts to autopar.init."
        )
    return ElasticHosts(least=least, most=most)
