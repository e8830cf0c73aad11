"""`autopar.parallelize`: from a train step to a step that runs on all devices, in one line or rung by rung.

step = autopar.parallelize(train_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=4))
state, metrics = step(state, batch)

step.trace(state, batch)   Traced      the jaxpr            (like the ladder of `jax.stages`)
    .plan()                Planned     every decision
    .lower()               Lowered     instructions per mesh
    .compile()             Compiled    runs
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from autopar.arguments import ArgumentRoles, Arguments, Call, abstract
from autopar.cluster import Cluster
from autopar.compiler import passes
from autopar.compiler.explain_plan import Explanation, explain_plan
from autopar.compiler.plan_that_fits import plan_that_fits
from autopar.compiler.price_plan import price_plan
from autopar.compiler.step_work import step_work
from autopar.compiler.trace import Leaf, Trace
from autopar.compiler.verify_plan import check_collectives
from autopar.errors import InvalidArgument
from autopar.machine import Machine
from autopar.options import DataParallel, Method
from autopar.plan import Plan
from autopar.program import Program
from autopar.runtime.base import Loaded
from autopar.runtime.in_process import InProcess
from autopar.session import current_session
from autopar.shipping import ship
from autopar.simulation import SimulationReport, check_cluster, simulate_plan
from autopar.verification_report import NumberCheck, VerificationReport, compare_numbers

Devices = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class _Target:
    """How and where a step is to run. `devices` of None: all of `jax.devices()`, asked for when needed.

    The session is the one in which the step was traced; None: this process.
    """

    method: Method | Plan
    devices: Devices | None
    cluster: Cluster | None
    session: Any = None

    def in_current_session(self) -> _Target:
        """The same for a step that is traced now: devices or a cluster that were named stand."""
        named = self.devices is not None or self.cluster is not None
        return replace(self, session=None if named else current_session())

    def planned_for(self) -> Cluster | None:
        """The cluster that plans are for; None: devices of this process."""
        return self.session.cluster if self.session is not None else self.cluster

    def num_devices(self) -> int:
        cluster = self.planned_for()
        return len(self.live_devices()) if cluster is None else cluster.num_devices

    def kind(self) -> str | Machine:
        cluster = self.planned_for()
        return Cluster.from_devices(self.live_devices()).kind if cluster is None else cluster.described_by

    def live_devices(self) -> Devices:
        return jax.devices() if self.devices is None else self.devices


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a rung was made from: the step, its arguments without their values, and the calls that it serves."""

    arguments: Arguments
    call: Call
    keys: frozenset[Hashable]
    target: _Target


@dataclass(frozen=True, kw_only=True, eq=False)
class Compiled:
    """A step ready to run: call it like the step it was made from, with arguments of the same shapes."""

    plan: Plan
    program: Program
    trace: Trace
    _source: _Source
    _loaded: Loaded

    @property
    def keys(self) -> frozenset[Hashable]:
        """The calls that it serves, see `Call.key`."""
        return self._source.keys

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. Raises `InvalidArgument` for other shapes, and `DonatedBuffer` for deleted arrays."""
        call = self._source.arguments.split(args, kwargs)
        if call.key() not in self.keys:
            raise InvalidArgument(
                f"{self.trace.name} was compiled for arguments of other shapes, dtypes, or static values. Call the "
                "parallelized function itself, which compiles once for each, or compile again with these arguments."
            )
        return self.run(call)

    def run(self, call: Call) -> Any:
        """Run one step on sorted arguments."""
        return jax.tree.unflatten(self.trace.out_tree, self._loaded(call.leaves))

    def __str__(self) -> str:
        return f"Compiled {self.trace.name} on {self.plan.num_devices} devices\n{self.plan}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Lowered:
    """A step as a program: `program` prints as instructions per mesh."""

    plan: Plan
    program: Program
    trace: Trace
    _source: _Source

    def compile(self) -> Compiled:
        """Load the program on the devices of this process."""
        target = self._source.target
        if target.session is not None:
            return self._on_cluster(target.session)
        devices = target.live_devices()
        if self.plan.num_devices > len(devices):
            raise InvalidArgument(
                f"The plan needs {self.plan.num_devices} devices, this process has {len(devices)}. Plan for these "
                "devices, "
                "or run where there are enough."
            )
        loaded = InProcess(devices).load(self.program, leaf_names=[leaf.name for leaf in self.trace.inputs])
        return self._compiled(loaded)

    def _on_cluster(self, session: Any) -> Compiled:
        from autopar.runtime.distributed.ray_runtime import RayLoaded

        shipped = ship(self._source.arguments, self._source.call, self.plan)
        return self._compiled(RayLoaded(session, self.program, [leaf.name for leaf in self.trace.inputs], shipped))

    def _compiled(self, loaded: Loaded) -> Compiled:
        return Compiled(plan=self.plan, program=self.program, trace=self.trace, _source=self._source, _loaded=loaded)

    def __str__(self) -> str:
        return str(self.program)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A step with its plan: `plan` prints as a table, and goes to JSON and back."""

    plan: Plan
    trace: Trace
    _source: _Source

    def lower(self) -> Lowered:
        """Cut the step as planned, and write the instructions of every mesh."""
        program = passes.lower_step(self.trace, self.plan)
        return Lowered(plan=self.plan, program=program, trace=self.trace, _source=self._source)

    def verify(self, *args: Any, target: str | None = None, **kwargs: Any) -> VerificationReport:
        """Compile, and compare: the collectives with the planned ones, the results with those of plain `jax.jit`.

        `args` are the step's arguments, to run it once on; without them, or for a GPU `target` such as "h100" (which
        compiles with XLA's GPU compiler and needs no GPU), only the collectives are compared. Raises `InvalidArgument`
        for a plan that leaves the layouts to XLA, or a target that there is not.
        """
        program = passes.lower_step(self.trace, self.plan)
        devices = None if target is not None else self._source.target.live_devices()
        collectives = check_collectives(self.plan, program, devices=devices, target=target)
        numbers = None
        if (args or kwargs) and target is None:
            call = self._source.arguments.split(args, kwargs)
            if all(isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int) for leaf in call.leaves):
                numbers = self._compare_numbers(call)
        return VerificationReport(collectives=collectives, numbers=numbers)

    def explain(self, name: str) -> Explanation:
        """What every layout of one input would cost: `name` is its key path, for example `params/block_3/mlp/kernel`.

        Raises `InvalidArgument` for a name that finds no input, and for a plan that leaves the layouts to XLA.
        """
        return explain_plan(self.trace, self.plan, name, kind=self._source.target.kind())

    def simulate(self, cluster: Cluster | None = None) -> SimulationReport:
        """What a step will take on a cluster, by default the step's own: time, idle time, memory and a timeline.

        No device is needed. The times within a stage are the plan's, so that the cluster must be of the machine that
        it was made for. Raises `InvalidArgument` if it is of another, `PlanMismatch` if it has too few devices, and
        `Unsupported` for a plan that leaves layouts on several devices to XLA.
        """
        cluster = (
            cluster or self._source.target.planned_for() or Cluster.from_devices(self._source.target.live_devices())
        )
        check_cluster(self.plan, cluster)
        program = passes.lower_step(self.trace, self.plan)
        priced = price_plan(self.trace, self.plan, program, kind=cluster.described_by)
        work = step_work(self.trace)
        return simulate_plan(
            program,
            priced,
            cluster,
            model_flops=work.flops,
            dtype=work.dtype,
            examples=work.examples,
            tokens=work.tokens,
        )

    def _compare_numbers(self, call: Call) -> NumberCheck:
        # From the host, so that arrays may come from anywhere and the step may name devices of its own.
        anywhere = [
            leaf if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key) else np.asarray(leaf)
            for leaf in call.leaves
        ]
        expected = jax.tree.leaves(jax.jit(self._source.arguments.call_flat(call))(*anywhere))
        copies = [jnp.array(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in call.leaves]
        found = jax.tree.leaves(self.lower().compile().run(replace(call, leaves=copies)))
        return compare_numbers([leaf.name for leaf in self.trace.outputs], expected, found)

    def __str__(self) -> str:
        return str(self.plan)


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A traced step: `trace` holds its jaxpr and the names of its inputs."""

    trace: Trace
    _source: _Source

    def plan(self, method: Method | Plan | None = None) -> Planned:
        """Decide everything, by the step's method or another one.

        What a search solved is kept in $AUTOPAR_CACHE_DIR, by default ~/.cache/autopar.
        """
        target = self._source.target
        plan = plan_that_fits(
            self.trace,
            target.method if method is None else method,
            num_devices=target.num_devices(),
            kind=target.kind(),
            devices=target.live_devices() if target.planned_for() is None else None,
            cache_directory=Path(os.environ.get("AUTOPAR_CACHE_DIR") or Path.home() / ".cache" / "autopar"),
        )
        return Planned(plan=plan, trace=self.trace, _source=self._source)

    def __str__(self) -> str:
        return str(self.trace)


class Step:
    """A parallelized step: called like the function it wraps, and compiled once for each shape of its arguments."""

    def __init__(self, fun: Callable[..., Any], roles: ArgumentRoles, target: _Target) -> None:
        functools.update_wrapper(self, fun)
        self._arguments = Arguments(fun, roles)
        self._target = target
        self._compiled: dict[Hashable, Compiled] = {}
        self._session: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: the result has the structure and the numbers of the plain step's."""
        call = self._arguments.split(args, kwargs)
        return self._compiled_for(call).run(call)

    def _compiled_for(self, call: Call) -> Compiled:
        """The compiled step of such calls, in the current session."""
        key = call.key()
        session = self._target.in_current_session().session
        if session is not self._session:  # what was compiled for another cluster went with it
            self._compiled, self._session = {}, session
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._trace(call).plan().lower().compile()
            self._compiled.update(dict.fromkeys(compiled.keys, compiled))
        return compiled

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
        source = _Source(
            arguments=self._arguments,
            call=call.without_values(names),
            keys=frozenset({call.key(), call.key_of_successor(set(trace.state_outputs.values()))}),
            target=self._target.in_current_session(),
        )
        return Traced(trace=trace, _source=source)


def trace_call(arguments: Arguments, call: Call) -> Trace:
    """The trace of a step on one call's arguments."""
    described = arguments.describe_leaves(call)
    leaves = [
        Leaf(name=name, argument=position, aval=abstract(leaf, name))
        for (name, position), leaf in zip(described, call.leaves, strict=True)
    ]
    return passes.trace_step(
        arguments.call_flat(call),
        leaves,
        name=arguments.name,
        batch_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in arguments.batch],
        donated_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in arguments.donated],
    )


def program_of(arguments: Arguments, call: Call, plan: Plan) -> Program:
    """The program of a step by a plan: what every process of a cluster makes for itself."""
    return passes.lower_step(trace_call(arguments, call), plan)


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
    target = _Target(method=chosen, devices=devices, cluster=cluster)

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
                "it "
                "is: leave num_microbatches out, or make another plan."
            )
        return method
    return replace(method, num_microbatches=num_microbatches)
