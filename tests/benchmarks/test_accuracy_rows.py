"""Files of measurements: every row is read, or named with what is wrong; what is no file of them is an error."""

import csv
from pathlib import Path

import pytest

from autopar.errors import InvalidArgument
from benchmarks.accuracy_rows import COLUMNS, Row, read_measurements

GPT_ROW = {"src": "someone/repository:rows.csv", "framework": "Megatron-LM", "dp": "2", "gbs": "32", "step_s": "0.22"}


def write(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_are_read_and_the_unreadable_named(tmp_path):
    rows = [GPT_ROW, {**GPT_ROW, "step_s": "fast"}, {**GPT_ROW, "dp": "-1"}, {**GPT_ROW, "src": ""}]
    found = read_measurements(write(tmp_path / "rows.csv", [*rows, {**GPT_ROW, "gbs": "nan"}]))
    assert [each.source for each in found.rows] == ["someone/repository", "no source"]
    assert [line for line, _ in found.unreadable] == [3, 4, 6]
    assert "'fast' in column step_s" in found.unreadable[0][1]
    assert "at least 0" in found.unreadable[1][1]


def test_a_row_with_too_few_or_too_many_cells_is_unreadable(tmp_path):
    path = write(tmp_path / "rows.csv", [GPT_ROW])
    path.write_text(path.read_text() + "a,b,c\n" + "," * 60 + "\n")
    found = read_measurements(path)
    assert len(found.rows) == 1
    assert [reason for _, reason in found.unreadable] == [
        "ends before its column model",
        "has more cells than there are columns",
    ]


def test_missing_columns_are_an_error_that_names_them(tmp_path):
    path = write(tmp_path / "rows.csv", [GPT_ROW], tuple(each for each in COLUMNS if each not in ("tp", "oom")))
    with pytest.raises(InvalidArgument, match=r"tp, oom must be there too. Add them"):
        read_measurements(path)


def test_what_is_not_text_or_not_csv_is_an_error_that_says_so(tmp_path):
    path = write(tmp_path / "rows.csv", [{**GPT_ROW, "note": "café"}])
    path.write_bytes(path.read_text().encode("latin-1"))
    with pytest.raises(InvalidArgument, match=r"byte 0xe9.*UTF-8"):
        read_measurements(path)
    write(path, [{**GPT_ROW, "note": "x" * 200_000}])
    with pytest.raises(InvalidArgument, match="not CSV: field larger"):
        read_measurements(path)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = write(tmp_path / "rows.csv", [GPT_ROW])
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")
    assert len(read_measurements(path).rows) == 1


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(InvalidArgument, match="There is no file"):
        read_measurements(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("src", "source"),
    [
        ("VIA-Research/vTrain:data/ground_truth_multi.csv", "VIA-Research/vTrain"),
        ("mosaicml/llm-foundry:scripts/README.md#L75", "mosaicml/llm-foundry"),
        ("", "no source"),
    ],
)
def test_a_source_is_a_repository_or_none(src, source):
    assert Row(line=2, cells=(("src", src),)).source == source
