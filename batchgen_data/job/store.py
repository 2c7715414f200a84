"""Output files: staged beside their destination, made durable, then published by renaming.

::

    OUT/data/<input name>.parquet      one file per input file; only whole files are ever here
    OUT/_batchgen/run.json             what ran, with which settings, and the counts
    OUT/_batchgen/staging/             files being written; gone when the run ends
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_data.errors import BatchgenError, CommitError, ConfigError, InternalError
from batchgen_data.job.filesystem import (
    cause,
    is_local,
    open_filesystem,
    storage_failures,
    without_credentials,
)

# Row groups are cut by bytes: by rows, long texts would pass the 2 GiB that 32-bit offsets can address.
ROW_GROUP_BYTES = 64 * 2**20


class OutputStore:
    """The output folder of one run.

    Making one checks the folder and changes nothing; `prepare` creates it.

    Args:
        url: A local path or fsspec URL.

    Raises:
        ConfigError: There is something at `url` already.
    """

    def __init__(self, url: str) -> None:
        self._shown = without_credentials(url)
        self._filesystem, self._root = open_filesystem(url)
        self._root = self._root.rstrip("/")
        self._is_local = is_local(self._filesystem)
        self.failures = storage_failures(url)
        self._num_published = 0
        self._num_parts = 0
        try:
            if self._filesystem.isfile(self._root):
                raise ConfigError(f"output {self._shown} is a file; name a folder")
            self._existed = self._filesystem.exists(self._root)
            if self._existed and self._filesystem.ls(self._root, detail=False):
                raise ConfigError(f"output {self._shown} is not empty; name a new folder or empty it first")
        except ConfigError:
            raise
        except self.failures as error:
            raise ConfigError(f"output {self._shown} cannot be used: {cause(error)}") from error

    def prepare(self) -> None:
        """Create the folders.

        Raises:
            ConfigError: The folder cannot be created, or another run took it meanwhile.
        """
        try:
            self._filesystem.makedirs(self._root, exist_ok=True)
            # Not exist_ok: of two runs that found the folder empty, one stops here.
            self._filesystem.makedirs(self._path("_batchgen"), exist_ok=not self._is_local)
            for folder in ("_batchgen/staging", "data"):
                self._filesystem.makedirs(self._path(folder), exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(f"output {self._shown} is being written by another run") from error
        except self.failures as error:
            raise ConfigError(f"output {self._shown} cannot be created: {cause(error)}") from error

    def open_part(self, name: str, schema: pa.Schema) -> PartWriter:
        """Start the output file ``data/<name>``; nothing is visible there before it is published.

        Raises:
            CommitError: The staged file cannot be created.
        """
        # Not named after the output: a nested path as one name may be longer than file systems allow.
        staged = self._path(f"_batchgen/staging/{self._num_parts}.parquet")
        self._num_parts += 1
        return PartWriter(self, name, staged, schema)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write ``_batchgen/run.json``.

        Raises:
            CommitError: It cannot be written.
        """
        content = json.dumps(record, indent=2, default=str).encode() + b"\n"
        staged, final = self._path("_batchgen/staging/run.json"), self._path("_batchgen/run.json")
        with self.commit_errors("run.json"):
            with self.create(staged) as sink:
                sink.write(content)
            self.publish(staged, final)

    def close(self) -> None:
        """Remove staged files, and the folder itself if this run made it and published nothing.

        Raises:
            CommitError: Something cannot be removed.
        """
        with self.commit_errors("staging"):
            self._remove(self._path("_batchgen/staging"))
            if not self._num_published:
                for folder in ("_batchgen", "data"):
                    self._remove(self._path(folder))
                if not self._existed:
                    self._remove(self._root)

    def create(self, path: str) -> Any:
        """Open a new file of this store's file system for writing."""
        return open(path, "xb") if self._is_local else self._filesystem.open(path, "wb")

    def publish(self, staged: str, final: str) -> None:
        """Move a closed staged file to its place, durably; never over an existing file."""
        if self._filesystem.exists(final):
            raise CommitError(
                f"output {self._shown}: {final} exists already; another run is writing to this output"
            )
        if not self._is_local:
            # Object stores have no rename: a copy appears whole or not at all.
            self._filesystem.mv(staged, final)
        else:
            _sync(staged)
            os.makedirs(os.path.dirname(final), exist_ok=True)
            os.rename(staged, final)
            _sync(os.path.dirname(final))
        self._num_published += 1

    @contextmanager
    def commit_errors(self, name: str) -> Iterator[None]:
        """Turn what the storage raises into CommitError naming the file."""
        try:
            yield
        except BatchgenError:
            raise
        except self.failures as error:
            raise CommitError(
                f"output {self._shown}: {name} cannot be written: {cause(error)}; files published before stay"
            ) from error

    def final_path(self, name: str) -> str:
        """Return where the output file `name` is published."""
        return self._path(f"data/{name}")

    def _path(self, relative: str) -> str:
        return f"{self._root}/{relative}"

    def _remove(self, path: str) -> None:
        if self._filesystem.exists(path):
            self._filesystem.rm(path, recursive=True)


class PartWriter:
    """One output file. As a context manager it publishes on success and leaves no trace otherwise."""

    def __init__(self, store: OutputStore, name: str, staged: str, schema: pa.Schema) -> None:
        self._store = store
        self._name = name
        self._staged = staged
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self.num_rows = 0
        with store.commit_errors(name):
            self._sink = store.create(staged)
            self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd", write_page_checksum=True)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # After a failure, closing may fail again for the same reason; the first error is the one to tell.
            with suppress(*self._store.failures):
                self._writer.close()
            with suppress(*self._store.failures):
                self._sink.close()

    def write(self, table: pa.Table) -> None:
        """Add rows, in order.

        Raises:
            InternalError: The table's schema is not the declared one.
            CommitError: The storage refused.
        """
        if not table.schema.equals(self._schema):
            raise InternalError(f"{self._name}: rows came back as {table.schema}, declared {self._schema}")
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
            with self._store.commit_errors(self._name):
                self._writer.write_table(rows, row_group_size=min(group_rows, rows.num_rows))
        self._pending, self._pending_bytes = [], 0

    def _finish(self) -> None:
        if self._pending:
            self._flush()
        with self._store.commit_errors(self._name):
            self._writer.close()
            self._sink.close()
            self._store.publish(self._staged, self._store.final_path(self._name))


def check_writable(schema: pa.Schema, name: str) -> None:
    """Refuse a schema that Parquet cannot hold, before any row runs.

    Raises:
        ConfigError: Names the file and Parquet's reason.
    """
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
    except (pa.ArrowException, NotImplementedError) as error:
        raise ConfigError(f"input {name} cannot be written as Parquet: {error}") from error


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
