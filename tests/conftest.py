"""Paths and fixtures shared by the suite."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parent
for folder in (
    _TESTS,
    *(_TESTS / name for name in ("runtime", "crash", "planner")),
    _TESTS.parent / "benchmarks",
):
    sys.path.insert(0, str(folder))
