"""Published plans are what their sources say, divide what they are for, and are held against the search."""

import csv
import json
import math
import re
from dataclasses import replace

import jax
import pytest

from autopar import Auto, Megatron
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.hardware.machine import Machine
from autopar.method_fields import MEMORY_LEVELS
from autopar.methods import Method
from benchmarks.accuracy_rows import STEP_COLUMNS
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.published_degrees import Published, published
from benchmarks.published_plans import Row, Simulated, compared, line, main, mean_of, memory_beside, table_of
from tests.benchmarks.test_accuracy_steps import STEP_ROW

SMALL = GPTSize(width=64, layers=2, heads=4, length=16, vocabulary=64, batch=8)


def small(*methods: Megatron) -> Published:
    return Published(
        name="small",
        source="nobody",
        workload=lambda: alpa_gpt("small", SMALL),
        machine="dgx-a100-80",
        devices=2,
        methods=methods,
    )


@pytest.mark.parametrize("full", [False, True])
def test_degrees_divide_devices_batch_and_layers(full: bool):
    rows = published(full=full)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.methods
        for method in row.methods:
            if isinstance(method, Auto):
                assert math.prod(method.mesh_shape or ()) == row.devices
                continue
            assert isinstance(method, Megatron)
            data, _, _ = method.degrees(row.devices)
            assert row.workload().batch_size % (data * method.num_microbatches) == 0


def test_fewer_replicas_have_as_many_examples_each_and_say_so():
    for few, all_of_them in zip(published(), published(full=True), strict=True):
        each = [row.workload().batch_size / row.devices for row in (few, all_of_them)]
        assert each[0] == each[1]
        assert (few.devices < all_of_them.devices) == ("replicas" in few.note)


def test_every_weight_of_a_llama_has_a_place_by_the_rules():
    row = next(row for row in published() if isinstance(row.methods[0], Auto))
    method, params = row.methods[0], row.workload().abstract_state.params
    assert isinstance(method, Auto)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        specs = [spec for pattern, spec in method.pins.items() if re.search(pattern, leaf_name("state.params", path))]
        assert len(specs) == (leaf.ndim > 1)
        for spec in specs:
            assert sorted(filter(None, spec)) == ["data", "model"]


def test_the_fastest_by_hand_that_fits_is_held_against_the_search():
    row = compared(small(Megatron(tensor=2), Megatron(data=2), Megatron(tensor=3)))
    assert row.hand.step_s is not None and row.searched.step_s is not None
    assert row.ratio == row.hand.step_s / row.searched.step_s >= 0.999
    assert "small, 2 of dgx-a100-80" in line(row) and table_of([row]).row_count == 1


def test_the_search_has_the_memory_that_a_plan_by_hand_needs():
    machine = Machine.named("dgx-a100-80")
    little, much = (
        Simulated(plan="", step_s=1.0, peak_bytes=round(share * machine.memory_bytes), cpu_s=0.0)
        for share in (0.89, 0.95)
    )
    assert memory_beside(little, machine) == "adaptive" == memory_beside(replace(much, step_s=None), machine)
    assert memory_beside(much, machine) == much.peak_bytes


def test_a_row_says_where_the_search_had_more_memory_than_usual(monkeypatch):
    asked: list[Method] = []

    def simulated(traced: object, cluster: object, method: Method) -> Simulated:
        asked.append(method)
        return Simulated(plan="", step_s=1.0, peak_bytes=100, cpu_s=0.0)

    monkeypatch.setattr("benchmarks.published_plans.simulated", simulated)
    assert compared(small(Megatron(data=2))).note == ""
    monkeypatch.setitem(MEMORY_LEVELS, "adaptive", 1e-9)
    assert compared(small(Megatron(data=2))).note == "as much memory as by hand"
    by_hand, usual, again, as_much = asked
    assert by_hand == again == Megatron(data=2)
    assert (usual, as_much) == (Auto(), Auto(memory=100))


def test_without_a_plan_by_hand_there_is_no_ratio():
    row = compared(small(Megatron(tensor=3)))
    assert row.ratio is None and row.hand.plan.startswith("InvalidArgument")
    assert "no ratio" in line(row)


def test_rows_of_a_file_are_planned_and_kept(tmp_path, capsys):
    file, out = tmp_path / "steps.csv", tmp_path / "out.json"
    cells = [STEP_ROW, STEP_ROW | {"id": "again"}, STEP_ROW | {"id": "alone", "devices": "1", "data": "1"}]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, STEP_COLUMNS)
        writer.writeheader()
        writer.writerows(cells)
    main(["--measurements", str(file), "--json", str(out)])
    assert [row["name"] for row in json.loads(out.read_text())] == ["small-1"]
    assert "1 of 1 fit by hand" in capsys.readouterr().out


def test_being_behind_fails(monkeypatch, capsys):
    one = Simulated(plan="", step_s=1.0, peak_bytes=0, cpu_s=0.0)
    row = Row(name="a", source="", note="", devices="", hand=one, searched=one, ratio=0.9)
    monkeypatch.setattr("benchmarks.published_plans.compared", lambda each: row)
    with pytest.raises(SystemExit, match=r"behind in 1 of 1 rows: 0\.900"):
        main(["--rows", "GPT-22B"])
    assert "0.9000" in capsys.readouterr().out


def test_the_mean_is_geometric():
    assert mean_of([2.0, 0.5]) == pytest.approx(1.0)
    assert math.isnan(mean_of([]))
    assert mean_of([0.0, 2.0]) == 0.0
