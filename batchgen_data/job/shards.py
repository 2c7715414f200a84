"""Shards, the unit of commit: a job's rows cut into ranges, and sets of rows written as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchgen_data.job.inputs import InputFile
from batchgen_data.job.reader import WorkItem

# A job has some 200 shards, so that results appear early, within bounds that keep files neither tiny nor
# large: a file of 64 MiB of input has about as much again in results.
_SHARDS_PER_JOB = 200
_MIN_SHARD_ROWS, _MAX_SHARD_ROWS = 1000, 50_000
_SHARD_BYTES = 64 * 2**20
_ITEM_BYTES = 64 * 2**20

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of rows of one input file; what is committed at once.

    Attributes:
        idx: Its number in the job.
        file_idx: Index of the input file.
        first_row: Position of its first row in the file.
        num_rows: Rows.
        name: What its files are called, without extension, relative to ``data``.
    """

    idx: int
    file_idx: int
    first_row: int
    num_rows: int
    name: str

    @property
    def rows(self) -> Ranges:
        """Its rows as one range, none for the shard of a file without rows."""
        return ((self.first_row, self.first_row + self.num_rows),) if self.num_rows else ()


def choose_shard_rows(file: InputFile, job_rows: int) -> int:
    """Return how many rows of a file make a shard in a job of `job_rows` rows."""
    rows = min(max(job_rows // _SHARDS_PER_JOB, _MIN_SHARD_ROWS), _MAX_SHARD_ROWS)
    row_bytes = max(1, file.data_bytes // max(1, file.num_rows))
    return max(1, min(rows, _SHARD_BYTES // row_bytes))


def plan_shards(stems: Sequence[str], rows_by_file: Sequence[int], shard_rows: Sequence[int]) -> list[Shard]:
    """Cut files into shards, in order; a file without rows is one shard, so that it has an output.

    Args:
        stems: Output name of each file, without extension.
        rows_by_file: How many of the first rows of each file the job takes.
        shard_rows: Rows of a shard of each file.
    """
    shards: list[Shard] = []
    for file_idx, (stem, end, step) in enumerate(zip(stems, rows_by_file, shard_rows, strict=True)):
        for number, first in enumerate(range(0, max(end, 1), step)):
            name = f"{stem}-{number:05d}"
            shards.append(Shard(len(shards), file_idx, first, min(step, end - first), name))
    return shards


def as_ranges(rows: Iterable[int]) -> Ranges:
    """Return ascending row positions as half-open ranges: what is stored in place of lists of rows."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1][1] = row + 1
        else:
            ranges.append([row, row + 1])
    return tuple((first, end) for first, end in ranges)


def num_rows(ranges: Iterable[Sequence[int]]) -> int:
    """Return how many rows are in ranges."""
    return sum(end - first for first, end in ranges)


def each_row(ranges: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the rows of ranges, in order."""
    for first, end in ranges:
        yield from range(first, end)


def without(ranges: Iterable[Sequence[int]], removed: Iterable[Sequence[int]]) -> Ranges:
    """Return the rows of `ranges` that are not in `removed`; both ascending."""
    left = []
    gone = list(removed)
    for first, end in ranges:
        for gone_first, gone_end in gone:
            if gone_end <= first or gone_first >= end:
                continue
            if gone_first > first:
                left.append((first, gone_first))
            first = min(gone_end, end)
        if first < end:
            left.append((first, end))
    return tuple(left)


def cut_items(
    shard: Shard, rows: Ranges, *, round_idx: int, row_bytes: int, rows_per_item: int
) -> list[WorkItem]:
    """Cut rows of a shard into what one call completes: at most `rows_per_item` rows, fewer where large.

    Args:
        shard: The shard.
        rows: Rows to do.
        round_idx: 0, or how often failed rows were tried again.
        row_bytes: Size of a row in memory.
        rows_per_item: Most rows of one call.
    """
    step = max(1, min(rows_per_item, _ITEM_BYTES // max(1, row_bytes)))
    return [
        WorkItem(shard.file_idx, start, min(step, end - start), shard.idx, round_idx)
        for first, end in rows
        for start in range(first, end, step)
    ]
