"""autopar: an auto-parallelizing compiler for JAX. Put `@autopar.parallelize` on a train step."""

from autopar.api import Compiled, Lowered, Planned, Step, Traced, parallelize
from autopar.compiler.frontend.compressed_gradients import compress_gradients
from autopar.compiler.frontend.layer_boundaries import layer_boundary
from autopar.compiler.frontend.scopes import colocate, replicate, set_default_strategy, split, stage
from autopar.compiler.sharding.declared_rules import sharding_rule
from autopar.compiler.sharding.rule_lookup import register_sharding_rule
from autopar.errors import (
    AutoparError,
    CannotSerialize,
    CheckpointFailed,
    ClusterFailed,
    DonatedBuffer,
    GenericFiguresWarning,
    HostLost,
    InvalidArgument,
    InvalidProgram,
    LossSpike,
    MemoryTooSmall,
    NonFiniteLoss,
    NonFiniteValue,
    NotSplittable,
    PlanMismatch,
    ReplicatedWarning,
    StepFailed,
    StepTimeout,
    StragglerWarning,
    Unsupported,
    UntriedWarning,
)
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.program import Program
from autopar.ir.schedule import Schedule
from autopar.ir.schedules import register_schedule
from autopar.methods import (
    Auto,
    DataParallel,
    ExpertParallel,
    Megatron,
    PipelineParallel,
    ShardParallel,
    TensorParallel,
    Zero,
)
from autopar.runtime.distributed.array import DistributedArray
from autopar.session import host_leaves, init, shutdown
from autopar.training.batches import prefetch, shard_batch
from autopar.training.checkpoints import Checkpoints
from autopar.training.create_state import create_state
from autopar.training.fit import fit
from autopar.training.ray_train import ray_train_loop, ray_train_report

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "AutoparError",
    "CannotSerialize",
    "CheckpointFailed",
    "Checkpoints",
    "Cluster",
    "ClusterFailed",
    "Compiled",
    "DataParallel",
    "DistributedArray",
    "DonatedBuffer",
    "ExpertParallel",
    "GenericFiguresWarning",
    "HostLost",
    "InvalidArgument",
    "InvalidProgram",
    "LossSpike",
    "Lowered",
    "Megatron",
    "MemoryTooSmall",
    "MeshPlan",
    "NonFiniteLoss",
    "NonFiniteValue",
    "NotSplittable",
    "PipelineParallel",
    "Plan",
    "PlanMismatch",
    "Planned",
    "Program",
    "ReplicatedWarning",
    "Schedule",
    "ShardParallel",
    "StagePlan",
    "Step",
    "StepFailed",
    "StepTimeout",
    "StragglerWarning",
    "TensorParallel",
    "Traced",
    "Unsupported",
    "UntriedWarning",
    "Zero",
    "colocate",
    "compress_gradients",
    "create_state",
    "fit",
    "host_leaves",
    "init",
    "layer_boundary",
    "parallelize",
    "prefetch",
    "ray_train_loop",
    "ray_train_report",
    "register_schedule",
    "register_sharding_rule",
    "replicate",
    "set_default_strategy",
    "shard_batch",
    "sharding_rule",
    "shutdown",
    "split",
    "stage",
]
