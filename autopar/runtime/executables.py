"""Make a jitted function of an executable: exactly the planned layouts in and out, compiled once.

This file takes `jaxpr_as_fun` from `jax.extend` itself, where all else goes through the compiler's gate: a
runtime imports nothing of the compiler, so that either can be replaced without the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.errors import InvalidArgument
from autopar.program import ArrayType, Executable, MeshProgram
from autopar.runtime.base import Device


def mesh_of(program: MeshProgram, devices: Sequence[Device]) -> Mesh:
    """The mesh's own devices among those of the cluster, with axes whose layouts the plan decides."""
    missing = [ordinal for ordinal in program.devices if ordinal not in range(len(devices))]
    if missing:
        raise InvalidArgument(
            f"The program uses device {missing[0]}, but there are {len(devices)}, from 0. "
            "Plan for this cluster, or give the runtime more devices."
        )
    grid = np.array([devices[ordinal] for ordinal in program.devices]).reshape(program.shape)
    return Mesh(grid, program.axis_names, axis_types=(AxisType.Auto,) * len(program.axis_names))


def jitted(executable: Executable, mesh: Mesh) -> Callable[..., list[jax.Array]]:
    """Arrays of the input types to arrays of the output types; jit compiles it at the first call."""
    fun = jaxpr_as_fun(executable.jaxpr)

    def call(*arrays: jax.Array) -> list[Any]:
        return fun(*arrays)

    call.__name__ = call.__qualname__ = executable.name  # what profiles and dumps of XLA show
    return jax.jit(
        call,
        in_shardings=_shardings(executable.inputs, mesh),
        out_shardings=list(_shardings(executable.outputs, mesh)),
        donate_argnums=executable.donated,
        keep_unused=True,  # so that the planned positions are the compiled ones
    )


def _shardings(types: Sequence[ArrayType], mesh: Mesh) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, kind.spec) for kind in types)
