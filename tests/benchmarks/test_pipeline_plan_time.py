"""The benchmark of planning times plans what it says, and says what it planned."""

import io

from rich.console import Console

from benchmarks.pipeline_plan_time import Case, measured, table_of


def test_a_row_says_how_long_which_plan_took():
    row = measured(Case(model="small", gpus=2))
    assert 0 < row.trace_s < row.total_s
    assert row.plan_s <= row.total_s and row.cpu_s > 0
    assert "microbatch" in row.plan
    text = io.StringIO()
    Console(file=text, width=200).print(table_of([row]))
    assert "gpt-small" in text.getvalue() and row.plan in text.getvalue()
