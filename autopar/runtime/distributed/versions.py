"""The releases that the driver and all processes of a cluster must have in common, since each makes the programs."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from autopar.errors import PlanMismatch

PACKAGES = ("jax", "jaxlib", "numpy", "autopar")


def versions() -> dict[str, str]:
    """The releases that driver and processes must have in common."""
    return {"python": platform.python_version().rpartition(".")[0]} | {name: version(name) for name in PACKAGES}


def check_versions(driver: Mapping[str, str], processes: Sequence[Mapping[str, str]]) -> None:
    """Raise `PlanMismatch` unless every process has the driver's releases, naming the package and both."""
    for number, found in enumerate(processes):
        different = [name for name in driver if found.get(name) != driver[name]]
        if different:
            name = different[0]
            raise PlanMismatch(
                f"Process {number} has {name} {found.get(name)}, the driver {driver[name]}. Programs are made in every "
                "process, so all need the same releases: install the same packages on every host."
            )
