"""The one gate to what JAX does not promise: its private modules, equations, name stacks and source lines.

Everything here differs, or may differ, between the JAX releases that autopar supports. An upgrade touches this file
and `params.py`, the gate to the parameters of equations.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax._src import (
    ad_checkpoint,  # the primitive of rematerialised regions is private
    api_util,  # where a function is written, and what its arguments are called, is told JAX by private functions
    config,  # what of the configuration a trace depends on has no public reader
    core,  # nor has the question which trace is under way
    dtypes,  # binding brings literals into the types that they have in a trace by a private function
    effects,  # whether an effect is ordered is asked of its kind, and the kinds are private
    source_info_util,  # name stacks and user frames have no public reader
)
from jax._src.interpreters import mlir as mlir_private  # the lowerings by platform have no public reader
from jax._src.interpreters import partial_eval  # dead code inside loops has no public remover, a trace no public type
from jax._src.state import discharge  # references have no public way out of a program
from jax.core import ShapedArray, Tracer
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.extend import random as jex_random
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "ad_phase",
    "bind_equation",
    "is_jit_disabled",
    "is_tracing",
    "jaxpr_as_fun",
    "jit_options",
    "open_jaxpr",
    "operands",
    "scope_of",
    "settings",
    "source_line",
    "subjaxprs",
    "trace",
    "unbound_axis",
]


NOTE = "autopar.demand["
"""The beginning of a name that is a note of ours and no scope of the user."""

_NO_MESH = jax.sharding.AbstractMesh((), ())


def settings() -> Hashable:
    """Return the settings of JAX by which `jax.jit` tells its traces apart, and the kind of keys."""
    return (config.trace_context(), config.default_prng_impl.value)


def settings_text() -> str:
    """Return these settings as a text, equal in every process, without the axes that a transformation binds."""
    told = [each for each in config.trace_context() if not isinstance(each, core.AxisEnv)]
    return repr((told, config.default_prng_impl.value))


def is_tracing() -> bool:
    """Return whether a transformation of JAX is under way here."""
    return not core.trace_state_clean()


def is_jit_disabled() -> bool:
    """Return whether `jax.disable_jit` is in force."""
    return config.disable_jit.value


def unbound_axis(error: NameError) -> str | None:
    """Return the name of the axis that a collective asked for in vain; None for any other error."""
    found = re.match(r"Found an unbound axis name: (\w+)", str(error))
    return found and found[1]


def jit_options(fun: Any) -> dict[str, tuple[Any, ...]] | None:
    """Return the arguments that `jax.jit(fun, ...)` was told are static or donated; None if it is no such function.

    One that was pickled still obeys these, and no longer says them: nothing is returned of it.
    """
    if not isinstance(fun, type(jax.jit(jit_options))):
        return None
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    info = vars(fun).get("_jit_info")
    return {} if info is None else {name: tuple(getattr(info, name)) for name in names}


def named_as(written: Callable[..., Any], names: Iterable[str], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun`, for which JAX's errors name the function `written` and these arguments."""
    place = api_util.fun_sourceinfo(written)
    info = core.DebugInfo("parallelize", place, tuple(names), core.initial_result_paths)
    api_util.save_wrapped_fun_debug_info(fun, info)
    return fun


def trace(fun: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr of `fun` on abstract values: shapes, dtypes and memories only, no device is touched.

    A mesh that the user has set has said what it had to say when the step was traced: only that of a shard_map counts.
    Nor is anything of the user's left to leak: `jax.checking_leaks` takes the values that a pass keeps for leaked ones.
    """
    around = jax.sharding.get_abstract_mesh()
    mesh = nullcontext() if around.empty or around.manual_axes else jax.sharding.use_abstract_mesh(_NO_MESH)
    with mesh, config.check_tracer_leaks(False):
        return jax.make_jaxpr(fun)(*map(_bare, avals))


def without_refs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with the references that it makes itself as values: each write makes another one."""
    own = any(isinstance(effect, core.InternalMutableArrayEffect) for effect in closed.effects)
    return discharge.discharge_state(closed) if own else closed


def _bare(aval: Any) -> Any:
    bare = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))
    if getattr(aval, "memory_space", None) != jax.memory.Space.Host:
        return bare
    # A struct has no place for the memory that a value is in.
    return ShapedArray(bare.shape, bare.dtype, weak_type=bare.weak_type, memory_space=jax.memory.Space.Host)


def bind_equation(eqn: JaxprEqn, args: Sequence[Any], changes: Mapping[str, Any] | None = None) -> list[Any]:
    """Evaluate (or re-trace) one equation on `args`, keeping its name stack, source line and context.

    `changes` are the parameters that are others, for an equation that is to run at another shape.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.empty and (results := _bound_in_place(eqn, args, changes)) is not None:
        return results
    # get_bind_params, user_context and eqn.ctx are what jax.core.eval_jaxpr itself uses; there is no public equivalent
    # that keeps the provenance of an equation.
    bind_params = eqn.primitive.get_bind_params({**eqn.params, **(changes or {})})
    # Inside of a shard_map its mesh counts, not the one that the equation was first traced under; outside of all, none.
    mesh = nullcontext() if around.empty and eqn.ctx.cur_abstract_mesh.empty else under_mesh(around)
    with under_scope_of(eqn), eqn.ctx.manager, mesh:
        out = eqn.primitive.bind(*args, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bound_in_place(eqn: JaxprEqn, args: Sequence[Any], changes: Mapping[str, Any] | None) -> list[Any] | None:
    """Bind a plain equation to the trace under way, as `Primitive.bind` would in the equation's own context.

    None where that is not the context around, or the primitive has rules of its own: half of the time of binding goes
    into entering contexts, of which equations of one step have one and the same.
    """
    trace, primitive = core.trace_ctx.trace, eqn.primitive
    if type(trace) is not partial_eval.DynamicJaxprTrace or eqn.ctx is not core.current_jaxpr_eqn_context():
        return None
    if not eqn.source_info.traceback or not is_plain(primitive) or config.eager_constant_folding.value:
        return None
    info, params = SourcePlace.here().source_info(eqn), {**eqn.params, **changes} if changes else eqn.params
    tracers = [
        arg
        if type(arg) is partial_eval.DynamicJaxprTracer and arg._trace is trace  # pyright: ignore[reportPrivateUsage]
        else trace.to_jaxpr_tracer(dtypes.canonicalize_value(arg), source_info=info)
        for arg in args
    ]
    core.trace_ctx.set_trace(core.eval_trace)  # what a rule computes on its way is none of the program
    try:
        out = trace.default_process_primitive(primitive, tracers, params, info)
    finally:
        core.trace_ctx.set_trace(trace)
    return list(out) if primitive.multiple_results else [out]


@cache
def is_plain(primitive: Primitive) -> bool:
    """Return whether binding a primitive to a trace is `default_process_primitive`."""
    own = {"bind", "bind_with_trace", "get_bind_params", "is_high"}
    if type(primitive) is not Primitive or not own.isdisjoint(vars(primitive)):
        return False
    return primitive not in partial_eval.custom_staging_rules or primitive.name in _STAGED_AS_OTHERS


def implementation_of(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
    """Return the function of an equation's operands by which another package has its primitive evaluated.

    None for primitives of JAX and of ours, which bind themselves, and where a platform has a lowering of its own.
    """
    primitive, sparse = eqn.primitive, _sparse_implementation(eqn.primitive)
    function = primitive.impl.func if isinstance(primitive.impl, partial) else primitive.impl
    package = str(getattr(function, "__module__", None)).partition(".")[0]
    lowerings = mlir_private._platform_specific_lowerings.values()  # pyright: ignore[reportPrivateUsage]
    bound = package in ("autopar", "jax", "jaxlib", "None") or any(primitive in own for own in lowerings)
    if bound and sparse is None:
        return None

    def evaluate(*operands: Any) -> list[Any]:
        results = (sparse or primitive.impl)(*operands, **eqn.params)
        return list(results) if primitive.multiple_results else [results]

    return evaluate


def _sparse_implementation(primitive: Primitive) -> Callable[..., Any] | None:
    """The code that a primitive of JAX's sparse arrays is lowered to, unless kernels of cuSPARSE are asked for."""
    module = sys.modules.get(f"jax.experimental.sparse.{primitive.name[:4]}")  # bcoo_dot_general, bcsr_extract
    return None if config.bcoo_cusparse_lowering.value else getattr(module, f"_{primitive.name}_impl", None)


_STAGED_AS_OTHERS = frozenset({"broadcast_in_dim", "dynamic_slice", "iota", "reshape"})
"""Primitives whose own rule does what all others do, since sizes no longer are values."""


@contextmanager
def under_mesh(mesh: jax.sharding.AbstractMesh) -> Generator[None]:
    """A context in which this mesh counts and none around it: JAX changes the size of a mesh only by way of none."""
    with jax.sharding.use_abstract_mesh(_NO_MESH), jax.sharding.use_abstract_mesh(mesh):
        yield


def under_scope_of(eqn: JaxprEqn) -> Any:
    """A context in which newly traced equations carry `eqn`'s name stack and source line."""
    source_info = SourcePlace.here().source_info(eqn)
    return source_info_util.user_context(source_info.traceback, name_stack=source_info.name_stack)


class SourcePlace(NamedTuple):
    """The place of equations written down again: name stacks, and a line for those that have none of the user's."""

    name_stack: Any
    traceback: Any

    @staticmethod
    def here() -> SourcePlace:
        """Return the place of what is traced now."""
        context = source_info_util._source_info_context.context  # type: ignore[reportPrivateUsage]
        return SourcePlace(context.name_stack, context.traceback)

    def source_info(self, eqn: JaxprEqn) -> Any:
        """Return the name stack and line of an equation here; for one of a jitted library function, the caller's."""
        own = eqn.source_info
        traceback = own.traceback if self.traceback is None or _is_users(own.traceback) else self.traceback
        if not self.name_stack.stack and traceback is own.traceback:
            return own
        return source_info_util.SourceInfo(traceback, self.name_stack + own.name_stack)

    def inside(self, eqn: JaxprEqn) -> SourcePlace:
        """Return the place of the equations of which one here is made."""
        info = self.source_info(eqn)
        return SourcePlace(info.name_stack, info.traceback or self.traceback)

    def of_program(self) -> SourcePlace:
        """Return the place of a program of its own, whose name stacks begin anew."""
        return SourcePlace(source_info_util.NameStack(), self.traceback)

    def context(self) -> Any:
        """A context in which newly traced equations are at this place."""
        return source_info_util.user_context(self.traceback, name_stack=self.name_stack)

    def equation(self, eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Var]) -> JaxprEqn:
        """Return an equation on other operands, with other variables for its results."""
        info = self.source_info(eqn)
        return JaxprEqn(operands, results, eqn.primitive, eqn.params, eqn.effects, info, eqn.ctx)


_AUTOPAR = str(Path(__file__).parents[2])
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
"""Stands in the paths of packages that were installed."""

NOWHERE = SourcePlace(source_info_util.NameStack(), None)
"""The place of equations that are written down as they are."""


def ad_phase(eqn: JaxprEqn) -> str | None:
    """`"forward"` or `"backward"` by the differentiations that made the equation; None outside of any.

    Forward equations stand under `jvp(...)`, backward ones under `transpose(jvp(...))`, and a transposition within
    another turns the direction again: `jvp(transpose(jvp(...)))` is the backward pass of a gradient that is
    differentiated, `transpose(jvp(transpose(jvp(...))))` goes forward through the model to differentiate it. What
    `jax.checkpoint` computes again inside of a gradient that is differentiated is that gradient's forward pass. Scopes
    that a user names "transpose" are of another kind and do not count.
    """
    stack = eqn.source_info.name_stack.stack
    turns = [e.name for e in stack if isinstance(e, source_info_util.Transform) and e.name in ("jvp", "transpose")]
    if not turns:
        return None
    if turns[0] == "jvp" and len(turns) > 1:
        again = [i for i, entry in enumerate(stack) if entry.name == "rematted_computation"]
        turns = [e.name for e in stack[again[-1] :] if isinstance(e, source_info_util.Transform)] if again else turns
    return "backward" if turns.count("transpose") % 2 else "forward"


def scope_of(eqn: JaxprEqn) -> str:
    """The equation's name stack, as JAX prints it, without our own notes: `jvp(Model)/h_3/attention`."""
    stack = eqn.source_info.name_stack
    if stack.stack and stack.stack[-1].name.startswith(NOTE):
        stack = source_info_util.NameStack(stack.stack[:-1])
    return str(stack)


def scope_names(eqn: JaxprEqn) -> Iterator[str]:
    """The names of the equation's name stack, without transformations, the outermost first."""
    return (entry.name for entry in eqn.source_info.name_stack.stack if isinstance(entry, source_info_util.Scope))


def innermost_scope(eqn: JaxprEqn) -> str:
    """The last name of the equation's name stack; empty if it has none."""
    stack = eqn.source_info.name_stack.stack
    return stack[-1].name if stack else ""


def source_line(eqn: JaxprEqn) -> str:
    """Return the line on which the user wrote the equation: `train.py:41 (loss_fn)`."""
    return source_info_util.summarize(eqn.source_info)


def leave_lines_to_callers(path: str) -> None:
    """Have equations that functions of a file of ours make for users carry the lines of those who call them."""
    source_info_util.register_exclusion(path)


def provenance(eqn: JaxprEqn) -> str:
    """Return all that is known of where an equation comes from: its name stack, with its transformations, and its line.

    Two equations of one text have the same `ad_phase`, scopes, notes and `source_line`.
    """
    return f"{eqn.source_info.name_stack.stack}\n{source_line(eqn)}"


def place_of(eqn: JaxprEqn) -> Hashable:
    """Return a key of the `provenance` of an equation: where keys are equal, texts are."""
    return (eqn.source_info.name_stack.stack, eqn.source_info.traceback)


def describe(eqn: JaxprEqn) -> str:
    """An equation in an error message: primitive, result, the user's line, and that of the package which that calls."""
    results = ", ".join(v.aval.str_short() for v in eqn.outvars)
    own, written = _users_line(eqn), source_line(eqn)
    return f"`{eqn.primitive.name}` -> {results} at {written if own is None else f'{own}, by {_in_package(written)}'}"


def _users_line(eqn: JaxprEqn) -> str | None:
    """Return the innermost line of the step outside of installed packages; None if it is `source_line`, or missing."""
    frames = list(_inside_of_step(eqn.source_info.traceback))
    own = next((frame for frame in frames if _is_own(frame)), None)
    if own is None or own is frames[0]:
        return None
    return f"{own.file_name}:{own.start_line}:{own.start_column} ({own.function_name})"


@lru_cache(maxsize=4096)
def _is_users(traceback: Any) -> bool:
    """Return whether an equation was made by a line of the step that is in no installed package."""
    return any(map(_is_own, _inside_of_step(traceback)))


def _inside_of_step(traceback: Any) -> Iterator[Any]:
    frames = source_info_util.user_frames(traceback)
    return itertools.takewhile(lambda frame: not frame.file_name.startswith(_AUTOPAR), frames)


def _is_own(frame: Any) -> bool:
    return _INSTALLED.search(frame.file_name) is None


def _in_package(line: str) -> str:
    return _INSTALLED.split(line)[-1]


def is_on_host(v: Any) -> bool:
    """Return whether a value's type says that it is in the memory of the host."""
    return getattr(v.aval, "memory_space", None) == jax.memory.Space.Host


def moves_memory(eqn: JaxprEqn) -> bool:
    """Return whether an equation copies values between the memories of devices and hosts, and does nothing else."""
    return eqn.primitive.name == "device_put" and any(
        is_on_host(given) != is_on_host(made) for given, made in zip(eqn.invars, eqn.outvars, strict=True)
    )


def explicit_sharding(v: Any) -> Any:
    """The sharding in a value's type, where the user's mesh has Explicit axes; None otherwise.

    A type's sharding is not documented as part of an abstract value, so only this file looks at it.
    """
    sharding = getattr(v.aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    return sharding


def devices_in_type(x: Any) -> int:
    """Return the number of devices of the mesh in an array's type; 1 where it has none."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return 1 if mesh is None or mesh.empty else mesh.size


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, tuple[Any, ...]]:
    """The jaxpr and its constants, of a closed or an open jaxpr (jax 0.12 has only one type for both)."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, ()


def in_row_major_order(x: Any) -> Any:
    """The array, in memory with its last dimension fastest."""
    return with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))


def operands(eqn: JaxprEqn) -> list[Var]:
    """The variables that an equation reads, without its literals."""
    return [v for v in eqn.invars if isinstance(v, Var)]


def subjaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """The jaxprs among an equation's parameters: loop bodies, branches, called functions."""
    for value in eqn.params.values():
        for item in cast(Sequence[Any], value) if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (Jaxpr, ClosedJaxpr)):
                yield item


_inside: WeakKeyDictionary[Jaxpr, tuple[JaxprEqn, ...]] = WeakKeyDictionary()


def all_equations(jaxpr: Any) -> tuple[JaxprEqn, ...]:
    """The equations of a jaxpr and of every jaxpr inside of it, found once."""
    body, _ = open_jaxpr(jaxpr)
    if body not in _inside:
        inner = ((eqn, *(each for sub in subjaxprs(eqn) for each in all_equations(sub))) for eqn in body.eqns)
        _inside[body] = tuple(itertools.chain.from_iterable(inner))
    return _inside[body]


def keeps_order(eqn: JaxprEqn) -> bool:
    """Return whether the kind of the equation's effect demands program order."""
    return any(effects.ordered_effects.contains(effect) for effect in eqn.effects)


def runs_on_one_device(eqn: JaxprEqn) -> bool:
    """Return whether the equation keeps an order that JAX can keep on a single device only."""
    return keeps_order(eqn) and not all(effects.shardable_ordered_effects.contains(effect) for effect in eqn.effects)


def map_subjaxprs(eqn: JaxprEqn, transform: Callable[[ClosedJaxpr], ClosedJaxpr]) -> dict[str, Any]:
    """The equation's parameters with `transform` applied to each jaxpr among them, open ones staying open.

    An open jaxpr (the body of `remat2` in jax 0.10) has no place for constants: where the transformed one needs some,
    the original stays.
    """

    def one(item: Any) -> Any:
        if type(item) in (tuple, list):  # named tuples, such as dimension numbers, hold no jaxpr
            return type(item)(one(i) for i in item)
        if isinstance(item, ClosedJaxpr):
            return transform(item)
        if isinstance(item, Jaxpr):
            closed = transform(ClosedJaxpr(item, []))
            return item if closed.consts else closed.jaxpr
        return item

    return {key: one(value) for key, value in eqn.params.items()}


def with_bodies(eqn: JaxprEqn, transform: Callable[[ClosedJaxpr], ClosedJaxpr]) -> JaxprEqn:
    """The same equation with `transform` applied to the jaxprs among its parameters, as `map_subjaxprs` does."""
    return eqn.replace(params=map_subjaxprs(eqn, transform)) if any(subjaxprs(eqn)) else eqn


def within_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    """The same equation with one more name at the inner end of its name stack."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=eqn.source_info.name_stack.extend(name)))


def with_scopes_renamed(eqn: JaxprEqn, names: Mapping[str, str]) -> JaxprEqn:
    """The same equation with other names in its name stack, where there are such."""
    entries = eqn.source_info.name_stack.stack
    if not any(entry.name in names for entry in entries):
        return eqn
    renamed = (
        source_info_util.Scope(names.get(entry.name, entry.name))
        if isinstance(entry, source_info_util.Scope)
        else entry
        for entry in entries
    )
    stack = source_info_util.NameStack(tuple(renamed))
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def closed_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> ClosedJaxpr:
    """A closed jaxpr; the one type that jax 0.12 has for both has lost its constants where their variables changed."""
    return ClosedJaxpr(jaxpr, list(consts))


def with_equations(closed: ClosedJaxpr, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """The same program with other equations, in an order that defines every value before its use."""
    jaxpr, consts = open_jaxpr(closed)
    jaxpr = jaxpr.replace(eqns=list(eqns))
    return closed_jaxpr(jaxpr, consts)


def part_of(
    closed: ClosedJaxpr, eqns: Sequence[JaxprEqn], inputs: Sequence[Var], results: Sequence[Any]
) -> ClosedJaxpr:
    """The program of some equations of another one, in order, from `inputs` to `results`.

    It shares equations, values and the constants that it needs with that one: nothing is traced again.
    """
    whole, consts = open_jaxpr(closed)
    read = {v for atoms in (*(eqn.invars for eqn in eqns), results) for v in atoms if isinstance(v, Var)}
    kept = [(v, const) for v, const in zip(whole.constvars, consts, strict=True) if v in read]
    return program_of(closed, inputs, results, eqns, kept)


def program_of(
    closed: ClosedJaxpr,
    inputs: Sequence[Var],
    results: Sequence[Any],
    eqns: Sequence[JaxprEqn],
    consts: Iterable[tuple[Any, Any]],
) -> ClosedJaxpr:
    """A program in place of another one; `consts` are what stands for each, a variable or a literal, and its value."""
    kept = [(v, const) for v, const in consts if isinstance(v, Var)]
    effects = frozenset(effect for eqn in eqns for effect in eqn.effects)
    names = open_jaxpr(closed)[0].debug_info.with_unknown_names()
    jaxpr = Jaxpr([v for v, _ in kept], list(inputs), list(results), list(eqns), effects, names)
    return ClosedJaxpr(jaxpr, [const for _, const in kept])


def constant_atom(value: Any) -> Any:
    """Return what stands for a constant in a program: a literal for a scalar, a new variable for an array."""
    aval = core.typeof(value)
    return Literal(value, aval) if core.is_literalable(value) else Var(aval)  # type: ignore[attr-defined]


def says_where(closed: ClosedJaxpr) -> bool:
    """Return whether types in a program say of what mesh values are, or its effects on which of its inputs they are."""
    jaxpr, _ = open_jaxpr(closed)
    if any(isinstance(effect, effects.JaxprInputEffect) for effect in jaxpr.effects):
        return True
    made = (v for eqn in all_equations(jaxpr) for v in eqn.outvars)
    return any(type(v.aval) is ShapedArray and not v.aval.sharding.mesh.empty for v in (*jaxpr.invars, *made))


def value_of_type(aval: Any) -> Var:
    """A new variable of a type."""
    return Var(aval)  # type: ignore[attr-defined]


def with_shape(aval: Any, shape: tuple[int, ...]) -> Any:
    """The same type at another shape; None for what is no array, or has a sharding in its type."""
    return aval.update(shape=shape) if type(aval) is ShapedArray and aval.sharding.mesh.empty else None


def unlowered_primitive(name: str, reason: str) -> Primitive:
    """A primitive of one result that a pass must remove: lowering or evaluating it is an error of ours."""
    primitive = Primitive(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError(reason)

    primitive.def_impl(refuse)
    mlir.register_lowering(primitive, refuse)
    return primitive


def calling_primitive(name: str) -> Primitive:
    """A primitive that calls its parameter `function`, a function of arrays to a list of arrays.

    It is one equation at any shape of its operands, also inside of `jit` and `shard_map`. Differentiation and `vmap`
    look inside.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def call(*args: Any, function: Callable[..., list[Any]], **_: Any) -> list[Any]:
        return function(*args)

    def abstract(*avals: Any, function: Callable[..., list[Any]], **_: Any) -> list[Any]:
        return [v.aval for v in open_jaxpr(trace(function, avals))[0].outvars]

    def jvp(primals: Any, tangents: Any, *, function: Callable[..., list[Any]], **_: Any) -> Any:
        moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def of_moving(*args: Any) -> list[Any]:
            changed = dict(zip(moving, args, strict=True))
            return function(*[changed.get(i, primal) for i, primal in enumerate(primals)])

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])

    def batched(args: Any, axes: Any, *, function: Callable[..., list[Any]], **_: Any) -> Any:
        results = jax.vmap(function, in_axes=tuple(axes))(*args)
        return results, [0] * len(results)

    primitive.def_impl(call)
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(call, multiple_results=True))
    return primitive


def closes_over_tracers(closed: ClosedJaxpr) -> bool:
    """Return whether constants of a program are values of a trace around it."""
    return any(isinstance(const, Tracer) for const in open_jaxpr(closed)[1])


def with_inputs(closed: ClosedJaxpr, kept: Sequence[int]) -> ClosedJaxpr:
    """The same program without the inputs that it does not read."""
    jaxpr, consts = open_jaxpr(closed)
    jaxpr = jaxpr.replace(invars=[jaxpr.invars[i] for i in kept])
    return closed_jaxpr(jaxpr, consts)


def with_outputs(closed: ClosedJaxpr, kept: Sequence[int]) -> ClosedJaxpr:
    """The same program with some of its results."""
    jaxpr, consts = open_jaxpr(closed)
    if list(kept) == list(range(len(jaxpr.outvars))):
        return closed
    return closed_jaxpr(jaxpr.replace(outvars=[jaxpr.outvars[i] for i in kept]), consts)


def with_results(closed: ClosedJaxpr, results: Sequence[Any]) -> ClosedJaxpr:
    """The same program with other values of it for results."""
    jaxpr, consts = open_jaxpr(closed)
    return closed_jaxpr(jaxpr.replace(outvars=list(results)), consts)


def consts_as_inputs(closed: ClosedJaxpr) -> tuple[Jaxpr, tuple[Any, ...]]:
    """A jaxpr whose constants are its first inputs, and these constants: the body of `remat2` can have none."""
    jaxpr, consts = open_jaxpr(closed)
    if not consts:
        return jaxpr, ()
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), consts


def only_results(eqn: JaxprEqn, wanted: Sequence[bool]) -> list[JaxprEqn]:
    """The equation without its other results, its body without what only they need (no equation if none is needed)."""
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    effects = frozenset(getattr(eqn, "effects", ()))
    info = open_jaxpr(next(subjaxprs(eqn)))[0].debug_info
    alone = Jaxpr([], invars, list(eqn.outvars), [eqn], effects, info.with_unknown_names())
    pruned, _ = partial_eval.dce_jaxpr(alone, list(wanted))
    return list(pruned.eqns)


def is_threefry_key(key: Any) -> bool:
    """Return whether a key array draws bits by the threefry generator, which depend on their position only."""
    return "fry" in str(key.dtype)


def threefry_bits(key: Any, counter: Any, bit_width: int) -> Any:
    """The random bits at the positions `counter` (below 2**32) of what `jax.random.bits(key, ...)` draws.

    Only `jax.extend` has the generator itself; that the bits of a position do not depend on the others is what
    `jax_threefry_partitionable` promises.
    """
    words = jax.random.key_data(key)
    high, low = jex_random.threefry2x32_p.bind(
        *jnp.broadcast_arrays(words[0], words[1], jnp.zeros_like(counter), counter)
    )
    if bit_width == 64:
        return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(jnp.dtype(f"uint{bit_width}"))


def recomputation(
    body: ClosedJaxpr, operands: Sequence[Any], results: Sequence[Var], backward: Sequence[JaxprEqn]
) -> JaxprEqn:
    """One equation that XLA keeps apart from equal work before it, as the backward pass of `jax.checkpoint` is.

    Only differentiation makes such an equation, and its primitive has no public name. It carries the outer part of the
    name stack that all equations of the `backward` pass in it share.
    """
    stacks = [eqn.source_info.name_stack.stack for eqn in backward]
    depth = 0
    while all(len(stack) > depth and stack[depth] == stacks[0][depth] for stack in stacks):
        depth += 1
    name_stack = source_info_util.NameStack(stacks[0][:depth])
    info, region = backward[0].source_info.replace(name_stack=name_stack), open_jaxpr(body)[0]
    params = {"jaxpr": region, "prevent_cse": True, "differentiated": True, "policy": None}
    ctx, results = backward[0].ctx, list(results)
    return JaxprEqn(list(operands), results, ad_checkpoint.remat_p, params, region.effects, info, ctx)
