"""Name the leaves of arguments and results, as plans, patterns, tables and messages call them.

    state, {"params": [{"w": ...}]}  ->  state.params.0.w

Attributes, keys and positions all stand between dots. A key that has a dot of its own is quoted, so that no two leaves
have one name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def leaf_name(root: str, path: Sequence[Any]) -> str:
    """Return the name of the leaf at a path of JAX's keys, or of plain ones, below `root` ("" for none)."""
    return ".".join([*([root] if root else []), *map(_part, path)])


def _part(key: Any) -> str:
    text = (
        key if isinstance(key, str) else str(key) if isinstance(key, int) else jax.tree_util.keystr((key,), simple=True)
    )
    return repr(text) if "." in text or not text else text
