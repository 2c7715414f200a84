"""Memory of the host tier: RAM, pinned for a GPU, or a memory-mapped file."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile

import torch

from batchgen_data.errors import ConfigError, PlanError


def allocate_host(num_bytes: int, folder: str | None = None, *, pinned: bool = False) -> torch.Tensor:
    """Return `num_bytes` bytes of host memory, a uint8 tensor.

    Args:
        num_bytes: at least 1.
        folder: where to put a memory-mapped file; it has no name, so it ends with the process. None takes
            RAM, which the system backs as it is first written.
        pinned: page-lock RAM, so that a GPU copies to and from it without waiting; a file is never pinned.

    Raises:
        ConfigError: the folder cannot be written.
        PlanError: no room for so many bytes; the message names bytes needed and bytes present.
    """
    if folder is None:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            kind = "pinned host memory" if pinned else "host memory"
            raise PlanError(f"{num_bytes:,} bytes of {kind} are not to be had; lower host_memory") from error
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="batchgen-") as file:
            # All of it now: a file that grows on a full disk would kill the process with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    except OSError as error:
        if not os.path.isdir(folder):
            raise ConfigError(f"host_path {folder!r} is not a folder") from error
        free = shutil.disk_usage(folder).free
        if free < num_bytes:
            raise PlanError(
                f"host_path {folder!r} has {free:,} bytes free, and the host tier needs {num_bytes:,}; lower "
                "host_memory or name another folder"
            ) from error
        raise ConfigError(f"host_path {folder!r} cannot be used: {error.strerror}") from error
