"""Estimate the costs of ranges of layers for a number of microbatches from those for other numbers.

RangeCosts of 2 microbatches, of 4, ...  ->  OtherRows of 8     seconds that ranges on a submesh rarely undercut
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.compiler.inter_op.stage_costs import RangeTable
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.compiler.planning.stages.stage_costs import RangeCosts


class OtherRows:
    """The likely costs of ranges of layers for a number of microbatches, by the layers of others: nothing is solved."""

    def __init__(self, each: Sequence[RangeCosts], num_microbatches: int) -> None:
        """Take the first of `each` that are solved for on a submesh to tell of it, or else the first of all."""
        self.each = each
        self.layers = replace(each[0].layers, num_microbatches=num_microbatches)
        self.tables: dict[Submesh, RangeTable] = {}

    def table(self, submesh: Submesh, asked: np.ndarray) -> RangeTable:
        """Return the costs of the ranges [start, stop) that are asked for, with the share of the weight gradient."""
        if submesh not in self.tables:
            ranges = self._telling(submesh)
            table = ranges.with_rows(submesh, ranges.layers.num_microbatches / self.layers.num_microbatches)
            backward_s, there = table.values[1], np.isfinite(table.values[1])
            table.values[2] = np.where(there, np.where(there, backward_s, 0.0) * self.weight_shares[..., None], np.inf)
            self.tables[submesh] = table
        table = self.tables[submesh]
        return replace(table, values=np.where(asked[..., None], table.values, np.inf))

    @cached_property
    def weight_shares(self) -> np.ndarray:
        """[start, stop]: the share of a backward pass that the weight gradient takes where layers are solved for.

        No more than half, which is as much as schedules can make use of, and is taken where nothing is known.
        """
        each = [ranges.weight_shares(submesh) for ranges in self.each for submesh in ranges.solved]
        return np.minimum(0.5, np.max(each, axis=0)) if each else np.array(0.5)

    def transfer_s(self, cut: int, source: Submesh, target: Submesh, *, same_domain: bool | None = None) -> float:
        """Return the seconds of activations and cotangents over a cut."""
        first = self.each[0]
        rows = first.layers.num_microbatches / self.layers.num_microbatches
        return rows * first.transfer_s(cut, source, target, same_domain=same_domain)

    def _telling(self, submesh: Submesh) -> RangeCosts:
        return next((ranges for ranges in self.each if submesh in ranges.solved), self.each[0])
