"""`autopar.create_state`: the first state, computed where the train step wants it and nowhere else.

    state = autopar.create_state(init_fn, jax.random.key(0), like=train_step, batch=batch)

Every mesh draws and computes its own leaves, in the layouts of the step's inputs; the driver never holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.aot import Compiled
from autopar.api import Step
from autopar.arguments import abstract
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.compiler.lowering.initial_state import placed_results
from autopar.errors import CannotSerialize
from autopar.ir.program import Program
from autopar.runtime.distributed.ray_cluster import pickled, unpickled
from autopar.runtime.in_process import InProcess
from autopar.training.array_placement import ArgumentPlacement, argument_placement, check_argument, compiled_like


def create_state(
    init_fn: Callable[..., Any], *args: Any, like: Step | Compiled, batch: Any = None, further: Sequence[Any] = ()
) -> Any:
    """`init_fn(*args)`, computed where `like` wants its state, which is its argument 0.

    The same numbers as `jax.jit(init_fn)(*args)`: what is drawn from threefry keys depends on no layout.

    - `args`: arrays, random keys and numbers; what else `init_fn` needs it closes over.
    - `like`: a parallelized step that was called or compiled before, or a compiled one.
    - `batch`, `further`: the step's arguments after the state, as arrays or `jax.ShapeDtypeStruct`s; with them the step
      is planned and compiled for this state now, and need not have been before.

    Raises `InvalidArgument`, which names the leaf, if the result is not what the step takes.
    """
    names = [leaf_name(f"{_name(init_fn)}'s argument", path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    avals = [abstract(leaf, name) for name, leaf in zip(names, jax.tree.leaves(args), strict=True)]
    shapes = jax.eval_shape(init_fn, *jax.tree.unflatten(jax.tree.structure(args), avals))
    if isinstance(like, Step) and (batch is not None or further):
        compiled = like.compiled_for(like.arguments.split((shapes, batch, *further), {}))
    else:
        compiled = compiled_like(like, 0, shapes)
    arrangement, tree = argument_placement(compiled, 0)
    check_argument(shapes, arrangement, tree, f"{_name(init_fn)} returns", compiled.trace.name)
    recipe = InitRecipe(init_fn=init_fn, args=jax.tree.unflatten(jax.tree.structure(args), avals), to=arrangement)
    program = recipe.program()
    session = compiled.source.target.session
    leaves = jax.tree.leaves(args)
    if session is None:
        made = InProcess(compiled.source.target.live_devices()).load(program, leaf_names=names)(leaves)
    else:
        from autopar.runtime.distributed.driver import ClusterProgram

        made = ClusterProgram(
            session, program, names, serialize_init(recipe) if session.has_driver else recipe.program
        ).once(leaves)
    return jax.tree.unflatten(tree, made)


@dataclass(frozen=True, kw_only=True)
class InitRecipe:
    """Makes the program of an initialisation, from the function, its arguments' types and the places."""

    init_fn: Callable[..., Any]
    args: tuple[Any, ...]
    to: ArgumentPlacement

    def program(self) -> Program:
        """One executable per mesh, for the leaves that it holds."""
        avals, tree = jax.tree.flatten(self.args)

        def flat(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(self.init_fn(*jax.tree.unflatten(tree, leaves)))

        parts = [place.parts for place in self.to.places]
        return placed_results(flat, avals, parts, self.to.meshes, name=_name(self.init_fn))


@dataclass(frozen=True, kw_only=True)
class SerializedInit:
    """Makes the program of an initialisation in another process."""

    payload: bytes

    def __call__(self) -> Program:
        """Trace the function again."""
        recipe: InitRecipe = unpickled(self.payload)
        return recipe.program()


def serialize_init(recipe: InitRecipe) -> SerializedInit:
    """Return what other processes need to make the program. Raises `CannotSerialize`."""
    try:
        return SerializedInit(payload=pickled(recipe))
    except Exception as error:
        raise CannotSerialize(
            f"{_name(recipe.init_fn)} cannot be sent to the processes of the cluster: something in it cannot be "
            f"pickled ({type(error).__name__}: {error}). Make that inside of the function, import it from a module "
            "that every host has, or pass it as an argument."
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
