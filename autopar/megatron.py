"""Data, tensor and pipeline parallelism by their degrees: the plan that practitioners write by hand, in one value.

devices = pipeline x data x tensor        rank = (stage · data + replica) · tensor + shard

Megatron(data=2, tensor=2, pipeline=2)    stage 0: [[0 1]   stage 1: [[4 5]     rows: replicas of the data,
                                                    [2 3]]            [6 7]]    columns: shards of the weights
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.checks import BATCH_STATISTICS, RANDOM, SCHEDULES, check_choice, check_count
from autopar.errors import InvalidArgument

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Megatron:
    """Divide the devices as Megatron-LM does, by degrees of parallelism that are given (Narayanan et al. 2021).

    The layers of the model are dealt out evenly to `pipeline` stages (what stands before the first layer and after
    the last goes with these). The devices of a stage are `data` x `tensor`: examples are split over `data`, and every
    product with a weight divides that weight over `tensor`, by columns, rows or heads (Shoeybi et al. 2019); which of
    them, and how activations lie in between, is the optimum under these restrictions. `data` is by default what
    `tensor` and `pipeline` leave of the devices.

    `num_microbatches` parts of the batch go through the stages in the order of the `schedule` ("gpipe", "1f1b",
    "eager-1f1b", "interleaved", "zero-bubble"); with "interleaved" each device has `virtual_stages` stages, 2 by
    default. `remat=True` recomputes a stage's forward pass in its backward pass.

    `zero` is the ZeRO stage (Rajbhandari et al. 2020), what is divided over `data` beside the examples:

        0   nothing: every replica holds the state and updates all of it
        1   the optimizer's state, what the model itself does not read (a master copy, moments)
        2   and the sums of gradients, into which those of each microbatch are reduce-scattered
        3   and the parameters, which are gathered for each forward and backward pass

    `random` and `batch_statistics` are those of `DataParallel`. After `time_limit_s` seconds for a stage the best
    layouts so far are taken.

    Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC'21.
    Shoeybi et al.: Megatron-LM, arXiv:1909.08053. Rajbhandari et al.: ZeRO, SC'20.

    Raises `InvalidArgument` for a count below 1, an unknown word, virtual stages without "interleaved", or a ZeRO
    stage without replicas to divide the state among.

    >>> Megatron(tensor=4, pipeline=2, num_microbatches=8).degrees(16)
    (2, 4, 2)
    """

    data: int | None = None
    tensor: int = 1
    pipeline: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    zero: int = 0
    remat: bool = False
    random: str = "full_batch"
    batch_statistics: str = "exact"
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a field that cannot be used."""
        for name in ("tensor", "pipeline", "num_microbatches"):
            check_count(name, getattr(self, name))
        if self.data is not None:
            check_count("data", self.data)
        check_count("virtual_stages", self.stages_per_mesh)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("random", self.random, RANDOM)
        check_choice("batch_statistics", self.batch_statistics, BATCH_STATISTICS)
        if self.zero not in ZERO_STAGES:
            raise InvalidArgument(f"zero is {self.zero!r}; ZeRO has the stages 1, 2 and 3. Give one of them, or 0.")
        if self.schedule != "interleaved" and self.stages_per_mesh != 1:
            raise InvalidArgument(
                f'virtual_stages is {self.stages_per_mesh} with schedule="{self.schedule}", which has one stage per '
                'mesh. Leave virtual_stages out, or use schedule="interleaved".'
            )
        if not self.time_limit_s > 0:
            raise InvalidArgument(f"time_limit_s is {self.time_limit_s}; give a positive number of seconds.")
        if self.data is not None:
            self._check_zero(self.data)

    @property
    def stages_per_mesh(self) -> int:
        """Number of stages on the devices of each: `virtual_stages`, or the schedule's usual number."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 2 if self.schedule == "interleaved" else 1

    def degrees(self, num_devices: int) -> tuple[int, int, int]:
        """How many replicas of the data, shards of the weights and stages there are among so many devices.

        Raises `InvalidArgument` unless their product is the number of devices.
        """
        given = math.prod(degree for degree in (self.data, self.tensor, self.pipeline) if degree is not None)
        data = num_devices // given if self.data is None else self.data
        if data * self.tensor * self.pipeline != num_devices:
            words = f"tensor={self.tensor} x pipeline={self.pipeline}"
            if self.data is None:
                found, required = f"{words} does not divide {num_devices} devices", f"divisors of {num_devices}"
            else:
                found = f"data={self.data} x {words} is {given}, there are {num_devices} devices"
                required = f"degrees whose product is {num_devices}"
            raise InvalidArgument(f"Megatron with {found}. Give {required}, or another number of devices.")
        self._check_zero(data)
        return data, self.tensor, self.pipeline

    def _check_zero(self, data: int) -> None:
        if self.zero and data == 1:
            raise InvalidArgument(
                f"zero={self.zero} divides the state among replicas of the data, and data is 1. Use zero=0, or make "
                "tensor or pipeline smaller, so that there are several replicas."
            )
