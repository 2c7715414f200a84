"""What this process may use: CPUs and memory, limits of a container included."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """CPUs this process may run on: its affinity, cut by a container's quota; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _read(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cpus = min(cpus, int(quota[0]) // int(quota[1]))
    return max(1, cpus)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can still be taken on `device`; for a CPU, what the system or the container leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _system_free_bytes()
    for folder, limit_name, used_name in (
        (_CGROUP, "memory.max", "memory.current"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            # File cache counts as used, but the system takes it back when memory is needed.
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            in_use = int(used) - (int(cache[1]) if cache else 0)
            free = min(free, max(0, int(limit) - in_use))
    return free


def _system_free_bytes() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Systems without /proc do not tell what is free without a library; half of all is a safe guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
