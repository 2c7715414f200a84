"""Drafts: several tokens of a sequence in one pass, guessed first and checked by what is sampled there.

A pass over a sequence's newest token and k guessed ones gives k + 1 places to sample from. At each the very
token is sampled that would have been without a draft, as a function of the row and its position, provided
that the guesses before it were right. So tokens are kept up to the first that differs from its guess, and
whatever the settings (penalties, minimum lengths, random draws) the same comes out. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from batchgen_data.runtime.sequence import Sequence as RunningSequence
from batchgen_data.runtime.step import Chunk, Sampled
from batchgen_data.sampling import ResolvedSampling


class Ahead:
    """A sequence as it is if the first tokens of its draft are right: what sampling needs of it."""

    __slots__ = ("_draft", "_sequence")

    def __init__(self, sequence: RunningSequence, draft: tuple[int, ...]) -> None:
        self._sequence = sequence
        self._draft = draft

    @property
    def sampling(self) -> ResolvedSampling:
        """As of the sequence."""
        return self._sequence.sampling

    @property
    def row_key(self) -> bytes:
        """As of the sequence."""
        return self._sequence.row_key

    @property
    def stop_ids(self) -> frozenset[int]:
        """As of the sequence."""
        return self._sequence.stop_ids

    @property
    def num_generated(self) -> int:
        """Generated tokens, the draft's included."""
        return self._sequence.num_generated + len(self._draft)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens, then the draft's."""
        return [*self._sequence.token_ids, *self._draft]

    @property
    def generated_ids(self) -> list[int]:
        """Generated tokens, then the draft's."""
        return [*self._sequence.generated_ids, *self._draft]


def places(chunk: Chunk) -> list[RunningSequence | Ahead]:
    """The sequence as it is at each token of a chunk that is sampled from."""
    return [
        chunk.sequence,
        *(Ahead(chunk.sequence, chunk.draft[:count]) for count in range(1, len(chunk.draft) + 1)),
    ]


def kept(draft: tuple[int, ...], sampled: Sequence[Sampled]) -> tuple[Sampled, ...]:
    """What of `sampled`, one for each of `places`, is right: all up to the first that is not as guessed."""
    for count, (guess, token) in enumerate(zip(draft, sampled, strict=False)):
        if token != guess:
            return tuple(sampled[: count + 1])
    return tuple(sampled)


def add_drafts(
    chunks: list[Chunk],
    draft: Callable[[RunningSequence, int], tuple[int, ...]],
    *,
    room_tokens: int,
    page_tokens: int,
) -> int:
    """Let decoding sequences of a pass check drafts, as far as there is room; return the tokens added.

    Args:
        chunks: of the pass; those of sequences that got a draft are replaced.
        draft: gives at most so many tokens for a sequence.
        room_tokens: tokens that the pass may still take, shared evenly.
        page_tokens: tokens of a KV page; a draft never needs a page that its sequence does not hold.
    """
    decoding = [at for at, chunk in enumerate(chunks) if chunk.samples and chunk.end - chunk.start == 1]
    added = 0
    for num_done, at in enumerate(decoding):
        chunk = chunks[at]
        sequence = chunk.sequence
        most = min(
            (room_tokens - added) // (len(decoding) - num_done),
            len(sequence.pages) * page_tokens - chunk.end,
            # The pass samples one token more than the draft has.
            sequence.limit_tokens - chunk.end - 1,
        )
        guess = draft(sequence, most) if most > 0 else ()
        if guess:
            chunks[at] = dataclasses.replace(chunk, end=chunk.end + len(guess), draft=guess)
            added += len(guess)
    return added
