"""One of several controllers, for tests: it trains as all do, and prints what it found as JSON.

python -m tests.runtime.controller_process PROCESS NUM_PROCESSES COORDINATOR FOLDER
"""

import json
import os
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import session
from autopar.errors import AutoparError
from tests.runtime.listeners import listeners
from tests.small_steps import mlp_loss, mlp_params, sgd

MARK = "controller: "
ROWS, WIDTH = 16, 4


def train_step(params: Any, batch: Any) -> Any:
    params, loss = sgd(mlp_loss)(params, batch)
    return params, {"loss": loss}


def batch_of(number: int) -> Any:
    rng = np.random.default_rng(number)
    return tuple(rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(2))


def plain() -> tuple[Any, list[float]]:
    params, losses = mlp_params(), []
    for number in range(3):
        params, metrics = jax.jit(train_step)(params, batch_of(number))
        losses.append(float(metrics["loss"]))
    return jax.tree.map(np.asarray, params), losses


def differs(params: Any, metrics: Any) -> float:
    """Return the largest difference from the plain step."""
    want, losses = plain()
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True)
    found = [np.abs(np.asarray(a) - b).max() for a, b in pairs]
    return float(max([*found, *(abs(float(m["loss"]) - loss) for m, loss in zip(metrics, losses, strict=True))]))


def trained(step: autopar.Step) -> float:
    params, history = mlp_params(), []
    for number in range(3):
        params, metrics = step(params, batch_of(number))
        history.append(metrics)
    return differs(params, history)


def refused(call: Any) -> str:
    try:
        call()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def no_plan() -> str:
    raise ZeroDivisionError("a link without bandwidth")


def raise_in(host: Any, process: int) -> None:
    if host.world.process == process:
        raise KeyError("weights")


def over_all_devices(array: Any, spec: PartitionSpec) -> jax.Array:
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: np.asarray(array)[index])


def found(process: int, folder: str) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    reports["wrong size"] = refused(lambda: autopar.init(cluster="jax", num_hosts=3))
    before = listeners()
    cluster = autopar.init(cluster="jax")
    reports["devices"] = cluster.num_devices
    reports["one mesh"] = trained(autopar.parallelize(train_step))
    pipeline = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    reports["pipeline"] = trained(autopar.parallelize(train_step, method=pipeline))
    searched = autopar.parallelize(train_step, method=autopar.Auto(num_microbatches=1))
    reports["searched"] = trained(searched)
    placed = autopar.Megatron(tensor=2, placement="intra_node_replica")
    reports["placement"] = trained(autopar.parallelize(train_step, method=placed))
    step = autopar.parallelize(train_step)
    params = jax.tree.map(lambda a: over_all_devices(a, PartitionSpec()), mlp_params())
    history: list[Any] = []
    for number in range(3):
        batch = tuple(over_all_devices(array, PartitionSpec("all")) for array in batch_of(number))
        params, metrics = step(params, batch)
        history.append(metrics)
    reports["global arrays"] = differs(params, history)
    own = autopar.parallelize(train_step, method=pipeline)
    params, history = autopar.fit(own, mlp_params(), batch_of, num_steps=2, checkpoint_dir=folder, checkpoint_every=2)
    params, rest = autopar.fit(own, mlp_params(), batch_of, num_steps=3, checkpoint_dir=folder)
    reports["restored"] = differs(params, [*history, *rest])
    reports["on failure"] = refused(
        lambda: autopar.fit(own, mlp_params(), batch_of, num_steps=3, checkpoint_dir=folder, on_failure="restart")
    )

    def other(params: Any, batch: Any) -> Any:
        return sgd(mlp_loss, 0.1 if process == 0 else 0.2)(params, batch)

    reports["other code"] = refused(lambda: autopar.parallelize(other)(mlp_params(), batch_of(0)))
    current: Any = session.current_session()
    reports["planning fails"] = refused(lambda: current.agree_on_plan("other", lambda: "the same", no_plan))
    reports["call fails"] = refused(lambda: current.run_everywhere(raise_in, 1))
    reports["goes on"] = trained(step)
    during = listeners()
    autopar.shutdown()
    reports["listeners"] = [before, during, listeners()]
    assert session.current_session() is None
    with jax.numpy_dtype_promotion("strict" if process else "standard"):
        reports["other settings"] = refused(lambda: autopar.init(cluster="jax"))
    os.environ["XLA_FLAGS"] += " --xla_dump_to=/nowhere" + process * " --xla_cpu_enable_fast_math=true"
    reports["other flags"] = refused(lambda: autopar.init(cluster="jax"))
    return reports


if __name__ == "__main__":
    number, count, coordinator, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    jax.distributed.initialize(coordinator, count, number)
    print(MARK + json.dumps(found(number, folder)), flush=True)
    jax.distributed.shutdown()
