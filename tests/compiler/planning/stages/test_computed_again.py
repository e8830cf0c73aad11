"""Where memory is short, as few stages are computed again as make the plan fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.inter_op.stage_costs import Timing
from autopar.compiler.inter_op.submeshes import cluster_shape
from autopar.compiler.planning.search.candidates import solved_searches
from autopar.compiler.planning.stages.layer_costs import LayoutChoice
from autopar.compiler.planning.stages.stage_costs import KnownLayers, RangeCosts
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.ir.schedules import get_schedule

LAYERS, ROWS, WIDTH = 32, 2048, 32
CLUSTER = autopar.Cluster(num_devices=4, kind="p3.16xlarge")


def train_step(params, batch):
    def loss_of(params):
        h = batch["x"]
        for i, layer in enumerate(params):
            with jax.named_scope(f"h_{i}"):
                h = h + jax.nn.gelu(jnp.tanh(h @ layer["a"]) @ layer["b"]) @ layer["c"]
        return jnp.mean((h - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)

    params = [{name: array(WIDTH, WIDTH) for name in "abc"} for _ in range(LAYERS)]
    return params, {name: array(ROWS, WIDTH) for name in "xy"}


@pytest.fixture(scope="module")
def traced():
    return autopar.parallelize(train_step, cluster=CLUSTER).trace(*arguments())


def method(**options):
    return autopar.Auto(num_stages=4, num_microbatches=8, schedule="1f1b", **options)


@pytest.fixture(scope="module")
def peaks(traced):
    """The bytes of a device if every stage is computed again, and if none is."""
    return [traced.plan(method(remat=remat)).simulate().peak_bytes for remat in (True, False)]


def times(traced, **options):
    try:
        return traced.plan(method(**options)).simulate().step_time_s
    except autopar.errors.MemoryTooSmall:
        return float("inf")


def test_more_memory_and_more_freedom_take_no_more_time(traced, peaks):
    again, plain = peaks
    before = float("inf")
    for share in (0.05, 0.7):
        memory = again * (1 - share) + plain * share
        free = times(traced, memory=memory)
        assert free <= 1.001 * min(before, *(times(traced, memory=memory, remat=each) for each in (True, False)))
        before = free


def test_stages_that_are_computed_again_and_others_make_one_step(traced, peaks):
    again, plain = peaks
    planned = traced.plan(method(memory=(again + plain) / 2))
    shares = [stage.recomputed / stage.num_layers for stage in planned.plan.stages]
    assert len(set(shares)) > 1 and shares == sorted(shares, reverse=True)  # the first hold the most microbatches
    assert planned.plan.verify(autopar.parallelize(train_step), arguments())
    words = [each.choice for each in planned.explain("remat").others]
    assert {"every stage computed again", "nothing computed again"} < {*words}
    assert any(" of stage " in each for each in words)  # one layer more, one less


def test_layers_are_solved_for_as_stages_compute_them(traced):
    """Solved for without being computed again, they are not taken to need nothing but their work if they are."""

    def ranges_within(memory):
        method = autopar.Auto(num_microbatches=8, memory=memory)
        problem = StageProblem(trace=traced.trace, method=method, hardware=CLUSTER, cache_directory=None)
        known = KnownLayers.of(problem)
        again = RangeCosts(problem, *known(8, True, splits=False), remat=True)
        return problem, RangeCosts(problem, *known(8, False, splits=False), again=again)

    submesh, timing = cluster_shape(2, 8), Timing(schedule=get_schedule("gpipe"), num_microbatches=8)
    _, ranges = ranges_within("off")
    half = len(ranges.layers.class_of) // 2
    ranges.solve({submesh})
    least, most = (ranges.cost(half, 2 * half, submesh, LayoutChoice(0.0, None, remat)) for remat in (True, False))
    problem, ranges = ranges_within(least.peak_bytes(8) * 0.8 + most.peak_bytes(8) * 0.2)
    ranges.costs.solved.add(submesh)
    found = solved_searches(problem, ranges, timing, 2, problem.clusters, (2, 2), float("inf"))
    stages = [stage for each in found for stage in each.best.stages]
    assert any(stage.cost.choice.remat for stage in stages)
    assert ranges.again is not None and ranges.again.solved == {submesh}
