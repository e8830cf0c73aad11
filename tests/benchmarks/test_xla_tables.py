"""XLA's own tables are read as they are written, and priced as plans are."""

import json
from pathlib import Path

import pytest

from autopar.hardware.machine import Machine
from benchmarks import xla_tables

_COLLECTIVES = """entries {
  key: "sm_90"
  value {
    entries {
      instruction {
        name: "_"
        opcode: "reduce-scatter"
        shape {
          element_type: F32
          dimensions: 1048576
          layout { minor_to_major: 0 }
        }
        metadata {}
        dimensions: 0
        iota_collective_device_list {
          num_replica_groups: 2
          num_devices_per_group: 4
        }
      }
      network_throughput_bytes_per_sec: 16000000000
    }
    entries {
      instruction {
        opcode: "all-reduce"
        shape {
          element_type: F32
          dimensions: 256
          layout { minor_to_major: 0 }
        }
        iota_collective_device_list {
          num_replica_groups: 1
          num_devices_per_group: 8
        }
      }
      network_throughput_bytes_per_sec: 1000000
    }
    entries {
      instruction {
        opcode: "collective-permute"
        shape {
          element_type: F32
          dimensions: 1048576
          layout { minor_to_major: 0 }
        }
        source_target_pairs { target: 1 }
        source_target_pairs { source: 1 }
        source_target_pairs { source: 2 target: 3 }
      }
      network_throughput_bytes_per_sec: 4000000000
    }
  }
}
entries {
  key: "sm_1"
  value {
    entries {
      instruction {
        opcode: "all-gather"
        shape {
          element_type: F32
          dimensions: 1048576
          layout { minor_to_major: 0 }
        }
        iota_collective_device_list {
          num_replica_groups: 1
          num_devices_per_group: 8
        }
      }
      network_throughput_bytes_per_sec: 1000000
    }
  }
}
"""
_PRODUCTS = """entries {
  key: "sm_90"
  value {
    entries {
      b: 2
      m: 1024
      n: 512
      k: 256
      flops { key: "bf16xbf16->bf16" value: 100000000000000 }
      flops { key: "f8e4m3fnxf8e4m3fn->bf16" value: 9000000000000000 }
    }
  }
}
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A library with both tables between other bytes."""
    path = tmp_path / "plugin.so"
    path.write_bytes(b"\x7fELF\0\xff\0" + _COLLECTIVES.encode() + b"\0\0" + _PRODUCTS.encode() + b"\0sm_90\0")
    return path


def test_entries_are_read_and_priced_by_the_machine_files(plugin: Path):
    rows, skipped = xla_tables.timed(xla_tables.tables_of(plugin))
    scatter, permute, product = rows
    h100 = Machine.named("dgx-h100")
    assert (scatter.what, scatter.detail, scatter.work) == ("reduce-scatter", "4", 16 * 2**20)
    assert scatter.measured_s == pytest.approx(16 * 2**20 / 16e9)
    assert scatter.modelled_s == pytest.approx(h100.collective_s("reduce-scatter", 16 * 2**20, 4))
    assert (permute.what, permute.detail, permute.work) == ("collective-permute", "4", 4 * 2**20)
    assert permute.modelled_s == pytest.approx(h100.collective_s("collective-permute", 4 * 2**20, 4))
    flops, nbytes = 2 * 2 * 1024 * 512 * 256, 2 * 2 * ((1024 + 512) * 256 + 1024 * 512)
    assert (product.detail, product.work, product.measured_s) == ("bf16", flops, flops / 1e14)
    assert product.modelled_s == h100.matmul_s(flops, nbytes, "bfloat16")
    assert sorted(skipped) == [
        "collectives of fewer than 64 KB",
        "no machine file says which machine sm_1 is in",
        "products of f8e4m3fn faster than the peak of an h100",
    ]


def test_figures_are_printed_and_written(plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "figures.json"
    xla_tables.main(["--plugin", str(plugin), "--json", str(out)])
    found = json.loads(out.read_text())
    by_kind = {(each["what"], each["detail"]): each for each in found["figures"]}
    assert by_kind["reduce-scatter", "all"]["rows"] == by_kind["reduce-scatter", "4"]["large"]["rows"] == 1
    ratio = by_kind["product", "bf16"]["bias"] + 1
    flops, nbytes = 2 * 2 * 1024 * 512 * 256, 2 * 2 * ((1024 + 512) * 256 + 1024 * 512)
    modelled_s = Machine.named("dgx-h100").matmul_s(flops, nbytes, "bfloat16")
    assert ratio == pytest.approx(modelled_s / (flops / 1e14), abs=1e-4)
    printed = capsys.readouterr().out
    assert "dgx-h100" in printed and "1 entries left out: collectives of fewer than 64 KB" in printed


def test_a_library_without_tables_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for path, said in ((tmp_path / "none.so", "There is no file"), (tmp_path / "other.so", "has no table of devices")):
        (tmp_path / "other.so").write_bytes(b"\x7fELF\0\0")
        with pytest.raises(SystemExit):
            xla_tables.main(["--plugin", str(path)])
        assert said in " ".join(capsys.readouterr().err.split())


def test_what_to_install_is_said_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(xla_tables.InvalidArgument, match=r"Install autopar\[gpu-aot\]"):
        xla_tables.installed_plugin()


def test_trees_of_one_switch_sum_many_small_arrays_in_fewer_steps():
    """GB200s, whose switches sum: 1 MB over 64 of them took 66 us in XLA's table, and a gather 100 us."""
    nvl72 = Machine.named("gb200-nvl72")
    assert nvl72.collective_s("all-reduce", 2**20, 64) < nvl72.collective_s("all-gather", 2**20, 64)
    assert nvl72.collective_s("all-reduce", 2**32, 64) > nvl72.collective_s("all-gather", 2**32, 64)
