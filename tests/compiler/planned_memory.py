"""Models whose activations and weights both matter, traced for the tests of the memory model."""

import autopar
from autopar.compiler.costs.mesh_costs import h100_figures
from autopar.compiler.intra_op.plan_program import plan_intra_op
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.spmd.local_program import local_block
from benchmarks.models.gpt import gpt
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model

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
    figures = h100_figures(len(shape))
    found = plan_intra_op(trace.jaxpr, mesh, figures, state_outputs=dict(trace.state_outputs), **how)
    return mesh, found, local_block(trace.jaxpr.jaxpr, found.plan, mesh)
