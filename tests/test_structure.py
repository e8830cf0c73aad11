"""The structure of the package: what imports what, and that importing costs nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from autopar.ir.schedules import SCHEDULES

PACKAGE = Path(__file__).parent.parent / "autopar"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "core", "common", "helpers", "misc"}

# Each may import only those before it. `compiler` and `runtime` do not know each other either, see below.
PACKAGES = (
    *("errors", "progress", "checks", "plain_text", "json_fields", "kept_files", "hardware", "ir", "methods"),
    *("compiler.jaxprs", "compiler.sharding", "compiler.frontend", "compiler.microbatch", "compiler.pipeline"),
    *("compiler.costs", "compiler.resharding", "compiler.spmd", "compiler.memory"),
    *("compiler.solver", "compiler.inter_op", "compiler.intra_op", "compiler.lowering", "compiler.planning"),
    *("compiler.analysis", "compiler.passes", "compiler.plan_within_memory"),
    *("runtime", "runtime.transfer", "runtime.distributed"),
    *(
        "nnx_objects",
        "arguments",
        "simulation",
        "description",
        "plan_difference",
        "fixes",
        "explorer",
        "session",
        "step_serialization",
        "verification",
        "finite_guard",
        "jit_shardings",
        "aot",
        "api",
        "training",
        "doctor",
        "machines_command",
        "supervisor",
        "plan_command",
        "__main__",
    ),
)
KNOWS_NO_JAX = ("compiler.solver", "compiler.inter_op")

# What only these files may import.
GATES = {
    "jax._src": ("compiler/jaxprs/compat.py", "runtime/executables.py"),
    "jax.extend": ("compiler/jaxprs/compat.py", "runtime/executables.py"),
    "jaxlib": ("compiler/sharding/shardy.py", "compiler/jaxprs/compat.py", "runtime/executables.py"),
    "ray": ("runtime/distributed/ray_cluster.py", "runtime/distributed/ray_actor.py"),
    "cupy": ("runtime/transfer/nccl.py",),
    "highspy": ("compiler/solver/linear_program.py",),
}

# Only these read the parameters of equations: the gate, and the files that define a primitive of ours.
PARAMETER_GATES = (
    "compiler/jaxprs/compat.py",
    "compiler/jaxprs/params.py",
    "compiler/microbatch/accumulate.py",
    "compiler/sharding/declared_rules.py",
)

over_files = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Every module or name that is imported anywhere in a file, as a dotted path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_used(path: Path) -> set[str]:
    """The modules of the package that a file imports; `from package import module` counts as the module."""
    modules = {module_name(other) for other in FILES}
    return {
        name if name in modules else name.rpartition(".")[0]
        for name in imported_names(TREES[path])
        if name in modules or name.rpartition(".")[0] in modules
    }


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    docstring_lines = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


def package_of(module: str) -> str:
    """The entry of `PACKAGES` that a module belongs to; empty for the package itself, which imports all."""
    path = module.removeprefix("autopar").removeprefix(".")
    return max((package for package in PACKAGES if f"{path}.".startswith(f"{package}.")), key=len, default="")


@over_files
def test_packages_import_only_those_before_them(path):
    package = package_of(module_name(path))
    allowed = PACKAGES[: PACKAGES.index(package) + 1] if package else PACKAGES
    used = {package_of(name) for name in modules_used(path)} - {""}
    assert used <= set(allowed)


def test_every_module_has_its_place_in_the_order_of_packages():
    unplaced = {module_name(path) for path in FILES if not package_of(module_name(path))}
    assert unplaced == {"autopar", "autopar.compiler"}


def test_solver_and_inter_operator_search_know_nothing_of_jax():
    files = [path for path in FILES if package_of(module_name(path)) in KNOWS_NO_JAX]
    assert files
    assert not [
        (path.name, name)
        for path in files
        for name in imported_names(TREES[path])
        if f"{name}.".startswith(("jax.", "jaxlib."))
    ]


@over_files
def test_compiler_and_runtime_do_not_import_each_other(path):
    side = path.relative_to(PACKAGE).parts[0]
    other = {"compiler": "autopar.runtime", "runtime": "autopar.compiler"}.get(side)
    assert not [name for name in modules_used(path) if other and f"{name}.".startswith(f"{other}.")]


@over_files
def test_what_is_private_or_optional_is_imported_at_its_gate_only(path):
    place = path.relative_to(PACKAGE).as_posix()
    assert not [
        name
        for name in imported_names(TREES[path])
        for gated, gates in GATES.items()
        if f"{name}.".startswith(f"{gated}.") and place not in gates
    ]


@over_files
def test_private_parts_of_jax_are_not_reached_by_attribute_either(path):
    attributes = {node.attr for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)}
    place = path.relative_to(PACKAGE).as_posix()
    assert "_src" not in attributes or place in GATES["jax._src"]


@over_files
def test_only_the_schedules_go_by_their_names(path):
    constants = {node.value for node in ast.walk(TREES[path]) if isinstance(node, ast.Constant)}
    assert not constants & SCHEDULES.keys() or path == PACKAGE / "ir/schedules.py"


@over_files
def test_parameters_of_equations_are_read_at_their_gate_only(path):
    place = path.relative_to(PACKAGE).as_posix()
    read = [node.lineno for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute) and node.attr == "params"]
    assert not read or place in PARAMETER_GATES


@over_files
def test_imports_within_the_package_are_absolute(path):
    assert not [node.lineno for node in ast.walk(TREES[path]) if isinstance(node, ast.ImportFrom) and node.level]


@over_files
def test_file_opens_with_its_idea(path):
    docstring = ast.get_docstring(TREES[path])
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))


@over_files
def test_file_has_a_name_that_says_something(path):
    assert not VAGUE_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)


@over_files
def test_functions_are_short_enough_to_read(path):
    lengths = {function.name: lines_without_docstring(function) for function in functions(TREES[path])}
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


@over_files
def test_functions_are_annotated(path):
    def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
        arguments = function.args
        stars = [star for star in (arguments.vararg, arguments.kwarg) if star]
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]

    assert not [function.name for function in functions(TREES[path]) if function.returns is None]
    assert not [
        f"{function.name}({parameter.arg})"
        for function in functions(TREES[path])
        for parameter in parameters(function)
        if parameter.annotation is None and parameter.arg not in ("self", "cls")
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
    modules = {module_name(path) for path in FILES} - gated
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
