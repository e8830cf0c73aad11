"""Pipeline schedules whose weight gradients are tasks of their own, which fill the time that stages would idle.

The backward pass of a stage is B, which others wait for, and W, which only the update does. So W of a microbatch may be
put off to the end, where a pipeline drains, and B comes back early. With S meshes, d = 0, 1, ... the depth of one:

    zero-bubble                S-d ahead, W waits for d more B: as much memory as 1F1B
    zero-bubble-h2             2(S-d)-1 ahead, W waits for 2d more B: nearly twice as much
    interleaved-zero-bubble    S-d + (V-1) S ahead, W waits for d more B: V stages on a mesh, round after round
    zero-bubble-v, dualpipe-v  two stages on a mesh, one on the way to the last mesh, the other on the way back
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.ir.schedule import Schedule, Seconds, first_round, list_schedule
from autopar.ir.task_order import TaskOrder, alternate, interleaved_tasks, new_task, with_weight_gradients
from autopar.ir.tasks import Task


@dataclass(frozen=True, kw_only=True)
class ZeroBubble(Schedule):
    """ZB-H1: 1F1B whose W of a microbatch waits on stage s until s more B have run.

    Qi et al.: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1. Stage s then holds S-s microbatches for
    their B and s for their W: S everywhere, the most that 1F1B holds on any stage. Late stages hand out their first B
    early; the W left over fill the time of 1F1B's drain. The idle time is (S-1)(max(f, w) + b - 2w) when M >= S, with
    w a part of b; the paper assumes f >= w.
    """

    name: str = "zero-bubble"
    splits_weight_gradients: bool = True

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return the order of 1F1B with each W as many B later as there are stages before."""
        tasks = alternate(stage, num_microbatches, num_in_flight=num_stages - stage)
        return with_weight_gradients(tasks, delay=stage)

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds, *, virtual_stages: int) -> Seconds:
        """Return max(f, w) + b - 2w: the first microbatch comes back without its weight gradients."""
        return np.maximum(forward_s, weight_s) + backward_s - 2 * weight_s

    def steady_s(
        self,
        forward_s: Seconds,
        backward_s: Seconds,
        weight_s: Seconds,
        *,
        num_microbatches: int,
        virtual_stages: int,
    ) -> Seconds:
        """Return M (f+b) without the warm-up: all but what the stage adds to the way of the first microbatch."""
        own_s = self.warmup_s(forward_s, backward_s, weight_s, virtual_stages=virtual_stages)
        return num_microbatches * (forward_s + backward_s) - own_s

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, S)."""
        return min(float(num_microbatches), float(num_stages))


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleH2(ZeroBubble):
    """ZB-H2: as many forward tasks ahead as fill the time until the first B is back.

    Qi et al., arXiv 2401.10241, section 2.2. Stage s runs 2(S-s)-1 microbatches ahead, and W waits until 2s more B have
    run: 2S-1 are in flight everywhere. If F, B and W take equal times, no stage idles between its first task and its
    last, and they begin one after the other: the idle time is (S-1) max(f, f + b - 3w) when M >= 2S, with w a part of
    b. Ahead of ZB-H1 where B without W takes longer than W.
    """

    name: str = "zero-bubble-h2"

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return 2(S-s)-1 times F, then B and F by turns, with each W twice as many B later as by ZB-H1."""
        tasks = alternate(stage, num_microbatches, num_in_flight=2 * (num_stages - stage) - 1)
        return with_weight_gradients(tasks, delay=2 * stage)

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds, *, virtual_stages: int) -> Seconds:
        """Return max(f, f + b - 3w)."""
        return forward_s + np.maximum(backward_s - 3 * weight_s, 0.0)

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, 2S-1)."""
        return min(float(num_microbatches), 2.0 * num_stages - 1)


@dataclass(frozen=True, kw_only=True)
class InterleavedZeroBubble(ZeroBubble):
    """ZB-H1 with V stages on a mesh, round after round: the bubbles of ZB-H1, each a V-th as long.

    The forward tasks ahead and the delay of W are those of ZB-H1 by the depth of the mesh, beside the (V-1) S that
    interleaving needs: V S of its V stages' microbatches are in flight on every mesh, as much memory as S of the whole.
    The idle time is (S-1) max(f, b - w, f + b - 2w) / V where S divides M.
    """

    name: str = "interleaved-zero-bubble"
    virtual_stages: tuple[int, ...] = (2, 3, 4)
    hides_transfers: bool = True

    def spread_tasks(self, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        """Return the interleaved order if the chain passes the meshes round after round, otherwise a list schedule."""
        meshes, rounds = first_round(stage_mesh)
        if list(stage_mesh) != meshes * rounds:
            return list_schedule(self, stage_mesh, num_microbatches)
        order: dict[int, Sequence[Task]] = {}
        for depth, mesh in enumerate(meshes):
            tasks = interleaved_tasks(depth, len(meshes), rounds, num_microbatches, ahead=1)
            order[mesh] = with_weight_gradients(tasks, delay=depth)
        return tuple(tuple(order[mesh]) for mesh in range(len(meshes)))

    def closed_forms(self, virtual_stages: int) -> Schedule:
        """Return ZB-H1 for one stage on a mesh."""
        return self if virtual_stages > 1 else _ZERO_BUBBLE

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds, *, virtual_stages: int) -> Seconds:
        """Return max(f, b - w, f + b - 2w) / V."""
        longest_s = np.maximum(np.maximum(forward_s, weight_s) + backward_s - 2 * weight_s, forward_s)
        return longest_s / virtual_stages


@dataclass(kw_only=True, eq=False)
class _MeshOfTwo:
    """The order of a mesh with two stages, while it is made: F, B and W of either, each of the next microbatch."""

    down: int
    """The stage on the way to the last mesh."""
    up: int
    """The stage on the way back."""
    tasks: list[Task] = field(default_factory=list[Task])
    counts: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    waiting: deque[int] = field(default_factory=deque[int])
    """The stages of the W that are put off."""

    def run(self, kind: str, stage: int, times: int = 1) -> None:
        """Add tasks of a kind and stage."""
        for _ in range(times):
            self.tasks.append(new_task(kind, stage, self.counts[kind, stage]))
            self.counts[kind, stage] += 1

    def backward(self, stage: int, *, puts_off: bool = False) -> None:
        """Add B and its W, or B alone."""
        self.run("B", stage)
        if puts_off:
            self.waiting.append(stage)
        else:
            self.run("W", stage)

    def weight_gradient(self) -> None:
        """Add the W that was put off first, if there is one."""
        if self.waiting:
            self.run("W", self.waiting.popleft())

    def order(self, num_microbatches: int) -> tuple[Task, ...]:
        """Return the tasks of so many microbatches, of those of more."""
        while self.waiting:
            self.weight_gradient()
        return tuple(task for task in self.tasks if (task.microbatch or 0) < num_microbatches)


@dataclass(frozen=True, kw_only=True)
class _VShaped(ZeroBubble):
    """Two stages on a mesh, those of the first half down to the last mesh, those of the second back up to the first."""

    virtual_stages: tuple[int, ...] = (2,)
    most_virtual_stages: float = 2
    hides_transfers: bool = True

    def meshes_of_stages(self, num_meshes: int, virtual_stages: int) -> list[int]:
        """Return the meshes in turn, and then back."""
        meshes = list(range(num_meshes))
        return meshes if virtual_stages == 1 else [*meshes, *reversed(meshes)]

    def spread_tasks(self, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        """Return the order of the schedule if the chain passes the meshes there and back, otherwise a list schedule."""
        meshes, rounds = first_round(stage_mesh)
        if rounds != 2 or list(stage_mesh) != [*meshes, *reversed(meshes)]:
            return list_schedule(self, stage_mesh, num_microbatches)
        order: dict[int, tuple[Task, ...]] = {}
        for depth, mesh in enumerate(meshes):
            two = _MeshOfTwo(down=depth, up=len(stage_mesh) - 1 - depth)
            # With fewer microbatches the order is that of more, without their tasks.
            self.run(two, depth, len(meshes), max(num_microbatches, 2 * len(meshes)))
            order[mesh] = two.order(num_microbatches)
        return tuple(order[mesh] for mesh in range(len(meshes)))

    def run(self, two: _MeshOfTwo, depth: int, num_meshes: int, num_microbatches: int) -> None:
        """Add all tasks of a mesh in order."""
        raise NotImplementedError

    def closed_forms(self, virtual_stages: int) -> Schedule:
        """Return ZB-H1 for one stage on a mesh."""
        return self if virtual_stages > 1 else _ZERO_BUBBLE

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds, *, virtual_stages: int) -> Seconds:
        """Return max(f, b - w) / V, which is exact for equal times and no more than it takes for others."""
        return np.maximum(forward_s, backward_s - weight_s) / virtual_stages


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleV(_VShaped):
    """ZB-V: no bubbles with the memory of 1F1B, if F, B and W take equal times.

    Qi et al.: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4. The stage on the way back
    runs as soon as the one on the way there has; its B come back first, each followed by its W, so that a mesh holds no
    more than 2 S of its two stages' microbatches. At the end W of both wait until all B have run.
    """

    name: str = "zero-bubble-v"

    def run(self, two: _MeshOfTwo, depth: int, num_meshes: int, num_microbatches: int) -> None:
        """Add all tasks of a mesh in order."""
        down, up = two.down, two.up
        two.run("F", down, 2 * (num_meshes - depth) - 1)
        for _ in range(depth):
            two.run("F", up)
            two.run("F", down)
        for _ in range(num_meshes - depth):
            two.run("F", up)
            two.backward(up)
        while two.counts["F", up] < num_microbatches:
            if two.counts["F", down] < num_microbatches:
                two.run("F", down)
            two.backward(down)
            two.run("F", up)
            two.backward(up)
        for _ in range(depth):
            two.backward(down, puts_off=True)
            two.backward(up, puts_off=True)
        for _ in range(num_meshes - depth):
            two.backward(down)


@dataclass(frozen=True, kw_only=True)
class DualPipeV(_VShaped):
    """DualPipeV: in the steady state F of either stage is followed by B of the other, whose collectives it may hide.

    DeepSeek-AI: DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.2.1, cut in half along the middle. W follow
    their B but where the pipeline drains. A mesh holds one of its two stages' microbatches more than by ZB-V; if F, B
    and W take equal times it idles longer, as tasks of one mesh run one after the other here.
    """

    name: str = "dualpipe-v"

    def run(self, two: _MeshOfTwo, depth: int, num_meshes: int, num_microbatches: int) -> None:
        """Add all tasks of a mesh in order."""
        down, up, behind = two.down, two.up, num_meshes - depth - 1
        two.run("F", down, 2 * behind)
        for _ in range(depth + 1):
            two.run("F", down)
            two.run("F", up)
        for _ in range(behind):
            two.backward(up)
            two.run("F", up)
        for _ in range(num_microbatches - num_meshes - behind):
            two.run("F", down)
            two.backward(up)
            two.run("F", up)
            two.backward(down)
        for _ in range(behind):
            two.backward(up)
            two.run("F", up)
            two.backward(down)
        for number in range(depth + 1):
            puts_off = number >= (depth + 1) // 2
            two.backward(up, puts_off=puts_off)
            two.backward(down, puts_off=puts_off)
        for _ in range(behind):
            two.weight_gradient()
            two.backward(down, puts_off=True)

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, S + 1/2): 2 S + 1 of the two stages' microbatches."""
        return min(float(num_microbatches), num_stages + 0.5)


_ZERO_BUBBLE = ZeroBubble()
