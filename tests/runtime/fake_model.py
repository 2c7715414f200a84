"""A deterministic stand-in for a model: instant, and able to fail on demand."""

from __future__ import annotations

import hashlib
import random
from array import array

from batchgen_data.errors import RowError
from batchgen_data.prompts import EncodedRow
from batchgen_data.runtime.drafts import kept, places
from batchgen_data.runtime.step import Step, StepResult
from batchgen_data.sampling import ResolvedSampling

VOCAB_SIZE = 1000


def sampling(**settings) -> ResolvedSampling:
    """Concrete settings: greedy, everything else off, unless given."""
    return ResolvedSampling(**{"temperature": 0.0, **settings})


def row(prompt, **settings) -> EncodedRow:
    """A row ready to run."""
    return EncodedRow(prompt_token_ids=list(prompt), sampling=sampling(**settings), row_key=b"")


def next_token(token_ids) -> int:
    """The token a sequence goes on with: a function of everything before it."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def expected(prompt, count) -> list[int]:
    """The `count` tokens that a fault-free run generates after `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class FakeExecutor:
    """Remembers what each page slot was written with, and answers only from that.

    A token computed from a page that holds something else (a wrong share, a page reused too early, a
    missing recomputation) raises: schedules are checked, not just counted.
    """

    def __init__(self, page_tokens: int, seed: int = 0):
        self.page_tokens = page_tokens
        self.random = random.Random(seed)
        self.copy_passes = (0, 0)  # that a copy goes on for, at least and at most
        self.copy_fault = None  # called with the copy; whether it fails
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.copies: dict = {}  # under way: passes left
        self.num_copies = 0
        self.num_restored = 0
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_steps = 0
        self.step_sizes: list[int] = []
        self.active_sizes: list[int] = []
        self.fault = None  # called with the step; may raise
        self.part_fault = None  # called with the step; the cause by id of each sequence whose part raised
        self.non_finite: set[int] = set()

    def run(self, step: Step) -> StepResult:
        for copy in step.copies:
            self.num_copies += 1
            self.copies[copy] = self.random.randint(*self.copy_passes)
        if not step.chunks:
            assert self.copies, "a step without chunks waits for a copy"
            return StepResult({}, copied=self._copy(min(self.copies.values())))
        result = self._run_pass(step)
        return StepResult(result.tokens, result.failed, self._copy(0))

    def _copy(self, passes: int):
        """So many passes later: end copies in any order; each reads and writes its pages at its very end."""
        ended = [copy for copy, left in self.copies.items() if left <= passes]
        self.copies = {copy: left - passes - 1 for copy, left in self.copies.items() if left > passes}
        self.random.shuffle(ended)
        return {copy: self._copied(copy) for copy in ended}

    def _copied(self, copy) -> bool:
        failed = self.copy_fault is not None and self.copy_fault(copy)
        source, target = (self.slots, self.host) if copy.to_host else (self.host, self.slots)
        pages = (copy.device_pages, copy.host_pages) if copy.to_host else (copy.host_pages, copy.device_pages)
        for page_from, page_to in zip(*pages, strict=True):
            for offset in range(self.page_tokens):
                target.pop((page_to, offset), None)
                if not failed and (page_from, offset) in source:
                    target[page_to, offset] = source[page_from, offset]
        self.num_restored += not (copy.to_host or failed)
        return not failed

    def _run_pass(self, step: Step) -> StepResult:
        self.num_steps += 1
        self.step_sizes.append(step.num_tokens)
        self.active_sizes.append(len(step.chunks))
        if self.fault is not None:
            self.fault(step)
        failed = self.part_fault(step) if self.part_fault is not None else {}
        results = {}
        # Each sequence writes and reads on its own: parts of a pass may run in any order.
        for chunk in reversed(step.chunks):
            self._write(chunk)
            if chunk.sequence.seq_id in failed:
                self._spoil(chunk)
                continue
            self._read(chunk)
            if chunk.samples:
                sequence = chunk.sequence
                if sequence.seq_id in self.non_finite:
                    results[sequence.seq_id] = RowError("non_finite_logits", "NaN")
                elif chunk.draft:
                    sampled = [next_token(place.token_ids) for place in places(chunk)]
                    results[sequence.seq_id] = kept(chunk.draft, sampled)
                else:
                    results[sequence.seq_id] = next_token(sequence.token_ids)
        return StepResult(results, failed)

    def _write(self, chunk):
        ids = [*chunk.sequence.token_ids, *chunk.draft]
        for at in range(chunk.start, chunk.end):
            page = chunk.sequence.pages[at // self.page_tokens]
            self.slots[page, at % self.page_tokens] = tuple(ids[: at + 1])

    def _spoil(self, chunk):
        """A part that raised may have written anything to its own pages."""
        for at in range(chunk.start, chunk.end):
            del self.slots[chunk.sequence.pages[at // self.page_tokens], at % self.page_tokens]

    def _read(self, chunk):
        ids = [*chunk.sequence.token_ids, *chunk.draft]
        for at in range(chunk.end):
            page = chunk.sequence.pages[at // self.page_tokens]
            assert self.slots.get((page, at % self.page_tokens)) == tuple(ids[: at + 1]), "wrong KV was read"
