"""The links of a mesh: found by axes, and kept as JSON."""

import json

import pytest

from autopar.errors import PlanMismatch
from autopar.ir.axis_links import AxisLinks, Ring

LINKS = AxisLinks(inside=(1, 4), rings=(Ring((0,), 40, 40), Ring((1,), 10, 10), Ring((0, 1), 10, 40, (10, 40))))


def test_a_ring_is_found_by_its_axes_in_any_order():
    assert LINKS.ring((1, 0)).levels == (10, 40)
    assert LINKS.ring(()) == Ring((), 10, 10)


def test_links_are_read_back_as_they_were_written():
    assert AxisLinks.from_data("mesh 0", json.loads(json.dumps(LINKS.to_data())), 2) == LINKS


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {"inside": [1, 4]},
        {"inside": [1], "rings": []},
        {"inside": [1, 4], "rings": [[[2], 10, 10, []]]},
        {"inside": [1, 4], "rings": [[[0], 0, 10, []]]},
        {"inside": [1, 4], "rings": [[[0, 1], 10, 40, [10]]]},
        {"inside": [1, 4], "rings": [[[0, 1], 10]]},
    ],
    ids=str,
)
def test_links_of_another_form_are_refused(raw):
    with pytest.raises(PlanMismatch, match=r"links of mesh 0 cannot be read.*make the plan again"):
        AxisLinks.from_data("mesh 0", raw, 2)
