"""Resharding steps: exact on eight devices for every pair of layouts, and moving what they are said to move."""

import dataclasses
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.compiler.analysis.compiled_collectives import compiled_collectives
from autopar.compiler.costs.mesh_costs import MeshCosts, with_links
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.resharding.costs import reshard_matrix, reshard_s, reshard_steps, step_collectives
from autopar.compiler.resharding.emit import apply_steps
from autopar.compiler.resharding.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    PadToPartial,
    Permute,
    ReduceScatter,
    Slice,
    ToPartial,
    after,
)
from autopar.compiler.sharding.collective import Collective
from autopar.compiler.sharding.layout import (
    Layout,
    LogicalMesh,
    all_layouts,
    local_shape,
    may_have,
    replicated,
    to_spec,
    used_axes,
)
from autopar.hardware.machine import Link, Machine


def mesh_of(*shape):
    return LogicalMesh(shape=shape, axis_names=("x", "y", "z")[: len(shape)])


def with_partial_sums(shape, mesh):
    """Every layout, and every layout with sums over some of the axes that do not split it."""
    for layout in all_layouts(shape, mesh):
        free = [axis for axis in range(len(mesh.shape)) if axis not in used_axes(layout)]
        for length in range(len(free) + 1):
            for partial in itertools.combinations(free, length):
                yield Layout(layout.dims, partial)


# --- the oracle: what each device holds, by NumPy -----------------------------------------------------------


def parts_of(array, layout, mesh):
    """Return each device's part of an array without partial sums, NaN for padding: [*mesh, *part]."""
    held = np.empty((*mesh.shape, *local_shape(array.shape, layout, mesh)), array.dtype)
    for device in np.ndindex(*mesh.shape):
        part = array
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                size = -(-part.shape[dim] // mesh.shape[axis])
                missing = [(0, size * mesh.shape[axis] - part.shape[dim] if d == dim else 0) for d in range(part.ndim)]
                if any(map(any, missing)):
                    part = np.pad(part, missing, constant_values=np.nan)
                part = part.take(range(device[axis] * size, (device[axis] + 1) * size), dim)
        held[device] = part
    return held


def summands_of(array, layout, mesh, rng):
    """Return each device's part of an array that is a sum over `layout.partial`: [*mesh, *part]."""
    counts = [mesh.shape[axis] for axis in layout.partial]
    if not counts:
        return parts_of(array, layout, mesh)
    summands = rng.integers(-8, 8, (*counts, *array.shape)).astype(array.dtype)
    summands[(-1,) * len(counts)] += array - summands.sum(tuple(range(len(counts))), dtype=array.dtype)
    held = np.empty((*mesh.shape, *local_shape(array.shape, layout, mesh)), array.dtype)
    for index in np.ndindex(*counts):
        here = [slice(None)] * len(mesh.shape)
        for axis, position in zip(layout.partial, index, strict=True):
            here[axis] = slice(position, position + 1)
        parts = parts_of(summands[index], layout, mesh)
        held[tuple(here)] = parts[tuple(here)]
    return held


def run_on_devices(run, arrays, mesh):
    """The compiled `run` of every device's part of each array ([*mesh, *part]), and its results, stacked the same."""
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    device_mesh = Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))
    spec, axes = PartitionSpec(*mesh.axis_names), tuple(range(len(mesh.shape)))

    def on_one_device(*parts):
        return [jnp.expand_dims(result, axes) for result in run(*[jnp.squeeze(part, axes) for part in parts])]

    mapped = jax.shard_map(on_one_device, mesh=device_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(*arrays).compile()
    arrays = [jax.device_put(array, jax.sharding.NamedSharding(device_mesh, spec)) for array in arrays]
    return compiled, [np.asarray(result) for result in compiled(*arrays)]


def check_exact(array, pairs, mesh):
    """Reshard `array` between all pairs of layouts in one program; the program."""
    rng = np.random.default_rng(0)
    arrays = [summands_of(array, source, mesh, rng) for source, _ in pairs]

    def run(*parts):
        programs = [reshard_steps(source, target, array.shape, mesh) for source, target in pairs]
        return [
            apply_steps(part, steps, mesh, array.shape, source)
            for part, steps, (source, _) in zip(parts, programs, pairs, strict=True)
        ]

    compiled, results = run_on_devices(run, arrays, mesh)
    for (source, target), result in zip(pairs, results, strict=True):
        expected = parts_of(array, Layout(target.dims), mesh)
        total = np.broadcast_to(result.sum(target.partial, dtype=array.dtype, keepdims=True), expected.shape)
        holds = expected == expected  # padding, which is not a number here, may be anything
        np.testing.assert_array_equal(total[holds], expected[holds], err_msg=f"{source} -> {target}")
    return compiled


def check_moves_as_planned(compiled, pairs, shape, mesh):
    """Bytes by kind and number of devices: those of the compiled program are those of the steps."""
    planned, found = Counter(), Counter()
    for source, target in pairs:
        steps = reshard_steps(source, target, shape, mesh)
        for c in itertools.chain(*step_collectives(steps, source, shape, 4, mesh)):
            # A permutation is compiled to cycles of any length, not to groups.
            size = 0 if c.kind == "collective-permute" else mesh.size(c.axes)
            planned[c.kind, size] += c.nbytes
    for c in compiled_collectives(compiled.as_text()):
        found[c.kind, 0 if c.kind == "collective-permute" else c.group_size] += c.nbytes
    assert found == planned


def numbered(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "mesh"),
    [
        pytest.param((16, 8), mesh_of(8), id="8"),
        pytest.param((8, 3, 1, 16), mesh_of(8), id="8, with dimensions that do not divide"),
        pytest.param((), mesh_of(2, 4), id="2x4, a scalar"),
        pytest.param((8,), mesh_of(2, 4), id="2x4, a vector"),
        pytest.param((8, 16), mesh_of(2, 4), id="2x4, a matrix"),
        pytest.param((8, 4), mesh_of(2, 4), id="2x4, where not every dimension divides by 8"),
        pytest.param((6, 12), mesh_of(2, 3), id="2x3"),
        pytest.param((13, 5), mesh_of(2, 4), id="2x4, padded parts"),
        pytest.param((10,), mesh_of(2, 2, 2), id="2x2x2, padding inside of padding"),
        pytest.param((9, 4), mesh_of(7), id="7"),
        pytest.param((8,), mesh_of(2, 1, 4), id="2x1x4, a vector"),
        pytest.param((8,), mesh_of(2, 2, 2), id="2x2x2, a vector"),
    ],
)
def test_every_pair_of_layouts_is_exact_and_moves_what_is_planned(shape, mesh):
    layouts = list(with_partial_sums(shape, mesh))
    pairs = list(itertools.product(layouts, layouts))
    compiled = check_exact(numbered(shape), pairs, mesh)
    check_moves_as_planned(compiled, pairs, shape, mesh)


def test_an_array_without_elements_is_resharded_without_collectives():
    mesh, shape = mesh_of(2, 4), (8, 0)
    for source, target in itertools.product(with_partial_sums(shape, mesh), repeat=2):
        steps = reshard_steps(source, target, shape, mesh)
        part = jnp.zeros(local_shape(shape, source, mesh))
        assert apply_steps(part, steps, mesh, shape, source).shape == local_shape(shape, target, mesh)


def orders_of(shape, mesh):
    """Every layout without partial sums, the axes of a dimension in any order."""
    for layout in all_layouts(shape, mesh):
        yield from (Layout(dims) for dims in itertools.product(*map(itertools.permutations, layout.dims)))


@pytest.mark.slow
def test_pairs_of_layouts_on_three_axes_are_exact():
    shape, mesh = (8, 16), mesh_of(2, 2, 2)
    layouts = list(all_layouts(shape, mesh))
    pairs = list(itertools.product(layouts, layouts))
    compiled = check_exact(numbered(shape), pairs, mesh)
    check_moves_as_planned(compiled, pairs, shape, mesh)


@pytest.mark.parametrize("mesh", [mesh_of(2, 4), mesh_of(2, 2, 2), mesh_of(4, 1, 2)], ids=lambda mesh: str(mesh.shape))
def test_axes_of_a_dimension_may_be_in_any_order_and_drawn_pairs_are_exact(mesh):
    shape = (8, 16, 8)
    layouts = [*with_partial_sums(shape, mesh), *orders_of(shape, mesh)]
    drawn = np.random.default_rng(1).integers(len(layouts), size=(60, 2))
    check_exact(numbered(shape), [(layouts[a], layouts[b]) for a, b in drawn], mesh)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
def test_every_dtype_is_resharded_exactly(dtype):
    mesh, array = mesh_of(2, 4), np.arange(64).reshape(8, 8) % 3
    whole = [Layout(((), ())), Layout(((0,), (1,))), Layout(((0, 1), ())), Layout(((), (1,)))]
    sums = [Layout(((0,), ()), (1,)), Layout(((), ()), (0, 1))]
    pairs = itertools.product(whole if dtype == "bool" else whole + sums, whole)
    check_exact(array.astype(jnp.dtype(dtype)), list(pairs), mesh)


def test_summands_of_booleans_are_one_array_and_otherwise_false():
    mesh, array = mesh_of(2, 4), np.arange(64).reshape(8, 8) % 3 == 0
    layouts = [Layout(((0,), ())), Layout(((), ()), (0,)), Layout(((), (1,)), (0,)), Layout(((0, 1), ()))]
    start = Layout(((0,), (1,)))

    def run(part):
        for source, target in itertools.pairwise([start, *layouts, start]):
            steps = reshard_steps(source, target, array.shape, mesh)
            part = apply_steps(part, steps, mesh, array.shape, source)
        return [part]

    before = parts_of(array, start, mesh)
    _, (result,) = run_on_devices(run, [before], mesh)
    np.testing.assert_array_equal(result, before)


def test_arrays_of_keys_are_resharded_as_they_are():
    mesh, shape = mesh_of(2, 4), (8, 8)
    words = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), shape)))
    pairs = list(itertools.product(all_layouts(shape, mesh)[::2], repeat=2))
    held = [parts_of(words, Layout((*source.dims, ())), mesh) for source, _ in pairs]

    def run(*parts):
        for (source, target), part in zip(pairs, parts, strict=True):
            keys = jax.random.wrap_key_data(part)
            steps = reshard_steps(source, target, shape, mesh)
            yield jax.random.key_data(apply_steps(keys, steps, mesh, shape, source))

    _, results = run_on_devices(run, held, mesh)
    for (source, target), result in zip(pairs, results, strict=True):
        expected = parts_of(words, Layout((*target.dims, ())), mesh)
        np.testing.assert_array_equal(result, expected, err_msg=f"{source} -> {target}")


# --- which steps --------------------------------------------------------------------------------------------

H100 = Machine.named("dgx-h100")
WHOLE = replicated(2)
ROWS, COLUMNS = Layout(((0,), ())), Layout(((), (0,)))
BLOCKS = Layout(((0,), (1,)))
ALL_ROWS, ALL_COLUMNS = Layout(((0, 1), ())), Layout(((), (0, 1)))


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        pytest.param(BLOCKS, BLOCKS, (), id="nothing to do"),
        pytest.param(WHOLE, ALL_ROWS, (Slice((0, 1), 0),), id="what every device has is split by slicing"),
        pytest.param(ALL_ROWS, WHOLE, (AllGather((0, 1), 0),), id="two axes are gathered at once"),
        pytest.param(ALL_ROWS, ROWS, (AllGather((1,), 0),), id="the minor axis alone"),
        pytest.param(ROWS, COLUMNS, (AllToAll((0,), 0, 1),), id="from one dimension to another"),
        pytest.param(ALL_ROWS, BLOCKS, (AllToAll((1,), 0, 1),), id="the minor axis to another dimension"),
        pytest.param(ALL_ROWS, ALL_COLUMNS, (AllToAll((0, 1), 0, 1),), id="two axes to another dimension at once"),
        pytest.param(
            ROWS, ALL_COLUMNS, (Slice((1,), 0), AllToAll((0, 1), 0, 1)), id="sliced first, so that less is sent"
        ),
        pytest.param(
            ALL_ROWS,
            Layout(((1,), ())),
            (Permute(((0, 1), ()), ((1, 0), ())), AllGather((0,), 0)),
            id="the major axis is made the minor one before it is gathered",
        ),
        pytest.param(Layout(((), ()), (0, 1)), WHOLE, (AllReduce((0, 1)),), id="added up over two axes at once"),
        pytest.param(Layout(((), ()), (0,)), ROWS, (ReduceScatter((0,), 0),), id="added up where it is needed"),
        pytest.param(Layout(((), ()), (0, 1)), ALL_ROWS, (ReduceScatter((0, 1), 0),), id="the same over two axes"),
        pytest.param(
            Layout(((), ()), (0, 1)), ROWS, (ReduceScatter((0,), 0), AllReduce((1,))), id="scattered before the rest"
        ),
        pytest.param(
            Layout(((), ()), (0,)), Layout(((), (1,))), (Slice((1,), 1), AllReduce((0,))), id="sliced before added up"
        ),
        pytest.param(WHOLE, Layout(((), ()), (0, 1)), (ToPartial((0, 1)),), id="an array as a sum"),
        pytest.param(ALL_ROWS, Layout(((0,), ()), (1,)), (PadToPartial((1,), 0),), id="a part as a summand"),
    ],
)
def test_steps_are_the_ones_that_send_least(source, target, steps):
    assert reshard_steps(source, target, (64, 64), mesh_of(2, 4)) == steps


def test_where_nothing_else_fits_parts_are_permuted_not_gathered_whole():
    # The second dimension divides by neither axis, so nothing can be exchanged with it.
    steps = reshard_steps(ROWS, Layout(((1,), ())), (8, 3), mesh_of(2, 4))
    assert steps == (Slice((1,), 0), Permute(((0, 1), ()), ((1, 0), ())), AllGather((0,), 0))


def test_an_array_is_made_a_sum_only_along_axes_along_which_the_target_is_one():
    mesh, shape = mesh_of(2, 4), (8, 3)
    layouts = [*with_partial_sums(shape, mesh), *orders_of(shape, mesh)]
    for source, target in itertools.product(layouts, repeat=2):
        made = [s.axes for s in reshard_steps(source, target, shape, mesh) if isinstance(s, ToPartial | PadToPartial)]
        assert sorted(itertools.chain(*made)) == sorted({*target.partial} - {*source.partial})


def test_dimensions_and_axes_of_size_one_take_no_part():
    mesh = mesh_of(2, 1, 4)
    steps = reshard_steps(Layout(((1,), (0,), (2,))), Layout(((), (0, 2), ()), (1,)), (1, 8, 16), mesh)
    assert steps == (AllToAll((2,), 2, 1),)
    permuted = reshard_steps(Layout(((), (2, 0))), Layout(((), (0, 1, 2))), (1, 8), mesh)
    assert permuted == (Permute(((), (2, 0)), ((), (0, 2))),)


def slow_between(machine: Machine = H100, *, domain: int = 4, slower: float = 40.0) -> Machine:
    """A machine of domains of so many devices, whose links between domains are so many times slower than inside."""
    return dataclasses.replace(
        machine,
        domain=domain,
        intra=Link(latency_s=2e-6, bandwidth=4e11, ramp_bytes=0.0),
        inter=Link(latency_s=1e-5, bandwidth=4e11 / slower, ramp_bytes=0.0),
    )


@pytest.mark.parametrize("sizes", [(2, 4), (8,), (4, 2)], ids=str)
def test_an_all_reduce_over_slow_links_is_a_sum_inside_of_domains_first(sizes):
    mesh = with_links(mesh_of(*sizes), slow_between())
    every = tuple(range(len(sizes)))
    steps = reshard_steps(Layout(((), ()), every), WHOLE, (64, 64), mesh)
    assert steps == (AllReduce(every),)
    (collectives,) = step_collectives(steps, Layout(((), ()), every), (64, 64), 4, mesh)
    nbytes = 64 * 64 * 4
    assert collectives == (
        Collective(kind="reduce-scatter", axes=every, nbytes=nbytes, reach="inside"),
        Collective(kind="all-reduce", axes=every, nbytes=nbytes / 4, reach="across"),
        Collective(kind="all-gather", axes=every, nbytes=nbytes, reach="inside"),
    )
    assert [mesh.reach(every, c.reach) for c in collectives] == [4, 2, 4]


@pytest.mark.parametrize(("slower", "in_levels"), [(1.0, False), (4.0, False), (8.0, False), (8.5, True)])
def test_the_links_decide_whether_sums_are_made_in_levels(slower, in_levels):
    # Of 8 devices, where 8 times what leaves a host per device is less than what stays inside, by a hundredth or more.
    machine = slow_between(slower=slower)
    mesh = with_links(mesh_of(2, 4), machine)
    assert (mesh.links is not None and bool(mesh.links.ring((0, 1)).levels)) == in_levels
    mesh_costs = MeshCosts(machine=machine, mesh=mesh)
    flat = MeshCosts(machine=machine, mesh=mesh_of(2, 4)).collective_s("all-reduce", (0, 1), 4 * 2**28)
    priced = reshard_s(Layout(((), ()), (0, 1)), WHOLE, (2**14, 2**14), 4, mesh_costs)
    assert priced <= flat * (1 + 1e-9)
    assert (priced < flat) == in_levels


def test_where_all_links_are_equal_a_mesh_has_none():
    equal = dataclasses.replace(H100, intra=dataclasses.replace(H100.intra, group_bandwidths=()))
    assert with_links(mesh_of(2, 4), equal) == mesh_of(2, 4)
    assert with_links(mesh_of(2, 4), slow_between(domain=8)) == mesh_of(2, 4)


def test_sums_in_levels_of_what_does_not_divide_move_its_padding_too():
    mesh = with_links(mesh_of(2, 4), slow_between())
    (collectives,) = step_collectives((AllReduce((0, 1)),), Layout(((), ()), (0, 1)), (2, 5), 4, mesh)
    assert [c.nbytes for c in collectives] == [12 * 4, 3 * 4, 12 * 4]


@pytest.mark.parametrize("sizes", [(2, 4), (8,), (4, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(64,), (7,), (3, 5), (2,), ()], ids=str)
def test_sums_in_levels_equal_those_along_one_ring(shape, sizes):
    mesh = with_links(mesh_of(*sizes), slow_between())
    every = tuple(range(len(sizes)))
    names = mesh.names(every)
    devices = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    source = Layout(((),) * len(shape), every)

    def summed(x):
        steps = reshard_steps(source, Layout(source.dims), shape, mesh)
        return apply_steps(x[0], steps, mesh, shape, source)

    run = jax.jit(
        jax.shard_map(summed, mesh=devices, in_specs=PartitionSpec(names), out_specs=PartitionSpec(), check_vma=False)
    )
    array = np.arange(8 * max(1, np.prod(shape)), dtype=np.float32).reshape(8, *shape)
    x = jax.device_put(array, NamedSharding(devices, PartitionSpec(names)))
    np.testing.assert_array_equal(run(x), array.sum(0))
    compiled = compiled_collectives(run.lower(x).compile().as_text())
    (planned,) = step_collectives((AllReduce(every),), source, shape, 4, mesh)
    assert sorted((c.kind, mesh.reach(every, c.reach), c.nbytes) for c in planned) == sorted(
        (c.kind, c.group_size, c.nbytes) for c in compiled
    )


# --- what they cost -----------------------------------------------------------------------------------------


def test_collectives_count_the_larger_of_operand_and_result_on_one_device():
    mesh, shape = mesh_of(2, 4), (64, 32)
    source = Layout(((), ()), (0, 1))
    steps = (ReduceScatter((0,), 0), AllReduce((1,)), Slice((1,), 0), AllToAll((1,), 0, 1), AllGather((0,), 0))
    whole = 64 * 32 * 2
    assert tuple(itertools.chain(*step_collectives(steps, source, shape, 2, mesh))) == (
        Collective(kind="reduce-scatter", axes=(0,), nbytes=whole),
        Collective(kind="all-reduce", axes=(1,), nbytes=whole / 2),
        Collective(kind="all-to-all", axes=(1,), nbytes=whole / 8),
        Collective(kind="all-gather", axes=(0,), nbytes=whole / 4),
    )


@pytest.mark.parametrize("machine", [Machine.named("cpu"), H100, slow_between()], ids=["cpu", "dgx-h100", "slow"])
@pytest.mark.parametrize("shape", [(8, 64), (1, 8, 16), (), (16, 3)], ids=str)
def test_seconds_are_those_of_the_collectives_and_of_copies(shape, machine):
    mesh = with_links(mesh_of(2, 4), machine)
    mesh_costs = MeshCosts(machine=machine, mesh=mesh)
    layouts = tuple(with_partial_sums(shape, mesh))
    matrix = reshard_matrix(layouts, layouts, shape, 4, mesh_costs)
    for (i, source), (j, target) in itertools.product(enumerate(layouts), repeat=2):
        steps = reshard_steps(source, target, shape, mesh)
        collectives = itertools.chain(*step_collectives(steps, source, shape, 4, mesh))
        sent = sum(mesh_costs.collective_s(c.kind, c.axes, c.nbytes, c.reach) for c in collectives)
        # Besides that, each step copies the array at most twice, and a sum in levels may be padded by three elements.
        copies = len(steps) * 4 * np.prod(shape) * 4 / mesh_costs.machine.memory_bandwidth
        padding = 0.0 if mesh.links is None else 2 * 3 * 4 * (1 / 4e11 + 1 / 4 / 1e10)
        assert sent * (1 - 1e-9) - padding <= matrix[i, j] <= (sent + copies) * (1 + 1e-9)
        assert reshard_s(source, target, shape, 4, mesh_costs) == matrix[i, j]


@pytest.mark.parametrize("rows", [8, 2**10, 2**20, 2**27])
def test_sums_over_hosts_take_what_their_collective_takes_at_every_size(rows):
    machine = Machine.named("p4d.24xlarge")
    mesh_costs = MeshCosts(machine=machine, mesh=mesh_of(8, 8))
    summed = reshard_s(Layout(((), ()), (0, 1)), replicated(2), (rows, 8), 4, mesh_costs)
    assert summed == pytest.approx(mesh_costs.collective_s("all-reduce", (0, 1), 32.0 * rows))


def test_what_is_there_already_costs_nothing_and_slicing_sends_nothing():
    mesh, shape = mesh_of(2, 2, 2), (64, 64, 64)
    mesh_costs = MeshCosts(machine=H100, mesh=mesh)
    layouts = all_layouts(shape, mesh)
    matrix = reshard_matrix(layouts, layouts, shape, 4, mesh_costs)
    assert not matrix.diagonal().any()
    assert (matrix + np.eye(len(layouts)) > 0).all()
    part = 4 * 64**3 / 8
    assert matrix[layouts.index(replicated(3))].max() == pytest.approx(3 * 2 * 4 * 64**3 / 2 / 2.8e12, rel=0.5)
    assert matrix[layouts.index(replicated(3))].max() < mesh_costs.collective_s("all-gather", (0,), 0.0)
    assert (
        reshard_s(replicated(3), Layout(((0, 1, 2), (), ())), shape, 4, mesh_costs)
        == 2 * part / mesh_costs.machine.memory_bandwidth
    )


def test_seconds_grow_with_the_array_but_for_the_latency():
    mesh = mesh_of(2, 4)
    mesh_costs = MeshCosts(machine=H100, mesh=mesh)
    layouts = all_layouts((8, 8), mesh)
    small, large, larger = (reshard_matrix(layouts, layouts, (n, 8), 4, mesh_costs) for n in (8, 16, 24))
    np.testing.assert_allclose(larger - large, large - small, rtol=1e-6)


# --- the search itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (3, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(48,), (48, 2), (24, 1, 5, 48)], ids=str)
def test_every_layout_is_reached_from_every_other(shape, sizes):
    mesh = mesh_of(*sizes)
    layouts = [*with_partial_sums(shape, mesh), *orders_of(shape, mesh)]
    for source, target in itertools.product(layouts, repeat=2):
        reached = source
        for step in reshard_steps(source, target, shape, mesh):
            reached = after(reached, step)
            assert may_have(shape, reached, mesh)
        assert reached == target


def test_no_detour_that_makes_no_new_sums_sends_much_less():
    mesh, shape = mesh_of(2, 2, 2), (16, 8)
    whole, layouts = all_layouts(shape, mesh), tuple(with_partial_sums(shape, mesh))
    # Only bytes count: collectives take no time by themselves, and copies none at all.
    link = Link(latency_s=0.0, bandwidth=1.0, ramp_bytes=0.0)
    mesh_costs = MeshCosts(machine=dataclasses.replace(H100, intra=link, memory_bandwidth=1e30), mesh=mesh)
    to_middle = reshard_matrix(layouts, layouts, shape, 1, mesh_costs)
    to_end = reshard_matrix(layouts, whole, shape, 1, mesh_costs)
    new_sums = np.array([[not {*middle.partial} <= {*source.partial} for middle in layouts] for source in layouts])
    detours = (np.where(new_sums, np.inf, to_middle)[:, :, None] + to_end).min(1)
    # A collective more has to save a quarter of the smallest part.
    part = np.prod(shape) / mesh.num_devices
    assert (to_end <= detours + 5 * part / 4).all()
    assert (to_end <= detours + 1e-6).mean() > 0.9


def test_what_goes_to_another_dimension_is_copied_into_row_major_order_at_once():
    mesh, shape = mesh_of(8), (16, 8, 24)
    source, target = Layout(((), (), (0,))), Layout(((0,), (), ()))

    def moved(x):
        return apply_steps(x, reshard_steps(source, target, shape, mesh), mesh, shape, source)

    specs = {"in_specs": to_spec(source, mesh), "out_specs": to_spec(target, mesh)}
    abstract = jax.sharding.AbstractMesh(mesh.shape, mesh.axis_names)
    closed = jax.make_jaxpr(jax.shard_map(moved, mesh=abstract, check_vma=False, **specs))(jnp.zeros(shape))
    (body,) = jc.subjaxprs(jc.open_jaxpr(closed)[0].eqns[0])
    names = [eqn.primitive.name for eqn in jc.open_jaxpr(body)[0].eqns]
    assert names[names.index("all_to_all") :] == ["all_to_all", "layout_constraint"]
