"""Let callbacks that raise end a call, not the process, where several devices work together.

x = callback(f, y)   ->   x = callback(f, y), or zeros and an error that is kept for the end of the call
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import CALLBACKS, FOREIGN
from autopar.ir.callback_errors import CallbackErrors
from autopar.ir.program import Executable, Program


def guard_callbacks(program: Program) -> Program:
    """Return the program that says of each executable with callbacks how they are guarded, once it is loaded."""

    def guarded(executable: Executable) -> Executable:
        if not _calls_back(executable.jaxpr):
            return executable
        return replace(executable, guarded=partial(_guarded, executable.jaxpr))

    return replace(program, executables={name: guarded(e) for name, e in program.executables.items()})


def _calls_back(closed: Any) -> bool:
    return any(_has_callback(eqn) for eqn in jc.open_jaxpr(closed)[0].eqns)


def _has_callback(eqn: jc.JaxprEqn) -> bool:
    match eqn.primitive.name:
        case name if name in CALLBACKS:
            return True
        case name if name in FOREIGN:  # which have primitives of their own
            return False
        case "declared_rule":
            return _calls_back(jp.declared_body(eqn))
        case _:
            return any(_calls_back(body) for body in jc.subjaxprs(eqn))


def _guarded(closed: jc.ClosedJaxpr, errors: CallbackErrors) -> jc.ClosedJaxpr:
    """Return the same program, equation by equation; callbacks are guarded, also those within others."""

    def inside(body: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
        return _guarded(body, errors)

    eqns = jc.open_jaxpr(closed)[0].eqns
    return jc.with_equations(closed, [_guarded_equation(e, inside, errors) if _has_callback(e) else e for e in eqns])


def _guarded_equation(
    eqn: jc.JaxprEqn, inside: Callable[[jc.ClosedJaxpr], jc.ClosedJaxpr], errors: CallbackErrors
) -> jc.JaxprEqn:
    match eqn.primitive.name:
        case name if name in CALLBACKS:
            results: list[Any] = [v.aval for v in eqn.outvars]
            return jp.with_callback(eqn, lambda callback: errors.keep(callback, results))
        case "declared_rule":
            return jp.with_declared_body(eqn, inside(jp.declared_body(eqn)))
        case _:
            return eqn.replace(params=jc.map_subjaxprs(eqn, inside))
