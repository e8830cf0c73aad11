"""Run every long benchmark, one after the other: what is looked at before a release.

    python -m benchmarks.sweep --list                    what there is, and its minutes on 2 cores
    python -m benchmarks.sweep --only optimality_gaps
    python -m benchmarks.sweep --keep-going              do not stop at the first that fails

Each is a process of its own. What it prints goes to OUT/NAME.log, its figures to OUT/NAME.json. A sweep fails if a
benchmark ends with an error; several end so if a promise is broken (a gap, a difference, bytes that were not planned).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

OUT = Path(".cache") / "sweep"
GPU_COMPILER = "jax_cuda12_plugin"
"""XLA's GPU compiler, which autopar[gpu-aot] brings."""
NOT_SWEPT = {
    "benchmarks.sailor_simulator": "needs a clone of eth-easl/sailor, and what its own script plans",
    "benchmarks.accuracy": "needs a file of measured steps",
    "benchmarks.measured_steps": "needs a GPU of 80 GB",
    "benchmarks.single_device": "needs a GPU",
    "benchmarks.attention_kernels": "needs a GPU with cuDNN",
    "benchmarks.weak_scaling_local": "is the process in which `benchmarks` times one case on the devices here",
    "benchmarks.wild": "needs packages of its own, which `make wild` installs",
    "benchmarks.sweep": "is this one",
}
"""The reason that a benchmark is no part of the sweep."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A benchmark with its options.

    The minutes are those of 2 cores: of a whole run, or summed over the rows that are kept; None where nobody measured
    them.
    """

    name: str
    words: tuple[str, ...]
    minutes: float | None
    shows: str
    needs: str = ""
    """A module, or a program on the PATH, without which it is skipped."""

    def can_run(self) -> bool:
        """True if what it needs is installed."""
        return (
            not self.needs or importlib.util.find_spec(self.needs) is not None or shutil.which(self.needs) is not None
        )


def _weak_scaling(family: str, gpus: str, methods: str, minutes: float) -> Sweep:
    words = ("benchmarks", family, "--cluster", "p3.16xlarge", "--gpus", gpus, "--method", methods)
    return Sweep(
        name=f"weak_scaling_{family}", words=words, minutes=minutes, shows="searched plans beside those by hand"
    )


SWEEPS = (
    Sweep(
        name="equivalence",
        words=("benchmarks.equivalence",),
        minutes=76,
        shows="models x stages x schedules x microbatches equal jax.jit",
    ),
    Sweep(
        name="equivalence_searched",
        words=("benchmarks.equivalence", "--searched"),
        minutes=6,
        shows="searched plans equal jax.jit",
    ),
    Sweep(
        name="random_steps",
        words=("benchmarks.random_steps",),
        minutes=None,
        shows="random steps of every kind under six methods equal jax.jit, or are refused",
    ),
    Sweep(
        name="answers",
        words=("benchmarks.answers",),
        minutes=30,
        shows="what explain, what_if, diff and fixes print of twelve models by every method comes out so",
    ),
    Sweep(
        name="printed_layouts",
        words=("benchmarks.printed_layouts",),
        minutes=None,
        shows="the layouts that plans print are those of the arrays that run, for every model and method",
    ),
    Sweep(
        name="scopes",
        words=("benchmarks.scopes",),
        minutes=18,
        shows="scopes nested two and three deep, and every pair of bridges, equal jax.jit and are compiled as planned",
    ),
    Sweep(
        name="mutants",
        words=("benchmarks.mutants",),
        minutes=14,
        shows="programs and plans of eight models, broken in 25 ways, are noticed",
    ),
    Sweep(
        name="planned_vs_compiled",
        words=("benchmarks.planned_vs_compiled", "--compilers", "cpu"),
        minutes=31,
        shows="the compiled collectives are the planned ones, to the byte",
    ),
    Sweep(
        name="optimality_gaps",
        words=("benchmarks.optimality_gaps",),
        minutes=5,
        shows="gap of every model's plan to the lower bound",
    ),
    Sweep(
        name="plan_quality",
        words=("benchmarks.plan_quality", "--budgets", "inf", "0.75", "0.5", "0.3"),
        minutes=90,
        shows="modelled time and compiled bytes beside plans by hand",
    ),
    Sweep(
        name="search_quality",
        words=("benchmarks.search_quality",),
        minutes=None,
        shows="Auto() beside its own restrictions and plans by hand, simulated",
    ),
    Sweep(
        name="freedom",
        words=("benchmarks.freedom",),
        minutes=None,
        shows="ladders of devices, memory, links, effort and kinds of parallelism: more of one makes no plan slower",
    ),
    Sweep(
        name="published_plans",
        words=("benchmarks.published_plans",),
        minutes=None,
        shows="Auto() beside the plans that Megatron-LM, Llama 3 and MaxText publish, simulated",
    ),
    Sweep(
        name="chosen_here",
        words=("benchmarks.chosen_here",),
        minutes=None,
        shows="the chosen plan beside simpler ones, run on eight devices of this CPU",
    ),
    Sweep(
        name="enumerated_plans",
        words=("benchmarks.enumerated_plans",),
        minutes=80,
        shows="Auto() beside all plans of 200 small steps, simulated",
    ),
    Sweep(
        name="planned_vs_compiled_gpu",
        words=("benchmarks.planned_vs_compiled", "--compilers", "h100:8", "h100:64"),
        minutes=45,
        shows="the same by XLA's GPU compiler",
        needs=GPU_COMPILER,
    ),
    Sweep(
        name="plan_quality_gpu",
        words=("benchmarks.plan_quality", "--target", "h100", "--sizes", "large"),
        minutes=None,
        shows="beside plans by hand, by XLA's GPU compiler",
        needs=GPU_COMPILER,
    ),
    Sweep(
        name="plan_quality_bfloat16",
        words=(
            *("benchmarks.plan_quality", "--models", "gpt", "llama", "moe", "vit", "convnet", "--target", "h100"),
            *("--sizes", "large", "--layers", "2", "--dtype", "bfloat16"),
        ),
        minutes=None,
        shows="the same of steps in bfloat16 with parameters in float32",
        needs=GPU_COMPILER,
    ),
    Sweep(
        name="memory_model",
        words=("benchmarks.memory_model",),
        minutes=None,
        shows="modelled beside compiled peak memory and bytes moved",
        needs=GPU_COMPILER,
    ),
    Sweep(
        name="memory_of_methods",
        words=("benchmarks.memory_of_methods",),
        minutes=None,
        shows="the same peak of plans by hand and searched, for a GPT of which no rule of the model was chosen",
        needs=GPU_COMPILER,
    ),
    Sweep(
        name="compiled_offload",
        words=("benchmarks.compiled_offload",),
        minutes=None,
        shows="XLA's GPU compiler has the transfers of offloaded plans, and the memory of devices and hosts",
        needs=GPU_COMPILER,
    ),
    Sweep(
        name="compressed_gradients",
        words=("benchmarks.compressed_gradients",),
        minutes=2,
        shows="losses of a GPT whose gradients are sent in 16 and in 8 bits, and their bytes, planned and compiled",
    ),
    Sweep(
        name="xla_tables",
        words=("benchmarks.xla_tables",),
        minutes=1,
        shows="what plans have for collectives and products, against the tables that XLA's GPU compiler carries",
        needs=GPU_COMPILER,
    ),
    Sweep(
        name="plan_time",
        words=("benchmarks.plan_time",),
        minutes=2,
        shows="seconds to plan Llama steps on one mesh",
    ),
    Sweep(
        name="pipeline_plan_time",
        words=("benchmarks.pipeline_plan_time",),
        minutes=3,
        shows="seconds to plan GPT-39B in stages for 64 GPUs",
    ),
    Sweep(
        name="very_large",
        words=("benchmarks.very_large",),
        minutes=7,
        shows="models of 1T and 10T parameters on 480 and 512 V100s, measure by measure, and that they fit",
    ),
    Sweep(
        name="schedules",
        words=("benchmarks.schedules",),
        minutes=9,
        shows="schedules on the same degrees, simulated",
    ),
    Sweep(
        name="stage_search_time",
        words=("benchmarks.stage_search_time",),
        minutes=1.3,
        shows="seconds of the search over stages alone, and its gap",
    ),
    Sweep(
        name="mixed_clusters",
        words=("benchmarks.mixed_clusters", "exact"),
        minutes=0.2,
        shows="stages on devices of several kinds, against enumeration",
    ),
    Sweep(
        name="mixed_clusters_shares",
        words=("benchmarks.mixed_clusters", "shares", "--cases", "1500"),
        minutes=0.1,
        shows="shares of the microbatches, against enumeration",
    ),
    Sweep(
        name="mixed_clusters_time",
        words=("benchmarks.mixed_clusters", "time"),
        minutes=0.1,
        shows="seconds of the search over stages of two kinds",
    ),
    Sweep(
        name="published_clusters",
        words=("benchmarks.published_clusters",),
        minutes=None,
        shows="plans for published mixed clusters beside those that were published",
    ),
    Sweep(
        name="unequal_processes",
        words=("benchmarks.unequal_processes",),
        minutes=None,
        shows="planned against even shares of two processes of unequal speed",
    ),
    Sweep(
        name="slow_link",
        words=("benchmarks.slow_link",),
        minutes=3,
        shows="what microbatches in flight bring back of what a slow link between two processes costs",
    ),
    Sweep(
        name="overhead",
        words=("benchmarks.overhead",),
        minutes=2,
        shows="what the front end costs where there is nothing to gain",
    ),
    Sweep(
        name="ray_runtime",
        words=("benchmarks.ray_runtime",),
        minutes=2,
        shows="the driver's time, overlap of stages in processes",
    ),
    Sweep(
        name="cluster_faults",
        words=("benchmarks.cluster_faults",),
        minutes=None,
        shows="training goes on right, or ends with one error",
    ),
    Sweep(
        name="bad_input",
        words=("benchmarks.bad_input",),
        minutes=None,
        shows="hostile options and damaged files are accepted or refused",
    ),
    Sweep(
        name="growth",
        words=("benchmarks.growth",),
        minutes=None,
        shows="10,000 calls, and as many trained steps: nothing grows",
    ),
    Sweep(
        name="explorer_pages",
        words=("benchmarks.explorer_pages", "--folder", str(OUT / "pages")),
        minutes=6,
        shows="pages of plans: size, first paint, interactions",
        needs="chromedriver",
    ),
    Sweep(
        name="elastic",
        words=("benchmarks.elastic", "--events", "20"),
        minutes=None,
        shows="no step is lost while hosts are lost, leave and join",
    ),
    _weak_scaling("gpt", "1,2,4,8,16,32,64", "auto,megatron,zero3,data,inter-only", 35),
    _weak_scaling("moe", "1,2,4,8,16,32,64", "auto,megatron", 30),
    _weak_scaling("wresnet", "4,8,16,32", "auto,intra-only,megatron,zero3", 65),
)


def main() -> None:
    """Run those asked for; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [sweep.name for sweep in SWEEPS]
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--keep-going", action="store_true", help="run the others if one fails")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIRECTORY", help=f"for logs and figures ({OUT})")
    options = parser.parse_args()
    chosen = [sweep for sweep in SWEEPS if sweep.name in options.only]
    if options.list:
        print("\n".join(_line(sweep) for sweep in chosen))
        return
    failed: list[str] = []
    for sweep in chosen:
        if not sweep.can_run():
            print(f"{sweep.name:24} SKIPPED: needs {sweep.needs}", flush=True)
            continue
        seconds, status = _run(sweep, options.out)
        print(
            f"{sweep.name:24} {'passed' if status == 0 else f'FAILED ({status})':12} {seconds / 60:6.1f} min",
            flush=True,
        )
        if status:
            failed.append(sweep.name)
            if not options.keep_going:
                break
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. What they printed is in {options.out}.")


def _line(sweep: Sweep) -> str:
    minutes = "not measured" if sweep.minutes is None else f"{sweep.minutes:g} min"
    return f"{sweep.name:24} {minutes:>12}  {sweep.shows}\n{'':38}python -m {' '.join(sweep.words)}"


def _run(sweep: Sweep, out: Path) -> tuple[float, int]:
    """Return its seconds and exit status."""
    out.mkdir(parents=True, exist_ok=True)
    figures = out / f"{sweep.name}.json"
    figures.unlink(missing_ok=True)  # some add their rows to those that it holds
    began_s = time.monotonic()
    with open(out / f"{sweep.name}.log", "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", *sweep.words, "--json", str(figures)]
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    return time.monotonic() - began_s, status


if __name__ == "__main__":
    main()
