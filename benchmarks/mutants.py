"""Break programs and plans of eight models on purpose, in the ways in which compilers err: `verify` must notice.

python -m benchmarks.mutants [--models mlp ...] [--kinds ...] [--seeds 1] [--json FILE]

Each model is planned twice: one program on a mesh of two by two, and a pipeline of two stages on two devices each. A
mutant differs from the planned program in one place, drawn from a seed. It is caught if `Lowered.verify` reports it, or
the program is refused before its first step. One that escapes is equivalent if it changes no result by more than
rounding the arguments does, from the step's own arguments and from others, up to six times as large, at which `verify`
does not look: nobody could tell it from the sound program by its numbers. The kinds are those of TrainVerify
(SOSP 2025), section 6, and more. Sound plans of each model by `SOUND` methods are verified too: none may be refused.

A run with `--json FILE` that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopar
from autopar.aot import Lowered
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.planning.plan_checks import check_plan
from autopar.errors import AutoparError
from autopar.ir.program import Executable, Instruction, Program, Recv, Run, Send
from autopar.verification import arguments_away_from_zero, rounded_arguments
from benchmarks.models import MODELS
from benchmarks.models.model import Model

SIZES: Mapping[str, Mapping[str, int]] = {
    "mlp": {"layers": 2, "width": 16, "hidden": 32, "batch": 16},
    "gpt": {"layers": 2, "width": 16, "heads": 2, "vocabulary": 32, "length": 8, "batch": 8},
    "moe": {"width": 16, "heads": 2, "experts": 4, "hidden": 32, "vocabulary": 32, "length": 8, "batch": 8},
    "moe_ragged": {"width": 16, "heads": 2, "experts": 4, "hidden": 32, "vocabulary": 32, "length": 8, "batch": 8},
    "convnet": {"stages": 2, "blocks": 1, "channels": 4, "image": 8, "classes": 8, "batch": 8},
    "vit": {"layers": 2, "width": 16, "heads": 2, "image": 8, "patch": 4, "classes": 8, "batch": 8},
    "lstm": {"width": 16, "vocabulary": 32, "length": 4, "batch": 8},
    "encoder_decoder": {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32, "source_length": 8, "target_length": 8,
                        "batch": 8},
}  # fmt: skip
PLANS: Mapping[str, Callable[[int], Any]] = {
    "one mesh": lambda parts: autopar.Auto(num_stages=1, num_microbatches=1, mesh_shape=(2, 2)),
    "pipeline": lambda parts: autopar.PipelineParallel(num_stages=2, num_microbatches=parts),
}
"""The methods whose programs are broken, for so many microbatches."""
SOUND: Mapping[str, Callable[[int], Any]] = {
    "data": lambda parts: autopar.DataParallel(num_microbatches=parts),
    "zero 2": lambda parts: autopar.Zero(stage=2),
    "zero 3": lambda parts: autopar.Zero(stage=3),
    "zero 2 over microbatches": lambda parts: autopar.Zero(stage=2, num_microbatches=parts),
    "zero 3 over microbatches": lambda parts: autopar.Zero(stage=3, num_microbatches=parts),
    "tensor": lambda parts: autopar.TensorParallel(),
    "mesh of 4": lambda parts: autopar.Auto(num_stages=1, num_microbatches=1, mesh_shape=(4,)),
    "microbatches": lambda parts: autopar.Auto(num_stages=1, num_microbatches=parts, mesh_shape=(2, 2)),
    "searched": lambda parts: autopar.Auto(num_microbatches=parts),
    "megatron": lambda parts: autopar.Megatron(data=2, tensor=2, pipeline=1),
    "gpipe": lambda parts: autopar.PipelineParallel(num_stages=2, num_microbatches=parts, schedule="gpipe"),
    "zero bubble": lambda parts: autopar.PipelineParallel(num_stages=2, num_microbatches=parts, schedule="zero-bubble"),
    "four parts": lambda parts: autopar.PipelineParallel(num_stages=2, num_microbatches=min(2 * parts, 4)),
    "recomputed": lambda parts: autopar.PipelineParallel(num_stages=2, num_microbatches=parts, remat=True),
}
"""More methods, whose programs are only verified."""
WHOLE_BATCH = ("moe", "moe_ragged", "convnet")
"""Models that look at the whole batch, their experts or their norms: no microbatches."""
TIME_LIMIT_S = 60.0
"""Within which a mutant is to be caught."""

Change = Callable[[jc.JaxprEqn, "Mesh"], Callable[..., Any] | None]
Mutate = Callable[[Lowered, Random], Iterator[Lowered]]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The axes of the mesh on which an executable runs, with their sizes."""

    sizes: Mapping[str, int]
    finite: frozenset[Any] = frozenset()
    """Masks of what is finite, as in a logarithm of a sum of exponentials, which is the same whatever they say."""

    def of(self, axes: Sequence[str]) -> int:
        """The number of devices along some axes."""
        size = 1
        for axis in axes:
            size *= self.sizes[axis]
        return size

    def others(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Other axes of as many devices as these, or fewer of these; none on a mesh of one axis."""
        rest = tuple(axis for axis in self.sizes if axis not in axes)
        return rest if rest else tuple(axes[:-1])


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a mutant: "numbers", "collectives", "refused" or "raised" if it was caught, or "escaped".

    The kind of a sound program is "none", and its verdict "sound" or "alarm"; CPU seconds.
    """

    model: str
    plan: str
    kind: str
    seed: int
    verdict: str
    seconds: float
    text: str


def lowered(name: str, plan: str) -> tuple[Lowered, Model]:
    """Return the program of a model by one of `PLANS` or `SOUND`."""
    model = MODELS[name](**SIZES[name])
    method = (PLANS | SOUND)[plan](1 if name in WHOLE_BATCH else 2)
    step = autopar.parallelize(model.step, method=method, devices=jax.devices()[:4])
    return step.trace(model.abstract_state, model.abstract_batch).plan().lower(), model


def verdict(program: Lowered, arguments: Sequence[Any]) -> tuple[str, str]:
    """Return what `verify` makes of a program, and what it says; "escaped" if it finds nothing."""
    try:
        check_plan(program.plan, program.trace, num_devices=4)
        report = program.verify(*arguments)
    except AutoparError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # before the first step, if not in our words
        return "raised", f"{type(error).__name__}: {error}"
    if not report.collectives:
        return "collectives", str(report).partition("memory:")[0]
    numbers = report.numbers
    assert numbers is not None
    told = f"{numbers.leaf} differs by {numbers.difference:.1e}, allowed {numbers.tolerance:.1e}"
    return ("escaped" if numbers else "numbers"), told


def is_equivalent(sound: Lowered, mutant: Lowered, arguments: Sequence[Any]) -> bool:
    """Return whether a mutant changes no result, as a whole, by more than rounding the arguments does."""
    leaves = [np.asarray(leaf) for leaf in sound.source.arguments.split(arguments, {}).leaves]
    run, run_mutant = sound.compile().loaded, mutant.compile().loaded
    for times in (None, 1.5, 3.0, 6.0):
        # Seeds that `verify` does not use.
        point = leaves if times is None else arguments_away_from_zero(leaves, times=times, seed=100 + int(times))
        expected, found, rounded = (
            [np.asarray(result, np.float64) for result in results]
            for results in (run(point), run_mutant(point), run(rounded_arguments(point)))
        )
        for x, y, z in zip(expected, found, rounded, strict=True):
            least = np.finfo(np.float32).eps * np.linalg.norm(x)
            if not np.linalg.norm(x - y) <= max(np.linalg.norm(x - z), least):
                return False
    return True


# --- one equation is another ----------------------------------------------------------------------------------


def _axes(eqn: jc.JaxprEqn) -> tuple[str, ...]:
    found = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
    axes = (found,) if isinstance(found, str) else tuple(found)
    return axes if all(isinstance(axis, str) for axis in axes) else ()  # of a sum within the device


def _missing(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    count, params = mesh.of(_axes(eqn)), eqn.params
    match eqn.primitive.name:
        case "psum" | "ppermute":
            return lambda *xs: [lax.optimization_barrier(x) for x in xs]
        case "all_gather":
            return lambda x: [jnp.concatenate([x] * count, axis=params["all_gather_dimension"])]
        case "reduce_scatter":
            return lambda x: [_own_part(x, eqn, count)]
        case "all_to_all":
            return lambda x: [jnp.concatenate(jnp.split(x, count, params["split_axis"]), axis=params["concat_axis"])]
        case _:
            return None


def _own_part(x: Any, eqn: jc.JaxprEqn, count: int) -> Any:
    dim = eqn.params["scatter_dimension"]
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(x, lax.axis_index(_axes(eqn)) * size, size, dim)


def _doubled(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    axes = _axes(eqn)
    match eqn.primitive.name:
        case "psum":
            return lambda *xs: [lax.psum(lax.psum(x, axes), axes) for x in xs]
        case "reduce_scatter":
            dim = eqn.params["scatter_dimension"]
            return lambda x: [lax.psum_scatter(lax.psum(x, axes), axes, scatter_dimension=dim, tiled=True)]
        case _:
            return None


def _swapped(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    axes, count = _axes(eqn), mesh.of(_axes(eqn))
    match eqn.primitive.name:
        case "psum":
            return lambda *xs: [lax.pmax(x, axes) for x in xs]
        case "reduce_scatter":
            return lambda x: [_own_part(lax.pmax(x, axes), eqn, count)]
        case "all_gather":
            dim = eqn.params["all_gather_dimension"]
            return lambda x: [
                lax.all_to_all(jnp.concatenate([x] * count, dim), axes, split_axis=dim, concat_axis=dim, tiled=True)
            ]
        case _:
            return None


def _over_other_axes(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    others = mesh.others(_axes(eqn))
    if not others:
        return None
    match eqn.primitive.name:
        case "psum":
            return lambda *xs: [lax.psum(x, others) for x in xs]
        case "all_gather" if mesh.of(others) == mesh.of(_axes(eqn)):
            return lambda x: [lax.all_gather(x, others, axis=eqn.params["all_gather_dimension"], tiled=True)]
        case "reduce_scatter" if mesh.of(others) == mesh.of(_axes(eqn)):
            dim = eqn.params["scatter_dimension"]
            return lambda x: [lax.psum_scatter(x, others, scatter_dimension=dim, tiled=True)]
        case _:
            return None


def _in_other_groups(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    """A sum with the device across, which is in no group of the axis: 0 with 3, 1 with 2."""
    if eqn.primitive.name != "psum" or len(_axes(eqn)) != 1 or len(mesh.sizes) != 2:
        return None
    across = [(device, 3 - device) for device in range(4)]
    return lambda *xs: [x + lax.ppermute(x, tuple(mesh.sizes), across) for x in xs]


def _only_dots(change: Callable[[Any], Any]) -> Change:
    def of(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated") or eqn.outvars[0].aval.ndim < 2:
            return None
        return lambda *xs: [change(jc.bind_equation(eqn, xs)[0])]

    return of


def _other_mask(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    shape = eqn.outvars[0].aval
    chosen = eqn.primitive.name == "select_n" and shape.ndim > 1 and jnp.issubdtype(shape.dtype, jnp.floating)
    if not chosen or len(eqn.invars) != 3 or eqn.invars[0].aval.dtype != jnp.bool_ or eqn.invars[0] in mesh.finite:
        return None
    return lambda mask, *cases: [lax.select_n(~mask, *cases)]


def _term_left_out(eqn: jc.JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    if eqn.primitive.name != "add_any":
        return None
    return lambda x, _: [lax.optimization_barrier(x)]


def _changing(change: Change) -> Mutate:
    """Return every program in which one equation is changed, in an order of its own."""

    def mutants(program: Lowered, rng: Random) -> Iterator[Lowered]:
        every = [eqn for e in program.program.executables.values() for eqn in jc.all_equations(e.jaxpr)]
        finite = frozenset(eqn.outvars[0] for eqn in every if eqn.primitive.name == "is_finite")
        meshes = [Mesh(sizes=dict(zip(m.axis_names, m.shape)), finite=finite) for m in program.program.meshes]
        places = [
            (name, number)
            for name, executable in program.program.executables.items()
            for number, eqn in enumerate(jc.all_equations(executable.jaxpr))
            if change(eqn, meshes[executable.mesh]) is not None
        ]
        rng.shuffle(places)
        for name, number in places:
            executable = program.program.executables[name]
            mesh = meshes[executable.mesh]
            jaxpr = _with_changed(executable.jaxpr, number, lambda eqn: _inlined(eqn, change(eqn, mesh), mesh))  # noqa: B023
            yield _with_executable(program, replace(executable, jaxpr=jaxpr))

    return mutants


def _with_changed(
    closed: jc.ClosedJaxpr, number: int, change: Callable[[jc.JaxprEqn], list[jc.JaxprEqn]]
) -> jc.ClosedJaxpr:
    """Return the program with its equation `number`, as `all_equations` counts them, replaced by others."""
    counter = itertools.count()

    def inside(body: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
        eqns: list[jc.JaxprEqn] = []
        for eqn in jc.open_jaxpr(body)[0].eqns:
            if next(counter) == number:
                eqns += change(eqn)
            else:
                eqns.append(eqn.replace(params=jc.map_subjaxprs(eqn, inside)) if any(jc.subjaxprs(eqn)) else eqn)
        return jc.with_equations(body, eqns)

    return inside(closed)


def _inlined(eqn: jc.JaxprEqn, function: Callable[..., Any] | None, mesh: Mesh) -> list[jc.JaxprEqn]:
    """Return equations that compute `function` of an equation's operands in its place."""
    assert function is not None
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    jaxpr, consts = jc.open_jaxpr(jax.make_jaxpr(function, axis_env=list(mesh.sizes.items()))(*avals))
    assert not consts
    names: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars)) | dict(zip(jaxpr.outvars, eqn.outvars))

    def named(atoms: Sequence[Any]) -> list[Any]:
        return [atom if isinstance(atom, jc.Literal) else names.get(atom, atom) for atom in atoms]

    return [each.replace(invars=named(each.invars), outvars=named(each.outvars)) for each in jaxpr.eqns]


def _with_executable(lowered: Lowered, executable: Executable) -> Lowered:
    executables = {**lowered.program.executables, executable.name: executable}
    return replace(lowered, program=replace(lowered.program, executables=executables))


# --- one instruction, input, output or type is another -----------------------------------------------------------


def _on_mesh(number: int, change: Callable[[list[Instruction]], None]) -> Callable[[Program], Program]:
    def changed(program: Program) -> Program:
        meshes = list(program.meshes)
        instructions = list(meshes[number].instructions)
        change(instructions)
        meshes[number] = replace(meshes[number], instructions=tuple(instructions))
        return replace(program, meshes=tuple(meshes))

    return changed


def _places(program: Program, kind: type[Any]) -> Iterator[tuple[int, int, Any]]:
    for number, mesh in enumerate(program.meshes):
        for position, instruction in enumerate(mesh.instructions):
            if isinstance(instruction, kind):
                yield number, position, instruction


def _drawn(changes: Callable[[Program], Iterator[Program]]) -> Mutate:
    def mutants(program: Lowered, rng: Random) -> Iterator[Lowered]:
        every = list(changes(program.program))
        rng.shuffle(every)
        yield from (replace(program, program=each) for each in every)

    return mutants


def _replaced(program: Program, mesh: int, position: int, *instructions: Instruction) -> Program:
    def change(listed: list[Instruction]) -> None:
        listed[position : position + 1] = instructions

    return _on_mesh(mesh, change)(program)


def _transfer_left_out(program: Program) -> Iterator[Program]:
    for (source, at, send), (to, there, recv) in itertools.product(_places(program, Send), _places(program, Recv)):
        if send.to == to and recv.source == source and send.values == recv.values:
            yield _replaced(_replaced(program, source, at), to, there)


def _transfer_to_other_stage(program: Program) -> Iterator[Program]:
    for mesh, position, send in _places(program, Send):
        yield _replaced(program, mesh, position, replace(send, to=(send.to + 1) % len(program.meshes)))


def _transfer_of_other_value(program: Program) -> Iterator[Program]:
    """The stage sends another value of the same type, and the other stage takes it for the right one."""
    for mesh, position, send in _places(program, Send):
        values = program.meshes[mesh].values
        for name in send.values:
            for other in values:
                if other != name and values[other] == values[name] and other not in send.values:
                    renamed = tuple(other if each == name else each for each in send.values)
                    yield _replaced(program, mesh, position, replace(send, values=renamed))


def _pairs_of_one_type(program: Program, names: str) -> Iterator[tuple[int, int, Run, tuple[str, ...]]]:
    for mesh, position, run in _places(program, Run):
        values, listed = program.meshes[mesh].values, getattr(run, names)
        for a, b in itertools.combinations(range(len(listed)), 2):
            if listed[a] != listed[b] and values[listed[a]] == values[listed[b]]:
                changed = list(listed)
                changed[a], changed[b] = listed[b], listed[a]
                yield mesh, position, run, tuple(changed)


def _other_slot(program: Program) -> Iterator[Program]:
    for mesh, position, run, outputs in _pairs_of_one_type(program, "outputs"):
        yield _replaced(program, mesh, position, replace(run, outputs=outputs))


def _other_operand(program: Program) -> Iterator[Program]:
    for mesh, position, run, inputs in _pairs_of_one_type(program, "inputs"):
        yield _replaced(program, mesh, position, replace(run, inputs=inputs))


def _other_weight(program: Program) -> Iterator[Program]:
    for a, b in itertools.combinations(program.inputs, 2):
        types = [program.meshes[item.mesh].values[item.value] for item in (a, b)]
        if None not in (a.leaf, b.leaf) and a.leaf != b.leaf and a.window == b.window and types[0] == types[1]:
            swapped = {id(a): replace(a, leaf=b.leaf), id(b): replace(b, leaf=a.leaf)}
            yield replace(program, inputs=tuple(swapped.get(id(item), item) for item in program.inputs))


def _other_rows(program: Program) -> Iterator[Program]:
    for a, b in itertools.combinations(program.inputs, 2):
        if a.window != b.window and a.leaf == b.leaf:
            swapped = {id(a): replace(a, window=b.window), id(b): replace(b, window=a.window)}
            yield replace(program, inputs=tuple(swapped.get(id(item), item) for item in program.inputs))


def _stale_value(program: Program) -> Iterator[Program]:
    """A task of the second microbatch reads a value of the first."""
    for mesh, position, run in _places(program, Run):
        for n, name in enumerate(run.inputs):
            earlier = name.removesuffix("@1") + "@0"
            if name.endswith("@1") and earlier in program.meshes[mesh].values:
                inputs = (*run.inputs[:n], earlier, *run.inputs[n + 1 :])
                yield _replaced(program, mesh, position, replace(run, inputs=inputs))


def _early_update(program: Program) -> Iterator[Program]:
    """The update comes before the last microbatch of a backward pass."""
    for mesh, position, run in _places(program, Run):
        earlier = [p for m, p, r in _places(program, Run) if m == mesh and p < position and r.task.microbatch == 1]
        if run.task.kind == "U" and earlier:

            def change(listed: list[Instruction], position: int = position, first: int = earlier[-1]) -> None:
                listed.insert(first, listed.pop(position))

            yield _on_mesh(mesh, change)(program)


def _microbatch_left_out(program: Program) -> Iterator[Program]:
    for mesh, position, run in _places(program, Run):
        if run.task.microbatch == 1:
            yield _replaced(program, mesh, position)


def _dropped_update(program: Program, replaced: Mapping[int, int]) -> Iterator[Program]:
    places = {item.leaf: (item.mesh, item.value) for item in program.inputs if item.window is None}
    for n, output in enumerate(program.outputs):
        if output.leaf in replaced and (old := places.get(replaced[output.leaf])) is not None and output.parts:
            kept = replace(output, parts=(old,), copied=True)
            yield replace(program, outputs=(*program.outputs[:n], kept, *program.outputs[n + 1 :]))


def _declared_in_other_dtype(program: Program) -> Iterator[Program]:
    for number, mesh in enumerate(program.meshes):
        for name, kind in mesh.values.items():
            if kind.dtype == "float32":
                values = {**mesh.values, name: replace(kind, dtype="bfloat16")}
                meshes = (*program.meshes[:number], replace(mesh, values=values), *program.meshes[number + 1 :])
                yield replace(program, meshes=meshes)


# --- the plan says something else --------------------------------------------------------------------------------


def _planned(change: Callable[[list[Any], int], None]) -> Mutate:
    """Return every plan in which one collective is changed; the program does what was planned before."""

    def mutants(program: Lowered, rng: Random) -> Iterator[Lowered]:
        plan = program.plan
        owners = [None, *range(len(plan.meshes))]
        for owner in rng.sample(owners, len(owners)):
            sharding = plan.sharding if owner is None else plan.meshes[owner].sharding
            if sharding is None:
                continue
            # Compilers for CPUs may merge those that are done again, so that one more or less of them is as planned.
            numbers = [n for n, each in enumerate(sharding.collectives) if not each.repeated]
            for number in rng.sample(numbers, len(numbers)):
                collectives = list(sharding.collectives)
                change(collectives, number)
                changed: Any = replace(sharding, collectives=tuple(collectives))
                if owner is None:
                    yield replace(program, plan=replace(plan, sharding=changed))
                else:
                    mesh = replace(plan.meshes[owner], sharding=changed)
                    meshes = (*plan.meshes[:owner], mesh, *plan.meshes[owner + 1 :])
                    yield replace(program, plan=replace(plan, meshes=meshes))

    return mutants


def _leave_out(collectives: list[Any], number: int) -> None:
    del collectives[number]


def _double(collectives: list[Any], number: int) -> None:
    collectives.append(collectives[number])


def _swap(collectives: list[Any], number: int) -> None:
    kind = "all-gather" if collectives[number].kind == "all-reduce" else "all-reduce"
    collectives[number] = replace(collectives[number], kind=kind)


def _of_another_program(program: Lowered, rng: Random) -> Iterator[Lowered]:
    yield replace(program, plan=replace(program.plan, fingerprint="0123456789abcdef"))


def _update_left_out(program: Lowered, rng: Random) -> Iterator[Lowered]:
    yield from _drawn(lambda p: _dropped_update(p, program.trace.state_outputs))(program, rng)


KINDS: Mapping[str, Mutate] = {
    "collective missing": _changing(_missing),
    "collective doubled": _changing(_doubled),
    "collective swapped for another": _changing(_swapped),
    "collective over other axes": _changing(_over_other_axes),
    "collective in other groups": _changing(_in_other_groups),
    "wrong scale": _changing(_only_dots(lambda x: 2 * x)),
    "lost digits": _changing(_only_dots(lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))),
    "wrong mask": _changing(_other_mask),
    "gradient's term missing": _changing(_term_left_out),
    "transfer missing": _drawn(_transfer_left_out),
    "transfer to another stage": _drawn(_transfer_to_other_stage),
    "transfer of another value": _drawn(_transfer_of_other_value),
    "wrong slot": _drawn(_other_slot),
    "wrong operand": _drawn(_other_operand),
    "wrong weight": _drawn(_other_weight),
    "wrong rows": _drawn(_other_rows),
    "stale value": _drawn(_stale_value),
    "update before the last microbatch": _drawn(_early_update),
    "microbatch missing": _drawn(_microbatch_left_out),
    "update dropped": _update_left_out,
    "wrong dtype": _drawn(_declared_in_other_dtype),
    "planned collective missing": _planned(_leave_out),
    "planned collective doubled": _planned(_double),
    "planned collective swapped": _planned(_swap),
    "plan of another program": _of_another_program,
}


def results(
    names: Sequence[str],
    plans: Sequence[str],
    kinds: Sequence[str],
    seeds: Sequence[int],
    known: Collection[tuple[str, str, str, int]] = (),
) -> Iterator[Result]:
    """Verify every plan of every model, and break some in every way, once for each seed; not those that are known."""
    for name in names:
        programs: set[str] = set()
        for plan in plans:
            try:
                sound, model = lowered(name, plan)
            except AutoparError:
                continue  # this method has no plan for the model
            if (text := str(sound.program)) in programs:
                continue
            programs.add(text)
            arguments = (model.create_state(), model.create_batch())
            tasks = [("none", 0), *itertools.product(kinds if plan in PLANS else (), seeds)]
            for kind, seed in tasks:
                if (name, plan, kind, seed) in known:
                    continue
                mutant = sound if kind == "none" else next(KINDS[kind](sound, Random(f"{name} {kind} {seed}")), None)
                if mutant is not None:
                    found, text, seconds = _judged(sound, mutant, arguments)
                    yield Result(model=name, plan=plan, kind=kind, seed=seed, verdict=found, seconds=seconds, text=text)
            jax.clear_caches()


def _judged(sound: Lowered, mutant: Lowered, arguments: Sequence[Any]) -> tuple[str, str, float]:
    begin = time.process_time()
    found, text = verdict(mutant, arguments)
    seconds = time.process_time() - begin
    if mutant is sound:
        found = "sound" if found == "escaped" else "alarm"
    elif found == "escaped" and is_equivalent(sound, mutant, arguments):
        found = "equivalent"
    return found, text if found in ("escaped", "alarm") else text.strip().partition("\n")[0][:160], seconds


def main() -> None:
    """Break, verify, and count; the exit status is 1 if a mutant escapes, takes too long, or a sound plan is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--plans", nargs="+", choices=[*PLANS, *SOUND], default=[*PLANS, *SOUND])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, and keep those that it has")
    options = parser.parse_args()
    found: list[Result] = []
    if options.json and options.json.exists():
        found = [Result(**row) for row in json.loads(options.json.read_text())]
    known = {(result.model, result.plan, result.kind, result.seed) for result in found}
    for result in results(options.models, options.plans, options.kinds, range(options.seeds), known):
        found.append(result)
        if result.verdict in ("escaped", "alarm") or result.seconds > TIME_LIMIT_S:
            print(f"{result.verdict}: {result.kind} in {result.model}, {result.plan}: {result.text[:400]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([vars(result) for result in found], indent=1) + "\n")
    counts = collections.Counter((result.kind, result.verdict) for result in found)
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:36} {outcome:12} {count}")
    sound = [result for result in found if result.kind == "none"]
    mutants = [result for result in found if result.kind != "none" and result.verdict != "equivalent"]
    escaped = [result for result in mutants if result.verdict == "escaped"]
    alarms = [result for result in sound if result.verdict == "alarm"]
    slowest_s = max((result.seconds for result in found), default=0.0)
    print(
        f"{len(mutants) - len(escaped)} of {len(mutants)} mutants of {len({r.kind for r in mutants})} kinds caught, "
        f"the slowest in {slowest_s:.1f} CPU s; {len(alarms)} alarms for {len(sound)} sound plans"
    )
    if escaped or alarms or slowest_s > TIME_LIMIT_S:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("PJRT_NPROC", "32")
    jax.config.update("jax_num_cpu_devices", 4)
    # Mutants share most of what is compiled, and what is compiled runs once.
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        main()
