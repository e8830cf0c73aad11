"""The weak-scaling benchmark counts what it says it counts, and tells what is wrong with its options."""

import dataclasses
import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.pipeline.placement import layer_order
from autopar.compiler.pipeline.prepare import prepare
from autopar.errors import InvalidArgument
from benchmarks import weak_scaling_local
from benchmarks.__main__ import main
from benchmarks.hand_candidates import hand_candidates
from benchmarks.models.alpa_gpt import GPT_SIZES, GPTSize, alpa_gpt
from benchmarks.models.alpa_moe import MoESize, alpa_moe
from benchmarks.models.sizes import FAMILIES
from benchmarks.models.wide_resnet import ResNetSize, wide_resnet
from benchmarks.planned_case import planned_row
from benchmarks.schedules import simulated
from benchmarks.stage_ablations import equal_cuts
from benchmarks.weak_scaling_plot import draw
from benchmarks.weak_scaling_rows import merged, read_json, row_of, rows_table, share_of_linear, write_json

KEYS = ["model", "gpus", "method", "step_time_s", "tflops_per_gpu", "tokens_per_s", "peak_gib", "plan_time_s"]
KEYS += ["lower_bound_s", "plan"]
GPT = GPTSize(width=64, layers=2, heads=4, length=64, vocabulary=256, batch=32)
MOE = MoESize(width=64, layers=2, heads=4, length=64, vocabulary=256, batch=8, experts=4, group=128)
RESNET = ResNetSize(channels=8, depth=26, image=64, classes=16, batch=8)
SMALL = {
    "gpt": alpa_gpt("small-gpt", GPT, jnp.float32),
    "moe": alpa_moe("small-moe", MOE, jnp.float32),
    "wresnet": wide_resnet("small-resnet", RESNET),
}
# One layer, to be planned quickly.
TINY = alpa_gpt("tiny-gpt", dataclasses.replace(GPT, layers=1, width=32, length=16), jnp.float16)
HOST = autopar.Cluster.parse("p3.16xlarge")


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family].models]
)
def test_models_have_as_many_parameters_as_their_names_say(family, name):
    size = name.rpartition("-")[2].upper()
    expected = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    # Alpa counts a tied embedding and has untied ones, which shows in the smallest; no array is made, of 405B either.
    untied = 51200 * 1024 if family == "gpt" else 0
    assert 0.9 * expected <= FAMILIES[family].maker(name)().num_parameters <= 1.1 * expected + untied


def product_flops(jaxpr):
    """FLOPs of the matrix products and convolutions of a program, at every depth."""
    total = 0
    for eqn in jaxpr.eqns:
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * math.prod(shapes[2]) * math.prod(shapes[0][d] for d in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            total += 2 * math.prod(shapes[2]) * math.prod(shapes[1][:3])
        inner = [getattr(param, "jaxpr", param) for param in eqn.params.values()]
        total += sum(product_flops(each) for each in inner if hasattr(each, "eqns"))
    return total


@pytest.mark.parametrize(
    ("family", "not_counted"),
    [
        ("gpt", 0),
        # Alpa counts the places of both choices of a token as one product of an outer shape, and has two.
        ("moe", 2 * MOE.batch * MOE.length * 2 * MOE.group),
        # The first convolution needs no gradient of the images: two passes instead of three.
        ("wresnet", 2 * RESNET.batch * 32**2 * 7 * 7 * 3 * RESNET.channels / 3),
    ],
)
def test_flops_of_a_step_are_three_times_the_products_of_the_forward_pass(family, not_counted):
    workload = SMALL[family]
    arrays = (workload.params, workload.statistics, workload.batch)
    forward = jax.make_jaxpr(workload.loss)(*jax.tree.map(lambda array: array.abstract, arrays))
    assert workload.flops == pytest.approx(3 * (product_flops(forward.jaxpr) - not_counted), rel=1e-9)


def test_flops_of_alpas_model_are_those_of_its_formula():
    # benchmark/alpa/util.py, compute_gpt_tflops without checkpoint_activations, for 2.6B and 1024 sequences.
    assert GPT_SIZES["2.6B"].flops == pytest.approx(17.7131323e15, rel=1e-8)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_a_step_keeps_its_master_copy_in_32_bits_and_learns(dtype):
    workload = alpa_gpt("gpt", dataclasses.replace(GPT, layers=1, batch=4, length=16), dtype)
    state, batch = workload.create_state(), workload.create_batch()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), workload.abstract_state
    )
    step, losses = jax.jit(workload.step), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(dtype)}
    if dtype == jnp.float16:
        assert {leaf.dtype for leaf in jax.tree.leaves(state.master)} == {jnp.dtype(jnp.float32)}
        np.testing.assert_array_equal(state.params["head"], state.master["head"].astype(dtype))


@pytest.mark.parametrize("method", ["data", "zero3", "megatron", "intra-only", "auto", "inter-only"])
def test_a_planned_row_follows_from_the_modelled_step(method):
    row = planned_row(TINY, HOST.with_devices(2), method, num_microbatches=2)
    assert list(dataclasses.asdict(row)) == KEYS
    assert (row.model, row.gpus, row.method) == ("tiny-gpt", 2, method)
    assert row.tflops_per_gpu == pytest.approx(TINY.flops / row.step_time_s / 2e12)
    assert row.tokens_per_s == pytest.approx(TINY.tokens / row.step_time_s)
    if method in ("auto", "intra-only") and row.plan.startswith("1 stage "):
        assert 0 < row.lower_bound_s <= row.step_time_s * (1 + 1e-9)
    assert 0 < row.peak_gib < 16 and row.plan_time_s > 0
    assert "2 microbatches" in row.plan


def test_a_plan_of_any_sharding_is_not_slower_than_one_of_data_parallelism():
    data, best = (planned_row(TINY, HOST.with_devices(4), each, num_microbatches=1) for each in ("data", "intra-only"))
    assert best.step_time_s <= data.step_time_s * (1 + 1e-6)


def test_a_search_for_stages_of_as_many_layers_finds_no_faster_plan():
    model = alpa_gpt("three-layers", dataclasses.replace(GPT, layers=3, width=32, length=16), jnp.float32)
    auto, less = (
        planned_row(model, HOST.with_devices(2), each, num_microbatches=8) for each in ("auto", "equal-layer")
    )
    assert auto.step_time_s <= less.step_time_s * (1 + 1e-6)
    assert "8 microbatches" in less.plan


def test_layers_of_as_many_operators_are_as_even_as_can_be():
    step = autopar.parallelize(SMALL["wresnet"].step, cluster=HOST.with_devices(2))
    trace = step.trace(SMALL["wresnet"].abstract_state, SMALL["wresnet"].abstract_batch).trace
    options = {"batch_statistics": "per_microbatch", "random": "full_batch"}
    phases = prepare(trace, num_layers=1, num_microbatches=2, loop_pieces=1, **options).phases
    sizes = np.diff([0, *equal_cuts(phases, 3), len(layer_order(phases))])
    assert len(sizes) == 3 and sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "3", "--hosts", "2"], "3 devices do not divide among --hosts 2"),
        (["--cluster", "p3.16xlarge", "--hosts", "2"], "--hosts 2 runs here and --cluster p3.16xlarge is modelled"),
        (["--devices", "2", "--hosts", "none"], "--hosts is 'none'"),
    ],
)
def test_processes_that_cannot_share_the_devices_are_refused(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["gpt", *options])
    assert message in capsys.readouterr().err


def small_gpus(count, memory_bytes):
    return autopar.Cluster(num_devices=count, machine=dataclasses.replace(HOST.machine, memory_bytes=memory_bytes))


@pytest.mark.parametrize("method", ["data", "zero3"])
def test_a_plan_that_a_gpu_has_no_room_for_has_a_row_with_its_bytes_and_no_time(method):
    row = planned_row(TINY, small_gpus(2, 1e5), method, num_microbatches=4)
    assert row.step_time_s is row.tflops_per_gpu is row.tokens_per_s is None
    assert row.peak_gib * 2**30 > 1e5
    assert row.plan.startswith("out of memory: ")


def test_a_search_that_finds_no_plan_has_a_row_that_says_why():
    row = planned_row(TINY, small_gpus(2, 1e5), "intra-only", num_microbatches=4)
    assert row.step_time_s is row.peak_gib is None
    assert row.plan.startswith("out of memory: ")


def test_a_batch_that_does_not_divide_among_the_gpus_is_refused():
    with pytest.raises(InvalidArgument, match="The batch of 32 does not divide among 5 GPUs"):
        planned_row(TINY, HOST.with_devices(5), "data")


def test_numbers_of_microbatches_into_which_a_model_cannot_be_split_are_passed_over():
    """Of eight groups of tokens there are no sixteen microbatches, though there are of sixteen examples."""
    groups = dataclasses.replace(MOE, batch=16, length=8, group=16, layers=1)
    planned_row(alpa_moe("groups", groups, jnp.float32), HOST.with_devices(2), "inter-only", num_microbatches=8)
    with pytest.raises(InvalidArgument, match="or not into the microbatches that were asked for"):
        planned_row(alpa_moe("groups", groups, jnp.float32), HOST.with_devices(2), "inter-only", num_microbatches=16)


def degrees(name, workload, count):
    found = hand_candidates(name, workload, HOST.with_devices(count))
    return [(each.data, each.tensor, each.pipeline, each.zero) for each in found]


def test_hand_candidates_are_the_degrees_that_a_practitioner_would_try():
    gpt = FAMILIES["gpt"]
    assert set(degrees("data", gpt.maker("2.6B")(), 8)) == {(8, 1, 1, 0)}
    assert set(degrees("zero3", gpt.maker("2.6B")(), 8)) == {(8, 1, 1, 3)}
    # A stage for every layer at most.
    assert set(degrees("inter-only", gpt.maker("39B")(), 64)) == {(1, 1, 48, 0)}
    for name, count in gpt.by_gpus.items():
        found = degrees("megatron", gpt.maker(count)(), name)
        assert found and all(data * tensor * pipeline == name for data, tensor, pipeline, _ in found)
        assert all(tensor <= 8 for _, tensor, _, _ in found)


def test_a_given_plan_is_simulated_on_the_cluster_that_it_was_made_for():
    step = autopar.parallelize(TINY.step, donate_argnums=0, cluster=HOST.with_devices(2))
    traced = step.trace(TINY.abstract_state, TINY.abstract_batch)
    plan = traced.plan(autopar.Auto(num_stages=1, num_microbatches=1)).plan
    assert planned_row(TINY, HOST.with_devices(2), plan).step_time_s == plan.sharding.step_time_s
    with pytest.raises(InvalidArgument, match=r"made for 2 devices of 'p3\.16xlarge', the cluster has 2 of 'dgx-h100'"):
        planned_row(TINY, autopar.Cluster.parse("dgx-h100").with_devices(2), plan)
    by_hand = traced.plan(autopar.DataParallel()).plan
    assert planned_row(TINY, HOST.with_devices(2), by_hand).step_time_s == by_hand.sharding.step_time_s


def rows():
    timed = [(1, "data", 1.0), (2, "data", 1.25), (2, "zero3", 2.0), (4, "data", None)]
    return [row_of(SMALL["gpt"], gpus=n, method=method, step_time_s=s, plan="P") for n, method, s in timed]


def test_the_share_of_linear_scaling_is_relative_to_the_smallest_run_of_the_method():
    assert [share_of_linear(row, rows()) for row in rows()] == [1.0, pytest.approx(0.4), 1.0, None]


def test_rows_are_written_with_these_keys_and_nothing_else(tmp_path):
    write_json(rows(), tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [list(row) for row in written] == [KEYS] * 4
    assert written[3]["step_time_s"] is None and written[3]["plan"] == "P"
    assert rows_table(rows()).row_count == 4


def test_rows_replace_those_of_the_same_model_gpus_and_method_in_a_file(tmp_path):
    write_json(rows(), tmp_path / "rows.json")
    again = row_of(SMALL["gpt"], gpus=2, method="data", step_time_s=1.0, plan="new")
    found = merged([again], read_json(tmp_path / "rows.json"))
    assert [(row.gpus, row.method, row.plan) for row in found] == [
        (1, "data", "P"),
        (2, "data", "new"),
        (2, "zero3", "P"),
        (4, "data", "P"),
    ]


def test_a_file_of_something_else_is_not_written_over(tmp_path):
    (tmp_path / "rows.json").write_text('{"step": 1}')
    with pytest.raises(InvalidArgument, match="holds no rows of this benchmark"):
        read_json(tmp_path / "rows.json")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_rows_are_drawn(tmp_path):
    draw(rows(), "title", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


CLUSTER = ["--cluster", "p3.16xlarge"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpr"], "The benchmark is 'gpr', which there is not. Did you mean gpt?"),
        (["gpt", "--method", "zero"], "The method is 'zero', which there is not. Did you mean"),
        (["gpt", "--method", "data,intra"], "Did you mean intra-only or inter-only?"),
        (["gpt", "--cluster", "p3.16xlarg"], "p3.16xlarge"),
        (["gpt", *CLUSTER, "--gpus", "8", "--model", "2.7B"], "The model of gpt is '2.7B', which there is not"),
        (["gpt", *CLUSTER, "--gpus", "3"], "There is no gpt model for 3 GPUs"),
        (["gpt", *CLUSTER, "--gpus", "0"], "--gpus is '0'. Give numbers of at least 1"),
        (["gpt", *CLUSTER, "--gpus", "-8"], "--gpus is '-8'. Give numbers of at least 1"),
        (["gpt", *CLUSTER, "--gpus", "two"], "--gpus is 'two'. Give numbers of at least 1"),
        (["gpt", "--cluster", "2x p3.16xlarge", "--gpus", "32"], "--gpus asks for 32, 2x p3.16xlarge has 16"),
        (["gpt", *CLUSTER, "--devices", "8"], "Give one of them"),
        (["gpt", *CLUSTER, "--gpus", "8", "--microbatches", "0"], "--microbatches is '0'"),
        (["gpt", "--gpus", "8"], "--gpus is for a cluster that is modelled, and --cluster is missing"),
        (["gpt", "--devices", "0"], "--devices is '0'. Give numbers of at least 1"),
        (["gpt", "--devices", "1", "--repetitions", "0"], "--repetitions is '0'"),
        (["gpt", *CLUSTER, "--gpus", "8", "--plan", "no-such.json"], "There is no file no-such.json"),
        (["gpt", *CLUSTER, "--gpus", "1,2", "--plan", "no-such.json"], "Give one number, and no --method"),
        (["gpt", "--devices", "1", "--plot", "rows.png"], "needs matplotlib"),
        (["gpt", "--devices", "1", "--plot", "rows.jpg"], "rows.jpg"),
    ],
)
def test_options_that_cannot_be_used_are_refused_with_what_to_do(words, message, capsys):
    if message == "needs matplotlib" and importlib.util.find_spec("matplotlib") is not None:
        pytest.skip("matplotlib is there")
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_devices_that_are_not_there_are_refused(capsys):
    with pytest.raises(SystemExit):
        weak_scaling_local.main(["--family", "gpt", "--devices", "999", "--method", "data"])
    assert f"--devices asks for 999, this machine has {len(jax.devices())} of 'cpu'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_runs_on_devices_of_this_machine_and_its_row_is_written(tmp_path):
    file = tmp_path / "rows.json"
    main(["wresnet", "--devices", "2", "--method", "data", "--repetitions", "1", "--json", str(file)])
    (row,) = json.loads(file.read_text())
    assert list(row) == KEYS
    assert (row["model"], row["gpus"], row["method"]) == ("wresnet-12-channels", 2, "data")
    assert row["step_time_s"] > 0 and row["tokens_per_s"] > 0


def test_schedules_are_compared_on_the_same_stages():
    workload = alpa_gpt("small-gpt", dataclasses.replace(GPT, layers=8, batch=8), jnp.float16)
    step = autopar.parallelize(workload.step, cluster=HOST.with_devices(2), donate_argnums=(0,))
    traced = step.trace(workload.abstract_state, workload.abstract_batch)
    times = {
        virtual: simulated(workload, traced, HOST.with_devices(2), "1x1x2", schedule, virtual).step_time_s
        for schedule, virtual in (("1f1b", 1), ("interleaved", 2))
    }
    assert times[2] < times[1]
    refused = simulated(workload, traced, HOST.with_devices(2), "1x1x2", "interleaved", 40)
    assert refused.step_time_s is None and "stages" in refused.message
