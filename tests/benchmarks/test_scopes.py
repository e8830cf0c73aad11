"""Some of the nestings and bridges of scopes; the benchmark has all."""

import jax
import pytest

from benchmarks import scopes

pytestmark = pytest.mark.usefixtures("float64")
ALL = {f"{case.group}: {case}": case for case in scopes.cases()}
SOME = [
    "two deep: replicate(2) > split(4) | none",
    "two deep: split(4) > replicate() | none",
    "three deep: split(2) > replicate(2) > split(2) | none",
    "three deep: replicate(4) > replicate() > split(2) | none",
    "in stages: split(2) > replicate(2) | replicate(2) > split(2)",
    "bridges: replicate(8) | split(8)",
    "bridges: replicate(2) | replicate(8)",
    "bridges: split(4) | split(2)",
]


@pytest.mark.parametrize("name", SOME)
def test_a_step_in_scopes_is_compiled_as_planned_and_equals_plain_jit(name):
    row = scopes.measure(ALL[name])
    assert not row.wrong and not row.refused, row
    assert row.collectives and row.difference is not None and row.difference < 1e-12


def test_scopes_that_ask_for_too_many_devices_are_refused_as_they_should_be():
    row = scopes.measure(ALL["three deep: split(4) > replicate() > replicate(4) | none"])
    assert "asks for 4 replicas and 4 devices for each example" in row.refused and not row.wrong


def test_a_parameter_that_lies_whole_where_it_was_to_be_split_is_noticed(monkeypatch):
    monkeypatch.setattr(scopes, "parts", lambda scopes: 8 if scopes else 1)
    row = scopes.measure(ALL["bridges: split(2) | split(2)"])
    assert "bytes on a device" in row.wrong
    assert "1" in [cell for column in scopes.table_of([row]).columns for cell in column.cells]
    assert jax.config.read("jax_enable_x64")
