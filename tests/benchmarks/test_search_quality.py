"""Random machines are those of their seed, and a row says which method is ahead."""

import pytest

from benchmarks.search_quality import ALLOWED, FREE, cluster_of, line, measured


def test_a_random_machine_is_that_of_its_seed():
    one, again, other = (cluster_of(f"random:{seed}") for seed in (3, 3, 4))
    assert one == again
    assert one != other
    assert one.num_devices % one.groups[0].machine.devices_per_host == 0


@pytest.mark.parametrize("seed", [0, 5])
def test_a_row_on_a_random_machine(seed):
    row = measured("mlp", f"random:{seed}", [FREE, "4 microbatches", "3 stages"])
    assert row.best in ("4 microbatches", "3 stages")
    assert row.ratio <= ALLOWED
    assert f"of {row.best}" in line(row)
