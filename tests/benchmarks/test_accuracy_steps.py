"""Measured steps of JAX programs, as the compiler plans and simulates them."""

import csv
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar import Auto, Megatron, PipelineParallel
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Machine
from benchmarks.accuracy import accuracy_report
from benchmarks.accuracy_cases import Unusable
from benchmarks.accuracy_journal import Entry, Journal
from benchmarks.accuracy_report import DIFFERENT, Predicted, ordered_pairs, summary
from benchmarks.accuracy_rows import STEP_COLUMNS, STEPS, Measurements, Row, read_measurements
from benchmarks.accuracy_steps import StepCase, method_of, priced, step_case_of, workload_of
from benchmarks.models.alpa_moe import MoESize
from benchmarks.models.wide_resnet import ResNetSize

STEP_ROW = {
    "id": "small-1",
    "source": "someone's log",
    "model": "gpt-small",
    "family": "gpt",
    "layers": "2",
    "hidden": "128",
    "ffn": "512",
    "heads": "4",
    "vocab": "512",
    "seq": "64",
    "global_batch": "8",
    "microbatches": "1",
    "dtype": "compute float16, parameters float32, adamw float32",
    "machine": "p3.16xlarge",
    "devices": "2",
    "data": "2",
    "tensor": "1",
    "pipeline": "1",
    "zero": "0",
    "remat": "full",
    "step_s": "0.01",
    "oom": "0",
    "group": "small-2",
    "complete": "yes",
}
MOE = {"family": "moe", "ffn": "1024", "experts": "4", "top_k": "2", "notes": "GShard top-2, group 64"}
RESNET = {"family": "wresnet", "layers": "50", "hidden": "160", "ffn": "", "heads": "", "vocab": "", "seq": ""}


def row(**cells: str) -> Row:
    known = {**STEP_ROW, **cells}
    return Row(line=2, cells=tuple((column, known.get(column, "")) for column in STEP_COLUMNS))


def case(**cells: str) -> StepCase:
    return step_case_of(row(**cells))


def method(**cells: str) -> Megatron | Auto | PipelineParallel:
    found = case(**cells)
    return method_of(workload_of(found.model), found.layout)


def test_degrees_are_planned_by_megatron():
    found = method(devices="8", tensor="2", pipeline="2", microbatches="2", zero="2")
    assert isinstance(found, Megatron)
    assert (found.degrees(8), found.num_microbatches, found.zero) == ((2, 2, 2), 2, 1)


def test_gradients_of_several_microbatches_are_added_up_whole():
    whole = method(devices="4", data="4", microbatches="1", zero="2")
    assert isinstance(whole, Megatron) and whole.zero == 2
    in_parts = method(devices="4", data="4", microbatches="2", zero="2")
    assert isinstance(in_parts, Megatron) and in_parts.zero == 1


def test_replicas_that_divide_the_state_are_those_of_zero_3():
    found = method(data="1", fsdp="2", zero="3")
    assert isinstance(found, Megatron) and (found.degrees(2), found.zero) == ((2, 1, 1), 3)


def test_a_state_divided_over_one_of_several_axes_is_pinned():
    found = method(devices="8", data="2", fsdp="2", tensor="2", zero="3")
    assert isinstance(found, Auto) and (found.mesh_shape, found.axis_names) == ((2, 2, 2), ("data", "fsdp", "tensor"))
    assert PartitionSpec("fsdp", "tensor") in found.pins.values() and found.memory == "adaptive"


def test_parameters_divided_among_replicas_alone_are_gathered_within_the_memory():
    found = method(devices="4", data="2", fsdp="2", tensor="1", zero="3")
    assert isinstance(found, Auto) and (found.mesh_shape, found.memory) == ((2, 2, 1), "adaptive")


def test_what_was_searched_is_searched_on_the_mesh_of_the_row():
    found = method(devices="8", data="", tensor="", complete="search", notes="auto_sharding, mesh 1x8")
    assert isinstance(found, Auto) and (found.mesh_shape, found.num_stages, found.memory) == ((1, 8), 1, "off")


def test_stages_that_were_searched_fit():
    found = method(devices="8", data="4", tensor="", pipeline="2", complete="search", notes="0-3 on 4x1, 4-7 on 4x1")
    assert isinstance(found, Auto) and (found.mesh_shape, found.num_stages, found.memory) == ((4, 1), 2, "adaptive")


def test_unequal_stages_have_the_layers_and_devices_of_the_row():
    cells = {"layers": "4", "devices": "3", "pipeline": "2", "data": "", "tensor": "", "microbatches": "2"}
    found = case(**cells, notes="stages in 2 pieces of 2 layers: 0-0 on 1x1, 1-1 on 2x1")
    planned = method_of(workload_of(found.model), found.layout)
    assert isinstance(planned, PipelineParallel) and planned.layouts == "search"
    assert (planned.layers, planned.submeshes) == (((0, 2), (2, 4)), ((1, 1), (1, 2)))
    equal = case(**{**cells, "devices": "2"}, notes="stages in 2 pieces of 2 layers: 0-0 on 1x1, 1-1 on 1x1")
    assert equal.layout.stages == () and priced(equal).step_s > priced(found).step_s > 0


def test_parameters_that_a_step_rounds_have_no_master_copy():
    cells = {"data": "1", "devices": "1", "dtype": "compute float16, adamw (parameters cast to float16 in the step)"}
    rounded, copied = (workload_of(case(**cells, **more).model) for more in ({}, {"zero": "2"}))
    assert rounded.abstract_state.master is None and copied.abstract_state.master is not None
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rounded.abstract_state.params)} == {"float32"}
    state = rounded.create_state()
    master = copied.create_state()._replace(master=state.params)
    batch = rounded.create_batch()
    (after, _), (after_copy, _) = rounded.step(state, batch), copied.step(master, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), after.params, after_copy.master)


def test_searches_on_two_axes_have_the_examples_along_the_first():
    found = method(devices="8", data="", tensor="", complete="search", notes="auto_sharding, mesh 2x4")
    assert isinstance(found, Megatron) and (found.degrees(8), found.zero) == ((2, 4, 1), 2)


def test_whole_gradients_are_summed_by_an_all_reduce_before_they_are_divided():
    cells = {"devices": "4", "data": "4", "microbatches": "2"}
    divided, whole = (case(**cells, zero=zero) for zero in ("1", "2"))
    more_s = priced(whole).step_s - priced(divided).step_s
    # Beside the reduce-scatter and the all-gather of ZeRO 1, which an all-reduce and an all-gather are one more of.
    nbytes = 2 * workload_of(whole.model).num_parameters
    alone_s = 3 / 4 * nbytes / whole.machine.intra.bandwidth_of(4)
    latencies_s = len(jax.tree.leaves(workload_of(whole.model).params)) * whole.machine.collective_s("all-gather", 0, 4)
    assert alone_s < more_s < alone_s + latencies_s


def test_compilers_of_2021_gather_parameters_once_more_for_the_backward_pass():
    cells = {"data": "1", "fsdp": "2", "zero": "3"}
    kept = case(**cells, remat="none", stack="XLA of 2021-12")
    before, since = (case(**cells, stack=f"XLA of {date}") for date in ("2021-12", "2023-12"))
    assert (before.layout.gathers_apart, since.layout.gathers_apart, kept.layout.gathers_apart) == (True, False, False)
    more_s = priced(before).step_s - priced(since).step_s
    params = jax.tree.leaves(workload_of(before.model).params)
    every_s = sum(before.machine.collective_s("all-gather", 2 * math.prod(each.shape), 2) for each in params)
    assert 0 < more_s < every_s


def test_rows_are_predicted_by_the_rules_of_the_compiler_that_was_measured():
    cells = {"machine": "p3.16xlarge"}
    before, since = (case(**cells, stack=f"XLA of {date}").machine for date in ("2021-12", "2023-12"))
    assert before.schedules_for_memory and since.schedules_for_memory
    assert (before.product_sums, since.product_sums) == (False, True)
    alpa = case(**cells, stack="Alpa with its own XLA fork, 2021-12").machine
    assert (alpa.combined_bytes, alpa.memory_bytes) == (2**60, 0.9 * since.memory_bytes)
    said = case(**cells, stack="Alpa of 2021-12", notes="all_reduce_threshold set to 1 MiB").machine
    assert said.combined_bytes == 2**20
    ours = Machine.named("p3.16xlarge")
    assert since == case(**cells, stack="").machine and since.to_data() == ours.to_data()
    # Only in programs of ours does anything wait for sums.
    assert (ours.ends_sums_late, since.ends_sums_late) == (True, False)
    assert not case(machine="tpu-v5p", stack="XLA of 2023-12").machine.schedules_for_memory


@pytest.mark.parametrize(
    ("notes", "model", "widening"), [("width factor 4, images 224x224", "wresnet", 4), ("", "wresnet-0.25B", 2)]
)
def test_the_width_of_a_network_is_stated_or_follows_from_its_parameters(notes: str, model: str, widening: int):
    size = case(**RESNET, notes=notes, model=model).model.size
    assert isinstance(size, ResNetSize) and size.widening == widening


def test_heads_may_be_wider_than_the_model_together():
    found = case(attention="flash", head_dim="64").model
    shapes = {leaf.shape for leaf in jax.tree.leaves(workload_of(found).abstract_state.params)}
    assert (128, 4, 64) in shapes and (4, 64, 128) in shapes
    assert case(attention="flash", head_dim="32").model == case(attention="flash").model


def test_experts_are_chosen_within_groups():
    size = case(**MOE).model.size
    assert isinstance(size, MoESize) and (size.group, size.experts, size.recomputed) == (64, 4, True)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"complete": "no"}, "does not say all of its sizes"),
        ({"complete": "remat"}, "kept or offloaded"),
        ({"machine": "abacus"}, "no machine file for 'abacus'"),
        ({"family": "t5"}, "is of the family 't5'; there are gpt, moe, wresnet"),
        ({"dtype": "compute float8"}, "computes in 'compute float8'"),
        ({"remat": "save dots"}, "recomputes 'save dots'"),
        ({"layers": ""}, "does not say layers"),
        ({"step_s": ""}, "has no measured time"),
        ({"tensor": "4"}, "says degrees whose product is not its number of devices"),
        ({"head_dim": "64", "attention": "dot"}, "has heads that are not as wide as the model together"),
        ({"sequence": "2"}, "divides the sequence among devices"),
        ({"notes": "stages: 0-1 on 1x1, 2-7 on 1x1"}, "unequal stages of parts that it does not size"),
        ({"notes": "stages in 4 pieces of 2 layers: 0-2 on 2x1, 3-3 on 16x1"}, "or of several hosts"),
        ({**MOE, "top_k": "1"}, "no mixture of experts"),
        ({**RESNET, "layers": "34"}, "has the depth 34"),
        ({**RESNET, "model": "wresnet"}, "neither its width factor"),
        ({**RESNET, "model": "wresnet-500B"}, "no width factor for which"),
    ],
)
def test_a_row_that_cannot_be_expressed_says_why(cells: dict[str, str], reason: str):
    with pytest.raises(Unusable, match=reason):
        case(**cells)


def test_a_model_is_traced_once_for_its_rows():
    cells = {"vocab": "384", "layers": "1"}
    rows = [row(**cells, id=each, global_batch=batch) for each, batch in (("a", "8"), ("b", "16"), ("c", "8"))]
    rows.append(row(**cells, id="d", data="1", tensor="2"))
    traced: list[object] = []
    measurements = Measurements(columns=STEPS, rows=tuple(rows), unreadable=())
    before = autopar.parallelize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autopar, "parallelize", lambda *args, **more: traced.append(args) or before(*args, **more))
        accuracy_report(measurements, None)
    assert len(traced) == 2


def test_what_the_compiler_refuses_is_named():
    with pytest.raises(Unusable, match=r"InvalidArgument: .*do not divide"):
        priced(case(global_batch="7"))


def test_rows_are_predicted_by_the_compiler_and_counted_by_source(tmp_path: Path):
    rows = [
        STEP_ROW,
        {**STEP_ROW, "data": "1", "tensor": "2", "step_s": "0.02"},
        {**STEP_ROW, "id": "small-3", "source": "", "complete": "no"},
        {**STEP_ROW, "oom": "1", "step_s": "", "peak_gib": "40"},
    ]
    path = tmp_path / "steps.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(STEP_COLUMNS)
        writer.writerows([each.get(column, "") for column in STEP_COLUMNS] for each in rows)
    measurements = read_measurements(path)
    assert measurements.columns is STEPS
    report = accuracy_report(measurements, None, rows=True)
    figures = report["sources"]["someone's log"]
    assert (figures["rows"], figures["pairs"], figures["oom_right"] + figures["oom_wrong"]) == (2, 1, 3)
    assert report["all"]["rows"] == 2 and len(report["predictions"]) == 3
    assert [(each["source"], each["ids"], each["lines"]) for each in report["skipped"]] == [
        ("no source", ["small-3"], [4])
    ]
    with pytest.raises(InvalidArgument, match="priced from machine files alone"):
        accuracy_report(measurements, 0.2)
    with pytest.raises(InvalidArgument, match="no rule asks for one"):
        accuracy_report(measurements, None, leave_out=True)


def test_pairs_are_those_of_one_group_that_clearly_differ():
    def at(measured_s: float, step_s: float, **cells: str) -> Predicted:
        return Predicted(case=case(step_s=str(measured_s), **cells), step_s=step_s, peak_bytes=0.0)

    close = at(1.0 + DIFFERENT / 2, 0.1)
    rows = [at(1.0, 0.2), close, at(2.0, 0.3), at(3.0, 0.25), at(9.0, 0.0, group="other")]
    assert ordered_pairs(rows) == [True, True, True, True, False]
    figures = summary([*rows, at(1.5, 0.2)])
    assert (figures["pairs"], figures["pairs_right"], figures["pairs_tied"]) == (9, 7, 1)


def test_a_run_that_was_stopped_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def price(case: StepCase) -> Entry:
        asked.append(case.row["id"])
        if case.row["id"] == "broken":
            raise Unusable("cannot be planned")
        if case.row["id"] == "interrupted" and asked.count("interrupted") == 1:
            raise KeyboardInterrupt
        return Entry(step_s=0.02, peak_bytes=7.0)

    monkeypatch.setattr("benchmarks.accuracy.priced_step", price)
    measurements = Measurements(
        columns=STEPS, rows=tuple(row(id=each) for each in ("first", "broken", "interrupted", "last")), unreadable=()
    )
    path = tmp_path / "run.journal"
    stopped = accuracy_report(measurements, None, journal=Journal(path))
    assert stopped["all"]["rows"] == 1
    assert {each["reason"].split(":")[0]: each["rows"] for each in stopped["skipped"]} == {
        "cannot be planned": 1,
        "was not reached": 2,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write('{"row": "cut o')
    whole = accuracy_report(measurements, None, journal=Journal(path))
    assert asked == ["first", "broken", "interrupted", "interrupted", "last"]
    assert (whole["all"]["rows"], whole["skipped"][0]["reason"]) == (3, "cannot be planned")
    assert all(Journal(path).known(each) for each in measurements.rows)
    path.write_text("of other sources\n" + "\n".join(path.read_text(encoding="utf-8").splitlines()[1:]))
    journal = Journal(path)
    assert journal.known(measurements.rows[0]) is None
    journal.close()
    assert not path.exists()
