"""Figures of devices and links: what collectives take, and which figures no machine has."""

import dataclasses
import math

import pytest

from autopar.compiler.costs.mesh_costs import cpu_figures, figures_of, h100_figures, mesh_figures, wire_bytes
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Machine, machines
from tests.compiler.planned_steps import GRID, figures


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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Four devices along the fast axis share what is sent along the slow one, of size two.
        ("all-gather", (3 + 24 / 8) + (1 + 4 / 2)),
        ("all-reduce", 2 * (3 + 24 / 8) + 2 * (1 + 4 / 2)),
        # Half of what a device has stays with its own device of the slow axis.
        ("all-to-all", (3 + 12 / 8) + (1 + 16 / 2)),
        ("collective-permute", 1 + 16 / 2),
    ],
)
def test_axes_of_different_levels_are_taken_one_after_the_other(kind, expected):
    chosen = dataclasses.replace(figures(GRID), latency_s=(1.0, 3.0), bandwidth=(2.0, 8.0))
    assert chosen.collective_s(kind, (0, 1), 32.0, GRID) == expected


def test_axes_that_are_equally_fast_are_one_ring():
    chosen = dataclasses.replace(figures(GRID, latency_s=1.0, bandwidth=10.0), step_s=(0.5, 0.25))
    assert chosen.collective_s("all-gather", (0, 1), 80.0, GRID) == 1 + 7 * 0.5 + 70 / 10
    assert chosen.collective_s("collective-permute", (1,), 80.0, GRID) == 1 + 0.25 + 60 / 10


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
        ("kernel_s", -1e-6),
        ("matmul_half_flops", math.nan),
        ("vector_flops", 0.0),
        ("exchange_bandwidth", (0.0, 1e9)),
    ],
)
def test_figures_that_no_machine_has_are_refused(field, value):
    with pytest.raises(InvalidArgument, match=rf"figure {field} of 'chosen' is .*must be finite and"):
        dataclasses.replace(figures(GRID), **{field: value})


@pytest.mark.parametrize("field", ["latency_s", "fused"])
def test_some_figures_may_be_zero(field):
    dataclasses.replace(figures(GRID), **{field: (0.0, 0.0) if field == "latency_s" else 0.0})


# --- of machines ------------------------------------------------------------------------------------------------

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def grid(*shape: int) -> LogicalMesh:
    return LogicalMesh(shape=shape, axis_names=tuple("xyz"[: len(shape)]))


@pytest.mark.parametrize(
    ("shape", "axis", "group", "hosts"),
    [
        ((8,), 0, 8, 1),
        ((4, 8), 1, 8, 1),  # consecutive devices: one host
        ((4, 8), 0, 4, 4),  # every eighth device: one of each host
        ((8, 4), 1, 4, 1),
        ((8, 4), 0, 8, 4),  # every fourth device: two of each host
        ((2, 16), 1, 16, 2),
        ((2, 16), 0, 2, 2),
        ((32,), 0, 32, 4),
        ((2, 4, 4), 1, 4, 2),
        ((3, 3), 0, 3, 3),  # strides that do not divide a host: none of two is surely in the same
        ((1, 8), 0, 1, 1),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dgx-h100", "p3.16xlarge"])
def test_an_axis_takes_what_the_machine_says_for_its_part_of_the_network(name, kind, shape, axis, group, hosts):
    machine = Machine.named(name)
    chosen = mesh_figures(machine, shape)
    for nbytes in (0.0, 1e5, 1e9):
        found = chosen.collective_s(kind, (axis,), nbytes, grid(*shape))
        assert found == pytest.approx(machine.collective_s(kind, nbytes, group, hosts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (2, 16)])
def test_all_axes_together_move_the_bytes_of_the_whole_group(kind, shape):
    machine, mesh = Machine.named("dgx-h100"), grid(*shape)
    chosen = mesh_figures(machine, shape)
    # Latencies differ a little: two axes inside a host are two rings here, and one to the machine.
    found, expected = (
        seconds(2e9) - seconds(1e9)
        for seconds in (
            lambda nbytes: chosen.collective_s(kind, (0, 1), nbytes, mesh),
            lambda nbytes: machine.collective_s(kind, nbytes, 32, 4),
        )
    )
    if kind == "all-to-all":  # by axes, a part of what goes to other hosts passes another device of its own first
        assert expected <= found * (1 + 1e-9) <= 1.2 * expected
    else:
        assert found == pytest.approx(expected)


def test_a_mesh_over_part_of_every_host_leaves_it_sooner():
    machine = Machine.named("p3.16xlarge")
    inside, across = mesh_figures(machine, (2, 4)), mesh_figures(machine, (2, 4), domain=4)
    assert inside.bandwidth == (machine.intra.bandwidth,) * 2
    assert across.bandwidth == (machine.inter.bandwidth, machine.intra.bandwidth)


def test_a_rack_of_nvlink_is_one_domain():
    machine = Machine.named("gb200-nvl72")
    assert mesh_figures(machine, (9, 8)).bandwidth == (machine.intra.bandwidth,) * 2


@pytest.mark.parametrize(
    ("name", "dtype", "itemsize", "rate"),
    [
        ("p3.16xlarge", "float16", 2, 125e12 * 0.8),
        ("p3.16xlarge", "bfloat16", 2, 15.7e12 * 0.9),
        ("p3.16xlarge", "float32", 4, 15.7e12 * 0.9),
        ("dgx-h100", "float32", 4, 494.7e12 * 0.8),
        ("dgx-h100", "float8_e4m3fn", 1, 1978.9e12 * 0.709),
        ("dgx-h100", "float64", 8, 67e12 * 0.8),
        ("tpu-v5e", "bfloat16", 2, 197e12 * 0.9),
    ],
)
def test_products_run_at_the_rate_of_their_type(name, dtype, itemsize, rate):
    machine = Machine.named(name)
    chosen = mesh_figures(machine, (8,))
    assert chosen.product_s(1e15, 0.0, dtype, itemsize) == pytest.approx(1e15 / rate, rel=1e-3)
    assert chosen.product_s(1e9, 3e6, dtype, itemsize) == machine.matmul_s(1e9, 3e6, dtype)


def test_vector_units_are_slower_than_the_units_for_products():
    for name in machines():
        chosen = mesh_figures(Machine.named(name), (8,))
        assert chosen.matmul_flops / 64 < 1e12 / chosen.vector_s(1e12) < chosen.matmul_flops


@pytest.mark.parametrize("shape", [(8,), (2, 4), (1, 8)])
def test_figures_go_by_the_name_that_jax_gives_a_device_or_by_a_machine(shape):
    machine = Machine.named("dgx-h100")
    assert figures_of("NVIDIA H100 80GB HBM3", shape) == figures_of(machine, shape) == mesh_figures(machine, shape)
    assert figures_of("cpu", shape) == cpu_figures(len(shape))


def test_figures_of_some_h100_are_those_of_one_host():
    some, host = h100_figures(2), mesh_figures(Machine.named("dgx-h100"), (1, 8))
    mesh = grid(1, 8)
    for kind in KINDS:
        assert some.collective_s(kind, (1,), 1e6, mesh) == pytest.approx(host.collective_s(kind, (1,), 1e6, mesh))
    assert some.product_s(1e15, 1.0, "float32", 4) == pytest.approx(host.product_s(1e15, 1.0, "float32", 4), rel=1e-4)


def test_devices_without_figures_are_an_error_that_says_which_there_are():
    with pytest.raises(InvalidArgument, match=r"no figures for devices of kind 'abacus'.*cpu, .*h100"):
        figures_of("abacus", (8,))
