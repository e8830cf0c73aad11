"""The comparison with published measurements: what is read, skipped, fitted and reported."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import InvalidArgument
from autopar.hardware.machine import machines
from benchmarks import accuracy
from benchmarks.accuracy_cases import Case, Unusable, case_of
from benchmarks.accuracy_fit import Scalars, chosen_for_fit, fitted_scalars
from benchmarks.accuracy_frameworks import MACHINES
from benchmarks.accuracy_report import Predicted, cell_regrets, spearman, summary
from benchmarks.accuracy_rows import COLUMNS, Row
from benchmarks.eager_steps import by_parts
from tests.benchmarks.measured_rows import SMALL_ROW, row


def write(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def grid() -> list[Case]:
    """Cases of one machine, in several layouts and sizes."""
    degrees = [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2)]
    return [
        case_of(row(line=10 * line + hidden, dp=str(dp), tp=str(tp), pp=str(pp), gbs="64", hidden=str(hidden)))
        for line, (dp, tp, pp) in enumerate(degrees)
        for hidden in (2048, 4096, 6144)
    ]


# --- cases ----------------------------------------------------------------------------------------------------


def test_a_full_row_is_a_case():
    case = case_of(row())
    assert (case.layout.dp, case.layout.tp, case.layout.pp, case.layout.microbatches) == (2, 2, 2, 4)
    assert (case.model.layers, case.model.hidden, case.measured_s) == (24, 1024, 0.22)
    assert case.machine.name == "dgx-a100-80"


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"hw": "abacus"}, "no machine file for the hardware 'abacus'"),
        ({"framework": ""}, "the framework is not named"),
        ({"layers": ""}, "layers missing"),
        ({"hidden": ""}, "hidden size missing"),
        ({"layers": "", "hidden": ""}, "layers and hidden size missing"),
        ({"dp": "", "tp": "", "pp": ""}, "the layout"),
        ({"gbs": ""}, "the global batch is not recorded"),
        ({"seq": ""}, "sequence length is not recorded"),
        ({"step_s": ""}, "no step time, throughput or FLOP/s is recorded"),
        ({"note": "NVFP4"}, "NVFP4"),
        ({"model": "Wide-ResNet"}, "Wide-ResNet"),
        ({"framework": "parax.auto", "dp": "", "tp": "", "pp": ""}, "the layout"),
        ({"ngpu": "16"}, "do not make the number of devices"),
        ({"seq": "1", "mbs": "1", "cp": "2", "ngpu": "16"}, "without work"),
        ({"note": "layers/stage [5, 7, 7]"}, "not of as many stages as pp"),
        ({"note": "layers/stage [9, 9]"}, "not those of the model"),
        ({"pp": "27", "ngpu": "108"}, "more stages than layers"),
        ({"pp": "1e12", "ngpu": ""}, "pp is beyond what is simulated"),
        ({"hidden": "1e300"}, "hidden is beyond what is simulated"),
        ({"step_s": "", "tok_s_gpu": "1e-9"}, "more than can be measured"),
    ],
)
def test_a_row_that_cannot_be_simulated_says_why(cells, reason):
    with pytest.raises(Unusable, match=reason.replace("(", r"\(")):
        case_of(row(**cells))


@pytest.mark.parametrize(
    ("cells", "step_s"),
    [
        ({"step_s": "", "samples_s": "160"}, 32 / 160),
        ({"step_s": "", "tok_s_gpu": "20480"}, 32 * 1024 / (20480 * 8)),
    ],
)
def test_the_step_follows_from_throughput(cells, step_s):
    assert case_of(row(**cells)).measured_s == pytest.approx(step_s)


@pytest.mark.parametrize("note", ["mbc0", "grad_accum=0", "mbc999999999999"])
def test_a_note_that_counts_no_microbatches_is_not_believed(note):
    assert case_of(row(note=note)).layout.microbatches in (1, 4)


@pytest.mark.parametrize(
    ("note", "dtype", "wide"), [("02-25", "float16", False), ("02-28", "bfloat16", True), ("", "float16", False)]
)
def test_runs_compute_in_bf16_and_sum_in_32_bits_from_the_day_of_its_optimizer(note, dtype, wide):
    habits = case_of(row(note=note)).habits
    assert (habits.dtype, habits.sums_in_32_bits) == (dtype, wide)


@pytest.mark.parametrize(("note", "flash"), [("BF16", False), ("MXFP8", True)])
def test_learnt_sinks_of_attention_were_not_fused_in_the_releases_that_trained_in_bf16(note, flash):
    cells = {"src": "NVIDIA-NeMo/Megatron-Bridge:docs/a.md#L1", "framework": "Megatron-Bridge", "note": note}
    case = case_of(row(**cells, model="GPT OSS 120B", layers="", hidden="", heads="", hw="DGX-B200"))
    assert case.habits.flash == flash
    assert case_of(row(**cells)).habits.flash


@pytest.mark.parametrize(("per_host", "gigabytes_s"), [("8", 24.0), ("4", 48.0)])
def test_the_devices_of_a_host_share_its_network(per_host, gigabytes_s):
    assert case_of(row(gpus_per_node=per_host)).machine.inter.bandwidth == pytest.approx(gigabytes_s * 1e9)


_KINDS: tuple[dict[str, str], ...] = (
    {"src": "VIA-Research/vTrain:data/ground_truth_multi.csv", "dp": "8", "ngpu": "32"},
    {"src": "bigscience-workshop/bigscience:a.md", "layers": "", "hidden": "", "params_b": "181", "note": "02-25"},
    {"src": "bigscience-workshop/bigscience:a.md", "note": "02-28", "hw": "V100-32GB", "gpus_per_node": "4"},
    {"src": "Oneflow-Inc/DLPerf:a.md", "framework": "Megatron-LM v2.4", "heads": "", "mbs": "", "hw": "V100-16GB"},
    {"src": "Oneflow-Inc/libai:a.md", "framework": "Megatron-LM", "hw": "V100-32GB"},
    {"src": "MooreThreads/SimuMax:a.json", "framework": "Megatron-LM 0.14", "model": "deepseekv3", "hw": "B200"},
    {"src": "cli99/llm-analysis:a.sh", "framework": "ZeRO-3", "zero": "3", "hw": "A100-80GB Selene"},
    {
        "src": "eth-easl/sailor:a",
        "framework": "Sailor(Megatron-DeepSpeed)",
        "model": "OPT-350M",
        "layers": "",
        "hidden": "",
        "seq": "",
        "hw": "GH-96",
    },
    {"src": "alpa-projects/alpa@osdi22_artifact:a.tsv", "framework": "megatron"},
    {
        "src": "mosaicml/llm-foundry:a.md",
        "framework": "Composer FSDP bf16",
        "zero": "FULL_SHARD",
        "pp": "1",
        "ngpu": "4",
    },
)


@pytest.mark.parametrize("cells", _KINDS, ids=[each["src"].partition(":")[0] for each in _KINDS])
def test_a_row_is_a_case_alike_without_its_source(cells):
    named, unnamed = case_of(row(**cells)), case_of(row(**{**cells, "src": ""}))
    assert replace(named, row=unnamed.row) == unnamed
    assert (named.counts_tensors, named.site) == (unnamed.counts_tensors, unnamed.site)


def test_a_file_without_sources_has_the_same_predictions(tmp_path):
    kinds = [{key: text for key, text in each.items() if key in ("src", "framework", "hw", "note")} for each in _KINDS]
    rows = [{**SMALL_ROW, "pp": "1", "dp": dp, "ngpu": "", **each} for each in kinds[1:5] for dp in ("2", "4")]
    found = []
    for name, sources in (("with", {}), ("without", {"src": ""})):
        path = write(tmp_path / f"{name}.csv", [{**each, **sources} for each in rows])
        out = tmp_path / "out.json"
        run("--measurements", str(path), "--calibrate", "0.4", "--rows", "--json", str(out))
        found.append(json.loads(out.read_text()))
    first, second = (
        [(each["line"], each["predicted_s"], each["fitted"]) for each in one["predictions"]] for one in found
    )
    assert first == second and len(first) == len(rows)
    assert found[0]["all"] == found[1]["all"] and set(found[1]["sources"]) == {"no source"}


@pytest.mark.parametrize(("tp", "ngpu", "heads"), [("1", "1", 92), ("4", "4", 92), ("8", "8", 64)])
def test_unrecorded_heads_are_as_many_on_each_device(tp, ngpu, heads):
    sizes = {"params_b": "200", "layers": "", "hidden": "11776", "heads": ""}
    model = case_of(row(**sizes, tp=tp, ngpu=ngpu, dp="1", pp="1", gbs="8")).model
    assert (model.heads, model.layers) == (heads, 120)


def test_the_step_follows_from_flops_as_megatron_counts_them():
    plain = case_of(row())
    tokens = 32 * 1024
    factor = 1 + 1024 / (6 * 1024) + plain.model.vocab / (16 * 24 * 1024)
    flops = 96 * tokens * 24 * 1024**2 * factor
    assert case_of(row(step_s="", tflops_gpu="50")).measured_s == pytest.approx(flops / (50e12 * 8))


@pytest.mark.parametrize(("kernel", "flash"), [("", True), ("torch", False), ("flash_attention2", True)])
def test_an_unknown_framework_runs_as_pytorch_with_the_kernel_it_names(kernel, flash):
    habits = case_of(row(framework="pen and paper", kernel=kernel)).habits
    assert habits.flash == flash and habits.launch_s > 0


def test_a_row_out_of_memory_has_no_time():
    case = case_of(row(oom="1", step_s=""))
    assert case.out_of_memory is True
    assert case.measured_s is None


def test_every_machine_that_hardware_is_mapped_to_is_in_the_library():
    assert {name for _, name in MACHINES} <= set(machines())


# --- fitting --------------------------------------------------------------------------------------------------


def test_rows_for_the_fit_are_chosen_by_content_whatever_their_order():
    cases = grid()
    chosen = chosen_for_fit(cases, 0.2)
    assert len(chosen) == 5
    assert chosen_for_fit(list(reversed(cases)), 0.2) == chosen


def test_rows_for_the_fit_do_not_depend_on_what_was_measured():
    cases = grid()
    slower = [
        replace(case, measured_s=2 * (case.measured_s or 0.0), row=replace(case.row, cells=remeasured(case.row)))
        for case in cases
    ]
    assert chosen_for_fit(slower, 0.2) == chosen_for_fit(cases, 0.2)


def remeasured(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((name, "99" if name == "step_s" else text) for name, text in row.cells)


def test_rows_for_the_fit_are_spread_over_what_was_run():
    cases = grid()
    chosen = chosen_for_fit(cases, 1 / 3)
    fitted = [case for case in cases if case.row.line in chosen]
    assert {case.model.hidden for case in fitted} == {2048, 4096, 6144}
    assert len({case.layout.tp for case in fitted}) >= 3


def test_without_rows_the_machine_file_stands():
    assert fitted_scalars([], by_parts({})) == Scalars()


# --- reporting ------------------------------------------------------------------------------------------------


def predicted(step_s: float, measured_s: float | None, peak_bytes: float = 1.0, **cells: str) -> Predicted:
    case = case_of(row(**cells))
    return Predicted(case=replace(case, measured_s=measured_s), step_s=step_s, peak_bytes=peak_bytes)


def test_summary_has_the_errors():
    found = summary([predicted(1.1, 1.0), predicted(1.6, 2.0, dp="1", pp="4"), predicted(4.0, 4.0, dp="1", tp="4")])
    assert (found["rows"], found["mape"], found["median"], found["worst"]) == (3, 0.1, 0.1, 0.2)
    assert found["spearman"] == 1.0


def test_regret_is_what_the_choice_costs_within_a_cell_only():
    here = [
        predicted(1.0, 1.2, dp="4", tp="2", pp="1"),  # chosen
        predicted(1.1, 1.0, dp="2", tp="4", pp="1"),  # the fastest
        predicted(0.1, 9.0, dp="4", tp="2", pp="1", gbs="64"),  # another task, alone
    ]
    assert cell_regrets(here) == pytest.approx([0.2])


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([1, 2, 3], [10, 20, 30], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 2, 3], [1, 2, 2, 3], 1.0)],
)
def test_spearman_is_the_correlation_of_ranks(left, right, expected):
    assert spearman(left, right) == pytest.approx(expected)


def test_spearman_of_one_value_is_none():
    assert spearman([1.0, 1.0], [1.0, 2.0]) is None


def test_labels_count_what_ran_and_what_did_not():
    limit = case_of(row()).machine.memory_bytes
    found = summary(
        [
            predicted(1, 1, limit - 1, oom="0"),
            predicted(1, 1, limit + 1, oom="0"),
            predicted(1, None, limit - 1, oom="1"),
            predicted(1, None, limit + 1, oom="1"),
            predicted(1, 1, limit + 1),
        ]
    )
    assert (found["oom_right"], found["oom_wrong"], found["false_feasible"]) == (2, 2, 1)


# --- the command ----------------------------------------------------------------------------------------------


def run(*arguments: str) -> None:
    parser = accuracy.argparse.ArgumentParser()
    accuracy.add_arguments(parser)
    accuracy.main(parser.parse_args(["--sample", "1", *arguments]))


def test_the_command_writes_what_it_found(tmp_path, capsys):
    rows = [
        {**SMALL_ROW, "dp": dp, "tp": tp, "pp": pp, "step_s": step_s}
        for dp, tp, pp, step_s in [
            ("2", "2", "2", ".22"),
            ("4", "2", "1", ".25"),
            ("2", "4", "1", ".31"),
            ("8", "1", "1", ".3"),
        ]
    ]
    rows += [{**SMALL_ROW, "hw": "abacus"}, {**SMALL_ROW, "pp": "two"}]
    path = write(tmp_path / "rows.csv", rows)
    run("--measurements", str(path), "--calibrate", "0.25", "--rows", "--json", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    figures = report["sources"]["VIA-Research/vTrain"]
    assert (figures["rows"], figures["fitted_rows"], figures["cells"]) == (3, 1, 1)
    assert figures["uncalibrated"]["rows"] == 3
    assert report["all"]["uncalibrated"] == figures["uncalibrated"]
    assert report["skipped"] == [
        {
            "source": "VIA-Research/vTrain",
            "reason": "no machine file for the hardware 'abacus'",
            "rows": 1,
            "lines": [6],
            "ids": ["line 6"],
        }
    ]
    assert [each["line"] for each in report["unreadable"]] == [7]
    assert len(report["predictions"]) == 4
    printed = capsys.readouterr().out
    assert "abacus" in printed and "5 rows took" in printed


def test_rows_of_unknown_machines_models_and_sources_leave_the_others_evaluated(tmp_path, capsys):
    unknown = [
        {**SMALL_ROW, "hw": "abacus", "src": "new/place:a.csv"},
        {**SMALL_ROW, "model": "Oracle-9000", "layers": "", "hidden": "", "src": "new/place:b.csv"},
        {**SMALL_ROW, "framework": "", "src": "newer/place:c.csv"},
    ]
    new = {**SMALL_ROW, "src": "newest/place:d.csv", "framework": "Unheard-Of 2.0"}
    path = write(tmp_path / "rows.csv", [*unknown, SMALL_ROW, new, {**SMALL_ROW, "gbs": "many"}])
    run("--measurements", str(path), "--json", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    assert {source: figures["rows"] for source, figures in report["sources"].items() if figures["rows"]} == {
        "newest/place": 1,
        "VIA-Research/vTrain": 1,
    }
    assert sum(each["rows"] for each in report["skipped"]) == 3
    assert [each["line"] for each in report["unreadable"]] == [7]
    said = " ".join(capsys.readouterr().out.split())
    for part in ("hardware 'abacus'", "sizes of 'Oracle-9000' are not known", "not named", "'many' in column gbs"):
        assert part in said


def test_a_source_that_is_left_out_is_predicted_by_the_rows_of_others(tmp_path, capsys):
    degrees = [("2", "2", "2", ".019"), ("4", "2", "1", ".016"), ("2", "4", "1", ".03"), ("8", "1", "1", ".007")]
    rows = [{**SMALL_ROW, "dp": dp, "tp": tp, "pp": pp, "step_s": step_s} for dp, tp, pp, step_s in degrees]
    new = {"src": "new/place:a.csv", "framework": "Megatron-LM"}
    others = [{**each, **new, "step_s": str(2 * float(each["step_s"]))} for each in rows]
    path = write(tmp_path / "rows.csv", [*rows, *others])

    def figures(*options: str) -> dict[str, dict[str, float]]:
        run("--measurements", str(path), "--json", str(tmp_path / "out.json"), *options)
        return json.loads((tmp_path / "out.json").read_text())["sources"]

    first, second = figures("--leave-out", "--calibrate", "0.5").values()
    # Sorted by name: that which took twice as long is predicted by the other, and the other way round.
    assert first["left_out"]["bias"] > first["bias"] and second["left_out"]["bias"] < second["bias"]
    assert "unseen" in capsys.readouterr().out
    assert figures() == figures("--leave-out")
    assert "No rule asks for a source" in capsys.readouterr().out


def test_the_figures_without_the_source_of_most_rows_are_told_beside_those_of_all(tmp_path, capsys):
    others = [{**SMALL_ROW, "src": f"{name}/place:a.csv"} for name in ("new", "newer")]
    path = write(tmp_path / "rows.csv", [*others, *[{**SMALL_ROW, "gbs": gbs} for gbs in ("32", "64", "96")]])
    run("--measurements", str(path), "--json", str(tmp_path / "out.json"))
    rest = json.loads((tmp_path / "out.json").read_text())["all_but_the_largest_source"]
    assert (rest["largest"], rest["rows"]) == ("VIA-Research/vTrain", 2)
    assert "all but vTrain" in capsys.readouterr().out
    run("--measurements", str(write(path, [*others, SMALL_ROW])), "--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["all_but_the_largest_source"] is None


@pytest.mark.parametrize("fraction", ["0", "1", "-0.5", "nan"])
def test_a_fraction_that_leaves_nothing_is_an_error(tmp_path, fraction):
    path = write(tmp_path / "rows.csv", [SMALL_ROW])
    with pytest.raises(InvalidArgument, match="between 0 and 1"):
        run("--measurements", str(path), "--calibrate", fraction)
