"""autopar: an auto-parallelizing compiler for JAX. Put `@autopar.parallelize` on a train step."""

from autopar.api import Compiled, Lowered, Planned, Step, Traced, parallelize
from autopar.cluster import Cluster
from autopar.compiler.intra_op.declared_rules import sharding_rule
from autopar.errors import (
    AutoparError,
    DonatedBuffer,
    InvalidArgument,
    InvalidProgram,
    MemoryTooSmall,
    NotSplittable,
    PlanMismatch,
    ReplicatedWarning,
    Unsupported,
)
from autopar.options import DataParallel, PipelineParallel, ShardParallel
from autopar.plan import MeshPlan, Plan, StagePlan
from autopar.program import Program
from autopar.search_methods import Auto, ExpertParallel, TensorParallel, Zero

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "AutoparError",
    "Cluster",
    "Compiled",
    "DataParallel",
    "DonatedBuffer",
    "ExpertParallel",
    "InvalidArgument",
    "InvalidProgram",
    "Lowered",
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
    "TensorParallel",
    "Traced",
    "Unsupported",
    "Zero",
    "parallelize",
    "sharding_rule",
]
