"""Add to a task what its host takes that launches its kernels one by one: eager PyTorch beside a device.

    seconds of a task  =  (device^p + host^p)^(1/p), p = 2.5
    host               =  layers x (kernels + collectives x (1 + 1.6 x (1/2 + … + 1/n))) x launch

Neither of the two is ahead all the time: the host is where kernels are large, and the device is where they are small,
so that a task takes more than the longer of both, and less than one after the other. A collective waits for the slowest
of the hosts of its n devices, which between two of them are apart as numbers of an exponential distribution are: the
largest of n is 1 + 1/2 + … + 1/n times the mean.

What else stands in a step, the ends of the model and the optimizer with one kernel for many tensors, is the device's.
So is what these frameworks do with scores of attention and the models here do not: dropout, which keeps a mask, and
where no kernel does the softmax, a scaled and a masked copy of them in 32 bits.
"""

from collections.abc import Callable

from autopar.step_parts import StepParts, TaskParts
from benchmarks.accuracy_cases import Case
from benchmarks.accuracy_frameworks import Launches

POWER = 2.5
"""Exponent with which device and host are added: 1 is one after the other, and much the longer of both."""
APART = 1.6
"""Launches by which hosts are apart between two collectives; both are chosen with `CHECKPOINTED_S`."""
FASTER = 3.0
"""Factor on the rate of vector units in kernels written by hand: XLA computes functions like tanh, which hardware
knows, from many more operations. Chosen with the others."""
COLLECTIVES = 2
"""Collectives of tensor parallelism in a layer's forward pass, and as many in its backward pass."""
FUSED_ROWS = 4
"""Rows of scores of so many heads and examples are one block of the fused softmax of Megatron-LM, which takes no other
numbers of them, and 16 bits only (megatron/model/fused_softmax.py, is_kernel_available)."""
_MASK_BYTES = 1
_COPIES_BYTES = 2 * (4 + 4)
"""Two copies in 32 bits, each read and written."""


def host_seconds(
    case: Case, launches: Launches, launch_s: float, parts: StepParts
) -> Callable[[TaskParts, float], float]:
    """Return what says the seconds of a task by those of the device, for a host that launches its kernels."""
    # The only task of a microbatch is both passes in one.
    alone = all(task.kind != "B" for task in parts.tasks)

    def task_s(task: TaskParts, device_s: float) -> float:
        passes = {"F": (1, 1) if alone else (1, 0), "B": (0, 1)}.get(task.kind, (0, 0))
        layers = case.model.layers / (case.layout.pp * case.layout.vp)
        host_s = layers * _layer_launches(case, launches, *passes) * launch_s
        device_s += layers * _layer_score_bytes(case, *passes) / case.machine.memory_bandwidth
        return float((device_s**POWER + host_s**POWER) ** (1 / POWER))

    return task_s


def _layer_launches(case: Case, launches: Launches, forward: int, backward: int) -> float:
    """Return the launches of a layer, and what it waits for others, of so many passes each way."""
    layout = case.layout
    again = forward + backward * (layout.recompute == "full")
    kernels = again * launches.forward + backward * launches.backward
    if not _fuses_softmax(case):
        kernels += (again + backward) * launches.softmax
    collectives = (again + backward) * COLLECTIVES if layout.tp > 1 else 0
    return kernels + collectives * (1 + APART * sum(1 / number for number in range(2, layout.tp + 1)))


def _fuses_softmax(case: Case) -> bool:
    rows = case.layout.microbatch * (case.model.heads // case.layout.tp)
    return case.habits.flash or (case.habits.dtype in ("float16", "bfloat16") and rows % FUSED_ROWS == 0)


def _layer_score_bytes(case: Case, forward: int, backward: int) -> float:
    """Return the bytes that dropout of the scores, and a softmax that is no kernel of its own, move in a layer."""
    layout = case.layout
    if case.habits.flash:
        return 0.0
    size = 2 if case.habits.dtype in ("float16", "bfloat16") else 4
    each = 2 * size + _MASK_BYTES + (0 if _fuses_softmax(case) else _COPIES_BYTES)
    passes = forward + backward * (1 + (layout.recompute == "full"))
    return passes * each * layout.microbatch * case.model.heads / layout.tp * layout.sequence**2
