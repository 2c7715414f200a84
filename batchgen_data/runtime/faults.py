"""What an exception of a forward pass says about the device."""

from __future__ import annotations

import torch

from batchgen_data.errors import DeviceError


def is_device_fault(error: Exception) -> bool:
    """A CUDA fault poisons the process: every later call fails or, worse, returns rubbish.

    Weights that cannot be read any more are no better.
    """
    if isinstance(error, DeviceError):
        return True
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if isinstance(accelerator_error, type) and isinstance(error, accelerator_error):
        return not is_out_of_memory(error)
    return "CUDA error" in str(error) and not is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller pass may succeed."""
    # PyTorch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


def aborts_pass(error: Exception) -> bool:
    """Whether the pass as a whole cannot go on, whichever part of it raised."""
    return is_device_fault(error) or is_out_of_memory(error)


def first_line(error: BaseException) -> str:
    """Type and first line of the message, at most 200 characters of it."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:200]}"
