"""An optimum is solved for once per problem, whatever happens to the files."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from autopar.compiler.solver.optimum_cache import cached, problem_fingerprint
from autopar.compiler.solver.problem import MRF
from autopar.compiler.solver.solve import solve
from autopar.kept_files import keep_text
from tests.compiler.solver.random_problems import small_problem

PROBLEM = small_problem(5)
OPTIMUM = solve(PROBLEM)


def never():
    pytest.fail("solved although the optimum is kept")


def kept_file(directory):
    (path,) = directory.iterdir()
    return path


def test_what_was_kept_is_not_made_again(tmp_path):
    assert cached(PROBLEM, tmp_path / "new", lambda: OPTIMUM) == OPTIMUM
    assert cached(PROBLEM, tmp_path / "new", never) == OPTIMUM
    assert kept_file(tmp_path / "new").name == f"{problem_fingerprint(PROBLEM)}.json"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"assignment": [0]}', '{"assignment": 1}', "\xff"])
def test_unreadable_file_is_made_again(tmp_path, text):
    cached(PROBLEM, tmp_path, lambda: OPTIMUM)
    kept_file(tmp_path).write_bytes(text.encode("latin-1"))
    assert cached(PROBLEM, tmp_path, lambda: OPTIMUM) == OPTIMUM
    assert cached(PROBLEM, tmp_path, never) == OPTIMUM


@pytest.mark.parametrize(("value", "other"), [("[", "[true, "), (": ", ": 1"), ("}", " }")])
def test_damaged_file_is_made_again_also_where_it_could_be_read(tmp_path, value, other):
    cached(PROBLEM, tmp_path, lambda: OPTIMUM)
    file = kept_file(tmp_path)
    kept = file.read_text()
    file.write_text(kept.replace(value, other, 1))
    assert cached(PROBLEM, tmp_path, lambda: OPTIMUM) == OPTIMUM
    assert file.read_text() == kept


POISONED = {
    "too short": replace(OPTIMUM, assignment=OPTIMUM.assignment[1:]),
    "no option": replace(OPTIMUM, assignment=(99, *OPTIMUM.assignment[1:])),
    "below zero": replace(OPTIMUM, assignment=(-1, *OPTIMUM.assignment[1:])),
    "another cost": replace(OPTIMUM, value=0.9 * OPTIMUM.value),
    "a bound above": replace(OPTIMUM, lower_bound=1.1 * OPTIMUM.value),
    "no number": replace(OPTIMUM, value=float("nan")),
}


@pytest.mark.parametrize("kind", POISONED)
def test_file_with_an_optimum_of_no_such_problem_is_made_again(tmp_path, kind):
    cached(PROBLEM, tmp_path, lambda: OPTIMUM)
    keep_text(tmp_path, kept_file(tmp_path).name, json.dumps(asdict(POISONED[kind])))
    assert cached(PROBLEM, tmp_path, lambda: OPTIMUM) == OPTIMUM
    assert cached(PROBLEM, tmp_path, never) == OPTIMUM


def test_directory_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    assert cached(PROBLEM, tmp_path / "file", lambda: OPTIMUM) == OPTIMUM


def test_fingerprint_tells_problems_apart():
    problem = MRF(costs=(np.zeros(2), np.ones(2), np.zeros(2)), edges={(0, 1): np.eye(2)})
    changed = [
        replace(problem, costs=(np.zeros(2), np.zeros(2), np.ones(2))),
        replace(problem, edges={(0, 2): np.eye(2)}),
        replace(problem, edges={(0, 1): 1 - np.eye(2)}),
        replace(problem, costs=(np.zeros(2), np.ones(2), np.zeros(3))),
    ]
    prints = {problem_fingerprint(each) for each in [problem, *changed]} | {problem_fingerprint(problem, "limit")}
    assert len(prints) == 6
    assert problem_fingerprint(problem) == problem_fingerprint(replace(problem, edges={(0, 1): np.eye(2)}))
