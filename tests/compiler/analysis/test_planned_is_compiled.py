"""The collectives of compiled programs are the planned ones: a few models and meshes, and how the two are compared."""

import importlib.util
from dataclasses import replace

import jax
import pytest

import autopar
from autopar.compiler.analysis.compiled_collectives import KindCheck
from benchmarks import planned_vs_compiled
from benchmarks.models import MODELS
from benchmarks.planned_vs_compiled import Case, Row, case_groups, restricted_methods

# Nothing is run, so that arrays may be large enough for splitting them to be worth it; layers are few.
SIZES = {
    "mlp": {"width": 2048, "hidden": 8192, "batch": 1024},
    "gpt": {"layers": 1, "width": 1024, "vocabulary": 8192, "length": 512},
    "moe": {"layers": 1, "width": 1024, "hidden": 4096, "vocabulary": 8192, "length": 256},
    "moe_ragged": {"layers": 1, "width": 1024, "hidden": 4096, "vocabulary": 8192, "length": 256},
    "convnet": {"stages": 1, "blocks": 1, "channels": 512, "classes": 1024},
    "lstm": {"layers": 1, "width": 1024, "vocabulary": 8192, "length": 32},
}
REMAT = {"remat": True}
SCAN = {"remat": True, "scan": True, "layers": 3}
CASES = {
    "two axes": ("mlp", {}, autopar.Auto(mesh_shape=(2, 4))),
    "microbatches": ("mlp", {}, autopar.Auto(mesh_shape=(8,), num_microbatches=4)),
    "tensor parallel": ("gpt", {}, autopar.TensorParallel(mesh_shape=(4, 2))),
    "recomputed layers": ("gpt", REMAT, autopar.Zero(mesh_shape=(8,), stage=3)),
    "a scan over layers": ("gpt", SCAN, autopar.Zero(mesh_shape=(2, 4), stage=3)),
    "experts": ("moe", {}, autopar.ExpertParallel(mesh_shape=(8,))),
    "sorted tokens": ("moe_ragged", {}, autopar.Auto(mesh_shape=(2, 4))),
    "convolutions": ("convnet", {}, autopar.TensorParallel(mesh_shape=(2, 4))),
    "a loop over time": ("lstm", {}, autopar.Auto(mesh_shape=(2, 2, 2))),
}


def planned(name, sizes, method):
    """The plan for eight H100, whose links are quick."""
    model = MODELS[name](**{**SIZES[name], **sizes})
    cluster = autopar.Cluster(num_devices=8, kind="h100")
    step = autopar.parallelize(model.step, method=method, donate_argnums=0, cluster=cluster)
    return step.trace(model.abstract_state, model.abstract_batch).plan()


@pytest.mark.parametrize(("name", "sizes", "method"), CASES.values(), ids=CASES)
def test_compiled_collectives_are_the_planned_ones(name, sizes, method):
    report = planned(name, sizes, method).verify()
    assert report.collectives.kinds
    assert report, str(report)


INSTALLED = importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.{name}") for name in ("xla_cuda12", "xla_cuda13")
)


# Eight layers of parameters, 67 MB each, are more than fits: some are gathered again for the backward pass.
TIGHT = autopar.Zero(mesh_shape=(8,), stage=3, memory=0.9e9)


@pytest.mark.skipif(not INSTALLED, reason="XLA's GPU compiler: pip install 'autopar[gpu-aot]'")
def test_gpus_repeat_what_is_planned_to_be_repeated():
    found = planned("mlp", {"layers": 8}, TIGHT)
    assert any(each.repeated for each in found.plan.sharding.collectives)
    report = found.verify(target="h100")
    for kind in report.collectives.kinds:
        assert kind.compiled_bytes == pytest.approx(kind.planned_bytes, rel=5e-3), str(report)


@pytest.mark.parametrize(
    ("compiled", "repeated", "moved", "holds"),
    [(1000, 0, 0, True), (1004, 0, 0, False), (1010, 0, 0, False), (990, 0, 0, False), (0, 0, 0, False),
     (800, 200, 0, True), (900, 200, 0, True), (790, 200, 0, False), (1010, 200, 0, False),
     (800, 0, 200, True), (900, 0, 200, False), (790, 0, 200, False), (1000, 0, 200, True),
     (700, 100, 200, True), (690, 100, 200, False), (850, 100, 200, False)],
)  # fmt: skip
def test_compiled_bytes_may_lack_only_what_was_planned_to_be_repeated_and_what_moved(compiled, repeated, moved, holds):
    check = KindCheck(
        kind="all-gather",
        group_size=8,
        planned_count=1,
        planned_bytes=1000,
        repeated_bytes=repeated,
        moved_bytes=moved,
        whole_bytes=0,
        spared_bytes=0,
        compiled_count=1,
        compiled_bytes=compiled,
    )
    assert check.holds == holds


@pytest.mark.parametrize(
    ("kind", "compiled", "whole", "spared", "verdict"),
    [("reduce-scatter", 400, -600, 0, "added up whole"), ("all-reduce", 1600, 600, 0, "added up whole"),
     ("all-reduce", 1700, 600, 0, "DIFFERENT"), ("reduce-scatter", 1000, -600, 0, "DIFFERENT"),
     ("all-gather", 500, 0, 500, "fewer or narrower"), ("all-gather", 400, 0, 500, "DIFFERENT"),
     ("reduce-scatter", 300, -600, 100, "fewer or narrower"), ("all-gather", 1000, 0, 0, "equal")],
)  # fmt: skip
def test_tpus_add_up_whole_and_spare_only_what_was_found_so(kind, compiled, whole, spared, verdict):
    check = KindCheck(
        kind=kind,
        group_size=8,
        planned_count=1,
        planned_bytes=1000,
        repeated_bytes=0,
        moved_bytes=0,
        whole_bytes=whole,
        spared_bytes=spared,
        compiled_count=1,
        compiled_bytes=compiled,
    )
    assert check.verdict == verdict


def test_what_a_loop_does_to_the_same_in_every_round_may_be_compiled_in_front_of_it_and_nothing_else_may_lack():
    """Every microbatch adds the same positions, which lie in parts; XLA for CPUs gathers them before the loop."""
    model = MODELS["gpt"](layers=1, width=16, heads=2, vocabulary=32, length=8, batch=8)
    method = autopar.Auto(num_stages=1, num_microbatches=2, mesh_shape=(2, 2))
    step = autopar.parallelize(model.step, method=method, devices=jax.devices()[:4])
    traced = step.trace(model.abstract_state, model.abstract_batch).plan()
    report = traced.verify()
    assert report, str(report)
    assert "moved out of loops" in str(report)
    plan = traced.plan
    collectives = plan.sharding.collectives
    moving = [n for n, each in enumerate(collectives) if each.invariant_trips > 1]
    # What is as large as one that moved may as well be what moved.
    large = {collectives[n].nbytes for n in moving}
    fixed = [n for n, c in enumerate(collectives) if c.kind == "all-gather" and c.nbytes not in large]
    sizes = {collectives[n].nbytes: n for n in fixed}
    assert moving and sizes and {collectives[n].times for n in moving} == {2}
    for number in (*moving, *sizes.values()):
        for others in (collectives[:number] + collectives[number + 1 :], (*collectives, collectives[number])):
            changed = replace(traced, plan=replace(plan, sharding=replace(plan.sharding, collectives=others)))
            assert not changed.verify(), f"{collectives[number]}: {len(others)} for {len(collectives)}"


def test_benchmark_covers_every_model_on_every_mesh():
    groups = list(case_groups(list(MODELS), None, ["cpu", "h100:64"]))
    assert len(groups) == len(MODELS) * (4 + 3)
    restricted = {case.mesh for group in groups for case in group if case.method != "Auto"}
    assert restricted == {"2x4", "8x8"}
    assert "expert parallel" in restricted_methods("moe")
    assert "expert parallel" not in restricted_methods("gpt")


def test_benchmark_prints_what_could_not_be_made(capsys):
    case = Case(model="mlp", mesh="3x3", method="Auto", compiler="cpu")
    row = planned_vs_compiled.check(case)
    assert isinstance(row, Row)
    assert "needs 9 devices" in row.message
    planned_vs_compiled.print_table([row])
    assert "0 of 1 programs have the planned collectives" in capsys.readouterr().out


@pytest.mark.slow
def test_benchmark_is_run_and_written_and_goes_on_from_there(tmp_path):
    file = tmp_path / "rows.json"
    words = ["--models", "mlp", "--meshes", "8", "--compilers", "cpu", "--methods", "Auto", "--json", str(file)]
    planned_vs_compiled.main(words)
    (row,) = planned_vs_compiled.read_rows(file)
    assert row.holds
    assert row.difference < 1
    planned_vs_compiled.main(words)
    assert planned_vs_compiled.read_rows(file) == [row], "what was checked is not checked again"
    assert jax.device_count() == 8
