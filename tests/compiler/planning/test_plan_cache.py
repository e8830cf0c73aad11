"""A plan is made once for all that it depends on, whatever happens to the files."""

import json
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, MemoryTooSmall
from autopar.compiler import passes
from autopar.compiler.planning import plan_cache
from autopar.compiler.planning.plan_cache import kept_plan, plan_key
from autopar.errors import GenericFiguresWarning, ReplicatedWarning
from autopar.hardware.machine import Machine, register_machine
from autopar.ir.plan_sharding import Certificate
from autopar.kept_files import keep_text, read_text
from tests.small_steps import mlp_batch, mlp_loss, mlp_params, mlp_step, sgd

CLUSTER = Cluster.parse("1x dgx-h100").with_devices(2)
METHOD = autopar.Auto(num_stages=1)


def traced(step=mlp_step, rows=8, cluster=CLUSTER, num_layers=2, **options):
    return autopar.parallelize(step, cluster=cluster, **options).trace(mlp_params(num_layers), mlp_batch(rows))


def key(step=None, method=METHOD, cluster=CLUSTER, checked=False):
    return plan_key((step or traced()).trace, method, cluster, checked=checked)


def kept_files(directory):
    return sorted(directory.glob("plan-*.json"))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_search(monkeypatch):
    def forbid():
        def never(*args, **kwargs):
            pytest.fail("planned although the plan is kept")

        monkeypatch.setattr(passes, "_plan_of_method", never)

    return forbid


@pytest.mark.parametrize(
    "method",
    [
        autopar.Auto(),
        autopar.Auto(num_stages=2, num_microbatches=4),
        autopar.Zero(stage=3),
        autopar.Megatron(data=2),
        autopar.PipelineParallel(num_stages=2),
        autopar.DataParallel(num_microbatches=2),
    ],
    ids=str,
)
def test_the_same_step_plans_again_without_a_search(method, directory, no_search):
    first = traced().plan(method)
    assert len(kept_files(directory)) == 1
    no_search()
    again = traced().plan(method)
    assert again.plan == first.plan and again.plan.to_json() == first.plan.to_json()
    assert str(again) == str(first)


KEYS = {
    "as it is": key,
    "another step": lambda: key(traced(sgd(mlp_loss, 0.2))),
    "other shapes": lambda: key(traced(rows=16)),
    "another depth": lambda: key(traced(num_layers=3)),
    "another batch": lambda: key(traced(batch_argnums=())),
    "donated parameters": lambda: key(traced(donate_argnums=(0,))),
    "another method": lambda: key(method=autopar.Auto(num_stages=1, effort="fast")),
    "pins": lambda: key(method=autopar.Auto(num_stages=1, pins={"w": jax.sharding.PartitionSpec("data")})),
    "a budget": lambda: key(method=autopar.Auto(num_stages=1, memory=1e9)),
    "another machine": lambda: key(cluster=Cluster.parse("1x p3.16xlarge").with_devices(2)),
    "more devices": lambda: key(cluster=CLUSTER.with_devices(4)),
    "other figures": lambda: key(cluster=Cluster.of_hosts(replace(CLUSTER.machine, kernel_s=1e-3), 1)),
    "to be compiled": lambda: key(checked=True),
}


def test_all_that_a_plan_depends_on_is_in_its_key():
    keys = {name: make() for name, make in KEYS.items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(KEYS)
    assert key(traced()) == keys["as it is"]


def test_what_was_registered_or_set_is_in_the_key(monkeypatch):
    before = key()
    with monkeypatch.context() as patched:
        costs = dict(plan_cache.collective_costs())
        changed = {**costs, "all-reduce": costs["all-to-all"]}
        patched.setattr(plan_cache, "collective_costs", lambda: tuple(changed.items()))
        assert key() not in (None, before)
    with monkeypatch.context() as patched:
        rules = plan_cache.registered_rules()
        patched.setattr(plan_cache, "registered_rules", lambda: (*rules, ("of no program here", lambda eqn: None)))
        assert key() == before
        patched.setattr(plan_cache, "registered_rules", lambda: (*rules, ("tanh", lambda eqn: None)))
        assert key() is None
    with monkeypatch.context() as patched:
        patched.setattr(plan_cache, "_releases", lambda: ("another release",))
        assert key() not in (None, before)
    autopar.set_default_strategy(autopar.replicate())
    try:
        assert key() not in (None, before)
    finally:
        autopar.set_default_strategy(None)
    assert key() == before


def test_the_figures_of_a_registered_machine_are_in_the_key(own_machines):
    machine = replace(Machine.named("p3.16xlarge"), name="one of ours", kind="one of ours")
    keys: list[str | None] = []
    for share in (1.0, 0.5):
        register_machine(replace(machine, memory_bytes=share * machine.memory_bytes))
        keys.append(key(cluster=Cluster(num_devices=2, kind="one of ours")))
    assert None not in keys and keys[0] != keys[1]


def test_a_line_of_the_model_that_moved_is_another_key():
    source = "def loss(params, batch):\n    h, y = batch\n    return ((h @ params[0]['w'] - y) ** 2).mean()\n"
    found = []
    for text in (source, source, "\n" + source):
        names = {}
        exec(compile(text, "model.py", "exec"), names)
        found.append(key(traced(sgd(names["loss"]))))
    assert found[0] == found[1] != found[2]


def damaged(text):
    return text[: len(text) // 2]


def changed(text):
    return text.replace("1f1b", "gpipe")


def of_another_program(text):
    return with_plan(text, lambda plan: replace(plan, fingerprint="0" * 16))


def of_more_devices(text):
    return with_plan(text, lambda plan: replace(plan, meshes=(replace(plan.meshes[0], devices=(6, 7)),)))


def at_another_batch(text):
    body = json.loads(text)
    return json.dumps(body | {"other batches": dict.fromkeys(body["other batches"], "0")})


def of_another_key(text):
    return json.dumps(json.loads(text) | {"key": "0" * 64})


def with_plan(text, change):
    body = json.loads(text)
    return json.dumps(body | {"plan": change(autopar.Plan.from_json(body["plan"])).to_json()})


DAMAGED = {"empty": lambda text: "", "half": damaged, "changed": changed}
POISONED = {
    "no JSON": lambda text: "{",
    "a list": lambda text: "[]",
    "no fields": lambda text: "{}",
    "no plan": lambda text: json.dumps(json.loads(text) | {"plan": "{}"}),
    "of another program": of_another_program,
    "of more devices": of_more_devices,
    "at another batch": at_another_batch,
    "of another key": of_another_key,
}


@pytest.mark.parametrize("kind", [*DAMAGED, *POISONED])
def test_an_entry_that_cannot_be_believed_is_made_again(kind, directory, no_search):
    method = autopar.PipelineParallel(num_stages=1, num_microbatches=2)
    first = traced().plan(method).plan
    (file,) = kept_files(directory)
    if kind in DAMAGED:
        file.write_text(DAMAGED[kind](file.read_text()))
    else:
        keep_text(directory, file.name, POISONED[kind](read_text(directory, file.name)))
    assert traced().plan(method).plan == first
    no_search()
    assert traced().plan(method).plan == first


def test_what_was_warned_of_is_warned_of_again(directory, no_search):
    def loss(params, batch):
        x = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(batch[0].shape, jnp.float32), batch[0])
        return mlp_loss(params, (jax.lax.stop_gradient(x), batch[1]))

    def reasons():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced(sgd(loss)).plan(METHOD)
        return [str(each.message) for each in caught if issubclass(each.category, ReplicatedWarning)]

    assert reasons() == reasons() != []
    assert not kept_files(directory)  # a callback has no content

    trace, plan = traced().trace, traced().plan(METHOD).plan

    def make():
        plan_cache.note_replicated("a table is whole")
        return plan

    for _ in range(2):
        with pytest.warns(ReplicatedWarning, match="a table is whole"):
            kept_plan(trace, METHOD, CLUSTER, checked=True, directory=directory, make=make)
        make = no_search


def test_generic_figures_are_warned_of_where_the_plan_is_kept_too(directory, no_search):
    for _ in range(2):
        with pytest.warns(GenericFiguresWarning, match="kind 'abacus'"):
            traced(cluster=Cluster(num_devices=2, kind="abacus")).plan(METHOD)
        no_search()


def test_what_a_clock_ended_is_not_kept(directory):
    trace, plan = traced().trace, traced().plan(METHOD).plan
    for stopped in ("the time limit of 3 s ended the search", 'effort="fast" ended the search'):
        certificate = Certificate(step_time_s=2.0, lower_bound_s=1.0, tried=(1,), runners_up=(), stopped=stopped)
        ended = replace(plan, certificate=certificate)
        kept_plan(trace, METHOD, CLUSTER, checked=True, directory=directory / stopped[:3], make=lambda: ended)  # noqa: B023
        assert len(kept_files(directory / stopped[:3])) == (not certificate.stopped_by_clock)


def test_errors_are_not_kept(directory):
    for _ in range(2):
        with pytest.raises(MemoryTooSmall):
            traced().plan(autopar.Auto(memory=100.0))
    assert not kept_files(directory)
