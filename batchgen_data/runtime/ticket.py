"""Rows handed to the engine in one call, and how each of their generations ended."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from batchgen_data.errors import BatchgenError, InternalError, RowError
from batchgen_data.prompts import EncodedRow
from batchgen_data.sampling import ResolvedSampling
from batchgen_data.schema import Outcome

# Windows cannot interrupt a wait, so there it is cut into slices. Elsewhere hundreds of callers that wake up
# twice a second would only take the interpreter from the engine thread.
_WAIT_SLICE_S = 0.5 if sys.platform == "win32" else None


class TicketOwner(Protocol):
    """The part of the engine a ticket needs."""

    def cancel(self, ticket: Ticket) -> None:
        """Take a ticket's unfinished rows out."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Turn token ids into text."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended, apart from the row it belongs to."""

    token_ids: array[int]
    finish_reason: str
    stop_reason: str | None
    stop_at: int | None


class Ticket:
    """Rows handed to the engine in one call; `wait` returns their outcomes in the same order."""

    def __init__(self, engine: TicketOwner, rows: Sequence[EncodedRow | RowError]) -> None:
        self._engine = engine
        self.rows = rows
        self.endings: list[Ending | RowError | None] = [
            row if isinstance(row, RowError) else None for row in rows
        ]
        self.num_left = sum(1 for ending in self.endings if ending is None)
        self.fatal: BatchgenError | None = None
        self.done = threading.Event()

    def settle(self, index: int, ending: Ending | RowError) -> None:
        """Record one row's ending (engine thread only)."""
        if self.endings[index] is not None:
            raise InternalError("a row was given a second outcome")
        self.endings[index] = ending
        self.num_left -= 1

    def wait(self) -> list[Outcome]:
        """Block until every row has its outcome.

        An interrupted wait (Ctrl-C) takes the rows out of the engine.

        Raises:
            DeviceError: the device failed; the process should be replaced.
            InternalError: the engine stopped by a bug of ours.
        """
        try:
            while not self.done.wait(timeout=_WAIT_SLICE_S):
                pass
        except BaseException:
            self._engine.cancel(self)
            raise
        if self.fatal is not None:
            # A new one per caller: raising one object in several threads would mix their tracebacks.
            raise type(self.fatal)(str(self.fatal)) from self.fatal
        return [self._outcome(row, ending) for row, ending in zip(self.rows, self.endings, strict=True)]

    def _outcome(self, row: EncodedRow | RowError, ending: Ending | RowError | None) -> Outcome:
        num_input = len(row.prompt_token_ids) if isinstance(row, EncodedRow) else None
        if isinstance(ending, RowError):
            return Outcome.failed(ending, num_input)
        if ending is None or isinstance(row, RowError):
            raise InternalError("a row has no outcome")
        token_ids = ending.token_ids.tolist()
        try:
            text = ending_text(ending, token_ids, row.sampling, self._engine.decode)
        except Exception as error:
            cause = f"decoding the generated tokens raised {type(error).__name__}"
            return Outcome.failed(RowError("decode_error", cause), num_input)
        return Outcome(
            finish_reason=ending.finish_reason,  # type: ignore[arg-type]
            stop_reason=ending.stop_reason,
            num_input_tokens=num_input,
            token_ids=token_ids,
            text=text,
        )


def ending_text(
    ending: Ending,
    token_ids: list[int],
    sampling: ResolvedSampling,
    decode: Callable[[list[int], bool], str],
) -> str:
    """Decode a whole generation at once, without the end token and what follows a stop string.

    One decode of all ids: a character split over tokens comes out whole, and one cut off by the end of the
    generation becomes one replacement mark.
    """
    by_token = ending.finish_reason == "stop" and ending.stop_at is None
    if by_token and not sampling.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    text = decode(token_ids, sampling.skip_special_tokens)
    if ending.stop_at is not None:
        kept = len(ending.stop_reason or "") if sampling.include_stop_str_in_output else 0
        text = text[: ending.stop_at + kept]
    return text
