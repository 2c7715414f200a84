"""A deterministic stand-in for a model: instant, and able to fail on demand."""

from __future__ import annotations

import hashlib
from array import array

from batchgen_data.errors import RowError
from batchgen_data.prompts import EncodedRow
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

    def __init__(self, page_tokens: int):
        self.page_tokens = page_tokens
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_steps = 0
        self.step_sizes: list[int] = []
        self.active_sizes: list[int] = []
        self.fault = None  # called with the step; may raise
        self.part_fault = None  # called with the step; the cause by id of each sequence whose part raised
        self.non_finite: set[int] = set()

    def run(self, step: Step) -> StepResult:
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
                else:
                    results[sequence.seq_id] = next_token(sequence.token_ids)
        return StepResult(results, failed)

    def _write(self, chunk):
        ids = chunk.sequence.token_ids
        for at in range(chunk.start, chunk.end):
            page = chunk.sequence.pages[at // self.page_tokens]
            self.slots[page, at % self.page_tokens] = tuple(ids[: at + 1])

    def _spoil(self, chunk):
        """A part that raised may have written anything to its own pages."""
        for at in range(chunk.start, chunk.end):
            del self.slots[chunk.sequence.pages[at // self.page_tokens], at % self.page_tokens]

    def _read(self, chunk):
        ids = chunk.sequence.token_ids
        for at in range(chunk.end):
            page = chunk.sequence.pages[at // self.page_tokens]
            assert self.slots.get((page, at % self.page_tokens)) == tuple(ids[: at + 1]), "wrong KV was read"
