"""Names of leaves, as plans and messages call them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.frontend.leaf_names import leaf_name


class _State(NamedTuple):
    params: object


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (1, ["state"]),
        ({"h_0": {"kernel": 1}, "h_1": [2, (3,)]}, ["state.h_0.kernel", "state.h_1.0", "state.h_1.1.0"]),
        (_State({3: 1}), ["state.params.3"]),
        ({"h.0": 1, "h": {"0": 2}, "": 3}, ["state.''", "state.h.0", "state.'h.0'"]),
    ],
)
def test_leaves_are_named_by_their_keys_between_dots_and_no_two_alike(tree, expected):
    assert [leaf_name("state", path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] == expected


def test_a_leaf_without_a_root_has_its_path_alone():
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path([jnp.zeros(()), {"w": 1}])]
    assert [leaf_name("", path) for path in paths] == ["0", "1.w"]
