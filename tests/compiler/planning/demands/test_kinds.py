"""Searches restricted to kinds of parallelism: more kinds are never slower, and only what is named runs."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Auto, InvalidArgument, MemoryTooSmall
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.planning.demands.kinds import allowed_splits
from autopar.compiler.planning.one_mesh import plan_by_search
from autopar.compiler.sharding.layout import Layout, LogicalMesh
from tests.compiler.planning.search.test_free_search import arguments, train_step
from tests.slow_links import slow_links

ROWS, WIDTH, LENGTH, EXPERTS = 48, 80, 36, 8
CLUSTER = slow_links(8)
PAIRS = autopar.Cluster(num_devices=4, machine=CLUSTER.machine)
BOTH = LogicalMesh(shape=(2, 4), axis_names=("data", "model"))


def drawn(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.float32(rng.normal(size=a.shape) / 8), shapes)


def experts_step(params, x):
    def loss_of(params):
        shares = jax.nn.softmax(x @ params["router"])
        sent = jnp.einsum("bse,bsd->ebsd", shares, x)
        made = jnp.tanh(jnp.einsum("ebsd,edf->ebsf", sent, params["up"]))
        return jnp.mean((jnp.einsum("ebsf,efd->bsd", made, params["down"]) - x) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def scanned_step(params, x):
    def loss_of(params):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return params - 0.1 * grads, loss


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


EXPERT_ARGUMENTS = (
    {
        "router": array(WIDTH, EXPERTS),
        "up": array(EXPERTS, WIDTH, 2 * WIDTH),
        "down": array(EXPERTS, 2 * WIDTH, WIDTH),
    },
    array(ROWS, LENGTH, WIDTH),
)
STEPS = {
    "layers": (train_step, arguments(WIDTH, ROWS)),
    "experts": (experts_step, EXPERT_ARGUMENTS),
    "scanned": (scanned_step, (array(3, WIDTH, WIDTH), array(ROWS, WIDTH))),
}


def traced(name, method=None, cluster=CLUSTER):
    step, shapes = STEPS[name]
    return autopar.parallelize(step, method=method or Auto(), cluster=cluster).trace(*shapes)


COMPUTED = ("add", "add_any", "dot_general", "integer_pow", "mul", "sub", "tanh")
"""Primitives of the steps here; reshapes and collectives of a sum over devices have elements in a row."""


def parts_of(planned):
    """Return the sizes of all dimensions of what a device computes, by the program: features, rows, experts."""
    program = planned.lower().program
    inside = [
        body
        for executable in program.executables.values()
        for eqn in jc.all_equations(executable.jaxpr)
        if eqn.primitive.name == "shard_map"
        for body in jc.subjaxprs(eqn)
    ]
    computed = [e for body in inside for e in jc.all_equations(body) if e.primitive.name in COMPUTED]
    atoms = [v for eqn in computed for v in (*eqn.invars, *eqn.outvars)]
    return {size for v in atoms for size in getattr(v.aval, "shape", ())} - {1}


def assert_runs_as_jit(name, planned):
    step, shapes = STEPS[name]
    args = drawn(shapes)
    wanted, found = jax.jit(step)(*args), autopar.parallelize(step, method=planned.plan)(*args)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


FEATURES = {WIDTH, 2 * WIDTH}
TWO_STAGES = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
FORMS = {
    "replicas": Auto(kinds="data", num_microbatches=1),
    "replicas in microbatches": Auto(kinds="data", num_microbatches=2, mesh_shape=(8,)),
    "split": Auto(kinds=("tensor",), num_microbatches=1),
    "pipeline": Auto(kinds=("pipeline",), **TWO_STAGES),
    "pipeline of replicas": Auto(kinds=("pipeline", "data"), **TWO_STAGES),
    "all": Auto(num_microbatches=1, num_stages=1),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_runs_as_jit_does_and_is_of_its_form(form):
    method = FORMS[form]
    planned = traced("layers", method).plan()
    rows = ROWS // (method.num_microbatches or 1)
    sizes, num_stages = parts_of(planned), planned.plan.num_stages
    features, examples = (sizes & {n // parts for n in of for parts in (2, 4, 8)} for of in (FEATURES, {rows}))
    assert bool(features - FEATURES) == (form in ("split", "all")), sizes
    if form != "all":
        assert bool(examples) == (form in ("replicas", "replicas in microbatches", "pipeline of replicas")), sizes
    assert num_stages == (method.num_stages or 1)
    assert_runs_as_jit("layers", planned)


def test_the_printed_plan_and_the_line_of_a_search_say_the_kinds():
    planned = traced("layers", Auto(kinds=("tensor", "data"), num_microbatches=1, mesh_shape=(8,))).plan()
    assert "with no parallelism but data, tensor" in " ".join(str(planned.plan).split())
    assert "with no parallelism but data, tensor" in planned.plan.choice()
    assert autopar.Plan.from_json(planned.plan.to_json()).certificate.kinds == ("data", "tensor")


ON_ONE_MESH = [
    ("data",),
    ("tensor",),
    ("data", "zero"),
    ("data", "expert"),
    ("data", "tensor"),
    ("data", "tensor", "expert"),
    ("tensor", "sequence"),
    ("data", "zero", "tensor", "sequence"),
    None,
]


def seconds_by_kinds(name):
    trace = traced(name).trace

    def seconds(kinds):
        method = Auto(kinds=kinds, num_stages=1, mesh_shape=BOTH.shape)
        return plan_by_search(trace, method, num_devices=8, machine=CLUSTER.machine).sharding.step_time_s

    return {kinds: seconds(kinds) for kinds in ON_ONE_MESH}


def assert_more_kinds_are_no_slower(seconds):
    for few, more in itertools.permutations(seconds, 2):
        if more is None or (few is not None and set(few) < set(more)):
            assert seconds[more] <= 1.001 * seconds[few], (few, more)


def test_more_kinds_are_no_slower_on_one_mesh():
    seconds = seconds_by_kinds("experts")
    assert_more_kinds_are_no_slower(seconds)
    assert seconds["data", "expert"] < seconds["data",] != seconds["tensor",]


def test_more_kinds_are_no_slower_in_stages():
    every = traced("layers", cluster=PAIRS)
    kinds = [("pipeline",), ("data", "pipeline"), ("data", "tensor", "pipeline"), None]
    methods = {each: Auto(kinds=each, **TWO_STAGES) for each in kinds}
    seconds = {each: every.plan(method).simulate(PAIRS).step_time_s for each, method in methods.items()}
    assert_more_kinds_are_no_slower(seconds)
    assert seconds["data", "pipeline"] < seconds["pipeline",]


def test_a_loop_carries_on_what_the_kinds_allow():
    planned = traced("scanned", Auto(kinds="data", num_stages=1, num_microbatches=1)).plan()
    assert parts_of(planned) <= {3, WIDTH, *(math.ceil(ROWS / parts) for parts in (1, 2, 4, 8))}
    assert_runs_as_jit("scanned", planned)


def test_state_is_divided_only_with_zero_where_memory_asks_for_it():
    trace = traced("layers").trace
    # Room for a product's workspace would be far more than for this state.
    where = {"num_devices": 8, "machine": dataclasses.replace(CLUSTER.machine, product_workspace_bytes=0)}
    whole = plan_by_search(trace, Auto(kinds="data", mesh_shape=(8,)), **where)
    assert set(whole.input_specs) <= {"batch.x", "batch.y"}
    tight = {"memory": 0.72 * whole.sharding.peak_bytes, "mesh_shape": (8,), "remat": False}
    with pytest.raises(MemoryTooSmall):
        plan_by_search(trace, Auto(kinds="data", **tight), **where)
    divided = plan_by_search(trace, Auto(kinds=("data", "zero"), **tight), **where)
    assert any(name.startswith("params") for name in divided.input_specs)


def test_without_zero_an_axis_splits_examples_or_features():
    every = allowed_splits(("data", "tensor"), BOTH)
    assert len(every) == 4
    parameter, activation = (((8, "tensor"), (8, "tensor")), ((8, "data"), (8, "tensor")))
    parameter, activation = ([(factor,) for factor in value] for value in (parameter, activation))
    for allowed in every:
        both = Layout(((0,), (1,)))
        assert allowed.allows(Layout(((1,), ())), parameter, BOTH, examples=False) != allowed.allows(
            Layout(((1,), ())), activation, BOTH, examples=True
        )
        assert allowed.allows(both, activation, BOTH, examples=True) == (
            allowed.with_examples == (frozenset({"data"}), frozenset({"tensor"}))
        )


def test_an_axis_beyond_a_factor_splits_the_next_one_as_well():
    (allowed,) = allowed_splits(("data",), BOTH)
    rows = [((2, "data"), (8, "sequence"))]
    assert allowed.allows(Layout(((0,),)), rows, BOTH, examples=True)
    assert not allowed.allows(Layout(((0, 1),)), rows, BOTH, examples=True)
    assert not allowed.allows(Layout(((1,),)), rows, BOTH, examples=True)


def test_fewer_kinds_allow_fewer_splits():
    kinds = ("data", "zero", "tensor", "sequence", "expert")
    sets = [each for n in range(1, 6) for each in itertools.combinations(kinds, n)]
    every = frozenset({"data", "tensor", "sequence", "expert"})

    def ways(named):
        for each in allowed_splits(named, BOTH):
            yield ((every,) * 2, (every,) * 2) if each is None else (each.with_examples, each.without)

    def is_in(few, more):
        return all(a <= b for one, other in zip(few, more, strict=True) for a, b in zip(one, other, strict=True))

    for few, more in itertools.permutations(sets, 2):
        if set(few) < set(more):
            assert all(any(is_in(one, other) for other in ways(more)) for one in ways(few)), (few, more)


def scoped(scope):
    def step(params, batch):
        def loss_of(params):
            with scope:
                return jnp.mean((jnp.tanh(batch @ params["w"]) - batch) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return autopar.parallelize(step, cluster=CLUSTER).trace({"w": array(WIDTH, WIDTH)}, array(ROWS, WIDTH))


def two_stages_step(params, batch):
    def loss_of(params):
        with autopar.stage("first"):
            h = jnp.tanh(batch @ params["a"])
        with autopar.stage("second"):
            return jnp.mean((h @ params["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def constrained_step(params, batch):
    wanted = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",)), P(None, "data"))

    def loss_of(params):
        return jnp.mean(jax.lax.with_sharding_constraint(jnp.tanh(batch @ params["a"]), wanted) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def two_layers(step):
    params = {name: array(WIDTH, WIDTH) for name in ("a", "b")}
    return autopar.parallelize(step, cluster=CLUSTER).trace(params, array(ROWS, WIDTH))


REFUSED = {
    "a pin": (lambda: traced("layers"), {"pins": {"h_0.up": P(None, "data")}, "mesh_shape": (8,)},
              r"layout of params.h_0.up asks for .*kinds=\('data',\).* does not allow"),
    "a constraint": (lambda: two_layers(constrained_step), {"mesh_shape": (8,)},
                     r"sharding constraint .* asks for a layout .*kinds=\('data',\)"),
    "split": (lambda: scoped(autopar.split(devices=2)), {}, "autopar.split.*needs 'tensor' or 'expert' or 'sequence'"),
    "replicas": (lambda: scoped(autopar.replicate(devices=8)), {"kinds": "tensor"}, "autopar.replicate.*needs 'data'"),
    "stages of the model": (lambda: two_layers(two_stages_step), {}, 'names the stages .*has no "pipeline"'),
    "a small mesh": (lambda: traced("layers"), {"mesh_shape": (2,)}, 'mesh_shape .2,. makes 4 stages .*no "pipeline"'),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_kinds_do_not_allow_is_refused(what):
    step, fields, message = REFUSED[what]
    with pytest.raises(InvalidArgument, match=message):
        step().plan(Auto(**({"kinds": "data", "num_microbatches": 1} | fields)))


def test_pins_scopes_and_constraints_within_the_kinds_are_kept():
    pinned = traced("layers").plan(
        Auto(kinds=("data", "tensor"), pins={"h_0.up": P(None, "data")}, mesh_shape=(8,), num_microbatches=1)
    )
    assert pinned.plan.input_specs["params.h_0.up"] == P(None, "data")
    assert scoped(autopar.split(devices=2)).plan(Auto(kinds=("data", "tensor"), num_microbatches=1)).scopes
    asked = two_layers(constrained_step).plan(Auto(kinds="tensor", mesh_shape=(8,), num_microbatches=1))
    assert WIDTH // 8 in parts_of(asked)
