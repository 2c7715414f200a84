"""What a scheduler decides: one forward pass, within limits, and the totals it keeps. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from batchgen_data.errors import RowError
from batchgen_data.runtime.sequence import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the scheduler may use; see EngineConfig for the meaning of most.

    `max_chunk_tokens`: tokens of one sequence in one pass at most, so that a pass can be cut into parts
    that run side by side; None leaves it to `max_step_tokens`.
    `max_sequence_pages`: KV pages of one sequence at most, where attention reads pages of the host tier
    through a staging on the device; None where only `num_pages` limits them.
    `host_pages`: KV pages of the host tier for checkpoints of suspended sequences; 0 recomputes them.
    `least_restored_tokens`: fewer tokens than this are recomputed all the same.
    """

    num_pages: int
    page_tokens: int = 64
    max_sequences: int = 256
    max_step_tokens: int = 512
    max_chunk_tokens: int | None = None
    max_sequence_pages: int | None = None
    prefix_reuse: bool = True
    host_pages: int = 0
    least_restored_tokens: int = 1


# A sampled token, or the row's own failure.
Sampled = int | RowError


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a pass: tokens `start` to `end`, sampled from if `samples`.

    The last of them are `draft`, tokens that the sequence may go on with: a guess that the pass checks.
    """

    sequence: Sequence
    start: int
    end: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def singly(self) -> bool:
        """Whether each token attends as a decoded one does, on its own; such chunks come first in a pass."""
        return self.end - self.start == 1 or bool(self.draft)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """KV pages to copy between the device and the host tier; both sides are left alone until it has ended.

    Attributes:
        sequence: whose.
        to_host: a checkpoint; else a restore.
        device_pages, host_pages: of the same length, in the order of the sequence.
        start, end: tokens they hold.
    """

    sequence: Sequence
    to_host: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: decoding sequences (one token each, and drafts) first, then prefill chunks.

    `copies` begin before it and may end later than it. A step without chunks waits until a copy has ended.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step's chunks, by sequence id.

    Attributes:
        tokens: the sampled token, or the row's own failure, of each chunk that samples; of one with a draft,
            those after each part of the draft that held, in order.
        failed: what the part of the pass raised that held the sequence; nothing it computed counts.
        copied: copies that have ended since the last result, and whether they succeeded.
    """

    tokens: Mapping[int, Sampled | tuple[Sampled, ...]]
    failed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    copied: Mapping[Copy, bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Counts:
    """Running totals; see `Scheduler.statistics`."""

    steps: int = 0
    page_boundaries: int = 0
    yields: int = 0
    yields_for_pages: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
