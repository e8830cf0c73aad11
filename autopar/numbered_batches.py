"""Batches by the number of their step, so that a step can be trained again.

iterable     batch i is its element i; those that may be asked for again are kept
function     batch i is f(i)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from autopar.errors import InvalidArgument
from autopar.runtime.distributed.distributed_array import DistributedArray

Batches = Iterable[Any] | Callable[[int], Any]

_END = object()


class NumberedBatches:
    """The batches from number `first` on; `replays` keeps those that were given until `forget_before`."""

    def __init__(self, source: Batches, first: int, *, replays: bool) -> None:
        self._source = source
        self._replays = replays
        self._kept: deque[Any] = deque()
        self._begin(first)

    def _begin(self, first: int) -> None:
        self._first = first
        self._kept.clear()
        self._iterator: Iterator[Any] = iter(()) if callable(self._source) else iter(self._source)
        for number in range(0 if callable(self._source) else first):
            if next(self._iterator, _END) is _END:
                raise InvalidArgument(
                    f"The checkpoint is of step {first}, but there are only {number} batches. Give the batches from "
                    "the first one on, as in the run that saved it."
                )

    def get(self, number: int) -> Any:
        """The batch of a step. Raises `StopIteration` if there is none."""
        if callable(self._source):
            return self._source(number)
        if number < self._first:
            if iter(self._source) is self._source:
                raise InvalidArgument(
                    f"Step {number} is to be trained again, but the batches before step {self._first} were given out "
                    "by an iterator, and are gone. Give a function of the step's number, or a list."
                )
            self._begin(number)
        while number >= self._first + len(self._kept):
            self._kept.append(self._checked(next(self._iterator)))
        batch = self._kept[number - self._first]
        if not self._replays:
            self.forget_before(number + 1)
        return batch

    def _checked(self, batch: Any) -> Any:
        if self._replays and any(isinstance(leaf, DistributedArray) for leaf in jax.tree.leaves(batch)):
            raise InvalidArgument(
                "A batch lies on the cluster, and would be lost with it. Give batches of the driver, or "
                "on_failure='raise'."
            )
        return batch

    def forget_before(self, number: int) -> None:
        """These will not be asked for again."""
        while self._kept and self._first < number:
            self._kept.popleft()
            self._first += 1
