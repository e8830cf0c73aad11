"""Plan steps that offload parameters or activations: by degrees of parallelism, each plan judged as a whole.

    StageProblem, what is on the hosts  ->  plans of `Megatron` on all degrees, one layer per virtual stage

A search adds up the memory of ranges of layers. That does not work for values that come and leave between the tasks of
a step: how many are on a device at once depends on the order of tasks, so that only a simulation of the plan tells.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar.compiler.frontend.scopes import has_scopes
from autopar.compiler.planning.by_hand.megatron import plan_megatron
from autopar.compiler.planning.stages.layer_classes import count_step_layers
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.errors import InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported
from autopar.ir.plan import Plan
from autopar.ir.schedules import SCHEDULES
from autopar.methods import Megatron

_MOST_MICROBATCHES = 8
_PARTS = (1, 2, 4)
"""Numbers of parts of a layer, each a virtual stage, where the model tells no more of its layers than their number."""
_REFUSED = (InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported)


def plans_by_degrees(problem: StageProblem, offload: str | tuple[str, ...]) -> Iterator[Plan]:
    """Yield the plans with this on the hosts that the method's options leave, one at least.

    They end when the method's seconds of the processor are up. None where the user says more of layouts, meshes or
    orders than degrees can: by pins, kinds, scopes, `mesh_shape`, `layers` or `schedule`, and where devices differ.
    """
    method, until_s = problem.method, time.process_time() + problem.method.time_limit_s
    said = method.mesh_shape, method.layers, method.schedule, method.kinds, method.pins or None
    if any(each is not None for each in said) or problem.hardware.is_mixed or has_scopes(problem.trace.jaxpr):
        return
    num_layers, _ = count_step_layers(problem.trace)
    for asked in _methods(problem, num_layers):
        try:
            plan = plan_megatron(
                problem.trace,
                replace(asked, offload=offload),
                cluster=problem.hardware,
                cache_directory=problem.cache_directory,
            )
        except _REFUSED:
            continue
        yield replace(plan, method="Auto")
        if time.process_time() > until_s:
            return


def _methods(problem: StageProblem, num_layers: int) -> Iterator[Megatron]:
    """Yield the degrees, those of fewer stages and shards first."""
    method, num_devices = problem.method, problem.num_devices
    rows = problem.trace.num_rows if problem.trace.batch_inputs else 1
    counts = [n for n in range(1, _MOST_MICROBATCHES + 1) if rows % n == 0]
    numbers = [method.num_microbatches] if method.num_microbatches is not None else counts
    remats = [method.remat] if isinstance(method.remat, bool) else [False, True]
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    stages = divisors if method.num_stages is None else [method.num_stages]
    in_parts = next(name for name, schedule in SCHEDULES.items() if max(schedule.virtual_stages) > 1)
    for pipeline, tensor in sorted(itertools.product(stages, divisors), key=lambda degrees: degrees[0] * degrees[1]):
        data, rest = divmod(num_devices, pipeline * tensor)
        if rest or not data or num_layers // pipeline < 1:
            continue
        zeros = (0, 1, 3) if data > 1 else (0,)
        for parts, zero, num_microbatches, remat in itertools.product(_PARTS, zeros, numbers, remats):
            virtual = parts * num_layers // pipeline
            schedule: dict[str, Any] = {"schedule": in_parts, "virtual_stages": virtual} if virtual > 1 else {}
            if rows // num_microbatches % data == 0:
                yield Megatron(
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    zero=zero,
                    num_microbatches=num_microbatches,
                    remat=remat,
                    random=method.random,
                    batch_statistics=method.batch_statistics,
                    ignore_user_shardings=method.ignore_user_shardings,
                    time_limit_s=method.time_limit_s,
                    **schedule,
                )
