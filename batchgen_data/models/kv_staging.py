"""KV pages in the host tier, staged on the device by layer and sub-batch.

What attention of one layer and one sub-batch reads is copied into one half of the staging, while attention
works on the other half. Which layer and sub-batch comes next is known, so the copies run ahead of it.
Shape letters as in `kv_pool`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from concurrent.futures import Future

import numpy as np
import torch

from batchgen_data.errors import DeviceError, InternalError, PlanError
from batchgen_data.models.copy_thread import CopyThread
from batchgen_data.models.kv_pool import KVPool, LayerShape, PagedBatch, layer_bytes, page_views
from batchgen_data.runtime.host_memory import allocate_host
from batchgen_data.runtime.trace import OFF, Trace
from batchgen_kernels import kv_append

# A layer, and the number of a sub-batch in its pass.
_Turn = tuple[int, int]


def sub_batch_pages(shapes: dict[int, LayerShape], page_tokens: int, staging_bytes: int) -> int:
    """Pages of the widest layer that fit in half of the staging.

    Raises:
        PlanError: fewer than two.
    """
    widest_bytes = page_tokens * max(shape.token_bytes for shape in shapes.values())
    num_pages = staging_bytes // 2 // widest_bytes
    if num_pages < 2:
        raise PlanError(
            f"a staging of {staging_bytes:,} bytes holds {num_pages} pages of one layer in each half, of "
            f"{widest_bytes:,} bytes ({page_tokens} tokens), and needs 2; set kv_memory to at least "
            f"{4 * widest_bytes:,} bytes, or lower page_tokens"
        )
    return num_pages


@dataclasses.dataclass(slots=True)
class StagingCounts:
    """What went through the staging, and how long attention waited for it.

    Attributes:
        reads: layers of sub-batches that attention ran.
        foreseen: those whose pages were on their way before attention asked for them.
        read_bytes: bytes copied into the staging.
        written_bytes: bytes of new keys and values copied to the host tier.
        waited_s: seconds that attention waited for copies.
    """

    reads: int = 0
    foreseen: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0


class StagedKVPool(KVPool):
    """All pages in the host tier, and a staging of two halves in device memory for those attention reads.

    One thread copies, in the order asked: pages of the next layer or sub-batch into the half that is not
    being read, then the new keys and values of the current one to their host pages. With a GPU the host
    memory is pinned and copies run on a stream of their own.

    Sub-batches of a pass take turns: layers from one turn to the next run for the first sub-batch, then for
    the second, and so on. After which layers the turn passes on is learnt from the pass before; a wrong
    guess costs one copy.

    Args:
        shapes: of every layer's keys and values, in layer order.
        num_pages: pages in the host tier.
        page_tokens: tokens of a page.
        device: where attention runs.
        staging_bytes: device memory to use.
        host_path: folder of a memory-mapped file for the host tier; None keeps it in memory.
        trace: where to record copies.

    Raises:
        PlanError: half of the staging holds less than two pages of a layer, or the host tier has no room.
    """

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        num_pages: int,
        page_tokens: int,
        device: torch.device,
        *,
        staging_bytes: int,
        host_path: str | None = None,
        trace: Trace = OFF,
    ) -> None:
        num_staged = sub_batch_pages(shapes, page_tokens, staging_bytes)
        pool_bytes = sum(layer_bytes(shape, num_pages, page_tokens) for shape in shapes.values())
        host = allocate_host(pool_bytes, host_path, pinned=device.type == "cuda")
        super().__init__(shapes, num_pages, page_tokens, device, memory=host)
        self.counts = StagingCounts()
        self.sub_batch_pages: int = num_staged
        self._shapes = shapes
        self._device = device
        self._trace = trace
        self._order = list(shapes)
        half_bytes = max(layer_bytes(shape, num_staged, page_tokens) for shape in shapes.values())
        self.staging = [torch.empty(half_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        # Each half as pages of each layer's shape.
        self._halves = [
            {shape: page_views(half, shape, num_staged, page_tokens) for shape in set(shapes.values())}
            for half in self.staging
        ]
        self._in_use = 0
        self._parts: list[_StagedPart] = []
        self._coming: tuple[_Turn, Future[torch.cuda.Event | None]] | None = None
        self._last: _Turn | None = None
        self._turn_ends = set(self._order)
        self._copier = CopyThread(device, "batchgen-kv")
        self._failed_write: BaseException | None = None

    @property
    def quantise_obstacle(self) -> str | None:
        """Why the pool cannot become int8."""
        return 'KV lives in the host tier (kv_residence="host")'

    def begin_pass(self) -> None:
        """Forget the sub-batches of the last pass."""
        self._parts = []
        self._last = None
        self._coming = None

    def place(self, paged: PagedBatch) -> PagedBatch:
        """Number the pages of a sub-batch as they will lie in the staging; the first starts its first copy.

        Raises:
            InternalError: the sub-batch uses more than `sub_batch_pages`.
            DeviceError: the host tier could not be written in an earlier pass.
        """
        part, staged = self._numbered(paged)
        self._parts.append(part)
        if part.index == 0:
            self._coming = self._start_read((self._order[0], 0))
        return staged

    def append(
        self, layer: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor, paged: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Not for a whole pool: each batch that `place` returns has its own."""
        raise InternalError("attention over the host tier needs a batch from place")

    def append_part(
        self, part: _StagedPart, layer: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor, paged: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `append`, for one sub-batch; starts the copy of what comes next.

        Raises:
            DeviceError: the host tier could not be read or written.
        """
        turn = (layer, part.index)
        self._learn(turn)
        self.counts.reads += 1
        if self._coming is not None and self._coming[0] == turn:
            self.counts.foreseen += 1
        else:
            self._coming = self._start_read(turn)
        self._wait(self._coming[1])
        self._in_use ^= 1
        k_pages, v_pages = self._halves[self._in_use][self._shapes[layer]]
        kv_append(k_TKD, v_TKV, k_pages, v_pages, paged.page_idx, paged.offset)
        # The half attention read before is free now. Reads go first: attention waits for them.
        following = self._following(turn)
        self._coming = self._start_read(following) if following else None
        written = self._copier.submit(self._write, part, layer, k_TKD, v_TKV, self._copier.mark())
        written.add_done_callback(self._note_failure)
        return k_pages, v_pages

    # Which pages.

    def _numbered(self, paged: PagedBatch) -> tuple[_StagedPart, PagedBatch]:
        """Give the pages of a sub-batch places in the staging: those with computed tokens first."""
        page_tokens = self.page_tokens
        read: list[np.ndarray] = []
        used: list[np.ndarray] = []
        if paged.num_decode:
            tables = paged.block_tables.cpu().numpy()
            lengths = paged.lengths.cpu().numpy()[:, None]
            column = np.arange(tables.shape[1])
            read.append(tables[column < -(-(lengths - 1) // page_tokens)])
            used.append(tables[column < -(-lengths // page_tokens)])
        for chunk in paged.prefills:
            page_ids = chunk.page_ids.cpu().numpy()
            computed = chunk.length - (chunk.last - chunk.first)
            read.append(page_ids[: -(-computed // page_tokens)])
            used.append(page_ids[: -(-chunk.length // page_tokens)])
        read_ids = np.unique(np.concatenate(read)).astype(np.int64)
        new_ids = np.setdiff1d(np.concatenate(used), read_ids)
        num_pages = len(read_ids) + len(new_ids)
        if num_pages > self.sub_batch_pages:
            raise InternalError(f"a sub-batch of {num_pages} pages; the staging holds {self.sub_batch_pages}")
        place = np.zeros(self.num_pages, np.int64)
        place[read_ids] = np.arange(len(read_ids))
        place[new_ids] = np.arange(len(read_ids), num_pages)
        part = _StagedPart(
            self, len(self._parts), torch.from_numpy(read_ids), paged.page_idx.cpu(), paged.offset.cpu()
        )
        places = torch.from_numpy(place).to(self._device)
        staged = dataclasses.replace(
            paged,
            pool=part,
            page_idx=places[paged.page_idx],
            block_tables=places[paged.block_tables.long()].int(),
            prefills=tuple(
                dataclasses.replace(chunk, page_ids=places[chunk.page_ids]) for chunk in paged.prefills
            ),
        )
        return part, staged

    # What comes next.

    def _learn(self, turn: _Turn) -> None:
        """After the layer before, did the same sub-batch go on?"""
        if self._last is not None and len(self._parts) > 1:
            layer, index = self._last
            if turn[1] != index:
                self._turn_ends.add(layer)
            else:
                self._turn_ends.discard(layer)
        self._last = turn

    def _following(self, turn: _Turn) -> _Turn | None:
        layer, index = turn
        at = self._order.index(layer)
        is_last = at + 1 == len(self._order)
        if len(self._parts) > 1 and (is_last or layer in self._turn_ends):
            if index + 1 < len(self._parts):
                while at > 0 and self._order[at - 1] not in self._turn_ends:
                    at -= 1
                return self._order[at], index + 1
            index = 0
        return None if is_last else (self._order[at + 1], index)

    # Copies.

    def _start_read(self, turn: _Turn) -> tuple[_Turn, Future[torch.cuda.Event | None]]:
        """Ask for the pages of a layer and sub-batch, in the half that is not in use."""
        self._raise_failure()
        layer, index = turn
        half = self._halves[self._in_use ^ 1][self._shapes[layer]]
        return turn, self._copier.submit(
            self._read, layer, self._parts[index].read_ids, half, self._copier.mark()
        )

    def _wait(self, coming: Future[torch.cuda.Event | None]) -> None:
        started = time.perf_counter()
        try:
            arrived = coming.result()
        except Exception as error:
            raise DeviceError(f"KV pages could not be read from the host tier: {error}") from error
        self.counts.waited_s += time.perf_counter() - started
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)

    @torch.inference_mode()  # grad modes belong to a thread
    def _read(
        self,
        layer: int,
        read_ids: torch.Tensor,
        half: tuple[torch.Tensor, torch.Tensor],
        after: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        num_read = len(read_ids)
        num_bytes = num_read * self.page_tokens * self._shapes[layer].token_bytes
        self.counts.read_bytes += num_bytes
        pairs = [(self.k[layer], half[0][:num_read]), (self.v[layer], half[1][:num_read])]
        with self._trace.span("stage", "KV copies", layer=layer, bytes=num_bytes), self._copier.after(after):
            if self._copier.stream is None:
                for pages, staged in pairs:
                    torch.index_select(pages, 0, read_ids, out=staged)
                return None
            for first, last in _runs(read_ids.tolist()):
                pages_from = slice(int(read_ids[first]), int(read_ids[first]) + last - first)
                for pages, staged in pairs:
                    staged[first:last].copy_(pages[pages_from], non_blocking=True)
            return self._copier.stream.record_event()

    @torch.inference_mode()
    def _write(
        self,
        part: _StagedPart,
        layer: int,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        after: torch.cuda.Event | None,
    ) -> None:
        num_bytes = len(k_TKD) * self._shapes[layer].token_bytes
        with self._trace.span("write back", "KV copies", layer=layer, bytes=num_bytes):
            with self._copier.after(after):
                k_TKD, v_TKV = k_TKD.cpu(), v_TKV.cpu()  # as they are, on a CPU
            kv_append(k_TKD, v_TKV, self.k[layer], self.v[layer], part.page_idx, part.offset)
        self.counts.written_bytes += num_bytes

    def _note_failure(self, written: Future[None]) -> None:
        self._failed_write = self._failed_write or written.exception()

    def _raise_failure(self) -> None:
        if self._failed_write is not None:
            raise DeviceError(
                f"keys and values could not be written to the host tier: {self._failed_write}"
            ) from self._failed_write


@dataclasses.dataclass(frozen=True, slots=True)
class _StagedPart:
    """One sub-batch of a pass: which host pages it reads, and where its new tokens go in the host tier."""

    pool: StagedKVPool
    index: int
    read_ids: torch.Tensor
    page_idx: torch.Tensor
    offset: torch.Tensor

    def append(
        self, layer: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor, paged: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Pages.append`."""
        return self.pool.append_part(self, layer, k_TKD, v_TKV, paged)


def _runs(page_ids: list[int]) -> list[tuple[int, int]]:
    """Cut ascending ids where they leave gaps: positions (first, last) of each run."""
    cuts = [at for at in range(1, len(page_ids)) if page_ids[at] != page_ids[at - 1] + 1]
    edges = [0, *cuts, len(page_ids)] if page_ids else []
    return list(itertools.pairwise(edges))
