"""A plan for a budget in bytes is compiled where its devices are, and made again for less until it keeps the budget."""

import jax
import pytest

import autopar
from autopar.compiler import plan_within_memory
from autopar.errors import MemoryTooSmall
from benchmarks.models.mlp import mlp

MODEL = mlp(layers=6, width=256, hidden=1024, batch=1024)
SHAPE = (8,)


def planned(memory):
    step = autopar.parallelize(MODEL.step, method=autopar.Auto(mesh_shape=SHAPE, memory=memory), donate_argnums=0)
    return step.trace(MODEL.abstract_state, MODEL.abstract_batch).plan().plan


@pytest.fixture
def compiler(monkeypatch):
    """A compiler whose programs need this many times what is modelled; the modelled bytes of all that it compiled."""
    seen = []

    def needing(share):
        def peak(plan, program, devices):
            assert list(devices) == jax.devices()[:8]
            assert program.executables
            seen.append(plan.sharding.peak_bytes)
            return share * plan.sharding.peak_bytes

        monkeypatch.setattr(plan_within_memory, "compiled_peak_bytes", peak)
        return seen

    return needing


@pytest.fixture(scope="module")
def free_bytes():
    return planned("off").sharding.peak_bytes


def test_a_plan_that_keeps_the_budget_is_taken_as_it_is(compiler, free_bytes):
    seen = compiler(1.0)
    assert planned(1.01 * free_bytes).sharding.peak_bytes == free_bytes
    assert seen == [free_bytes]


def test_a_plan_that_needs_more_when_compiled_is_made_again_for_less(compiler, free_bytes):
    seen = compiler(1.1)
    plan = planned(1.01 * free_bytes)
    assert seen[0] == free_bytes
    assert seen[-1] == plan.sharding.peak_bytes <= 1.01 / 1.1 * free_bytes


def test_words_for_memory_leave_a_share_free_and_are_not_compiled(compiler):
    seen = compiler(1e9)
    planned("heavy")
    assert seen == []


def test_a_budget_that_no_plan_keeps_when_compiled_says_what_was_needed(compiler, free_bytes):
    seen = compiler(1e3)
    with pytest.raises(MemoryTooSmall) as error:
        planned(1.01 * free_bytes)
    shortage = error.value.shortage  # the whole message compiles what it suggests
    assert f"needs more when it is compiled, at least {1e3 * min(seen) / 2**20:.1f} MiB" in shortage
    assert f"made for {1.01 * free_bytes / 2**20:.1f} MiB" in shortage
