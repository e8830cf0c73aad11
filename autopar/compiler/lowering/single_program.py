"""Lower a step that one executable runs: as traced on one device, or with the collectives of its planned layouts."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import jaxpr_bytes, jaxpr_flops
from autopar.compiler.lowering.sharded_step import sharded_step
from autopar.compiler.lowering.user_constraints import without_constraints
from autopar.compiler.memory.host_bytes import host_bytes, makes_host_values
from autopar.ir.plan import Plan
from autopar.ir.program import ArrayType, Executable, Free, Input, Instruction, MeshProgram, Output, Program, Run, Task


def single_program(trace: Trace, plan: Plan, *, on_paper: bool) -> Program:
    """Return the program: place the arguments, run the step; what that computes is left out `on_paper`."""
    (mesh,) = plan.meshes
    sharded = None if plan.sharding is None else sharded_step(trace, plan)
    inputs = [leaf.name.replace("@", "(at)") for leaf in trace.inputs]
    outvars = trace.jaxpr.jaxpr.outvars
    computed = [i for i, v in enumerate(outvars) if not isinstance(v, jc.Literal)]
    outputs = {i: ".".join(filter(None, ("result", trace.outputs[i].name))).replace("@", "(at)") for i in computed}
    if sharded is None:
        input_specs, output_specs = ([PartitionSpec()] * len(each) for each in (trace.inputs, computed))
        jaxpr = without_constraints(jc.with_outputs(trace.jaxpr, computed))
    else:
        input_specs, output_specs = sharded.input_specs, sharded.output_specs
        jaxpr = None if on_paper and not makes_host_values(sharded.whole) else sharded.jaxpr
    types = {
        name: ArrayType.of(leaf.aval, spec) for name, leaf, spec in zip(inputs, trace.inputs, input_specs, strict=True)
    }
    input_types = [types[name] for name in inputs]
    output_types = [ArrayType.of(trace.outputs[i].aval, spec) for i, spec in zip(computed, output_specs, strict=True)]
    types |= dict(zip(outputs.values(), output_types, strict=True))
    donated = _donated(trace, input_types, output_types)
    executable = Executable(
        name=trace.name,
        mesh=0,
        inputs=tuple(input_types),
        outputs=tuple(output_types),
        donated=donated,
        flops=jaxpr_flops(trace.jaxpr),
        bytes_accessed=jaxpr_bytes(trace.jaxpr),
        host_bytes=0 if jaxpr is None else host_bytes(jaxpr),
        jaxpr=jaxpr,
    )
    run = Run(
        task=Task(kind="U", stage=0), executable=trace.name, inputs=tuple(inputs), outputs=tuple(outputs.values())
    )
    kept = [n for i, n in enumerate(inputs) if i not in donated]
    instructions: list[Instruction] = [run, *([Free(values=tuple(kept))] if kept else [])]
    return Program(
        name=trace.name,
        meshes=(
            MeshProgram(
                devices=mesh.devices,
                shape=mesh.shape,
                axis_names=mesh.axis_names,
                values=types,
                instructions=tuple(instructions),
            ),
        ),
        executables={trace.name: executable},
        inputs=tuple(Input(leaf=i, mesh=0, value=name) for i, name in enumerate(inputs)),
        outputs=tuple(_output(i, v, outputs) for i, v in enumerate(outvars)),
        num_microbatches=1,
    )


def _donated(trace: Trace, inputs: list[ArrayType], outputs: list[ArrayType]) -> tuple[int, ...]:
    """Donated inputs whose buffer some output can take; XLA would refuse the others."""
    room = list(outputs)
    donated: list[int] = []
    for i in sorted(trace.donated_inputs):
        if inputs[i] in room:
            room.remove(inputs[i])
            donated.append(i)
    return tuple(donated)


def _output(leaf: int, v: Any, names: dict[int, str]) -> Output:
    if leaf in names:
        return Output(leaf=leaf, parts=((0, names[leaf]),))
    return Output(leaf=leaf, parts=(), literal=v.val)
