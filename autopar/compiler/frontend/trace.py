"""Trace an unmodified train step: its jaxpr, the names of its inputs and outputs, and which of them belong together.

    step, arguments, options  ->  Trace

Tracing is abstract: shapes and dtypes only, no device is touched. The step is traced at the given batch and, where the
batch size can change, at twice that: what differs between the two says where the batch is in every value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize
from autopar.errors import InvalidArgument
from autopar.progress import collector_paused


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One flat input or output: its name (`state.params['w']`), its argument's number, its abstract value."""

    name: str
    argument: int | None
    aval: jax.ShapeDtypeStruct


@partial(jax.tree_util.register_dataclass, data_fields=["result", "replaced", "further"], meta_fields=["kept", "rest"])
@dataclass(frozen=True, kw_only=True)
class Returned:
    """What a step gives beside its result: arrays that take the place of its inputs, and further ones.

    `replaced` has them by the number of the input, `kept` the numbers of inputs that are the caller's also where their
    argument is donated. `rest` is handed through to whoever made the value.
    """

    result: Any
    replaced: Mapping[int, Any]
    further: Mapping[str, Any]
    kept: tuple[int, ...] = ()
    rest: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A train step as data. Inputs and outputs are flat, in the order of `jax.tree.leaves`."""

    name: str
    jaxpr: jc.ClosedJaxpr
    other_batch_as_traced: jc.ClosedJaxpr | None
    """The same step at twice the batch, not normalised yet: only splitting the batch needs it."""
    no_other_batch_because: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    out_tree: Any
    batch_inputs: tuple[int, ...]
    donated_inputs: tuple[int, ...]
    state_outputs: Mapping[int, int]
    """Output number -> number of the input that it replaces in the next step."""

    @cached_property
    def at_other_batch(self) -> jc.ClosedJaxpr | None:
        """The same step at twice the batch; None where it has no batch or cannot be traced so."""
        return None if self.other_batch_as_traced is None else normalize(self.other_batch_as_traced)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the program in plans: equal steps on equal shapes have equal fingerprints in every process."""
        text = re.sub(r"0x[0-9a-f]+", "0x", str(self.jaxpr))  # addresses of callbacks differ between processes
        names = "\n".join(f"{leaf.name}: {leaf.aval.dtype}{list(leaf.aval.shape)}" for leaf in self.inputs)
        return hashlib.sha256(f"{text}\n{names}".encode()).hexdigest()[:16]

    @property
    def differentiates(self) -> bool:
        """Return whether the step takes a gradient anywhere."""
        return any(jc.ad_phase(eqn) == "backward" for eqn in self.jaxpr.jaxpr.eqns)

    def __str__(self) -> str:
        phases = [jc.ad_phase(eqn) for eqn in self.jaxpr.jaxpr.eqns]
        return (
            f"Trace of {self.name} ({self.fingerprint}): {len(phases)} equations, "
            f"{phases.count('forward')} forward, {phases.count('backward')} backward, {phases.count(None)} outside of "
            f"the gradient; {len(self.inputs)} inputs ({len(self.batch_inputs)} batch, {len(self.donated_inputs)} "
            f"donated), {len(self.outputs)} outputs"
        )


@collector_paused()
def trace_step(
    flat_step: Callable[..., Any],
    leaves: Sequence[Leaf],
    *,
    name: str,
    batch_inputs: Sequence[int],
    donated_inputs: Sequence[int],
) -> Trace:
    """Trace `flat_step(*leaves)`, which returns any pytree, or `Returned`."""
    avals = [leaf.aval for leaf in leaves]
    _check_batch(leaves, batch_inputs)
    closed, out_shape = jax.make_jaxpr(flat_step, return_shape=True)(*avals)
    at_other_batch, reason = _trace_at_other_batch(flat_step, avals, batch_inputs)
    returned = out_shape if isinstance(out_shape, Returned) else Returned(result=out_shape, replaced={}, further={})
    outputs, replaced = _outputs(returned, leaves)
    return Trace(
        name=name,
        jaxpr=normalize(closed),
        other_batch_as_traced=at_other_batch,
        no_other_batch_because=reason,
        inputs=tuple(leaves),
        outputs=outputs,
        out_tree=jax.tree.structure(out_shape),
        batch_inputs=tuple(batch_inputs),
        donated_inputs=tuple(i for i in donated_inputs if i not in returned.kept),
        state_outputs=replaced | _match_state(leaves, outputs, set(batch_inputs) | set(replaced.values())),
    )


def _outputs(returned: Returned, leaves: Sequence[Leaf]) -> tuple[tuple[Leaf, ...], dict[int, int]]:
    """Return the flat outputs, and which of them take the place of which input."""
    parts = jax.tree_util.tree_leaves_with_path(returned.result)
    named = [(jax.tree_util.keystr(path), a) for path, a in parts]
    inputs = sorted(returned.replaced)
    replaced = {len(named) + i: number for i, number in enumerate(inputs)}
    named += [(f"{{{leaves[number].name}}}", returned.replaced[number]) for number in inputs]
    named += [(f"{{{name}}}", returned.further[name]) for name in sorted(returned.further)]
    outputs = [Leaf(name=name, argument=None, aval=jax.ShapeDtypeStruct(a.shape, a.dtype)) for name, a in named]
    return tuple(outputs), replaced


def _check_batch(leaves: Sequence[Leaf], batch_inputs: Sequence[int]) -> None:
    sizes = {leaves[i].name: leaves[i].aval.shape[:1] for i in batch_inputs}
    for leaf_name, size in sizes.items():
        if not size:
            raise InvalidArgument(
                f"Batch input {leaf_name} is a scalar; every batch input needs the batch as its first axis. "
                "Leave arguments without a batch axis out of batch_argnums."
            )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{n}: {s[0]}" for n, s in sizes.items())
        raise InvalidArgument(
            f"Batch inputs have different batch sizes ({listed}); one size is required on the first axis of all of "
            "them. Name only the arguments that carry the batch in batch_argnums."
        )


def _trace_at_other_batch(
    flat_step: Callable[..., Any], avals: Sequence[Any], batch_inputs: Sequence[int]
) -> tuple[jc.ClosedJaxpr | None, str]:
    if not batch_inputs:
        return None, "no argument is a batch (see batch_argnums)"
    batch = set(batch_inputs)
    larger = [
        jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype, weak_type=a.weak_type) if i in batch else a
        for i, a in enumerate(avals)
    ]
    try:
        return jax.make_jaxpr(flat_step)(*larger), ""
    # Whatever the user's own code raises at another batch size; it matters only where microbatches are asked for.
    except Exception as error:
        return None, f"tracing it at twice the batch size raised {type(error).__name__}: {error}"


def _match_state(leaves: Sequence[Leaf], outputs: Sequence[Leaf], others: set[int]) -> dict[int, int]:
    """Pair the outputs with the inputs that they replace: a subtree of the result that looks just like an argument.

    The inputs `others` are none of these.

    An argument `state` is matched by `result[0]` when every leaf of it stands there under the same path with the same
    shape and dtype.
    """
    by_path = {leaf.name: i for i, leaf in enumerate(outputs)}
    matches: dict[int, int] = {}
    arguments: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.argument is not None and i not in others:
            arguments.setdefault(leaf.argument, []).append(i)
    for members in arguments.values():
        paths = _relative_paths([leaves[i].name for i in members])
        for prefix in [p[: len(p) - len(paths[0])] for p in by_path if p.endswith(paths[0])]:
            partners = [by_path.get(prefix + path) for path in paths]
            pairs = {o: i for i, o in zip(members, partners, strict=True) if o is not None and o not in matches}
            if len(pairs) == len(members) and all(_same(leaves[i], outputs[o]) for o, i in pairs.items()):
                matches.update(pairs)
                break
    return matches


def _relative_paths(names: Sequence[str]) -> list[str]:
    """Key paths below the argument: `state.params['w']` -> `.params['w']`."""
    return [re.sub(r"^\w+", "", name) for name in names]


def _same(a: Leaf, b: Leaf) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype
