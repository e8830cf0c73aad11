"""The simulated program is the one that runs, without what its executables compute."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import autopar
from autopar.compiler import passes
from tests.small_steps import WIDTH, mlp_loss, mlp_params, sgd

BATCH = (np.ones((16, WIDTH), np.float32), np.ones((16, WIDTH), np.float32))


@pytest.mark.parametrize(
    "method",
    [
        autopar.Auto(num_stages=1),
        autopar.Megatron(data=2, tensor=2, pipeline=2, num_microbatches=4),
        autopar.PipelineParallel(num_stages=4, num_microbatches=2),
    ],
    ids=["one program", "stages on four devices", "stages on two"],
)
def test_the_program_on_paper_is_the_one_that_runs(method):
    planned = autopar.parallelize(sgd(mlp_loss), method=method, devices=jax.devices()[:8]).trace(mlp_params(4), BATCH)
    plan = planned.plan().plan
    paper = passes.lower_step(planned.trace, plan, on_paper=True)
    whole = passes.lower_step(planned.trace, plan)
    computed = {name: replace(e, jaxpr=None, guarded=None) for name, e in whole.executables.items()}
    written_down = [e for e in paper.executables.values() if e.jaxpr is not None]
    assert len(written_down) < len(computed)
    assert paper.meshes == whole.meshes and paper.inputs == whole.inputs and paper.outputs == whole.outputs
    assert {name: replace(e, jaxpr=None) for name, e in paper.executables.items()} == computed
