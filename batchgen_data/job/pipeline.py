"""The job as a Ray Data pipeline: ranges of rows in, completed tables out, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import ray
import ray.data

from batchgen_data.config import EngineConfig, calls_in_flight
from batchgen_data.errors import InternalError, JobError
from batchgen_data.job.check import CheckedJob
from batchgen_data.job.progress import ProgressDisplay, ReportToActor, Totals, start_counter
from batchgen_data.job.reader import WorkItem, plan_items
from batchgen_data.job.session import ray_session, sigterm_interrupts
from batchgen_data.job.stage import ITEM_SCHEMA, JobStage, decode_failure, from_ipc
from batchgen_data.pool import plan_pool

# Ranges of 16 to 64 rows: small enough that every call has work and a crash repeats little, large enough
# that Ray's cost per task (about a millisecond) disappears.
_MIN_ITEM_ROWS, _MAX_ITEM_ROWS = 16, 64
_ITEMS_PER_WORKER = 32
# Beyond this many tasks Ray's own bookkeeping shows; ranges grow instead.
_MAX_ITEMS = 20_000
_MAX_WORKER_RESTARTS = 3


@dataclass(slots=True)
class Pipeline:
    """A running pipeline.

    Attributes:
        items: The ranges of rows, in input order.
        tables: The completed table of each, in the same order.
        worker_record: What a worker resolved when it loaded its model; known after the first table.
        totals: Asks for the workers' counts.
    """

    items: list[WorkItem]
    tables: Iterator[pa.Table]
    worker_record: str | None = None
    totals: Callable[[], Totals] = field(default=Totals)


@contextmanager
def open_pipeline(
    job: CheckedJob,
    *,
    display: ProgressDisplay | None = None,
    stage_class: Callable[..., Any] | None = None,
) -> Iterator[Pipeline]:
    """Start a job's workers for the block; the tables come as they are asked for.

    Iterating raises what failed in a worker: ConfigError, JobError and its kinds, DeviceError.

    Args:
        job: The checked job, with at least one row.
        display: Shows progress while the block runs.
        stage_class: Takes the place of `BatchGenLLM` in tests.
    """
    with ray_session(), sigterm_interrupts():
        engine = EngineConfig.from_options(job.config.engine)
        pool = plan_pool(engine, num_actors=job.config.num_actors, num_gpus=job.config.num_gpus)
        rows_per_item = job.config.batch_size or _rows_per_item(job.num_rows, pool.num_actors)
        items = plan_items(job.files, job.rows_by_file, rows_per_item=rows_per_item)
        counter = start_counter()
        options = {
            **job.options,
            "progress": ReportToActor(counter),
            "actors_per_node": pool.actors_per_node,
        }
        dataset = ray.data.from_arrow(
            [_item_table(item_idx, item) for item_idx, item in enumerate(items)]
        ).map_batches(
            JobStage,
            fn_constructor_kwargs={
                "files": job.files,
                "options": options,
                "counter": counter,
                "max_starts": pool.num_actors + _MAX_WORKER_RESTARTS,
                "stage_class": stage_class,
            },
            batch_size=None,
            batch_format="pyarrow",
            **pool.map_arguments(calls_in_flight(engine.max_sequences, rows_per_item)),
        )
        dataset.context.execution_options.preserve_order = True
        pipeline = Pipeline(items, iter(()), totals=lambda: ray.get(counter.totals.remote(), timeout=5))
        watching = nullcontext() if display is None else display.watch(pipeline.totals, job.num_rows)
        # Closed before the session: Ray Data's iterators start a new session when they outlive theirs.
        with closing(_tables(dataset, pipeline)) as tables, watching:
            pipeline.tables = tables
            yield pipeline


def _tables(dataset: Any, pipeline: Pipeline) -> Generator[pa.Table, None, None]:
    expected_idx = 0
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in range(table.num_rows):
                failure = table.column("failure")[row].as_py()
                if failure is not None:
                    raise decode_failure(failure)
                item_idx = table.column("item_idx")[row].as_py()
                if item_idx != expected_idx:
                    raise InternalError(f"range {item_idx} came back in place of {expected_idx}")
                expected_idx += 1
                if pipeline.worker_record is None:
                    pipeline.worker_record = table.column("worker_record")[row].as_py()
                yield from_ipc(table.column("rows_ipc")[row])
    except ray.exceptions.RayError as error:
        raise JobError(f"Ray stopped the job: {str(error).strip().splitlines()[-1]}") from error
    if expected_idx != len(pipeline.items):
        raise InternalError(f"{expected_idx} ranges came back of {len(pipeline.items)}")


def _item_table(item_idx: int, item: WorkItem) -> pa.Table:
    return pa.Table.from_pylist([{"item_idx": item_idx, **item._asdict()}], schema=ITEM_SCHEMA)


def _rows_per_item(num_rows: int, num_workers: int) -> int:
    spread = num_rows // (num_workers * _ITEMS_PER_WORKER)
    return max(min(max(spread, _MIN_ITEM_ROWS), _MAX_ITEM_ROWS), math.ceil(num_rows / _MAX_ITEMS))
