"""Random train steps, each beside plain `jax.jit` under six methods: what is right, refused, wrong or raised raw.

python -m benchmarks.random_steps [--count 500] [--first 0] [--rotate] [--minutes 8] [--json FILE]

A step is traced once and held beside one run of `jax.jit`. The file has one line for each step, written when it is
done; steps that it holds are not drawn again.

A step is drawn from a seed: operations in a row, each on its predecessor and on a weight of a pool (so that weights are
tied), a loss or several, an optimizer, and the sizes, which need not divide. Everything is float64 but for casts to
bfloat16 within some steps. A refusal is an `AutoparError` with its reason; anything else that is raised is raw.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from benchmarks.cheap_compilation import cheap_xla_flags

METHODS: Mapping[str, Any] = {
    "data": autopar.DataParallel(),
    "microbatches": autopar.DataParallel(num_microbatches=2),
    "pipeline": autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    "auto": autopar.Auto(num_stages=1, num_microbatches=1),
    "auto in stages": autopar.Auto(num_stages=2, num_microbatches=2),
    "zero": autopar.Zero(stage=3),
}
ROWS, WIDTHS, TOKENS, POOL = (4, 8, 12, 6), (4, 8, 6), 11, 2
TOLERANCE = {"float64": 1e-9, "bfloat16": 0.1}
"""The largest difference as a part of the largest element of a result; steps with bfloat16 round after every sum."""


@dataclass(frozen=True, kw_only=True)
class RandomStep:
    """A drawn step; printed, it is all that is needed to draw it again."""

    seed: int
    rows: int
    width: int
    operations: tuple[tuple[str, int], ...]
    """Names, each with the number of its weight."""
    region: str
    structure: str
    optimizer: str

    @property
    def precision(self) -> str:
        """The least precision that a step computes in."""
        return "bfloat16" if any(name == "bfloat16" for name, _ in self.operations) else "float64"


def draw(seed: int) -> RandomStep:
    """Return the step of a seed."""
    rng = Random(seed)
    return RandomStep(
        seed=seed,
        rows=rng.choice(ROWS),
        width=rng.choice(WIDTHS),
        operations=tuple((rng.choice(list(OPERATIONS)), rng.randrange(POOL)) for _ in range(rng.randint(2, 6))),
        region=rng.choice(["plain", "plain", "remat", "jit"]),
        structure=rng.choice(list(STRUCTURES)),
        optimizer=rng.choice(["sgd", "adam", "clipped"]),
    )


def _convolution(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    image = x.reshape(x.shape[0], -1, 2)
    out = jax.lax.conv_general_dilated(image, p["kernel"][k], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(out.reshape(x.shape))


def _scatter(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    return x + jnp.zeros_like(x).at[jnp.arange(x.shape[0]), b["label"] % x.shape[1]].add(x[:, 0])


def _top(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    values, places = jax.lax.top_k(x, 2)
    return x + jnp.sum(values, -1, keepdims=True) * jax.nn.one_hot(places[:, 0], x.shape[1], dtype=x.dtype)


def _batch_norm(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 0.1) * p["bias"][k]


def _dropout(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(5), k), 0.8, x.shape)
    return jnp.where(keep, x / 0.8, 0.0)


def _scan(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    return jax.lax.scan(lambda h, w: (h + 0.3 * jnp.tanh(h @ w), None), x, p["stack"][k])[0]


def _while(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    count = jax.lax.while_loop(lambda i: i * i < 10, lambda i: i + 1, jnp.int32(k))
    return x * (1 + 0.1 * count)


def _cond(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    return jax.lax.cond(p["bias"][k][0] > 0, lambda h: jnp.tanh(h @ p["matrix"][k]), jnp.sin, x)


def _bfloat16(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    return jnp.tanh(x.astype(jnp.bfloat16) @ p["matrix"][k].astype(jnp.bfloat16)).astype(x.dtype)


def _attention(p: Any, x: jax.Array, b: Any, k: int) -> jax.Array:
    h = x.reshape(x.shape[0], -1, 2)
    scores = jax.nn.softmax(h @ jnp.swapaxes(h, 1, 2))
    return (scores @ h).reshape(x.shape)


OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "dense": lambda p, x, b, k: jnp.tanh(x @ p["matrix"][k] + p["bias"][k]),
    "residual": lambda p, x, b, k: x + 0.3 * jax.nn.gelu(x @ p["matrix"][k]),
    "transposed": lambda p, x, b, k: 0.5 * x @ p["matrix"][k].T,
    "embed": lambda p, x, b, k: x + p["table"][b["label"]],
    "layer norm": lambda p, x, b, k: (x - x.mean(-1, keepdims=True)) * p["bias"][k],
    "convolution": _convolution,
    "scatter": _scatter,
    "top k": _top,
    "sort": lambda p, x, b, k: jnp.sort(x, axis=-1),
    "batch norm": _batch_norm,
    "dropout": _dropout,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "bfloat16": _bfloat16,
    "attention": _attention,
    "cumulative": lambda p, x, b, k: jnp.tanh(jnp.cumsum(x, axis=1)),
}


def _one_gradient(loss: Any, update: Any, state: Any, b: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(state[0], b)
    return update(state, grads), value


def _two_gradients(loss: Any, update: Any, state: Any, b: Any) -> Any:
    state, first = _one_gradient(loss, update, state, b)
    state, second = _one_gradient(loss, update, state, {**b, "x": jnp.cos(b["x"])})
    return state, (first, second)


def _attack(loss: Any, update: Any, state: Any, b: Any) -> Any:
    moved = b["x"] + 0.1 * jnp.sign(jax.grad(lambda x: loss(state[0], {**b, "x": x}))(b["x"]))
    return _one_gradient(loss, update, state, {**b, "x": moved})


def _penalty(loss: Any, update: Any, state: Any, b: Any) -> Any:
    def penalized(p: Any, b: Any) -> jax.Array:
        grads = jax.grad(lambda x: jnp.sum(b["y"] * x) + loss(p, {**b, "x": x}))(b["x"])
        return loss(p, b) + 0.1 * jnp.mean(grads**2)

    return _one_gradient(penalized, update, state, b)


def _epochs(loss: Any, update: Any, state: Any, b: Any) -> Any:
    return jax.lax.scan(lambda s, _: _one_gradient(loss, update, s, b), state, None, length=2)


def _two_losses(loss: Any, update: Any, state: Any, b: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(state[0], b)
    other = jax.grad(loss)(state[0], {**b, "x": jnp.cos(b["x"])})
    return update(state, jax.tree.map(jnp.add, grads, other)), value


STRUCTURES: dict[str, Callable[..., Any]] = {
    "one gradient": _one_gradient,
    "one after another": _two_gradients,
    "two losses": _two_losses,
    "attack": _attack,
    "penalty": _penalty,
    "epochs": _epochs,
}
_OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-2, eps=1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
}


def arguments(step: RandomStep) -> tuple[Any, Any]:
    """Return the state and the batch of a step."""
    rng = np.random.default_rng(step.seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float64)

    n = step.width
    params = {
        "matrix": [normal(n, n) for _ in range(POOL)],
        "bias": [1 + normal(n) for _ in range(POOL)],
        "kernel": [normal(3, 2, 2) for _ in range(POOL)],
        "stack": [normal(2, n, n) for _ in range(POOL)],
        "table": normal(TOKENS, n),
        "head": normal(n, n),
    }
    batch = {
        "x": normal(step.rows, n),
        "y": normal(step.rows, n),
        "label": jnp.asarray(rng.integers(0, TOKENS, step.rows), jnp.int32),
    }
    return (params, _OPTIMIZERS[step.optimizer].init(params)), batch


def make_step(step: RandomStep) -> Callable[..., Any]:
    """Return the train step `(state, batch) -> (state, losses)`."""
    optimizer = _OPTIMIZERS[step.optimizer]

    def loss(p: Any, b: Any) -> jax.Array:
        h = b["x"]
        for name, k in step.operations:
            h = OPERATIONS[name](p, h, b, k)
        return jnp.mean((h @ p["head"] - b["y"]) ** 2)

    def update(state: Any, grads: Any) -> Any:
        updates, moments = optimizer.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), moments

    region = {"plain": lambda f: f, "remat": jax.checkpoint, "jit": jax.jit}[step.region]

    def train_step(state: Any, batch: Any) -> Any:
        return STRUCTURES[step.structure](region(loss), update, state, batch)

    return train_step


def verdicts(step: RandomStep, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield for each method its name, "right", "wrong", "refused" or "raw", and what there is to say about it."""
    function, args = make_step(step), arguments(step)
    want = jax.tree.leaves(jax.jit(function)(*args))
    devices = jax.devices()[: 2 if step.rows % 4 else 4]
    traced: autopar.Traced | None = None
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if traced is None:
                    traced = autopar.parallelize(function, batch_argnums=1, devices=devices).trace(*args)
                got = jax.tree.leaves(traced.plan(METHODS[name]).lower().compile()(*args))
        except autopar.AutoparError as error:
            yield name, "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            yield name, "raw", f"{type(error).__name__}: {error}"
        else:
            off = max(_difference(a, b) for a, b in zip(got, want, strict=True))
            yield name, "right" if off <= TOLERANCE[step.precision] else "wrong", f"off by {off:.1e}"


def _difference(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b), initial=0.0) / max(1.0, np.max(np.abs(b), initial=0.0)))


def main() -> None:
    """Try every step with every method, and count the verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", type=Path, help="one line for each step; those that it holds are not drawn again")
    parser.add_argument("--rotate", action="store_true", help="one method for each step, in turn")
    parser.add_argument("--minutes", type=float, default=math.inf, help="draw no further step after so long")
    options = parser.parse_args()
    rows = read_rows(options.json) if options.json and options.json.exists() else []
    known, end = {row["seed"] for row in rows}, time.monotonic() + 60 * options.minutes
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() > end:
            break
        if seed in known:
            continue
        names = [list(METHODS)[seed % len(METHODS)]] if options.rotate else list(METHODS)
        rows.append(_row(draw(seed), names))
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        if len(rows) % 20 == 0:  # what is compiled of one step is of no use to others
            jax.clear_caches()
    _print_counts(rows)
    if any(result in ("wrong", "raw") for row in rows for result in row["verdicts"].values()):
        raise SystemExit(1)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file: the seed of a step, and by method its verdict and the reason of a refusal."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _row(step: RandomStep, names: Sequence[str]) -> dict[str, Any]:
    found = list(verdicts(step, names))
    for name, result, text in found:
        if result in ("wrong", "raw"):
            print(f"{result}: {name}, {step}: {text[:300]}", flush=True)
    reasons = {name: _without_place(text) for name, result, text in found if result == "refused"}
    return {"seed": step.seed, "verdicts": {name: result for name, result, _ in found}, "reasons": reasons}


def _without_place(text: str) -> str:
    """Return the beginning of an error without directories, which are of one machine."""
    return " ".join(re.sub(r"/\S*/", "", text).split()[:24])


def _print_counts(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{len(rows)} steps")
    counts = collections.Counter((name, result) for row in rows for name, result in row["verdicts"].items())
    for (name, result), count in sorted(counts.items()):
        print(f"{name:16} {result:8} {count}")
    reasons = collections.Counter(" ".join(text.split()[:12]) for row in rows for text in row["reasons"].values())
    for reason, count in reasons.most_common(20):
        print(f"{count:5} refused: {reason}")


if __name__ == "__main__":
    os.environ.setdefault("PJRT_NPROC", "32")
    os.environ["XLA_FLAGS"] = cheap_xla_flags(os.environ.get("XLA_FLAGS", ""))
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    jax.config.update("jax_traceback_in_locations_limit", 0)
    main()
