"""Mutants of a program are caught, whatever is wrong in them; the sound program is not taken for one."""

from functools import cache
from random import Random

import pytest

from benchmarks.mutants import KINDS, PLANS, SIZES, lowered, verdict

# One of each way to be caught; `python -m benchmarks.mutants` tries all kinds on all models.
QUICK = (
    *("collective missing", "lost digits", "wrong mask", "wrong slot", "update dropped", "microbatch missing"),
    *("stale value", "update before the last microbatch", "transfer of another value", "planned collective doubled"),
)
# Mutants that were drawn where they change a result by 1.6e-5 and 1.6e-7 of it, less than rounding may.
HARMLESS = {("pipeline", "lstm"): {"wrong scale"}, ("pipeline", "vit"): {"wrong mask"}}


@cache
def pipeline():
    program, model = lowered("mlp", "pipeline")
    return program, (model.create_state(), model.create_batch())


def test_a_sound_program_is_no_mutant():
    found, text = verdict(*pipeline())
    assert found == "escaped", text


@pytest.mark.parametrize("kind", QUICK)
def test_a_mutant_is_caught(kind):
    program, arguments = pipeline()
    mutant = next(KINDS[kind](program, Random(kind)))
    found, text = verdict(mutant, arguments)
    assert found in ("numbers", "collectives", "refused"), text


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_all_kinds_of_mutants_are_caught(name, plan):
    program, model = lowered(name, plan)
    arguments = (model.create_state(), model.create_batch())
    drawn = {kind: next(mutants(program, Random(kind)), None) for kind, mutants in KINDS.items()}
    found = {kind: verdict(mutant, arguments) for kind, mutant in drawn.items() if mutant is not None}
    assert len(found) >= 14
    escaped = {kind: told for kind, (caught, told) in found.items() if caught == "escaped"}
    assert escaped.keys() == HARMLESS.get((plan, name), set()), escaped
