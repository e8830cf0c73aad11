"""Models whose activations and weights both matter, planned and compiled for the tests of the memory model."""

import importlib.util

import jax
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.compiler.analysis.aot_targets import aot_devices
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op.plan_program import plan_intra_op
from autopar.compiler.memory import estimate
from autopar.compiler.sharding.layout import LogicalMesh, to_spec
from autopar.compiler.spmd.emit import emit_spmd
from autopar.compiler.spmd.local_program import Value, local_block
from autopar.hardware.machine import Machine
from benchmarks.models.gpt import gpt
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model

H100 = Machine.named("dgx-h100")
_GPT = {"layers": 2, "width": 512, "heads": 8, "vocabulary": 8192, "length": 256, "batch": 64}
MODELS = {
    "mlp": lambda: mlp(layers=6, width=1024, hidden=4096, batch=4096),
    "gpt": lambda: gpt(**_GPT),
    "gpt_scan": lambda: gpt(**_GPT, scan=True),
    "gpt_scan_remat": lambda: gpt(**{**_GPT, "layers": 4}, scan=True, remat=True),
}


def traced(name: str):
    return traced_model(MODELS[name]())


def traced_model(model: Model):
    return autopar.parallelize(model.step).trace(model.abstract_state, model.abstract_batch).trace


def state_inputs(trace) -> list[int]:
    return sorted(set(dict(trace.state_outputs).values()))


def planned(trace, shape: tuple[int, ...], **how):
    """Mesh, plan, and the program of one device."""
    mesh = LogicalMesh(shape=shape, axis_names=("data", "model")[: len(shape)])
    mesh_costs = MeshCosts(machine=H100, mesh=mesh)
    found = plan_intra_op(trace.jaxpr, mesh_costs, state_outputs=dict(trace.state_outputs), **how)
    return mesh, found, local_block(trace.jaxpr.jaxpr, found.plan, mesh)


needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="XLA's GPU compiler: pip install 'autopar[gpu-aot]'"
)


def peak_memory(block, mesh, donated=()) -> estimate.MemoryEstimate:
    """The estimate for the machine that `planned` plans for."""
    return estimate.peak_memory(block, mesh, donated, machine=H100)


def compiled(trace, block, mesh, donated, target: str = "h100") -> jax.stages.Compiled:
    """The local program as XLA compiles it ahead of time."""
    devices = Mesh(np.reshape(aot_devices(target, mesh.num_devices), mesh.shape), mesh.axis_names)
    step = jax.jit(
        jaxpr_as_fun(emit_spmd(trace.jaxpr, block, mesh)),
        in_shardings=[NamedSharding(devices, to_spec(v.layout, mesh)) for v in block.inputs],
        out_shardings=[NamedSharding(devices, to_spec(v.layout, mesh)) for v in block.outputs if isinstance(v, Value)],
        donate_argnums=tuple(donated),
    )
    lowered = step.lower(*(v.variable.aval for v in block.inputs))
    # Timing kernels needs a GPU.
    return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def compiled_bytes(trace, block, mesh, donated) -> float:
    """Peak bytes of one H100 for the local program."""
    sizes = compiled(trace, block, mesh, donated).memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + results
