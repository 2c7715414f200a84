"""Runs one planned step on the device: pack, forward, sample.

All tokens of a pass (or of one of its lanes), prefill chunks and decoded tokens alike, are packed into one
row; only the last token of each sequence that needs one goes through the output head.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from transformers import PreTrainedModel

from batchgen_data.errors import RowError
from batchgen_data.models.kv_pool import KVPool, PagedBatch, Prefill
from batchgen_data.models.weights import WeightCounts, WeightStream
from batchgen_data.runtime.coroutine import CoroutineCounts, run_sub_batches
from batchgen_data.runtime.sampler import sample
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Chunk, Step
from batchgen_data.runtime.sub_batches import cut


@dataclasses.dataclass(slots=True)
class Timings:
    """Seconds spent, in total."""

    pack_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


# Below this many tokens a pass reads more weights than it computes with them: one part reads them once.
_LEAST_LANE_TOKENS = 16
# Lanes more uneven than this would wait for the longest one.
_MOST_LANE_SHARE = 1.35


class TorchExecutor:
    """The executor for real models, on a CPU or a GPU.

    On a CPU a pass is cut into lanes, parts of about equal size that run side by side on a thread each,
    where it has enough sequences for that. Threads inside one matrix product meet at a barrier after each
    of some 200 products a pass; lanes meet once (measured: docs/performance.md).

    Call it with `torch.inference_mode` on, from one thread.

    Args:
        model: switched to paged attention by `models.attention.install`.
        pool: its KV pages.
        sub_batch: sequences of one attention sub-batch; None runs sequences of a lane as one unit, or with
            a pool that stages pages as many together as its staging holds.
        num_threads: CPU threads to use in lanes; 1 on a GPU.
        weights: what brings the model's weights where they are streamed; closed with the executor.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        *,
        sub_batch: int | None = None,
        num_threads: int = 1,
        weights: WeightStream | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.sub_batch = sub_batch
        self.num_threads = num_threads
        self._in_turns = sub_batch is not None or pool.sub_batch_pages is not None
        self.coroutine_counts = CoroutineCounts()
        self.timings = Timings()
        self._weights = weights
        self.device = model.get_input_embeddings().weight.device
        self._others = ThreadPoolExecutor(
            max(1, num_threads - 1),
            thread_name_prefix="batchgen-lane",
            initializer=torch.set_num_threads,
            initargs=(1,),
        )

    @property
    def weights(self) -> WeightCounts | None:
        """What streaming the weights took; None where all are resident."""
        return self._weights.counts if self._weights is not None else None

    def close(self) -> None:
        """Stop streaming weights; nothing can run afterwards. Safe to call twice."""
        if self._weights is not None:
            self._weights.close()

    def run(self, step: Step) -> dict[int, int | RowError]:
        """Run the pass and return, by sequence id, the token or row error of each chunk that samples.

        Raises:
            Exception: whatever the model raises; nothing of the step counts then.
        """
        started = time.perf_counter()
        parts = self._parts(step)
        self.pool.begin_pass()
        forwards = [self._forward(chunks) for chunks in parts]
        sequences = [[chunk.sequence for chunk in chunks if chunk.samples] for chunks in parts]
        self.timings.pack_s += time.perf_counter() - started
        if self._in_turns or len(parts) == 1:
            return self._run_together(forwards, sequences)
        return self._run_lanes(forwards, sequences)

    def _run_together(
        self, forwards: list[Callable[[], torch.Tensor]], sequences: list[list[Sequence]]
    ) -> dict[int, int | RowError]:
        """As coroutines of this thread, which combine at the model's yield points."""
        if self.num_threads > 1:
            torch.set_num_threads(self.num_threads)
        started = time.perf_counter()
        logits = run_sub_batches(forwards, self.coroutine_counts)
        self.timings.forward_s += time.perf_counter() - started
        results: dict[int, int | RowError] = {}
        for part, part_sequences in zip(logits, sequences, strict=True):
            results |= self._sample(part, part_sequences)
        return results

    def _run_lanes(
        self, forwards: list[Callable[[], torch.Tensor]], sequences: list[list[Sequence]]
    ) -> dict[int, int | RowError]:
        """Side by side, each on one thread, sampling included."""

        @torch.inference_mode()  # grad modes belong to a thread
        def run(lane: int) -> dict[int, int | RowError]:
            return self._sample(forwards[lane](), sequences[lane])

        torch.set_num_threads(1)
        started = time.perf_counter()
        sampled_before_s = self.timings.sample_s
        others = [self._others.submit(run, lane) for lane in range(1, len(forwards))]
        try:
            results = run(0)
        finally:
            wait(others)  # nobody may still write pages when a failed step is taken apart
        for other in others:
            results |= other.result()
        # Lanes sample at their own times: count the mean, and the rest of the clock as forward.
        sampled_s = (self.timings.sample_s - sampled_before_s) / len(forwards)
        self.timings.sample_s = sampled_before_s + sampled_s
        self.timings.forward_s += time.perf_counter() - started - sampled_s
        return results

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, int | RowError]:
        if not sequences:
            return {}
        started = time.perf_counter()
        results = sample(logits, sequences)
        self.timings.sample_s += time.perf_counter() - started
        return {sequence.seq_id: result for sequence, result in zip(sequences, results, strict=True)}

    def _parts(self, step: Step) -> list[tuple[Chunk, ...]]:
        if self._in_turns:
            return cut(
                step.chunks,
                self.pool.page_tokens,
                max_sequences=self.sub_batch,
                max_pages=self.pool.sub_batch_pages,
            )
        num_lanes = min(self.num_threads, step.num_tokens // _LEAST_LANE_TOKENS)
        if num_lanes < 2:
            return [step.chunks]
        lanes: list[list[Chunk]] = [[] for _ in range(num_lanes)]
        sizes = [0] * num_lanes
        # Largest first, each to the emptiest lane.
        for chunk in sorted(step.chunks, key=lambda chunk: chunk.start - chunk.end):
            lane = sizes.index(min(sizes))
            lanes[lane].append(chunk)
            sizes[lane] += chunk.end - chunk.start
        if max(sizes) > _MOST_LANE_SHARE * step.num_tokens / num_lanes:
            return [step.chunks]  # one long chunk: its products are shared by all threads instead
        return [tuple(reversed(lane)) for lane in lanes]

    def _forward(self, chunks: tuple[Chunk, ...]) -> Callable[[], torch.Tensor]:
        """Pack one sub-batch; the returned closure gives the logits [rows that sample, vocabulary]."""
        device = self.device
        page_tokens = self.pool.page_tokens
        tokens: list[int] = []
        positions: list[int] = []
        page_idx: list[int] = []
        sampled_at: list[int] = []
        for chunk in chunks:
            sequence = chunk.sequence
            span = range(chunk.start, chunk.end)
            tokens += sequence.token_ids[chunk.start : chunk.end]
            positions += span
            pages = sequence.pages
            page_idx += [pages[at // page_tokens] for at in span]
            if chunk.samples:
                sampled_at.append(len(tokens) - 1)
        num_decode = next((i for i, chunk in enumerate(chunks) if chunk.end - chunk.start > 1), len(chunks))
        position_ids = torch.tensor(positions, device=device)
        paged = self.pool.place(
            PagedBatch(
                pool=self.pool,
                page_idx=torch.tensor(page_idx, device=device),
                offset=position_ids % page_tokens,
                num_decode=num_decode,
                block_tables=self._block_tables(chunks[:num_decode]),
                lengths=torch.tensor(
                    [chunk.end for chunk in chunks[:num_decode]], dtype=torch.int32, device=device
                ),
                prefills=self._prefills(chunks, num_decode),
            )
        )
        input_ids = torch.tensor(tokens, device=device).unsqueeze(0)
        # A pass of prefill chunks that all go on has nothing to sample, but the head wants one row.
        keep = torch.tensor(sampled_at or [0], device=device)

        def forward() -> torch.Tensor:
            logits = self.model(
                input_ids=input_ids,
                position_ids=position_ids.unsqueeze(0),
                use_cache=False,
                logits_to_keep=keep,
                paged=paged,
            ).logits[0]
            return logits[: len(sampled_at)]

        return forward

    def _block_tables(self, chunks: tuple[Chunk, ...]) -> torch.Tensor:
        widest = max((len(chunk.sequence.pages) for chunk in chunks), default=0)
        tables = [chunk.sequence.pages + [0] * (widest - len(chunk.sequence.pages)) for chunk in chunks]
        return torch.tensor(tables, dtype=torch.int32, device=self.device)

    def _prefills(self, chunks: tuple[Chunk, ...], num_decode: int) -> tuple[Prefill, ...]:
        prefills = []
        first = num_decode
        for chunk in chunks[num_decode:]:
            num_pages = -(-chunk.end // self.pool.page_tokens)
            page_ids = torch.tensor(chunk.sequence.pages[:num_pages], device=self.device)
            last = first + chunk.end - chunk.start
            prefills.append(Prefill(first, last, page_ids, chunk.end))
            first = last
        return tuple(prefills)
