"""Plans that practitioners published for large models, with where they stand: the step, the devices, the degrees.

    Published  ->  Workload, Cluster, methods by hand

Where a source leaves a degree open (the examples of a microbatch, how often stages are interleaved), there is a method
for each that it may have been, and the fastest counts. Where a source has more replicas than are planned here, both
sides have as few, with as many examples each, and `note` says so; `--full` asks for all of them.

    SC'21       Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
    MLSys'23    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
    Llama 3     Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783
    MaxText     AI-Hypercomputer/maxtext, src/MaxText/configs/base.yml: `logical_axis_rules`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autopar import Auto, Cluster, Megatron
from autopar.hardware.machine import Machine
from autopar.methods import Method
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.models.alpa_moe import DeepSeekSize, deepseek_moe
from benchmarks.models.llama import LLAMA_70B, LLAMA_405B, Llama, llama_workload
from benchmarks.models.workload import Workload

_SC21 = "SC'21, table 1"
_MLSYS23 = "MLSys'23, table 3"
_OPEN_ROWS = (1, 2, 4, 8)
"""Examples of a microbatch, where a source does not say how many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Published:
    """A model on devices, and the plans that its source may have meant."""

    name: str
    source: str
    workload: Callable[[], Workload]
    """Made when it is asked for."""
    machine: str
    devices: int
    methods: tuple[Method, ...]
    note: str = ""
    """The difference of what is planned here from what was published."""

    @property
    def cluster(self) -> Cluster:
        return Cluster(num_devices=self.devices, machine=Machine.named(self.machine))


def published(*, full: bool = False) -> tuple[Published, ...]:
    """Return all of them; those with many replicas with a few, unless `full`."""
    return (*_megatron_21(full), *_megatron_23(), *_llama_405b(full), *_maxtext())


# --- Megatron-LM --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A line of a table of GPTs, with the replicas that are planned here."""

    name: str
    width: int
    heads: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    virtual: int = 1
    replicas: int | None = None

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline)

    def size(self, full: bool, *, selective: bool = False) -> GPTSize:
        """The model, and the batch of as many replicas. Selective recomputation is that of attention alone."""
        batch = self.batch if full or self.replicas is None else self.batch // self.data * self.replicas
        return GPTSize(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            length=2048,
            batch=batch,
            recomputed=not selective,
            kernel=selective,
        )


_ROWS_21 = (
    _Row(name="1.7B", width=2304, heads=24, layers=24, tensor=1, pipeline=1, gpus=32, batch=512),
    _Row(name="3.6B", width=3072, heads=32, layers=30, tensor=2, pipeline=1, gpus=64, batch=512),
    _Row(name="7.5B", width=4096, heads=32, layers=36, tensor=4, pipeline=1, gpus=128, batch=512, replicas=8),
    _Row(name="18.4B", width=6144, heads=48, layers=40, tensor=8, pipeline=1, gpus=256, batch=1024, replicas=8),
    _Row(name="39.1B", width=8192, heads=64, layers=48, tensor=8, pipeline=2, gpus=512, batch=1536, replicas=4),
    _Row(name="76.1B", width=10240, heads=80, layers=60, tensor=8, pipeline=4, gpus=1024, batch=1792, replicas=4),
    _Row(name="145.6B", width=12288, heads=96, layers=80, tensor=8, pipeline=8, gpus=1536, batch=2304, replicas=2),
    _Row(name="310.1B", width=16384, heads=128, layers=96, tensor=8, pipeline=16, gpus=1920, batch=2160, replicas=1),
    _Row(name="529.6B", width=20480, heads=128, layers=105, tensor=8, pipeline=35, gpus=2520, batch=2520, replicas=1),
    _Row(name="1008B", width=25600, heads=160, layers=128, tensor=8, pipeline=64, gpus=3072, batch=3072, replicas=1),
)
_ROWS_23 = (
    _Row(name="22B", width=6144, heads=64, layers=48, tensor=8, pipeline=1, gpus=8, batch=4),
    _Row(name="175B", width=12288, heads=96, layers=96, tensor=8, pipeline=8, gpus=64, batch=64, virtual=3),
    _Row(name="530B", width=20480, heads=128, layers=105, tensor=8, pipeline=35, gpus=280, batch=280, virtual=3),
    _Row(name="1T", width=25600, heads=160, layers=128, tensor=8, pipeline=64, gpus=512, batch=512),
)


def _megatron_21(full: bool) -> list[Published]:
    """Every layer is computed again, replicas hold the whole state."""
    found: list[Published] = []
    for row in _ROWS_21:
        data = row.data if full or row.replicas is None else row.replicas
        size = row.size(full)
        each = size.batch // data
        methods = tuple(
            Megatron(data=data, tensor=row.tensor, pipeline=row.pipeline, num_microbatches=each // rows, **_order(row))
            for rows in _OPEN_ROWS
            if each % rows == 0
        )
        found.append(
            Published(
                name=f"GPT-{row.name}",
                source=_SC21,
                workload=partial(alpa_gpt, f"gpt-{row.name}", size, jnp.float16),
                machine="dgx-a100-80",
                devices=data * row.tensor * row.pipeline,
                methods=methods,
                note="" if data == row.data else f"{data} of {row.data} replicas",
            )
        )
    return found


def _megatron_23() -> list[Published]:
    """Return GPTs that compute only attention again; what flows between layers is divided along its length."""
    return [
        Published(
            name=f"GPT-{row.name}, selective",
            source=_MLSYS23,
            workload=partial(alpa_gpt, f"gpt-{row.name}", row.size(True, selective=True), jnp.float16),
            machine="dgx-a100-80",
            devices=row.gpus,
            methods=(
                Megatron(
                    data=1,
                    tensor=row.tensor,
                    pipeline=row.pipeline,
                    num_microbatches=1 if row.pipeline == 1 else row.batch,
                    **_order(row),
                ),
            ),
        )
        for row in _ROWS_23
    ]


def _order(row: _Row) -> dict[str, object]:
    return {"schedule": "interleaved", "virtual_stages": row.virtual} if row.virtual > 1 else {"schedule": "1f1b"}


# --- Llama and MaxText --------------------------------------------------------------------------------------------


def _llama_405b(full: bool) -> list[Published]:
    """32 sequences for each of 64 replicas: tensor 8, pipeline 16, state and gradients divided among replicas."""
    data = 64 if full else 2
    model = replace(LLAMA_405B, scanned=False, sequence=8192, batch=32 * data)
    return [
        Published(
            name="Llama-405B",
            source="Llama 3, table 4",
            workload=partial(llama_workload, "llama-405b", model),
            machine="dgx-h100",
            devices=128 * data,
            methods=tuple(
                Megatron(
                    data=data, tensor=8, pipeline=16, num_microbatches=32, zero=1, schedule=schedule, virtual_stages=v
                )
                for schedule, v in (("1f1b", None), ("interleaved", 2), ("interleaved", 4))
            ),
            note="every layer recomputed" + ("" if full else f"; {data} of 64 replicas"),
        )
    ]


_LLAMA_RULES: Mapping[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", "embed"),
    "query": ("embed", "heads", None),
    "key": ("embed", "heads", None),
    "value": ("embed", "heads", None),
    "out": ("heads", None, "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "head": ("embed", "vocab"),
}
"""Names of the dimensions of a Llama's weights, as MaxText's models have them."""


def maxtext_specs(names: Mapping[str, Sequence[str | None]], *, tensor: bool) -> dict[str, P]:
    """Return where MaxText's rules put weights: "embed" over the replicas, what is inside of a layer over "model"."""
    axes = {"embed": "data"} | (dict.fromkeys(("heads", "mlp", "vocab"), "model") if tensor else {})
    return {
        rf"(^|\.){weight}$": P(*(axes.get(name or "") for name in dimensions)) for weight, dimensions in names.items()
    }


def _maxtext() -> list[Published]:
    """The state divided over all chips (fsdp), or over some, with tensor parallelism among the others."""
    rows = (
        ("Llama-70B", LLAMA_70B, "tpu-v6e", (128, 1), 512),
        ("Llama-70B", LLAMA_70B, "tpu-v5p", (256, 1), 512),
        ("Llama-70B", LLAMA_70B, "tpu-v5p", (64, 4), 256),
        ("Llama-405B", LLAMA_405B, "tpu-v5p", (256, 1), 256),
        ("Llama-405B", LLAMA_405B, "tpu-v5p", (32, 8), 128),
    )
    return [*(_by_rules(*row) for row in rows), _deepseek()]


def _deepseek() -> Published:
    """DeepSeek-V3 by the same rules, as deep and as wide: the state divided over all chips."""
    size = DeepSeekSize(
        width=7168,
        layers=61,
        experts=256,
        chosen=8,
        shared=1,
        expert_hidden=2048,
        hidden=18432,
        heads=128,
        vocabulary=129280,
        batch=512,
    )
    return Published(
        name="DeepSeek-V3, fsdp 256",
        source="MaxText",
        workload=partial(deepseek_moe, "deepseek-v3", size),
        machine="tpu-v5p",
        devices=256,
        methods=(Megatron(data=256, zero=3),),
        note="every layer recomputed; heads as in other transformers, experts in all layers but the first",
    )


def _by_rules(name: str, model: Llama, machine: str, degrees: tuple[int, int], batch: int) -> Published:
    fsdp, tensor = degrees
    model = replace(model, scanned=False, sequence=8192, batch=batch)
    method: Method = Megatron(data=fsdp, zero=3)
    if tensor > 1:
        method = Auto(
            num_stages=1,
            num_microbatches=1,
            mesh_shape=degrees,
            pins=maxtext_specs(_LLAMA_RULES, tensor=True),
            remat=False,
        )
    return Published(
        name=f"{name}, fsdp {fsdp}, tensor {tensor}",
        source="MaxText",
        workload=partial(llama_workload, name.lower(), model),
        machine=machine,
        devices=fsdp * tensor,
        methods=(method,),
        note="every layer recomputed",
    )
