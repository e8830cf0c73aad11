"""Train steps as practitioners parallelise them by hand: `jax.jit`, shardings by the names of dimensions, constraints.

A plan sends names of dimensions to mesh axes, for parameters as they are stored and for activations where the model
marks them; what ZeRO adds is to spread parameters or moments over further axes. XLA partitions the rest.

    data parallel          batch -> data
    ZeRO-1, ZeRO-2, FSDP   ... and moments (1), gradients (2), parameters (3) spread over data
    grouped FSDP           parameters spread over the axis `model` only, the batch over both
    tensor parallel        mlp, heads, vocabulary -> model                                (Shoeybi et al. 2019)
    + sequence             ... and what flows between layers is split along its length     (Korthikanti et al. 2022)
    expert parallel        expert -> expert, the batch over all axes: two all-to-alls      (Lepikhin et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.models.model import OPTIMIZER, Array, Mark, Model, Tree, train_step

Axes = tuple[str, ...]
Rules = Mapping[str, Axes]
SPLIT_BY_MODEL = ("mlp", "heads", "vocabulary")


@dataclass(frozen=True, kw_only=True)
class HandPlan:
    """A plan by hand: where the dimensions of arrays go, on a mesh of its own."""

    name: str
    mesh: Mapping[str, int]  # sizes of the axes
    params: Rules
    activations: Rules
    spread_params: Axes = ()
    spread_gradients: Axes = ()
    spread_moments: Axes = ()

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1)
        return f"{self.name} {sizes}"

    def fits(self, mesh_shape: Sequence[int]) -> bool:
        """True if a mesh of this shape has the axes, if any of its axes may be taken for one."""
        sizes = sorted(size for size in self.mesh.values() if size > 1)
        return any(sizes == merged for merged in _merged(tuple(mesh_shape)))


def hand_plans(model: Model, num_devices: int = 8) -> tuple[HandPlan, ...]:
    """Every plan for a model, on every mesh of `num_devices` devices."""
    names = {name for array in jax.tree.leaves(model.params) for name in array.names}
    plans: list[HandPlan] = []
    for model_size in _powers_of_two(num_devices):
        data_size = num_devices // model_size
        if model_size == 1:
            plans += _data_parallel({"data": num_devices})
            continue
        plans += _tensor_parallel({"data": data_size, "model": model_size}, of_sequences="heads" in names)
        if data_size > 1:
            plans.append(_grouped_fsdp({"data": data_size, "model": model_size}))
        if "expert" in names:
            plans += _expert_parallel({"data": data_size, "expert": model_size})
            if model_size > 2:
                plans += _expert_parallel({"data": data_size, "expert": model_size // 2, "model": 2})
    return tuple(plans)


def compile_by_hand(model: Model, plan: HandPlan, devices: Sequence[Any]) -> jax.stages.Compiled:
    """The step compiled for these devices, the state donated. Its shardings say where the arguments belong."""
    mesh = Mesh(np.array(devices).reshape(tuple(plan.mesh.values())), tuple(plan.mesh))
    state, batch = _state_shardings(model, plan, mesh), _batch_shardings(model, plan, mesh)

    def mark(x: jax.Array, *names: str) -> jax.Array:
        named = Array(shape=x.shape, names=names, dtype=x.dtype)
        return jax.lax.with_sharding_constraint(x, _sharding(named, plan.activations, (), mesh))

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        spread = jax.lax.with_sharding_constraint(params, stored)
        return model.loss(jax.lax.with_sharding_constraint(spread, whole), batch, mark)

    def mark_gradients(grads: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(grads, _params_shardings(model, plan, plan.spread_gradients, mesh))

    # Without these constraints XLA would rather move activations than gather what FSDP has spread, or gather it before
    # it is converted to fewer bits.
    stored = _params_shardings(model, plan, plan.spread_params, mesh)
    whole = _params_shardings(model, plan, (), mesh)
    step = train_step(replace(model, loss=loss), mark, mark_gradients)
    jitted = jax.jit(step, in_shardings=(state, batch), out_shardings=(state, None), donate_argnums=0)
    return jitted.lower(model.abstract_state, model.abstract_batch).compile()


def _data_parallel(mesh: Mapping[str, int]) -> list[HandPlan]:
    plain = HandPlan(name="data parallel", mesh=mesh, params={}, activations=_over_batch("data"))
    data = ("data",)
    return [
        plain,
        replace(plain, name="ZeRO-1", spread_moments=data),
        replace(plain, name="ZeRO-2", spread_moments=data, spread_gradients=data),
        replace(plain, name="FSDP", spread_moments=data, spread_gradients=data, spread_params=data),
    ]


def _grouped_fsdp(mesh: Mapping[str, int]) -> HandPlan:
    return HandPlan(
        name="grouped FSDP",
        mesh=mesh,
        params={},
        activations=_over_batch("data", "model"),
        spread_params=("model",),
        spread_moments=("model",),
    )


def _tensor_parallel(mesh: Mapping[str, int], *, of_sequences: bool) -> list[HandPlan]:
    by_model: Rules = dict.fromkeys(SPLIT_BY_MODEL, ("model",))
    plain = HandPlan(
        name="tensor parallel", mesh=mesh, params=by_model, activations={**_over_batch("data"), **by_model}
    )
    if not of_sequences:
        return _with_zero(plain, ("data",))
    between = {**plain.activations, "sequence": ("model",)}
    sequence = replace(plain, name="tensor+sequence parallel", activations=between)
    return [*_with_zero(plain, ("data",)), *_with_zero(sequence, ("data",))]


def _expert_parallel(mesh: Mapping[str, int]) -> list[HandPlan]:
    """Tokens are split over all axes, but for the axis that splits the experts' own matrices, if there is one."""
    by_model: Rules = {name: ("model",) for name in SPLIT_BY_MODEL if "model" in mesh}
    plain = HandPlan(
        name="expert parallel",
        mesh=mesh,
        params={"expert": ("expert",), **by_model},
        activations={"batch": ("data", "expert"), "expert": ("expert",), "expert_batch": ("data",), **by_model},
    )
    return _with_zero(plain, ("data", "expert"))


def _with_zero(plain: HandPlan, spread: Axes) -> list[HandPlan]:
    """The plan itself, with moments spread over what is left of the axes, and with parameters too."""
    if math.prod(plain.mesh[axis] for axis in spread) == 1:
        return [plain]
    return [
        plain,
        replace(plain, name=f"{plain.name}, ZeRO-1", spread_moments=spread),
        replace(
            plain, name=f"{plain.name}, FSDP", spread_moments=spread, spread_gradients=spread, spread_params=spread
        ),
    ]


def _over_batch(*axes: str) -> Rules:
    return {"batch": axes, "expert_batch": axes}


def _state_shardings(model: Model, plan: HandPlan, mesh: Mesh) -> Tree:
    moments = _params_shardings(model, plan, plan.spread_moments, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree.map_params(
        OPTIMIZER,
        lambda _, sharding: sharding,
        model.abstract_state[1],
        moments,
        transform_non_params=lambda _: whole,
    )
    return _params_shardings(model, plan, plan.spread_params, mesh), opt_state


def _params_shardings(model: Model, plan: HandPlan, spread: Axes, mesh: Mesh) -> Tree:
    return jax.tree.map(lambda array: _sharding(array, plan.params, spread, mesh), model.params)


def _batch_shardings(model: Model, plan: HandPlan, mesh: Mesh) -> Tree:
    return jax.tree.map(lambda array: _sharding(array, plan.activations, (), mesh), model.batch)


def _sharding(array: Array, rules: Rules, spread: Axes, mesh: Mesh) -> NamedSharding:
    """Every dimension by its rule where that divides it, then the axes to spread over where most is left."""
    dims: list[Axes] = [()] * len(array.shape)
    used = set[str]()

    def left(number: int) -> int:
        return array.shape[number] // math.prod(mesh.shape[axis] for axis in dims[number])

    for number, name in enumerate(array.names):
        for axis in rules.get(name, ()):
            if axis not in used and left(number) % mesh.shape[axis] == 0:
                dims[number] += (axis,)
                used.add(axis)
    for axis in spread:
        numbers = [number for number in range(len(dims)) if left(number) % mesh.shape[axis] == 0]
        if axis not in used and numbers:
            dims[max(numbers, key=left)] += (axis,)
            used.add(axis)
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims)))


def _powers_of_two(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def _merged(shape: tuple[int, ...]) -> Iterator[list[int]]:
    """The sorted sizes of every partition of the axes into groups: (2, 4) has [2, 4] and [8]."""
    if not shape:
        yield []
        return
    first, *rest = shape
    for sizes in _merged(tuple(rest)):
        yield sorted([first, *sizes])
        for number, size in enumerate(sizes):
            yield sorted([*sizes[:number], first * size, *sizes[number + 1 :]])
