"""Stages in whose place others did not fit are expected to need as much more than their layers."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from autopar.compiler.planning.search.learned_memory import LearnedMemory, usual_share
from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stages.stage_problem import StageProblem


@dataclass(frozen=True)
class _Stage:
    """A stage of which nothing counts but whether it is computed again."""

    remat: bool = False

    @property
    def cost(self) -> Any:
        return self

    @property
    def choice(self) -> Any:
        return self


@dataclass(frozen=True)
class _Candidate:
    """Stages that need shares of the memory by their layers."""

    shares: tuple[float, ...]
    remat: bool = False

    @property
    def stages(self) -> list[_Stage]:
        return [_Stage(self.remat) for _ in self.shares]

    def peak_shares(self, problem: object) -> list[float]:
        return [*self.shares]


def candidate(*shares: float, remat: bool = False) -> PipelineCandidate:
    return cast(PipelineCandidate, _Candidate(shares, remat))


def learned_memory() -> LearnedMemory:
    return LearnedMemory(problem=cast(StageProblem, None))


def test_a_stage_that_does_not_fit_tells_of_those_in_its_place_alone():
    learned = learned_memory()
    assert not learned.learn(candidate(0.9, 0.5), [0.95, 0.6])  # what fits tells nothing before some did not
    assert learned.exceeded_share(candidate(0.99, 0.99)) is None
    assert learned.learn(candidate(0.9, 0.7), [0.8, 1.4])
    assert learned.exceeded_share(candidate(0.99, 0.4)) is None
    assert learned.exceeded_share(candidate(0.1, 0.6)) == 0.5
    for other in (candidate(0.9, 0.9, 0.9), candidate(0.9, 0.9, remat=True), candidate(0.9)):
        assert learned.exceeded_share(other) is None


def test_what_fits_after_all_leaves_others_more_room():
    learned = learned_memory()
    learned.learn(candidate(0.7, 0.7), [1.4, 1.0])
    assert learned.learn(candidate(0.6, 0.7), [0.8, 0.9])
    assert learned.exceeded_share(candidate(0.74, 0.9)) is None
    assert learned.exceeded_share(candidate(0.76, 0.9)) == pytest.approx(0.75)


def test_of_several_stages_without_room_the_largest_share_is_enough():
    learned = learned_memory()
    learned.learn(candidate(0.8, 0.6), [1.6, 1.5])
    assert learned.shares == {(2, False, 0): 0.5, (2, False, 1): 0.6 / 1.5}
    assert learned.exceeded_share(candidate(0.7, 0.7)) == 0.5
    assert learned.exceeded_share(candidate(0.3, 0.7)) == 0.6 / 1.5


def test_others_are_as_large_where_they_need_as_much_in_the_place_that_did_not_fit():
    learned, one = learned_memory(), candidate(0.9, 0.7)
    assert learned.is_as_large(candidate(0.5, 0.7), one, number=1)
    assert not learned.is_as_large(candidate(0.95, 0.6), one, number=1)
    assert learned.is_as_large(candidate(0.1, 0.9, 0.1), one, number=1)
    assert not learned.is_as_large(candidate(0.1, 0.8, 0.1), one, number=1)


def test_a_stage_alone_may_need_more_by_its_layers_than_there_is_until_one_does_not_fit():
    learned = learned_memory()
    assert usual_share(1) > usual_share(2) == 1.0
    assert learned.exceeded_share(candidate(1.2)) is None and learned.exceeded_share(candidate(1.2, 0.5)) == 1.0
    assert learned.exceeded_share(candidate(1.01 * usual_share(1))) == usual_share(1)
    assert learned.learn(candidate(1.2), [1.05])
    assert learned.exceeded_share(candidate(1.15)) == pytest.approx(1.2 / 1.05)


def test_what_is_searched_next_needs_as_much_less_as_the_fullest_stage_needs_too_much():
    learned = learned_memory()
    assert learned.next_share(candidate(0.9, 0.5), [1.25, 0.6], 1.0) == 0.8
    assert learned.next_share(candidate(0.9, 0.5), [0.99, 0.6], 0.8) == pytest.approx(0.97 * 0.8)
    # Alone, it may have needed much less by its layers than it was allowed.
    assert learned.next_share(candidate(1.2), [1.25], 1.5) == pytest.approx(1.2 / 1.25)
