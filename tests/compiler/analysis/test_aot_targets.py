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

import autopar
from autopar.compiler.analysis import aot_targets
from autopar.compiler.analysis.aot_targets import aot_devices, gpu_targets, tpu_targets
from autopar.compiler.analysis.compiled_collectives import compile_for, compiled_collectives
from autopar.errors import InvalidArgument, Unsupported
from autopar.hardware.machine import Machine
from benchmarks.models import MODELS

INSTALLED = importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.{name}") for name in ("xla_cuda12", "xla_cuda13")
)
TPU_INSTALLED = importlib.util.find_spec("libtpu") is not None
needs_tpu_compiler = pytest.mark.skipif(not TPU_INSTALLED, reason="XLA's TPU compiler: pip install 'autopar[tpu-aot]'")
needs_compiler = pytest.mark.skipif(not INSTALLED, reason="XLA's GPU compiler: pip install 'autopar[gpu-aot]'")


def test_targets_are_listed_by_name():
    assert set(gpu_targets()) >= {"a100", "a6000", "b200", "gb300", "h100", "l40s", "p100", "t4", "v100"}
    assert tpu_targets() == ("tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu7x")


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("a100", "dgx-a100-80"),
        ("a100-40", "p4d.24xlarge"),
        ("a10g", "g5.48xlarge"),
        ("gh200", "gh200-4"),
        ("l4", "g6.48xlarge"),
        ("l40s", "g6e.48xlarge"),
        ("p100", "nc24s-v2"),
        ("rtx-4090", "rtx-4090"),
        ("t4", "g4dn.12xlarge"),
        ("v100", "p3.16xlarge"),
        ("v100-32", "p3dn.24xlarge"),
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
    assert 0.7 * figures["memory_bandwidth"] < planner.memory_bandwidth < figures["memory_bandwidth"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("h10", "'h100'"),
        ("H200", "'h200'"),
        ("tpu_v5p", "'tpu-v5p'"),
        ("tpu-v7x", "'tpu7x'"),
        ("v6e", "'tpu-v6e'"),
        ("mi300", "'mi300[ax]'"),
        ("rtx4090", "'rtx-4090'"),
    ],
)
def test_unknown_target_is_an_error_that_names_the_closest_of_all_targets(name, meant):
    known = r"Choose a GPU \(a100, .*v100.*\) or a TPU \(tpu-v5e, .*tpu7x\)"
    with pytest.raises(InvalidArgument, match=rf"no target '{name}' to compile for. Did you mean {meant}.*{known}"):
        aot_devices(name, 8)


@pytest.mark.parametrize("name", ["mi200", "mi250", "mi300x", "mi355x"])
def test_amd_gpus_are_an_error_that_says_what_they_need(name):
    with pytest.raises(InvalidArgument, match=rf"'{name}' is an AMD GPU. .*plug-in for ROCm .*Verify on a host"):
        aot_devices(name, 8)


@pytest.mark.parametrize("number", [-8, 0, 1.5])
@pytest.mark.parametrize("target", ["h100", "tpu-v5p"])
def test_there_must_be_a_device(target, number):
    with pytest.raises(InvalidArgument, match=rf"number of devices to compile for is {number}"):
        aot_devices(target, number)


@pytest.mark.skipif(TPU_INSTALLED, reason="XLA's TPU compiler is installed")
def test_missing_tpu_compiler_is_an_error_that_says_how_to_install_it():
    with pytest.raises(InvalidArgument, match=r"libtpu, is not installed; .* `pip install 'autopar\[tpu-aot\]'`"):
        aot_devices("tpu-v5p", 8)


@needs_tpu_compiler
@pytest.mark.parametrize(("target", "corner"), [("tpu-v5p", [1, 1, 1]), ("tpu-v6e", [1, 3, 0]), ("tpu7x", [1, 1, 0])])
def test_slices_of_tpus_are_nearly_cubes_or_squares(target, corner):
    devices = aot_devices(target, 8)
    assert len(devices) == 8
    assert devices[-1].coords == corner
    assert aot_devices(target, 6) == devices[:6]


@needs_tpu_compiler
def test_tpus_that_the_installed_compiler_does_not_know_are_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(aot_targets._TPUS, "tpu-v99", ("v99", 3, 1))
    with pytest.raises(InvalidArgument, match=r"libtpu [\d.]+, does not make the slice v99:2x2x1: .*--upgrade"):
        aot_devices("tpu-v99", 4)


@pytest.mark.skipif(INSTALLED, reason="XLA's GPU compiler is installed")
def test_missing_compiler_is_an_error_that_says_how_to_install_it():
    with pytest.raises(InvalidArgument, match=r"not installed; .* `pip install 'autopar\[gpu-aot\]'`"):
        aot_devices("h100", 8)


def compiled_product(num_devices: int, batch: int):
    """x [batch, 4096] w [4096, 1024], the summed dimension split over y and the result over both axes."""
    mesh = Mesh(np.reshape(aot_devices("h100", num_devices), (-1, 4)), ("x", "y"))

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


def layers_and_collectives(mesh: Mesh):
    def local(x, weights):
        def layer(h, w):
            return jnp.tanh(h @ lax.all_gather(w, "y", tiled=True)), None

        h, _ = lax.scan(layer, x, weights)
        return lax.all_to_all(lax.psum_scatter(h, "y", tiled=True), "x", 0, 1, tiled=True), lax.psum(h, ("x", "y"))

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), P(None, "y")), out_specs=(P(("x", "y")), P()), check_vma=False
    )
    return jax.jit(step).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 128), (6, 128, 128))))


@needs_compiler
@pytest.mark.parametrize("target", gpu_targets())
def test_every_target_compiles_loops_and_asynchronous_collectives(target):
    mesh = Mesh(np.reshape(aot_devices(target, 8), (2, 4)), ("x", "y"))

    try:
        compiled = compile_for(target, layers_and_collectives(mesh), "layers")
    except Unsupported as error:  # A newer ptxas leaves out the oldest GPUs.
        assert target in ("p100", "v100", "v100-32")
        assert re.search(rf"for {target} does not compile layers: .*ptxas too old.*nvidia-cuda-nvcc-cu12", str(error))
        return
    assert "-start(" in compiled.as_text()
    # 32 rows of 128 numbers on each device, and 128 x 128 weights in every layer.
    assert sorted((c.kind, c.group_size, c.nbytes, c.count) for c in compiled_collectives(compiled.as_text())) == [
        ("all-gather", 4, 4 * 128 * 128, 6),
        ("all-reduce", 8, 4 * 32 * 128, 1),
        ("all-to-all", 2, 4 * 8 * 128, 1),
        ("reduce-scatter", 4, 4 * 32 * 128, 1),
    ]


@needs_tpu_compiler
@pytest.mark.parametrize("target", tpu_targets())
def test_every_tpu_counts_the_rounds_of_a_loop(target):
    mesh = Mesh(np.reshape(aot_devices(target, 8), (2, 4)), ("x", "y"))
    found = compiled_collectives(compile_for(target, layers_and_collectives(mesh), "layers").as_text())
    assert ("all-gather", 4, 6) in [(c.kind, c.group_size, c.count) for c in found]


@needs_tpu_compiler
@pytest.mark.parametrize("target", tpu_targets())
def test_plans_are_verified_for_tpus_that_are_not_here(target):
    model = MODELS["gpt"](layers=2, width=64, heads=4, vocabulary=128, length=16, batch=16, dtype=jnp.bfloat16)
    method = autopar.Zero(mesh_shape=(2, 4), stage=3, memory="off")
    step = autopar.parallelize(model.step, method=method, cluster=autopar.Cluster.parse("2x tpu-v5p"))
    report = step.trace(model.abstract_state, model.abstract_batch).plan().verify(target=target)
    assert report, str(report)
    assert f"compiled for {target}" in str(report)
    assert sum(kind.compiled_bytes for kind in report.collectives.kinds) > 0


@needs_compiler
def test_equal_requests_give_the_same_devices():
    assert aot_devices("h100", 8) is aot_devices("h100", 8)
    assert [device.process_index for device in aot_devices("h100", 12)] == [0] * 8 + [1] * 4


PROGRAM = """
import jax
{before}
from autopar.compiler.analysis.aot_targets import aot_devices
devices = aot_devices("h100", 2)
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
