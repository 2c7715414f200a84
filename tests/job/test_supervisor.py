"""Rows that kill their worker: found in a few deaths, without Ray."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from batchgen_data.errors import JobError
from batchgen_data.job.stall import Watchdog
from batchgen_data.job.supervisor import Rows, Supervisor
from batchgen_data.job.turns import Turns
from batchgen_data.job.worker import RangeWorker
from batchgen_data.schema import Outcome, append_results

RESULTS = [
    *("generated_text", "finish_reason", "stop_reason", "num_input_tokens", "num_generated_tokens"),
    *("error_code", "error_message"),
]


class Died(BaseException):
    """Stands in for the end of a process."""


class Line:
    """Stands in for the line to the supervisor's actor."""

    def __init__(self, supervisor: Supervisor, worker: str) -> None:
        self._supervisor, self._worker, self.is_cut = supervisor, worker, False

    def begin(self, rows: Rows, *, alone: bool) -> bool:
        return self._supervisor.begin(self._worker, rows, alone=alone)

    def end(self, rows: Rows) -> None:
        if not self.is_cut:
            self._supervisor.end(self._worker, rows)


def run_job(num_rows: int, killers: set[int], *, rows_per_range: int) -> tuple[list[pa.Table], int, int]:
    """Complete ranges at once in one worker, started again after each death; results, deaths, rows run."""
    supervisor = Supervisor()
    ranges = [
        Rows(0, first, min(rows_per_range, num_rows - first)) for first in range(0, num_rows, rows_per_range)
    ]
    done: dict[Rows, pa.Table] = {}
    num_deaths = num_run = 0
    while True:
        why = supervisor.worker_started("w")
        if why is not None:
            raise JobError(why)
        line = Line(supervisor, "w")

        def complete(table: pa.Table, line: Line = line) -> pa.Table:
            nonlocal num_run
            rows = table.column("row").to_pylist()
            num_run += len(rows)
            if killers.intersection(rows):
                line.is_cut = True
                raise Died
            outcomes = [Outcome(finish_reason="stop", text=str(row)) for row in rows]
            return append_results(table, outcomes)

        worker = RangeWorker(
            [], complete, result_names=RESULTS, journal_folder="/none", generation=1, watch=line
        )
        left = [rows for rows in ranges if rows not in done]
        # All that may run beside others is with the worker when it dies.
        together = [rows for rows in left if supervisor.begin("w", rows, alone=False)]
        try:
            for rows in sorted(left, key=lambda rows: rows not in together):
                table = pa.table({"row": list(range(rows.first_row, rows.first_row + rows.num_rows))})
                done[rows] = worker._complete_watched(table, rows)[0]
        except Died:
            num_deaths += 1
            continue
        return [done[rows] for rows in ranges], num_deaths, num_run


@pytest.mark.parametrize("killers", [{0}, {37}, {255}, {100, 101}, {3, 77, 200}])
def test_a_row_that_kills_its_worker_is_found_and_costs_no_other(killers: set[int]) -> None:
    """Promise 6."""
    tables, num_deaths, _ = run_job(256, killers, rows_per_range=64)
    table = pa.concat_tables(tables)
    codes = table.column("error_code").to_pylist()
    assert {row for row, code in enumerate(codes) if code == "worker_died"} == killers
    assert [
        row for row, text in enumerate(table.column("generated_text").to_pylist()) if text != str(row)
    ] == sorted(killers)
    # log2(256) + 2 for one; another costs what only it makes necessary.
    assert num_deaths <= 10 + 3 * (len(killers) - 1)


def test_no_killer_no_cost() -> None:
    tables, num_deaths, num_run = run_job(100, set(), rows_per_range=16)
    assert (num_deaths, num_run, sum(table.num_rows for table in tables)) == (0, 100, 100)


def test_rows_that_all_kill_stop_the_job_by_name() -> None:
    with pytest.raises(JobError, match="worker processes died 101 times; look for a lack of memory"):
        run_job(512, set(range(512)), rows_per_range=64)


def test_a_worker_that_dies_idle_is_started_three_times() -> None:
    supervisor = Supervisor()
    assert [supervisor.worker_started("w") for _ in range(4)] == [None] * 4
    assert "died 4 times" in (supervisor.worker_started("w") or "")


def test_deaths_of_one_worker_say_nothing_about_rows_of_another() -> None:
    supervisor = Supervisor()
    for worker in ("a", "b"):
        assert supervisor.worker_started(worker) is None
    for _ in range(3):
        assert supervisor.begin("b", Rows(0, 64, 64), alone=False)
        supervisor.begin("a", Rows(0, 0, 64), alone=False)
        assert supervisor.worker_started("a") is None
    assert not supervisor.begin("a", Rows(0, 0, 64), alone=False)


def test_who_wants_to_be_alone_is_let_in_and_is_alone() -> None:
    turns, inside, seen = Turns(), [], []

    def beside() -> None:
        for _ in range(50):
            with turns.together():
                inside.append(1)
                time.sleep(0.001)
                inside.pop()

    def alone() -> None:
        for _ in range(10):
            with turns.alone():
                seen.append(len(inside))
                time.sleep(0.001)
                seen.append(len(inside))

    threads = [threading.Thread(target=target) for target in (beside, beside, alone, alone, beside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert seen == [0] * 40


def test_the_watchdog_barks_once_where_nothing_moves() -> None:
    position, barked = [0], threading.Event()
    is_busy = threading.Event()
    dog = Watchdog(lambda: position[0], barked.set, limit_s=0.3, is_busy=is_busy.is_set)
    with dog.watching():
        assert not barked.wait(0.6), "nothing to do is no stall"
        is_busy.set()
        for _ in range(10):
            position[0] += 1
            time.sleep(0.1)
        assert not barked.is_set()
        assert barked.wait(5)
