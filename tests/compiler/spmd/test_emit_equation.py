"""Every strategy of every equation, on eight devices: its parts are the parts of what one device computes."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.resharding.costs import apply_steps, reshard_steps
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated, to_spec
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import Strategy, strategies
from autopar.compiler.spmd.emit_equation import evaluate_locally
from tests.compiler.equations import EQUATIONS, equation

LINE = LogicalMesh(shape=(8,), axis_names=("x",))
GRID = LogicalMesh(shape=(2, 4), axis_names=("x", "y"))
# Programs of thousands of small operations, which run once.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["8", "2x4"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_every_strategy_gives_the_parts_of_the_whole(name, mesh):
    check_every_strategy(*equation(*EQUATIONS[name]), mesh, name)


@pytest.mark.usefixtures("float64")
def test_parts_of_random_bits_of_sixty_four_are_those_of_the_whole():
    eqn, operands = equation("random_bits", lambda key: jax.random.bits(key, (8, 2), "uint64"), (jax.random.key(0),))
    check_every_strategy(eqn, operands, GRID, "64 bits")


def check_every_strategy(eqn: jc.JaxprEqn, operands: Sequence[Any], mesh: LogicalMesh, name: str) -> None:
    """What the devices compute, all strategies in one program, against what one device computes."""
    every = strategies_of(eqn, mesh)
    expected = [as_numbers(x) for x in jax.jit(lambda *args: jc.bind_equation(eqn, args))(*operands)]
    found = on_devices(lambda *args: [evaluated(eqn, args, strategy, mesh) for strategy in every], operands, mesh)
    for strategy, results in zip(every, found, strict=True):
        for parts, whole, layout in zip(results, expected, strategy.results, strict=True):
            check_parts(parts, whole, layout, mesh, f"{name}: {strategy}")


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
    part = apply_steps(x, reshard_steps(replicated(x.ndim), Layout(layout.dims), x.shape, mesh), mesh)
    for axis in layout.partial:
        part = part * jnp.where(lax.axis_index(mesh.axis_names[axis]) == 0, mesh.shape[axis], -1).astype(part.dtype)
    return part


def on_devices(run: Any, operands: Sequence[Any], mesh: LogicalMesh) -> Any:
    """What every device makes of whole arrays: [device, ...]."""

    def on_one(*args: Any) -> Any:
        return jax.tree.map(lambda x: words(x)[None], run(*args))

    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(mesh.axis_names)}
    program = jax.jit(jax.shard_map(on_one, mesh=devices_of(mesh), check_vma=False, **specs)).lower(*operands)
    return jax.device_get(program.compile(QUICKLY)(*operands))


def devices_of(mesh: LogicalMesh) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(mesh.shape), mesh.axis_names, (AxisType.Auto,) * len(mesh.shape))


def words(x: Any) -> Any:
    """The array; of keys, their words."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def as_numbers(x: Any) -> np.ndarray:
    """The array as NumPy computes with it."""
    return np.asarray(x.astype(np.float32) if x.dtype == jnp.bfloat16 else words(x))


def check_parts(parts: Any, whole: np.ndarray, layout: Layout, mesh: LogicalMesh, message: str) -> None:
    """Every device has its part of `whole`; where they have summands, these add up to it."""
    own = NamedSharding(devices_of(mesh), to_spec(Layout(layout.dims), mesh)).devices_indices_map(whole.shape)
    expected = np.stack([whole[index] for index in own.values()])
    summands = as_numbers(parts).reshape(*mesh.shape, *parts.shape[1:])
    sums = summands.sum(layout.partial, dtype=whole.dtype, keepdims=True) if layout.partial else summands
    found = np.broadcast_to(sums, summands.shape).reshape(expected.shape)
    if not np.issubdtype(whole.dtype, np.inexact):
        np.testing.assert_array_equal(found, expected, message)
        return
    # Summands are up to eight times as large as their sum, and added in another order.
    largest = np.max(np.abs(whole), initial=1, where=np.isfinite(whole))
    rounding = 2**-7 if parts.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=1e-5 * largest, err_msg=message)
