"""The collectives read from compiled programs are those that were written, with their bytes and their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from autopar.compiler.analysis.compiled_collectives import compiled_collectives, wire_bytes_by_kind
from autopar.errors import Unsupported

WHOLE = jax.ShapeDtypeStruct((16, 32), jnp.float32)
BLOCKS = P("x", "y")  # [8, 8] on each device: 256 bytes


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def compiled_text(fun, mesh, in_specs=BLOCKS, out_specs=BLOCKS, args=(WHOLE,)) -> str:
    local = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(local).lower(*args).compile().as_text()


def figures_of(text: str) -> list[tuple[str, int, float, float]]:
    return sorted((c.kind, c.group_size, c.nbytes, c.count) for c in compiled_collectives(text))


def damped_sum(x):
    return lax.psum(x, "y") * 0.1


def scan_in_scan(x):
    def outer(carry, row):
        inner = lax.scan(lambda c, _: (damped_sum(c), None), carry + row, None, length=3)
        return inner[0], None

    return lax.scan(outer, x, jnp.arange(4.0), reverse=True)[0]


def counting_down(x):
    return lax.while_loop(lambda c: c[1] > 0, lambda c: (damped_sum(c[0]), c[1] - 3), (x, 10))[0]


def data_dependent(x):
    return lax.while_loop(lambda c: c.sum() > 0, damped_sum, x)


def two_branches(x):
    return lax.cond(x.sum() > 0, damped_sum, lambda x: lax.ppermute(x, "x", [(0, 1), (1, 0)]), x)


def recomputed_layers(x):
    """Four layers with weights split over y, gathered when needed, also in the backward pass."""

    def loss(weights):
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ lax.all_gather(w, "y", tiled=True)), None))
        return lax.scan(layer, jnp.ones((4, 8)), weights)[0].sum()

    return jax.grad(loss)(jnp.stack([x[:2]] * 4)).sum(0)


PROGRAMS = {
    "sum": (lambda x: lax.psum(x, "y"), [("all-reduce", 4, 256, 1)]),
    "sum over both axes": (lambda x: lax.psum(x, ("x", "y")), [("all-reduce", 8, 256, 1)]),
    "maximum": (lambda x: lax.pmax(x, "x"), [("all-reduce", 2, 256, 1)]),
    "gather": (lambda x: lax.all_gather(x, "y", tiled=True), [("all-gather", 4, 1024, 1)]),
    "gather over both axes": (lambda x: lax.all_gather(x, ("y", "x"), axis=1), [("all-gather", 8, 2048, 1)]),
    "scatter of a sum": (lambda x: lax.psum_scatter(x, "y", tiled=True), [("reduce-scatter", 4, 256, 1)]),
    "exchange": (lambda x: lax.all_to_all(x, "y", 0, 1, tiled=True), [("all-to-all", 4, 256, 1)]),
    "ring": (
        lambda x: lax.ppermute(x, "y", [(i, (i + 1) % 4) for i in range(4)]),
        [("collective-permute", 4, 256, 1)],
    ),
    "chain of three": (lambda x: lax.ppermute(x, "y", [(2, 0), (0, 3)]), [("collective-permute", 3, 256, 1)]),
    "groups by number": (
        lambda x: lax.psum(x, "y", axis_index_groups=[[0, 2], [1, 3]]),
        [("all-reduce", 2, 256, 1)],
    ),
    "integers": (lambda x: lax.psum(x.astype(jnp.int8), "y"), [("all-reduce", 4, 64, 1)]),
    "truth values": (lambda x: lax.all_gather(x > 0, "y", tiled=True), [("all-gather", 4, 256, 1)]),
    "nothing": (jnp.sin, []),
    "loop": (lambda x: lax.fori_loop(2, 9, lambda i, c: damped_sum(c) + i, x), [("all-reduce", 4, 256, 7)]),
    "loop in a loop": (scan_in_scan, [("all-reduce", 4, 256, 12)]),
    "loop that counts down": (counting_down, [("all-reduce", 4, 256, 4)]),
    "loop of a length that the data decide": (data_dependent, [("all-reduce", 4, 256, 1)]),
    "unrolled loop": (
        lambda x: lax.scan(lambda c, _: (damped_sum(c), None), x, None, length=7, unroll=2)[0],
        [("all-reduce", 4, 256, 1), *[("all-reduce", 4, 256, 3)] * 2],
    ),
    "branches": (two_branches, [("all-reduce", 4, 256, 1), ("collective-permute", 2, 256, 1)]),
    "layers that are recomputed": (
        recomputed_layers,
        [("all-gather", 4, 256, 4), ("all-gather", 4, 256, 4), ("reduce-scatter", 4, 256, 4)],
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_collectives_are_those_written(program, mesh):
    fun, expected = PROGRAMS[program]
    assert figures_of(compiled_text(fun, mesh)) == expected


def test_devices_in_another_order_do_not_matter():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2).transpose(2, 0, 1), ("x", "y", "z"))
    text = compiled_text(
        lambda x: lax.all_gather(lax.psum(x, "y"), ("z", "x"), tiled=True), mesh, P(("z", "x"), "y"), P()
    )
    assert figures_of(text) == [("all-gather", 4, 16 * 16 * 4, 1), ("all-reduce", 2, 4 * 16 * 4, 1)]


def test_axis_of_one_device_does_not_communicate():
    mesh = jax.make_mesh((8, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    assert figures_of(compiled_text(lambda x: lax.psum(x, "y"), mesh)) == []


def test_sums_that_the_compiler_combined_are_one_collective_of_several_arrays(mesh):
    text = compiled_text(
        lambda x: (lax.psum(x, "y"), lax.psum(x.astype(jnp.int32)[:2], "y")), mesh, out_specs=(P("x"), P("x"))
    )
    collectives = compiled_collectives(text)
    assert sum(c.nbytes for c in collectives) == 256 + 64
    assert sorted(zip(sum((c.dtypes for c in collectives), ()), sum((c.operands for c in collectives), ()))) == [
        ("f32", 256.0),
        ("s32", 64.0),
    ]


def test_many_sums_of_one_type_are_combined_and_counted_each(mesh):
    """More than five operands: XLA numbers them in comments."""
    text = compiled_text(lambda *xs: [lax.psum(x, "y") for x in xs], mesh, args=(WHOLE,) * 12)
    assert "/*index=5*/" in text
    assert [(c.operands, c.count) for c in compiled_collectives(text)] == [((256.0,) * 12, 1)]


def test_type_tells_that_a_sum_was_promoted(mesh):
    (collective,) = compiled_collectives(compiled_text(lambda x: lax.psum(x.astype(jnp.bfloat16), "y"), mesh))
    assert collective.dtypes in {("bf16",), ("f32",)}
    assert collective.nbytes == {"bf16": 128, "f32": 256}[collective.dtypes[0]]


def test_collective_says_where_it_was_written(mesh):
    def fun(x):
        with jax.named_scope("gather_weights"):
            return lax.all_gather(x, "y", tiled=True)

    (collective,) = compiled_collectives(compiled_text(fun, mesh))
    assert "gather_weights" in collective.scope
    assert str(collective) == f"1 x all-gather of 1024 bytes f32 over 4: {collective.scope}"


def test_bytes_on_the_wire_count_trips_and_group_sizes(mesh):
    def fun(x):
        x = lax.fori_loop(0, 5, lambda _, c: damped_sum(c), x)
        return lax.psum_scatter(x, "x", tiled=True)

    collectives = compiled_collectives(compiled_text(fun, mesh, out_specs=P(("x", "y"))))
    assert wire_bytes_by_kind(collectives) == {
        "all-reduce": 5 * 2 * 256 * 3 / 4,
        "reduce-scatter": 256 / 2,
    }


def module_text(*lines: str) -> str:
    """A program of 16 partitions whose entry computation has these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        "HloModule step, is_scheduled=true, num_partitions=16\n\n"
        f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


GROUPS = {
    "{{0,1},{2,3},{4,5},{6,7}}": 2,
    "{{0,1,2},{3}}": 3,
    "{}": 16,
    "[2,8]<=[16]": 8,
    "[4,4]<=[4,4]T(1,0)": 4,
    "[8,2]<=[2,2,4]T(2,0,1)": 2,
    "mesh['x'=2,'y'=8] {'y'}": 8,
    "mesh['x'=2,'y'=8] {'x','y'}": 16,
    "mesh['x'=2,'y'=8] {'y':(2)4}": 4,
    "mesh['a'=4,'b'=4], device_ids=([4,4]T(1,0)) {'b'}": 4,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_every_way_to_write_groups_is_read(groups):
    line = f"ROOT %s = f32[8,8]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    assert figures_of(module_text(line)) == [("all-reduce", GROUPS[groups], 256, 1)]


TYPES = {
    "f64[3,5]{1,0}": 120,
    "bf16[4,4]{1,0:T(8,128)(2,1)}": 32,
    "f8e4m3fn[16]{0}": 16,
    "c64[2]{0}": 16,
    "pred[7]{0}": 7,
    "s4[8]{0}": 4,
    "f32[]": 4,
    "u32[<=6]{0}": 24,
}


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_follow_from_the_element_type_and_the_sizes(dtype):
    text = module_text(
        f"%v = {dtype} custom-call(%x)", f"ROOT %s = {dtype} all-reduce(%v), replica_groups=[1,16]<=[16]"
    )
    assert [c.nbytes for c in compiled_collectives(text)] == [TYPES[dtype]]


# What XLA prints for GPUs: an instruction that starts a collective, whose result holds the operands too, and one that
# ends it.
ASYNCHRONOUS = [
    (
        "all-reduce",
        256,
        "%s = f32[8,8]{1,0} all-reduce-start(%x), channel_id=1, {groups}, to_apply=%add",
        "ROOT %d = f32[8,8]{1,0} all-reduce-done(%s)",
    ),
    (
        "all-reduce",
        256,
        "%s = ((f32[8,8]{1,0}), f32[8,8]{1,0}) all-reduce-start(%x), {groups}, to_apply=%add, "
        "output_to_operand_aliasing={{1}: (0, {})}",
        "ROOT %d = f32[8,8]{1,0} all-reduce-done(%s)",
    ),
    (
        "all-gather",
        1024,
        "%s = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), channel_id=1, {groups}, dimensions={0}",
        "ROOT %d = f32[32,8]{1,0} all-gather-done(%s)",
    ),
    (
        "all-gather",
        2048,
        "%s = ((f32[8,8]{1,0}, f32[8,8]{1,0}), (f32[32,8]{1,0}, /*index=1*/f32[32,8]{1,0})) "
        "all-gather-start(%x, /*index=1*/%x), {groups}, dimensions={0}",
        "ROOT %d = (f32[32,8]{1,0}, f32[32,8]{1,0}) all-gather-done(%s)",
    ),
    (
        "reduce-scatter",
        256,
        "%s = ((f32[8,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%x), {groups}, dimensions={0}, to_apply=%add",
        "ROOT %d = f32[2,8]{1,0} reduce-scatter-done(%s)",
    ),
    (
        "all-to-all",
        256,
        "%s = ((f32[8,8]{1,0}), f32[8,8]{1,0}) all-to-all-start(%x), channel_id=1, {groups}, dimensions={0}",
        "ROOT %d = f32[8,8]{1,0} all-to-all-done(%s)",
    ),
    (
        "collective-permute",
        256,
        "%s = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%x), channel_id=1, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,4}}",
        "ROOT %d = f32[8,8]{1,0} collective-permute-done(%s)",
    ),
]


@pytest.mark.parametrize(("kind", "nbytes", "start", "done"), ASYNCHRONOUS)
def test_collective_that_is_started_and_ended_counts_once(kind, nbytes, start, done):
    text = module_text(start.replace("{groups}", "replica_groups=[4,4]<=[16]"), done)
    assert figures_of(text) == [(kind, 4, nbytes, 1)]


def test_computation_that_is_started_and_ended_counts_once():
    wrapped = (
        "%wrapped (p: f32[8,8]) -> f32[2,8] {\n  %p = f32[8,8]{1,0} parameter(0)\n"
        "  ROOT %s = f32[2,8]{1,0} reduce-scatter(%p), replica_groups=[4,4]<=[16], to_apply=%add\n}\n\n"
    )
    calls = module_text(
        "%start = ((f32[8,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%x), calls=%wrapped",
        "%update = ((f32[8,8]{1,0}), f32[2,8]{1,0}, u32[]) async-update(%start), calls=%wrapped",
        "ROOT %done = f32[2,8]{1,0} async-done(%update), calls=%wrapped",
    )
    assert figures_of(calls.replace("ENTRY", f"{wrapped}ENTRY")) == [("reduce-scatter", 4, 256, 1)]


def test_operands_with_types_and_names_without_percent_are_read_too():
    groups = "replica_groups=[4,4]<=[16]"
    assert figures_of(module_text(f"%s = f32[8,8]{{1,0}} all-reduce(f32[8,8]{{1,0}} %x), {groups}")) == [
        ("all-reduce", 4, 256, 1)
    ]
    bare = module_text(f"%s = f32[8,8]{{1,0}} all-reduce(%x), {groups}").replace("%", "")
    assert figures_of(bare) == [("all-reduce", 4, 256, 1)]


# What XLA prints for TPUs: not how often a loop runs, but what it counts.
COUNTED = """HloModule step, num_partitions=4

%body (p: (s32[], f32[8,8], s32[])) -> (s32[], f32[8,8], s32[]) {{
  %p = (s32[]{{:T(128)}}, f32[8,8]{{1,0}}, s32[]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %moved = s32[]{{:T(128)S(6)}} copy(%i), backend_config={{"flag_configs":[]}}
  %n = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant({step})
  %next = s32[] add(%moved, %one), metadata={{op_name="while/body/add"}}
  %x = f32[8,8]{{1,0}} get-tuple-element(%p), index=1
  %sum = f32[8,8]{{1,0}} all-reduce(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  ROOT %out = (s32[], f32[8,8]{{1,0}}, s32[]) tuple(%next, %sum, %n)
}}

%test (q: (s32[], f32[8,8], s32[])) -> pred[] {{
  %q = (s32[], f32[8,8]{{1,0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=2
  ROOT %less = pred[] compare(%j, %m), direction={direction}
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %zero = s32[] constant({start})
  %bound = s32[] {bound}
  %all = (s32[], f32[8,8]{{1,0}}, s32[]) tuple(%zero, %x, %bound)
  %loop = (s32[], f32[8,8]{{1,0}}, s32[]) while(%all), condition=%test, body=%body
  ROOT %r = f32[8,8]{{1,0}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("start", "step", "bound", "direction", "rounds"),
    [
        (0, 1, "constant(6)", "LT", 6),
        (1, 2, "constant(6)", "LT", 3),
        (6, 1, "constant(6)", "LT", 0),
        (0, 1, "constant(6)", "NE", 1),
        (0, 0, "constant(6)", "LT", 1),
        (0, 1, "get-dimension-size(%x), dimensions={0}", "LT", 1),
    ],
)
def test_rounds_of_a_loop_follow_from_its_counter_or_are_one_where_it_does_not_tell(
    start, step, bound, direction, rounds
):
    text = COUNTED.format(start=start, step=step, bound=bound, direction=direction)
    assert figures_of(text) == ([("all-reduce", 4, 256, rounds)] if rounds else [])


def test_computation_that_nothing_calls_does_not_count():
    unused = "%unused (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n  %s = f32[8] all-reduce(%p)\n}\n\n"
    assert figures_of(module_text().replace("ENTRY", f"{unused}ENTRY")) == []


@pytest.mark.parametrize("kind", ["ragged-all-to-all", "collective-broadcast", "send"])
def test_transfer_that_cannot_be_counted_is_an_error(kind):
    text = module_text(f'%r = f32[8,8]{{1,0}} {kind}(%x, %x), metadata={{op_name="jit(step)/moe"}}')
    with pytest.raises(Unsupported, match=rf"moves data by `{kind}` \(r, from jit\(step\)/moe\); what can be counted"):
        compiled_collectives(text)


def test_data_for_a_callback_on_the_host_is_no_collective():
    assert (
        figures_of(module_text("%t = token[] after-all()", "%r = f32[8,8] send(%x, %t), is_host_transfer=true")) == []
    )
