"""Train in the workers of Ray Train's `JaxTrainer`: one of them on each host, all of them one JAX world.

    JaxTrainer(autopar.ray_train_loop(train), ...).fit()      starts the workers, and again after a failure
        train(config)                                         in each of them, autopar on all devices of the world
            autopar.fit(..., on_step=autopar.ray_train_report)

Ray Train owns the processes and autopar what they compute. A group that Ray starts anew goes on from the checkpoints of
`fit`, as many workers as it has then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.errors import InvalidArgument
from autopar.runtime.distributed.ray_cluster import import_ray_train
from autopar.session import init, shutdown


def ray_train_loop(train: Callable[..., None]) -> Callable[..., None]:
    """Return `train` as the `train_loop_per_worker` of Ray Train's `JaxTrainer`.

    For example, on four hosts of eight GPUs:

        def train(config):
            step = autopar.parallelize(train_step)
            folder = config["folder"]  # which every host can read and write
            autopar.fit(step, state, batches, num_steps=1000, checkpoint_dir=folder, on_step=autopar.ray_train_report)

        JaxTrainer(
            autopar.ray_train_loop(train),
            train_loop_config={"folder": "/shared/run"},
            scaling_config=ray.train.ScalingConfig(num_workers=4, use_gpu=True, resources_per_worker={"GPU": 8}),
            run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
        ).fit()

    In each worker it is called between `autopar.init(cluster="jax")` and `autopar.shutdown()`, with the `config` of the
    trainer if it takes an argument. Ray has joined the workers to one JAX world where `ScalingConfig` has `use_gpu` or
    `use_tpu`; a single worker needs none.

    Raises, in the worker, `InvalidArgument` for several workers without such a world, and `Unsupported` without Ray
    Train.
    """

    @functools.wraps(train)
    def train_loop_per_worker(*config: Any) -> None:
        workers = import_ray_train().get_context().get_world_size()
        if workers > 1 and not jax.distributed.is_initialized():
            raise InvalidArgument(
                f"Ray Train started {workers} workers without a JAX world. It makes one for GPUs and TPUs: give "
                "ScalingConfig use_gpu=True or use_tpu=True."
            )
        init(cluster="jax" if workers > 1 else "local")
        try:
            train(*config)
        finally:
            shutdown()

    return train_loop_per_worker


def ray_train_report(number: int, metrics: Any) -> None:
    """Report the metrics of a step to Ray Train: an `on_step` of `autopar.fit` in a worker.

    What Ray shows are `step` and each metric of one number, by its name; those of several numbers are left out. All
    workers have the same ones.
    """
    reported: dict[str, Any] = {"step": number}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if np.size(leaf) == 1:
            reported[leaf_name("", path) or "metrics"] = np.asarray(leaf).item()
    import_ray_train().report(reported)
