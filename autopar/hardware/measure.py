"""Measure what the devices at hand take: products, memory traffic, collectives, transfers, each over growing sizes.

    devices  ->  Measurement(what, dtype, flops, nbytes, group_size, seconds), ...

Each work is repeated inside one compiled loop, so that what is measured is the device's time and not the time to
begin; sizes grow fourfold until one run takes `Effort.run_s`. Of three loops the fastest counts, for what slows one
down is something else on the machine. Where each round of a loop has kernels of its own, many works stand in one round.

A large product that runs alone draws more power than a step does, and clocks fall: the largest of each type is measured
between memory traffic that takes as long, too. Of GPUs more kernels of training steps are measured: reductions of rows
and columns, which compute more for every byte than `memory`; convolutions with their gradients and the update of their
weights; and copies that are written in short pieces.

All devices work at once, as in a step, and so do all groups of a collective: devices that share cores, memory or links
(the virtual ones of a CPU share everything) have less of them then than one that is alone. How much less is told by one
work on few of them, and on more.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_AXIS, _GROUPS = "devices", "groups"
_REPETITIONS = 3
_CALLS = 50
_ARRAYS = 100
"""Number of arrays that a task of a model of some layers is given: weights, gradients so far and activations."""
_SMALL = 64
"""Rows and columns of a small product."""
_IN_A_ROW = 256
"""Rows and columns of the products of executables in a row, at the least: as many more as take `_AHEAD_S`."""
_MOST_IN_A_ROW, _AHEAD_S = 8192, 1e-3
"""Most rows and columns, and the seconds of a product for which the host is ahead: devices wait for no executable."""
_ROW, _PAIRS = 16, 11
"""Executables in a row, and how often they are held against one that does as much."""
_FIRST_OF_UNITS = 3
"""Smaller products, of up to 208 rows, take what a kernel takes to start where matrix units compute them."""
_WORKS_IN_A_ROUND = 32
"""A GPU counts the rounds of a loop by kernels, and waits for its host to be asked whether to go on."""
_FEW_WORKS = 8
"""The same for works of a fraction of a millisecond and more."""
_MOST_PASSES = 64
"""Numbers that go through memory between two products."""
_WIDTH = 1024
"""Numbers in a row that is reduced."""
_PIECE_NUMBERS, _STACKED, _COPIES = 4, 16, 4
"""Numbers of a dimension that a copy moves innermost, how many matrices it copies so, and how many more copies."""
PIECE_BYTES, WRITTEN_SHARE = 4.0 * _PIECE_NUMBERS, 2 / 3
"""Bytes that such a copy writes at once, in float32, and the share that it writes of what it reads and writes."""
_SIDES, _CHANNELS = (56, 28, 14, 7), (160, 512, 640, 2048)
"""Sides of images between the convolutions of a network, and their channels: kernels of libraries are faster where
these are powers of two, as they are in some networks and in others not. For fewer images, as many fewer channels."""
_MOST_IMAGES, _CHANNELS_OF_A_LOAD = 64, 8
_NETWORKS_MORE = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timed operation: "product" (alone), "in step" (a product between memory traffic), "memory", "reduction",
    "convolution" (of a training step), "pieces" (a copy written in pieces of `PIECE_BYTES`), "at once", "dispatch",
    "execution", "transfer", or one of `PASSES`."""

    what: str
    dtype: str
    nbytes: float
    """Bytes, as in `Machine.matmul_s`, `memory_s`, `collective_s` and `transfer_s`."""
    seconds: float
    flops: float = 0.0
    group_size: int = 1
    """Devices of a collective or a transfer; of "at once" the devices at work."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Bounds on the time to measure: sizes grow until one run takes `run_s`, and a loop takes about `loop_s`."""

    run_s: float
    loop_s: float
    max_sizes: int
    dtypes: tuple[str, ...]
    array_bytes: int = 2**28
    """Bytes of an array that kernels of one size only go through."""
    images: int = _MOST_IMAGES
    """Images of convolutions in 16 bits."""

    @staticmethod
    def of(*, quick: bool) -> Effort:
        """A few seconds on a CPU, or about a minute."""
        if quick:
            short = Effort(run_s=0.005, loop_s=0.01, max_sizes=2, dtypes=("float32", "bfloat16"))
            return replace(short, array_bytes=2**24, images=4)
        return Effort(run_s=0.02, loop_s=0.05, max_sizes=5, dtypes=("float32", "bfloat16", "float16"))


@dataclass(frozen=True, kw_only=True)
class Series:
    """One work over growing sizes."""

    name: str
    measure: Callable[[Effort], list[Measurement]]


def series_of(devices: Sequence[Any], effort: Effort, *, quick: bool) -> list[Series]:
    """Everything to measure on devices of one process."""
    found = [Series(name="memory", measure=partial(_memory, devices))]
    found += [
        Series(name=f"products of {dtype}", measure=partial(_products, devices, dtype)) for dtype in effort.dtypes
    ]
    if devices[0].platform == "gpu":
        found.append(Series(name="reductions", measure=partial(reductions, devices)))
        found.append(Series(name="convolutions", measure=partial(convolutions, devices)))
        found.append(Series(name="short pieces", measure=partial(short_pieces, devices)))
    found.append(Series(name="starts of executables", measure=partial(_dispatches, devices)))
    found.append(Series(name="executables in a row", measure=partial(_executions, devices)))
    if len(devices) == 1:
        return found
    found.append(Series(name="devices at once", measure=partial(_at_once, devices)))
    found.append(Series(name="transfers", measure=partial(_transfers, devices[0], devices[-1])))
    # Two sizes of groups tell the latency of a step from that of a collective.
    sizes = (2,) if quick else [2**i for i in range(1, len(devices).bit_length())]
    groups = sorted({size for size in sizes if len(devices) % size == 0} | {len(devices)})
    for kind in _EXCHANGES:
        for group in groups if not quick or kind == "all-reduce" else groups[-1:]:
            measure = partial(_collectives, kind, devices, group)
            found.append(Series(name=f"{kind} over {group}", measure=measure))
    return found


def _products(devices: Sequence[Any], dtype: str, effort: Effort) -> list[Measurement]:
    step = _on_each(lambda y, w: y @ w, devices)

    def operand(n: int) -> jax.Array:
        def make() -> jax.Array:
            drawn = jax.random.normal(jax.random.key(0), (len(devices) * n, n)) / math.sqrt(n)
            return drawn.astype(dtype)

        return _made(make, devices)

    def measured(n: int) -> Measurement:
        x = operand(n)
        seconds = _looped_s(step, (x, x), effort)
        nbytes = 3 * x.nbytes // len(devices)
        return Measurement(what="product", dtype=dtype, nbytes=nbytes, seconds=seconds, flops=2.0 * n**3)

    # Four times the FLOPs from one to the next.
    first = 0 if devices[0].platform == "cpu" else _FIRST_OF_UNITS
    sizes = (round(128 * 4 ** (i / 3) / 16) * 16 for i in range(first, max(first + 4, 2 * effort.max_sizes)))
    found = list(_growing(sizes, measured, effort, more=2))
    largest = found[-1]
    x = operand(round((largest.flops / 2) ** (1 / 3)))
    seconds = _between_passes_s(step, x, largest.seconds, devices, effort)
    return [*found, replace(largest, what="in step", seconds=seconds)]


def _between_passes_s(
    step: Callable[..., jax.Array], x: jax.Array, alone_s: float, devices: Sequence[Any], effort: Effort
) -> float:
    """Seconds of a product between passes through memory, over an array like its own, that take about as long.

    At least half of what it takes alone: what is less is the noise of the passes.
    """
    one_pass = _on_each(_passed, devices)
    pass_s = _looped_s(one_pass, (x,), effort)
    passes = min(_MOST_PASSES, max(1, round(alone_s / pass_s)))

    def both(carried: tuple[jax.Array, jax.Array], w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, z = carried
        y, z = lax.optimization_barrier((step(y, w), z))
        for _ in range(passes):
            z = lax.optimization_barrier(one_pass(z))
        return y, z

    return max(_looped_s(both, ((x, x), x), effort) - passes * pass_s, alone_s / 2)


def _passed(y: jax.Array) -> jax.Array:
    """Read and write an array."""
    return y * y.dtype.type(0.5) + y.dtype.type(1)


def _memory(devices: Sequence[Any], effort: Effort) -> list[Measurement]:
    step = _on_each(_passed, devices)

    def measured(nbytes: int) -> Measurement:
        x = _made(lambda: jnp.ones(len(devices) * nbytes // 4, jnp.float32), devices)
        return Measurement(what="memory", dtype="float32", nbytes=2 * nbytes, seconds=_looped_s(step, (x,), effort))

    # The smallest says what a kernel takes to start (XLA's CPU compiler makes one kernel of a whole loop over less
    # than a kilobyte); all others are larger than caches.
    return list(_growing((2**12, *(2**25 * 2**i for i in range(8))), measured, effort))


def reductions(devices: Sequence[Any], effort: Effort) -> list[Measurement]:
    """A softmax, its gradient, a normalization with its gradients, and sums of columns, in 16 bits.

    Bytes are those of the arrays that their kernels read and write, as XLA of jaxlib 0.11.2 compiles them for an H100.
    """
    rows = effort.array_bytes // 2 // _WIDTH

    def drawn(key: int) -> jax.Array:
        return jax.random.normal(jax.random.key(key), (len(devices) * rows, _WIDTH)).astype(jnp.bfloat16)

    x, g = _made(lambda: drawn(0), devices), _made(lambda: drawn(1), devices)
    row = _made(lambda: jnp.ones((len(devices), _WIDTH), jnp.bfloat16), devices)
    works: Sequence[tuple[int, Callable[[Any], Any], Any]] = (
        (2, jax.nn.softmax, x),
        (4, _softmax_gradient, (x, g)),
        (10, _normalized, (x, g, row, row)),
        (2, _summed_columns, (x, row)),
    )
    found: list[Measurement] = []
    for arrays, work, carried in works:
        seconds = _looped_s(_on_each(work, devices), (carried,), effort, works=_FEW_WORKS)
        nbytes = arrays * x.nbytes // len(devices)
        found.append(Measurement(what="reduction", dtype="bfloat16", nbytes=nbytes, seconds=seconds))
    return found


def _softmax_gradient(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Compute it as where a layer is computed again, from the softmax's input: once for sums, once for the result."""
    x, g = carried
    _, backward = jax.vjp(jax.nn.softmax, x)
    return x, *backward(g)


def _normalized(carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """A normalization (2 arrays), the gradients of its input (3), its scale (3, 1 read again) and its shift (1)."""
    x, g, scale, shift = carried

    def normalize(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        normal = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return normal.astype(x.dtype) * scale + shift

    y, backward = jax.vjp(normalize, x, scale, shift)
    return y, *backward(g)


def _summed_columns(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Compute something of an array, and its sum over rows: the gradient of what was added to all of them."""
    x, row = carried
    y = _passed(x) + row
    return y, y.mean(0, keepdims=True) / 4


def convolutions(devices: Sequence[Any], effort: Effort) -> list[Measurement]:
    """A training step of convolutions, one of each side of images, for each type: weights and momentum in 32 bits.

    Libraries have layouts of their own: what copies weights into them and gradients out of them is in the time. FLOPs
    are those of forward pass and gradients, bytes what is read and written of weights and momentum. Images are as many
    as take as many bytes in either type.
    """
    loads = (each * effort.images // _MOST_IMAGES // _CHANNELS_OF_A_LOAD for each in _CHANNELS)
    channels = [_CHANNELS_OF_A_LOAD * each for each in loads]
    weights = [9 * each**2 for each in channels]
    found: list[Measurement] = []
    for dtype in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
        images = effort.images * 2 // dtype.itemsize
        in_a_row = partial(_trained_in_a_row, devices, channels, dtype, images)
        seconds = _one_more_s(in_a_row, _NETWORKS_MORE, effort)
        flops = sum(6.0 * images * side**2 * size for side, size in zip(_SIDES, weights, strict=True))
        # Weights and momentum are read and written, weights converted, gradients read.
        converted = 0 if dtype.itemsize == 4 else 4 + dtype.itemsize
        nbytes = (2 * 8 + converted + dtype.itemsize) * sum(weights)
        measured = Measurement(what="convolution", dtype=dtype.name, nbytes=nbytes, seconds=seconds, flops=flops)
        found.append(measured)
    return found


def _trained_in_a_row(
    devices: Sequence[Any], channels: Sequence[int], dtype: np.dtype[Any], images: int, networks: int
) -> Callable[[int], Any]:
    """Return what trains so many networks, of a convolution of 3 x 3 for each side, a number of steps."""

    def drawn(key: int, *shape: int) -> jax.Array:
        return _made(lambda: jax.random.normal(jax.random.key(key), (len(devices) * shape[0], *shape[1:])), devices)

    def trained(state: Any, arrays: Any) -> Any:
        updated = [_trained(x, *each) for x, each in zip(arrays, state, strict=True)]
        return [each[0] for each in updated], [each[1:] for each in updated]

    layers = [(key, side, size) for key in range(networks) for side, size in zip(_SIDES, channels, strict=True)]
    arrays = [drawn(key, images, side, side, size).astype(dtype) for key, side, size in layers]
    weights = [drawn(key, 3, 3, size, size) / math.sqrt(9 * size) for key, _, size in layers]
    state = [(w, w * 0) for w in weights]
    step = jax.jit(_on_each(trained, devices), donate_argnums=0)

    def in_a_row(count: int) -> Any:
        nonlocal state
        for _ in range(count):
            state, _ = step(state, arrays)
        return state

    return in_a_row


def _trained(x: jax.Array, w: jax.Array, m: jax.Array) -> tuple[Any, ...]:
    """A convolution's state after a step by gradient and momentum, its result, and the gradient of its images."""

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    y, backward = jax.vjp(convolve, x, w)
    dx, dw = backward(x)
    m = 0.9 * m + dw
    return (w - 1e-6 * m, m), y, dx


def short_pieces(devices: Sequence[Any], effort: Effort) -> list[Measurement]:
    """A copy, from 16 bits, that turns matrices stacked four by four inside out, and writes four numbers at once.

    The stacks lie as products leave them, four matrices as one of more rows: of what was in four dimensions before,
    XLA has Triton make tiles, which write at the bandwidth (jaxlib 0.11.2).
    """
    numbers = effort.array_bytes // (2 * _PIECE_NUMBERS * _STACKED)
    rows = 2 ** (numbers.bit_length() // 2)
    shape = (len(devices) * _STACKED, _PIECE_NUMBERS * rows, numbers // rows)

    def inside_out(x: jax.Array) -> jax.Array:
        return x.reshape(-1, _PIECE_NUMBERS, rows, numbers // rows).astype(jnp.float32).transpose(0, 3, 2, 1)

    def copied(copies: int) -> Callable[[int], Any]:
        arrays = [_made(lambda: jnp.ones(shape, jnp.bfloat16), devices) for _ in range(copies)]
        step = jax.jit(_on_each(lambda each: [inside_out(x) for x in each], devices))

        def in_a_row(count: int) -> Any:
            results: Any = None
            for _ in range(count):
                results = step(arrays)
            return results

        return in_a_row

    nbytes = (2 + 4) * math.prod(shape) // len(devices)
    seconds = _one_more_s(copied, _COPIES, effort)
    return [Measurement(what="pieces", dtype="float32", nbytes=nbytes, seconds=seconds)]


def _one_more_s(in_a_row: Callable[[int], Callable[[int], Any]], more: int, effort: Effort) -> float:
    """Seconds of one more work in an executable: of one with so many more, against one with one work.

    What starts an executable is in both. The layouts of its arguments and results are those of their shapes, which in a
    loop the compiler chooses.
    """
    one_s, several_s = (fastest_s(in_a_row(works), effort) for works in (1, 1 + more))
    return (several_s - one_s) / more if several_s > one_s else several_s / (1 + more)


def _at_once(devices: Sequence[Any], effort: Effort) -> list[Measurement]:
    """A product with what follows it in a layer, too little to divide one device's among cores, on 1, 2, 4, ..."""
    found: list[Measurement] = []
    for count in sorted({2**i for i in range(len(devices).bit_length())} | {len(devices)}):
        step = _on_each(lambda y, w: jax.nn.softmax(jnp.tanh(y @ w)), devices[:count])
        x = _made(lambda: jnp.ones((count * _SMALL, _SMALL), jnp.float32), devices[:count])  # noqa: B023
        measured = Measurement(
            what="at once",
            dtype="float32",
            nbytes=3 * x.nbytes // count,
            seconds=_looped_s(step, (x, x), effort),
            flops=2.0 * _SMALL**3,
            group_size=count,
        )
        found.append(measured)
    return found


def _dispatches(devices: Sequence[Any], _: Effort) -> list[Measurement]:
    """The call of an executable that does next to nothing, until it returns, all work before it being done."""
    step = jax.jit(_on_each(lambda x: x + 1.0, devices))
    x = _made(lambda: jnp.ones(len(devices), jnp.float32), devices)
    jax.block_until_ready(step(x))

    def seconds() -> float:
        start = time.perf_counter()
        result = step(x)
        passed_s = time.perf_counter() - start
        jax.block_until_ready(result)
        return passed_s

    median_s = statistics.median(seconds() for _ in range(_CALLS))
    return [Measurement(what="dispatch", dtype="float32", nbytes=4, seconds=median_s)]


def _executions(devices: Sequence[Any], _: Effort) -> list[Measurement]:
    """Measure the seconds that products take longer as executables in a row than as one, with the host ahead."""
    each = _on_each(lambda x, others: (jax.nn.softmax(x @ x), [y + 1.0 for y in others]), devices)
    others = [_made(lambda: jnp.ones(len(devices), jnp.float32), devices)] * _ARRAYS
    one = jax.jit(each)

    def seconds(step: Callable[..., Any], carried: Any, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            carried = step(*carried)
        jax.block_until_ready(carried)
        return time.perf_counter() - start

    def begun(rows: int) -> tuple[Any, ...]:
        carried = _made(lambda: jnp.ones((len(devices) * rows, rows), jnp.float32), devices), others
        seconds(one, carried, 1)  # compiles
        return carried

    rows = _IN_A_ROW
    carried = begun(rows)
    while rows < _MOST_IN_A_ROW and min(seconds(one, carried, 4) for _ in range(3)) < 4 * _AHEAD_S:
        rows *= 2
        carried = begun(rows)

    @jax.jit
    def row(*carried: Any) -> Any:
        for _ in range(_ROW):
            carried = lax.optimization_barrier(each(*carried))
        return carried

    seconds(row, carried, 2)
    longer_s = [seconds(one, carried, 2 * _ROW) - seconds(row, carried, 2) for _ in range(_PAIRS)]
    taken_s = max(statistics.median(longer_s), 0.0) / (2 * _ROW - 2)
    return [Measurement(what="execution", dtype="float32", nbytes=4 * _ARRAYS, seconds=taken_s)]


def _on_each(step: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """The step on every device at once, each on its own part of the arguments."""
    return jax.shard_map(step, mesh=Mesh(np.array(devices), (_AXIS,)), in_specs=P(_AXIS), out_specs=P(_AXIS))


def _made(make: Callable[[], jax.Array], devices: Sequence[Any]) -> jax.Array:
    """Make the arrays of `make`, equally many rows on each device."""
    return jax.jit(make, out_shardings=NamedSharding(Mesh(np.array(devices), (_AXIS,)), P(_AXIS)))()


def _transfers(source: Any, target: Any, effort: Effort) -> list[Measurement]:
    def measured(nbytes: int) -> Measurement:
        x = jax.device_put(jnp.ones(nbytes // 4, jnp.float32), source)
        seconds = fastest_s(lambda count: [jax.device_put(x, target) for _ in range(count)], effort)
        return Measurement(what="transfer", dtype="float32", nbytes=x.nbytes, seconds=seconds, group_size=2)

    return list(_growing((2**12 * 4**i for i in range(12)), measured, effort))


def _collectives(kind: str, devices: Sequence[Any], group: int, effort: Effort) -> list[Measurement]:
    mesh = Mesh(np.array(devices).reshape(-1, group), (_GROUPS, _AXIS))
    split = P((_GROUPS, _AXIS))

    def measured(nbytes: int) -> Measurement:
        # The smaller side of a gather is what a device holds before it.
        held = nbytes // group if kind == "all-gather" else nbytes
        zeros = jnp.zeros((len(devices), held // 4 // group, group), jnp.float32)
        x = jax.device_put(zeros, NamedSharding(mesh, split))
        step = jax.shard_map(_EXCHANGES[kind], mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        seconds = _looped_s(step, (x,), effort)
        return Measurement(what=kind, dtype="float32", nbytes=nbytes, seconds=seconds, group_size=group)

    # Multiples of 4 bytes · group² are dealt out evenly, whatever the number of devices.
    least = 4 * group**3
    start = least * max(1, 2**14 // least)
    return list(_growing((start * 4**i for i in range(12)), measured, effort))


# Each keeps the shape of what a device holds, so that the next can follow it. Zeros stay zeros.
def _all_reduce(x: jax.Array) -> jax.Array:
    return lax.psum(x, _AXIS)


def _all_gather(x: jax.Array) -> jax.Array:
    whole = lax.optimization_barrier(lax.all_gather(x, _AXIS, tiled=True))
    return whole[: x.shape[0]]


def _reduce_scatter(x: jax.Array) -> jax.Array:
    part = lax.psum_scatter(x, _AXIS, scatter_dimension=2, tiled=True)
    return lax.dynamic_update_slice(x, part, (0, 0, 0))


def _all_to_all(x: jax.Array) -> jax.Array:
    return lax.all_to_all(x, _AXIS, split_axis=2, concat_axis=2, tiled=True)


def _permute(x: jax.Array) -> jax.Array:
    size = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(i, (i + 1) % size) for i in range(size)])


_EXCHANGES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
}


def _growing(
    sizes: Any, measured: Callable[[int], Measurement], effort: Effort, *, more: int = 1
) -> Iterator[Measurement]:
    """Measurements of growing sizes, two at least, until one takes long enough or there are enough."""
    for number, size in enumerate(sizes):
        found = measured(size)
        yield found
        if number + 1 >= effort.max_sizes * more or (number and found.seconds > effort.run_s):
            return


def _looped_s(
    step: Callable[..., Any], arguments: tuple[Any, ...], effort: Effort, works: int = _WORKS_IN_A_ROUND
) -> float:
    """Seconds of one of many steps, each of which takes the place of the first argument; so many are in a round."""
    device = next(iter(jax.tree.leaves(arguments)[0].devices()))
    works = 1 if device.platform == "cpu" else works

    @jax.jit
    def loop(count: Any, first: Any, *others: jax.Array) -> Any:
        def several(_: Any, x: Any) -> Any:
            for _ in range(works):
                # Without the barrier, one step might be fused with the next.
                x = lax.optimization_barrier(step(x, *others))
            return x

        return lax.fori_loop(0, count, several, first)

    return fastest_s(lambda count: loop(count, *arguments), effort) / works


def fastest_s(run: Callable[[int], Any], effort: Effort) -> float:
    """Seconds of one more round of `run`: of as many as take about `loop_s`, against a third of them.

    What a loop takes to begin is in both: to launch it, and to get memory, which is much for large arrays on a CPU.
    """

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(count))
        return time.perf_counter() - start

    seconds(1)  # compiles
    once_s = _slope_s([(count, seconds(count)) for count in (1, 4)])
    count = max(3, min(10_000, round(effort.loop_s / once_s)))
    return _slope_s([(n, min(seconds(n) for _ in range(_REPETITIONS))) for n in (count // 3, count)])


def _slope_s(totals: Sequence[tuple[int, float]]) -> float:
    """Seconds of one more round, from a few and from more of them; their mean if the more took less time."""
    (few, few_s), (more, more_s) = totals
    return (more_s - few_s) / (more - few) if more_s > few_s else more_s / more
