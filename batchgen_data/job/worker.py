"""One worker's part of a job, without Ray: read a range of rows, complete it, keep the outcomes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pyarrow as pa

from batchgen_data.errors import InternalError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.inputs import InputFile
from batchgen_data.job.journal import JournalWriter
from batchgen_data.job.reader import RangeReader, WorkItem


class RangeWorker:
    """Completes ranges of rows; safe to call from several threads.

    The range is read here and not before, so that input never crosses the object store; and only the result
    columns go back, since whoever writes the output reads the input's columns again. They are in the journal
    before they go back: from then on no kill of any process can cost them.

    Args:
        files: The job's files.
        complete: Takes a table of rows and returns it with the result columns, in the same order.
        result_names: The result columns.
        journal_folder: The job's journal.
        generation: The lease under which the job runs.
        storage: The file system of the journal.
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
    ) -> None:
        self._reader = RangeReader(files)
        self._complete = complete
        self._result_names = list(result_names)
        # On another machine that does not share the output's folder, outcomes are kept where it is.
        self.keeps_journal = os.path.isdir(journal_folder)
        self._journal = JournalWriter(journal_folder, generation, storage or LocalFiles())

    def run(self, item: WorkItem) -> pa.Table:
        """Return the outcomes of the rows of `item`: the result columns.

        Raises:
            InputError: The rows cannot be read.
            CommitError: The journal cannot be written.
            Exception: Whatever `complete` raises.
        """
        table = self._reader.read(item)
        if self.keeps_journal:
            self._journal.attempt(item)
        completed = self._complete(table)
        if completed.num_rows != table.num_rows:
            raise InternalError(f"{completed.num_rows} rows came back of {table.num_rows}")
        results = completed.select(self._result_names).replace_schema_metadata(None)
        if self.keeps_journal:
            self._journal.outcomes(item, results)
        return results

    def close(self) -> None:
        """Close the journal's files."""
        self._journal.close()
