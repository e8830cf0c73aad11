"""Mutants of a program are caught, whatever is wrong in them; the sound program is not taken for one."""

from random import Random

import pytest

from benchmarks.mutants import KINDS, PLANS, is_equivalent, lowered, verdict


@pytest.fixture(scope="module", params=PLANS)
def planned(request):
    """The smallest model by a plan, and its arguments; `python -m benchmarks.mutants` breaks all eight models."""
    program, model = lowered("mlp", request.param)
    return program, (model.create_state(), model.create_batch())


def test_a_sound_program_is_no_mutant(planned):
    found, text = verdict(*planned)
    assert found == "escaped", text


def test_mutant_is_equivalent_if_rounding_changes_as_much(planned):
    program, arguments = planned
    assert is_equivalent(program, program, arguments)
    assert not is_equivalent(program, next(KINDS["wrong scale"](program, Random(0))), arguments)


def test_all_kinds_of_mutants_are_caught(planned):
    program, arguments = planned
    drawn = {kind: next(mutants(program, Random(kind)), None) for kind, mutants in KINDS.items()}
    found = {kind: verdict(mutant, arguments) for kind, mutant in drawn.items() if mutant is not None}
    assert len(found) >= 14
    assert {caught for caught, _ in found.values()} <= {"numbers", "collectives", "refused"}, found
