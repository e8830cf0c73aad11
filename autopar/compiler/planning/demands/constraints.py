"""Turn what a user fixed into constraints of the search: pins, constraints in the model, forms of parallelism.

pins, specs     the inputs that a pattern finds have one layout; of a method by hand, all other inputs have one, too
constraints     `with_sharding_constraint` in the model has one strategy, by the names of the mesh axes
scopes          equations in them have those in which the asked devices share the examples, or the work on each
Zero, ...       inputs and equations of the model have the layouts of that form of parallelism
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autopar.checks import check_spec
from autopar.compiler.frontend.dimension_kinds import ValueKinds, step_kinds
from autopar.compiler.frontend.scopes import demand_of
from autopar.compiler.frontend.trace import Leaf, Trace
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.normalize import IN_SHARDINGS, OUT_SHARDINGS
from autopar.compiler.jaxprs.primitives import CONSTRAINTS
from autopar.compiler.planning.demands.kinds import AllowedSplits, kept_layouts, within_kinds
from autopar.compiler.planning.demands.megatron_layouts import program_constraints
from autopar.compiler.planning.demands.restricted_search import restricted_constraints
from autopar.compiler.planning.demands.scope_demands import layouts_in_parts, parameters_in_parts, within_scopes
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, fits, from_spec, replicated
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import InvalidArgument
from autopar.ir.instructions import listed, spec_axes
from autopar.methods import Auto, Megatron, ProgramMethod, ShardParallel

DATA = "data"
"""The mesh axis along which methods by hand split the batch."""

Layouts = dict[int, tuple[Layout, ...]]
"""The layouts that inputs or results may have, by number."""

_CONSTRAINTS = CONSTRAINTS - {"layout_constraint"}
"""The constraints that ask for a sharding."""


def constraints_of(
    trace: Trace,
    closed: jc.ClosedJaxpr,
    method: ProgramMethod,
    mesh: LogicalMesh,
    allowed: AllowedSplits | None,
) -> Constraints:
    """Return the constraints of a method, which is to use the axes as `allowed`.

    Raises `InvalidArgument` for those that mesh or program cannot keep.
    """
    match method:
        case Auto():
            usual, results = Layouts(), Layouts()
            pinned = {i: (layout,) for i, layout in pinned_inputs(trace, method.pins, mesh).items()}
        case ShardParallel():
            usual, results = _usual_inputs(trace, mesh), {} if method.specs else _usual_results(trace, mesh)
            pinned = _specified_inputs(trace, method.specs, mesh)
        case _:
            if isinstance(method, Megatron):
                form = program_constraints(trace, closed, mesh, method.zero)
            else:
                form = restricted_constraints(trace, closed, method, mesh)
            if method.ignore_user_shardings:
                return form
            given, asked = _jit_layouts(trace, closed, mesh)
            both = {i: tuple(a for a in form.inputs.get(i, layouts) if a in layouts) for i, layouts in given.items()}
            for i in (i for i, layouts in both.items() if not layouts):
                raise _against_form(f"in_shardings for {trace.inputs[i].name}", type(method).__name__)
            kept = constraints_within(form, mesh, type(method).__name__)
            return replace(kept, inputs=form.inputs | both, results=form.results | asked)
    given, asked = (Layouts(), Layouts()) if method.ignore_user_shardings else _jit_layouts(trace, closed, mesh)
    constraints = replace(
        equation_constraints(mesh, ignore_user_shardings=method.ignore_user_shardings),
        inputs=usual | ({} if method.ignore_user_shardings else _inputs_in_parts(closed, mesh)) | given | pinned,
        results=results | asked,
    )
    return constraints if allowed is None else _of_kinds(trace, closed, constraints, allowed, mesh)


def _of_kinds(
    trace: Trace, closed: jc.ClosedJaxpr, constraints: Constraints, allowed: AllowedSplits, mesh: LogicalMesh
) -> Constraints:
    """The constraints of the user, and within them the kinds of parallelism that are allowed."""
    dims = step_kinds(closed, trace.batch_axes)

    def kept(given: Layouts, leaves: Sequence[Leaf], kinds: Sequence[ValueKinds], what: str) -> Layouts:
        every = {
            i: even_layouts(tuple(a.aval.shape), mesh) for i, a in enumerate(leaves) if not below_split_size(a.aval)
        }
        called = {i: f"{what} {leaf.name}" for i, leaf in enumerate(leaves)}
        return kept_layouts(every | given, called, dict(enumerate(kinds)), allowed, mesh)

    return replace(
        within_kinds(constraints, allowed, dims, mesh),
        inputs=kept(constraints.inputs, trace.inputs, dims.inputs, "The layout of"),
        results=kept(constraints.results, trace.outputs, dims.results, "The layout of the result"),
    )


def _inputs_in_parts(closed: jc.ClosedJaxpr, mesh: LogicalMesh) -> Layouts:
    """The layouts of the inputs that are parameters of a scope whose devices share the work."""
    avals = closed.in_avals
    layouts = {i: layouts_in_parts(avals[i], demand, mesh) for i, demand in parameters_in_parts(closed).items()}
    return {i: each for i, each in layouts.items() if each is not None}


def _specified_inputs(trace: Trace, specs: Mapping[str, PartitionSpec], mesh: LogicalMesh) -> Layouts:
    return {
        i: (layout_from_user(trace.inputs[i].name, spec, tuple(trace.inputs[i].aval.shape), mesh),)
        for i, spec in specified_inputs(trace, specs).items()
    }


def specified_inputs(trace: Trace, specs: Mapping[str, PartitionSpec]) -> dict[int, PartitionSpec]:
    """Return by number the spec of the first pattern that finds an input and has no more entries than it has axes.

    Raises `InvalidArgument` for a pattern that finds no input.
    """
    found: dict[int, PartitionSpec] = {}
    for pattern, spec in specs.items():
        for i in inputs_called(trace, pattern, "spec"):
            if trace.inputs[i].aval.ndim >= len(spec):
                found.setdefault(i, spec)
    return found


def _usual_inputs(trace: Trace, mesh: LogicalMesh) -> Layouts:
    """The examples along the axis "data", everything else on every device."""
    layouts: Layouts = {}
    for i, leaf in enumerate(trace.inputs):
        shape = tuple(leaf.aval.shape)
        if i in trace.batch_axes:
            layouts[i] = (batch_layout(shape, trace.batch_axes[i], mesh),)
        elif not below_split_size(leaf.aval):
            layouts[i] = (replicated(len(shape)),)
    return layouts


def _usual_results(trace: Trace, mesh: LogicalMesh) -> Layouts:
    """Return the layouts of results: along the axis "data" if one may have a row for each example, or whole."""
    rows = trace.num_rows if trace.batch_inputs else None
    return {
        number: usual_result(tuple(leaf.aval.shape), rows, mesh)
        for number, leaf in enumerate(trace.outputs)
        if not below_split_size(leaf.aval)
    }


def usual_result(shape: tuple[int, ...], rows: int | None, mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Return the layouts of a result that is no state: whole, or split along its first axis if that has `rows`."""
    whole = replicated(len(shape))
    return (whole, batch_layout(shape, 0, mesh)) if shape[:1] == (rows,) else (whole,)


def batch_layout(shape: tuple[int, ...], axis: int, mesh: LogicalMesh) -> Layout:
    """Return the layout with `axis` along the mesh axis "data", where there is one and it divides; else replicated."""
    split = from_spec(PartitionSpec(*[None] * axis, DATA), len(shape), mesh) if DATA in mesh.axis_names else None
    return split if split is not None and fits(shape, split, mesh) else replicated(len(shape))


def pinned_inputs(trace: Trace, pins: Mapping[str, PartitionSpec], mesh: LogicalMesh) -> dict[int, Layout]:
    """The layouts of the inputs that the patterns of `pins` find, by number."""
    for pattern, spec in pins.items():
        check_spec(f"the inputs that match {pattern!r}", spec, (mesh.axis_names,))
    return {i: _pinned_layout(trace.inputs[i], p, pins[p], mesh) for i, p in pins_of_inputs(trace, pins).items()}


def pins_of_inputs(trace: Trace, pins: Mapping[str, PartitionSpec]) -> dict[int, str]:
    """The pattern of `pins` that finds each input, by number, on whatever mesh.

    Raises `InvalidArgument` for a pattern that finds none, and for two that contradict each other.
    """
    pattern_of: dict[int, str] = {}
    for pattern, spec in pins.items():
        for i in inputs_called(trace, pattern, "pin"):
            if i in pattern_of and _entries(pins[pattern_of[i]]) != _entries(spec):
                raise InvalidArgument(
                    f"The pins {pattern_of[i]!r} and {pattern!r} both match {trace.inputs[i].name} and ask "
                    f"for different layouts, {pins[pattern_of[i]]} and {spec}. Narrow one of the two patterns."
                )
            pattern_of.setdefault(i, pattern)
    return pattern_of


def inputs_called(trace: Trace, pattern: str, what: str) -> list[int]:
    """Return the numbers of the inputs whose names a pattern finds; `InvalidArgument` if there are none."""
    numbers = [i for i, leaf in enumerate(trace.inputs) if re.search(pattern, leaf.name)]
    if not numbers:
        names = [leaf.name for leaf in trace.inputs]
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
        raise InvalidArgument(
            f"The {what} {pattern!r} matches no input of {trace.name}. The closest names are {listed(tuple(close))}: "
            f"give a regular expression that finds one of them, or leave the {what} out."
        )
    return numbers


def _entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The axes of every dimension, those behind the last that is split left out."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def _pinned_layout(leaf: Leaf, pattern: str, spec: PartitionSpec, mesh: LogicalMesh) -> Layout:
    return layout_from_user(f"The pin {pattern!r} of {leaf.name}", spec, tuple(leaf.aval.shape), mesh)


def layout_from_user(what: str, spec: PartitionSpec, shape: tuple[int, ...], mesh: LogicalMesh) -> Layout:
    """The layout that a spec means for an array of this shape; `InvalidArgument` if it means none."""
    if len(spec) > len(shape):
        raise InvalidArgument(
            f"{what} is {spec}, which has {len(spec)} entries; the array has {len(shape)} dimensions."
        )
    layout = from_spec(spec, len(shape), mesh)
    if not fits(shape, layout, mesh):
        sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        raise InvalidArgument(
            f"{what} splits shape {shape} by {spec} over {sizes}, which does not divide. Choose another dimension, or "
            "another mesh_shape."
        )
    if any(list(axes) != sorted(axes) for axes in layout.dims):
        raise InvalidArgument(
            f"{what} is {spec}; the axes of one dimension must stand in the order of the mesh, {mesh.axis_names}. "
            "Write them in that order, or name the mesh axes in another one."
        )
    return layout


def _jit_layouts(trace: Trace, closed: jc.ClosedJaxpr, mesh: LogicalMesh) -> tuple[Layouts, Layouts]:
    """The layouts of inputs and results, by number, that `jax.jit` was given for the step itself."""
    jaxpr, _ = jc.open_jaxpr(closed)
    inputs, results = Layouts(), Layouts()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _CONSTRAINTS:
            continue
        scope = jc.scope_of(eqn).rpartition("/")[2]
        given = [i for i, v in enumerate(jaxpr.invars) if scope == IN_SHARDINGS and v is eqn.invars[0]]
        asked = [i for i, v in enumerate(jaxpr.outvars) if scope == OUT_SHARDINGS and v is eqn.outvars[0]]
        named = [f"in_shardings for {trace.inputs[i].name}" for i in given]
        named += [f"out_shardings for {trace.outputs[i].name}" for i in asked]
        what = next(iter(named), f"The sharding constraint {jc.describe(eqn)}")
        layout = (_asked_layout(what, _wanted_sharding(eqn), eqn.outvars[0], mesh),)
        inputs |= dict.fromkeys(given, layout)
        results |= dict.fromkeys(asked, layout)
    return inputs, results


def equation_constraints(mesh: LogicalMesh, *, ignore_user_shardings: bool) -> Constraints:
    """Return the constraints that the user wrote into the model: its sharding constraints, and its scopes."""
    if ignore_user_shardings:
        return Constraints()
    return Constraints(
        restrict=lambda eqn, every: within_scopes(eqn, constrained(eqn, every, mesh), mesh),
        constraint_key=lambda eqn: (constraint_of(eqn), demand_of(eqn)),
    )


def names_axes(trace: Trace, method: Auto) -> bool:
    """Return whether the user asks for layouts, by the axes of a mesh or by the devices of a scope."""
    if method.pins or method.ignore_user_shardings:
        return bool(method.pins)
    equations = jc.all_equations(trace.jaxpr)
    return any(constraint_of(eqn) is not None or demand_of(eqn) is not None for eqn in equations)


def constraints_within(form: Constraints, mesh: LogicalMesh, method: str) -> Constraints:
    """Return the constraints of a form of parallelism, and within them those that the user wrote into the model.

    Raises `InvalidArgument` where an equation cannot keep both.
    """
    user = equation_constraints(mesh, ignore_user_shardings=False)

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        wanted = user.restrict(eqn, every) if user.constraint_key(eqn) != (None, None) else every
        if wanted == every:
            return form.restrict(eqn, every)
        # Beside the strategy that splits nothing, so that what the form refuses is not taken for want of another.
        kept = tuple(s for s in form.restrict(eqn, (every[0], *wanted)) if s in wanted)
        if not kept:
            raise _against_form(f"The sharding constraint {jc.describe(eqn)}", method)
        return kept

    return replace(
        form, restrict=restrict, constraint_key=lambda eqn: (form.constraint_key(eqn), user.constraint_key(eqn))
    )


def _against_form(what: str, method: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} asks for a layout that {method} does not allow. Use Auto(), which obeys it, leave the constraint out, "
        "or give ignore_user_shardings=True."
    )


def constraint_of(eqn: jc.JaxprEqn) -> Hashable:
    """Return the user's constraint on an equation: a sharding constraint, or types of a mesh with Explicit axes."""
    if eqn.primitive.name in _CONSTRAINTS:
        return str(_wanted_sharding(eqn))
    typed = tuple([jc.explicit_sharding(v) for v in eqn.outvars])
    return str(typed) if any(typed) else None


def _wanted_sharding(eqn: jc.JaxprEqn) -> NamedSharding:
    wanted: Any = jp.asked_sharding(eqn)
    if not isinstance(wanted, NamedSharding):
        raise InvalidArgument(
            f"The sharding constraint {jc.describe(eqn)} is a {type(wanted).__name__}; only a NamedSharding or a "
            "PartitionSpec can be carried over to the planned mesh. Use one, or ignore_user_shardings=True."
        )
    return wanted


def constrained(eqn: jc.JaxprEqn, every: tuple[Strategy, ...], mesh: LogicalMesh) -> tuple[Strategy, ...]:
    """The strategies that keep what the user asks for at an equation."""
    if eqn.primitive.name in _CONSTRAINTS:
        what = f"The sharding constraint {jc.describe(eqn)}"
        layout = _asked_layout(what, _wanted_sharding(eqn), eqn.outvars[0], mesh)
        return (Strategy((layout,), (layout,)),)
    typed = [jc.explicit_sharding(v) for v in eqn.outvars]
    wanted = [
        None if sharding is None else _asked_layout(f"The type of {jc.describe(eqn)}", sharding, v, mesh)
        for sharding, v in zip(typed, eqn.outvars, strict=True)
    ]
    if all(layout is None for layout in wanted):
        return every
    kept = tuple(s for s in every if all(w is None or r.dims == w.dims for r, w in zip(s.results, wanted, strict=True)))
    # Where no rule of ours splits so, the next constraint still holds.
    return kept or every


def _asked_layout(what: str, sharding: NamedSharding, v: Any, mesh: LogicalMesh) -> Layout:
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True))
    used = {name: sizes[name] for entry in sharding.spec for name in spec_axes(entry)}
    planned = matched_axes(used, sizes, mesh)
    if planned is None:
        raise InvalidArgument(
            f"{what} is over the axes {used} of a mesh {sizes}; the planned mesh "
            f"is {dict(zip(mesh.axis_names, mesh.shape, strict=True))}, whose axes are not theirs by name, nor by size "
            "and place. Give mesh_shape and axis_names of that mesh, or ignore_user_shardings=True."
        )
    entries = [tuple(name for axis in spec_axes(entry) for name in planned[axis]) for entry in sharding.spec]
    shape: tuple[int, ...] = tuple(getattr(v.aval, "shape", ()))
    return layout_from_user(what, PartitionSpec(*entries), shape, mesh)


def matched_axes(
    used: Mapping[str, int], sizes: Mapping[str, int], mesh: LogicalMesh
) -> dict[str, tuple[str, ...]] | None:
    """Return the planned mesh axes that stand for the `used` axes of a user's mesh of these `sizes`.

    An axis stands for that of its name. If a name is missing, meshes of equal sizes match place by place, and a mesh
    of one axis over all devices is all axes of the planned one. None where nothing of that holds.
    """
    if used.keys() <= set(mesh.axis_names):
        return {name: (name,) for name in used}
    theirs = {name: size for name, size in sizes.items() if size > 1}
    mine = {name: size for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1}
    of_one = {name: () for name in sizes if name not in theirs}
    if tuple(theirs.values()) == tuple(mine.values()):
        return of_one | {name: (own,) for name, own in zip(theirs, mine, strict=True)}
    if tuple(theirs.values()) == (mesh.num_devices,):
        return of_one | dict.fromkeys(theirs, tuple(mine))
    return None
