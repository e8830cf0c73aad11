"""A program sends each value once, frees it at its last use, and overwrites nothing that is the caller's."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.jaxprs import compat as jc
from autopar.ir.program import Free, Program, Recv, Run, Send
from autopar.ir.schedules import schedule_tasks
from tests.small_steps import (
    adam,
    adam_state,
    gan_params,
    gan_step,
    gpt_batch,
    gpt_loss,
    gpt_params,
    lowered,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
)

STEPS = {
    "mlp": (mlp_step, (mlp_params(4), mlp_batch())),
    "gpt, clipped": (adam(gpt_loss, clip=0.1), (adam_state(gpt_params()), gpt_batch())),
    "two gradients": (gan_step, (gan_params(), mlp_batch())),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "two microbatches": {},
    "whole batch": {"num_microbatches": 1},
    "four stages, remat": {"num_stages": 4, "num_devices": 4, "remat": True, "num_microbatches": 4},
    "virtual stages": {"schedule": "interleaved", "num_microbatches": 4},
    "weight gradients apart": {"schedule": "zero-bubble", "num_microbatches": 4},
}
on_every_step = pytest.mark.parametrize(("step", "args"), STEPS.values(), ids=STEPS)
on_every_schedule = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
_PROGRAMS: dict[Any, Program] = {}


def program(step: Any, args: Any, options: dict[str, Any], donated: tuple[int, ...] = ()) -> Program:
    """Lowered once for all tests that look at it."""
    key = (step, id(args), tuple(options.items()), donated)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = lowered(step, *args, donated=donated, **options)
    return _PROGRAMS[key]


def touched(instruction: Any) -> tuple[str, ...]:
    match instruction:
        case Run():
            return (*instruction.inputs, *instruction.outputs)
        case _:
            return instruction.values


@on_every_schedule
@on_every_step
def test_program_is_valid(step, args, options):
    program(step, args, options).verify()


@on_every_schedule
@on_every_step
def test_each_value_goes_to_each_mesh_once_and_only_to_be_read(step, args, options):
    found = program(step, args, options)
    sends: Counter[tuple[str, int]] = Counter()
    for mesh in found.meshes:
        sends.update((v, i.to) for i in mesh.instructions if isinstance(i, Send) for v in i.values)
    assert sends and set(sends.values()) == {1}
    for value, to in sends:
        assert any(isinstance(i, Run) and value in i.inputs for i in found.meshes[to].instructions)


@on_every_schedule
@on_every_step
def test_value_is_sent_right_after_it_is_made(step, args, options):
    for mesh in program(step, args, options).meshes:
        made: set[str] = set()
        for instruction in mesh.instructions:
            if isinstance(instruction, Run):
                made = set(instruction.outputs)
            elif isinstance(instruction, Recv):
                made = set()
            elif isinstance(instruction, Send):
                assert set(instruction.values) <= made | {item.value for item in program(step, args, options).inputs}


@on_every_schedule
@on_every_step
def test_value_is_received_right_before_a_task_reads_it(step, args, options):
    for mesh in program(step, args, options).meshes:
        for number, instruction in enumerate(mesh.instructions):
            if isinstance(instruction, Recv):
                following = next(i for i in mesh.instructions[number:] if not isinstance(i, Recv))
                assert isinstance(following, Run)


@on_every_schedule
@on_every_step
def test_value_is_freed_right_after_its_last_use(step, args, options):
    for mesh in program(step, args, options).meshes:
        for before, instruction in zip(mesh.instructions, mesh.instructions[1:]):
            if isinstance(instruction, Free):
                assert set(instruction.values) <= set(touched(before))


@on_every_schedule
@on_every_step
@pytest.mark.parametrize("donated", [(), (0,), (0, 1)], ids=["nothing", "state", "state and batch"])
def test_only_donated_arguments_are_overwritten(step, args, options, donated):
    found = program(step, args, options, donated)
    state, batch = (len(jax.tree.leaves(arg)) for arg in args)
    allowed = set(range(state + batch if 1 in donated else state if 0 in donated else 0))
    leaves = {(item.mesh, item.value): item.leaf for item in found.inputs}
    overwritten = {
        leaves[number, run.inputs[position]]
        for number, mesh in enumerate(found.meshes)
        for run in mesh.instructions
        if isinstance(run, Run)
        for position in found.executables[run.executable].donated
        if (number, run.inputs[position]) in leaves
    }
    assert overwritten <= allowed
    assert bool(overwritten) == bool(allowed)


@on_every_schedule
def test_all_state_of_the_optimizer_is_updated_in_place_where_it_is_donated(options):
    step, args = adam(mlp_loss), (adam_state(mlp_params(4)), mlp_batch())
    found = lowered(step, *args, donated=(0,), **options)
    taken = {
        run.inputs[position]
        for mesh in found.meshes
        for run in mesh.instructions
        if isinstance(run, Run) and run.task.kind == "U"
        for position in found.executables[run.executable].donated
    }
    names = {item.value for item in found.inputs if item.value.startswith("a.")}
    assert taken >= names - {"a.count"}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_updates_of_several_rounds_overwrite_all_that_dies_in_them_and_fits(zero, schedule):
    """A clipped step reads its state in two programs of each stage, of which the later one overwrites it."""
    method = autopar.Megatron(data=2, pipeline=2, num_microbatches=2, zero=zero, schedule=schedule)
    step = autopar.parallelize(adam(mlp_loss, clip=0.1), method=method, devices=jax.devices()[:4], donate_argnums=0)
    args = adam_state(mlp_params(4)), mlp_batch()
    found = step.trace(*args).plan().lower().program
    num_state = len(jax.tree.leaves(args[0]))
    for number, mesh in enumerate(found.meshes):
        kept = {name for output in found.outputs for of_mesh, name in output.parts if of_mesh == number}
        kept |= {i.value for i in found.inputs if i.mesh == number and (i.leaf is None or i.leaf >= num_state)}
        last = {name: run for run in mesh.instructions if not isinstance(run, Free) for name in touched(run)}
        for run in mesh.instructions:
            if isinstance(run, Run) and run.task.kind == "U":
                taken = {run.inputs[place] for place in found.executables[run.executable].donated}
                assert all(last[name] is run and name not in kept for name in taken)
                left = Counter(mesh.values[n] for n in run.inputs if last[n] is run and n not in taken | kept)
                room = Counter(mesh.values[n] for n in run.outputs) - Counter(mesh.values[n] for n in taken)
                assert not left & room


@on_every_schedule
@on_every_step
def test_accumulators_are_added_to_in_place(step, args, options):
    found = program(step, args, options)
    for mesh in found.meshes:
        for run in mesh.instructions:
            if isinstance(run, Run):
                again = {p for p, name in enumerate(run.inputs) if name in run.outputs}
                assert again <= set(found.executables[run.executable].donated)
                assert not again or found.num_microbatches > 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"])
def test_tasks_run_in_the_order_of_the_schedule(schedule):
    found = lowered(mlp_step, mlp_params(4), mlp_batch(), schedule=schedule, num_microbatches=4)
    num_stages = 4 if schedule == "interleaved" else 2
    order = schedule_tasks(
        schedule,
        num_microbatches=4,
        stage_mesh=[s % 2 for s in range(num_stages)],
    )
    for mesh, tasks in zip(found.meshes, order, strict=True):
        ran = [i.task for i in mesh.instructions if isinstance(i, Run) and i.task.kind in "FBW"]
        assert ran == [t for t in tasks if t in ran]
        # Nobody waits for the first stage, whose weight gradients are not apart.
        assert {str(t) for t in tasks} - {str(t) for t in ran} <= {f"W0.m{m}" for m in range(4)}


def test_update_runs_after_the_last_microbatch():
    for mesh in lowered(mlp_step, mlp_params(), mlp_batch()).meshes:
        kinds = [i.task.kind for i in mesh.instructions if isinstance(i, Run)]
        assert kinds[-1] == "U" and set(kinds[:-1]) <= {"Z", "F", "B"}


def test_two_gradients_are_two_sweeps_with_the_update_of_the_first_between():
    found = lowered(gan_step, gan_params(), mlp_batch())
    for mesh in found.meshes:
        tasks = [i.task for i in mesh.instructions if isinstance(i, Run) and i.task.kind not in "ZC"]
        order = [2 * t.round + (t.kind == "U") for t in tasks]
        assert order == sorted(order)
    kinds = {
        (t.kind, t.round) for mesh in found.meshes for t in (i.task for i in mesh.instructions if isinstance(i, Run))
    }
    assert {("F", 0), ("B", 0), ("U", 0), ("F", 1), ("B", 1), ("U", 1)} <= kinds


def test_each_microbatch_is_a_window_of_the_batch_and_nothing_is_cut_for_one():
    for count, windows in ((1, [None]), (4, [(0, 2), (2, 4), (4, 6), (6, 8)])):
        found = lowered(mlp_step, mlp_params(), mlp_batch(), num_microbatches=count)
        mine = [item for item in found.inputs if item.leaf == 4]
        assert [item.value for item in mine] == [f"b.0@{m}" for m in range(count)]
        assert [item.window and (item.window.start, item.window.stop) for item in mine] == windows


def in_parts(params, batch):
    def loss(params):
        h = batch[0]
        for layer in params:
            h = jnp.tanh(h @ layer["w"])
        return jnp.mean((h - batch[1]) ** 2), h

    grads, h = jax.grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), h, batch[0], params[0]["w"]


def test_results_of_examples_are_joined_once_in_the_order_of_the_microbatches():
    found = lowered(in_parts, mlp_params(), mlp_batch(), num_microbatches=4)
    (join,) = [i for i in found.meshes[1].instructions if isinstance(i, Run) and i.task.kind == "C"]
    assert [name.partition("@")[2] for name in join.inputs] == ["0", "1", "2", "3"]
    assert found.meshes[1].values[join.outputs[0]].shape == (8, 4)


@pytest.mark.parametrize(("donated", "copied"), [((), 1), ((0,), 0)])
def test_arguments_that_are_results_are_copied_unless_they_were_donated(donated, copied):
    found = lowered(in_parts, mlp_params(), mlp_batch(), donated=donated)
    # Four parameters, the activations, the batch put together from its microbatches, and a weight as it came.
    assert [output.copied for output in found.outputs] == [False] * 6 + [bool(copied)]
    assert "copied" in str(found.outputs[-1]) or not copied


def test_accumulators_begin_at_the_neutral_element():
    def step(params, batch):
        def loss(params):
            h = jnp.tanh(batch[0] @ params[0]["w"] - 5)
            return jnp.sum(h @ params[1]["w"]), h

        grads, h = jax.grad(loss, has_aux=True)(params)
        return grads, jnp.max(h), jnp.min(h), jnp.all(h < 0), jnp.any(h > 0), jnp.max(jnp.argmax(h, -1))

    found = lowered(step, mlp_params(), mlp_batch(), num_microbatches=4)
    zeros = [e for e in found.executables.values() if e.name.startswith("zeros")]
    starts = [jc.jaxpr_as_fun(e.jaxpr)() for e in zeros]
    scalars = sorted(float(x) for values in starts for x in values if x.ndim == 0)
    assert scalars == [float("-inf"), -(2.0**31), 0.0, 1.0, float("inf")]
