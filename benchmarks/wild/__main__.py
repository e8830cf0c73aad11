"""Try autopar on train steps that other people wrote: every case, by three methods, beside its own jit.

    make wild                                   installs the packages apart, runs all, writes docs/wild.md
    python -m benchmarks.wild [case ...] [--json F] [--markdown F] [--timeout SECONDS]

Without cases, those are run whose packages are installed here: some need a newer Python and JAX than others. Rows of
another environment that F holds stand, so that the table is of all.

Each case and method is a process of its own, on 8 virtual CPU devices. Two calls are made on the arguments; what they
returned, and what they changed in place, is held beside the same two calls under the package's own jit.

    right      equal, as far as rounding allows
    refused    an autopar error: its first sentence is the reason
    WRONG      other numbers
    RAW        another exception
    SILENT     equal, but nothing was divided, and nobody was told (a search may find that best: its plan says so)

Exits 1 when anything is wrong, raw, silent or out of time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

METHODS = ("data", "pipeline", "auto")
_MISSING = "not installed"
BAD = ("WRONG", "RAW", "SILENT", "TIMEOUT")
TOLERANCE = 2e-4
"""Tolerance as a share of the largest entry of a leaf: float32 sums in another order, two steps long."""
SMALL = 1e-2
"""Share of the median leaf: one with smaller entries is held to this size. It may be nothing but rounding, like the
gradient of a bias before a batch norm."""


def main() -> None:
    """Run the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; by default those whose packages are here")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--json", type=Path, help="write the figures here; what it holds of others stands")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a case by one method")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(*options.one)))
        return
    known: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
    elsewhere = {row["case"] for row in known if row["here"] != environment()}
    rows = run_all(options.cases or installed(elsewhere), options.methods, options.timeout)
    run = {(row["case"], row["method"]) for row in rows}
    rows = [row for row in known if (row["case"], row["method"]) not in run] + rows
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    counts = {status: sum(row["status"] == status for row in rows) for status in ("right", "refused", *BAD)}
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    sys.exit(any(counts[status] for status in BAD))


def environment() -> str:
    """Return the Python and the JAX that run here, in words."""
    return f"Python {sys.version.split()[0]}, jax {_version('jax')}"


def installed(without: Collection[str]) -> list[str]:
    """Return the cases whose packages are installed here, without those that have been run elsewhere."""
    from benchmarks.wild.cases import CASES

    return [name for name, (package, _) in CASES.items() if name not in without and _version(package) != _MISSING]


def run_all(names: list[str], methods: tuple[str, ...], timeout: float) -> list[dict[str, Any]]:
    """Return a row for each case and method, and print each as it comes."""
    from benchmarks.wild.cases import CASES

    unknown = set(names) - set(CASES)
    if unknown:
        raise SystemExit(f"There is no case {', '.join(sorted(unknown))}. There are {', '.join(CASES)}.")
    rows = []
    for name in names:
        package, build = CASES[name]
        about = {"case": name, "package": package, "version": _version(package), "what": (build.__doc__ or "").strip()}
        about["here"] = environment()
        for method in methods:
            row = about | {"method": method} | _in_a_process(name, method, timeout)
            rows.append(row)
            print(f"{row['status']:8} {name:28} {method:9} {row['seconds']:5.0f} s  {row['said'][:150]}", flush=True)
    return rows


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _MISSING


def _in_a_process(name: str, method: str, timeout: float) -> dict[str, Any]:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
    }
    started = time.monotonic()
    words = [sys.executable, "-m", "benchmarks.wild", "--one", name, method]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "TIMEOUT", "said": f"not done after {timeout:.0f} s", "seconds": timeout}
    seconds = time.monotonic() - started
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"status": "RAW", "said": f"ended with {done.returncode}: {last}", "seconds": seconds}
    return json.loads(lines[-1]) | {"seconds": round(seconds, 1)}


def run_one(name: str, method: str) -> dict[str, Any]:
    """Return status and words of one case by one method, in this process."""
    import autopar
    from benchmarks.wild.cases import CASES

    wild = CASES[name][1]()
    wanted = _two_calls(wild.jit(wild.step), wild)
    methods = {
        "data": autopar.DataParallel(),
        "pipeline": autopar.PipelineParallel(num_stages=2, num_microbatches=2),
        "auto": autopar.Auto(),
    }
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            step = autopar.parallelize(wild.step, method=methods[method], **wild.options)
            got = _two_calls(step, wild)
        except autopar.AutoparError as error:
            return {"status": "refused", "said": f"{type(error).__name__}: {error}"}
        except Exception as error:  # whatever came through is what this looks for
            return {"status": "RAW", "said": f"{type(error).__name__}: {error}"}
    said = "; ".join(sorted({str(w.message) for w in told if w.category.__module__.startswith("autopar")}))
    off, where = _difference(wanted, got)
    if not off <= TOLERANCE:
        return {"status": "WRONG", "said": f"off by {off:.1e} of the largest entry in {where}"}
    if not said and not _divides(step):
        if method != "auto":
            return {"status": "SILENT", "said": "no input is divided, and nothing was said"}
        said = "the search found it cheapest to divide nothing"
    return {"status": "right", "said": said, "off": off}


def _two_calls(step: Any, wild: Any) -> Any:
    import jax

    arguments, keywords = wild.arguments(), wild.keywords()
    with wild.around():
        results = [step(*arguments, **keywords) for _ in range(2)]
    return jax.device_get(_arrays((results, arguments)))


def _arrays(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by their paths, those inside of nnx modules too."""
    import jax
    from flax import nnx

    flat = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(tree)) if _has_modules(tree) else tree)
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in flat if isinstance(leaf, jax.Array)}
    return {
        path: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for path, leaf in arrays.items()
    }


def _has_modules(tree: Any) -> bool:
    import jax
    from flax import nnx

    is_module = lambda node: isinstance(node, nnx.Object)  # noqa: E731
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _difference(wanted: dict[str, Any], got: dict[str, Any]) -> tuple[float, str]:
    """Return the largest difference, relative to the largest entry of its leaf, and the leaf."""
    import numpy as np

    if set(wanted) != set(got):
        return float("inf"), f"leaves {sorted(set(wanted) ^ set(got))[:3]} that only one of them has"
    largest = {path: np.nanmax(np.abs(np.asarray(leaf, np.float64)), initial=0.0) for path, leaf in wanted.items()}
    least = max(SMALL * float(np.median(list(largest.values()) or [0.0])), 1e-6)
    worst, where = 0.0, ""
    for path, leaf in wanted.items():
        a, b = (np.asarray(x, np.float64) for x in (leaf, got[path]))
        if a.shape != b.shape:
            return float("inf"), f"{path}: {b.shape} for {a.shape}"
        apart = np.where(np.isnan(a) & np.isnan(b), 0.0, np.abs(a - b))
        off = float(np.max(np.nan_to_num(apart, nan=np.inf), initial=0.0)) / max(largest[path], least)
        if off > worst:
            worst, where = off, path
    return worst, where


def _divides(step: Any) -> bool:
    """Return whether the last plan divides any input, over devices or into microbatches or stages."""
    plan = step.all_compiled()[-1].plan
    divided = [any(axes is not None for axes in spec) for spec in plan.input_specs.values()]
    return plan.num_microbatches > 1 or len(plan.meshes) > 1 or any(divided)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of `docs/wild.md`."""
    places = list(dict.fromkeys(row["here"] for row in rows))
    lines = [
        "# Train steps that other people wrote",
        "",
        "Models, losses and steps of released packages, each by three methods on 8 virtual CPU devices beside its own",
        "`jit`; two calls, results and what is changed in place compared. Made by `make wild`.",
        "",
        *(f"{here}: {', '.join(dict.fromkeys(r['package'] for r in rows if r['here'] == here))}." for here in places),
        "",
        "| package | step | `DataParallel()` | `PipelineParallel` 2 x 2 | `Auto()` |",
        "|---|---|---|---|---|",
    ]
    notes: list[str] = []
    for name in dict.fromkeys(row["case"] for row in rows):
        by_method = {row["method"]: row for row in rows if row["case"] == name}
        first = next(iter(by_method.values()))
        cells = []
        for method in METHODS:
            row = by_method.get(method)
            cell = "" if row is None else row["status"]
            if row is not None and row["said"]:
                words = " ".join(row["said"].split())
                said = re.sub(r"\S*/(?=benchmarks/wild|site-packages)(site-packages/)?", "", words)
                notes.append(f"{name}, {method}: {said}")
                cell += f" [{len(notes)}]"
            cells.append(cell)
        what = first["what"].splitlines()[0]
        lines.append(f"| {first['package']} {first['version']} | {what} | {' | '.join(cells)} |")
    lines += ["", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
