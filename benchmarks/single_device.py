"""One device, where there is nothing to gain: a GPT's step beside `jax.jit`'s, and its products beside their model.

    python -m benchmarks.single_device --json single_device.json                 # GPT-350M in bfloat16: needs a GPU
    python -m benchmarks.single_device --layers 2 --width 64 --heads 2 --length 32 --batch 2 --repetitions 5

Steps are timed as in `benchmarks.overhead`. The products are those of a layer and of the head: each with the one that
brings its result back to the shape of its operand, so that a compiled loop can go round them; modelled by the figures
of the device's machine, or of a file that `autopar calibrate` wrote.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import autopar
from autopar.hardware.machine import Machine
from autopar.hardware.measure import Effort, fastest_s
from benchmarks.models.alpa_gpt import GPT_SIZES, GPTSize, alpa_gpt
from benchmarks.overhead import Comparison, compare, describe_machine, time_pairs

TARGET_RATIO = 1.01
EFFORT = Effort(run_s=0.02, loop_s=0.2, max_sizes=1, dtypes=())
"""Bounds on the time of each product: only `loop_s` matters where shapes are given."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """[rows, inner] @ [inner, columns] and the way back: what both take, as measured and as modelled."""

    what: str
    rows: int
    inner: int
    columns: int
    measured_us: float
    modelled_us: float

    @property
    def error(self) -> float:
        """The excess of the modelled time over the measured one, as a share of that."""
        return self.modelled_us / self.measured_us - 1


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(GPT_SIZES), default="350M")
    for name in ("layers", "width", "heads", "length", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="instead of the size's own")
    parser.add_argument("--batch", type=int, default=16, metavar="N")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=50, help="pairs of steps")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="written by `autopar calibrate --json`")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in ("layers", "width", "heads", "length", "vocabulary", "batch")}
    size = replace(GPT_SIZES[args.size], **{name: value for name, value in given.items() if value is not None})
    machine = machine_of(jax.devices()[0].device_kind, args.figures)
    comparison = compare_steps(size, args.dtype, args.repetitions)
    products = [*measured_products(size, args.dtype, machine)]
    print_tables(comparison, products)
    if args.json:
        result = {"machine": describe_machine(), "size": asdict(size), "dtype": args.dtype, "figures": machine.name}
        result |= {"step": asdict(comparison), "products": [asdict(each) | {"error": each.error} for each in products]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def machine_of(device_kind: str, figures: Path | None) -> Machine:
    """The machine whose figures the products are modelled by."""
    if figures is None:
        return Machine.of_kind(device_kind)
    return autopar.Cluster.load(figures).machine


def compare_steps(size: GPTSize, dtype: str, repetitions: int) -> Comparison:
    """A step on one device by `parallelize`, and by `jax.jit`."""
    name = f"GPT, {size.layers} layers of width {size.width}, {size.batch} x {size.length} tokens, {dtype}"
    model = alpa_gpt(name, size, jnp.dtype(dtype))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return model.step(state, batch)

    one = jax.devices()[:1]
    ours = autopar.parallelize(step, method=autopar.Auto(), donate_argnums=(0,), devices=one)
    times = time_pairs(
        jax.jit(step, donate_argnums=0), ours, model.draw_state, jax.device_put(model.create_batch()), repetitions
    )
    return replace(compare(name, times), target=TARGET_RATIO)


def measured_products(size: GPTSize, dtype: str, machine: Machine) -> Iterator[Product]:
    """The products of a step: forward, and those of the backward pass that differ in shape."""
    tokens, width = size.batch * size.length, size.width
    shapes = {
        "queries, keys, values": (tokens, width, 3 * width),
        "out": (tokens, width, width),
        "up, down": (tokens, width, 4 * width),
        "head": (tokens, width, size.vocabulary),
        "gradient of queries, keys, values": (width, tokens, 3 * width),
        "gradient of out": (width, tokens, width),
        "gradient of up, down": (width, tokens, 4 * width),
        "one sequence, up, down": (size.length, width, 4 * width),
        "a quarter of up, down": (tokens, width, width // 4),
    }
    for what, (rows, inner, columns) in shapes.items():
        nbytes = jnp.dtype(dtype).itemsize * (rows * inner + inner * columns + rows * columns)
        modelled_s = 2 * machine.matmul_s(2.0 * rows * inner * columns, nbytes, dtype)
        yield Product(
            what=what,
            rows=rows,
            inner=inner,
            columns=columns,
            measured_us=1e6 * there_and_back_s(rows, inner, columns, dtype),
            modelled_us=1e6 * modelled_s,
        )


def there_and_back_s(rows: int, inner: int, columns: int, dtype: str) -> float:
    """Seconds of x @ w @ v, of many in one loop."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inner)).astype(dtype)
    w = (jax.random.normal(keys[1], (inner, columns)) / inner**0.5).astype(dtype)
    v = (jax.random.normal(keys[2], (columns, inner)) / columns**0.5).astype(dtype)

    @jax.jit
    def loop(count: Any, x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, y: y @ w @ v, x)

    return fastest_s(lambda count: loop(count, x, w, v), EFFORT)


def print_tables(comparison: Comparison, products: Sequence[Product]) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    low, high = comparison.interval
    console.print(
        f"{comparison.name}: jax.jit {comparison.plain_ms:.2f} ms, parallelize {comparison.autopar_ms:.2f} ms, ratio "
        f"{comparison.ratio:.4f} (95 % {low:.4f} to {high:.4f}; at most {comparison.target:.2f} is asked)"
    )
    table = Table(title="Products, there and back")
    for column in ("", "rows", "inner", "columns", "measured µs", "modelled µs", "error"):
        table.add_column(column, justify="right" if column else "left")
    for each in products:
        sizes = map(str, (each.rows, each.inner, each.columns))
        table.add_row(each.what, *sizes, f"{each.measured_us:.1f}", f"{each.modelled_us:.1f}", f"{each.error:+.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
