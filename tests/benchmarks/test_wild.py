"""Wild steps: the comparison notices what is wrong, and every package that a case needs is installed by its target."""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.wild import __main__ as wild
from benchmarks.wild.cases import CASES

REQUIREMENTS = Path(wild.__file__).parent.glob("requirements*.txt")


def test_every_case_says_what_it_is_and_its_package_is_installed():
    lines = [line for path in REQUIREMENTS for line in path.read_text().splitlines()]
    needed = {re.split(r"[<>=]", line)[0] for line in lines if line[0] != "#"}
    for package, build in CASES.values():
        assert package in needed | {"flax"}  # autopar itself needs flax
        assert build.__doc__


def test_other_numbers_shapes_and_leaves_are_differences_and_rounding_is_not():
    wanted = {"a": np.ones(4), "bias before a norm": np.full(4, 1e-9), "b": np.full((2, 2), 3.0)}
    assert wild._difference(wanted, wanted | {"bias before a norm": np.full(4, 2e-9)})[0] < wild.TOLERANCE
    off, where = wild._difference(wanted, wanted | {"b": np.full((2, 2), 3.3)})
    assert off == pytest.approx(0.1)
    assert where == "b"
    for other in ({"a": wanted["a"]}, wanted | {"a": np.ones(3)}, wanted | {"a": np.full(4, np.nan)}):
        assert not wild._difference(wanted, other)[0] <= wild.TOLERANCE


@pytest.mark.parametrize("method", wild.METHODS)
def test_a_step_that_is_installed_here_is_right(method):
    assert wild.run_one("optax_accumulation", method)["status"] == "right"


def test_an_unknown_case_is_refused():
    with pytest.raises(SystemExit, match="There is no case nothing"):
        wild.run_all(["nothing"], ("data",), 1.0)


def test_a_table_is_of_the_rows_of_several_environments():
    rows = [
        {"case": name, "package": name, "version": "1", "what": name, "here": here, "method": "data", "status": "right",
         "said": ""}
        for name, here in (("old", "Python 3.11.7, jax 0.10.2"), ("new", "Python 3.12.1, jax 0.12.0"))
    ]  # fmt: skip
    table = wild.markdown(rows)
    assert "Python 3.11.7, jax 0.10.2: old.\nPython 3.12.1, jax 0.12.0: new.\n" in table
    assert "| old 1 | old | right |  |  |" in table


def test_cases_whose_packages_are_here_are_run_once_in_all_environments():
    here = wild.installed(())
    assert "optax_accumulation" in here
    assert "maxtext_llama" not in here
    assert wild.installed({"optax_accumulation"}) == [name for name in here if name != "optax_accumulation"]
