"""Who may import whom, as docs/architecture.md says."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "batchgen_data"
KERNELS = ROOT / "kernels/batchgen_kernels"
TORCH_FREE = (
    "errors",
    "config",
    "sampling",
    "schema",
    "prompts",
    "template",
    "chat",
    "columns",
    "row_values",
)
TORCH_FREE_RUNTIME = ("scheduler", "residents", "suspects", "pages", "sequence", "host_store")
TORCH_FREE_PLANNER = ("cache", "cost", "dag", "plan", "roofline", "rules", "search", "sizes", "workload")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each imported module of a file by its full name, and whether it is imported with the file."""
    tree = ast.parse(path.read_text())
    late = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in late
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module, id(node) not in late
            for alias in node.names:  # a module may be imported out of its package
                yield f"{module}.{alias.name}", id(node) not in late


def top_level(path: Path, *, also_late: bool) -> set[str]:
    return {module.partition(".")[0] for module, at_once in imports(path) if at_once or also_late}


def module_path(name: str) -> Path | None:
    """Return the file of a module of this package, None for anything else."""
    path = ROOT / name.replace(".", "/")
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if name.startswith("batchgen_data") and file.is_file()), None)


def reached(path: Path) -> set[str]:
    """Top-level packages that come with importing a file, through other modules of this package too."""
    seen: set[Path] = set()
    waiting, outside = [path], set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for module, at_once in imports(file):
            if not at_once:
                continue
            inside = module_path(module)
            if inside is not None:
                waiting.append(inside)
            elif not module.startswith("batchgen_data"):
                outside.add(module.partition(".")[0])
    return outside


def files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, folder
    return found


@pytest.mark.parametrize(
    "path",
    [
        *files(PACKAGE / "job"),
        *(PACKAGE / "runtime" / f"{name}.py" for name in TORCH_FREE_RUNTIME),
        *(PACKAGE / "planner" / f"{name}.py" for name in TORCH_FREE_PLANNER),
        *(PACKAGE / f"{name}.py" for name in TORCH_FREE),
        PACKAGE / "cli.py",
        PACKAGE / "cli_options.py",
        PACKAGE / "pool.py",
    ],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_these_bring_no_torch(path: Path) -> None:
    assert not {"torch", "transformers"} & top_level(path, also_late=True)
    assert not {"torch", "transformers"} & reached(path)


@pytest.mark.parametrize(
    "path",
    [*files(PACKAGE / "runtime"), *files(PACKAGE / "models"), *files(PACKAGE / "planner")],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_runtime_knows_nothing_of_ray(path: Path) -> None:
    assert "ray" not in top_level(path, also_late=True)
    assert "ray" not in reached(path)


@pytest.mark.parametrize("path", files(KERNELS), ids=lambda path: path.stem)
def test_kernels_know_torch_and_numba_only(path: Path) -> None:
    allowed = {"torch", "numba", "numpy", "batchgen_kernels", *sys.stdlib_module_names}
    assert top_level(path, also_late=True) <= allowed


def test_checks_and_command_line_start_without_ray() -> None:
    for name in ("cli.py", "job/check.py", "job/run.py", "job/preview.py"):
        assert "ray" not in reached(PACKAGE / name), name


def test_layers_import_downwards_only() -> None:
    layers = ["models", "runtime", "llm", "operator", "job", "cli"]
    for position, layer in enumerate(layers):
        path = PACKAGE / layer
        above = {name for name in layers[position + 1 :] if (layer, name) != ("models", "runtime")}
        for file in files(path) if path.is_dir() else [path.with_suffix(".py")]:
            for module, _ in imports(file):
                parts = module.split(".")
                if parts[0] == "batchgen_data" and len(parts) > 1:
                    assert parts[1] not in above, f"{file.relative_to(PACKAGE)} imports {module}"
