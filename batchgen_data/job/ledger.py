"""Which rows of a job are done: takes outcomes in any order, commits each shard when its last row is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from batchgen_data.errors import InputError, InternalError
from batchgen_data.job.check import CheckedJob, output_schema
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.inputs import ROW_ID_COLUMN, InputFile, local_stat
from batchgen_data.job.journal import journal_files, read_journal
from batchgen_data.job.reader import RangeReader, WorkItem
from batchgen_data.job.records import ShardState, add_up
from batchgen_data.job.shards import Ranges, Shard, as_ranges, cut_items, num_rows
from batchgen_data.job.store import Commit, JobStore
from batchgen_data.job.summary import RunSummary
from batchgen_data.schema import result_fields

# Rows of one piece on their way from input and results to the output file.
_PIECE_ROWS = 1024
_PIECE_BYTES = 16 * 2**20


class OpenShard:
    """A shard some of whose rows have no outcome yet.

    Args:
        shard: The shard.
        round_idx: 0, or how often failed rows were tried again.
        rows: The rows that need outcomes.
        retired: Errors file that held these rows before.
    """

    def __init__(self, shard: Shard, round_idx: int, rows: Ranges, retired: str | None = None) -> None:
        self.shard = shard
        self.round_idx = round_idx
        self.rows = rows
        self.retired = retired
        # Made when the first outcomes come: most shards of a large job wait, and cost nothing meanwhile.
        self._positions = self._is_done = np.zeros(0, int)
        self._pieces: list[tuple[int, pa.Table]] = []

    @property
    def missing(self) -> Ranges:
        """Rows without an outcome."""
        return as_ranges(self._positions[~self._is_done].tolist()) if self._pieces else self.rows

    @property
    def num_missing(self) -> int:
        """Rows without an outcome, counted."""
        return num_rows(self.rows) - int(np.count_nonzero(self._is_done))

    def add(self, first_row: int, results: pa.Table) -> list[tuple[int, pa.Table]]:
        """Take outcomes of consecutive rows; those that are known already or not asked for are passed over.

        Returns:
            The outcomes that were taken, as pieces of consecutive rows.
        """
        if not self._pieces:
            self._positions = np.concatenate([np.arange(first, end) for first, end in self.rows or [(0, 0)]])
            self._is_done = np.zeros(len(self._positions), bool)
        rows = np.arange(first_row, first_row + results.num_rows)
        at = np.searchsorted(self._positions, rows)
        is_wanted = at < len(self._positions)
        is_wanted[is_wanted] = self._positions[at[is_wanted]] == rows[is_wanted]
        is_wanted[is_wanted] = ~self._is_done[at[is_wanted]]
        taken = []
        for start, end in as_ranges(np.flatnonzero(is_wanted).tolist()):
            taken.append((first_row + start, results.slice(start, end - start)))
            self._is_done[at[start:end]] = True
        self._pieces += taken
        return taken

    def results(self) -> pa.Table | None:
        """Return all outcomes in the order of rows, None where the shard has no rows."""
        pieces = [table for _, table in sorted(self._pieces, key=lambda piece: piece[0])]
        return pa.concat_tables(pieces) if pieces else None


class Ledger:
    """Takes the outcomes of a job's rows and commits its shards.

    Args:
        job: The checked job.
        shards: Its shards.
        store: Where it is committed.
        states: What is recorded so far.
        stats: What `inputs.local_stat` said of each file when the run began.
        retry_failed: Try rows again whose outcome is an error.
    """

    def __init__(
        self,
        job: CheckedJob,
        shards: Sequence[Shard],
        store: JobStore,
        states: dict[int, ShardState],
        stats: Sequence[list[int] | None],
        *,
        retry_failed: bool = False,
    ) -> None:
        self._job = job
        self._shards = shards
        self._store = store
        self._states = states
        self._stats = stats
        self._retry_failed = retry_failed
        self._reader = RangeReader(job.files)
        config = job.config
        self._fields = result_fields(generated_tokens=config.generated_tokens, prefix=config.output_prefix)
        self._open: dict[int, OpenShard] = {}
        for shard in shards:
            state = states.get(shard.idx)
            if state is None:
                self._open[shard.idx] = OpenShard(shard, 0, shard.rows)
            elif retry_failed and state.failed_rows:
                retired = state.errors.path if state.errors else None
                self._open[shard.idx] = OpenShard(shard, state.next_round, state.failed_rows, retired)
        # Rows with an outcome; those that are tried again count when they have their new one.
        self.counted = RunSummary()
        for shard_idx, state in states.items():
            if shard_idx not in self._open:
                self.counted.add_summary(state.summary)
        self.num_attempts_lost = 0

    @property
    def num_missing(self) -> int:
        """Rows without an outcome."""
        return sum(shard.num_missing for shard in self._open.values())

    @property
    def has_outcomes(self) -> bool:
        """Whether any row has an outcome, recorded or not."""
        return bool(self._states) or self.num_missing < sum(num_rows(s.rows) for s in self._open.values())

    def read_journal(self, files: LocalFiles, first_generation: int) -> None:
        """Take the outcomes that earlier runs left in the journal, and commit shards that are complete.

        Args:
            files: The file system.
            first_generation: Older journals belong to another job that was begun in this place.
        """
        folder = self._store.places.journal
        for name in list(journal_files(folder, files)):
            shard = self._open.get(name.shard_idx)
            is_open = shard is not None and shard.round_idx == name.round_idx
            if not is_open or name.generation < first_generation:
                if shard is None or name.round_idx < shard.round_idx or name.generation < first_generation:
                    files.remove(f"{folder}/{name}")
                continue
            assert shard is not None
            attempts: set[tuple[int, int]] = set()
            for entry in read_journal(files.read(f"{folder}/{name}")):
                rows = (entry.first_row, entry.num_rows)
                if entry.results is None:
                    attempts.add(rows)
                    continue
                attempts.discard(rows)
                results = self._checked(entry.results, entry.num_rows)
                for start, end in self._kept(results):
                    self._take(shard, entry.first_row + start, results.slice(start, end - start))
            self.num_attempts_lost += sum(count for _, count in attempts)
        for shard in list(self._open.values()):
            if shard.rows and not shard.num_missing:
                self._commit(shard)
        self._commit_empty()

    def items(self, rows_per_item: int) -> list[WorkItem]:
        """Return what is left to do, in order, in ranges of at most `rows_per_item` rows."""
        items = []
        for shard in self._open.values():
            file = self._job.files[shard.shard.file_idx]
            row_bytes = file.data_bytes // max(1, file.num_rows)
            items += cut_items(
                shard.shard,
                shard.missing,
                round_idx=shard.round_idx,
                row_bytes=row_bytes,
                rows_per_item=rows_per_item,
            )
        return items

    def add(self, item: WorkItem, results: pa.Table) -> None:
        """Take the outcomes of one item, and commit its shard if it is complete.

        Raises:
            InternalError: They are not the item's, or came twice.
            CommitError, JobLockedError, InputError: See `JobStore.commit` and `RangeReader.read`.
        """
        shard = self._open.get(item.shard_idx)
        if shard is None or shard.round_idx != item.round_idx:
            raise InternalError(f"outcomes came for shard {item.shard_idx}, which is closed")
        taken = self._take(shard, item.first_row, self._checked(results, item.num_rows))
        if taken != item.num_rows:
            raise InternalError(f"shard {item.shard_idx}: rows from {item.first_row} on came twice")
        if not shard.num_missing:
            self._commit(shard)
            self._commit_empty()

    def _commit_empty(self) -> None:
        """Commit shards of files without rows, last: a job of which no row ran leaves nothing."""
        if not self.num_missing:
            for shard in list(self._open.values()):
                self._commit(shard)

    def _take(self, shard: OpenShard, first_row: int, results: pa.Table) -> int:
        """Add outcomes to a shard and count them; returns how many were new."""
        file, prefix = self._job.files[shard.shard.file_idx], self._job.config.output_prefix
        taken = 0
        for first, table in shard.add(first_row, results):
            rows = range(first, first + table.num_rows)
            self.counted.add(table, file_name=file.name, rows=rows, prefix=prefix)
            taken += table.num_rows
        return taken

    def _kept(self, results: pa.Table) -> Ranges:
        """Return which outcomes of a journal are kept: all, or those that are no errors."""
        if not self._retry_failed:
            return ((0, results.num_rows),)
        reasons = results.column(self._job.config.output_prefix + "finish_reason").to_pylist()
        return as_ranges(idx for idx, reason in enumerate(reasons) if reason != "error")

    def _checked(self, results: pa.Table, num_rows: int) -> pa.Table:
        declared = pa.schema(self._fields)
        if results.num_rows != num_rows or not results.schema.equals(declared):
            raise InternalError(
                f"{results.num_rows} rows of {results.schema} came back for {num_rows} of {declared}"
            )
        return results.replace_schema_metadata(None)

    def _commit(self, shard: OpenShard) -> None:
        config = self._job.config
        file = self._job.files[shard.shard.file_idx]
        # The results are those of the rows that were read when the run began.
        if local_stat(file) != self._stats[shard.shard.file_idx]:
            raise InputError(f"{file.name} was touched since the run started; run again")
        record = self._store.commit(
            Commit(
                shard=shard.shard,
                round_idx=shard.round_idx,
                rows=shard.rows,
                tables=self._completed(shard, file),
                schema=output_schema(file, config),
                file_name=file.name,
                prefix=config.output_prefix,
                retired=shard.retired,
            )
        )
        state = self._states.get(shard.shard.idx)
        del self._open[shard.shard.idx]
        self._states |= add_up([*(state.records if state else []), record])

    def _completed(self, shard: OpenShard, file: InputFile) -> Iterator[pa.Table]:
        """Yield the rows of a complete shard: the input's columns, read again, and the results."""
        schema = output_schema(file, self._job.config)
        results = shard.results()
        row_bytes = max(1, file.data_bytes // max(1, file.num_rows))
        position = 0
        for item in cut_items(
            shard.shard,
            shard.rows,
            round_idx=0,
            row_bytes=row_bytes,
            rows_per_item=max(1, min(_PIECE_ROWS, _PIECE_BYTES // row_bytes)),
        ):
            assert results is not None
            columns = self._reader.read(item).drop_columns([ROW_ID_COLUMN]).columns
            outcomes = results.slice(position, item.num_rows).columns
            position += item.num_rows
            yield pa.Table.from_arrays([*columns, *outcomes], schema=schema)
