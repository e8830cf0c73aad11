"""The actor: a `Host` whose methods Ray calls. Steps run in order on one thread; health is answered on others."""

from __future__ import annotations

import ray

from autopar.runtime.distributed.host import Host
from autopar.runtime.unfinished import UnfinishedTask


class HostActor(Host):
    """A process of the cluster as Ray runs it."""

    def node(self) -> str:
        """The IP address of the node that this process is on."""
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="health")
    def answer_ping(self) -> int:
        """As `Host.ping`, while a step runs."""
        return self.ping()

    @ray.method(concurrency_group="health")
    def first_unfinished(self) -> UnfinishedTask | None:
        """As `Host.unfinished`, while a step runs."""
        return self.unfinished()

    @ray.method(concurrency_group="health")
    def stay_alive(self) -> None:
        """As `Host.stay`, while steps run."""
        self.stay()

    def free_port(self) -> int:
        """A port at which nothing listens: where the processes of a world meet."""
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])
