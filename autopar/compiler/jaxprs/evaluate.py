"""Evaluate a jaxpr equation by equation, with a say for the caller in each; rewrite programs that way.

    evaluate_jaxpr(jaxpr, consts, args)         the results
    evaluate_jaxpr(..., equation)               equation(number, eqn, values) -> results, in place of each equation
    rewrite(closed, equation)                   the same under a trace: the program that the hook makes of it
    bind_bodies(eqn, args, run)                 a loop, branch or region around other bodies: run(number, inputs)

Every equation keeps its name stack and source line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.dead_code import eliminate_dead

_lax: Any = lax  # annotated in part, which a strict checker does not take
Equation = Callable[[int, jc.JaxprEqn, list[Any]], Sequence[Any]]
"""The results of an equation, given its number, itself and the values of its operands."""


def evaluate_jaxpr(
    jaxpr: jc.Jaxpr, consts: Sequence[Any], args: Sequence[Any], equation: Equation | None = None
) -> list[Any]:
    """Return the results of a jaxpr on `args`."""
    values: dict[jc.Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    evaluate_equations(jaxpr.eqns, values, equation)
    return [read(atom, values) for atom in jaxpr.outvars]


def rewrite(closed: Any, equation: Equation) -> jc.ClosedJaxpr:
    """Return the program of the same inputs that evaluates `closed` with this hook."""
    jaxpr, consts = jc.open_jaxpr(closed)
    return jc.trace(lambda *args: evaluate_jaxpr(jaxpr, consts, args, equation), [v.aval for v in jaxpr.invars])


def evaluate_equations(
    eqns: Iterable[jc.JaxprEqn], values: MutableMapping[jc.Var, Any], equation: Equation | None = None
) -> None:
    """Evaluate equations in order, and enter their results into `values`."""
    for number, eqn in enumerate(eqns):
        operands = [read(atom, values) for atom in eqn.invars]
        results = jc.bind_equation(eqn, operands) if equation is None else equation(number, eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))


def read(atom: Any, values: Mapping[jc.Var, Any]) -> Any:
    """Return the value of a variable or literal."""
    return atom.val if isinstance(atom, jc.Literal) else values[atom]


BodyEvaluator = Callable[[int, Sequence[Any]], Sequence[Any]]
"""The results of a body, given its number (as in `params.bodies_of`) and its inputs."""


def bind_bodies(eqn: jc.JaxprEqn, args: Sequence[Any], run: BodyEvaluator) -> list[Any]:
    """Bind a loop, branch or rematerialised region with `run` in place of its bodies.

    What `run` reads beside the inputs of a body becomes an operand of the equation, whose other parameters stay.
    """
    match eqn.primitive.name:
        case "scan":
            return _bind_scan(eqn, args, run)
        case "while":
            return _bind_while(eqn, args, run)
        case "cond":
            return _bind_cond(eqn, args, run)
        case _:
            operands = list(map(_as_array, args))
            region, consts = jc.consts_as_inputs(_traced(run, 0, operands, None))
            return jc.bind_equation(eqn, [*consts, *operands], {"jaxpr": region})


def _bind_scan(eqn: jc.JaxprEqn, args: Sequence[Any], run: BodyEvaluator) -> list[Any]:
    loop = jp.scan_of(eqn)
    consts, initial, xs = args[: loop.num_consts], args[loop.num_consts : loop.first_x], args[loop.first_x :]
    types = eqn.outvars[: loop.num_carry]

    def once(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        results = run(0, [*consts, *carry, *x])
        return _typed(results[: loop.num_carry], types), results[loop.num_carry :]

    with jc.under_scope_of(eqn):
        carry, ys = _lax.scan(once, _typed(initial, types), list(xs), loop.length, loop.reverse, loop.unroll)
    return [*carry, *ys]


def _bind_while(eqn: jc.JaxprEqn, args: Sequence[Any], run: BodyEvaluator) -> list[Any]:
    loop = jp.while_of(eqn)
    cond_consts, body_consts = args[: loop.cond_consts], args[loop.cond_consts : loop.first_carry]
    with jc.under_scope_of(eqn):
        return _lax.while_loop(
            lambda carry: run(0, [*cond_consts, *carry])[0],
            lambda carry: _typed(run(1, [*body_consts, *carry]), eqn.outvars),
            _typed(args[loop.first_carry :], eqn.outvars),
        )


def _bind_cond(eqn: jc.JaxprEqn, args: Sequence[Any], run: BodyEvaluator) -> list[Any]:
    index, *operands = map(_as_array, args)
    branches = [_traced(run, number, operands, eqn.outvars) for number in range(len(jp.branches_of(eqn)))]
    captured = [jc.open_jaxpr(branch)[1] for branch in branches]
    common = [value for consts in captured for value in consts]
    if common:
        branches = [
            _with_common(branch, sum(map(len, captured[:number])), common, operands)
            for number, branch in enumerate(branches)
        ]
    return jc.bind_equation(eqn, [index, *common, *operands], {"branches": tuple(branches)})


def _traced(run: BodyEvaluator, number: int, operands: Sequence[Any], types: Sequence[jc.Var] | None) -> jc.ClosedJaxpr:
    """A body as a jaxpr; its constants are what it reads of the trace around it."""

    def body(*inputs: Any) -> Sequence[Any]:
        results = run(number, inputs)
        return results if types is None else _typed(results, types)

    return eliminate_dead(jc.trace(body, [jax.typeof(x) for x in operands]))


def _with_common(branch: jc.ClosedJaxpr, first: int, common: Sequence[Any], operands: Sequence[Any]) -> jc.ClosedJaxpr:
    """A branch that takes the constants of all branches as its first inputs; its own begin at number `first`."""
    jaxpr, consts = jc.open_jaxpr(branch)

    def body(*inputs: Any) -> list[Any]:
        return evaluate_jaxpr(jaxpr, inputs[first : first + len(consts)], inputs[len(common) :])

    return jc.trace(body, [jax.typeof(x) for x in (*common, *operands)])


def _typed(values: Sequence[Any], types: Sequence[jc.Var]) -> list[Any]:
    """Literals among the values get the types that are expected there."""
    return [_of_dtype(x, v.aval.dtype) for x, v in zip(values, types, strict=True)]  # type: ignore[attr-defined]


def _of_dtype(x: Any, dtype: Any) -> Any:
    return x if getattr(x, "dtype", None) == dtype else jnp.asarray(x, dtype)


def _as_array(x: Any) -> Any:
    return x if hasattr(x, "aval") else jnp.asarray(x)
