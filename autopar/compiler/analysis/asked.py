"""Find what the user wrote that fixes a layout or a decision: a scope, a pin, an option, a method that decides itself.

Planning, an input or a decision  ->  "the scope autopar.split(devices=4, name='head')", ...
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.compiler.analysis.revision import Planning
from autopar.compiler.frontend.scopes import all_scopes, stage_of
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.planning.demands.constraints import pins_of_inputs
from autopar.compiler.planning.demands.scope_demands import layouts_in_parts, parameter_demands
from autopar.compiler.sharding.layout import Layout, LogicalMesh, from_spec
from autopar.methods import Auto, given_options, method_words

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "stages": ("num_stages", "layers", "pipeline", "virtual_stages"),
    "schedule": ("schedule",),
    "num_microbatches": ("num_microbatches",),
    "remat": ("remat",),
    "mesh_shape": ("mesh_shape", "data", "tensor", "placement"),
    "shares": (),
    "machines": (),
}
"""The options of methods that fix a decision."""


def asked_of_decision(planning: Planning, decision: str) -> tuple[str, ...]:
    """Return what the user wrote that fixes a decision, in words; nothing for one that a search made."""
    method = planning.method
    options = {} if method is None else given_options(method)
    found = [f"the option {options[name]} of {type(method).__name__}" for name in _OPTIONS[decision] if name in options]
    if not planning.keeps_scopes:
        return tuple(found)
    scopes = all_scopes(planning.trace.jaxpr)
    if decision == "stages":
        found += [f"the scope {scope}" for scope in scopes if scope.is_stage]
    if decision == "machines":
        found += [f"the scope {scope}" for scope in scopes if scope.machine is not None]
    if decision == "mesh_shape":
        found += [f"the scope {scope}" for scope in scopes if not scope.is_stage and (scope.devices or scope.axis)]
    return tuple(found)


def asked_of_input(planning: Planning, leaf: int) -> tuple[str, ...]:
    """Return what the user wrote that decides where an input lies, in words; nothing where a search was free."""
    method = planning.method
    found = [] if method is None or isinstance(method, Auto) else [f"the method {method_words(method)}"]
    if isinstance(method, Auto) and method.kinds is not None:
        found.append(f"the option kinds={method.kinds} of Auto")
    pattern = _pins(planning).get(leaf)
    if pattern is not None:
        found.append(f"the pin {pattern!r}")
    if planning.keeps_scopes:
        asked = [demand for number, demand in parameter_demands(planning.trace.jaxpr) if number == leaf]
        found += [f"the scope {demand.scope}" for demand in asked]
        variable = jc.open_jaxpr(planning.trace.jaxpr)[0].invars[leaf]
        readers = (eqn for eqn in jc.open_jaxpr(planning.trace.jaxpr)[0].eqns if variable in eqn.invars)
        found += [f"the scope {stage}" for eqn in readers if (stage := stage_of(eqn)) is not None]
    return tuple(dict.fromkeys(found))


def contradicted(planning: Planning, leaf: int, layout: Layout, mesh: LogicalMesh) -> str:
    """Return what the user asked for that another layout of an input would not keep, in words; "" if it keeps all."""
    method, pattern = planning.method, _pins(planning).get(leaf)
    if isinstance(method, Auto) and pattern is not None:
        rank = len(planning.trace.inputs[leaf].aval.shape)
        return "" if layout == from_spec(method.pins[pattern], rank, mesh) else f"against the pin {pattern!r}"
    for number, demand in parameter_demands(planning.trace.jaxpr) if planning.keeps_scopes else ():
        if number == leaf and demand.parts is not None:
            allowed = layouts_in_parts(planning.trace.inputs[leaf].aval, demand, mesh)
            if allowed is not None and layout not in allowed:
                return f"against the scope {demand.scope}"
    return ""


def _pins(planning: Planning) -> Mapping[int, str]:
    method = planning.method
    return pins_of_inputs(planning.trace, method.pins) if isinstance(method, Auto) else {}
