"""Compare a parallelized step of the zoo with plain `jax.jit`, leaf by leaf: what the tests and the benchmark ask.

Case, Configuration  ->  Agreement      the leaf that differs most after three steps, and by how much
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.api import Compiled, Step
from autopar.methods import Method
from tests.zoo import ZOO, Case

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble")
NUM_STEPS = 3
# Differences are relative to the largest entry of a leaf. A leaf of smaller entries than this has them by
# cancellation (a gradient that is zero in exact arithmetic), so its own size is no measure.
SMALLEST_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How to parallelize. One stage is `DataParallel`, or `ShardParallel` if `options` give a mesh shape.

    `searched` is `Auto` for all devices, which finds what is not in its `options`; the other fields are then 1.
    """

    num_stages: int
    num_microbatches: int
    schedule: str = "1f1b"
    donate: bool = False
    searched: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # further fields of the method

    def method(self, case: Case) -> Method:
        """The method for a case: its batch statistics are the case's."""
        if self.searched:
            return autopar.Auto(**self.options)
        given = {"num_microbatches": self.num_microbatches, "batch_statistics": case.batch_statistics, **self.options}
        if self.num_stages > 1:
            return autopar.PipelineParallel(num_stages=self.num_stages, schedule=self.schedule, **given)
        if "mesh_shape" in given:
            return autopar.ShardParallel(**given)
        return autopar.DataParallel(**given)

    def __str__(self) -> str:
        if self.searched:
            return " ".join(["searched", *(f"{name}={value}" for name, value in self.options.items())])
        pipelined = f"{self.num_stages} stages {self.schedule}" if self.num_stages > 1 else "1 stage"
        words = [f"{name}={value}" for name, value in self.options.items() if name != "specs"]
        words += ["specs"] * ("specs" in self.options) + ["donated"] * self.donate
        return " ".join([f"{pipelined} x{self.num_microbatches}", *words])


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The leaf of state and metrics that differs most, relative to its largest entry."""

    leaf: str
    difference: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """True if the difference is one of rounding. A NaN does not hold."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return f"{self.leaf} differs by {self.difference:.1e} of its size, {self.tolerance:.0e} is allowed"


def compare(case: Case, configuration: Configuration, step: Step | Compiled | None = None) -> Agreement:
    """Run three steps, and compare with the plain step's. Computes in 64 bits, which the caller has enabled.

    `step` is what runs the configuration, if it has been made.
    """
    step = parallelized(case, configuration) if step is None else step
    state, *batch = example_of(case)
    if configuration.donate:
        state = jax.tree.map(jnp.array, state)
    got = _run(step, state, batch, case)
    return largest_difference(got, _expected(case, configuration.num_microbatches), case.tolerance)


def parallelized(case: Case, configuration: Configuration) -> Step:
    """The case's step under a configuration, on all devices."""
    return autopar.parallelize(
        _made(case.name)[0],
        method=configuration.method(case),
        batch_argnums=case.batch_argnums,
        donate_argnums=(0,) if configuration.donate else (),
    )


def largest_difference(got: Any, want: Any, tolerance: float) -> Agreement:
    """Of two trees whose structures, shapes and dtypes must be equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named, _ = jax.tree.flatten_with_path(want)
    found = [
        Agreement(leaf=jax.tree_util.keystr(path), difference=_difference(a, b), tolerance=tolerance)
        for (path, b), a in zip(named, jax.tree.leaves(got), strict=True)
    ]
    # NaN is larger than any number.
    return max(found, key=lambda agreement: np.nan_to_num(agreement.difference, nan=np.inf))


def _difference(got: Any, want: Any) -> float:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    a, b = _numbers(got), _numbers(want)
    return float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), SMALLEST_SCALE))


def _numbers(leaf: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(jnp.asarray(leaf)) if is_key else leaf).astype(np.float64)


def _run(step: Any, state: Any, batch: Any, case: Case) -> Any:
    metrics = None
    for _ in range(NUM_STEPS):
        state, metrics = step(state, *batch, **case.kwargs)
    return state, metrics


def example_of(case: Case) -> list[Any]:
    """The state and the batch of a case, made once."""
    return list(_made(case.name)[1:])


@functools.cache
def _made(name: str) -> tuple[Any, ...]:
    return ZOO[name].make()


def _expected(case: Case, num_microbatches: int) -> Any:
    """The plain step's result; where statistics are of a microbatch, that of microbatches on one device."""
    exact = case.batch_statistics == "exact" or num_microbatches == 1
    return _reference(case.name, 1 if exact else num_microbatches)


@functools.cache
def _reference(name: str, num_microbatches: int) -> Any:
    step, state, *batch = _made(name)
    case = ZOO[name]
    if num_microbatches == 1:
        return _run(jax.jit(step), state, batch, case)
    method = Configuration(num_stages=1, num_microbatches=num_microbatches).method(case)
    whole = autopar.parallelize(step, method=method, batch_argnums=case.batch_argnums, devices=jax.devices()[:1])
    return _run(whole, state, batch, case)
