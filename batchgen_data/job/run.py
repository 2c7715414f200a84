"""Runs a job: opens its output, completes what is missing through the pipeline, publishes shard by shard."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchgen_data.errors import ConfigError, InternalError
from batchgen_data.job import openai_batch
from batchgen_data.job.budget import ErrorBudget
from batchgen_data.job.check import CheckedJob, JobConfig, check_job
from batchgen_data.job.filesystem import without_credentials
from batchgen_data.job.journal import JournalWriter
from batchgen_data.job.output import OpenOutput, check_output, has_outcomes, open_output
from batchgen_data.job.signals import signals_ignored, sigterm_interrupts
from batchgen_data.job.summary import RunSummary
from batchgen_data.schema import result_fields

if TYPE_CHECKING:
    from batchgen_data.job.progress import ProgressDisplay, Totals

REPORT_FORMAT = 2
_PACKAGES = ("batchgen-data", "torch", "transformers", "ray", "pyarrow")


@dataclass(slots=True)
class _Run:
    """What a run has done so far."""

    started_at: datetime
    begin_s: float
    totals: Totals | None = None
    tokens_before: int = 0
    rows_before: int = 0
    num_retries: int = 0
    worker_record: str | None = None


def run_job(
    config: JobConfig,
    *,
    display: ProgressDisplay | None = None,
    on_checked: Callable[[CheckedJob], None] | None = None,
    on_opened: Callable[[OpenOutput], None] | None = None,
    stage_class: Callable[..., Any] | None = None,
) -> RunSummary:
    """Run a job, or what is missing of it, to its end.

    The same job on the same output goes on where it stopped, and does nothing when it is finished. Uses the
    Ray session that is initialised or that RAY_ADDRESS names; without one, starts its own and stops it at
    the end. Ctrl-C and SIGTERM stop the run: finished rows are kept.

    Args:
        config: The job, with an output.
        display: Shows progress.
        on_checked: Called when all checks passed, before anything is written.
        on_opened: Called when the output is open, before Ray starts.
        stage_class: Takes the place of `BatchGenLLM` in tests.

    Returns:
        Counts of all rows of the job, and times of this run.

    Raises:
        ConfigError: Something about the job cannot work; see `check_job`.
        ResumeMismatchError: The output belongs to a job with other settings.
        JobLockedError: Another run is writing to the output, or took it over.
        ErrorBudgetExceeded: More rows failed than `max_failed_rows` allows.
        JobError: The run stopped: an input or output failed, a worker failed, or, with `fail_fast`, a row.
        KeyboardInterrupt: The run was interrupted.
    """
    if config.output is None:
        raise ConfigError("the job has no output; name a folder")
    path = check_output(config.output)
    job = check_job(config)
    if on_checked is not None:
        on_checked(job)
    run = _Run(datetime.now(UTC), time.monotonic())
    with (
        sigterm_interrupts(),
        open_output(path, job, overwrite=config.overwrite, retry_failed=config.retry_failed) as output,
    ):
        if on_opened is not None:
            on_opened(output)
        try:
            _complete_rows(job, output, run, display, stage_class)
            output.put_in_place()
            if config.format == "openai":
                _write_answers(job, output)
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            try:
                _report(job, output, run, status)
            except Exception as second:
                # What stopped the run is what to tell, and an interrupt must stay one.
                error.add_note(f"Afterwards: {second}")
            raise
        return _report(job, output, run, "finished")


def _complete_rows(
    job: CheckedJob,
    output: OpenOutput,
    run: _Run,
    display: ProgressDisplay | None,
    stage_class: Callable[..., Any] | None,
) -> None:
    config, ledger = job.config, output.ledger
    run.tokens_before, run.rows_before = ledger.counted.generated_tokens, ledger.counted.num_rows
    budget = ErrorBudget.of(config.max_failed_rows, job.num_rows, fail_fast=config.fail_fast)
    budget.check(ledger.counted)
    if ledger.num_missing:
        # Late: Ray takes seconds to import, and a finished job does not need it.
        from batchgen_data.job.pipeline import open_pipeline

        fields = result_fields(generated_tokens=config.generated_tokens, prefix=config.output_prefix)
        worker = {
            "journal_folder": output.store.places.journal,
            "generation": output.lease.generation,
            "result_names": [column.name for column in fields],
        }
        journal = JournalWriter(output.store.places.journal, output.lease.generation, output.files)
        with (
            closing(journal),
            open_pipeline(
                job,
                ledger.items,
                num_rows=ledger.num_missing,
                worker=worker,
                display=display,
                stage_class=stage_class,
            ) as pipeline,
        ):
            for item, results, is_kept, num_retries in pipeline.outcomes:
                run.num_retries += num_retries
                run.worker_record = run.worker_record or pipeline.worker_record
                if not is_kept:
                    journal.outcomes(item, results)
                ledger.add(item, results)
                budget.check(ledger.counted)
            # The files are published: no answer to this question is a reason to fail.
            with suppress(Exception):
                run.totals = pipeline.totals()
    if not output.is_complete:
        raise InternalError(f"{ledger.num_missing} rows have no outcome at the end of the run")


def _write_answers(job: CheckedJob, output: OpenOutput) -> None:
    model = str(job.options["model"])
    with output.store.commit_errors(f"{openai_batch.RESULTS} or {openai_batch.ERRORS}"):
        openai_batch.write_answers(
            output.path,
            [part.path for shard in output.shards for part in output.states[shard.idx].parts],
            prefix=job.config.output_prefix,
            model=os.path.basename(model.rstrip("/")) if os.path.exists(model) else model,
            created_at_s=int(datetime.fromisoformat(output.manifest.created_at).timestamp()),
            files=output.files,
            staging=output.lease.folder,
        )


def _report(job: CheckedJob, output: OpenOutput, run: _Run, status: str) -> RunSummary:
    """Write the report of the run, if there is anything to tell, and return its counts.

    Those of a finished run come from the published files.
    """
    counted = output.ledger.counted
    summary = RunSummary()
    if status == "finished":
        for state in output.states.values():
            summary.add_summary(state.summary)
    else:
        summary.add_summary(counted)
    summary.elapsed_s = time.monotonic() - run.begin_s
    if run.totals is not None:
        summary.generating_s = run.totals.generating_s
        summary.run_yields = run.totals.yields_for_pages
        summary.run_recomputed_tokens = run.totals.recomputed_tokens
    summary.run_tokens = counted.generated_tokens - run.tokens_before
    summary.run_retries = run.num_retries
    summary.run_rows = counted.num_rows - run.rows_before
    places = output.store.places
    # A finished job that is run again has nothing to add to the report of the run that finished it.
    is_news = status != "finished" or summary.run_rows or not output.files.exists(places.report)
    if is_news and has_outcomes(places, output.files):
        content = json.dumps(_record(job, output, run, status, summary), indent=2, default=str)
        with signals_ignored():
            output.store.replace_report(places.report, content.encode() + b"\n")
    return summary


def _record(
    job: CheckedJob, output: OpenOutput, run: _Run, status: str, summary: RunSummary
) -> dict[str, Any]:
    config = job.config
    settings = {
        name: getattr(config, name)
        for name in config.__dataclass_fields__
        if name not in ("inputs", "output")
    }
    return {
        "format": REPORT_FORMAT,
        "status": status,
        "generation": output.lease.generation,
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
        "counts": summary.to_dict(),
        "files": [
            {
                "input": job.files[shard.file_idx].name,
                "first_row": shard.first_row,
                "output": part.path,
                "rows": part.num_rows,
            }
            for shard in output.shards
            if shard.idx in output.states
            for part in output.states[shard.idx].parts
        ],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
