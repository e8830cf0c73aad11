"""The program of a step whose every value has a planned layout: one jaxpr for one mesh, its collectives explicit.

Trace                     -> the step as one jaxpr, a loop over its microbatches inside
that, ShardingPlan        -> LocalBlock: what every device does
that                      -> the jaxpr to compile
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.frontend.training_loops import in_microbatches
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.cse import merge_common_subexpressions
from autopar.compiler.lowering.microbatch_loop import microbatch_loop
from autopar.compiler.pipeline.rematerialize import rematerialize
from autopar.compiler.sharding.layout import LogicalMesh, to_spec
from autopar.compiler.spmd.block_plan import BlockPlan, from_data
from autopar.compiler.spmd.emit import emit_spmd
from autopar.compiler.spmd.local_program import LocalBlock, Value, local_block
from autopar.errors import PlanMismatch
from autopar.ir.plan import MeshPlan, Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedStep:
    """A step on one mesh: what a device does, and the specs of its inputs and of its computed results."""

    whole: jc.ClosedJaxpr
    """The step as it is planned, before its collectives are written down."""
    mesh: LogicalMesh
    block: LocalBlock
    input_specs: tuple[PartitionSpec, ...]
    output_specs: tuple[PartitionSpec, ...]

    @cached_property
    def jaxpr(self) -> jc.ClosedJaxpr:
        """The program to compile."""
        return emit_spmd(self.whole, self.block, self.mesh)


@lru_cache(maxsize=4)
def one_jaxpr(
    trace: Trace,
    *,
    num_microbatches: int,
    batch_statistics: str,
    random: str,
) -> jc.ClosedJaxpr:
    """The whole step, with a loop over its microbatches, and nothing in it twice but what is recomputed on purpose.

    The last few are remembered: it is the same on every mesh, and where it is planned, simulated and lowered.
    """
    looped = microbatch_loop(trace, num_microbatches, batch_statistics, random)
    return merge_common_subexpressions(looped)


def logical_mesh(mesh: MeshPlan) -> LogicalMesh:
    """A planned mesh, without its devices where these follow each other."""
    first = mesh.devices[0]
    order = None if mesh.devices == tuple(range(first, first + len(mesh.devices))) else mesh.devices
    return LogicalMesh(shape=mesh.shape, axis_names=mesh.axis_names, links=mesh.links, order=order)


def planned_layouts(trace: Trace, plan: Plan) -> tuple[jc.ClosedJaxpr, BlockPlan]:
    """The step as a plan with a sharding has it (what is computed again, the microbatches), and its layouts."""
    assert plan.sharding is not None
    trace = in_microbatches(trace, plan.num_microbatches)
    closed = one_jaxpr(
        rematerialize(trace, plan.sharding.recomputed_layers, plan.sharding.num_layers),
        num_microbatches=plan.num_microbatches,
        batch_statistics=plan.batch_statistics,
        random=plan.random,
    )
    layouts = from_data(plan.sharding.layouts, logical_mesh(plan.meshes[0]))
    _check_fits(closed, layouts, trace)
    return closed, layouts


def planned_block(trace: Trace, plan: Plan) -> tuple[jc.ClosedJaxpr, LocalBlock]:
    """The step as a plan with a sharding has it, and that spelled out."""
    closed, layouts = planned_layouts(trace, plan)
    return closed, local_block(jc.open_jaxpr(closed)[0], layouts, logical_mesh(plan.meshes[0]))


def sharded_step(trace: Trace, plan: Plan) -> ShardedStep:
    """The program of a plan with a sharding."""
    closed, block = planned_block(trace, plan)
    mesh = logical_mesh(plan.meshes[0])
    return ShardedStep(
        whole=closed,
        mesh=mesh,
        block=block,
        input_specs=tuple(to_spec(value.layout, mesh) for value in block.inputs),
        output_specs=tuple(to_spec(v.layout, mesh) for v in block.outputs if isinstance(v, Value)),
    )


def _check_fits(closed: jc.ClosedJaxpr, layouts: BlockPlan, trace: Trace) -> None:
    jaxpr, _ = jc.open_jaxpr(closed)
    if len(jaxpr.eqns) != len(layouts.equations):
        raise PlanMismatch(
            f"The plan has layouts for {len(layouts.equations)} equations, {trace.name} has {len(jaxpr.eqns)}. Make a "
            "new plan with step.trace(...).plan()."
        )
