"""What runs in each Ray worker of a job: complete ranges of rows and hand their outcomes back."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray

from batchgen_data import errors
from batchgen_data.errors import BatchgenError, JobError, RowError
from batchgen_data.job.inputs import InputFile
from batchgen_data.job.journal import to_ipc
from batchgen_data.job.reader import WorkItem
from batchgen_data.job.worker import RangeWorker

ITEM_SCHEMA = pa.schema([("item_idx", pa.int64()), *((name, pa.int64()) for name in WorkItem._fields)])
RESULT_SCHEMA = pa.schema(
    [
        ("item_idx", pa.int64()),
        ("results_ipc", pa.large_binary()),
        ("is_kept", pa.bool_()),
        ("num_retries", pa.int64()),
        ("failure", pa.string()),
        ("worker_record", pa.string()),
    ]
)


class JobStage:
    """The job's `map_batches` class: one row in per range of rows, one row out with its outcomes.

    The outcomes of a range travel as one Arrow IPC value: Ray Data joins blocks and splits large ones where
    it sees rows, and one value per range keeps Ray's replay after a crash exact, in whatever order ranges
    finish.

    What fails for the whole job (the model cannot be loaded, a file changed) comes back as a `failure`
    instead of being raised: Ray would wrap it, log its traceback and lose its type.

    Args:
        files: The job's files.
        options: Keyword options of `BatchGenLLM`.
        counter: Handle of the `ProgressCounter` actor.
        max_starts: Worker processes that may start in this job before it is given up.
        worker: Keyword arguments of `RangeWorker`.
        stage_class: Takes the place of `BatchGenLLM` in tests.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        options: Mapping[str, Any],
        counter: Any,
        max_starts: int,
        worker: Mapping[str, Any],
        stage_class: Callable[..., Any] | None = None,
    ) -> None:
        self._failure: str | None = None
        self._record: str | None = None
        try:
            num_starts = ray.get(counter.started.remote())
            if num_starts > max_starts:
                raise JobError(
                    f"worker processes died {num_starts - 1} times; look for a lack of memory "
                    "(kernel log) or for a row that kills the process, then run again"
                )
            complete = (stage_class or _batchgen_llm())(**options)
            self._record = json.dumps(complete.record(), default=str)
            self._worker = RangeWorker(files, complete, **worker)
            counter.ready.remote()
        except Exception as error:
            self._failure = encode_failure(error)

    def __call__(self, items: pa.Table) -> pa.Table:
        """Complete the ranges in `items`, in order."""
        results = [self._result(row) for row in items.to_pylist()]
        return pa.Table.from_pylist(results, schema=RESULT_SCHEMA)

    def _result(self, row: Mapping[str, int]) -> dict[str, Any]:
        result: dict[str, Any] = {"item_idx": row["item_idx"], "worker_record": self._record}
        if self._failure is not None:
            return {**result, "failure": self._failure}
        try:
            done = self._worker.run(WorkItem(*(row[name] for name in WorkItem._fields)))
            return {
                **result,
                "results_ipc": to_ipc(done.results),
                "is_kept": self._worker.keeps_journal,
                "num_retries": done.num_retries,
            }
        except Exception as error:
            return {**result, "failure": encode_failure(error)}


def _batchgen_llm() -> Callable[..., Any]:
    # Imported where it runs: the driver needs neither torch nor transformers.
    from batchgen_data.operator import BatchGenLLM

    return BatchGenLLM


def encode_failure(error: Exception) -> str:
    """Return an exception as text that crosses processes without pickling it."""
    return json.dumps(
        {"kind": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    )


def decode_failure(failure: str) -> Exception:
    """Return the exception that `encode_failure` described, of its own class if it is one of ours.

    The worker's traceback is added as a note.
    """
    fields = json.loads(failure)
    kind: Any = getattr(errors, fields["kind"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, BatchgenError) and not issubclass(kind, RowError)
    error: Exception
    if is_ours:
        error = kind(fields["message"])
    else:
        error = JobError(f"a worker failed: {fields['kind']}: {fields['message']}")
    error.add_note("In the worker:\n" + fields["traceback"])
    return error
