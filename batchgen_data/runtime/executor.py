"""Runs one planned step on the device: pack, forward, sample.

All tokens of a pass, prefill chunks and decoded tokens alike, are packed into one row; only the last token
of each sequence that needs one goes through the output head.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from batchgen_data.errors import RowError
from batchgen_data.models.attention import KVPool, PagedBatch, Prefill
from batchgen_data.runtime.coroutine import CoroutineCounts, run_sub_batches
from batchgen_data.runtime.sampler import sample
from batchgen_data.runtime.scheduler import Chunk, Step


@dataclasses.dataclass(slots=True)
class Timings:
    """Seconds spent, in total."""

    pack_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class TorchExecutor:
    """The executor for real models, on a CPU or a GPU.

    Call it with `torch.inference_mode` on, from one thread.
    """

    def __init__(self, model: PreTrainedModel, pool: KVPool, *, sub_batch: int | None = None) -> None:
        self.model = model
        self.pool = pool
        self.sub_batch = sub_batch
        self.coroutine_counts = CoroutineCounts()
        self.timings = Timings()
        self.device = model.get_input_embeddings().weight.device

    def run(self, step: Step) -> dict[int, int | RowError]:
        """Run the pass and return, by sequence id, the token or row error of each chunk that samples.

        Raises:
            Exception: whatever the model raises; nothing of the step counts then.
        """
        started = time.perf_counter()
        groups = self._groups(step)
        forwards = [self._forward(group) for group in groups]
        packed = time.perf_counter()
        logits = torch.cat(run_sub_batches(forwards, self.coroutine_counts))
        sequences = [chunk.sequence for group in groups for chunk in group if chunk.samples]
        # Reading a result back waits for the device; before that, clocks would time the launch only.
        computed = time.perf_counter()
        results = sample(logits, sequences) if sequences else []
        sampled = time.perf_counter()
        self.timings.pack_s += packed - started
        self.timings.forward_s += computed - packed
        self.timings.sample_s += sampled - computed
        return {sequence.seq_id: result for sequence, result in zip(sequences, results, strict=True)}

    def _groups(self, step: Step) -> list[tuple[Chunk, ...]]:
        if not self.sub_batch or len(step.chunks) <= self.sub_batch:
            return [step.chunks]
        starts = range(0, len(step.chunks), self.sub_batch)
        return [step.chunks[start : start + self.sub_batch] for start in starts]

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
        paged = PagedBatch(
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
