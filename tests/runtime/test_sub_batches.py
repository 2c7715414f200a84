"""How a pass is cut into sub-batches."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Chunk
from batchgen_data.runtime.sub_batches import cut
from fake_model import sampling

PAGE_TOKENS = 4


def chunk(pages, end, start=0) -> Chunk:
    sequence = Sequence(0, [1] * end, sampling(max_tokens=1), limit_tokens=end + 1)
    sequence.pages = list(pages)
    return Chunk(sequence, start, end, True)


def used(part) -> set[int]:
    return {page for c in part for page in c.sequence.pages[: -(-c.end // PAGE_TOKENS)]}


def test_shared_pages_count_once_and_the_reserve_not_at_all():
    chunks = [chunk([0, 1, 8, 9], 8), chunk([0, 2, 10, 11], 5), chunk([3], 4), chunk([4], 1)]
    assert [len(part) for part in cut(chunks, PAGE_TOKENS, max_pages=3)] == [2, 2]
    assert [len(part) for part in cut(chunks, PAGE_TOKENS, max_pages=4)] == [3, 1]
    assert [len(part) for part in cut(chunks, PAGE_TOKENS, max_pages=5)] == [4]
    assert [len(part) for part in cut(chunks, PAGE_TOKENS, max_pages=4, max_sequences=2)] == [2, 2]
    assert [len(part) for part in cut(chunks, PAGE_TOKENS, max_sequences=3)] == [3, 1]
    assert cut([], PAGE_TOKENS, max_pages=3) == []


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8)), max_size=20),
    max_pages=st.none() | st.integers(3, 9),
    max_sequences=st.none() | st.integers(1, 5),
)
def test_every_part_fits_and_none_could_take_one_more(sizes, max_pages, max_sequences):
    chunks = [chunk([first + at for at in range(3)], end) for end, first in sizes]
    parts = cut(chunks, PAGE_TOKENS, max_sequences=max_sequences, max_pages=max_pages)
    assert [c for part in parts for c in part] == chunks

    def fits(part):
        return len(part) <= (max_sequences or len(part)) and len(used(part)) <= (max_pages or 10**6)

    assert all(part and fits(part) for part in parts)
    assert not any(fits((*part, after[0])) for part, after in itertools.pairwise(parts))
