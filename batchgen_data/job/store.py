"""One job's output: shards staged, published and recorded so that a kill anywhere loses and doubles nothing.

::

    OUT/data/<input name>-00000.parquet      rows with a result; whole files only, and they never change
    OUT/errors/<input name>-00000.parquet    rows that failed
    OUT/_batchgen/run.json                   the last run: settings, counts, files
    OUT/_batchgen/job/manifest.json          which job this is
    OUT/_batchgen/job/records/               what was published, one file per shard
    OUT/_batchgen/job/journal/               outcomes of rows of open shards
    OUT/_batchgen/owners/, leases/           see `lease`

The steps of a commit, in order: stage data, stage errors, intent, retire errors (of rows tried again),
publish data, publish errors, record, clean up. Before the intent nothing has happened; from the intent on,
whoever takes the lease next finishes the steps. docs/architecture.md has the table.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen_data.errors import BatchgenError, CommitError, InternalError
from batchgen_data.job.files import LocalFiles, file_digest
from batchgen_data.job.lease import Lease
from batchgen_data.job.parts import STORAGE_FAILURES, PartFile, PartWriter, read_part
from batchgen_data.job.records import ShardRecord, ShardState, add_up
from batchgen_data.job.shards import Ranges, Shard, as_ranges, each_row
from batchgen_data.job.summary import COUNTED_COLUMNS, RunSummary

_RETRY_SUFFIX = re.compile(r"-r\d+$")


@dataclass(frozen=True, slots=True)
class Places:
    """Where one job's files lie.

    Attributes:
        root: Folder of ``data`` and ``errors``.
        job: Folder of manifest, records and journal.
        kind: Name of the part of an owner's folder where it stages for this job.
    """

    root: str
    job: str
    kind: str

    @classmethod
    def of_output(cls, output: str) -> Places:
        """Places of the job that an output shows."""
        return cls(output, f"{output}/_batchgen/job", "job")

    @classmethod
    def of_replacement(cls, output: str) -> Places:
        """Places of a job that will replace the one an output shows, when it is complete."""
        return cls(f"{output}/_batchgen/next", f"{output}/_batchgen/next/job", "next")

    @property
    def manifest(self) -> str:
        """The manifest."""
        return f"{self.job}/manifest.json"

    @property
    def report(self) -> str:
        """The report of the last run."""
        return f"{os.path.dirname(self.job)}/run.json"

    @property
    def records(self) -> str:
        """The folder of records."""
        return f"{self.job}/records"

    @property
    def journal(self) -> str:
        """The folder of the journal."""
        return f"{self.job}/journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What to commit: the completed rows of a shard.

    Attributes:
        shard: The shard.
        round_idx: 0, or how often failed rows were tried again.
        rows: The rows that get their outcomes.
        tables: They, with their results, in order, in pieces of any size.
        schema: Of all pieces.
        file_name: Name of the input file.
        prefix: Prefix of the result columns.
        retired: Errors file of an earlier round that held these rows.
    """

    shard: Shard
    round_idx: int
    rows: Ranges
    tables: Iterable[pa.Table]
    schema: pa.Schema
    file_name: str
    prefix: str = ""
    retired: str | None = None


class JobStore:
    """Publishes the shards of one job under a lease.

    Args:
        places: Where.
        lease: Held by this process.
        files: The file system.
        shown: The output's name for messages.
    """

    def __init__(self, places: Places, lease: Lease, files: LocalFiles, *, shown: str) -> None:
        self.places = places
        self._lease = lease
        self._files = files
        self.shown = shown

    @property
    def _staging(self) -> str:
        return f"{self._lease.folder}/{self.places.kind}"

    def prepare(self) -> None:
        """Create the folders.

        Raises:
            CommitError: They cannot be created.
        """
        with self.commit_errors("the folders"):
            for folder in (
                self._staging,
                self.places.records,
                self.places.journal,
                f"{self.places.root}/data",
            ):
                self._files.make_folders(folder)

    def write_once(self, path: str, content: bytes) -> None:
        """Create a file of this job, whole and durable.

        Raises:
            CommitError: It exists already or cannot be written.
        """
        with self.commit_errors(os.path.basename(path)):
            staged = f"{self._staging}/{os.path.basename(path)}"
            self._files.write(staged, content)
            self._files.publish(staged, path)
            self._files.remove(staged)

    def load(self) -> dict[int, ShardState]:
        """Return the state of each recorded shard.

        Raises:
            CommitError: A record is damaged, or a file that it names is gone or has another size.
        """
        states = read_states(self.places, self._files)
        for state in states.values():
            for part in state.parts:
                size_bytes = self._files.size_bytes(f"{self.places.root}/{part.path}")
                if size_bytes != part.size_bytes:
                    what = "is gone" if size_bytes is None else "was changed"
                    raise CommitError(
                        f"output {self.shown}: {part.path} {what}; put it back, or use --overwrite"
                    )
        return states

    def commit(self, commit: Commit) -> ShardRecord:
        """Publish a shard's rows and record them.

        Raises:
            JobLockedError: Another run took over.
            CommitError: The storage refused; what is published stays, and the next run goes on from there.
            InternalError: The rows are not those of the shard.
        """
        base = f"{self._staging}/{commit.shard.idx:08d}-{commit.round_idx}"
        with self.commit_errors(f"data/{commit.shard.name}.parquet"):
            self._lease.check()
            record = self._stage(commit, base)
            # Torn by a kill it has no valid checksum, and the commit has not happened.
            self._files.write(f"{base}.json", record.encode())
            self._files.sync(self._staging)
            self._publish(record, base)
            return record

    def recover(self) -> int:
        """Finish or discard what earlier owners left; returns how many commits were finished.

        Raises:
            CommitError: The storage refused.
        """
        finished = 0
        with self.commit_errors("recovery"):
            for folder in self._lease.inherited:
                staged = f"{folder}/{self.places.kind}"
                for name in self._files.names(staged):
                    if name.endswith(".json"):
                        finished += self._finish_or_discard(staged, name)
                self._files.remove_folder(staged)
        return finished

    def sweep(self, shards: Iterable[Shard], states: dict[int, ShardState]) -> None:
        """Remove files that have a shard's name and that no record vouches for.

        Raises:
            CommitError: The storage refused.
        """
        names = {shard.name for shard in shards}
        standing = {part.path for state in states.values() for part in state.parts}
        with self.commit_errors("leftovers"):
            for folder in ("data", "errors"):
                for found in self._files.tree(f"{self.places.root}/{folder}"):
                    path = f"{folder}/{found}"
                    stem = _RETRY_SUFFIX.sub("", found.removesuffix(".parquet"))
                    if path not in standing and stem in names:
                        self._files.remove(f"{self.places.root}/{path}")

    def replace_report(self, path: str, content: bytes) -> None:
        """Write a file that tells about the last run, in place of an earlier one.

        Raises:
            CommitError: It cannot be written.
        """
        with self.commit_errors(os.path.basename(path)):
            staged = f"{self._lease.folder}/{os.path.basename(path)}"
            self._files.remove(staged)
            self._files.write(staged, content)
            self._files.replace(staged, path)

    @contextmanager
    def commit_errors(self, name: str) -> Iterator[None]:
        """Turn what the storage raises into CommitError naming the file; JobLockedError after a take-over."""
        try:
            yield
        except BatchgenError:
            raise
        except STORAGE_FAILURES as error:
            self._lease.check()  # a missing folder of our own means that a successor moved it
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise CommitError(
                f"output {self.shown}: {name} cannot be written: {why}; what is published stays: "
                "run again to go on"
            ) from error

    def _stage(self, commit: Commit, base: str) -> ShardRecord:
        """Write the staged files of a commit and describe them."""
        rows = list(each_row(commit.rows))
        failed = _write_parts(commit, base, self._files)
        if len(failed) != len(rows):
            raise InternalError(f"shard {commit.shard.name}: {len(failed)} rows of {len(rows)}")
        rows_of = {
            "data": [row for row, is_failed in zip(rows, failed, strict=True) if not is_failed],
            "errors": [row for row, is_failed in zip(rows, failed, strict=True) if is_failed],
        }
        suffix = f"-r{commit.round_idx}" if commit.round_idx else ""
        parts: dict[str, PartFile | None] = {}
        for folder, positions in rows_of.items():
            staged = f"{base}.{folder}.parquet"
            parts[folder] = None
            if self._files.exists(staged):
                parts[folder] = _describe(
                    staged, f"{folder}/{commit.shard.name}{suffix}.parquet", positions, commit
                )
        return ShardRecord(
            generation=self._lease.generation,
            shard_idx=commit.shard.idx,
            round_idx=commit.round_idx,
            rows=commit.rows,
            failed_rows=as_ranges(rows_of["errors"]),
            data=parts["data"],
            errors=parts["errors"],
            retired=commit.retired,
        )

    def _publish(self, record: ShardRecord, base: str) -> None:
        """Do the steps after the intent; those already done are passed over."""
        if record.retired is not None and self._files.exists(f"{self.places.root}/{record.retired}"):
            self._files.rename(f"{self.places.root}/{record.retired}", f"{base}.retired.parquet")
        for part in record.parts:
            final = f"{self.places.root}/{part.path}"
            if not (self._files.exists(final) and part.matches(final, self._files)):
                self._files.publish(f"{base}.{part.path.partition('/')[0]}.parquet", final)
        self._files.publish(f"{base}.json", f"{self.places.records}/{record.name}")
        for staged in (".json", ".data.parquet", ".errors.parquet", ".retired.parquet"):
            if self._files.exists(base + staged):
                self._files.remove(base + staged)
        self.drop_journal(record.shard_idx, record.round_idx)

    def drop_journal(self, shard_idx: int, round_idx: int) -> None:
        """Remove the journals of a shard up to a round."""
        for name in self._files.names(self.places.journal):
            shard, _, rest = name.partition("-")
            if shard == f"{shard_idx:08d}" and int(rest.partition("-")[0]) <= round_idx:
                self._files.remove(f"{self.places.journal}/{name}")

    def _finish_or_discard(self, folder: str, name: str) -> bool:
        base = f"{folder}/{name.removesuffix('.json')}"
        try:
            record = ShardRecord.decode(self._files.read(f"{folder}/{name}"), name)
        except CommitError:
            return False
        if self._files.exists(f"{self.places.records}/{record.name}"):
            return False
        if all(self._is_there(part, base) for part in record.parts):
            self._publish(record, base)
            return True
        for part in record.parts:
            final = f"{self.places.root}/{part.path}"
            if self._files.exists(final) and part.matches(final, self._files):
                self._files.remove(final)
        if record.retired is not None and self._files.exists(f"{base}.retired.parquet"):
            self._files.publish(f"{base}.retired.parquet", f"{self.places.root}/{record.retired}")
        return False

    def _is_there(self, part: PartFile, base: str) -> bool:
        staged = f"{base}.{part.path.partition('/')[0]}.parquet"
        final = f"{self.places.root}/{part.path}"
        return any(self._files.exists(path) and part.matches(path, self._files) for path in (final, staged))


def read_states(places: Places, files: LocalFiles) -> dict[int, ShardState]:
    """Return what the records of a job add up to, by shard.

    Raises:
        CommitError: A record is damaged.
    """
    names = [name for name in files.names(places.records) if name.endswith(".json")]
    records = (ShardRecord.decode(files.read(f"{places.records}/{name}"), name) for name in names)
    return add_up(sorted(records, key=lambda record: (record.shard_idx, record.round_idx)))


def count_part(path: str, file_name: str, rows: Iterable[int], prefix: str) -> RunSummary:
    """Count the rows of a Parquet file of results, page checksums verified.

    Raises:
        OSError, pa.ArrowException: It cannot be read, or it is damaged.
    """
    summary = RunSummary()
    positions = iter(rows)
    for batch in read_part(path, [prefix + name for name in COUNTED_COLUMNS]):
        summary.add(
            batch, file_name=file_name, rows=itertools.islice(positions, batch.num_rows), prefix=prefix
        )
    return summary


def _write_parts(commit: Commit, base: str, files: LocalFiles) -> list[bool]:
    """Write the staged files; returns for each row whether it failed."""
    failed: list[bool] = []
    writers: dict[bool, PartWriter] = {}
    with ExitStack() as stack:

        def writer(kind: bool) -> PartWriter:
            if kind not in writers:
                path = f"{base}.{'errors' if kind else 'data'}.parquet"
                writers[kind] = stack.enter_context(PartWriter(files, path, commit.schema))
            return writers[kind]

        if not commit.round_idx:
            writer(False)
        for table in commit.tables:
            is_failed = pc.equal(table.column(commit.prefix + "finish_reason"), "error").to_numpy()
            # Slices instead of a filter: they are free and work for every type.
            edges = [0, *(np.flatnonzero(np.diff(is_failed)) + 1).tolist(), table.num_rows]
            for start, end in itertools.pairwise(edges):
                if start < end:
                    writer(bool(is_failed[start])).write(table.slice(start, end - start))
            failed += is_failed.tolist()
    return failed


def _describe(staged: str, path: str, rows: list[int], commit: Commit) -> PartFile:
    counts = count_part(staged, commit.file_name, rows, commit.prefix)
    if counts.num_rows != len(rows):
        raise InternalError(f"{path}: {counts.num_rows} rows were written of {len(rows)}")
    return PartFile(path=path, size_bytes=os.path.getsize(staged), digest=file_digest(staged), counts=counts)
