"""Hostile input to everything that takes some: it is accepted, or refused with an `AutoparError`, and soon.

python -m benchmarks.bad_input [--count 500] [--seed 0] [--json FILE]

    options    every field of every method and cluster, every option of `parallelize` and `init`, values of all types
    files      plans, machines, clusters and kept optima as JSON, with bytes, numbers, types and keys changed at random,
               `--count` of each; checkpoints with bytes changed, files cut off, removed or added, a fifth as many

An optimum that is found in spite of a damaged file must be that of the problem, and a state that is restored from a
damaged checkpoint be the state that was saved: other numbers count as raw, as does an error that is no `AutoparError`:
a mistake of ours, which the user gets as a traceback.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.compiler.solver.optimum_cache import solve_or_recall
from autopar.compiler.solver.problem import MRF, Optimum
from autopar.errors import AutoparError
from autopar.hardware.machine import Machine
from autopar.training.checkpoints import Checkpoints

TIME_LIMIT_S = 10.0
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**70, 1.5, -0.0, float("nan"), float("inf"), 1j),
    *("", "x", "*", "auto", "\0", b"x", (), (0,), (-1, 2), (1.5,), ("x",), ((),), [], [1], {}, {"(": 1}, {"x": None}),
    *(object(), len, int, np.int64(2), np.float32("nan"), np.zeros((2, 2)), {1, 2}, iter(()), ...),
)
METHODS = (
    *(autopar.Auto, autopar.Zero, autopar.TensorParallel, autopar.ExpertParallel, autopar.Megatron),
    *(autopar.DataParallel, autopar.ShardParallel, autopar.PipelineParallel),
)
REQUIRED: Mapping[Any, dict[str, Any]] = {
    autopar.ShardParallel: {"mesh_shape": (2, 2)},
    autopar.PipelineParallel: {"num_stages": 2, "num_microbatches": 2},
}
OPTIONS = (
    *("method", "num_microbatches", "batch_argnums", "unbatched", "static_argnums", "static_argnames"),
    *("donate_argnums", "donate_argnames", "axis_name", "check_finite"),
)
INIT = (
    "address",
    "num_hosts",
    "devices_per_host",
    "runtime_env",
    "step_timeout_s",
    "start_timeout_s",
    "answer_timeout_s",
)

Input = tuple[str, Callable[[], Any]]


def step(w: Any, x: Any) -> Any:
    """A train step for which the options are."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def option_inputs() -> Iterator[Input]:
    """Every option of every public value with every hostile value, one at a time."""
    for method in METHODS:
        for field in dataclasses.fields(method):
            for value in VALUES:
                options = REQUIRED.get(method, {}) | {field.name: value}
                yield f"{method.__name__}({field.name}={value!r})", lambda m=method, o=options: m(**o)
    for name in OPTIONS:
        for value in VALUES:
            yield f"parallelize({name}={value!r})", lambda o={name: value}: autopar.parallelize(step, **o)
    for name in INIT:
        for value in VALUES:
            if value is not None:
                yield f"init({name}={value!r})", lambda o={name: value}: autopar.init("local", **o)
    for value in VALUES:
        yield f"parallelize({value!r})", lambda value=value: autopar.parallelize(value)
        yield f"Cluster.parse({value!r})", lambda value=value: autopar.Cluster.parse(value)
        yield f"Cluster(num_devices={value!r})", lambda value=value: autopar.Cluster(num_devices=value, kind="cpu")
        yield f"Cluster(kind={value!r})", lambda value=value: autopar.Cluster(num_devices=1, kind=value)
        yield f"Plan.from_json({value!r})", lambda value=value: autopar.Plan.from_json(value)


def file_inputs(count: int, seed: int) -> Iterator[Input]:
    """Plans, machines and clusters, each damaged in one to three places."""
    abstract = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    traced = autopar.parallelize(step, devices=jax.devices()[:4]).trace(abstract, abstract)
    methods = (autopar.DataParallel(), autopar.PipelineParallel(num_stages=2, num_microbatches=2), autopar.Auto())
    plans = [traced.plan(method).plan.to_json() for method in methods]
    cluster = autopar.Cluster.parse("2x p3.16xlarge")
    machine, whole = cluster.machine.to_json(), cluster.to_json()
    for number in range(count):
        rng = Random(f"{seed} {number}")
        text = _damaged(rng.choice(plans), rng)
        yield f"plan {seed} {number}", lambda text=text: traced.plan(autopar.Plan.from_json(text)).lower()
        text = _damaged(machine, rng)
        yield f"machine {seed} {number}", lambda text=text: Machine.from_json(text)
        text = _damaged(whole, rng)
        yield f"cluster {seed} {number}", lambda text=text: autopar.Cluster.from_json(text)


def kept_optimum_inputs(count: int, seed: int, folder: Path) -> Iterator[Input]:
    """Kept optima of a small problem, each damaged: the optimum is found all the same."""
    costs = tuple(np.arange(3.0) * (n + 1) for n in range(4))
    problem = MRF(
        costs=costs, edges={(n, n + 1): np.abs(np.subtract.outer([0.0, 1, 2], [2.0, 1, 0])) for n in range(3)}
    )

    def recall() -> Optimum:
        return solve_or_recall(problem, folder, time_limit_s=10.0, max_gap=0.0)

    sound = recall()
    (path,) = folder.iterdir()
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")

    def recalled(damaged: str) -> None:
        path.write_text(f"{digest}\n{damaged}", encoding="utf-8", errors="replace")
        found = recall()
        assert (found.assignment, found.value) == (sound.assignment, sound.value), found

    for number in range(count):
        damaged = _damaged(text, Random(f"optimum {seed} {number}"))
        yield f"optimum {seed} {number}", lambda damaged=damaged: recalled(damaged)


def checkpoint_inputs(count: int, seed: int, folder: Path) -> Iterator[Input]:
    """Checkpoints with damaged files: the state that was saved comes back, or a reason."""
    state = {
        "w": jnp.arange(12.0).reshape(3, 4),
        "key": jax.random.key(7),
        "layers": [jnp.ones(5, jnp.bfloat16)],
        "n": 3,
    }
    saved = Checkpoints(folder / "sound")
    saved.save(1, state)
    saved.wait()
    names = sorted(path.relative_to(folder / "sound") for path in (folder / "sound").rglob("*") if path.is_file())

    def restored(number: int, verify: bool) -> None:
        there = folder / f"damaged-{number}"
        shutil.copytree(folder / "sound", there)
        _damage_file(there / Random(f"{seed} {number}").choice(names), Random(f"bytes {seed} {number}"))
        try:
            _, found = Checkpoints(there, verify=verify).restore(like=state)
        finally:
            shutil.rmtree(there)
        same = [np.array_equal(_words(a), _words(b)) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state))]
        assert all(same) or not verify, "other numbers came back"

    for number in range(count):
        for verify in (True, False):
            name = f"checkpoint {seed} {number}, {'verified' if verify else 'not verified'}"
            yield name, lambda number=number, verify=verify: restored(number, verify)


def _words(leaf: Any) -> np.ndarray[Any, Any]:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _damage_file(path: Path, rng: Random) -> None:
    data = bytearray(path.read_bytes())
    match rng.randrange(4):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(data[: rng.randrange(len(data) + 1)])
        case 2:
            path.write_bytes(data + bytes(rng.randrange(256) for _ in range(9)))
        case _:
            for _ in range(rng.randint(1, 4) if data else 0):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data)


def _damaged(text: str, rng: Random) -> str:
    if rng.random() < 0.2:
        return _with_other_bytes(text, rng)
    data = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        _change(data, rng)
    return json.dumps(data)


def _with_other_bytes(text: str, rng: Random) -> str:
    start, stop = sorted(rng.sample(range(len(text)), 2))
    match rng.randrange(3):
        case 0:
            return text[:start]
        case 1:
            return text[:start] + text[stop:]
        case _:
            return text[:start] + chr(rng.randrange(1, 0x3000)) + text[start + 1 :]


def _change(data: Any, rng: Random) -> None:
    """Change one value somewhere in JSON data."""
    while True:
        if isinstance(data, dict):
            keys: Sequence[Any] = sorted(data)
        elif isinstance(data, list):
            keys = range(len(data))
        else:
            return
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(data[key], dict | list) or not data[key] or rng.random() < 0.2:
            break
        data = data[key]
    if rng.random() < 0.15:
        del data[key]
        return
    data[key] = rng.choice([None, True, -1, 0, 7, 2**70, 1.5, -1e308, "", "x", [], [0], [[]], {}, {"x": 1}, [-1, "x"]])


def verdict(make: Callable[[], Any]) -> tuple[str, str]:
    """Return "accepted", "refused", "raw" or "slow", and what was raised."""
    begin = time.monotonic()
    try:
        make()
        found, text = "accepted", ""
    except AutoparError as error:
        found, text = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        found, text = "raw", f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    return ("slow", f"{seconds:.0f} s") if seconds > TIME_LIMIT_S else (found, text)


def main() -> None:
    """Try everything and count; the exit status is 1 if something is raw or slow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    with TemporaryDirectory(prefix="autopar-bad-input-") as folder:
        inputs = (
            option_inputs(),
            file_inputs(options.count, options.seed),
            kept_optimum_inputs(options.count, options.seed, Path(folder) / "optima"),
            checkpoint_inputs(options.count // 5, options.seed, Path(folder)),
        )
        for name, make in itertools.chain.from_iterable(inputs):
            found, text = verdict(make)
            counts[found] += 1
            kinds[f"{re.split('[ (]', name)[0]} {found}"] += 1
            if found in ("raw", "slow"):
                wrong.append(f"{found}: {name[:120]}: {text[:200]}")
                print(wrong[-1], flush=True)
    if options.json:
        said = {"jax": jax.__version__, "seed": options.seed, "count": options.count, "total": counts.total()}
        options.json.write_text(
            json.dumps({**said, **counts, "kinds": dict(sorted(kinds.items())), "wrong": wrong}, indent=1)
        )
    print(f"{counts.total()} inputs: " + ", ".join(f"{count} {found}" for found, count in sorted(counts.items())))
    if counts["raw"] or counts["slow"]:
        raise SystemExit(1)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
