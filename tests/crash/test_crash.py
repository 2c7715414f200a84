"""A small share of the crash bench (`make crash`): random kills, and one at each kind of change on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent / "bench.py"


def test_kills_lose_double_and_invent_nothing() -> None:
    """Promises 1 to 3; the bench fails by itself where one does not hold, and prints its seed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, BENCH, "--kills", "10", "--steps"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["random_kills"] >= 10
    assert counts["steps_killed_at"] >= 30
    for name in ("lost", "doubled", "invented", "wrong", "failures", "changed"):
        assert counts[name] == 0, name
    assert counts["recomputed"] <= counts["recomputed_allowed"]
    assert counts["opens"] > 100
