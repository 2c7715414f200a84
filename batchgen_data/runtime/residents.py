"""The sequences that hold KV pages: how many each needs, which it can share, what it gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from batchgen_data.errors import InternalError, RowError
from batchgen_data.runtime.host_store import HostStore
from batchgen_data.runtime.pages import PagePool
from batchgen_data.runtime.sequence import Sequence, State
from batchgen_data.runtime.step import Counts, Limits

RESERVE_PAGES = 2


class Residents:
    """The active sequences of one scheduler, with the device's page pool and the host tier.

    Args:
        limits: what they may use.
        counts: where reused and recomputed tokens are added.
    """

    def __init__(self, limits: Limits, counts: Counts) -> None:
        self.limits = limits
        self.pool = PagePool(limits.num_pages, limits.page_tokens)
        self.store = HostStore(limits, self.pool)
        self._counts = counts
        self._active: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._active)

    @property
    def sequences(self) -> Collection[Sequence]:
        """In the order they came in; always the present state."""
        return self._active.values()

    @property
    def youngest(self) -> Sequence:
        """The one that arrived last; there is one."""
        return max(self._active.values(), key=lambda sequence: sequence.seq_id)

    def add_pages(self, count: int) -> None:
        """The pool holds more pages now; those in use keep their ids."""
        self.limits = dataclasses.replace(self.limits, num_pages=self.limits.num_pages + count)
        self.pool.grow(count)

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a sequence that ends with so many tokens."""
        # The last token is never written: nothing follows it.
        return max(1, -(-(num_tokens - 1) // self.limits.page_tokens))

    def refusal(self, sequence: Sequence) -> RowError | None:
        """Why a sequence could not run even alone; None where it can.

        One for which no output length was asked ends where the pool does, and says so.
        """
        needed = self.pages_for(sequence.limit_tokens)
        most, place = self.limits.num_pages, "all KV memory"
        if self.limits.max_sequence_pages is not None and self.limits.max_sequence_pages < most:
            most, place = self.limits.max_sequence_pages, "the staging that attention reads them from"
        if needed <= most:
            return None
        if sequence.sampling.max_tokens is None and self.pages_for(sequence.num_tokens + 1) <= most:
            sequence.length_reason = "kv_memory"
            sequence.limit_tokens = most * self.limits.page_tokens
            return None
        return RowError(
            "exceeds_kv_memory",
            f"prompt and output need {needed} KV pages ({sequence.limit_tokens} tokens), and "
            f"{place} holds {most}; lower max_tokens or raise kv_memory",
        )

    def num_missing(self, sequence: Sequence) -> int:
        """Pages it lacks for its tokens and the reserve; 0 or less where it has them."""
        return self._pages_wanted(sequence) - len(sequence.pages)

    def next_boundary_pages(self) -> int:
        """Pages that all will ask for when each has decoded one more page of tokens."""
        return sum(
            1 for active in self._active.values() if self.pages_for(active.limit_tokens) > len(active.pages)
        )

    def can_decode(self, sequence: Sequence) -> bool:
        """Whether its keys and values are there, and the page for its newest token."""
        if self.store.waits(sequence):
            return False
        return sequence.num_tokens <= len(sequence.pages) * self.limits.page_tokens

    def num_shared(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """How many of its full pages are in the pool already, and the names of all of them."""
        names = self._shareable_names(sequence)
        return len(self.pool.match(names)), names

    def activate(self, sequence: Sequence, headroom: int = 0) -> bool:
        """Give a sequence its pages, shared ones first; False when too few are available.

        Args:
            sequence: one without pages.
            headroom: pages that must be left to the others.
        """
        if self.store.waits(sequence):
            return False
        shared = self.pool.match(self._shareable_names(sequence)) if self.limits.prefix_reuse else []
        fresh = self._pages_wanted(sequence) - len(shared)
        if fresh + self.pool.num_kept(shared) + headroom > self.pool.num_available:
            return False
        self.pool.share(shared)
        sequence.pages = shared + self.pool.allocate(fresh)
        sequence.num_computed = len(shared) * self.limits.page_tokens
        sequence.num_named = len(shared)
        sequence.state = State.ACTIVE
        self._active[sequence.seq_id] = sequence
        self._counts.reused_tokens += sequence.num_computed
        self.store.restore(sequence)
        if sequence.num_yields:
            there = max(sequence.num_computed, sequence.num_stored)
            self._counts.recomputed_tokens += sequence.num_tokens - 1 - there
        return True

    def name_pages(self, sequence: Sequence) -> None:
        """Publish the full pages computed so far for reuse."""
        if not self.limits.prefix_reuse:
            return
        num_full = sequence.num_computed // self.limits.page_tokens
        if num_full > sequence.num_named:
            names = sequence.page_names(self.limits.page_tokens, num_full)
            for index in range(sequence.num_named, num_full):
                self.pool.name(sequence.pages[index], names[index])
            sequence.num_named = num_full

    def forget_pages(self, sequence: Sequence) -> None:
        """Its keys and values may hold NaN: nobody may reuse its pages."""
        for page in sequence.pages:
            self.pool.forget(page)
        self.store.forget(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's pages back; its full pages stay reusable until their memory is needed."""
        del self._active[sequence.seq_id]
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed = 0
        sequence.num_named = 0

    def check(self, suspended: Iterable[Sequence]) -> None:
        """Assert every invariant; `suspended` may have checkpoints in the host tier.

        Raises:
            InternalError: pages leak or are counted twice, or a sequence has fewer than it computed.
        """
        active_pages = (sequence.pages for sequence in self._active.values())
        self.pool.check((*active_pages, *self.store.device_pages()))
        self.store.check(suspended, self._active.values())
        for sequence in self._active.values():
            if sequence.state is not State.ACTIVE:
                raise InternalError("an active sequence is in another state")
            if sequence.num_computed > len(sequence.pages) * self.limits.page_tokens:
                raise InternalError("a sequence computed more tokens than its pages hold")
            if sequence.num_computed >= sequence.num_tokens:
                raise InternalError("a sequence computed a token it does not have")

    def _pages_wanted(self, sequence: Sequence) -> int:
        """Pages for its tokens and the reserve, never beyond its end."""
        now = -(-sequence.num_tokens // self.limits.page_tokens)
        return min(now + RESERVE_PAGES, self.pages_for(sequence.limit_tokens))

    def _shareable_names(self, sequence: Sequence) -> list[bytes]:
        # At least the last token is computed, for its logits.
        num_full = (sequence.num_tokens - 1) // self.limits.page_tokens
        return sequence.page_names(self.limits.page_tokens, num_full)
