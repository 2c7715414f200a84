"""Parquet files of results: row groups cut by bytes, page checksums, and what a record says of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_data.errors import ConfigError, InternalError
from batchgen_data.job.files import LocalFiles, file_digest
from batchgen_data.job.summary import RunSummary

# Row groups are cut by bytes: by rows, long texts would pass the 2 GiB that 32-bit offsets can address.
ROW_GROUP_BYTES = 64 * 2**20
STORAGE_FAILURES = (OSError, pa.ArrowException)
_READ_ROWS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A Parquet file of results, as its record describes it.

    Attributes:
        path: Where it is published, relative to the output: ``data/...`` or ``errors/...``.
        size_bytes: Its size.
        digest: Digest of its bytes (`files.file_digest`).
        counts: What its rows are, read back from it.
    """

    path: str
    size_bytes: int
    digest: str
    counts: RunSummary

    @property
    def num_rows(self) -> int:
        """Rows in it."""
        return self.counts.num_rows

    def matches(self, path: str, files: LocalFiles) -> bool:
        """Tell whether the file at `path` has the described bytes."""
        return files.size_bytes(path) == self.size_bytes and file_digest(path) == self.digest

    def to_dict(self) -> dict[str, Any]:
        """Return the description for a record."""
        return {
            "path": self.path,
            "bytes": self.size_bytes,
            "blake2b": self.digest,
            "counts": self.counts.to_counts(),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PartFile:
        """Return the description that `to_dict` gave."""
        return cls(
            path=str(fields["path"]),
            size_bytes=int(fields["bytes"]),
            digest=str(fields["blake2b"]),
            counts=RunSummary.from_counts(fields["counts"]),
        )


class PartWriter:
    """Writes one staged Parquet file; as a context manager it is whole and durable on success.

    Args:
        files: The file system.
        path: The staged file; it must not exist.
        schema: Of every row, metadata included.

    Raises:
        OSError, pa.ArrowException: The storage refused.
    """

    def __init__(self, files: LocalFiles, path: str, schema: pa.Schema) -> None:
        self._files = files
        self._path = path
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self.num_rows = 0
        self._sink = files.create(path)
        self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd", write_page_checksum=True)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._pending:
                    self._flush()
                self._writer.close()
                self._sink.close()
                self._files.sync(self._path)
        finally:
            # After a failure, closing may fail again for the same reason; the first error is the one to tell.
            with suppress(*STORAGE_FAILURES, ValueError):
                self._writer.close()
            with suppress(*STORAGE_FAILURES, ValueError):
                self._sink.close()

    def write(self, table: pa.Table) -> None:
        """Add rows, in order.

        Raises:
            InternalError: The table's schema is not the declared one.
            OSError, pa.ArrowException: The storage refused.
        """
        if not table.schema.equals(self._schema):
            raise InternalError(f"{self._path}: rows came as {table.schema}, declared {self._schema}")
        self.num_rows += table.num_rows
        self._pending.append(table)
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        rows = pa.concat_tables(self._pending)
        if rows.num_rows:
            row_bytes = max(1, self._pending_bytes // rows.num_rows)
            group_rows = max(1, ROW_GROUP_BYTES // row_bytes)
            self._writer.write_table(rows, row_group_size=min(group_rows, rows.num_rows))
        self._pending, self._pending_bytes = [], 0


def read_part(path: str, columns: Iterable[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file in batches, page checksums verified.

    Args:
        path: The file.
        columns: Only these; None reads all.

    Raises:
        OSError, pa.ArrowException: It cannot be read, or a page does not match its checksum.
    """
    with pa.OSFile(path) as source, pq.ParquetFile(source, page_checksum_verification=True) as parquet:
        names = None if columns is None else list(columns)
        for group in range(parquet.metadata.num_row_groups):
            yield from parquet.iter_batches(_READ_ROWS, row_groups=[group], columns=names, use_threads=False)


def check_writable(schema: pa.Schema, name: str) -> None:
    """Refuse a schema that Parquet cannot hold, before any row runs.

    Raises:
        ConfigError: Names the file and Parquet's reason.
    """
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
    except (pa.ArrowException, NotImplementedError) as error:
        raise ConfigError(f"input {name} cannot be written as Parquet: {error}") from error
