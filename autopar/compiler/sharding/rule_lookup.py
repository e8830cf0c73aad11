"""The sharding rule of every equation of a step: by hand where positions matter, else from Shardy, else none.

    equation -> key -> known already, or
                       by hand            what is common; positions, indices, random numbers (`primitive_rules`)
                       lowered, by Shardy everything else that has a lowering of known parts (`shardy`)
                       none               side effects, callbacks, kernels: every device computes the whole

Equations that are equal but for their operands share one rule, so that a model of many layers asks once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from autopar.checks import is_text
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import equation_key
from autopar.compiler.jaxprs.primitives import CALLBACKS, FOREIGN, NESTED, VISIBLE
from autopar.compiler.sharding.declared_rules import check_text, rule_of_text
from autopar.compiler.sharding.primitive_rules import has_rule, register_rule, rule_by_hand
from autopar.compiler.sharding.replication import note_replicated
from autopar.compiler.sharding.rule import FactorRule, Rule, blocked_rule, compose, rule_of_labels, shapes_of
from autopar.compiler.sharding.shardy import lowered_functions
from autopar.errors import InvalidArgument

__all__ = ["Rule", "register_sharding_rule", "rules_without_warning", "sharding_rules"]

# Primitives whose parameters hold numbers that are right for local parts too, or that are made local.
_READ_APART = frozenset(
    {
        "argmax", "argmin", "bitcast_convert_type", "compress_gradient", "compress_gradient_in_blocks", "reduce",
        "squeeze", "stack", "unstack",
    }
)  # fmt: skip

_known: dict[Hashable, Rule] = {}


def register_sharding_rule(primitive: str, rule: str | Callable[[Any], str]) -> None:
    """Register how a primitive of one's own is split: `register_sharding_rule("my_product", "b s d, d f -> b s f")`.

    `primitive` is its name. `rule` is a text as for `sharding_rule`, one name for each dimension of the operands and
    results, or a function that makes one of the equation, whose parameters it may read. The promise: bound to parts of
    its operands, with the same parameters, the primitive gives the parts of its results, or summands of them along
    dimensions that only operands have. It holds in every step that is planned from then on.

    A kernel whose parameters hold shapes (`pallas_call`, an FFI call) makes no such promise: give the function that
    calls it to `sharding_rule`, which calls it anew with the parts.

    Raises `InvalidArgument` for a text that is no rule, and for a primitive that has one, as those of JAX do; in
    planning, for a text that does not fit the equation.
    """
    if not callable(rule):
        check_text(rule)
    if not is_text(primitive) or primitive in FOREIGN | CALLBACKS | NESTED or has_rule(primitive):
        raise InvalidArgument(
            f"A sharding rule was given for the primitive {primitive!r}; it must be the name of a primitive of your "
            "own that has no rule yet. For a kernel or a callback, give the function that calls it to sharding_rule."
        )

    @register_rule(primitive)
    def _(eqn: jc.JaxprEqn) -> Rule:
        return rule_of_text(eqn, rule(eqn) if callable(rule) else rule)

    _known.clear()  # among which the primitive may be one without a rule


def sharding_rules(eqns: Sequence[jc.JaxprEqn], keys: Sequence[Hashable] | None = None) -> list[Rule]:
    """The rule of each equation. Notes each equation that has no rule as replicated.

    `keys` are their `equation_key`s, if these are known. Equations with bodies that are planned themselves have no rule
    to ask for.
    """
    keys = [equation_key(eqn) for eqn in eqns] if keys is None else keys
    rules = rules_without_warning(eqns, keys)
    unknown = {key: eqn for key, eqn, rule in zip(keys, eqns, rules, strict=True) if rule.source == "none"}
    for eqn in unknown.values():
        _warn(eqn)
    return rules


def rules_without_warning(eqns: Sequence[jc.JaxprEqn], keys: Sequence[Hashable] | None = None) -> list[Rule]:
    """The rule of each equation; those that are not known yet are lowered together."""
    keys = [equation_key(eqn) for eqn in eqns] if keys is None else keys
    asked = dict(zip(keys, eqns, strict=True))
    missing = {key: eqn for key, eqn in asked.items() if key not in _known}
    _known.update(zip(missing, _rules_of(list(missing.values())), strict=True))
    return [_known[key] for key in keys]


def _rules_of(eqns: Sequence[jc.JaxprEqn]) -> list[Rule]:
    rules = [_rule_without_lowering(eqn) for eqn in eqns]
    lowered = [eqn for eqn, rule in zip(eqns, rules, strict=True) if rule is None]
    by_lowering = iter(rules_by_lowering(lowered))
    return [rule or next(by_lowering) for rule in rules]


def _rule_without_lowering(eqn: jc.JaxprEqn) -> Rule | None:
    name = eqn.primitive.name
    assert name not in NESTED, f"{jc.describe(eqn)} has a body, which has rules of its own"
    if name in VISIBLE:  # it is to see whole values, on one device
        return blocked_rule(eqn, "by hand")
    if eqn.effects:
        return blocked_rule(eqn, "none")
    if not _can_be_split(eqn):
        return blocked_rule(eqn, "by hand")
    if rule := rule_by_hand(eqn):
        return rule
    if name in _READ_APART or not any(map(_holds_numbers, jp.parameters(eqn).values())):
        return None
    return blocked_rule(eqn, "none")


def _can_be_split(eqn: jc.JaxprEqn) -> bool:
    return any(size > 1 for shape in shapes_of([*eqn.invars, *eqn.outvars]) for size in shape)


def _holds_numbers(value: Any) -> bool:
    """Return whether a parameter may describe shapes, positions or bodies, which parts of arrays do not share."""
    if isinstance(value, (tuple, list)):
        return any(map(_holds_numbers, value))
    if value is None or isinstance(value, (bool, str, enum.Enum, np.dtype, type)):
        return False
    return isinstance(value, (int, float, np.ndarray, np.generic, dict)) or callable(value) or _is_program(value)


def _is_program(value: Any) -> bool:
    return isinstance(value, (jc.Jaxpr, jc.ClosedJaxpr))


def rules_by_lowering(eqns: Sequence[jc.JaxprEqn]) -> list[Rule]:
    """Rules after Shardy. Where one equation cannot be lowered, the others still can."""
    if not eqns:
        return []
    try:
        names, functions = lowered_functions(
            list(map(_function_of, eqns)), [[a.aval for a in eqn.invars] for eqn in eqns]
        )
    except Exception:
        if len(eqns) == 1:
            # Why is not known here, only that this platform has no lowering: another may have one.
            return [blocked_rule(eqns[0], "none")]
        half = len(eqns) // 2
        return rules_by_lowering(eqns[:half]) + rules_by_lowering(eqns[half:])
    known: dict[str, FactorRule | None] = {}
    factors = [compose(name, functions, known) for name in names]
    return [_rule_of_factors(eqn, own) for eqn, own in zip(eqns, factors, strict=True)]


def _function_of(eqn: jc.JaxprEqn) -> Callable[..., Any]:
    def run(*args: Any) -> list[Any]:
        return jc.bind_equation(eqn, args)

    return run


def _rule_of_factors(eqn: jc.JaxprEqn, factors: FactorRule | None) -> Rule:
    if factors is None:
        return blocked_rule(eqn, "none")
    # What is lowered of a random key has one dimension more than the key: its words stay together.
    operands = [dims[: len(shape)] for dims, shape in zip(factors.operands, shapes_of(eqn.invars), strict=True)]
    results = [dims[: len(shape)] for dims, shape in zip(factors.results, shapes_of(eqn.outvars), strict=True)]
    return rule_of_labels(
        eqn,
        operands,
        results,
        blocked=factors.blocked | factors.reduced,
        sizes=dict(enumerate(factors.sizes)),
        source="shardy",
    )


def _warn(eqn: jc.JaxprEqn) -> None:
    if _can_be_split(eqn):
        note_replicated(
            f"{jc.describe(eqn)} has no sharding rule: every device computes the whole of it, and its operands are "
            "gathered for that. Write it with other operations, or declare a rule with autopar.sharding_rule."
        )
