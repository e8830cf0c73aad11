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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from autopar.aot import Compiled, Devices, Lowered, Planned, Source, Target, Traced
from autopar.arguments import ArgumentRoles, Arguments, Call
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.methods import DataParallel, Method
from autopar.step_serialization import trace_call

__all__ = ["Compiled", "Lowered", "Planned", "Step", "Traced", "parallelize"]


class Step:
    """A parallelized step: called like the function it wraps, and compiled once for each shape of its arguments."""

    def __init__(self, fun: Callable[..., Any], roles: ArgumentRoles, target: Target) -> None:
        functools.update_wrapper(self, fun)
        self._arguments = Arguments(fun, roles)
        self._target = target
        self._compiled: dict[Hashable, Compiled] = {}
        self._session: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: the result has the structure and the numbers of the plain step's."""
        call = self._arguments.split(args, kwargs)
        return self.compiled_for(call).run(call)

    @property
    def arguments(self) -> Arguments:
        """The roles of its arguments, by which calls are sorted."""
        return self._arguments

    def compiled_for(self, call: Call, plan: Plan | None = None) -> Compiled:
        """Return the compiled step of such calls in the current session, by `plan` if one is given."""
        compiled = self._in_session().get(call.key())
        if compiled is None:
            compiled = self._trace(call).plan(plan).lower().compile()
            self._compiled.update(dict.fromkeys(compiled.keys, compiled))
        return compiled

    def all_compiled(self) -> list[Compiled]:
        """Return all that was compiled in the current session, in this order."""
        return list(dict.fromkeys(self._in_session().values()))

    def _in_session(self) -> dict[Hashable, Compiled]:
        session = self._target.in_current_session().session
        if session is not self._session:  # what was compiled for another cluster went with it
            self._compiled, self._session = {}, session
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

    def _trace(self, call: Call) -> Traced:
        trace = trace_call(self._arguments, call)
        names = [leaf.name for leaf in trace.inputs]
        source = Source(
            arguments=self._arguments,
            call=call.without_values(names),
            keys=frozenset({call.key(), call.key_of_successor(set(trace.state_outputs.values()))}),
            target=self._target.in_current_session(),
        )
        return Traced(trace=trace, source=source)


@overload
def parallelize(
    fun: Callable[..., Any],
    *,
    method: Method | Plan | None = ...,
    num_microbatches: int | None = ...,
    batch_argnums: Sequence[int] | int | None = ...,
    static_argnums: Sequence[int] | int = ...,
    static_argnames: Sequence[str] | str = ...,
    donate_argnums: Sequence[int] | int = ...,
    devices: Devices | None = ...,
    cluster: Cluster | None = ...,
) -> Step: ...
@overload
def parallelize(
    fun: None = None,
    *,
    method: Method | Plan | None = ...,
    num_microbatches: int | None = ...,
    batch_argnums: Sequence[int] | int | None = ...,
    static_argnums: Sequence[int] | int = ...,
    static_argnames: Sequence[str] | str = ...,
    donate_argnums: Sequence[int] | int = ...,
    devices: Devices | None = ...,
    cluster: Cluster | None = ...,
) -> Callable[[Callable[..., Any]], Step]: ...
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | Plan | None = None,
    num_microbatches: int | None = None,
    batch_argnums: Sequence[int] | int | None = None,
    static_argnums: Sequence[int] | int = (),
    static_argnames: Sequence[str] | str = (),
    donate_argnums: Sequence[int] | int = (),
    devices: Devices | None = None,
    cluster: Cluster | None = None,
) -> Step | Callable[[Callable[..., Any]], Step]:
    """Make a train step run on many devices, with the results of the plain step.

    `fun` is any function of arrays in pytrees that `jax.jit` accepts; a train step uses `jax.grad` or
    `jax.value_and_grad` as usual. Also a decorator, with or without options.

    - `method`: `DataParallel` (the default), `ShardParallel`, `PipelineParallel`, `Megatron`, `Auto`, `Zero`,
      `TensorParallel`, `ExpertParallel`, or a `Plan`.
    - `num_microbatches`: into how many parts the batch is split, instead of the method's own number.
    - `batch_argnums`: the arguments that carry the batch, on the first axis of every array in them; by default
      argument 1. Arguments may be passed by name all the same.
    - `static_argnums`, `static_argnames`, `donate_argnums`: as in `jax.jit`.
    - `devices`: JAX devices of this process, all by default; `cluster`: plan for one that may not be here.

    Raises `InvalidArgument` for options that contradict each other or the function.
    """
    chosen = _with_microbatches(DataParallel() if method is None else method, num_microbatches)
    roles = ArgumentRoles(
        batch_argnums=None if batch_argnums is None else _numbers(batch_argnums),
        static_argnums=_numbers(static_argnums),
        static_argnames=(static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames),
        donate_argnums=_numbers(donate_argnums),
    )
    target = Target(method=chosen, devices=devices, cluster=cluster)

    def wrap(function: Callable[..., Any]) -> Step:
        if not callable(function):
            raise InvalidArgument(f"parallelize was given a {type(function).__name__}; it takes a function.")
        return Step(function, roles, target)

    return wrap if fun is None else wrap(fun)


def _numbers(value: Sequence[int] | int) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


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
