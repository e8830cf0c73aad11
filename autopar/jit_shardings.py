"""A plan on one mesh in the words of plain JAX: shardings and constraints for a user's own `jax.jit`, and axis rules.

Planned  ->  JitShardings   inputs, outputs   for `jax.jit(in_shardings=, out_shardings=)`
                            constrain(step)   the step with a constraint on every value inside
                            logical_axis_rules(names)   for libraries that name the dimensions of their parameters

The layouts are the plan's. Which collectives they mean, and whether it is right, is then for XLA's partitioner to say:
what autopar emits itself, compiles and verifies is `planned.lower().compile()`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, default_registry

from autopar.arguments import Call
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import planned_block
from autopar.compiler.spmd.constrain import evaluate_constrained
from autopar.errors import InvalidArgument, Unsupported
from autopar.ir.instructions import spec_axes
from autopar.ir.plan import Plan
from autopar.ir.program import Program

_LEAF, _NONE = jax.tree.structure(0), jax.tree.structure(None)


@dataclass(frozen=True, kw_only=True, eq=False)
class JitShardings:
    """The layouts of a plan on one mesh, for `jax.jit`.

    >>> import optax, autopar                                                             # doctest: +SKIP
    >>> found = step.trace(state, batch).plan().shardings()                               # doctest: +SKIP
    >>> jax.jit(found.constrain(step), in_shardings=found.inputs, out_shardings=found.outputs)   # doctest: +SKIP
    """

    mesh: Mesh
    inputs: tuple[Any, ...]
    """A tree of shardings for every positional argument, as `in_shardings` takes it."""
    outputs: Any
    """A tree of shardings of the result, as `out_shardings` takes it."""
    input_specs: Mapping[str, PartitionSpec]
    """The layout of each input, by its name (`state.params.h_0.kernel`)."""
    plan: Plan
    trace: Trace
    _arguments: Any
    """The structure of the arguments, all of them arrays."""

    def constrain(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step as planned, with a sharding constraint on every value inside, for `jax.jit`.

        It takes positional arguments of the planned shapes. The program is the planned one: what the plan computes
        again or in microbatches is. Raises `Unsupported` for a plan of several executables.
        """
        if self.plan.sharding is None:
            raise Unsupported(
                f"The plan of {self.trace.name} runs {self.plan.num_microbatches} microbatches in executables of their "
                "own, which one jax.jit cannot hold. Use the shardings of its inputs and outputs alone, or plan with "
                "num_microbatches=1."
            )
        closed, block = planned_block(self.trace, self.plan)
        _, consts = jc.open_jaxpr(closed)

        def constrained(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            shapes = [(tuple(np.shape(leaf)), jax.numpy.result_type(leaf)) for leaf in leaves]
            planned = [(tuple(leaf.aval.shape), leaf.aval.dtype) for leaf in self.trace.inputs]
            if tree != self._arguments or shapes != planned:
                raise InvalidArgument(
                    f"{self.trace.name} was planned for {len(planned)} arrays of other shapes, dtypes or another tree "
                    f"than the {len(shapes)} that are given. Plan it for these arguments."
                )
            results = evaluate_constrained(block, consts, leaves, self.mesh)
            return self.trace.result(leaves, results)

        constrained.__name__ = constrained.__qualname__ = getattr(step, "__name__", self.trace.name)
        return constrained

    def logical_axis_rules(self, names: Mapping[str, Sequence[str | None]]) -> tuple[tuple[str, Any], ...]:
        """Return rules from logical axes to mesh axes, as Flax and MaxText take them, that give the planned layouts.

        `names` maps regular expressions, which find inputs by name, to the names of their dimensions, None for one
        without. The rule of a dimension that is whole is `(name, None)`.

        Raises `InvalidArgument` for a pattern that finds nothing, another number of dimensions, and for a name whose
        dimensions the plan splits in two ways, which no rule says.
        """
        rules: dict[str, tuple[tuple[str, ...], str]] = {}
        for pattern, dims in names.items():
            found = [name for name in self.input_specs if re.search(pattern, name)]
            if not found:
                raise InvalidArgument(
                    f"The pattern {pattern!r} finds no input of {self.trace.name}. Its inputs are named like "
                    f"{', '.join(list(self.input_specs)[:4])}."
                )
            for name in found:
                self._add_rules(rules, name, dims)
        return tuple((name, axes[0] if len(axes) == 1 else axes or None) for name, (axes, _) in rules.items())

    def _add_rules(self, rules: dict[str, tuple[tuple[str, ...], str]], name: str, dims: Sequence[str | None]) -> None:
        rank = next(len(leaf.aval.shape) for leaf in self.trace.inputs if leaf.name == name)
        if len(dims) != rank:
            raise InvalidArgument(
                f"{name} has {rank} dimensions, and {len(dims)} names are given for it: {tuple(dims)}. Give one for "
                "each, None for a dimension without."
            )
        spec = self.input_specs[name]
        for place, logical in enumerate(dims):
            if logical is None:
                continue
            axes = spec_axes(spec[place]) if place < len(spec) else ()
            known, where = rules.setdefault(logical, (axes, name))
            if known != axes:
                raise InvalidArgument(
                    f"The axis {logical!r} is split over {known or 'nothing'} in {where}, and over {axes or 'nothing'} "
                    f"in {name}. One rule gives one layout: name the two dimensions differently, or plan with "
                    "pins={...} that lay them out alike."
                )


def jit_shardings(
    trace: Trace, call: Call, plan: Plan, program: Program, devices: Sequence[Any] | None
) -> JitShardings:
    """Return the layouts of a plan on one mesh, on these devices; None: on placeholders of its own.

    Raises `Unsupported` for stages on several meshes, for state on the host, and for arguments that a plain `jax.jit`
    takes no shardings of.
    """
    planned, *others = plan.meshes
    if others:
        raise Unsupported(
            f"The plan of {trace.name} has stages on {len(plan.meshes)} meshes, and one jax.jit runs on one. Plan with "
            "Auto(num_stages=1), or run what autopar compiles."
        )
    if plan.on_host:
        raise Unsupported(
            f"The plan of {trace.name} keeps {plan.on_host[0]} on the host and brings it in part by part, which "
            'one jax.jit cannot. Plan with offload="off", or run what autopar compiles.'
        )
    positional, named, graph = call.tree.children()
    if named.num_leaves or graph != _NONE or call.static or call.static_leaves:
        raise Unsupported(
            f"{trace.name} was traced with arguments by name, static ones, or NNX objects, for which jax.jit takes no "
            "in_shardings. Trace a function of positional arguments that are trees of arrays (nnx.split gives them)."
        )
    if devices is None or len(devices) < plan.num_devices:
        raise InvalidArgument(
            f"The plan of {trace.name} is for {plan.num_devices} devices, and shardings need devices; here are "
            f"{0 if devices is None else len(devices)}. Ask where they are, or give devices=."
        )
    chosen = np.array([devices[number] for number in planned.devices]).reshape(planned.shape)
    mesh = Mesh(chosen, planned.axis_names)
    types = program.meshes[0].values
    input_specs = {each.leaf: types[each.value].spec for each in program.inputs if each.leaf is not None}
    output_specs = {out.leaf: types[out.parts[0][1]].spec for out in program.outputs if out.parts}

    def placed(specs: Mapping[int, PartitionSpec], count: int) -> list[NamedSharding]:
        return [NamedSharding(mesh, specs.get(number, PartitionSpec())) for number in range(count)]

    inputs = placed(input_specs, len(trace.inputs))
    outputs = placed(output_specs, len(trace.outputs))
    return JitShardings(
        mesh=mesh,
        inputs=tuple(_as_tree(positional, inputs).values()),
        outputs=_as_tree(trace.out_tree, trace.every_result(inputs, outputs)),
        input_specs={leaf.name: each.spec for leaf, each in zip(trace.inputs, inputs, strict=True)},
        plan=plan,
        trace=trace,
        _arguments=jax.tree_util.treedef_tuple(positional.children()),
    )


def _as_tree(structure: Any, shardings: Sequence[NamedSharding]) -> Any:
    """Return shardings in this structure. A node of the user's that takes only arrays is one sharding, as a prefix."""
    node = structure.node_data()
    if node is None:
        return shardings[0] if shardings else None
    rest = iter(shardings)
    children = structure.children()
    trees = [_as_tree(child, list(itertools.islice(rest, child.num_leaves))) for child in children]
    flat = PyTreeDef.from_node_data_and_children(default_registry, node, [_LEAF] * len(children))
    try:
        return flat.unflatten(trees)
    except Exception as error:  # whatever its constructor says of what is no array
        first, *others = shardings
        if any(each != first for each in others):
            raise Unsupported(
                f"{node[0].__name__} takes no shardings in place of its arrays ({type(error).__name__}: {error}), and "
                "the plan lays these out in different ways. Have its unflatten function take any leaves, or run what "
                "autopar compiles."
            ) from error
        return first
