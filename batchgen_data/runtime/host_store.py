"""Checkpoints of suspended sequences: which pages of the host tier hold them, which copies are under way.

Accounting only: no torch, no clock. Copies are ordered with a step and reported with a later result; until
then a copy is a user of its pages on both sides, whatever becomes of the sequence meanwhile. So a page goes
back to its pool exactly once, when the last sequence and the last copy have let go of it.

Full pages in the host tier have the names they have on the device. What is there already is not copied again,
and stays after a restore until its memory is needed: a sequence that yields twice is checkpointed by what it
has gained since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Pages

from batchgen_data.errors import InternalError
from batchgen_data.runtime.pages import PagePool
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Copy, Limits


class HostStore:
    """The host tier of one scheduler.

    A suspended sequence has a checkpoint (`num_stored`), or is recomputed: because the tier is full or too
    small, a copy failed, or too little would be saved.

    Args:
        limits: `host_pages` may be 0; then nothing is ever stored.
        device: the pool that sequences compute in.
    """

    def __init__(self, limits: Limits, device: PagePool) -> None:
        self._limits = limits
        self._device = device
        self._host = PagePool(limits.host_pages, limits.page_tokens)
        self._stored: dict[int, list[int]] = {}
        self._under_way: dict[Copy, None] = {}
        self._copied_pages: Counter[int] = Counter()  # device pages, by copies under way
        self._waits: dict[int, Copy] = {}
        self._orders: list[Copy] = []
        self._counts = {"checkpointed_tokens": 0, "restored_tokens": 0, "failed_copies": 0, "host_full": 0}

    @property
    def num_under_way(self) -> int:
        """Copies that have not ended."""
        return len(self._under_way)

    @property
    def num_coming(self) -> int:
        """Device pages that become available when the copies under way have ended."""
        return sum(
            1 for page, num_copies in self._copied_pages.items() if self._only_copied(page, num_copies)
        )

    def waits(self, sequence: Sequence) -> bool:
        """Whether a copy must end before the sequence can go on."""
        return sequence.seq_id in self._waits

    def suspend(self, sequence: Sequence, *, checkpoint: bool) -> None:
        """An active sequence is about to lose its pages: order a checkpoint of what it computed, if possible.

        One that was still being restored keeps the checkpoint it has.
        """
        if self._waits.pop(sequence.seq_id, None) is not None:
            return
        length = sequence.num_computed
        if not checkpoint or not self._limits.host_pages or length < self._limits.least_restored_tokens:
            return
        page_tokens = self._limits.page_tokens
        names = sequence.page_names(page_tokens, length // page_tokens) if self._limits.prefix_reuse else []
        there = self._host.match(names)
        num_fresh = -(-length // page_tokens) - len(there)
        if num_fresh + self._host.num_kept(there) > self._host.num_available:
            self._counts["host_full"] += 1
            return
        self._host.share(there)
        self._stored[sequence.seq_id] = there + self._host.allocate(num_fresh)
        sequence.num_stored = length
        if num_fresh:
            self._order(sequence, to_host=True, first=len(there))

    def restore(self, sequence: Sequence) -> None:
        """A sequence was given pages again: order a copy of what it has not computed there.

        Where that is too little to be worth it, the checkpoint is let go.
        """
        if sequence.num_stored - sequence.num_computed < self._limits.least_restored_tokens:
            self.drop(sequence)
        else:
            self._order(sequence, to_host=False, first=sequence.num_computed // self._limits.page_tokens)

    def drop(self, sequence: Sequence) -> None:
        """Let go of a sequence's checkpoint, if it has one; a copy under way keeps its pages to its end."""
        self._waits.pop(sequence.seq_id, None)
        self._host.release(self._stored.pop(sequence.seq_id, []))
        sequence.num_stored = 0

    def forget(self, sequence: Sequence) -> None:
        """Take away the names of a sequence's pages: their content cannot be trusted."""
        num_full = sequence.num_tokens // self._limits.page_tokens
        for page in self._host.match(sequence.page_names(self._limits.page_tokens, num_full)):
            self._host.forget(page)

    def take_orders(self) -> tuple[Copy, ...]:
        """Copies to begin now; each is handed out once."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def settle(self, copied: Mapping[Copy, bool]) -> int:
        """Copies have ended: give their pages back and let the sequences that waited for them go on.

        Returns:
            Tokens of restores that failed: they are to be computed after all.
        """
        lost_tokens = 0
        for copy, succeeded in copied.items():
            del self._under_way[copy]
            sequence = copy.sequence
            waited = self._waits.get(sequence.seq_id) is copy
            if succeeded:
                self._name(copy)
            else:
                self._counts["failed_copies"] += 1
                for page in copy.host_pages:
                    self._host.forget(page)
            if waited:
                del self._waits[sequence.seq_id]
                if not copy.to_host:
                    if succeeded:
                        sequence.num_computed = copy.end
                    else:
                        lost_tokens += copy.end - copy.start
                if not (copy.to_host and succeeded):
                    self.drop(sequence)
            self._copied_pages.subtract(copy.device_pages)
            self._device.release(copy.device_pages)
            self._host.release(copy.host_pages)
        self._copied_pages = +self._copied_pages
        return lost_tokens

    def device_pages(self) -> Iterator[Pages[int]]:
        """The device pages of each copy under way, for `PagePool.check`."""
        return (copy.device_pages for copy in self._under_way)

    def statistics(self) -> dict[str, int]:
        """Totals since the start, and what is held now."""
        return {
            **self._counts,
            "host_pages": self._limits.host_pages,
            "host_pages_in_use": self._host.num_in_use,
        }

    def check(self, suspended: Iterable[Sequence], active: Iterable[Sequence]) -> None:
        """Assert every invariant.

        Raises:
            InternalError: host pages leak or are counted twice, or a sequence and its checkpoint disagree.
        """
        copied = (copy.host_pages for copy in self._under_way)
        self._host.check([*self._stored.values(), *copied])
        stored = set()
        for sequence in (*suspended, *(one for one in active if self.waits(one))):
            num_pages = -(-sequence.num_stored // self._limits.page_tokens)
            if num_pages != len(self._stored.get(sequence.seq_id, ())):
                raise InternalError("a checkpoint has not the pages of its tokens")
            if num_pages:
                stored.add(sequence.seq_id)
        if stored != self._stored.keys():
            raise InternalError("a checkpoint belongs to no suspended sequence")
        if not self._waits.keys() <= stored or not set(self._waits.values()) <= self._under_way.keys():
            raise InternalError("a sequence waits for a copy that is not under way")

    def _only_copied(self, page: int, num_copies: int) -> bool:
        return self._device.num_users(page) == num_copies

    def _order(self, sequence: Sequence, *, to_host: bool, first: int) -> None:
        """Copy a sequence's stored pages from `first` on, and let it wait for that."""
        host_pages = tuple(self._stored[sequence.seq_id][first:])
        device_pages = tuple(sequence.pages[first : first + len(host_pages)])
        start = first * self._limits.page_tokens
        copy = Copy(sequence, to_host, device_pages, host_pages, start, sequence.num_stored)
        self._device.share(device_pages)
        self._host.share(host_pages)
        self._copied_pages.update(device_pages)
        self._under_way[copy] = None
        self._waits[sequence.seq_id] = copy
        self._orders.append(copy)

    def _name(self, copy: Copy) -> None:
        """Count a copy; publish the full pages of a checkpoint."""
        num_tokens = copy.end - copy.start
        if not copy.to_host:
            self._counts["restored_tokens"] += num_tokens
            return
        self._counts["checkpointed_tokens"] += num_tokens
        if self._limits.prefix_reuse:
            page_tokens = self._limits.page_tokens
            names = copy.sequence.page_names(page_tokens, copy.end // page_tokens)
            # The last page may not be full.
            for page, name in zip(copy.host_pages, names[copy.start // page_tokens :], strict=False):
                self._host.name(page, name)
