"""`scripts/setup`: an environment that an interrupted start left half made is made again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Stands in for Python: makes environments whose Python takes any pip command, and is Python otherwise.
PYTHON = """#!/usr/bin/env bash
if [ "$1 $2" = "-m venv" ]; then
    echo "$@" >> made
    rm -rf .venv
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho "$@" >> installed\\n' > .venv/bin/python
    chmod +x .venv/bin/python
else
    exec {python} "$@"
fi
"""


@pytest.mark.parametrize("before", ["nothing", "no pip", "no python", "whole"])
def test_a_half_made_environment_heals(tmp_path: Path, before: str) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    fake = tmp_path / "python"
    fake.write_text(PYTHON.format(python=sys.executable))
    fake.chmod(0o755)
    python = tmp_path / ".venv/bin/python"
    if before != "nothing":
        python.parent.mkdir(parents=True)
        if before == "no python":
            python.symlink_to("/removed/python3")
        else:
            python.write_text(f"#!/bin/sh\nexit {int(before == 'no pip')}\n")
            python.chmod(0o755)

    def setup() -> None:
        environment = {**os.environ, "PYTHON": str(fake)}
        subprocess.run(["scripts/setup"], cwd=tmp_path, env=environment, check=True, capture_output=True)

    setup()
    assert (tmp_path / "made").exists() == (before != "whole")
    if before != "whole":
        assert (tmp_path / "made").read_text() == "-m venv --clear .venv\n"
        assert "--editable .[test,check,demo]" in (tmp_path / "installed").read_text()
    stamp = (tmp_path / ".venv/stamp").stat().st_mtime_ns
    setup()  # nothing changed: nothing is done
    assert (tmp_path / ".venv/stamp").stat().st_mtime_ns == stamp
