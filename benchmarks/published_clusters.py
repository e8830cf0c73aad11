"""Plans for the mixed clusters of a published evaluation, beside the plans that were published for them.

    python -m benchmarks.published_clusters --json published.json
    python -m benchmarks.published_clusters --sizes 32+96

Clusters of two kinds are those of Sailor (SOSP 2025, arXiv 2504.17096, figure 8b; eth-easl/sailor, sailor/Planner/
simulations/configs/gpu_trace_heterogeneous_imbalanced.csv): A100s of 40 GB and V100s of 16 GB, four to a host. The
model is its OPT-350M with batches of 1024 sequences of 2048 tokens, or 1280 where 80 and 240 devices have to divide
them; 16 bits with a master copy. Between hosts NCCL reaches 2.42 GB/s from A100s and 1.72 GB/s from V100s (sailor/
providers/multizone_bandwidths_het.json, the last figures of us-central1-a). Clusters of three kinds are made of the
V100s, P100s and T4s of Metis (USENIX ATC 2024), four to a host, with 0.8 of 16 Gb/s between hosts; the model is
GPT-350M with batches of 128 sequences of 1024 tokens. All is simulated by the costs of this library.

    Auto        the search, with no more than its default limits
    even        equal numbers of devices and layers: Megatron, the best of its degrees and numbers of microbatches
    Metis       what its planner, as it is in Sailor's repository, prints first for the cluster; for three kinds the one
                in SamsungLabs/Metis, which is told what this library says of a layer at each batch and degree
    Sailor      what the planner of Sailor prints first

A published plan is the model with its stages named, on as many devices of their kinds; layouts within a stage are the
best ones and not its own, and its number of microbatches is the better of the powers of two around its own. That of
Sailor for 32 + 96 has a stage of 24 hosts of V100s and three A100s, and one of 27 A100s: its 27 replicas divide no
batch of ours, so that it gets 32 of each, on 128 V100s and 32 A100s, which is more than there are. Metis' for three
kinds is the first with layers and one kind in each stage, its 13th of 4+4+8 V100s, P100s and T4s and its 87th of
16+8+8: the others are of stages that are no meshes here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.hardware.machine import Machine
from benchmarks.models import alpa_layers, transformer
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from benchmarks.models.model import Tree
from benchmarks.models.workload import Workload

A100, V100, P100, T4 = "a100-40", "v100-16", "p100-16", "t4-16"
BLOCKS, PER_HOST = 24, 4
MACHINES = {A100: "p4d.24xlarge", V100: "p3.16xlarge", P100: "nc24s-v2", T4: "g4dn.12xlarge"}
SAILOR_CARDS = {A100: 2.42e9, V100: 1.72e9}
METIS_CARDS = dict.fromkeys((V100, P100, T4), 0.8 * 16e9 / 8)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Stages by their layers, the embedding and the head counted as one each, and the devices of each by kind."""

    planner: str
    stages: tuple[tuple[int, str, int], ...]
    microbatches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster by the devices of each kind, the examples of a batch, and what was published for it."""

    devices: dict[str, int]
    batch: int
    published: tuple[Published, ...]
    cards: dict[str, float] = field(default_factory=lambda: SAILOR_CARDS)
    """Bytes/s from a host of each kind."""
    length: int = 2048
    vocabulary: int = 50272


CASES = {
    "32+96": Case(
        devices={A100: 32, V100: 96},
        batch=1024,
        published=(
            Published(
                planner="Metis",
                stages=((8, A100, 16), (7, A100, 16), (4, V100, 32), (7, V100, 64)),
                microbatches=(32, 64),
            ),
            Published(planner="Sailor", stages=((13, V100, 128), (13, A100, 32)), microbatches=(16, 32)),
        ),
    ),
    "80+240": Case(
        devices={A100: 80, V100: 240},
        batch=1280,
        published=(
            Published(planner="Metis", stages=((11, A100, 32), (10, A100, 32), (5, V100, 64)), microbatches=(32, 64)),
            Published(
                planner="Sailor",
                stages=(
                    (3, V100, 80),
                    (3, A100, 20),
                    (4, A100, 20),
                    (4, A100, 20),
                    (4, A100, 20),
                    (4, V100, 80),
                    (4, V100, 80),
                ),
                microbatches=(64,),
            ),
        ),
    ),
    "128+384": Case(
        devices={A100: 128, V100: 384},
        batch=1024,
        published=(
            Published(planner="Metis", stages=((5, V100, 128), (8, V100, 256), (13, A100, 128)), microbatches=(8,)),
            Published(
                planner="Sailor",
                stages=(
                    (3, V100, 128),
                    (3, A100, 32),
                    (4, A100, 32),
                    (4, A100, 32),
                    (4, A100, 32),
                    (4, V100, 128),
                    (4, V100, 128),
                ),
                microbatches=(32,),
            ),
        ),
    ),
    "4+4+8": Case(
        devices={V100: 4, P100: 4, T4: 8},
        batch=128,
        published=(
            Published(
                planner="Metis",
                stages=((15, V100, 4), (3, P100, 4), (5, T4, 4), (3, T4, 4)),
                microbatches=(8, 16, 32),
            ),
        ),
        cards=METIS_CARDS,
        length=1024,
        vocabulary=51200,
    ),
    "16+8+8": Case(
        devices={V100: 16, P100: 8, T4: 8},
        batch=128,
        published=(
            Published(
                planner="Metis",
                stages=((11, V100, 8), (11, V100, 8), (2, P100, 8), (2, T4, 8)),
                microbatches=(4, 8, 16),
            ),
        ),
        cards=METIS_CARDS,
        length=1024,
        vocabulary=51200,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan: the seconds of a step, whether it fits, and the processor seconds that it took to find."""

    cluster: str
    plan: str
    step_time_s: float
    fits: bool
    choice: str
    plan_time_s: float


def cluster_of(
    devices: Mapping[str, int], cards: Mapping[str, float], machines: Mapping[str, Machine] | None = None
) -> autopar.Cluster:
    """Return the hosts of four devices each; of these machines, by default those that the library knows."""
    groups: list[autopar.Cluster] = []
    for kind, count in devices.items():
        found = machines[kind] if machines is not None else Machine.named(MACHINES[kind])
        near = tuple(pair for pair in found.intra.group_bandwidths if pair[0] <= PER_HOST)
        exchanged = tuple(pair for pair in found.intra.exchange_bandwidths if pair[0] <= PER_HOST)
        machine = replace(
            found,
            name=kind,
            devices_per_host=PER_HOST,
            domain=PER_HOST,
            intra=replace(found.intra, group_bandwidths=near, exchange_bandwidths=exchanged),
            inter=replace(found.inter, bandwidth=cards[kind] / PER_HOST, group_bandwidths=(), exchange_bandwidths=()),
        )
        groups.append(autopar.Cluster.of_hosts(machine, count // PER_HOST))
    return autopar.Cluster.of_groups(groups)


def staged(whole: Workload, layers: Sequence[int], scope: Callable[[int], AbstractContextManager[None]]) -> Workload:
    """Return a GPT with so many layers in each scope, the embedding and the head counted as one each."""
    owner = [number for number, count in enumerate(layers) for _ in range(count)]

    def loss(params: Tree, statistics: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        with scope(0):
            x = transformer.norm(params["norm"], params["embedding"][batch["tokens"]] + params["positions"])
        for number, at in enumerate(owner[1:-1]):
            with scope(at):
                x = alpa_layers.layer(params[f"h_{number}"], x)
        with scope(owner[-1]):
            return alpa_layers.cross_entropy(x @ params["head"] + params["head_bias"], batch["targets"]), statistics

    return replace(whole, loss=loss)


def model(case: Case, stages: Sequence[tuple[int, str, int]] = ()) -> Workload:
    """Return the model of 350M parameters as one, or with its stages named."""
    sizes = {"batch": case.batch, "length": case.length, "vocabulary": case.vocabulary}
    whole = alpa_gpt("350M", GPTSize(width=1024, layers=BLOCKS, heads=16, recomputed=False, **sizes))

    def scope(number: int) -> AbstractContextManager[None]:
        _, kind, devices = stages[number]
        return autopar.stage(f"stage_{number}", devices=devices, kind=kind)

    return staged(whole, [layers for layers, _, _ in stages], scope) if stages else whole


def planned(words: str, name: str, workload: Workload, method: autopar.Method, cluster: autopar.Cluster) -> Row | None:
    """Return the row of a plan by a method; None where there is none."""
    began = time.process_time()
    step = autopar.parallelize(workload.step, method=method, cluster=cluster)
    try:
        found = step.trace(workload.abstract_state, workload.abstract_batch).plan()
    except AutoparError as error:
        Console(stderr=True).print(f"{words}, {name}, {method}: {error}", highlight=False)
        return None
    report = found.simulate()
    return Row(
        cluster=words,
        plan=name,
        step_time_s=report.step_time_s,
        fits=report.fits,
        choice=found.plan.choice(),
        plan_time_s=time.process_time() - began,
    )


def even(words: str, case: Case) -> Iterator[Row | None]:
    """Yield pipelines of equal stages, each of one kind."""
    for pipeline in (4, 8, 16):
        for tensor, count in ((1, 4 * pipeline), (1, 8 * pipeline), (4, 8 * pipeline)):
            method = autopar.Megatron(pipeline=pipeline, tensor=tensor, num_microbatches=count)
            yield planned(words, "even", model(case), method, cluster_of(case.devices, case.cards))


def published(words: str, case: Case) -> Iterator[Row | None]:
    """Yield the published plans."""
    for each in case.published:
        wanted = {kind: sum(devices for _, mine, devices in each.stages if mine == kind) for kind in case.devices}
        cluster = cluster_of({kind: count for kind, count in wanted.items() if count}, case.cards)
        for count in each.microbatches:
            method = autopar.Auto(num_microbatches=count)
            yield planned(words, each.planner, model(case, each.stages), method, cluster)


def rows_of(words: str) -> Iterator[Row]:
    """Yield the plan of Auto, the best even one, and the best of each publication, one that fits if there is one."""
    case = CASES[words]
    auto = planned(words, "Auto", model(case), autopar.Auto(), cluster_of(case.devices, case.cards))
    others = [*published(words, case), *even(words, case)]
    for name in ("Auto", "even", *(each.planner for each in case.published)):
        mine = [row for row in (auto, *others) if row is not None and row.plan == name]
        yield from sorted(mine, key=lambda row: (not row.fits, row.step_time_s))[:1]


def main() -> None:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    rows: list[Row] = []
    for words in options.sizes:
        found = list(rows_of(words))
        rows += found
        table = Table("devices", "plan", "step s", "over Auto", "fits", "CPU s", "what")
        for row in found:
            over = f"{row.step_time_s / found[0].step_time_s:.2f}"
            cells = f"{row.step_time_s:.3f}", over, "yes" if row.fits else "no", f"{row.plan_time_s:.0f}"
            table.add_row(row.cluster, row.plan, *cells, row.choice.partition("; ")[0])
        Console(width=180).print(table)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
