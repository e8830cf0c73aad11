"""Scopes in the model: they restrict the plan, which shows them, and never change a result."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar import Auto, DataParallel, InvalidArgument, Megatron, MemoryTooSmall, PipelineParallel, Unsupported
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.planning.demands.scope_demands import within_scopes
from autopar.compiler.sharding.layout import LogicalMesh, replicated
from autopar.compiler.sharding.strategies import Strategy
from autopar.hardware.machine import Machine

ROWS, WIDTH, CLASSES = 16, 32, 64


def params_of(num_layers: int = 2):
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(WIDTH, WIDTH)) / 6 for _ in range(num_layers)]
    return jax.tree.map(jnp.float32, {"layers": layers, "head": rng.normal(size=(WIDTH, CLASSES)) / 6})


def batch_of():
    rng = np.random.default_rng(1)
    return jnp.float32(rng.normal(size=(ROWS, WIDTH))), jnp.int32(rng.integers(0, CLASSES, ROWS))


def step_of(model):
    """A training step of `model(params, x) -> logits`."""

    def loss(params, x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(model(params, x)), y[:, None], 1).mean()

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def mlp(layers_in, head_in):
    """A model whose layers and head stand in these scopes."""

    def model(params, x):
        with layers_in:
            for w in params["layers"]:
                x = jnp.tanh(x @ w)
        with head_in:
            return x @ params["head"]

    return model


def planned(model, method=None, params=None):
    return autopar.parallelize(step_of(model), method=method or Auto()).trace(params or params_of(), batch_of()).plan()


def assert_equal_to_jit(model, method, params=None):
    params, batch, step = params or params_of(), batch_of(), step_of(model)
    wanted, found = jax.jit(step)(params, batch), autopar.parallelize(step, method=method)(params, batch)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def degree(plan, name: str) -> int:
    """The number of parts in which an input lies on a device of the first mesh."""
    sizes = dict(zip(plan.meshes[0].axis_names, plan.meshes[0].shape, strict=True))
    entries = [entry for entry in plan.input_specs.get(name, PartitionSpec()) if entry is not None]
    return int(
        np.prod([sizes[axis] for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))])
    )


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_work_is_divided_among_as_many_devices_as_the_scope_says(parts):
    model = mlp(autopar.replicate(name="body"), autopar.split(devices=parts, name="head"))
    shape = (8,) if parts == 8 else (8 // parts, parts)
    found = planned(model, Auto(mesh_shape=shape, axis_names=("data", "model")[: len(shape)]))
    assert degree(found.plan, "params.head") >= parts


@pytest.mark.parametrize("classes", [100_000, 1_000_000])
def test_a_head_of_many_classes_and_its_moments_lie_in_parts_and_send_no_logits(classes):
    rows, width = 256, 1024
    optimizer = optax.adam(1e-3)

    def step(state, batch):
        def loss(params):
            with autopar.replicate(name="body"):
                features = jnp.tanh(batch[0] @ params["body"])
            with autopar.split(devices=8, name="head"):
                logits = features @ params["head"]
                own = jnp.take_along_axis(logits, batch[1][:, None], 1)[:, 0]
                return (jax.nn.logsumexp(logits, -1) - own).mean()

        params, moments = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    params = {"body": jax.ShapeDtypeStruct((width, width), jnp.float32)}
    params["head"] = jax.ShapeDtypeStruct((width, classes), jnp.float32)
    state = params, jax.eval_shape(optimizer.init, params)
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    traced = autopar.parallelize(step, method=Auto(), cluster=autopar.Cluster.parse("1x dgx-h100")).trace(state, batch)
    found = traced.plan().plan
    heads = [leaf.name for leaf in traced.trace.inputs if leaf.name.endswith("head")]
    assert len(heads) == 3 and {degree(found, name) for name in heads} == {8}
    most = max(each.nbytes for each in found.planned_collectives)
    assert most <= 4 * max(width * width, rows * width) < 4 * rows * classes / 8


def test_replicas_work_on_examples_of_their_own():
    model = mlp(autopar.replicate(devices=8), autopar.replicate(devices=8))
    sent = planned(model, Auto(mesh_shape=(2, 4))).plan.planned_collectives
    assert sent and not any(f"[{ROWS}," in each.what for each in sent)  # gradients and parameters, no activations


NESTED = {
    "replicate in split": lambda: (autopar.split(devices=4), autopar.replicate(devices=2)),
    "split in replicate": lambda: (autopar.replicate(devices=4), autopar.split(devices=2)),
    "split in split": lambda: (autopar.split(devices=2), autopar.split(devices=4)),
    "replicate in replicate": lambda: (autopar.replicate(devices=2), autopar.replicate(devices=2)),
    "three deep": lambda: (autopar.replicate(devices=2), autopar.split(devices=2), autopar.split(devices=2)),
}


@pytest.mark.parametrize("scopes", NESTED.values(), ids=NESTED.keys())
def test_scopes_nest_in_every_order(scopes):
    every = scopes()

    def model(params, x):
        for scope in every:
            scope.__enter__()
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        for scope in reversed(every):
            scope.__exit__(None, None, None)
        return x @ params["head"]

    assert_equal_to_jit(model, Auto())


@pytest.mark.parametrize("first", [autopar.replicate, autopar.split])
@pytest.mark.parametrize("second", [autopar.replicate, autopar.split])
@pytest.mark.parametrize("devices", [(2, 8), (4, 2)], ids=str)
def test_values_cross_between_scopes_of_unequal_degrees(first, second, devices):
    model = mlp(first(devices=devices[0]), second(devices=devices[1]))
    assert_equal_to_jit(model, Auto(mesh_shape=(2, 2, 2), axis_names=("a", "b", "c")))


def test_scopes_hold_inside_of_scans_and_recomputed_regions():
    def model(params, x):
        def layer(x, w):
            with autopar.split(devices=8):
                return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return x @ params["head"]

    params = params_of()
    params["layers"] = jnp.stack(params["layers"])
    assert degree(planned(model, params=params).plan, "params.layers") == 8
    assert_equal_to_jit(model, Auto(), params)


def test_the_default_strategy_holds_where_no_scope_stands():
    def model(params, x):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        with autopar.replicate():
            return x @ params["head"]

    autopar.set_default_strategy(autopar.split(devices=8))
    try:
        whole = planned(model).plan
        assert_equal_to_jit(model, Auto())
    finally:
        autopar.set_default_strategy(None)
    assert degree(whole, "params.layers.0") == 8
    with pytest.raises(InvalidArgument, match="The default strategy is 3"):
        autopar.set_default_strategy(3)


def test_named_stages_are_the_stages():
    model = mlp(autopar.stage("body", devices=2), autopar.stage("head"))
    found = planned(model)
    assert len(found.plan.meshes[0].devices) == 2 and found.plan.num_stages == 2
    assert "autopar.stage(devices=2, name='body'), autopar.stage(name='head')" in str(found.describe())
    assert_equal_to_jit(model, Auto())
    assert_equal_to_jit(mlp(autopar.stage("body"), autopar.stage("head")), PipelineParallel(num_stages=2))


def test_stages_without_a_name_are_told_apart_by_their_order():
    def model(params, x):
        for w in params["layers"]:
            with autopar.stage(devices=4):
                x = jnp.tanh(x @ w)
        return x @ params["head"]

    found, again = planned(model), planned(model)
    assert [len(mesh.devices) for mesh in found.plan.meshes] == [4, 4]
    assert "keeps autopar.stage(devices=4) #1, autopar.stage(devices=4) #2" in str(found.describe())
    assert found.trace.fingerprint == again.trace.fingerprint
    assert_equal_to_jit(model, Auto())


def two_kinds(devices=(4, 4)):
    """Devices that compute as the others do, with twice the memory and another name."""
    cpu = Machine.named("cpu")
    large = dataclasses.replace(cpu, name="large-host", kind="large", memory_bytes=2 * cpu.memory_bytes)
    small = dataclasses.replace(cpu, name="small-host", kind="small")
    pairs = zip(devices, (large, small), strict=True)
    return autopar.Cluster.of_groups([autopar.Cluster(num_devices=n, machine=machine) for n, machine in pairs])


@pytest.mark.parametrize("kinds", [("small", "large"), ("large-host", "small"), (None, "large")], ids=str)
def test_a_stage_lies_on_devices_of_the_kind_that_it_names(kinds):
    step = step_of(mlp(autopar.stage("body", kind=kinds[0]), autopar.stage("head", kind=kinds[1])))
    parallel = autopar.parallelize(step, method=Auto(num_microbatches=2), cluster=two_kinds())
    found = parallel.trace(params_of(), batch_of()).plan()
    machines = [found.plan.meshes[stage.mesh].machine for stage in found.plan.stages]
    assert all(kind is None or machine.startswith(kind[:5]) for kind, machine in zip(kinds, machines, strict=True))
    assert f"kind={kinds[1]!r}, name='head'" in str(found.describe())
    wanted, given = jax.jit(step)(params_of(), batch_of()), found.lower().compile()(params_of(), batch_of())
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            autopar.stage("body", kind="h100"),
            autopar.stage("head"),
            r"stage\(kind='h100', name='body'\) asks for devices of the kind 'h100', and the kinds of the cluster are "
            "'large' or 'large-host', of 4 devices; 'small' or 'small-host', of 2 devices",
        ),
        (autopar.stage("body", devices=4, kind="small"), autopar.stage("head"), "asks for 4 devices. .* one of 1, 2"),
        (
            autopar.stage("body", devices=2, kind="small"),
            autopar.stage("head", kind="small-host"),
            r"name='body'\), .*name='head'\) ask for 3 devices or more of the kind 'small', and there are 2",
        ),
        (
            autopar.stage("body", kind="small"),
            autopar.stage("body", kind="large"),
            r"stage\(kind='small', name='body'\) and .*\(kind='large', name='body'\) are one stage by their name",
        ),
    ],
    ids=["unknown", "too few", "too few for two", "contradiction"],
)
def test_kinds_that_no_plan_can_keep_are_refused(first, second, message):
    parallel = autopar.parallelize(step_of(mlp(first, second)), method=Auto(), cluster=two_kinds((4, 2)))
    with pytest.raises(InvalidArgument, match=message):
        parallel.trace(params_of(), batch_of()).plan()


def test_stages_may_have_a_host_each():
    step = step_of(mlp(autopar.stage("body", devices=8), autopar.stage("head", devices=8)))
    parallel = autopar.parallelize(step, method=Auto(), cluster=autopar.Cluster.parse("2x p3.16xlarge"))
    found = parallel.trace(params_of(), batch_of()).plan()
    assert [mesh.devices for mesh in found.plan.meshes] == [tuple(range(8)), tuple(range(8, 16))]


def tied(params, x):
    """A model whose first and last part share a parameter, and their devices."""
    with autopar.stage("ends", devices=4):
        x = jnp.tanh(x @ params["layers"][0])
    with autopar.stage("middle"):
        x = jnp.tanh(x @ params["layers"][1])
    with autopar.colocate("ends"):
        return (x @ params["layers"][0].T) @ params["head"]


@pytest.mark.parametrize(
    "method",
    [Auto(num_microbatches=1), *(Auto(num_microbatches=4, schedule=s) for s in ("gpipe", "zero-bubble", "1f1b"))],
    ids=lambda method: str(method.schedule),
)
def test_colocated_stages_share_their_devices(method):
    found = planned(tied, method)
    assert [stage.mesh for stage in found.plan.stages] == [0, 1, 0]
    assert len(found.plan.meshes[0].devices) == 4
    assert "autopar.stage(name='middle'), autopar.colocate('ends') #1" in str(found.describe())
    assert "asked for it by the scope" in str(found.explain("stages"))
    assert autopar.Plan.from_json(found.plan.to_json()) == found.plan
    assert found.simulate().step_time_s == pytest.approx(found.plan.certificate.step_time_s)
    sent = {each.value for each in found.describe().crossings}
    assert not any("layers" in name for name in sent)  # what both ends read is there once
    assert_equal_to_jit(tied, method)


def test_colocated_stages_without_a_place_or_without_memory_are_refused():
    def model(params, x):
        with autopar.split(devices=8):
            return tied(params, x)

    parallel = autopar.parallelize(step_of(model), method=Auto(num_microbatches=1), cluster=two_kinds())
    with pytest.raises(InvalidArgument, match=r"colocate\('ends'\) #1 have no place on 4 devices of large-host"):
        parallel.trace(params_of(), batch_of()).plan()
    with pytest.raises(MemoryTooSmall) as caught:
        planned(tied, Auto(memory=3000.0))
    assert "colocate('ends') #1 do not fit on 8 devices of cpu" in caught.value.shortage


def test_what_is_colocated_behind_its_stage_is_a_part_of_it():
    def model(params, x):
        with autopar.stage("body"):
            x = jnp.tanh(x @ params["layers"][0])
        with autopar.colocate("body"):
            x = jnp.tanh(x @ params["layers"][1])
        with autopar.stage("head"):
            return x @ params["head"]

    assert planned(model).plan.num_stages == 2
    assert_equal_to_jit(model, Auto())


def test_stages_hold_scopes():
    def model(params, x):
        with autopar.stage("body"), autopar.replicate():
            for w in params["layers"]:
                x = jnp.tanh(x @ w)
        with autopar.stage("head", devices=4), autopar.split():
            return x @ params["head"]

    assert_equal_to_jit(model, Auto(num_microbatches=2))


def test_plans_say_which_scopes_they_keep():
    model = mlp(autopar.replicate(name="body"), autopar.split(devices=8, name="head"))
    words = "autopar.replicate(name='body'), autopar.split(devices=8, name='head')"
    assert words in str(planned(model).describe())
    assert "keeps" not in str(planned(model, Auto(ignore_user_shardings=True)).describe())


def test_steps_in_scopes_have_fingerprints_of_their_own():
    def fingerprint(scope):
        return planned(mlp(scope, autopar.replicate()), Auto(mesh_shape=(8,))).trace.fingerprint

    assert fingerprint(autopar.replicate()) == fingerprint(autopar.replicate())
    assert fingerprint(autopar.replicate()) != fingerprint(autopar.split())


def test_scopes_do_nothing_without_autopar():
    model, plain = mlp(autopar.split(), autopar.stage("head")), mlp(autopar.replicate(), autopar.replicate())
    params, (x, _) = params_of(), batch_of()
    assert jnp.array_equal(jax.jit(model)(params, x), plain(params, x))


def test_open_scopes_run_on_one_device():
    step = step_of(mlp(autopar.replicate(), autopar.split()))
    params, batch = params_of(), batch_of()
    loss = autopar.parallelize(step, devices=jax.devices()[:1])(params, batch)[1]
    assert loss == jax.jit(step)(params, batch)[1]
    with pytest.raises(InvalidArgument, match=r"split\(devices=8\) asks for 8 devices .* there are 1 devices"):
        closed = step_of(mlp(autopar.replicate(), autopar.split(devices=8)))
        autopar.parallelize(closed, devices=jax.devices()[:1])(params, batch)


REFUSED = {
    "no axes of such sizes": (
        mlp(autopar.split(devices=3, name="body"), autopar.replicate()),
        Auto(),
        r"autopar.split\(devices=3, name='body'\) asks for 3 devices for each example",
    ),
    "an axis that is none": (mlp(autopar.split("rows"), autopar.replicate()), Auto(), "names the mesh axis 'rows'"),
    "a method that decides": (
        mlp(autopar.split(name="body"), autopar.replicate()),
        DataParallel(),
        "which DataParallel cannot keep",
    ),
    "degrees": (mlp(autopar.replicate(), autopar.replicate()), Megatron(tensor=2), "which Megatron cannot keep"),
    "too many devices": (
        mlp(autopar.stage("body", devices=8), autopar.stage("head")),
        Auto(),
        r"The stages of step \(body, head\) ask for 8 devices, and 1 of them for any number; there are 8",
    ),
    "one stage alone": (
        mlp(autopar.stage("body"), autopar.replicate()),
        Auto(),
        r"names one stage, autopar.stage\(name='body'\)",
    ),
    "three devices": (mlp(autopar.stage("a", devices=3), autopar.stage("b")), Auto(), "give it one of 1, 2, 4, 8"),
    "a stage that is none": (
        mlp(autopar.stage("body"), autopar.colocate("tail")),
        Auto(),
        r"autopar.colocate\('tail'\) #1 asks for the devices of the stage 'tail', and the stages of step are 'body'",
    ),
    "all on one mesh": (mlp(autopar.stage("body"), autopar.colocate("body")), Auto(), "names one stage"),
    "colocation and a number of stages": (
        tied,
        Auto(num_stages=3),
        r"colocate\('ends'\) #1 shares the devices of autopar.stage\('ends'\), and num_stages=3",
    ),
    "a mesh of all devices": (tied, Auto(mesh_shape=(8,)), r"3 stages .* on 2 meshes, and 2 of the mesh_shape \(8,\)"),
    "colocation by hand": (tied, PipelineParallel(num_stages=3), "which PipelineParallel cannot keep"),
    "another number of stages": (
        mlp(autopar.stage("body"), autopar.stage("head")),
        Auto(num_stages=4),
        "names 2 stages",
    ),
}


@pytest.mark.parametrize(("model", "method", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_plan_can_keep_is_refused(model, method, message):
    with pytest.raises(InvalidArgument, match=message):
        planned(model, method)


def test_a_product_that_nothing_divides_is_refused():
    trace = planned(mlp(autopar.split(devices=8, name="body"), autopar.replicate()), Auto(mesh_shape=(8,))).trace
    eqn = next(e for e in jc.all_equations(trace.jaxpr) if e.primitive.name == "dot_general")
    whole = Strategy((replicated(2), replicated(2)), (replicated(2),))
    with pytest.raises(InvalidArgument, match=r"name='body'\) asks for work divided over 8 devices .* no dimension"):
        within_scopes(eqn, (whole,), LogicalMesh(shape=(8,), axis_names=("data",)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: autopar.split(devices=0), "devices is 0"),
        (lambda: autopar.replicate(devices=True), "devices is True"),
        (lambda: autopar.split("two words"), "axis is 'two words'"),
        (lambda: autopar.replicate(name="a/b"), "name is 'a/b'"),
        (lambda: autopar.stage("a", kind="a/b"), "kind is 'a/b'"),
        (lambda: autopar.colocate(None), "name is None"),
        (lambda: autopar.colocate("a#1"), "name is 'a#1'"),
    ],
)
def test_scopes_with_impossible_options_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_stage_inside_of_a_loop_or_entered_twice_is_refused():
    def in_loop(params, x):
        def layer(x, w):
            with autopar.stage("layer"):
                return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, jnp.stack(params["layers"]))[0] @ params["head"]

    with pytest.raises(InvalidArgument, match="stands inside of a loop"):
        planned(in_loop)

    def twice(params, x):
        for w, name in zip((*params["layers"], params["head"]), ("a", "b", "a"), strict=True):
            with autopar.stage(name):
                x = jnp.tanh(x @ w)
        return x

    with pytest.raises(InvalidArgument, match="is entered again after 'b'"):
        planned(twice)


def test_scopes_need_a_batch():
    def step(params, batch):
        with autopar.replicate():
            return jax.tree.map(lambda p: p * 2, params), batch.sum()

    traced = autopar.parallelize(step, method=Auto(), batch_argnums=())
    with pytest.raises(Unsupported, match="must know which dimensions carry the examples"):
        traced.trace({"w": jnp.ones((64, 64))}, jnp.ones(8))


def test_a_default_strategy_leaves_steps_without_a_gradient_alone():
    autopar.set_default_strategy(autopar.split(devices=8))
    try:
        doubled = autopar.parallelize(lambda x: 2 * x, method=Auto(), batch_argnums=())(jnp.ones((16, 16)))
    finally:
        autopar.set_default_strategy(None)
    assert jnp.array_equal(doubled, 2 * jnp.ones((16, 16)))
