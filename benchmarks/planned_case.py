"""Plan a model for a cluster by one method, and say how long a step takes there: no device is needed.

    Workload, Cluster, method  ->  Row

Methods, beside the search of everything:

    data         every device holds the state and computes on a part of the batch
    zero3        the same, the state divided (Rajbhandari et al. 2020)
    megatron     matrices divided within a host, the batch across hosts (Shoeybi et al. 2019)
    intra-only   any sharding on one mesh of all devices
    inter-only   a pipeline of stages of one device each

The batch goes through in microbatches: `_ROWS` examples for every device at a time, or as many fewer as it takes to fit
into memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping

from jax.sharding import PartitionSpec

import autopar
from autopar.errors import InvalidArgument, MemoryTooSmall, Unsupported
from benchmarks.models.workload import Workload
from benchmarks.weak_scaling_rows import Row, row_of

METHODS = ("auto", "data", "zero3", "megatron", "intra-only", "inter-only")
DEFAULT_METHOD = "intra-only"
_NOT_THERE = ("auto", "inter-only")
"""What needs the search over stages, or its simulation."""
_ROWS = 8
_IN, _OUT = PartitionSpec("model", None), PartitionSpec(None, "model")
_MEGATRON: Mapping[str, PartitionSpec] = {
    r"/(params|master|mu|nu)/.*attention/(query|key|value)$": PartitionSpec(None, "model", None),
    r"/(params|master|mu|nu)/.*attention/out$": PartitionSpec("model", None, None),
    r"/(params|master|mu|nu)/.*mlp/up$": _OUT,
    r"/(params|master|mu|nu)/.*mlp/up_bias$": PartitionSpec("model"),
    r"/(params|master|mu|nu)/.*mlp/down$": _IN,
    r"/(params|master|mu|nu)/embedding$": _IN,
    r"/(params|master|mu|nu)/head$": _OUT,
    r"/(params|master|mu|nu)/(.*norm/(gain|bias)|.*mlp/down_bias|positions)$": PartitionSpec(),
}
"""Where Megatron-LM puts the parameters of a transformer of `benchmarks.models.transformer`, by their paths."""


def planned_row(
    workload: Workload, cluster: autopar.Cluster, method: str | autopar.Plan, *, num_microbatches: int | None = None
) -> Row:
    """The modelled step of a model on a cluster, by a method of `METHODS` or by a plan.

    Raises `Unsupported` for a method that cannot be simulated, `InvalidArgument` for one that does not fit the model.
    """
    begin = time.perf_counter()
    if isinstance(method, str):
        check_method(method)
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=cluster)
    traced = step.trace(workload.abstract_state, workload.abstract_batch)
    plan, reason = _first_that_fits(traced, workload, cluster, method, num_microbatches)
    plan_time_s = time.perf_counter() - begin
    name = method if isinstance(method, str) else f"plan of {method.method}"
    if plan is None:
        why = f"out of memory: {reason}"
        return row_of(
            workload, gpus=cluster.num_devices, method=name, step_time_s=None, plan=why, plan_time_s=plan_time_s
        )
    sharding = _sharding_for(plan, cluster)
    return row_of(
        workload,
        gpus=cluster.num_devices,
        method=name,
        step_time_s=sharding.step_time_s,
        peak_bytes=sharding.peak_bytes,
        plan_time_s=plan_time_s,
        lower_bound_s=sharding.lower_bound_s,
        plan=summary(plan),
    )


def check_method(name: str) -> None:
    """Raise `InvalidArgument` for a method that there is not, `Unsupported` for one that cannot be simulated yet."""
    closest("The method", name, METHODS)
    if name in _NOT_THERE:
        there = ", ".join(each for each in METHODS if each not in _NOT_THERE)
        raise Unsupported(
            f"The method {name!r} makes pipelines, and a pipeline cannot be planned and simulated for a cluster yet. "
            f"Choose one of {there}."
        )


def summary(plan: autopar.Plan) -> str:
    """The decisions of a plan that go into one line."""
    meshes = ", ".join(
        " ".join(f"{axis}={size}" for axis, size in zip(mesh.axis_names, mesh.shape)) for mesh in plan.meshes
    )
    return f"{plan.num_stages} stages of {plan.num_microbatches} microbatches on {meshes}"


def method_on(name: str, workload: Workload, cluster: autopar.Cluster, num_microbatches: int) -> autopar.Auto:
    """The search that a method of one mesh is."""
    count = cluster.num_devices
    if name == "intra-only":
        return autopar.Auto(num_stages=1, num_microbatches=num_microbatches)
    if name == "megatron":
        inside = math.gcd(count, cluster.machine.devices_per_host)
        return autopar.Auto(
            mesh_shape=(count // inside, inside), num_microbatches=num_microbatches, pins=_megatron_pins(workload)
        )
    return autopar.Auto(
        mesh_shape=(count,),
        axis_names=("data",),
        num_microbatches=num_microbatches,
        pins={r"^state/": PartitionSpec()},
    )
