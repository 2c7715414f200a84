"""One thread that copies between device and host tier beside the computation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CopyThread(ThreadPoolExecutor):
    """Runs copies one after another, in the order asked; with a GPU on a stream of their own.

    Args:
        device: the device's side of the copies.
        name: of the thread.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(1, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,))
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """Where the device stands now: a copy after it sees all work asked for so far. None on a CPU."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def after(self, mark: torch.cuda.Event | None) -> AbstractContextManager[Any]:
        """Within the block, what is asked of the device runs on the stream of copies, after the mark."""
        if self.stream is None or mark is None:
            return nullcontext()
        self.stream.wait_event(mark)
        return torch.cuda.stream(self.stream)
