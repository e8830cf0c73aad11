"""Keep what the scopes in a model ask: which devices share its examples, and which the work on each example.

Of every strategy of an equation, the mesh axes that split dimensions with examples are those of replicas, all others
that split anything are those of parts:

    scope                          strategies that are kept
    replicate                      no parts
    replicate(devices=r)           no parts, r replicas
    split                          products with parameters in parts
    split(axis=a, devices=p)       p parts along the axis a, products with parameters always, others where it divides
    both                           both
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autopar.compiler.frontend.scopes import Demand, ModelScope, all_scopes, demand_of, meshes_of, stages_of
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.inter_op.submeshes import submesh_choices
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import PRODUCTS, REARRANGEMENTS, REMAT, WIDENING
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.methods import (
    Auto,
    DataParallel,
    ExpertParallel,
    Megatron,
    PipelineParallel,
    TensorParallel,
    Zero,
)


def within_scopes(eqn: jc.JaxprEqn, every: tuple[Strategy, ...], mesh: LogicalMesh) -> tuple[Strategy, ...]:
    """Return the strategies of an equation that keep the scopes around it.

    Raises `InvalidArgument`, with the scope, where the mesh has not the devices for it, or a product cannot be divided.
    """
    demand = demand_of(eqn)
    if demand is None:
        return every
    check_mesh(demand, mesh)
    allowed = _allowed_parts(demand, mesh)
    kept = tuple(s for s in every if _parts(s, demand) in allowed) or every[:1]
    replicas, parts = demand.replicas, demand.parts
    if replicas:
        kept = tuple(s for s in kept if _devices(_replicas(s, demand), mesh) == replicas) or kept
    if parts is None or not _has_parameters(eqn, demand):
        return kept
    divided = tuple(s for s in kept if (n := _devices(_parts(s, demand), mesh)) == parts or (parts == 0 and n > 1))
    if not divided:
        wanted = f"{parts} devices" if parts else "any devices"
        raise InvalidArgument(
            f"{demand.scope} asks for work divided over {wanted} of a mesh {_sizes(mesh)}, and no dimension of "
            f"{jc.describe(eqn)} beside the examples divides so. Make its features a multiple of the devices, give "
            "other `devices`, or end the scope before it."
        )
    return divided


def scopes_kept(trace: Trace, method: object) -> tuple[ModelScope, ...]:
    """Return the scopes of a step that a method keeps, in their order."""
    scopes = () if getattr(method, "ignore_user_shardings", False) else all_scopes(trace.jaxpr)
    match method:
        case Megatron() | TensorParallel() | ExpertParallel():
            return ()
        case DataParallel() | Zero():
            return tuple(scope for scope in scopes if scope.kind == "replicate" and scope.devices is None)
        case PipelineParallel():
            return tuple(
                each
                for each in scopes
                if each.kind in ("replicate", "stage") and each.devices is None and each.machine is None
            )
        case _:  # a search; or a plan, or one that follows a plan: its scopes held when it was made
            return scopes


def check_scopes(trace: Trace, method: object, num_devices: int) -> None:
    """Raise `InvalidArgument` for scopes that so many devices cannot keep, or a method, which decides by itself."""
    kept = scopes_kept(trace, method)
    lost = [scope for scope in all_scopes(trace.jaxpr) if scope not in kept]
    if lost and not getattr(method, "ignore_user_shardings", False):
        raise InvalidArgument(
            f"{trace.name} has {lost[0]}, which {type(method).__name__} cannot keep: it decides by itself how work is "
            "divided. Use Auto(), which obeys scopes, leave the scope out, or give ignore_user_shardings=True."
        )
    for eqn in jc.all_equations(trace.jaxpr) if kept else ():
        demand = demand_of(eqn)
        if demand is not None and num_devices % least_devices([demand]) and not _is_vacuous(demand, num_devices):
            raise InvalidArgument(
                f"{demand.scope} asks for {_asked(demand)}, and there are {num_devices} devices, which does not "
                "divide. Give other `devices`, or leave them out."
            )


def named_stages(trace: Trace, method: Auto, cluster: Cluster) -> tuple[ModelScope, ...]:
    """Return the stages that a step names and `Auto` is to plan: two or more, or none.

    Raises `InvalidArgument` for numbers that the method or the devices contradict.
    """
    stages = () if method.ignore_user_shardings else stages_of(trace.jaxpr)
    if not stages:
        return ()
    _check_colocation(trace, method, stages)
    if len(set(meshes_of(stages))) == 1:
        raise InvalidArgument(
            f"{trace.name} names one stage, {stages[0]}, and a pipeline has two or more. Name the other parts of the "
            "model as well, or leave the scope out."
        )
    names = ", ".join(str(stage.name) for stage in stages)
    for option, number in (("num_stages", method.num_stages), ("layers", method.layers)):
        if number not in (None, len(stages)):
            raise InvalidArgument(
                f"{trace.name} names {len(stages)} stages ({names}), and {option} is {number}. Leave {option} out, or "
                "name as many stages."
            )
    num_devices, num_meshes = cluster.num_devices, len(set(meshes_of(stages)))
    if method.mesh_shape is not None and num_devices != num_meshes * math.prod(method.mesh_shape):
        raise InvalidArgument(
            f"{trace.name} names {len(stages)} stages ({names}) on {num_meshes} meshes, and {num_meshes} of the "
            f"mesh_shape {method.mesh_shape} are not {num_devices} devices. Leave mesh_shape out, or give that of a "
            "stage."
        )
    stages_alone = [stage for stage in stages if stage.kind == "stage"]
    for stage in stages_alone:
        choices = [submesh_choices(each.num_devices, each.machine.devices_per_host) for each in _groups(cluster, stage)]
        sizes = sorted({submesh.num_devices for each in choices for submesh in each})
        if stage.devices is not None and stage.devices not in sizes:
            raise InvalidArgument(
                f"{stage} asks for {stage.devices} devices. A stage gets equal parts of a host, or whole hosts: give "
                f"it one of {', '.join(map(str, sizes))}."
            )
    _check_kinds_of_stages(stages_alone, cluster)
    given = [stage.devices for stage in stages if stage.devices is not None]
    rest = len(stages_alone) - len(given)
    if sum(given) + rest > num_devices or (not rest and sum(given) != num_devices):
        raise InvalidArgument(
            f"The stages of {trace.name} ({names}) ask for {sum(given)} devices, and {rest} of them for any number; "
            f"there are {num_devices}. Give other `devices` to them, or leave one open, which gets what is left."
        )
    return stages


def _check_colocation(trace: Trace, method: Auto, stages: Sequence[ModelScope]) -> None:
    """Raise `InvalidArgument` where a part of the model is to be on the devices of a stage that is not there."""
    named = [stage.name for stage in stages if stage.kind == "stage"]
    for stage in stages:
        if stage.kind == "stage":
            continue
        if stage.place not in named:
            raise InvalidArgument(
                f"{stage} asks for the devices of the stage {stage.place!r}, and the stages of {trace.name} are "
                f"{', '.join(map(repr, named)) or 'none'}. Name one of them, or write autopar.stage({stage.place!r})."
            )
        if method.num_stages is not None:
            raise InvalidArgument(
                f"{stage} shares the devices of autopar.stage({stage.place!r}), and num_stages={method.num_stages} "
                "asks for stages of equal devices of their own. Leave num_stages out, or take the scope away."
            )


def is_of_kind(group: Cluster, stage: ModelScope) -> bool:
    """Return whether the devices of a group are of the kind that a stage asks for, if it asks for one."""
    return stage.machine is None or stage.machine.lower() in {name.lower() for name in _kinds(group)}


def _kinds(group: Cluster) -> tuple[str, ...]:
    """Return the names by which the devices of a group are known: of their kind and of their machine."""
    return tuple(dict.fromkeys((group.kind, group.machine.kind, group.machine.name)))


def _groups(cluster: Cluster, stage: ModelScope) -> list[Cluster]:
    """Return the groups whose devices a stage may get."""
    groups = [group for group in cluster.groups if is_of_kind(group, stage)]
    if not groups:
        there = "; ".join(f"{' or '.join(map(repr, _kinds(g)))}, of {g.num_devices} devices" for g in cluster.groups)
        raise InvalidArgument(
            f"{stage} asks for devices of the kind {stage.machine!r}, and the kinds of the cluster are {there}. Give "
            "one of these, or leave the kind out."
        )
    return groups


def _check_kinds_of_stages(stages: Sequence[ModelScope], cluster: Cluster) -> None:
    """Raise `InvalidArgument` where stages ask for more devices of a kind than there are, each for one at least."""
    for stage in stages:
        groups = _groups(cluster, stage)
        there = sum(group.num_devices for group in groups)
        same = [each for each in stages if each.machine is not None and _groups(cluster, each) == groups]
        asked = sum(each.devices or 1 for each in same)
        if asked > there:
            raise InvalidArgument(
                f"{', '.join(map(str, same))} ask for {asked} devices or more of the kind {stage.machine!r}, and there "
                f"are {there}. Give them fewer `devices`, or leave the kind of one out."
            )


def parameters_in_parts(closed: Any) -> dict[int, Demand]:
    """Return by number the inputs that a product inside of a `split` reads as its parameters, and what that asks."""
    return {number: demand for number, demand in parameter_demands(closed) if demand.parts is not None}


def parameter_demands(closed: Any) -> list[tuple[int, Demand]]:
    """Return the number of an input and what is asked, for each product inside of a scope that has it as parameters."""
    jaxpr, _ = jc.open_jaxpr(closed)
    source: dict[jc.Var, int] = {v: number for number, v in enumerate(jaxpr.invars)}
    found: list[tuple[int, Demand]] = []
    for eqn in jaxpr.eqns:
        demand, name = demand_of(eqn), eqn.primitive.name
        if name in _UNCHANGED and isinstance(eqn.invars[0], jc.Var) and eqn.invars[0] in source:
            source[eqn.outvars[0]] = source[eqn.invars[0]]
        elif name in REMAT | {"scan"}:
            read = ((eqn.invars[number], each) for number, each in parameter_demands(jp.bodies_of(eqn)[0]))
            found += [(source[v], each) for v, each in read if isinstance(v, jc.Var) and v in source]
        elif demand is not None and _has_parameters(eqn, demand):
            whole = (v for v, examples in zip(eqn.invars, demand.examples) if not examples and isinstance(v, jc.Var))
            found += [(source[v], demand) for v in whole if v in source]
    return found


def layouts_in_parts(aval: Any, demand: Demand, mesh: LogicalMesh) -> tuple[Layout, ...] | None:
    """Return the layouts in which every device holds its part of a parameter; None if any will do, or none can."""
    if below_split_size(aval):
        return None
    allowed = _allowed_parts(demand, mesh) - {frozenset()}
    every = even_layouts(tuple(aval.shape), mesh)
    return tuple(each for each in every if any(axes <= frozenset(used_axes(each)) for axes in allowed)) or None


def check_mesh(demand: Demand, mesh: LogicalMesh) -> None:
    """Raise `InvalidArgument` if a mesh has not the axes that a scope asks for."""
    if demand.axis is not None and demand.axis not in mesh.axis_names:
        raise InvalidArgument(
            f"{demand.scope} names the mesh axis {demand.axis!r}; the axes are {', '.join(mesh.axis_names)}. Name one "
            "of them, give axis_names to the method, or leave the axis out."
        )
    if not any(_holds(demand, mesh, replicas, parts) for replicas, parts in _disjoint_axes(mesh)):
        raise InvalidArgument(
            f"{demand.scope} asks for {_asked(demand)}, and a mesh {_sizes(mesh)} has no axes for that. Give a "
            "mesh_shape whose sizes have these products, or other `devices`."
        )


def _asked(demand: Demand) -> str:
    asked = [f"{n} replicas" for n in (demand.replicas,) if n]
    asked += [f"{n or 'several'} devices for each example" for n in (demand.parts,) if n is not None]
    return " and ".join(asked)


def _is_vacuous(demand: Demand, num_devices: int) -> bool:
    """True where one device runs the step and no number was asked for: there is nothing to divide."""
    return num_devices == 1 and not demand.replicas and not demand.parts


_UNCHANGED = REARRANGEMENTS | {"convert_element_type", WIDENING}
"""Primitives whose result is still the parameter that they read."""


def least_devices(demands: Iterable[Demand | None]) -> int:
    """Return what the devices of a stage must be a multiple of for its scopes to hold."""
    each = {((d.replicas or 1), 1 if d.parts is None else (d.parts or 2)) for d in demands if d is not None}
    return math.lcm(*(replicas * parts for replicas, parts in each))


def _holds(demand: Demand, mesh: LogicalMesh, replicas: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    if demand.replicas and _devices(replicas, mesh) != demand.replicas:
        return False
    if demand.parts is None:
        return True
    count = _devices(parts, mesh)
    named = demand.axis is None or all(mesh.axis_names[axis] == demand.axis for axis in parts)
    return named and (count == demand.parts if demand.parts else count > 1)


def _disjoint_axes(mesh: LogicalMesh) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    axes = range(len(mesh.shape))
    for uses in itertools.product((0, 1, 2), repeat=len(mesh.shape)):
        yield tuple(a for a in axes if uses[a] == 1), tuple(a for a in axes if uses[a] == 2)


def _allowed_parts(demand: Demand, mesh: LogicalMesh) -> set[frozenset[int]]:
    """The sets of mesh axes that may divide the work on an example; none is always among them."""
    if demand.parts is None:
        return {frozenset()}
    sets = {frozenset(parts) for _, parts in _disjoint_axes(mesh)}
    named = {s for s in sets if demand.axis is None or all(mesh.axis_names[axis] == demand.axis for axis in s)}
    return {s for s in named if not s or not demand.parts or _devices(s, mesh) == demand.parts}


def _parts(strategy: Strategy, demand: Demand) -> frozenset[int]:
    """The mesh axes that split a dimension without examples."""
    return frozenset(axis for axis, carries in _splits(strategy, demand) if not carries)


def _replicas(strategy: Strategy, demand: Demand) -> frozenset[int]:
    """The mesh axes that split a dimension with examples."""
    return frozenset(axis for axis, carries in _splits(strategy, demand) if carries)


def _splits(strategy: Strategy, demand: Demand) -> Iterator[tuple[int, bool]]:
    for layout, examples in zip((*strategy.operands, *strategy.results), demand.examples, strict=True):
        for dimension, axes in enumerate(layout.dims):
            for axis in axes:
                yield axis, dimension in examples


def _has_parameters(eqn: jc.JaxprEqn, demand: Demand) -> bool:
    """True for a product of examples with something that has none."""
    operands = demand.examples[: len(eqn.invars)]
    return eqn.primitive.name in PRODUCTS and any(operands) and not all(operands)


def _devices(axes: Iterable[int], mesh: LogicalMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _sizes(mesh: LogicalMesh) -> dict[str, int]:
    return dict(zip(mesh.axis_names, mesh.shape, strict=True))
