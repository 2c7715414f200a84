"""A job in one plain process: the real output, ledger and journal, a stand-in for Ray and the model.

What a prompt says decides its outcome, and every generation is logged before it starts, so that a bench can
count what was lost, doubled, invented or computed again.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_data.job import check, shards
from batchgen_data.job.check import CheckedJob, JobConfig, check_job
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.output import OpenOutput, check_output, open_output
from batchgen_data.job.reader import WorkItem
from batchgen_data.job.worker import RangeResults, RangeWorker
from batchgen_data.models.source import ModelSource
from batchgen_data.schema import Outcome, append_results, result_fields

RESULTS = [field.name for field in result_fields()]


@dataclass(frozen=True, kw_only=True)
class PlainJob:
    """A job and the stand-in that runs it.

    Attributes:
        inputs: Folder of Parquet files with the columns ``id`` and ``prompt``.
        output: The output folder.
        log: Every generated row's id, one per line; None writes none.
        fails: Whether prompts that begin with "bad" fail.
        rows_per_item: Rows of one call.
        num_calls: Calls in flight.
        call_s: What one call takes.
        shard_rows: Rows of a shard.
        options: More fields of `JobConfig`.
    """

    inputs: Path
    output: Path
    log: Path | None = None
    fails: bool = True
    rows_per_item: int = 2
    num_calls: int = 1
    call_s: float = 0.0
    shard_rows: int = 3
    options: dict[str, Any] | None = None

    @property
    def in_flight_rows(self) -> int:
        """Rows that can be between their attempt and their outcome."""
        return self.rows_per_item * self.num_calls

    def config(self) -> JobConfig:
        """Return the job's options."""
        return JobConfig(
            inputs=(str(self.inputs),),
            output=str(self.output),
            **{"model": "fake", "prompt_column": "prompt", **(self.options or {})},
        )

    def checked(self) -> CheckedJob:
        """Return the checked job; the model is not looked for."""
        with _set(check, "resolve_source", _source):
            return check_job(self.config())

    def run(self, files: LocalFiles | None = None, *, expiry_s: float = 60.0) -> None:
        """Run the job, or what is missing of it."""
        path = check_output(str(self.output))
        job = self.checked()
        with (
            _set(shards, "_MIN_SHARD_ROWS", self.shard_rows),
            open_output(
                path,
                job,
                overwrite=job.config.overwrite,
                retry_failed=job.config.retry_failed,
                files=files,
                expiry_s=expiry_s,
            ) as output,
        ):
            self.complete(output, job)
            assert output.is_complete
            output.put_in_place()

    def complete(self, output: OpenOutput, job: CheckedJob) -> None:
        """Do what is missing, several calls at once."""
        worker = RangeWorker(
            job.files,
            self.generate,
            result_names=RESULTS,
            journal_folder=output.store.places.journal,
            generation=output.lease.generation,
            storage=output.files,
        )
        items = output.ledger.items(self.rows_per_item)
        with closing(worker):
            for item, results in _finished(worker.run, items, self.num_calls):
                output.ledger.add(item, results)

    def generate(self, table: pa.Table) -> pa.Table:
        """Stand in for `BatchGenLLM`."""
        ids, prompts = table.column("id").to_pylist(), table.column("prompt").to_pylist()
        if self.log is not None:
            with open(self.log, "ab", buffering=0) as sink:
                sink.write("".join(f"{row_id}\n" for row_id in ids).encode())
        if self.call_s:
            time.sleep(self.call_s)
        return append_results(table, [self.outcome(prompt) for prompt in prompts])

    def outcome(self, prompt: str) -> Outcome:
        """Return what becomes of a prompt."""
        if prompt.startswith("bad") and self.fails:
            return Outcome(finish_reason="error", error_code="model_error", error_message="it is bad")
        text = f"{prompt} {(self.options or {}).get('system', '')}"
        return Outcome(finish_reason="stop", text=text, token_ids=[1, 2], num_input_tokens=1)

    def differences(self) -> dict[str, int]:
        """Compare the published files with the inputs: rows lost, doubled, invented or wrong."""
        wanted = {}
        for path in sorted(self.inputs.glob("*.parquet")):
            for row in pq.read_table(path, use_threads=False).to_pylist():
                wanted[row["id"]] = row["prompt"]
        found: Counter[int] = Counter()
        wrong = 0
        for folder in ("data", "errors"):
            for path in sorted((self.output / folder).rglob("*.parquet")):
                for row in (
                    pq.ParquetFile(path, page_checksum_verification=True).read(use_threads=False).to_pylist()
                ):
                    found[row["id"]] += 1
                    outcome = self.outcome(row["prompt"])
                    is_right = row["prompt"] == wanted.get(row["id"])
                    is_right &= row["generated_text"] == outcome.text
                    is_right &= (folder == "errors") == (outcome.finish_reason == "error")
                    wrong += not is_right
        return {
            "lost": len(wanted.keys() - found.keys()),
            "doubled": sum(times - 1 for times in found.values()),
            "invented": len(found.keys() - wanted.keys()),
            "wrong": wrong,
        }


def write_inputs(folder: Path, num_rows: Sequence[int]) -> int:
    """Write one file per number, of so many rows; every seventh row is bad. Returns the number of rows."""
    folder.mkdir(parents=True)
    first = 0
    for number, count in enumerate(num_rows):
        ids = list(range(first, first + count))
        prompts = [f"{'bad' if row_id % 7 == 3 else 'say'} {row_id}" for row_id in ids]
        table = pa.table({"id": pa.array(ids, pa.int64()), "prompt": pa.array(prompts, pa.string())})
        pq.write_table(table, folder / f"{number}.parquet")
        first += count
    return first


class StepFiles(LocalFiles):
    """Calls a hook before every change on disk.

    Args:
        before: Called with the number of the change from 1, the method and its arguments.
    """

    STEPS = (
        "make_folder",
        "make_folders",
        "create",
        "append",
        "write",
        "sync",
        "publish",
        "rename",
        "replace",
        "remove",
        "remove_folder",
        "remove_empty",
    )

    # Changes that are a step of their own; the others make them durable or clean up after them.
    NAMED = ("make_folder", "append", "create", "write", "publish", "rename", "replace", "remove_folder")

    def __init__(self, before: Callable[[int, str, Sequence[Any]], None] | None = None) -> None:
        self.num_steps = 0
        self.trace: list[tuple[str, str]] = []
        self._before = before

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in StepFiles.STEPS:
            return method

        def step(*arguments: Any) -> Any:
            self.num_steps += 1
            places = " ".join(argument for argument in arguments if isinstance(argument, str))
            self.trace.append((name, re.sub(r"/\S*/out/|[0-9a-f]{6,}|\d+", "#", places)))
            if self._before is not None:
                self._before(self.num_steps, name, arguments)
            return method(*arguments)

        return step

    def first_of_each_kind(self) -> list[int]:
        """Return the numbers of the first change of each kind, a method and a place; small ones left out."""
        kinds: dict[tuple[str, str], int] = {}
        for number, kind in enumerate(self.trace, start=1):
            if kind[0] in self.NAMED:
                kinds.setdefault(kind, number)
        return list(kinds.values())


def _finished(
    run: Callable[[WorkItem], RangeResults], items: Sequence[WorkItem], num_calls: int
) -> Iterator[tuple[WorkItem, pa.Table]]:
    """Run items on threads, at most `num_calls` at once, and yield them as they finish."""
    if num_calls == 1:  # without threads
        yield from ((item, run(item).results) for item in items)
        return
    waiting = iter(items)
    with ThreadPoolExecutor(num_calls) as pool:
        running: dict[Future[RangeResults], WorkItem] = {}
        while True:
            while len(running) < num_calls and (item := next(waiting, None)) is not None:
                running[pool.submit(run, item)] = item
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result().results


def _source(name: str, revision: str | None = None, **_: Any) -> ModelSource:
    return ModelSource(kind="hub", name=name, revision=revision)


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def alive(pid: int) -> bool:
    """Tell whether a child still runs; reaps it if not."""
    return os.waitpid(pid, os.WNOHANG) == (0, 0)
