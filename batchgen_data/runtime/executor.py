"""Runs one planned step on the device: pack, forward, sample.

All tokens of a pass (or of one of its lanes), prefill chunks and decoded tokens alike, are packed into one
row; only the last token of each sequence that needs one goes through the output head.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from transformers import PreTrainedModel

from batchgen_data.models.experts import experts_per_choice
from batchgen_data.models.kv_checkpoint import CopyCounts, KVCopies
from batchgen_data.models.kv_pool import KVPool, PagedBatch, Prefill
from batchgen_data.models.weights import WeightCounts, WeightStream
from batchgen_data.runtime.coroutine import CoroutineCounts, run_sub_batches
from batchgen_data.runtime.drafts import kept, places
from batchgen_data.runtime.faults import aborts_pass, first_line
from batchgen_data.runtime.sampler import sample
from batchgen_data.runtime.step import Chunk, Sampled, Step, StepResult
from batchgen_data.runtime.sub_batches import cut
from batchgen_data.runtime.trace import OFF, Trace

logger = logging.getLogger(__name__)


# The chunks that run as one unit.
_Part = tuple[Chunk, ...]
_Tokens = dict[int, Sampled | tuple[Sampled, ...]]


@dataclasses.dataclass(slots=True)
class Timings:
    """Seconds spent, in total."""

    pack_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


# Below this many tokens a pass reads more weights than it computes with them: one part reads them once.
_LEAST_LANE_TOKENS = 16
# And below this many tokens for each expert: threads share experts better than lanes that all read them. Of
# 128, 8 for a token, 16 rows decode 1.5 times sooner in one part than in lanes, 64 rows 1.2, 256 as fast.
_LEAST_EXPERT_TOKENS = 32
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
        moe_batch_tokens: tokens of one combined call at most; None: all tokens of the pass. With a number
            a pass never runs in lanes.
        num_threads: CPU threads to use in lanes; 1 on a GPU.
        weights: what brings the model's weights where they are streamed; closed with the executor.
        copies: what copies pages to and from the host tier, where suspended sequences are kept; closed with
            the executor.
        trace: where to record what passes do.
        trace_path: where to write that when the executor closes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        *,
        sub_batch: int | None = None,
        moe_batch_tokens: int | None = None,
        num_threads: int = 1,
        weights: WeightStream | None = None,
        copies: KVCopies | None = None,
        trace: Trace = OFF,
        trace_path: str | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.sub_batch = sub_batch
        self.moe_batch_tokens = moe_batch_tokens
        self.num_threads = num_threads
        self.trace = trace
        self._trace_path = trace_path
        self._in_turns = any(
            limit is not None for limit in (sub_batch, moe_batch_tokens, pool.sub_batch_pages)
        )
        self.least_lane_tokens = max(
            _LEAST_LANE_TOKENS, int(_LEAST_EXPERT_TOKENS * experts_per_choice(model))
        )
        self.coroutine = CoroutineCounts()
        self.timings = Timings()
        self._weights = weights
        self._copies = copies
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

    @property
    def kv_copies(self) -> CopyCounts | None:
        """What checkpoints and restores took; None where nothing is kept of suspended sequences."""
        return self._copies.counts if self._copies is not None else None

    def close(self) -> None:
        """Stop copies, stop streaming weights and write the trace; nothing can run afterwards.

        Safe to call twice.
        """
        if self._copies is not None:
            self._copies.close()
        if self._weights is not None:
            self._weights.close()
        path, self._trace_path = self._trace_path, None
        if path is not None:
            try:
                self.trace.write(path)
            except OSError as error:
                # The rows are done: what tells how they were must not take them away.
                logger.error("the trace could not be written to %s: %s", path, error)

    def run(self, step: Step) -> StepResult:
        """Begin the copies and run the pass: a token or row error of each chunk that samples, by sequence id.

        A step without chunks waits for a copy instead.

        What one of several parts of the pass raises, sampling included, is the failure of its sequences
        only.

        Raises:
            Exception: the failure of the first part, where all failed; at once what says that the pass as
                a whole cannot run (`aborts_pass`). Nothing of the step counts then.
        """
        if self._copies is not None:
            self._copies.start(step.copies)
            if not step.chunks:
                return StepResult({}, copied=self._copies.wait())
        result = self._run_pass(step)
        return result if self._copies is None else dataclasses.replace(result, copied=self._copies.ended())

    def _run_pass(self, step: Step) -> StepResult:
        self.trace.begin_pass()
        with self.trace.span("pass", "passes", sequences=len(step.chunks), tokens=step.num_tokens):
            started = time.perf_counter()
            parts = self._parts(step)
            self.pool.begin_pass()
            forwards = [self._forward(chunks) for chunks in parts]
            self.timings.pack_s += time.perf_counter() - started
            if self._in_turns or len(parts) == 1:
                return self._run_together(forwards, parts)
            return self._run_lanes(forwards, parts)

    def _run_together(self, forwards: list[Callable[[], torch.Tensor]], parts: list[_Part]) -> StepResult:
        """As coroutines of this thread, which combine at the model's yield points."""
        if self.num_threads > 1:
            torch.set_num_threads(self.num_threads)
        started = time.perf_counter()
        with self.trace.span("forward", "forward", sub_batches=len(parts)):
            logits = run_sub_batches(
                forwards, self.coroutine, most_tokens=self.moe_batch_tokens, trace=self.trace
            )
        self.timings.forward_s += time.perf_counter() - started
        outcomes: list[_Tokens | Exception] = [
            part_logits if isinstance(part_logits, Exception) else self._try_sampling(part_logits, chunks)
            for part_logits, chunks in zip(logits, parts, strict=True)
        ]
        return _step_result(parts, outcomes)

    def _run_lanes(self, forwards: list[Callable[[], torch.Tensor]], parts: list[_Part]) -> StepResult:
        """Side by side, each on one thread, sampling included."""

        @torch.inference_mode()  # grad modes belong to a thread
        def run(lane: int) -> _Tokens | Exception:
            try:
                with self.trace.span("forward", f"lane {lane}", sequences=len(parts[lane])):
                    logits = forwards[lane]()
                return self._sample(logits, parts[lane], f"lane {lane}")
            except Exception as error:
                return error

        torch.set_num_threads(1)
        started = time.perf_counter()
        sampled_before_s = self.timings.sample_s
        others = [self._others.submit(run, lane) for lane in range(1, len(forwards))]
        try:
            outcomes = [run(0)]
        finally:
            wait(others)  # nobody may still write pages when a failed step is taken apart
        outcomes += [other.result() for other in others]
        # Lanes sample at their own times: count the mean, and the rest of the clock as forward.
        sampled_s = (self.timings.sample_s - sampled_before_s) / len(forwards)
        self.timings.sample_s = sampled_before_s + sampled_s
        self.timings.forward_s += time.perf_counter() - started - sampled_s
        return _step_result(parts, outcomes)

    def _try_sampling(self, logits: torch.Tensor, chunks: _Part) -> _Tokens | Exception:
        try:
            return self._sample(logits, chunks, "sampling")
        except Exception as error:
            return error

    def _sample(self, logits: torch.Tensor, chunks: _Part, track: str) -> _Tokens:
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return {}
        started = time.perf_counter()
        with self.trace.span("sampling", track, sequences=len(sampling)):
            results = iter(sample(logits, [place for chunk in sampling for place in places(chunk)]))
        self.timings.sample_s += time.perf_counter() - started
        return {
            chunk.sequence.seq_id: kept(chunk.draft, [next(results) for _ in range(len(chunk.draft) + 1)])
            if chunk.draft
            else next(results)
            for chunk in sampling
        }

    def _parts(self, step: Step) -> list[_Part]:
        if self._in_turns:
            return cut(
                step.chunks,
                self.pool.page_tokens,
                max_sequences=self.sub_batch,
                max_pages=self.pool.sub_batch_pages,
            )
        num_lanes = min(self.num_threads, step.num_tokens // self.least_lane_tokens)
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
        # Decoded tokens first again.
        return [tuple(sorted(lane, key=lambda chunk: not chunk.singly)) for lane in lanes]

    def _forward(self, chunks: _Part) -> Callable[[], torch.Tensor]:
        """Pack one sub-batch; the returned closure gives the logits [places sampled from, vocabulary]."""
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
            tokens += chunk.draft
            positions += span
            pages = sequence.pages
            page_idx += [pages[at // page_tokens] for at in span]
            if chunk.samples:
                sampled_at += range(len(tokens) - 1 - len(chunk.draft), len(tokens))
        num_singly = next((i for i, chunk in enumerate(chunks) if not chunk.singly), len(chunks))
        # One entry for each token: those of a draft have the same pages and one length more each.
        singly = [chunk for chunk in chunks[:num_singly] for _ in range(chunk.start, chunk.end)]
        num_decode = len(singly)
        position_ids = torch.tensor(positions, device=device)
        paged = self.pool.place(
            PagedBatch(
                pool=self.pool,
                page_idx=torch.tensor(page_idx, device=device),
                offset=position_ids % page_tokens,
                num_decode=num_decode,
                block_tables=self._block_tables(singly),
                lengths=torch.tensor(positions[:num_decode], dtype=torch.int32, device=device) + 1,
                prefills=self._prefills(chunks[num_singly:], num_decode),
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

    def _block_tables(self, chunks: list[Chunk]) -> torch.Tensor:
        widest = max((len(chunk.sequence.pages) for chunk in chunks), default=0)
        tables = [chunk.sequence.pages + [0] * (widest - len(chunk.sequence.pages)) for chunk in chunks]
        return torch.tensor(tables, dtype=torch.int32, device=self.device)

    def _prefills(self, chunks: _Part, first: int) -> tuple[Prefill, ...]:
        prefills = []
        for chunk in chunks:
            num_pages = -(-chunk.end // self.pool.page_tokens)
            page_ids = torch.tensor(chunk.sequence.pages[:num_pages], device=self.device)
            last = first + chunk.end - chunk.start
            prefills.append(Prefill(first, last, page_ids, chunk.end))
            first = last
        return tuple(prefills)


def _step_result(parts: list[_Part], outcomes: list[_Tokens | Exception]) -> StepResult:
    """Put the parts of a pass together; raise what is no failure of some of them only."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    for error in errors:
        if aborts_pass(error):
            raise error
    if len(errors) == len(parts):
        raise errors[0]
    tokens: _Tokens = {}
    failed: dict[int, str] = {}
    for chunks, outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, Exception):
            logger.warning("%d of the rows of a pass raised %s", len(chunks), type(outcome).__name__)
            failed |= {chunk.sequence.seq_id: first_line(outcome) for chunk in chunks}
        else:
            tokens |= outcome
    return StepResult(tokens, failed)
