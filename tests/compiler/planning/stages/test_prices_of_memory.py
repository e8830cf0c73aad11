"""The bytes that stages needed at a price of memory tell which prices are too low, of other microbatches as well."""

import dataclasses
from types import SimpleNamespace

import pytest

from autopar.compiler.inter_op.stage_costs import StageCost
from autopar.compiler.planning.stages.stage_layouts import _least_bytes  # pyright: ignore[reportPrivateUsage]

COST = StageCost(forward_s=0.0, backward_s=0.0, state_bytes=5.0, activation_bytes=2.0, temporary_bytes=1.0)


def stage(num_microbatches, num_in_flight=2.0):
    return SimpleNamespace(
        stage=SimpleNamespace(cost=COST), num_in_flight=num_in_flight, num_microbatches=num_microbatches
    )


def test_stages_of_as_many_microbatches_need_as_large_a_share():
    assert _least_bytes(stage(8), {}) == 0.0
    assert _least_bytes(stage(8), {8: 1.5}) == pytest.approx(1.5 * (5 + 5))


def test_larger_microbatches_need_no_less_and_what_is_gathered_for_each_is_no_larger():
    assert _least_bytes(stage(8), {16: 1.5}) == pytest.approx(1.5 * (5 + 5 / 2))
    assert _least_bytes(stage(8), {4: 1.5}) == pytest.approx(1.5 * (5 + 5))
    assert _least_bytes(stage(8), {16: 1.5, 4: 0.5}) == pytest.approx(0.5 * (5 + 5))


def test_state_that_counts_alone_is_the_same_for_all():
    only = dataclasses.replace(COST, activation_bytes=0.0, temporary_bytes=0.0)
    held = SimpleNamespace(stage=SimpleNamespace(cost=only), num_in_flight=1.0, num_microbatches=8)
    assert _least_bytes(held, {32: 2.0}) == pytest.approx(10.0)
