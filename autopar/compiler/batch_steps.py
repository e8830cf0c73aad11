"""The result of the analysis of a full-batch program: per equation, what one microbatch does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.compiler.batch_states import Invariant, State
from autopar.compiler.jaxprs import compat as jc

KEEP, COMPLETE, FIRST, SHARE = "keep", "complete", "first", "share"
"""How an operand is used: as it is; accumulated over the microbatches; by the first microbatch only (the
others use zero); divided by the number of microbatches."""

SPLIT, SOURCE, DRAW, WHOLE, NESTED = "split", "source", "draw", "whole", "nested"
"""How an equation is evaluated: at the microbatch's shape; at the full shape, then sliced; random bits at the
microbatch's shape; on the whole batch, before the microbatches; with its bodies rewritten."""

LOOPS = ("scan", "while")
REMATS = ("remat2", "remat", "checkpoint")
CALLS = ("jit", "pjit", "closed_call", "eval_jaxpr")
"""Equations with bodies, beside `cond`. Calls are left only where constants keep them from being inlined."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one microbatch does for an equation."""

    eqn: jc.JaxprEqn
    doubled: jc.JaxprEqn
    mode: str
    uses: tuple[str, ...]
    operands: tuple[State, ...]
    results: tuple[State, ...]
    local: bool = False
    """A sum over the microbatch stands for the one over the batch: it is multiplied by their number."""
    own_column: int | None = None
    """The column of a gather's or scatter's indices that counts the rows of the batch."""
    bodies: tuple[Block, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Block:
    """A program or the body of an equation."""

    jaxpr: jc.Jaxpr
    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    needed_whole: frozenset[jc.Var]
    """Values that are wanted of the whole batch, before the microbatches."""
    constants: Mapping[jc.Var, State] = field(default_factory=dict[jc.Var, State])
    output_uses: tuple[str, ...] = ()


def needed_whole(
    jaxpr: jc.Jaxpr, steps: tuple[Step, ...], states: Mapping[jc.Var, State], top: bool
) -> frozenset[jc.Var]:
    """What those steps read that work on the whole batch. At the top, shared values are at hand."""
    needed: set[jc.Var] = set()

    def want(atom: Any) -> None:
        if isinstance(atom, jc.Var) and not (top and isinstance(states[atom], Invariant)):
            needed.add(atom)

    for step in reversed(steps):
        if step.mode == WHOLE or any(v in needed for v in step.eqn.outvars):
            for atom in step.eqn.invars:
                want(atom)
        for body, offset in straight_bodies(step):
            for position, var in enumerate(body.jaxpr.invars):
                if var in body.needed_whole:
                    want(step.eqn.invars[offset + position])
    return frozenset(needed)


def straight_bodies(step: Step) -> list[tuple[Block, int]]:
    """Bodies that run once, so that what they need whole is computed outside; the operands before theirs."""
    if step.mode != NESTED or step.eqn.primitive.name in LOOPS:
        return []
    return [(body, 1 if step.eqn.primitive.name == "cond" else 0) for body in step.bodies]
