"""Copies that compilers make of what is gathered, sliced or convolved: blocks by hand, on two devices."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs.strides import reorders_images
from autopar.compiler.memory.estimate import peak_memory
from autopar.compiler.memory.listing import listed_step
from autopar.compiler.resharding.steps import AllGather, ReduceScatter, Slice
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated
from autopar.compiler.sharding.strategies import Strategy
from autopar.compiler.spmd.block_times import block_bytes, block_times
from autopar.compiler.spmd.combining import combined_values
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, Reshard, Value
from autopar.hardware.machine import Machine
from tests.compiler.planned_memory import H100

A100 = Machine.named("dgx-a100-80")
MESH = LogicalMesh(shape=(2,), axis_names=("data",))
IMAGES, KERNEL = (64, 32, 32, 32), (3, 3, 32, 32)
NBYTES = 4 * 64 * 32 * 32 * 32
"""Of images of float32."""


def convolve(images, kernel):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dimensions)


def gathered(fn, *shapes: tuple[int, ...], dim: int, dtype: str = "float32") -> LocalBlock:
    """`fn` of one equation, whose first operand is gathered along a dimension."""
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr
    (eqn,) = jaxpr.eqns
    rank = len(shapes[0])
    part = Value(jaxpr.invars[0], Layout(tuple((0,) if d == dim else () for d in range(rank))))
    whole = Value(jaxpr.invars[0], replicated(rank), "forward")
    others = [Value(v, replicated(v.aval.ndim)) for v in jaxpr.invars[1:]]
    result = Value(eqn.outvars[0], replicated(eqn.outvars[0].aval.ndim))
    operands = (whole, *others)
    strategy = Strategy(tuple(v.layout for v in operands), (result.layout,))
    return LocalBlock(
        jaxpr=jaxpr,
        inputs=(part, *others),
        actions=(
            Reshard(operand=part, result=whole, steps=(AllGather((0,), dim),)),
            Evaluate(eqn=eqn, operands=operands, results=(result,), strategy=strategy),
        ),
        outputs=(result,),
        combined=combined_values(jaxpr, None),
    )


def temporary_bytes(block: LocalBlock, machine: Machine) -> float:
    found = peak_memory(block, MESH, machine=machine)
    return found.peak_bytes - found.arguments_bytes


@pytest.mark.parametrize(
    ("fn", "dim", "arrays"),
    [
        pytest.param(lambda x: lax.slice(x, (0, 0), (8, 8)), 1, 2, id="along an inner dimension"),
        pytest.param(lambda x: lax.slice(x, (0, 0), (8, 8)), 0, 1, id="along the outermost"),
        pytest.param(lambda x: x.sum(0), 1, 1, id="sums read any order"),
    ],
)
def test_what_is_gathered_along_an_inner_dimension_is_there_twice(fn, dim: int, arrays: int):
    block = gathered(fn, (4096, 4096), dim=dim)
    anyhow = dataclasses.replace(H100, gathers_outermost=False)
    one = 4 * 4096 * 4096
    assert temporary_bytes(block, H100) == pytest.approx(arrays * one, rel=1e-3)
    assert temporary_bytes(block, anyhow) == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("read_again", [True, False])
@pytest.mark.parametrize(
    ("machine", "dtype", "copies"),
    [(H100, "float32", False), (A100, "float32", True), (A100, "bfloat16", False)],
)
def test_a_convolution_copies_gathered_images_into_the_order_of_its_library(
    machine: Machine, dtype: str, copies: bool, read_again: bool
):
    block = gathered(convolve, IMAGES, KERNEL, dim=0, dtype=dtype)
    if read_again:
        reshard = block.actions[0]
        assert isinstance(reshard, Reshard)
        block = dataclasses.replace(block, outputs=(*block.outputs, reshard.result))
    same = dataclasses.replace(machine, channels_last=("float32", "bfloat16"))
    # What was gathered is gone when the convolution runs, unless something else reads it.
    more = NBYTES if copies and read_again else 0
    assert temporary_bytes(block, machine) - temporary_bytes(block, same) == more


def test_convolutions_share_the_copy_of_what_is_gathered():
    block = gathered(convolve, IMAGES, KERNEL, dim=0)
    reshard, first = block.actions
    assert isinstance(reshard, Reshard) and isinstance(first, Evaluate)
    made = Value(first.eqn.outvars[0], replicated(4), "again")
    again = dataclasses.replace(first, results=(made,))
    twice = dataclasses.replace(block, actions=(reshard, first, again), outputs=(*block.outputs, made, reshard.result))
    once = dataclasses.replace(block, outputs=(*block.outputs, reshard.result))
    assert temporary_bytes(twice, A100) - temporary_bytes(once, A100) == NBYTES


@pytest.mark.parametrize("after", [True, False])
def test_what_a_barrier_holds_until_it_is_sliced_is_in_memory(after: bool):
    jaxpr = jax.make_jaxpr(lambda x: lax.cumsum(jnp.sin(x) + 1, 1))(jax.ShapeDtypeStruct((4096, 4096), "float32")).jaxpr
    x, (sine, one, total) = Value(jaxpr.invars[0], replicated(2)), (eqn.outvars[0] for eqn in jaxpr.eqns)
    whole, shifted = Value(sine, replicated(2)), Value(one, replicated(2))
    rows = Layout(((0,), ()))
    part, result = Value(one, rows, "forward"), Value(total, rows)
    calls = [
        Evaluate(eqn=eqn, operands=operands, results=(made,), strategy=Strategy((), (made.layout,)))
        for eqn, operands, made in zip(
            jaxpr.eqns, [(x,), (whole, jaxpr.eqns[1].invars[1]), (part,)], [whole, shifted, result], strict=True
        )
    ]
    sliced = Reshard(operand=shifted, result=part, steps=(Slice((0,), 0),), after=(x,) if after else ())
    block = LocalBlock(
        jaxpr=jaxpr,
        inputs=(x,),
        actions=(*calls[:2], sliced, calls[2]),
        outputs=(result,),
        combined=combined_values(jaxpr, None),
    )
    whole_bytes = 4.0 * 4096 * 4096
    # A part is there with the array that it is of, or with its sums, which have a place of their own all the time.
    assert temporary_bytes(block, H100) == (2.0 if after else 1.0) * whole_bytes


@pytest.mark.parametrize("images", ["NHWC", "NCHW"])
def test_a_library_reorders_images_whose_channels_lie_elsewhere_in_its_order(images: str):
    def loss(x, kernel):
        dimensions = (images, "HWIO", images)
        return (lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions) ** 2).sum()

    shape = jax.ShapeDtypeStruct((8, 8, 8, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    eqns = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shape).jaxpr.eqns
    convolutions = [eqn for eqn in eqns if eqn.primitive.name == "conv_general_dilated"]
    assert len(convolutions) == 3
    for eqn in convolutions:
        assert reorders_images(eqn, channels_last=True) == (images == "NCHW")
        assert reorders_images(eqn, channels_last=False) == (images == "NHWC")
    assert not any(reorders_images(eqn, last) for eqn in eqns if eqn not in convolutions for last in (False, True))


@pytest.mark.parametrize(
    ("reversed_dim", "parts_there"),
    [
        pytest.param(0, 2, id="nothing is reversed"),
        pytest.param(2, 5, id="the reversed part is there, and gathered too"),
    ],
)
def test_what_is_reversed_along_one_place_is_gathered_once(reversed_dim: int, parts_there: int):
    shape = jax.ShapeDtypeStruct((1, 4096, 1024), "float32")
    jaxpr = jax.make_jaxpr(lambda x: lax.rev(x, (reversed_dim,)))(shape).jaxpr
    (eqn,) = jaxpr.eqns
    rows, whole = Layout(((), (0,), ())), replicated(3)
    parts = Value(jaxpr.invars[0], rows), Value(eqn.outvars[0], rows)
    gathered_twice = Value(jaxpr.invars[0], whole, "forward"), Value(eqn.outvars[0], whole, "forward")
    reshards = [
        Reshard(operand=part, result=result, steps=(AllGather((0,), 1),))
        for part, result in zip(parts, gathered_twice, strict=True)
    ]
    strategy = Strategy((rows,), (rows,))
    block = LocalBlock(
        jaxpr=jaxpr,
        inputs=(parts[0],),
        actions=(
            reshards[0],
            Evaluate(eqn=eqn, operands=(parts[0],), results=(parts[1],), strategy=strategy),
            reshards[1],
        ),
        outputs=gathered_twice,
        combined=combined_values(jaxpr, None),
    )
    machine = dataclasses.replace(A100, gathers_outermost=False)
    assert temporary_bytes(block, machine) == parts_there * 4 * 2048 * 1024


@pytest.mark.parametrize("copies", [True, False])
def test_state_that_is_gathered_of_updated_parts_is_not_made_in_its_place(copies: bool):
    machine = dataclasses.replace(Machine.named("tpu-v5p"), copies_state=copies)
    jaxpr = jax.make_jaxpr(jnp.sin)(jax.ShapeDtypeStruct((4096, 4096), "float32")).jaxpr
    (eqn,), (w,) = jaxpr.eqns, jaxpr.invars
    whole, split = replicated(2), Layout(((0,), ()))
    state, part, new = Value(w, whole), Value(w, split, "part"), Value(eqn.outvars[0], split)
    gathered_again = Value(eqn.outvars[0], whole)
    block = LocalBlock(
        jaxpr=jaxpr,
        inputs=(state,),
        actions=(
            Reshard(operand=state, result=part, steps=(Slice((0,), 0),)),
            Evaluate(eqn=eqn, operands=(part,), results=(new,), strategy=Strategy((split,), (split,))),
            Reshard(operand=new, result=gathered_again, steps=(AllGather((0,), 0),)),
        ),
        outputs=(gathered_again,),
        combined=combined_values(jaxpr, None),
    )
    found = peak_memory(block, MESH, [0], machine=machine)
    one = 4 * 4096 * 4096
    # The updated part, and what is gathered of it until that is copied.
    assert found.peak_bytes - found.arguments_bytes == pytest.approx((1.5 if copies else 0.5) * one, rel=1e-3)
    assert found.copied == ((gathered_again,) if copies else ())
    # The old state and the new are read and written; of what is gathered only that, here.
    costs = MeshCosts(machine=machine, mesh=MESH)
    assert block_bytes(block, costs, copied=found.copied) - block_bytes(block, costs) == (4 * one if copies else 0)
    more_s = block_times(block, costs, found.copied).compute_s - block_times(block, costs).compute_s
    assert more_s == pytest.approx(4 * one / machine.memory_bandwidth if copies else 0.0)


@pytest.mark.parametrize(("outermost", "sums"), [(True, 1), (False, 2)])
def test_sums_that_are_scattered_along_other_dimensions_are_one_where_that_is_outermost_in_memory(outermost, sums):
    jaxpr = jax.make_jaxpr(lambda x, y: (x, y))(*2 * [jax.ShapeDtypeStruct((64, 64), "float32")]).jaxpr
    whole = [Value(v, Layout(((), ()), (0,))) for v in jaxpr.invars]
    parts = [Value(v, Layout(((0,), ()) if dim == 0 else ((), (0,))), "forward") for dim, v in enumerate(jaxpr.invars)]
    actions = [
        Reshard(operand=summands, result=part, steps=(ReduceScatter((0,), dim),))
        for dim, (summands, part) in enumerate(zip(whole, parts, strict=True))
    ]
    block = LocalBlock(
        jaxpr=jaxpr,
        inputs=tuple(whole),
        actions=tuple(actions),
        outputs=tuple(parts),
        combined=combined_values(jaxpr, None),
    )
    program = listed_step(block, MESH, (), dataclasses.replace(A100, gathers_outermost=outermost))
    assert len({op.steps for op in program.ops}) == sums
