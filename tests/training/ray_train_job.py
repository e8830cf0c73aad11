"""Train a small model in two of Ray Train's workers, one of which fails once.   FOLDER of checkpoints and the result"""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

import autopar
from tests.small_steps import WIDTH, mlp_loss, mlp_params

NUM_STEPS, FAILS_AT = 6, 4


def train_step(params, batch):
    value, grads = jax.value_and_grad(mlp_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "ignored": grads[0]["b"]}


def batches(number):
    random = np.random.default_rng(number)
    return tuple(random.normal(size=(16, WIDTH)).astype(np.float32) for _ in range(2))


def train(config):
    import ray.train

    folder = Path(config["folder"])

    def on_step(number, metrics):
        autopar.ray_train_report(number, metrics)
        failed = folder / "failed"
        if number == FAILS_AT and ray.train.get_context().get_world_rank() == 0 and not failed.exists():
            failed.touch()
            raise RuntimeError("lost")

    step = autopar.parallelize(train_step, method=autopar.Megatron(pipeline=2, num_microbatches=2))
    state, losses = autopar.fit(
        step,
        mlp_params(),
        batches,
        num_steps=NUM_STEPS,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=2,
        on_step=on_step,
    )
    values = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state)]
    if ray.train.get_context().get_world_rank() == 0:
        found = {"processes": jax.process_count(), "steps": len(losses), "state": values}
        (folder / "result.json").write_text(json.dumps(found))


def callback(folder):
    """Return what writes down what the first worker reports."""
    import ray.train

    class Keep(ray.train.UserCallback):
        def after_report(self, run_context, metrics, checkpoint):
            with (Path(folder) / "reported.jsonl").open("a") as file:
                file.write(json.dumps(metrics[0]) + "\n")

    return Keep()


def main():
    import ray
    import ray.train
    from ray.train.v2.jax import JaxTrainer

    folder = sys.argv[1]
    flags = "--xla_force_host_platform_device_count=2"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "16", "PYTHONPATH": os.getcwd()}
    ray.init("local", num_cpus=8, num_gpus=2, runtime_env={"env_vars": environment}, include_dashboard=False)
    trainer = JaxTrainer(
        autopar.ray_train_loop(train),
        train_loop_config={"folder": folder},
        # The GPUs are said to be there and are none: Ray makes a JAX world of the platform that the environment names.
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=True),
        run_config=ray.train.RunConfig(
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=1),
            callbacks=[callback(folder)],
            name="job",
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
