"""Hand on the devices what a step itself offloads, and say which values wait on the host for their backward pass.

    F: a -> device_put(a, Host);  B: device_put(device_put(a, Host), Device) -> g(a)     a checkpoint that offloads, cut
    F: a;                         B: g(a);  and `a` is offloaded

Between its tasks, such a value leaves and comes back by instructions of the program (`lowering.host_memory`), beside
the work. What one task alone moves there and back stays as it is: XLA's own copies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import bind_bodies, evaluate_jaxpr
from autopar.compiler.jaxprs.params import bodies_of
from autopar.compiler.jaxprs.primitives import NESTED
from autopar.compiler.pipeline.stage_graph import StageTask


def handed_on_devices(tasks: Sequence[StageTask]) -> tuple[tuple[StageTask, ...], frozenset[str]]:
    """Return the tasks with every value between them on the devices, and the names of those that the step offloads."""
    rewritten, offloaded = list[StageTask](), set[str]()
    for task in tasks:
        if not any(jc.moves_memory(eqn) for eqn in jc.all_equations(task.jaxpr)):
            rewritten.append(task)
            continue
        own, skipped = _offloaded_by(task)
        rewritten.append(_on_devices(task, skipped))
        offloaded |= own
    return tuple(rewritten), frozenset(offloaded)


def _offloaded_by(task: StageTask) -> tuple[set[str], set[int]]:
    """Return what a task takes or hands on as offloaded, and the numbers of the equations that it is moved by."""
    jaxpr, _ = jc.open_jaxpr(task.jaxpr)
    comes_of: dict[Any, str] = dict(zip(jaxpr.invars, task.inputs, strict=True))
    made_by = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    names = {name for v, name in comes_of.items() if jc.is_on_host(v)}
    skipped = set[int]()
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name not in ("name", "device_put") or not all(v in comes_of for v in jc.operands(eqn)):
            continue
        comes_of.update((made, comes_of[v]) for v, made in zip(jc.operands(eqn), eqn.outvars, strict=True))
        if eqn.primitive.name == "device_put":
            names.update(comes_of[v] for v in eqn.outvars if jc.is_on_host(v))
            skipped.add(number)
    for v, name in zip(jaxpr.outvars, task.outputs, strict=True):
        if isinstance(v, jc.Var) and jc.is_on_host(v):
            names.add(name)
            if v in made_by and jaxpr.eqns[made_by[v]].primitive.name == "device_put":
                skipped.add(made_by[v])
    return names, skipped


def _on_devices(task: StageTask, skipped: Collection[int]) -> StageTask:
    jaxpr, consts = jc.open_jaxpr(task.jaxpr)

    def run(*args: Any) -> list[Any]:
        results = _evaluate(jaxpr, consts, args, skipped)
        return [jax.device_put(x, jax.memory.Space.Device) if _is_there(x) else x for x in results]

    on_devices: list[Any] = [v.aval for v in jaxpr.invars]
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in on_devices]
    return replace(task, jaxpr=eliminate_dead(jc.trace(run, types)))


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], skipped: Collection[int] = ()) -> list[Any]:
    """Evaluate a jaxpr that was written for values on the host on such as are on the devices."""

    def equation(number: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if number in skipped:
            return values
        moved = any(jc.is_on_host(atom) and not _is_there(x) for atom, x in zip(eqn.invars, values, strict=True))
        if not moved or eqn.primitive.name not in NESTED:
            return jc.bind_equation(eqn, values)
        bodies = [jc.open_jaxpr(body) for body in bodies_of(eqn)]
        return bind_bodies(eqn, values, lambda body, inputs: _evaluate(*bodies[body], inputs))

    return evaluate_jaxpr(jaxpr, consts, args, equation)


def _is_there(value: Any) -> bool:
    return hasattr(value, "aval") and jc.is_on_host(value)
