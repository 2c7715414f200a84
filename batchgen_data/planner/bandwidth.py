"""How fast bytes move: between the tiers, and from the checkpoint."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

_COPY_BYTES = 64 * 2**20
_READ_BYTES, _ONE_READ_BYTES = 256 * 2**20, 4 * 2**20


def copy_bandwidth(device: torch.device, page_bytes: int) -> float:
    """Bytes per second that pages of so many bytes are copied from the host tier to the device with.

    On a CPU by one thread, as the staging copies.
    """
    page = max(1, min(page_bytes, _COPY_BYTES // 8))
    host = torch.zeros(_COPY_BYTES // page, page, dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = torch.zeros_like(host, device=device)
    order = torch.randperm(len(host))
    seconds = []
    callers_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(6):
        started = time.perf_counter()
        if device.type == "cuda":
            staged.copy_(host, non_blocking=True)
            torch.cuda.synchronize(device)
        else:
            torch.index_select(host, 0, order, out=staged)
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(callers_threads)
    return host.nbytes / min(seconds)


def read_bandwidth(files: Sequence[Path]) -> float:
    """Bytes per second that a checkpoint is read with, past the file cache where the system lets us."""
    buffer = mmap.mmap(-1, _ONE_READ_BYTES)
    num_bytes, started = 0, time.perf_counter()
    for file in files:
        descriptor = _open_direct(file)
        try:
            offset = 0
            while num_bytes < _READ_BYTES and (count := os.preadv(descriptor, [buffer], offset)):
                num_bytes += count
                offset += count
                if count % 4096:
                    break  # the end; an unaligned offset is refused
        finally:
            os.close(descriptor)
    return num_bytes / max(1e-9, time.perf_counter() - started)


def _open_direct(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without it
        descriptor = os.open(file, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return descriptor
