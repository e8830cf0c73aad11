"""Eight CPU devices, a compile cache that outlives the run, and float64 for tests that compare exactly."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.cheap_compilation import cheap_xla_flags

# Read by jax at import, so set before it; a caller's own choice stands.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time goes into compiling, most of that into making fast what runs for a millisecond.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = cheap_xla_flags(os.environ.get("XLA_FLAGS", ""), xla_force_host_platform_device_count="8")
_CACHE = Path(__file__).parent.parent / ".cache" / "jax" / version("jax")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("AUTOPAR_CACHE_DIR", str(_CACHE.parent.parent / "autopar"))
# A test's Ray is its own, and not one that another test or somebody else has started on this machine.
os.environ.setdefault("RAY_ADDRESS", "local")
os.environ.setdefault("AUTOPAR_PROGRESS", "0")
# Everything is worth keeping: tests compile many small programs.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

# Processes that tests start import the package, too: they compile it once, wherever else that is switched off.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax
import pytest

from autopar.hardware import machine


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-goldens` writes tests/golden anew."""
    parser.addoption("--update-goldens", action="store_true", help="write the texts in tests/golden anew")


FIRST = (
    "tests/training/test_elastic.py",
    "tests/test_examples.py",
    "tests/compiler/intra_op/test_memory_budget.py",
    "tests/runtime/distributed/test_ray.py",
    "tests/training/test_checkpoints.py",
    "tests/benchmarks/test_weak_scaling.py",
    "tests/compiler/pipeline/test_rematerialize.py",
)
"""Files of few and long tests. Begun last, they would keep one process busy when the other has ended."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a file run in one process, as do those of one model of the zoo: what one of them made, others find.

    Long groups come first: those of `FIRST`, then those of many tests.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    if missing := [file for file in FIRST if not (config.rootpath / file).is_file()]:
        raise pytest.UsageError(f"FIRST in tests/conftest.py names {missing}, which are not there. Name what is.")
    groups = {item: _group_of(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    sizes = Counter(groups.values())
    places = {file: place for place, file in enumerate(FIRST)}
    items.sort(key=lambda item: (places.get(groups[item], len(FIRST)), -sizes[groups[item]]))


def _group_of(item: pytest.Item) -> str:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    model = f" {params['name']}" if {"name", "configuration"} <= params.keys() else ""
    return item.nodeid.partition("::")[0] + model


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not among what was imported: traces are many small objects that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


@pytest.fixture
def own_machines() -> Iterator[None]:
    """Forget after the test the machines that it registers."""
    known = machine._library()
    before = dict(known)
    yield
    known.clear()
    known.update(before)


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in 64 bits during the test, on every thread (`jax.enable_x64` would cover only this one)."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
