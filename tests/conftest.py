"""Eight CPU devices, a compile cache that outlives the run, and float64 for tests that compare exactly."""

import gc
import math
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
from autopar.reports import fixes

# Errors that nothing fits plan no changes that would: that takes longer than most tests. `patient` brings it back.
fixes.QUICK_S = 0.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-goldens` writes tests/golden anew, `--wide` runs what `WIDE` names, too."""
    parser.addoption("--update-goldens", action="store_true", help="write the texts in tests/golden anew")
    parser.addoption("--wide", action="store_true", help="run the long tests as well that others are much like")


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


WIDE = (
    "tests/benchmarks/test_answers.py::test_all_answers_about_a_plan_hold[mlp-two kinds",
    "tests/benchmarks/test_answers.py::test_all_answers_about_a_plan_hold[several_arguments",
    "tests/benchmarks/test_answers.py::test_all_answers_about_a_plan_hold[tied_embedding",
    "tests/benchmarks/test_compiled_offload.py::test_every_copy_is_a_transfer_of_the_gpu_compiler",
    "tests/benchmarks/test_freedom.py::test_more_of_something_makes_no_plan_slower[convnet",
    "tests/benchmarks/test_freedom.py::test_more_of_something_makes_no_plan_slower[vit",
    "tests/benchmarks/test_printed_layouts.py::test_arrays_lie_as_their_plan_prints[tied_embedding",
    "tests/benchmarks/test_random_steps.py::test_random_steps_are_right_or_refused[data",
    "tests/benchmarks/test_random_steps.py::test_random_steps_are_right_or_refused[zero",
    "tests/benchmarks/test_random_steps.py::test_random_steps_are_right_or_refused[microbatches",
    "tests/benchmarks/test_search_quality.py::test_a_model_of_a_family_is_held_as_well",
    "tests/compiler/intra_op/test_memory_budget.py::test_tightening_the_budget_of_a_gpt",
    "tests/compiler/memory/test_estimate.py::test_modelled_memory_is_near_the_compiled_one[gpt_scan_remat",
    "tests/compiler/pipeline/test_recomputed_values.py::test_a_step_of_which_values_are_made_again_is_the_step[zero-bubble",
    "tests/compiler/pipeline/test_rematerialize.py::test_models_of_the_zoo_that_recompute_every_layer_equal_the_plain_step[enc",
    *(
        "tests/compiler/planning/search/test_search_is_exact.py::"
        f"test_no_enumerated_plan_is_faster_and_none_is_below_the_bound[{n}]"
        for n in (0, 2, 4, 6, 64, 106, 185, 233, 282)
    ),
    "tests/compiler/planning/stages/test_stage_memory.py::test_backward_tasks_of_recomputed_layers_compile_to_the_memory_modelled[a100",
    *(
        "tests/reports/test_what_if.py::test_where_nothing_fits_changes_that_do_are_told_with_the_time_and_memory_of_"
        f"their_plans[{name}"
        for name in ("alone", "a search")
    ),
    "tests/runtime/distributed/test_ray.py::test_step_on_a_cluster_equals_the_plain_step[gpt_linen",
    "tests/runtime/distributed/test_ray.py::test_step_on_a_cluster_equals_the_plain_step[tied_embedding",
    *(
        f"tests/test_end_to_end.py::test_parallelized_step_equals_the_plain_step[{model}: 1 stage"
        for model in ("dropout", "encoder_decoder", "gpt_bfloat16", "gpt_equinox", "gpt_nnx", "masked_lm", "vit")
    ),
    "tests/test_properties.py::test_the_program_of_a_random_step_runs_to_the_same_result[102",
    "tests/test_properties.py::test_the_program_of_a_random_step_runs_to_the_same_result[103",
    *(f"tests/test_properties.py::test_the_stages_of_a_random_program_evaluate_to_it[{n}]" for n in range(4, 8)),
    "tests/training/test_elastic.py::test_training_in_lanes_goes_on_when_the_host_of_one_is_lost[other",
)
"""How long tests begin that are much like others, a sixth of all seconds: `make test-wide` runs them, too."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a file run in one process, as do those of one model of the zoo: what one of them made, others find.

    Long groups come first: those of `FIRST`, then those of many tests. Those of `WIDE` are left out unless asked for,
    also by naming a single one.
    """
    if not config.getoption("wide") and not any("::" in each for each in config.args):
        left_out = [item for item in items if item.nodeid.startswith(WIDE)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.nodeid.startswith(WIDE)]
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


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that plan what would fit, however busy the machine is."""
    monkeypatch.setattr(fixes, "QUICK_S", math.inf)
    monkeypatch.setattr(fixes, "MOST_S", math.inf)
