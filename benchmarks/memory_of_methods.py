"""Hold the memory that plans say they need against XLA's, through the path that users take.

    python -m benchmarks.memory_of_methods [--targets h100 a100] [--sizes small deep wide] --json FILE

A step of `autopar.parallelize` is planned by methods by hand and by search, and `verify` compiles it for a target: what
`simulate` says of the peak of a device is held against temporaries, arguments and results of the executable. The model
is the GPT of the weak scaling, of which `memory_model` has no row. Its layers are computed again, so that it gathers,
sums and recomputes at once.

    small   4 layers of width 1,024; in float32 and bfloat16, with donated state and without
    deep    14 layers: what is done late piles up; in bfloat16, with donated state, by methods that divide the state
    wide    8 layers of width 4,096: gradients are larger than what is computed forward; the same

Nothing is run; it needs the compilers for GPUs (autopar[gpu-aot]).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.methods import Auto, Megatron, Method, Zero, method_words
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt

SIZES = {
    "small": GPTSize(width=1024, layers=4, heads=16, length=512, vocabulary=8192, batch=64),
    "deep": GPTSize(width=1024, layers=14, heads=16, length=512, vocabulary=8192, batch=16),
    "wide": GPTSize(width=4096, layers=8, heads=32, length=256, vocabulary=8192, batch=16),
}
CLUSTERS = {"h100": "dgx-h100", "a100": "dgx-a100-80", "b200": "dgx-b200"}
METHODS: tuple[Method, ...] = (
    Megatron(),
    Megatron(zero=1),
    Megatron(zero=3),
    Megatron(tensor=2),
    Megatron(tensor=2, zero=3),
    Megatron(tensor=4, zero=1),
    Megatron(tensor=8),
    Zero(stage=3),
    Auto(num_stages=1, num_microbatches=1),
)
DIVIDING: tuple[Method, ...] = (Megatron(tensor=2, zero=1), Zero(stage=2), *METHODS[-2:])


@dataclass(frozen=True, kw_only=True)
class Case:
    target: str
    size: str
    dtype: str
    donated: bool
    """True if the new state takes the place of the old one."""
    method: str
    modelled_mb: float
    compiled_mb: float

    @property
    def error(self) -> float:
        """The modelled peak against the compiled one."""
        return self.modelled_mb / self.compiled_mb - 1


def main() -> None:
    """Compile every case, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h100", "a100"], choices=list(CLUSTERS), help="to compile for")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="of the model")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = Table(
        "target", "size", "dtype", "state", "method", "modelled MB", "compiled MB", "error", title="memory of plans"
    )
    found: list[Case] = []
    console = Console()
    for each in cases(arguments.targets, arguments.sizes):
        found.append(each)
        state = "donated" if each.donated else "kept"
        numbers = f"{each.modelled_mb:.0f}", f"{each.compiled_mb:.0f}", f"{each.error:+.1%}"
        table.add_row(each.target, each.size, each.dtype, state, each.method, *numbers)
        console.print(f"{each.target} {each.size} {each.dtype} {state} {each.method}: {each.error:+.1%}")
    console.print(table)
    for target, size in itertools.product(arguments.targets, arguments.sizes):
        errors = [abs(each.error) for each in found if (each.target, each.size) == (target, size)]
        near = sum(error <= 0.05 for error in errors)
        mean, most = sum(errors) / len(errors), max(errors)
        console.print(f"{target} {size}: within 5 % {near} of {len(errors)}, mean {mean:.1%}, most {most:.1%}")
    if arguments.json is not None:
        rows = [asdict(each) | {"error": each.error} for each in found]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def cases(targets: list[str], sizes: list[str]) -> Iterator[Case]:
    """Yield the cases in the order of their options; a plan that does not exist for a model is left out."""
    for target, size in itertools.product(targets, sizes):
        is_small = size == "small"
        for dtype, donated in itertools.product(("float32", "bfloat16"), (True, False)):
            if not is_small and (dtype, donated) != ("bfloat16", True):
                continue
            model = alpa_gpt(dtype, SIZES[size], jnp.dtype(dtype))
            step = autopar.parallelize(
                model.step,
                cluster=autopar.Cluster.parse(CLUSTERS[target]),
                donate_argnums=(0,) if donated else (),
            )
            traced = step.trace(model.abstract_state, model.abstract_batch)
            for method in METHODS if is_small else DIVIDING:
                try:
                    planned = traced.plan(method)
                except AutoparError as error:
                    Console(stderr=True).print(f"{method_words(method)}: {error}")
                    continue
                report = planned.verify(target=target)
                yield Case(
                    target=target,
                    size=size,
                    dtype=dtype,
                    donated=donated,
                    method=method_words(method),
                    modelled_mb=planned.simulate().peak_bytes / 1e6,
                    compiled_mb=report.collectives.compiled_peak_bytes / 1e6,
                )


if __name__ == "__main__":
    main()
