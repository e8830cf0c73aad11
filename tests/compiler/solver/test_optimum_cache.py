"""An optimum is solved for once per problem, whatever happens to the files."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.compiler.solver.optimum_cache import cached, problem_fingerprint
from autopar.compiler.solver.problem import MRF, Optimum
from autopar.compiler.solver.solve import solve
from tests.compiler.solver.random_problems import small_problem

OPTIMUM = Optimum(assignment=(0, 2), value=0.1 + 0.2, lower_bound=0.3, seconds=1.5, how="reductions")


def never():
    pytest.fail("solved although the optimum is kept")


def test_what_was_kept_is_not_made_again(tmp_path):
    assert cached("key", tmp_path / "new", lambda: OPTIMUM) == OPTIMUM
    assert cached("key", tmp_path / "new", never) == OPTIMUM
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["key.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"assignment": [0]}', '{"assignment": 1}', "\xff"])
def test_unreadable_file_is_made_again(tmp_path, text):
    (tmp_path / "key.json").write_bytes(text.encode("latin-1"))
    assert cached("key", tmp_path, lambda: OPTIMUM) == OPTIMUM
    assert cached("key", tmp_path, never) == OPTIMUM


def test_directory_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    assert cached("key", tmp_path / "file", lambda: OPTIMUM) == OPTIMUM


def test_optimum_of_a_problem_comes_back_as_it_was(tmp_path):
    problem = small_problem(5)
    key = problem_fingerprint(problem)
    assert cached(key, tmp_path, lambda: solve(problem)) == cached(key, tmp_path, never)


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
