"""The structure of the package: what imports what, and that importing costs nothing."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import autopar
from autopar.ir.schedules import SCHEDULES

PACKAGE = Path(__file__).parent.parent / "autopar"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "core", "common", "helpers", "misc"}
WRITTEN = ("autopar", "benchmarks", "tests", "examples")
INDIRECT = re.compile(r"\s*(What|Whether|Say)\b")

# Each may import only those before it. `compiler` and `runtime` do not know each other either, see below.
PACKAGES = (
    *(
        "errors",
        "progress",
        "checks",
        "plain_text",
        "json_fields",
        "kept_files",
        "hardware",
        "ir",
        "method_fields",
        "methods",
    ),
    *("compiler.jaxprs", "compiler.sharding", "compiler.frontend", "compiler.microbatch", "compiler.pipeline"),
    *("compiler.costs", "compiler.resharding", "compiler.spmd", "compiler.memory"),
    *("compiler.solver", "compiler.inter_op", "compiler.intra_op", "compiler.lowering"),
    *("compiler.planning.demands", "compiler.planning", "compiler.planning.stages"),
    *("compiler.planning.by_hand", "compiler.planning.search"),
    *("compiler.analysis", "compiler.passes", "compiler.plan_within_memory"),
    *("runtime", "runtime.transfer", "runtime.distributed"),
    *(
        "nnx_objects",
        "arguments",
        "simulation",
        "step_parts",
        "reports",
        "reports.explorer",
        "session",
        "target",
        "step_serialization",
        "verification",
        "finite_guard",
        "jit_shardings",
        "aot",
        "api",
        "training",
        "commands",
        "__main__",
    ),
)
KNOWS_NO_JAX = ("compiler.solver", "compiler.inter_op")

# What only these files may import.
GATES = {
    "jax._src": ("compiler/jaxprs/compat.py", "runtime/executables.py"),
    "jax.extend": ("compiler/jaxprs/compat.py", "runtime/executables.py"),
    "jaxlib": (
        "compiler/sharding/shardy.py",
        "compiler/jaxprs/compat.py",
        "runtime/executables.py",
        "runtime/distributed/coordinator.py",
    ),
    "ray": ("runtime/distributed/ray_cluster.py", "runtime/distributed/ray_actor.py"),
    "cupy": ("runtime/transfer/nccl.py",),
    "google": ("reports/chakra.py",),
    "highspy": ("compiler/solver/linear_program.py",),
}

# Only these read the parameters of equations: the gate, and the files that define a primitive of ours.
PARAMETER_GATES = (
    "compiler/jaxprs/compat.py",
    "compiler/jaxprs/params.py",
    "compiler/microbatch/accumulate.py",
    "compiler/sharding/declared_rules.py",
)

# Every rule is one test that lists what breaks it; 3,000 tests, one for each file and rule, would mostly be overhead.


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


@cache
def imported_names(path: Path) -> list[str]:
    """Every module or name that is imported anywhere in a file, as a dotted path."""
    names: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def modules_used(path: Path) -> set[str]:
    """The modules of the package that a file imports; `from package import module` counts as the module."""
    return {
        name if name in MODULES else name.rpartition(".")[0]
        for name in imported_names(path)
        if name in MODULES or name.rpartition(".")[0] in MODULES
    }


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    docstring_lines = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


def package_of(module: str) -> str:
    """The entry of `PACKAGES` that a module belongs to; empty for the package itself, which imports all."""
    path = module.removeprefix("autopar").removeprefix(".")
    return max((package for package in PACKAGES if f"{path}.".startswith(f"{package}.")), key=len, default="")


def test_packages_import_only_those_before_them():
    def too_early(path: Path) -> set[str]:
        package = package_of(module_name(path))
        allowed = PACKAGES[: PACKAGES.index(package) + 1] if package else PACKAGES
        return {package_of(name) for name in modules_used(path)} - {"", *allowed}

    assert not [(place(path), name) for path in FILES for name in too_early(path)]


def test_every_module_has_its_place_in_the_order_of_packages():
    unplaced = {module for module in MODULES if not package_of(module)}
    assert unplaced == {"autopar", "autopar.compiler"}


def test_solver_and_inter_operator_search_know_nothing_of_jax():
    files = [path for path in FILES if package_of(module_name(path)) in KNOWS_NO_JAX]
    assert files
    assert not [
        (place(path), name)
        for path in files
        for name in imported_names(path)
        if f"{name}.".startswith(("jax.", "jaxlib."))
    ]


def test_compiler_and_runtime_do_not_import_each_other():
    others = {"compiler": "autopar.runtime.", "runtime": "autopar.compiler."}
    assert not [
        (place(path), name)
        for path in FILES
        if (other := others.get(path.relative_to(PACKAGE).parts[0]))
        for name in modules_used(path)
        if f"{name}.".startswith(other)
    ]


def test_what_is_private_or_optional_is_imported_at_its_gate_only():
    assert not [
        (place(path), name)
        for path in FILES
        for name in imported_names(path)
        for gated, gates in GATES.items()
        if f"{name}.".startswith(f"{gated}.") and place(path) not in gates
    ]


def test_private_parts_of_jax_are_not_reached_by_attribute_either():
    assert not reads_of("_src", allowed=GATES["jax._src"])


def test_parameters_of_equations_are_read_at_their_gate_only():
    assert not reads_of("params", allowed=PARAMETER_GATES)


def reads_of(attribute: str, allowed: tuple[str, ...]) -> list[str]:
    return [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        if place(path) not in allowed
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == attribute
    ]


def test_only_the_schedules_go_by_their_names():
    assert not [
        (f"{place(path)}:{node.lineno}", node.value)
        for path in FILES
        if place(path) not in ("ir/schedules.py", "ir/zero_bubble_schedules.py")
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in SCHEDULES
    ]


def test_imports_within_the_package_are_absolute():
    assert not [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def test_files_open_with_their_idea():
    docstrings = {place(path): ast.get_docstring(cast(ast.Module, nodes(path)[0])) for path in FILES}
    first_lines = {path: (docstring or "").partition("\n")[0] for path, docstring in docstrings.items()}
    assert not {path: line for path, line in first_lines.items() if not line.endswith((".", ":"))}


def test_docstrings_begin_with_their_subject_or_verb():
    files = (path for folder in WRITTEN for path in sorted((PACKAGE.parent / folder).rglob("*.py")))
    assert not [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {text}"
        for path in files
        for line, text in standing_strings(path)
        if INDIRECT.match(text)
    ]


def standing_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a file and the strings beneath its fields and constants, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_files_have_names_that_say_something():
    assert not [place(path) for path in FILES if VAGUE_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)]


def test_functions_are_short_enough_to_read():
    assert not [
        (place(path), function.name, length)
        for path in FILES
        for function in functions(path)
        if (length := lines_without_docstring(function)) > MAX_FUNCTION_LINES
    ]


def test_functions_are_annotated():
    def unannotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        arguments = function.args
        stars = [star for star in (arguments.vararg, arguments.kwarg) if star]
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]
        missing = [p.arg for p in parameters if p.annotation is None and p.arg not in ("self", "cls")]
        return [*missing, *(["its result"] if function.returns is None else [])]

    assert not [
        (place(path), function.name, missing)
        for path in FILES
        for function in functions(path)
        for missing in unannotated(function)
    ]


def test_no_module_imports_itself_by_way_of_others():
    uses = {module_name(path): modules_used(path) - {module_name(path)} for path in FILES}
    # Modules that import nothing unresolved go, until only those on a cycle, or above one, remain.
    while free := {module for module, needed in uses.items() if not needed & uses.keys()}:
        uses = {module: needed for module, needed in uses.items() if module not in free}
    assert not uses


def test_every_public_name_of_the_package_exists():
    for name in getattr(autopar, "__all__", ()):
        assert hasattr(autopar, name)


def test_importing_loads_neither_ray_nor_cupy_and_starts_no_backend():
    gated = {module_name(PACKAGE / gate) for gates in GATES.values() for gate in gates if "jax" not in gate}
    modules = MODULES - gated
    program = "\n".join(
        [
            "import sys, threading",
            *(f"import {module}" for module in ["autopar", *sorted(modules)]),
            "print(sorted({'ray', 'cupy'} & set(sys.modules)), threading.active_count())",
            # A platform that does not exist fails as soon as a backend is asked for, and not before.
            "import jax",
            "try:",
            "    jax.devices()",
            "except RuntimeError:",
            "    print('no backend')",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"JAX_PLATFORMS": "nonexistent", "PATH": "", "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["[] 1", "no backend"]), done.stderr
