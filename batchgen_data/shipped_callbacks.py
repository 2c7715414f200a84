"""Callbacks that come with the package: prompt lookup for stragglers, int8 KV when pages are short."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from batchgen_data.callbacks import Callbacks, Drafter, RuntimeView, SequenceView
from batchgen_data.errors import ConfigError, nearest

_TOKEN = array("i")
# Found by replaying 24 outputs of SmolLM2 with the times of passes of 1 to 16 tokens: 8 or 12 tokens at
# first, or a rest after a single right token too, were up to 10 % slower.
_FIRST_DRAFT_TOKENS = 4
_LONGEST_REST_TOKENS = 64


class PromptLookup(Callbacks):
    """Several tokens a pass for the last rows, where they repeat what was said before: no token changes.

    When no rows wait and few are left, a pass takes as long as reading the model's weights. This looks for
    an earlier place in the row's own prompt and output where its last tokens stand, and lets the pass check
    what came after them (Saxena, "Prompt lookup decoding", 2023). Rows that quote, extract or rewrite their
    prompt, or go round in circles, end sooner; where guesses are wrong they become rare.

    Args:
        max_active: rows left at most for it to begin. More fill the device by themselves; a GPU has room
            for more than a CPU.
        max_draft: tokens of one guess at most.
        min_match, max_match: how many last tokens must stand at the earlier place; longer ones first.

    Raises:
        ConfigError: not whole numbers of at least 1, or `min_match` above `max_match`.
    """

    def __init__(
        self, *, max_active: int = 4, max_draft: int = 15, min_match: int = 2, max_match: int = 4
    ) -> None:
        self.max_active = _count(max_active, "max_active")
        self.max_draft = _count(max_draft, "max_draft")
        self.min_match = _count(min_match, "min_match")
        self.max_match = _count(max_match, "max_match")
        if min_match > max_match:
            raise ConfigError(f"PromptLookup: min_match={min_match} is above max_match={max_match}")

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"PromptLookup({options})"

    def on_long_tail(self, runtime: RuntimeView) -> Drafter | None:
        """Guess while few rows are left."""
        return self.draft if len(runtime.active) <= self.max_active else None

    def draft(self, sequence: SequenceView, most: int) -> list[int]:
        """What came after the last tokens where they stood before; empty where they did not, or in a rest."""
        row = sequence.notes.setdefault("prompt_lookup", _Row())
        row.read(sequence)
        if sequence.num_tokens < row.rests_until:
            return []
        guess = row.look_up(min(most, row.draft_tokens, self.max_draft), self.min_match, self.max_match)
        row.guessed(len(guess))
        return guess


class _Row:
    """What prompt lookup remembers of a row: its tokens as bytes, in which C searches, and its luck."""

    def __init__(self) -> None:
        self.ids = bytearray()
        self.num_tokens = 0
        self.draft_tokens = _FIRST_DRAFT_TOKENS
        self.rests_until = 0
        self._num_guessed = 0
        self._rest_tokens = 1

    def read(self, sequence: SequenceView) -> None:
        """Take the tokens that came since, and learn from what became of the last guess."""
        new = sequence.token_ids(self.num_tokens)
        if self._num_guessed:
            accepted = len(new) - 1
            if accepted > 0:
                self.draft_tokens = max(_FIRST_DRAFT_TOKENS, 2 * accepted)
                self._rest_tokens = 1
            else:
                self.draft_tokens = _FIRST_DRAFT_TOKENS
                self._rest_tokens = min(2 * self._rest_tokens, _LONGEST_REST_TOKENS)
                self.rests_until = sequence.num_tokens + self._rest_tokens
            self._num_guessed = 0
        self.ids += array("i", new).tobytes()
        self.num_tokens += len(new)

    def look_up(self, most: int, min_match: int, max_match: int) -> list[int]:
        """Up to `most` tokens after the last earlier place of the longest run of last tokens that has one."""
        size = _TOKEN.itemsize
        for num_match in range(min(max_match, self.num_tokens - 1), min_match - 1, -1):
            last = self.ids[-num_match * size :]
            at = self.ids.rfind(last, 0, len(self.ids) - size)
            while at > 0 and at % size:  # between two tokens
                at = self.ids.rfind(last, 0, at + len(last) - 1)
            if at >= 0:
                after = array("i", bytes(self.ids[at + len(last) :][: most * size])).tolist()
                # Of a place that reaches to the end: it goes round in circles.
                return (after * most)[:most]
        return []

    def guessed(self, count: int) -> None:
        """A guess of so many tokens is on its way."""
        self._num_guessed = count


class Int8KV(Callbacks):
    """Keep keys and values as int8 when KV pages are short: more rows at once, slightly other tokens.

    Lossy: docs/callbacks.md says how far tokens differ. All pages change over at once, and stay so.

    Args:
        when: "pressure" waits until a row would be suspended, or cannot be admitted, for want of pages; what
            a row becomes then depends on its neighbours. "start" begins with int8, so that it does not.

    Raises:
        ConfigError: another `when`. When an engine starts: it keeps KV in the host tier, or MLA latents.
    """

    def __init__(self, *, when: str = "pressure") -> None:
        if when not in ("pressure", "start"):
            raise ConfigError(f'Int8KV: when must be "pressure" or "start", not {when!r}')
        self.when = when

    def __repr__(self) -> str:
        return f"Int8KV(when={self.when!r})"

    def on_start(self, runtime: RuntimeView) -> None:
        """Begin with int8, or see that it can be done later."""
        if runtime.quantise_obstacle is not None:
            raise ConfigError(f"keys and values cannot be kept as int8: {runtime.quantise_obstacle}")
        if self.when == "start":
            runtime.quantise_kv()

    def on_pressure(self, runtime: RuntimeView, sequence: SequenceView) -> None:
        """A row would be suspended, or cannot be admitted."""
        runtime.quantise_kv()


SHIPPED: dict[str, type[Callbacks]] = {"prompt-lookup": PromptLookup, "int8-kv": Int8KV}


def is_int8(item: Callbacks | str) -> bool:
    """Whether this callback, or this name of one, is `Int8KV`."""
    return isinstance(item, Int8KV) or (isinstance(item, str) and SHIPPED.get(item) is Int8KV)


def as_callbacks(items: Sequence[Callbacks | str]) -> tuple[Callbacks, ...]:
    """Make the callbacks that are given by name.

    Raises:
        ConfigError: neither a callback nor the name of a shipped one (with the nearest name).
    """
    return tuple(_as_callback(item) for item in items)


def _as_callback(item: Any) -> Callbacks:
    if isinstance(item, Callbacks):
        return item
    if isinstance(item, str):
        if item not in SHIPPED:
            raise ConfigError(
                f"unknown callback {item!r}{nearest(item, SHIPPED)}; shipped ones are {', '.join(SHIPPED)}"
            )
        return SHIPPED[item]()
    if isinstance(item, type) and issubclass(item, Callbacks):
        raise ConfigError(f"callbacks takes objects, not classes: write {item.__name__}()")
    raise ConfigError(f"callbacks must be objects of subclasses of Callbacks, not {type(item).__name__}")


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"PromptLookup: {name} must be a whole number of at least 1, not {value!r}")
    return value
