"""Attention of one kernel on a device: what cuDNN's takes, forward and backward, by shape, and what is modelled.

    python -m benchmarks.attention_kernels --json attention.json                 # needs a GPU with cuDNN
    python -m benchmarks.attention_kernels --kept attention.json                 # prints what was measured before

Each is `jax.nn.dot_product_attention(..., implementation="cudnn")` in bfloat16, many in a row in one compiled loop: the
forward kernel alone, and with it the gradients of queries, keys and values. TFLOP/s count the products that the mask
leaves: two forward and five backward, half of each where attention is causal (Dao, FlashAttention-2, 2023, 4.1).

Modelled is what a plan for the machine has of the same equations (`costs.compute:equation_s`). What a round of a loop
waits for its host is in none of it: a file whose rounds have one kernel each (`kernels_in_a_round` 1) has it in its
forward times, and not in their difference.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

from autopar.compiler.costs.compute import equation_s
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.fusion import alone
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.primitives import ATTENTION
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import strategies
from autopar.hardware.machine import Machine
from autopar.hardware.measure import Effort, fastest_s
from benchmarks.models.cudnn import traced_as_if_there
from benchmarks.overhead import describe_machine

EFFORT = Effort(run_s=0.02, loop_s=0.1, max_sizes=1, dtypes=())
_IN_A_ROUND = 16
"""Kernels in a round of a loop, at whose end a GPU waits for its host."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Queries [batch, length, heads, width], keys and values [batch, length, kv_heads, width]."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    causal: bool = True

    @property
    def product_flops(self) -> float:
        """FLOPs that the mask leaves of one of its products."""
        return 2.0 * self.batch * self.heads * self.length**2 * self.width * (0.5 if self.causal else 1)

    @property
    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Queries, keys and values."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return [jax.ShapeDtypeStruct((self.batch, self.length, count, self.width), jnp.bfloat16) for count in heads]

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """The forward kernel."""
        return jax.nn.dot_product_attention(q, k, v, is_causal=self.causal, implementation="cudnn")

    def gradients(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """The forward kernel, and those of the gradients of a result that is its own cotangent."""
        out, pulled = jax.vjp(self.attend, q, k, v)
        return pulled(out)


SHAPES = (
    Shape(batch=32, length=512, heads=12, kv_heads=12, width=64),
    Shape(batch=16, length=1024, heads=16, kv_heads=16, width=64),
    Shape(batch=16, length=1024, heads=16, kv_heads=16, width=64, causal=False),
    Shape(batch=8, length=2048, heads=16, kv_heads=16, width=64),
    Shape(batch=8, length=2048, heads=16, kv_heads=16, width=128),
    Shape(batch=8, length=2048, heads=16, kv_heads=16, width=128, causal=False),
    Shape(batch=4, length=2048, heads=32, kv_heads=8, width=64),
    Shape(batch=4, length=4096, heads=32, kv_heads=8, width=128),
    Shape(batch=1, length=16384, heads=32, kv_heads=8, width=128),
    Shape(batch=1, length=1024, heads=8, kv_heads=8, width=64),
    Shape(batch=64, length=256, heads=16, kv_heads=16, width=64, causal=False),
)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Microseconds of the forward kernel, and of it with its gradients."""

    shape: Shape
    forward_us: float
    both_us: float

    @property
    def backward_us(self) -> float:
        return self.both_us - self.forward_us

    @property
    def forward_tflops(self) -> float:
        return 2 * self.shape.product_flops / self.forward_us / 1e6

    @property
    def backward_tflops(self) -> float:
        return 5 * self.shape.product_flops / self.backward_us / 1e6


def main(argv: Sequence[str] | None = None) -> None:
    """Time every shape, or read what was timed, print a table, and write what `--json` names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="written by --json: print it, measure nothing")
    parser.add_argument("--machine", metavar="NAME", help="modelled for it; by default that of the device")
    args = parser.parse_args(argv)
    if args.kept is None:
        device, timed = describe_machine(), [time_shape(shape) for shape in SHAPES]
    else:
        data = json.loads(args.kept.read_text(encoding="utf-8"))
        device = data["machine"]
        timed = [Timed(shape=Shape(**row.pop("shape")), **_measured(row)) for row in data["rows"]]
    if args.json:
        rows = [
            asdict(each) | {"forward_tflops": each.forward_tflops, "backward_tflops": each.backward_tflops}
            for each in timed
        ]
        data = {"machine": device, "kernels_in_a_round": _IN_A_ROUND, "rows": rows}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    machine = Machine.named(args.machine) if args.machine else Machine.of_kind(str(device["device"]))
    Console(width=None if Console().is_terminal else 120).print(table_of(timed, str(device["device"]), machine))


def _measured(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in ("forward_us", "both_us")}


def time_shape(shape: Shape) -> Timed:
    """Forward alone, and with its gradients."""
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [
        jax.random.normal(key, each.shape).astype(each.dtype) for key, each in zip(keys, shape.operands, strict=True)
    ]

    def looped(count: Any, step: Callable[..., Any], operands: Any) -> Any:
        def several(_: Any, given: Any) -> Any:
            for _ in range(_IN_A_ROUND):
                given = lax.optimization_barrier(step(*given))
            return given

        return lax.fori_loop(0, count, several, operands)

    @jax.jit
    def forward(count: Any, *operands: jax.Array) -> Any:
        return looped(count, lambda q, k, v: (shape.attend(q, k, v), k, v), operands)

    @jax.jit
    def both(count: Any, *operands: jax.Array) -> Any:
        return looped(count, shape.gradients, operands)

    forward_s, both_s = (
        fastest_s(lambda count, run=run: run(count, *operands), EFFORT) / _IN_A_ROUND for run in (forward, both)
    )
    return Timed(shape=shape, forward_us=1e6 * forward_s, both_us=1e6 * both_s)


def modelled_us(shape: Shape, machine: Machine) -> tuple[float, float]:
    """Microseconds of the forward kernel, and of those of the gradients, as plans have them."""
    with traced_as_if_there():
        traced = jax.make_jaxpr(shape.gradients)(*shape.operands)
    equations = jc.open_jaxpr(normalize(traced))[0].eqns
    kernels = [eqn for eqn in equations if eqn.primitive.name in ATTENTION]
    mesh = LogicalMesh(shape=(1,), axis_names=("data",))
    costs = MeshCosts(machine=machine, mesh=mesh)
    forward_s, backward_s = (
        equation_s(eqn, strategies(eqn, rule, mesh)[0], costs, alone(eqn))
        for eqn, rule in zip(kernels, sharding_rules(kernels), strict=True)
    )
    return 1e6 * forward_s, 1e6 * backward_s


def table_of(timed: Sequence[Timed], device: str, machine: Machine) -> Table:
    """Each shape, its microseconds and TFLOP/s, and the microseconds that are modelled."""
    table = Table(title=f"Attention in one kernel on a {device}, modelled for {machine.name}")
    for column in ("batch", "length", "heads", "of keys", "width", "causal", "forward µs", "TFLOP/s", "modelled µs"):
        table.add_column(column, justify="right")
    for column in ("backward µs", "TFLOP/s", "modelled µs"):
        table.add_column(column, justify="right")
    for each in timed:
        shape = each.shape
        forward_us, backward_us = modelled_us(shape, machine)
        sizes = map(str, (shape.batch, shape.length, shape.heads, shape.kv_heads, shape.width))
        table.add_row(
            *sizes,
            "yes" if shape.causal else "no",
            f"{each.forward_us:.0f}",
            f"{each.forward_tflops:.0f}",
            f"{forward_us:.0f}",
            f"{each.backward_us:.0f}",
            f"{each.backward_tflops:.0f}",
            f"{backward_us:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
