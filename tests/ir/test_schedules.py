"""Every schedule is complete and free of deadlocks, idles and holds what its paper says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import PipelineParallel
from autopar.errors import InvalidArgument, InvalidProgram
from autopar.ir.schedules import SCHEDULES, schedule_tasks
from autopar.ir.task_order import check_order, peak_in_flight
from autopar.ir.tasks import Task
from autopar.runtime.simulator import ConstantCosts, simulate
from tests.schedule_programs import program_of

LINEAR = ["gpipe", "1f1b", "eager-1f1b", "interleaved"]
SIZES = [(1, 1), (1, 4), (2, 1), (2, 8), (4, 2), (4, 4), (4, 16), (4, 17), (8, 12)]
TIMES = [(1, 1, 1), (1, 2, 0), (3, 2, 1), (1, 2, 2)]


def chain(name: str, num_stages: int, num_microbatches: int):
    return schedule_tasks(name, stage_mesh=range(num_stages), num_microbatches=num_microbatches)


def makespan(order, stage_mesh, num_microbatches, f, b, w=0.0) -> float:
    costs = ConstantCosts(forward_s=f, backward_s=b, weight_s=w)
    return simulate(program_of(order, stage_mesh, num_microbatches), costs).makespan_s


def text(order) -> list[str]:
    return [" ".join(map(str, tasks)) for tasks in order]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize(("f", "b", "_w"), TIMES)
@pytest.mark.parametrize("name", LINEAR)
def test_makespan_is_the_closed_form(name, f, b, _w, num_stages, num_microbatches) -> None:
    took_s = makespan(chain(name, num_stages, num_microbatches), range(num_stages), num_microbatches, f, b)
    assert took_s == (num_stages - 1 + num_microbatches) * (f + b)


@pytest.mark.parametrize(("f", "b", "w"), TIMES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [s for s in SIZES if s[1] >= s[0]])
def test_zero_bubble_makespan_is_the_closed_form(num_stages, num_microbatches, f, b, w) -> None:
    order = chain("zero-bubble", num_stages, num_microbatches)
    idle = (num_stages - 1) * (max(f, w) + b - w)  # (S-1)(f+b-w) where f >= w, as in the paper
    took_s = makespan(order, range(num_stages), num_microbatches, f, b, w)
    assert took_s == num_microbatches * (f + b + w) + idle


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_zero_bubble_is_never_slower_than_1f1b(num_stages, num_microbatches) -> None:
    split, whole = (
        chain("zero-bubble", num_stages, num_microbatches),
        chain("1f1b", num_stages, num_microbatches),
    )
    for f, b, w in TIMES:
        ours = makespan(split, range(num_stages), num_microbatches, f, b, w)
        assert ours <= makespan(whole, range(num_stages), num_microbatches, f, b + w)


@pytest.mark.parametrize("num_meshes", [2, 4])
@pytest.mark.parametrize("per_mesh", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("f", "b"), [(1, 1), (1, 2)])
def test_interleaving_divides_the_bubble_by_the_stages_per_mesh(num_meshes, per_mesh, rounds, f, b) -> None:
    stage_mesh = list(range(num_meshes)) * per_mesh
    m = rounds * num_meshes
    order = schedule_tasks(
        "interleaved",
        num_microbatches=m,
        stage_mesh=stage_mesh,
    )
    assert makespan(order, stage_mesh, m, f, b) == m * per_mesh * (f + b) + (num_meshes - 1) * (f + b)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("gpipe", lambda s, last, m: m),
        ("1f1b", lambda s, last, m: min(m, last + 1 - s)),
        ("eager-1f1b", lambda s, last, m: min(m, 2 * (last + 1 - s) - 1)),
        ("zero-bubble", lambda s, last, m: min(m, last + 1)),
        ("zero-bubble-h2", lambda s, last, m: min(m, 2 * last + 1)),
    ],
)
def test_microbatches_in_flight_are_those_of_the_paper(name, bound, num_stages, num_microbatches) -> None:
    order = chain(name, num_stages, num_microbatches)
    expected = tuple(bound(s, num_stages - 1, num_microbatches) for s in range(num_stages))
    assert peak_in_flight(order) == expected


def test_interleaved_order_is_megatrons() -> None:
    order = schedule_tasks("interleaved", num_microbatches=4, stage_mesh=[0, 1, 0, 1])
    assert text(order) == [
        "F0.m0 F0.m1 F2.m0 F2.m1 F0.m2 B2.m0 F0.m3 B2.m1 F2.m2 B0.m0 F2.m3 B0.m1 B2.m2 B2.m3 B0.m2 B0.m3",
        "F1.m0 F1.m1 F3.m0 B3.m0 F3.m1 B3.m1 F1.m2 B1.m0 F1.m3 B1.m1 F3.m2 B3.m2 F3.m3 B3.m3 B1.m2 B1.m3",
    ]


def test_zero_bubble_order_delays_the_weight_gradient() -> None:
    assert text(chain("zero-bubble", 2, 3)) == [
        "F0.m0 F0.m1 B0.m0 W0.m0 F0.m2 B0.m1 W0.m1 B0.m2 W0.m2",
        "F1.m0 B1.m0 F1.m1 B1.m1 W1.m0 F1.m2 B1.m2 W1.m1 W1.m2",
    ]


def test_twice_as_much_ahead_fills_the_way_of_the_first_microbatch() -> None:
    assert text(chain("zero-bubble-h2", 2, 4)) == [
        "F0.m0 F0.m1 F0.m2 B0.m0 W0.m0 F0.m3 B0.m1 W0.m1 B0.m2 W0.m2 B0.m3 W0.m3",
        "F1.m0 B1.m0 F1.m1 B1.m1 F1.m2 B1.m2 W1.m0 F1.m3 B1.m3 W1.m1 W1.m2 W1.m3",
    ]


@pytest.mark.parametrize("name", ["zero-bubble-v", "dualpipe-v"])
@pytest.mark.parametrize(("num_meshes", "num_microbatches"), [(2, 1), (2, 4), (4, 3), (4, 8), (4, 17), (8, 16)])
def test_two_stages_on_a_mesh_go_there_and_back(name, num_meshes, num_microbatches) -> None:
    stage_mesh = SCHEDULES[name].meshes_of_stages(num_meshes, 2)
    assert stage_mesh == [*range(num_meshes), *reversed(range(num_meshes))]
    order = schedule_tasks(name, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
    check_order(order, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
    most = {"zero-bubble-v": 2 * num_meshes, "dualpipe-v": 2 * num_meshes + 1}[name]
    assert max(peak_in_flight(order)) <= min(2 * num_microbatches, most)


def test_weight_gradients_wait_at_the_end_of_the_order_there_and_back() -> None:
    order = schedule_tasks("zero-bubble-v", num_microbatches=4, stage_mesh=[0, 1, 1, 0])
    assert text(order)[1] == (
        "F1.m0 F2.m0 F1.m1 F2.m1 B2.m0 W2.m0 F1.m2 B1.m0 W1.m0 F2.m2 B2.m1 W2.m1 F1.m3 B1.m1 W1.m1 F2.m3 B2.m2 W2.m2 "
        "B1.m2 B2.m3 B1.m3 W1.m2 W1.m3 W2.m3"
    )


@pytest.mark.parametrize("num_meshes", [2, 4])
@pytest.mark.parametrize("per_mesh", [2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_interleaving_divides_the_bubble_of_split_weight_gradients_too(num_meshes, per_mesh, rounds, f, b, w) -> None:
    stage_mesh, m = list(range(num_meshes)) * per_mesh, rounds * num_meshes
    order = schedule_tasks("interleaved-zero-bubble", num_microbatches=m, stage_mesh=stage_mesh)
    idle = (num_meshes - 1) * max(f, b, f + b - w)
    assert makespan(order, stage_mesh, m, f, b, w) == m * per_mesh * (f + b + w) + idle
    assert peak_in_flight(order) == (num_meshes * per_mesh,) * num_meshes


@pytest.mark.parametrize("name", ["zero-bubble-v", "dualpipe-v"])
def test_more_stages_than_there_and_back_are_refused(name) -> None:
    with pytest.raises(InvalidArgument, match=rf'3 with schedule="{name}", which has at most 2 stages per mesh.*use '):
        PipelineParallel(num_stages=2, schedule=name, virtual_stages=3)


def test_neighbouring_stages_of_one_mesh_act_as_one_stage() -> None:
    order = schedule_tasks("1f1b", num_microbatches=2, stage_mesh=[1, 1, 0, 0])
    assert text(order) == [
        "F2.m0 F3.m0 B3.m0 B2.m0 F2.m1 F3.m1 B3.m1 B2.m1",
        "F0.m0 F1.m0 F0.m1 F1.m1 B1.m0 B0.m0 B1.m1 B0.m1",
    ]


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stage_mesh=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    num_microbatches=st.integers(1, 9),
)
def test_any_placement_of_stages_has_an_order_without_deadlock(name, stage_mesh, num_microbatches) -> None:
    used = sorted(set(stage_mesh))
    stage_mesh = [used.index(mesh) for mesh in stage_mesh]
    order = schedule_tasks(
        name,
        num_microbatches=num_microbatches,
        stage_mesh=stage_mesh,
    )
    check_order(order, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
    program_of(order, stage_mesh, num_microbatches).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schedule": "2f2b"},
            r"schedule is '2f2b'. Choose one of '1f1b', 'eager-1f1b', 'gpipe', 'interleaved', 'zero-bubble', 'zero-b",
        ),
        ({"num_microbatches": 0}, r"at least 1 microbatch; it was given 0"),
        ({"stage_mesh": []}, r"0 stages were placed on meshes \[\]"),
        ({"stage_mesh": [0, 2]}, r"2 stages were placed on meshes \[0, 2\].*every mesh a stage"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(change, message) -> None:
    arguments = {
        "schedule": "1f1b",
        "num_microbatches": 2,
        "stage_mesh": [0, 1],
    }
    with pytest.raises(InvalidArgument, match=message):
        schedule_tasks(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a[1:], b), r"Task F0.m0 is scheduled 0 times; it must be 1"),
        (lambda a, b: ((*a, a[0]), b), r"Task F0.m0 is scheduled 2 times; it must be 1"),
        (
            lambda a, b: ((*a, a[0]._replace(microbatch=5)), b),
            r"Task F0.m5 is scheduled 1 times; it must be 0",
        ),
        (lambda a, b: (b, a), r"is on mesh 0; its stage lives on 1"),
        (lambda a, b: (a, b[::-1]), r"Deadlock: mesh 0 at B0.m0, mesh 1 at B1.m1"),
    ],
)
def test_a_broken_order_is_found(change, message) -> None:
    order = change(*chain("1f1b", 2, 2))
    with pytest.raises(InvalidProgram, match=message):
        check_order(order, stage_mesh=[0, 1], num_microbatches=2)


def test_a_task_is_printed_as_kind_stage_microbatch() -> None:
    assert str(Task(kind="F", stage=1, microbatch=0)) == "F1.m0"
    assert str(Task(kind="U", stage=0)) == "U0"
    assert str(Task(kind="U", stage=0, update_round=2, round=1)) == "U0.r1.w2"
