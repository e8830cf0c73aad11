"""Hostile options and damaged files are accepted or refused with a reason; nothing else is raised."""

import pytest

from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from benchmarks.bad_input import checkpoint_inputs, file_inputs, kept_optimum_inputs, option_inputs, verdict


def bad(inputs):
    found = {name: verdict(make) for name, make in inputs}
    return {name: text for name, (result, text) in found.items() if result in ("raw", "slow")}, found


def test_hostile_options_are_accepted_or_refused():
    wrong, found = bad(option_inputs())
    assert wrong == {}
    assert len(found) > 2000


@pytest.mark.parametrize("seed", range(2))
def test_damaged_files_are_accepted_or_refused(seed):
    wrong, found = bad(file_inputs(40, seed))
    assert wrong == {}
    assert sum(result == "refused" for result, _ in found.values()) > 40


def test_damaged_optima_and_checkpoints_give_the_sound_numbers_or_a_reason(tmp_path):
    wrong, found = bad([*kept_optimum_inputs(40, 0, tmp_path / "optima"), *checkpoint_inputs(6, 0, tmp_path)])
    assert wrong == {}
    assert sum(result == "refused" for result, _ in found.values()) > 4


def test_what_is_no_text_is_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"The cluster is 8. Give a string"):
        Cluster.parse(8)
    with pytest.raises(InvalidArgument, match=r"The kind of the devices is 8"):
        Cluster(num_devices=1, kind=8)
    with pytest.raises(ValueError, match=r"The plan is None, it must be JSON as a string"):
        Plan.from_json(None)
