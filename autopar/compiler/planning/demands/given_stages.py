"""Find out where the stages of a user lie: the devices of each, and which layers of the model it has.

    PipelineParallel, Cluster       ->  MeshPlan, ...             groups of equal size, or the submeshes that are given
    PipelineParallel, PreparedStep  ->  cuts, (start, stop), ...  even runs of layers, or those that are given

Layers are given by their numbers in the model as its author counts them: what stands before the first and after the
last goes with these. In ranges that end two later, it counts as a layer each, as in the plans that a search makes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autopar.compiler.frontend.layer_boundaries import is_layer_boundary
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, place_submeshes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.layers import (
    count_layers,
    count_marked_layers,
    cut_forward,
    group_layers,
    has_own_layers,
    layer_cuts,
    numbered_layers,
)
from autopar.compiler.pipeline.phases import Phases
from autopar.compiler.pipeline.prepare import prepare
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import MeshPlan
from autopar.methods import PipelineParallel

Runs = list[tuple[int, int]]


def stage_meshes(stages: PipelineParallel, cluster: Cluster) -> tuple[MeshPlan, ...]:
    """Return the meshes of stages without layouts; raise `InvalidArgument` for what the cluster has no place for."""
    if stages.submeshes is not None:
        devices = _placed([Submesh(num_hosts=h, devices_per_host=d) for h, d in stages.submeshes], cluster)
    elif stages.mesh_shapes is not None:
        devices = _in_order([math.prod(shape) for shape in stages.mesh_shapes], cluster)
    else:
        each = _equal_part(stages, cluster.num_devices)
        devices = [tuple(range(mesh * each, (mesh + 1) * each)) for mesh in range(stages.num_meshes)]
    shapes = stages.mesh_shapes or [stages.mesh_shape or (len(own),) for own in devices]
    for own, shape in zip(devices, shapes, strict=True):
        if math.prod(shape) != len(own):
            raise InvalidArgument(
                f"mesh_shape {shape} has {math.prod(shape)} devices, and a submesh has {len(own)}. Give mesh_shapes, "
                "one for each of the submeshes, with as many devices."
            )
    return tuple(
        MeshPlan(devices=own, shape=shape, axis_names=stages.mesh_axes)
        for own, shape in zip(devices, shapes, strict=True)
    )


def _equal_part(stages: PipelineParallel, num_devices: int) -> int:
    """Return the devices of each of so many equal meshes."""
    count = stages.num_meshes
    if num_devices % count:
        raise InvalidArgument(
            f"{num_devices} devices do not divide into {count} stages of equal size. Use a number of "
            f"stages that divides {num_devices}, or pass `devices=` with a multiple of {count}."
        )
    each = num_devices // count
    shape = stages.mesh_shape or (each,)
    size = math.prod(shape)
    if size != each and count == 1:
        raise InvalidArgument(
            f"mesh_shape {shape} needs {size} devices, there are {each}. Give a shape whose product is {each}, or pass "
            f"`devices=` with {size} of them."
        )
    if size != each:
        raise InvalidArgument(
            f"mesh_shape {shape} needs {size} devices per stage, each of the {count} stages has {each}. "
            f"Give a shape whose product is {each}, or another number of stages."
        )
    return each


def _in_order(sizes: Sequence[int], cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the devices of meshes one after another."""
    if sum(sizes) > cluster.num_devices:
        raise InvalidArgument(
            f"mesh_shapes have {' + '.join(map(str, sizes))} = {sum(sizes)} devices, there are {cluster.num_devices}. "
            f"Give shapes of at most {cluster.num_devices} devices together."
        )
    starts = itertools.accumulate(sizes, initial=0)
    return [tuple(range(start, start + size)) for start, size in zip(starts, sizes)]


def _placed(submeshes: Sequence[Submesh], cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the devices of submeshes, each whole hosts or a part of one."""
    if cluster.is_mixed:
        raise InvalidArgument(
            f"submeshes are hosts of one kind, and the cluster has {cluster}. Give mesh_shapes without submeshes: they "
            "take the devices in order, each of one kind."
        )
    whole = cluster_shape(cluster.num_devices, cluster.machine.devices_per_host)
    hosts = f"{whole.num_hosts} host{'s' * (whole.num_hosts > 1)} of {whole.devices_per_host} devices"
    given = ", ".join(f"({each.num_hosts}, {each.devices_per_host})" for each in submeshes)
    for each in submeshes:
        if each.devices_per_host > whole.devices_per_host or (
            each.num_hosts > 1 and each.devices_per_host < whole.devices_per_host
        ):
            raise InvalidArgument(
                f"The submesh ({each.num_hosts}, {each.devices_per_host}) is neither whole hosts nor a part of one: "
                f"there are {hosts}. Give (1, n) with n up to {whole.devices_per_host}, or (n, "
                f"{whole.devices_per_host})."
            )
    devices = place_submeshes(submeshes, whole)
    if devices is None:
        needed = sum(each.num_devices for each in submeshes)
        raise InvalidArgument(
            f"The submeshes {given} have {needed} devices and do not fit: there are {hosts}. Give smaller ones, "
            "or a larger cluster."
        )
    return list(devices)


def count_given_layers(trace: Trace, stages: PipelineParallel) -> int:
    """Return the number of layers to cut: that is given, or that the model has, or else one for each stage.

    Raises `InvalidArgument` if the model has fewer layers than there are stages, or others than those of the stages.
    """
    marked = any(is_layer_boundary(eqn) for eqn in jc.all_equations(trace.jaxpr))
    if stages.runs is None and (stages.layers is not None or not marked):
        return stages.num_layers
    options = {"batch_statistics": stages.batch_statistics, "random": stages.random}
    phases = prepare(trace, num_layers=1, num_microbatches=1, loop_pieces=1, **options).phases
    if stages.runs is not None:
        return _layers_of_runs(trace.name, phases, stages.num_layers)
    return count_layers(phases, stages.num_virtual_stages) if count_marked_layers(phases) else stages.num_layers


def _layers_of_runs(name: str, phases: Phases, num_given: int) -> int:
    """Return the number of layers to cut for runs up to `num_given`: those of the model if it has some of its own."""
    if not has_own_layers(phases):
        return num_given
    every = count_layers(phases)
    numbered = len(numbered_layers(phases, every))
    if num_given not in (every, numbered):
        or_every = f", or {every} with what stands before the first and after the last" * (every > numbered)
        raise InvalidArgument(
            f"The layers of the stages end at {num_given}, and {name} has {numbered} layers{or_every}. Let the last "
            f"stage end at {numbered}."
        )
    return every


def stage_layers(phases: Phases, stages: PipelineParallel, num_layers: int) -> tuple[tuple[int, ...], Runs]:
    """Return where the layers begin, and the layers of every stage."""
    if stages.num_virtual_stages == 1:
        cuts = layer_cuts(phases, num_layers)
        return cuts, [(0, len(cuts) + 1)]
    if stages.runs is None:
        anywhere = stages.layers is None and not count_marked_layers(phases)
        cuts = (cut_forward if anywhere else layer_cuts)(phases, num_layers)
        return cuts, group_layers(phases, cuts, stages.num_virtual_stages)
    cuts = layer_cuts(phases, num_layers)
    begins = range(num_layers) if stages.num_layers == num_layers else numbered_layers(phases, num_layers)
    starts = [*begins, num_layers]
    return cuts, [(starts[start], starts[stop]) for start, stop in stages.runs]
