"""Machines: what work takes on them is a ring, a roofline and a line in the bytes; files hold exactly their fields."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import GenericFiguresWarning, InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.hardware.collectives import PASSES
from autopar.hardware.machine import Link, Machine, machines

MB = 2**20
INTRA = Link(latency_s=1e-6, bandwidth=1e11, ramp_bytes=1e6)
INTER = Link(latency_s=1e-5, bandwidth=1e10, ramp_bytes=2e6)
ONE = Machine(
    name="one",
    devices_per_host=8,
    kind="one",
    memory_bytes=16e9,
    memory_bandwidth=1e12,
    peak_flops={"float32": 1e13, "float16": 1e14},
    matmul_share={"float32": 0.8, "float16": 0.5},
    matmul_half_flops=1e9,
    kernel_s=1e-6,
    intra=INTRA,
    inter=INTER,
    domain=8,
    sources={"kernel_s": "a wish"},
)


def ring(link: Link, nbytes: float, size: int) -> float:
    """One pass over a ring, step by step."""
    seconds = 0.0
    for _ in range(size - 1):
        seconds += link.latency_s + (nbytes + link.ramp_bytes) / size / link.bandwidth
    return seconds


def across(nbytes: float, local: int, hosts: int) -> float:
    """One pass over a ring through hosts whose cards are slower than the links inside: starts, steps, bytes."""
    size = local * hosts
    start_s = sum((n - 1) / n * link.ramp_bytes / link.bandwidth for link, n in ((INTRA, local), (INTER, hosts)))
    step_s = ((size - hosts) * INTRA.latency_s + hosts * INTER.latency_s) / size
    return start_s + (size - 1) * step_s + (size - 1) / size * nbytes / min(INTRA.bandwidth, local * INTER.bandwidth)


@pytest.mark.parametrize(
    ("kind", "group", "hosts", "expected"),
    [
        ("all-gather", 8, 1, ring(INTRA, 64e6, 8)),
        ("reduce-scatter", 4, 1, ring(INTRA, 64e6, 4)),
        ("all-reduce", 8, 1, 2 * ring(INTRA, 64e6, 8)),
        ("all-to-all", 8, 1, ring(INTRA, 64e6, 8)),
        ("collective-permute", 8, 1, 1e-6 + 65e6 / 1e11),
        ("all-reduce", 4, 4, 2 * ring(INTER, 64e6, 4)),
        ("collective-permute", 8, 2, 1e-5 + 66e6 / 1e10),
        # One ring through all hosts: the eight cards of a host carry what a link inside carries.
        ("all-reduce", 32, 4, 2 * across(64e6, 8, 4)),
        ("all-gather", 16, 2, across(64e6, 8, 2)),
        # Of what a device sends to everyone, a quarter is for its own host.
        ("all-to-all", 32, 4, ring(INTRA, 16e6, 8) + ring(INTER, 64e6, 4)),
    ],
)
def test_a_collective_is_a_ring_through_all_levels(kind, group, hosts, expected):
    assert ONE.collective_s(kind, 64e6, group, hosts) == pytest.approx(expected)


TREES = replace(ONE, inter=replace(INTER, tree_share=0.8))


@pytest.mark.parametrize(("local", "hosts", "steps"), [(8, 2, 1), (8, 64, 6), (8, 48, 6), (1, 64, 6)])
def test_small_sums_over_hosts_go_along_a_tree_and_large_ones_around_a_ring(local, hosts, steps):
    group, pieces = local * hosts, ((INTRA, local), (INTER, hosts))
    start_s = sum((n - 1) / n * link.ramp_bytes / link.bandwidth for link, n in pieces)
    chain_s = (local - 1) * INTRA.latency_s + steps * INTER.latency_s
    rate = 0.8 * min(INTRA.bandwidth, local * INTER.bandwidth)
    small = TREES.collective_s("all-reduce", 1e3, group, hosts)
    assert small == pytest.approx(2 * (start_s + chain_s) + 2 * 1e3 / rate)
    assert small < ONE.collective_s("all-reduce", 1e3, group, hosts)
    assert TREES.collective_s("all-reduce", 1e12, group, hosts) == ONE.collective_s("all-reduce", 1e12, group, hosts)


@pytest.mark.parametrize("kind", sorted(set(PASSES) - {"all-reduce"}))
def test_only_sums_over_hosts_have_trees(kind):
    assert TREES.collective_s(kind, 1e3, 64, 8) == ONE.collective_s(kind, 1e3, 64, 8)
    assert TREES.collective_s("all-reduce", 1e3, 8) == ONE.collective_s("all-reduce", 1e3, 8)


def test_steps_of_a_sum_without_bytes_grow_with_the_logarithm_of_hosts_where_there_are_trees():
    h100, v5e = Machine.named("dgx-h100"), Machine.named("tpu-v5e")
    trees, rings = (
        [machine.collective_s("all-reduce", 0, 8 * hosts, hosts) for hosts in (64, 128, 256)] for machine in (h100, v5e)
    )
    assert trees[2] - trees[1] == pytest.approx(trees[1] - trees[0], rel=0.05)
    assert rings[2] - rings[1] == pytest.approx(2 * (rings[1] - rings[0]), rel=0.05)


@pytest.mark.parametrize("kind", PASSES)
def test_one_device_alone_exchanges_nothing(kind):
    assert ONE.collective_s(kind, 1e9, 1) == 0


@given(
    st.sampled_from(sorted(PASSES)), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**34), st.integers(1, 2**34)
)
def test_more_bytes_take_longer_and_more_hosts_are_never_faster(kind, local, hosts, nbytes, more):
    group = local * hosts
    seconds = ONE.collective_s(kind, nbytes, group, hosts)
    assert seconds >= ONE.collective_s(kind, nbytes, group, 1) * (1 - 1e-12)
    assert ONE.collective_s(kind, nbytes + more, group, hosts) >= seconds
    line = [ONE.collective_s(kind, n, group, hosts) for n in (nbytes, nbytes + more, nbytes + 2 * more)]
    assert line[2] - line[1] == pytest.approx(line[1] - line[0], rel=1e-6, abs=1e-12)


def test_half_of_the_rates_is_reached_at_the_sizes_that_say_so():
    at_once = replace(ONE, kernel_s=0.0, intra=replace(INTRA, latency_s=0.0))
    assert 1e9 / at_once.matmul_s(1e9, 0, "float16") == pytest.approx(5e13 / 2)
    assert 1e6 / at_once.transfer_s(1e6, same_host=True) == pytest.approx(1e11 / 2)
    assert 1e12 / at_once.matmul_s(1e12, 0, "float16") == pytest.approx(5e13, rel=2e-3)


def test_a_product_takes_its_flops_or_its_bytes_and_the_start_of_a_kernel():
    assert ONE.matmul_s(7e9, 1e6, "float32") == pytest.approx(1e-6 + 8e9 / 8e12)
    assert ONE.matmul_s(7e9, 1e10, "float32") == pytest.approx(1e-6 + 1e10 / 1e12)
    assert ONE.memory_s(3e9) == pytest.approx(1e-6 + 3e-3)
    assert ONE.transfer_s(8e6, same_host=False) == pytest.approx(1e-5 + 1e7 / 1e10)


@pytest.mark.parametrize(
    ("machine", "dtype", "expected"),
    [
        ("dgx-h100", "float32", "tf32"),
        ("dgx-h100", "float8_e4m3fn", "fp8"),
        ("dgx-a100-80", "float8_e5m2", "bfloat16"),
        ("dgx-a100-80", "uint8", "int8"),
        ("p3.16xlarge", "float32", "float32"),
        ("p3.16xlarge", "bfloat16", "float32"),
        ("p3.16xlarge", "float64", "float64"),
        ("tpu-v5e", "float16", "float32"),
        ("tpu-v5e", "complex64", "float32"),
    ],
)
def test_types_that_a_machine_has_no_unit_for_are_computed_in_others(machine, dtype, expected):
    assert Machine.named(machine).computed_in(dtype) == expected


def test_devices_that_share_their_host_are_faster_where_others_idle():
    shared = replace(ONE, concurrent_devices=2, execution_s=1e-3)
    assert shared.when_busy(8) == shared and ONE.when_busy(1) is ONE
    for devices, factor in ((4, 2), (2, 4), (1, 4)):
        found = shared.when_busy(devices)
        assert found.matmul_s(1e12, 1e6, "float32") == pytest.approx(shared.matmul_s(1e12, 1e6, "float32") / factor)
        assert found.memory_s(1e9) == pytest.approx(shared.memory_s(1e9) / factor)
        assert found.execution_s == pytest.approx(1e-3 / factor)
        ring = found.collective_s("all-reduce", 64e6, devices)
        assert ring == pytest.approx(shared.collective_s("all-reduce", 64e6, devices) / factor)
        assert (found.name, found.memory_bytes, found.inter) == (shared.name, shared.memory_bytes, shared.inter)
    assert [shared.share_of_host(devices) for devices in (1, 2, 8)] == [0.5, 1.0, 1.0]
    assert ONE.share_of_host(8) == 0.0
    part = replace(shared, devices_per_host=1)
    assert part.when_busy(1) is part and part.share_of_host(1) == 0.5


# --- which values and files are refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bandwidth": math.nan}, "figure memory_bandwidth of 'one' is nan; it must be finite and positive"),
        ({"memory_bytes": 0}, "memory_bytes of 'one' is 0"),
        ({"memory_bytes": "16 GB"}, "memory_bytes of 'one' is '16 GB'"),
        ({"kernel_s": -1.0}, "kernel_s of 'one' is -1.0; it must be finite and not negative"),
        ({"matmul_half_flops": math.inf}, "matmul_half_flops of 'one' is inf"),
        ({"hidden_share": 1.5}, "hidden_share of 'one' is 1.5, a share is at most 1"),
        ({"devices_per_host": 0}, "devices_per_host of 'one' is 0"),
        ({"concurrent_devices": -1}, "concurrent_devices of 'one' is -1; it must be finite and not negative"),
        ({"concurrent_devices": 0.5}, "concurrent_devices of 'one' is 0.5, and one device .* Give how many devices"),
        ({"concurrent_devices": "two"}, "concurrent_devices of 'one' is 'two'"),
        ({"domain": 8.5}, "domain of 'one' is 8.5"),
        ({"domain": 3}, "domain of 'one' is 3 and a host has 8 devices. A fast domain .*: give such a number"),
        ({"domain": 12}, "domain of 'one' is 12 and a host has 8 devices"),
        ({"devices_per_host": 7}, "domain of 'one' is 8 and a host has 7 devices"),
        ({"memory_bytes": 1}, "memory_bytes of 'one' is 1; a device has at least 10000 bytes. Give bytes"),
        ({"memory_bytes": 80}, "memory_bytes of 'one' is 80; a device has at least"),
        (
            {"peak_flops": {"float32": 1e30, "float16": 1e14}},
            r"peak_flops\['float32'\] of 'one' is 1e.30; one device has at most 1e.18 FLOP/s. Give FLOP/s of one",
        ),
        ({"peak_flops": {"float32": 0.0}}, r"peak_flops\['float32'\] of 'one' is 0.0"),
        ({"peak_flops": {"float32": 1e12, "half": 1e12}}, "peak_flops of 'one' is 'half'. Choose one of .*'float16'"),
        (
            {"peak_flops": {"float32": 1e12}},
            r"peak_flops for \['float32'\] and matmul_share for \['float16', 'float32'\]",
        ),
        ({"matmul_share": {"float32": 2.0, "float16": 0.5}}, "a share is at most 1"),
        ({"convolution_share": {"float32": 1.5}}, "convolution_share of 'one' is .*, a share is at most 1"),
        ({"convolution_share": {"half": 0.5}}, "convolution_share of 'one' is 'half'. Choose one of .*'float16'"),
        ({"matmul_share": {"float32": "half", "float16": 0.5}}, r"matmul_share\['float32'\] of 'one' is 'half'"),
        ({"memory_bytes": 10**400}, "memory_bytes of 'one' is 1000"),
        ({"schedules_for_latency": 1}, "schedules_for_latency of 'one' is 1, it must be true or false"),
        ({"product_sums": None}, "product_sums of 'one' is None, it must be true or false"),
        ({"fuses_products": 1}, "fuses_products of 'one' is 1, it must be true or false"),
        ({"widens_bfloat16": "no"}, "widens_bfloat16 of 'one' is 'no', it must be true or false"),
        ({"scatters_sums": 1.0}, "scatters_sums of 'one' is 1.0, it must be true or false"),
        ({"masks_ragged_products": 0}, "masks_ragged_products of 'one' is 0, it must be true or false"),
        ({"launch_s": "soon"}, "launch_s of 'one' is 'soon'"),
        ({"fuses": 0}, "fuses of 'one' is 0, it must be true or false"),
        ({"gathers_outermost": 1}, "gathers_outermost of 'one' is 1, it must be true or false"),
        ({"channels_last": ["float32", "half"]}, "channels_last of 'one' is 'half'. Choose one of .*'float16'"),
        ({"execution_s": -1e-3}, "execution_s of 'one' is -0.001; it must be finite and not negative"),
        ({"sources": {"intra": 5}}, r"sources of 'one' are \{'intra': 5\}; each must be a text"),
        ({"sources": {"nic": "somewhere"}}, r"name the unknown fields \['nic'\]"),
    ],
)
def test_figures_that_no_machine_has_are_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(ONE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_s": -1e-6}, "latency_s of a link is -1e-06; it must be finite and not negative"),
        ({"bandwidth": 0}, "bandwidth of a link is 0; it must be finite and positive"),
        ({"ramp_bytes": math.nan}, "ramp_bytes of a link is nan"),
        ({"tree_share": -0.5}, "tree_share of a link is -0.5; it must be finite and not negative"),
        ({"bandwidth": True}, "bandwidth of a link is True"),
        ({"group_bandwidths": ((1, 1e9),)}, "number of devices in group_bandwidths of a link is 1"),
        ({"group_bandwidths": ((2, 0.0),)}, "bandwidth of 2 devices in group_bandwidths of a link is 0.0"),
    ],
)
def test_figures_that_no_link_has_are_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(INTRA, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all-scatter", 1.0, 8), "no cost of the collective 'all-scatter'; there is one of all-reduce"),
        (("all-reduce", 1.0, 0), "group_size is 0"),
        (("all-reduce", 1.0, 8, 3), "8 devices in 3 hosts"),
        (("all-reduce", 1.0, 8, 0), "num_hosts is 0"),
    ],
)
def test_groups_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        ONE.collective_s(*arguments)


def test_smaller_groups_send_as_fast_as_the_wires_that_join_them():
    link = replace(INTRA, group_bandwidths=((2, 1e10), (4, 4e10)))
    assert [link.bandwidth_of(size) for size in (1, 2, 3, 4, 8)] == [INTRA.bandwidth, 1e10, 1e10, 4e10, INTRA.bandwidth]
    assert link.transfer_s(1e9) == pytest.approx(INTRA.latency_s + (1e9 + INTRA.ramp_bytes) / 1e10)
    assert link.level(4).bandwidth == 4e10
    assert link.level(4).exchange_bandwidth == 4e10
    pairs = replace(link, exchange_bandwidths=((8, 1e9),))
    sent = replace(ONE, intra=pairs)
    assert sent.collective_s("all-to-all", 8e9, 8) > 7 > sent.collective_s("all-gather", 8e9, 8)
    v100 = Machine.named("p3.16xlarge")
    pair_s, quad_s, all_s = (v100.collective_s("all-gather", 1e9, size) for size in (2, 4, 8))
    assert pair_s > 2 * quad_s > 2 * all_s


@pytest.mark.parametrize(
    ("name", "link", "links"),
    [
        ("tpu-v5e", 4.3e10, {2: 1, 4: 2, 16: 2, 64: 2, 128: 3, 256: 4}),
        ("tpu-v6e", 8.68e10, {2: 1, 4: 2, 16: 2, 64: 2, 128: 3, 256: 4}),
        ("tpu-v5p", 8.63e10, {2: 1, 4: 2, 8: 2, 16: 2, 32: 3, 64: 4, 256: 4, 512: 6, 8960: 6}),
        ("tpu7x", 5e10, {4: 2, 8: 2, 16: 2, 32: 2, 64: 3, 128: 4, 1024: 6, 18432: 6}),
    ],
)
def test_a_group_of_tpus_sends_by_as_many_links_as_its_least_connected_chip_has(name, link, links):
    machine = Machine.named(name)
    for size, count in links.items():
        # Without steps and starts an all-gather passes all but a device's own part.
        rate = 1e12 * (size - 1) / size / machine.collective_s("all-gather", 1e12, size)
        assert rate == pytest.approx(count * link, rel=0.01)


def test_pairs_of_a_torus_have_one_link_each_and_all_to_alls_half_of_what_an_axis_of_16_has():
    v5e, permuted = Machine.named("tpu-v5e"), 1e9 / 4.3e10
    assert v5e.transfer_s(1e9, same_host=True) == pytest.approx(permuted, rel=0.01)
    # On a ring of n an all-to-all takes n / 4 of the time of an all-gather of as many bytes a device.
    assert v5e.collective_s("all-to-all", 1e9, 16) == pytest.approx(
        16 / 4 * v5e.collective_s("all-gather", 1e9, 16), rel=0.01
    )
    assert v5e.collective_s("collective-permute", 1e9, 256) > permuted


def test_pairs_that_send_to_each_other_are_as_slow_as_the_slowest_of_them():
    pairs = replace(ONE, intra=replace(INTRA, exchange_bandwidths=((8, 1e9),)))
    assert pairs.collective_s("collective-permute", 1e9, 8) == pytest.approx(1.0, rel=0.01)
    assert pairs.collective_s("all-gather", 1e9, 8) == ONE.collective_s("all-gather", 1e9, 8)


def test_a_damaged_file_is_refused_with_a_lesson_or_read(tmp_path):
    def damaged(raw: Any) -> Iterator[Any]:
        yield from (None, "x", True, [], {}, [1], -1, 1.5, 10**400, [[1, 2]], [["a", 1]])
        items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
        for key, value in list(items):
            for other in damaged(value):
                changed = raw.copy()
                changed[key] = other
                yield changed
        for key in raw if isinstance(raw, dict) else ():
            yield {name: value for name, value in raw.items() if name != key}
            yield {f"{name}!" if name == key else name: value for name, value in raw.items()}

    text = Machine.named("p3.16xlarge").to_json()
    texts = [json.dumps(each) for each in damaged(json.loads(text))]
    texts += [text[:stop] for stop in range(0, len(text), 97)] + ["[" * 100_000, "1" * 5_000]
    refused = 0
    for each in texts:
        try:
            machine = Machine.from_json(each)
        except InvalidArgument:
            refused += 1
        else:
            assert machine.matmul_s(1e9, 1e6, "float16") > 0 and machine.collective_s("all-reduce", 1e6, 8) > 0
    assert refused > 0.8 * len(texts) > 500


@pytest.mark.parametrize("load", [Machine.load, Cluster.load])
def test_what_is_no_file_of_text_is_refused(load, tmp_path):
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        load(tmp_path / "one.json")
    (tmp_path / "one.json").write_bytes("é".encode("latin-1"))
    with pytest.raises(InvalidArgument, match="holds the byte 0xe9"):
        load(tmp_path / "one.json")


def test_a_file_gives_back_the_machine(tmp_path):
    ONE.save(tmp_path / "one.json")
    assert Machine.load(tmp_path / "one.json") == ONE
    assert hash(Machine.load(tmp_path / "one.json")) == hash(ONE)


def test_a_file_of_an_earlier_release_is_read_without_the_figure_that_nothing_reads():
    raw = ONE.to_data()
    former = {**raw, "overlap": 0.5, "sources": {**raw["sources"], "overlap": "a guess"}}
    assert Machine.from_json(json.dumps(former)) == ONE


def test_one_share_of_convolutions_is_that_of_all_types():
    read = Machine.from_data({**ONE.to_data(), "convolution_share": 0.5})
    assert read.convolution_share == {"float32": 0.5, "float16": 0.5}
    assert Machine.from_json(read.to_json()) == read
    by_type = dataclasses.replace(ONE, convolution_share={"float16": 0.5})
    assert (by_type.share_of_convolutions("float16"), by_type.share_of_convolutions("float32")) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.pop("kernel_s"), r"The machine lacks the keys \['kernel_s'\]"),
        (lambda raw: raw.update(colour="red"), r"has the unknown keys \['colour'\]"),
        (lambda raw: raw["inter"].pop("bandwidth"), r"inter of the machine 'one' lacks the keys \['bandwidth'\]"),
        (lambda raw: raw.update(intra=3), "intra of the machine 'one' is 3, it must be a JSON object"),
        (lambda raw: raw.update(kind=3), "kind of the machine 'one' is 3, it must be a string"),
        (lambda raw: raw.update(peak_flops=1e12), "peak_flops of the machine 'one' is .*, it must be an object"),
        (
            lambda raw: raw.update(convolution_share="all"),
            "convolution_share of the machine 'one' is 'all', it must be",
        ),
        (lambda raw: raw.update(convolution_share=True), "convolution_share of the machine 'one' is True, it must be"),
        (
            lambda raw: raw.update(channels_last="float32"),
            "channels_last of 'one' is 'float32', it must be a list",
        ),
        (lambda raw: raw.update(memory_bytes="1"), "memory_bytes of 'one' is '1'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_its_field(change, message):
    raw = ONE.to_data()
    change(raw)
    with pytest.raises(InvalidArgument, match=message):
        Machine.from_json(json.dumps(raw))


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "must be a JSON object")])
def test_a_file_of_something_else_is_refused(text, message):
    with pytest.raises(InvalidArgument, match=message):
        Machine.from_json(text)


# --- the library ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "types"),
    [
        pytest.param("dgx-h100", {"float32", "bfloat16", "float16", "float8_e4m3fn", "int8"}, id="capability 9.0"),
        pytest.param("dgx-b200", {"float32", "bfloat16", "float16", "float8_e4m3fn", "int8"}, id="capability 10.0"),
        pytest.param("p4d.24xlarge", {"bfloat16", "float16", "float8_e4m3fn", "int8"}, id="capability 8.0"),
        pytest.param("p3.16xlarge", {"bfloat16", "float16", "float8_e4m3fn", "int8"}, id="capability 7.0"),
        pytest.param("nc24s-v2", {"float8_e4m3fn", "int8"}, id="capability 6.0"),
        pytest.param("mi300x-8", {"float8_e4m3fn", "int8"}, id="AMD's"),
        pytest.param("tpu-v5p", set(), id="no libraries"),
    ],
)
def test_libraries_have_channels_innermost_by_type_and_compute_capability(name, types):
    known = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
    assert {dtype for dtype in known if Machine.named(name).has_channels_last(dtype)} == types


@pytest.mark.parametrize("name", machines())
def test_every_machine_says_where_its_figures_are_from(name):
    machine = Machine.named(name)
    assert machine.name == name
    said = {"memory_bytes", "memory_bandwidth", "peak_flops", "matmul_share", "matmul_half_flops", "kernel_s"}
    assert {*said, "intra", "inter"} <= set(machine.sources)
    assert all(source.strip() for source in machine.sources.values())
    assert machine.domain == machine.devices_per_host or "domain" in machine.sources


@pytest.mark.parametrize("name", [name for name in machines() if name != "cpu"])
def test_links_inside_are_faster_than_between_and_memory_than_both(name):
    machine = Machine.named(name)
    assert machine.memory_bandwidth > machine.intra.bandwidth > machine.inter.bandwidth
    assert machine.intra.latency_s < machine.inter.latency_s


@pytest.mark.parametrize(
    ("name", "kind", "group", "hosts", "measured"),
    [
        # Milliseconds by MiB: tables of NCCL's times on 8 H100, and of 8 hosts; bus bandwidths on 8 A100 and V100;
        # sums over hosts of p4d (github.com/NVIDIA/nccl/issues/527).
        ("dgx-h100", "all-reduce", 8, 1, {16: 0.1292, 256: 1.3609, 2048: 10.4952}),
        ("dgx-h100", "all-gather", 8, 1, {128: 0.3584, 8192: 20.9105}),
        ("dgx-h100", "reduce-scatter", 8, 8, {16: 0.4059, 2048: 39.2532}),
        ("p4d.24xlarge", "all-reduce", 8, 1, {1: 0.0927, 16: 0.2330, 256: 2.1648, 1024: 8.2055}),
        ("p4d.24xlarge", "all-reduce", 24, 3, {1024: 64.8}),
        ("p4d.24xlarge", "all-reduce", 32, 4, {1024: 70.3}),
        ("p3.16xlarge", "all-reduce", 8, 1, {1: 0.0798, 16: 0.2744, 256: 3.5320, 1024: 13.9706}),
    ],
)
def test_collectives_take_about_what_was_measured(name, kind, group, hosts, measured):
    found = [1e3 * Machine.named(name).collective_s(kind, size * MB, group, hosts) for size in measured]
    np.testing.assert_allclose(found, list(measured.values()), rtol=0.15)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Tesla V100-SXM2-16GB", "p3.16xlarge"),
        ("Tesla V100-SXM2-32GB", "dgx-1v-32"),
        ("NVIDIA A100-SXM4-40GB", "p4d.24xlarge"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100-80"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("H100", "dgx-h100"),
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA B200", "dgx-b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu7x"),
        ("Tesla T4", "g4dn.12xlarge"),
        ("Tesla P100-PCIE-16GB", "nc24s-v2"),
        ("NVIDIA A10G", "g5.48xlarge"),
        ("NVIDIA L4", "g6.48xlarge"),
        ("NVIDIA L40S", "g6e.48xlarge"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x-8"),
        ("AMD Instinct MI355X", "mi355x-8"),
        ("cpu", "cpu"),
        ("p4de.24xlarge", "p4de.24xlarge"),
    ],
)
def test_devices_are_found_by_the_name_that_jax_gives_them(kind, name):
    assert Machine.of_kind(kind) == Machine.named(name)


def test_a_kind_is_no_part_of_a_longer_number():
    assert Machine.find("NVIDIA L40") is None
    with pytest.warns(
        GenericFiguresWarning, match=r"no figures for devices of kind 'NVIDIA L40'.*cpu.*autopar calibrate"
    ):
        assert Machine.of_kind("NVIDIA L40").name == "generic"


def test_a_machine_that_is_not_there_is_refused_with_those_spelled_alike():
    with pytest.raises(InvalidArgument, match=r"no machine 'p3.16xlrge'\. Did you mean 'p3.16xlarge'"):
        Machine.named("p3.16xlrge")
    with pytest.raises(InvalidArgument, match=r"no machine 'abacus'\. Choose one of cpu, "):
        Machine.named("abacus")


@pytest.mark.parametrize("name", machines())
def test_a_machine_and_its_clusters_come_back_from_their_data_which_is_json(name):
    machine = Machine.named(name)
    assert Machine.from_data(machine.to_data()) == machine
    assert json.loads(json.dumps(machine.to_data())) == machine.to_data()
    for cluster in (Cluster.of_hosts(machine, 2), Cluster.parse(f"1x {name} + 2x dgx-h100 @ 25 Gbit/s")):
        assert Cluster.from_data(cluster.to_data()) == cluster
        assert json.loads(json.dumps(cluster.to_data())) == cluster.to_data()


@pytest.mark.parametrize("domain", [1, 2, 4, 8, 16, 72])
def test_a_fast_domain_divides_a_host_or_has_whole_hosts(domain):
    assert replace(ONE, domain=domain).domain == domain


def test_fields_of_the_library_are_those_of_the_class():
    assert {field.name for field in dataclasses.fields(Machine)} == set(Machine.named("cpu").to_data())


def test_the_compiler_knows_of_all_memory_where_jax_may_take_a_part():
    h100 = Machine.named("dgx-h100")
    here = Cluster(num_devices=8, machine=h100, memory_bytes=0.75 * h100.memory_bytes).machine
    assert here.memory_bytes == 0.75 * h100.memory_bytes
    assert here.compiler_share * here.memory_bytes == pytest.approx(h100.compiler_share * h100.memory_bytes)
    given, most = 1e9, 0.95 * (0.8 * h100.memory_bytes - 1e9) + 1e9
    assert h100.bytes_computed_again(given, most) == here.bytes_computed_again(given, 0.75 * h100.memory_bytes) == 0
    assert h100.bytes_computed_again(given, most + 1e6) == pytest.approx(1e6)
    assert h100.bytes_computed_again(0.9 * h100.memory_bytes, 0.9 * h100.memory_bytes + 1e6) == pytest.approx(1e6)
    assert h100.computed_again_s(1e9) == 2.5e9 / h100.memory_bandwidth
    assert Machine.named("tpu-v5p").bytes_computed_again(given, 1e15) == 0
