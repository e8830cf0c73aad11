"""The benchmark of planning times plans what it says, and says what it planned."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import benchmarks.pipeline_plan_time as benchmark
from benchmarks.pipeline_plan_time import Case, Row, measured, rows_of, table_of

_SMALL = Case(model="small", gpus=2)


@pytest.fixture(scope="module")
def row() -> Row:
    return measured(_SMALL)


def test_a_row_says_how_long_which_plan_took(row: Row):
    assert 0 < row.trace_s < row.total_s
    assert row.plan_s <= row.total_s and row.first_s is not None and 0 < row.first_s <= row.cpu_s
    assert "microbatch" in row.plan
    text = io.StringIO()
    Console(file=text, width=200).print(table_of([row]))
    assert "gpt-small" in text.getvalue() and row.plan in text.getvalue()


def test_another_plan_on_a_busy_machine_is_an_error(row: Row, monkeypatch: pytest.MonkeyPatch):
    """Rows under load have a cache of their own, and are held against the cold one."""
    digests, caches = {"cold": "a", "again": "a", "loaded": "a"}, list[str]()

    def planned(case: Case, cache: str, **_: Any) -> Row:
        caches.append(cache)
        return replace(row, case=case, digest=digests[case.what])

    monkeypatch.setattr(benchmark, "measured_apart", planned)
    rows = list(rows_of(_SMALL, ("cold", "again", "loaded")))
    assert [each.case.what for each in rows] == ["cold", "again", "loaded"]
    assert caches[0] == caches[1] != caches[2]
    digests["loaded"] = "b"
    with pytest.raises(RuntimeError, match="another plan beside 8 busy processes"):
        list(rows_of(_SMALL, ("cold", "loaded")))
