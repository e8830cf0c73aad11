"""The compiler on one screen.

    trace_step   step         -> Trace        its jaxpr, normalised; its batch and its state
    make_plan    Trace        -> Plan         every decision: by hand, by degrees of parallelism, or by search
    cut_step     Trace, Plan  -> StageGraph   the planned stages, one jaxpr per task
    lower_step   Trace, Plan  -> Program      what each mesh runs, sends, receives and frees; verified

What comes before the plan decides; what comes after it only carries out. A plan of one stage in one executable has
nothing to cut: `lower_step` takes the traced step as it is on one device, or with the collectives that the plan says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from autopar.compiler.frontend.scopes import all_scopes
from autopar.compiler.frontend.trace import Trace, trace_step
from autopar.compiler.frontend.training_loops import unroll_training_loops
from autopar.compiler.lowering.guard_callbacks import guard_callbacks
from autopar.compiler.lowering.lower import lower
from autopar.compiler.lowering.single_program import single_program
from autopar.compiler.lowering.user_constraints import (
    check_callbacks,
    check_manual_meshes,
    check_results_on_host,
    check_state_on_host,
)
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.prepare import prepare
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.by_hand.follow import Followed, plan_following
from autopar.compiler.planning.by_hand.manual import plan_by_hand
from autopar.compiler.planning.by_hand.megatron import plan_megatron
from autopar.compiler.planning.demands.scope_demands import check_scopes, named_stages
from autopar.compiler.planning.one_mesh import plan_by_search
from autopar.compiler.planning.plan_cache import kept_plan
from autopar.compiler.planning.plan_checks import check_machines, check_plan, with_machines
from autopar.compiler.planning.search.best_first import Simulated
from autopar.compiler.planning.search.offload import search_with_offload
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.planning.state_bound import refuse_too_large_a_state
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.methods import (
    Auto,
    DataParallel,
    ExpertParallel,
    Megatron,
    Method,
    PipelineParallel,
    ShardParallel,
    TensorParallel,
    Zero,
)
from autopar.progress import collector_paused

__all__ = ["check_plan", "cut_step", "lower_step", "make_plan", "trace_step"]


@collector_paused()
def make_plan(
    trace: Trace,
    method: Method | Plan | Followed,
    *,
    cluster: Cluster,
    simulated: Simulated | None = None,
    checked: bool = False,
    cache_directory: Path | None = None,
) -> Plan:
    """Return the plan of a method for the devices of a cluster, or the given plan if it fits.

    In which type gradients are summed is what the trace says: see `Trace.reducing_in`.
    `Auto` compares plans by the seconds that they are simulated to take. Plans, and what searches solved on the way,
    are kept in `cache_directory`, if one is given: then `simulated` must be nothing but the simulation of a plan.
    Searches use all of a memory budget if the plan is `checked` by compiling it.
    """
    check_manual_meshes(trace)
    check_results_on_host(trace)
    check_scopes(trace, method, cluster.num_devices)
    match method:
        case Plan():
            check_plan(method, trace, num_devices=cluster.num_devices)
            check_machines(method, cluster)
            return method
        case Followed():
            return plan_following(trace, method, cluster=cluster, cache_directory=cache_directory)
        case _:
            make = partial(_plan_of_method, trace, method, cluster, simulated, checked, cache_directory)
            return kept_plan(trace, method, cluster, checked=checked, directory=cache_directory, make=make)


def _plan_of_method(
    trace: Trace,
    method: Method,
    cluster: Cluster,
    simulated: Simulated | None,
    checked: bool,
    cache_directory: Path | None,
) -> Plan:
    match method:
        case DataParallel() | ShardParallel() | PipelineParallel():
            plan = plan_by_hand(trace, method, cluster=cluster, cache_directory=cache_directory)
        case Megatron():
            plan = plan_megatron(trace, method, cluster=cluster, cache_directory=cache_directory)
        case Auto():
            assert simulated is not None, "a search compares plans by their simulation"
            problem = StageProblem(
                trace=trace,
                method=method,
                hardware=cluster,
                cache_directory=cache_directory,
                checked=checked,
                named_stages=named_stages(trace, method, cluster),
            )
            _check_kinds(problem)
            plan = search_with_offload(problem, simulated)
        case Zero() | TensorParallel() | ExpertParallel():
            refuse_too_large_a_state(trace, method.memory, cluster)
            plan = plan_by_search(
                trace,
                method,
                num_devices=cluster.num_devices,
                machine=cluster.machine.when_busy(min(cluster.num_devices, cluster.machine.devices_per_host)),
                checked=checked,
                cache_directory=cache_directory,
            )
    return with_machines(replace(plan, reduce_dtype=trace.reduce_dtype), cluster)


def cut_step(trace: Trace, plan: Plan) -> StageGraph:
    """Return the stages of a plan as programs of their own."""
    prepared = prepare(
        unroll_training_loops(trace),
        num_layers=plan.num_layers,
        num_microbatches=plan.num_microbatches,
        loop_pieces=plan.loop_pieces,
        batch_statistics=plan.batch_statistics,
        random=plan.random,
    )
    return cut_stages(prepared, StageCut.of(plan))


@collector_paused()
def lower_step(trace: Trace, plan: Plan, *, on_paper: bool = False, graph: StageGraph | None = None) -> Program:
    """Return the program of a plan, verified. Raises `Unsupported` for callbacks that it could not keep in order.

    `on_paper` it is for who simulates: what executables of several devices compute is not written down, and the program
    is verified when it is lowered to run. `graph` is what `cut_step` gives, for who has it.
    """
    check_callbacks(trace, plan)
    check_state_on_host(trace, plan)
    if plan.is_single_program:
        program = single_program(trace, plan, on_paper=on_paper)
    else:
        graph, donated = graph or cut_step(trace, plan), trace.donated_inputs
        rows = trace.num_rows if trace.batch_inputs else 1
        program = lower(graph, plan, num_rows=rows, donated_leaves=donated, on_paper=on_paper)
    if on_paper:
        return program
    program.verify()
    return program if plan.num_devices == 1 else guard_callbacks(program)


def _check_kinds(problem: StageProblem) -> None:
    """Raise `InvalidArgument` for a mesh, stages or scopes that the kinds of parallelism of a method do not allow."""
    method, stages = problem.method, problem.num_stages or len(problem.named_stages) or 1
    if method.kinds is None:
        return
    scopes = () if method.ignore_user_shardings else all_scopes(problem.trace.jaxpr)
    if stages > 1 and not method.allows_stages:
        what = f"mesh_shape {method.mesh_shape} makes {stages} stages of {problem.num_devices} devices"
        if problem.named_stages:
            what = f"{problem.trace.name} names the stages {', '.join(map(str, problem.named_stages))}"
        raise InvalidArgument(
            f'{what}, and kinds {method.kinds} has no "pipeline", without which there is one stage. Add "pipeline" to '
            "kinds, or let all devices be one mesh."
        )
    for scope in scopes:
        needed = {"split": ("tensor", "expert", "sequence"), "replicate": ("data",)}.get(scope.kind, ())
        asks = scope.kind == "split" or (scope.devices or 1) > 1
        if needed and asks and not set(needed) & set(method.kinds):
            raise InvalidArgument(
                f"{problem.trace.name} has {scope}, which needs {' or '.join(map(repr, needed))} among the kinds, and "
                f"these are {method.kinds}. Add it, leave the scope out, or give ignore_user_shardings=True."
            )
