"""The job as a Ray Data pipeline: ranges of rows in, their outcomes out, in the order they finish."""

from __future__ import annotations

import _thread
import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa
import ray
import ray.data

from batchgen_data.config import EngineConfig, calls_in_flight
from batchgen_data.errors import InternalError, JobError, JobStalledError
from batchgen_data.job.check import CheckedJob
from batchgen_data.job.journal import from_ipc
from batchgen_data.job.progress import ProgressDisplay, ReportToActor, Totals
from batchgen_data.job.reader import WorkItem
from batchgen_data.job.session import ray_session
from batchgen_data.job.signals import sigterm_interrupts
from batchgen_data.job.stage import ITEM_SCHEMA, JobStage, decode_failure
from batchgen_data.job.stall import Watchdog
from batchgen_data.job.supervisor import start_supervisor
from batchgen_data.pool import plan_pool

# Ranges of 16 to 64 rows: small enough that every call has work and a crash repeats little, large enough
# that Ray's cost per task (about 15 ms on two cores) disappears beside a model's.
_MIN_ITEM_ROWS, _MAX_ITEM_ROWS = 16, 64
_ITEMS_PER_WORKER = 32
# With more tasks than this their cost shows even where rows are quick; ranges grow instead: a million rows in
# ranges of 250 are through in 65 s, of 64 it would be four minutes (`benchmarks/job_rate.py`).
_MAX_ITEMS = 4_000
# Workers that hang end themselves after the timeout; one that cannot do even that is noticed later, with
# time left for a worker to start again and load its model.
_STALLS_OF_JOB, _STARTING_S = 3, 600.0


class Outcomes(NamedTuple):
    """A range of rows with its result columns.

    Attributes:
        item: The range.
        results: The result columns.
        is_kept: Whether the worker put them into the journal.
        num_retries: Calls that raised and were made again.
    """

    item: WorkItem
    results: pa.Table
    is_kept: bool
    num_retries: int = 0


@dataclass(slots=True)
class Pipeline:
    """A running pipeline.

    Attributes:
        outcomes: The outcomes of each range, as they come.
        worker_record: What a worker resolved when it loaded its model; known after the first outcomes.
        totals: Asks for the workers' counts.
    """

    outcomes: Iterator[Outcomes]
    worker_record: str | None = None
    totals: Callable[[], Totals] = field(default=Totals)


@contextmanager
def open_pipeline(
    job: CheckedJob,
    cut: Callable[[int], list[WorkItem]],
    *,
    num_rows: int,
    worker: Mapping[str, Any],
    display: ProgressDisplay | None = None,
    stage_class: Callable[..., Any] | None = None,
) -> Iterator[Pipeline]:
    """Start a job's workers for the block; outcomes come as they are asked for.

    Iterating raises what failed in a worker: ConfigError, JobError and its kinds, DeviceError.

    Args:
        job: The checked job.
        cut: Returns what is to be done, in ranges of at most so many rows.
        num_rows: Rows to be done, at least one.
        worker: Keyword arguments of `RangeWorker`.
        display: Shows progress while the block runs.
        stage_class: Takes the place of `BatchGenLLM` in tests.
    """
    with ray_session(), sigterm_interrupts():
        engine = EngineConfig.from_options(job.config.engine)
        pool = plan_pool(engine, num_actors=job.config.num_actors, num_gpus=job.config.num_gpus)
        rows_per_item = job.config.batch_size or _rows_per_item(num_rows, pool.num_actors)
        items = cut(rows_per_item)
        supervisor = start_supervisor()
        options = {
            **job.options,
            "progress": ReportToActor(supervisor),
            "actors_per_node": pool.actors_per_node,
        }
        dataset = ray.data.from_arrow(
            [_item_table(item_idx, item) for item_idx, item in enumerate(items)]
        ).map_batches(
            JobStage,
            fn_constructor_kwargs={
                "files": job.files,
                "options": options,
                "supervisor": supervisor,
                "stall_timeout_s": job.config.stall_timeout_s,
                "worker": worker,
                "stage_class": stage_class,
            },
            batch_size=None,
            batch_format="pyarrow",
            **pool.map_arguments(calls_in_flight(engine.max_sequences, rows_per_item)),
        )
        # Not in order: one long row would hold back whatever finished after it.
        dataset.context.execution_options.preserve_order = False
        pipeline = Pipeline(iter(()), totals=lambda: ray.get(supervisor.totals.remote(), timeout=5))
        watching = nullcontext() if display is None else display.watch(pipeline.totals, num_rows)
        # Closed before the session: Ray Data's iterators start a new session when they outlive theirs.
        with (
            closing(_outcomes(dataset, items, pipeline)) as outcomes,
            watching,
            _no_stall(pipeline.totals, _STALLS_OF_JOB * job.config.stall_timeout_s + _STARTING_S),
        ):
            pipeline.outcomes = outcomes
            yield pipeline


@contextmanager
def _no_stall(totals: Callable[[], Totals], limit_s: float) -> Iterator[None]:
    """Interrupt the block where the workers' counts do not change for so long.

    Only in the main thread, the only one that can be interrupted.

    Raises:
        JobStalledError: It was.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stalled = threading.Event()

    def interrupt() -> None:
        stalled.set()
        _thread.interrupt_main()

    def position() -> Totals:
        return replace(totals(), generating_s=0.0)

    try:
        with Watchdog(position, interrupt, limit_s=limit_s).watching():
            yield
    except KeyboardInterrupt:
        if not stalled.is_set():
            raise
        raise JobStalledError(
            f"no worker made any progress for {limit_s:.0f} seconds; finished rows are kept: run again to go "
            "on, with a higher stall_timeout_s if a single pass may take longer"
        ) from None


def _outcomes(dataset: Any, items: Sequence[WorkItem], pipeline: Pipeline) -> Generator[Outcomes, None, None]:
    waiting = set(range(len(items)))
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in range(table.num_rows):
                failure = table.column("failure")[row].as_py()
                if failure is not None:
                    raise decode_failure(failure)
                item_idx = table.column("item_idx")[row].as_py()
                if item_idx not in waiting:
                    raise InternalError(f"range {item_idx} came back twice")
                waiting.remove(item_idx)
                if pipeline.worker_record is None:
                    pipeline.worker_record = table.column("worker_record")[row].as_py()
                results = from_ipc(table.column("results_ipc")[row].as_buffer())
                is_kept, num_retries = (table.column(n)[row].as_py() for n in ("is_kept", "num_retries"))
                yield Outcomes(items[item_idx], results, is_kept, num_retries)
    except ray.exceptions.RayError as error:
        raise JobError(f"Ray stopped the job: {str(error).strip().splitlines()[-1]}") from error
    if waiting:
        raise InternalError(f"{len(waiting)} ranges of {len(items)} never came back")


def _item_table(item_idx: int, item: WorkItem) -> pa.Table:
    return pa.Table.from_pylist([{"item_idx": item_idx, **item._asdict()}], schema=ITEM_SCHEMA)


def _rows_per_item(num_rows: int, num_workers: int) -> int:
    spread = num_rows // (num_workers * _ITEMS_PER_WORKER)
    return max(min(max(spread, _MIN_ITEM_ROWS), _MAX_ITEM_ROWS), math.ceil(num_rows / _MAX_ITEMS))
