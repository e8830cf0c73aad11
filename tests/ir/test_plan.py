"""The plan: what it refuses, that JSON keeps it, and how it is printed."""

import dataclasses
import json

import pytest
import rich
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autopar.errors import InvalidArgument, PlanMismatch
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.plan_sharding import ShardingPlan

LINE = MeshPlan(devices=(0, 1), shape=(2,), axis_names=("data",))
GRID = MeshPlan(devices=(2, 3, 4, 5), shape=(2, 2), axis_names=("data", "model"))

PLAN = Plan(
    fingerprint="8f3a",
    method="PipelineParallel",
    meshes=(LINE, GRID),
    stages=(StagePlan(layers=(0, 1), mesh=0), StagePlan(layers=(1, 3), mesh=1, recomputed=2)),
    cuts=(7, 12),
    num_microbatches=4,
    input_specs={
        "state.params.h_0.kernel": P(None, "model"),
        "state.params.h_1.kernel": P(None, "model"),
        "batch": P("data"),
        "state.step": P(),
    },
)

SHARDING = ShardingPlan(layouts={}, collectives=(), step_time_s=1.0, lower_bound_s=1.0, peak_bytes=1.0, figures="cpu")

PRINTED = """\
PipelineParallel: 4 microbatches, schedule 1f1b, for 8f3a

  stage   layers   mesh   devices   mesh shape        remat
 ───────────────────────────────────────────────────────────
  0       [0, 1)   0      0-1       data=2            no
  1       [1, 3)   1      2-5       data=2, model=2   yes

inputs: 3 sharded, all others replicated
  name                       spec               count
  state.params.h_*.kernel    P(None, 'model')   2
  batch                      P('data',)         1"""


def test_plan_prints_a_table_of_its_stages_and_of_what_is_sharded():
    words = [line.split() for line in str(PLAN).splitlines()]
    assert words == [line.split() for line in PRINTED.splitlines()]


def test_rich_prints_names_with_stars_as_they_are(capsys):
    rich.print(PLAN)
    assert "state.params.h_*.kernel" in capsys.readouterr().out


def test_state_on_the_host_is_printed_by_name_and_kept_in_the_file():
    plan = dataclasses.replace(PLAN, host_state=(("state.mu.h_0", "state.nu.h_0"), ("state.mu.h_1", "state.nu.h_1")))
    assert "in pinned memory of the host between steps: 4 inputs, brought in 2 parts" in str(plan)
    assert [line.split() for line in str(plan).splitlines()[-2:]] == [["state.mu.h_*", "2"], ["state.nu.h_*", "2"]]
    assert Plan.from_json(plan.to_json()) == plan
    assert "host_state" not in PLAN.to_json()


def test_plan_counts_layers_stages_and_devices():
    assert (PLAN.num_layers, PLAN.num_stages, PLAN.num_devices) == (3, 2, 6)


def test_plan_does_not_change_with_the_dictionary_it_was_made_from():
    specs = {"batch": P("data")}
    plan = dataclasses.replace(PLAN, input_specs=specs)
    specs["batch"] = P()
    assert plan.input_specs == {"batch": P("data")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "2f2b"}, "schedule is '2f2b'.*'1f1b'"),
        ({"random": "none"}, "random is 'none'"),
        ({"batch_statistics": "none"}, "batch_statistics is 'none'"),
        ({"num_microbatches": 0}, "num_microbatches is 0.*Give 1 or more"),
        ({"num_microbatches": True}, "num_microbatches is True"),
        ({"loop_pieces": 1.5}, "loop_pieces is 1.5"),
        ({"cuts": (7, 7)}, r"cuts are \(7, 7\).*increase strictly"),
        ({"cuts": (0, 7)}, r"cuts are \(0, 7\)"),
        ({"cuts": (7,)}, "3 layers together, the cuts make 2"),
        ({"cuts": (7, 12, 13)}, "3 layers together, the cuts make 4"),
        ({"stages": ()}, "no stage"),
        (
            {"stages": (StagePlan(layers=(1, 3), mesh=0),)},
            r"Stage 0 has the layers \[1, 3\).*begin at layer 0",
        ),
        ({"stages": (StagePlan(layers=(0, 0), mesh=0),)}, "at least one layer"),
        ({"stages": (StagePlan(layers=(0, 3), mesh=2),)}, "lives on mesh 2, the plan has 2 meshes"),
        ({"stages": (StagePlan(layers=(0, 3), mesh=-1),)}, "lives on mesh -1"),
        ({"meshes": (GRID, GRID)}, "Device 2 is in mesh 0 and in mesh 1"),
        ({"input_specs": {"w": P("expert")}}, "spec of w is .*mesh axes are .*'data', 'model'"),
        ({"input_specs": {"w": P("data", "data")}}, "each mesh axis for one dimension"),
        ({"input_specs": {"w": P(P.UNCONSTRAINED)}}, "A plan decides"),
        ({"input_specs": {"w": ("data",)}}, r"spec of w is \('data',\).*PartitionSpec"),
        ({"host_state": (("m",), ("v", "m"))}, r"host_state have \['m'\]. Each has inputs, and each input is in one"),
        ({"host_state": ((), ("v",))}, "host_state have an empty one"),
        ({"host_state": (("m",),), "sharding": SHARDING}, "keeps m on the host, and its step is one program"),
    ],
)
def test_plan_whose_parts_do_not_fit_is_refused(change, message):
    with pytest.raises(InvalidArgument, match=message):
        dataclasses.replace(PLAN, **change)


@pytest.mark.parametrize(
    ("devices", "shape", "axis_names", "message"),
    [
        ((0, 1), (3,), ("data",), r"lists 2 devices, its shape \(3,\) needs 3"),
        ((0, 0), (2,), ("data",), "distinct"),
        ((-1, 0), (2,), ("data",), "counted from 0"),
        ((0, 1), (2, 1), ("data",), r"shape \(2, 1\) has the axis names .*Give 2 different names"),
        ((0, 1), (2, 1), ("data", "data"), "2 different names"),
        ((), (0,), ("data",), r"size of mesh axis 0 in \(0,\) is 0"),
        ((), (), (), "at least one axis"),
    ],
)
def test_mesh_whose_devices_do_not_fill_its_shape_is_refused(devices, shape, axis_names, message):
    with pytest.raises(InvalidArgument, match=message):
        MeshPlan(devices=devices, shape=shape, axis_names=axis_names)


@st.composite
def specs(draw: st.DrawFn, axes: tuple[str, ...]) -> dict[str, P]:
    entry = st.none() | st.sampled_from(axes)
    one_axis = st.lists(entry, max_size=3).map(
        lambda parts: P(*(part if part not in parts[:i] else None for i, part in enumerate(parts)))
    )
    spec = one_axis | st.permutations(axes).map(lambda names: P(None, tuple(names)))
    return draw(st.dictionaries(st.text(), spec, max_size=4))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rank = draw(st.integers(1, 3))
    axes = ("data", "model", "größe")[:rank]
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    size = shape[0] * (shape[1] if rank > 1 else 1) * (shape[2] if rank > 2 else 1)
    num_meshes = draw(st.integers(1, 3))
    order = draw(st.permutations(range(size * num_meshes)))
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    cuts = draw(st.sets(st.integers(1, 10**6), min_size=sum(lengths) - 1, max_size=sum(lengths) - 1))
    return Plan(
        fingerprint=draw(st.text()),
        method=draw(st.text()),
        meshes=tuple(
            MeshPlan(devices=tuple(order[i * size : (i + 1) * size]), shape=shape, axis_names=axes)
            for i in range(num_meshes)
        ),
        stages=tuple(
            StagePlan(
                layers=(start, start + length),
                mesh=draw(st.integers(0, num_meshes - 1)),
                recomputed=draw(st.integers(0, length)),
            )
            for start, length in zip(starts, lengths, strict=True)
        ),
        cuts=tuple(sorted(cuts)),
        loop_pieces=draw(st.integers(1, 9)),
        num_microbatches=draw(st.integers(1, 9)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"])),
        input_specs=draw(specs(axes)),
        batch_statistics=draw(st.sampled_from(["exact", "per_microbatch"])),
        random=draw(st.sampled_from(["full_batch", "per_microbatch"])),
    )


@given(plans())
def test_json_keeps_the_plan_and_its_text(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


def test_saved_plan_loads_as_it_was(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_json_has_one_line_for_each_spec_mesh_and_stage():
    text = PLAN.to_json()
    assert """  "batch": ["data"],\n""" in text
    assert """  {"layers": [1, 3], "mesh": 1, "recomputed": 2}\n""" in text
    assert list(json.loads(text)) == sorted(json.loads(text))


def without(key: str) -> dict:
    fields = json.loads(PLAN.to_json())
    del fields[key]
    return fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "format None"),
        (json.dumps(json.loads(PLAN.to_json()) | {"format": 99}), "format 99.* reads format 5"),
        (json.dumps(without("format")), "format None"),
        (json.dumps(without("random")), r"lacks the keys \['random'\]"),
        (json.dumps(json.loads(PLAN.to_json()) | {"colour": 1}), r"unknown keys \['colour'\]"),
        (PLAN.to_json().replace('"recomputed"', '"remap"'), r"Stage 0 lacks the keys \['recomputed'\].*'remap'"),
        (
            PLAN.to_json().replace('"recomputed": 2', '"recomputed": 3'),
            "Stage 1 has 2 layers, and computes 3 of them again",
        ),
        (PLAN.to_json().replace('"shape"', '"form"'), "Mesh 0 lacks"),
        (PLAN.to_json().replace('"mesh": 1', '"mesh": "1"'), "mesh of stage 1 is '1' of type str.* type int"),
        (PLAN.to_json().replace("[1, 3]", "[1, 3, 5]"), r"Stage 1 has the layers \[1, 3, 5\]"),
        (
            PLAN.to_json().replace('"batch": ["data"]', '"batch": [3]'),
            "spec of batch is 3 of type int.*type list",
        ),
        (PLAN.to_json().replace('"cuts": [7, 12]', '"cuts": "7"'), "cuts is '7' of type str.*type list"),
        (PLAN.to_json().replace("[7, 12]", "[7, true]"), "entry of cuts is True of type bool"),
        (json.dumps(json.loads(PLAN.to_json()) | {"host_state": [["m"], [3]]}), "part of host_state is 3 of type int"),
    ],
)
def test_json_of_another_format_or_with_other_keys_is_refused(text, message):
    with pytest.raises(PlanMismatch, match=message):
        Plan.from_json(text)
