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
from autopar.simulation import SimulationReport, check_cluster, simulate_plan
from autopar.verification_report import NumberCheck, VerificationReport, compare_numbers

Devices = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class _Target:
    """How and where a step is to run. `devices` of None: all of `jax.devices()`, asked for when needed."""

    method: Method | Plan
    devices: Devices | None
    cluster: Cluster | None

    def num_devices(self) -> int:
        if self.cluster is not None:
            return self.cluster.num_devices
        return len(self.live_devices())

    def kind(self) -> str | Machine:
        if self.cluster is not None:
            return self.cluster.described_by
        return Cluster.from_devices(self.live_devices()).kind

    def live_devices(self) -> Devices:
        return jax.devices() if self.devices is None else self.devices


@dataclass(frozen=True, kw_only=True, eq=False)
class Compiled:
    """A step ready to run: call it like the step it was made from, with arguments of the same shapes."""

    plan: Plan
    program: Program
    trace: Trace
    _arguments: Arguments
    keys: frozenset[Hashable]
    _loaded: Loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. Raises `InvalidArgument` for other shapes, and `DonatedBuffer` for deleted arrays."""
        call = self._arguments.split(args, kwargs)
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
    _arguments: Arguments
    _keys: frozenset[Hashable]
    _target: _Target

    def compile(self) -> Compiled:
        """Load the program on the devices of this process."""
        devices = self._target.live_devices()
        if self.plan.num_devices > len(devices):
            raise InvalidArgument(
                f"The plan needs {self.plan.num_devices} devices, this process has {len(devices)}. Plan for these "
                "devices, "
                "or run where there are enough."
            )
        loaded = InProcess(devices).load(self.program, leaf_names=[leaf.name for leaf in self.trace.inputs])
        return Compiled(
            plan=self.plan,
            program=self.program,
            trace=self.trace,
            _arguments=self._arguments,
            keys=self._keys,
            _loaded=loaded,
        )

    def __str__(self) -> str:
        return str(self.program)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A step with its plan: `plan` prints as a table, and goes to JSON and back."""

    plan: Plan
    trace: Trace
    _arguments: Arguments
    _keys: frozenset[Hashable]
    _target: _Target

    def lower(self) -> Lowered:
        """Cut the step as planned, and write the instructions of every mesh."""
        program = passes.lower_step(self.trace, self.plan)
        return Lowered(
            plan=self.plan,
            program=program,
            trace=self.trace,
            _arguments=self._arguments,
            _keys=self._keys,
            _target=self._target,
        )

    def verify(self, *args: Any, target: str | None = None, **kwargs: Any) -> VerificationReport:
        """Compile, and compare: the collectives with the planned ones, the results with those of plain `jax.jit`.

        `args` are the step's arguments, to run it once on; without them, or for a GPU `target` such as "h100" (which
        compiles with XLA's GPU compiler and needs no GPU), only the collectives are compared. Raises `InvalidArgument`
        for a plan that leaves the layouts to XLA, or a target that there is not.
        """
        program = passes.lower_step(self.trace, self.plan)
        devices = None if target is not None else self._target.live_devices()
        collectives = check_collectives(self.plan, program, devices=devices, target=target)
        numbers = None
        if (args or kwargs) and target is None:
            call = self._arguments.split(args, kwargs)
            if all(isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int) for leaf in call.leaves):
                numbers = self._compare_numbers(call)
        return VerificationReport(collectives=collectives, numbers=numbers)

    def explain(self, name: str) -> Explanation:
        """What every layout of one input would cost: `name` is its key path, for example `params/block_3/mlp/kernel`.

        Raises `InvalidArgument` for a name that finds no input, and for a plan that leaves the layouts to XLA.
        """
        return explain_plan(self.trace, self.plan, name, kind=self._target.kind())

    def simulate(self, cluster: Cluster | None = None) -> SimulationReport:
        """What a step will take on a cluster, by default the step's own: time, idle time, memory and a timeline.

        No device is needed. The times within a stage are the plan's, so that the cluster must be of the machine that
        it was made for. Raises `InvalidArgument` if it is of another, `PlanMismatch` if it has too few devices, and
        `Unsupported` for a plan that leaves layouts on several devices to XLA.
        """
        cluster = cluster or self._target.cluster or Cluster.from_devices(self._target.live_devices())
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
        expected = jax.tree.leaves(jax.jit(self._arguments.call_flat(call))(*anywhere))
        copies = [jnp.array(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in call.leaves]
        found = jax.tree.leaves(self.lower().compile().run(replace(call, leaves=copies)))
        return compare_numbers([leaf.name for leaf in self.trace.outputs], expected, found)

    def __str__(self) -> str:
        return str(self.plan)


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A traced step: `trace` holds its jaxpr and the names of its inputs."""

    trace: Trace
    _arguments: Arguments
    _keys: frozenset[Hashable]
    _target: _Target

    def plan(self, method: Method | Plan | None = None) -> Planned:
        """Decide everything, by the step's method or another one.

        What a search solved is kept in $AUTOPAR_CACHE_DIR, by default ~/.cache/autopar.
        """
        plan = plan_that_fits(
            self.trace,
            self._target.method if method is None else method,
            num_devices=self._target.num_devices(),
            kind=self._target.kind(),
            devices=self._target.live_devices() if self._target.cluster is None else None,
            cache_directory=Path(os.environ.get("AUTOPAR_CACHE_DIR") or Path.home() / ".cache" / "autopar"),
        )
        return Planned(plan=plan, trace=self.trace, _arguments=self._arguments, _keys=self._keys, _target=self._target)

    def __str__(self) -> str:
        return str(self.trace)


class Step:
    """A parallelized step: called like the function it wraps, and compiled once for each shape of its arguments."""

    def __init__(self, fun: Callable[..., Any], roles: ArgumentRoles, target: _Target) -> None:
        functools.update_wrapper(self, fun)
        self._arguments = Arguments(fun, roles)
        self._target = target
        self._compiled: dict[Hashable, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: the result has the structure and the numbers of the plain step's."""
        call = self._arguments.split(args, kwargs)
        key = call.key()
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._trace(call).plan().lower().compile()
            self._compiled.update(dict.fromkeys(compiled.keys, compiled))
        return compiled.run(call)

    def __repr__(self) -> str:
        method = self._target.method
        compiled = len(set(map(id, self._compiled.values())))
        return f"<parallelized {self._arguments.name} by {type(method).__name__}, compiled {compiled} times>"

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace the step on these arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._trace(self._arguments.split(args, kwargs))

    def _trace(self, call: Call) -> Traced:
        described = self._arguments.describe_leaves(call)
        leaves = [
            Leaf(name=name, argument=position, aval=abstract(leaf, name))
            for (name, position), leaf in zip(described, call.leaves, strict=True)
        ]
        trace = passes.trace_step(
            self._arguments.call_flat(call),
            leaves,
            name=self._arguments.name,
            batch_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in self._arguments.batch],
            donated_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in self._arguments.donated],
        )
        keys = frozenset({call.key(), call.key_of_successor(set(trace.state_outputs.values()))})
        return Traced(trace=trace, _arguments=self._arguments, _keys=keys, _target=self._target)


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

    - `method`: `DataParallel` (the default), `ShardParallel`, `PipelineParallel`, `Auto`, `Zero`, `TensorParallel`,
      `ExpertParallel`, or a `Plan`.
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
