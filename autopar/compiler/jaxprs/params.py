"""Read the parameters of JAX's equations: the one gate to their names, their forms and their changes between releases.

Nothing here is promised by JAX. A reader gets values of ours (`Scan`, `Gather`, `SlidingWindow`, ...); whoever binds an
equation with other parameters names those that change (`bind_equation(eqn, args, {"shape": shape})`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding

from autopar.compiler.jaxprs.compat import (
    ClosedJaxpr,
    JaxprEqn,
    bind_equation,
    jaxpr_as_fun,
    open_jaxpr,
    subjaxprs,
    trace,
)

Dimensions = tuple[int, ...]


def parameters(eqn: JaxprEqn) -> Mapping[str, Any]:
    """All parameters by name, for what treats them alike: keys of equations, sizes that grow with the batch."""
    return eqn.params


# Loops, branches and calls

_INSIDE_OF_KERNELS = {"mosaic", "mosaic_gpu"}
"""The platforms that are languages of Pallas kernels, and no devices."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A `lax.scan` equation, read apart: operands are `[consts | carry | xs]`, results `[carry | ys]`."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int
    body: ClosedJaxpr

    @property
    def first_x(self) -> int:
        """Number of the first operand that is scanned over."""
        return self.num_consts + self.num_carry


def scan_of(eqn: JaxprEqn) -> Scan:
    """Read a scan equation (jax 0.10 counts its operands, jax 0.11 and later keep trees of them)."""
    assert eqn.primitive.name == "scan", eqn.primitive.name
    params = eqn.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].update(list(eqn.invars)).unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    return Scan(
        num_consts=num_consts,
        num_carry=num_carry,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params.get("unroll", 1),
        body=params["jaxpr"],
    )


def bind_scan(eqn: JaxprEqn, args: Sequence[Any], length: int) -> list[Any]:
    """Run the body of a scan equation `length` times, on `xs` of that length.

    The body of a scan is one iteration and knows nothing of their number, so no re-tracing is needed; parameters
    that a release adds are passed on untouched.
    """
    return bind_equation(eqn, args, {"length": length, "unroll": min(eqn.params.get("unroll", 1), length)})


@dataclass(frozen=True, kw_only=True)
class While:
    """A `lax.while_loop` equation, read apart: operands are `[consts of cond | consts of body | carry]`."""

    cond_consts: int
    body_consts: int
    cond: ClosedJaxpr
    body: ClosedJaxpr

    @property
    def first_carry(self) -> int:
        """Number of the first operand that is carried."""
        return self.cond_consts + self.body_consts


def while_of(eqn: JaxprEqn) -> While:
    """Read a while equation."""
    params = eqn.params
    return While(
        cond_consts=params["cond_nconsts"],
        body_consts=params["body_nconsts"],
        cond=params["cond_jaxpr"],
        body=params["body_jaxpr"],
    )


def targets_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The target of each operand of a `device_put` equation: a memory space, a sharding, a device, or None."""
    return tuple(eqn.params["devices"])


def branches_of(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """The branches of a `cond` equation, by the number that its first operand gives."""
    return tuple(eqn.params["branches"])


def branch_of_devices(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the one branch of a `platform_dependent` that devices take; the others are for Pallas kernels."""
    platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
    if platforms is None:
        return None
    each = zip(branches_of(eqn), platforms, strict=True)
    taken = [branch for branch, names in each if names is None or not _INSIDE_OF_KERNELS.issuperset(names)]
    return taken[0] if len(taken) == 1 else None


def bodies_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The bodies of a loop, branch or rematerialised region: `[body]`, `[cond, body]`, branches, `[body]`."""
    match eqn.primitive.name:
        case "scan":
            return (scan_of(eqn).body,)
        case "while":
            loop = while_of(eqn)
            return (loop.cond, loop.body)
        case "cond":
            return branches_of(eqn)
        case _:
            return (next(subjaxprs(eqn)),)


# The parameter that holds the called function, by primitive name.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # jax 0.12: the forward half of a rematerialised region
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
    "custom_partitioning": "call",  # as a device computes it that has all of the operands
}


def declared_body(eqn: JaxprEqn) -> ClosedJaxpr:
    """The function of an equation that `sharding_rule` made, at the types of its operands."""
    return trace(eqn.params["function"], [v.aval for v in eqn.invars])


def with_declared_body(eqn: JaxprEqn, body: ClosedJaxpr) -> JaxprEqn:
    """The equation of `sharding_rule` with another function, for operands of the same types."""
    return eqn.replace(params={**eqn.params, "function": lambda *args: jaxpr_as_fun(body)(*args)})


def with_callback(eqn: JaxprEqn, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> JaxprEqn:
    """The callback equation that calls `change(f)` in place of its function f of flat arrays."""
    if "callback" in eqn.params:
        return eqn.replace(params={**eqn.params, "callback": change(eqn.params["callback"])})
    # A `jax.debug.print` makes its function when it is lowered.
    called = change(partial(eqn.primitive.impl, **eqn.params))
    options = {name: eqn.params[name] for name in ("ordered", "partitioned")}
    closed = trace(lambda *args: jax.debug.callback(called, *args, **options), [v.aval for v in eqn.invars])
    (callback,) = open_jaxpr(closed)[0].eqns
    return eqn.replace(primitive=callback.primitive, params=callback.params)


def called_function(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation does nothing but call; None for every other equation."""
    parameter = _CALLS.get(eqn.primitive.name)
    return None if parameter is None else eqn.params[parameter]


def jit_shardings(eqn: JaxprEqn) -> tuple[list[NamedSharding | None], list[NamedSharding | None]]:
    """The shardings that a call of `jax.jit` asks for, by operand and by result; None where it leaves them open.

    Their axes are Auto, as those of a constraint must be: what a caller asks of an Explicit mesh is asked all the same.
    """

    def named(key: str, count: int) -> list[NamedSharding | None]:
        given = eqn.params.get(key) or (None,) * count
        return [over_auto_axes(s) if isinstance(s, NamedSharding) else None for s in given]

    def over_auto_axes(sharding: NamedSharding) -> NamedSharding:
        mesh = sharding.mesh.update(axis_types=(AxisType.Auto,) * len(sharding.mesh.axis_names))
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)

    return named("in_shardings", len(eqn.invars)), named("out_shardings", len(eqn.outvars))


def linear_solver(eqn: JaxprEqn) -> ClosedJaxpr:
    """The function that a `custom_linear_solve` calls; its others are for derivatives."""
    return eqn.params["jaxprs"].solve


def solver_operands(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Return of the operands of a `custom_linear_solve` those of its solver: its constants, and the right-hand side."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*values[first : first + lengths.solve], *values[sum(lengths) :]]


def kernel_grid(eqn: JaxprEqn) -> tuple[int, ...]:
    """The grid of a `pallas_call`, without dimensions that are known at run time only."""
    return tuple(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))


def without_shardings(eqn: JaxprEqn) -> dict[str, None]:
    """The changes by which an equation says nothing of its results' shardings, which only whole arrays have."""
    return {key: None for key in ("sharding", "out_sharding") if key in eqn.params}


def without_mesh_types(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """The results of an equation that says which mesh axes values differ along; None for every other equation."""
    match eqn.primitive.name:
        case "pvary" | "pcast":
            return list(values)
        case "psum_invariant":
            return [jax.lax.psum(value, eqn.params["axes"]) for value in values]
        case "all_gather_invariant":
            dimension, tiled = eqn.params["all_gather_dimension"], eqn.params["tiled"]
            return [jax.lax.all_gather(value, eqn.params["axis_name"], axis=dimension, tiled=tiled) for value in values]
        case _:
            return None


def manual_axes(eqn: JaxprEqn) -> dict[Any, int]:
    """The mesh axes over which a `shard_map` runs its body, and their sizes."""
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))
    return {axis: eqn.params["mesh"].shape[axis] for axis in axes}


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """A `shard_map` equation, read apart."""

    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    body: Any
    """The program of each device's part, open or closed."""


def shard_map_of(eqn: JaxprEqn) -> ShardMap:
    """Read a `shard_map` equation."""
    (body,) = subjaxprs(eqn)
    return ShardMap(
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=tuple(eqn.params["out_specs"]),
        body=body,
    )


# Products


class DotDimensions(NamedTuple):
    """The contracted dimensions of left and right operand of a `dot_general`, then those of the batch."""

    contracted: tuple[Dimensions, Dimensions]
    batch: tuple[Dimensions, Dimensions]


def dot_dimensions(eqn: JaxprEqn) -> DotDimensions:
    """Contracted and batch dimensions of a `dot_general` or of a product in ragged groups."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    return DotDimensions(*(eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers))


class RaggedDimensions(NamedTuple):
    """The left dimensions of a `ragged_dot_general` that are cut into groups, and the right ones that number these."""

    ragged: Dimensions
    groups: Dimensions


def ragged_dimensions(eqn: JaxprEqn) -> RaggedDimensions:
    """The ragged dimensions of a product; none of a plain one."""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return RaggedDimensions((), ())
    return RaggedDimensions(tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions))


class Convolution(NamedTuple):
    """A `conv_general_dilated`: each spec is (batch, features, *space), or (out, in features, *space) of a kernel."""

    lhs_spec: Dimensions
    rhs_spec: Dimensions
    out_spec: Dimensions
    strides: Dimensions
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Dimensions
    rhs_dilation: Dimensions
    feature_groups: int
    batch_groups: int


def convolution_of(eqn: JaxprEqn) -> Convolution:
    """Read a convolution."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    return Convolution(
        *(tuple(spec) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)),
        strides=tuple(params["window_strides"]),
        padding=tuple(params["padding"]),
        lhs_dilation=tuple(params["lhs_dilation"]),
        rhs_dilation=tuple(params["rhs_dilation"]),
        feature_groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
    )


class Attention(NamedTuple):
    """A kernel of attention, forward or `backward`; dimensions of queries are batch, length, heads and width.

    With `heads_first` heads come before the length. Every key head serves as many query heads as there are more of
    these. A query sees all keys, those up to its own place (`causal`), or the last `window` of them.
    """

    backward: bool
    heads_first: bool
    batch: int
    heads: int
    kv_heads: int
    num_queries: int
    num_keys: int
    width: int
    value_width: int
    causal: bool
    window: int | None
    has_bias: bool
    bias_gradient: bool
    segments: int
    """Sequences that may be packed into one example."""
    paged: bool
    """True if keys and values lie in pages."""
    dropout: bool
    scaled: bool
    """True if it computes in 8 bits, and returns the largest numbers that it met."""

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, of one head."""
        if not self.causal and self.window is None:
            return float(self.num_queries * self.num_keys)
        most = min(self.num_keys, self.window or self.num_keys)
        growing = min(self.num_queries, most)
        return growing * (growing + 1) / 2 + (self.num_queries - growing) * most


def attention_of(eqn: JaxprEqn) -> Attention:
    """Read a kernel of attention of JAX's `jax._src.cudnn.fused_attention_stablehlo`.

    Operands are queries, keys and values, then (not in 8 bits) bias, two lengths, two offsets and two page tables, each
    empty where there is none, then (backward) statistics, result and its gradient.
    """
    params, scaled = eqn.params, "use_causal_mask" in eqn.params
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes: list[Dimensions] = [aval.shape for aval in avals]
    heads_first = bool(params["layout"])
    length, head = (2, 1) if heads_first else (1, 2)
    query, key, value = shapes[:3]
    bias = (False, False) if scaled else params["variadic_args"]
    mask = "" if scaled else params["mask_type"].name
    return Attention(
        backward="_bwd_" in eqn.primitive.name,
        heads_first=heads_first,
        batch=query[0],
        heads=query[head],
        kv_heads=key[head],
        num_queries=query[length],
        num_keys=key[length],
        width=query[3],
        value_width=value[3],
        causal=params["use_causal_mask"] if scaled else mask.endswith("CAUSAL"),
        window=params.get("sliding_window_length"),
        has_bias=bias[0],
        bias_gradient=bias[1],
        segments=1 if scaled or len(shapes[6]) != 2 else shapes[6][1] - 1,
        paged=not scaled and len(shapes[8]) == 4,
        dropout=params.get("dropout_rate", 0.0) > 0,
        scaled=scaled,
    )


def without_bias_gradient(eqn: JaxprEqn) -> JaxprEqn:
    """The gradients of a kernel of attention without that of its bias, which stands last."""
    has_bias, _ = eqn.params["variadic_args"]
    return eqn.replace(outvars=eqn.outvars[:3], params={**eqn.params, "variadic_args": (has_bias, False)})


# Dimensions and positions

_ALONG = {
    name: parameter
    for parameter, names in {
        "axes": (
            "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
            "reduce_xor",
        ),
        "axis": (
            "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split", "stack", "top_k", "unstack",
        ),
        "dimension": ("concatenate", "iota", "sort"),
        "dimensions": ("reduce", "rev", "squeeze"),
        "reduction_dimension": ("approx_top_k",),
    }.items()
    for name in names
}  # fmt: skip
"""The parameter that names the dimensions along which a primitive works."""


def dimensions_of(eqn: JaxprEqn) -> Dimensions:
    """The dimensions along which an equation reduces, accumulates, sorts, joins, splits, counts or reverses.

    One that counts from the end is given as JAX has it: -1 for the last.
    """
    value = eqn.params.get(_ALONG[eqn.primitive.name], -1)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def mapped_axes(eqn: JaxprEqn) -> Dimensions | None:
    """The dimensions over which a collective reduces, where all its axes are those of `jax.vmap`; else None.

    Mapped axes have become dimensions of the operands by then; those of a mesh still have names. There is no dimension
    left where the operand was the same along them, as in the gradient of a mean.
    """
    if eqn.primitive.name not in ("psum", "pmax", "pmin") or eqn.params.get("axis_index_groups") is not None:
        return None
    axes = tuple(eqn.params["axes"])
    return axes if all(isinstance(axis, int) for axis in axes) else None


def fft_points(eqn: JaxprEqn) -> tuple[int, ...]:
    """The lengths of the transformed dimensions of an `fft`."""
    return tuple(eqn.params["fft_lengths"])


def solves_from_left(eqn: JaxprEqn) -> bool:
    """Return whether a `triangular_solve` solves a x = b, whose columns are independent; x a = b otherwise."""
    return bool(eqn.params["left_side"])


def permutation_of(eqn: JaxprEqn) -> Dimensions:
    """The operand's dimensions in the order of a `transpose`'s result."""
    return tuple(eqn.params["permutation"])


def broadcast_dimensions(eqn: JaxprEqn) -> Dimensions:
    """The dimension of a `broadcast_in_dim`'s result for each dimension of its operand."""
    return tuple(eqn.params["broadcast_dimensions"])


def read_order(eqn: JaxprEqn) -> Dimensions | None:
    """Return the order in which a `reshape` reads its operand's dimensions; None if it is theirs."""
    order = eqn.params.get("dimensions")
    return None if order is None else tuple(map(int, order))


def repetitions(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the number of times that a `tile` repeats each dimension."""
    return tuple(eqn.params["reps"])


def padding_of(eqn: JaxprEqn) -> tuple[tuple[int, int, int], ...]:
    """For each dimension of a `pad`: elements before, after and between."""
    return tuple((int(low), int(high), int(between)) for low, high, between in eqn.params["padding_config"])


class StaticSlice(NamedTuple):
    """A `slice`: from `starts` to `limits` by `strides`, for each dimension."""

    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]


def slice_of(eqn: JaxprEqn) -> StaticSlice:
    """Read a slice at places that are known."""
    starts, limits, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
    return StaticSlice(tuple(starts), tuple(limits), tuple(strides or (1,) * len(starts)))


class Gather(NamedTuple):
    """A `gather`: JAX's `GatherDimensionNumbers`, the size of a slice, and what stands for indices out of range."""

    numbers: Any
    slice_sizes: tuple[int, ...]
    mode: Any
    fill_value: Any


def gather_of(eqn: JaxprEqn) -> Gather:
    """Read a gather."""
    params = eqn.params
    return Gather(params["dimension_numbers"], tuple(params["slice_sizes"]), params["mode"], params["fill_value"])


class Scatter(NamedTuple):
    """A `scatter`: JAX's `ScatterDimensionNumbers`, its mode, and what combines an element with its update."""

    numbers: Any
    mode: Any
    combine: Any


def scatter_of(eqn: JaxprEqn) -> Scatter:
    """Read a scatter of any kind."""
    params = eqn.params
    return Scatter(params["dimension_numbers"], params["mode"], params.get("update_jaxpr"))


def adds_one_of_each_row(eqn: JaxprEqn) -> bool:
    """Return true for a scatter that adds single elements, each along one dimension of a row of its own."""
    if eqn.primitive.name != "scatter-add":
        return False
    numbers = eqn.params["dimension_numbers"]
    one_index = len(numbers.operand_batching_dims) == len(getattr(eqn.invars[0].aval, "shape", ())) - 1
    return one_index and not numbers.update_window_dims


def indexed_dimensions(eqn: JaxprEqn) -> Dimensions:
    """The dimensions of a gather's or scatter's array that the columns of its indices name, in their order."""
    numbers = eqn.params["dimension_numbers"]
    named = getattr(numbers, "start_index_map", None)
    return tuple(numbers.scatter_dims_to_operand_dims if named is None else named)


class SlidingWindow(NamedTuple):
    """A window that slides over an array: for each dimension its size, stride, padding and dilations."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]

    def slides_along(self, dimension: int) -> bool:
        """Return False where the windows are single elements, each in its place."""
        return tuple(field[dimension] for field in self) != (1, 1, (0, 0), 1, 1)


def window_of(eqn: JaxprEqn) -> SlidingWindow:
    """Read a reduction over windows."""
    params, ones = eqn.params, (1,) * len(eqn.params["window_dimensions"])
    return SlidingWindow(
        sizes=tuple(params["window_dimensions"]),
        strides=tuple(params.get("window_strides") or ones),
        padding=tuple((int(low), int(high)) for low, high in params["padding"]),
        base_dilation=tuple(params.get("base_dilation") or ones),
        window_dilation=tuple(params.get("window_dilation") or ones),
    )


# Types and placement


def reduced_precision(eqn: JaxprEqn) -> tuple[int, int]:
    """Bits of exponent and mantissa to which a `reduce_precision` rounds."""
    return eqn.params["exponent_bits"], eqn.params["mantissa_bits"]


def name_of(eqn: JaxprEqn) -> str:
    """Return the name that `jax.ad_checkpoint.checkpoint_name` gave a value."""
    return eqn.params["name"]


def asked_sharding(eqn: JaxprEqn) -> Any:
    """Return the sharding that a `sharding_constraint` or `reshard` asks for, as JAX holds it."""
    return eqn.params.get("sharding", eqn.params.get("dst_sharding"))
