"""List the values that the forward pass computes: where each lies, in which layout, and the user's line that makes it.

    Trace, Plan  ->  PlannedValue, ...

Equations are named as in the model, by their scopes without JAX's transformations: `GPT/h_3/attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import logical_mesh, sharded_step
from autopar.compiler.lowering.stage_programs import task_block, tasks_of_stages
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated
from autopar.compiler.spmd.collectives import user_line
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, RunBody
from autopar.ir.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlannedValue:
    """The result of an equation, of one microbatch: the type of the whole array, and its layout on a mesh.

    `spec` has the axes that split each dimension, and `partial` those over which it is a sum not taken yet. The value
    of a loop's body is that of one round.
    """

    mesh: int
    scope: str
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]
    line: str

    def layout_words(self) -> str:
        """Return the layout as `(data, -)`, and the axes over which it is still to be summed."""
        parts = ["·".join(axes) or "-" for axes in self.spec]
        words = f"({', '.join(parts)})" if any(self.spec) else "replicated"
        return words + (f", sum over {'·'.join(self.partial)}" if self.partial else "")


def input_lines(trace: Trace) -> tuple[str, ...]:
    """Return for each input the user's line that reads it first, in the forward pass if that does; empty for none."""
    jaxpr = jc.open_jaxpr(trace.jaxpr)[0]
    first: dict[Any, str] = {}
    # Equations of the forward pass come before those that only update.
    for eqn in sorted(jaxpr.eqns, key=lambda eqn: jc.ad_phase(eqn) != "forward"):
        line = user_line(eqn)
        for atom in eqn.invars if line else ():
            if not isinstance(atom, jc.Literal):
                first.setdefault(atom, line)
    return tuple(first.get(v, "") for v in jaxpr.invars)


def planned_values(trace: Trace, plan: Plan, cut: Callable[[], StageGraph]) -> tuple[PlannedValue, ...]:
    """Return the values of the forward pass, or of all of a step without a gradient; `cut` makes the stages."""
    found: list[PlannedValue] = []
    for number, mesh, results in _results(trace, plan, cut):
        for eqn, layouts in results:
            if trace.differentiates and jc.ad_phase(eqn) != "forward":
                continue
            scope, line = "/".join(n for n in jc.scope_names(eqn) if not n.startswith(jc.NOTE)), user_line(eqn)
            avals: list[Any] = [v.aval for v in eqn.outvars]
            for aval, layout in zip(avals, layouts, strict=True):
                found.append(
                    PlannedValue(
                        mesh=number,
                        scope=scope,
                        primitive=eqn.primitive.name,
                        shape=tuple(aval.shape),
                        dtype=str(aval.dtype),
                        spec=tuple(mesh.names(axes) for axes in layout.dims),
                        partial=mesh.names(layout.partial),
                        line=line,
                    )
                )
    return tuple(found)


_Results = Iterable[tuple[jc.JaxprEqn, tuple[Layout, ...]]]


def _results(trace: Trace, plan: Plan, cut: Callable[[], StageGraph]) -> Iterator[tuple[int, LogicalMesh, _Results]]:
    """Yield for every mesh its equations, each with the layouts of its results."""
    if plan.is_single_program:
        on_several = plan.sharding is not None
        results = _of_block(sharded_step(trace, plan).block) if on_several else _whole(trace.jaxpr)
        yield 0, logical_mesh(plan.meshes[0]), results
        return
    graph = cut()
    for number, planned in enumerate(plan.meshes):
        mesh = logical_mesh(planned)
        for task in tasks_of_stages(graph, plan.stages_on(number)):
            if task.phase == "forward":
                sharding = planned.sharding
                block = None if sharding is None else task_block(task, sharding, mesh, number)
                yield number, mesh, _whole(task.jaxpr) if block is None else _of_block(block)


def _of_block(block: LocalBlock) -> _Results:
    for action in block.actions:
        match action:
            case Evaluate():
                yield action.eqn, tuple(value.layout for value in action.results)
            case RunBody():
                for body in action.bodies:
                    yield from _of_block(body)
            case _:
                pass


def _whole(jaxpr: jc.ClosedJaxpr) -> _Results:
    for eqn in jc.all_equations(jaxpr):
        if not any(True for _ in jc.subjaxprs(eqn)):
            avals: list[Any] = [v.aval for v in eqn.outvars]
            yield eqn, tuple(replicated(len(aval.shape)) for aval in avals)
