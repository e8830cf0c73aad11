"""Scopes in the model, by which users say how its parts are parallelized: `with autopar.split(name="head"): ...`.

A scope is a name around equations, which JAX itself carries through `grad`, `vmap`, `scan`, `jax.checkpoint` and `jit`;
without autopar it does nothing. Whale's scopes (Jia et al. 2022, section 3.1), in JAX's habits:

    replicate    its devices work on examples of their own; parameters are whole where they are used
    split        its devices share the work on every example: products are divided along other dimensions
    stage        it is a stage of a pipeline, on devices of its own
    colocate     it is a stage of a pipeline, on the devices of another one

Scopes nest: `replicate` around `split` is both, over different devices. What a scope leaves open is searched; one
that leaves its devices open, inside of one of its kind that gives them or around it, adds none.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal, cast

import jax

from autopar.checks import is_text, is_whole, plain_value
from autopar.compiler.frontend.batch_dimensions import BatchDims
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import InvalidArgument
from autopar.ir.instructions import listed

_SCOPE = re.compile(
    r"autopar\.(replicate|split|stage|colocate)\[(?:axis=(\w+))?;?(?:devices=(\d+))?;?(?:kind=([^;\]]+))?;?(?:name=([^\]]+))?\]"
)
_DEMAND = re.compile(r"autopar\.demand\[([\w-]+)\|([\d,;]*)\|(\d*)\|(\d*)\|(\w*)\|([^\]|]*)\]")
_NAME = re.compile(r"[\w.\- ]+")
_NUMBER = "#"
"""Stands before a number at the end of the names of scopes that are told apart by their order; no user can write it."""


_Kind = Literal["replicate", "split", "stage", "colocate"]


@dataclass(frozen=True, kw_only=True)
class ModelScope:
    """A part of the model, as the user named it."""

    kind: _Kind
    name: str | None = None
    devices: int | None = None
    axis: str | None = None
    """The mesh axis over which work is divided."""
    machine: str | None = None
    """The kind of the devices, in a cluster of several."""

    def __str__(self) -> str:
        """Return it as the user wrote it: `autopar.split(devices=4, name='head')`; if unnamed `autopar.stage() #2`."""
        given, number = self._given, ""
        if self.is_numbered:
            given.pop("name")
            number = f" {_NUMBER}{str(self.name).rpartition(_NUMBER)[2]}"
        words = [repr(self.place)] if self.kind == "colocate" else [f"{k}={v!r}" for k, v in given.items()]
        return f"autopar.{self.kind}({', '.join(words)}){number}"

    @property
    def label(self) -> str:
        """The scope as a name of JAX: `autopar.split[devices=4;name=head]`."""
        return f"autopar.{self.kind}[{';'.join(f'{k}={v}' for k, v in self._given.items())}]"

    @property
    def is_stage(self) -> bool:
        """True for what says on which devices a part of the model is."""
        return self.kind in ("stage", "colocate")

    @property
    def is_numbered(self) -> bool:
        """True for scopes that the user told apart by nothing but their order."""
        return self.name is not None and _NUMBER in self.name

    @property
    def place(self) -> str:
        """The name of the stage on whose devices a stage is: its own, or of that with which it is colocated."""
        assert self.is_stage and self.name is not None
        return self.name.partition(_NUMBER)[0] if self.kind == "colocate" else self.name

    @property
    def _given(self) -> dict[str, Any]:
        every = {"axis": self.axis, "devices": self.devices, "kind": self.machine, "name": self.name}
        return {option: value for option, value in every.items() if value is not None}


class _Entered(threading.local):
    """The scopes that are entered in this thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[ExitStack] = []


_entered = _Entered()
_numbers = itertools.count(1)


class _EnteredScope:
    """A scope that a `with` statement enters: any number of times, also within itself, in any thread."""

    def __init__(self, scope: ModelScope) -> None:
        self.scope = scope

    def __enter__(self) -> None:
        scope, entered = self.scope, ExitStack()
        if scope.kind == "colocate" or (scope.kind == "stage" and scope.name is None):
            scope = replace(scope, name=f"{scope.name or ''}{_NUMBER}{next(_numbers)}")
        entered.enter_context(jax.named_scope(scope.label))
        _entered.scopes.append(entered)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _entered.scopes.pop().__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return str(self.scope)


def replicate(devices: int | None = None, name: str | None = None) -> _EnteredScope:
    """Return a scope in which every device works on examples of its own, with all of the parameters that it uses.

    The examples are divided over `devices` devices, or as many as the search finds best. Beside it, inside of a `split`
    or around one, the other devices share the work on each example.

        with autopar.replicate(name="backbone"):
            features = backbone(params, images)

    Raises `InvalidArgument` for a number of devices or a name that cannot be used; a plan that cannot keep the scope is
    refused, with its name, when the step is planned.
    """
    return _EnteredScope(_scope("replicate", devices=devices, name=name))


def split(axis: str | None = None, devices: int | None = None, name: str | None = None) -> _EnteredScope:
    """Return a scope in which devices share the work on every example: each holds a part of the parameters.

    Every product with parameters is divided, along dimensions that do not carry the examples, over `devices` devices
    or as many as the search finds best; over the mesh axis `axis`, if one is named. Examples may be divided over the
    other devices.

        with autopar.split(name="head"):
            logits = features @ params["head"]      # 1,000,000 classes: a part of them on each device

    Raises as `replicate`.
    """
    if axis is not None and not (is_text(axis) and axis.isidentifier()):
        raise InvalidArgument(f"axis is {axis!r}. Give the name of a mesh axis, such as 'model', or leave it out.")
    return _EnteredScope(_scope("split", devices=devices, name=name, axis=axis))


def stage(name: str | None = None, devices: int | None = None, kind: str | None = None) -> _EnteredScope:
    """Return a scope that is a stage of a pipeline, on `devices` devices, or as many as the search finds best.

    In a cluster of several machines, its devices are of the kind `kind`: "a100", or "p4d.24xlarge". A stage of one name
    may be entered again before the next one begins; without a name, every `with` statement is a stage of its own. What
    stands between two stages belongs to the first of them, what stands before all to the first one. With stages in the
    model, `Auto()` plans these and no others.

        with autopar.stage("encoder"):
            h = encoder(params, x)
        with autopar.stage("decoder", devices=8, kind="a100"):
            y = decoder(params, h)

    Raises as `replicate`.
    """
    if kind is not None and not (is_text(kind) and _NAME.fullmatch(kind)):
        raise InvalidArgument(f"kind is {kind!r}. Give a kind of machine as the cluster names it, such as 'a100'.")
    return _EnteredScope(_scope("stage", devices=devices, name=name, machine=kind))


def colocate(name: str) -> _EnteredScope:
    """Return a scope that is a stage of a pipeline on the devices of the stage `name`, wherever it stands.

    The devices hold the parameters of both, so that what both read (an embedding that is the head as well) is there
    once. Behind its stage it is a part of it.

        with autopar.stage("ends"):
            h = embed(params, tokens)
        with autopar.stage("layers"):
            h = layers(params, h)
        with autopar.colocate("ends"):
            logits = h @ params["embedding"].T

    Raises as `replicate`.
    """
    if not is_text(name):
        raise InvalidArgument(f"name is {name!r}. Give the name of a stage of the model: autopar.colocate('encoder').")
    return _EnteredScope(_scope("colocate", devices=None, name=name))


_default: ModelScope | None = None


def set_default_strategy(strategy: Any) -> None:
    """Set what holds for all of the model that stands in no scope: `replicate(...)`, `split(...)`, or None for neither.

    It holds for the steps that are planned from now on, in this process. Raises `InvalidArgument` for anything else.
    """
    if strategy is not None and not (isinstance(strategy, _EnteredScope) and not strategy.scope.is_stage):
        raise InvalidArgument(
            f"The default strategy is {strategy!r}. Give autopar.replicate(...), autopar.split(...), or None."
        )
    global _default
    _default = None if strategy is None else strategy.scope


def default_strategy() -> ModelScope | None:
    """Return the strategy of what stands in no scope."""
    return _default


def _scope(kind: _Kind, *, devices: Any, name: Any, axis: str | None = None, machine: str | None = None) -> ModelScope:
    devices = plain_value(devices)
    if devices is not None and not (is_whole(devices) and devices >= 1):
        raise InvalidArgument(f"devices is {devices!r}. Give a number of devices, at least 1, or leave it out.")
    if name is not None and not (is_text(name) and _NAME.fullmatch(name)):
        raise InvalidArgument(f"name is {name!r}. Give a name of letters, digits, spaces, '.', '-' and '_'.")
    return ModelScope(kind=kind, name=name, devices=devices, axis=axis, machine=machine)


def scopes_of(eqn: jc.JaxprEqn) -> tuple[ModelScope, ...]:
    """Return the scopes around an equation, the outermost first."""
    return tuple(scope for name in jc.scope_names(eqn) if (scope := _parsed(name)) is not None)


def as_written(text: str) -> str:
    """Return a text of JAX's scope names with ours as the user wrote them."""
    return _SCOPE.sub(lambda found: str(_scope_of(found)), text)


def scopes_in(text: str) -> tuple[ModelScope, ...]:
    """Return the scopes of ours that a text of JAX's scope names has, in their order."""
    return tuple(dict.fromkeys(map(_scope_of, _SCOPE.finditer(text))))


@lru_cache(maxsize=4096)
def _parsed(name: str) -> ModelScope | None:
    found = _SCOPE.fullmatch(name)
    return None if found is None else _scope_of(found)


def _scope_of(found: re.Match[str]) -> ModelScope:
    kind, axis, devices, machine, own = found.groups()
    return ModelScope(
        kind=cast(_Kind, kind),
        name=own or None,
        devices=int(devices) if devices else None,
        axis=axis or None,
        machine=machine or None,
    )


def has_scopes(closed: jc.ClosedJaxpr) -> bool:
    """Return whether a scope says anything about a program."""
    by_default = _default is not None and any(jc.ad_phase(eqn) is not None for eqn in jc.all_equations(closed))
    return by_default or any(scopes_of(eqn) for eqn in jc.all_equations(closed))


def scopes_text(closed: jc.ClosedJaxpr) -> str:
    """Return what the scopes of a program ask, equation by equation; empty for a program without."""
    each = [(number, scopes_of(eqn), demand_of(eqn)) for number, eqn in enumerate(jc.all_equations(closed))]
    return "".join(f"\n{number} {scopes} {demand}" for number, scopes, demand in each if scopes or demand)


def number_stages(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """Return a program whose scopes of one name are numbered from 1 in their order, in every process alike."""
    labels: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for scope in all_scopes(closed):
        if scope.is_numbered:
            own = str(scope.name).partition(_NUMBER)[0]
            numbers[own] += 1
            labels[scope.label] = replace(scope, name=f"{own}{_NUMBER}{numbers[own]}").label

    def renamed(inside: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
        eqns = (jc.with_bodies(eqn, renamed) for eqn in jc.open_jaxpr(inside)[0].eqns)
        return jc.with_equations(inside, [jc.with_scopes_renamed(eqn, labels) for eqn in eqns])

    return renamed(closed) if labels else closed


def stages_of(closed: jc.ClosedJaxpr) -> tuple[ModelScope, ...]:
    """Return the stages that a program names, in their order; what is colocated behind its stage is a part of it."""
    stages: list[ModelScope] = []
    for scope in all_scopes(closed):
        if scope.is_stage and not (stages and scope.kind == "colocate" and scope.place == stages[-1].place):
            stages.append(scope)
    return tuple(stages)


def meshes_of(stages: Sequence[ModelScope]) -> tuple[int, ...]:
    """Return the number of the mesh of every stage: those that are colocated share one."""
    places = list(dict.fromkeys(stage.place for stage in stages))
    return tuple(places.index(stage.place) for stage in stages)


def check_stages(closed: jc.ClosedJaxpr) -> None:
    """Raise `InvalidArgument` for stages that contradict each other, and one inside of a loop or branch.

    Every round of a loop would be a stage.
    """
    named: dict[str | None, ModelScope] = {}
    for scope in stages_of(closed):
        first = named.setdefault(scope.name, scope)
        if first != scope:
            raise InvalidArgument(
                f"{first} and {scope} are one stage by their name, and ask for different devices. Write both alike, "
                "or give them names of their own."
            )
    jaxpr, _ = jc.open_jaxpr(closed)
    inside = (inner for eqn in jaxpr.eqns for body in jc.subjaxprs(eqn) for inner in jc.all_equations(body))
    for eqn in inside:
        if stage_of(eqn) is not None:
            raise InvalidArgument(
                f"{stage_of(eqn)} stands inside of a loop, a branch or a jax.checkpoint, at {jc.source_line(eqn)}. Put "
                "it around the whole of that."
            )


def all_scopes(closed: jc.ClosedJaxpr) -> tuple[ModelScope, ...]:
    """Return every scope of a program, in the order in which they are met."""
    names = dict.fromkeys(name for eqn in jc.all_equations(closed) for name in jc.scope_names(eqn))
    return tuple(dict.fromkeys(scope for name in names if (scope := _parsed(name)) is not None))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The demands of the scopes around an equation on its layouts."""

    primitive: str
    """The name of the equation's primitive: an equation that a pass made of it under the same name is another one."""
    examples: BatchDims
    replicas: int | None
    """Devices among which examples are divided by `replicate`: 0 for any number, None outside of one."""
    parts: int | None
    """Devices that share the work on an example by `split`: 0 for any number, None outside of one."""
    axis: str | None
    """The mesh axis over which that work is divided."""
    scope: str
    """The innermost scope, as the user wrote it."""

    @property
    def label(self) -> str:
        """The demand as a name of JAX."""
        dims = ";".join(",".join(map(str, each)) for each in self.examples)
        replicas, parts = ("" if count is None else count for count in (self.replicas, self.parts))
        return f"{jc.NOTE}{self.primitive}|{dims}|{replicas}|{parts}|{self.axis or ''}|{self.scope}]"


def demand_of(eqn: jc.JaxprEqn) -> Demand | None:
    """Return what scopes ask of an equation, as `with_demands` noted it; None where they ask nothing."""
    demand = _parsed_demand(jc.innermost_scope(eqn))
    if demand is None or demand.primitive != eqn.primitive.name:
        return None
    ranks = [len(getattr(atom.aval, "shape", ())) for atom in (*eqn.invars, *eqn.outvars)]
    of_these = len(ranks) == len(demand.examples)
    return demand if of_these and all(map(_are_dims, demand.examples, ranks)) else None


def _are_dims(dims: Sequence[int], rank: int) -> bool:
    return max(dims, default=-1) < rank


@lru_cache(maxsize=4096)
def _parsed_demand(name: str) -> Demand | None:
    noted = _DEMAND.fullmatch(name)
    if noted is None:
        return None
    primitive, dims, replicas, parts, axis, scope = noted.groups()
    return Demand(
        primitive=primitive,
        examples=tuple(tuple(int(d) for d in each.split(",") if d) for each in dims.split(";")),
        replicas=int(replicas) if replicas else None,
        parts=int(parts) if parts else None,
        axis=axis or None,
        scope=scope,
    )


def with_demands(closed: jc.ClosedJaxpr, examples: Mapping[int, BatchDims]) -> jc.ClosedJaxpr:
    """Return a program that notes at every equation what the scopes around it ask.

    The note is a name around the equation, as a scope is: it stays with it when the step is split into microbatches and
    cut into stages. `examples` has the dimensions that carry examples by `id` of the equation, at every depth.
    """

    def noted(eqn: jc.JaxprEqn, around: tuple[ModelScope, ...]) -> jc.JaxprEqn:
        scopes = (*around, *scopes_of(eqn))

        def body(inside: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
            return jc.with_equations(inside, [noted(each, scopes) for each in jc.open_jaxpr(inside)[0].eqns])

        changed = jc.with_bodies(eqn, body)
        demand = _demand(eqn, scopes, examples[id(eqn)]) if id(eqn) in examples else None
        return changed if demand is None else jc.within_scope(changed, demand.label)

    return jc.with_equations(closed, [noted(eqn, ()) for eqn in jc.open_jaxpr(closed)[0].eqns])


def _demand(eqn: jc.JaxprEqn, scopes: Sequence[ModelScope], examples: BatchDims) -> Demand | None:
    if _default is not None and jc.ad_phase(eqn) is not None and all(scope.is_stage for scope in scopes):
        scopes = (_default,)
    replicating, splitting = ([s for s in scopes if s.kind == kind] for kind in ("replicate", "split"))
    if not replicating and not splitting:
        return None
    axes = {scope.axis for scope in splitting if scope.axis is not None}
    if len(axes) > 1:
        raise InvalidArgument(
            f"{splitting[-1]} stands in {splitting[0]}, and the two name the axes {listed(tuple(sorted(axes)))}. "
            "Name one of them, or take the scopes apart."
        )
    inner = [scope for scope in scopes if not scope.is_stage][-1]
    return Demand(
        primitive=eqn.primitive.name,
        examples=examples,
        replicas=_degree(replicating),
        parts=_degree(splitting),
        axis=next(iter(axes), None),
        scope=str(inner),
    )


def _degree(scopes: Sequence[ModelScope]) -> int | None:
    """Return the devices of scopes in each other: the product of those given, 0 if none is; None without scopes.

    A scope that leaves them open inside of one that gives them, or around it, adds none.
    """
    given = [scope.devices for scope in scopes if scope.devices is not None]
    return math.prod(given) if given else 0 if scopes else None


def stage_of(eqn: jc.JaxprEqn) -> ModelScope | None:
    """Return the stage that an equation stands in, the innermost."""
    return next((scope for scope in reversed(scopes_of(eqn)) if scope.is_stage), None)
