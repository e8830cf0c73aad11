"""Cost ranges of layers on submeshes, as sums over their layers.

    StageProblem                      ->  KnownLayers    (microbatches, remat) -> Layers, LayerCosts
    StageProblem, Layers, LayerCosts  ->  RangeCosts     (start, stop, submesh) -> StageCost, ...

Both compute an answer when it is first asked for.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.inter_op.stage_costs import RangeTable, StageCost, cost_of_column
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.compiler.pipeline.prepare import loop_pieces_for, prepare
from autopar.compiler.planning.demands.kinds import allowed_splits
from autopar.compiler.planning.stages.layer_classes import (
    Layers,
    count_step_layers,
    find_layers,
    model_cuts,
    recomputed_layers,
    with_exact,
)
from autopar.compiler.planning.stages.layer_costs import (
    ESTIMATE_GAP,
    MEMORY_MULTIPLIERS,
    SAVED_FOR_NOTHING,
    LayerCosts,
    LayoutChoice,
)
from autopar.compiler.planning.stages.layers_between import layers_between
from autopar.compiler.planning.stages.stage_problem import StageProblem, submesh_mesh
from autopar.hardware.machine import Machine
from autopar.methods import offloaded
from autopar.progress import tell

_LITTLE_TIME = 0.01
"""Share of a step: if keeping as little as can be in memory takes no more, nothing in between is asked for."""
_SHARES_AGAIN = 0.25, 0.5, 0.75
"""Shares of its layers that a stage may compute again, beside none and all of them."""
_BYTES = "state_bytes", "activation_bytes", "temporary_bytes", "update_bytes"
"""The fields of a cost that are bytes of a device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownLayers:
    """The layers of a problem for every number of microbatches, with their costs; the problem keeps them."""

    problem: StageProblem
    num_layers: int
    """The number of layers asked for; those that do next to nothing join another."""
    loop_pieces: int
    options: Mapping[str, str]

    @classmethod
    def of(cls, problem: StageProblem) -> KnownLayers:
        """Return those of the model's layers."""
        options = {"batch_statistics": problem.method.batch_statistics, "random": problem.method.random}
        num_layers, loop_pieces = problem.method.layers, 1
        if problem.named_stages:
            num_layers = len(problem.named_stages)
        elif num_layers is None:
            num_layers, loop_pieces = count_step_layers(problem.trace, num_stages=problem.least_layers, **options)
        else:
            loop_pieces = loop_pieces_for(problem.trace, num_layers)
        return cls(problem=problem, num_layers=num_layers, loop_pieces=loop_pieces, options=options)

    @cached_property
    def num_worthwhile(self) -> int:
        """The layers of the whole batch that do not join another."""
        prepared = prepare(
            self.problem.trace,
            num_layers=self.num_layers,
            num_microbatches=1,
            loop_pieces=self.loop_pieces,
            **with_exact(self.options),
        )
        return len(model_cuts(prepared.phases, self.num_layers, self.problem.least_layers)) + 1

    @property
    def solved(self) -> set[int]:
        """The numbers of microbatches for which the layouts of layers are solved on some submesh."""
        return {count for (count, _, _), (_, costs) in self.problem.known.items() if costs.solved}

    def num_solved(self, num_microbatches: int) -> int:
        """Return on how many submeshes layers are solved for, those that are computed again and those that are not."""
        each = (costs for (count, _, _), (_, costs) in self.problem.known.items() if count == num_microbatches)
        return sum(len(costs.solved) for costs in each)

    @property
    def gap(self) -> float:
        """The largest gap of the optima so far."""
        return max((costs.gap for _, costs in self.problem.known.values()), default=0.0)

    def __call__(self, num_microbatches: int, remat: bool, *, splits: bool) -> tuple[Layers, LayerCosts]:
        """Return the layers and their costs; with `splits`, weight gradients are tasks of their own.

        Raises `NotSplittable` and `Unsupported` for batches that cannot be split so.
        """
        problem, key = self.problem, (num_microbatches, remat, splits)
        if key not in problem.known:
            layers = self._by_others(num_microbatches, remat, splits) or find_layers(
                problem.trace,
                num_layers=self.num_layers,
                loop_pieces=self.loop_pieces,
                num_microbatches=num_microbatches,
                split_weight_gradients=splits,
                remat=remat,
                pins=problem.method.pins,
                by_kinds=problem.method.kinds is not None,
                cut=problem.cut or partial(model_cuts, num_stages=problem.least_layers),
                offload="optimizer" in offloaded(problem.method),
                **self.options,
            )
            problem.known[key] = layers, _costs_of(problem, layers)
        return problem.known[key]

    def _by_others(self, num_microbatches: int, remat: bool, splits: bool) -> Layers | None:
        """Return the layers by those of the first two numbers of microbatches that were asked for, if they tell them.

        There the step is prepared already, so that to cut it for them is less work than to prepare it once more.
        """
        trace = self.problem.trace
        first = list(dict.fromkeys(count for count, _, _ in self.problem.known if count > 1))[:2]
        if len(first) < 2 or num_microbatches in (1, *first) or trace.num_rows % num_microbatches:
            return None
        (one, _), (other, _) = (self(count, remat, splits=splits) for count in first)
        again = partial(
            prepare,
            trace,
            num_layers=len(one.cuts) + 1,
            num_microbatches=num_microbatches,
            loop_pieces=one.loop_pieces,
            **with_exact(self.options),
        )
        return layers_between(one, other, num_microbatches, again)


def _costs_of(problem: StageProblem, layers: Layers) -> LayerCosts:
    return LayerCosts(
        classes=layers.classes,
        most_common=Counter(layers.class_of).most_common(1)[0][0],
        method=problem.method,
        cache_directory=problem.cache_directory,
        optima=problem.layer_optima,
        task_works=problem.task_works,
        fits=problem.is_roomy,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sums:
    """The costs of all layers before a cut together, and for each range the most that one layer needs for itself."""

    added: np.ndarray
    """[cut, column]"""
    most: np.ndarray
    """[start, stop]: bytes of a task that are there only while its layer is computed."""


class RangeCosts:
    """The costs of ranges of layers on submeshes: fronts of time against memory, by how their layouts are chosen."""

    def __init__(
        self,
        problem: StageProblem,
        layers: Layers,
        costs: LayerCosts,
        *,
        remat: bool = False,
        whole: RangeCosts | None = None,
        again: RangeCosts | None = None,
    ) -> None:
        """With `remat`, backward tasks compute these layers again, and `again` are those of which a stage may do so.

        `whole` are those of the layers without weight gradients as tasks of their own, which take no longer. Where they
        are solved for, they tell what the others take.
        """
        self.problem, self.layers, self.costs, self.remat, self.again = problem, layers, costs, remat, again
        self.whole = whole if whole is not None and whole.layers.class_of == layers.class_of else None
        self.sums: dict[tuple[Submesh, LayoutChoice], _Sums] = {}
        self.multipliers: dict[tuple[Submesh, LayoutChoice], Sequence[float]] = {}
        self.free_choices: dict[Submesh, list[LayoutChoice]] = {}
        self.known: dict[tuple[int, int, Submesh], Sequence[StageCost]] = {}
        self.columns: dict[tuple[Submesh, LayoutChoice], np.ndarray] = {}
        self.tables: dict[tuple[Submesh, bytes], tuple[np.ndarray, list[LayoutChoice]]] = {}
        self.least_sums: dict[tuple[Machine, int, bool], np.ndarray] = {}
        self.expected_bytes = problem.expected_bytes
        self.most_in_flight = min(layers.num_microbatches, 2 * len(layers.class_of))

    @classmethod
    def of(
        cls,
        problem: StageProblem,
        known: KnownLayers,
        num_microbatches: int,
        with_whole: bool,
        splits: bool,
        remats: Sequence[bool],
    ) -> RangeCosts:
        """Return the costs where stages may do as any of `remats` says, the first before the others.

        Where `with_whole`, those whose weight gradients are tasks of their own, as `splits` says, know the others.
        """
        remat, *others = remats
        return cls(
            problem,
            *known(num_microbatches, remat, splits=splits),
            remat=remat,
            whole=cls.of(problem, known, num_microbatches, with_whole, False, (remat,))
            if splits and with_whole
            else None,
            again=cls.of(problem, known, num_microbatches, with_whole, splits, others) if others else None,
        )

    @property
    def solved(self) -> Set[Submesh]:
        """The submeshes on which the layouts of layers are solved for; on others, only their work counts."""
        return self.costs.solved

    def solve(self, submeshes: Collection[Submesh]) -> None:
        """Have the layouts of layers on these submeshes solved for from now on."""
        self.costs.solved.update(submeshes)
        self._forget(self._told_by(submeshes).union(submeshes))
        if self.again is not None:
            self.again.solve(submeshes)

    def solve_for_memory(self, choices: Collection[tuple[Submesh, LayoutChoice]]) -> None:
        """Have the layouts that save memory solved for from now on, as layers on these submeshes are computed."""
        mine = {submesh for submesh, choice in choices if choice.remat == self.remat}
        self.costs.saving.update(mine)
        known = {submesh for submesh, _ in choices}
        self._forget(known | self._told_by(known))
        if self.again is not None:
            self.again.solve_for_memory(choices)

    def _told_by(self, submeshes: Collection[Submesh]) -> set[Submesh]:
        """Return the smaller submeshes of which these tell: those where layers are not solved for."""
        most = max((submesh.num_devices for submesh in submeshes), default=0)
        return {submesh for submesh, _ in self.sums if submesh.num_devices < most and submesh not in self.solved}

    def _forget(self, submeshes: Collection[Submesh]) -> None:
        """Forget what is known of submeshes of which more is to be known."""
        self.known = {key: known for key, known in self.known.items() if key[2] not in submeshes}
        self.sums = {key: sums for key, sums in self.sums.items() if key[0] not in submeshes}
        self.columns = {key: values for key, values in self.columns.items() if key[0] not in submeshes}
        self.tables = {key: table for key, table in self.tables.items() if key[0] not in submeshes}

    def __call__(self, start: int, stop: int, submesh: Submesh) -> Sequence[StageCost]:
        key = (start, stop, submesh)
        if key not in self.known:
            costs = [cost for free in self._free_choices(submesh) for cost in self._front(start, stop, submesh, free)]
            if self.again is not None and not self.is_enough(costs[0], submesh):
                parts = [costs[0].choice._replace(remat=share) for share in _SHARES_AGAIN]
                costs += [self.cost(start, stop, submesh, choice) for choice in parts]
                costs += self.again(start, stop, submesh)
            self.known[key] = costs
        return self.known[key]

    def table(self, submesh: Submesh, asked: np.ndarray) -> RangeTable:
        """Return the costs of the ranges [start, stop) that are asked for, as a call for each of them would."""
        key = (submesh, asked.tobytes())
        if key not in self.tables:
            slots = self._slots(submesh, asked)
            values = [np.where(there, self._columns(submesh, choice), np.inf) for choice, there in slots]
            self.tables[key] = np.stack(values, axis=-1), [choice for choice, _ in slots]
        values, choices = self.tables[key]
        return RangeTable(values=values, cost=lambda start, stop, slot: self.cost(start, stop, submesh, choices[slot]))

    def _slots(self, submesh: Submesh, asked: np.ndarray) -> list[tuple[LayoutChoice, np.ndarray]]:
        """Return the choices of some range, and for which ranges each is one."""
        slots: list[tuple[LayoutChoice, np.ndarray]] = []
        for free in self._free_choices(submesh):
            slots.append((free, asked))
            short = asked & ~self._are_enough(submesh, free)
            if short.any() and submesh.num_devices > 1 and submesh in self.solved:
                saves = submesh in self.costs.saving
                multipliers = self._worthwhile_multipliers(submesh, free) if saves else [SAVED_FOR_NOTHING]
                slots += [(free._replace(memory_multiplier=each), short) for each in multipliers]
        if self.again is not None:
            free = slots[0][0]
            short = asked & ~self._are_enough(submesh, free)
            if short.any():
                slots += [(free._replace(remat=share), short) for share in _SHARES_AGAIN]
                slots += self.again._slots(submesh, short)
        return slots

    def _are_enough(self, submesh: Submesh, choice: LayoutChoice) -> np.ndarray:
        """Return for all ranges whether a stage of them fits, whatever its schedule has in flight."""
        state, temporary, activation, update = self._columns(submesh, choice)[4:]
        peak_bytes = state + np.maximum(temporary + self.most_in_flight * activation, update)
        return peak_bytes <= self.expected_bytes[submesh.group]

    def _columns(self, submesh: Submesh, choice: LayoutChoice) -> np.ndarray:
        """Return the columns of a table for all ranges with one choice: [column, start, stop]."""
        if choice.remat != self.remat:
            assert self.again is not None
            return self._columns_of_parts(submesh, choice) if choice.remat < 1 else self.again._columns(submesh, choice)
        key = (submesh, choice)
        if key not in self.columns:
            sums = self._sums(submesh, choice)
            added = np.moveaxis(sums.added[None, :] - sums.added[:-1, None], -1, 0)
            forward_s, backward_s, weight_s, update_s, state, activation, update = added
            self.columns[key] = np.stack(
                [forward_s, backward_s, weight_s, update_s, state, sums.most, activation, update]
            )
        return self.columns[key]

    def _columns_of_parts(self, submesh: Submesh, choice: LayoutChoice) -> np.ndarray:
        """Return the columns of a table for all ranges of which a share of the layers is computed again, the first."""
        assert self.again is not None
        num_layers = len(self.layers.class_of)
        start, stop = np.arange(num_layers)[:, None], np.arange(num_layers + 1)[None, :]
        again = np.array([recomputed_layers(length, choice.remat) for length in range(num_layers + 1)])
        middle = start + again[np.maximum(stop - start, 0)]
        parts = self.again._sums(submesh, choice._replace(remat=1.0)), self._sums(submesh, choice._replace(remat=0.0))
        first, rest = (np.moveaxis(part.added, -1, 0) for part in parts)
        added = first[:, middle] - first[:, start] + rest[:, stop] - rest[:, middle]
        forward_s, backward_s, weight_s, update_s, state, activation, update = added
        beyond = np.concatenate([parts[1].most, np.zeros((1, num_layers + 1))])
        temporary = np.maximum(parts[0].most[start, middle], beyond[middle, stop])
        return np.stack([forward_s, backward_s, weight_s, update_s, state, temporary, activation, update])

    def _free_choices(self, submesh: Submesh) -> list[LayoutChoice]:
        """Return the choices in which memory costs nothing; one as long as only the work of layers counts."""
        every = self._every_free_choice(submesh)
        return every if submesh in self.solved else every[:1]

    def _every_free_choice(self, submesh: Submesh) -> list[LayoutChoice]:
        """Return the choices in which memory costs nothing."""
        if submesh not in self.free_choices:
            every = allowed_splits(self.problem.method.kinds, submesh_mesh(self.problem, submesh))
            self.free_choices[submesh] = [LayoutChoice(0.0, splits, self.remat) for splits in every]
        return self.free_choices[submesh]

    def _front(self, start: int, stop: int, submesh: Submesh, free: LayoutChoice) -> Iterator[StageCost]:
        fastest = self.cost(start, stop, submesh, free)
        yield fastest
        # Memory costs nothing where there is enough of it in any case, nor where nothing can be divided.
        if not (self.is_enough(fastest, submesh) or submesh.num_devices == 1 or submesh not in self.solved):
            for multiplier in self._worthwhile_multipliers(submesh, free):
                yield self.cost(start, stop, submesh, free._replace(memory_multiplier=multiplier))

    def is_enough(self, cost: StageCost, submesh: Submesh) -> bool:
        """Return whether a stage of this cost fits, whatever its schedule has in flight."""
        return cost.peak_bytes(self.most_in_flight) <= self.expected_bytes[submesh.group]

    def _worthwhile_multipliers(self, submesh: Submesh, choice: LayoutChoice) -> Sequence[float]:
        """Return the largest multiplier, and those in between only if saving memory takes much time."""
        key = (submesh, choice)
        if key not in self.multipliers:
            free, least = (
                self._sums(submesh, choice._replace(memory_multiplier=each)).added[-1]
                for each in (MEMORY_MULTIPLIERS[0], MEMORY_MULTIPLIERS[-1])
            )
            times = np.array([self.layers.num_microbatches, self.layers.num_microbatches, 0.0, 1.0])
            much = least[:4] @ times > (1 + _LITTLE_TIME) * (free[:4] @ times)
            self.multipliers[key] = MEMORY_MULTIPLIERS[1:] if much else MEMORY_MULTIPLIERS[-1:]
        return self.multipliers[key]

    def cost(self, start: int, stop: int, submesh: Submesh, choice: LayoutChoice) -> StageCost:
        """Return the cost of a range whose layouts are chosen so."""
        if choice.remat != self.remat:
            assert self.again is not None
            middle = start + recomputed_layers(stop - start, choice.remat)
            again = self.again.cost(start, middle, submesh, choice._replace(remat=1.0))
            rest = self.cost(middle, stop, submesh, choice._replace(remat=0.0)) if middle < stop else None
            return replace(_joined(again, rest) if rest else again, choice=choice)
        sums = self._sums(submesh, choice)
        added = (sums.added[stop] - sums.added[start]).tolist()
        forward_s, backward_s, weight_s, update_s, state, activation, update = added
        return StageCost(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=weight_s,
            update_s=update_s,
            state_bytes=state,
            activation_bytes=activation,
            temporary_bytes=float(sums.most[start, stop]),
            update_bytes=update,
            choice=choice,
        )

    def with_rows(self, submesh: Submesh, factor: float) -> RangeTable:
        """Return what ranges likely need with `factor` times as many rows in a microbatch, by their costs and work.

        Seconds of given layouts are taken to grow evenly with the rows, and so those of the best layouts ever more
        slowly: fewer rows save what does not begin anew for each microbatch at most, and more rows take their work at
        least. Products that memory bounds grow less: what this says of more rows is likely, and no bound.
        """
        num_layers = len(self.layers.class_of)
        every = np.arange(num_layers)[:, None] < np.arange(num_layers + 1)[None, :]
        given = self.table(submesh, every)
        sums = self._least_sums(submesh, begins=True), self._least_sums(submesh, begins=False)
        begins, work = (np.moveaxis(each[None, :] - each[:-1, None], -1, 0)[..., None] for each in sums)
        values = given.values.copy()
        whole = values[:3]
        there = np.isfinite(whole)
        by_rows = np.maximum(whole - begins, 0.0) if factor < 1 else np.minimum(work - begins, whole)
        values[:3] = np.where(there, whole + (factor - 1) * np.where(there, by_rows, 0.0), np.inf)
        if self.layers.num_microbatches == 1 and factor < 1:
            adding = self._adding_sums(submesh)
            values[1:3] += (adding[None, :] - adding[:-1, None])[..., None]
        values[5:7] *= factor

        def cost(start: int, stop: int, slot: int) -> StageCost:
            return cost_of_column(values[:, start, stop, slot], given.cost(start, stop, slot).choice)

        return RangeTable(values=values, cost=cost)

    def _least_sums(self, submesh: Submesh, *, begins: bool) -> np.ndarray:
        """Return the least seconds forward, backward and of the weight gradient of all layers before a cut, together.

        Or of these what `begins` anew for each microbatch.
        """
        machine, num_devices = self.problem.machine_of(submesh), submesh.num_devices
        key = (machine, num_devices, begins)
        if key not in self.least_sums:
            numbers = range(len(self.layers.classes))
            each = [self.costs.least(n, machine, num_devices, begins=begins) for n in numbers]
            rows = np.array([(each[n].forward_s, each[n].backward_s, each[n].weight_s) for n in self.layers.class_of])
            self.least_sums[key] = np.concatenate([np.zeros((1, 3)), np.cumsum(rows, axis=0)])
        return self.least_sums[key]

    def _adding_sums(self, submesh: Submesh) -> np.ndarray:
        """Return the seconds in which all layers before a cut add to totals, which those of one microbatch do not."""
        machine, numbers = self.problem.machine_of(submesh), range(len(self.layers.classes))
        each = [self.costs.adding(number, machine, submesh.num_devices) for number in numbers]
        return np.concatenate([[0.0], np.cumsum([each[number] for number in self.layers.class_of])])

    def _sums(self, submesh: Submesh, choice: LayoutChoice) -> _Sums:
        key = (submesh, choice)
        if key not in self.sums:
            each = self._of_classes(submesh, choice)
            self.sums[key] = _sums([each[number] for number in self.layers.class_of])
        return self.sums[key]

    def _of_classes(self, submesh: Submesh, choice: LayoutChoice) -> list[StageCost]:
        numbers = range(len(self.layers.classes))
        if submesh not in self.solved:
            if self.whole is not None and submesh in self.whole.solved:
                return self.whole._of_classes(submesh, choice)
            if submesh.num_devices == 1:
                return self._on_one_device(submesh)
            if (undivided := self._undivided(submesh)) is not None:
                return undivided
            others, more = self._like_on(submesh), self._on_more(submesh)
            saving = self._saving_on_more(submesh)
            return [_no_less_bytes(self._least(number, submesh, others, more), saving(number)) for number in numbers]
        tell(f"{self.layers.num_microbatches} microbatches: layers on {submesh}")
        mesh_costs = self._mesh_costs(submesh)
        if choice.memory_multiplier == SAVED_FOR_NOTHING:
            return [self.costs.saved_for_nothing(number, mesh_costs, choice) for number in numbers]
        return [self.costs.cost(number, mesh_costs, choice) for number in numbers]

    def _mesh_costs(self, submesh: Submesh) -> MeshCosts:
        return MeshCosts(machine=self.problem.machine_of(submesh), mesh=submesh_mesh(self.problem, submesh))

    def is_told(self, submesh: Submesh) -> bool:
        """Return whether layers of another number of microbatches tell what these need at least on a submesh."""
        return self._like_on(submesh) is not None

    def _like_on(self, submesh: Submesh) -> tuple[int, LayerCosts] | None:
        """Return the number of microbatches next to this one whose equal layers are solved for there, and their costs.

        One microbatch is another program than several; those with fewer rows than devices tell nothing of larger ones.
        """
        mine, trace = self.layers, self.problem.trace
        count, every = mine.num_microbatches, self._every_free_choice(submesh)
        mesh_costs = self._mesh_costs(submesh)
        found = [
            (abs(math.log2(like / count)), like, costs)
            for (like, remat, _), (layers, costs) in self.problem.known.items()
            if remat == self.remat
            and count > 1 < like != count
            and (like < count or trace.num_rows >= like * submesh.num_devices)
            and (layers.cuts, layers.class_of) == (mine.cuts, mine.class_of)
            and all(_is_known(layers, costs, mesh_costs, choice) for choice in every)
        ]
        _, like, costs = min(found, key=lambda each: each[:2], default=(0.0, 0, None))
        return None if costs is None else (like, costs)

    def has_one_choice(self, submesh: Submesh) -> bool:
        """Return whether layers are known to need no less on a submesh than on one device, where nothing is solved for.

        One device leaves nothing to choose; what tasks need there besides is asked for.
        """
        if not self.problem.is_roomy:
            return False
        return submesh.num_devices == 1 or self._undivided(submesh) is not None

    def _undivided(self, submesh: Submesh) -> list[StageCost] | None:
        """Return what all layers need on one device, if they are known to need no less on a submesh; else None."""
        ranges, count, alone = self.whole or self, self.layers.num_microbatches, self._on_one_device(submesh)
        more = ranges._on_more(submesh)
        if not more or not self.problem.is_roomy:
            return None
        least_s = np.array([ranges._least(n, submesh, None, more).step_s(count) for n in range(len(alone))])
        alone_s = np.array([cost.step_s(count) for cost in alone])
        return alone if np.all(np.abs(alone_s - least_s) <= ESTIMATE_GAP * alone_s) else None

    def _on_one_device(self, submesh: Submesh) -> list[StageCost]:
        """Return what all layers need on one device of a submesh, but for what their tasks make."""
        machine, numbers = self.problem.machine_of(submesh), range(len(self.layers.classes))
        if self.whole is None:
            return [self.costs.on_one_device(number, machine) for number in numbers]
        each = [self.whole.costs.on_one_device(number, machine) for number in numbers]
        weights_s = [self.costs.least(number, machine, 1).weight_s for number in numbers]
        return [replace(cost, weight_s=min(cost.backward_s, s)) for cost, s in zip(each, weights_s, strict=True)]

    def _on_more(self, submesh: Submesh) -> list[tuple[LayerCosts, MeshCosts]]:
        """Return the costs of the same layers on meshes of more devices of which a part is like that of a submesh.

        Layouts for fewer devices are among those for more, where these leave the other axes alone.
        """
        mine = self._mesh_costs(submesh)
        return [
            (ranges.costs, costs)
            for ranges in (self, self.whole)
            if ranges is not None
            for more in sorted(ranges.solved, key=lambda each: each.num_devices)
            if more.group == submesh.group and more.num_devices > submesh.num_devices
            for costs in [self._mesh_costs(more)]
            if mine.is_part_of(costs)
        ]

    def _saving_on_more(self, submesh: Submesh) -> Callable[[int], list[StageCost]]:
        """Return the costs of a layer on more devices with layouts that save memory, where these are solved for.

        There, each axis is no shorter and all devices have a part of a microbatch, so that what can be split on fewer
        devices is likely to be split as much. That is no bound, and tells a thorough search nothing: of two prices of
        memory, neither has least of each.
        """
        problem, shape = self.problem, sorted(submesh_mesh(self.problem, submesh).shape)
        rows = problem.trace.num_rows // self.layers.num_microbatches
        on_more = [
            self._mesh_costs(more)
            for more in self.costs.saving
            if problem.method.effort != "thorough"
            and more.group == submesh.group
            and more.num_devices > submesh.num_devices
            and rows % more.num_devices == 0
            and all(map(operator.le, shape, sorted(submesh_mesh(problem, more).shape)))
        ]
        prices = MEMORY_MULTIPLIERS[0], MEMORY_MULTIPLIERS[-1]
        choices = [
            free._replace(memory_multiplier=each) for free in self._every_free_choice(submesh) for each in prices
        ]
        return lambda number: [self.costs.cost(number, costs, choice) for costs in on_more for choice in choices]

    def _least(
        self,
        number: int,
        submesh: Submesh,
        others: tuple[int, LayerCosts] | None,
        on_more: Sequence[tuple[LayerCosts, MeshCosts]],
    ) -> StageCost:
        """Return what a layer needs at least on a submesh where it is not solved for, by its work.

        By the time that it takes on more devices, which is no more, and no more than on one of them, as it need not be
        divided; by its share of the weight gradient there. And by the time of `others`: more rows take no less, and
        fewer save no more than their share of what does not begin anew for each microbatch. Where these alone tell,
        half of a backward pass is taken to be the weight gradient: schedules can make use of no more.
        """
        machine, num_devices = self.problem.machine_of(submesh), submesh.num_devices
        least, every = self.costs.least(number, machine, num_devices), self._every_free_choice(submesh)
        seconds, weight_share, update_s = [_seconds(least)], 0.5, least.update_s
        for costs, mesh_costs in on_more:
            each = [costs.cost(number, mesh_costs, choice) for choice in every]
            seconds.append((1 - costs.gap) * np.min([_seconds(cost) for cost in each], axis=0))
            update_s = max(update_s, (1 - costs.gap) * min(cost.update_s for cost in each))
            weight_share = max(cost.weight_s / cost.backward_s if cost.backward_s else 0.5 for cost in each)
        if others is not None:
            like, costs = others
            mesh_costs, factor = self._mesh_costs(submesh), min(1.0, like / self.layers.num_microbatches)
            begins = _seconds(costs.least(number, machine, num_devices, begins=True))
            whole = np.min([_seconds(costs.cost(number, mesh_costs, choice)) for choice in every], axis=0)
            seconds.append(whole - (1 - factor) * np.maximum(whole - begins, 0.0))
        if len(seconds) == 1:
            return least
        alone = _seconds(self.costs.on_one_device(number, machine))
        forward_s, backward_s = np.maximum(seconds[0], np.minimum(np.max(seconds, axis=0), alone)).tolist()
        weight_s = max(least.weight_s, weight_share * backward_s)
        return replace(least, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s, update_s=update_s)

    def transfer_s(self, cut: int, source: Submesh, target: Submesh, *, same_domain: bool | None = None) -> float:
        """Return the seconds of activations and cotangents over a cut, which the devices of both sides share.

        As long as nobody knows whether both lie in one fast domain, every cut is priced as one between domains if the
        group is more than one: some cut is, and the slowest one sets the pace.
        """
        nbytes = self.layers.crossing_bytes[cut - 1] / 2 / min(source.num_devices, target.num_devices)
        if source.group != target.group:
            return 2 * self.problem.hardware.link_between(source.group, target.group).transfer_s(nbytes)
        group = self.problem.hardware.groups[source.group]
        near = group.num_devices <= group.machine.domain if same_domain is None else same_domain
        return 2 * group.machine.transfer_s(nbytes, near)


def _no_less_bytes(least: StageCost, others: Sequence[StageCost]) -> StageCost:
    """Return the cost with at least as many bytes of each kind as the fewest among others."""
    fewest = {name: min((getattr(each, name) for each in others), default=0.0) for name in _BYTES}
    return replace(least, **{name: max(getattr(least, name), nbytes) for name, nbytes in fewest.items()})


def _joined(one: StageCost, other: StageCost) -> StageCost:
    """Return the cost of the layers of both."""
    names = ("forward_s", "backward_s", "weight_s", "update_s", *_BYTES)
    both = StageCost(**{name: getattr(one, name) + getattr(other, name) for name in names})
    return replace(both, temporary_bytes=max(one.temporary_bytes, other.temporary_bytes))


def _seconds(cost: StageCost) -> np.ndarray:
    return np.array([cost.forward_s, cost.backward_s])


def _sums(layers: Sequence[StageCost]) -> _Sums:
    rows = np.array(
        [
            (
                c.forward_s,
                c.backward_s,
                c.weight_s,
                c.update_s,
                c.state_bytes,
                c.activation_bytes,
                c.update_bytes,
            )
            for c in layers
        ]
    )
    most = np.zeros((len(layers), len(layers) + 1))
    temporary = np.array([c.temporary_bytes for c in layers])
    for start in range(len(layers)):
        most[start, start + 1 :] = np.maximum.accumulate(temporary[start:])
    return _Sums(added=np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)]), most=most)


def _is_known(layers: Layers, costs: LayerCosts, mesh_costs: MeshCosts, choice: LayoutChoice) -> bool:
    """Return whether the costs of all layers on a mesh are known, with layouts that are chosen so."""
    return all(costs.is_known(number, mesh_costs, choice) for number in range(len(layers.classes)))
