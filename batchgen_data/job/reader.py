"""Reads ranges of rows of input files, without loading whole files."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_data.errors import BatchgenError, InputError
from batchgen_data.job import text
from batchgen_data.job.filesystem import cause, open_file, storage_failures
from batchgen_data.job.inputs import ROW_ID_COLUMN, InputFile, footer_digest

_ITEM_BYTES = 64 * 2**20
_DECODE_BYTES = 16 * 2**20
_DECODE_ROWS = 1024
# Calls of one worker ask for neighbouring ranges slightly out of order: so much decoded data is kept.
_WINDOW_BYTES = 64 * 2**20
_WINDOW_ROWS = 4096


class WorkItem(NamedTuple):
    """A range of rows of one file: what one call of the stage completes.

    The shard it belongs to, and the round of that shard (0, or how often failed rows are tried again), name
    the journal that its results go to.
    """

    file_idx: int
    first_row: int
    num_rows: int
    shard_idx: int = 0
    round_idx: int = 0


class Rows(NamedTuple):
    """A range of rows of one file."""

    file_idx: int
    first_row: int
    num_rows: int


def plan_items(
    files: Sequence[InputFile], rows_by_file: Sequence[int], *, rows_per_item: int
) -> list[WorkItem]:
    """Cut the files into ranges of `rows_per_item` rows (fewer where rows are large), in order.

    Args:
        files: The job's files.
        rows_by_file: How many of the first rows of each to take.
        rows_per_item: Most rows of one range.
    """
    items = []
    for file_idx, (file, end) in enumerate(zip(files, rows_by_file, strict=True)):
        row_bytes = max(1, file.data_bytes // max(1, file.num_rows))
        step = max(1, min(rows_per_item, _ITEM_BYTES // row_bytes))
        items += [WorkItem(file_idx, first, min(step, end - first)) for first in range(0, end, step)]
    return items


class RangeReader:
    """Reads ranges of rows; one per worker, safe to call from several threads.

    Ranges asked for in about ascending order are read in one pass over a Parquet file; any order is right.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._open: dict[int, _ParquetRows] = {}

    def read(self, item: WorkItem) -> pa.Table:
        """Return the rows of `item` with the file's schema and, last, the row identity column.

        Raises:
            InputError: The file cannot be read or changed since the job started.
        """
        file = self._files[item.file_idx]
        if file.index is not None:
            table = _read_text(file, file.index, item)
        else:
            with self._lock:
                if item.file_idx not in self._open:
                    # A worker goes through the files in order: two open ones are the old and the new.
                    while len(self._open) > 1:
                        self._open.pop(min(self._open)).close()
                    self._open[item.file_idx] = _ParquetRows(file)
                table = self._open[item.file_idx].read(item.first_row, item.num_rows)
        return table.append_column(
            ROW_ID_COLUMN, pa.array(_row_ids(file, item.first_row, item.num_rows), pa.binary())
        )


def _read_text(file: InputFile, index: text.TextIndex, item: WorkItem) -> pa.Table:
    kind = file.format
    assert kind != "parquet"  # those have no index
    try:
        with open_file(file.source, file.path) as source:
            return text.read_rows(source, kind, index, item.first_row, item.num_rows, file.name)
    except InputError:
        raise
    except _failures(file) as error:
        raise InputError(f"{file.name} cannot be read: {cause(error)}") from error


def _failures(file: InputFile) -> tuple[type[Exception], ...]:
    return (BatchgenError, *storage_failures(file.source))


def _row_ids(file: InputFile, first_row: int, num_rows: int) -> list[bytes]:
    return [file.fingerprint + row.to_bytes(8, "big") for row in range(first_row, first_row + num_rows)]


class _ParquetRows:
    """Rows of one Parquet file, decoded in a stream from the row group where a range starts.

    Parquet has no cheap way into the middle of a row group. Reading each range by itself would decode a
    large group over and over; keeping the whole group would cost its size. So one decoder goes through the
    file, and what it passed lately is kept for ranges that come a little late.
    """

    def __init__(self, file: InputFile) -> None:
        self._file = file
        try:
            self._source = open_file(file.source, file.path)
            size_bytes = self._source.seek(0, 2)
            digest = footer_digest(self._source, size_bytes, file.name)
            self._parquet = pq.ParquetFile(self._source, page_checksum_verification=True)
        except _failures(file) as error:
            raise InputError(f"{file.name} cannot be read: {cause(error)}") from error
        if (size_bytes, digest) != (file.size_bytes, file.content_digest):
            raise InputError(f"{file.name} changed since the run started; run again")
        metadata = self._parquet.metadata
        self._group_starts = [0]
        for group in range(metadata.num_row_groups):
            self._group_starts.append(self._group_starts[-1] + metadata.row_group(group).num_rows)
        row_bytes = max(1, file.data_bytes // max(1, file.num_rows))
        self._decode_rows = max(1, min(_DECODE_ROWS, _DECODE_BYTES // row_bytes))
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._window: deque[tuple[int, pa.RecordBatch]] = deque()
        self._next_row = 0
        self._restart(0)

    def read(self, first_row: int, num_rows: int) -> pa.Table:
        """Return rows ``first_row`` to ``first_row + num_rows`` with the file's schema."""
        oldest = self._window[0][0] if self._window else self._next_row
        if first_row < oldest or self._group_of(first_row) > self._group_of(self._next_row):
            self._restart(self._group_of(first_row))
        while self._next_row < first_row + num_rows:
            self._decode(first_row)
        slices = []
        for start, batch in self._window:
            begin = max(first_row - start, 0)
            end = min(first_row + num_rows - start, batch.num_rows)
            if begin < end:
                slices.append(batch.slice(begin, end - begin))
        table = pa.Table.from_batches(slices)
        return pa.Table.from_arrays(table.columns, schema=self._file.schema)

    def close(self) -> None:
        self._batches = iter(())
        self._source.close()

    def _group_of(self, row: int) -> int:
        return bisect.bisect_right(self._group_starts, row) - 1

    def _restart(self, group: int) -> None:
        self._window.clear()
        self._next_row = self._group_starts[group]
        # Group by group: a batch across two groups would fail for the damage of the second.
        self._batches = (
            batch
            for idx in range(group, self._parquet.metadata.num_row_groups)
            for batch in self._parquet.iter_batches(self._decode_rows, row_groups=[idx], use_threads=False)
        )

    def _decode(self, needed_from: int) -> None:
        try:
            batch = next(self._batches)
        except Exception as error:
            if not isinstance(error, (StopIteration, *_failures(self._file))):
                raise
            group = self._group_of(self._next_row)
            why = "it holds fewer rows than it says" if isinstance(error, StopIteration) else cause(error)
            raise InputError(f"{self._file.name}, row group {group}, cannot be read: {why}") from error
        self._window.append((self._next_row, batch))
        self._next_row += batch.num_rows
        while (
            self._window
            and self._window[0][0] + self._window[0][1].num_rows <= needed_from
            and (
                sum(kept.num_rows for _, kept in self._window) > _WINDOW_ROWS
                or sum(kept.nbytes for _, kept in self._window) > _WINDOW_BYTES
            )
        ):
            self._window.popleft()
