"""autopar: an auto-parallelizing compiler for JAX. Put `@autopar.parallelize` on a train step."""

from autopar.api import Compiled, Lowered, Planned, Step, Traced, parallelize
from autopar.cluster import Cluster
from autopar.compiler.intra_op.declared_rules import sharding_rule
from autopar.errors import (
    AutoparError,
    CannotShip,
    ClusterFailed,
    DonatedBuffer,
    HostLost,
    InvalidArgument,
    InvalidProgram,
    MemoryTooSmall,
    NotSplittable,
    PlanMismatch,
    ReplicatedWarning,
    StepFailed,
    StepTimeout,
    Unsupported,
)
from autopar.megatron import Megatron
from autopar.options import DataParallel, PipelineParallel, ShardParallel
from autopar.plan import MeshPlan, Plan, StagePlan
from autopar.program import Program
from autopar.runtime.distributed.distributed_array import DistributedArray
from autopar.search_methods import Auto, ExpertParallel, TensorParallel, Zero
from autopar.session import init, shutdown

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "AutoparError",
    "CannotShip",
    "Cluster",
    "ClusterFailed",
    "Compiled",
    "DataParallel",
    "DistributedArray",
    "DonatedBuffer",
    "ExpertParallel",
    "HostLost",
    "InvalidArgument",
    "InvalidProgram",
    "Lowered",
    "Megatron",
    "MemoryTooSmall",
    "MeshPlan",
    "NotSplittable",
    "PipelineParallel",
    "Plan",
    "PlanMismatch",
    "Planned",
    "Program",
    "ReplicatedWarning",
    "ShardParallel",
    "StagePlan",
    "Step",
    "StepFailed",
    "StepTimeout",
    "TensorParallel",
    "Traced",
    "Unsupported",
    "Zero",
    "init",
    "parallelize",
    "sharding_rule",
    "shutdown",
]
