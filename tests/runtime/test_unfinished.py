"""The first instruction that has not ended is named, and nothing is waited for longer than it may take."""

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import StepTimeout
from autopar.ir.program import Recv, Run
from autopar.ir.tasks import Task
from autopar.runtime.unfinished import StepProgress, UnfinishedTask, wait_until_ready

STEP = [
    (0, Run(task=Task(kind="F", stage=0, microbatch=0), executable="f", inputs=("x",), outputs=("h",)), None),
    (1, Recv(values=("h",), source=0), 0),
    (1, Run(task=Task(kind="F", stage=1, microbatch=0), executable="g", inputs=("h",), outputs=("y",)), None),
]


def long(x):
    return jax.lax.fori_loop(0, 20_000, lambda _, x: jnp.tanh(x @ x), x)


def test_first_instruction_that_has_not_ended_is_named_with_what_it_reads():
    progress = StepProgress(STEP, (3, 5, 8))
    assert progress.unfinished() is None
    progress.begin()
    assert progress.unfinished().place == -1
    compiled = jax.jit(long).lower(jnp.ones((64, 64))).compile()
    for place, function in ((0, lambda x: [x, jnp.zeros(())]), (2, lambda x: [x, compiled(jnp.ones((64, 64)))])):
        instruction = STEP[place][1]
        call = progress.marking(place, instruction, {instruction.executable: function})[instruction.executable]
        jax.block_until_ready(call(jnp.ones(()))[0])
        assert progress.started == place
    progress.started = 3
    said = UnfinishedTask(place=8, text="task F1.m0 on mesh 1, which reads h of mesh 0")
    assert progress.unfinished() == said
    with pytest.raises(StepTimeout, match=r"within 0\.01 s in process 3\. The first .* is task F1\.m0 on mesh 1"):
        wait_until_ready([progress._markers[2]], 0.01, progress.unfinished, process=3)
    wait_until_ready([progress._markers[2], jax.random.key(0)], 100.0, progress.unfinished)
    assert progress.unfinished() is None
