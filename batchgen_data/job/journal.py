"""The journal: outcomes of rows whose shard is still open, so that a kill costs only rows in flight.

Whoever completes rows appends to files of its own, one per shard and round, named after shard, round, lease
generation and writer. An entry is written by one call of the system and carries a checksum; a torn one ends
what is read of its file, and nobody appends to a file of another process. Files are not synced: a killed
process loses nothing, and a power loss only costs the rows of its torn or missing entries.
"""

from __future__ import annotations

import os
import struct
import threading
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from batchgen_data.errors import CommitError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.parts import STORAGE_FAILURES
from batchgen_data.job.reader import WorkItem

_MAGIC = b"BGJRNL1\n"
# Kind, first row, rows, bytes of the payload; then the checksum of all of these and the payload.
_HEADER = struct.Struct("<BQIQ")
_CHECKSUM = struct.Struct("<I")
_ATTEMPT, _OUTCOMES = 1, 2


class Entry(NamedTuple):
    """One entry: an attempt at rows (`results` is None), or their outcomes."""

    first_row: int
    num_rows: int
    results: pa.Table | None


@dataclass(frozen=True, slots=True)
class JournalName:
    """What the name of a journal file says."""

    shard_idx: int
    round_idx: int
    generation: int
    writer: str

    def __str__(self) -> str:
        return f"{self.shard_idx:08d}-{self.round_idx}-{self.generation:08d}-{self.writer}.log"

    @classmethod
    def parse(cls, name: str) -> JournalName | None:
        """Return what a file name says, None where it is no journal's."""
        fields = name.removesuffix(".log").split("-")
        if not name.endswith(".log") or len(fields) != 4 or not all(f.isdigit() for f in fields[:3]):
            return None
        return cls(int(fields[0]), int(fields[1]), int(fields[2]), fields[3])


class JournalWriter:
    """Appends to the journals of open shards; safe to call from several threads.

    Args:
        folder: The journal folder.
        generation: The lease under which rows are completed.
        files: The file system.
        max_open: Files held open; the one used longest ago is closed, and its shard continues in a new file.
    """

    def __init__(self, folder: str, generation: int, files: LocalFiles, *, max_open: int = 32) -> None:
        self._folder = folder
        self._generation = generation
        self._files = files
        self._max_open = max_open
        self._writer = uuid.uuid4().hex[:12]
        self._num_files = 0
        self._open: dict[tuple[int, int], BinaryIO] = {}
        self._lock = threading.Lock()

    def attempt(self, item: WorkItem) -> None:
        """Note that the rows of `item` are about to run.

        Raises:
            CommitError: The journal cannot be written.
        """
        self._append(item, _ATTEMPT, b"")

    def outcomes(self, item: WorkItem, results: pa.Table) -> None:
        """Keep the outcomes of the rows of `item`: the result columns alone.

        Raises:
            CommitError: The journal cannot be written.
        """
        self._append(item, _OUTCOMES, to_ipc(results))

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _append(self, item: WorkItem, kind: int, payload: bytes) -> None:
        header = _HEADER.pack(kind, item.first_row, item.num_rows, len(payload))
        checksum = _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header)))
        content = b"".join((header, checksum, payload))
        key = (item.shard_idx, item.round_idx)
        with self._lock:
            try:
                sink = self._sink(key)
                if sink.write(content) != len(content):
                    raise OSError(28, "the disk took a part of an entry")
            except STORAGE_FAILURES as error:
                # What follows a torn entry would never be read.
                if key in self._open:
                    self._open.pop(key).close()
                raise CommitError(f"the journal {self._folder} cannot be written: {error}") from error

    def _sink(self, key: tuple[int, int]) -> BinaryIO:
        sink = self._open.pop(key, None)
        if sink is None:
            while len(self._open) >= self._max_open:
                self._open.pop(next(iter(self._open))).close()
            name = JournalName(*key, self._generation, f"{self._writer}{self._num_files:x}")
            self._num_files += 1
            sink = self._files.append(os.path.join(self._folder, str(name)))
            sink.write(_MAGIC)
        self._open[key] = sink
        return sink


def read_journal(content: bytes) -> Iterator[Entry]:
    """Yield the entries of a journal file up to its end or the first torn or damaged one."""
    if not content.startswith(_MAGIC):
        return
    view = memoryview(content)
    position = len(_MAGIC)
    while position + _HEADER.size + _CHECKSUM.size <= len(view):
        header = view[position : position + _HEADER.size]
        kind, first_row, num_rows, payload_bytes = _HEADER.unpack(header)
        position += _HEADER.size
        (checksum,) = _CHECKSUM.unpack(view[position : position + _CHECKSUM.size])
        position += _CHECKSUM.size
        payload = view[position : position + payload_bytes]
        if len(payload) < payload_bytes or zlib.crc32(payload, zlib.crc32(header)) != checksum:
            return
        position += payload_bytes
        if kind == _ATTEMPT:
            yield Entry(first_row, num_rows, None)
        elif kind == _OUTCOMES:
            yield Entry(first_row, num_rows, pa.ipc.open_stream(pa.py_buffer(payload)).read_all())


def journal_files(folder: str, files: LocalFiles) -> Iterator[JournalName]:
    """Yield the journal files in a folder, in order of shards, rounds, generations and writers."""
    for name in files.names(folder):
        parsed = JournalName.parse(name)
        if parsed is not None:
            yield parsed


def to_ipc(table: pa.Table) -> bytes:
    """Return `table` as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_ipc(content: pa.Buffer) -> pa.Table:
    """Return the table of an IPC stream without copying its columns."""
    return pa.ipc.open_stream(content).read_all()
