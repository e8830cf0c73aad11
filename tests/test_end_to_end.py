"""Every step of the zoo, parallelized in every way, equals the plain `jax.jit` step after three steps.

The full product of models, stages, microbatches and schedules is `benchmarks/equivalence.py`. The table below covers
it: every model on one mesh and in stages, light ones in two and in four, every schedule with many models.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import Lowered
from autopar.errors import DonatedBuffer
from autopar.ir.plan import Plan
from autopar.ir.program import Input, MeshProgram, Program, Run, Send
from autopar.runtime.simulator import ConstantCosts, simulate
from benchmarks import equivalence as benchmark
from tests.equivalence import SCHEDULES, Configuration, compare, largest_difference, parallelized
from tests.zoo import HEAVY as HEAVY_MODELS
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("float64")

COLUMNS = {"specs": {r"\.w$": P(None, "model")}}
# As in Megatron-LM: the first matrix of a perceptron by columns, the second by rows.
MEGATRON = {"specs": {r"\.up\.kernel": P(None, "model"), r"\.down\.kernel": P("model")}}
EXPERTS = {"specs": {r"\.(up|down)$": P("model")}}
MESH_2_4, MESH_2_2 = {"mesh_shape": (2, 4)}, {"mesh_shape": (2, 2)}
REMAT = {"remat": True}


def one(num_microbatches: int, *, donate: bool = False, **options: Any) -> Configuration:
    return Configuration(num_stages=1, num_microbatches=num_microbatches, donate=donate, options=options)


def two(num_microbatches: int, schedule: str, *, donate: bool = False, **options: Any) -> Configuration:
    return Configuration(
        num_stages=2, num_microbatches=num_microbatches, schedule=schedule, donate=donate, options=options
    )


def four(num_microbatches: int, schedule: str, *, donate: bool = False, **options: Any) -> Configuration:
    return Configuration(
        num_stages=4, num_microbatches=num_microbatches, schedule=schedule, donate=donate, options=options
    )


# Models that take long to compile: on one mesh, and in two or four stages. `make sweep` runs the rest of the product.
HEAVY = {
    "gpt_linen": (one(2, **MESH_2_4, **MEGATRON), two(2, "zero-bubble", **MESH_2_2, **MEGATRON)),
    "gpt_scan": (one(2), four(1, "1f1b", donate=True)),
    "gpt_bfloat16": (one(4), four(2, "gpipe")),
    "gpt_nnx": (one(2), two(4, "gpipe", **REMAT)),
    "gpt_equinox": (one(4), four(1, "zero-bubble")),
    "moe": (one(2, **MESH_2_4, **EXPERTS), two(1, "interleaved")),
    "convnet": (one(4), four(2, "1f1b", **REMAT)),
    "convnet_batch_norm": (one(1), two(2, "1f1b")),
    "vit": (one(2), two(4, "eager-1f1b")),
    "recurrent": (one(2), two(4, "zero-bubble")),
    "encoder_decoder": (one(4), two(2, "interleaved")),
    "masked_lm": (one(2), four(4, "eager-1f1b")),
    "dropout": (one(4), two(2, "eager-1f1b", donate=True)),
    "gan": (one(4), two(1, "1f1b")),
}
# Models that compile in seconds.
LIGHT = {
    "mlp": (one(4, **MESH_2_4, **COLUMNS), two(1, "gpipe"), four(2, "zero-bubble", layers=8)),
    "tied_embedding": (one(1, donate=True), two(4, "eager-1f1b", donate=True), four(2, "1f1b")),
    "sum_loss": (one(2), two(4, "interleaved", donate=True), four(1, "gpipe")),
    "arange_loss": (one(4), two(2, "zero-bubble", **REMAT), four(1, "eager-1f1b")),
    "regularized": (one(2), two(1, "1f1b", donate=True), four(4, "eager-1f1b", layers=6)),
    "remat_whole": (one(1), two(2, "gpipe", **REMAT), four(4, "interleaved")),
    "several_arguments": (one(4), two(2, "1f1b", layers=5), four(1, "zero-bubble", donate=True)),
    "dropout_legacy_key": (one(2), two(4, "1f1b", **REMAT), four(1, "zero-bubble")),
    "vae": (one(1), two(2, "gpipe"), four(4, "1f1b", donate=True)),
    "control_flow": (one(2), two(4, "gpipe"), four(1, "eager-1f1b")),
    "scan_layers": (one(1), two(2, "interleaved", layers=8, donate=True), four(4, "zero-bubble")),
    "nested_jit": (one(4), two(1, "interleaved"), four(2, "1f1b", layers=6)),
    "mlp_float16": (one(4), two(2, "1f1b", donate=True), four(1, "gpipe")),
    "mlp_float8": (one(2), two(4, "gpipe"), four(2, "1f1b", donate=True)),
}
TABLE = {**HEAVY, **LIGHT}

# The ones that run on the second Python version too, in two stages: every light model, and of the heavy ones these.
REPRESENTATIVES = {"gpt_linen", "gpt_nnx", "convnet_batch_norm", "recurrent", "dropout", "gan", *LIGHT}


def is_slow(name: str, configuration: Configuration) -> bool:
    return not (name in REPRESENTATIVES and configuration.num_stages == 2)


ROWS = [
    pytest.param(name, c, id=f"{name}: {c}", marks=[pytest.mark.slow] * is_slow(name, c))
    for name, configurations in TABLE.items()
    for c in configurations
]


@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")  # microbatches smaller than the mesh
@pytest.mark.parametrize(("name", "configuration"), ROWS)
def test_parallelized_step_equals_the_plain_step(name, configuration):
    agreement = compare(ZOO[name], configuration)
    assert agreement.holds, str(agreement)


# Its losses take along an axis, in whose indices JAX leaves out a dimension of one row.
@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")
def test_microbatches_of_one_row_equal_the_plain_step():
    agreement = compare(ZOO["tied_embedding"], two(16, "1f1b"))
    assert agreement.holds, str(agreement)


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        ("mlp", four(2, "dualpipe-v", layers=8)),
        ("tied_embedding", two(4, "zero-bubble-v", donate=True)),
        ("several_arguments", two(4, "interleaved-zero-bubble", donate=True)),
        ("regularized", four(4, "zero-bubble-h2", layers=6)),
    ],
)
def test_other_orders_of_the_tasks_equal_the_plain_step(name, configuration):
    agreement = compare(ZOO[name], configuration)
    assert agreement.holds, str(agreement)


def test_the_table_covers_the_product():
    assert TABLE.keys() == ZOO.keys()
    assert HEAVY.keys() == HEAVY_MODELS
    for name, configurations in TABLE.items():
        stages = {c.num_stages for c in configurations}
        assert stages == {1, 2, 4} if name in LIGHT else len(stages) == 2 and 1 in stages
    pairs = {(c.num_stages, c.num_microbatches) for configurations in TABLE.values() for c in configurations}
    assert pairs == set(itertools.product((1, 2, 4), repeat=2))
    models = Counter(c.schedule for configurations in TABLE.values() for c in configurations if c.num_stages > 1)
    assert set(models) == set(SCHEDULES)
    assert min(models.values()) >= 5


def lowered(name: str, configuration: Configuration) -> Lowered:
    _, *arguments = ZOO[name].make()
    return parallelized(ZOO[name], configuration).trace(*arguments, **ZOO[name].kwargs).plan().lower()


def sends_per_step(mesh: MeshProgram) -> list[Send]:
    """Return the collectives of a mesh once per step, in contrast to once per microbatch."""
    sends = [i for i in mesh.instructions if isinstance(i, Send)]
    return [send for send in sends if any("@" not in value for value in send.values)]


def test_a_step_is_traced_once_for_each_shape_even_if_its_state_begins_with_a_python_number():
    plain, state, batch = ZOO["regularized"].make()
    traced = []

    def step(state, batch):
        traced.append(batch["x"].shape)
        return plain(state, batch)

    ours = autopar.parallelize(step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=2))
    state = {**state, "step": 0}
    half = jax.tree.map(lambda leaf: leaf[:8], batch)
    for part in (batch, half):
        state, _ = ours(state, part)
        assert traced
        traced.clear()
        for _ in range(2):
            state, _ = ours(state, part)
        assert not traced
    ours(state, batch)
    assert not traced


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        ("mlp", one(1, **MESH_2_4, **COLUMNS)),
        ("mlp", one(4, **MESH_2_4, **COLUMNS)),
        ("mlp", two(2, "1f1b", **MESH_2_2, **COLUMNS)),
        ("tied_embedding", four(2, "zero-bubble")),
        ("scan_layers", two(2, "1f1b", donate=True)),
        ("scan_layers", four(2, "gpipe", remat=True)),
        ("regularized", two(4, "interleaved", donate=True)),
    ],
    ids=str,
)
def test_state_comes_back_where_the_next_call_wants_it(name, configuration):
    _, state, *batch = ZOO[name].make()
    if configuration.donate:
        state = jax.tree.map(jnp.array, state)
    program = lowered(name, configuration).program
    after, _ = parallelized(ZOO[name], configuration)(state, *batch)
    for number, leaf in enumerate(jax.tree.leaves(after)):
        uses = [item for item in program.inputs if item.leaf == number]
        assert uses
        # A counter is read on every mesh and comes back on one; whatever has a size is on all that read it.
        assert (any if leaf.ndim == 0 else all)(lies(leaf, item, program) for item in uses)


def lies(leaf: jax.Array, item: Input, program: Program) -> bool:
    """True if every device of an input's mesh holds just its part of it already."""
    mesh, kind = program.meshes[item.mesh], program.meshes[item.mesh].values[item.value]
    devices = np.array(jax.devices())[list(mesh.devices)].reshape(mesh.shape)
    wanted = NamedSharding(Mesh(devices, mesh.axis_names), kind.spec).devices_indices_map(kind.shape)
    first = 0 if item.window is None else item.window.start
    rows = {device: [i + first for i in range(kind.shape[0])[index[0]]] for device, index in wanted.items() if index}
    held = leaf.sharding.devices_indices_map(leaf.shape)
    return set(wanted) <= set(held) and all(
        [*range(leaf.shape[0])[held[device][0]]] == rows[device]
        and [range(n)[i] for n, i in zip(leaf.shape[1:], held[device][1:])]
        == [range(n)[i] for n, i in zip(kind.shape[1:], wanted[device][1:])]
        for device in rows
    )


@pytest.mark.parametrize("configuration", [one(2, **MESH_2_4, **COLUMNS), two(2, "zero-bubble", layers=6)], ids=str)
def test_a_plan_read_from_json_gives_the_same_numbers(configuration):
    case = ZOO["mlp"]
    plain, state, batch = case.make()
    ours = parallelized(case, configuration)
    plan = Plan.from_json(ours.trace(state, batch).plan().plan.to_json())
    again = autopar.parallelize(plain, method=plan)
    got, want = again(state, batch), ours(state, batch)
    assert largest_difference(got, want, 0.0).holds
    assert str(again.trace(state, batch).plan().lower()) == str(ours.trace(state, batch).plan().lower())


def test_a_donated_state_is_gone_and_refused_by_name():
    case = ZOO["mlp"]
    _, state, batch = case.make()
    ours = parallelized(case, two(2, "1f1b", donate=True))
    placed, _ = ours(state, batch)  # on the meshes now, so that it can be given up
    ours(placed, batch)
    with pytest.raises(DonatedBuffer, match=r"'state\..*' was donated to an earlier call"):
        ours(placed, batch)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_tied_table_and_its_gradient_cross_once_per_step(num_microbatches):
    program = lowered("tied_embedding", two(num_microbatches, "1f1b")).program
    (table,) = (i.value for i in program.inputs if i.mesh == 0 and "params.embedding" in i.value)
    there, back = map(sends_per_step, program.meshes)
    large = [[v for send in sends for v in send.values if table_sized(program, v)] for sends in (there, back)]
    assert large[0] == [table]
    assert len(large[1]) == 1


def table_sized(program: Program, value: str) -> bool:
    return any(mesh.values[value].shape == (32, 16) for mesh in program.meshes if value in mesh.values)


def test_a_global_norm_is_one_exchange_of_scalars():
    program = lowered("regularized", two(4, "1f1b")).program
    for mesh in program.meshes:
        (send,) = sends_per_step(mesh)
        assert {mesh.values[value].shape for value in send.values} == {()}
        assert {i.task.update_round for i in mesh.instructions if isinstance(i, Run) and i.task.kind == "U"} == {0, 1}


def test_each_device_holds_only_its_layers_of_a_stacked_parameter():
    case = ZOO["scan_layers"]
    _, state, batch = case.make()
    state, _ = parallelized(case, four(2, "1f1b"))(state, batch)
    stacked = [leaf for leaf in jax.tree.leaves(state) if leaf.shape[:1] == (8,)]
    assert len(stacked) == 6
    for leaf in stacked:
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}
        assert leaf.is_fully_addressable and len(leaf.sharding.device_set) == 8


@pytest.mark.parametrize("name", ["mlp", "tied_embedding", "scan_layers"])
def test_memory_falls_from_gpipe_to_1f1b_and_by_remat(name):
    _, state, batch = ZOO[name].make()
    # So many examples that activations are most of the memory.
    many = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((4096, *leaf.shape[1:]), leaf.dtype), batch)

    def peaks(schedule: str, **options: Any) -> tuple[int, ...]:
        step = parallelized(ZOO[name], four(8, schedule, donate=True, **options))
        program = step.trace(state, many).plan().lower().program
        return simulate(program, ConstantCosts(forward_s=1.0, backward_s=2.0)).peak_bytes

    gpipe = peaks("gpipe")
    assert all(less < more for less, more in zip(peaks("1f1b"), gpipe))
    assert sum(peaks("gpipe", remat=True)) < sum(gpipe)


def test_the_benchmark_writes_what_it_found_and_goes_on_from_there(tmp_path: Path):
    file = tmp_path / "equivalence.json"

    def run(*stages: str) -> list[dict[str, Any]]:
        chosen = ["--models", "nested_jit", "--microbatches", "2", "--schedules", "gpipe", "--stages", *stages]
        assert benchmark.main([*chosen, "--json", str(file)]) == 0
        return json.loads(file.read_text())

    first = run("1")
    rows = run("1", "2")
    assert rows[:1] == first, "a row that was there is not run again"
    assert [(row["num_stages"], row["schedule"], row["equal"]) for row in rows] == [(1, "", True), (2, "gpipe", True)]
