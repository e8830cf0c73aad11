"""Devices to compile for that are not here: XLA's compilers need the figures of a device, not the device.

    mesh = Mesh(np.reshape(aot_devices("h100", 64), (8, 8)), ("data", "model"))
    compiled = jax.jit(step).lower(...).compile()        # with shardings or a shard_map over that mesh

The text and the memory analysis of what comes out are those of the real program, except where the compiler would time
alternatives on the device. The compiler runs in this process, beside the backend that JAX has started.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Generator
from importlib import metadata
from importlib.resources import files
from types import ModuleType
from typing import Any

import jax
from jax.experimental import topologies

from autopar.checks import names_alike
from autopar.errors import InvalidArgument

_Device = Any  # a jax.Device, which the type checker does not know

DEVICES_PER_HOST = 8
_TARGETS = files("autopar.compiler.analysis") / "gpu_targets"
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# By name what the compiler calls a TPU, and the dimensions of its torus.
_TPUS = {"tpu-v5e": ("v5e", 2), "tpu-v5p": ("v5p", 3), "tpu-v6e": ("v6e", 2)}
# Else the compiler asks a server that only a host of TPUs has what it runs on.
_NO_SERVER = "TPU_SKIP_MDS_QUERY"


def gpu_targets() -> tuple[str, ...]:
    """The GPUs whose figures are known, by name."""
    return tuple(sorted(file.name.removesuffix(".txtpb") for file in _TARGETS.iterdir()))


def tpu_targets() -> tuple[str, ...]:
    """The TPUs whose compiler is known, by name."""
    return tuple(sorted(_TPUS))


def aot_devices(target: str, num_devices: int) -> tuple[_Device, ...]:
    """Abstract devices to build a mesh of, a GPU's or a TPU's; raises what `gpu_devices` and `tpu_devices` do."""
    return tpu_devices(target, num_devices) if target in _TPUS else gpu_devices(target, num_devices)


@functools.cache
def tpu_devices(target: str, num_devices: int) -> tuple[_Device, ...]:
    """Abstract TPUs of one slice, whose sides are as equal as can be; equal arguments give the same devices.

    Raises `InvalidArgument` for a TPU that is not known, a number that makes no slice, and if the compiler is not
    installed.
    """
    if target not in _TPUS:
        raise InvalidArgument(
            f"A TPU named {target!r} is not known; {', '.join(tpu_targets())} are. "
            f"{names_alike(target, tpu_targets())}Take the nearest of these."
        )
    name, dimensions = _TPUS[target]
    if num_devices < 4 or num_devices.bit_count() != 1:
        raise InvalidArgument(
            f"{num_devices} TPUs were asked for; a slice has 4, 8, 16 or another power of two. Ask for one of these."
        )
    sides = [1] * dimensions
    for number in range(num_devices.bit_length() - 1):
        sides[number % dimensions] *= 2
    sides = sides if dimensions == 3 else sides[::-1]
    topology = f"{name}:{'x'.join(map(str, sides))}"
    try:
        with _environment(_NO_SERVER):
            return tuple(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        raise InvalidArgument(
            f"XLA's TPU compiler does not start: {error}. Compiling for TPUs that are not here needs libtpu of the "
            "release of jaxlib. Run `pip install 'autopar[tpu-aot]'`."
        ) from error


@functools.cache
def gpu_devices(target: str, num_devices: int) -> tuple[_Device, ...]:
    """Abstract devices to build a mesh of and to compile for; equal arguments give the same devices.

    More than eight stand in hosts of eight, each a process. Raises `InvalidArgument` for a target whose figures are not
    known, a number that does not fill its hosts, and if the compiler is not installed.
    """
    if target not in gpu_targets():
        raise InvalidArgument(
            f"The figures of a GPU named {target!r} are not known; those of {', '.join(gpu_targets())} are. "
            f"{names_alike(target, gpu_targets())}Take the nearest of these."
        )
    num_hosts, rest = divmod(num_devices, DEVICES_PER_HOST)
    if num_devices < 1 or (num_hosts and rest):
        raise InvalidArgument(
            f"{num_devices} devices were asked for; a host has {DEVICES_PER_HOST}, and hosts must be full. "
            f"Ask for up to {DEVICES_PER_HOST}, or for a multiple of {DEVICES_PER_HOST}."
        )
    topology = f"1x{num_hosts}x{DEVICES_PER_HOST}" if num_hosts else f"1x1x{rest}"
    return _devices(target, topology, (_TARGETS / f"{target}.txtpb").read_text(encoding="utf-8"))


def _devices(target: str, topology: str, figures: str) -> tuple[_Device, ...]:
    try:
        return tuple(topologies.get_topology_desc(target, "cuda", topology=topology, target_config=figures).devices)
    except NotImplementedError:  # JAX has no plug-in for CUDA; afterwards it has
        _register_plugin()
        return tuple(topologies.get_topology_desc(target, "cuda", topology=topology, target_config=figures).devices)


def _register_plugin() -> None:
    """Have JAX load the CUDA plug-in, which holds the compiler.

    JAX tries to by itself, but the plug-in refuses if it may be asked to run programs too (`JAX_PLATFORMS` does not
    exclude it) and libraries for that are missing. The compiler does not use them.
    """
    plugin = _plugin()
    if plugin is None:
        raise InvalidArgument(
            "XLA's GPU compiler is not installed; compiling for GPUs that are not here needs it, though no CUDA. "
            "Run `pip install 'autopar[gpu-aot]'`."
        )
    # Start the backends that there are: what registers later does not become one of them for want of a GPU.
    jax.devices()
    with _environment(_SKIP_CHECK):
        try:
            plugin.initialize()
        except Exception as error:
            raise InvalidArgument(
                f"XLA's GPU compiler ({plugin.__name__}) does not start: {error}. It must be of the release of jaxlib, "
                f"which is {metadata.version('jaxlib')}. Run `pip install --upgrade 'autopar[gpu-aot]'`."
            ) from error


def _plugin() -> ModuleType | None:
    for name in _PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


@contextlib.contextmanager
def _environment(name: str) -> Generator[None]:
    """Set a variable of the environment to 1 for a while."""
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
