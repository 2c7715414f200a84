"""KV page accounting: which pages are free, shared, or kept for reuse. No tensors here.

A page holds the keys and values of `page_tokens` tokens in every layer. Full pages are named by a hash
chain (the page's tokens and everything before them), so two sequences with an equal prefix share pages.
A page nobody uses keeps its name until its memory is needed: least recently used goes first. A copy between
device and host tier is a user like any other. Both tiers are accounted for by a pool each.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from batchgen_data.errors import InternalError

ROOT_HASH = b"\x00" * 16


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name a full page: 128 bits over its parent's name and its own token ids."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PagePool:
    """Reference-counted pages with reuse by hash.

    Each page is in exactly one of three places: free (no name, no users), kept (a name, no users), or in
    use (one or more users, with or without a name). `check` asserts it.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        # Lowest ids first: the pages in use stay together at the low end of the pool.
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._users = [0] * num_pages
        self._name_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_in_use(self) -> int:
        """Pages with at least one user."""
        return self.num_pages - self.num_available

    def grow(self, count: int) -> None:
        """Add `count` free pages, with the ids after those there are."""
        self._free = [*range(self.num_pages + count - 1, self.num_pages - 1, -1), *self._free]
        self._users += [0] * count
        self.num_pages += count

    def allocate(self, count: int) -> list[int]:
        """Take `count` unnamed pages; the caller has checked `num_available`.

        Raises:
            InternalError: fewer pages are available; nothing is taken.
        """
        if count > self.num_available:
            raise InternalError(f"asked for {count} KV pages, {self.num_available} are available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                self._drop_name(page)
            self._users[page] = 1
            pages.append(page)
        return pages

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest run of `names` that are present; takes no reference."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_users(self, page: int) -> int:
        """Sequences and copies that use a page."""
        return self._users[page]

    def num_kept(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody uses: sharing those lowers `num_available`."""
        return sum(1 for page in pages if self._users[page] == 0)

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to named pages."""
        for page in pages:
            if self._users[page] == 0:
                del self._kept[page]
            self._users[page] += 1

    def name(self, page: int, name: bytes) -> None:
        """Publish a full page for reuse; a name already taken by another page stays there."""
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def forget(self, page: int) -> None:
        """Take a page's name away: its content cannot be trusted."""
        self._drop_name(page)
        if page in self._kept:
            del self._kept[page]
            self._free.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each page.

        Later pages of a sequence are released first, so that under pressure a chain loses its end before
        its beginning.
        """
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] < 0:
                raise InternalError(f"KV page {page} was released more often than taken")
            if self._users[page] == 0:
                if page in self._name_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert the accounting against the block tables of all sequences that hold pages.

        Raises:
            InternalError: a page leaked, is counted twice, or sits in two places.
        """
        users = [0] * self.num_pages
        for pages in held:
            for page in pages:
                users[page] += 1
        free, kept = set(self._free), set(self._kept)
        if users != self._users:
            raise InternalError("KV page user counts do not match the block tables")
        if len(free) != len(self._free) or free & kept:
            raise InternalError("a KV page is free twice")
        idle = {page for page, count in enumerate(users) if count == 0}
        if idle != free | kept:
            raise InternalError("KV pages leaked: neither in use nor available")
        if not kept <= self._name_of.keys() or free & self._name_of.keys():
            raise InternalError("KV page names and places disagree")
        if {page: name for name, page in self._page_of.items()} != self._name_of:
            raise InternalError("KV page names are not one to one")

    def _drop_name(self, page: int) -> None:
        name = self._name_of.pop(page, None)
        if name is not None:
            del self._page_of[name]
