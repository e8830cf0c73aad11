"""The actor: a `Host` whose methods Ray calls. Steps run in order on one thread; health is answered on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from autopar.runtime.distributed.host import Host
from autopar.runtime.unfinished import UnfinishedTask


class HostActor(Host):
    """A process of the cluster as Ray runs it."""

    def node(self) -> tuple[str, str]:
        """The IP address of the node that this process is on, and Ray's name for it."""
        return str(ray.util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="health")
    def answer_ping(self) -> int:
        """Answer as `Host.ping`, while a step runs."""
        return self.ping()

    @ray.method(concurrency_group="health")
    def first_unfinished(self) -> UnfinishedTask | None:
        """Answer as `Host.unfinished`, while a step runs."""
        return self.unfinished()

    @ray.method(concurrency_group="health")
    def run_beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run as `Host.run`, while a step runs, or waits for a process that is lost."""
        return self.run(function, *arguments)

    @ray.method(concurrency_group="health")
    def stay_alive(self) -> None:
        """Stay as `Host.stay`, while steps run."""
        self.stay()
