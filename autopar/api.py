"""`autopar.parallelize`: from a train step to a step that runs on all devices, at once or one stage at a time.

step = autopar.parallelize(train_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=4))
state, metrics = step(state, batch)

step.trace(state, batch)   Traced      the jaxpr            (like the stages of `jax.stages`)
    .plan()                Planned     every decision
    .lower()               Lowered     instructions per mesh
    .compile()             Compiled    runs
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.aot import Compiled, Lowered, Planned, Traced
from autopar.arguments import ArgumentRoles, Arguments, Call
from autopar.checks import check_axes, check_count, check_flag, check_names, check_numbers, check_pattern
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.planning.by_hand.follow import Followed
from autopar.errors import CannotSerialize, InvalidArgument, Unsupported
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.methods import Auto, Method
from autopar.session import current_session
from autopar.step_serialization import trace_call
from autopar.target import Devices, Source, Target, check_not_traced

__all__ = ["Compiled", "Lowered", "Planned", "Step", "Traced", "parallelize"]


_forks: list[int] = []
"""One entry for each fork between the first process and this one; JAX's threads do not follow into a forked process."""
os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))


class _NotDispatched(Exception):
    """A call that `jax.jit` alone cannot serve."""


class Step:
    """A parallelized step: called like the function it wraps, and compiled once for each shape of its arguments."""

    def __init__(
        self, fun: Callable[..., Any], roles: ArgumentRoles, target: Target, follow: Following | None = None
    ) -> None:
        functools.update_wrapper(self, fun)
        self._arguments = Arguments(fun, roles)
        self._target = target
        self._compiled: dict[Hashable, Compiled] = {}
        self._compiling = threading.RLock()
        """Held while a step is compiled: of several threads that call first, one does."""
        self._follow = follow
        self._compiled_in: tuple[Any, Compiled | None] = (None, None)
        self._dispatch: Any = None
        self._dispatches = True
        self._forks = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: the result has the structure and the numbers of the plain step's.

        Under `jax.disable_jit` the step runs as it stands, operation by operation, like everything that is jitted.
        Raises `Unsupported` inside of a transformation of JAX.
        """
        if self._compiled and self._forks != len(_forks):
            raise self._forked()
        if self._dispatch is not None and not kwargs and not jc.is_tracing() and self._is_here():
            try:
                return self._dispatch(*args)
            except (_NotDispatched, TypeError, ValueError):
                pass  # not compiled yet, arrays on other devices, or what is to be explained
            except RuntimeError as error:
                if "deleted" not in str(error):
                    raise
        return self._call(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an object, as a function does: the step of a class is a method, and gets `self`."""
        return self if instance is None else types.MethodType(self, instance)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_not_traced(self._arguments.name)
        if jc.is_jit_disabled():
            return self._arguments.bound(*args, **kwargs)
        call = self._arguments.split(args, kwargs)
        compiled = self._in_session().get(call.key())
        if compiled is None:
            compiled = self.compiled_for(call)
            if not kwargs and self._can_dispatch(compiled):
                with suppress(_NotDispatched, TypeError, ValueError), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                    return self._dispatch(*args)
        return compiled.run(call)

    def _forked(self) -> Unsupported:
        return Unsupported(
            f"{self._arguments.name} was compiled in another process, of which this one was forked; JAX's threads have "
            "not followed, and a call would wait for ever. Start processes by multiprocessing's 'spawn', and call the "
            "step there first, or in the first process alone."
        )

    def _can_dispatch(self, compiled: Compiled) -> bool:
        """Return whether JAX can find this compiled step by itself; one that it cannot find ends it for all calls.

        `jax.jit` flattens arguments, tells calls apart and builds results without any Python. So where all that was
        compiled are functions on one device, they are traced into one `jax.jit`, which calls them from then on.
        """
        whole = compiled.on_one_device()
        if whole is None:
            self._dispatch, self._dispatches = None, False
        elif self._dispatches and self._dispatch is None:
            # Not the plan's mesh, which would be part of the types: the first call and the second were two traces then.
            there = SingleDeviceSharding(whole.device)
            donated = tuple(self._arguments.donated)

            def enter(*args: Any) -> Any:
                return self._enter(*args)

            enter.__name__ = enter.__qualname__ = self._arguments.name  # what profiles and dumps of XLA show
            self._dispatch = jax.jit(enter, in_shardings=there, out_shardings=there, donate_argnums=donated)
        return self._dispatch is not None

    def _enter(self, *args: Any) -> Any:
        call = self._arguments.split(args, {})
        compiled = self._compiled.get(call.key())
        if compiled is None or not jc.is_tracing() or any(jc.devices_in_type(leaf) > 1 for leaf in call.leaves):
            raise _NotDispatched
        whole = compiled.on_one_device()
        if whole is None:
            raise _NotDispatched
        return compiled.trace.result(call.leaves, whole.function(*call.leaves))

    def _is_here(self) -> bool:
        return self._target.names_devices or current_session() is None

    @property
    def target(self) -> Target:
        """The method, and where the step runs."""
        return self._target

    @property
    def arguments(self) -> Arguments:
        """The roles of its arguments, by which calls are sorted."""
        return self._arguments

    def compiled_for(self, call: Call, plan: Plan | None = None) -> Compiled:
        """Return the compiled step of such calls in the current session, by `plan` if one is given."""
        compiled = self._in_session().get(call.key())
        if compiled is not None:
            return compiled
        with self._compiling:
            compiled = self._in_session().get(call.key())
            if compiled is None:
                lowered = self._trace(call).plan(plan).lower()
                compiled = lowered.compile(at_first_call=lowered.plan.num_devices == 1)
                self._compiled.update(dict.fromkeys(compiled.keys, compiled))
                self._forks = len(_forks)
            return compiled

    def all_compiled(self) -> list[Compiled]:
        """Return all that was compiled in the current session, in this order."""
        return list(dict.fromkeys(self._in_session().values()))

    def clear_cache(self, compiled: Compiled | None = None) -> None:
        """Drop all that was compiled, or one of `all_compiled`, with its executables. Later calls compile again.

        Raises `InvalidArgument` for what is not among them.
        """
        known = self._in_session()
        keys = [key for key, each in known.items() if compiled is None or each is compiled]
        if compiled is not None and not keys:
            raise InvalidArgument(
                f"{self._arguments.name} has no such compiled step in this session. Give one of step.all_compiled(), "
                "or nothing, to drop all."
            )
        for key in keys:
            del known[key]
        self._dispatch = None

    def __copy__(self) -> Step:
        """Return the step itself, as of functions: what holds one can be copied."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """Return the step itself."""
        return self

    def __reduce__(self) -> str:
        """Pickle by reference, as functions are: the executables stay here."""
        module = self.__dict__.get("__module__", "")
        name = next((name for name, value in vars(sys.modules.get(module)).items() if value is self), None)
        if name is None:
            raise CannotSerialize(
                f"The parallelized step {self._arguments.name} has no name of its own in the module {module}, by which "
                "another process would find it. Pickle the plain function and parallelize it there, or give the step a "
                "name on the level of the module."
            )
        return name

    def _in_session(self) -> dict[Hashable, Compiled]:
        now = (self._target.in_current_session().session, None if self._follow is None else self._follow.compiled())
        if any(a is not b for a, b in zip(now, self._compiled_in)):  # it went with its cluster, or with what it follows
            self._compiled, self._compiled_in, self._dispatch = {}, now, None
        return self._compiled

    def timeline(self, path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Run one step as `Compiled.timeline` does: returns its result, and writes when what ran to a file."""
        return self.compiled_for(self._arguments.split(args, kwargs)).timeline(path, *args, **kwargs)

    def __repr__(self) -> str:
        method = self._target.method
        compiled = len(set(map(id, self._compiled.values())))
        return f"<parallelized {self._arguments.name} by {type(method).__name__}, compiled {compiled} times>"

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace the step on these arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._trace(self._arguments.split(args, kwargs))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result's structure with a `jax.ShapeDtypeStruct` for every array, as `jax.jit`'s function does.

        Nothing is planned nor run, and objects that the step changes in place stay as they are.
        """
        return self._arguments.result_types(self._arguments.split(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace, plan and lower the step on these arguments, where `jax.jit`'s was lowered."""
        return self.trace(*args, **kwargs).plan().lower()

    def _trace(self, call: Call) -> Traced:
        trace = trace_call(self._arguments, call)
        names = [leaf.name for leaf in trace.inputs]
        target = self._target.in_current_session()
        if self._follow is not None:
            target = replace(target, method=self._follow.method(trace.name))
        source = Source(
            arguments=self._arguments,
            call=call.without_values(names),
            keys=frozenset({call.key(), call.key_of_successor(set(trace.state_outputs.values()))}),
            target=target,
        )
        return Traced(trace=trace, source=source)


@dataclass(frozen=True, kw_only=True)
class Following:
    """The step that another one follows, and the user's number of microbatches for that."""

    step: Step | Compiled
    num_microbatches: int | None

    @property
    def target(self) -> Target:
        """The place of the step that is followed."""
        return self.step.source.target if isinstance(self.step, Compiled) else self.step.target

    def compiled(self) -> Compiled | None:
        """Return what the step compiled last; None if that is nothing yet."""
        return self.step if isinstance(self.step, Compiled) else next(reversed(self.step.all_compiled()), None)

    def method(self, follower: str) -> Followed:
        """Return how to plan. Raises `InvalidArgument` before the step has compiled anything."""
        compiled = self.compiled()
        if compiled is None:
            name = self.step.arguments.name if isinstance(self.step, Step) else ""
            raise InvalidArgument(
                f"{follower} follows {name}, which has not been compiled yet, so where its state lies is not decided. "
                f"Call {name} first, or give what {name}.trace(...).plan().lower().compile() returns."
            )
        return Followed(
            trace=compiled.trace,
            plan=compiled.plan,
            program=compiled.program,
            num_microbatches=self.num_microbatches,
            ignore_user_shardings=getattr(compiled.source.target.method, "ignore_user_shardings", False),
        )


@overload
def parallelize(
    fun: Callable[..., Any],
    *,
    method: Method | Plan | None = ...,
    follow: Step | Compiled | None = ...,
    num_microbatches: int | None = ...,
    batch_argnums: Sequence[int] | int | None = ...,
    unbatched: Sequence[str] | str = ...,
    batch_axes: Mapping[str, int] | None = ...,
    static_argnums: Sequence[int] | int = ...,
    static_argnames: Sequence[str] | str = ...,
    donate_argnums: Sequence[int] | int = ...,
    donate_argnames: Sequence[str] | str = ...,
    axis_name: str | None = ...,
    devices: Devices | None = ...,
    cluster: Cluster | None = ...,
    check_finite: bool = ...,
) -> Step: ...
@overload
def parallelize(
    fun: None = None,
    *,
    method: Method | Plan | None = ...,
    follow: Step | Compiled | None = ...,
    num_microbatches: int | None = ...,
    batch_argnums: Sequence[int] | int | None = ...,
    unbatched: Sequence[str] | str = ...,
    batch_axes: Mapping[str, int] | None = ...,
    static_argnums: Sequence[int] | int = ...,
    static_argnames: Sequence[str] | str = ...,
    donate_argnums: Sequence[int] | int = ...,
    donate_argnames: Sequence[str] | str = ...,
    axis_name: str | None = ...,
    devices: Devices | None = ...,
    cluster: Cluster | None = ...,
    check_finite: bool = ...,
) -> Callable[[Callable[..., Any]], Step]: ...
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | Plan | None = None,
    follow: Step | Compiled | None = None,
    num_microbatches: int | None = None,
    batch_argnums: Sequence[int] | int | None = None,
    unbatched: Sequence[str] | str = (),
    batch_axes: Mapping[str, int] | None = None,
    static_argnums: Sequence[int] | int = (),
    static_argnames: Sequence[str] | str = (),
    donate_argnums: Sequence[int] | int = (),
    donate_argnames: Sequence[str] | str = (),
    axis_name: str | None = None,
    devices: Devices | None = None,
    cluster: Cluster | None = None,
    check_finite: bool = False,
) -> Step | Callable[[Callable[..., Any]], Step]:
    """Make a train step run on many devices, with the results of the plain step.

    `fun` is any function of arrays in pytrees that `jax.jit` accepts; a train step uses `jax.grad` or
    `jax.value_and_grad` as usual. Also a decorator, with or without options.

    - `method`: `Auto` (the default: what is fastest is searched, and a line says what that is), `Zero`,
      `TensorParallel`, `ExpertParallel`, `Megatron`, `DataParallel`, `ShardParallel`, `PipelineParallel`, or a `Plan`.
    - `follow`: a step whose state this one takes as it lies, instead of a method: an evaluation of what another step
      trains. It runs on the same devices, in stages if those are, and never moves the state; what it returns of its
      arguments as they are is the caller's own.
    - `num_microbatches`: into how many parts the batch is split, instead of the method's own number.
    - `batch_argnums`: the arguments that carry the batch, on the first axis of every array in them; by default the
      inputs that carry it are found from what the step does. Arguments may be passed by name all the same.
    - `unbatched`: regular expressions that find, by name, inputs that are not to be taken for the batch; `batch_axes`:
      such that find inputs with the batch on another axis than the first, and that axis (`{"tokens": 1}`).
    - `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`: as in `jax.jit`.
    - `axis_name`: for a step written for `jax.pmap`, the axis that it reduces over. It is bound to the whole batch, as
      if one device held all of it: `lax.pmean` over it changes nothing.
    - `devices`: JAX devices of this process, all by default; `cluster`: plan for one that may not be here.
    - `check_finite`: wait for every step, and raise `NonFiniteValue` at a result that is infinite or not a number when
      it was not before; the step is run again then, to name the equation, stage and microbatch of the first such value.
      The state is in memory twice for that.

    Raises `InvalidArgument` for options that contradict each other or the function.
    """
    following = _following(follow, num_microbatches, {"method": method, "devices": devices, "cluster": cluster})
    chosen = _with_microbatches(Auto() if method is None else method, None if follow else num_microbatches)
    roles = ArgumentRoles(
        batch_argnums=None if batch_argnums is None else check_numbers("batch_argnums", batch_argnums),
        unbatched=check_names("unbatched", unbatched),
        batch_axes=check_axes("batch_axes", batch_axes or {}),
        static_argnums=check_numbers("static_argnums", static_argnums),
        static_argnames=check_names("static_argnames", static_argnames),
        donate_argnums=check_numbers("donate_argnums", donate_argnums),
        donate_argnames=check_names("donate_argnames", donate_argnames),
        axis_name=axis_name,
        keeps_inputs=follow is not None,
    )
    for pattern in roles.unbatched:
        check_pattern("unbatched", pattern)
    _check_place(axis_name, devices, cluster)
    target = Target(method=chosen, devices=devices, cluster=cluster) if following is None else following.target
    target = replace(target, check_finite=check_flag("check_finite", check_finite))

    def wrap(function: Callable[..., Any]) -> Step:
        if not callable(function):
            raise InvalidArgument(f"parallelize was given a {type(function).__name__}; it takes a function.")
        return Step(function, roles, target, following)

    return wrap if fun is None else wrap(fun)


def _following(follow: Any, num_microbatches: int | None, instead: dict[str, Any]) -> Following | None:
    if follow is None:
        return None
    if not isinstance(follow, Step | Compiled):
        raise InvalidArgument(
            f"follow is a {type(follow).__name__}. Give a parallelized step, or what one has been compiled to."
        )
    given = [name for name, value in instead.items() if value is not None]
    if given:
        raise InvalidArgument(
            f"follow takes the plan and the devices of another step, and {', '.join(given)} would ask for others. Give "
            "one of the two."
        )
    if num_microbatches is not None:
        check_count("num_microbatches", num_microbatches)
    return Following(step=follow, num_microbatches=num_microbatches)


def _check_place(axis_name: Any, devices: Any, cluster: Any) -> None:
    if axis_name is not None and not isinstance(axis_name, str):
        raise InvalidArgument(f"axis_name is {axis_name!r}. Give the name of the axis that the step reduces over.")
    if devices is not None and (
        isinstance(devices, str)
        or not isinstance(devices, Sequence | np.ndarray)
        or not len(devices)
        or not all(hasattr(device, "device_kind") for device in devices)
    ):
        raise InvalidArgument(f"devices is {devices!r}. Give a sequence of JAX devices, such as jax.devices()[:2].")
    if cluster is not None and not isinstance(cluster, Cluster):
        raise InvalidArgument(f"cluster is {cluster!r}. Give an autopar.Cluster, such as Cluster.parse('2x dgx-h100').")


def _with_microbatches(method: Any, num_microbatches: int | None) -> Method | Plan:
    if not isinstance(method, Method | Plan):
        raise InvalidArgument(
            f"method is a {type(method).__name__}. Choose Auto(), DataParallel(), ShardParallel(mesh_shape=...), "
            "PipelineParallel(num_stages=...), Zero(stage=...), TensorParallel(), ExpertParallel(), or give a Plan."
        )
    if num_microbatches is None:
        return method
    if isinstance(method, Plan):
        if method.num_microbatches != num_microbatches:
            raise InvalidArgument(
                f"num_microbatches is {num_microbatches}, the plan has {method.num_microbatches}. A plan is obeyed as "
                "it is: leave num_microbatches out, or make another plan."
            )
        return method
    return replace(method, num_microbatches=num_microbatches)
