"""Memory of the host tier: RAM, pinned for a GPU, or a file, memory-mapped where it is used as memory."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from typing import IO

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
    with open_host_file(num_bytes, folder) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def open_host_file(num_bytes: int, folder: str) -> IO[bytes]:
    """Open a file of `num_bytes` bytes in `folder`. It has no name, and goes when it is closed.

    Raises:
        ConfigError: the folder cannot be written.
        PlanError: no room for so many bytes; the message names bytes needed and bytes present.
    """
    file: IO[bytes] | None = None
    try:
        file = tempfile.TemporaryFile(dir=folder, prefix="batchgen-", buffering=0)  # noqa: SIM115
        # All of it now: a mapped file that grows on a full disk would kill the process with SIGBUS.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return file
    except OSError as error:
        if file is not None:
            file.close()
        if not os.path.isdir(folder):
            raise ConfigError(f"host_path {folder!r} is not a folder") from error
        free = shutil.disk_usage(folder).free
        if free < num_bytes:
            raise PlanError(
                f"host_path {folder!r} has {free:,} bytes free, and the host tier needs {num_bytes:,}; lower "
                "host_memory or name another folder"
            ) from error
        raise ConfigError(f"host_path {folder!r} cannot be used: {error.strerror}") from error
