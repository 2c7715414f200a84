"""What runs in each Ray worker of a job: complete ranges of rows and hand their outcomes back."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
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
from batchgen_data.job.stall import Watchdog
from batchgen_data.job.supervisor import Watch
from batchgen_data.job.worker import RangeWorker

logger = logging.getLogger(__name__)

# Exit code of a worker that ends itself.
_STALLED = 70
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
        supervisor: Handle of the `Supervisor` actor.
        stall_timeout_s: Seconds without any progress after which this process ends itself.
        worker: Keyword arguments of `RangeWorker`.
        stage_class: Takes the place of `BatchGenLLM` in tests.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        options: Mapping[str, Any],
        supervisor: Any,
        stall_timeout_s: float,
        worker: Mapping[str, Any],
        stage_class: Callable[..., Any] | None = None,
    ) -> None:
        self._failure: str | None = None
        self._record: str | None = None
        try:
            # Of the actor: the same after each restart.
            name = ray.get_runtime_context().get_actor_id() or "worker"
            if (why := ray.get(supervisor.worker_started.remote(name))) is not None:
                raise JobError(why)
            complete = (stage_class or _batchgen_llm())(**options)
            self._record = json.dumps(complete.record(), default=str)
            self._worker = RangeWorker(files, complete, watch=Watch(supervisor, name), **worker)
            Watchdog(
                lambda: (self._worker.num_done, _position(complete)),
                _end_process,
                limit_s=stall_timeout_s,
                is_busy=lambda: self._worker.num_running > 0,
            ).watch_forever()
            supervisor.ready.remote()
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


def _position(complete: Any) -> Any:
    """How far a stage's engine is, where it has one."""
    statistics: Mapping[str, Any] = getattr(complete, "statistics", dict)()
    return [statistics.get(name) for name in ("steps", "rows_done", "rows_failed")]


def _end_process() -> None:
    """End a worker in which nothing moves: Ray starts it again, and what it ran counts as at a death."""
    logger.error("nothing moved in this worker for too long; it ends, to be started again")
    faulthandler.dump_traceback(all_threads=True)
    os._exit(_STALLED)


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
