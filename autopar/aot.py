"""Ahead of time, from a step to what runs: four values, like those of `jax.stages`, each of which prints.

step.trace(state, batch)   Traced      the jaxpr
    .plan()                Planned     every decision
    .lower()               Lowered     instructions per mesh
    .compile()             Compiled    runs
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.arguments import Call
from autopar.checks import as_reduce_dtype
from autopar.compiler import passes
from autopar.compiler.analysis.compiled_collectives import check_collectives
from autopar.compiler.analysis.executable_runs import executable_runs
from autopar.compiler.analysis.explain import CollectiveCauses, Explanation, explain
from autopar.compiler.analysis.finite_values import WatchedProgram, keeping_arguments, watched_program
from autopar.compiler.analysis.inspect_executables import ExecutableReport, inspect_executables
from autopar.compiler.analysis.planned_values import input_lines, planned_values
from autopar.compiler.analysis.revision import Planning, Price
from autopar.compiler.analysis.step_work import input_parts, step_work
from autopar.compiler.analysis.task_times import price_plan
from autopar.compiler.frontend.compressed_gradients import rounding_of_compressed
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.plan_within_memory import plan_that_fits
from autopar.compiler.planning.by_hand.follow import Followed
from autopar.compiler.planning.demands.scope_demands import scopes_kept
from autopar.compiler.planning.one_mesh import memory_limit
from autopar.compiler.planning.search.best_first import Simulated
from autopar.compiler.planning.whole_inputs import note_whole
from autopar.compiler.sharding.replication import one_warning
from autopar.errors import AutoparError, InvalidArgument, MemoryTooSmall, StragglerWarning, Unsupported
from autopar.finite_guard import FiniteGuard
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Run
from autopar.jit_shardings import JitShardings, jit_shardings
from autopar.methods import Auto, Method
from autopar.progress import say, search_progress
from autopar.reports.changes import Asked, Change
from autopar.reports.description import PlanDescription, describe_plan
from autopar.reports.dump import dump_name, write_dump
from autopar.reports.explorer import Answer, plan_page
from autopar.reports.fixes import Fixes, find_fixes, with_changes
from autopar.reports.plan_difference import PlanDifference, plan_difference
from autopar.runtime.finite import kinds_of_values
from autopar.runtime.in_process import FunctionOnOneDevice, InProcess, InProcessProgram, function_on_one_device
from autopar.runtime.interfaces import LoadedProgram
from autopar.runtime.stragglers import find_stragglers
from autopar.runtime.timeline import InstructionTime, Timeline, write_trace
from autopar.session import step_timeout_s
from autopar.simulation import SimulationReport, check_devices, check_hosts, simulate_plan
from autopar.step_parts import StepParts, step_parts
from autopar.step_serialization import ChangedProgram, serialize_step
from autopar.target import Devices, Source, check_not_traced
from autopar.verification import NumberCheck, VerificationReport, move_of_types, rounding_of_sums, verify_numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Compiled:
    """A step ready to run: call it like the step it was made from, with arguments of the same shapes."""

    plan: Plan
    program: Program
    trace: Trace
    source: Source
    loaded: LoadedProgram
    """Runs the step: flat arguments in, flat results out, not checked against `keys`."""

    @property
    def keys(self) -> frozenset[Hashable]:
        """The calls that it serves, see `Call.key`."""
        return self.source.keys

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Raises `InvalidArgument` for other shapes, `DonatedBuffer` for deleted arrays, and `Unsupported` inside of a
        transformation of JAX.
        """
        check_not_traced(self.trace.name)
        call = self.source.arguments.split(args, kwargs)
        if call.key() not in self.keys:
            raise InvalidArgument(
                f"{self.trace.name} was compiled for arguments of other shapes, dtypes, or static values. Call the "
                "parallelized function itself, which compiles once for each, or compile again with these arguments."
            )
        return self.run(call)

    def run(self, call: Call) -> Any:
        """Run one step on sorted arguments."""
        return self._result(call, self.loaded(call.leaves))

    def _result(self, call: Call, outputs: Sequence[Any]) -> Any:
        return self.source.arguments.result(call, self.trace.result(call.leaves, outputs))

    def on_one_device(self) -> FunctionOnOneDevice | None:
        """Return the step as a function that JAX can trace, if its arguments and results are arrays on one device."""
        target, call = self.source.target, self.source.call
        if (
            target.session is not None
            or target.check_finite
            or call.static
            or call.static_leaves
            or self.trace.returns_more
        ):
            return None
        return function_on_one_device(self.program, target.live_devices())

    def timeline(self, path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Run one step in which every instruction is waited for, and write when each ran, for https://ui.perfetto.dev.

        Returns the step's result. Beside the measured lanes stand the predicted ones, unless the plan was made for
        another machine.
        """
        result, times = self.measure(*args, **kwargs)
        write_trace(path, times, self.predicted())
        return result

    def measure(self, *args: Any, **kwargs: Any) -> tuple[Any, list[InstructionTime]]:
        """Run one step in which every instruction is waited for: its result, and when each ran, for `Planned.view`."""
        return self.timed(self.source.arguments.split(args, kwargs))

    def timed(self, call: Call) -> tuple[Any, list[InstructionTime]]:
        """Run one step as `measure` does, on sorted arguments."""
        outputs, times = self.loaded.timed(call.leaves)
        return self._result(call, outputs), times

    def predicted(self) -> Timeline | None:
        """Return the times that the plan expects; None if it was made for another machine."""
        return Planned(plan=self.plan, trace=self.trace, source=self.source).predicted()

    def warn_of_stragglers(self, times: Sequence[InstructionTime]) -> None:
        """Warn with `StragglerWarning` of stages that take longer than their share of a step."""
        predicted = self.predicted()
        expected = [0.0] * len(self.program.meshes) if predicted is None else list(predicted.busy_s)
        if not all(expected):  # by their work, then
            for number, mesh in enumerate(self.program.meshes):
                runs = [i for i in mesh.instructions if isinstance(i, Run)]
                expected[number] = sum(self.program.executables[run.executable].flops for run in runs)
        for slow in find_stragglers(times, expected):
            stages = [str(n) for n, stage in enumerate(self.plan.stages) if stage.mesh == slow.mesh]
            warnings.warn(
                f"Stage {', '.join(stages)} on mesh {slow.mesh}, in process {', '.join(map(str, slow.processes))}, "
                f"took {slow.busy_s:.3g} s for its tasks of a step; beside the others {slow.expected_s:.3g} s were "
                "expected. "
                "Look at the clocks and the other users of its devices, or plan anew for what they can do.",
                StragglerWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        """One line; `print` shows the plan."""
        return f"<Compiled {self.trace.name}: {self.plan!r}>"

    def __str__(self) -> str:
        return f"Compiled {self.trace.name} on {self.plan.num_devices} devices\n{self.plan}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Lowered:
    """A step as a program: `program` prints as instructions per mesh."""

    plan: Plan
    program: Program
    trace: Trace
    source: Source

    def compile(self, *, at_first_call: bool = False) -> Compiled:
        """Load the program on the devices of this process; XLA's part may wait until the first call."""
        target = self.source.target
        if os.environ.get("AUTOPAR_DUMP"):
            self.dump(Path(os.environ["AUTOPAR_DUMP"]) / dump_name(self.trace, self.plan))
        if target.session is not None:
            return self._on_cluster(target.session)
        devices = target.live_devices()
        self._check_devices(len(devices))
        names = [leaf.name for leaf in self.trace.inputs]
        runtime = InProcess(devices, step_timeout_s=step_timeout_s())
        if target.check_finite:
            loaded = runtime.load(keeping_arguments(self.program), leaf_names=names, at_first_call=at_first_call)
            return self._guarded(loaded, kinds_of_values, lambda w: runtime.load(w.program, leaf_names=names))
        return self._compiled(runtime.load(self.program, leaf_names=names, at_first_call=at_first_call))

    def inspect(self, target: str | None = None) -> tuple[ExecutableReport, ...]:
        """Compile, and return the StableHLO, the HLO, and XLA's account of memory and work of every executable.

        `target` and errors are those of `verify`.
        """
        devices = None if target is not None else self.source.target.live_devices()
        self._check_devices(self.plan.num_devices if devices is None else len(devices))
        return inspect_executables(self.plan, self.program, devices=devices, target=target)

    def dump(self, folder: str | Path) -> Path:
        """Write jaxpr, plan, program, modelled timeline and what `inspect` returns into a folder; return the folder.

        Without the devices here, or on a cluster, the executables are left out. With `AUTOPAR_DUMP=folder` in the
        environment, every step is written so into a folder of its own in that one when it is compiled. Raises
        `InvalidArgument` for a folder that cannot be written to.
        """
        target = self.source.target
        is_here = target.planned_for() is None and self.plan.num_devices <= len(target.live_devices())
        predicted = Planned(plan=self.plan, trace=self.trace, source=self.source).predicted()
        try:
            return write_dump(
                Path(folder),
                trace=self.trace,
                plan=self.plan,
                program=self.program,
                timeline=predicted,
                executables=self.inspect() if is_here else (),
            )
        except OSError as error:
            raise InvalidArgument(
                f"The folder {folder} cannot be written to: {error.strerror}. Name another one, by AUTOPAR_DUMP or as "
                "the argument of dump."
            ) from error

    def _check_devices(self, num_devices: int) -> None:
        if self.plan.num_devices > num_devices:
            raise InvalidArgument(
                f"The plan needs {self.plan.num_devices} devices, this process has {num_devices}. Plan for these "
                "devices, or run where there are enough."
            )

    def verify(self, *args: Any, target: str | None = None, **kwargs: Any) -> VerificationReport:
        """Compile, and compare the collectives with the planned ones, the results with those of plain `jax.jit`.

        `args` are the step's arguments, to run it on, and on others of up to four times their size; without them, or
        for a `target` such as "h100" or "tpu-v5p" (which compiles with XLA's compiler for it and needs no such device),
        only the collectives are compared. Raises `InvalidArgument` for a target that there is not or whose compiler is
        not installed, `Unsupported` for what that does not compile, `InvalidProgram` for a program that does not fit
        together.
        """
        self.program.verify()
        devices = None if target is not None else self.source.target.live_devices()
        call = self.source.arguments.split(args, kwargs) if (args or kwargs) and target is None else None
        if call and any(not isinstance(x, jax.Array | np.ndarray | np.generic | float | int) for x in call.leaves):
            call = None
        loaded = None if call is None else self.compile().loaded
        compiled = loaded.functions if isinstance(loaded, InProcessProgram) else None
        collectives = check_collectives(self.plan, self.program, devices=devices, target=target, compiled=compiled)
        numbers = None if call is None or loaded is None else self._compare_numbers(call, loaded)
        return VerificationReport(collectives=collectives, numbers=numbers)

    def _compare_numbers(self, call: Call, loaded: LoadedProgram) -> NumberCheck:
        # From the host, so that arrays may come from anywhere and the step may name devices of its own.
        anywhere = [
            leaf if jnp.issubdtype(dtype, jax.dtypes.prng_key) else np.asarray(leaf, dtype)
            for leaf, dtype in ((leaf, jnp.asarray(leaf).dtype) for leaf in call.leaves)
        ]
        plain = jax.jit(self.source.arguments.call_flat(call))
        on_cpu = all(device.platform == "cpu" for device in self.source.target.live_devices())
        avals = [v.aval for eqn in jc.all_equations(self.trace.jaxpr) for v in (*eqn.invars, *eqn.outvars)]
        return verify_numbers(
            [leaf.name for leaf in self.trace.outputs],
            lambda leaves: jax.tree.leaves(plain(*leaves)),
            # Copies, because a step may take what it is given.
            lambda leaves: loaded([jnp.array(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]),
            anywhere,
            replaced=self.trace.state_outputs,
            # Others multiply float32 in fewer bits, if they are not told otherwise.
            rounding=rounding_of_sums(avals, bits=52 if on_cpu else 10),
            least_move=max(move_of_types(avals), rounding_of_compressed(self.trace.jaxpr)),
        )

    def _on_cluster(self, session: Any) -> Compiled:
        from autopar.runtime.distributed.driver import ClusterProgram, kinds_of_distributed_values

        if self.plan.on_host:
            raise Unsupported(
                f"The plan of {self.trace.name} keeps {self.plan.on_host[0]} on the host, and on clusters values "
                "live on devices. Plan without offload there, or run in one process."
            )
        make_program: Callable[[], Program] = (
            serialize_step(self.source.arguments, self.source.call, self.plan)
            if session.has_driver
            else lambda: self.program
        )
        names = [leaf.name for leaf in self.trace.inputs]
        if not self.source.target.check_finite:
            return self._compiled(ClusterProgram(session, self.program, names, make_program))
        kept, kept_there = keeping_arguments(self.program), ChangedProgram(make=make_program, change=keeping_arguments)

        def load(reporting: WatchedProgram) -> ClusterProgram:
            there = ChangedProgram(make=make_program, change=watched_program)
            return ClusterProgram(session, reporting.program, names, there)

        return self._guarded(
            ClusterProgram(session, kept, names, kept_there), partial(kinds_of_distributed_values, session), load
        )

    def _guarded(
        self,
        loaded: LoadedProgram,
        kinds: Callable[[Sequence[Any]], list[int]],
        load: Callable[[WatchedProgram], LoadedProgram],
    ) -> Compiled:
        return self._compiled(
            FiniteGuard(
                loaded=loaded,
                program=self.program,
                input_names=[leaf.name for leaf in self.trace.inputs],
                output_names=[leaf.name for leaf in self.trace.outputs],
                state_outputs=self.trace.state_outputs,
                kinds=kinds,
                load=load,
            )
        )

    def _compiled(self, loaded: LoadedProgram) -> Compiled:
        return Compiled(plan=self.plan, program=self.program, trace=self.trace, source=self.source, loaded=loaded)

    def __repr__(self) -> str:
        """One line; `print` shows the instructions."""
        return f"<Lowered {self.trace.name}: {self.plan!r}>"

    def __str__(self) -> str:
        return str(self.program)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A step with its plan: `plan` prints as a table, and goes to JSON and back."""

    plan: Plan
    trace: Trace
    source: Source
    scopes: tuple[str, ...] = ()
    """The scopes of the model that the plan was made to keep."""
    method: Method | Plan | Followed | None = None
    """The method that it was planned by; None for what is planned by no method of its own."""

    @cached_property
    def _program(self) -> Program:
        return passes.lower_step(self.trace, self.plan)

    @cached_property
    def _on_paper(self) -> Program:
        """The program that is simulated: without what its executables compute, unless that is known."""
        return vars(self).get("_program") or passes.lower_step(self.trace, self.plan, on_paper=True)

    def lower(self) -> Lowered:
        """Cut the step as planned, and write the instructions of every mesh."""
        return Lowered(plan=self.plan, program=self._program, trace=self.trace, source=self.source)

    def describe(self, cluster: Cluster | None = None) -> PlanDescription:
        """Return what runs: the layout of every input and crossing value, the collectives, time and memory.

        It prints as tables, shows in a notebook, and gives JSON. `cluster` and errors are those of `simulate`.
        """
        names = [leaf.name for leaf in self.trace.inputs]
        state = {output: names[leaf] for output, leaf in self.trace.state_outputs.items()}
        return describe_plan(
            self.trace.name,
            self.plan,
            self._program,
            names,
            input_lines(self.trace),
            [(leaf.name, state.get(number, "")) for number, leaf in enumerate(self.trace.outputs)],
            self.simulate(cluster),
            self.scopes,
            in_one_process=self.source.target.is_one_process(),
        )

    def verify(self, *args: Any, target: str | None = None, **kwargs: Any) -> VerificationReport:
        """Hold the plan against what a compiler makes of it, and against plain `jax.jit`: see `Lowered.verify`."""
        return self.lower().verify(*args, target=target, **kwargs)

    def explain(self, question: str) -> Explanation | CollectiveCauses:
        """Return what else a layout or a decision could be, with the price of each, or what causes a collective.

        `question` is an input, by its name (`state.params.h_3.mlp.kernel`), the end of it or a regular expression; one
        of "stages", "schedule", "num_microbatches", "remat", "mesh_shape", "shares" (of lanes) and "machines" (of a
        mixed cluster: each stage elsewhere, and the figure that it is worse for there); or a part of the line or the
        scope of a collective, or its kind. Every price is that of a whole plan as `simulate` gives it, the layouts
        chosen anew. What the user asked for by scopes, pins and options stays, and is named.

        Raises `InvalidArgument` for a question that finds nothing, and for an input that is too small to be split.
        """
        return explain(self._planning(self.source.target.devices_planned_for()), question)

    def _planning(self, cluster: Cluster) -> Planning:
        """Return the plan and what it was made from, as on a cluster like its own."""
        known: dict[int, tuple[Plan, SimulationReport]] = {}

        def report(plan: Plan) -> SimulationReport:
            if id(plan) not in known:
                known[id(plan)] = plan, replace(self, plan=plan).simulate(cluster)
            return known[id(plan)][1]

        def price(plan: Plan) -> Price:
            made = report(plan)
            limit = made.memory_limit_bytes
            return Price(step_time_s=made.step_time_s, peak_bytes=made.peak_bytes, memory_limit_bytes=limit)

        limits = {group.machine.name: memory_limit("adaptive", group.machine) for group in cluster.groups}
        for mesh in report(self.plan).meshes:
            limits[mesh.machine] = max(limits[mesh.machine], mesh.peak_bytes)
        return Planning(
            trace=self.trace,
            plan=self.plan,
            method=self.method if isinstance(self.method, Method) else None,
            cluster=cluster,
            cut=lambda plan: passes.cut_step(self.trace, plan),
            made=lambda method: Traced(trace=self.trace, source=self.source).planned(method).plan,
            price=price,
            fits=lambda plan: all(mesh.peak_bytes <= limits[mesh.machine] for mesh in report(plan).meshes),
            limits=limits,
            on=self._planning,
        )

    def simulate(self, cluster: Cluster | None = None) -> SimulationReport:
        """Return time, idle time, memory and a timeline of a step on a cluster, by default the step's own.

        No device is needed. The times within a stage are the plan's, so that the cluster must be of the machine that
        it was made for. Raises `InvalidArgument` if it is of another, and `PlanMismatch` if it has too few devices.
        """
        cluster = cluster or self.source.target.devices_planned_for()
        check_devices(self.plan, cluster)
        return _simulated(self.trace, self.plan, self._on_paper, cluster)

    def parts(self, cluster: Cluster | None = None) -> StepParts:
        """Return what the simulated step is made of, along its critical path. `cluster` and errors as of `simulate`."""
        planned_on = cluster or self.source.target.devices_planned_for()
        program, timeline = self._on_paper, self.simulate(planned_on).timeline
        priced = price_plan(self.trace, self.plan, program, cluster=planned_on)
        cut = partial(passes.cut_step, self.trace, self.plan)
        return step_parts(self.trace, priced, program, timeline, cut, planned_on)

    def chakra(
        self, folder: str | Path, *, devices: Sequence[int] | None = None, cluster: Cluster | None = None
    ) -> Path:
        """Write the simulated step as Chakra traces, for other simulators; return the folder.

        `step.N.et` is what device N does, for each device of the plan or for `devices`: tasks and collectives with
        their modelled durations, messages, and what waits for what. `comm_groups.json` has the devices of each group
        of collectives. `cluster` and errors are those of `simulate`; `InvalidArgument` for a folder that cannot be
        written to.
        """
        from autopar.reports.chakra import write_chakra

        timeline, planned_on = self.simulate(cluster).timeline, cluster or self.source.target.devices_planned_for()
        priced = price_plan(self.trace, self.plan, self._program, cluster=planned_on)
        cut = partial(passes.cut_step, self.trace, self.plan)
        runs = executable_runs(self.trace, priced, self._program, cut, planned_on)
        try:
            return write_chakra(Path(folder), self._program, timeline, runs, devices)
        except OSError as error:
            raise InvalidArgument(
                f"The folder {folder} cannot be written to: {error.strerror}. Name another one for the traces."
            ) from error

    def predicted(self) -> Timeline | None:
        """Return the times that the plan expects; None if it was made for another machine."""
        try:
            return self.simulate().timeline
        except AutoparError:
            return None

    def shardings(self, devices: Devices | None = None) -> JitShardings:
        """Return the layouts of a plan on one mesh for a plain `jax.jit`, on `devices`, by default the step's own.

        Raises `Unsupported` for stages on several meshes, static arguments or ones by name, and `InvalidArgument` for
        too few devices.
        """
        here = devices if devices is not None or self.source.target.planned_for() else self.source.target.live_devices()
        return jit_shardings(self.trace, self.source.call, self.plan, self._program, here)

    def diff(self, other: Planned) -> PlanDifference:
        """Return what differs in another plan, in words and numbers: decisions, layouts, collectives, memory, time."""
        return plan_difference(self.describe(), other.describe())

    def what_if(
        self, *, method: Method | None = None, cluster: Cluster | str | None = None, **options: Any
    ) -> PlanDifference:
        """Plan the step anew, and return what differs: `what_if(num_microbatches=8)`, `what_if(cluster="4x dgx-h100")`.

        `options` are fields of the method, by default the one that made this plan: `memory`, `pins`, `schedule`,
        `remat`, `tensor` and whatever it has. `difference.after.plan` is the plan. Raises `InvalidArgument` for an
        option that the method does not have, and whatever planning raises.
        """
        asked = _with_options(self.method if method is None else method, options)
        source = Traced(trace=self.trace, source=self.source)
        if cluster is not None:
            source = source.on_cluster(Cluster.parse(cluster) if isinstance(cluster, str) else cluster)
        return self.diff(source.plan(asked))

    def fixes(self) -> Fixes:
        """Return what to write instead of the method, by what it gains; each suggestion is planned and simulated."""
        return Traced(trace=self.trace, source=self.source).fixes_of(self.method, self.describe())

    def view(
        self,
        path: str | Path,
        *,
        cluster: Cluster | None = None,
        beside: Planned | None = None,
        answers: Sequence[Answer] = (),
        measured: Sequence[InstructionTime] = (),
    ) -> Path:
        """Write what `describe` returns as a page for a browser, one file that fetches nothing; return its path.

        `beside` is another plan, with its timeline and all that differs; `answers` are what `what_if` and `explain`
        returned, and `measured` the times of a step that ran, as `Compiled.measure` returns them.
        """
        page, other = Path(path), None if beside is None else beside.describe(cluster)
        values = planned_values(self.trace, self.plan, lambda: passes.cut_step(self.trace, self.plan))
        text = plan_page(self.describe(cluster), values=values, beside=other, answers=answers, measured=measured)
        page.write_text(text, encoding="utf-8")
        return page

    def __repr__(self) -> str:
        """One line; `print` shows what runs."""
        return f"<Planned {self.trace.name}: {self.plan!r}>"

    def __rich__(self) -> PlanDescription | Plan:
        """Return what runs, see `describe`; the plan alone if its times are of another machine."""
        try:
            return self.describe()
        except AutoparError:
            return self.plan

    def __str__(self) -> str:
        return str(self.__rich__())

    def _repr_html_(self) -> str:
        return self.describe().to_html()


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A traced step: `trace` holds its jaxpr and the names of its inputs."""

    trace: Trace
    source: Source

    def plan(self, method: Method | Plan | None = None) -> Planned:
        """Decide everything, by the step's method or another one.

        What a search solved is kept in $AUTOPAR_CACHE_DIR, by default ~/.cache/autopar. Raises `MemoryTooSmall` where
        no plan fits, whose message, when it is read, says what change would: each is planned then, and simulated. Of a
        step that takes long to plan it says only that `fixes` does that.
        """
        asked = self.source.target.method if method is None else method
        began_s = time.process_time()
        try:
            found = self.planned(asked)
        except MemoryTooSmall as error:
            planned_s = time.process_time() - began_s
            raise with_changes(error, partial(self.fixes_of, asked, error), self.trace, planned_s) from None
        if isinstance(asked, Auto) and found.plan.certificate is not None:
            say(f"{self.trace.name}: {found.plan.choice()}")
        return found

    def planned(self, asked: Method | Plan | Followed) -> Planned:
        """Decide everything as `plan` does, and say nothing of it; where nothing fits, of no changes either."""
        target = self.source.target
        cluster = target.devices_planned_for()
        trace = self.trace.reducing_in(None if isinstance(asked, Followed) else as_reduce_dtype(asked.reduce_dtype))
        last: dict[int, tuple[Plan, SimulationReport]] = {}  # the one whose time and memory are asked for in turn

        def report(plan: Plan, graph: StageGraph | None = None) -> SimulationReport:
            if id(plan) not in last:
                last.clear()
                on_paper = passes.lower_step(trace, plan, on_paper=True, graph=graph)
                last[id(plan)] = plan, _simulated(trace, plan, on_paper, cluster)
            return last[id(plan)][1]

        def step_s(plan: Plan, graph: StageGraph | None = None) -> float:
            check_hosts(report(plan, graph), trace.name)
            return report(plan).step_time_s

        def peak_bytes(plan: Plan) -> list[int]:
            return [mesh.peak_bytes for mesh in report(plan).meshes]

        with search_progress(f"planning {trace.name}"), one_warning(trace.name):
            plan = self._agreed(
                lambda: plan_that_fits(
                    trace,
                    asked,
                    cluster=cluster,
                    simulated=Simulated(step_s=step_s, peak_bytes=peak_bytes),
                    devices=target.live_devices() if target.planned_for() is None else None,
                    cache_directory=Path(os.environ.get("AUTOPAR_CACHE_DIR") or Path.home() / ".cache" / "autopar"),
                )
            )
            note_whole(trace, plan, partial(passes.cut_step, trace, plan))
        scopes = tuple(map(str, scopes_kept(trace, asked)))
        return Planned(plan=plan, trace=trace, source=self.source, method=asked, scopes=scopes)

    def on_cluster(self, cluster: Cluster) -> Traced:
        """Return the step for the devices of another cluster, which need not be there."""
        target = replace(self.source.target, cluster=cluster, devices=None, session=None)
        return replace(self, source=replace(self.source, target=target))

    def fixes(self, method: Method | None = None) -> Fixes:
        """Return what to write instead of a method, by default the step's, for a step without a plan or a slow one."""
        asked = self.source.target.method if method is None else method
        try:
            now = self.planned(asked).describe()
        except AutoparError as error:
            now = error
        return self.fixes_of(asked, now)

    def fixes_of(
        self,
        method: Method | Plan | Followed | None,
        now: PlanDescription | AutoparError,
        most_s: float = math.inf,
    ) -> Fixes:
        """Return what to write instead of a method that makes this plan, or raises this error.

        No change is begun after `most_s` seconds of the processor.
        """
        given = method if isinstance(method, Method) else None
        asked = Asked.of(self.trace, given, self.source.target.devices_planned_for())
        return find_fixes(asked, self._describe_changed, now=now, most_s=most_s)

    def _describe_changed(self, change: Change) -> PlanDescription:
        """Plan with a change. On a cluster it is planned on paper: the processes do not agree on what does not run."""
        changed, session = self, self.source.target.session
        if change.cluster is not None or session is not None:
            changed = changed.on_cluster(change.cluster or session.cluster)
        if change.donated:
            changed = replace(changed, trace=self.trace.donating(change.donated))
        return changed.planned(change.method).describe()

    def _agreed(self, make: Callable[[], Plan]) -> Plan:
        """Return the plan that all processes of the session obey; one of them makes it."""
        session = self.source.target.session
        if session is None:
            return make()
        made: list[Plan] = []

        def write() -> str:
            made.append(make())
            return made[0].to_json()

        written = session.agree_on_plan(self.trace.name, lambda: f"{self.trace}\n{self.trace.jaxpr}", write)
        return made[0] if made else Plan.from_json(written)

    def __repr__(self) -> str:
        """One line; `print` shows the jaxpr."""
        return f"<Traced {self.trace.name}: {len(self.trace.inputs)} inputs, {len(self.trace.outputs)} outputs>"

    def __str__(self) -> str:
        return str(self.trace)


def _simulated(trace: Trace, plan: Plan, program: Program, cluster: Cluster) -> SimulationReport:
    """Return the simulation of a step by its plan, lowered."""
    priced, work = price_plan(trace, plan, program, cluster=cluster), step_work(trace)
    return simulate_plan(
        program,
        priced,
        cluster,
        inputs=input_parts(trace),
        model_flops=work.flops,
        dtype=work.dtype,
        examples=work.examples,
        tokens=work.tokens,
    )


def _with_options(method: Method | Plan | Followed | None, options: Mapping[str, Any]) -> Method | Plan | None:
    """Return a method with some of its fields changed."""
    if isinstance(method, Plan) and not options:
        return method
    if method is None or isinstance(method, Plan | Followed):
        raise InvalidArgument(
            "This was planned from a stored plan or as another step is, and has no options to change. Give a method: "
            "what_if(method=autopar.Auto(...))."
        )
    if not isinstance(method, Method):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"method is {method!r}. Give a method such as autopar.Auto() or autopar.Megatron().")
    known = [each.name for each in fields(method)]
    for name, value in options.items():
        if name not in known:
            raise InvalidArgument(
                f"{type(method).__name__} has no option {name!r}; it has {', '.join(known)}. Ask for another method: "
                f"method=autopar.Auto({name}={value!r})."
            )
    return replace(method, **options)
