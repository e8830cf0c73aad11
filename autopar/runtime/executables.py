"""Compile the executables of a program: exactly the planned layouts in and out, all before the first step.

This file takes `jaxpr_as_fun` from `jax.extend` itself, where all else goes through the compiler's gate: a
runtime imports nothing of the compiler, so that either can be replaced without the other.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.api_util import InternalFloatingPointError  # what compiled functions raise has no public name
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from autopar.errors import InvalidArgument, Unsupported
from autopar.ir.program import ArrayType, Executable, MeshProgram
from autopar.runtime.interfaces import Device

_PINNED = "pinned_host"
PACKED_DTYPES = {"int2", "uint2", "int4", "uint4", "float4_e2m1fn"}
KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@contextmanager
def debugging() -> Generator[None]:
    """A context in which what `jax_debug_nans` and `jax_debug_infs` find is raised as by `jax.jit`."""
    try:
        yield
    except InternalFloatingPointError as error:
        raise FloatingPointError(
            f"invalid value ({error.ty}) encountered in {error.name}, an executable of the parallelized step. "
            "Parallelize with check_finite=True, without jax_debug_nans and jax_debug_infs, to be told the line, the "
            "stage and the microbatch."
        ) from None


def jax_dtype(name: str) -> Any:
    """The dtype that a program names: `float32`, or that of random keys, `key<fry>`."""
    if name not in KEY_IMPLEMENTATIONS:
        return jnp.dtype(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEY_IMPLEMENTATIONS[name])).dtype


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


def sharding_of(kind: ArrayType, mesh: Mesh) -> NamedSharding:
    """The layout of a value on live devices, and its memory.

    Raises `Unsupported` for a value on the host where the devices have no pinned memory there.
    """
    if kind.memory == "device":
        return NamedSharding(mesh, kind.spec)
    assert mesh.devices is not None
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _PINNED not in kinds:
        raise Unsupported(
            f"The plan keeps values in {_PINNED} memory, and {device.device_kind} devices have {', '.join(kinds)} "
            "here. Plan without offload, or run where JAX has that memory: on GPUs, TPUs, and CPU devices of JAX 0.10."
        )
    return NamedSharding(mesh, kind.spec, memory_kind=_PINNED)


def compile_all(
    executables: Sequence[Executable], meshes: Sequence[Mesh] | Mapping[int, Mesh], *, marked: bool = False
) -> Mapping[str, Callable[..., Any]]:
    """Compile every executable for its mesh, as many at a time as there are cores, and show how far it is.

    One with effects returns a number more than it has outputs, which is there when its effects are; all do if they are
    `marked`, so that one can ask whether they have ended without holding what they computed. A callback that
    raises has kept its error by then if the executable is guarded; where it is not, on one device, it fails the
    executable, and reading the number says so, whatever becomes of the outputs.

    Lowering reads JAX's thread-local configuration, so it stays on this thread; XLA compiles on the others.
    """
    lowered = [_lowered(e, meshes[e.mesh], marked) for e in executables]  # each compiles when it is called
    console = Console(stderr=True)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        compiling = [pool.submit(low) for low in lowered]
        shown = track(compiling, "compiling", console=console, transient=True, disable=not console.is_terminal)
        return {e.name: work.result() for e, work in zip(executables, shown, strict=True)}


def compile_at_first_call(
    executables: Sequence[Executable], meshes: Sequence[Mesh] | Mapping[int, Mesh], *, marked: bool = False
) -> Mapping[str, Callable[..., Any]]:
    """Return every executable as a function that compiles it when it is called first."""

    def later(executable: Executable) -> Callable[..., Any]:
        compiled = cache(lambda: _lowered(executable, meshes[executable.mesh], marked)())
        return lambda *arrays: compiled()(*arrays)

    return {e.name: later(e) for e in executables}


def without_mesh() -> AbstractContextManager[None]:
    """Return a context in which no mesh is set: that of the user's is of the step as written, not of what runs."""
    return nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None)


def has_effects(executable: Executable) -> bool:
    """Return True if the executable calls back to Python, prints, or has another effect that can fail."""
    return executable.guarded is not None or (executable.jaxpr is not None and bool(executable.jaxpr.effects))


@dataclass(frozen=True)
class _OfPackedValues:
    """An executable that takes values of less than a byte per element, called by `jax.jit`.

    What is compiled ahead of time compares the layouts of its arguments, and JAX writes those of arrays otherwise. So
    `jax.jit` compiles it again, for the arguments of the caller and for its own results. `compiled` tells of it.
    """

    function: Callable[..., Any]
    compiled: Any

    def __call__(self, *arrays: jax.Array) -> list[Any]:
        with without_mesh():  # it is not compiled for a mesh of the caller's
            return self.function(*arrays)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def _lowered(executable: Executable, mesh: Mesh, marked: bool) -> Callable[[], Callable[..., Any]]:
    arguments = [
        jax.ShapeDtypeStruct(kind.shape, jax_dtype(kind.dtype), sharding=sharding)
        for kind, sharding in zip(executable.inputs, _shardings(executable.inputs, mesh), strict=True)
    ]
    function = _jitted(executable, mesh, marked or has_effects(executable))
    with without_mesh():
        lowered = function.lower(*arguments)
    if not any(kind.dtype in PACKED_DTYPES for kind in executable.inputs):
        return lowered.compile
    return lambda: _OfPackedValues(function, lowered.compile())


def _jitted(executable: Executable, mesh: Mesh, marked: bool) -> Any:
    fun = jaxpr_as_fun(executable.jaxpr)

    def call(*arrays: jax.Array) -> list[Any]:
        results = [
            as_weak(x) if kind.weak_type else x for x, kind in zip(fun(*arrays), executable.outputs, strict=True)
        ]
        return [*results, *([jnp.zeros(())] if marked else [])]

    call.__name__ = call.__qualname__ = executable.name  # what profiles and dumps of XLA show
    return jax.jit(
        call,
        in_shardings=_shardings(executable.inputs, mesh),
        out_shardings=[
            *_shardings(executable.outputs, mesh),
            *([NamedSharding(mesh, PartitionSpec())] if marked else []),
        ],
        donate_argnums=executable.donated,
        keep_unused=True,  # so that the planned positions are the compiled ones
    )


def as_weak(x: Any) -> Any:
    """Return the array as one whose dtype gives way to others, as that of a Python number does."""
    if x.weak_type:
        return x
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def _shardings(types: Sequence[ArrayType], mesh: Mesh) -> tuple[NamedSharding, ...]:
    return tuple(sharding_of(kind, mesh) for kind in types)
