"""Finished greedy rows, kept for equal prompts to come."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from batchgen_data.runtime.ticket import Ending

# Counted in token ids of 4 bytes: about 8 MiB.
_MOST_TOKENS = 2_000_000
_ENTRY_TOKENS = 256  # what an entry costs besides its tokens


class FinishedRows:
    """A bounded memo from (prompt token bytes, sampling) to how a generation ended; oldest use goes first."""

    def __init__(self) -> None:
        self._endings: OrderedDict[tuple[Any, ...], Ending] = OrderedDict()
        self._num_tokens = 0

    def get(self, key: tuple[Any, ...]) -> Ending | None:
        """How an equal row ended, if it is still known."""
        ending = self._endings.get(key)
        if ending is not None:
            self._endings.move_to_end(key)
        return ending

    def add(self, key: tuple[Any, ...], ending: Ending) -> None:
        """Keep a row's ending; the caller adds each key once while it is not known."""
        self._endings[key] = ending
        self._num_tokens += _size(key, ending)
        while self._num_tokens > _MOST_TOKENS:
            self._num_tokens -= _size(*self._endings.popitem(last=False))


def _size(key: tuple[Any, ...], ending: Ending) -> int:
    return len(ending.token_ids) + len(key[0]) // 4 + _ENTRY_TOKENS
