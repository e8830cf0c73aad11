"""Host memory that a step itself asks for is kept, counted and priced, by every method, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Auto, DataParallel, Megatron, Zero
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import Unsupported
from autopar.hardware.machine import Machine
from autopar.ir.program import Copy
from tests.small_steps import SEPARATE

NAMED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
DOTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LAYERS, WIDTH, ROWS = 4, 256, 64
VALUE_BYTES = ROWS * WIDTH * 4
BATCH = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": LAYERS}
METHODS = {
    "data": DataParallel(),
    "microbatches": DataParallel(num_microbatches=2),
    "zero": Zero(stage=3),
    "auto": Auto(mesh_shape=(8,), num_microbatches=1),
    "pipeline": Megatron(data=2, tensor=2, pipeline=2, num_microbatches=2),
    "interleaved": Megatron(**INTERLEAVED),
}


def params():
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 16 for key in jax.random.split(jax.random.key(0), LAYERS)]


def layer(w, x):
    return checkpoint_name(jnp.tanh(x @ w), "hidden")


def loss(params, x, layer=layer):
    for w in params:
        x = layer(w, x)
    return jnp.mean(x**2)


def updated(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def whole_net(params, batch):
    value, grads = jax.value_and_grad(jax.checkpoint(loss, policy=NAMED))(params, batch)
    return updated(params, grads), value


def layer_by_layer(params, batch):
    offloading = jax.checkpoint(layer, policy=DOTS)
    value, grads = jax.value_and_grad(lambda p, x: loss(p, x, offloading))(params, batch)
    return updated(params, grads), value


def scanned(params, batch):
    def stacked_loss(stack, x):
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), policy=DOTS), x, stack)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(stacked_loss)(params, batch)
    return params - 0.1 * grads, value


OFFLOADING = {
    "whole net": (whole_net, params),
    "layer by layer": (layer_by_layer, params),
    "scan": (scanned, lambda: jnp.stack(params())),
}


def planned(step, args, method):
    devices = autopar.Cluster(num_devices=8, machine=SEPARATE)
    return autopar.parallelize(step, method=method, cluster=devices).trace(*args).plan()


def check_equal(step, args, planned):
    found, expected = planned.lower().compile()(*args), jax.jit(step)(*args)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), found, expected)
    kinds = [[leaf.sharding.memory_kind for leaf in jax.tree.leaves(result)] for result in (found, expected)]
    assert kinds[0] == kinds[1]


def moved(program, space):
    """How many values the executables of a program put into a memory, and its instructions in a step."""
    eqns = [
        eqn for each in program.executables.values() for eqn in jc.all_equations(each.jaxpr) if jc.moves_memory(eqn)
    ]
    copies = [i for mesh in program.meshes for i in mesh.instructions if isinstance(i, Copy) and i.to == space]
    there = sum(jc.is_on_host(v) == (space == "host") for eqn in eqns for v in eqn.outvars)
    return there, sum(len(i.values) for i in copies)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", OFFLOADING)
def test_a_checkpoint_that_offloads_is_kept_and_changes_no_number(model, method):
    step, state = OFFLOADING[model]
    made = planned(step, (state(), BATCH), METHODS[method])
    check_equal(step, (state(), BATCH), made)
    program, report = made.lower().program, made.simulate()
    inside, between = moved(program, "host")
    assert moved(program, "device") == (inside, between)
    if method in ("data", "zero", "auto"):
        assert inside == (1 if model == "scan" else LAYERS)
        assert report.host_bytes == pytest.approx(LAYERS * VALUE_BYTES / 8, rel=0.3)
    if method == "interleaved":
        assert inside + between > 0
        assert report.host_bytes > 0


def test_what_is_offloaded_is_not_counted_on_the_devices_and_its_time_on_the_link_is():
    def report(policy):
        def step(params, batch):
            kept = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=policy)
            value, grads = jax.value_and_grad(lambda p, x: loss(p, x, kept))(params, batch)
            return updated(params, grads), value

        # On V100s: on later GPUs and CPUs the products of gradients wait for each other, and keep what they read.
        hosts = autopar.Cluster.parse("p3.16xlarge")
        traced = autopar.parallelize(step, cluster=hosts).trace(params(), batch)
        return traced.plan(DataParallel()).simulate()

    batch = jax.ShapeDtypeStruct((32 * ROWS, WIDTH), jnp.float32)
    offloaded, saved = report(DOTS), report(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    kept = 32 * VALUE_BYTES / 8 * LAYERS
    assert (offloaded.host_bytes, saved.host_bytes) == (kept, 0)
    assert saved.peak_bytes - offloaded.peak_bytes == pytest.approx(kept, rel=0.5)
    there_and_back_s = 2 * kept / Machine.named("p3.16xlarge").host_bandwidth
    assert offloaded.step_time_s - saved.step_time_s == pytest.approx(there_and_back_s, rel=0.5)


def test_between_the_tasks_of_stages_what_is_offloaded_leaves_and_comes_back_beside_the_work():
    made = planned(layer_by_layer, (params(), BATCH), METHODS["interleaved"])
    program = made.lower().program
    assert moved(program, "host")[0] == 0
    assert moved(program, "host")[1] == moved(program, "device")[1] > 0
    assert made.simulate().host_bytes > 0


# --- state that the step keeps on the host --------------------------------------------------------------------------


def on_host(tree):
    there = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.tree.map(lambda x: jax.device_put(x, there), tree)


def new_state():
    return params(), on_host([jnp.zeros((WIDTH, WIDTH))] * LAYERS), on_host(jnp.zeros(()))


def with_momentum(to_device, to_host):
    def keeping(state, batch):
        weights, moments, count = state
        value, grads = jax.value_and_grad(loss)(weights, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * jax.device_put(m, to_device) + g, moments, grads)
        count = jax.device_put(count, to_device) + 1
        state = updated(weights, moments), *(jax.device_put(x, to_host) for x in (moments, count))
        return state, value

    return keeping


def one_device(kind):
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("i",)), P(), memory_kind=kind)


WORDS = {"spaces": (DEVICE, HOST), "shardings": (one_device("device"), one_device("pinned_host"))}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("zero", "auto")])
@pytest.mark.parametrize("words", WORDS)
def test_state_that_the_step_puts_on_the_host_lives_there_and_comes_in_parts(words, method):
    step = with_momentum(*WORDS[words])
    made = planned(step, (new_state(), BATCH), METHODS[method])
    assert sorted(name for part in made.plan.host_state for name in part) == [f"state.1.{n}" for n in range(LAYERS)]
    found, expected = made.lower().compile()(new_state(), BATCH), jax.jit(step)(new_state(), BATCH)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), found, expected)
    (weights, moments, _), _ = found
    assert {leaf.sharding.memory_kind for leaf in moments} == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in weights} == {"device"}


def test_a_search_keeps_it_there_as_well():
    made = planned(with_momentum(DEVICE, HOST), (new_state(), BATCH), Auto(num_stages=1, num_microbatches=1))
    assert sum(map(len, made.plan.host_state)) == LAYERS
    assert made.simulate().host_bytes > 0


def test_parameters_that_the_step_keeps_on_the_host_live_there():
    def keeping(weights, batch):
        weights = jax.tree.map(lambda w: jax.device_put(w, DEVICE), weights)
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w: jax.device_put(w, HOST), updated(weights, grads)), value

    args = on_host(params()), BATCH
    check_equal(keeping, args, planned(keeping, args, METHODS["interleaved"]))


def test_a_method_that_cannot_keep_it_there_is_refused_with_its_line():
    with pytest.raises(Unsupported, match=r"keeping puts state.1.0 into .*test_user_memory.py.*Zero keeps all state"):
        planned(with_momentum(DEVICE, HOST), (new_state(), BATCH), METHODS["zero"]).lower()


def test_a_result_on_the_host_that_no_input_brings_back_is_refused_with_its_line():
    def showing(params, batch):
        params, _ = whole_net(params, batch)
        return params, jax.device_put(jnp.tanh(batch), HOST)

    with pytest.raises(Unsupported, match=r"showing puts its result 1 into .*test_user_memory.py.*jax.device_get"):
        planned(showing, (params(), BATCH), DataParallel())
