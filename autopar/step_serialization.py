"""Serialize a step for other processes: the step itself, its arguments' types, and the plan.

    serialize_step(fun, roles, call, plan)  ->  bytes  ->  in every process: trace, lower  ->  the same Program

A jaxpr cannot be pickled and may hold callbacks, so each process traces anew; that all made the same program is
checked by its fingerprint.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.arguments import Arguments, Call, abstract
from autopar.compiler import passes
from autopar.compiler.frontend.trace import Leaf, Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import CannotSerialize, InvalidArgument
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.distributed.ray_cluster import pickled, unpickled

_NAMED_DEPTH = 3  # how many things inside of a step the message follows down to the one that cannot be sent


def trace_call(arguments: Arguments, call: Call) -> Trace:
    """The trace of a step on one call's arguments."""
    described = arguments.describe_leaves(call)
    leaves = [
        Leaf(name=name, argument=position, aval=abstract(leaf, name))
        for (name, position), leaf in zip(described, call.leaves, strict=True)
    ]
    try:
        return passes.trace_step(
            arguments.call_flat(call),
            leaves,
            name=arguments.name,
            batch_inputs=arguments.batch_leaves(described),
            unbatched_inputs=arguments.unbatched_leaves(described),
            batch_axes=arguments.batch_axes(described),
            donated_inputs=arguments.donated_leaves(described),
            keeps_inputs=arguments.roles.keeps_inputs,
        )
    except NameError as error:
        axis = jc.unbound_axis(error)
        if axis is None:
            raise
        raise InvalidArgument(
            f"{arguments.name} reduces over the axis {axis!r}, as in a step for jax.pmap, and nothing binds it. Use "
            f"parallelize(..., axis_name={axis!r}), which binds it to the whole batch, and pass the batch whole, "
            "without an axis of devices."
        ) from error


def program_of(arguments: Arguments, call: Call, plan: Plan) -> Program:
    """The program of a step by a plan: what every process of a cluster makes for itself."""
    return passes.lower_step(trace_call(arguments, call).reducing_in(plan.reduce_dtype), plan)


def serialize_step(arguments: Arguments, call: Call, plan: Plan) -> SerializedStep:
    """Return what other processes need to make the step's program.

    Raises `CannotSerialize`, which names what cannot be sent.
    """
    names = [name for name, _ in arguments.describe_leaves(call)]
    traced = call.unflatten(call.without_values(names).leaves)
    fun, roles, name = arguments.fun, arguments.roles, arguments.name  # a jitted function loses its name on the way
    payload = (fun, roles, name, traced, call.static, call.num_positional, plan.to_json())
    try:
        data = pickled(payload)
        unpickled(data)  # some objects can be pickled, and fail only here
        return SerializedStep(payload=data)
    except Exception as error:
        culprit = _culprit(arguments.name, arguments.fun) or _culprit("its arguments", (traced, call.static))
        raise CannotSerialize(
            f"{arguments.name} cannot be sent to the processes of the cluster: {culprit or 'a part of it'} cannot be "
            f"pickled ({type(error).__name__}: {error}). Make it inside of the step, import it from a module that "
            "every host has, or pass what it holds as an argument."
        ) from error


@dataclass(frozen=True, kw_only=True)
class SerializedStep:
    """Makes the program of a step in another process; `payload` is pickled by value where needed."""

    payload: bytes

    def __call__(self) -> Program:
        """Trace the step and lower it as planned."""
        fun, roles, name, traced, static, num_positional, plan = unpickled(self.payload)
        arguments = Arguments(fun, roles, name)
        return program_of(arguments, arguments.call_of(traced, static, num_positional), Plan.from_json(plan))


@dataclass(frozen=True, kw_only=True)
class ChangedProgram:
    """Makes a program in another process, and changes it there; `change` is a function of a module."""

    make: Callable[[], Program]
    change: Callable[[Program], Program]

    def __call__(self) -> Program:
        """Return the program, changed."""
        return self.change(self.make())


def _culprit(name: str, value: Any, depth: int = 0) -> str | None:
    """The name of the innermost thing in `value` that cannot be pickled; None if all can."""
    if _pickles(value):
        return None
    if depth < _NAMED_DEPTH:
        for inner, part in _parts(value):
            found = _culprit(f"{inner} in {name}", part, depth + 1)
            if found is not None:
                return found
    return f"{name} (a {type(value).__name__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    function = inspect.unwrap(value) if callable(value) else value
    if inspect.ismethod(function):
        yield "the object of the method", function.__self__
        function = function.__func__
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        parts: Mapping[str, Any] = {**found.globals, **found.nonlocals}
        yield from ((f"the variable {name!r}", part) for name, part in parts.items())
        yield from ((f"the default {number}", part) for number, part in enumerate(function.__defaults__ or ()))
    elif isinstance(value, Mapping):
        yield from ((repr(key), part) for key, part in value.items())
    elif isinstance(value, tuple | list):
        yield from ((f"element {number}", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f"the attribute {key!r}", part) for key, part in vars(value).items())


def _pickles(value: Any) -> bool:
    try:
        unpickled(pickled(value))
    except Exception:
        return False
    return True


def _with_custom_derivative(kind: type, state: dict[str, Any]) -> Any:
    made = kind(state["fun"])
    vars(made).update(state)
    return made


def _reduced(function: Any) -> tuple[Any, ...]:
    return _with_custom_derivative, (type(function), dict(vars(function)))


# Functions with derivatives of their own: pickle would call their classes without the function.
for _kind in (jax.custom_vjp, jax.custom_jvp):
    copyreg.pickle(_kind, _reduced)  # pyright: ignore[reportArgumentType]
