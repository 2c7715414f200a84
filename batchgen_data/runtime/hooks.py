"""Asks the callbacks of one engine, and holds them to their word. No torch here."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchgen_data.callbacks import Callbacks, Drafter, KVMemory, RuntimeView, SequenceView
from batchgen_data.errors import BatchgenError, CallbackError
from batchgen_data.runtime.drafts import add_drafts
from batchgen_data.runtime.sequence import Sequence as RunningSequence
from batchgen_data.runtime.step import Chunk

if TYPE_CHECKING:
    from batchgen_data.runtime.scheduler import Scheduler


class Hooks:
    """The callbacks of one engine.

    Args:
        callbacks: asked in this order.
        vocab_size: token ids are below it.
        kv: the KV memory; None on a device without.
    """

    def __init__(
        self, callbacks: Sequence[Callbacks], *, vocab_size: int, kv: KVMemory | None = None
    ) -> None:
        self._callbacks = callbacks
        self._vocab_size = vocab_size
        self._kv = kv
        self._asked = {
            name: [callback for callback in callbacks if _overrides(callback, name)]
            for name in ("on_start", "on_refill", "on_long_tail", "on_pressure", "on_yield", "on_combine")
        }
        self._drafter: Drafter | None = None
        self._drafter_name = ""
        # The tail at which `on_long_tail` was last asked.
        self._tail: tuple[int, int] | None = None
        self._asked_to_admit = False

    def start(self, scheduler: Scheduler) -> None:
        """The engine is ready; what is asked from now on is about this scheduler.

        Raises:
            CallbackError: as all methods: a callback raised, or answered what cannot be.
        """
        self._scheduler = scheduler
        self._runtime = RuntimeView(scheduler, self._kv)
        for callback in self._asked["on_start"]:
            _ask(callback, "on_start", self._runtime)

    def refill(self) -> None:
        """Rows wait at a page boundary: who comes first?"""
        self._asked_to_admit = False
        for callback in self._asked["on_refill"]:
            first = _ask(callback, "on_refill", self._runtime)
            if first is None:
                continue
            name = f"{type(callback).__name__}.on_refill"
            try:
                chosen = list(first)
            except Exception as error:
                raise _failure(name, error) from error
            waiting = {sequence.seq_id for sequence in self._scheduler.waiting}
            if any(not isinstance(view, SequenceView) or view.id not in waiting for view in chosen):
                raise CallbackError(f"callback {name} must return sequences of runtime.waiting, or None")
            self._scheduler.admit_first([view._sequence for view in chosen])

    def makes_room(self, sequence: RunningSequence) -> bool:
        """KV pages are short for `sequence`: whether a callback freed some."""
        if not sequence.pages:
            if self._asked_to_admit:
                return False
            self._asked_to_admit = True
        before = self._runtime.num_free_pages
        for callback in self._asked["on_pressure"]:
            _ask(callback, "on_pressure", self._runtime, SequenceView(sequence))
            if self._runtime.num_free_pages > before:
                return True
        return False

    def yielded(self, sequence: RunningSequence) -> None:
        """A sequence is being suspended."""
        for callback in self._asked["on_yield"]:
            _ask(callback, "on_yield", self._runtime, SequenceView(sequence))

    def combined(self, sequence: RunningSequence) -> None:
        """A sequence joined the next pass."""
        for callback in self._asked["on_combine"]:
            _ask(callback, "on_combine", self._runtime, SequenceView(sequence))

    def draft(self, chunks: list[Chunk], room_tokens: int, num_boundaries: int) -> int:
        """Add drafts to a pass while nothing waits, if a callback has any; return the tokens added.

        Args:
            chunks: of the pass; changed in place.
            room_tokens: tokens that the pass may still take.
            num_boundaries: page boundaries so far.
        """
        if not self._asked["on_long_tail"]:
            return 0
        if self._scheduler.waiting or self._scheduler.suspended:
            self._tail = None
            return 0
        tail = (num_boundaries, self._scheduler.num_active)
        if tail != self._tail:
            self._tail = tail
            self._drafter = self._ask_drafter()
        if self._drafter is None:
            return 0
        page_tokens = self._scheduler.limits.page_tokens
        return add_drafts(chunks, self._guess, room_tokens=room_tokens, page_tokens=page_tokens)

    def _ask_drafter(self) -> Drafter | None:
        for callback in self._asked["on_long_tail"]:
            drafter = _ask(callback, "on_long_tail", self._runtime)
            if drafter is not None:
                self._drafter_name = f"{type(callback).__name__}.on_long_tail"
                if not callable(drafter):
                    raise CallbackError(f"callback {self._drafter_name} must return a function, or None")
                return drafter
        return None

    def _guess(self, sequence: RunningSequence, most: int) -> tuple[int, ...]:
        name = f"{self._drafter_name} (its drafter)"
        assert self._drafter is not None
        try:
            guess = tuple(map(operator.index, self._drafter(SequenceView(sequence), most)))[:most]
        except Exception as error:
            raise _failure(name, error) from error
        if guess and not 0 <= min(guess) <= max(guess) < self._vocab_size:
            raise CallbackError(f"callback {name} returned a token id that is not below {self._vocab_size}")
        return guess


def _overrides(callback: Callbacks, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(Callbacks, name)


def _ask(callback: Callbacks, name: str, *arguments: Any) -> Any:
    try:
        return getattr(callback, name)(*arguments)
    except Exception as error:
        raise _failure(f"{type(callback).__name__}.{name}", error) from error


def _failure(name: str, error: Exception) -> CallbackError:
    line = (str(error).strip().splitlines() or [""])[0][:200]
    raised = "" if isinstance(error, BatchgenError) else f" raised {type(error).__name__}"
    return CallbackError(f"callback {name}{raised}: {line}")
