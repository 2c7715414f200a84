"""The job as a Ray Data pipeline: ranges of rows in, completed tables out, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from batchgen_data.job.session import Session, ray_session, sigterm_interrupts
from batchgen_data.job.stage import ITEM_SCHEMA, JobStage, decode_failure, from_ipc

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
    with ray_session() as session, sigterm_interrupts():
        num_gpus = _gpus_per_worker(job, session)
        num_workers = job.config.num_actors or _num_workers(num_gpus, session)
        rows_per_item = job.config.batch_size or _rows_per_item(job.num_rows, num_workers)
        items = plan_items(job.files, job.rows_by_file, rows_per_item=rows_per_item)
        engine = EngineConfig.from_options(job.config.engine)
        counter = start_counter()
        options = {
            **job.options,
            "progress": ReportToActor(counter),
            "actors_per_node": math.ceil(num_workers / session.num_nodes),
        }
        dataset = ray.data.from_arrow(
            [_item_table(item_idx, item) for item_idx, item in enumerate(items)]
        ).map_batches(
            JobStage,
            fn_constructor_kwargs={
                "files": job.files,
                "options": options,
                "counter": counter,
                "max_starts": num_workers + _MAX_WORKER_RESTARTS,
                "stage_class": stage_class,
            },
            batch_size=None,
            batch_format="pyarrow",
            # On our own session nothing competes for CPUs, and reserving them could only starve Ray's tasks.
            num_cpus=0 if session.is_own else job.config.engine.get("num_threads") or 0,
            num_gpus=num_gpus or None,
            compute=ray.data.ActorPoolStrategy(
                size=num_workers,
                max_concurrent_calls_per_actor=calls_in_flight(engine.max_sequences, rows_per_item),
                enable_true_multi_threading=True,
            ),
        )
        dataset.context.execution_options.preserve_order = True
        pipeline = Pipeline(items, iter(()), totals=lambda: ray.get(counter.totals.remote(), timeout=5))
        pipeline.tables = _tables(dataset, pipeline)
        if display is None:
            yield pipeline
        else:
            with display.watch(pipeline.totals, job.num_rows):
                yield pipeline


def _tables(dataset: Any, pipeline: Pipeline) -> Iterator[pa.Table]:
    expected_idx = 0
    try:
        for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in range(block.num_rows):
                failure = block.column("failure")[row].as_py()
                if failure is not None:
                    raise decode_failure(failure)
                item_idx = block.column("item_idx")[row].as_py()
                if item_idx != expected_idx:
                    raise InternalError(f"range {item_idx} came back in place of {expected_idx}")
                expected_idx += 1
                if pipeline.worker_record is None:
                    pipeline.worker_record = block.column("worker_record")[row].as_py()
                yield from_ipc(block.column("rows_ipc")[row])
    except ray.exceptions.RayError as error:
        raise JobError(f"Ray stopped the job: {str(error).strip().splitlines()[-1]}") from error
    if expected_idx != len(pipeline.items):
        raise InternalError(f"{expected_idx} ranges came back of {len(pipeline.items)}")


def _item_table(item_idx: int, item: WorkItem) -> pa.Table:
    return pa.Table.from_pylist([{"item_idx": item_idx, **item._asdict()}], schema=ITEM_SCHEMA)


def _rows_per_item(num_rows: int, num_workers: int) -> int:
    spread = num_rows // (num_workers * _ITEMS_PER_WORKER)
    return max(min(max(spread, _MIN_ITEM_ROWS), _MAX_ITEM_ROWS), math.ceil(num_rows / _MAX_ITEMS))


def _gpus_per_worker(job: CheckedJob, session: Session) -> float:
    if job.config.num_gpus is not None:
        return job.config.num_gpus
    wants_gpu = job.config.engine.get("device", "auto") != "cpu"
    return 1 if wants_gpu and session.num_gpus else 0


def _num_workers(num_gpus: float, session: Session) -> int:
    return max(1, int(session.num_gpus // num_gpus)) if num_gpus else session.num_nodes
