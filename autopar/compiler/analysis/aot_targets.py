"""Devices to compile for that are not here: XLA's compilers need the figures of a device, not the device.

    mesh = Mesh(np.reshape(aot_devices("h100", 64), (8, 8)), ("data", "model"))
    compiled = jax.jit(step).lower(...).compile()        # with shardings or a shard_map over that mesh

The text and the memory analysis of what comes out are those of the real program, except where the compiler would time
alternatives on the device. The compiler runs in this process, beside the backend that JAX has started.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Generator
from importlib import metadata
from importlib.resources import files
from types import ModuleType
from typing import Any

import jax
from jax.experimental import topologies

from autopar.checks import check_count, names_alike
from autopar.errors import InvalidArgument

_Device = Any  # a jax.Device, which the type checker does not know

DEVICES_PER_HOST = 8
_TARGETS = files("autopar.compiler.analysis") / "gpu_targets"
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# By name what the compiler calls a TPU, the dimensions of its torus, and the devices of a chip.
_TPUS = {"tpu-v5e": ("v5e", 2, 1), "tpu-v5p": ("v5p", 3, 1), "tpu-v6e": ("v6e", 2, 1), "tpu7x": ("tpu7x", 3, 2)}
_LEAST_CHIPS = 4
_AMD = ("mi200", "mi210", "mi250", "mi250x", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x")
# Else the compiler asks a server that only a host of TPUs has what it runs on.
_NO_SERVER = "TPU_SKIP_MDS_QUERY"


def gpu_targets() -> tuple[str, ...]:
    """The NVIDIA GPUs whose figures are known, by name."""
    return tuple(sorted(file.name.removesuffix(".txtpb") for file in _TARGETS.iterdir()))


def tpu_targets() -> tuple[str, ...]:
    """The TPUs that can be asked for, by name; a libtpu of another release may know fewer."""
    return tuple(sorted(_TPUS))


def is_gpu(target: str) -> bool:
    """Return whether a target is a GPU."""
    return target not in _TPUS


def aot_devices(target: str, num_devices: int) -> tuple[_Device, ...]:
    """Abstract devices to build a mesh of and to compile for; equal arguments give the same devices.

    They are the first of the fewest whole hosts or, of TPUs, of the smallest slice of a power of two that has so many:
    more than eight GPUs stand in hosts of eight, each a process. Raises `InvalidArgument` for a target that there is
    not, for no device, and if the target's compiler is not installed or does not know it.
    """
    check_count("The number of devices to compile for", num_devices)
    if target in _TPUS:
        return tpu_devices(target, num_devices)[:num_devices]
    if target in gpu_targets():
        return gpu_devices(target, num_devices)[:num_devices]
    if target in _AMD:
        raise InvalidArgument(
            f"{target!r} is an AMD GPU. Its compiler comes with JAX's plug-in for ROCm (jax-rocm7-plugin and "
            "jax-rocm7-pjrt), which starts only where AMD's ROCm is installed, and not without its GPUs. Verify on a "
            "host that has them, without a target."
        )
    every = (*gpu_targets(), *_AMD, *tpu_targets())
    raise InvalidArgument(
        f"There is no target {target!r} to compile for. {names_alike(str(target), every)}Choose a GPU "
        f"({', '.join(gpu_targets())}) or a TPU ({', '.join(tpu_targets())})."
    )


def tpu_devices(target: str, num_devices: int) -> tuple[_Device, ...]:
    """Return the smallest slice that has so many of one of `tpu_targets`, with sides as equal as can be."""
    name, dimensions, per_chip = _TPUS[target]
    num_chips = max(-(-num_devices // per_chip), _LEAST_CHIPS)
    sides = [1] * dimensions
    for number in range((num_chips - 1).bit_length()):
        sides[number % dimensions] *= 2
    sides = sides if dimensions == 3 else sides[::-1]
    return _slice(f"{name}:{'x'.join(map(str, sides))}")


@functools.cache
def _slice(topology: str) -> tuple[_Device, ...]:
    try:
        with _environment(_NO_SERVER):
            return tuple(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        if importlib.util.find_spec("libtpu") is None:
            raise InvalidArgument(
                "XLA's TPU compiler, libtpu, is not installed; compiling for TPUs that are not here needs it. "
                "Run `pip install 'autopar[tpu-aot]'`."
            ) from error
        raise InvalidArgument(
            f"XLA's TPU compiler, libtpu {metadata.version('libtpu')}, does not make the slice {topology}: {error}. "
            "Ask for fewer devices or another TPU, or, if it does not know this one, run "
            "`pip install --upgrade 'autopar[tpu-aot]'`."
        ) from error


def gpu_devices(target: str, num_devices: int) -> tuple[_Device, ...]:
    """Return so many of one of `gpu_targets` in one host, or the whole hosts of eight that have so many."""
    num_hosts = -(-num_devices // DEVICES_PER_HOST)
    return _hosts(target, f"1x{num_hosts}x{min(num_devices, DEVICES_PER_HOST)}")


@functools.cache
def _hosts(target: str, topology: str) -> tuple[_Device, ...]:
    figures = (_TARGETS / f"{target}.txtpb").read_text(encoding="utf-8")
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
