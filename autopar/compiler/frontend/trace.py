"""Trace an unmodified train step: its jaxpr, the names of its inputs and outputs, and which of them belong together.

    step, arguments, options  ->  Trace

Tracing is abstract: shapes and dtypes only, no device is touched. Which inputs carry the batch is found from what the
step does (`find_batch`), unless the user says. Where the batch is to be split, the step is traced again with as many
rows as a part has: what differs between the two says where the batch is in every value.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple

import jax

from autopar.compiler.frontend.batch_dimensions import equation_batch_dims
from autopar.compiler.frontend.compressed_gradients import check_compressed
from autopar.compiler.frontend.find_batch import FoundBatch, find_batch, unlearned_state
from autopar.compiler.frontend.host_transfers import results_on_devices, transfers_by_memory
from autopar.compiler.frontend.implementations import normalize_step
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.compiler.frontend.scopes import (
    all_scopes,
    check_stages,
    default_strategy,
    has_scopes,
    number_stages,
    scopes_text,
    with_demands,
)
from autopar.compiler.frontend.wide_gradients import with_wide_gradients
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import same_equations
from autopar.errors import InvalidArgument, Unsupported
from autopar.progress import collector_paused


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One flat input or output: its name (`state.params.w`), its argument's number, its abstract value."""

    name: str
    argument: int | None
    aval: jax.ShapeDtypeStruct


@partial(jax.tree_util.register_dataclass, data_fields=["result", "replaced", "further"], meta_fields=["kept", "rest"])
@dataclass(frozen=True, kw_only=True)
class Returned:
    """Outputs of a step beside its result: arrays that take the place of its inputs, and further ones.

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
    flat_step: Callable[..., Any]
    """The step as a function of the inputs."""
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    out_tree: Any
    """The tree of the results, the kept inputs among them."""
    batch: FoundBatch
    donated_inputs: tuple[int, ...]
    state_outputs: Mapping[int, int]
    """Output number -> number of the input that it replaces in the next step."""
    kept_inputs: Mapping[int, int]
    """Place among the results -> number of the input that stands there as it is; these are no outputs."""
    host_results: Mapping[int, str]
    """Output number -> the line by which the step itself puts it into the memory of the host."""
    reduce_dtype: str | None = None
    """The type in which gradients of fewer bits are summed; None: their own."""
    as_written: Trace | None = None
    """The step with gradients summed in their own types, if this one is another."""

    def result(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Return the result of the step, of these outputs and what it keeps of the inputs."""
        return jax.tree.unflatten(self.out_tree, self.every_result(inputs, outputs))

    def every_result(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result, of these outputs and what it keeps of the inputs."""
        every = list(outputs)
        for place, number in sorted(self.kept_inputs.items()):
            every.insert(place, inputs[number])
        return every

    @property
    def returns_more(self) -> bool:
        """Return whether there is more to the result than arrays. Nodes of the user's may take no others as leaves."""
        node = self.out_tree.node_data()
        return node is not None and node[0] is Returned

    @property
    def host_state(self) -> tuple[str, ...]:
        """The names of the inputs that the step replaces by results on the host, and that therefore live there."""
        return tuple(self.inputs[self.state_outputs[o]].name for o in self.host_results if o in self.state_outputs)

    @property
    def batch_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs that carry the batch."""
        return self.batch.inputs

    @cached_property
    def batch_axes(self) -> Mapping[int, int]:
        """For every input that carries the batch the axis along which the examples are."""
        return self.batch.by_input()

    @property
    def undonated_state(self) -> tuple[int, ...]:
        """The numbers of the arguments that the step replaces as a whole, and may not overwrite."""
        state, donated = set(self.state_outputs.values()), set(self.donated_inputs)
        others = {leaf.argument for i, leaf in enumerate(self.inputs) if i not in state or i in donated}
        return tuple(sorted({leaf.argument for leaf in self.inputs if leaf.argument is not None} - others))

    def donating(self, arguments: Collection[int]) -> Trace:
        """Return the same step that may overwrite these arguments as well."""
        more = (i for i, leaf in enumerate(self.inputs) if leaf.argument in arguments)
        return replace(self, donated_inputs=tuple(sorted({*self.donated_inputs, *more})))

    def reducing_in(self, dtype: str | None) -> Trace:
        """Return the same step with gradients of fewer bits summed in a type; None: in their own."""
        if dtype == self.reduce_dtype:
            return self
        if self.as_written is not None:
            return self.as_written.reducing_in(dtype)
        assert dtype is not None
        if dtype not in self._reducing:
            jaxpr = with_wide_gradients(self.jaxpr, dtype)
            self._reducing[dtype] = replace(self, jaxpr=jaxpr, reduce_dtype=dtype, as_written=self)
        return self._reducing[dtype]

    @cached_property
    def _reducing(self) -> dict[str, Trace]:
        return {}

    def at_batch_of(self, rows: int) -> tuple[jc.ClosedJaxpr | None, str]:
        """Return the same step on a batch of so many rows, normalised; or None and what tracing it raised."""
        if rows not in self._at_rows:
            self._at_rows[rows] = _trace_at(self, rows)
        return self._at_rows[rows]

    @property
    def rows_traced(self) -> tuple[int, ...]:
        """The other batches that were asked for so far, by their rows."""
        return tuple(self._at_rows)

    @cached_property
    def _at_rows(self) -> dict[int, tuple[jc.ClosedJaxpr | None, str]]:
        return {}

    @cached_property
    def at_other_batch(self) -> jc.ClosedJaxpr | None:
        """The same step on another batch, to see what grows with it; None if there is none.

        It has half of the rows, as a part of a batch has fewer: code may take no more than there are. If it is another
        program then, or the rows cannot be halved, it has twice as many.
        """
        if not self.batch_inputs:
            return None
        rows = self.num_rows
        sizes = [rows // 2, 2 * rows] if rows % 2 == 0 and rows > 2 else [2 * rows]
        traced: list[jc.ClosedJaxpr] = []
        for size in sizes:
            twin, _ = self.at_batch_of(size)
            if twin is not None and same_equations(self.jaxpr, twin):
                return twin
            traced += [] if twin is None else [twin]
        return traced[0] if traced else None

    @property
    def num_rows(self) -> int:
        """The number of examples in the batch."""
        number = self.batch_inputs[0]
        return self.inputs[number].aval.shape[self.batch_axes[number]]

    @property
    def no_other_batch_because(self) -> str:
        """The reason for which there is no trace at another batch."""
        if not self.batch_inputs:
            return self.batch.missing or "no argument is a batch (see batch_argnums)"
        return self.at_batch_of(2 * self.num_rows)[1]

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the program in plans: equal steps on equal shapes have equal fingerprints in every process.

        In which type gradients are summed is a decision of the plan.
        """
        if self.as_written is not None:
            return self.as_written.fingerprint
        text = re.sub(r"0x[0-9a-f]+", "0x", str(self.jaxpr))  # addresses of callbacks differ between processes
        names = "\n".join(f"{leaf.name}: {leaf.aval.dtype}{list(leaf.aval.shape)}" for leaf in self.inputs)
        words = scopes_text(self.jaxpr)
        on_host = "".join(f"\non the host: {name}" for name in self.host_state)
        return hashlib.sha256(f"{text}\n{names}{words}{on_host}".encode()).hexdigest()[:16]

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
    batch_inputs: Sequence[int] | None,
    donated_inputs: Sequence[int],
    unbatched_inputs: Collection[int] = (),
    batch_axes: Mapping[int, int] | None = None,
    keeps_inputs: bool = False,
) -> Trace:
    """Trace `flat_step(*leaves)`, which returns any pytree, or `Returned`.

    With `keeps_inputs` what it returns of its inputs as they are is no output of the program.

    `batch_inputs` is the user's word on what carries the batch; None: it is found, outside of `unbatched_inputs`.
    `batch_axes` are the axes of those that do not carry it on their first one.
    """
    given = {i: 0 for i in batch_inputs or () if i not in unbatched_inputs} | checked_axes(leaves, batch_axes or {})
    _check_batch(leaves, given)
    closed, outputs, results = _traced(flat_step, leaves)
    replaced = results.replaced
    closed, host_results = results_on_devices(transfers_by_memory(normalize_step(closed)))
    closed = number_stages(closed)
    check_compressed(closed)
    kept = _kept(closed) if keeps_inputs else {}
    if kept:
        rest = [place for place in range(len(outputs)) if place not in kept]
        closed, outputs = jc.with_outputs(closed, rest), tuple(outputs[place] for place in rest)
        replaced = {rest.index(place): number for place, number in replaced.items() if place not in kept}
        host_results = {rest.index(place): line for place, line in host_results.items() if place not in kept}
    if batch_inputs is None:
        state = _whole_subtrees(leaves, outputs, replaced, ())
        batch = find_batch(
            closed,
            [leaf.name for leaf in leaves],
            [leaf.argument for leaf in leaves],
            state=set(state.values()),
            unbatched=unbatched_inputs,
            given_axes=given,
            unlearned=unlearned_state(closed, state),
        )
        if not batch.inputs and not batch.ambiguous:
            batch = _batch_of_one(flat_step, leaves, {*state.values(), *unbatched_inputs}) or batch
    else:
        batch = FoundBatch.along(given)
        state = _whole_subtrees(leaves, outputs, replaced, batch.inputs)
    trace = Trace(
        name=name,
        jaxpr=closed,
        flat_step=flat_step,
        inputs=tuple(leaves),
        outputs=outputs,
        out_tree=results.tree,
        batch=batch,
        donated_inputs=tuple(i for i in donated_inputs if i not in {*results.kept, *kept.values()}),
        state_outputs=_single_leaves(leaves, outputs, state, batch.inputs),
        kept_inputs=kept,
        host_results=host_results,
    )
    if batch_inputs is None:
        trace = _with_companions(trace, unbatched_inputs)
    return _with_scopes(trace) if has_scopes(closed) else trace


def _with_companions(trace: Trace, unbatched: Collection[int]) -> Trace:
    """Return the step with those inputs of as many rows in its batch without which no other batch can be traced.

    The rows of a matrix of all pairs may be summed up first; that they are examples as well shows as their number
    changes.
    """
    companions = [i for i in _inputs_of_as_many_rows(trace) if i not in unbatched] if trace.batch_inputs else []
    if not companions or trace.at_other_batch is not None:
        return trace
    wider = replace(trace, batch=FoundBatch.along({**trace.batch_axes, **dict.fromkeys(companions, 0)}))
    return trace if wider.at_other_batch is None else wider


def _with_scopes(trace: Trace) -> Trace:
    """The same step with what the user's scopes ask noted at its equations."""
    check_stages(trace.jaxpr)
    twin = trace.at_other_batch
    dims = None if twin is None else equation_batch_dims(trace.jaxpr, jc.all_equations(twin))
    if dims is None:
        why = trace.no_other_batch_because if twin is None else "the step is another program on another batch"
        scope = next(iter(all_scopes(trace.jaxpr)), default_strategy())
        raise Unsupported(
            f"{trace.name} has {scope}, which must know which dimensions carry the examples: {why}. "
            "Say which arguments are the batch (batch_argnums), or leave the scopes out."
        )
    return replace(trace, jaxpr=with_demands(trace.jaxpr, dims))


class _Results(NamedTuple):
    """Results of a step: the names of all leaves, the number of the input that each replaces, the tree, kept inputs."""

    names: list[str]
    replaced: dict[int, int]
    tree: Any
    kept: tuple[int, ...]


def _traced(flat_step: Callable[..., Any], leaves: Sequence[Leaf]) -> tuple[jc.ClosedJaxpr, tuple[Leaf, ...], _Results]:
    """Return a step's program, outputs and results. Nodes of the user's are made of tracers only, as by `jax.jit`."""
    found: list[_Results] = []

    @wraps(flat_step)
    def flat(*values: Any) -> list[Any]:
        made = flat_step(*values)
        returned = made if isinstance(made, Returned) else Returned(result=made, replaced={}, further={})
        names = [leaf_name("", path) for path, _ in jax.tree_util.tree_leaves_with_path(returned.result)]
        replaced = {len(names) + i: number for i, number in enumerate(sorted(returned.replaced))}
        names += [f"{{{leaves[number].name}}}" for number in replaced.values()]
        names += [f"{{{name}}}" for name in sorted(returned.further)]
        outputs, tree = jax.tree.flatten(made)
        found.append(_Results(names, replaced, tree, returned.kept))
        return outputs

    closed = jax.make_jaxpr(flat)(*(leaf.aval for leaf in leaves))
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in closed.out_avals]
    named = zip(found[-1].names, avals, strict=True)
    return closed, tuple(Leaf(name=name, argument=None, aval=aval) for name, aval in named), found[-1]


def _kept(closed: jc.ClosedJaxpr) -> dict[int, int]:
    jaxpr, _ = jc.open_jaxpr(closed)
    numbers = {v: number for number, v in enumerate(jaxpr.invars)}
    return {place: numbers[v] for place, v in enumerate(jaxpr.outvars) if isinstance(v, jc.Var) and v in numbers}


def _batch_of_one(flat_step: Callable[..., Any], leaves: Sequence[Leaf], others: Collection[int]) -> FoundBatch | None:
    """Return the batch of a step on one example, found on two: an axis of one shows nothing. None if there is none.

    `others` are the inputs that are no batch.
    """
    of_one = {i for i, leaf in enumerate(leaves) if i not in others and leaf.aval.shape[:1] == (1,)}
    if not of_one:
        return None
    try:
        avals = _with_rows([leaf.aval for leaf in leaves], dict.fromkeys(of_one, 0), 2)
        closed = normalize_step(jax.make_jaxpr(flat_step)(*avals))
    # Whatever the user's own code raises where one of them is no batch, and has to stay as it is.
    except Exception:
        return None
    names, arguments = [leaf.name for leaf in leaves], [leaf.argument for leaf in leaves]
    found = find_batch(closed, names, arguments, state=others)
    return found if found.inputs and of_one.issuperset(found.inputs) and not any(found.axes) else None


def _with_rows(avals: Sequence[Any], axes: Mapping[int, int], rows: int) -> list[Any]:
    """Return the types of the inputs of a step on so many rows, along these axes."""

    def at(a: Any, axis: int) -> jax.ShapeDtypeStruct:
        shape = (*a.shape[:axis], rows, *a.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, a.dtype, weak_type=a.weak_type)

    return [at(a, axes[i]) if i in axes else a for i, a in enumerate(avals)]


def checked_axes(leaves: Sequence[Leaf], axes: Mapping[int, int]) -> dict[int, int]:
    """Return axes counted from the first one. Raises `InvalidArgument` for one that an input does not have."""
    for i, axis in axes.items():
        shape = list(leaves[i].aval.shape)
        if not -len(shape) <= axis < len(shape):
            raise InvalidArgument(
                f"batch_axes has the batch on axis {axis} of {leaves[i].name}, whose shape is {shape}. Name an axis "
                "that it has, counted from 0."
            )
    return {i: axis % leaves[i].aval.ndim for i, axis in axes.items()}


def _check_batch(leaves: Sequence[Leaf], axes: Mapping[int, int]) -> None:
    sizes = {leaves[i].name: leaves[i].aval.shape[axis : axis + 1] for i, axis in axes.items()}
    for name, size in sizes.items():
        if not size:
            raise InvalidArgument(
                f"Batch input {name} is a scalar; every batch input needs the batch as its first axis. "
                "Leave arguments without a batch axis out of batch_argnums, or inputs without one by unbatched."
            )
    first = {size[0]: name for name, size in reversed(sizes.items())}
    if len(first) > 1:
        listed = ", ".join(f"{name}: {size}" for size, name in reversed(first.items()))
        raise InvalidArgument(
            f"Batch inputs have different batch sizes ({listed}); one size is required on the first axis of all of "
            "them. Name only the arguments that carry the batch in batch_argnums, inputs without it in unbatched, and "
            "those that have it on another axis in batch_axes; stack a list of examples (jnp.stack)."
        )


def _trace_at(trace: Trace, rows: int) -> tuple[jc.ClosedJaxpr | None, str]:
    avals = _with_rows([leaf.aval for leaf in trace.inputs], trace.batch_axes, rows)
    try:
        closed = transfers_by_memory(normalize_step(jax.make_jaxpr(trace.flat_step)(*avals)))
        twin = number_stages(results_on_devices(closed)[0])
        twin = twin if trace.reduce_dtype is None else with_wide_gradients(twin, trace.reduce_dtype)
    # Whatever the user's own code raises at another batch size; it matters only where the batch is split.
    except Exception as error:
        said = f"tracing it with a batch of {rows} raised {type(error).__name__}: {str(error).rstrip('.')}"
        names = ", ".join(trace.inputs[i].name for i in _inputs_of_as_many_rows(trace))
        if names:
            said += (
                f". {names} kept {trace.num_rows} rows there: if these are the batch as well, name all arguments that "
                "carry it in batch_argnums"
            )
        return None, said
    places = range(len(trace.outputs) + len(trace.kept_inputs))
    return jc.with_outputs(twin, [place for place in places if place not in trace.kept_inputs]), ""


def _inputs_of_as_many_rows(trace: Trace) -> list[int]:
    """Return the inputs that may carry the batch too, by the number of their rows."""
    known, rows = {*trace.batch_inputs, *trace.state_outputs.values()}, (trace.num_rows,)
    return [i for i, leaf in enumerate(trace.inputs) if i not in known and leaf.aval.shape[:1] == rows]


def _whole_subtrees(
    leaves: Sequence[Leaf], outputs: Sequence[Leaf], known: Mapping[int, int], batch: Collection[int]
) -> dict[int, int]:
    """Pair the outputs with the inputs outside of the batch that they replace, by subtrees of several leaves.

    The pairs that are `known` are among them.

    A subtree of the arguments is replaced by one of the result where every leaf of it stands under the same path with
    the same shape and dtype; the largest subtrees are matched first.
    """
    paths, results = [_keys(leaf.name) for leaf in leaves], [_keys(leaf.name) for leaf in outputs]
    ending: dict[str, list[tuple[str, ...]]] = {}
    for path in results:
        ending.setdefault(path[-1] if path else "", []).append(path)
    by_path = {path: o for o, path in enumerate(results)}
    matches, taken = dict(known), set(known.values())
    members: dict[tuple[str, ...], list[int]] = {}
    for i, path in enumerate(paths):
        for length in range(1, len(path)) if i not in batch and i not in taken else ():
            members.setdefault(path[:length], []).append(i)
    for root, inside in sorted(members.items(), key=lambda item: -len(item[1])):
        if len(inside) == 1 or not taken.isdisjoint(inside):
            continue
        below = [paths[i][len(root) :] for i in inside]
        for end in ending.get(below[0][-1], ()):
            where = end[: len(end) - len(below[0])]
            partners = [by_path.get(where + path) for path in below]
            pairs = {o: i for i, o in zip(inside, partners, strict=True) if o is not None and o not in matches}
            if len(pairs) == len(inside) and all(_same(leaves[i], outputs[o]) for o, i in pairs.items()):
                matches.update(pairs)
                taken.update(inside)
                break
    return matches


def _single_leaves(
    leaves: Sequence[Leaf], outputs: Sequence[Leaf], matches: Mapping[int, int], batch: Collection[int]
) -> dict[int, int]:
    """Pair what is left: an input outside of the batch with a result that looks like it, by the end of its path.

    An argument of one array has no path; it is paired with the first result of its shape and dtype.
    """
    found, taken = dict(matches), set(matches.values()) | set(batch)
    sizes = Counter(leaf.argument for leaf in leaves)
    results = {o: _keys(output.name) for o, output in enumerate(outputs) if o not in matches}
    for i in (i for i in range(len(leaves)) if i not in taken):
        path = _keys(leaves[i].name)[1:]
        alike = [o for o in results if o not in found and _same(leaves[i], outputs[o])]
        best = max(alike, key=lambda o: _meet(path, results[o]), default=None)
        if best is not None and (sizes[leaves[i].argument] == 1 or _meet(path, results[best])):
            found[best] = i
    return found


def common_ending(name: str, other: str) -> int:
    """Return the number of keys at the end of two names that are the same."""
    return _meet(_keys(name), _keys(other))


def _meet(path: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(reversed(path), reversed(other))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _keys(name: str) -> tuple[str, ...]:
    """The keys of a path: `state.params.w.0` -> state, params, w, 0."""
    return tuple(key for key in re.split(r"[.'\"]+", name) if key)


def _same(a: Leaf, b: Leaf) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype
