"""How a pass is cut into sub-batches. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen_data.runtime.step import Chunk


def cut(
    chunks: Sequence[Chunk],
    page_tokens: int,
    *,
    max_sequences: int | None = None,
    max_pages: int | None = None,
) -> list[tuple[Chunk, ...]]:
    """Cut chunks, in order, into sub-batches of at most so many sequences and different KV pages.

    A chunk counts the pages up to its last token; a page that several share counts once. A chunk that
    needs more than `max_pages` alone gets a sub-batch alone: admission refuses those (see Limits).
    """
    parts: list[tuple[Chunk, ...]] = []
    part: list[Chunk] = []
    pages: set[int] = set()
    for chunk in chunks:
        needed = chunk.sequence.pages[: -(-chunk.end // page_tokens)]
        full = max_sequences is not None and len(part) >= max_sequences
        if max_pages is not None and not full:
            full = len(pages) + sum(page not in pages for page in needed) > max_pages
        if part and full:
            parts.append(tuple(part))
            part, pages = [], set()
        part.append(chunk)
        pages.update(needed)
    if part:
        parts.append(tuple(part))
    return parts
