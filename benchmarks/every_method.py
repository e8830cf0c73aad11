"""Name one value of every method of autopar, for a number of devices: what benchmarks of all methods go through."""

from jax.sharding import PartitionSpec as P

import autopar
from autopar.methods import Method


def every_method(num_devices: int) -> dict[str, Method]:
    """Return methods by name, each of which has a plan for `num_devices`, a multiple of 4."""
    assert num_devices % 4 == 0
    specs = {r"w$|kernel$|embedding$": P(None, "model")}
    interleaved = autopar.PipelineParallel(num_stages=2, virtual_stages=2, num_microbatches=2, schedule="interleaved")
    return {
        "data parallel": autopar.DataParallel(),
        "microbatches": autopar.DataParallel(num_microbatches=2),
        "by specs": autopar.ShardParallel(mesh_shape=(2, num_devices // 2), specs=specs),
        "two stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2),
        "interleaved": interleaved,
        "megatron": autopar.Megatron(data=num_devices // 2, tensor=2),
        "megatron stages": autopar.Megatron(data=2, tensor=num_devices // 4, pipeline=2, num_microbatches=2, zero=1),
        "zero": autopar.Zero(),
        "tensor": autopar.TensorParallel(),
        "expert": autopar.ExpertParallel(),
        "auto": autopar.Auto(),
        "auto stages": autopar.Auto(num_stages=2, num_microbatches=2),
    }
