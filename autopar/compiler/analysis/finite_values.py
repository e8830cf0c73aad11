"""Find the first value of a step that is not finite: a program whose every executable reports on its equations.

    watched(program)    the same instructions; each Run has one more result, a row with a number per equation:
        0   finite, or no more than what was read
        1   infinite, of finite operands
        2   not a number (NaN), of operands without any

The rows are the program's only results. Inside of a loop the row is that of the first iteration that has a number; of
devices that differ, the largest. `log(0)` under a mask is infinite as well, and does no harm: so a NaN comes before
all infinities, and the infinity before it is named beside it. What stands in the padding of uneven parts is looked at
like all else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr
from autopar.compiler.jaxprs.primitives import NESTED
from autopar.ir.program import ArrayType, Copy, Executable, Free, Instruction, Output, Program, Run, Task

INFINITE, NOT_A_NUMBER = 1, 2
_PASSES = {"F": "forward", "B": "backward", "W": "weight gradient", "U": "update", "P": "first update"}


@dataclass(frozen=True, kw_only=True)
class FirstValue:
    """The first value that is not finite: its equation and the task that computes it."""

    equation: jc.JaxprEqn
    task: Task | None
    """The task that made the value; None where one task is the whole step."""
    not_a_number: bool

    def __str__(self) -> str:
        what = "not a number (NaN)" if self.not_a_number else "infinite"
        return f"{jc.describe(self.equation)} is {what}{'' if self.task is None else f' ({_words(self.task)})'}"


@dataclass(frozen=True, kw_only=True)
class WatchedProgram:
    """A program that reports: its results are the rows of `runs`, in an order in which values are made."""

    program: Program
    runs: tuple[Run, ...]
    equations: Mapping[str, Sequence[jc.JaxprEqn]]
    """The equation of each number in the row of an executable, by executable."""

    def first_values(self, rows: Sequence[Any]) -> list[FirstValue]:
        """Return the first NaN and, if one comes before it, the first infinity; nothing if all is finite."""
        infinity: list[FirstValue] = []
        alone = len(self.runs) == 1
        for run, row in zip(self.runs, rows, strict=True):
            for number in map(int, np.flatnonzero(row)):
                nan = bool(row[number] == NOT_A_NUMBER)
                equation = self.equations[run.executable][number]
                found = FirstValue(equation=equation, task=None if alone else run.task, not_a_number=nan)
                if nan:
                    return [found, *infinity]
                infinity = infinity or [found]
        return infinity


def keeping_arguments(program: Program) -> Program:
    """Return the program without donated arguments, which are there after the step then, for another look at it."""
    arguments = {(item.mesh, item.value) for item in program.inputs}
    kept: dict[str, set[int]] = {}
    for number, mesh in enumerate(program.meshes):
        for run in mesh.instructions:
            if isinstance(run, Run):
                donated = program.executables[run.executable].donated
                found = {position for position in donated if (number, run.inputs[position]) in arguments}
                kept.setdefault(run.executable, set()).update(found)
    executables = {
        name: replace(e, donated=tuple(position for position in e.donated if position not in kept.get(name, ())))
        for name, e in program.executables.items()
    }

    def freed(instruction: Instruction) -> list[Instruction]:
        if isinstance(instruction, Copy):
            return [replace(instruction, takes=False)]
        if not isinstance(instruction, Run):
            return [instruction]
        values = tuple(instruction.inputs[position] for position in sorted(kept[instruction.executable]))
        return [instruction, *([Free(values=values)] if values else [])]

    meshes = tuple(
        replace(mesh, instructions=tuple(each for i in mesh.instructions for each in freed(i)))
        for mesh in program.meshes
    )
    return replace(program, meshes=meshes, executables=executables)


def watched(program: Program) -> WatchedProgram:
    """Return the program that reports on every equation. It keeps its arguments, and calls callbacks again."""
    program = keeping_arguments(program)
    equations: dict[str, list[jc.JaxprEqn]] = {}
    executables: dict[str, Executable] = {}
    for name, executable in program.executables.items():
        equations[name] = _equations(executable.jaxpr)
        executables[name] = _reporting(executable, len(equations[name])) if equations[name] else executable
    results = {part for output in program.outputs for part in output.parts}
    order: dict[tuple[int, int], Run] = {}
    seen: Counter[int] = Counter()
    for mesh, instruction in program.linear_order():
        if isinstance(instruction, Run) and equations[instruction.executable]:
            order[mesh, seen[mesh]] = instruction
        seen[mesh] += 1
    meshes = tuple(
        replace(
            mesh,
            values={
                **mesh.values,
                **{
                    _row(place): ArrayType(shape=(len(equations[run.executable]),), dtype="int32")
                    for (n, place), run in order.items()
                    if n == number
                },
            },
            instructions=(
                *(
                    replace(i, outputs=(*i.outputs, _row(place)))
                    if isinstance(i, Run) and (number, place) in order
                    else i
                    for place, i in enumerate(mesh.instructions)
                ),
                *_free_all(value for m, value in results if m == number),
            ),
        )
        for number, mesh in enumerate(program.meshes)
    )
    outputs = tuple(Output(leaf=i, parts=((mesh, _row(place)),)) for i, (mesh, place) in enumerate(order))
    return WatchedProgram(
        program=replace(program, meshes=meshes, executables=executables, outputs=outputs),
        runs=tuple(order.values()),
        equations=equations,
    )


def watched_program(program: Program) -> Program:
    """Return the program of `watched` alone."""
    return watched(program).program


def _words(task: Task) -> str:
    microbatch = "" if task.microbatch is None else f" of microbatch {task.microbatch}"
    return f"stage {task.stage}, {_PASSES.get(task.kind, task.kind)}{microbatch}"


def _row(place: int) -> str:
    return f"finite/{place}"


def _free_all(values: Any) -> list[Instruction]:
    found = tuple(sorted(values))
    return [Free(values=found)] if found else []


def _reporting(executable: Executable, count: int) -> Executable:
    guarded = executable.guarded
    row = ArrayType(shape=(count,), dtype="int32")
    return replace(
        executable,
        outputs=(*executable.outputs, row),
        jaxpr=_with_row(executable.jaxpr),
        guarded=None if guarded is None else lambda errors: _with_row(guarded(errors)),
    )


def _with_row(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    def run(*args: Any) -> list[Any]:
        results, row = _run(closed, args)
        return [*results, row]

    return jc.trace(run, [v.aval for v in jc.open_jaxpr(closed)[0].invars])


def _equations(jaxpr: Any) -> list[jc.JaxprEqn]:
    """Return the equations that a row has numbers for, in its order."""
    found: list[jc.JaxprEqn] = []
    for eqn in jc.open_jaxpr(jaxpr)[0].eqns:
        inside = _bodies(eqn)
        if inside is None:
            found += [eqn] if any(_has_floats(v.aval) for v in eqn.outvars) else []
        else:
            found += [each for body in inside for each in _equations(body)]
    return found


def _bodies(eqn: jc.JaxprEqn) -> list[Any] | None:
    """Return the bodies of an equation that is looked into; None for one that is looked at as a whole."""
    match eqn.primitive.name:
        case "while":
            return [params.while_of(eqn).body]
        case "shard_map":
            return [params.shard_map_of(eqn).body]
        case name if name in NESTED:
            return list(params.bodies_of(eqn))
        case _:
            called = params.called_function(eqn)
            return None if called is None else [called]


def _run(jaxpr: Any, args: Sequence[Any]) -> tuple[list[Any], Any]:
    """Evaluate a program, with the row of its equations."""
    rows: list[Any] = []

    def equation(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> list[Any]:
        with jc.under_scope_of(eqn):
            results, row = _run_equation(eqn, values)
        rows.extend(row)
        return results

    results = evaluate_jaxpr(*jc.open_jaxpr(jaxpr), args, equation)
    return results, jnp.concatenate([*rows, jnp.zeros(0, jnp.int32)])


def _run_equation(eqn: jc.JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    bodies = _bodies(eqn)
    if bodies is not None and not any(_equations(body) for body in bodies):
        bodies = None
    if bodies is None:
        results = jc.bind_equation(eqn, args)
        floats = any(_has_floats(v.aval) for v in eqn.outvars)
        return results, [_number(args, results)[None]] if floats else []
    match eqn.primitive.name:
        case "scan":
            results, row = _run_scan(eqn, args)
        case "while":
            results, row = _run_while(eqn, args)
        case "cond":
            results, row = _run_branch(eqn, args)
        case "shard_map":
            results, row = _run_on_devices(eqn, args)
        case _:
            results, row = _run(bodies[0], args)
    return results, [row]


def _run_scan(eqn: jc.JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], Any]:
    scan = params.scan_of(eqn)
    consts, carry, xs = args[: scan.num_consts], args[scan.num_consts : scan.first_x], args[scan.first_x :]

    def body(carry: Any, xs: Any) -> Any:
        results, row = _run(scan.body, [*consts, *carry, *xs])
        return results[: scan.num_carry], (results[scan.num_carry :], row)

    last, (ys, rows) = jax.lax.scan(body, list(carry), list(xs), length=scan.length, reverse=scan.reverse)
    rows = rows[::-1] if scan.reverse else rows
    first = rows[jnp.argmax(rows.any(axis=1))] if scan.length else jnp.zeros(rows.shape[1:], jnp.int32)
    return [*last, *ys], first


def _run_while(eqn: jc.JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], Any]:
    loop = params.while_of(eqn)
    of_cond, of_body = args[: loop.cond_consts], args[loop.cond_consts : loop.first_carry]
    cond = jc.jaxpr_as_fun(loop.cond)

    def body(carry: Any) -> Any:
        results, row = _run(loop.body, [*of_body, *carry[0]])
        return results, jnp.where(carry[1].any(), carry[1], row)

    start = list(args[loop.first_carry :]), jnp.zeros(len(_equations(loop.body)), jnp.int32)
    return jax.lax.while_loop(lambda carry: cond(*of_cond, *carry[0])[0], body, start)


def _run_branch(eqn: jc.JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], Any]:
    branches = params.branches_of(eqn)
    counts = [len(_equations(branch)) for branch in branches]

    def taking(number: int) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            results, row = _run(branches[number], operands)
            before, after = sum(counts[:number]), sum(counts[number + 1 :])
            return results, jnp.pad(row, (before, after))

        return run

    return jax.lax.switch(args[0], [taking(number) for number in range(len(branches))], *args[1:])


def _run_on_devices(eqn: jc.JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], Any]:
    mapped = params.shard_map_of(eqn)

    def body(*parts: Any) -> Any:
        results, row = _run(mapped.body, parts)
        return [*results, jax.lax.pmax(row, mapped.mesh.axis_names)]

    specs = [*mapped.out_specs, PartitionSpec()]
    run: Any = jax.shard_map(body, mesh=mapped.mesh, in_specs=mapped.in_specs, out_specs=specs, check_vma=False)
    *results, row = run(*args)
    return results, row


def _number(operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return what is new in results: 2 for NaN, 1 for infinity, 0 for neither."""
    nans, was_nan = _any(jnp.isnan, results), _any(jnp.isnan, operands)
    infinite, was_infinite = (_any(lambda x: ~jnp.isfinite(x), each) for each in (results, operands))
    new_infinity = jnp.where(infinite & ~nans & ~was_infinite, INFINITE, 0)
    return jnp.where(nans & ~was_nan, NOT_A_NUMBER, new_infinity).astype(jnp.int32)


def _any(test: Callable[[Any], Any], values: Sequence[Any]) -> Any:
    found = [test(x).any() for x in values if _has_floats(jax.typeof(x))]
    return jnp.stack(found).any() if found else jnp.zeros((), bool)


def _has_floats(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)
