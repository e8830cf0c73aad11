"""Sort the arguments of a call: which are static, which are traced, which carry the batch, which are donated.

    step(state, batch, train=True)  ->  flat leaves, their tree, and the static values

Arguments may be named by position or by name, however the caller passes them. Arrays and numbers are traced, as by
`jax.jit`; whatever else stands among the leaves (functions, words, dtypes) is static by itself, and so are the numbers
inside of an Equinox module, which are its hyperparameters. Results are read in the same way.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import nnx_objects
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.compiler.frontend.scopes import default_strategy
from autopar.compiler.frontend.trace import Returned
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import InvalidArgument, Unsupported
from autopar.nnx_objects import ObjectGraph, ObjectPlace


@dataclass(frozen=True, kw_only=True)
class ArgumentRoles:
    """The user's words on the arguments of a step."""

    batch_argnums: tuple[int, ...] | None = None
    """Numbers of the arguments with the batch; None: the batch is found."""
    unbatched: tuple[str, ...] = ()
    """Patterns that find, by name, the inputs without a batch."""
    batch_axes: tuple[tuple[str, int], ...] = ()
    """Patterns that find, by name, inputs with the batch, and the axis on which they have it."""
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    axis_name: str | None = None
    """The axis that a step written for `jax.pmap` reduces over."""
    keeps_inputs: bool = False
    """True if arguments that the step returns as they are stay the caller's own, as of a step that follows another."""
    static_numbers: bool = False
    """True if Python's numbers are static, as by `eqx.filter_jit`."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """A value that a step is compiled for. Equal values of other types are others, so 1, 1.0 and True are three."""

    value: Hashable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and _with_types(self.value) == _with_types(other.value)

    def __hash__(self) -> int:
        return hash(self.value)


def _with_types(value: Any) -> Any:
    return (type(value), tuple(map(_with_types, value)) if type(value) is tuple else value)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call's arguments. `leaves` are the traced ones, flat; all else can be hashed and compared.

    `tree` is that of all leaves: of the positional arguments by number, of those by name, and of the NNX objects among
    them, if there are any. `references` finds these objects again.
    """

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int | str, Static], ...] = ()
    static_leaves: tuple[tuple[int, Static], ...] = ()
    """The leaves that are static by themselves, by their place among all leaves."""
    num_positional: int
    settings: Hashable = ()
    references: Any = None

    def without_values(self, names: Sequence[str]) -> Call:
        """Return the same call of shapes and dtypes alone; `names` of the leaves are for messages."""
        shapes: list[Any] = [abstract(leaf, name) for leaf, name in zip(self.leaves, names, strict=True)]
        return replace(self, leaves=shapes, references=None)

    def unflatten(self, leaves: Sequence[Any]) -> tuple[dict[int, Any], dict[str, Any], ObjectGraph | None]:
        """Return the arguments with `leaves` as the traced ones: by position, by name, and the objects of both."""
        every = list(leaves)
        for place, static in self.static_leaves:
            every.insert(place, static.value)
        return jax.tree.unflatten(self.tree, every)

    def key(self) -> Hashable:
        """Return a value that is equal for calls that one compiled step serves."""
        return (*self._structure(), tuple(map(leaf_type, self.leaves)))

    def key_of_successor(self, state: Collection[int]) -> Hashable:
        """The key of the next call, where the leaves `state` are results of this one: arrays, no longer numbers."""
        types = [leaf_type(leaf) for leaf in self.leaves]
        types = [(*t[:2], False) if i in state else t for i, t in enumerate(types)]
        return (*self._structure(), tuple(types))

    def _structure(self) -> tuple[Hashable, ...]:
        return (self.settings, self.static, self.static_leaves, self.num_positional, self.tree)


class Arguments:
    """Sorts the arguments of calls of one function."""

    def __init__(self, fun: Callable[..., Any], roles: ArgumentRoles, name: str | None = None) -> None:
        self.name = name or getattr(fun, "__name__", type(fun).__name__)
        self.fun, self.roles = fun, roles = _without_jit(fun, roles)
        self._trees_with_objects: dict[Any, bool] = {}
        self._static_among: dict[Any, Collection[int]] = {}
        self.positional = _positional_names(fun)
        self.static_positions = self._positions("static_argnums", roles.static_argnums)
        self._check_names("static_argnames", roles.static_argnames)
        self._check_names("donate_argnames", roles.donate_argnames)
        self.static_names = frozenset(roles.static_argnames) | {
            self.positional[i] for i in self.static_positions if i < len(self.positional)
        }
        self.static_positions |= {i for i, n in enumerate(self.positional) if n in self.static_names}
        self.batch = None if roles.batch_argnums is None else self._positions("batch_argnums", roles.batch_argnums)
        self.donated_names = frozenset(roles.donate_argnames)
        self.donated = self._positions("donate_argnums", roles.donate_argnums) | {
            i for i, name in enumerate(self.positional) if name in self.donated_names
        }
        both = ((self.batch or frozenset()) | self.donated) & self.static_positions
        if both:
            raise InvalidArgument(
                f"Argument {min(both)} of {self.name} is static, and cannot be a batch or donated as well. Static "
                "arguments are Python values that the step is compiled for; name it in one place only."
            )

    def _positions(self, option: str, numbers: Sequence[int] | int) -> frozenset[int]:
        positions: set[int] = set()
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            count = len(self.positional)
            position = number + count if number < 0 else number
            if count and not 0 <= position < count and not _takes_any(self.fun):
                raise InvalidArgument(
                    f"{option} names argument {number}, but {self.name} takes {count} positional arguments "
                    f"({', '.join(self.positional)}). Count them from 0."
                )
            positions.add(position)
        return frozenset(positions)

    def _check_names(self, option: str, names: Sequence[str]) -> None:
        taken = _names(self.fun)
        for name in names:
            if taken is not None and name not in taken:
                raise InvalidArgument(
                    f"{option} names {name!r}, but {self.name} takes {', '.join(taken)}. Name one of these."
                )

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Sort one call's arguments."""
        static: list[tuple[int | str, Static]] = []
        traced_args: dict[int, Any] = {}
        traced_kwargs: dict[str, Any] = {}
        for i, value in enumerate(args):
            if i in self.static_positions:
                static.append((i, Static(self._hashable(i, value))))
            else:
                traced_args[i] = value
        for name, value in kwargs.items():
            if name in self.static_names:
                static.append((name, Static(self._hashable(name, value))))
            else:
                traced_kwargs[name] = value
        graph = references = None
        if self._holds_objects((traced_args, traced_kwargs)):
            (traced_args, traced_kwargs), objects = nnx_objects.take_objects((traced_args, traced_kwargs))
            graph, references = nnx_objects.split(objects)
        return self.call_of((traced_args, traced_kwargs, graph), tuple(static), len(args), references)

    def call_of(
        self,
        traced: tuple[dict[int, Any], dict[str, Any], ObjectGraph | None],
        static: tuple[tuple[int | str, Static], ...],
        num_positional: int,
        references: Any = None,
    ) -> Call:
        """Return the call of these arguments: by position, by name, and the objects that have places in them."""
        leaves, tree = jax.tree.flatten(traced)
        places = self._static_places(leaves, tree)
        return Call(
            leaves=[leaf for i, leaf in enumerate(leaves) if i not in places] if places else leaves,
            tree=tree,
            static=static,
            static_leaves=tuple((i, Static(leaves[i])) for i in places),
            num_positional=num_positional,
            settings=(jc.settings(), default_strategy()),
            references=references,
        )

    def _holds_objects(self, arguments: tuple[dict[int, Any], dict[str, Any]]) -> bool:
        if not nnx_objects.may_hold_objects():
            return False
        if any(nnx_objects.is_object(value) for each in arguments for value in each.values()):
            return True
        tree = jax.tree.structure(arguments)
        if tree not in self._trees_with_objects:
            found = jax.tree.leaves(arguments, is_leaf=nnx_objects.is_object)
            self._trees_with_objects[tree] = any(map(nnx_objects.is_object, found))
        return self._trees_with_objects[tree]

    def _static_places(self, leaves: Sequence[Any], tree: Any) -> Collection[int]:
        """Return the places of the leaves that are static by themselves, in order."""
        types = tuple(map(type, leaves))
        places = self._static_among.get((tree, types))
        if places is None:
            places = dict.fromkeys(static_places(leaves, tree, numbers=self.roles.static_numbers))
            self._static_among[tree, types] = places
        for place in places:
            self._check_static_leaf(leaves, tree, place)
        return places

    def _check_static_leaf(self, leaves: Sequence[Any], tree: Any, place: int) -> None:
        try:
            hash(leaves[place])
        except TypeError:
            call = Call(leaves=list(leaves), tree=tree, num_positional=0)
            raise _no_array(
                leaves[place],
                self.describe_leaves(call)[place][0],
                ": no array or number, which could be traced, and nothing that can be hashed, which the step could be "
                "compiled for. Pass an array, or a value that can be hashed.",
            ) from None

    def _hashable(self, where: int | str, value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError:
            raise InvalidArgument(
                f"Static argument {where!r} of {self.name} is a {type(value).__name__}, which cannot be hashed. "
                "The step is compiled once for each static value, so it must be hashable: pass a tuple or a frozen "
                "dataclass, or make it a traced argument."
            ) from None
        return value

    def call_flat(self, call: Call) -> Callable[..., Any]:
        """Return the function of the traced leaves alone.

        It returns the step's result, or `Returned` if there is more to it: static leaves, and what the step changed in
        place in objects of the call.
        """

        def flat(*leaves: Any) -> Any:
            positional, named, graph = call.unflatten(leaves)
            copies, merged = ([], None) if graph is None else nnx_objects.merge(graph)
            if copies:
                positional, named = nnx_objects.put_objects((positional, named), copies)
            before = _variables((positional, named))
            result = self._call(call, positional, named)
            self._check_kept(before, result)
            if graph is None:
                places = self._result_places(result)
                return Returned(result=_with_static(result, places), replaced={}, further={}) if places else result
            result, made = nnx_objects.take_objects(result, len(copies))
            result = _with_static(result, self._result_places(result))
            return _changed(result, graph, nnx_objects.split_changed([*copies, *made], merged), leaves)

        made = flat if self.roles.axis_name is None else _over_axis(flat, self.roles.axis_name)
        return jc.named_as(self.fun, (name for name, _ in self.describe_leaves(call)), made)

    def bound(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain step, operation by operation."""
        if self.roles.axis_name is None:
            return self.fun(*args, **kwargs)
        call = self.split(args, kwargs)
        return self.result(call, self.call_flat(call)(*call.leaves))

    def _call(self, call: Call, positional: dict[int, Any], named: dict[str, Any]) -> Any:
        every = {**positional, **named} | {where: static.value for where, static in call.static}
        by_name = {name: value for name, value in every.items() if isinstance(name, str)}
        return self.fun(*[every[i] for i in range(call.num_positional)], **by_name)

    def _result_places(self, result: Any) -> list[int]:
        return static_places(*jax.tree.flatten(result), numbers=self.roles.static_numbers)

    def _check_kept(self, variables: Sequence[tuple[Any, Any]], result: Any) -> None:
        """Raise `InvalidArgument` if the step changes variables of an `nnx.State` and returns none of them."""
        changed = [v.get_raw_value() for v, value in variables if v.get_raw_value() is not value]
        returned = {id(leaf) for leaf in jax.tree.leaves(result)} if changed else set[int]()
        if changed and returned.isdisjoint(map(id, jax.tree.leaves(changed))):
            raise InvalidArgument(
                f"{self.name} changes a variable of an nnx.State in place, and returns none that it changed. A State "
                "is a plain tree of arrays, of which the step has a copy: pass the module itself, or return the new "
                "State."
            )

    def result(self, call: Call, returned: Any) -> Any:
        """Return the result of the step, and change the objects of the call in place, as the step did."""
        result = self._result_alone(returned)
        if not isinstance(returned, Returned) or returned.rest is None:
            return result
        structure, tree, sources = returned.rest
        given = {"kept": call.leaves, "replaced": returned.replaced, "further": returned.further}
        found = [key.value if kind == "static" else given[kind][key] for kind, key in sources]
        arrays = jax.tree.unflatten(tree, found)
        objects = nnx_objects.update(ObjectGraph(arrays, structure), call.references)
        return nnx_objects.put_objects(result, objects)

    def result_types(self, call: Call) -> Any:
        """Return the result of the step with a `jax.ShapeDtypeStruct` for every array; nothing is computed."""
        leaves = [abstract(leaf, name) for (name, _), leaf in zip(self.describe_leaves(call), call.leaves, strict=True)]
        return self._result_alone(jax.eval_shape(self.call_flat(call), *leaves))

    def _result_alone(self, returned: Any) -> Any:
        """Return what the step returns itself, its static leaves among it."""
        if not isinstance(returned, Returned):
            return returned
        return jax.tree.map(lambda x: x.value if _is_static(x) else x, returned.result, is_leaf=_is_static)

    def describe_leaves(self, call: Call) -> list[tuple[str, int | None]]:
        """Return of every leaf its name in messages and plans, and its argument's position (None: by keyword only)."""
        static = {place for place, _ in call.static_leaves}
        return [named for i, named in enumerate(self._describe_all(call)) if i not in static]

    def _describe_all(self, call: Call) -> Iterator[tuple[str, int | None]]:
        positional, named, graph = call.unflatten(call.leaves)
        places: dict[int, tuple[str, int | None]] = {}
        arguments = [(self.positional[i] if i < len(self.positional) else f"args[{i}]", i) for i in positional]
        arguments += [
            (name, self.positional.index(name) if name in self.positional else None) for name in sorted(named)
        ]
        for (name, position), value in zip(arguments, [*positional.values(), *(named[n] for n in sorted(named))]):
            for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_place):
                described = (leaf_name(name, path), position)
                if isinstance(leaf, ObjectPlace):
                    places[leaf.number] = described
                else:
                    yield described
        for number, path in nnx_objects.array_paths(graph) if graph is not None else ():
            name, position = places[number]
            yield leaf_name(name, path), position

    def batch_leaves(self, described: Sequence[tuple[str, int | None]]) -> list[int] | None:
        """Return the numbers of the leaves that the user names as the batch; None if it is to be found."""
        return (
            None if self.batch is None else [i for i, (_, position) in enumerate(described) if position in self.batch]
        )

    def donated_leaves(self, described: Sequence[tuple[str, int | None]]) -> list[int]:
        """Return the numbers of the leaves whose buffers the step may take, by the position or the name."""
        return [
            i
            for i, (name, position) in enumerate(described)
            if position in self.donated or name.partition(".")[0] in self.donated_names
        ]

    def unbatched_leaves(self, described: Sequence[tuple[str, int | None]]) -> set[int]:
        """Return the numbers of the leaves that the user says carry no batch.

        Raises `InvalidArgument` for a pattern that finds none.
        """
        return {i for pattern in self.roles.unbatched for i in self._called("unbatched", pattern, described)}

    def batch_axes(self, described: Sequence[tuple[str, int | None]]) -> dict[int, int]:
        """Return by number the axis on which the user says that an input carries the batch.

        Raises `InvalidArgument` for a pattern that finds no input, or one that carries no batch.
        """
        axes: dict[int, int] = {}
        for pattern, axis in self.roles.batch_axes:
            for number in self._called("batch_axes", pattern, described):
                axes.setdefault(number, axis)
        both = axes.keys() & self.unbatched_leaves(described)
        if both:
            raise InvalidArgument(
                f"{described[min(both)][0]} has a batch by batch_axes and none by unbatched. Name it in one of them."
            )
        return axes

    def _called(self, option: str, pattern: str, described: Sequence[tuple[str, int | None]]) -> list[int]:
        found = [i for i, (name, _) in enumerate(described) if re.search(pattern, name)]
        if not found:
            raise InvalidArgument(
                f"{option} has the pattern {pattern!r}, which finds no input of {self.name}. Its inputs are named "
                f"like {', '.join(name for name, _ in described[:4])}: give a regular expression that finds one."
            )
        return found


def _over_axis(flat: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Return the function with the axis bound: of size 1, so that one shard is the whole batch."""

    def over_axis(*leaves: Any) -> Any:
        bind = functools.partial(jax.vmap, flat, in_axes=None, axis_size=1, axis_name=axis_name)
        try:
            return bind(out_axes=None)(*leaves)
        except ValueError as error:
            if "out_axes is None" not in str(error):
                raise
        # The step asks for its place on the axis, so that results have the axis, too.
        return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), bind(out_axes=0)(*leaves))

    return over_axis


def static_places(leaves: Sequence[Any], tree: Any, *, numbers: bool = False) -> list[int]:
    """Return the places of the leaves that no trace can take; with `numbers`, Python's numbers are among them.

    Numbers inside of an Equinox module always are: they are its hyperparameters, which its code branches on.
    """
    if all(isinstance(leaf, jax.Array) for leaf in leaves):
        return []
    inside = _inside_of_equinox(leaves, tree)
    return [i for i, leaf in enumerate(leaves) if not _is_traced(leaf, number=not (numbers or inside[i]))]


def _is_traced(leaf: Any, *, number: bool) -> bool:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or _on_cluster(leaf):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
    if isinstance(leaf, enum.Enum) or (isinstance(leaf, bool | int | float | complex) and not number):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _inside_of_equinox(leaves: Sequence[Any], tree: Any) -> list[bool]:
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return [False] * len(leaves)

    def is_module(value: Any) -> bool:
        return isinstance(value, equinox.Module)

    parts = jax.tree.leaves(jax.tree.unflatten(tree, leaves), is_leaf=is_module)
    return [is_module(part) for part in parts for _ in jax.tree.leaves(part)]


def _is_static(value: Any) -> bool:
    return isinstance(value, Static)


def _is_place(value: Any) -> bool:
    return isinstance(value, ObjectPlace)


def _with_static(tree: Any, places: Collection[int]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [Static(leaf) if i in places else leaf for i, leaf in enumerate(leaves)])


def _variables(tree: Any) -> list[tuple[Any, Any]]:
    """Return the NNX variables that stand in no object, with their values."""
    if not nnx_objects.may_hold_objects():
        return []

    def is_whole(value: Any) -> bool:
        return nnx_objects.is_object(value) or nnx_objects.is_variable(value)

    found = jax.tree.leaves(tree, is_leaf=is_whole)
    return [(variable, variable.get_raw_value()) for variable in found if nnx_objects.is_variable(variable)]


def _changed(result: Any, before: ObjectGraph, after: ObjectGraph, leaves: Sequence[Any]) -> Returned:
    """Return the result, with the arrays after the step that are none of the traced `leaves`, which went in.

    `rest` says where every array after the step is found.
    """
    numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
    stood = {path: numbers.get(id(array)) for path, array in zip(nnx_objects.array_paths(before), _arrays(before))}
    replaced: dict[int, Any] = {}
    further: dict[str, Any] = {}
    sources: list[tuple[str, Hashable]] = []
    for path, array in zip(nnx_objects.array_paths(after), _arrays(after)):
        number = stood.get(path)
        if id(array) in numbers:
            sources.append(("kept", numbers[id(array)]))
        elif not _is_traced(array, number=True):
            sources.append(("static", Static(array)))
        elif (
            number is not None
            and jax.typeof(array).shape == leaves[number].shape
            and (jax.typeof(array).dtype == leaves[number].dtype)
        ):
            replaced[number] = array
            sources.append(("replaced", number))
        else:
            further[leaf_name(f"new{len(further)}", path[1])] = array
            sources.append(("further", list(further)[-1]))
    kept = tuple(sorted({key for kind, key in sources if kind == "kept" and isinstance(key, int)}))
    rest = (after.structure, jax.tree.structure(after.arrays), tuple(sources))
    return Returned(result=result, replaced=replaced, further=further, kept=kept, rest=rest)


def _arrays(graph: ObjectGraph) -> list[Any]:
    return jax.tree.leaves(graph.arrays)


def _without_jit(fun: Callable[..., Any], roles: ArgumentRoles) -> tuple[Callable[..., Any], ArgumentRoles]:
    """Return the function, and the roles of its arguments.

    `nnx.jit` and `eqx.filter_jit` are taken off, and what they and `jax.jit` were told of the arguments is a role of
    them. `jax.jit` itself stays around the function: nothing that it does is lost when it is traced.
    """
    options = jc.jit_options(fun)
    if options is not None:
        return fun, _with_options(roles, options)
    jitted = nnx_objects.jitted_function(fun)
    if jitted is not None:
        return fun.__wrapped__, _with_options(roles, jc.jit_options(jitted) or {})  # pyright: ignore
    equinox = sys.modules.get("equinox")
    if equinox is not None and isinstance(fun, type(equinox.filter_jit(_positional_names))):
        wrapped: Any = fun.__wrapped__  # pyright: ignore
        donated = {0: getattr(fun, "donate_first", False)}
        donated |= dict.fromkeys(range(1, len(_positional_names(wrapped))), getattr(fun, "donate_rest", False))
        options = {"donate_argnums": tuple(i for i, is_donated in donated.items() if is_donated)}
        return wrapped, replace(_with_options(roles, options), static_numbers=True)
    return fun, roles


def _with_options(roles: ArgumentRoles, options: Mapping[str, tuple[Any, ...]]) -> ArgumentRoles:
    donated = (*roles.donate_argnums, *options.get("donate_argnums", ()))
    return replace(
        roles,
        static_argnums=(*roles.static_argnums, *options.get("static_argnums", ())),
        static_argnames=(*roles.static_argnames, *options.get("static_argnames", ())),
        donate_argnums=tuple(dict.fromkeys(donated)),
        donate_argnames=(*roles.donate_argnames, *options.get("donate_argnames", ())),
    )


def _positional_names(fun: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return ()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _names(fun: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments that may be passed by name; None if any may."""
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name, p in parameters.items() if p.kind in kinds)


def _takes_any(fun: Callable[..., Any]) -> bool:
    parameters = inspect.signature(fun).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def leaf_type(leaf: Any) -> tuple[Any, Any, bool]:
    """Return what a compiled step depends on: shape, dtype, and whether the dtype is a Python number's."""
    # Every leaf of every call passes here. To ask `isinstance(leaf, jax.Array)` takes longer than all of the rest.
    aval = getattr(leaf, "aval", None)
    if aval is None:
        try:  # of numpy's 64 bits `typeof` keeps what JAX is set to keep
            aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        except TypeError:  # no array: tracing names it
            return ((), type(leaf), False)
    return (aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False)))


def _on_cluster(leaf: Any) -> bool:
    """Return True for a value of a cluster, which must not be fetched to learn its type."""
    return isinstance(getattr(leaf, "aval", None), jax.ShapeDtypeStruct)


def abstract(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an argument, as JAX will see it. Raises `InvalidArgument` for what is no array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if _on_cluster(leaf):
        return leaf.aval
    if isinstance(leaf, jax.Ref):
        raise Unsupported(
            f"{name} is a jax.Ref, and devices do not share one. Pass its value, {name}[...], return the new one, and "
            "write that into the reference after the call; references that the step makes itself are supported."
        )
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        raise _no_array(
            leaf,
            name,
            "; arrays and numbers are required. Name the argument in static_argnums or static_argnames if the step is "
            "to be compiled for its value.",
        ) from None
    weak = bool(getattr(aval, "weak_type", False))
    dtype = aval.dtype if isinstance(leaf, jax.Array) else np.dtype(aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=weak)


def _no_array(leaf: Any, name: str, otherwise: str) -> InvalidArgument:
    """Return the error for what JAX does not take as an array; `otherwise` ends it for what is none of numpy's."""
    if not isinstance(leaf, np.ndarray):
        return InvalidArgument(f"{name} is a {type(leaf).__name__}{otherwise}")
    return InvalidArgument(
        f"{name} is an array of {leaf.dtype}, a type that JAX does not have. Convert it before the call: numbers in "
        "the byte order of another machine by x.astype(x.dtype.newbyteorder('=')), records field by field, words and "
        "objects to numbers."
    )
