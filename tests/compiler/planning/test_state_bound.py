"""A step whose state has no room whatever the plan is refused at once, by what takes the room; none that fits is."""

import itertools
import math
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.compiler.planning.search.space import Space
from autopar.compiler.planning.state_bound import StateBound, even_parts, kept_leaves, refuse_too_large_a_state
from autopar.errors import MemoryTooSmall
from autopar.reports.changes import Asked, more_memory

TX = optax.adam(1e-3)


def train_step(state, batch):
    def loss_of(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    grads = jax.grad(loss_of)(state["params"])
    updates, moments = TX.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments, "unread": jnp.zeros(99)}


def with_memory(num_devices, memory_bytes):
    cluster = autopar.Cluster(num_devices=num_devices, kind="cpu")
    return autopar.Cluster(num_devices=num_devices, machine=replace(cluster.machine, memory_bytes=memory_bytes))


def traced(cluster, hidden=512, width=256, rows=64, **options):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"up": array(width, hidden), "down": array(hidden, width)}
    state = {"params": params, "moments": jax.eval_shape(TX.init, params), "unread": array(99)}
    batch = {"x": array(rows, width), "y": array(rows, width)}
    step = autopar.parallelize(train_step, cluster=cluster, donate_argnums=(0,), batch_argnums=1, **options)
    return step.trace(state, batch)


STATE_BYTES = 3 * 2 * 512 * 256 * 4


@pytest.mark.parametrize("seed", range(20))
def test_even_parts_are_those_of_enumeration(seed):
    draw = random.Random(seed)
    shape, most = [draw.randint(1, 24) for _ in range(draw.randint(0, 3))], draw.randint(1, 40)
    each = [[n for n in range(1, size + 1) if size % n == 0] for size in shape]
    assert even_parts(shape, most) == {n for n in map(math.prod, itertools.product(*each)) if n <= most}


@pytest.mark.parametrize(
    ("method", "num_devices"),
    [
        (autopar.DataParallel(), 4),
        (autopar.Zero(stage=3), 4),
        (autopar.Megatron(data=2, tensor=2, zero=3), 4),
        (autopar.PipelineParallel(num_stages=2, num_microbatches=4), 2),
        (autopar.Auto(), 8),
        (autopar.Auto(num_microbatches=4), 6),
    ],
    ids=str,
)
def test_every_plan_needs_as_much_at_least_and_none_that_fits_is_refused(method, num_devices):
    cluster = autopar.Cluster(num_devices=num_devices, kind="cpu")
    step = traced(cluster)
    peak_bytes = step.plan(method).simulate().peak_bytes
    leaves = tuple(kept_leaves(step.trace).values())
    bound = StateBound(leaves=leaves, memory=1.0, cluster=cluster)
    assert 0 < bound.share * cluster.machine.memory_bytes <= peak_bytes
    refuse_too_large_a_state(step.trace, 1.0, with_memory(num_devices, peak_bytes))


def test_a_state_without_room_is_refused_by_its_names_before_anything_is_searched(monkeypatch):
    monkeypatch.setattr(Space, "of", lambda *_: pytest.fail("searched"))
    step = traced(with_memory(4, STATE_BYTES / 10), method=autopar.Auto(memory=1.0))
    with pytest.raises(MemoryTooSmall) as caught:
        step.plan()
    words = caught.value.shortage
    assert "train_step cannot run on 4 devices with 307.2 KiB each" in words and "takes 3 MiB, 768 KiB of each" in words
    assert "2 MiB state.moments, 1 MiB state.params" in words and "unread" not in words
    assert "At least 11 such devices are needed, or 460.8 KiB more memory on each" in words
    assert 'With offload="optimizer" 2 MiB of it are on the hosts.' in words
    assert caught.value.least_share == pytest.approx(2.5, rel=1e-4)
    with pytest.raises(MemoryTooSmall, match="At least 11 such devices"):
        step.plan(autopar.Zero(stage=3, memory=1.0))
    refuse_too_large_a_state(step.trace, 1.0, with_memory(11, STATE_BYTES / 10))
    with pytest.raises(MemoryTooSmall):
        refuse_too_large_a_state(step.trace, 1.0, with_memory(10, STATE_BYTES / 10))


def test_what_jax_may_not_take_of_the_memory_is_said_where_it_is_missing():
    limited = autopar.Cluster(num_devices=4, kind="v100", memory_bytes=STATE_BYTES / 10)
    step = traced(limited, method=autopar.Auto(memory=1.0))
    words = "JAX may take 307.2 KiB of 16 GiB; of a GPU, XLA_PYTHON_CLIENT_MEM_FRACTION says how much"
    with pytest.raises(MemoryTooSmall) as caught:
        step.plan()
    assert f"more memory on each ({words})" in caught.value.shortage
    asked = Asked.of(step.trace, autopar.Auto(), limited)
    assert more_memory(asked, 3.0).words.endswith(f"more memory per device ({words})")


def test_what_does_not_divide_among_the_devices_has_to_have_room_as_it_is():
    step = traced(autopar.Cluster(num_devices=4, kind="cpu"), hidden=1021, width=3)
    largest = 1021 * 3 * 4

    def refused(num_devices, memory, words):
        with pytest.raises(MemoryTooSmall, match=words) as caught:
            refuse_too_large_a_state(step.trace, memory, with_memory(num_devices, 1e5))
        return caught.value.least_share

    refuse_too_large_a_state(step.trace, largest / 2, with_memory(13, 1e5))  # in three parts
    share = refused(200, largest / 4, r"of shape \[\d+, \d+\] is in 3 even parts at most there; padded, it may\.")
    assert share == pytest.approx(4 / 3)
    share = refused(2, largest / 2, r"does not divide evenly there.*At least 13 such devices are needed, or")
    assert share == pytest.approx(6, rel=1e-3)
    refused(200, largest / 4, "At least 1021 such devices are needed, or")
    refused(200, largest / 4000, r"there; padded, it may. At least \S+ KiB more memory on each")


def test_of_the_optimizers_state_on_hosts_only_what_microbatches_read_counts():
    step, few = traced(autopar.Cluster(num_devices=4, kind="cpu")), STATE_BYTES / 12
    refuse_too_large_a_state(step.trace, 1.0, with_memory(4, few * 1.01), offloaded={"optimizer"})
    with pytest.raises(MemoryTooSmall, match="takes 1 MiB, 256 KiB of each"):
        refuse_too_large_a_state(step.trace, 1.0, with_memory(4, few * 0.99), offloaded={"optimizer"})
    refuse_too_large_a_state(step.trace, 1.0, with_memory(4, 1e4), offloaded={"optimizer", "parameters"})


def test_the_memory_of_all_machines_counts():
    small, large = with_memory(2, STATE_BYTES / 8), with_memory(2, STATE_BYTES / 2)
    trace = traced(autopar.Cluster(num_devices=4, kind="cpu")).trace
    both = autopar.Cluster.of_groups([small, large])
    refuse_too_large_a_state(trace, 1.0, both)
    with pytest.raises(MemoryTooSmall, match=r"with at most 1\.05 MiB each.*At least 1.143 times the memory is needed"):
        refuse_too_large_a_state(trace, 0.7, both)


def test_one_device_runs_a_step_as_it_is():
    assert traced(with_memory(1, STATE_BYTES / 2), method=autopar.Auto()).plan().plan.num_devices == 1
