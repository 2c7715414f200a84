"""What a user's code may see and decide while the engine runs; docs/callbacks.md has the rules and examples.

A callback is asked at few moments, sees read-only views, and answers with what it returns. No answer can make
a token wrong, lose a row or keep one from ending. What it raises stops the run with a `CallbackError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from batchgen_data.errors import ConfigError
from batchgen_data.sampling import ResolvedSampling

if TYPE_CHECKING:
    from batchgen_data.runtime.scheduler import Scheduler
    from batchgen_data.runtime.sequence import Sequence as RunningSequence


logger = logging.getLogger(__name__)


class SequenceView:
    """One row's generation, as a callback sees it: read-only, and always the present state."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: RunningSequence) -> None:
        self._sequence = sequence

    @property
    def id(self) -> int:
        """Position in the order of arrival in this engine."""
        return self._sequence.seq_id

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return self._sequence.num_tokens

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self._sequence.num_prompt

    @property
    def num_generated(self) -> int:
        """Generated tokens so far."""
        return self._sequence.num_generated

    @property
    def limit_tokens(self) -> int:
        """Prompt and output together at most."""
        return self._sequence.limit_tokens

    @property
    def num_pages(self) -> int:
        """KV pages it holds; 0 while it waits or is suspended."""
        return len(self._sequence.pages)

    @property
    def num_yields(self) -> int:
        """How often it was suspended."""
        return self._sequence.num_yields

    @property
    def sampling(self) -> ResolvedSampling:
        """Its settings; `sampling.greedy` says whether tokens are drawn."""
        return self._sequence.sampling

    @property
    def notes(self) -> dict[str, Any]:
        """A place for what callbacks want to remember of this sequence; it goes when the sequence goes."""
        if self._sequence.notes is None:
            self._sequence.notes = {}
        return self._sequence.notes

    def token_ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """A copy of its tokens `start` to `stop`, prompt first."""
        return self._sequence.token_ids[start:stop]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceView) and other._sequence is self._sequence

    def __hash__(self) -> int:
        return hash(id(self._sequence))

    def __repr__(self) -> str:
        return f"SequenceView(id={self.id}, {self.num_prompt} + {self.num_generated} tokens)"


# Given a sequence and a number: at most so many tokens that it may go on with, a guess.
Drafter = Callable[[SequenceView, int], Sequence[int]]


class _Views(Sequence[SequenceView]):
    """Views of a queue, made as they are asked for: thousands of rows may wait."""

    def __init__(self, sequences: Collection[RunningSequence]) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceView]:
        return map(SequenceView, tuple(self._sequences))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [SequenceView(sequence) for sequence in tuple(self._sequences)[index]]
        index = range(len(self._sequences))[index]
        return SequenceView(next(islice(self._sequences, index, None)))


class KVMemory(Protocol):
    """The part of a KV pool that can change over to int8."""

    @property
    def quantise_obstacle(self) -> str | None:
        """Why it cannot; None where it can."""

    def quantise(self) -> int:
        """Keep all pages as int8 from now on and return how many there are; a second call changes nothing."""


class RuntimeView:
    """The engine, as a callback sees it: read-only but for `quantise_kv`, and always the present state."""

    __slots__ = ("_kv", "_scheduler")

    def __init__(self, scheduler: Scheduler, kv: KVMemory | None) -> None:
        self._scheduler = scheduler
        self._kv = kv

    @property
    def active(self) -> Sequence[SequenceView]:
        """Sequences that hold KV pages and run, in the order they came in."""
        return _Views(self._scheduler.active)

    @property
    def suspended(self) -> Sequence[SequenceView]:
        """Sequences that yielded and wait for KV pages, in the order they come back."""
        return _Views(self._scheduler.suspended)

    @property
    def waiting(self) -> Sequence[SequenceView]:
        """Sequences that have not run yet, in the order they will be admitted, after suspended ones."""
        return _Views(self._scheduler.waiting)

    @property
    def max_sequences(self) -> int:
        """Sequences that may be active at most."""
        return self._scheduler.limits.max_sequences

    @property
    def page_tokens(self) -> int:
        """Tokens of a KV page."""
        return self._scheduler.limits.page_tokens

    @property
    def num_pages(self) -> int:
        """All KV pages."""
        return self._scheduler.limits.num_pages

    @property
    def num_free_pages(self) -> int:
        """KV pages that no sequence holds."""
        return self._scheduler.pool.num_available

    @property
    def quantise_obstacle(self) -> str | None:
        """Why `quantise_kv` cannot work here (KV in the host tier, MLA latents); None where it can."""
        return "this engine has no KV memory" if self._kv is None else self._kv.quantise_obstacle

    def quantise_kv(self) -> int:
        """Keep keys and values as int8 from now on, in all pages, and return how many pages that added.

        Lossy; see docs/callbacks.md. There is no way back; a second call adds 0.

        Raises:
            ConfigError: it cannot work here; see `quantise_obstacle`.
        """
        if self._kv is None or self.quantise_obstacle is not None:
            raise ConfigError(f"keys and values cannot be kept as int8: {self.quantise_obstacle}")
        before, num_pages = self.num_pages, self._kv.quantise()
        added = num_pages - before
        if added:
            self._scheduler.add_pages(added)
            logger.warning(
                "keys and values are int8 from now on: %d pages in memory of %d", num_pages, before
            )
        return added


class Callbacks:
    """Base class of callbacks: override what you need; what is not overridden costs nothing.

    All methods but `on_start` run in the engine's thread, one at a time, between two passes of the model.
    The device is idle meanwhile, so they should take well under a millisecond, and must not generate with
    the `LLM` they run in. A callback goes to Ray's workers pickled: one copy per engine.
    """

    def on_start(self, runtime: RuntimeView) -> None:
        """The engine is ready and has no rows yet. Runs in the thread that makes the engine."""

    def on_refill(self, runtime: RuntimeView) -> Iterable[SequenceView] | None:
        """Rows wait: some may be admitted now, as far as `max_sequences` and free KV pages allow.

        Asked at page boundaries: when rows came or ended, and at least every `page_tokens` passes.

        Returns:
            Which of `runtime.waiting` to admit first, in order; the others follow as they are. None changes
            nothing. Suspended sequences go before all of them.
        """
        return None

    def on_long_tail(self, runtime: RuntimeView) -> Drafter | None:
        """No rows wait and none is suspended: only `runtime.active` are left, until new ones come.

        Asked when that begins, at page boundaries, and when their number changed.

        Returns:
            What guesses the next tokens of a sequence, or None. Until it is asked again, the guess for each
            sequence that decodes is checked in one pass, and the longest part that is right is kept: a wrong
            guess costs time and changes no token, whether greedy or drawn.
        """
        return None

    def on_pressure(self, runtime: RuntimeView, sequence: SequenceView) -> None:
        """KV pages are short: `sequence` is about to be suspended, or (`num_pages` is 0) cannot be admitted.

        Where this makes pages free (`runtime.quantise_kv`), it stays, or comes in. Of rows that cannot be
        admitted, one is asked about at a page boundary.
        """

    def on_yield(self, runtime: RuntimeView, sequence: SequenceView) -> None:
        """`sequence` is being suspended: it gives its KV pages back.

        Later it is restored from the host tier, or computed again from its tokens. For want of pages, or to
        find out which row makes a pass fail.
        """

    def on_combine(self, runtime: RuntimeView, sequence: SequenceView) -> None:
        """`sequence` got its KV pages and joins the next pass: admitted, or (`num_yields` > 0) resumed."""
