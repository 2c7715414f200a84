"""The host tier of suspended sequences: copies KV pages there and back while passes go on.

A page of the host tier holds one page of every layer, keys and values one after another, in memory or in a
file. Shape letters as in `kv_pool`, H pages of the host tier.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import zlib
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from batchgen_data.models.copy_thread import CopyThread
from batchgen_data.models.kv_pool import ALIGNMENT_BYTES, KVPool
from batchgen_data.runtime.host_memory import allocate_host, open_host_file
from batchgen_data.runtime.step import Copy
from batchgen_data.runtime.trace import OFF, Trace

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class CopyCounts:
    """What checkpoints and restores took.

    Attributes:
        checkpoints, restores: copies that succeeded.
        checkpoint_bytes, restore_bytes: bytes they copied.
        copy_s: seconds of the thread that copies.
        waited_s: seconds in which nothing could run before a copy had ended.
    """

    checkpoints: int = 0
    restores: int = 0
    checkpoint_bytes: int = 0
    restore_bytes: int = 0
    copy_s: float = 0.0
    waited_s: float = 0.0


class KVCopies:
    """Carries out the copies that a scheduler orders. Used by one thread; another one copies.

    Args:
        pool: the device's pages; they cannot become int8 any more.
        num_pages: H.
        host_path: folder of a file for the host tier; None keeps it in memory, pinned for a GPU.
        trace: where to record copies.

    Raises:
        ConfigError: the folder cannot be written.
        PlanError: the host tier has no room.
    """

    def __init__(
        self, pool: KVPool, num_pages: int, *, host_path: str | None = None, trace: Trace = OFF
    ) -> None:
        # Layers of latents have values of width 0.
        self._device_pages = [
            pages for layer in pool.k for pages in (pool.k[layer], pool.v[layer]) if pages.numel()
        ]
        pool.is_copied = True
        device = self._device_pages[0].device
        self._page_bytes = host_page_bytes(pool)
        self._tier: _Tier
        if host_path is None:
            self._tier = _Memory(self._device_pages, num_pages, self._page_bytes)
        else:
            self._tier = _File(self._device_pages, num_pages, self._page_bytes, host_path)
        self.counts = CopyCounts()
        self._trace = trace
        self._thread = CopyThread(device, "batchgen-checkpoint")
        self._ended: SimpleQueue[tuple[Copy, bool]] = SimpleQueue()
        self._warned = False

    def start(self, copies: Sequence[Copy]) -> None:
        """Begin copies, in this order; returns at once."""
        for copy in copies:
            self._thread.submit(self._copy, copy, self._thread.mark())

    def ended(self) -> dict[Copy, bool]:
        """Copies that have ended since the last call, and whether they succeeded."""
        found: dict[Copy, bool] = {}
        while True:
            try:
                copy, succeeded = self._ended.get_nowait()
            except Empty:
                return found
            found[copy] = succeeded

    def wait(self) -> dict[Copy, bool]:
        """As `ended`, but at least one; only while some are under way."""
        started_s = time.perf_counter()
        with self._trace.span("wait for KV copies", "passes"):
            copy, succeeded = self._ended.get()
        self.counts.waited_s += time.perf_counter() - started_s
        return {copy: succeeded, **self.ended()}

    def close(self) -> None:
        """Stop copying and give the host tier back. Safe to call twice."""
        self._thread.shutdown(cancel_futures=True)
        self._tier.close()
        self._device_pages = []

    # In the thread that copies.

    @torch.inference_mode()  # grad modes belong to a thread
    def _copy(self, copy: Copy, mark: torch.cuda.Event | None) -> None:
        started_s = time.perf_counter()
        name = "checkpoint" if copy.to_host else "restore"
        num_bytes = len(copy.host_pages) * self._page_bytes
        succeeded = False
        try:
            tokens = copy.end - copy.start
            with (
                self._trace.span(name, "KV copies", bytes=num_bytes, tokens=tokens),
                self._thread.after(mark),
            ):
                if copy.to_host:
                    self._tier.store(copy.device_pages, copy.host_pages)
                else:
                    self._tier.load(copy.host_pages, copy.device_pages)
                if self._thread.stream is not None:
                    self._thread.stream.synchronize()
            succeeded = True
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "a %s of KV pages failed (%s); rows are computed again where that happens", name, error
                )
        counts = self.counts
        counts.copy_s += time.perf_counter() - started_s
        if succeeded and copy.to_host:
            counts.checkpoints += 1
            counts.checkpoint_bytes += num_bytes
        elif succeeded:
            counts.restores += 1
            counts.restore_bytes += num_bytes
        self._ended.put((copy, succeeded))


def host_page_bytes(pool: KVPool) -> int:
    """Bytes of a page of the host tier."""
    return sum(_aligned(pages[0].nbytes) for layer in pool.k for pages in (pool.k[layer], pool.v[layer]))


class _Tier(Protocol):
    def store(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages of all layers to the host tier."""

    def load(self, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Copy pages of all layers to the device."""

    def close(self) -> None:
        """Give the memory back."""


class _Memory:
    """Host pages in memory. Layer by layer, so that each copy reads and writes long stretches."""

    def __init__(self, device_pages: Sequence[torch.Tensor], num_pages: int, page_bytes: int) -> None:
        pinned = device_pages[0].device.type == "cuda"
        memory = allocate_host(num_pages * page_bytes, pinned=pinned).view(num_pages, page_bytes)
        self._pairs = list(zip(device_pages, _parts(memory, device_pages), strict=True))

    def store(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        for on_device, on_host in self._pairs:
            for page, host_page in zip(device_pages, host_pages, strict=True):
                on_host[host_page].copy_(on_device[page], non_blocking=True)

    def load(self, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        for on_device, on_host in self._pairs:
            for page, host_page in zip(device_pages, host_pages, strict=True):
                on_device[page].copy_(on_host[host_page], non_blocking=True)

    def close(self) -> None:
        self._pairs = []


class _File:
    """Host pages in a file, read and written by calls: a disk that fails is an exception, not a signal.

    A page's checksum stays in memory. A disk may accept a page, lose it on the way from the page cache, and
    return what was there before.
    """

    def __init__(
        self, device_pages: Sequence[torch.Tensor], num_pages: int, page_bytes: int, folder: str
    ) -> None:
        self._file = open_host_file(num_pages * page_bytes, folder)
        self._page_bytes = page_bytes
        self._checksums = [0] * num_pages
        self._device = device_pages[0].device
        bounce = torch.zeros(1, page_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._bounce = bounce.view(-1).numpy().data
        self._pairs = list(zip(device_pages, _parts(bounce, device_pages), strict=True))

    def store(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        for page, host_page in zip(device_pages, host_pages, strict=True):
            for on_device, on_host in self._pairs:
                on_host[0].copy_(on_device[page], non_blocking=True)
            self._wait()
            self._checksums[host_page] = zlib.crc32(self._bounce)
            done = 0
            while done < self._page_bytes:
                done += os.pwrite(
                    self._file.fileno(), self._bounce[done:], host_page * self._page_bytes + done
                )

    def load(self, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        for page, host_page in zip(device_pages, host_pages, strict=True):
            done = 0
            while done < self._page_bytes:
                offset = host_page * self._page_bytes + done
                got = os.preadv(self._file.fileno(), [self._bounce[done:]], offset)
                if got <= 0:
                    raise OSError(f"the file of the host tier ends at byte {offset}")
                done += got
            if zlib.crc32(self._bounce) != self._checksums[host_page]:
                raise OSError("the file of the host tier does not hold what was written to it")
            for on_device, on_host in self._pairs:
                on_device[page].copy_(on_host[0], non_blocking=True)
            self._wait()

    def close(self) -> None:
        self._pairs = []
        self._file.close()

    def _wait(self) -> None:
        """The bounce page is used again."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _parts(memory_HB: torch.Tensor, device_pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views [H, K, P, D] into host pages, one for each of `device_pages` [N, K, P, D]."""
    views, offset = [], 0
    for pages in device_pages:
        num_bytes = pages[0].nbytes
        view = memory_HB[:, offset : offset + num_bytes].view(pages.dtype)
        views.append(view.unflatten(1, pages.shape[1:]))
        offset += _aligned(num_bytes)
    return views
