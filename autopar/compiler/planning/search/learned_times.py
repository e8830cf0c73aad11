"""Expect what stages take as a whole, by their layers and by the stages that were completed before.

    PipelineCandidate, the costs of its stages as a whole  ->  LearnedTimes    seconds of other candidates

The layers of a stage take less together than one by one: a border between them needs no layout of its own. By how much
depends on the devices and grows with them; so stages on a submesh are taken to gain at each border within them what
others there did, of one microbatch and of several apart. So are those whose layers save memory, by themselves: each of
their layers saves as much as it can, they as a whole no more than they have to. A stage that takes more than its layers
does so for want of memory, and tells nothing of others. Layouts of a whole stage may also trade time of the update for
time of every microbatch; the same stage does so alike for other numbers of microbatches and other schedules. A step
takes longer than its stages by themselves, by a share that grows with their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.compiler.inter_op.stage_costs import Stage, StageCost
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.compiler.planning.stages.pipeline_candidate import WHOLE_SHARE, PipelineCandidate
from autopar.compiler.planning.stages.virtual_stages import least_part

_LARGER_SHARE = 0.95
"""Factor on the least share that stages were seen to take: those on more devices rarely take less than the product."""
_OTHERS_SHARE = 0.97
"""Factor on the least share that steps were simulated to take: others rarely take less than the product."""
_GAINED = 0.99
"""Share of the time by their layers that stages take where it depends on their submeshes which are the best."""
_NO_GAIN = 1.03
"""Largest multiple of the time by their layers that counts: what takes longer wants memory, where that is short."""
_SLACK = 0.995
"""Factor on a time that is expected of stages, and on that of steps like others."""
_SIMULATED_SHARE = 0.98
"""Factor on the least share of the time by their stages that plans were simulated to take: others rarely take less."""
_STEADY_SHARE = 0.998
"""The same factor where such plans were simulated to take what their stages take."""
_LINK_SHARE = 0.25
"""Largest share of the time in which stages send by their layers that plans usually save; 0.17 to 0.24 were seen."""
_ROUNDING = 1 - 1e-9
"""Factor on a bound: sums in another order may differ by as much."""


class StageSetting(NamedTuple):
    """Where stages run and how: those that differ in it tell nothing of each other, but by the size of the submesh."""

    submesh: Submesh
    several: bool
    """True if there are several microbatches, whose program is another one."""
    saves: bool = False
    """True if the layouts of their layers save memory."""

    @classmethod
    def of(cls, stage: Stage, num_microbatches: int) -> StageSetting:
        """Return that of a stage."""
        return cls(stage.submesh, num_microbatches > 1, stage.cost.choice.memory_multiplier > 0)


class _Trade(NamedTuple):
    """The shares of their time by their layers that the microbatches and the update of a stage take as a whole."""

    microbatch: float
    update: float

    def of(self, cost: StageCost, num_microbatches: int, most_s: float) -> StageCost:
        """Return what a stage takes by its layers, so traded, with at most so many seconds of work in a step."""
        traded = replace(cost.in_time(self.microbatch), update_s=self.update * cost.update_s)
        own_s = traded.step_s(num_microbatches)
        return traded.in_time(min(1.0, most_s / own_s)) if own_s > 0 else traded


class _Basis(NamedTuple):
    """The cost that tells of a stage, by its layers or as a whole, and the share of it that it is expected to take."""

    cost: StageCost
    share: float


class _Expected(NamedTuple):
    """The costs of a candidate's stages, what tells of them, and the seconds of a step with them."""

    bases: tuple[_Basis, ...]
    trades: tuple[_Trade | None, ...]
    costs: Sequence[StageCost]
    seconds: float


@dataclass(kw_only=True, eq=False)
class LearnedTimes:
    """The times of stages that a search has learned; only its own methods change them."""

    is_roomy: bool = False
    """True if a device has room for all of the step, so that nothing takes longer for want of memory."""
    wholes: dict[object, StageCost] = field(default_factory=dict[object, StageCost])
    """The least costs of stages as a whole that are known."""
    of_stages: dict[object, StageCost] = field(default_factory=dict[object, StageCost])
    """The same by stages, whatever their schedule."""
    trades: dict[object, _Trade] = field(default_factory=dict[object, _Trade])
    """The shares of their microbatches and of their updates apart, whatever the number of microbatches."""
    on: dict[StageSetting, float] = field(default_factory=dict[StageSetting, float])
    """The least share of their time by their layers that stages of many layers take as a whole, by what stages took.

    What they gain, they gain at the borders within them. Want of memory is apart."""
    simulated: dict[int, float] = field(default_factory=dict[int, float])
    """The least share of the time by their stages as a whole that plans were simulated to take, by number of stages."""
    unlike: dict[int, float] = field(default_factory=dict[int, float])
    """The most by which this share differed from 1, by number of stages."""
    splitting: set[bool] = field(default_factory=set[bool])
    """True if a plan that was simulated had weight gradients as tasks of their own; False if one had none; or both."""
    steps: list[float] = field(default_factory=list[float])
    """The shares of their time by their layers that whole steps were simulated to take without want of memory."""
    expected: dict[PipelineCandidate, _Expected] = field(default_factory=dict[PipelineCandidate, _Expected])
    """The seconds that candidates were last simulated to take, with the costs that were taken for them."""

    def learn_stages(self, candidate: PipelineCandidate, costs: Mapping[int, StageCost], gap: float) -> None:
        """Keep what stages of a candidate take as a whole, by their numbers, up to a gap."""
        count = candidate.layers.num_microbatches
        for number, whole in sorted(costs.items()):
            key, stage = candidate.scheduled_otherwise[number], candidate.stages[number]
            least = self.wholes[candidate.stage_keys[number]] = self.of_stages[key] = whole.in_time(1 - gap)
            if by_layers_s := stage.cost.step_s(count):
                self._learn_trade(candidate.whatever_microbatches[number], stage.cost, least)
                if stage.stop - stage.start > 1:  # one layer has no border to gain by
                    self._learn_on(stage, count, least.step_s(count) / by_layers_s)

    def _learn_trade(self, key: object, by_layers: StageCost, whole: StageCost) -> None:
        if by_layers.step_s(1) > by_layers.update_s > 0:
            microbatch = (whole.step_s(1) - whole.update_s) / (by_layers.step_s(1) - by_layers.update_s)
            self.trades[key] = _Trade(microbatch=microbatch, update=whole.update_s / by_layers.update_s)

    def learn_step(self, candidate: PipelineCandidate, seconds: float) -> None:
        """Keep what a whole step of a candidate takes.

        Where no memory is wanting, one that takes longer than its stages tells that there is nothing to gain.
        """
        share = seconds / candidate.step_time_s
        if share <= _NO_GAIN:
            self.steps.append(share)
        elif self.is_roomy and _has_layouts(candidate):
            self.steps.append(1.0)
        if len(candidate.stages) == 1:
            self._learn_on(candidate.stages[0], candidate.layers.num_microbatches, share)

    def learn_simulated(self, candidate: PipelineCandidate, share: float) -> None:
        """Keep what share of the time by its stages a plan of a candidate was simulated to take.

        What single devices send has no layouts to gain by, so that it tells nothing of others.
        """
        self.splitting.add(candidate.timing.schedule.splits_weight_gradients)
        if _has_layouts(candidate):
            number = len(candidate.stages)
            self.unlike[number] = max(abs(1 - share), self.unlike.get(number, 0.0))
            self.simulated[number] = min(share, self.simulated.get(number, share))

    def _learn_on(self, stage: Stage, num_microbatches: int, share: float) -> None:
        if share <= _NO_GAIN or self.is_roomy:
            setting = StageSetting.of(stage, num_microbatches)
            of_many = min(share, _NO_GAIN) if share >= 1 else 1 - (1 - share) / _bordered(stage.stop - stage.start)
            self.on[setting] = min(of_many, self.on.get(setting, of_many))

    def share_on(
        self,
        submesh: Submesh,
        num_layers: float = math.inf,
        *,
        several: bool | None = None,
        saves: bool | None = None,
    ) -> float:
        """Return the least share of their time that stages of so many layers on a submesh are expected to take.

        For `several` microbatches or for one, where layers save memory or do not; what was seen for either tells, if it
        is not said. On one device there are no layouts to gain by, so that stages there tell nothing of others.
        """
        least = self._of_many_on(submesh, several, saves)
        return max(WHOLE_SHARE, least if least >= 1 else 1 - (1 - least) * _bordered(num_layers))

    def _of_many_on(self, submesh: Submesh, several: bool | None, saves: bool | None) -> float:
        seen: dict[Submesh, float] = {}
        for setting, share in self.on.items():
            if several in (None, setting.several) and saves in (None, setting.saves):
                seen[setting.submesh] = min(share, seen.get(setting.submesh, share))
        if submesh in seen:
            return seen[submesh]
        telling = {other: share for other, share in seen.items() if other.num_devices > 1}
        larger = [share for other, share in telling.items() if other.num_devices >= submesh.num_devices]
        return min(larger, default=_LARGER_SHARE * min(telling.values(), default=0.0))

    def gains(self, *, several: bool) -> bool:
        """Return whether some stages took so much less than their layers that the best may be on other submeshes."""
        return any(
            share < _GAINED for setting, share in self.on.items() if setting.several == several and not setting.saves
        )

    def simulated_share(self, candidate: PipelineCandidate) -> float:
        """Return the least share of the time by its stages as a whole that a plan is expected to take in simulation.

        Until one of as many stages was simulated, what they send may take less than by their layers, or differ from it
        twice as much as in plans of more stages. What one took longer, it took for the layouts of what it sends.
        """
        number = len(candidate.stages)
        shares = [1.0, *(share for other, share in self.simulated.items() if other <= number)]
        if number not in self.simulated:
            shares.append(max(1 - _LINK_SHARE * (1 - candidate.share_without_links), 1 - 2 * self._unlike(number)))
        return min(shares)

    def least_simulated_share(self, candidate: PipelineCandidate) -> float:
        """Return the least share of the time by its whole stages that a plan may take in simulation, slack included.

        Plans are taken to differ from what their stages take twice as much as plans of no fewer stages did.
        """
        steady = min(_STEADY_SHARE, 1 - 2 * self._unlike(len(candidate.stages)))
        return max(_SIMULATED_SHARE, steady) * self.simulated_share(candidate)

    def _unlike(self, num_stages: int) -> float:
        """Return the most by which plans of no fewer stages differed from what their stages take."""
        return max((most for many, most in self.unlike.items() if many >= num_stages), default=1.0)

    @property
    def step_share(self) -> float:
        """The least share of their time by their layers that steps of stages are expected to take."""
        return max(WHOLE_SHARE, _OTHERS_SHARE * min(self.steps, default=0.0))

    @property
    def least_share(self) -> float:
        """The least of the shares that steps may take or took."""
        return min([1.0, self.step_share, *self.steps])

    def least_s(self, candidate: PipelineCandidate) -> float:
        """Return the least seconds that a candidate is expected to take."""
        bases, trades, last = self._bases(candidate), self._trades(candidate), self._last(candidate)
        if last.bases != bases or last.trades != trades:
            seconds = self._expected_s(candidate, {})
            self.expected[candidate] = _Expected(bases, trades, _costs(bases), seconds)
        return self._slack(candidate) * self._last(candidate).seconds

    def least_with_s(self, candidate: PipelineCandidate, known: Mapping[int, StageCost]) -> float:
        """Return the least seconds that a candidate is expected to take whose stages take what is `known` of some."""
        return self._slack(candidate) * self._expected_s(candidate, known)

    def _expected_s(self, candidate: PipelineCandidate, known: Mapping[int, StageCost]) -> float:
        """Return the same without slack: whether stages trade time of their updates or not, whichever is less."""
        trades, ways = self._trades(candidate), [_costs(self._bases(candidate))]
        if any(trades):
            ways.append(_traded(candidate, trades, ways[0]))
        return min(candidate.simulate_s([known.get(n, cost) for n, cost in enumerate(costs)]) for costs in ways)

    def bound_s(self, candidate: PipelineCandidate) -> float:
        """Return a lower bound in seconds on `least_s`, from the last simulation of the candidate."""
        bases, trades, last = self._bases(candidate), self._trades(candidate), self._last(candidate)
        if last.bases == bases and last.trades == trades:
            return self._slack(candidate) * last.seconds
        if candidate.hosts.shares or any(trades):
            return 0.0
        part = least_part(_costs(bases), last.costs, candidate.timing)
        return self._slack(candidate) * _ROUNDING * part * last.seconds

    def _last(self, candidate: PipelineCandidate) -> _Expected:
        """Return the last simulation of a candidate: by its layers, if nothing was learned before."""
        if candidate not in self.expected:
            bases = tuple(_Basis(stage.cost, 1.0) for stage in candidate.stages)
            self.expected[candidate] = _Expected(bases, (None,) * len(bases), _costs(bases), candidate.step_time_s)
        return self.expected[candidate]

    def _slack(self, candidate: PipelineCandidate) -> float:
        """Return the least share of the time by its expected stages that a candidate is expected to take.

        Where all stages are known, to complete it tells nothing but this time.
        """
        return max(_SLACK * self._schedule_share(candidate), self.least_simulated_share(candidate))

    def _schedule_share(self, candidate: PipelineCandidate) -> float:
        seen = not self.splitting or candidate.timing.schedule.splits_weight_gradients in self.splitting
        return (1.0 if seen else _SIMULATED_SHARE) * self.simulated_share(candidate)

    def _bases(self, candidate: PipelineCandidate) -> tuple[_Basis, ...]:
        """Return what tells of each stage: it as a whole, it by another schedule, or else its layers."""
        slack = _SLACK * self._schedule_share(candidate) / self._slack(candidate)
        each = zip(candidate.stage_keys, candidate.scheduled_otherwise, candidate.stages, strict=True)
        return tuple(
            _Basis(self.wholes[whole], 1.0)
            if whole in self.wholes
            else _Basis(_split_as(stage.cost, self.of_stages[key]), slack)
            if key in self.of_stages
            else _Basis(stage.cost, slack * self._share_of(stage, candidate.layers.num_microbatches))
            for whole, key, stage in each
        )

    def _share_of(self, stage: Stage, num_microbatches: int) -> float:
        setting = StageSetting.of(stage, num_microbatches)
        return self.share_on(setting.submesh, stage.stop - stage.start, several=setting.several, saves=setting.saves)

    def _trades(self, candidate: PipelineCandidate) -> tuple[_Trade | None, ...]:
        """Return how each stage traded time of its update for other microbatches; None where that tells nothing new."""
        each = zip(candidate.whatever_microbatches, candidate.scheduled_otherwise, strict=True)
        return tuple(None if same in self.of_stages else self.trades.get(alike) for alike, same in each)


def _bordered(num_layers: float) -> float:
    """Return the borders within a stage to each of its layers; of one those of two, as it may gain at its ends."""
    return 1 - 1 / max(2.0, num_layers)


def _costs(bases: Sequence[_Basis]) -> list[StageCost]:
    return [basis.cost.in_time(basis.share) for basis in bases]


def _split_as(by_layers: StageCost, whole: StageCost) -> StageCost:
    """Return the cost of a whole stage by a schedule in which its weight gradients take the share that layers take."""
    share = by_layers.weight_s / by_layers.backward_s if by_layers.backward_s else 0.0
    return replace(whole, weight_s=share * whole.backward_s)


def _traded(
    candidate: PipelineCandidate, trades: Sequence[_Trade | None], costs: Sequence[StageCost]
) -> list[StageCost]:
    """Return what stages are expected to take, the time of their updates traded as it was in other steps."""
    count = candidate.layers.num_microbatches
    return [
        cost if trade is None else trade.of(stage.cost, count, cost.step_s(count))
        for stage, trade, cost in zip(candidate.stages, trades, costs, strict=True)
    ]


def _has_layouts(candidate: PipelineCandidate) -> bool:
    """Return whether some stage of a candidate has several devices."""
    return any(stage.submesh.num_devices > 1 for stage in candidate.stages)
