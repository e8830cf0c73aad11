"""Layouts of runs that a planner or a grid search chose and did not record: the fastest predicted one that fits.

All layouts dp·tp·pp of the devices are candidates, tensor parallelism inside a host, microbatches that fit the batch,
the whole step recomputed by layers as Alpa's benchmarks do; the machine's file alone predicts them, uncalibrated.
"""

from collections.abc import Iterator

from autopar.hardware.machine import Machine
from benchmarks.training_model.layout import Habits, Layout
from benchmarks.training_model.memory import peak_memory
from benchmarks.training_model.models import Transformer
from benchmarks.training_model.prices import Scalars, rates_of
from benchmarks.training_model.step import step_time

ALPA_BATCH = 1024
ALPA_SEQUENCE = 1024
"""Of Alpa's GPT benchmarks (benchmark/alpa/suite_auto_gpt.py)."""


def restriction_of(framework: str) -> str | None:
    """Parallelism allowed to the planner: "any", "intra" operator parallelism only, "inter" only; None if unknown."""
    match framework.lower().removeprefix("parax."):
        case "megatron" | "auto" | "auto_stage" | "equal_mesh" | "equal_layer":
            return "any"
        case "intra_only":
            return "intra"
        case "inter_only":
            return "inter"
        case _:
            return None


def best_layout(
    model: Transformer, devices: int, machine: Machine, habits: Habits, restriction: str, batch: int, sequence: int
) -> Layout | None:
    """The fastest predicted layout that fits in memory, or None if none does."""
    rates = rates_of(machine, habits, Scalars())
    fitting = [
        layout
        for layout in _layouts(model, devices, machine, restriction, batch, sequence)
        if peak_memory(model, layout, habits).total_bytes <= machine.memory_bytes
    ]
    return min(fitting, key=lambda layout: step_time(model, layout, rates).total_s, default=None)


def _layouts(
    model: Transformer, devices: int, machine: Machine, restriction: str, batch: int, sequence: int
) -> Iterator[Layout]:
    divisors = [each for each in range(1, devices + 1) if devices % each == 0]
    for pp in divisors:
        for tp in (each for each in divisors if devices % (pp * each) == 0 and each <= machine.devices_per_host):
            dp = devices // (pp * tp)
            allowed = {"any": True, "intra": pp == 1, "inter": dp == tp == 1}[restriction]
            if not allowed or model.layers % pp or batch % dp:
                continue
            for size in (each for each in (1, 2, 4, 8, 16, 32) if batch // dp % each == 0):
                yield Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    zero=1 if pp == 1 else 0,
                    microbatch=size,
                    microbatches=batch // dp // size,
                    sequence=sequence,
                    recompute="full",
                )
