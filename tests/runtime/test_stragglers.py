"""A straggler is a mesh that takes longer than its share, not one that has more to do, nor a machine that is slow."""

import pytest

from autopar.runtime.stragglers import find_stragglers
from autopar.runtime.timeline import InstructionTime


def task(mesh: int, process: int, seconds: float, *, is_task: bool = True) -> InstructionTime:
    return InstructionTime(process=process, mesh=mesh, name="F0", start_s=1.0, stop_s=1.0 + seconds, is_task=is_task)


def test_mesh_that_takes_longer_than_its_share_is_named_with_its_time():
    times = [task(0, 0, 1.0), task(0, 0, 1.0), task(1, 1, 8.0), task(1, 2, 9.0), task(2, 3, 6.0)]
    (found,) = find_stragglers(times, [1.0, 2.0, 3.0])
    assert (found.mesh, found.processes, found.busy_s) == (1, (1, 2), 9.0)
    assert found.expected_s == pytest.approx(4.0) and found.ratio == pytest.approx(2.25)


def test_slow_machines_and_transfers_are_no_stragglers():
    assert find_stragglers([task(0, 0, 10.0), task(1, 1, 20.0)], [0.1, 0.2]) == []
    assert find_stragglers([task(0, 0, 1.0), task(1, 1, 1.0), task(1, 1, 9.0, is_task=False)], [1.0, 1.0]) == []
    assert find_stragglers([task(0, 0, 1.0)], [1.0]) == []
