"""One row's generation: everything needed to go on with it, wherever it stopped."""

from __future__ import annotations

import enum
from collections.abc import Callable

from batchgen_data.errors import RowError
from batchgen_data.runtime.pages import ROOT_HASH, page_hash
from batchgen_data.sampling import ResolvedSampling


class State(enum.Enum):
    """Where a sequence is in its life: waiting -> active <-> suspended -> finished."""

    WAITING = "waiting"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    FINISHED = "finished"


class Sequence:
    """The state of one generation. Only the scheduler changes `state`, `pages` and `num_computed`.

    Attributes:
        seq_id: position in the order of arrival.
        token_ids: prompt and generated tokens.
        num_computed: leading tokens whose keys and values are in `pages`.
        limit_tokens: prompt and output together at most.
        pages: block table.
        finish_reason, stop_reason, error: set when finished.
        length_reason: becomes the stop reason when the sequence ends at `limit_tokens`.
        stop_at: where the stop string begins in the decoded text, when one ended the sequence.
        suspect: a pass that held this sequence raised; it runs alone until one succeeds.
    """

    __slots__ = (
        "_page_names",
        "_stop_text",
        "decode_text",
        "error",
        "finish_reason",
        "length_reason",
        "limit_tokens",
        "num_computed",
        "num_named",
        "num_prompt",
        "num_yields",
        "pages",
        "row_key",
        "sampling",
        "seq_id",
        "state",
        "stop_at",
        "stop_ids",
        "stop_reason",
        "suspect",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        sampling: ResolvedSampling,
        *,
        limit_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        row_key: bytes = b"",
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt = len(prompt_token_ids)
        self.sampling = sampling
        self.limit_tokens = limit_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else eos_token_ids
        )
        self.row_key = row_key
        self.decode_text = decode_text
        self.state = State.WAITING
        self.pages: list[int] = []
        self.num_computed = 0
        self.num_named = 0
        self.num_yields = 0
        self.suspect = False
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self.length_reason: str | None = None
        self.stop_at: int | None = None
        self.error: RowError | None = None
        self._page_names: list[bytes] = []
        self._stop_text = max((len(text.encode()) for text in sampling.stop), default=0)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def generated_ids(self) -> list[int]:
        """Generated tokens so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def decoding(self) -> bool:
        """Whether the next pass computes just the newest token."""
        return self.num_computed == len(self.token_ids) - 1

    def page_names(self, page_tokens: int, count: int) -> list[bytes]:
        """Hash-chain names of the first `count` full pages (`count * page_tokens <= num_tokens`)."""
        names = self._page_names
        while len(names) < count:
            start = len(names) * page_tokens
            parent = names[-1] if names else ROOT_HASH
            names.append(page_hash(parent, self.token_ids[start : start + page_tokens]))
        return names[:count]

    def accept(self, token_id: int) -> bool:
        """Append a sampled token and say whether the sequence is finished by it."""
        self.token_ids.append(token_id)
        if self.num_generated >= self.sampling.min_tokens:
            if token_id in self.stop_ids:
                self.finish_reason = "stop"
                if token_id in self.sampling.stop_token_ids:
                    self.stop_reason = str(token_id)
                return True
            if self._stop_text and self._find_stop_string():
                return True
        if len(self.token_ids) >= self.limit_tokens:
            self.finish_reason = "length"
            self.stop_reason = self.length_reason
            return True
        return False

    def fail(self, error: RowError) -> None:
        """Finish with an error outcome."""
        self.finish_reason = "skipped" if error.skipped else "error"
        self.error = error

    def _find_stop_string(self) -> bool:
        if self.decode_text is None:
            return False
        generated = self.generated_ids
        # A token is at least one byte of text, or special: this many tokens hold any stop string that the
        # newest token could complete, with room for a character cut by the window's edge.
        tail = self.decode_text(generated[-(self._stop_text + 8) :])
        if not any(stop in tail for stop in self.sampling.stop):
            return False
        # What was complete before `min_tokens` does not count.
        exempt = (
            len(self.decode_text(generated[: self.sampling.min_tokens - 1]))
            if self.sampling.min_tokens
            else 0
        )
        text = self.decode_text(generated)
        found = [
            (position, stop)
            for stop in self.sampling.stop
            if (position := text.find(stop, max(0, exempt - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        self.finish_reason = "stop"
        self.stop_at, self.stop_reason = min(found, key=lambda item: (item[0], len(item[1])))
        return True
