"""Keep where a traced step comes from, and where it is to run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.arguments import Arguments, Call
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.planning.by_hand.follow import Followed
from autopar.errors import Unsupported
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.methods import Method
from autopar.session import current_session

Devices = Sequence[Any]


def check_not_traced(name: str) -> None:
    """Raise `Unsupported` inside of `jit`, `grad`, `vmap`, `scan` or another transformation."""
    if jc.is_tracing():
        raise Unsupported(
            f"The parallelized step {name} is called inside of a transformation of JAX (jit, grad, vmap, scan, "
            "eval_shape, or another parallelize). Its plan places arrays on devices, so it must be called with arrays, "
            f"outside of all: parallelize the outermost function, and call the plain step inside, {name}.__wrapped__."
        )


@dataclass(frozen=True, kw_only=True)
class Target:
    """Method and place of a step. `devices` of None: all of `jax.devices()`, asked for when needed.

    The session is the one in which the step was traced; None: this process.
    """

    method: Method | Plan | Followed
    devices: Devices | None
    cluster: Cluster | None
    session: Any = None
    check_finite: bool = False

    @property
    def names_devices(self) -> bool:
        """Return whether the user named the devices or the cluster, which then stand in every session."""
        return self.devices is not None or self.cluster is not None

    def in_current_session(self) -> Target:
        """Return the target of a step that is traced now."""
        return replace(self, session=None if self.names_devices else current_session())

    def planned_for(self) -> Cluster | None:
        """Return the cluster that plans are for; None: devices of this process."""
        return self.session.cluster if self.session is not None else self.cluster

    def is_one_process(self) -> bool:
        """Return True if one process holds all devices that plans are for."""
        return self.session is None and (self.cluster is None or self.cluster.num_hosts == 1)

    def num_devices(self) -> int:
        """Return the number of devices that plans are for."""
        cluster = self.planned_for()
        return len(self.live_devices()) if cluster is None else cluster.num_devices

    def devices_planned_for(self) -> Cluster:
        """Return the devices that plans are for, as a cluster."""
        cluster = self.planned_for()
        return Cluster.from_devices(self.live_devices()) if cluster is None else cluster

    def live_devices(self) -> Devices:
        """Return the devices of this process; asks JAX for them."""
        return jax.devices() if self.devices is None else self.devices


@dataclass(frozen=True, kw_only=True)
class Source:
    """The origin of such a value: the step, its arguments without their values, and the calls that it serves."""

    arguments: Arguments
    call: Call
    keys: frozenset[Hashable]
    target: Target
