"""Every path, module, function, make target and option that the pages name exists; their Python runs; links resolve."""

import ast
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

import autopar
from autopar.__main__ import COMMANDS
from autopar.compiler import passes
from autopar.hardware.cluster import Cluster
from benchmarks.sweep import NOT_SWEPT, SWEEPS
from tests.small_steps import mlp_batch, mlp_params, mlp_step, traced, two_stages
from tests.test_structure import PACKAGES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
# Their code goes on where that of the README ends, in this order.
GO_ON = ("guide.md", "methods.md", "reading-a-plan.md", "when-it-does-not-fit.md")
MAX_README_LINES = 200
TOP_LEVEL = ("autopar", "tests", "benchmarks", "docs", "examples", ".ci", ".github")
SUFFIXES = (".py", ".md", ".toml", ".yaml", ".yml", ".svg", ".png")
# A page may leave out the beginning of a module's name.
PREFIXES = ("", "autopar.", "autopar.compiler.")

over_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)


def quoted(page: Path) -> list[str]:
    """The words between backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command of the shell blocks, and of those quoted in the text."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)
    for words in quoted(page):
        if words.startswith(("make ", "python ", "pytest ", ".ci/", "autopar ")):
            yield words.split()


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Return the names that a module defines or imports, `Class.name` too; None if there is no such module."""
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return None
    return frozenset(_defined(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _defined(statements: list[ast.stmt], prefix: str) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.ClassDef(name=name, body=body):
                yield prefix + name
                yield from _defined(body, f"{prefix}{name}.")
            case ast.FunctionDef(name=name):
                yield prefix + name
            case ast.Assign(targets=targets):
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                yield from (prefix + (alias.asname or alias.name) for alias in names)
            case _:
                pass


def resolves(module: str, name: str = "") -> bool:
    every = (names_of(prefix + module) for prefix in PREFIXES)
    return any(names is not None and (not name or name in names) for names in every)


def options_of(module: str) -> str:
    """The text in which a benchmark's or a command's options stand."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    paths = [Path(str(spec.origin))]
    if paths[0].name == "__init__.py":
        # `python -m benchmarks gpt` hands its words on to one of these.
        paths = [paths[0].with_name(f"{name}.py") for name in ("__main__", "weak_scaling", "accuracy")]
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


def test_readme_is_short():
    assert len(read(ROOT / "README.md").splitlines()) <= MAX_README_LINES


@over_pages
def test_every_path_exists(page):
    # `compiler/passes.py` and the like go from the package on.
    places = (ROOT, ROOT / "autopar", ROOT / "autopar" / "compiler")
    paths = {
        word.split(":")[0]
        for word in quoted(page)
        if re.fullmatch(r"[\w./-]+(:\w+)?", word)
        and ("/" in word or word.split(":")[0].endswith(SUFFIXES))
        and (word.split("/")[0] in TOP_LEVEL or word.split(":")[0].endswith(SUFFIXES))
    }
    assert not [path for path in paths if not any((place / path).exists() for place in places)]


@over_pages
def test_every_module_and_function_exists(page):
    functions = {word for word in quoted(page) if re.fullmatch(r"[a-z_]\w*(\.\w+)*:\w+(\.\w+)*", word)}
    functions |= set(re.findall(r"→ `?([a-z_][\w.]*:\w+(?:\.\w+)*)", read(page)))
    assert not [word for word in functions if not resolves(*word.split(":"))]
    packages = "|".join(package.rpartition(".")[2] for package in PACKAGES)
    modules = {word for word in quoted(page) if re.fullmatch(rf"(autopar|benchmarks|tests|{packages})(\.\w+)+", word)}
    modules = {word for word in modules if not word.endswith(SUFFIXES)}
    missing = [
        word
        for word in modules
        if not resolves(word) and not resolves(*word.rsplit(".", 1)) and not hasattr(autopar, word.split(".")[1])
    ]
    assert not missing


@over_pages
def test_every_command_exists(page):
    targets = re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE)
    for words in commands(page):
        match words:
            case ["make", target, *_]:
                assert target in targets
            case [("python" | ".venv/bin/python"), "-m", module, *rest]:
                text = options_of(module) if module.startswith("benchmarks") else None
                unknown = [word for word in rest if word.startswith("--") and text and f'"{word}"' not in text]
                assert not unknown, f"{module} has no {unknown}"
            case [("python" | "pytest" | ".ci/run" | ".ci/test-newest") as program, *rest]:
                paths = [word for word in [program, *rest] if "/" in word]
                assert not [path for path in paths if not (ROOT / path.split("::")[0]).exists()]
            case ["autopar", command, *rest]:
                assert command in COMMANDS
                source = read(Path(COMMANDS[command][0].__file__))
                assert not [word for word in rest if word.startswith("-") and f'"{word}"' not in source]
            case _:
                pass


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@over_pages
def test_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@over_pages
def test_page_is_of_a_length_to_read(page):
    assert len(read(page).splitlines()) <= 320


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_every_sweep_exists(sweep):
    module, *words = sweep.words
    text = options_of(module)
    assert not [word for word in (*words, "--json") if word.startswith("--") and f'"{word}"' not in text]


def test_every_benchmark_is_in_the_sweep_or_says_why_not():
    files = [path for path in (ROOT / "benchmarks").rglob("*.py") if 'if __name__ == "__main__":' in read(path)]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files}
    assert modules == {sweep.words[0] for sweep in SWEEPS} | NOT_SWEPT.keys()
    assert len({sweep.name for sweep in SWEEPS}) == len(SWEEPS)


def test_errors_of_the_table_of_limits_are_public():
    text = read(ROOT / "docs" / "limits.md")
    table = text.partition("<!-- begin: not supported -->")[2].partition("<!-- end: not supported -->")[0]
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    assert len(rows) > 10
    for found, error in rows:
        names = [name for name in re.findall(r"`(\w+)`", error) if name[0].isupper()]
        assert names or error.startswith("a warning"), found
        assert all(issubclass(getattr(autopar, name), (autopar.AutoparError, Warning)) for name in names), found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_python_of_readme_and_guide_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it writes
    readme, guide = (blocks(page, "python") for page in (ROOT / "README.md", ROOT / "docs" / "guide.md"))
    assert (len(readme), len(guide)) == (2, 4)
    names: dict[str, Any] = {"__name__": "__main__"}  # so that its functions are sent by value, as a script's are
    for block in readme:
        exec(block, names)
    assert names["metrics"]["loss"] < 1.0
    assert names["planned"].plan.num_devices <= 64
    for block in guide:
        exec(block, names)
    assert names["history"][-1]["loss"] < names["history"][0]["loss"]
    assert names["report"].fits
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert json.loads(names["text"])["num_microbatches"] == 4
    assert names["planned"].plan.method == "PipelineParallel"
    for page in GO_ON[1:]:
        for block in blocks(ROOT / "docs" / page, "python"):
            exec(block, names)
    assert names["asked"].after.plan.method == "DataParallel"


RUN_BY: dict[str, str] = {
    "make demo": "tests/test_examples.py",
    "make test": "tests/test_docs.py",
    "make docs": ".ci/run",
    "make venv": ".ci/run",
    "make hooks": "not here: it would change the checkout's own settings",
    "git clone": "not here: CI has a clone, and nobody else's address",
    "python3 -m venv": ".ci/run",
    "pip install .": ".ci/run",
    "python -m webbrowser": "tests/reports/test_explorer.py",
    "autopar doctor --ray": "tests/commands/test_doctor.py",
    "srun": "not here: needs Slurm",
    "mpirun": "not here: needs Open MPI; tests/runtime/distributed starts such worlds by itself",
    "export RAY_": "not here: needs certificates and a cluster of its own",
    "python -m benchmarks": "test_benchmarks_of_the_pages_start",
    "autopar": "test_shell_of_get_started_runs_as_it_stands",
    "XLA_FLAGS=": "test_shell_of_get_started_runs_as_it_stands",
}
"""For what a command of the pages begins with, where it runs, or why it cannot; the first that fits counts."""


def shell_lines(page: Path) -> list[str]:
    """The commands of the shell blocks of a page, without their comments."""
    text = "".join(blocks(page, "sh")).replace("\\\n", " ")
    return [" ".join(line.partition(" #")[0].split()) for line in text.splitlines() if line.strip()]


def runner(line: str) -> str:
    return next((where for words, where in RUN_BY.items() if line.startswith(words)), "")


def test_every_shell_command_of_the_pages_runs_somewhere_or_says_why_not():
    lines = [line for page in PAGES for line in shell_lines(page)]
    assert len(lines) > 30 and not [line for line in lines if not runner(line)]
    assert {words for words in RUN_BY if not any(runner(line) == RUN_BY[words] for line in lines)} == set()
    for where in RUN_BY.values():
        assert where.startswith("not here: ") or where in globals() or (ROOT / where).exists(), where


def test_no_block_of_the_pages_is_left_out():
    kinds = {(kind, page.name) for page in PAGES for kind in re.findall(r"^ *```([\w{}-]+)", read(page), re.MULTILINE)}
    # `make docs` fails by what Sphinx cannot make of those in braces; architecture.md has a test of its own.
    others = {(kind, name) for kind, name in kinds if kind not in ("python", "sh", "json") and kind[0] != "{"}
    assert others == {("text", "architecture.md")}
    indented = [page.name for page in PAGES if re.search(r"^ +```", read(page), re.MULTILINE)]
    assert not indented, "blocks() finds only those at the beginning of a line"
    for block in (block for page in PAGES for block in blocks(page, "json")):
        assert json.loads(block)


@pytest.mark.slow
def test_shell_of_get_started_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "get-started.md"
    mine = test_shell_of_get_started_runs_as_it_stands.__name__
    lines = [line for line in shell_lines(page) if runner(line) == mine]
    assert len(lines) == 6
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    model = tmp_path / "examples" / "plan_me.py"  # smaller, so that it is planned in seconds
    sizes = "LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = "
    model.write_text(re.sub(rf"{sizes}.*", f"{sizes}2, 512, 8, 2_000, 128, 128", model.read_text()))
    (tmp_path / "train.py").write_text(blocks(ROOT / "README.md", "python")[0] + "\nprint(metrics['loss'])\n")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "autopar").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autopar "$@"\n')
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for each in bin_folder.iterdir():
        each.chmod(0o755)
    paths = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    printed = {}
    for line in lines:
        ran = subprocess.run(
            line, shell=True, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=600
        )
        # Only what is missing here, as a GPU, may be said by the doctor.
        assert ran.returncode == 0 or "doctor" in line, (line, ran.stderr)
        printed[line.split()[1]] = ran.stdout
    assert "64 devices of dgx-h100" in printed["plan"] and (tmp_path / "plan.html").stat().st_size > 10_000
    assert "as planned" in printed["explain"] and "per step instead of" in printed["what-if"]
    assert 0 < float(printed["python"]) < 1


@pytest.mark.parametrize(
    "module", sorted({line.split()[2] for page in PAGES for line in shell_lines(page) if "-m benchmarks." in line})
)
def test_benchmarks_of_the_pages_start(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


def test_the_reference_has_every_public_name_once():
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", read(ROOT / "docs" / "api.md"), re.MULTILINE)
    assert sorted(listed) == sorted(["autopar", *autopar.__all__])


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("README.md", *GO_ON)], ids=lambda page: page.name
)
def test_python_of_other_pages_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(block, names)


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="releases of JAX differ in their equations")
def test_architecture_shows_what_is_printed():
    trace = traced(mlp_step, mlp_params(), mlp_batch(), donated=(0,))
    plan = passes.make_plan(trace, two_stages(), cluster=Cluster(num_devices=4, kind="cpu"))
    printed = "\n".join(map(str, (trace, plan, passes.cut_step(trace, plan), passes.lower_step(trace, plan))))
    shown = [line for block in blocks(ROOT / "docs" / "architecture.md", "text") for line in block.splitlines()]
    assert len(shown) > 15
    assert not [line for line in shown if line.rstrip() not in printed]


def test_architecture_lists_every_package_in_the_order_of_imports():
    text = read(ROOT / "docs" / "architecture.md")
    packages = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "autopar").rglob("__init__.py")}
    assert not [name for name in sorted(packages - {"autopar", "autopar/compiler"}) if f"| `{name}` |" not in text]
    listed = re.findall(r"^\| `autopar/([\w/]+)` \|", text, re.MULTILINE)
    assert listed == sorted(listed, key=lambda name: PACKAGES.index(name.replace("/", ".")))


def test_readme_names_the_releases_of_jax_that_are_admitted():
    bounds = re.findall(r"jax(?:lib|\[.*?\])?>=([\d.]+),<(\d+)\.(\d+)", read(ROOT / "pyproject.toml"))
    assert len(bounds) == 4
    ((first, major, minor),) = set(bounds)
    assert f"JAX {first}, up to JAX {major}.{int(minor) - 1}." in " ".join(read(ROOT / "README.md").split())


def test_picture_is_the_one_that_the_script_draws():
    script = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))
    assert script["OUT"].read_text(encoding="utf-8") == script["draw"](), "run `make pictures`"


def test_every_page_can_be_reached_from_the_readme():
    linked = set(re.findall(r"\]\(([^)#\s]+)", read(ROOT / "README.md")))
    assert not [page for page in PAGES[1:] if page.relative_to(ROOT).as_posix() not in linked]
