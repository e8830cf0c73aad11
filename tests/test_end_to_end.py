"""Every step of the zoo, parallelized in every way, equals the plain `jax.jit` step after three steps.

The full product of models, stages, microbatches and schedules is `benchmarks/equivalence.py`; the table below
covers it: every model with each number of stages and each number of microbatches, every schedule with many models.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import equivalence as benchmark
from tests.equivalence import SCHEDULES, Configuration, compare
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("float64")

COLUMNS = {"specs": {r"\['(w|kernel)'\]$": P(None, "model")}}
EXPERTS = {"specs": {r"\['(up|down)'\]$": P("model")}}
MESH_2_4, MESH_2_2 = {"mesh_shape": (2, 4)}, {"mesh_shape": (2, 2)}
REMAT = {"remat": True}


def one(num_microbatches: int, *, donate: bool = False, **options: Any) -> Configuration:
    return Configuration(num_stages=1, num_microbatches=num_microbatches, donate=donate, options=options)


def two(num_microbatches: int, schedule: str, *, donate: bool = False, **options: Any) -> Configuration:
    return Configuration(
        num_stages=2, num_microbatches=num_microbatches, schedule=schedule, donate=donate, options=options
    )


def four(num_microbatches: int, schedule: str, *, donate: bool = False, **options: Any) -> Configuration:
    return Configuration(
        num_stages=4, num_microbatches=num_microbatches, schedule=schedule, donate=donate, options=options
    )


# Models that compile in seconds.
LIGHT = {
    "mlp": (one(4, **MESH_2_4, **COLUMNS), two(1, "gpipe"), four(2, "zero-bubble", layers=8)),
    "tied_embedding": (one(1, donate=True), two(4, "eager-1f1b", donate=True), four(2, "1f1b")),
    "sum_loss": (one(2), two(4, "interleaved", donate=True), four(1, "gpipe")),
    "arange_loss": (one(4), two(2, "zero-bubble", **REMAT), four(1, "eager-1f1b")),
    "regularized": (one(2), two(1, "1f1b", donate=True), four(4, "eager-1f1b", layers=6)),
    "remat_whole": (one(1), two(2, "gpipe", **REMAT), four(4, "interleaved")),
    "several_arguments": (one(4), two(2, "1f1b", layers=5), four(1, "zero-bubble", donate=True)),
    "dropout_legacy_key": (one(2), two(4, "1f1b", **REMAT), four(1, "zero-bubble")),
    "vae": (one(1), two(2, "gpipe"), four(4, "1f1b", donate=True)),
    "control_flow": (one(2), two(4, "gpipe"), four(1, "eager-1f1b")),
    "scan_layers": (one(1), two(2, "interleaved", layers=8, donate=True), four(4, "zero-bubble")),
    "nested_jit": (one(4), two(1, "interleaved"), four(2, "1f1b", layers=6)),
}
# Models whose four stages take long to compile.
HEAVY = {
    "gpt_linen": (one(1, **MESH_2_4, **COLUMNS), two(2, "zero-bubble", **MESH_2_2, **COLUMNS), four(4, "1f1b")),
    "gpt_scan": (one(2), two(4, "interleaved"), four(1, "1f1b", donate=True)),
    "gpt_bfloat16": (one(4), two(1, "eager-1f1b"), four(2, "gpipe")),
    "gpt_nnx": (one(1), two(4, "gpipe", **REMAT), four(2, "eager-1f1b")),
    "gpt_equinox": (one(4), two(2, "1f1b", donate=True), four(1, "zero-bubble")),
    "moe": (one(2, **MESH_2_4, **EXPERTS), two(1, "interleaved"), four(4, "zero-bubble")),
    "convnet": (one(4), two(1, "zero-bubble"), four(2, "1f1b", **REMAT)),
    "convnet_batch_norm": (one(1), two(2, "1f1b"), four(4, "gpipe")),
    "vit": (one(2), two(4, "eager-1f1b"), four(1, "gpipe")),
    "recurrent": (one(1), two(4, "zero-bubble"), four(2, "gpipe")),
    "encoder_decoder": (one(4), two(2, "interleaved"), four(1, "1f1b")),
    "masked_lm": (one(2), two(1, "gpipe", **REMAT), four(4, "eager-1f1b")),
    "dropout": (one(4), two(2, "eager-1f1b", donate=True), four(1, "interleaved")),
    "gan": (one(4), two(1, "1f1b"), four(2, "gpipe")),
}
TABLE = {**LIGHT, **HEAVY}

ROWS = [
    pytest.param(name, c, id=f"{name}: {c}", marks=[pytest.mark.slow] if name in HEAVY and c.num_stages != 2 else [])
    for name, configurations in TABLE.items()
    for c in configurations
]


@pytest.mark.parametrize(("name", "configuration"), ROWS)
def test_parallelized_step_equals_the_plain_step(name, configuration):
    agreement = compare(ZOO[name], configuration)
    assert agreement.holds, str(agreement)


def test_the_table_covers_the_product():
    assert TABLE.keys() == ZOO.keys()
    for configurations in TABLE.values():
        assert {c.num_stages for c in configurations} == {1, 2, 4}
        assert {c.num_microbatches for c in configurations} == {1, 2, 4}
    models = Counter(c.schedule for configurations in TABLE.values() for c in configurations if c.num_stages > 1)
    assert set(models) == set(SCHEDULES)
    assert min(models.values()) >= 5


def test_the_benchmark_writes_what_it_found(tmp_path: Path):
    file = tmp_path / "equivalence.json"
    assert not benchmark.main(
        [
            "--models",
            "nested_jit",
            "--stages",
            "1",
            "2",
            "--microbatches",
            "2",
            "--schedules",
            "gpipe",
            "--json",
            str(file),
        ]
    )
    rows = json.loads(file.read_text())
    assert [(row["num_stages"], row["schedule"], row["equal"]) for row in rows] == [(1, "", True), (2, "gpipe", True)]
