"""Let users mark where a layer of their model ends: `h = autopar.layer_boundary(h)`.

A mark is the identity on one array, as an equation with a name that JAX itself carries through `grad`, `vmap`, `scan`,
`jax.checkpoint` and `jit`; without autopar it does nothing.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp

_NAME = "autopar.layer_boundary"


def layer_boundary(tree: Any) -> Any:
    """Return `tree` as it is; what the model computes after it is the next layer.

    Call it in the model, on the activations that go from one layer to the next: arrays of any shape, in any pytree. A
    model with such marks has the layers between them, whatever its scopes are called, and a pipeline's stages are runs
    of these; a model without marks has those of its numbered scopes. In a `lax.scan` over layers every iteration is a
    layer in any case, and a mark there changes nothing.

        for block in blocks:
            h = autopar.layer_boundary(block(h))
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _NAME) if isinstance(leaf, jax.Array) else leaf, tree)


def is_layer_boundary(eqn: jc.JaxprEqn) -> bool:
    """Return whether an equation is such a mark."""
    return eqn.primitive.name == "name" and jp.name_of(eqn) == _NAME
