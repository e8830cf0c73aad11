"""The simulated runtime tells when every mesh does what, how much it holds, and what crosses the links."""

import json
from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P

from autopar.ir.program import (
    ArrayType,
    Executable,
    Free,
    Input,
    MeshProgram,
    Output,
    Program,
    Recv,
    Run,
    Send,
    Task,
    Window,
)
from autopar.ir.schedules import schedule_tasks
from autopar.runtime.simulator import ConstantCosts, simulate
from tests.schedule_programs import EDGE, program_of

ONE = ConstantCosts(forward_s=1.0, backward_s=2.0)


def schedule(name: str, num_stages: int, num_microbatches: int) -> Program:
    stages = range(num_stages)
    order = schedule_tasks(name, stage_mesh=stages, num_microbatches=num_microbatches)
    return program_of(order, stages, num_microbatches)


def test_bubble_and_busy_time_are_those_of_the_closed_form() -> None:
    timeline = simulate(schedule("1f1b", 4, 8), ONE)
    assert timeline.makespan_s == 33.0
    assert timeline.busy_s == (24.0,) * 4
    assert timeline.bubble_fraction == pytest.approx(3 / 11)


@pytest.mark.parametrize(("name", "held"), [("gpipe", (8, 8, 8, 8)), ("1f1b", (4, 3, 2, 1))])
def test_peak_memory_follows_the_microbatches_in_flight(name, held) -> None:
    peaks = simulate(schedule(name, 4, 8), ONE).peak_bytes
    # At its fullest a mesh has its residuals, and what has just come in and what is about to leave.
    extra = [peak / EDGE.nbytes - residuals for peak, residuals in zip(peaks, held)]
    assert all(0 <= values <= 2 for values in extra)


def test_transfers_take_latency_and_bandwidth() -> None:
    costs = replace(ONE, latency_s=0.25, bytes_per_s=2048.0)
    timeline = simulate(schedule("gpipe", 2, 1), costs)
    assert timeline.makespan_s == 1 + 0.75 + 1 + 2 + 0.75 + 2
    assert [(t.source, t.destination, t.num_bytes, t.label) for t in timeline.transfers] == [
        (0, 1, 1024, "h_0@0"),
        (1, 0, 1024, "g_1@0"),
    ]


def test_a_link_carries_one_transfer_at_a_time_and_the_sender_goes_on() -> None:
    timeline = simulate(schedule("gpipe", 2, 3), replace(ONE, latency_s=5.0))
    forward = [t for t in timeline.transfers if t.source == 0]
    assert [(t.start_s, t.stop_s) for t in forward] == [(1.0, 6.0), (6.0, 11.0), (11.0, 16.0)]
    assert [e.start_s for e in timeline.events if e.mesh == 0 and e.label.startswith("F")] == [0.0, 1.0, 2.0]


def test_two_directions_of_a_pair_of_meshes_do_not_share_a_link() -> None:
    timeline = simulate(schedule("1f1b", 2, 4), replace(ONE, latency_s=4.0))
    there = [t for t in timeline.transfers if t.source == 0]
    back = [t for t in timeline.transfers if t.source == 1]
    assert any(a.start_s < b.stop_s and b.start_s < a.stop_s for a in there for b in back)


def test_memory_counts_inputs_shards_donation_and_free() -> None:
    big, small = ArrayType(shape=(64,), dtype="float32", spec=P("d")), ArrayType(shape=(), dtype="float32")
    run = Run(task=Task(kind="U", stage=0), executable="update", inputs=("w", "s"), outputs=("v",))
    mesh = MeshProgram(
        devices=(0, 1),
        shape=(2,),
        axis_names=("d",),
        values={"w": big, "s": small, "v": big},
        instructions=(run, Free(values=("s",))),
    )
    update = Executable(name="update", mesh=0, inputs=(big, small), outputs=(big,), donated=(0,))
    program = Program(
        name="update",
        meshes=(mesh,),
        executables={"update": update},
        inputs=(Input(leaf=0, mesh=0, value="w"), Input(leaf=1, mesh=0, value="s")),
        outputs=(),
    )
    assert simulate(program, ONE).peak_bytes == (128 + 4,)
    kept = replace(program, executables={"update": replace(update, donated=())})
    assert simulate(kept, ONE).peak_bytes == (128 + 4 + 128,)


def test_freeing_an_argument_leaves_it_with_the_caller() -> None:
    runs = [
        Run(task=Task(kind="U", stage=0, update_round=number), executable="copy", inputs=(source,), outputs=(target,))
        for number, (source, target) in enumerate([("a", "b"), ("b", "c")])
    ]
    mesh = MeshProgram(
        devices=(0,),
        shape=(1,),
        axis_names=("d",),
        values=dict.fromkeys("abc", EDGE),
        instructions=(runs[0], Free(values=("a",)), runs[1], Free(values=("b",))),
    )
    program = Program(
        name="copies",
        meshes=(mesh,),
        executables={"copy": Executable(name="copy", mesh=0, inputs=(EDGE,), outputs=(EDGE,))},
        inputs=(Input(leaf=0, mesh=0, value="a"),),
        outputs=(Output(leaf=0, parts=((0, "c"),)),),
    )
    assert simulate(program, ONE).peak_bytes == (3 * EDGE.nbytes,)
    piece = replace(program.inputs[0], window=Window(axis=0, start=0, stop=256))
    assert simulate(replace(program, inputs=(piece,)), ONE).peak_bytes == (2 * EDGE.nbytes,)


@pytest.mark.parametrize(
    ("kind", "seconds"), [("F", 1.0), ("B", 2.0), ("W", 3.0), ("U", 4.0), ("P", 5.0), ("Z", 5.0), ("C", 5.0)]
)
def test_constant_costs_know_every_kind_of_task(kind, seconds) -> None:
    costs = ConstantCosts(forward_s=1.0, backward_s=2.0, weight_s=3.0, update_s=4.0, other_s=5.0)
    executable = Executable(name="e", mesh=0, inputs=(), outputs=())
    assert costs.run_time_s(executable, Task(kind=kind, stage=0)) == seconds


def test_an_idle_program_has_no_bubble() -> None:
    timeline = simulate(Program(name="idle", meshes=(), executables={}, inputs=(), outputs=()), ONE)
    assert (timeline.makespan_s, timeline.bubble_fraction, timeline.busy_s) == (0.0, 0.0, ())


def test_values_that_wait_to_be_received_are_held_by_the_receiver_from_the_receive_on() -> None:
    meshes = []
    for number, instructions in enumerate(
        [
            (Send(values=("x",), to=1), Send(values=("y",), to=1)),
            (
                Recv(values=("x",), source=0),
                Free(values=("x",)),
                Recv(values=("y",), source=0),
                Free(values=("y",)),
            ),
        ]
    ):
        meshes.append(
            MeshProgram(
                devices=(number,),
                shape=(1,),
                axis_names=("d",),
                values={"x": EDGE, "y": EDGE},
                instructions=instructions,
            )
        )
    inputs = (Input(leaf=0, mesh=0, value="x"), Input(leaf=1, mesh=0, value="y"))
    program = Program(name="move", meshes=tuple(meshes), executables={}, inputs=inputs, outputs=())
    program.verify()
    assert simulate(program, ONE).peak_bytes == (2 * EDGE.nbytes, EDGE.nbytes)


def test_trace_has_every_task_and_transfer_for_perfetto(tmp_path) -> None:
    timeline = simulate(schedule("1f1b", 2, 2), replace(ONE, latency_s=0.5))
    timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == timeline.to_chrome_trace()
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(timeline.events) + len(timeline.transfers) == 8 + 4
    first = next(event for event in spans if event["name"] == "F1.m0")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (1, 0, 1.5e6, 1e6)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["mesh 0 (predicted)", "mesh 1 (predicted)", "tasks", "tasks", "to mesh 1", "to mesh 0"]


def test_trace_shows_compute_and_collectives_of_a_task_apart() -> None:
    timeline = simulate(schedule("gpipe", 2, 1), ONE, collective_s={"B1": 0.5})
    spans = {(event["pid"], event["name"]): event for event in timeline.to_chrome_trace()["traceEvents"]}
    found = {name: (spans[1, name]["ts"], spans[1, name]["dur"]) for name in ("B1.m0", "compute", "collectives")}
    assert found == {"B1.m0": (2e6, 2e6), "compute": (2e6, 1.5e6), "collectives": (3.5e6, 0.5e6)}
    assert (0, "compute") not in spans
    assert timeline.collective_s == (0.0, 0.5)


def test_an_executable_needs_its_temporaries_while_it_runs() -> None:
    program = schedule("gpipe", 2, 3)
    without = simulate(program, ONE).peak_bytes
    # The residual of every microbatch when the first backward pass runs; what it makes is in what it needs.
    assert simulate(program, ONE, temporary_bytes={"B1": 5000.0}).peak_bytes == (without[0], 3 * EDGE.nbytes + 5000)


@pytest.mark.parametrize(
    ("senders", "receivers", "spec", "moved"),
    [(2, 2, P("d"), 512), (2, 2, P(), 1024), (4, 2, P("d"), 512), (2, 4, P("d"), 512), (2, 4, P(), 2048)],
)
def test_the_busiest_device_of_either_mesh_bounds_a_transfer(senders, receivers, spec, moved) -> None:
    meshes = [
        MeshProgram(
            devices=tuple(devices),
            shape=(len(devices),),
            axis_names=("d",),
            values={"x": replace(EDGE, spec=layout)},
            instructions=(instruction,),
        )
        for devices, layout, instruction in [
            (range(senders), P(), Send(values=("x",), to=1)),
            (range(senders, senders + receivers), spec, Recv(values=("x",), source=0)),
        ]
    ]
    program = Program(
        name="x",
        meshes=tuple(meshes),
        executables={},
        inputs=(Input(leaf=0, mesh=0, value="x"),),
        outputs=(),
    )
    timeline = simulate(program, replace(ONE, bytes_per_s=1.0))
    assert timeline.makespan_s == timeline.exposed_s[1] == moved


def test_exposed_is_the_wait_for_what_is_made_already() -> None:
    """Of a pipeline, the first transfer in each direction; the wait for the others' tasks is not exposed."""
    timeline = simulate(schedule("gpipe", 4, 6), replace(ONE, latency_s=0.5))
    assert timeline.exposed_s == (0.5, 1.0, 1.0, 0.5)
    assert [timeline.makespan_s - busy_s for busy_s in timeline.busy_s] == [9 + 6 * 0.5] * 4
    assert simulate(schedule("gpipe", 4, 6), ONE).exposed_s == (0.0,) * 4


def test_a_chart_has_a_lane_for_every_mesh_and_the_microbatch_of_every_task() -> None:
    chart = simulate(schedule("gpipe", 2, 2), ONE).gantt(width=8 + 2 * 9 + 1)
    assert chart.splitlines() == [
        "mesh 0 |F0F1      B0==B1==|",
        "mesh 1 |  F0F1B0==B1==    |",
    ]
    narrow = simulate(schedule("gpipe", 2, 2), ONE).gantt(width=8 + 9 + 1)
    assert narrow.splitlines()[0] == "mesh 0 |FF   B0B1|"


def test_a_timeline_prints_as_a_table() -> None:
    text = str(simulate(schedule("1f1b", 2, 3), ONE))
    lines = text.splitlines()
    assert lines[0].strip() == "schedule: 12 s, bubble 25.0%"
    assert [cell.strip() for cell in lines[2].split("┃")[1:3]] == ["mesh", "busy s"]
    assert lines[4].replace("│", " ").split()[:3] == ["0", "9", "75.0%"]
