"""Every strategy of every equation, on eight devices: its parts are the parts of what one device computes."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.resharding.costs import reshard_steps
from autopar.compiler.resharding.emit import apply_steps
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import Strategy, strategies
from autopar.compiler.spmd.emit_equation import evaluate_locally, part_held
from tests.compiler.equations import EQUATIONS, equation

PAIRS = LogicalMesh(shape=(3, 2), axis_names=("x", "y"))
LINE = LogicalMesh(shape=(8,), axis_names=("x",))
GRID = LogicalMesh(shape=(2, 4), axis_names=("x", "y"))
# Programs of thousands of small operations, which run once.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.mark.parametrize("mesh", [LINE, GRID, PAIRS], ids=["8", "2x4", "3x2"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_every_strategy_gives_the_parts_of_the_whole(name, mesh):
    check_every_strategy(*equation(*EQUATIONS[name]), mesh, name)


@pytest.mark.usefixtures("float64")
def test_parts_of_random_bits_of_sixty_four_are_those_of_the_whole():
    eqn, operands = equation("random_bits", lambda key: jax.random.bits(key, (8, 2), "uint64"), (jax.random.key(0),))
    check_every_strategy(eqn, operands, GRID, "64 bits")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["random bits of several keys", "random bits of another generator"])
def test_bits_drawn_whole_are_divided_in_a_program_of_sixty_four_bits(name):
    check_every_strategy(*equation(*EQUATIONS[name]), GRID, name)


def check_every_strategy(eqn: jc.JaxprEqn, operands: Sequence[Any], mesh: LogicalMesh, name: str) -> None:
    """Compare the devices' results, all strategies in one program, with one device's."""
    every = strategies_of(eqn, mesh)
    expected = [as_numbers(x) for x in jax.jit(lambda *args: jc.bind_equation(eqn, args))(*operands)]
    found = on_devices(lambda *args: [evaluated(eqn, args, strategy, mesh) for strategy in every], operands, mesh)
    rounding = 2**-7 if any(v.aval.dtype == jnp.bfloat16 for v in (*eqn.invars, *eqn.outvars)) else 1e-5
    for strategy, results in zip(every, found, strict=True):
        for parts, whole, layout in zip(results, expected, strategy.results, strict=True):
            check_parts(parts, whole, layout, mesh, rounding, f"{name}: {strategy}")


def strategies_of(eqn: jc.JaxprEqn, mesh: LogicalMesh) -> tuple[Strategy, ...]:
    """All, with every operand that may be a sum."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (rule,) = sharding_rules([eqn])
    return strategies(eqn, rule, mesh, maybe_partial=range(len(eqn.invars)))


def evaluated(eqn: jc.JaxprEqn, operands: Sequence[Any], strategy: Strategy, mesh: LogicalMesh) -> list[Any]:
    """The equation on this device's parts of `operands`."""
    parts = [part_of(x, layout, mesh) for x, layout in zip(operands, strategy.operands, strict=True)]
    return evaluate_locally(eqn, parts, strategy, mesh)


def part_of(x: Any, layout: Layout, mesh: LogicalMesh) -> Any:
    """A device's part, or summand: n times the array on the first of n devices, minus the array on the others."""
    whole = replicated(x.ndim)
    part = apply_steps(x, reshard_steps(whole, Layout(layout.dims), x.shape, mesh), mesh, x.shape, whole)
    part = with_garbage(part, x.shape, layout, mesh)
    for axis in layout.partial:
        part = part * jnp.where(lax.axis_index(mesh.axis_names[axis]) == 0, mesh.shape[axis], -1).astype(part.dtype)
    return part


def with_garbage(part: Any, shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> Any:
    """The part with what would show in every result for padding."""
    for dim, axes in enumerate(layout.dims):
        if shape[dim] % mesh.size(axes):
            _, held = part_held(shape[dim], axes, mesh)
            inside = lax.broadcasted_iota(jnp.int32, part.shape, dim) < held
            part = jnp.where(inside, part, garbage(part.dtype))
    return part


def garbage(dtype: Any) -> Any:
    """Not a number, or a large one; a key, for keys."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key(7)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    return jnp.asarray(True if dtype == jnp.bool_ else jnp.iinfo(dtype).max, dtype)


def on_devices(run: Any, operands: Sequence[Any], mesh: LogicalMesh) -> Any:
    """Return every device's results of whole arrays: [device, ...]."""

    def on_one(*args: Any) -> Any:
        return jax.tree.map(lambda x: words(x)[None], run(*args))

    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(mesh.axis_names)}
    program = jax.jit(jax.shard_map(on_one, mesh=devices_of(mesh), check_vma=False, **specs)).lower(*operands)
    return jax.device_get(program.compile(QUICKLY)(*operands))


def devices_of(mesh: LogicalMesh) -> Mesh:
    return Mesh(
        np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape),
        mesh.axis_names,
        (AxisType.Auto,) * len(mesh.shape),
    )


def words(x: Any) -> Any:
    """The array; of keys, their words."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def as_numbers(x: Any) -> np.ndarray:
    """The array as NumPy computes with it."""
    return np.asarray(x.astype(np.float32) if x.dtype == jnp.bfloat16 else words(x))


def part_on(device: tuple[int, ...], whole: np.ndarray, layout: Layout, mesh: LogicalMesh) -> np.ndarray:
    """The part of a device, with zeros for padding."""
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            size = -(-whole.shape[dim] // mesh.shape[axis])
            missing = [(0, size * mesh.shape[axis] - n if d == dim else 0) for d, n in enumerate(whole.shape)]
            whole = np.pad(whole, missing).take(range(device[axis] * size, (device[axis] + 1) * size), dim)
    return whole


def check_parts(
    parts: Any, whole: np.ndarray, layout: Layout, mesh: LogicalMesh, rounding: float, message: str
) -> None:
    """Every device has its part of `whole`; where they have summands, these add up to it."""
    expected = np.stack([part_on(device, whole, layout, mesh) for device in np.ndindex(*mesh.shape)])
    summands = as_numbers(parts).reshape(*mesh.shape, *parts.shape[1:])
    sums = summands.sum(layout.partial, dtype=whole.dtype, keepdims=True) if layout.partial else summands
    found = np.broadcast_to(sums, summands.shape).reshape(expected.shape)
    holds = np.stack([part_on(device, np.ones(whole.shape), layout, mesh) for device in np.ndindex(*mesh.shape)]) > 0
    found, expected = found[holds], expected[holds]  # padding may be anything
    if not np.issubdtype(whole.dtype, np.inexact):
        np.testing.assert_array_equal(found, expected, message)
        return
    # Summands are up to nine times as large as their sum, and added in another order.
    largest = np.max(np.abs(whole), initial=1, where=np.isfinite(whole))
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding * largest, err_msg=message)
