"""The progress line, and the counts behind it."""

from __future__ import annotations

import io
import time

import pyarrow as pa
import pytest
from rich.console import Console

from batchgen_data.job.progress import ProgressCounter, ProgressDisplay, Totals, duration, progress_line
from batchgen_data.job.summary import RunSummary
from batchgen_data.schema import Outcome, append_results


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_workers_add_up_and_a_later_report_replaces_the_earlier() -> None:
    clock = Clock()
    counter = ProgressCounter(clock)
    assert counter.totals() == Totals()
    counter.ready()
    clock.now_s += 4
    counter.ready()
    counter.report("a", {"rows_done": 5, "generated_tokens": 50})
    counter.report("b", {"rows_done": 1, "rows_failed": 1, "generated_tokens": 0})
    counter.report("a", {"rows_done": 7, "rows_skipped": 2, "generated_tokens": 80, "unknown": 9})
    assert counter.totals() == Totals(
        rows_done=8, rows_failed=1, rows_skipped=2, generated_tokens=80, num_ready=2, generating_s=4.0
    )


def test_the_line_says_what_is_known() -> None:
    assert progress_line(Totals(), 10) == "0/10 rows, loading the model"
    assert progress_line(Totals(num_ready=1), 10) == "0/10 rows"
    halfway = Totals(
        rows_done=5, rows_failed=1, rows_skipped=2, generated_tokens=900, num_ready=1, generating_s=60.0
    )
    assert progress_line(halfway, 10) == "5/10 rows, 1 failed, 2 skipped, 15 tokens/s, ETA 1m00s"
    early = Totals(rows_done=4, generated_tokens=900, num_ready=1, generating_s=60.0)
    assert progress_line(early, 10) == "4/10 rows, 15 tokens/s"
    # Rows that a restarted worker repeats never make more rows than there are.
    assert progress_line(Totals(rows_done=12, num_ready=1, generating_s=1.0), 10) == "10/10 rows, 0 tokens/s"


@pytest.mark.parametrize("seconds, shown", [(0.4, "0s"), (59, "59s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_display_follows_the_totals_and_survives_a_failing_poll(is_terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=80)
    polls = 0

    def poll() -> Totals:
        nonlocal polls
        polls += 1
        if polls == 1:
            raise TimeoutError
        return Totals(rows_done=polls, num_ready=1)

    display = ProgressDisplay(console, poll_s=0.01, line_s=0.01)
    with display.watch(poll, 1000):
        deadline_s = time.monotonic() + 10
        while polls < 4 and time.monotonic() < deadline_s:
            time.sleep(0.005)
    shown = stream.getvalue()
    assert "2/1000 rows" in shown
    assert "3/1000 rows" in shown
    if not is_terminal:
        assert "\x1b" not in shown
        assert shown.splitlines()[0] == "2/1000 rows"


def test_without_a_terminal_a_short_run_prints_no_line() -> None:
    stream = io.StringIO()
    with ProgressDisplay(Console(file=stream)).watch(Totals, 1):
        pass
    assert stream.getvalue() == ""


def test_the_summary_adds_up_and_names_the_first_row_of_each_cause() -> None:
    outcomes = [
        Outcome(finish_reason="stop", text="a", token_ids=[1, 2], num_input_tokens=3),
        Outcome(finish_reason="length", text="b", token_ids=[1, 2, 3], num_input_tokens=4),
        Outcome(
            finish_reason="error", error_code="prompt_too_long", error_message="long", num_input_tokens=9
        ),
        Outcome(finish_reason="skipped", error_code="null_input", error_message="null"),
        Outcome(finish_reason="error", error_code="prompt_too_long", error_message="longer"),
    ]
    table = append_results(pa.table({"x": range(5)}), outcomes, prefix="r_")
    summary = RunSummary()
    summary.add(table.slice(0, 3), file_name="a.parquet", rows=range(10, 13), prefix="r_")
    summary.add(table.slice(3), file_name="b.parquet", rows=range(2), prefix="r_")
    assert summary.num_rows == summary.num_ok + summary.num_failed + summary.num_skipped == 5
    assert (summary.num_stop, summary.num_length, summary.num_failed, summary.num_skipped) == (1, 1, 2, 1)
    assert (summary.input_tokens, summary.generated_tokens) == (16, 5)
    cause = summary.failures["prompt_too_long"]
    assert (cause.count, cause.location, cause.message) == (2, "a.parquet:12", "long")
    assert summary.skips["null_input"].location == "b.parquet:0"
    assert summary.to_dict()["failures"] == {"prompt_too_long": 2}
    twice = RunSummary.from_counts(summary.to_counts())
    assert twice == summary
    twice.add_summary(summary)
    assert (twice.num_rows, twice.failures["prompt_too_long"].count) == (10, 4)
    assert summary.failures["prompt_too_long"].count == 2
