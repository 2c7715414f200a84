"""Page accounting under any sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchgen_data.errors import InternalError
from batchgen_data.runtime.pages import ROOT_HASH, PagePool, page_hash


def test_equal_prefixes_have_equal_names_and_others_do_not():
    first = page_hash(ROOT_HASH, [1, 2, 3])
    assert first == page_hash(ROOT_HASH, [1, 2, 3])
    assert first != page_hash(ROOT_HASH, [1, 2, 4])
    assert page_hash(first, [1, 2, 3]) != first


def test_a_released_page_is_found_by_name_until_its_memory_is_needed():
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    pool.name(pages[0], b"a")
    pool.name(pages[1], b"b")
    pool.release(pages)
    assert pool.match([b"a", b"b"]) == pages
    assert pool.num_available == 3
    pool.allocate(2)  # the free page, then the end of the chain: the beginning stays
    assert pool.match([b"a", b"b"]) == pages[:1]


def test_asking_for_too_much_takes_nothing():
    pool = PagePool(2, 4)
    with pytest.raises(InternalError, match="asked for 3"):
        pool.allocate(3)
    assert pool.num_available == 2


def test_releasing_twice_is_our_bug_and_says_so():
    pool = PagePool(1, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(InternalError, match="released more often"):
        pool.release(pages)


@pytest.mark.parametrize(
    "damage,message",
    [
        (lambda pool: pool._free.pop(), "leaked"),
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._users.__setitem__(0, 1), "user counts"),
        (lambda pool: pool._name_of.__setitem__(pool._free[0], b"x"), "disagree"),
        (lambda pool: pool._page_of.__setitem__(b"x", pool._free[0]), "one to one"),
    ],
)
def test_the_check_finds_damage(damage, message):
    pool = PagePool(4, 4)
    pool.check([])
    damage(pool)
    with pytest.raises(InternalError, match=message):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Random holders take, share, name, forget and release pages."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(6, 4)
        self.held: list[list[int]] = []
        self.next_name = 0
        self.names: dict[int, bytes] = {}

    @rule(count=st.integers(1, 3))
    def allocate(self, count):
        if count <= self.pool.num_available:
            pages = self.pool.allocate(count)
            assert len(set(pages)) == count
            assert not set(pages) & {page for held in self.held for page in held}
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name(self, data):
        page = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        self.pool.name(page, b"%d" % self.next_name)
        self.names[self.next_name] = page
        self.next_name += 1

    @precondition(lambda self: self.next_name)
    @rule(data=st.data())
    def share(self, data):
        name = b"%d" % data.draw(st.integers(0, self.next_name - 1))
        pages = self.pool.match([name])
        if pages:
            self.pool.share(pages)
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(pages)

    @rule(page=st.integers(0, 5))
    def forget(self, page):
        self.pool.forget(page)

    @invariant()
    def accounting_holds(self):
        self.pool.check(self.held)
        assert self.pool.num_in_use == len({page for pages in self.held for page in pages})


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
