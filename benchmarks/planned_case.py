"""Plan a model for a cluster by one method, and say how long a step takes there: no device is needed.

    Workload, Cluster, method  ->  Row

Methods, beside the search of everything:

    data         every device holds the state and computes on a part of the batch
    zero3        the same, the state divided (Rajbhandari et al. 2020)
    megatron     matrices divided within a host, the batch across hosts (Shoeybi et al. 2019)
    intra-only   any sharding on one mesh of all devices
    inter-only   a pipeline of stages of one device each

The batch goes through in microbatches: as many as the search over stages finds best, or `_ROWS` examples for every
device at a time, or as many fewer as it takes to fit into memory.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.options import Method
from benchmarks.models.sizes import closest
from benchmarks.models.workload import Workload
from benchmarks.weak_scaling_rows import Row, row_of

METHODS = ("auto", "data", "zero3", "megatron", "intra-only", "inter-only")
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

    Raises `InvalidArgument` for a method that there is not or that does not fit the model, and for a plan that was made
    for another cluster.
    """
    begin = time.perf_counter()
    name = closest("The method", method, METHODS) if isinstance(method, str) else f"plan of {method.method}"
    if method == "megatron":
        _megatron_pins(workload)  # to be refused before the step is traced
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=cluster)
    traced = step.trace(workload.abstract_state, workload.abstract_batch)
    planned, reason = _first_that_fits(traced, workload, cluster, method, num_microbatches)
    plan_time_s = time.perf_counter() - begin
    if planned is None:
        why = f"out of memory: {reason}"
        return row_of(
            workload, gpus=cluster.num_devices, method=name, step_time_s=None, plan=why, plan_time_s=plan_time_s
        )
    step_time_s, peak_bytes = _simulated(planned, cluster)
    bounded = planned.plan.sharding or planned.plan.certificate
    return row_of(
        workload,
        gpus=cluster.num_devices,
        method=name,
        step_time_s=step_time_s,
        peak_bytes=peak_bytes,
        plan_time_s=plan_time_s,
        lower_bound_s=None if bounded is None else bounded.lower_bound_s,
        plan=summary(planned.plan),
    )


def summary(plan: autopar.Plan) -> str:
    """The decisions of a plan that go into one line, like "2 stages x 64 microbatches, 1f1b: data=1 model=4 (x2)"."""
    shapes = Counter(" ".join(f"{axis}={size}" for axis, size in zip(m.axis_names, m.shape)) for m in plan.meshes)
    meshes = ", ".join(shape if count == 1 else f"{shape} (x{count})" for shape, count in shapes.items())
    schedule = f", {plan.schedule}" if plan.num_stages > 1 else ""
    parts = [(plan.num_stages, "stage"), (plan.num_microbatches, "microbatch")]
    words = [f"{count} {noun if count == 1 else noun + ('es' if noun.endswith('h') else 's')}" for count, noun in parts]
    return f"{' x '.join(words)}{schedule}: {meshes}"


def method_on(name: str, workload: Workload, cluster: autopar.Cluster, num_microbatches: int | None) -> Method:
    """The search that a method is, in so many microbatches; None leaves their number to the search."""
    count = cluster.num_devices
    options: dict[str, Any] = {"num_microbatches": num_microbatches, "batch_statistics": workload.batch_statistics}
    if name == "zero3":
        return autopar.Zero(stage=3, **options)
    options["remat"] = False  # The models say themselves what is computed again.
    match name:
        case "auto":
            return autopar.Auto(**options)
        case "inter-only":
            return autopar.Auto(num_stages=count, mesh_shape=(1,), **options)
        case "intra-only":
            return autopar.Auto(num_stages=1, **options)
        case "data":
            whole = {r"^state/": PartitionSpec()}
            return autopar.Auto(num_stages=1, mesh_shape=(count,), axis_names=("data",), pins=whole, **options)
        case "megatron":
            inside = math.gcd(count, cluster.machine.devices_per_host)
            return autopar.Auto(
                num_stages=1, mesh_shape=(count // inside, inside), pins=_megatron_pins(workload), **options
            )
        case _:
            raise AssertionError(name)


def _first_that_fits(
    traced: autopar.Traced,
    workload: Workload,
    cluster: autopar.Cluster,
    method: str | autopar.Plan,
    num_microbatches: int | None,
) -> tuple[autopar.Planned | None, str]:
    """The plan with the fewest microbatches that fits into memory, or why there is none."""
    if isinstance(method, autopar.Plan):
        return traced.plan(method), ""
    counts: list[int | None] = [num_microbatches]
    if num_microbatches is None:
        # The search over stages chooses for itself, and so it does for large steps on one mesh.
        searched = method != "zero3" and cluster.num_devices > 1
        counts = [*([None] if searched else []), *_counts(workload, cluster.num_devices)]
    reason = f"the batch of {workload.batch_size} has not an example for each of {cluster.num_devices} devices"
    for count in counts:
        try:
            return traced.plan(method_on(method, workload, cluster, count)), ""
        except MemoryTooSmall as error:
            reason = str(error)
    return None, reason


def _counts(workload: Workload, num_devices: int) -> Iterator[int]:
    """Numbers of microbatches, from few to many, of which each has an example for every device."""
    rows = _ROWS
    while rows:
        if workload.batch_size % (rows * num_devices) == 0:
            yield workload.batch_size // (rows * num_devices)
        rows //= 2


def _megatron_pins(workload: Workload) -> Mapping[str, PartitionSpec]:
    paths = [f"/params/{jax.tree_util.keystr(path, simple=True, separator='/')}" for path, _ in _leaves(workload)]
    if any(not any(re.search(pattern, path) for pattern in _MEGATRON) for path in paths):
        raise InvalidArgument(
            f"The method 'megatron' divides the matrices of a dense transformer, and {workload.name} has others. "
            "Choose another method, such as intra-only."
        )
    return {pattern: spec for pattern, spec in _MEGATRON.items() if any(re.search(pattern, path) for path in paths)}


def _leaves(workload: Workload) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(workload.params)


def _simulated(planned: autopar.Planned, cluster: autopar.Cluster) -> tuple[float, float]:
    """Seconds of a step, and bytes of the device that holds the most."""
    sharding = planned.plan.sharding
    if sharding is None:
        report = planned.simulate(cluster)
        return report.step_time_s, report.peak_bytes
    # One program on one mesh: the search has priced it as it runs.
    if sharding.figures != cluster.machine.name or planned.plan.num_devices != cluster.num_devices:
        raise InvalidArgument(
            f"The plan was made for {planned.plan.num_devices} devices of {sharding.figures!r}, the cluster has "
            f"{cluster.num_devices} of {cluster.machine.name!r}. Give the cluster that it was made for."
        )
    return sharding.step_time_s, sharding.peak_bytes
