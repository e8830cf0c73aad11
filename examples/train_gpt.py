"""Train a small GPT on Python's own source files by the plan that a search finds, beside plain `jax.jit`.

    python examples/train_gpt.py --output demo                                  what Auto() finds, and why
    python examples/train_gpt.py --stages 2 --microbatches 4 --schedule 1f1b    a pipeline by hand
    python examples/train_gpt.py --cluster ray --hosts 4 --devices-per-host 2

Without accelerators it makes 8 virtual CPU devices, which show that the numbers are right, not a speed-up. On a Ray
cluster every stage runs in processes of its own, and the same plan is run in this process afterwards, to compare.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if "XLA_FLAGS" not in os.environ:  # This only adds devices to the CPU; accelerators are used where there are any.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parent))  # so that it runs as a script and as a module
from corpus import VOCABULARY, draw_batches, read_standard_library

import autopar

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 32, 64, 128, 4, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool)
        h = nn.LayerNorm(name="ln_1")(x)
        # No biases: a key's has no effect, so its gradient is rounding, which Adam turns into full steps.
        attend = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=False, name="attention")
        x = x + attend(h, h, mask=mask)
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="ln_2")(x)))
        return x + nn.Dense(WIDTH, name="down")(h)


class GPT(nn.Module):
    """Remat per block; the embedding is also the output layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=nn.initializers.normal(0.02), name="embed")
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for i in range(LAYERS):
            x = nn.remat(Block)(name=f"h_{i}")(x)
        return embed.attend(nn.LayerNorm(name="ln_f")(x))


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step as written for one device: nothing in it knows of stages, microbatches or devices."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def create_state() -> TrainState:
    model = GPT()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, weight_decay=0.01))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    console = Console()
    if args.cluster == "ray":
        autopar.init(cluster="ray", num_hosts=args.hosts, devices_per_host=args.devices_per_host)
    write = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    method = autopar.Auto()
    if args.stages is not None:
        method = autopar.PipelineParallel(
            num_stages=args.stages, num_microbatches=args.microbatches, schedule=args.schedule
        )
    step = autopar.parallelize(train_step, method=method)
    text = read_standard_library()
    batches = draw_batches(text, num_batches=args.steps, batch_size=BATCH, length=LENGTH)
    first = create_state()
    planned = step.trace(first, batches[0]).plan()
    plan = planned.plan
    where = f"{args.hosts} Ray processes" if args.cluster == "ray" else f"{jax.devices()[0].platform} devices here"
    write(f"{len(text):,} bytes of Python source, {plan.num_devices} devices: {where}")
    write(str(planned))
    other = explain(planned, write) if args.output else None

    compiled = planned.lower().compile()  # the step that runs is the one that is shown
    state, loss, seconds = train(compiled, first, batches, console, "autopar")
    params, local_loss = jax.device_get(state.params), loss
    if args.cluster == "ray":
        autopar.shutdown()
        here = autopar.parallelize(train_step, method=plan, devices=jax.devices()[: plan.num_devices])
        compiled = here.trace(first, batches[0]).plan().lower().compile()
        state, local_loss, _ = train(compiled, first, batches, console, "in process")
    plain_step = jax.jit(train_step, donate_argnums=0)
    reference, reference_loss, _ = train(plain_step, first, batches, console, "jax.jit")
    result = {
        "loss": loss,
        "reference_loss": reference_loss,
        "max_loss_diff": max(abs(a - b) / abs(b) for a, b in zip(loss, reference_loss, strict=True)),
        "max_param_diff": largest_difference(params, reference.params),
        # The first step compiles: the rate is that of the later ones.
        "tokens_per_s": BATCH * LENGTH / float(np.median(seconds[1:] or seconds)),
        "plan": json.loads(plan.to_json()),
    }
    write(f"loss {loss[0]:.4f} -> {loss[-1]:.4f} in {args.steps} steps, {result['tokens_per_s']:,.0f} tokens/s")
    write("largest difference from plain jax.jit on one device:")
    write(f"  loss       {result['max_loss_diff']:.1e} (relative, over all steps)")
    write(f"  parameters {result['max_param_diff']:.1e} (absolute, after the last step)")
    if args.cluster == "ray":
        result["max_loss_diff_in_process"] = max(abs(a - b) / abs(b) for a, b in zip(loss, local_loss, strict=True))
        result["max_param_diff_in_process"] = largest_difference(params, state.params)
        write("largest difference from the same plan in one process:")
        write(f"  loss       {result['max_loss_diff_in_process']:.1e} (relative, over all steps)")
        write(f"  parameters {result['max_param_diff_in_process']:.1e} (absolute, after the last step)")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        state, _ = compiled.timeline(args.output / "trace.json", state, batches[0])
        write(f"{args.output / 'trace.json'}: the step, measured beside predicted, for https://ui.perfetto.dev")
        _, times = compiled.measure(state, batches[0])
        page = planned.view(args.output / "plan.html", answers=[other] if other else [], measured=times)
        write(f"{page}: the plan as a page for the browser, with the measured step")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def explain(planned: autopar.Planned, write: Callable[[str], None]) -> Any:
    """Print why the plan is as it is, and how another one would differ; return that difference."""
    searched = planned.plan.certificate
    if searched is not None:
        for words, seconds in (each for each in searched.runners_up if each[1] > searched.step_time_s):
            write(f"not {words}: {1e3 * seconds:.4g} ms")
    traced_to = [each for each in planned.plan.planned_collectives if each.line]
    if traced_to:
        write(f"\nWhat communicates longest, and why:\n{planned.explain(max(traced_to, key=_seconds).line)}")
    other = planned.what_if(method=autopar.DataParallel())
    write(f"\nWith DataParallel() instead: {other.headline()}")
    return other


def _seconds(collective: Any) -> float:
    return collective.seconds


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", type=int, help="of a pipeline by hand, in place of a search")
    parser.add_argument("--microbatches", type=int, default=4)
    schedules = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble")
    parser.add_argument("--schedule", default="1f1b", choices=schedules)
    parser.add_argument("--cluster", default="local", choices=("local", "ray"))
    parser.add_argument("--hosts", type=int, default=4, help="processes on the Ray cluster")
    parser.add_argument("--devices-per-host", type=int, default=2, help="devices of each of them")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the plan's page and a trace there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write losses, differences and plan here")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; at least 1 is needed.")
    return args


def train(
    step: Callable[..., Any], state: TrainState, batches: list[np.ndarray], console: Console, label: str
) -> tuple[TrainState, list[float], list[float]]:
    """All steps; the final state, and the loss and the seconds of every step."""
    losses, seconds = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[status]}"), console=console) as progress:
        bar = progress.add_task(f"{label:8}", total=len(batches), status="compiling")
        for batch in batches:
            start = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))  # waits for the step
            seconds.append(time.perf_counter() - start)
            status = f"loss {losses[-1]:.4f}, {batch.shape[0] * LENGTH / seconds[-1]:,.0f} tokens/s"
            progress.update(bar, advance=1, status=status)
    return state, losses, seconds


def largest_difference(first: Any, second: Any) -> float:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


if __name__ == "__main__":
    main()
