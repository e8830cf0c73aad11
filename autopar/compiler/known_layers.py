"""The layers of a step for any number of microbatches and what they cost, each found when it is first asked for.

StageProblem  ->  KnownLayers     (microbatches, remat) -> Layers, LayerCosts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.compiler.layer_classes import Layers, count_step_layers, find_layers
from autopar.compiler.layer_costs import LayerCosts
from autopar.compiler.stage_ranges import StageProblem
from autopar.errors import NotSplittable, Unsupported

SPLITTING = "zero-bubble"
"""The schedule whose weight gradients are tasks of their own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownLayers:
    """What is known of the layers of a problem, which keeps it for the next search."""

    problem: StageProblem
    num_layers: int
    """That are asked for; those that do next to nothing join another."""
    loop_pieces: int
    options: Mapping[str, str]

    @classmethod
    def of(cls, problem: StageProblem) -> KnownLayers:
        """Those of the model's layers."""
        options = {"batch_statistics": problem.method.batch_statistics, "random": problem.method.random}
        num_layers, loop_pieces = count_step_layers(problem.trace, **options)
        return cls(problem=problem, num_layers=num_layers, loop_pieces=loop_pieces, options=options)

    def __call__(self, num_microbatches: int, remat: bool, *, splits: bool = False) -> tuple[Layers, LayerCosts]:
        """The layers and their costs; with `splits`, weight gradients are tasks of their own.

        Raises `NotSplittable` and `Unsupported` for batches that cannot be split so.
        """
        problem, key = self.problem, (num_microbatches, remat, splits)
        if key not in problem.known:
            layers = find_layers(
                problem.trace,
                num_layers=self.num_layers,
                loop_pieces=self.loop_pieces,
                num_microbatches=num_microbatches,
                schedule=SPLITTING if splits else problem.method.schedule or "1f1b",
                remat=remat,
                pins=problem.method.pins,
                cut=problem.cut,
                **self.options,
            )
            problem.known[key] = layers, _costs_of(problem, layers)
        return problem.known[key]

    def of_first(self, counts: Sequence[int], remat: bool) -> tuple[Layers, LayerCosts] | None:
        """Those of the first number of microbatches into which the batch can be split."""
        for count in counts:
            try:
                return self(count, remat)
            except (NotSplittable, Unsupported):
                continue
        return None


def _costs_of(problem: StageProblem, layers: Layers) -> LayerCosts:
    return LayerCosts(
        classes=layers.classes,
        most_common=Counter(layers.class_of).most_common(1)[0][0],
        method=problem.method,
        cache_directory=problem.cache_directory,
    )
