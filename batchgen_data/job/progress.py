"""How far the run is: workers add up in one small actor, one line shows the sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_COUNTS = (
    *("rows_done", "rows_failed", "rows_skipped", "input_tokens", "generated_tokens"),
    *("yields_for_pages", "recomputed_tokens"),
)

# Rows decode together and end together: before as many are done as run at once, their rate says nothing.
_ETA_FROM_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all workers.

    Attributes:
        rows_done: Rows with an outcome, failed and skipped ones included.
        rows_failed: Rows that ended in an error.
        rows_skipped: Rows left out on purpose.
        input_tokens: Prompt tokens of the rows done.
        generated_tokens: Tokens generated so far.
        yields_for_pages: Times a row was suspended because KV memory was short.
        recomputed_tokens: Tokens computed again after a row was suspended.
        num_ready: Workers that loaded their model.
        generating_s: Seconds since the first worker was ready; 0 before.
    """

    rows_done: int = 0
    rows_failed: int = 0
    rows_skipped: int = 0
    input_tokens: int = 0
    generated_tokens: int = 0
    yields_for_pages: int = 0
    recomputed_tokens: int = 0
    num_ready: int = 0
    generating_s: float = 0.0


class ProgressCounter:
    """Adds up what workers report.

    Args:
        clock: Seconds; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, dict[str, int]] = {}
        self._num_ready = 0
        self._first_ready_s: float | None = None

    def ready(self) -> None:
        """Count a worker whose model is loaded."""
        self._num_ready += 1
        if self._first_ready_s is None:
            self._first_ready_s = self._clock()

    def report(self, worker_id: str, counts: Mapping[str, int]) -> None:
        """Take a worker's running totals; a later report of the same worker replaces the earlier one."""
        self._counts[worker_id] = dict(counts)

    def totals(self) -> Totals:
        """Return the sums over all workers."""
        sums = {name: sum(counts.get(name, 0) for counts in self._counts.values()) for name in _COUNTS}
        since = 0.0 if self._first_ready_s is None else self._clock() - self._first_ready_s
        return Totals(**sums, num_ready=self._num_ready, generating_s=since)


class ReportToActor:
    """A picklable progress callable for the stage; never waits and never fails the caller."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter

    def __call__(self, worker_id: str, counts: Mapping[str, int]) -> None:
        self._counter.report.remote(worker_id, dict(counts))


def progress_line(totals: Totals, num_rows: int) -> str:
    """Return the one line that describes a run of `num_rows` rows."""
    if not totals.num_ready:
        return f"0/{num_rows} rows, loading the model"
    # A worker that died and started again reports the rows it repeats a second time.
    done = min(totals.rows_done, num_rows)
    parts = [f"{done}/{num_rows} rows"]
    if totals.rows_failed:
        parts.append(f"{totals.rows_failed} failed")
    if totals.rows_skipped:
        parts.append(f"{totals.rows_skipped} skipped")
    if totals.generating_s > 0:
        parts.append(f"{totals.generated_tokens / totals.generating_s:.0f} tokens/s")
        if min(num_rows / 2, _ETA_FROM_ROWS) <= done < num_rows:
            parts.append(f"ETA {duration(totals.generating_s * (num_rows - done) / done)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds as people say them: ``8s``, ``3m05s``, ``2h10m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class ProgressDisplay:
    """Shows the progress line on a console: rewritten in place, or a new line now and then.

    Args:
        console: Where to; a terminal gets the live line.
        poll_s: Seconds between two looks at the totals.
        line_s: Seconds between two lines where there is no terminal.
    """

    def __init__(self, console: Console, *, poll_s: float = 0.5, line_s: float = 10.0) -> None:
        self._console = console
        self._poll_s = poll_s
        self._line_s = line_s

    @contextmanager
    def watch(self, poll: Callable[[], Totals], num_rows: int) -> Iterator[None]:
        """Show what `poll` returns until the block ends."""
        ended = threading.Event()
        show = self._show_live if self._console.is_terminal else self._show_lines
        thread = threading.Thread(target=show, args=(poll, num_rows, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _show_live(self, poll: Callable[[], Totals], num_rows: int, ended: threading.Event) -> None:
        with Live(Text(""), console=self._console, auto_refresh=False, transient=True) as live:
            while not ended.wait(self._poll_s):
                line = self._line(poll, num_rows)
                if line is not None:
                    live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _show_lines(self, poll: Callable[[], Totals], num_rows: int, ended: threading.Event) -> None:
        while not ended.wait(self._line_s):
            line = self._line(poll, num_rows)
            if line is not None:
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, poll: Callable[[], Totals], num_rows: int) -> str | None:
        try:
            return progress_line(poll(), num_rows)
        except Exception:
            # The counter may be slow or going down with the session: the line is no reason to fail a run.
            return None
