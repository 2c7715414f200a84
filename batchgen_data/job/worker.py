"""One worker's part of a job, without Ray: read a range of rows, complete it, keep the outcomes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from batchgen_data.errors import BatchgenError, InternalError, RowError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.inputs import InputFile
from batchgen_data.job.journal import JournalWriter
from batchgen_data.job.reader import RangeReader, Rows, WorkItem
from batchgen_data.job.turns import Turns
from batchgen_data.schema import Outcome, append_results

logger = logging.getLogger(__name__)

# Waits before a call that raised is made again.
_BACK_OFF_S = (0.5, 2.0)
# Into so many parts a range is cut that killed its process: from 64 rows to one in two more deaths, while
# most of its rows still run several at a time.
_PARTS = 8


class RangeWatch(Protocol):
    """Who is told what runs; see `supervisor.Supervisor`."""

    def begin(self, rows: Rows, *, alone: bool) -> bool:
        """Rows are about to run; False says that they must not."""

    def end(self, rows: Rows) -> None:
        """They are through."""


class _NoWatch:
    def begin(self, rows: Rows, *, alone: bool) -> bool:
        return True

    def end(self, rows: Rows) -> None:
        pass


class RangeResults(NamedTuple):
    """The result columns of a range, and how many calls it took beyond the first."""

    results: pa.Table
    num_retries: int


class RangeWorker:
    """Completes ranges of rows; safe to call from several threads.

    The range is read here and not before, so that input never crosses the object store; and only the result
    columns go back, since whoever writes the output reads the input's columns again. They are in the journal
    before they go back: from then on no kill of any process can cost them.

    A call that raises is made again after a wait, then in halves: a row that raises alone gets the outcome
    `stage_error`, and its neighbours theirs. Our own errors, and what every row of a range raises, are no
    row's fault and go to the caller. Rows that were here when a process died run alone (see `supervisor`);
    one that killed it by itself gets the outcome `worker_died`.

    Args:
        files: The job's files.
        complete: Takes a table of rows and returns it with the result columns, in the same order.
        result_names: The result columns.
        journal_folder: The job's journal.
        generation: The lease under which the job runs.
        storage: The file system of the journal.
        watch: Keeps account of what runs here, in case this process dies.

    Attributes:
        num_done: Ranges completed.
        num_running: Ranges that are running.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        complete: Callable[[pa.Table], pa.Table],
        *,
        result_names: Sequence[str],
        journal_folder: str,
        generation: int,
        storage: LocalFiles | None = None,
        watch: RangeWatch | None = None,
    ) -> None:
        self._reader = RangeReader(files)
        self._complete = complete
        self._result_names = list(result_names)
        # On another machine that does not share the output's folder, outcomes are kept where it is.
        self.keeps_journal = os.path.isdir(journal_folder)
        self._watch = watch or _NoWatch()
        self._turns = Turns()
        self.num_done = self.num_running = 0
        self._counting = threading.Lock()
        self._journal = JournalWriter(journal_folder, generation, storage or LocalFiles())

    def run(self, item: WorkItem) -> RangeResults:
        """Return the outcomes of the rows of `item`.

        Raises:
            InputError: The rows cannot be read.
            CommitError: The journal cannot be written.
            Exception: What `complete` raises for every row.
        """
        table = self._reader.read(item)
        if self.keeps_journal:
            self._journal.attempt(item)
        completed, num_retries = self._complete_watched(
            table, Rows(item.file_idx, item.first_row, item.num_rows)
        )
        if completed.num_rows != table.num_rows:
            raise InternalError(f"{completed.num_rows} rows came back of {table.num_rows}")
        results = completed.select(self._result_names).replace_schema_metadata(None)
        if self.keeps_journal:
            self._journal.outcomes(item, results)
        return RangeResults(results, num_retries)

    def _complete_watched(self, table: pa.Table, rows: Rows) -> tuple[pa.Table, int]:
        """Complete rows beside other calls, or alone where they were at too many deaths."""
        with self._turns.together():
            if self._watch.begin(rows, alone=False):
                return self._complete_begun(table, rows)
        with self._turns.alone():
            return self._complete_alone(table, rows)

    def _complete_begun(self, table: pa.Table, rows: Rows) -> tuple[pa.Table, int]:
        with self._counting:
            self.num_running += 1
        try:
            return self._complete_stubbornly(table)
        finally:
            with self._counting:
                self.num_running -= 1
                self.num_done += 1
            self._watch.end(rows)

    def _complete_alone(self, table: pa.Table, rows: Rows) -> tuple[pa.Table, int]:
        """Complete rows while nothing else runs; what killed a process that way is taken apart."""
        if self._watch.begin(rows, alone=True):
            return self._complete_begun(table, rows)
        if table.num_rows == 1:
            logger.warning("a row is given up: its worker died each time it ran, also alone")
            self._watch.end(rows)
            cause = "the worker process died or hung each time this row ran, also alone"
            return self._failed(table, RowError("worker_died", cause)), 0
        step = -(-table.num_rows // _PARTS)
        done = [
            self._complete_alone(
                table.slice(first, step),
                Rows(rows.file_idx, rows.first_row + first, min(step, table.num_rows - first)),
            )
            for first in range(0, table.num_rows, step)
        ]
        return pa.concat_tables([part for part, _ in done]), sum(num_retries for _, num_retries in done)

    def _failed(self, table: pa.Table, error: RowError) -> pa.Table:
        prefix = self._result_names[0].removesuffix("generated_text")
        has_tokens = f"{prefix}generated_tokens" in self._result_names
        outcomes = [Outcome.failed(error)] * table.num_rows
        return append_results(table, outcomes, generated_tokens=has_tokens, prefix=prefix)

    def _complete_stubbornly(self, table: pa.Table) -> tuple[pa.Table, int]:
        """Complete rows; returns them and how many calls raised."""
        num_failed = 0
        for wait_s in (*_BACK_OFF_S, None):
            try:
                return self._complete(table), num_failed
            except BatchgenError:
                raise
            except Exception as error:
                num_failed += 1
                logger.warning("a call of %d rows raised %s", table.num_rows, type(error).__name__)
                if wait_s is not None:
                    time.sleep(wait_s)
                    continue
                parts, errors, num_alone = self._complete_in_halves(table, error)
                if table.num_rows > 1 and len(errors) == table.num_rows:
                    raise errors[0] from error
                return pa.concat_tables(parts), num_failed + num_alone
        raise InternalError("a call was neither completed nor given up")

    def _complete_in_halves(
        self, table: pa.Table, error: Exception
    ) -> tuple[list[pa.Table], list[Exception], int]:
        """Complete rows whose call raised; returns pieces in order, what single rows raised, failed calls."""
        if table.num_rows == 1:
            cause = f"completing this row raised {type(error).__name__}, also alone"
            return [self._failed(table, RowError("stage_error", cause))], [error], 0
        pieces: list[pa.Table] = []
        errors: list[Exception] = []
        num_failed = 0
        middle = table.num_rows // 2
        for half in (table.slice(0, middle), table.slice(middle)):
            try:
                pieces.append(self._complete(half))
            except BatchgenError:
                raise
            except Exception as second:
                num_failed += 1
                parts, causes, num_more = self._complete_in_halves(half, second)
                pieces += parts
                errors += causes
                num_failed += num_more
        return pieces, errors, num_failed

    def close(self) -> None:
        """Close the journal's files."""
        self._journal.close()
