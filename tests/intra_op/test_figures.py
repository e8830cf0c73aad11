"""Figures of devices and links: what collectives take, and which figures no machine has."""

import dataclasses
import math

import pytest

from autopar.compiler.intra_op.figures import cpu_figures, figures_of, h100_figures, wire_bytes
from autopar.errors import InvalidArgument
from tests.intra_op.planned_steps import GRID, figures


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [("all-reduce", 150.0), ("all-gather", 75.0), ("reduce-scatter", 75.0), ("all-to-all", 75.0)],
)
def test_bytes_on_the_wire_are_those_of_a_ring(kind, nbytes):
    assert wire_bytes(kind, 4, 100.0) == nbytes
    assert wire_bytes(kind, 1, 100.0) == 0


def test_seconds_of_a_collective_are_its_latency_and_its_bytes():
    chosen = figures(GRID, latency_s=1.0, bandwidth=10.0)
    assert chosen.collective_s("all-gather", (1,), 40.0, GRID) == 1 + 30 / 10
    assert chosen.collective_s("all-reduce", (0, 1), 80.0, GRID) == 2 + 2 * 70 / 10


def test_the_slowest_of_several_axes_counts():
    chosen = dataclasses.replace(figures(GRID), latency_s=(0.0, 3.0), bandwidth=(2.0, 8.0))
    assert chosen.collective_s("all-gather", (0, 1), 16.0, GRID) == 3 + 14 / 2


def test_one_device_alone_sends_nothing():
    assert figures(GRID, latency_s=1.0).collective_s("all-reduce", (), 1e9, GRID) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("matmul_flops", 0.0),
        ("memory_bandwidth", math.nan),
        ("memory_bytes", math.inf),
        ("bandwidth", (1e9, 0.0)),
        ("latency_s", (-1.0, 0.0)),
        ("fused", -0.1),
    ],
)
def test_figures_that_no_machine_has_are_refused(field, value):
    with pytest.raises(InvalidArgument, match=rf"figure {field} of 'chosen' is .*must be finite and"):
        dataclasses.replace(figures(GRID), **{field: value})


@pytest.mark.parametrize("field", ["latency_s", "fused"])
def test_some_figures_may_be_zero(field):
    dataclasses.replace(figures(GRID), **{field: (0.0, 0.0) if field == "latency_s" else 0.0})


@pytest.mark.parametrize(
    ("kind", "expected"), [("cpu", cpu_figures(2)), ("NVIDIA H100 80GB HBM3", h100_figures(2))], ids=["cpu", "h100"]
)
def test_figures_go_by_the_name_that_jax_gives_a_device(kind, expected):
    assert figures_of(kind, 2) == expected


def test_devices_without_figures_are_an_error_that_says_which_there_are():
    with pytest.raises(InvalidArgument, match=r"no figures for devices of kind 'abacus'.*cpu, h100"):
        figures_of("abacus", 1)
