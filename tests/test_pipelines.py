"""The example pipelines: they start, say what they take, and set the stage up as the README does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIPELINES = sorted((ROOT / "pipelines").glob("*.py"))


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_a_pipeline_imports_and_prints_its_help(path: Path) -> None:
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


def test_the_pipeline_uses_the_cluster_it_finds_and_the_numbers_of_the_readme() -> None:
    """A size given to `ray.init` is refused by a running cluster, and caps a large machine."""
    source = (ROOT / "pipelines/complete_parquet.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    starts = [call for call in calls if ast.unparse(call.func) == "ray.init"]
    assert [(call.args, call.keywords) for call in starts] == [([], [])]
    readme = (ROOT / "README.md").read_text()
    given = {word.arg: ast.unparse(word.value) for call in calls for word in call.keywords if word.arg}
    for name in ("max_concurrent_calls_per_actor", "batch_size", "num_cpus", "batch_format"):
        assert f"{name}={given[name]}," in readme.replace('"', "'"), name
