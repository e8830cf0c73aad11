"""Calibration: figures that times were made of are found again, and devices that are here become a file."""

import io
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from autopar.__main__ import main
from autopar.errors import Unsupported
from autopar.hardware.calibrate import (
    fit_concurrent_devices,
    fit_in_step_share,
    fit_kernels,
    fit_link,
    fit_machine,
    fit_rates,
    least_squares,
    measure,
    predicted_s,
    summary_of,
    table_of,
)
from autopar.hardware.cluster import Cluster
from autopar.hardware.collectives import PASSES
from autopar.hardware.machine import Link, Machine
from autopar.hardware.measure import Effort, Measurement, Series, convolutions, reductions, short_pieces

MB = 2**20


def exchanges(machine: Machine, groups=(2, 4, 8)) -> list[Measurement]:
    """Return the times of a machine's collectives and transfers, by its formulas."""
    found = [
        Measurement(what=kind, dtype="float32", nbytes=nbytes, seconds=1.0, group_size=group)
        for kind in (*PASSES, "transfer")
        for group in groups
        for nbytes in (2**14, MB, 64 * MB)
    ]
    return [replace(each, seconds=predicted_s(machine, each)) for each in found]


def work(machine: Machine, dtypes=("float32", "float16")) -> list[Measurement]:
    """Return the times of its products and its memory traffic."""
    products = [
        Measurement(what="product", dtype=dtype, nbytes=12 * n**2, seconds=1.0, flops=2 * n**3)
        for dtype in dtypes
        for n in (512, 1024, 2048, 4096, 8192)
    ]
    memory = [Measurement(what="memory", dtype="float32", nbytes=n, seconds=1.0) for n in (2**13, 2**26, 2**28)]
    return [replace(each, seconds=predicted_s(machine, each)) for each in products + memory]


@pytest.mark.parametrize("name", ["p3.16xlarge", "dgx-h100", "tpu-v5e", "cpu"])
def test_the_link_that_times_were_made_of_is_found_again(name):
    machine = Machine.named(name)
    intra = replace(machine.intra, group_bandwidths=(), exchange_bandwidths=(), tree_share=0.0)
    found = fit_link(exchanges(replace(machine, intra=intra)))
    for field in ("latency_s", "bandwidth", "ramp_bytes"):
        assert getattr(found, field) == pytest.approx(getattr(intra, field), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("name", ["p3.16xlarge", "dgx-h100"])
def test_the_rates_that_times_were_made_of_are_found_again(name):
    machine = Machine.named(name)
    found = fit_rates(work(machine))
    assert found.kernel_s == pytest.approx(machine.kernel_s, rel=0.1)
    assert found.memory_bandwidth == pytest.approx(machine.memory_bandwidth, rel=0.1)
    for dtype, rate in found.matmul_flops.items():
        assert rate == pytest.approx(machine.matmul_flops(dtype), rel=0.02)
    assert found.matmul_half_flops == pytest.approx(machine.matmul_half_flops, rel=0.2)


@pytest.mark.parametrize("share", [0.88, 1.19])
def test_what_products_reach_in_a_step_is_found_again_beside_what_they_reach_alone(share):
    machine = replace(Machine.named("dgx-h200"), in_step_share=share)
    alone = work(machine, ("float32", "bfloat16"))
    assert fit_in_step_share(alone) is None
    largest = [each for each in alone if each.what == "product" and each.flops == 2 * 8192**3]
    within = [replace(each, what="in step") for each in largest]
    within = [replace(each, seconds=predicted_s(machine, each)) for each in within]
    assert fit_in_step_share([*alone, *within]) == pytest.approx(share, rel=0.01)
    device = type("Device", (), {"device_kind": "NVIDIA H200", "platform": "gpu", "memory_stats": lambda self: None})()
    found = fit_machine([device], [*alone, *within])
    assert found.in_step_share == pytest.approx(share, rel=0.01)
    assert found.matmul_share == pytest.approx(machine.matmul_share, rel=0.02)  # alone, as before
    assert found.sources["in_step_share"].startswith("measured on 1 x NVIDIA H200")


KERNELS = (
    Measurement(what="reduction", dtype="bfloat16", nbytes=5e8, seconds=1.0),
    Measurement(what="reduction", dtype="bfloat16", nbytes=2e9, seconds=1.0),
    Measurement(what="convolution", dtype="bfloat16", nbytes=1e9, seconds=1.0, flops=3e12),
    Measurement(what="convolution", dtype="float32", nbytes=1e9, seconds=1.0, flops=3e12),
    Measurement(what="pieces", dtype="float32", nbytes=8e8, seconds=1.0),
)


def test_figures_of_kernels_that_times_were_made_of_are_found_again():
    known = Machine.named("dgx-h100")
    shares = {**known.convolution_share, "bfloat16": 0.66, "tf32": 0.5}
    figures = {"reducing_share": 0.7, "piece_bytes": 87.0}
    machine = replace(known, convolution_share=shares, **figures)
    kernels = [replace(each, seconds=predicted_s(machine, each)) for each in KERNELS]
    fitted = fit_kernels(known, kernels)
    assert fitted.pop("convolution_share") == pytest.approx(shares, rel=0.01)
    assert fitted == pytest.approx(figures, rel=0.01)
    device = type("Device", (), {"device_kind": "NVIDIA H100", "platform": "gpu", "memory_stats": lambda self: None})()
    found = fit_machine([device], [*work(machine, ("float32", "bfloat16")), *kernels])
    assert {name: getattr(found, name) for name in figures} == pytest.approx(figures, rel=0.1)
    assert found.convolution_share == pytest.approx(shares, rel=0.1)
    assert all(found.sources[name].startswith("measured on 1 x NVIDIA H100") for name in figures)
    written = io.StringIO()
    Console(width=120, file=written).print(summary_of(found, kernels), table_of(found, kernels))
    assert all(
        words in written.getvalue() for words in ("reductions, of the bandwidth", "bfloat16 66 %, tf32 50 %", "pieces")
    )


def test_kernels_that_were_not_measured_are_as_the_file_says():
    assert fit_kernels(Machine.named("dgx-h200"), []) == {}
    device = type("Device", (), {"device_kind": "NVIDIA H200", "platform": "gpu", "memory_stats": lambda self: None})()
    found = fit_machine([device], work(Machine.named("dgx-h200"), ("float32", "bfloat16")))
    assert (found.reducing_share, found.sources["reducing_share"]) == (0.67, "not measured: as dgx-h200")


@pytest.mark.parametrize("series", [reductions, convolutions, short_pieces])
def test_kernels_of_steps_are_measured_on_all_devices(series):
    effort = replace(Effort.of(quick=True), loop_s=0.001, array_bytes=2**16, images=1)
    found = series(jax.devices()[:2], effort)
    assert found and all(0 < each.seconds < 10 and each.nbytes > 0 for each in found)
    assert len({each.what for each in found}) == 1 and found[0].what in {each.what for each in KERNELS}


def test_what_is_measured_so_far_is_kept_once_a_machine_can_be_fitted(monkeypatch):
    every, kept = work(Machine.named("dgx-h100")), []
    series = [Series(name="one", measure=lambda _, each=each: [each]) for each in reversed(every)]
    monkeypatch.setattr("autopar.hardware.calibrate.series_of", lambda *_, **__: series)
    measure(jax.devices(), quick=True, kept=lambda found: kept.append(len(found)))
    memory = sum(each.what == "memory" for each in every)
    assert kept == list(range(memory + 1, len(every) + 1))


def test_a_series_that_the_devices_refuse_does_not_lose_the_others(monkeypatch):
    def refused(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no algorithm\nmore")

    kept = work(Machine.named("dgx-h100"))
    series = [Series(name="convolutions", measure=refused), Series(name="others", measure=lambda _: kept)]
    monkeypatch.setattr("autopar.hardware.calibrate.series_of", lambda *_, **__: series)
    with pytest.warns(UserWarning, match="convolutions could not be measured: INTERNAL: no algorithm$"):
        assert measure(jax.devices(), quick=True) == kept
    with pytest.warns(UserWarning), pytest.raises(Unsupported, match="No memory and no product could be measured"):
        series.pop()
        measure(jax.devices(), quick=True)


def at_once(seconds: dict[int, float]) -> list[Measurement]:
    """Return the times of one work on so many devices at once."""
    return [
        Measurement(what="at once", dtype="float32", nbytes=1.0, seconds=each, group_size=n)
        for n, each in seconds.items()
    ]


@pytest.mark.parametrize("concurrent", [1, 2, 4, 8])
def test_how_many_devices_share_a_host_is_found_again(concurrent):
    draw = np.random.default_rng(concurrent)
    shared = replace(Machine.named("dgx-h100"), concurrent_devices=concurrent)
    times = {n: shared.idle_share(n) * draw.uniform(0.9, 1.1) for n in (1, 2, 4, 8)}
    assert fit_concurrent_devices(at_once(times)) == (concurrent if concurrent < 8 else 0)
    machine = replace(shared, concurrent_devices=concurrent % 8)
    written = io.StringIO()
    Console(width=120, file=written).print(summary_of(machine, [*work(machine), *at_once(times)]))
    assert ("no" if concurrent == 8 else f"{concurrent} of 8") in written.getvalue()


def test_of_one_device_nothing_is_said_to_be_shared():
    assert fit_concurrent_devices(at_once({1: 1.0})) is None


def test_times_that_vary_by_a_fifth_give_figures_that_are_right_on_average():
    machine, draw = Machine.named("dgx-a100-80"), np.random.default_rng(0)
    noisy = [replace(each, seconds=each.seconds * draw.uniform(0.8, 1.2)) for each in exchanges(machine)]
    found = replace(machine, intra=fit_link(noisy))
    assert found.intra.bandwidth == pytest.approx(machine.intra.bandwidth, rel=0.1)
    ratios = [predicted_s(found, each) / each.seconds for each in noisy]
    assert np.median(ratios) == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize(
    ("rows", "seconds", "expected"),
    [
        ([(1, 0), (0, 1)], (2, 3), (2, 3)),
        ([(1, 1), (1, 2), (1, 3)], (3, 5, 7), (1, 2)),
        ([(1, 1), (1, 2), (1, 3)], (1, 3, 5), (0, None)),  # the line through them begins below zero
        ([(1,)] * 3, (1, 2, 8), (2,)),  # half as long and four times as long
        ([(1,)] * 5, (2, 2, 2, 2, 1000), (2,)),  # one that something else slowed down
    ],
)
def test_fits_give_nothing_negative_and_weigh_slow_and_fast_alike(rows, seconds, expected):
    found = least_squares(rows, seconds)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one >= 0 if other is None else one == pytest.approx(other, rel=0.01)


def test_what_is_known_of_a_kind_of_device_is_kept():
    machine = Machine.named("dgx-h200")
    device = type("Device", (), {"device_kind": "NVIDIA H200", "platform": "gpu", "memory_stats": lambda self: None})()
    found = fit_machine([device], work(machine, ("float32", "bfloat16")))
    assert (found.devices_per_host, found.domain, found.kind) == (1, 8, "nvidia h200")
    assert found.peak_flops == machine.peak_flops
    assert found.matmul_share == pytest.approx(machine.matmul_share, rel=0.02)
    assert (found.intra, found.inter, found.domain) == (machine.intra, machine.inter, machine.domain)
    assert found.sources["intra"] == "not measured: as dgx-h200"
    assert found.sources["matmul_share"].startswith("measured on 1 x NVIDIA H200")


def test_measured_and_fitted_stand_side_by_side():
    machine = Machine.named("p3.16xlarge")
    measured = [*work(machine), *exchanges(machine)]
    slower = replace(machine, intra=Link(latency_s=0.0, bandwidth=machine.intra.bandwidth / 2, ramp_bytes=0.0))
    written = io.StringIO()
    Console(width=120, file=written).print(table_of(slower, measured), summary_of(machine, measured))
    text = written.getvalue()
    assert "all-reduce" in text and "product" in text and "+8" in text
    assert "108 TFLOP/s" in text and "134 GB/s" in text and "2.5 MB" in text


def test_the_devices_that_are_here_become_a_file(tmp_path, capsys):
    path = tmp_path / "here.json"
    assert main(["calibrate", "--quick", "--json", str(path)]) == 0
    cluster = Cluster.load(path)
    assert (cluster.num_devices, cluster.kind) == (len(jax.devices()), "cpu")
    machine = cluster.machine
    assert {"float32", "bfloat16"} <= set(machine.peak_flops)
    assert set(machine.matmul_share.values()) == {1.0}
    assert machine.sources["intra"].startswith(f"measured on {len(jax.devices())} x cpu")
    assert 0 <= machine.concurrent_devices < 8 and machine.sources["concurrent_devices"].startswith("measured on")
    assert 0 <= machine.execution_s < 0.1 and machine.sources["execution_s"].startswith("measured on")
    assert 1e-6 < machine.dispatch_s < 0.1 and machine.sources["dispatch_s"].startswith("measured on")
    assert json.loads(path.read_text())["name"] == "measured-cpu"
    told = capsys.readouterr()
    assert "measured against fitted" in told.out and "reduce-scatter" in told.out and "Cluster.load" in told.out


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path, capsys):
    assert main(["calibrate", "--json", str(tmp_path / "nowhere" / "here.json")]) == 1
    told = capsys.readouterr()
    assert "autopar calibrate: There is no directory" in told.err and not told.out


@pytest.mark.parametrize("words", [[], ["calibrat"], ["calibrate", "--slowly"]])
def test_words_that_are_no_command_end_with_what_there_is(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: autopar" in capsys.readouterr().err
