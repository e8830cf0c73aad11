"""Programs compile for GPUs that are not here, with the collectives and the memory that they would have there."""

import importlib.util
import os
import re
import subprocess
import sys
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.compiler.analysis.aot_targets import aot_devices, gpu_devices, gpu_targets, tpu_devices
from autopar.compiler.analysis.compiled_collectives import compiled_collectives
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Machine

INSTALLED = importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.{name}") for name in ("xla_cuda12", "xla_cuda13")
)
TPU_INSTALLED = importlib.util.find_spec("libtpu") is not None
needs_compiler = pytest.mark.skipif(not INSTALLED, reason="XLA's GPU compiler: pip install 'autopar[gpu-aot]'")


def test_targets_are_listed_by_name():
    assert gpu_targets() == ("a100", "b200", "b300", "gb200", "gb300", "h100", "h200")


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("a100", "dgx-a100-80"),
        ("b200", "dgx-b200"),
        ("b300", "dgx-b300"),
        ("gb200", "gb200-nvl72"),
        ("gb300", "gb300-nvl72"),
        ("h100", "dgx-h100"),
        ("h200", "dgx-h200"),
    ],
)
def test_compiler_and_planner_know_the_same_device(target, machine):
    text = (files("autopar.compiler.analysis") / "gpu_targets" / f"{target}.txtpb").read_text(encoding="utf-8")
    figures = {name: float(number) for name, number in re.findall(r"(\w+): ([\d.]+)", text)}
    planner = Machine.named(machine)
    assert figures["device_memory_size"] == pytest.approx(planner.memory_bytes, rel=0.08)
    assert 0.8 * figures["memory_bandwidth"] < planner.memory_bandwidth < figures["memory_bandwidth"]


def test_unknown_target_is_an_error_that_names_the_known_ones():
    with pytest.raises(
        InvalidArgument, match=r"'v100' are not known; those of a100, b200, .*h200 are. Did you mean .*'h100'"
    ):
        gpu_devices("v100", 8)


@pytest.mark.parametrize("number", [-8, 0, 9, 12])
def test_hosts_must_be_full(number):
    with pytest.raises(InvalidArgument, match=rf"{number} devices were asked for; a host has 8, .* a multiple of 8"):
        gpu_devices("h100", number)


def test_unknown_tpu_is_an_error_that_names_the_known_ones():
    with pytest.raises(InvalidArgument, match=r"'tpu-v6' is not known; tpu-v5e, tpu-v5p, tpu-v6e are. Did you mean"):
        tpu_devices("tpu-v6", 8)


@pytest.mark.parametrize("number", [0, 2, 12])
def test_slices_of_tpus_have_powers_of_two(number):
    with pytest.raises(InvalidArgument, match=rf"{number} TPUs were asked for; a slice has 4, 8, .* Ask for one"):
        aot_devices("tpu-v5p", number)


@pytest.mark.skipif(TPU_INSTALLED, reason="XLA's TPU compiler is installed")
def test_missing_tpu_compiler_is_an_error_that_says_how_to_install_it():
    with pytest.raises(InvalidArgument, match=r"does not start: .* `pip install 'autopar\[tpu-aot\]'`"):
        aot_devices("tpu-v5p", 8)


@pytest.mark.skipif(not TPU_INSTALLED, reason="XLA's TPU compiler: pip install 'autopar[tpu-aot]'")
@pytest.mark.parametrize(("target", "corner"), [("tpu-v5p", [1, 1, 1]), ("tpu-v6e", [1, 3, 0])])
def test_slices_of_tpus_are_nearly_cubes_or_squares(target, corner):
    devices = aot_devices(target, 8)
    assert len(devices) == 8
    assert devices[-1].coords == corner


@pytest.mark.skipif(INSTALLED, reason="XLA's GPU compiler is installed")
def test_missing_compiler_is_an_error_that_says_how_to_install_it():
    with pytest.raises(InvalidArgument, match=r"not installed; .* `pip install 'autopar\[gpu-aot\]'`"):
        gpu_devices("h100", 8)


def compiled_product(num_devices: int, batch: int):
    """x [batch, 4096] w [4096, 1024], the summed dimension split over y and the result over both axes."""
    mesh = Mesh(np.reshape(gpu_devices("h100", num_devices), (-1, 4)), ("x", "y"))

    def argument(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    product = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", "y")))
    return product.lower(argument((batch, 4096), P("x", "y")), argument((4096, 1024), P("y"))).compile()


@needs_compiler
@pytest.mark.parametrize("num_devices", [8, 64])
def test_product_over_a_split_dimension_ends_in_a_reduce_scatter(num_devices):
    rows = 256
    compiled = compiled_product(num_devices, batch=rows * num_devices // 4)
    (collective,) = compiled_collectives(compiled.as_text())
    assert (collective.kind, collective.group_size, collective.count) == ("reduce-scatter", 4, 1)
    assert collective.nbytes == rows * 1024 * {"bf16": 2, "f32": 4}[collective.dtypes[0]]
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == 2 * (rows * 1024 + 1024 * 1024)
    assert memory.output_size_in_bytes == 2 * rows * 256
    assert memory.temp_size_in_bytes >= collective.nbytes


@needs_compiler
@pytest.mark.parametrize("target", gpu_targets())
def test_every_target_compiles_loops_and_asynchronous_collectives(target):
    mesh = Mesh(np.reshape(gpu_devices(target, 8), (2, 4)), ("x", "y"))

    def local(x, weights):
        def layer(h, w):
            return jnp.tanh(h @ lax.all_gather(w, "y", tiled=True)), None

        h, _ = lax.scan(layer, x, weights)
        return lax.all_to_all(lax.psum_scatter(h, "y", tiled=True), "x", 0, 1, tiled=True), lax.psum(h, ("x", "y"))

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), P(None, "y")), out_specs=(P(("x", "y")), P()), check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 128), (6, 128, 128))]
    compiled = jax.jit(step).lower(*shapes).compile()
    assert "-start(" in compiled.as_text()
    # 32 rows of 128 numbers on each device, and 128 x 128 weights in every layer.
    assert sorted((c.kind, c.group_size, c.nbytes, c.count) for c in compiled_collectives(compiled.as_text())) == [
        ("all-gather", 4, 4 * 128 * 128, 6),
        ("all-reduce", 8, 4 * 32 * 128, 1),
        ("all-to-all", 2, 4 * 8 * 128, 1),
        ("reduce-scatter", 4, 4 * 32 * 128, 1),
    ]


@needs_compiler
def test_equal_requests_give_the_same_devices():
    assert gpu_devices("h100", 8) is gpu_devices("h100", 8)
    assert [device.process_index for device in gpu_devices("h100", 16)] == [0] * 8 + [1] * 8


PROGRAM = """
import jax
{before}
from autopar.compiler.analysis.aot_targets import gpu_devices
devices = gpu_devices("h100", 2)
sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("x",)), jax.sharding.PartitionSpec("x"))
argument = jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)
print(jax.jit(lambda x: x @ x).lower(argument).compile().memory_analysis().argument_size_in_bytes)
print(jax.default_backend(), jax.numpy.arange(4).sum())
"""


@needs_compiler
@pytest.mark.parametrize("platforms", ["cpu", ""])
@pytest.mark.parametrize("before", ["", "jax.devices()"])
def test_compiler_starts_beside_the_cpu_backend_whoever_comes_first(platforms, before):
    environment = {**os.environ, "JAX_PLATFORMS": platforms, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["128", "cpu 6"]), done.stderr
