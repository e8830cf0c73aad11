"""How long a pipeline of unequal stages takes, by closed form and, to check it, event by event.

Stage i of p takes f_i forward and b_i backward for each of m microbatches, a transfer takes c. One microbatch passes
through all stages and back; the others follow at the pace of the slowest stage, or of the longest round trip divided by
the microbatches that 1F1B keeps in flight (stage i keeps p - i):

    T = Σ (f_i + b_i) + 2 (p-1) c + (m-1) · max over i of max(f_i + b_i, r_i / (p-i)),
    r_i = Σ over j>=i of (f_j + b_j) + 2 (p-1-i) c

Interleaving v virtual stages per device divides what the first microbatch takes by v, and sends v times as often
(Narayanan et al. 2021, section 2.2). GPipe's microbatches follow forward, then backward, at the pace of each.
"""

from collections.abc import Sequence


def pipeline_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    transfer_s: float = 0.0,
    *,
    schedule: str = "1f1b",
    virtual: int = 1,
) -> float:
    """Seconds of all forward and backward passes of one step."""
    stages = len(forward_s)
    both = [f + b for f, b in zip(forward_s, backward_s)]
    if stages == 1:
        return microbatches * both[0]
    trips = 2 * transfer_s * (stages - 1)
    if schedule == "gpipe":
        return sum(both) + trips + (microbatches - 1) * (max(forward_s) + max(backward_s))
    pace = max(both)
    for stage in range(stages):
        in_flight = min(microbatches, stages - stage)
        trip = sum(both[stage:]) + 2 * transfer_s * (stages - 1 - stage)
        pace = max(pace, trip / in_flight) if in_flight == stages - stage else pace
    # The last microbatch leaves a device that all the time had one; what the others add of the first one is the bubble.
    bubble = (sum(both) + trips - max(both)) / virtual
    sent = (virtual - 1) * 2 * transfer_s * microbatches if virtual > 1 else 0.0
    return bubble + sent + max(both) + (microbatches - 1) * pace


def simulated_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, transfer_s: float) -> float:
    """Seconds of 1F1B, event by event: each device runs its tasks in order, each as soon as its input is there."""
    stages = len(forward_s)
    orders = [_order(stage, stages, microbatches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    clocks, next_task = [0.0] * stages, [0] * stages
    while any(next_task[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while next_task[stage] < len(orders[stage]):
                kind, index = orders[stage][next_task[stage]]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < stages:
                    if (kind, source, index) not in done:
                        break
                    ready = done[kind, source, index] + transfer_s
                else:
                    ready = 0.0
                clocks[stage] = max(clocks[stage], ready) + (forward_s if kind == "F" else backward_s)[stage]
                done[kind, stage, index] = clocks[stage]
                next_task[stage] += 1
    return max(clocks)


def _order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """1F1B: as many forward passes as there are stages after this one, then by turns, then the rest backward."""
    ahead = min(stages - 1 - stage, microbatches)
    order = [("F", index) for index in range(ahead)]
    for index in range(microbatches):
        if ahead + index < microbatches:
            order.append(("F", ahead + index))
        order.append(("B", index))
    return order
