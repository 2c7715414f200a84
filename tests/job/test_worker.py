"""A worker whose stage raises: made again, then in halves, so that a poisoned row costs itself alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

from batchgen_data.errors import DeviceError
from batchgen_data.job import worker as worker_module
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.journal import journal_files, read_journal
from batchgen_data.job.reader import WorkItem
from batchgen_data.job.worker import RangeWorker
from batchgen_data.schema import Outcome, append_results
from plain_job import RESULTS, PlainJob, write_inputs

NUM_ROWS = 16
ITEM = WorkItem(0, 0, NUM_ROWS)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RangeWorker]]:
    monkeypatch.setattr(worker_module, "_BACK_OFF_S", (0.0, 0.0))
    write_inputs(tmp_path / "in", [NUM_ROWS])
    (tmp_path / "journal").mkdir()
    files = PlainJob(inputs=tmp_path / "in", output=tmp_path / "out").checked().files

    with ExitStack() as stack:

        def make(complete: Callable[[pa.Table], pa.Table]) -> RangeWorker:
            worker = RangeWorker(
                files, complete, result_names=RESULTS, journal_folder=str(tmp_path / "journal"), generation=1
            )
            stack.callback(worker.close)
            return worker

        yield make


class Stage:
    """Completes rows; raises for some, or for the first calls."""

    def __init__(self, *bad_ids: int, first_calls: int = 0, error: type[Exception] = OSError) -> None:
        self.bad_ids = set(bad_ids)
        self.first_calls = first_calls
        self.error = error
        self.num_calls = 0

    def __call__(self, table: pa.Table) -> pa.Table:
        self.num_calls += 1
        ids = set(table.column("id").to_pylist())
        if self.num_calls <= self.first_calls or ids & self.bad_ids:
            raise self.error("say 5 is secret")
        return append_results(table, [Outcome(finish_reason="stop", text="x")] * table.num_rows)


def test_an_error_that_passes_costs_nothing_but_a_call(make: Callable[..., RangeWorker]) -> None:
    """Case 67."""
    done = make(Stage(first_calls=2)).run(ITEM)
    assert done.num_retries == 2
    assert done.results.column("finish_reason").to_pylist() == ["stop"] * NUM_ROWS


def test_a_poisoned_row_costs_itself_alone(
    make: Callable[..., RangeWorker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(5, 11)
    done = make(stage).run(ITEM)
    codes = done.results.column("error_code").to_pylist()
    assert [row for row, code in enumerate(codes) if code] == [5, 11]
    assert codes[5] == "stage_error"
    assert done.results.column("error_message")[5].as_py() == "completing this row raised OSError, also alone"
    assert stage.num_calls <= 3 + 2 * 2 * 4
    assert done.num_retries == 3 + 2 * 4
    assert "secret" not in caplog.text
    (name,) = journal_files(str(tmp_path / "journal"), LocalFiles())
    attempt, outcomes = read_journal((tmp_path / "journal" / str(name)).read_bytes())
    assert attempt.results is None
    assert outcomes.results is not None
    assert outcomes.results.equals(done.results)


def test_what_every_row_raises_is_no_rows_fault(make: Callable[..., RangeWorker]) -> None:
    with pytest.raises(OSError, match="secret"):
        make(Stage(*range(NUM_ROWS))).run(ITEM)


def test_our_own_errors_are_not_tried_again(make: Callable[..., RangeWorker]) -> None:
    stage = Stage(3, error=DeviceError)
    with pytest.raises(DeviceError):
        make(stage).run(ITEM)
    assert stage.num_calls == 1


def test_without_the_journals_folder_rows_are_completed_all_the_same(
    make: Callable[..., RangeWorker], tmp_path: Path
) -> None:
    (tmp_path / "journal").rmdir()
    worker = make(Stage())
    assert not worker.keeps_journal
    assert worker.run(ITEM).results.num_rows == NUM_ROWS
