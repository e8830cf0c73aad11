"""Measure what `parallelize` costs where there is nothing to gain: against `jax.jit`, and per instruction.

    python -m benchmarks.overhead --json overhead.json

A comparison times one step of each contestant in turn, the order reversed every time, from the call, with a
batch on the host, until the new state is ready. The figure is the median of the ratios of neighbours, which
slow changes of the machine's speed leave alone, with the 95 % interval of that median by order statistics:
nothing is assumed of how the times are distributed.

Of the call itself, until it returns, there is a comparison with 10, 100 and 1,000 arrays of state on one
device: such a step computes next to nothing, and the state is ready before each call.

The driver's time per instruction is the host's time from the call of a pipelined step until it returns,
divided by the number of instructions of all meshes. The tensors are tiny, earlier work is done, and nothing
is waited for. Of the same step, in CPU seconds until its state is ready, is what an executable costs for each
of its devices: hardly anything is computed, and other processes leave it alone.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if "XLA_FLAGS" not in os.environ:  # This only adds devices to the CPU; accelerators are used where there are any.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import autopar
from autopar.ir.program import Run

TARGET_RATIO = 1.02
TARGET_DISPATCH_RATIO = 1.15
NUMBERS_OF_LEAVES = (10, 100, 1000)
Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    name: str
    plain_ms: float  # median
    autopar_ms: float  # median
    ratio: float  # median of the ratios of neighbours
    interval: tuple[float, float]  # 95 % of that median
    target: float = TARGET_RATIO


@dataclass(frozen=True, kw_only=True)
class DriverTime:
    num_instructions: int
    us_per_instruction: float  # median over steps
    interval: tuple[float, float]
    cpu_us_per_execution: float  # of one executable on one device: median over steps
    jit_call_us: float  # yardstick: one call of a jitted function on the devices of one stage, measured in turn


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=300, help="pairs of steps per comparison")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    comparisons = [compare_one_device(args.repetitions), compare_data_parallel(args.repetitions)]
    comparisons += [compare_dispatch(number, args.repetitions) for number in NUMBERS_OF_LEAVES]
    driver = time_driver(args.repetitions)
    print_tables(comparisons, driver)
    if args.json:
        result = {
            "machine": describe_machine(),
            "repetitions": args.repetitions,
            "comparisons": [asdict(comparison) for comparison in comparisons],
            "driver": asdict(driver),
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def compare_one_device(repetitions: int) -> Comparison:
    step, create_state, batch = make_step(width=384, num_layers=8, batch_size=384)
    ours = autopar.parallelize(step, method=autopar.DataParallel(), donate_argnums=(0,), devices=jax.devices()[:1])
    plain = jax.jit(step, donate_argnums=0)
    times = time_pairs(plain, ours, create_state, batch, repetitions)
    return compare("one device, against jax.jit", times)


def compare_data_parallel(repetitions: int) -> Comparison:
    step, create_state, batch = make_step(width=256, num_layers=8, batch_size=512)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    plain = jax.jit(step, donate_argnums=0, in_shardings=(whole, split), out_shardings=whole)
    ours = autopar.parallelize(step, method=autopar.DataParallel(), donate_argnums=(0,))
    times = time_pairs(plain, ours, create_state, batch, repetitions)
    return compare(f"data parallel on {jax.device_count()} devices, against jit with shardings", times)


def compare_dispatch(num_leaves: int, repetitions: int) -> Comparison:
    """The call of a step with so many arrays of state, until it returns."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return [leaf + 0.5 for leaf in state], {"loss": jnp.sum(batch)}

    def create_state() -> Any:
        return [jnp.ones(4) for _ in range(num_leaves)]

    ours = autopar.parallelize(step, batch_argnums=(), devices=jax.devices()[:1])
    pairs = time_pairs(jax.jit(step), ours, create_state, jnp.ones(8), repetitions, until_ready=False)
    return compare(f"dispatch with {num_leaves} leaves, against jax.jit", pairs, TARGET_DISPATCH_RATIO)


def make_step(*, width: int, num_layers: int, batch_size: int) -> tuple[Step, Callable[[], Any], Any]:
    """A perceptron under AdamW: a step, a function that creates its state, and a batch on the host."""
    tx = optax.adamw(1e-4)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for layer in params:
            h = h + jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h - batch["y"]) ** 2)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(width, width), scale=width**-0.5).astype(np.float32) for _ in range(num_layers)]
    x, y = rng.normal(size=(2, batch_size, width)).astype(np.float32)

    def create_state() -> Any:
        params = [{"w": jnp.asarray(w), "b": jnp.zeros(width)} for w in weights]
        return params, tx.init(params)

    return step, create_state, {"x": x, "y": y}


def time_pairs(
    plain: Step,
    ours: Step,
    create_state: Callable[[], Any],
    batch: Any,
    repetitions: int,
    *,
    until_ready: bool = True,
) -> list[tuple[float, float]]:
    """Seconds of one step of each, or of its call alone, taken in turn; who begins alternates."""
    states = {0: create_state(), 1: create_state()}
    steps = (plain, ours)

    def time_step(i: int) -> float:
        start = time.perf_counter()
        states[i], metrics = steps[i](states[i], batch)
        called = time.perf_counter()
        jax.block_until_ready((states[i], metrics))
        return (time.perf_counter() if until_ready else called) - start

    for _ in range(3):  # compile, then settle
        time_step(0), time_step(1)
    pairs = []
    for repetition in range(repetitions):
        order = (0, 1) if repetition % 2 else (1, 0)
        seconds = {i: time_step(i) for i in order}
        pairs.append((seconds[0], seconds[1]))
    return pairs


def compare(name: str, pairs: list[tuple[float, float]], target: float = TARGET_RATIO) -> Comparison:
    ratio, interval = median_interval([ours / plain for plain, ours in pairs])
    return Comparison(
        name=name,
        plain_ms=1e3 * statistics.median(plain for plain, _ in pairs),
        autopar_ms=1e3 * statistics.median(ours for _, ours in pairs),
        ratio=ratio,
        interval=interval,
        target=target,
    )


def median_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median and its 95 % interval: the number of values below the true median is binomial(n, 1/2)."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5
    low, high = max(0, int(n / 2 - reach)), min(n - 1, int(n / 2 + reach))
    return statistics.median(ordered), (ordered[low], ordered[high])


def time_driver(repetitions: int) -> DriverTime:
    """Host time per instruction of a two-stage pipeline of eight microbatches."""
    step, create_state, batch = make_step(width=8, num_layers=4, batch_size=64)
    ours = autopar.parallelize(
        step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=8), donate_argnums=(0,)
    )
    state = create_state()
    program = ours.trace(state, batch).plan().lower().program
    num_instructions = sum(len(mesh.instructions) for mesh in program.meshes)
    num_executions = sum(
        len(mesh.devices) for mesh in program.meshes for each in mesh.instructions if isinstance(each, Run)
    )
    stage_devices = jax.devices()[: max(1, jax.device_count() // 2)]
    call, x = jit_on(stage_devices)
    seconds, cpu_seconds, yardstick = [], [], []
    for _ in range(3 + repetitions):  # the first three compile and settle
        start, cpu_start = time.perf_counter(), time.process_time()
        state, metrics = ours(state, batch)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready((state, metrics))
        cpu_seconds.append(time.process_time() - cpu_start)
        start = time.perf_counter()
        y = call(x)
        yardstick.append(time.perf_counter() - start)
        y.block_until_ready()
    per_instruction = [1e6 * s / num_instructions for s in seconds[3:]]
    median, interval = median_interval(per_instruction)
    return DriverTime(
        num_instructions=num_instructions,
        us_per_instruction=median,
        interval=interval,
        cpu_us_per_execution=1e6 * statistics.median(cpu_seconds[3:]) / num_executions,
        jit_call_us=1e6 * statistics.median(yardstick[3:]),
    )


def jit_on(devices: Sequence[jax.Device]) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """A jitted multiplication of small arrays split over the devices, and an argument for it."""
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    split = NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(lambda x: x * 2), jax.device_put(jnp.ones((len(devices), 8)), split)


def describe_machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "num_devices": jax.device_count(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def print_tables(comparisons: Sequence[Comparison], driver: DriverTime) -> None:
    console = Console()
    table = Table(title="One step, medians")
    for column in ("", "plain ms", "autopar ms", "ratio", "95 % interval", "target"):
        table.add_column(column, justify="left" if not column else "right")
    for c in comparisons:
        interval = f"{c.interval[0]:.3f} - {c.interval[1]:.3f}"
        row = (f"{c.plain_ms:.2f}", f"{c.autopar_ms:.2f}", f"{c.ratio:.3f}", interval, f"<= {c.target:.2f}")
        table.add_row(c.name, *row)
    console.print(table)
    low, high = driver.interval
    console.print(
        f"Driver: {driver.us_per_instruction:.1f} us per instruction (95 % interval {low:.1f} - {high:.1f}),"
        f" {driver.num_instructions} instructions per step, {driver.cpu_us_per_execution:.1f} us of CPU time for an"
        " executable and each of its devices; one jitted call on a stage's devices takes"
        f" {driver.jit_call_us:.1f} us.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
