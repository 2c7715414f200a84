"""Runs a job: completed tables from the pipeline, in order, into one published file per input file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchgen_data.errors import ConfigError, InternalError, JobError
from batchgen_data.job.check import CheckedJob, JobConfig, check_job, output_schema
from batchgen_data.job.filesystem import without_credentials
from batchgen_data.job.reader import WorkItem
from batchgen_data.job.store import OutputStore
from batchgen_data.job.summary import RunSummary

if TYPE_CHECKING:
    from batchgen_data.job.progress import ProgressDisplay

RECORD_FORMAT = 1
_PACKAGES = ("batchgen-data", "torch", "transformers", "ray", "pyarrow")


@dataclass(slots=True)
class _Run:
    """What a run has done so far."""

    started_at: datetime
    summary: RunSummary = field(default_factory=RunSummary)
    published: list[dict[str, Any]] = field(default_factory=list)
    worker_record: str | None = None


def run_job(
    config: JobConfig,
    *,
    display: ProgressDisplay | None = None,
    on_checked: Callable[[CheckedJob], None] | None = None,
    stage_class: Callable[..., Any] | None = None,
) -> RunSummary:
    """Run a job to its end and publish its files.

    Uses the Ray session that is initialised or that RAY_ADDRESS names; without one, starts its own and
    stops it at the end. Ctrl-C and SIGTERM stop the run: files already complete stay, nothing half is left.

    Args:
        config: The job, with an output.
        display: Shows progress.
        on_checked: Called when all checks passed, before Ray starts.
        stage_class: Takes the place of `BatchGenLLM` in tests.

    Returns:
        Counts and times.

    Raises:
        ConfigError: Something about the job cannot work; see `check_job`.
        JobError: The run stopped: an input or output failed, a worker failed, or, with `fail_fast`, a row.
        KeyboardInterrupt: The run was interrupted.
    """
    if config.output is None:
        raise ConfigError("the job has no output; name a folder")
    store = OutputStore(config.output)
    job = check_job(config)
    if on_checked is not None:
        on_checked(job)
    # Late, as in the functions below: Ray takes seconds to import and the checks do not need it.
    from batchgen_data.job.session import sigterm_interrupts

    run = _Run(datetime.now(UTC))
    begin_s = time.monotonic()
    with sigterm_interrupts():
        store.prepare()
        try:
            _complete_files(job, store, run, display, stage_class)
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            try:
                _finish(job, store, run, status, begin_s)
            except Exception as second:
                # What stopped the run is what to tell, and an interrupt must stay one.
                error.add_note(f"Afterwards: {second}")
            raise
        _finish(job, store, run, "finished", begin_s)
    return run.summary


def _finish(job: CheckedJob, store: OutputStore, run: _Run, status: str, begin_s: float) -> None:
    from batchgen_data.job.session import signals_ignored

    run.summary.elapsed_s = time.monotonic() - begin_s
    with signals_ignored():
        try:
            if run.published:
                store.write_record(_record(job, run, status))
        finally:
            store.close()


def _complete_files(
    job: CheckedJob,
    store: OutputStore,
    run: _Run,
    display: ProgressDisplay | None,
    stage_class: Callable[..., Any] | None,
) -> None:
    config = job.config
    with ExitStack() as stack:
        completed: Iterator[tuple[WorkItem, pa.Table]] = iter(())
        pipeline = None
        if job.num_rows:
            from batchgen_data.job.pipeline import open_pipeline

            pipeline = stack.enter_context(open_pipeline(job, display=display, stage_class=stage_class))
            completed = zip(pipeline.items, pipeline.tables, strict=True)
        for file, num_rows in zip(job.files, job.rows_by_file, strict=True):
            with store.open_part(file.output_name, output_schema(file, config)) as part:
                while part.num_rows < num_rows:
                    item, table = next(completed)
                    if table.num_rows != item.num_rows:
                        raise InternalError(
                            f"{file.name}: {table.num_rows} rows came back of {item.num_rows}"
                        )
                    run.summary.add(
                        table, file_name=file.name, first_row=item.first_row, prefix=config.output_prefix
                    )
                    if config.fail_fast and run.summary.failures:
                        code, cause = next(iter(run.summary.failures.items()))
                        raise JobError(f"row {cause.location} failed ({code}): {cause.message}")
                    part.write(table)
            run.published.append(
                {"input": file.name, "output": f"data/{file.output_name}", "rows": part.num_rows}
            )
        if pipeline is not None:
            next(completed, None)  # runs the pipeline's own check that nothing is left
            run.worker_record = pipeline.worker_record
            # The files are published: no answer to this question is a reason to fail.
            with suppress(Exception):
                run.summary.generating_s = pipeline.totals().generating_s


def _record(job: CheckedJob, run: _Run, status: str) -> dict[str, Any]:
    config = job.config
    settings = {
        name: getattr(config, name)
        for name in config.__dataclass_fields__
        if name not in ("inputs", "output")
    }
    return {
        "format": RECORD_FORMAT,
        "status": status,
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "settings": {
            "inputs": [without_credentials(source) for source in config.inputs],
            **settings,
            "sampling": config.sampling.to_dict(),
            "engine": dict(config.engine),
        },
        "tokenizer": job.options["tokenizer"],
        "worker": json.loads(run.worker_record) if run.worker_record else None,
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "counts": run.summary.to_dict(),
        "files": run.published,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
