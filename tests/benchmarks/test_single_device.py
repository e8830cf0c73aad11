"""The benchmark for one device measures what it says, on whatever device is here."""

import json

import jax
import pytest

from autopar.hardware.machine import Machine
from benchmarks import single_device
from benchmarks.models.alpa_gpt import GPTSize

TINY = {"layers": 1, "width": 32, "heads": 2, "length": 16, "vocabulary": 64, "batch": 2}


def test_step_and_products_are_measured_and_kept(tmp_path, capsys):
    file = tmp_path / "single.json"
    words = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    single_device.main([*words, "--repetitions", "4", "--dtype", "float32", "--json", str(file)])
    result = json.loads(file.read_text())
    assert TINY.items() <= result["size"].items()
    assert result["step"]["plain_ms"] > 0
    assert result["step"]["interval"][0] <= result["step"]["ratio"] <= result["step"]["interval"][1]
    assert len(result["products"]) >= 8
    for product in result["products"]:
        assert product["measured_us"] > 0
        assert product["error"] == pytest.approx(product["modelled_us"] / product["measured_us"] - 1)
    printed = capsys.readouterr().out
    assert "float32: jax.jit" in printed
    assert all(product["what"] in printed for product in result["products"])


def test_products_are_modelled_by_the_figures_of_the_machine():
    size, machine = GPTSize(**TINY), Machine.of_kind("h200")
    up = next(each for each in single_device.measured_products(size, "bfloat16", machine) if each.what == "up, down")
    tokens, width = TINY["batch"] * TINY["length"], TINY["width"]
    assert (up.rows, up.inner, up.columns) == (tokens, width, 4 * width)
    nbytes = 2 * (tokens * width + 4 * width**2 + 4 * tokens * width)
    assert up.modelled_us == pytest.approx(2e6 * machine.matmul_s(8.0 * tokens * width**2, nbytes, "bfloat16"))


def test_figures_of_a_file_count_where_one_is_given(tmp_path):
    file = tmp_path / "machine.json"
    machine = Machine.of_kind("cpu")
    machine.save(file)
    assert single_device.machine_of("no such device", file) == machine
    assert single_device.machine_of(jax.devices()[0].device_kind, None) == machine
