"""One row's generation: everything needed to go on with it, wherever it stopped."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

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
        num_stored: leading tokens whose keys and values the host tier holds while it is suspended.
        limit_tokens: prompt and output together at most.
        pages: block table.
        finish_reason, stop_reason, error: set when finished.
        length_reason: becomes the stop reason when the sequence ends at `limit_tokens`.
        stop_at: where the stop string begins in the decoded text, when one ended the sequence.
        notes: what callbacks remember of the sequence; None until one does.
        suspect: a pass that held this sequence raised; it runs alone until one succeeds.
    """

    __slots__ = (
        "_named_stop_ids",
        "_page_names",
        "_stop_bytes",
        "decode_text",
        "error",
        "finish_reason",
        "length_reason",
        "limit_tokens",
        "notes",
        "num_computed",
        "num_named",
        "num_prompt",
        "num_stored",
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
        eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self.stop_ids = frozenset(sampling.stop_token_ids) | eos
        self._named_stop_ids = self.stop_ids - eos
        self.row_key = row_key
        self.decode_text = decode_text
        self.state = State.WAITING
        self.pages: list[int] = []
        self.num_computed = 0
        self.num_named = 0
        self.num_stored = 0
        self.num_yields = 0
        self.suspect = False
        self.notes: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self.length_reason: str | None = None
        self.stop_at: int | None = None
        self.error: RowError | None = None
        self._page_names: list[bytes] = []
        self._stop_bytes = max((len(text.encode()) for text in sampling.stop), default=0)

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
        """Append a sampled token and say whether the sequence is finished by it.

        What raises on the way (decoding text for stop strings) is this row's own failure.
        """
        self.token_ids.append(token_id)
        try:
            return self._ends()
        except Exception as error:
            message = f"decoding the generated tokens raised {type(error).__name__}"
            self.fail(RowError("decode_error", message))
            return True

    def _ends(self) -> bool:
        token_id = self.token_ids[-1]
        if self.num_generated >= self.sampling.min_tokens and token_id in self.stop_ids:
            self.finish_reason = "stop"
            # As in vLLM: the model's own end token needs no reason.
            if token_id in self._named_stop_ids:
                self.stop_reason = str(token_id)
            return True
        if self._stop_bytes and self.num_generated > self.sampling.min_tokens and self._find_stop_string():
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
        if not any(stop in self._tail_text() for stop in self.sampling.stop):
            return False
        # Text complete by the `min_tokens`-th token does not count, as in vLLM.
        exempt = len(self.decode_text(self.generated_ids[: self.sampling.min_tokens]))
        text = self.decode_text(self.generated_ids)
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

    def _tail_text(self) -> str:
        """Decode the newest tokens: at least twice the longest stop string, or all there is."""
        assert self.decode_text is not None
        # Most tokens are at least a byte of text; special ones may be none, so look whether it was enough.
        window = self._stop_bytes + 8
        while True:
            first = max(self.num_prompt, len(self.token_ids) - window)
            text = self.decode_text(self.token_ids[first:])
            if first == self.num_prompt or len(text.encode()) >= self._stop_bytes + 8:
                return text
            window *= 2
